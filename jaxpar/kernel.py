"""Which kernel runs the LSTM layers: the scan of `nn.lstm`, or cuDNN's LSTM of `nn.cudnn`."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.axes import TENSOR
from jaxpar.config import Config, ModelConfig
from jaxpar.models import make_lstm
from jaxpar.nn.cudnn import is_cudnn_installed
from jaxpar.nn.lstm import LSTM

NUM_ROUNDS, PASSES_OF_ROUND = 5, 4


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """A kernel, and why it and not the other.

    Attributes:
      name: of the kernel.
      reason: what was measured, or why cuDNN cannot run; None if the config names the kernel.
    """

    name: Literal["scan", "cudnn"]
    reason: str | None = None


def choose_kernel(config: Config, mesh: Mesh) -> KernelChoice:
    """What `config.model.kernel` is on this mesh.

    "auto" is the faster one. Both run the layers of a stage over a unit of work, forward and backward, on a
    device of the mesh, once in a process for each size; process 0 decides for all. Where cuDNN cannot run,
    nothing is measured.

    Args:
      config: one that `config.check()` accepts.
    Raises:
      ValueError: kernel="cudnn" cannot run here.
    """
    kernel = config.model.kernel
    if kernel == "scan":
        return KernelChoice("scan")
    obstacle = _obstacle_to_cudnn(config, mesh)
    if kernel == "cudnn":
        if obstacle is not None:
            fact, remedy = obstacle
            raise ValueError(f"kernel='cudnn' cannot run: {fact}; use {remedy}kernel='scan'")
        return KernelChoice("cudnn")
    if obstacle is not None:
        return KernelChoice("scan", f"cudnn cannot run: {obstacle[0]}")
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    seconds = measure_kernels(
        dataclasses.replace(config.model, num_layers=max(config.placement)),
        config.data.seq_len // config.num_chunks,
        config.microbatch_rows,
        config.runs_in_units,
        device,
    )
    ms = {name: f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items()}
    name = "cudnn" if seconds["cudnn"] < seconds["scan"] else "scan"
    return KernelChoice(name, f"layers forward and backward: {ms['scan']}, {ms['cudnn']}")


def with_kernel(config: Config, choice: KernelChoice) -> Config:
    """The config with the kernel that was chosen."""
    model = dataclasses.replace(config.model, kernel=choice.name)
    return dataclasses.replace(config, model=model)


@functools.lru_cache
def measure_kernels(
    model: ModelConfig, num_steps: int, num_rows: int, in_units: bool, device: Any
) -> dict[str, float]:
    """Seconds of each kernel for all layers over a window, forward and backward: the best of a few rounds.

    Args:
      in_units: as a pipeline runs them, layer by layer.
    """
    passes = {
        name: _make_pass(
            dataclasses.replace(model, kernel=name), num_steps, num_rows, in_units, device
        )
        for name in ("scan", "cudnn")
    }
    rounds = [[_seconds(run) for run in passes.values()] for _ in range(NUM_ROUNDS + 1)]
    best = np.min(rounds[1:], axis=0)  # the first compiles
    if jax.process_count() > 1:
        best = multihost_utils.broadcast_one_to_all(best)
    return dict(zip(passes, best.tolist(), strict=True))


def _make_pass(
    model: ModelConfig, num_steps: int, num_rows: int, in_units: bool, device: Any
) -> Callable[[], Any]:
    graphdef, params = nnx.split(make_lstm(model, rngs=nnx.Rngs(0)))
    key = jax.random.key(0)

    def loss(params, x_TBH):
        lstm = nnx.merge(graphdef, params)
        run_all = functools.partial(LSTM.run_all, lstm) if in_units else lstm.run_all
        return jnp.sum(run_all(lstm.initial_carry(num_rows), x_TBH, key, 0)[1])

    x_TBH = jnp.ones((num_steps, num_rows, model.hidden_size))
    arguments = jax.device_put((params, x_TBH), device)
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    return lambda: gradients(*arguments)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(PASSES_OF_ROUND)])
    return (time.perf_counter() - start) / PASSES_OF_ROUND


def _obstacle_to_cudnn(config: Config, mesh: Mesh) -> tuple[str, str] | None:
    """Fact and remedy."""
    device, num_parts = mesh.devices.flat[0], mesh.shape[TENSOR]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return f"it needs GPUs of NVIDIA, the mesh has {device.device_kind} ({device.platform})", ""
    if not is_cudnn_installed():
        return "this JAX came without it", "pip install 'jaxpar[cuda13]' (or cuda12), or "
    if num_parts > 1:
        return f"it computes whole layers, tensor={num_parts} splits them", "tensor=1, or "
    if config.model.dtype != "float32":
        return f"JAX has it in float32 alone, dtype={config.model.dtype!r}", "dtype='float32', or "
    return None
