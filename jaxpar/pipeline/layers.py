"""Stacked layers of one kind or several: run one after the other, whole or as forward and backward.

The parameters of all layers of a kind are stacked on a leading dim; slots say which layer comes when and
where it lies. `run_layers` is the plain way, differentiable by autodiff. `SplitLayers` is the same in two
halves with what passes between them in the caller's hands: a pipeline keeps it in slots of its own. With
one kind the program is a scan over one layer, however many there are; with several each slot switches to
its kind. Each pass has a body for either: a switch reads its weights by their places, which copies them,
and a scan over the stack does not.

Legend: t time steps, b rows; n slots of a stage, r rows of a kind's stack there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.at import At
from jaxpar.trees import add, vary_like, zeros

# One layer: (its parameters, what of them is frozen, its carry, inputs, where they lie) -> (carry, outputs).
# Inputs and outputs are trees of floats of the same shapes and dtypes; so is the carry before and after.
Layer = Callable[[Any, Any, Any, Any, At], tuple[Any, Any]]


class SlotArrays(NamedTuple):
    """What is in each slot, as data: int32 [n].

    Attributes:
      layer: its number; -1 for an empty slot.
      kind: of the layer.
      place: its row in the stack of its kind.
    """

    layer: jax.Array
    kind: jax.Array
    place: jax.Array


def run_layers(
    layers: Sequence[Layer],
    params: Sequence[Any],
    frozen: Sequence[Any],
    carry: Sequence[Any],
    x: Any,
    at: At,
    slots: SlotArrays,
    *,
    has_empty_slots: bool,
) -> tuple[tuple[Any, ...], Any]:
    """Feeds x through stacked layers, one after the other.

    Args:
      layers: a function for every kind.
      params, frozen, carry: a tree for every kind, every leaf stacked, [r, ...].
      at: of x; its layer is ignored.
      has_empty_slots: False promises that there is none; an empty one costs no compute.
    Returns:
      the carry after the window, stacked likewise, and the output of the last layer.
    """

    def run(kind, params, frozen, carry, x, layer_id):
        return layers[kind](params, frozen, carry, x, at._replace(layer=layer_id))

    if len(layers) == 1:

        def of_one_kind(x, slot):
            params, frozen, carry, layer_id = slot
            carry, y = _if_full(
                layer_id,
                lambda: run(0, params, frozen, carry, x, layer_id),
                lambda: (carry, x),
                has_empty_slots,
            )
            return y, carry

        y, after = lax.scan(of_one_kind, x, (params[0], frozen[0], carry[0], slots.layer))
        return (after,), y

    def body(state, slot):
        def of_kind(kind):
            def go(state):
                x, carry = state
                own = [pick(tree[kind], slot.place) for tree in (params, frozen, carry)]
                after, y = run(kind, *own, x=x, layer_id=slot.layer)
                return vary_like((y, _put(carry, kind, slot.place, after)), x)

            return go

        return _switch(slot, len(layers), of_kind, state), None

    (y, after), _ = lax.scan(body, (x, tuple(carry)), slots)
    return after, y


class SplitLayers:
    """Stacked layers, forward and backward apart.

    What the backward pass needs of the parameters is not among what the forward pass saves.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        params: Sequence[Any],
        frozen: Sequence[Any],
        carry: Sequence[Any],
        x: Any,
        at: At,
        *,
        has_empty_slots: bool,
    ):
        """Traces every kind once, to learn what it saves; arguments as of `run_layers`."""
        self._has_empty_slots = has_empty_slots
        self._kinds = [
            _SplitLayer(layer, pick(p, 0), pick(f, 0), pick(c, 0), x, at)
            for layer, p, f, c in zip(layers, params, frozen, carry, strict=True)
        ]

    def forward(
        self,
        params: Sequence[Any],
        frozen: Sequence[Any],
        carry: Sequence[Any],
        x: Any,
        at: At,
        slots: SlotArrays,
    ) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        """`run_layers`, and the residuals of every layer: for every kind leaves [r, ...]."""

        def run(kind, params, frozen, carry, x, layer_id):
            out = self._kinds[kind].forward(params, frozen, carry, x, at._replace(layer=layer_id))
            return vary_like(out, x)

        if len(self._kinds) == 1:

            def of_one_kind(x, slot):
                params, frozen, carry, layer_id = slot
                carry, y, saved = _if_full(
                    layer_id,
                    lambda: run(0, params, frozen, carry, x, layer_id),
                    lambda: vary_like((carry, x, zeros(self._kinds[0].saved)), x),
                    self._has_empty_slots,
                )
                return y, (carry, saved)

            y, (after, saved) = lax.scan(
                of_one_kind, x, (params[0], frozen[0], carry[0], slots.layer)
            )
            return (after,), y, (saved,)

        def room(kind):
            count = jax.tree.leaves((params[kind], frozen[kind], carry[kind]))[0].shape[0]
            shapes = self._kinds[kind].saved
            return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), shapes)

        def body(state, slot):
            def of_kind(kind):
                def go(state):
                    x, carry, saved = state
                    own = [pick(tree[kind], slot.place) for tree in (params, frozen, carry)]
                    after, y, kept = run(kind, *own, x=x, layer_id=slot.layer)
                    carry = _put(carry, kind, slot.place, after)
                    return vary_like((y, carry, _put(saved, kind, slot.place, kept)), x)

                return go

            return _switch(slot, len(self._kinds), of_kind, state), None

        start = vary_like(tuple(map(room, range(len(self._kinds)))), x)
        (y, after, saved), _ = lax.scan(body, (x, tuple(carry), start), slots)
        return after, y, saved

    def backward(
        self,
        params: Sequence[Any],
        frozen: Sequence[Any],
        saved: Sequence[Any],
        d_carry: Sequence[Any],
        dy: Any,
        grads: Sequence[Any],
        slots: SlotArrays,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """The vector-Jacobian product of `forward`.

        Args:
          saved: what `forward` returned, for the same parameters.
          d_carry: cotangent of the carry after the window.
          dy: cotangent of the output.
          grads: gradients so far, to which those of the parameters are added.
        Returns:
          the gradients, the cotangent of the carry before the window, and that of x.
        """

        def run(kind, params, frozen, saved, d_carry, grads, dy):
            d_params, d_carry, dx = self._kinds[kind].backward(params, frozen, saved, d_carry, dy)
            return vary_like((add(grads, d_params), d_carry, dx), dy)

        if len(self._kinds) == 1:
            # Gradients are carried and changed in place; as outputs of the scan they would be copied.
            def of_one_kind(carried, inputs):
                dy, all_grads = carried
                place, params, frozen, saved, d_carry, layer_id = inputs
                grads = pick(all_grads, place)
                grads, d_carry, dx = _if_full(
                    layer_id,
                    lambda: run(0, params, frozen, saved, d_carry, grads, dy),
                    lambda: (grads, d_carry, dy),
                    self._has_empty_slots,
                )
                return (dx, _put((all_grads,), 0, place, grads)[0]), d_carry

            places = jnp.arange(slots.layer.shape[0])
            inputs = (places, params[0], frozen[0], saved[0], d_carry[0], slots.layer)
            (dx, after), d_before = lax.scan(of_one_kind, (dy, grads[0]), inputs, reverse=True)
            return (after,), (d_before,), dx

        def body(state, slot):
            def of_kind(kind):
                def go(state):
                    dy, d_carry, grads = state
                    own = [
                        pick(tree[kind], slot.place)
                        for tree in (params, frozen, saved, d_carry, grads)
                    ]
                    total, dc, dx = run(kind, *own, dy=dy)
                    d_carry = _put(d_carry, kind, slot.place, dc)
                    return vary_like((dx, d_carry, _put(grads, kind, slot.place, total)), dy)

                return go

            return _switch(slot, len(self._kinds), of_kind, state), None

        (dx, d_before, after), _ = lax.scan(
            body, (dy, tuple(d_carry), tuple(grads)), slots, reverse=True
        )
        return after, d_before, dx


class _SplitLayer:
    """One layer as forward and backward.

    Attributes:
      saved: shapes and dtypes of what forward saves for backward.
    """

    def __init__(self, layer: Layer, params: Any, frozen: Any, carry: Any, x: Any, at: At):
        self._layer, self._structure, self._sources = layer, None, list[int | None]()

        # Where a block lies is traced as well: autodiff saves less of what it knows.
        where = (at.layer, at.time, at.row, at.batch)

        def trace(params, frozen, carry, x, layer, time, row, batch):
            here = at._replace(layer=layer, time=time, row=row, batch=batch)
            _, vjp = self._vjp(params, frozen, carry, x, here)
            leaves, self._structure = jax.tree.flatten(vjp)
            self._sources = _find(leaves, (params, frozen))
            return self._saved(leaves)

        self.saved = jax.eval_shape(trace, params, frozen, carry, x, *where)

    def forward(self, params: Any, frozen: Any, carry: Any, x: Any, at: At):
        (carry, y), vjp = self._vjp(params, frozen, carry, x, at)
        leaves = jax.tree.leaves(vjp)
        assert _find(leaves, (params, frozen)) == self._sources, "a layer traces in one way only"
        return carry, y, self._saved(leaves)

    def backward(self, params: Any, frozen: Any, saved: list[jax.Array], d_carry: Any, dy: Any):
        weights, again = jax.tree.leaves((params, frozen)), iter(saved)
        leaves = [next(again) if source is None else weights[source] for source in self._sources]
        assert self._structure is not None
        return jax.tree.unflatten(self._structure, leaves)((d_carry, dy))

    def _vjp(self, params, frozen, carry, x, at):
        # Weak types are made strong, or what is saved would depend on where the arrays come from.
        carry, x = jax.tree.map(lambda a: lax.convert_element_type(a, a.dtype), (carry, x))
        return jax.vjp(functools.partial(self._run, frozen, at), params, carry, x)

    def _run(self, frozen, at, params, carry, x):
        return self._layer(params, frozen, carry, x, at)

    def _saved(self, leaves: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(leaves, self._sources, strict=True)
        return [leaf for leaf, source in pairs if source is None]


def _find(leaves: list[Any], weights: Any) -> list[int | None]:
    """For each leaf its number among the leaves of the weights; None if it is none of them."""
    numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(weights))}
    return [numbers.get(id(leaf)) for leaf in leaves]


def pick(tree: Any, place: Any) -> Any:
    """One row of stacked leaves."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, place, 0, False), tree)


def _put(trees: Sequence[Any], kind: int, place: Any, part: Any) -> tuple[Any, ...]:
    """The trees with one row of one kind's leaves changed."""
    changed = jax.tree.map(
        lambda a, p: lax.dynamic_update_index_in_dim(a, p.astype(a.dtype), place, 0),
        trees[kind],
        part,
    )
    return (*trees[:kind], changed, *trees[kind + 1 :])


def _if_full(layer_id, run, skip, has_empty_slots: bool):
    return lax.cond(layer_id >= 0, run, skip) if has_empty_slots else run()


def _switch(slot: SlotArrays, num_kinds: int, of_kind: Callable[[int], Any], state: Any) -> Any:
    """What the kind of a slot makes of the state; an empty slot leaves it as it is."""
    branches = [lambda state: state, *map(of_kind, range(num_kinds))]
    return lax.switch(jnp.where(slot.layer < 0, 0, slot.kind + 1), branches, state)
