"""Cross-entropy over a vocabulary that may be split.

Legend: T time, B batch, V vocabulary (or this device's part of it).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.data import IGNORE


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


@jax.named_scope("loss")
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
