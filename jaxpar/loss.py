"""Cross-entropy over a vocabulary that may be split, and that of a linear head, a few time steps at once.

Legend: T time, B batch, H hidden, V vocabulary (or this device's part of it).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.axes import DATA
from jaxpar.data import IGNORE
from jaxpar.nn.linear import matmul
from jaxpar.nn.stack import vary_like, zeros

# Logits computed at once: few enough for a CPU's cache, enough to keep an accelerator busy.
LOGITS_ON_CPU = 5 * 2**19
LOGITS_ELSEWHERE = 2**27
MIN_ROWS = 128


class LossSums(NamedTuple):
    """Sums over a batch, to be added over batches: `exp(nll / num_targets)` is the perplexity.

    Attributes:
      nll: negative log-likelihood of the targets, in nats; float32 scalar.
      num_targets: those that are not `IGNORE`; float32 scalar.
    """

    nll: jax.Array
    num_targets: jax.Array


class ImageSums(NamedTuple):
    """Sums over a batch of images.

    Attributes:
      nll, num_targets: as of `LossSums`.
      num_right: images whose label has the largest logit.
    """

    nll: jax.Array
    num_targets: jax.Array
    num_right: jax.Array


def cross_entropy(
    logits_TBV: jax.Array, targets_TB: jax.Array, *, manual_axis: str | None = None
) -> LossSums:
    """Negative log-likelihood of the targets, summed over those that are not `IGNORE`.

    The target's logit is picked by a masked sum, which needs no exchange where the compiler splits V.

    Args:
      logits_TBV: float32.
      targets_TB: int32.
      manual_axis: inside a `shard_map` over this mesh axis, V is this device's part of the vocabulary, in
        the axis's order. The log-sum-exp is taken over all parts, from their common maximum
        (arXiv:1909.08053, section 3), and the result is the same on every device of the axis.
    """
    first = 0 if manual_axis is None else lax.axis_index(manual_axis) * logits_TBV.shape[-1]
    vocab_V = first + jnp.arange(logits_TBV.shape[-1], dtype=targets_TB.dtype)
    is_target_TBV = targets_TB[..., None] == vocab_V[None, None]
    max_TB = lax.stop_gradient(jnp.max(logits_TBV, axis=-1))
    target_TB = jnp.sum(jnp.where(is_target_TBV, logits_TBV, 0.0), axis=-1)
    if manual_axis is not None:
        max_TB = lax.pmax(max_TB, manual_axis)
    sum_TB = jnp.sum(jnp.exp(logits_TBV - max_TB[..., None]), axis=-1)
    if manual_axis is not None:
        sum_TB, target_TB = lax.psum((sum_TB, target_TB), manual_axis)
    counts_TB = targets_TB != IGNORE
    nll_TB = jnp.where(counts_TB, jnp.log(sum_TB) + (max_TB - target_TB), 0.0)
    return LossSums(jnp.sum(nll_TB), jnp.sum(counts_TB, dtype=jnp.float32))


def linear_cross_entropy(
    y_TBH: jax.Array,
    kernel_HV: jax.Array,
    bias_V: jax.Array,
    targets_TB: jax.Array,
    mesh: Mesh,
) -> LossSums:
    """`cross_entropy(y @ kernel + bias, targets)` that never holds the logits of all time steps.

    A scan computes the logits of a few steps and, where gradients are wanted, what they add to them, while
    they are in the cache. There is no second forward pass: the gradients of a sum scale with its cotangent.

    Args:
      y_TBH: B may be split over `data`; the matmuls run in its dtype.
      kernel_HV, bias_V: float32; V may be split over `tensor`.
      targets_TB: int32, split like y.
      mesh: with one stage.
    """
    limit = LOGITS_ON_CPU if mesh.devices.flat[0].platform == "cpu" else LOGITS_ELSEWHERE
    (T, B), V = targets_TB.shape, kernel_HV.shape[1]
    chunk_len = max(limit // V, MIN_ROWS) * mesh.shape[DATA] // B
    num_chunks = -(-T // max(chunk_len, 1))
    padding = -T % num_chunks
    y_TBH = jnp.pad(y_TBH, ((0, padding), (0, 0), (0, 0)))
    targets_TB = jnp.pad(targets_TB, ((0, padding), (0, 0)), constant_values=IGNORE)
    nll = _linear_nll(mesh, num_chunks, y_TBH, kernel_HV, bias_V, targets_TB)
    return LossSums(nll, jnp.sum(targets_TB != IGNORE, dtype=jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear_nll(mesh: Mesh, num_chunks: int, y_TBH, kernel_HV, bias_V, targets_TB) -> jax.Array:
    return _over_data(mesh, num_chunks, False, y_TBH, kernel_HV, bias_V, targets_TB)[0]


def _linear_nll_fwd(mesh: Mesh, num_chunks: int, y_TBH, kernel_HV, bias_V, targets_TB):
    return _over_data(mesh, num_chunks, True, y_TBH, kernel_HV, bias_V, targets_TB)


def _linear_nll_bwd(mesh: Mesh, num_chunks: int, grads, d_nll):
    return (*(jax.tree.map(lambda g: (d_nll * g).astype(g.dtype), grads)), None)


_linear_nll.defvjp(_linear_nll_fwd, _linear_nll_bwd)


def _over_data(mesh: Mesh, num_chunks: int, with_grads: bool, *arrays: jax.Array) -> Any:
    """`_in_chunks` on the rows of each data-parallel group; gradients are added up once, after the loop."""
    run = functools.partial(_in_chunks, num_chunks, with_grads)
    if mesh.shape[DATA] == 1:
        return run(*arrays)

    def run_group(*arrays):
        nll, grads = run(*arrays)
        nll, weight_grads = lax.psum((nll, grads[1:]), DATA)
        return nll, (*grads[:1], *weight_grads)

    rows, whole = P(None, DATA), P()
    return jax.shard_map(
        run_group,
        mesh=mesh,
        in_specs=(rows, whole, whole, rows),
        out_specs=(whole, (rows, whole, whole) if with_grads else ()),
        axis_names={DATA},
    )(*arrays)


def _in_chunks(num_chunks: int, with_grads: bool, y_TBH, kernel_HV, bias_V, targets_TB):
    """Negative log-likelihood, and its gradients with respect to y, kernel and bias, or ()."""

    def loss(y_tBH, kernel_HV, bias_V, targets_tB):
        return cross_entropy(matmul(y_tBH, kernel_HV) + bias_V[None, None], targets_tB).nll

    def step(totals, chunk):
        nll, weight_grads = totals
        y_tBH, targets_tB = chunk
        if not with_grads:
            return (nll + loss(y_tBH, kernel_HV, bias_V, targets_tB), ()), ()
        more, (dy_tBH, *grads) = jax.value_and_grad(loss, (0, 1, 2))(
            y_tBH, kernel_HV, bias_V, targets_tB
        )
        return (nll + more, jax.tree.map(jnp.add, weight_grads, tuple(grads))), dy_tBH

    cut = [a.reshape(num_chunks, -1, *a.shape[1:]) for a in (y_TBH, targets_TB)]
    start = (jnp.float32(0), zeros((kernel_HV, bias_V)) if with_grads else ())
    (nll, weight_grads), dy = lax.scan(step, vary_like(start, y_TBH), tuple(cut))
    return nll, (dy.reshape(y_TBH.shape), *weight_grads) if with_grads else ()
