"""Which kernel runs the LSTM layers: the scan of `nn.lstm`, or cuDNN's LSTM of `nn.cudnn`."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.at import At
from jaxpar.axes import TENSOR
from jaxpar.nn.cudnn import CuDNNLSTM, is_cudnn_installed
from jaxpar.nn.lstm import LSTM
from jaxpar.timing import take_turns

Kernel = Literal["scan", "cudnn"]
LAYERS: dict[str, type[LSTM]] = {"scan": LSTM, "cudnn": CuDNNLSTM}

NUM_ROUNDS, PASSES_OF_ROUND = 5, 4


class Work(NamedTuple):
    """What a layer has to do: a block of time steps and rows, on one device, with or without resets in it."""

    hidden_size: int
    dropout: float
    dtype: str
    num_steps: int
    num_rows: int
    resets: bool = False


class KernelChoice(NamedTuple):
    """A kernel, and why it and not the other: what was measured, or why cuDNN cannot run."""

    name: Kernel
    reason: str


def choose_kernel(work: Work, mesh: Mesh) -> KernelChoice:
    """The faster kernel on this mesh.

    Both run a layer over a unit of work, forward and backward, on a device of the mesh, once in a process
    for each size; process 0 decides for all. Where cuDNN cannot run, nothing is measured.
    """
    obstacle = _obstacle_to_cudnn(work, mesh)
    if obstacle is not None:
        return KernelChoice("scan", f"cudnn cannot run: {obstacle[0]}")
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    seconds = measure_kernels(work, device)
    ms = {name: f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items()}
    name = "cudnn" if seconds["cudnn"] < seconds["scan"] else "scan"
    return KernelChoice(name, f"a layer forward and backward: {ms['scan']}, {ms['cudnn']}")


def check_cudnn(work: Work, mesh: Mesh) -> None:
    """Nothing, if cuDNN can run on this mesh.

    Raises:
      ValueError: it cannot.
    """
    obstacle = _obstacle_to_cudnn(work, mesh)
    if obstacle is not None:
        fact, remedy = obstacle
        raise ValueError(f"kernel='cudnn' cannot run: {fact}; use {remedy}kernel='scan'")


@functools.lru_cache
def measure_kernels(work: Work, device: Any) -> dict[str, float]:
    """Seconds of each kernel for a layer, forward and backward: the best of a few rounds."""
    runs = [_make_pass(layer, work, device) for layer in LAYERS.values()]
    best = np.min(take_turns(runs, NUM_ROUNDS, times=PASSES_OF_ROUND), axis=1)
    if jax.process_count() > 1:
        best = multihost_utils.broadcast_one_to_all(best)
    return dict(zip(LAYERS, best.tolist(), strict=True))


def _make_pass(layer: type[LSTM], work: Work, device: Any):
    graphdef, params = nnx.split(layer(work.hidden_size, rngs=nnx.Rngs(0), dropout=work.dropout))
    at = At(layer=0, time=0, row=0, key=jax.random.key(0))

    def loss(params, x_TBH):
        layer = nnx.merge(graphdef, params)
        return jnp.sum(layer(layer.initial_carry(work.num_rows), x_TBH, at)[1])

    x_TBH = jnp.ones((work.num_steps, work.num_rows, work.hidden_size), work.dtype)
    arguments = jax.device_put((params, x_TBH), device)
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    return lambda: gradients(*arguments)


def _obstacle_to_cudnn(work: Work, mesh: Mesh) -> tuple[str, str] | None:
    """Fact and remedy."""
    device, num_parts = mesh.devices.flat[0], mesh.shape[TENSOR]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return f"it needs GPUs of NVIDIA, the mesh has {device.device_kind} ({device.platform})", ""
    if not is_cudnn_installed():
        return "this JAX came without it", "pip install 'jaxpar[cuda13]' (or cuda12), or "
    if num_parts > 1:
        return f"it computes whole layers, tensor={num_parts} splits them", "tensor=1, or "
    if work.dtype != "float32":
        return f"JAX has it in float32 alone, dtype={work.dtype!r}", "dtype='float32', or "
    if work.resets:
        return "it cannot begin anew within a window, as packed lines do", "packed=False, or "
    return None
