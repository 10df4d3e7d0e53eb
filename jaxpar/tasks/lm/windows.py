"""Windows of random lengths of a text (Merity et al. 2017, arXiv:1708.02182), and layers in them.

All windows of a run are arrays of one length, the longest: one program. Shorter ones begin late:

    step of the window   0 1 2 3 4 5 6 7
    tokens                   d e f g h i     padding=2: before them nothing counts
    state                    ^ the carried one, whatever layers have made of the padding

Legend of the dim suffixes: T time, B batch, H hidden.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.at import At
from jaxpar.fields import check_fields, require, require_rate
from jaxpar.parts import RESETS, part_of, with_part
from jaxpar.tasks.lm.regularization import square_of
from jaxpar.trees import vary_like

PADDING = "padding"  # the field of a batch: how many steps of the window are before its text
LEAST = 5  # steps of a window


@dataclasses.dataclass(frozen=True)
class Windows:
    """Lengths of the windows of training; the learning rate of a step is multiplied by length / mean.

    Attributes:
      mean: of the normal distribution that lengths are drawn from, in steps; with 0 all are `seq_len` steps
        long. Lengths are from 5 to `seq_len`.
      spread: its standard deviation.
      short: the share of windows for which half the mean is taken.
    """

    mean: int = 0
    spread: float = 5.0
    short: float = 0.05

    def __post_init__(self):
        check_fields(self)
        require(
            self.mean == 0 or self.mean >= LEAST,
            f"mean={self.mean}: windows have {LEAST} steps or more; use {LEAST}, or 0 for one length",
        )
        require(self.spread >= 0, f"spread={self.spread}: must not be negative")
        require_rate(self, "short")

    def expected(self, seq_len: int) -> float:
        """The mean length, ignoring what is cut off at the ends."""
        return self.mean * (1 - self.short / 2) if self.mean else seq_len

    def draw(self, rng: np.random.Generator, count: int, seq_len: int) -> np.ndarray:
        """The lengths of `count` windows, integers [count]."""
        if not self.mean:
            return np.full(count, seq_len)
        means = np.where(rng.random(count) < self.short, self.mean / 2, self.mean)
        lengths = rng.normal(means, self.spread).astype(np.int64)
        return np.clip(lengths, LEAST, seq_len)

    def rate(self, length: int) -> float:
        """The factor of the learning rate in a window of this length."""
        return length / self.mean if self.mean else 1.0


class Outputs(NamedTuple):
    """What goes from layer to layer where slowness is wanted.

    Attributes:
      y_TBH: outputs of a layer.
      change_TB: the mean square over H of how much they changed since the step before in the window; float32.
    """

    y_TBH: jax.Array
    change_TB: jax.Array


@functools.cache
def in_window(layer: type) -> Any:
    """A class of layers that begins late where the batch says so, and reports its change if asked.

    Args:
      layer: a class; the first array of its carry is its last output, and it begins from `at.initial`.
    """

    class InWindow(layer):
        kind_name = getattr(layer, "kind_name", layer.__name__)  # parameters are where they were

        def __call__(self, carry: Any, x: Any, at: At) -> tuple[Any, Any]:
            x_TBH, padding = x.y_TBH if isinstance(x, Outputs) else x, part_of(at.batch, PADDING)
            T, B, _ = x_TBH.shape
            # As the state, whatever stage the block is on: one value for all that reads it.
            time = vary_like(jnp.asarray(at.time), x_TBH)
            begins_T = time + jnp.arange(T) == (0 if padding is None else padding)
            begins_TB = jnp.broadcast_to(begins_T[:, None], (T, B))
            inner = at
            if padding is not None:
                batch = with_part(at.batch, RESETS, begins_TB)
                inner = at._replace(batch=batch, initial=carry)
            after, y_TBH = super().__call__(carry, x_TBH, inner)
            if padding is not None:
                is_padding = time + T <= padding
                after = jax.tree.map(lambda a, b: jnp.where(is_padding, a, b), carry, after)
            if not isinstance(x, Outputs):
                return after, y_TBH
            if at.key is None:  # in evaluation
                return after, Outputs(y_TBH, x.change_TB)
            h_BH = jax.tree.leaves(carry)[0].astype(y_TBH.dtype)
            change_TBH = y_TBH - jnp.concatenate([h_BH[None], y_TBH[:-1]])
            if at.resets is not None:
                begins_TB |= at.resets
            return after, Outputs(y_TBH, jnp.where(begins_TB, 0.0, square_of(change_TBH)))

    InWindow.__name__ = InWindow.__qualname__ = layer.__name__
    return InWindow
