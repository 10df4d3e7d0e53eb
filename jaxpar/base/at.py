"""Where a block of activations lies in the whole computation, and what is known there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.base.parts import LENGTHS, RESETS, part_of


def anywhere(x: Any, *_dims: str | None) -> Any:
    """`x`, wherever the compiler lays it out."""
    return x


class At(NamedTuple):
    """What `first`, a layer and `last` know of the block that they are given.

    Attributes:
      layer: its number in the stack; int32. In `last` it is the number of layers, in `first` one more, so
        that every place has dropout masks of its own.
      time: of the block's first time step, within the window; int32.
      row: of its first row, within the global batch; int32.
      key: of this training step, for dropout; None in evaluation.
      batch: the block's part of the batch.
      layout: lays activations out by the names of their dims, `at.layout(x, "batch", None, "heads")`.
      time_major: whether blocks are [time, rows, ...]; else [rows, ...].
      platform: of the devices that compute, as JAX calls it; None is that of JAX's default devices.
    """

    layer: jax.Array | int
    time: jax.Array | int
    row: jax.Array | int
    key: jax.Array | None = None
    batch: Any = None
    layout: Callable[..., Any] = anywhere
    time_major: bool = True
    platform: str | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether CPUs compute: what keeps an accelerator busy may be slow there."""
        return self._platform == "cpu"

    @property
    def unroll(self) -> int:
        """How many time steps a turn of a loop over time takes at most.

        On a GPU each operation of a turn is a launch, of microseconds, and steps of one turn share some: an
        LSTM's step is 9 operations forward and 11 backward, with 8 steps a turn 4.75 and 3.9, a GRU's 9 and
        13, or 3 and 4 (compiled for an H100, `tests/test_aot.py`).
        """
        return 8 if self._platform == "gpu" else 1

    @property
    def _platform(self) -> str:
        return self.platform or jax.default_backend()

    @property
    def resets(self) -> Any:
        """Where a sequence begins within the block: bool [time, rows]; None if the batch does not say.

        It is the batch's field or key `resets`, [rows, time] there. A recurrent layer starts such a step from
        its initial state.
        """
        resets = part_of(self.batch, RESETS)
        return None if resets is None else resets.astype(bool)

    @property
    def lengths(self) -> Any:
        """How many steps of the block are real in each row: int32 [rows]; None if the batch does not say.

        The steps after them are padding. A layer that reads later steps must leave padding out, so that what
        it gives for real steps does not depend on it. It is the batch's field or key `lengths`, [rows], which
        counts the real steps of the window; here it is cut to the block.
        """
        lengths = part_of(self.batch, LENGTHS)
        if lengths is None:
            return None
        dim = 0 if self.time_major else 1
        steps = max(leaf.shape[dim] for leaf in jax.tree.leaves(self.batch) if jnp.ndim(leaf) > 1)
        return jnp.clip(lengths.astype(jnp.int32) - self.time, 0, steps)
