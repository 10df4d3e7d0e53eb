"""What is kept of a unit between its forward and its backward pass, and between B and W.

    Residuals   what the layers save; B hands to W what lies in the same slot
    Inputs      x and carry alone (remat), on the device or on the host: the residuals are made again

Under remat neither y nor residuals outlive F: before B `recall` runs the forward pass again from x and carry,
and W is not apart, since what it needs would have to be kept. With remat_keeps="carries" (segments, see
`loop`) residuals are kept as without remat, of one segment's units.

Both lie in buffers [slots + 1, ...]: what is written to slot -1 lies in the last one, which nobody reads.

Legend: r rows of a kind's stack in a group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxpar.base.trees import add, shape_of, vary_like, zeros
from jaxpar.pipeline.split import SplitLayer
from jaxpar.pipeline.stage import Stage, Unit, corner
from jaxpar.pipeline.walk import pick, put, stack


class Residuals:
    """The layers of a stage as forward, B and W, with what passes between the three in buffers.

    What the backward pass needs of the parameters is not among it.

    Attributes:
      kinds: each kind of layer in its parts.
      has_weights: whether W of any kind is apart.
    """

    def __init__(self, stage: Stage, carry: Any, *, splits: bool):
        """Traces a layer of every kind, to learn what it saves.

        Args:
          carry: of the stage.
          splits: take W, the gradients of weights, out of the backward pass where it is separable.
        """
        self._stage = stage
        params, frozen = stage.params.layers, stage.frozen.layers
        stacked = params, frozen
        if stage.spec.unroll:
            stacked = tuple(tuple(map(stack, tree)) for tree in stacked)
        zero = jnp.int32(0)
        before = stage.read_carry(carry, zero, zero)
        x = vary_like(zeros(stage.x_shape), stage.here)
        self._inputs = jax.tree.map(shape_of, (before, x))
        at = stage.at(Unit(zero))
        self.kinds = [
            SplitLayer(
                layer, pick(p, 0), pick(f, 0), pick(c, 0), (x, stage.no_sums), at, splits=splits
            )
            for layer, p, f, c in zip(stage.layers, *stacked, before, strict=True)
        ]
        self.has_weights = any(kind.has_weights for kind in self.kinds)
        # As the backward pass takes the weights.
        self._prepared = tuple(zip(params, frozen, strict=True))
        if stage.spec.unroll:
            own = zip(*params, *frozen, strict=True)
            self._prepared = ([self.kinds[0].prepare(*row) for row in own],)

    # ---- buffers ----

    @property
    def shapes(self) -> Any:
        """Of what is kept of a unit: for every kind leaves [r, ...], or a list of rows if written out."""

        def of_kind(kind: SplitLayer, rows: jax.Array) -> list[Any]:
            if self._stage.spec.unroll:
                return [kind.saved_and_room] * len(rows)
            r = len(rows) // self._stage.num_groups
            leaves = kind.saved_and_room
            return [jax.ShapeDtypeStruct((r, *leaf.shape), leaf.dtype) for leaf in leaves]

        return tuple(map(of_kind, self.kinds, self._stage.rows))

    def placed(self, kept: Any) -> Any:
        """What is kept, in the memory where it is kept."""
        return kept

    def write(self, buffers: Any, saved: Any, slot: ArrayLike) -> Any:
        """Puts what a forward saved into a slot; the room behind it, for W, stays as it is."""

        def of_layers(buffers, saved):
            count = len(saved)
            return [*write(list(buffers[:count]), list(saved), slot), *buffers[count:]]

        return self._of_kinds(of_layers, buffers, saved)

    def write_for_weights(self, buffers: Any, later: Any, slot: ArrayLike) -> Any:
        """Puts what W needs of B into its places in a slot; see `SplitLayer.places`."""
        if not self.has_weights:
            return buffers

        def of_layers(buffers, later, places):
            buffers = list(buffers)
            for place, leaf in zip(places, later, strict=True):
                buffers[place] = write(buffers[place], leaf, slot)
            return buffers

        return self._of_kinds(of_layers, buffers, later, [kind.places for kind in self.kinds])

    def _of_kinds(self, function: Callable[..., Any], kept: Any, values: Any, *more: Any) -> Any:
        """What a function makes of every kind's buffers; of every row's, if layers are written out."""
        if not self._stage.spec.unroll:
            return tuple(map(function, kept, values, *more))
        own = [each[0] for each in more]
        return ([function(*row, *own) for row in zip(kept[0], values[0], strict=True)],)

    # ---- F, B and W of a unit ----

    def forward(self, unit: Unit, group: Any, carry: Any, x: Any) -> tuple[Any, Any, Any]:
        """The layers of a group: the carry, y, and what is kept."""
        return self._save(unit, group, carry, x)

    def recall(self, buffers: Any, unit: Unit, group: Any, slot: Any) -> tuple[Any, Any]:
        """y of a unit whose backward pass comes, and its residuals; Nones if they lie in its slot."""
        return None, None

    def backward(
        self, buffers: Any, recalled: Any, slot: Any, group: Any, d_carry: Any, dy: Any, grads: Any
    ) -> tuple[Any, Any, Any, Any]:
        """B of a unit: the vector-Jacobian product of `forward`; where W is apart, that of inputs only.

        Args:
          recalled: the unit's residuals, as of `recall`.
          d_carry: cotangent of the carry after the unit.
          dy: cotangent of y.
          grads: gradients of the stage's layers so far, to which those of the parameters are added; () of
            kinds whose W is apart.
        Returns:
          the gradients, the cotangent of the carry before the unit, that of x, and for every kind what W
          needs.
        """
        stage, kinds = self._stage, self.kinds
        _, _, slots = stage.own(group)
        saved = read(buffers, slot) if recalled is None else recalled
        own, prepared = stage.of_group((grads, self._prepared), group)

        def body(kind, grads, d_carry, dy, reads, layer):
            weights, saved = reads
            weights = weights if stage.spec.unroll else kinds[kind].prepare(*weights)
            d_params, d_carry, dx, later = kinds[kind].backward(weights, saved, d_carry, dy)
            return vary_like((add(grads, d_params), d_carry, dx, later), dy)

        later = [kind.later for kind in kinds]
        own, d_carry, dx, later = stage.spec.walk(
            body, dy, (prepared, saved), d_carry, slots, later, sums=own, reverse=True
        )
        return stage.into_group(grads, own, group), d_carry, dx, later

    def weights(self, buffers: Any, slot: Any, group: Any, grads: Any) -> Any:
        """Adds W of a unit to the gradients of the stage's layers, type by type: no order is asked for."""
        return tuple(
            self._weights_of(number, buffers[number], slot, group, own) if kind.has_weights else own
            for number, (kind, own) in enumerate(zip(self.kinds, grads, strict=True))
        )

    def _weights_of(self, number: int, buffers: Any, slot: Any, group: Any, grads: Any) -> Any:
        kind, stage = self.kinds[number], self._stage
        prepared, layer_R = self._prepared[number], stage.rows[number]

        def kept(leaf, place):
            if stage.spec.unroll:
                return read(buffers[place][leaf], slot)
            a = buffers[leaf]
            part = lax.dynamic_slice(a, corner(a, slot, place), (1, 1, *a.shape[2:]))
            return part.reshape(a.shape[2:])

        def of_row(layer, prepare, place, grads):
            def run():
                parts = [[kept(leaf, place) for leaf in own] for own in (kind.needed, kind.places)]
                return add(grads, vary_like(kind.weights(prepare(), *parts), grads))

            if not stage.spec.slots.has_empty_slots:
                return run()
            return lax.cond(layer >= 0, run, lambda: grads)

        if stage.spec.unroll:
            return [
                of_row(layer_R[row], lambda own=own: own, row, grads[row])
                for row, own in enumerate(prepared)
            ]
        count = len(layer_R) // stage.num_groups
        first = group * count

        def body(place, grads):
            row = first + place

            def prepare():
                return kind.prepare(*pick(prepared, row))

            return put(grads, row, of_row(layer_R[row], prepare, place, pick(grads, row)))

        return lax.fori_loop(0, count, body, grads)

    def _save(self, unit: Unit, group: Any, carry: Any, x: Any) -> tuple[Any, Any, Any]:
        """The layers, and their residuals: of every kind leaves [r, ...], or a list of such of rows."""
        stage, kinds = self._stage, self.kinds
        params, frozen, slots = stage.own(group)
        at = stage.at(unit)

        def body(kind, sums, carry, x, reads, layer):
            out = kinds[kind].forward(*reads, carry, x, at._replace(layer=layer))
            return sums, *vary_like(out, x)

        saved = [kind.saved for kind in kinds]
        return stage.spec.walk(body, x, (params, frozen), carry, slots, saved)[1:]


class Inputs(Residuals):
    """As `Residuals`, but a unit's carry and x are all that is kept: its forward pass runs again before B."""

    @property
    def shapes(self) -> Any:
        """Of a unit's carry and x."""
        return self._inputs

    def placed(self, kept: Any) -> Any:
        """What is kept, in the memory where it is kept."""
        return self._move(kept, jax.memory.Space.Host)

    def write(self, buffers: Any, saved: Any, slot: ArrayLike) -> Any:
        """Puts a unit's carry and x into a slot."""
        return write(buffers, self.placed(saved), slot)

    def forward(self, unit: Unit, group: Any, carry: Any, x: Any) -> tuple[Any, Any, Any]:
        """The layers of a group: the carry, y, and what is kept."""
        after, y = self._stage.forward(unit, group, carry, x)
        return after, y, (carry, x[0])

    def recall(self, buffers: Any, unit: Unit, group: Any, slot: Any) -> tuple[Any, Any]:
        """y of a unit whose backward pass comes, and its residuals; sums of its layers were added before."""
        stage = self._stage
        carry, x = self._move(read(buffers, slot), jax.memory.Space.Device)

        def run():
            _, (y, _), residuals = self._save(unit, group, carry, (x, stage.no_sums))
            return y, residuals

        out = jax.eval_shape(run)
        return lax.cond(
            jnp.asarray(unit.number) >= 0,
            lambda: vary_like(run(), stage.here),
            lambda: vary_like(zeros(out), stage.here),
        )

    def _move(self, kept: Any, space: Any) -> Any:
        return jax.device_put(kept, space) if self._stage.spec.keeps_on_host else kept


def what_is_kept(stage: Stage, carry: Any, *, splits: bool) -> Residuals:
    """What the options of a pipeline keep of its units; arguments as of `Residuals`."""
    if stage.spec.remat:
        return Inputs(stage, carry, splits=False)
    return Residuals(stage, carry, splits=splits)


def read(buffers: Any, slot: ArrayLike) -> Any:
    """What lies in one slot of buffers [slots + 1, ...]; anything for slot -1."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, slot, keepdims=False), buffers)


def write(buffers: Any, values: Any, slot: ArrayLike) -> Any:
    """Puts values into one slot of buffers [slots + 1, ...]; slot -1 is the last, which nobody reads."""
    return jax.tree.map(
        lambda a, value: lax.dynamic_update_index_in_dim(
            a, value, jnp.where(jnp.asarray(slot) < 0, a.shape[0] - 1, slot), 0
        ),
        buffers,
        values,
    )


def buffers_of(count: int, shapes: Sequence[Any] | Any, fill: float) -> Any:
    """Buffers of so many slots, and one more, where slot -1 is written."""
    return jax.tree.map(lambda a: jnp.full((count + 1, *a.shape), fill).astype(a.dtype), shapes)
