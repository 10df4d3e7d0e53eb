"""Regularization of language models (Merity et al. 2017, arXiv:1708.02182).

All masks are functions of the seed, the step and what they drop, whatever the mesh and the schedule; there
are none in evaluation.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.at import At
from jaxpar.fields import check_fields, require, require_rate
from jaxpar.nn.dropout import Dropout

WORDS, KERNELS = 2**30, 2**30 + 1  # tell the keys of masks from those of layers


@dataclasses.dataclass(frozen=True)
class Regularization:
    """Options of a language model, in addition to its `dropout`.

    Attributes:
      input_dropout: rate on the embedded inputs; None takes `dropout`.
      output_dropout: rate before the head; None takes `dropout`.
      hold_masks: use the same dropout mask for all time steps of a window.
      word_dropout: rate at which words lose their whole embedding, at all their places in a batch at once.
      kernel_dropout: rate on the weights of the recurrent kernels (DropConnect).
      activations: weight of the mean square of what goes into the head, in the loss of training.
      slowness: weight of the mean square of how much the last layer's outputs, without dropout, change from
        one step of a window to the next.
    """

    input_dropout: float | None = None
    output_dropout: float | None = None
    hold_masks: bool = False
    word_dropout: float = 0.0
    kernel_dropout: float = 0.0
    activations: float = 0.0
    slowness: float = 0.0

    def __post_init__(self):
        check_fields(self)
        for name in ("input_dropout", "output_dropout", "word_dropout", "kernel_dropout"):
            if getattr(self, name) is not None:
                require_rate(self, name)
        for name in ("activations", "slowness"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value}: must not be negative")

    def of_layers(self, rate: float) -> float | Dropout:
        """Dropout of the layers' inputs, of which `rate` is that between layers."""
        first = rate if self.input_dropout is None else self.input_dropout
        return (
            rate if first == rate and not self.hold_masks else Dropout(rate, first, self.hold_masks)
        )

    def of_head(self, rate: float) -> float | Dropout:
        """Dropout of the head's inputs."""
        rate = rate if self.output_dropout is None else self.output_dropout
        return Dropout(rate, rate, True) if self.hold_masks else rate


def scale_of_words(rate: float, num_words: int, at: At) -> jax.Array | None:
    """The factor of each word's embedding, float32 [num_words]; None if all stay as they are."""
    if rate == 0.0 or at.key is None:
        return None
    is_kept = jax.random.bernoulli(jax.random.fold_in(at.key, WORDS), 1.0 - rate, (num_words,))
    return jnp.where(is_kept, 1.0 / (1.0 - rate), 0.0)


def drop_kernels(
    kernel: jax.Array, layer_of_row: tuple[int, ...], rate: float, key: jax.Array
) -> jax.Array:
    """Stacked kernels [rows, ...] with some weights dropped; a row's mask is that of its layer."""
    key = jax.random.fold_in(key, KERNELS)

    def drop(kernel, layer):
        is_kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 1.0 - rate, kernel.shape)
        return jnp.where(is_kept, kernel / (1.0 - rate), 0.0)

    return jax.vmap(drop)(kernel, jnp.asarray(layer_of_row, jnp.int32))


def square_of(y_TBH: jax.Array) -> jax.Array:
    """The mean square over H, float32 [T, B]."""
    return jnp.mean(jnp.square(y_TBH.astype(jnp.float32)), axis=-1)
