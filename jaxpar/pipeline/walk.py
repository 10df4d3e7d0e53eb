"""Through the layers of a stage, one after the other, whatever is done with each: three ways of a loop.

    Scan        layers of one kind: a loop over one of them, however many there are
    Switch      layers of several kinds: a loop in which each slot branches to its kind
    Unrolled    layers of one kind, written out, each with weights of its own

What is done with a layer is a *body*, which says nothing of the loop: a forward pass, one that keeps
residuals, and a backward pass are bodies. A switch reads its weights by their places, which copies them; a
scan over the stack does not.

Legend: n slots of a stage, r rows of a kind's stack there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.at import At
from jaxpar.base.trees import add, vary_like, zeros
from jaxpar.pipeline.split import PlainLayer

# What is done with one layer: (number of its kind, sums, its row, x, what it reads, its number) -> sums, row,
# x, and what it makes besides. Sums are added up in place, such as gradients; a row is changed, such as a
# carry; x goes from layer to layer; what is read stays, such as weights.
Body = Callable[[int, Any, Any, Any, Any, Any], tuple[Any, Any, Any, Any]]


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


@dataclasses.dataclass(frozen=True)
class Scan:
    """Layers of one kind in a loop over one.

    Attributes:
      has_empty_slots: False promises that there are none; an empty slot costs no compute.
    """

    has_empty_slots: bool

    def __call__(
        self,
        body: Body,
        x: Any,
        reads: Sequence[Sequence[Any]],
        rows: Sequence[Any],
        slots: SlotArrays,
        makes: Sequence[Any],
        *,
        sums: Sequence[Any] | None = None,
        reverse: bool = False,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any, tuple[Any, ...]]:
        """x through the layers.

        Args:
          body: see `Body`.
          reads: each a tree for every kind, leaves [r, ...]; of layers that are written out a list of trees.
          rows: a tree for every kind, leaves [r, ...].
          makes: shapes and dtypes of what the body makes of a layer of each kind.
          sums: as `reads`; as outputs of a scan they would be copied. () where a kind has none.
          reverse: from the last layer to the first.
        Returns:
          sums and rows after it, x, and what was made: for every kind a tree, or a list where written out.
        """

        def of_slot(carried, inputs):
            x, all_sums = carried
            place, own, row, layer = inputs
            own_sums = pick(all_sums, place)
            own_sums, row, x, made = _if_full(
                layer,
                lambda: body(0, own_sums, row, x, own, layer),
                lambda: vary_like((own_sums, row, x, zeros(makes[0])), x),
                self.has_empty_slots,
            )
            return (x, put(all_sums, place, own_sums)), (row, made)

        places = None if sums is None else jnp.arange(slots.layer.shape[0])
        inputs = places, [each[0] for each in reads], rows[0], slots.layer
        start = x, () if sums is None else sums[0]
        (x, total), (after, made) = lax.scan(of_slot, start, inputs, reverse=reverse)
        return (total,), (after,), x, (made,)


@dataclasses.dataclass(frozen=True)
class Unrolled(Scan):
    """Layers of one kind, written out."""

    def __call__(self, body, x, reads, rows, slots, makes, *, sums=None, reverse=False):
        """As of `Scan`."""
        numbers = range(len(reads[0][0]))
        own_sums = [()] * len(numbers) if sums is None or not sums[0] else sums[0]
        out: list[Any] = [()] * len(numbers)
        for number in reversed(numbers) if reverse else numbers:
            row, layer = jax.tree.map(lambda a, n=number: a[n], (rows[0], slots.layer))

            def run(x=x, number=number, row=row, layer=layer):
                own = [each[0][number] for each in reads]
                return body(0, own_sums[number], row, x, own, layer)

            def skip(x=x, number=number, row=row):
                return vary_like((own_sums[number], row, x, zeros(makes[0])), x)

            total, row, x, made = _if_full(layer, run, skip, self.has_empty_slots)
            out[number] = total, row, made
        all_sums, all_rows, all_made = map(list, zip(*out, strict=True))
        return (all_sums if sums and sums[0] else (),), (stack(all_rows),), x, (all_made,)


@dataclasses.dataclass(frozen=True)
class Switch(Scan):
    """Layers of several kinds; an empty slot leaves all as it is."""

    def __call__(self, body, x, reads, rows, slots, makes, *, sums=None, reverse=False):
        """As of `Scan`."""

        def of_slot(state, slot):
            def of_kind(kind):
                def go(state):
                    x, *all_of = state
                    own, row, own_sums = pick(
                        ([each[kind] for each in reads], *(each[kind] for each in all_of[:2])),
                        slot.place,
                    )
                    total, row, x, made = body(kind, own_sums, row, x, own, slot.layer)
                    parts = zip(all_of, (row, total, made), strict=True)
                    after = [
                        (*a[:kind], put(a[kind], slot.place, part), *a[kind + 1 :])
                        for a, part in parts
                    ]
                    return vary_like((x, *after), x)

                return go

            branches = [lambda state: state, *map(of_kind, range(len(rows)))]
            return lax.switch(jnp.where(slot.layer < 0, 0, slot.kind + 1), branches, state), None

        sums = ((),) * len(rows) if sums is None else tuple(sums)
        start = x, tuple(rows), sums, _zero_rows(makes, zip(*reads, rows, strict=True), x)
        (x, after, total, made), _ = lax.scan(of_slot, start, slots, reverse=reverse)
        return total, after, x, made


def make_walk(num_kinds: int, *, has_empty_slots: bool, unroll: bool = False) -> Scan:
    """The way through layers of so many kinds."""
    way = Unrolled if unroll else Scan if num_kinds == 1 else Switch
    return way(has_empty_slots)


def run_layers(
    walk: Scan,
    layers: Sequence[PlainLayer],
    params: Sequence[Any],
    frozen: Sequence[Any],
    carry: Sequence[Any],
    x: Any,
    at: At,
    slots: SlotArrays,
) -> tuple[tuple[Any, ...], Any]:
    """Feeds x through stacked layers, one after the other; autodiff can differentiate it.

    Args:
      layers: a function for every kind.
      params, frozen, carry: a tree for every kind, every leaf stacked, [r, ...]. Of layers that are written
        out, parameters and frozen ones are lists of trees, one for each row.
      at: of x; its layer is ignored.
    Returns:
      the carry after the window, stacked likewise, and the output of the last layer.
    """

    def run(kind, sums, carry, x, reads, layer):
        after, y = layers[kind](*reads, carry, x, at._replace(layer=layer))
        return sums, after, y, ()

    made = ((),) * len(layers)
    _, after, y, _ = walk(run, x, (params, frozen), carry, slots, made)
    return after, y


def with_sums(layer: Callable[..., Any]) -> PlainLayer:
    """A layer whose x is (x, sums), to which it adds what it may return as a third: sums of its own."""

    def run(params, frozen, carry, x_and_sums, at):
        x, sums = x_and_sums
        after, y, *own = layer(params, frozen, carry, x, at)
        for each in own:
            sums = add(sums, each)
        return after, (y, sums)

    return run


def stack(rows: Sequence[Any]) -> Any:
    """Trees of equal structure as one, their leaves stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def unstack(tree: Any, num_rows: int) -> list[Any]:
    """Stacked leaves as a tree for each row."""
    return [jax.tree.map(lambda a, row=row: a[row], tree) for row in range(num_rows)]


def pick(tree: Any, place: Any) -> Any:
    """One row of stacked leaves."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, place, 0, False), tree)


def put(tree: Any, place: Any, part: Any) -> Any:
    """Stacked leaves with one row changed."""
    return jax.tree.map(
        lambda a, p: lax.dynamic_update_index_in_dim(a, p.astype(a.dtype), place, 0), tree, part
    )


def _zero_rows(shapes: Sequence[Any], like: Iterable[Any], x: Any) -> tuple[Any, ...]:
    """Zeros of these shapes of every kind, as many as there are rows in `like`."""

    def of_kind(own, stacked):
        def zeros_of_rows(a):
            return jnp.zeros((len(jax.tree.leaves(stacked)[0]), *a.shape), a.dtype)

        return jax.tree.map(zeros_of_rows, own)

    return vary_like(tuple(map(of_kind, shapes, like)), x)


def _if_full(
    layer: Any, run: Callable[[], Any], skip: Callable[[], Any], may_be_empty: bool
) -> Any:
    """What a slot gives: `skip` where it is empty."""
    return lax.cond(layer >= 0, run, skip) if may_be_empty else run()
