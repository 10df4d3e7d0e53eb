"""The saved activations of a unit between forward and backward pass, and between B and W.

    Residuals   what the layers save; B hands to W what lies in the same slot
    Inputs      x and carry alone (remat), on the device or on the host: the residuals are made again

Under remat neither y nor residuals outlive F: before B `recall` runs the forward pass again from x and carry,
and W is not apart, since what it needs would have to be kept. With remat_keeps="carries" (segments, see
`loop`) residuals are kept as without remat, of one segment's units.

Both lie in buffers [slots, ...], which change where a unit runs and are never copied. Each layer writes what
it saves straight to its place, [slot, row], and reads it there.

Legend: r rows of a kind's stack in a group.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.trees import add, shape_of, vary_like, zeros
from jaxpar.base.types import Activations, Arrays, Carry, Cotangents, Function, Index, Params, Tree
from jaxpar.internal.split import SplitLayer
from jaxpar.pipeline.buffers import read_at, write, write_at
from jaxpar.pipeline.order import after_collectives, needs_loops_in_order
from jaxpar.pipeline.stage import Stage, Unit
from jaxpar.pipeline.store import pick, stack
from jaxpar.trace.loops import loops_in_order


class Residuals:
    """The layers of a stage as forward, B and W, with what passes between the three in buffers.

    What the backward pass needs of the parameters is not among it.

    Attributes:
      kinds: each kind of layer in its parts.
      has_weights: whether W of any kind is apart.
    """

    def __init__(self, stage: Stage, carry: Carry, *, splits: bool):
        """Traces a layer of every kind, to learn what it saves.

        Args:
          carry: of the stage.
          splits: take W, the gradients of weights, out of the backward pass where it is separable.
        """
        self._stage = stage
        weights = stage.params.layers, stage.frozen.layers
        if stage.spec.unroll:
            weights = tuple(tuple(map(stack, tree)) for tree in weights)
        zero = jnp.int32(0)
        before = stage.read_carry(carry, zero, zero)
        x = vary_like(zeros(stage.x_shape), stage.here)
        self._inputs = jax.tree.map(shape_of, (before, x))
        at = stage.at(Unit(zero))
        self.kinds = []
        for number, (layer, own) in enumerate(zip(stage.layers, before, strict=True)):
            p, f = self._layer(weights, number, 0)
            x_and_sums = x, stage.no_sums
            self.kinds.append(SplitLayer(layer, p, f, pick(own, 0), x_and_sums, at, splits=splits))
        self.has_weights = any(kind.has_weights for kind in self.kinds)
        self._prepared = []  # of each layer that is written out, as the backward pass takes the weights
        if stage.spec.unroll:
            rows = zip(*stage.params.layers, *stage.frozen.layers, strict=True)
            self._prepared = [self.kinds[0].prepare(*row) for row in rows]

    def _run(self, kinds: Iterable[SplitLayer], function: Function, *args: Tree) -> Tree:
        """What a function of layers of these kinds gives, with the loops in it in order."""
        is_ordered = any(needs_loops_in_order(self._stage.spec, kind.program) for kind in kinds)
        return loops_in_order(function, *args) if is_ordered else function(*args)

    def _layer(self, weights: Params, kind: int, row: Index) -> list[Arrays]:
        """Parameters of one layer, and what of them is frozen."""
        pairs = zip(self._stage.stores, weights, strict=True)
        return [store.pick(each, kind, row) for store, each in pairs]

    # ---- buffers ----

    @property
    def shapes(self) -> Arrays:
        """Of what is kept of a unit: for every kind leaves [r, ...], or a list of rows if written out."""

        def of_kind(kind: SplitLayer, rows: jax.Array) -> list[Arrays]:
            if self._stage.spec.unroll:
                return [kind.saved_and_room] * len(rows)
            r = len(rows) // self._stage.num_groups
            leaves = kind.saved_and_room
            return [jax.ShapeDtypeStruct((r, *leaf.shape), leaf.dtype) for leaf in leaves]

        return tuple(map(of_kind, self.kinds, self._stage.rows))

    def placed(self, kept: Arrays) -> Arrays:
        """What is kept, in the memory where it is kept."""
        return kept

    # ---- F, B and W of a unit ----

    def forward(
        self, buffers: Arrays, slot: Index, unit: Unit, group: Index, carry: Carry, x: Activations
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The layers of a group: the carry, y, and the buffers with what is kept in a slot."""
        stage, kinds = self._stage, self.kinds
        params, frozen, slots = stage.own(group)
        at = stage.at(unit)

        def body(kind, sums, carry, x, reads, layer, buffers, place):
            own, here = kinds[kind], at._replace(layer=layer)
            carry, y, saved = self._run([own], own.forward, *reads, carry, x, here)
            there = [
                self._put(a, value, slot, *place) for a, value in zip(buffers, saved, strict=False)
            ]
            there += buffers[len(saved) :]  # room for W
            return sums, *vary_like((carry, y, there), x)

        return stage.walk(group)(body, x, (params, frozen), carry, slots, buffers)[1:]

    def backward(
        self,
        buffers: Arrays,
        slot: Index,
        group: Index,
        d_carry: Cotangents,
        dy: Cotangents,
        grads: Cotangents,
    ) -> tuple[Cotangents, Cotangents, Cotangents, Arrays]:
        """B of a unit: the vector-Jacobian product of `forward`; where W is apart, that of inputs only.

        Args:
          buffers, slot: where what `forward` kept lies.
          d_carry: cotangent of the carry after the unit.
          dy: cotangent of y.
          grads: gradients of the stage's layers so far, to which those of the parameters are added; see
            `added_to`.
        Returns:
          the gradients, the cotangent of the carry before the unit, that of x, and the buffers with what W
          needs.
        """
        stage, kinds = self._stage, self.kinds
        *reads, slots = stage.own(group)
        own = stage.stores[0].take_group(grads, group, stage.num_groups)
        if stage.spec.unroll:
            reads = [[self._prepared]]

        def body(kind, grads, d_carry, dy, reads, layer, buffers, place):
            split = kinds[kind]
            weights = reads[0] if stage.spec.unroll else split.prepare(*reads)
            saved = [self._get(leaf, slot, *place) for leaf in buffers[: len(split.saved)]]
            args = weights, saved, d_carry, dy
            d_params, d_carry, dx, later = self._run([split], split.backward, *args)
            after = list(buffers)
            for number, leaf in zip(split.places, later, strict=True):
                after[number] = self._put(buffers[number], leaf, slot, *place)
            grads = () if split.has_weights else add(grads, d_params)
            return vary_like((grads, d_carry, dx, after), dy)

        own, d_carry, dx, after = stage.walk(group)(
            body, dy, reads, d_carry, slots, buffers, sums=own, reverse=True
        )
        grads = stage.stores[0].put_group(grads, own, group, stage.num_groups)
        return grads, d_carry, dx, after

    def added_to(self, grads: Cotangents) -> Cotangents:
        """The gradients of the stage's layers that B adds to, without those of kinds whose W is apart."""
        return self._stage.stores[0].keep(grads, [not kind.has_weights for kind in self.kinds])

    def after_backward(self, before: Cotangents, own: Cotangents) -> Cotangents:
        """All gradients, after B has added to those."""
        kinds = [not kind.has_weights for kind in self.kinds]
        return self._stage.stores[0].restore(before, own, kinds)

    def weights(self, buffers: Arrays, slot: Index, group: Index, grads: Cotangents) -> Cotangents:
        """Adds W of a unit to the gradients of the stage's layers, kind by kind: any order is right."""
        turns = vary_like(jnp.int32(0), self._stage.here)
        for number, kind in enumerate(self.kinds):
            if kind.has_weights:
                kinds = [n == number for n in range(len(self.kinds))]
                own = self._stage.stores[0].keep(grads, kinds)
                state = own, turns
                own, turns = self._weights_of(number, buffers[number], slot, group, state)
                grads = self._stage.stores[0].restore(grads, own, kinds)
        return grads

    def _weights_of(
        self,
        number: int,
        buffers: Arrays,
        slot: Index,
        group: Index,
        state: tuple[Cotangents, jax.Array],
    ) -> tuple[Cotangents, jax.Array]:
        """Gradients with W of all layers of a kind, and how many layers had a turn, both from `state` on."""
        kind, stage = self.kinds[number], self._stage
        layer_R, store = stage.rows[number], stage.stores[0]
        weights = stage.params.layers, stage.frozen.layers

        def of_row(layer, prepare, place, grads, turns):
            own, at = (buffers[place], ()) if stage.spec.unroll else (buffers, (place,))
            slot_after = after_collectives(stage.spec, turns, slot)

            def run():
                parts = [
                    [self._get(own[n], slot_after, *at) for n in numbers]
                    for numbers in (kind.needed, kind.places)
                ]
                return add(grads, vary_like(kind.weights(prepare(), *parts), grads)), turns + 1

            # Other kinds may lie in the slots of a stage.
            if -1 not in stage.spec.slots.rows[number]:
                return run()
            return lax.cond(layer >= 0, run, lambda: (grads, turns))

        grads, turns = state
        if stage.spec.unroll:
            totals = []
            for row, (prepared, own) in enumerate(zip(self._prepared, grads[0], strict=True)):
                total, turns = of_row(layer_R[row], lambda p=prepared: p, row, own, turns)
                totals.append(total)
            return [totals], turns
        count = len(layer_R) // stage.num_groups
        first = group * count

        def body(place, state):
            (grads, turns), row = state, first + place

            def prepare():
                return kind.prepare(*self._layer(weights, number, row))

            layer, own = layer_R[row], store.pick(grads, number, row)
            total, turns = of_row(layer, prepare, place, own, turns)
            return store.put(grads, number, row, total), turns

        return lax.fori_loop(0, count, body, state)

    def _get(self, buffer: jax.Array, *place: Index) -> jax.Array:
        """What a layer has kept in a buffer, in its slot and row; without a row if layers are written out."""
        spec = self._stage.spec
        kept = read_at(buffer, place, spec.platform)
        if buffer.shape[0] == 1:  # XLA knows the only slot, and would not wait for its number
            kept = after_collectives(spec, jnp.asarray(place[0]), kept)
        return kept

    def _put(self, buffer: jax.Array, value: jax.Array, *place: Index) -> jax.Array:
        return write_at(buffer, place, value, self._stage.spec.platform)


class Inputs(Residuals):
    """As `Residuals`, but a unit's carry and x are all that is kept: its forward pass runs again before B."""

    @property
    def shapes(self) -> Arrays:
        """Of a unit's carry and x."""
        return self._inputs

    def placed(self, kept: Arrays) -> Arrays:
        """What is kept, in the memory where it is kept."""
        return self._move(kept, jax.memory.Space.Host)

    def forward(
        self, buffers: Arrays, slot: Index, unit: Unit, group: Index, carry: Carry, x: Activations
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The layers of a group: the carry, y, and the buffers with what is kept in a slot."""
        after, y = self._run(self.kinds, self._stage.forward, unit, group, carry, x)
        return after, y, write(buffers, self.placed((carry, x[0])), slot)

    def recall(
        self, buffers: Arrays, unit: Unit, group: Index, slot: Index
    ) -> tuple[Arrays, Arrays]:
        """y of a unit whose backward pass comes, and buffers of one slot with its residuals.

        Sums of its layers were added before.
        """
        stage = self._stage
        carry, x = self._move(pick(buffers, slot), jax.memory.Space.Device)
        empty = vary_like(stage.buffers(1, super().shapes), stage.here)

        def run():
            _, (y, _), residuals = super(Inputs, self).forward(
                empty, 0, unit, group, carry, (x, stage.no_sums)
            )
            return vary_like((y, residuals), stage.here)

        return lax.cond(
            jnp.asarray(unit.number) >= 0, run, lambda: (vary_like(x, stage.here), empty)
        )

    def _move(self, kept: Arrays, space: Any) -> Arrays:
        return jax.device_put(kept, space) if self._stage.spec.keeps_on_host else kept
