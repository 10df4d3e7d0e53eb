"""The model as pure functions of its variables: `first`, each kind of layer, and `last` or `predict`.

    Parts     of a partition's model: its layers by kind, their first carry, what follows the layers
    Outer     the variables before and after the stack, as flat lists that the pipeline can take

The way through the model (`forward`), the check of independent rows and the planner see a model through these
alone.
"""

import functools
from collections.abc import Callable, Container, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import STAGE
from jaxpar.base.checks import require
from jaxpar.base.trees import add, shape_of, vary_like, vary_over, zeros
from jaxpar.base.types import (
    Activations,
    Arrays,
    Carry,
    Cotangents,
    Function,
    Module,
    Outputs,
    Params,
    Shapes,
    Specs,
)
from jaxpar.model.abstract import abstract
from jaxpar.model.facts import ModelFacts
from jaxpar.model.model import Sums, checked_outputs, checked_sums, overrides, run_layer
from jaxpar.model.outer import (
    STACK,
    Call,
    Uses,
    add_rows,
    call_as_it_is,
    held_call,
    modules,
    owner,
    part_call,
    size_of,
    with_calls,
)
from jaxpar.model.tracing import flatten
from jaxpar.partition.partition import Partition
from jaxpar.partition.storage import Storage
from jaxpar.trace.bound import bound, in_bound
from jaxpar.trace.counts import used_inputs
from jaxpar.trace.varying import on_any_mesh


class Parts:
    """A partition's model in its parts, each a pure function of variables.

    Attributes:
      storage: where a state holds the variables.
      partition, facts: of the model.
      casts_derivatives: whether derivatives are cast on a mesh; see `trace.varying.on_any_mesh`.
    """

    def __init__(self, storage: Storage, *, casts_derivatives: bool = False):
        """Makes nothing."""
        self.storage, self.partition = storage, storage.partition
        self.facts: ModelFacts = storage.facts
        self.casts_derivatives = casts_derivatives

    @classmethod
    def of(cls, partition: Partition) -> "Parts":
        """The parts of a partition's model."""
        return cls(Storage(partition))

    def with_cast_derivatives(self) -> "Parts":
        """These parts, for a model that JAX cannot differentiate on a mesh."""
        return Parts(self.storage, casts_derivatives=True)

    def on_mesh(self, what: str, function: Function) -> Function:
        """A part as a function for a `shard_map`; see `trace.varying.on_any_mesh`."""
        return on_any_mesh(what, function, casts_derivatives=self.casts_derivatives)

    # ---- the whole model ----

    def abstract_model(self) -> Module:
        """The model of shapes, its layers in the slots of stacks."""
        return abstract(self.storage.merge, self.storage.params, self.storage.frozen)

    def drawn(self, params: nnx.State, frozen: nnx.State, key: jax.Array) -> nnx.State:
        """The parameters with what the model draws of them for a step; see `Model.draw`."""
        model = self.storage.merge(params, frozen)
        if not overrides(model, "draw"):
            return params
        return self.storage.replaced(params, self.facts.split(model.draw(key))[1])

    def initial_carry(self, params: nnx.State, frozen: nnx.State) -> dict[str, Carry]:
        """The state of the layers at the start, as variables by kind."""
        return self.storage.merge(params, frozen).layers.initial_carry(self.facts.batch_size)

    # ---- layers ----

    def of_layers(self, state: nnx.State) -> tuple[nnx.State, ...]:
        """For each kind its variables of a tree with layers in stacks; maybe empty."""
        stack = state.get(STACK, {})
        return tuple(nnx.State(stack.get(kind, {})) for kind in self.facts.kinds)

    @property
    def of_row(self) -> tuple[tuple[Shapes, ...], ...]:
        """Trained and other variables of one layer of each kind, of shapes."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype),
            (self.of_layers(self.storage.params), self.of_layers(self.storage.frozen)),
        )

    def layer_functions(self, *, in_units: bool = True) -> tuple[Callable[..., tuple], ...]:
        """For each kind (params, frozen, carry, x, at) -> (carry, y), or with sums if layers add any.

        Args:
          in_units: whether x and y are blocks of one shape (`base.padding`).
        """
        functions = [
            functools.partial(self._run_layer, kind, self._graphdef_of(kind))
            for kind in self.facts.kinds
        ]
        if not (in_units and self.facts.traces.padding.width):
            return tuple(functions)
        shapes = (args[2] for _, args in self.facts.traces.layers)
        pairs = zip(functions, shapes, strict=True)
        return tuple(functools.partial(self.run_padded, *pair) for pair in pairs)

    def _graphdef_of(self, kind: str) -> nnx.GraphDef:
        return nnx.graphdef(getattr(self.abstract_model().layers, kind))

    def _run_layer(
        self,
        kind: str,
        graphdef: nnx.GraphDef,
        params: Params,
        frozen: Params,
        carry: Carry,
        x: Activations,
        at: LayerContext,
    ) -> tuple:
        """A kind of layer as a function of its variables; mistakes in it are reported with its name."""

        def call(params: Params, frozen: Params, carry: Carry, x: Activations, at: LayerContext):
            return run_layer(kind, nnx.merge(graphdef, params, frozen), carry, x, at)

        out = self.on_mesh(f"layer {kind}", call)(params, frozen, carry, x, at)
        carry, y, *sums = out
        if not self.facts.traces.adds_sums:
            wrong = f"layer {kind} returns sums for some of its calls only."
            require(not sums, f"{wrong}\nFix: return (carry, y, sums) always.")
            return carry, y
        names = self.facts.traces.sums.metrics  # where any kind adds sums, all do
        return carry, y, sums[0].with_names(names) if sums else self.no_sums

    def run_padded(
        self,
        layer: Callable[..., tuple],
        like: Shapes,
        params: Params,
        frozen: Params,
        carry: Carry,
        block: Activations,
        at: LayerContext,
    ) -> tuple:
        """A layer, as a function of its variables, on a block of one shape (`base.padding`).

        Args:
          like: shapes of the x that the layer takes.
        """
        padding = self.facts.traces.padding
        x = padding.unpad(block, like, at.layout)
        x = jax.tree.map(lambda a, shape: a.astype(shape.dtype), x, like)
        after, y, *sums = layer(params, frozen, carry, x, at)
        return after, padding.pad(y, at.layout), *sums

    def layer_specs(self, *axes: str) -> tuple[Specs, Specs]:
        """For each kind those of its variables, trained and others, as a step takes them."""
        storage, specs = self.storage, self.partition.param_specs
        params, frozen = (specs(state, *axes) for state in (storage.params, storage.frozen))
        return self.of_layers(params), self.of_layers(frozen)

    def carry_specs(self, *axes: str) -> list[list[P]]:
        """For each kind those of the arrays of its carry, over these axes and the task's own."""
        carry = jax.eval_shape(self.initial_carry, self.storage.params, self.storage.frozen)
        specs = self.partition.specs
        return [jax.tree.leaves(specs(carry[kind], *axes)) for kind in self.facts.kinds]

    @functools.cached_property
    @in_bound(lambda self: self.facts.task.axes)
    def learned_starts(self) -> tuple[Callable[..., Carry] | None, ...]:
        """For each kind (params, frozen, rows) -> its initial carry, if that depends on trained variables."""
        starts: list[Callable[..., Carry] | None] = []
        for kind, params, frozen in zip(self.facts.kinds, *self.of_row, strict=True):
            graphdef = self._graphdef_of(kind)

            def start(params, frozen, rows, graphdef=graphdef):
                layer = nnx.merge(graphdef, params, frozen)
                return layer.initial_carry(rows) if hasattr(layer, "initial_carry") else ()

            used = used_inputs(lambda *own, start=start: start(*own, 1), params, frozen)
            starts.append(start if any(used[: len(jax.tree.leaves(params))]) else None)
        return tuple(starts)

    # ---- what follows the layers ----

    @property
    def no_sums(self) -> Outputs:
        """The sums that layers have added before the first of them; () if none adds any."""
        traces = self.facts.traces
        return zeros(traces.sums) if traces.adds_sums else ()

    def after_layers(
        self,
        model: Module,
        y: Activations,
        at: LayerContext,
        of_layers: Outputs = (),
        *,
        predicts: bool,
        is_part: bool = False,
    ) -> Outputs:
        """The sums of `last`, or what a model predicts, of the y of its layers.

        Args:
          of_layers: sums that layers have added.
          is_part: whether the model has a part of the parameters (`last_part`, `predict_part`).
        """
        at, traces = at._replace(layer=len(self.facts.kind_of)), self.facts.traces
        if predicts:
            run = model.predict_part if is_part else model.predict
            return checked_outputs(run(y, at.batch, at), type(self.facts.model).__name__)
        run = model.last_part if is_part else model.last
        sums: Sums = checked_sums(
            run(y, at.batch, at), f"{self.facts.ends[1]} of {type(self.facts.model).__name__}"
        )
        if not traces.adds_sums:
            return sums
        sums = sums.with_names(traces.sums.metrics)
        return add(sums, of_layers) if of_layers else sums


class Outer:
    """Variables outside the stack, as flat lists that an engine can take; and the functions that use them.

    What follows the layers is `last`, or where rows are predicted the model's `predict`.

    Attributes:
      states, leaves: of what is trained, and of all other variables; of the layers too.
      first, last: likewise the numbers of the leaves that each uses.
    """

    def __init__(
        self,
        parts: Parts,
        model: Module,
        *,
        predicts: bool = False,
        tied: frozenset[str] = frozenset(),
    ):
        """Finds the variables that `first` and `last` use.

        Args:
          model: of the partition, or what its `prepare` made of it; abstract or with values.
          predicts: whether `predict` follows the layers.
          tied: the tables that `first` looks up on the last stage.
        """
        self._tied, self._holder = tied, parts.partition.outer_stages[1]
        self.parts, self.facts, self._predicts = parts, parts.facts, predicts
        self.graphdef, *self.states = self.facts.split(model)
        self._paths, self.leaves, self._structures = zip(*map(flatten, self.states), strict=True)
        self._sizes = {name: size_of(module) for name, module in modules(model)}
        look = functools.partial(self.facts.uses_of, model, predicts=predicts)
        self.uses = bound(self.facts.task.axes, look)
        self.first, self.last = map(self._numbers, self.uses)

    def _numbers(self, uses: Uses) -> tuple[list[int], ...]:
        """Of the leaves outside of the stack that a function reads."""
        return tuple(
            [
                n
                for n, path in enumerate(own)
                if path in uses.read and not path.startswith(f"{STACK}/")
            ]
            for own in self._paths
        )

    def names(self, numbers: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        """Of leaves, trained and others."""
        return tuple(
            tuple(paths[n].removesuffix("/value") for n in own)
            for paths, own in zip(self._paths, numbers, strict=True)
        )

    def specs(
        self, numbers: Sequence[Sequence[int]], names: Container[str] | None, axis: str = STAGE
    ) -> tuple[tuple[P, ...], ...]:
        """Partition specs over an axis, and axes of one's own, of leaves, trained and others, by the rules.

        Args:
          names: of the modules that are in parts over the axis, the others are whole; None if all are.
        """

        def specs(state: nnx.State, paths: Sequence[str], own: Sequence[int]) -> tuple[P, ...]:
            of_all, of_others = (
                jax.tree.leaves(self.parts.partition.param_specs(state, *axes))
                for axes in ([axis], [])
            )
            in_parts = (names is None or owner(path) in names for path in paths)
            found = [
                each[0] if part else each[1]
                for part, *each in zip(in_parts, of_all, of_others, strict=True)
            ]
            return tuple(found[n] for n in own)

        return tuple(map(specs, self.states, self._paths, numbers))

    def merge(self, leaves: Sequence[Sequence[Arrays]]) -> Module:
        """The model of all its leaves, which may be shapes where they are not used."""
        return nnx.merge(self.graphdef, *map(jax.tree.unflatten, self._structures, leaves))

    def run_first(self, leaves: Params, frozen: Params, at: LayerContext) -> Activations:
        """`first` of the model with the leaves that it uses, which may be parts over `stage`; a block."""
        x = self.parts.on_mesh("`first`", self._first)(leaves, frozen, at)
        return self.facts.traces.padding.pad(x, at.layout)

    def _first(
        self,
        leaves: Params,
        frozen: Params,
        at: LayerContext,
        look_up: Callable[..., jax.Array] | None = None,
    ) -> Activations:
        """What `first` returns.

        Args:
          look_up: instead of the call of an embedding that is trained: (its name, that call, words) -> rows.
        """
        at = at._replace(layer=len(self.facts.kind_of) + 1)
        model = self._with(self.first, leaves, frozen)
        calls = self._part_calls(model) | dict.fromkeys(self._tied, held_call(self._holder))
        for name in () if look_up is None else self._tables:
            assert look_up is not None
            calls[name] = functools.partial(look_up, name, calls.get(name, call_as_it_is))
        return with_calls(model, calls).first(at.batch, at)

    def add_first_gradient(
        self, grads: Cotangents, leaves: Params, frozen: Params, at: LayerContext, dx: Cotangents
    ) -> Cotangents:
        """The gradients of these leaves, with what a unit adds: to a table only in the rows of its words."""
        tables, names, grads = self._tables, list[str](), list(grads)
        others = [n for n in range(len(grads)) if n not in tables.values()]

        def find(leaves, frozen, at):
            names.clear()
            found = []

            def note(name, call, *args, **options):
                names.append(name)
                found.append((args[1], call(*args, **options)))
                return found[-1][-1]

            self._first(leaves, frozen, at, note)
            return found

        def first(leaves, frozen, at, rows):
            given = iter(rows)
            return self._first(leaves, frozen, at, lambda *_, **__: next(given))

        def run(own, rows):
            whole = list(leaves)
            for n, leaf in zip(others, own, strict=True):
                whole[n] = leaf
            x = self.parts.on_mesh("`first`", first)(whole, frozen, at, rows)
            return vary_like(self.facts.traces.padding.pad(x, at.layout), dx)

        found = self.parts.on_mesh("`first`", find)(leaves, frozen, at)
        _, vjp = jax.vjp(run, [leaves[n] for n in others], [rows for _, rows in found])
        d_own, d_rows = vjp(dx)
        for n, d_leaf in zip(others, d_own, strict=True):
            grads[n] = add(grads[n], d_leaf)
        for name, (ids, _), rows in zip(names, found, d_rows, strict=True):
            n = tables[name]
            if name in self._tied:
                ids = jnp.where(lax.axis_index(STAGE) == self._holder, ids, len(grads[n]))
            grads[n] = add_rows(grads[n], ids, rows, self._sizes[name])
        return tuple(grads)

    @functools.cached_property
    def _tables(self) -> dict[str, int]:
        """Embeddings that `first` looks up and are trained: the place of each among the leaves it uses."""
        names = [owner(self._paths[0][n]) for n in self.first[0]]
        return {name: names.index(name) for name in sorted(self.uses[0].looked_up & {*names})}

    def _part_calls(self, model: Module) -> dict[str, Call]:
        """How the modules of a model that have parts of their parameters are called."""
        return {
            name: part_call(module, self._sizes[name])
            for name, module in modules(model)
            if size_of(module) < self._sizes[name]
        }

    def run_last(
        self, leaves: Params, frozen: Params, y: Activations, at: LayerContext, *, is_part: bool
    ) -> Outputs:
        """`last` of the model with the leaves that it uses, or `predict`, of a block; or a part of either."""
        traces = self.facts.traces
        y = traces.padding.unpad(y, traces.y, at.layout)
        if is_part:  # each part of y has a cotangent of its own
            y = jax.tree.map(lambda a: vary_over(a, frozenset([STAGE])), y)
        else:
            y = jax.tree.map(lambda a, shape: a.astype(shape.dtype), y, traces.y)

        def last(leaves: Params, frozen: Params, y: Activations, at: LayerContext) -> Outputs:
            model = self._with(self.last, leaves, frozen)
            if not is_part:
                model = with_calls(model, self._part_calls(model))
            return self.parts.after_layers(model, y, at, predicts=self._predicts, is_part=is_part)

        what = "`predict`" if self._predicts else "`last`"
        return self.parts.on_mesh(what, last)(leaves, frozen, y, at)

    def _with(self, numbers: Sequence[Sequence[int]], *given: Params) -> Module:
        """The model with leaves of these numbers; of the others it has shapes."""
        return self.merge([*map(_with_values, self.leaves, numbers, given)])


def _with_values(
    leaves: Sequence[jax.Array], numbers: Sequence[int], values: Params
) -> list[Arrays]:
    known = dict(zip(numbers, values, strict=True))
    return [known.get(n, shape_of(leaf)) for n, leaf in enumerate(leaves)]
