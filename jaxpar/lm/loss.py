"""Cross-entropy over a vocabulary that may be split, and that of a linear head, a few time steps at a time.

Legend: T time, B batch, H hidden, V vocabulary (or this device's part of it).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.trees import vary_like, zeros
from jaxpar.base.types import Arrays
from jaxpar.internal.products import transposable
from jaxpar.lm.streams import IGNORE
from jaxpar.model.model import Sums
from jaxpar.nn.linear import matmul

# Logits computed at once: few enough for a CPU's cache, enough to keep an accelerator busy.
LOGITS_ON_CPU = 5 * 2**19
LOGITS_ELSEWHERE = 2**27
MIN_ROWS = 128

# The logit of what is no word: its probability is exactly 0, and so is its gradient. Finite, for infinities
# cancel to NaN.
NO_WORD = -1e30


def logits_at_once(at: LayerContext) -> int:
    """How many logits are computed at once where this block is."""
    return LOGITS_ON_CPU if at.on_cpu else LOGITS_ELSEWHERE


def without_padding(
    bias_V: jax.Array, num_words: int, *, manual_axis: str | None = None
) -> jax.Array:
    """A head's bias that removes all probability from the ids that are not words.

    Args:
      num_words: ids from here on are padding.
      manual_axis: as of `cross_entropy`.
    """
    no_word = jnp.asarray(NO_WORD, bias_V.dtype)
    return jnp.where(_ids(bias_V, manual_axis) < num_words, bias_V, no_word)


@jax.named_scope("loss")
def cross_entropy(
    logits_TBV: jax.Array, targets_TB: jax.Array, *, manual_axis: str | None = None
) -> Sums:
    """Negative log-likelihood of the targets, in nats, summed over those that are not `IGNORE`.

    Args:
      logits_TBV: float32.
      targets_TB: int32.
      manual_axis: inside a `shard_map` over this mesh axis, V is this device's part of the vocabulary, in
        the axis's order. The log-sum-exp is taken over all parts, from their common maximum
        (arXiv:1909.08053, section 3), and the result is the same on every device of the axis.
    Returns:
      the sum, and the number of targets that count.
    """
    nll: Arrays = _nll(manual_axis, logits_TBV, targets_TB)
    return Sums(nll, jnp.sum(targets_TB != IGNORE, dtype=jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(manual_axis: str | None, logits_TBV, targets_TB) -> jax.Array:
    return _nll_fwd(manual_axis, logits_TBV, targets_TB)[0]


def _nll_fwd(manual_axis: str | None, logits_TBV, targets_TB):
    """The sum, and what its gradient is made of: one `exp` per logit serves both."""
    nll_TB, exp_TBV, sum_TB = _nll_of_each(manual_axis, logits_TBV, targets_TB)
    return jnp.sum(nll_TB), (exp_TBV, sum_TB, targets_TB)


def _nll_of_each(manual_axis: str | None, logits_TBV, targets_TB):
    """Of each target, 0 where there is none; and the exponentials, with their sums."""
    max_TB = jnp.max(logits_TBV, axis=-1)
    target_TB = _pick(logits_TBV, targets_TB, manual_axis)
    if manual_axis is not None:
        max_TB = lax.pmax(max_TB, manual_axis)
    # Nobody reads the logits after this: what follows overwrites them.
    logits_TBV, target_TB = lax.optimization_barrier((logits_TBV, target_TB))
    exp_TBV = jnp.exp(logits_TBV - max_TB[..., None])
    sum_TB = jnp.sum(exp_TBV, axis=-1)
    if manual_axis is not None:
        sum_TB, target_TB = lax.psum((sum_TB, target_TB), manual_axis)
    nll_TB = jnp.where(targets_TB != IGNORE, jnp.log(sum_TB) + (max_TB - target_TB), 0.0)
    return nll_TB, exp_TBV, sum_TB


def _nll_bwd(manual_axis: str | None, saved, d_nll: jax.Array):
    """Probabilities minus the one-hot targets."""
    exp_TBV, sum_TB, targets_TB = saved
    d_nll_TB = jnp.where(targets_TB != IGNORE, d_nll, 0.0)
    ids_V = _ids(exp_TBV, manual_axis).astype(targets_TB.dtype)
    is_target_TBV = targets_TB[..., None] == ids_V[None, None]
    target_TBV = jnp.where(is_target_TBV, d_nll_TB[..., None], 0.0)
    return exp_TBV * (d_nll_TB / sum_TB)[..., None] - target_TBV, None


_nll.defvjp(_nll_fwd, _nll_bwd)


@jax.named_scope("log_likelihood")
def log_likelihood(
    logits_TBV: jax.Array, targets_TB: jax.Array, *, manual_axis: str | None = None
) -> jax.Array:
    """Of each target, float32 [T, B], in nats; 0 where it is `IGNORE`. Arguments as of `cross_entropy`."""
    return -_nll_of_each(manual_axis, logits_TBV, targets_TB)[0]


def linear_log_likelihood(
    y_TBH: jax.Array,
    kernel_HV: jax.Array,
    bias_V: jax.Array,
    targets_TB: jax.Array,
    *,
    max_logits: int,
) -> jax.Array:
    """`log_likelihood(y @ kernel + bias, targets)`, a few time steps at a time, as `linear_cross_entropy`."""

    def step(_, chunk):
        y_tBH, targets_tB = chunk
        return None, log_likelihood(_logits(y_tBH, kernel_HV, bias_V), targets_tB)

    num_chunks, *padded = _padded(y_TBH, targets_TB, kernel_HV.shape[1], max_logits)
    found_CtB = lax.scan(step, None, _cut(num_chunks, *padded))[1]
    return found_CtB.reshape(-1, targets_TB.shape[1])[: len(targets_TB)]


def linear_cross_entropy(
    y_TBH: jax.Array,
    kernel_HV: jax.Array,
    bias_V: jax.Array,
    targets_TB: jax.Array,
    *,
    max_logits: int,
    rounds_gradient: bool = False,
) -> Sums:
    """`cross_entropy(y @ kernel + bias, targets)` that never holds the logits of all time steps.

    A scan computes the logits of a few steps and, where gradients are wanted, their contribution to them,
    while they are in the cache. There is no second forward pass: the gradients of a sum scale with its
    cotangent.

    Args:
      y_TBH: the matmuls run in its dtype.
      kernel_HV, bias_V: float32; V may be split by the compiler.
      targets_TB: int32.
      max_logits: how many are computed at once; at least those of `MIN_ROWS` rows.
      rounds_gradient: of the logits, as of `matmul`.
    """
    num_chunks, y_TBH, targets_TB = _padded(y_TBH, targets_TB, kernel_HV.shape[1], max_logits)
    how = num_chunks, rounds_gradient
    nll: Arrays = _linear_nll(how, y_TBH, kernel_HV, bias_V, targets_TB)
    return Sums(nll, jnp.sum(targets_TB != IGNORE, dtype=jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_nll(how: tuple[int, bool], y_TBH, kernel_HV, bias_V, targets_TB) -> jax.Array:
    num_chunks, rounds_gradient = how

    def step(nll, chunk):
        y_tBH, targets_tB = chunk
        return nll + _nll_of_chunk(rounds_gradient, y_tBH, kernel_HV, bias_V, targets_tB), None

    chunks = _cut(num_chunks, y_TBH, targets_TB)
    return lax.scan(step, vary_like(jnp.float32(0), y_TBH), chunks)[0]


def _linear_nll_fwd(how: tuple[int, bool], y_TBH, kernel_HV, bias_V, targets_TB):
    num_chunks, rounds_gradient = how
    of_chunk = functools.partial(_nll_of_chunk, rounds_gradient)
    nll_and_grads = jax.value_and_grad(of_chunk, (0, 1, 2))

    def step(totals, chunk):
        y_tBH, targets_tB = transposable(chunk[0]), chunk[1]
        loss, (dy_tBH, *grads) = nll_and_grads(y_tBH, kernel_HV, bias_V, targets_tB)
        return jax.tree.map(jnp.add, totals, (loss, grads)), dy_tBH

    start = vary_like((jnp.float32(0), zeros([kernel_HV, bias_V])), y_TBH)
    (loss, grads), dy = lax.scan(step, start, _cut(num_chunks, y_TBH, targets_TB))
    return loss, (dy.reshape(y_TBH.shape), *grads)


def _linear_nll_bwd(_how: tuple[int, bool], grads, d_nll: jax.Array):
    scaled = ((d_nll * grad.astype(jnp.float32)).astype(grad.dtype) for grad in grads)
    return (*scaled, None)


_linear_nll.defvjp(_linear_nll_fwd, _linear_nll_bwd)


def _nll_of_chunk(rounds_gradient: bool, y_tBH, kernel_HV, bias_V, targets_tB) -> jax.Array:
    logits_tBV = _logits(y_tBH, kernel_HV, bias_V, rounds_gradient=rounds_gradient)
    return cross_entropy(logits_tBV, targets_tB).loss


def _logits(y_tBH: jax.Array, kernel_HV, bias_V, *, rounds_gradient: bool = False) -> jax.Array:
    return matmul(y_tBH, kernel_HV, rounds_gradient=rounds_gradient) + bias_V[None, None]


def _padded(
    y_TBH: jax.Array, targets_TB: jax.Array, V: int, max_logits: int
) -> tuple[int, jax.Array, jax.Array]:
    """In how many chunks of time so many logits are computed; and both, with steps that fill the last one."""
    T, B = targets_TB.shape
    steps = max(max(max_logits // V, MIN_ROWS) // B, 1)  # of a chunk, at most
    num_chunks = -(-T // steps)
    padding = -T % num_chunks
    y_TBH = jnp.pad(y_TBH, ((0, padding), (0, 0), (0, 0)))
    targets_TB = jnp.pad(targets_TB, ((0, padding), (0, 0)), constant_values=IGNORE)
    return num_chunks, y_TBH, targets_TB


def _pick(logits_TBV: jax.Array, targets_TB: jax.Array, manual_axis: str | None) -> jax.Array:
    """The logits of the targets; 0 where another device has them, or none."""
    size = logits_TBV.shape[-1]
    first = 0 if manual_axis is None else lax.axis_index(manual_axis) * size
    place_TB = targets_TB - first
    picked_TB1 = jnp.take_along_axis(logits_TBV, place_TB[..., None], axis=-1, mode="clip")
    return jnp.where((place_TB >= 0) & (place_TB < size), picked_TB1[..., 0], 0.0)


def _cut(num_chunks: int, *arrays: jax.Array) -> list[jax.Array]:
    return [a.reshape(num_chunks, -1, *a.shape[1:]) for a in arrays]


def _ids(a_V: jax.Array, manual_axis: str | None) -> jax.Array:
    """The ids of the last dim; of this device's part of them."""
    size = a_V.shape[-1]
    first = 0 if manual_axis is None else lax.axis_index(manual_axis) * size
    return first + jnp.arange(size, dtype=jnp.int32)
