"""The pieces of a model's work on a unit, as functions: to be counted, compiled, and measured.

    forward, backward, weights   of the layers of a kind on a stage; W where it is apart
    forward and backward         of all layers of a kind, where a step is one whole
    first, first gradient        before the layers
    last                         after them, with its gradients

They are the engine's own (`pipeline.layers.SplitLayers`), with gradients added to those so far, and, of a
step that is one whole, that step's (`step.run_kind`).

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
from jaxpar.mesh import MeshConfig
from jaxpar.pipeline.layers import SlotArrays, SplitLayers, pick
from jaxpar.pipeline.split import SplitLayer
from jaxpar.planning.compiled import simulated_mesh
from jaxpar.planning.shape import ONE, ModelShapes, StepShape, least_factor
from jaxpar.sharding import Layout, Rules, dims_of, is_variable
from jaxpar.step import run_kind
from jaxpar.trees import add, shape_of, zeros
from jaxpar.work import Amount, amount, collectives_of

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
BOTH = "forward and backward"
FIRST, FIRST_GRADIENT, LAST = "first", "first gradient", "last"


class Unit:
    """A model's work on t time steps of b rows.

    Attributes:
      block, x: shapes of a unit's part of the batch, and of what goes from layer to layer.
      kinds: each kind of layer in its parts.
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
          splits: whether W is taken apart, where it can be.
          mesh: that it is laid out on; all devices but those of `tensor`, and of `stage` where the head is
            shared, do the same. None: one device.
          rules: how parameters lie while a step computes.
        """
        self.model, self.t, self.b, self.splits = model, t, b, splits
        self.mesh = simulated_mesh(ONE) if mesh is None else mesh
        self.rules = model.task.rules if rules is None else rules
        self.shares_head, layout = shares_head, model.layout
        self.outer_model = layout.abstract_model(dict(self.mesh.shape))
        self.outer = layout.outer(self.outer_model)
        self.block = jax.tree.map(self._cut, layout.batch)
        self.key: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        self.functions = layout.layer_functions()
        self.x: Any = jax.tree.map(shape_of, jax.eval_shape(self._first, *self._of_first()))
        at = self._at(self.block, self.key)._replace(key=jax.random.key(0))
        self.kinds = [
            SplitLayer(function, _row(p), _row(f), _row(c), self.x, at, splits=splits)
            for function, p, f, c in zip(self.functions, *self._of_layers(1), strict=True)
        ]

    # ---- the pieces: functions of what they change in place (), and of other arrays ----

    def pieces(self, kind: int | None = None, rows: int = 1) -> dict[str, tuple[Any, ...]]:
        """By name a function (changed, *rest) -> (changed, results), and the shapes of its arguments.

        Args:
          kind: of the layers; None gives what is before and after all layers.
          rows: layers of the kind.
        """
        if kind is None:
            leaves, frozen, block, key = self._of_first()
            first: dict[str, tuple[Any, ...]] = {
                FIRST: (lambda _, *args: ((), self._first(*args)), (), leaves, frozen, block, key)
            }
            if leaves:
                first[FIRST_GRADIENT] = (self._first_gradient, leaves, *self._of_first(), self.x)
            return {**first, LAST: (self._last, *self._of_last())}
        params, frozen, carry = ((trees[kind],) for trees in self._of_layers(rows))
        split, where = self.kinds[kind], (self.block, self.key)
        stacked = functools.partial(_stacked, rows)
        saved = [[stacked(leaf) for leaf in split.saved]]
        later = [[stacked(leaf) for leaf in split.later]]
        layers = functools.partial(self._layers, kind, rows)

        def forward(_, params, frozen, carry, x, block, key):
            made, slots, at = layers(params, frozen, block, key)
            return (), made.forward(params, frozen, carry, x, at, slots)

        def backward(grads, params, frozen, saved, d_carry, dy, block, key):
            made, slots, _ = layers(params, frozen, block, key)
            made.kinds = [split]  # by which the shapes of what is saved are
            prepared = tuple(zip(params, frozen, strict=True))
            own = ((),) if split.has_weights else grads
            own, *rest = made.backward(prepared, saved, d_carry, dy, own, slots)
            return grads if split.has_weights else own, rest

        def weights(grads, params, frozen, saved, later, block, key):
            made, slots, _ = layers(params, frozen, block, key)
            made.kinds = made._weights = [split]

            def kept(place):
                needed = [pick(saved[0][n], place) for n in split.needed]
                return needed, [pick(leaf, place) for leaf in later[0]]

            prepared = (params[0], frozen[0])
            return (made.weights(0, prepared, kept, grads[0], slots.layer, (0, rows)),), ()

        grads = params
        pieces = {
            FORWARD: (forward, (), params, frozen, carry, self.x, *where),
            BACKWARD: (backward, grads, params, frozen, saved, carry, self.x, *where),
        }
        if split.has_weights:
            pieces[WEIGHTS] = (weights, grads, params, frozen, saved, later, *where)
        return pieces

    def at_once(self, kind: int, rows: int) -> tuple[Any, ...]:
        """`BOTH`, likewise."""
        params, frozen, carry = (trees[kind] for trees in self._of_layers(rows))

        def both(_, params, frozen, carry, x, dy, block, key):
            def run(params, x):
                own, at = (params, frozen, carry), self._at(block, key)
                unroll = self.model.layout.unroll
                return run_kind(unroll, self.functions[kind], own, x, at, range(rows))[::-1]

            y, vjp, after = jax.vjp(run, params, x, has_aux=True)
            return (), (y, after, vjp(dy))

        return both, (), params, frozen, carry, self.x, self.x, self.block, self.key

    def forward_of_all(self, params: Any, frozen: Any, carry: Any, x: Any, block: Any, key: Any):
        """Layers of all kinds, one of each, or two if there is one kind; arguments as `all_layers`."""
        is_one_kind = len(self.kinds) == 1
        order = jnp.arange(2 if is_one_kind else len(self.kinds))
        kinds, places = order, jnp.zeros_like(order)
        if is_one_kind:
            kinds, places = places, kinds
        at, slots = self._at(block, key), SlotArrays(order, kinds, places)
        made = SplitLayers(
            self.functions, params, frozen, carry, x, at, has_empty_slots=False, splits=self.splits
        )
        return made.forward(params, frozen, carry, x, at, slots)

    def all_layers(self) -> tuple[Any, ...]:
        """Shapes of what `forward_of_all` takes."""
        trees = self._of_layers(2 if len(self.kinds) == 1 else 1)
        return (*(tuple(tree) for tree in trees), self.x, self.block, self.key)

    def _layers(self, kind: int, rows: int, params: Any, frozen: Any, block: Any, key: Any):
        """Those of a kind, in slots, and where they are."""
        at, order = self._at(block, key), jnp.arange(rows)
        carry = (zeros(self._of_layers(rows)[2][kind]),)
        made = SplitLayers(
            self.functions[kind : kind + 1],
            *(params, frozen, carry, zeros(self.x), at),
            has_empty_slots=False,
            splits=self.splits,
        )
        return made, SlotArrays(order, jnp.zeros_like(order), order), at

    def _first(self, leaves: Any, frozen: Any, block: Any, key: Any) -> Any:
        model = self.outer.model(self.outer.first, leaves, self.outer.first_frozen, frozen)
        return model.first(block, self._at(block, key))

    def _first_gradient(self, grads: Any, leaves: Any, frozen: Any, block: Any, key: Any, dx: Any):
        outer, at = self.outer, self._at(block, key)
        model = outer.model(outer.first, leaves, outer.first_frozen, frozen)
        if hasattr(model, "add_first_gradient"):
            state = model.add_first_gradient(outer.as_state(outer.first, grads), dx, block, at)
            return outer.from_state(state), ()
        _, vjp = jax.vjp(lambda leaves: self._first(leaves, frozen, block, key), leaves)
        return add(grads, vjp(dx)[0]), ()

    def _last(self, grads: Any, leaves: Any, frozen: Any, y: Any, block: Any, key: Any):
        outer, at = self.outer, self._at(block, key)

        def loss(leaves, y):
            model = outer.model(outer.last, leaves, outer.last_frozen, frozen)
            sums = (model.last_part if self.shares_head else model.last)(y, block, at)
            return jax.tree.leaves(sums)[0], sums

        (_, sums), (parts, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(leaves, y)
        return add(grads, parts), (sums, dy)

    # ---- their arguments ----

    def _of_first(self) -> tuple[Any, ...]:
        return (*self._of_outer(self.outer.first, self.outer.first_frozen), self.block, self.key)

    def _of_last(self) -> tuple[Any, ...]:
        leaves, frozen = self._of_outer(self.outer.last, self.outer.last_frozen)
        return leaves, leaves, frozen, self.x, self.block, self.key

    def _of_outer(self, numbers: Sequence[int], frozen_numbers: Sequence[int]) -> Any:
        _, params, frozen = self.model.layout.split(self.outer_model)
        found = []
        for tree, own in ((params, numbers), (frozen, frozen_numbers)):
            leaves = jax.tree.leaves(tree, is_leaf=is_variable)
            found.append(tuple(self._placed(leaves[n], leaves[n].shape).get_value() for n in own))
        return found

    def _of_layers(self, rows: int) -> tuple[list[Any], ...]:
        """Parameters, frozen ones and carry of every kind, in stacks of so many rows."""
        layout = self.model.layout

        def stacks(trees):
            def placed(variable):
                return self._placed(variable, (rows, *variable.shape[1:]))

            return [jax.tree.map(placed, tree, is_leaf=is_variable) for tree in trees]

        carries = [
            jax.tree.map(
                lambda v: self._placed(v, (rows, self.b, *v.shape[2:])).get_value(),
                tree,
                is_leaf=is_variable,
            )
            for tree in self.model.carry_trees
        ]
        return (
            stacks(layout.of_layers(layout.params)),
            stacks(layout.of_layers(layout.frozen)),
            carries,
        )

    def _placed(self, variable: Any, shape: tuple[int, ...]) -> Any:
        """A variable of that shape, split over `tensor`, and over `stage` if the head is."""
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
        if self.model.layout.time_major and len(shape) > 1:
            shape[:2] = self.t if shape[1] > 1 else 1, self.b
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    def _at(self, block: Any, key: Any) -> At:
        zero = jnp.int32(0)
        is_shape = isinstance(key, jax.ShapeDtypeStruct)
        return At(
            *(zero, zero, zero),
            None if is_shape else jax.random.wrap_key_data(key),
            block,
            Layout(self.mesh, self.rules, (DATA, STAGE)) if self.mesh.size > 1 else anywhere,
            self.model.layout.time_major,
        )

    def spread(self, piece: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A piece as all devices of the mesh run it, split over `tensor` by the compiler; and its shapes.

        Args:
          piece: of `pieces`; that after the layers, where the stages share it.
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
            if self.model.layout.time_major and leaf.ndim > 1:
                leaf = leaf.swapaxes(0, 1)
            return leaf[tuple(map(slice, shape.shape))]

        return jax.tree.map(cut, self.block, self.model.task.example_batch())


def _over_stages(leaf: Any) -> P:
    return P(*(STAGE if STAGE in (axes or ()) else None for axes in leaf.sharding.spec))


class Facts(NamedTuple):
    """What a unit has to do and to keep, as numbers.

    Attributes:
      x: bytes of what goes from layer to layer; carry: of a layer of every kind.
      saved: for every kind the bytes of each array that a layer keeps for its backward pass.
      first_saved: bytes of what is kept before the layers, where a step is one whole.
      shared_head: bytes of every collective over the stages of a head that they share, by its number and
        operation.
      amounts: of every piece, by (its name, the number of its kind, -1 outside of the layers).
    """

    x: float
    carry: tuple[float, ...]
    saved: tuple[tuple[float, ...], ...]
    first_saved: float
    shared_head: dict[tuple[int, str], float]
    amounts: dict[tuple[str, int], Amount]


def measure_facts(model: ModelShapes, t: int | None, b: int, splits: bool) -> Facts:
    """Of a unit, on one device, traced for it."""
    unit = Unit(model, t, b, splits=splits)
    amounts = {
        (name, -1 if kind is None else kind): amount(*piece)
        for kind in (None, *range(len(unit.kinds)))
        for name, piece in unit.pieces(kind).items()
    }
    saved = tuple(tuple(map(_bytes, (*kind.saved, *room(kind)))) for kind in unit.kinds)
    carries = tuple(_bytes_of(tree) for tree in unit._of_layers(1)[2])
    leaves, *rest = unit._of_first()
    first_saved = jax.eval_shape(
        lambda *args: jax.vjp(lambda x: unit._first(x, *args[1:]), args[0])[1], leaves, *rest
    )
    first_bytes = max(_bytes_of(first_saved) - _bytes_of(leaves), 0.0)  # weights are no copies
    sent = {}
    if model.can_share_head:
        mesh = simulated_mesh(MeshConfig(stage=2))
        shared = Unit(model, t, b, splits=splits, mesh=mesh, shares_head=True)
        function, shapes = shared.spread(shared.pieces()[LAST])
        found = collectives_of(function, *shapes)
        sent = {(number, op): size for number, (op, size) in enumerate(found)}
    return Facts(_bytes_of(unit.x), carries, saved, first_bytes, sent, amounts)


def room(kind: SplitLayer) -> list[Any]:
    """Shapes of what B hands to W, beyond the places of what was saved."""
    pairs = zip(kind.later, kind.places, strict=True)
    return [leaf for leaf, place in pairs if place >= len(kind.saved)]


# Numbers of a unit are sums of products of its steps and rows. Four units of such sizes tell them for all,
# and a fifth whether they do.
_STEPS, _ROWS, _FIFTH = (4, 6), (3, 5), (9, 7)


@functools.lru_cache(maxsize=4096)
def facts_of(model: ModelShapes, t: int | None, b: int, splits: bool) -> Facts:
    """Of a unit of any size: from a few that were traced, or, where numbers grow otherwise, traced."""
    known = _corners(model, splits)
    return measure_facts(model, t, b, splits) if known is None else _between(known, t, b)


@functools.lru_cache(maxsize=64)
def _corners(model: ModelShapes, splits: bool) -> list[Facts] | None:
    """The facts of units of `_STEPS` and `_ROWS`; None if others do not follow from them."""
    has_time = model.layout.num_steps is not None
    steps, fifth = (_STEPS, _FIFTH) if has_time else ((None,), (None, _FIFTH[1]))
    try:
        known = [measure_facts(model, t, b, splits) for t in steps for b in _ROWS]
        checked = measure_facts(model, *fifth, splits)
        expected = _between(known, *fifth)
    except (TypeError, ValueError):  # a model for its own number of time steps alone
        return None
    exact, live = (
        [
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(part(f))])
            for f in (checked, expected)
        ]
        for part in (_without_live, _most_alive)
    )
    # What is alive is a sum of the larger of two numbers, here and there.
    return known if np.allclose(*exact, rtol=1e-9) and np.allclose(*live, rtol=0.02) else None


def _without_live(facts: Facts) -> Any:
    return facts._replace(amounts={key: each[:3] for key, each in facts.amounts.items()})


def _most_alive(facts: Facts) -> list[float]:
    return [max(facts.amounts[key].live) for key in sorted(facts.amounts)]


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
      x: from layer to layer.
      saved: for every kind, each array that a layer keeps.
    """

    x: bool
    saved: tuple[tuple[bool, ...], ...]


def is_split(step: StepShape) -> Split:
    """As the compiler lays them out, in the forward pass of a small unit on few devices."""
    return _split_of(step.model, least_factor(step.tensor), step.splits_weights)


@functools.lru_cache(maxsize=64)
def _split_of(model: ModelShapes, n: int, splits: bool) -> Split:
    layout = model.layout
    if not layout.kinds:
        return Split(False, ())
    t = layout.num_steps and min(layout.num_steps, _STEPS[1])
    unit = Unit(model, t, _ROWS[0], splits=splits, mesh=simulated_mesh(MeshConfig(tensor=n)))
    compiled = jax.jit(unit.forward_of_all).lower(*unit.all_layers()).compile()
    _, y, saved = compiled.output_shardings
    cut = [tuple(not where.is_fully_replicated for where in leaves) for leaves in saved]
    more = [
        (*known, *[any(known)] * len(room(kind)))
        for kind, known in zip(unit.kinds, cut, strict=True)
    ]
    return Split(any(not where.is_fully_replicated for where in jax.tree.leaves(y)), tuple(more))


def _row(stacked: Any) -> Any:
    """Shapes of one row."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)


def _stacked(rows: int, leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype)


def _bytes(leaf: Any) -> float:
    return float(np.prod(leaf.shape) * leaf.dtype.itemsize)


def _bytes_of(tree: Any) -> float:
    return sum(map(_bytes, jax.tree.leaves(tree)))
