"""Layers of one kind, stacked on the leading dim of their parameters and run by one scan.

The program has the size of one layer, however many there are. `run_layers` is the plain way;
`SavingLayers` is the same in two halves, forward and backward, with what passes between them in the
caller's hands: a pipeline keeps it in slots.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.nn.dropout import Position

Params = TypeVar("Params")
Carry = TypeVar("Carry")

# One layer: (its parameters, its carry, inputs [T, B, W], where they lie) -> (carry, outputs [T, B, W]).
Layer = Callable[[Params, Carry, jax.Array, Position], tuple[Carry, jax.Array]]


def run_layers(
    layer: Layer,
    params: Params,
    carry: Carry,
    x_TBW: jax.Array,
    position: Position,
    layer_ids: np.ndarray | jax.Array,
    *,
    has_empty_slots: bool,
) -> tuple[Carry, jax.Array]:
    """Feeds x through stacked layers, one after the other.

    Args:
      params, carry: every leaf stacked, [slots, ...].
      position: of x in time and batch; its layer is ignored.
      layer_ids: [slots] int32, the layer in each slot; -1 marks an empty slot.
      has_empty_slots: False promises that there is none; an empty one costs no compute.
    Returns:
      the carry after the window, stacked likewise, and the output of the last layer.
    """

    def body(x_TBW, slot):
        params, carry, layer_id = slot
        carry, y_TBW = _if_full(
            layer_id,
            lambda: layer(params, carry, x_TBW, position._replace(layer=layer_id)),
            lambda: (carry, x_TBW),
            has_empty_slots,
        )
        return y_TBW, carry

    y_TBW, carry = lax.scan(body, x_TBW, (params, carry, jnp.asarray(layer_ids)))
    return carry, y_TBW


class SavingLayers:
    """Stacked layers, forward and backward apart. One object serves one trace: forward, then backward.

    What the backward pass needs of the parameters is not among what the forward pass saves.
    """

    def __init__(self, layer: Layer, *, has_empty_slots: bool):
        """Arguments as of `run_layers`."""
        self._layer, self._has_empty_slots = layer, has_empty_slots
        self._restore: Callable[[Any, list[jax.Array]], Callable[..., Any]] | None = None

    def forward(
        self,
        params: Params,
        carry: Carry,
        x_TBW: jax.Array,
        position: Position,
        layer_ids: jax.Array,
    ) -> tuple[Carry, jax.Array, list[jax.Array]]:
        """`run_layers`, and the residuals of every layer, leaves [slots, ...]."""

        def run(params, carry, x_TBW, layer_id):
            at = position._replace(layer=layer_id)
            (carry, y_TBW), vjp = jax.vjp(
                lambda params, carry, x_TBW: self._layer(params, carry, x_TBW, at),
                params,
                carry,
                x_TBW,
            )
            saved, self._restore = _residuals(vjp, params)
            return vary_like((carry, y_TBW, saved), x_TBW)

        def body(x_TBW, slot):
            params, carry, layer_id = slot

            def skip():
                saved = jax.eval_shape(run, params, carry, x_TBW, layer_id)[2]
                return vary_like((carry, x_TBW, zeros(saved)), x_TBW)

            carry, y_TBW, saved = _if_full(
                layer_id,
                lambda: run(params, carry, x_TBW, layer_id),
                skip,
                self._has_empty_slots,
            )
            return y_TBW, (carry, saved)

        y_TBW, (carry, saved) = lax.scan(body, x_TBW, (params, carry, layer_ids))
        return carry, y_TBW, saved

    def backward(
        self,
        params: Params,
        saved: list[jax.Array],
        d_carry: Carry,
        dy_TBW: jax.Array,
        grads: Params,
        layer_ids: jax.Array,
    ) -> tuple[Params, Carry, jax.Array]:
        """The vector-Jacobian product of `forward`.

        Args:
          saved: what `forward` returned, for the same parameters.
          d_carry: cotangent of the carry after the window.
          dy_TBW: cotangent of the output.
          grads: gradients so far, to which those of the parameters are added.
        Returns:
          the gradients, the cotangent of the carry before the window, and that of x.
        """
        restore = self._restore
        assert restore is not None, "trace forward before backward"

        def run(dy_TBW, params, saved, d_carry, grads):
            d_params, d_carry, dx_TBW = restore(params, saved)((d_carry, dy_TBW))
            return vary_like((add(grads, d_params), d_carry, dx_TBW), dy_TBW)

        # The gradients are carried and changed in place; as outputs of the scan they would be copied.
        def body(carried, inputs):
            dy_TBW, all_grads = carried
            slot, params, saved, d_carry, layer_id = inputs
            grads = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, slot, 0, False), all_grads)
            grads, d_carry, dx_TBW = _if_full(
                layer_id,
                lambda: run(dy_TBW, params, saved, d_carry, grads),
                lambda: (grads, d_carry, dy_TBW),
                self._has_empty_slots,
            )
            all_grads = jax.tree.map(
                lambda a, part: lax.dynamic_update_index_in_dim(a, part, slot, 0), all_grads, grads
            )
            return (dx_TBW, all_grads), d_carry

        slots = jnp.arange(layer_ids.shape[0])
        (dx_TBW, grads), d_carry = lax.scan(
            body, (dy_TBW, grads), (slots, params, saved, d_carry, layer_ids), reverse=True
        )
        return grads, d_carry, dx_TBW


def add(totals: Any, parts: Any) -> Any:
    """Adds two trees, in the dtypes of the first."""
    return jax.tree.map(lambda total, part: total + part.astype(total.dtype), totals, parts)


def zeros(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def vary_like(tree: Any, reference: jax.Array) -> Any:
    """`tree`, typed inside a `shard_map` as differing over every axis that `reference` differs over."""
    axes = jax.typeof(reference).manual_axis_type.varying

    def cast(leaf):
        missing = tuple(axes - jax.typeof(leaf).manual_axis_type.varying)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def _if_full(layer_id, run, skip, has_empty_slots: bool):
    return lax.cond(layer_id >= 0, run, skip) if has_empty_slots else run()


def _residuals(vjp: Callable[..., Any], params: Any):
    """Takes a function of `jax.vjp` apart, which is a pytree.

    Returns:
      its residuals but for those that are leaves of `params`, and the function
      (params, residuals) -> vjp that puts it together again.
    """
    leaves, structure = jax.tree.flatten(vjp)
    number_of = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(params))}
    sources = [number_of.get(id(leaf)) for leaf in leaves]
    saved = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]

    def restore(params, saved):
        again, weights = iter(saved), jax.tree.leaves(params)
        leaves = [next(again) if source is None else weights[source] for source in sources]
        return jax.tree.unflatten(structure, leaves)

    return saved, restore
