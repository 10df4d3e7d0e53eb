"""Stacked layers of one kind or several: run one after the other, whole or as forward and backward.

The parameters of all layers of a kind are stacked on a leading dim; slots say which layer comes when and
where it lies. `run_layers` is the plain way, differentiable by autodiff. `SplitLayers` is the same in two
halves with what passes between them in the caller's hands: a pipeline keeps it in slots of its own. With
one kind the program is a scan over one layer, however many there are; with several each slot switches to
its kind. `_walk` has both ways: a switch reads its weights by their places, which copies them, and a scan
over the stack does not.

Legend: t time steps, b rows; n slots of a stage, r rows of a kind's stack there.
"""

import functools
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

    def run(kind, sums, carry, x, reads, layer_id):
        after, y = layers[kind](*reads, carry, x, at._replace(layer=layer_id))
        return sums, after, y, ()

    nothing = ((),) * len(layers)
    _, after, y, _ = _walk(run, nothing, x, (params, frozen), carry, slots, has_empty_slots)
    return after, y


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
        self.saved = tuple(kind.saved_and_room for kind in self.kinds)

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

        def run(kind, sums, carry, x, reads, layer_id):
            out = self.kinds[kind].forward(*reads, carry, x, at._replace(layer=layer_id))
            return sums, *vary_like(out, x)

        saved, reads = [kind.saved for kind in self.kinds], (params, frozen)
        return _walk(run, saved, x, reads, carry, slots, self._has_empty_slots)[1:]

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
        is_written_out = isinstance(prepared[0], list)

        def run(kind, grads, d_carry, dy, reads, layer_id):
            weights, saved = reads
            own = weights if is_written_out else self.kinds[kind].prepare(*weights)
            d_params, d_carry, dx, later = self.kinds[kind].backward(own, saved, d_carry, dy)
            return vary_like((add(grads, d_params), d_carry, dx, later), dy)

        walk = functools.partial(_walk, has_empty_slots=self._has_empty_slots, reverse=True)
        later = [kind.later for kind in self.kinds]
        return walk(run, later, dy, (prepared, saved), d_carry, slots, sums=grads)

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
            return _put(grads, row, total)

        return lax.fori_loop(0, count, body, grads)


def _walk(
    run: Callable[..., tuple[Any, Any, Any, Any]],
    made_of: Sequence[Any],
    x: Any,
    reads: Sequence[Sequence[Any]],
    rows: Sequence[Any],
    slots: SlotArrays,
    has_empty_slots: bool,
    *,
    sums: Sequence[Any] | None = None,
    reverse: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...], Any, tuple[Any, ...]]:
    """x through stacked layers, one after the other.

    Args:
      run: (kind, sums, row, x, reads, number) of a layer -> sums, row, x, and what it makes besides.
      made_of: shapes and dtypes of that, of a layer of each kind.
      reads: what layers read: trees for every kind, leaves [r, ...]; or, of layers of one kind that are
        written out, lists with a tree for each row.
      rows: what each of them changes, a tree for every kind, leaves [r, ...].
      sums: likewise, changed in place: as outputs of a scan they would be copied. A list, or nothing, where
        layers are written out; None for none.
      reverse: from the last layer to the first.
    Returns:
      sums and rows after it, x, and what layers made: a tree for every kind, or a list where written out.
    """
    has_sums, sums = sums is not None, tuple(sums or ((),) * len(rows))

    def run_or_skip(own_sums, row, x, own, layer_id):
        return _if_full(
            layer_id,
            lambda: run(0, own_sums, row, x, own, layer_id),
            lambda: vary_like((own_sums, row, x, zeros(made_of[0])), x),
            has_empty_slots,
        )

    if len(rows) == 1 and isinstance(reads[0][0], list):
        numbers = range(len(reads[0][0]))
        out: list[Any] = [()] * len(numbers)
        for number in reversed(numbers) if reverse else numbers:
            row, layer_id = pick((rows[0], slots.layer), number)
            own_sums, own = sums[0] and sums[0][number], [each[0][number] for each in reads]
            own_sums, row, x, made = run_or_skip(own_sums, row, x, own, layer_id)
            out[number] = own_sums, row, made
        all_sums, all_rows, all_made = map(list, zip(*out, strict=True))
        return (sums[0] and all_sums,), (stack(all_rows),), x, (all_made,)

    if len(rows) == 1:

        def of_one_kind(carried, inputs):
            x, all_sums = carried
            place, own, row, layer_id = inputs
            own_sums = pick(all_sums, place)
            own_sums, row, x, made = run_or_skip(own_sums, row, x, own, layer_id)
            return (x, _put(all_sums, place, own_sums)), (row, made)

        places = jnp.arange(slots.layer.shape[0]) if has_sums else None
        inputs = places, [each[0] for each in reads], rows[0], slots.layer
        (x, total), (after, made) = lax.scan(of_one_kind, (x, sums[0]), inputs, reverse=reverse)
        return (total,), (after,), x, (made,)

    def body(state, slot):
        def of_kind(kind):
            def go(state):
                x, *all_of = state
                own, row, own_sums = pick(
                    ([each[kind] for each in reads], *(each[kind] for each in all_of[:2])),
                    slot.place,
                )
                total, row, x, made = run(kind, own_sums, row, x, own, slot.layer)
                parts = zip(all_of, (row, total, made), strict=True)
                after = [
                    (*a[:kind], _put(a[kind], slot.place, part), *a[kind + 1 :])
                    for a, part in parts
                ]
                return vary_like((x, *after), x)

            return go

        # An empty slot leaves all as it is.
        branches = [lambda state: state, *map(of_kind, range(len(rows)))]
        return lax.switch(jnp.where(slot.layer < 0, 0, slot.kind + 1), branches, state), None

    start = x, tuple(rows), sums, _room(made_of, zip(*reads, rows, strict=True), x)
    (x, after, total, made), _ = lax.scan(body, start, slots, reverse=reverse)
    return total, after, x, made


def _room(shapes: Sequence[Any], like: Iterable[Any], x: Any) -> tuple[Any, ...]:
    """Zeros of these shapes of every kind, as many as there are rows in `like`."""

    def room(own, stacked):
        def zeros_of_rows(a):
            return jnp.zeros((len(jax.tree.leaves(stacked)[0]), *a.shape), a.dtype)

        return jax.tree.map(zeros_of_rows, own)

    return vary_like(tuple(map(room, shapes, like)), x)


def stack(rows: Sequence[Any]) -> Any:
    """Trees of equal structure as one, their leaves stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def unstack(tree: Any, num_rows: int) -> list[Any]:
    """Stacked leaves as a tree for each row."""
    return [jax.tree.map(lambda a, row=row: a[row], tree) for row in range(num_rows)]


def pick(tree: Any, place: Any) -> Any:
    """One row of stacked leaves."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, place, 0, False), tree)


def _put(tree: Any, place: Any, part: Any) -> Any:
    """Stacked leaves with one row changed."""
    return jax.tree.map(
        lambda a, p: lax.dynamic_update_index_in_dim(a, p.astype(a.dtype), place, 0), tree, part
    )


def _if_full(layer_id, run, skip, has_empty_slots: bool):
    return lax.cond(layer_id >= 0, run, skip) if has_empty_slots else run()
