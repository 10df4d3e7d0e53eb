"""A layer that reads a window in both directions, for encoders."""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.parts import RESETS, with_part
from jaxpar.base.trees import has_time
from jaxpar.base.types import Activations, Carry, Dims, LayerOutput, Module, Tree

SECOND = 2**31 - 1  # folded into the key of the second layer's dropout

Merge = Callable[[Activations, Activations], Activations]


class Bidirectional(nnx.Module):
    """Two layers, one of which reads from the end: `Bidirectional(GRU(64, rngs=rngs), GRU(64, rngs=rngs))`.

    The state of the first is carried from window to window, as in any layer. The second begins at the last
    step of every sequence, and of the window, with its initial carry. Where the batch says how many steps of
    a row are real (`at.lengths`), it reads these first, and the padding after them. It needs the whole window
    at once, so time is not cut into chunks.

    Attributes:
      first, second: layers that take the same inputs.

    Example:
      gru = lambda: jaxpar.nn.GRU(16, rngs=rngs)
      layer = jaxpar.nn.Bidirectional(gru(), gru())
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    whole_window: ClassVar[bool] = True

    def __init__(self, first: Module, second: Module, merge: Merge = jnp.add):
        """Takes the layers.

        Args:
          merge: makes one output of the two, of the shape of the inputs. The default adds them; two layers
            with outputs half as wide may be concatenated.
        """
        self.first, self.second, self.merge = first, second, merge

    def initial_carry(self, rows: int) -> Carry:
        """Of the first layer."""
        return self.first.initial_carry(rows)

    @property
    def carry_dims(self) -> Dims:
        """Of the first layer."""
        return getattr(self.first, "carry_dims", None)

    def __call__(self, carry: Carry, x: Activations, at: LayerContext) -> LayerOutput:
        """Both layers over the window."""
        carry, y = self.first(carry, x, at)
        num_rows = jax.tree.leaves(x)[0].shape[1]
        start, x = self.second.initial_carry(num_rows), _flip(x, at.lengths)
        _, z = self.second(start, x, _reversed(at))
        return carry, jax.tree.map(self.merge, y, _flip(z, at.lengths))


def _flip(tree: Tree, lengths_B: jax.Array | None) -> Tree:
    """Arrays [time, rows, ...] with the steps of each row in reverse order; done twice, as they were.

    Args:
      lengths_B: so many steps of each row are reversed, and so is what follows them; None means all.
    """

    def flip(a: jax.Array) -> jax.Array:
        if lengths_B is None or len(a) == 1:
            return a[::-1]
        order_TB = (lengths_B[None] - 1 - jnp.arange(len(a))[:, None]) % len(a)
        return jax.vmap(lambda a_T, order_T: a_T[order_T], 1, 1)(a, order_TB)

    return jax.tree.map(flip, tree)


def _reversed(at: LayerContext) -> LayerContext:
    """`at` of the window read from its end: a sequence begins with what was its last step."""
    flip = lambda a, timed: _flip(a, at.lengths) if timed else a  # noqa: E731
    batch = jax.tree.map(flip, at.batch, has_time(at.batch))
    if at.resets is not None:
        ends = jnp.concatenate([at.resets[1:], jnp.zeros_like(at.resets[:1])])
        batch = with_part(batch, RESETS, _flip(ends, at.lengths))
    # Other masks of dropout than those of the first layer.
    key = None if at.key is None else jax.random.fold_in(at.key, SECOND)
    return at._replace(batch=batch, key=key)
