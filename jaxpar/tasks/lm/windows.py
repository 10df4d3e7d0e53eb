"""Layers in windows of random lengths, which begin late; see `data.windows.Windows`.

    step of the window   0 1 2 3 4 5 6 7
    tokens                   d e f g h i     padding=2: before them nothing counts
    state                    ^ the carried one, whatever layers have made of the padding

Legend of the dim suffixes: T time, B batch, H hidden.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.at import At
from jaxpar.data.windows import PADDING
from jaxpar.parts import RESETS, part_of, with_part
from jaxpar.tasks.lm.regularization import square_of
from jaxpar.trees import vary_like


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
