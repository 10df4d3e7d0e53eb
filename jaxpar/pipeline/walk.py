"""Loops over the layers of a stage, in three forms.

    Scan        layers of one kind: a loop over one of them, however many there are
    Switch      layers of several kinds: a loop in which each slot branches to its kind
    Unrolled    layers of one kind, written out, each with weights of its own

What is done with a layer is a *body*, which says nothing of the loop: a forward pass, one that keeps
residuals, and a backward pass are bodies. A switch reads its weights by their places, which copies them; a
scan over the stack does not.

Legend: n slots of a stage, r rows of a kind's stack there.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.trees import add, vary_like
from jaxpar.base.types import Activations, Arrays, Carry, Function, Index
from jaxpar.internal.split import PlainLayer
from jaxpar.pipeline.store import Store, pick, put, replaced, stack

# What is done with one layer: (number of its kind, sums, its row, x, what it reads, its number, store, place)
# -> sums, row, x, store. Sums are added up in place, such as gradients; a row is changed, such as a carry; x
# goes from layer to layer; what is read stays, such as weights. A store is changed in place: it has room for
# every layer of a kind, and `place` has the numbers of this layer's in it: its row, or none.
Body = Callable[
    [int, Arrays, Carry, Activations, Arrays, Index, Arrays, tuple[Index, ...]],
    tuple[Arrays, Carry, Activations, Arrays],
]


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
        x: Activations,
        reads: Sequence[Sequence[Arrays]],
        rows: Sequence[Arrays],
        slots: SlotArrays,
        store: Sequence[Arrays] | None = None,
        *,
        sums: Sequence[Arrays] | None = None,
        reverse: bool = False,
    ) -> tuple[Arrays, tuple[Carry, ...], Activations, tuple[Arrays, ...]]:
        """x through the layers.

        Args:
          body: see `Body`.
          reads: each a tree for every kind, leaves [r, ...]; of layers that are written out a list of trees.
          rows: a tree for every kind, leaves [r, ...].
          store: anything for every kind; of layers that are written out a list, and `place` is (). None if
            nothing is stored.
          sums: as `reads`; as outputs of a scan they would be copied. () where a kind has none.
          reverse: from the last layer to the first.
        Returns:
          sums and rows after it, x, and the store.
        """

        def of_slot(carried, inputs):
            x, all_sums, store = carried
            place, own, row, layer = inputs
            own_sums = pick(all_sums, place)
            own_sums, row, x, store = self._if_full(
                layer,
                lambda: body(0, own_sums, row, x, own, layer, store, (place,)),
                lambda: vary_like((own_sums, row, x, store), x),
            )
            return (x, put(all_sums, place, own_sums), store), row

        places = None
        if sums is not None or store is not None:
            places = jnp.arange(slots.layer.shape[0], dtype=jnp.int32)
        inputs = places, [each[0] for each in reads], rows[0], slots.layer
        start = x, () if sums is None else sums[0], () if store is None else store[0]
        (x, total, stored), after = lax.scan(of_slot, start, inputs, reverse=reverse)
        return (total,), (after,), x, (stored,)

    def _if_full(self, layer: Index, run: Callable[[], Any], skip: Callable[[], Any]) -> Arrays:
        """What a slot gives: `skip` where it is empty."""
        return lax.cond(layer >= 0, run, skip) if self.has_empty_slots else run()


@dataclasses.dataclass(frozen=True)
class Unrolled(Scan):
    """Layers of one kind, written out."""

    def __call__(self, body, x, reads, rows, slots, store=None, *, sums=None, reverse=False):
        """As of `Scan`."""
        numbers = range(len(reads[0][0]))
        own_sums = [()] * len(numbers) if sums is None or not sums[0] else sums[0]
        stores = [()] * len(numbers) if store is None else store[0]
        out: list[Any] = [()] * len(numbers)
        for number in reversed(numbers) if reverse else numbers:
            row, layer = jax.tree.map(lambda a, n=number: a[n], (rows[0], slots.layer))

            def run(x=x, number=number, row=row, layer=layer):
                own = [each[0][number] for each in reads]
                return body(0, own_sums[number], row, x, own, layer, stores[number], ())

            def skip(x=x, number=number, row=row):
                return vary_like((own_sums[number], row, x, stores[number]), x)

            total, row, x, stored = self._if_full(layer, run, skip)
            out[number] = total, row, stored
        all_sums, all_rows, all_stored = map(list, zip(*out, strict=True))
        return (all_sums if sums and sums[0] else (),), (stack(all_rows),), x, (all_stored,)


@dataclasses.dataclass(frozen=True)
class Switch(Scan):
    """Layers of several kinds; an empty slot leaves all as it is.

    Attributes:
      stores: how each of the `reads` is stored; the first is that of sums too.
    """

    stores: Sequence[Store] = (Store(), Store())

    def __call__(self, body, x, reads, rows, slots, store=None, *, sums=None, reverse=False):
        """As of `Scan`."""

        def of_slot(state, slot):
            def of_kind(kind):
                def go(state):
                    x, rows, sums, store = state
                    pairs = zip(self.stores, reads, strict=True)
                    own = [each.pick(read, kind, slot.place) for each, read in pairs]
                    row = pick(rows[kind], slot.place)
                    own_sums = self.stores[0].pick(sums, kind, slot.place)
                    total, row, x, stored = body(
                        kind, own_sums, row, x, own, slot.layer, store[kind], (slot.place,)
                    )
                    rows = replaced(rows, kind, put(rows[kind], slot.place, row))
                    sums = self.stores[0].put(sums, kind, slot.place, total)
                    return vary_like((x, rows, sums, replaced(store, kind, stored)), x)

                return go

            branches = [lambda state: state, *map(of_kind, range(len(rows)))]
            return lax.switch(jnp.where(slot.layer < 0, 0, slot.kind + 1), branches, state), None

        nothing = ((),) * len(rows)
        kept = nothing if store is None else tuple(store)
        sums = nothing if sums is None else sums
        (x, after, total, stored), _ = lax.scan(
            of_slot, (x, tuple(rows), sums, kept), slots, reverse=reverse
        )
        return total, after, x, stored


def make_walk(num_kinds: int, *, has_empty_slots: bool, unroll: bool = False) -> Scan:
    """The way through layers of so many kinds."""
    way = Unrolled if unroll else Scan if num_kinds == 1 else Switch
    return way(has_empty_slots)


def run_layers(
    walk: Scan,
    layers: Sequence[PlainLayer],
    params: Sequence[Arrays],
    frozen: Sequence[Arrays],
    carry: Sequence[Arrays],
    x: Activations,
    at: LayerContext,
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

    def run(kind, sums, carry, x, reads, layer, store, place):
        after, y = layers[kind](*reads, carry, x, at._replace(layer=layer))
        return sums, after, y, store

    _, after, y, _ = walk(run, x, (params, frozen), carry, slots)
    return after, y


def with_sums(layer: Function) -> PlainLayer:
    """A layer whose x is (x, sums), to which it adds what it may return as a third: sums of its own."""

    def run(params, frozen, carry, x_and_sums, at):
        x, sums = x_and_sums
        after, y, *own = layer(params, frozen, carry, x, at)
        for each in own:
            sums = add(sums, each)
        return after, (y, sums)

    return run
