"""Stacked layers of one kind or several: run one after the other, whole or as forward and backward.

The parameters of all layers of a kind are stacked on a leading dim; slots say which layer comes when and
where it lies. `run_layers` is the plain way, differentiable by autodiff. `SplitLayers` is the same in two
halves with what passes between them in the caller's hands: a pipeline keeps it in slots of its own. With
one kind the program is a scan over one layer, however many there are; with several each slot switches to
its kind. Each pass has a body for either: a switch reads its weights by their places, which copies them,
and a scan over the stack does not.

Legend: t time steps, b rows; n slots of a stage, r rows of a kind's stack there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.at import At
from jaxpar.pipeline.split import Layer, SplitLayer
from jaxpar.trees import add, vary_like, zeros


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
      params, frozen, carry: a tree for every kind, every leaf stacked, [r, ...]. Layers of one kind may be
        unrolled: parameters and frozen ones are then lists of trees, one for each row.
      at: of x; its layer is ignored.
      has_empty_slots: False promises that there are none; an empty slot costs no compute.
    Returns:
      the carry after the window, stacked likewise, and the output of the last layer.
    """

    def run(kind, params, frozen, carry, x, layer_id):
        return *layers[kind](params, frozen, carry, x, at._replace(layer=layer_id)), ()

    stacked, kept = (params, frozen, carry), ((),) * len(layers)
    return _run_stacked(run, kept, stacked, x, slots, has_empty_slots)[:2]


class SplitLayers:
    """Stacked layers, forward and backward apart.

    What the backward pass needs of the parameters is not among what the forward pass saves.

    Attributes:
      kinds: each kind of layer in its parts.
      saved: for each kind the shapes and dtypes of what a layer keeps for its backward pass; what forward
        saves comes first, then room for what B hands to W.
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
        splits: bool = False,
        whole: tuple[Any, At, int] | None = None,
    ):
        """Traces every kind once, to learn what it saves; arguments as of `run_layers`.

        Args:
          splits: take W, the gradients of weights, out of `backward`, for every kind where it is separable.
          whole: x and at of all blocks that one W is for, one after the other in time, and how many they are;
            None runs it for each.
        Raises:
          ValueError: W of a kind cannot be run for several blocks at once.
        """
        self._has_empty_slots = has_empty_slots

        def split(x, at):
            return [
                SplitLayer(layer, pick(p, 0), pick(f, 0), pick(c, 0), x, at, splits=splits)
                for layer, p, f, c in zip(layers, params, frozen, carry, strict=True)
            ]

        self.kinds = self._weights = split(x, at)
        if whole is not None:
            *block, times = whole
            self._weights = split(*block)
            for number, (kind, long) in enumerate(zip(self.kinds, self._weights, strict=True)):
                if kind.has_weights and not long.is_longer(kind, times):
                    raise ValueError(
                        f"zero_bubble='microbatch': the gradients of the weights of layers of kind {number} "
                        f"cannot be taken for {times} chunks of time at once; use 'unit'"
                    )
        self.saved = tuple(
            [
                *kind.saved,
                *(
                    leaf
                    for leaf, n in zip(kind.later, kind.places, strict=True)
                    if n >= len(kind.saved)
                ),
            ]
            for kind in self.kinds
        )

    def prepare(self, params: Sequence[Any], frozen: Sequence[Any]) -> list[Any]:
        """The weights of layers that are written out, as `backward` and `weights` take them."""
        rows = zip(params[0], frozen[0], strict=True)
        return [[self.kinds[0].prepare(*row) for row in rows]]

    def forward(
        self,
        params: Sequence[Any],
        frozen: Sequence[Any],
        carry: Sequence[Any],
        x: Any,
        at: At,
        slots: SlotArrays,
    ) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        """`run_layers`, and the residuals of every layer: of every kind leaves [r, ...], or such a list."""

        def run(kind, params, frozen, carry, x, layer_id):
            out = self.kinds[kind].forward(params, frozen, carry, x, at._replace(layer=layer_id))
            return vary_like(out, x)

        saved, stacked = [kind.saved for kind in self.kinds], (params, frozen, carry)
        return _run_stacked(run, saved, stacked, x, slots, self._has_empty_slots)

    def backward(
        self,
        prepared: Sequence[Any],
        saved: Sequence[Any],
        d_carry: Sequence[Any],
        dy: Any,
        grads: Sequence[Any],
        slots: SlotArrays,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any, tuple[Any, ...]]:
        """The vector-Jacobian product of `forward`; for kinds whose W is separate, that of inputs only.

        Args:
          prepared: of layers that are written out what `prepare` gives; else for every kind its parameters,
            and what of them is frozen.
          saved: what `forward` returned, for the same parameters.
          d_carry: cotangent of the carry after the window.
          dy: cotangent of the output.
          grads: gradients so far, to which those of the parameters are added; () where W is separate.
        Returns:
          the gradients, the cotangent of the carry before the window, that of x, and for every kind what W
          needs, as `saved`.
        """

        def run(kind, prepared, saved, d_carry, grads, dy):
            parts = self.kinds[kind].backward(prepared, saved, d_carry, dy)
            d_params, d_carry, dx, later = parts
            return vary_like((add(grads, d_params), d_carry, dx, later), dy)

        def run_or_skip(layer_id, prepare, saved, d_carry, grads, dy):
            return _if_full(
                layer_id,
                lambda: run(0, prepare(), saved, d_carry, grads, dy),
                lambda: (grads, d_carry, dy, vary_like(zeros(self.kinds[0].later), dy)),
                self._has_empty_slots,
            )

        if len(self.kinds) == 1 and isinstance(prepared[0], list):

            def of_row(dy, row):
                prepared, saved, d_carry, layer_id, grads = row
                grads, d_carry, dx, later = run_or_skip(
                    layer_id, lambda: prepared, saved, d_carry, grads, dy
                )
                return dx, (grads, d_carry, later)

            own = grads[0] or [()] * len(prepared[0])
            rows = prepared[0], saved[0], d_carry[0], slots.layer, own
            dx, out = _one_by_one(of_row, dy, rows, reverse=True)
            after, d_before, later = ([row[n] for row in out] for n in range(3))
            return (after if grads[0] else (),), (stack(d_before),), dx, (later,)

        if len(self.kinds) == 1:
            # Gradients are carried and changed in place; as outputs of the scan they would be copied.
            def of_one_kind(carried, inputs):
                dy, all_grads = carried
                place, weights, saved, d_carry, layer_id = inputs
                grads, d_carry, dx, later = run_or_skip(
                    layer_id,
                    lambda: self.kinds[0].prepare(*weights),
                    *(saved, d_carry, pick(all_grads, place), dy),
                )
                return (dx, _put((all_grads,), 0, place, grads)[0]), (d_carry, later)

            places = jnp.arange(slots.layer.shape[0])
            inputs = (places, prepared[0], saved[0], d_carry[0], slots.layer)
            (dx, after), (d_before, later) = lax.scan(
                of_one_kind, (dy, grads[0]), inputs, reverse=True
            )
            return (after,), (d_before,), dx, (later,)

        def body(state, slot):
            def of_kind(kind):
                def go(state):
                    dy, d_carry, grads, later = state
                    weights, *own = [
                        pick(tree[kind], slot.place) for tree in (prepared, saved, d_carry, grads)
                    ]
                    total, dc, dx, kept = run(kind, self.kinds[kind].prepare(*weights), *own, dy=dy)
                    d_carry = _put(d_carry, kind, slot.place, dc)
                    grads = _put(grads, kind, slot.place, total)
                    return vary_like((dx, d_carry, grads, _put(later, kind, slot.place, kept)), dy)

                return go

            return _switch(slot, len(self.kinds), of_kind, state), None

        room = _room([kind.later for kind in self.kinds], zip(prepared, d_carry, strict=True), dy)
        start = dy, tuple(d_carry), tuple(grads), room
        (dx, d_before, after, later), _ = lax.scan(body, start, slots, reverse=True)
        return after, d_before, dx, later

    def weights(
        self,
        kind: int,
        prepared: Any,
        kept: Callable[[Any], Sequence[list[jax.Array]]],
        grads: Any,
        layer_R: jax.Array,
        rows: tuple[Any, int],
    ) -> Any:
        """Adds W of layers of a kind to its gradients.

        Args:
          kind: one whose W is apart.
          prepared: of the kind, as of `backward`; of all its layers on the stage, leaves [R, ...].
          kept: place among the rows -> what was kept of that layer: what W needs of the saved, and of B.
          grads: likewise.
          layer_R: number of the layer in each row; -1 for none.
          rows: the first, and how many.
        """
        first, count = rows

        def of_row(layer_id, prepare, place, grads):
            def run():
                d_params = self._weights[kind].weights(prepare(), *kept(place))
                return add(grads, vary_like(d_params, grads))

            return _if_full(layer_id, run, lambda: grads, self._has_empty_slots)

        if isinstance(prepared, list):
            return [
                of_row(layer_R[row], lambda row=row: prepared[row], row, grads[row])
                for row in range(count)
            ]

        def body(place, grads):
            row = first + place

            def prepare():
                return self.kinds[kind].prepare(*pick(prepared, row))

            total = of_row(layer_R[row], prepare, place, pick(grads, row))
            return _put((grads,), 0, row, total)[0]

        return lax.fori_loop(0, count, body, grads)


def _run_stacked(
    run: Callable[..., Any],
    kept_of: Sequence[Any],
    stacked: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    x: Any,
    slots: SlotArrays,
    has_empty_slots: bool,
) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """The carry, the output of the last layer, and what each of them keeps, of stacked layers.

    Args:
      run: (kind, parameters, frozen ones, carry, x, number) of a layer -> carry, y, and what it keeps.
      kept_of: shapes and dtypes of what a layer of each kind keeps.
      stacked: parameters, frozen ones and carry, as of `run_layers`.
    """
    params, frozen, carry = stacked
    if len(params) == 1:

        def of_one_kind(x, slot):
            *own, layer_id = slot
            after, y, kept = _if_full(
                layer_id,
                lambda: run(0, *own, x=x, layer_id=layer_id),
                lambda: vary_like((own[2], x, zeros(kept_of[0])), x),
                has_empty_slots,
            )
            return y, (after, kept)

        rows = params[0], frozen[0], carry[0], slots.layer
        if isinstance(params[0], list):
            y, out = _one_by_one(of_one_kind, x, rows)
            return (stack([row[0] for row in out]),), y, ([row[1] for row in out],)
        y, (after, kept) = lax.scan(of_one_kind, x, rows)
        return (after,), y, (kept,)

    def body(state, slot):
        def of_kind(kind):
            def go(state):
                x, carry, kept = state
                own = [pick(tree[kind], slot.place) for tree in (params, frozen, carry)]
                after, y, part = run(kind, *own, x=x, layer_id=slot.layer)
                carry = _put(carry, kind, slot.place, after)
                return vary_like((y, carry, _put(kept, kind, slot.place, part)), x)

            return go

        return _switch(slot, len(params), of_kind, state), None

    start = x, tuple(carry), _room(kept_of, zip(*stacked, strict=True), x)
    (y, after, kept), _ = lax.scan(body, start, slots)
    return after, y, kept


def _room(shapes: Sequence[Any], like: Iterable[Any], x: Any) -> tuple[Any, ...]:
    """Zeros of these shapes of every kind, as many as there are rows in `like`."""

    def room(own, stacked):
        def zeros_of_rows(a):
            return jnp.zeros((jax.tree.leaves(stacked)[0].shape[0], *a.shape), a.dtype)

        return jax.tree.map(zeros_of_rows, own)

    return vary_like(tuple(room(*each) for each in zip(shapes, like, strict=True)), x)


def stack(rows: Sequence[Any]) -> Any:
    """Trees of equal structure as one, their leaves stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def unstack(tree: Any, num_rows: int) -> list[Any]:
    """Stacked leaves as a tree for each row."""
    return [jax.tree.map(lambda a, row=row: a[row], tree) for row in range(num_rows)]


def _one_by_one(body: Callable[..., Any], init: Any, xs: Sequence[Any], *, reverse: bool = False):
    """`lax.scan` written out; of xs, and of what the body gives, there is one for each row."""
    rows = range(len(xs[0]))
    out: list[Any] = [None] * len(rows)
    for row in reversed(rows) if reverse else rows:
        own = tuple(x[row] if isinstance(x, list) else pick(x, row) for x in xs)
        init, out[row] = body(init, own)
    return init, out


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
