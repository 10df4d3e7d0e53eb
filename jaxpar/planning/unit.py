"""The pieces of a model's work on a unit, as functions to count, compile and measure.

    forward, backward, weights   of the layers of a kind on a stage; W where it runs apart from B
    forward and backward         of all layers of a kind, where a step is not cut into units
    first, first gradient        before the layers
    last                         after them, with its gradients

They are the engine's own (`pipeline.layers.SplitLayers`), with gradients added to those so far; for a step
that is not cut into units they are that step's (`step.run_kind`).

Legend: t time steps (None if the model has no time), b rows, n devices that layers are split over.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.at import At, anywhere
from jaxpar.axes import DATA, STAGE
from jaxpar.layout import Outer
from jaxpar.mesh import MeshConfig
from jaxpar.model import values
from jaxpar.pipeline.engine import read, write_later, write_saved
from jaxpar.pipeline.layers import SlotArrays, SplitLayers, pick
from jaxpar.pipeline.split import Layer
from jaxpar.planning.compiled import quickest_options, simulated_mesh
from jaxpar.planning.shape import ONE, ModelShapes, Sizes, StepShape, least_factor
from jaxpar.sharding import Constraint, Rules, dims_of, is_variable
from jaxpar.step import run_block, run_kind
from jaxpar.trees import add, shape_of
from jaxpar.work import Amount, amount, collectives_of

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
BOTH = "forward and backward"
FIRST, FIRST_GRADIENT, LAST = "first", "first gradient", "last"


class Unit:
    """A model's work on t time steps of b rows.

    Attributes:
      block, x: shapes of a unit's part of the batch, and of what goes from layer to layer.
      layers: of each kind, split into forward, backward and W.
    """

    def __init__(
        self,
        model: ModelShapes,
        t: int | None,
        b: int,
        *,
        splits: bool,
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        shares_head: bool = False,
    ):
        """Traces it.

        Args:
          splits: whether W runs apart from B, where it can.
          mesh: what it is laid out on; only along `tensor`, and along `stage` where the head is shared, do
            devices differ in what they do. None: one device.
          rules: how parameters are sharded while a step computes.
        """
        self.model, self.t, self.b, self.splits = model, t, b, splits
        self.mesh = simulated_mesh(ONE) if mesh is None else mesh
        self.rules = model.task.rules if rules is None else rules
        self.shares_head, layout = shares_head, model.layout
        self.outer_model = _outer_model(model, tuple(self.mesh.shape.items()))
        self.outer = Outer(layout, self.outer_model)
        self.block = jax.tree.map(self._cut, layout.facts.batch)
        self.key: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        with jax.set_mesh(self.mesh):
            x = jax.eval_shape(self._first, *self._of_first())
        self.x: Any = jax.tree.map(shape_of, x)
        self.layers = [
            self._layers_of(function, *trees)
            for function, *trees in zip(layout.layer_functions(), *self._of_layers(1), strict=True)
        ]

    def _layers_of(self, function: Layer, params: Any, frozen: Any, carry: Any) -> SplitLayers:
        """The layers of a kind, with forward and backward separate."""
        made = list[SplitLayers]()

        def trace(params, frozen, carry, x, block):
            at = self._at(block, jax.random.key_data(jax.random.key(0)))
            own = ((function,), (params,), (frozen,), (carry,), x, at)
            made.append(SplitLayers(*own, has_empty_slots=False, splits=self.splits))

        # Shardings are left out: inside a `shard_map` they are written differently.
        jax.eval_shape(trace, *jax.tree.map(shape_of, (params, frozen, carry, self.x, self.block)))
        return made[0]

    # ---- the pieces: functions of what they change in place, or (), and of other arrays ----

    def pieces(self, kind: int | None = None, rows: int = 1) -> dict[str, tuple[Any, ...]]:
        """By name: a function (changed, *rest) -> (changed, results), then the shapes of its arguments.

        Args:
          kind: number of the kind of layers; None gives what is before and after all layers.
          rows: how many layers of the kind.
        """
        if kind is None:
            leaves, *rest = self._of_first()
            first: dict[str, tuple[Any, ...]] = {
                FIRST: (lambda _, *args: ((), self._first(*args)), (), leaves, *rest)
            }
            if leaves:
                first[FIRST_GRADIENT] = (self._first_gradient, leaves, leaves, *rest, self.x)
            return {**first, LAST: (self._last, *self._of_last())}
        params, frozen, carry = ((trees[kind],) for trees in self._of_layers(rows))
        layers, split = self.layers[kind], self.layers[kind].kinds[0]
        saved, later = (
            [[jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype) for leaf in leaves]]
            for leaves in (split.saved, split.later)
        )

        def slots() -> SlotArrays:
            order = jnp.arange(rows)
            return SlotArrays(order, jnp.zeros_like(order), order)

        def forward(_, params, frozen, carry, x, block, key):
            return (), layers.forward(params, frozen, carry, x, self._at(block, key), slots())

        def backward(grads, params, frozen, saved, d_carry, dy):
            prepared = tuple(zip(params, frozen, strict=True))
            own = ((),) if split.has_weights else grads
            own, *rest = layers.backward(prepared, saved, d_carry, dy, own, slots())
            return grads if split.has_weights else own, rest

        def weights(grads, params, frozen, saved, later):
            def kept(place):
                needed = [pick(saved[0][n], place) for n in split.needed]
                return needed, [pick(leaf, place) for leaf in later[0]]

            own = (params[0], frozen[0]), kept, grads[0], slots().layer, (0, rows)
            return (layers.weights(0, *own),), ()

        pieces = {
            FORWARD: (forward, (), params, frozen, carry, self.x, self.block, self.key),
            BACKWARD: (backward, params, params, frozen, saved, carry, self.x),
        }
        if split.has_weights:
            pieces[WEIGHTS] = (weights, params, params, frozen, saved, later)
        return pieces

    def in_slots(self, kind: int, rows: int, num_slots: int) -> dict[str, tuple[Any, ...]]:
        """`pieces`, with what is kept in slots, as the engine has it: F writes there, and B reads."""
        pieces, split = self.pieces(kind, rows), self.layers[kind].kinds[0]
        forward, _, *of_forward = pieces[FORWARD]
        backward, grads, params, frozen, _, *of_backward = pieces[BACKWARD]
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        buffers = [
            jax.ShapeDtypeStruct((num_slots + 1, rows, *leaf.shape), leaf.dtype)
            for leaf in self.layers[kind].saved[0]
        ]

        def into_slot(buffers, slot, *args):
            _, (carry, y, (saved,)) = forward((), *args)
            return write_saved(buffers, saved, slot), (carry, y)

        def from_slot(changed, slot, params, frozen, *args):
            grads, buffers = changed
            saved = [read(buffers, slot)]
            grads, (*rest, (later,)) = backward(grads, params, frozen, saved, *args)
            return (grads, write_later(buffers, later, split.places, slot)), rest

        return {
            **pieces,
            FORWARD: (into_slot, buffers, slot, *of_forward),
            BACKWARD: (from_slot, (grads, buffers), slot, params, frozen, *of_backward),
        }

    def at_once(self, kind: int, rows: int) -> tuple[Any, ...]:
        """`BOTH`, as in `pieces`: its function, then the shapes of its arguments."""
        params, frozen, carry = (trees[kind] for trees in self._of_layers(rows))
        function = self.model.layout.layer_functions()[kind]

        def both(_, params, frozen, carry, x, dy, block, key):
            def run(params, x):
                own, at = (params, frozen, carry), self._at(block, key)
                unroll = self.model.facts.unroll
                return run_kind(unroll, function, own, x, at, range(rows))[::-1]

            y, vjp, after = jax.vjp(run, params, x, has_aux=True)
            return (), (y, after, vjp(dy))

        return both, (), params, frozen, carry, self.x, self.x, self.block, self.key

    def whole(self) -> tuple[Any, ...]:
        """The whole model with gradients, for a step not cut into units, on one device; as in `pieces`."""
        layout, layers = self.model.layout, self.model.layout.layer_functions()

        def run(_, params, frozen, carry, block, key):
            def loss(params):
                at = self._at(block, key)
                carry_, sums = run_block(layout, layers, params, (), frozen, carry, at)
                return sums.loss, (carry_, sums)

            return (), jax.value_and_grad(loss, has_aux=True)(params)

        carry = [
            jax.tree.map(
                lambda a: jax.ShapeDtypeStruct((len(a), self.b, *a.shape[2:]), a.dtype), tree
            )
            for tree in map(values, self.model.carry_trees)
        ]
        return run, (), layout.params, layout.frozen, carry, self.block, self.key

    def _first(self, leaves: Any, frozen: Any, block: Any, key: Any) -> Any:
        return self.outer.run_first(leaves, frozen, self._at(block, key))

    def _first_gradient(self, grads: Any, leaves: Any, frozen: Any, block: Any, key: Any, dx: Any):
        if hasattr(self.outer_model, "add_first_gradient"):
            at = self._at(block, key)
            return self.outer.add_first_gradient(grads, leaves, frozen, at, dx), ()
        _, vjp = jax.vjp(lambda leaves: self._first(leaves, frozen, block, key), leaves)
        return add(grads, vjp(dx)[0]), ()

    def _last(self, grads: Any, leaves: Any, frozen: Any, y: Any, block: Any, key: Any):
        def loss(leaves, y):
            at = self._at(block, key)
            sums = self.outer.run_last(leaves, frozen, y, at, is_part=self.shares_head)
            return jax.tree.leaves(sums)[0], sums

        (_, sums), (parts, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(leaves, y)
        return add(grads, parts), (sums, dy)

    # ---- their arguments ----

    def _of_first(self) -> tuple[Any, ...]:
        return (*self._of_outer(self.outer.first), self.block, self.key)

    def _of_last(self) -> tuple[Any, ...]:
        leaves, frozen = self._of_outer(self.outer.last)
        return leaves, leaves, frozen, self.x, self.block, self.key

    def _of_outer(self, numbers: Sequence[Sequence[int]]) -> Any:
        found = []
        for tree, own in zip(self.outer.states, numbers, strict=True):
            leaves = jax.tree.leaves(tree, is_leaf=is_variable)
            found.append(tuple(self._placed(leaves[n], leaves[n].shape).get_value() for n in own))
        return found

    def _of_layers(self, rows: int) -> tuple[list[Any], ...]:
        """Parameters, frozen parameters and carry of every kind, in stacks of `rows` rows."""
        layout = self.model.layout

        def stacks(trees, *dims):
            def placed(variable):
                return self._placed(variable, (rows, *dims, *variable.shape[1 + len(dims) :]))

            return [jax.tree.map(placed, tree, is_leaf=is_variable) for tree in trees]

        return (
            stacks(layout.of_layers(layout.params)),
            stacks(layout.of_layers(layout.frozen)),
            [values(tree) for tree in stacks(self.model.carry_trees, self.b)],
        )

    def _placed(self, variable: Any, shape: tuple[int, ...]) -> Any:
        """A variable of this shape, split over `tensor`, and over `stage` if the head is."""
        manual = () if self.shares_head else (STAGE,)
        split = [self.rules.axes_of(dim) if dim else () for dim in dims_of(variable)]
        spec = P(*(tuple(a for a in axes if a not in (DATA, *manual)) or None for axes in split))
        where = NamedSharding(self.mesh, spec)
        return variable.replace(jax.ShapeDtypeStruct(shape, variable.dtype, sharding=where))

    def _cut(self, leaf: Any) -> Any:
        """A unit's part of an array of the batch, as the model sees it."""
        shape = list(leaf.shape)
        if shape:
            shape[0] = self.b
        if self.model.facts.time_major and len(shape) > 1:
            shape[:2] = self.t if shape[1] > 1 else 1, self.b
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    def _at(self, block: Any, key: Any) -> At:
        zero = jnp.int32(0)
        return At(
            *(zero, zero, zero),
            jax.random.wrap_key_data(key),
            block,
            Constraint(self.mesh, self.rules, (DATA, STAGE)) if self.mesh.size > 1 else anywhere,
            self.model.facts.time_major,
        )

    def spread(self, piece: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A piece as all devices of the mesh run it, split over `tensor` by the compiler; and its shapes.

        Args:
          piece: one of `pieces`; `LAST`, if the stages share the head.
        """
        function, *shapes = piece
        whole: tuple[Any, Any] = P(), P()
        if self.shares_head:
            leaves, frozen = (jax.tree.map(_over_stages, tree) for tree in shapes[1:3])
            whole = (leaves, leaves, frozen, P(), P(), P()), (leaves, P())
        spread = jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names={DATA, STAGE},
            in_specs=whole[0],
            out_specs=whole[1],
            check_vma=self.shares_head,
        )
        return spread, tuple(shapes)

    def real_block(self) -> Any:
        """A unit's part of an example batch, as the model sees it."""

        def cut(shape, leaf):
            leaf = np.asarray(leaf)
            if leaf.ndim != len(shape.shape) or not leaf.ndim:
                return leaf
            if self.model.facts.time_major and leaf.ndim > 1:
                leaf = leaf.swapaxes(0, 1)
            return leaf[tuple(map(slice, shape.shape))]

        return jax.tree.map(cut, self.block, self.model.task.example_batch())


@functools.lru_cache(maxsize=64)
def _outer_model(model: ModelShapes, sizes: Sizes) -> Any:
    """What is before and after the layers, as shapes, the way devices on such a mesh use it."""
    return model.layout.abstract_model(dict(sizes))


def _over_stages(leaf: Any) -> P:
    return P(*(STAGE if STAGE in (axes or ()) else None for axes in leaf.sharding.spec))


class Facts(NamedTuple):
    """What a unit computes and keeps, as numbers.

    Attributes:
      x: bytes of what goes from layer to layer.
      carry: for every kind, bytes of one layer's carry.
      saved: for every kind, bytes of each array that a layer keeps for its backward pass.
      whole: bytes alive at every operation of a step that is not cut into units; () if W runs apart from B.
      shared_head: (number, operation) -> bytes of every collective over the stages that share the head.
      amounts: (name, number of the kind, or -1 outside of the layers) -> what the piece does and holds.
    """

    x: float
    carry: tuple[float, ...]
    saved: tuple[tuple[float, ...], ...]
    whole: tuple[float, ...]
    shared_head: dict[tuple[int, str], float]
    amounts: dict[tuple[str, int], Amount]


def measure_facts(model: ModelShapes, t: int | None, b: int, splits: bool) -> Facts:
    """The facts of a unit on one device, by tracing it."""
    unit = Unit(model, t, b, splits=splits)
    amounts = {
        (name, -1 if kind is None else kind): amount(*piece)
        for kind in (None, *range(len(unit.layers)))
        for name, piece in unit.pieces(kind).items()
    }
    saved = tuple(tuple(map(_bytes, layers.saved[0])) for layers in unit.layers)
    carries = tuple(_bytes_of(tree) for tree in unit._of_layers(1)[2])
    sent = {}
    if model.facts.can_share_head:
        mesh = simulated_mesh(MeshConfig(stage=2))
        shared = Unit(model, t, b, splits=splits, mesh=mesh, shares_head=True)
        function, shapes = shared.spread(shared.pieces()[LAST])
        found = collectives_of(function, *shapes)
        sent = {(number, op): size for number, (op, size) in enumerate(found)}
    whole = () if splits else amount(*unit.whole()).live
    return Facts(_bytes_of(unit.x), carries, saved, whole, sent, amounts)


# Numbers of a unit are bilinear in its steps and rows. Four units of these sizes determine them for all, and
# a fifth checks that they do.
_STEPS, _ROWS, _FIFTH = (4, 6), (3, 5), (9, 7)


@functools.lru_cache(maxsize=4096)
def facts_of(model: ModelShapes, t: int | None, b: int, splits: bool) -> Facts:
    """The facts of a unit of any size: interpolated from a few that were traced, or else traced itself."""
    known = _corners(model, splits)
    return measure_facts(model, t, b, splits) if known is None else _between(known, t, b)


@functools.lru_cache(maxsize=64)
def _corners(model: ModelShapes, splits: bool) -> list[Facts] | None:
    """The facts of units of `_STEPS` and `_ROWS`; None if others do not follow from them."""
    has_time = model.facts.num_steps is not None
    steps, fifth = (_STEPS, _FIFTH) if has_time else ((None,), (None, _FIFTH[1]))
    try:
        known = [measure_facts(model, t, b, splits) for t in steps for b in _ROWS]
        checked, expected = measure_facts(model, *fifth, splits), _between(known, *fifth)
    except (TypeError, ValueError):  # a model that takes only its own number of time steps
        return None

    def numbers(facts: Facts) -> tuple[list[float], list[float]]:
        amounts = [facts.amounts[key] for key in sorted(facts.amounts)]
        rest = facts._replace(amounts={n: each[:3] for n, each in enumerate(amounts)})
        return jax.tree.leaves(rest), [max(each.live) for each in amounts]

    exact, live = zip(numbers(checked), numbers(expected), strict=True)
    # What is alive is, in places, the larger of two numbers, so this is approximate.
    return known if np.allclose(*exact, rtol=1e-9) and np.allclose(*live, rtol=0.02) else None


def _between(known: Sequence[Facts], t: int | None, b: int) -> Facts:
    at_b = (b - _ROWS[0]) / (_ROWS[1] - _ROWS[0])
    rows = [
        jax.tree.map(lambda low, high: low + (high - low) * at_b, *pair)
        for pair in zip(known[::2], known[1::2], strict=True)
    ]
    if t is None:
        return rows[0]
    at_t = (t - _STEPS[0]) / (_STEPS[1] - _STEPS[0])
    return jax.tree.map(lambda low, high: low + (high - low) * at_t, *rows)


class Split(NamedTuple):
    """Which arrays of a unit are split over `tensor`.

    Attributes:
      x: what goes from layer to layer.
      saved: for every kind, each array that a layer keeps.
    """

    x: bool
    saved: tuple[tuple[bool, ...], ...]


def is_split(step: StepShape) -> Split:
    """As the compiler splits them in a small unit on few devices."""
    return _split_of(step.model, least_factor(step.tensor), step.splits_weights)


@functools.lru_cache(maxsize=64)
def _split_of(model: ModelShapes, n: int, splits: bool) -> Split:
    t = model.facts.num_steps and min(model.facts.num_steps, _STEPS[1])
    unit = Unit(model, t, n * _ROWS[0], splits=splits, mesh=simulated_mesh(MeshConfig(tensor=n)))
    x, saved = list[bool](), list[list[bool]]()
    for kind, layers in enumerate(unit.layers):
        split, pieces = layers.kinds[0], unit.pieces(kind, 2)
        _, y, kept = _cuts_in(unit, pieces[FORWARD])
        room = [n for n, place in enumerate(split.places) if place >= len(split.saved)]
        if room:
            *_, later = _cuts_in(unit, pieces[BACKWARD])
            kept += [later[n] for n in room]
        x += y
        saved.append(kept)
    # Arrays of one shape are split alike.
    like_x = {leaf.shape for leaf in jax.tree.leaves(unit.x) if any(x)}
    cut_like = [
        like_x | {leaf.shape for leaf, is_cut in zip(layers.saved[0], cut, strict=True) if is_cut}
        for cut, layers in zip(saved, unit.layers, strict=True)
    ]
    return Split(
        any(x),
        tuple(
            tuple(leaf.shape in shapes for leaf in layers.saved[0])
            for shapes, layers in zip(cut_like, unit.layers, strict=True)
        ),
    )


def _cuts_in(unit: Unit, piece: tuple[Any, ...]) -> list[list[bool]]:
    """For every array of each of a piece's results, whether the compiler splits it."""
    function, shapes = unit.spread(piece)
    compiled = jax.jit(function).lower(*shapes).compile(quickest_options())
    _, results = compiled.output_shardings
    return [[not where.is_fully_replicated for where in jax.tree.leaves(part)] for part in results]


def _bytes(leaf: Any) -> float:
    return float(np.prod(leaf.shape) * leaf.dtype.itemsize)


def _bytes_of(tree: Any) -> float:
    return sum(map(_bytes, jax.tree.leaves(tree)))
