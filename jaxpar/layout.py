"""Where everything of a task's model lies: layers in slots, parameters and state on the axes of a mesh.

The facts say what the model is, a `Parallel` how devices share it; here the two meet, before anything is
made. `state` makes the arrays, `step` computes with them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxpar.base.at import At
from jaxpar.base.axes import BATCH, DATA
from jaxpar.base.trees import shape_of, zeros
from jaxpar.config import Parallel
from jaxpar.facts import LAYERS_OF_MODEL, ModelFacts, called, flatten
from jaxpar.model import NO_SLOTS
from jaxpar.pipeline.placement import (
    PartCosts,
    Route,
    Slots,
    make_slots,
    resolve_placement,
    route_of,
)
from jaxpar.pipeline.split import SplitLayer
from jaxpar.pipeline.walk import with_sums
from jaxpar.sharding import PARAM_SHAPE, Constraint, Rules, is_variable, off_stages, split_over_data
from jaxpar.task import Task
from jaxpar.trace.counts import used_inputs


@dataclasses.dataclass(frozen=True)
class Layout:
    """A task's model on devices: arithmetic, but for the structure of the model in its slots.

    Attributes:
      facts: of the task.
      parallel: with no -1 left.
    Raises:
      ValueError: the two do not fit each other.
    """

    facts: ModelFacts
    parallel: Parallel

    def __post_init__(self):
        facts, parallel = self.facts, self.parallel
        task, stages = facts.task, parallel.mesh.stage
        parallel.check(facts.batch_size, facts.num_steps)
        task.check(parallel)
        if parallel.num_segments > 1 and task.variable_length:
            raise ValueError(
                f"remat_keeps='carries': segments are for batches of one length, those of task {task.name} "
                f"have any; use remat_keeps='device' or 'host'"
            )
        if self.head == "sharded" and stages > 1 and not facts.can_share_head:
            what, use = "head='sharded'", "head='last'"
            if named := parallel.pipeline.named_placement:
                what, use = f"placement={str(named)!r} leaves out last", "last on the last stage"
            raise ValueError(
                f"{what}: model {type(facts.model).__name__} has no method last_part, which runs the head on "
                f"every stage with its part of it; use {use}, or write one"
            )
        if parallel.runs_in_units and not facts.divides_by_hand:
            raise ValueError(
                f"the rules of task {task.name} split the batch over {task.rules.axes_of(BATCH)}; "
                f"pipelines, microbatches and shares need it split over {DATA!r} alone: use stage=1, "
                f"num_microbatches=1 and equal shares, or other rules"
            )
        if parallel.num_chunks > 1 and facts.whole_window:
            raise ValueError(
                f"layer {facts.whole_window[0]} reads the whole window at once, "
                f"num_chunks={parallel.num_chunks} cuts it; use num_chunks=1, and more microbatches"
            )
        if stages > 1 and not facts.kind_of:
            raise ValueError(
                f"stage={stages}: the model of task {task.name} has no layers in its stack to be "
                f"placed on stages; use stage=1, and data and tensor for all devices"
            )
        _ = facts.traces, self.placement  # what is wrong with them is said now

    @property
    def task(self) -> Task:
        """Whose model it is."""
        return self.facts.task

    # ---- how devices share it ----

    @functools.cached_property
    def head(self) -> str:
        """Where what follows the layers runs in a pipeline: "last" or "sharded"."""
        pipeline, shares = self.parallel.pipeline, self.facts.can_share_head
        if self.parallel.mesh.stage > 1:
            if pipeline.head != "auto":
                return pipeline.head
            if named := pipeline.named_placement:
                shares = not named.has_last
        return "sharded" if shares else "last"

    @functools.cached_property
    def placement(self) -> tuple[int, ...]:
        """Layers on each stage; with several groups a stage, layers of each group, in the layers' order."""
        facts, stages = self.facts, self.parallel.mesh.stage
        if stages == 1 or not facts.kind_of:
            return (len(facts.kind_of),)
        pipeline = self.parallel.pipeline
        return resolve_placement(
            pipeline.named_placement or pipeline.placement,
            self.costs,
            stages,
            self.parallel.num_groups,
        )

    @property
    def route(self) -> Route:
        """The groups of layers, in the order in which a unit passes them."""
        parallel = self.parallel
        return route_of(parallel.pipeline.schedule, parallel.mesh.stage, parallel.num_groups)

    @functools.cached_property
    def slots(self) -> Slots:
        """Where each layer lies."""
        if not self.facts.kind_of:
            return NO_SLOTS
        return make_slots(self.placement, self.route.stages, self.facts.kind_of)

    @property
    def costs(self) -> PartCosts:
        """Of the parts of the model, in FLOPs; nothing for what all stages share."""
        costs = self.facts.costs
        alone = self.parallel.mesh.stage > 1 and self.head == "last"
        return costs if alone else costs._replace(last=(0.0, 0.0))

    @functools.cached_property
    def rules(self) -> Rules:
        """How parameters lie while a step computes."""
        head_is_last = self.parallel.mesh.stage > 1 and self.head == "last"
        return off_stages(self.task.rules) if head_is_last else self.task.rules

    @functools.cached_property
    def param_rules(self) -> Rules:
        """How parameters lie between steps."""
        return split_over_data(self.rules) if self.parallel.fsdp else self.rules

    @functools.cached_property
    def opt_rules(self) -> Rules:
        """How optimizer state lies between steps."""
        is_split = self.parallel.fsdp or self.parallel.update != "replicated"
        return split_over_data(self.rules) if is_split else self.rules

    @functools.cached_property
    def carry_rules(self) -> Rules:
        """How the carry lies between steps.

        Unequal shares do not split evenly: then every data-parallel group has all rows and takes its own.
        """
        return self.rules if self.parallel.has_equal_shares else self.rules.replace({BATCH: None})

    def constraint(self, mesh: Mesh, *manual: str) -> Constraint:
        """For activations (`At.layout`)."""
        return Constraint(mesh, self.rules, manual)

    # ---- the model in its slots ----

    def make(self, seed: int | jax.Array) -> Any:
        """The model with its values, of a seed or a key, its layers in their slots. Call under `jit`."""
        model = self.facts.make(seed)
        if self.slots.layers:
            model.layers.place(self.slots)
        for _, variable in nnx.iter_graph(model):
            if is_variable(variable):
                variable.set_metadata(PARAM_SHAPE, tuple(variable.shape))
        return model

    @functools.cached_property
    def _parts(self) -> tuple[Any, nnx.State, nnx.State]:
        return self.facts.split(nnx.eval_shape(lambda: self.make(0)))

    @property
    def graphdef(self) -> Any:
        """Of the model in its slots."""
        return self._parts[0]

    @property
    def params(self) -> nnx.State:
        """Shapes of what is trained."""
        return self._parts[1]

    @property
    def frozen(self) -> nnx.State:
        """Shapes of all other variables."""
        return self._parts[2]

    def merge(self, params: nnx.State, frozen: nnx.State) -> Any:
        """The model with these values."""
        return nnx.merge(self.graphdef, params, frozen)

    def drawn(self, params: nnx.State, frozen: nnx.State, key: jax.Array) -> nnx.State:
        """The parameters with what the model draws of them for a step; see `model.Model`."""
        model = self.merge(params, frozen)
        return self.facts.split(model.draw(key))[1] if hasattr(model, "draw") else params

    def of_layers(self, state: nnx.State) -> tuple[Any, ...]:
        """For each kind its part of parameters or frozen variables; `nnx.State`s, maybe empty."""
        stack = state.get(LAYERS_OF_MODEL, {})
        return tuple(nnx.State(stack.get(kind, {})) for kind in self.facts.kinds)

    def layer_functions(self) -> tuple[Callable[..., Any], ...]:
        """For each kind (params, frozen, carry, x, at) -> (carry, y), or with sums if layers add any."""
        return tuple(
            functools.partial(self._run_layer, kind, self._graphdef_of(kind))
            for kind in self.facts.kinds
        )

    @functools.cached_property
    def learned_starts(self) -> tuple[Callable[..., Any] | None, ...]:
        """For each kind (params, frozen, rows) -> its initial carry, if that depends on what is trained."""
        starts: list[Callable[..., Any] | None] = []
        for kind, params, frozen in zip(self.facts.kinds, *self.of_row, strict=True):
            graphdef = self._graphdef_of(kind)

            def start(params, frozen, rows, graphdef=graphdef):
                layer = nnx.merge(graphdef, params, frozen)
                return layer.initial_carry(rows) if hasattr(layer, "initial_carry") else ()

            used = used_inputs(lambda *own, start=start: start(*own, 1), params, frozen)
            starts.append(start if any(used[: len(jax.tree.leaves(params))]) else None)
        return tuple(starts)

    @property
    def of_row(self) -> tuple[tuple[Any, ...], ...]:
        """Trained and other variables of one layer of each kind, of shapes."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype),
            (self.of_layers(self.params), self.of_layers(self.frozen)),
        )

    def _graphdef_of(self, kind: str) -> Any:
        return nnx.graphdef(getattr(self.abstract_model().layers, kind))

    def abstract_model(self, sizes: Mapping[str, int] | None = None) -> Any:
        """The model of shapes, in its slots.

        Args:
          sizes: of the mesh's axes, to have it as a step that runs in units uses it (`prepare`).
        """

        def make(params, frozen):
            model = self.merge(params, frozen)
            return model.prepare(sizes) if sizes and hasattr(model, "prepare") else model

        return nnx.eval_shape(make, self.params, self.frozen)

    def initial_carry(self, params: nnx.State, frozen: nnx.State) -> dict[str, Any]:
        """The state of the layers at the start, as variables."""
        return self.merge(params, frozen).layers.initial_carry(self.facts.batch_size)

    def _run_layer(
        self, kind: str, graphdef: Any, params: Any, frozen: Any, carry: Any, x: Any, at: At
    ) -> tuple[Any, ...]:
        """A kind of layer as a function of its variables; mistakes inside are told with its name."""
        out = called(kind, nnx.merge(graphdef, params, frozen), carry, x, at)
        return self.facts.of_layer(kind, out)

    @functools.cached_property
    def whole_kinds(self) -> tuple[str, ...]:
        """Kinds of layers whose gradients of weights cannot leave their backward pass; see `SplitLayer`."""
        pairs = zip(self.facts.kinds, self.split_layers, strict=True)
        return tuple(name for name, layer in pairs if not layer.has_weights)

    @functools.cached_property
    def split_layers(self) -> tuple[SplitLayer, ...]:
        """One layer of each kind in parts, on a whole batch."""
        facts, split = self.facts, list[SplitLayer]()
        for (_, (_, carry, x, batch)), function, params, frozen in zip(
            facts.traces.layers, self.layer_functions(), *self.of_row, strict=True
        ):
            own = params, frozen, carry, (x, facts.no_sums)
            split.append(SplitLayer(with_sums(function), *own, facts.at(batch), splits=True))
        return tuple(split)


class Outer:
    """Variables outside the stack, as flat lists that an engine can take; and the functions that use them.

    What follows the layers is `last`, or where rows are predicted the model's `predict`.

    Attributes:
      states, leaves: of what is trained, and of all other variables; of the layers too.
      first, last: likewise the numbers of the leaves that each uses.
    """

    def __init__(self, layout: Layout, model: Any, *, predicts: bool = False):
        """Looks at what `first` and `last` use.

        Args:
          model: of the layout, or what its `prepare` made of it; abstract or with values.
          predicts: whether `predict` follows the layers.
        """
        self.layout, facts, self._predicts = layout, layout.facts, predicts
        self.graphdef, *self.states = facts.split(model)
        paths, self.leaves, self._structures = zip(*map(flatten, self.states), strict=True)
        shapes = jax.tree.map(shape_of, self.leaves)

        def uses(function: Callable[..., Any]) -> tuple[list[int], ...]:
            used = iter(used_inputs(function, shapes))
            return tuple(
                [n for n, path in enumerate(own) if next(used) and not _is_layer(path)]
                for own in paths
            )

        def first(leaves):
            batch = zeros(facts.block)
            return self.merge(leaves).first(batch, facts.at(batch))

        def last(leaves):
            model, at = self.merge(leaves), facts.at(zeros(facts.block))
            return facts.after_layers(model, zeros(facts.traces.x), at, predicts=predicts)

        self.first, self.last = uses(first), uses(last)

    def merge(self, leaves: Sequence[Sequence[Any]]) -> Any:
        """The model of all its leaves, which may be shapes where they are not used."""
        return nnx.merge(self.graphdef, *map(jax.tree.unflatten, self._structures, leaves))

    def run_first(self, leaves: Any, frozen: Any, at: At) -> Any:
        """`first` of the model with the leaves that it uses."""
        at = at._replace(layer=len(self.layout.facts.kind_of) + 1)
        return self._with(self.first, leaves, frozen).first(at.batch, at)

    def add_first_gradient(self, grads: Any, leaves: Any, frozen: Any, at: At, dx: Any) -> Any:
        """The gradients of these leaves, with what the model adds to them by itself."""
        whole = _replaced(self.leaves[0], self.first[0], grads)
        flat = list(nnx.to_flat_state(jax.tree.unflatten(self._structures[0], whole)))
        own = nnx.from_flat_state([flat[number] for number in self.first[0]])
        model = self._with(self.first, leaves, frozen)
        return tuple(jax.tree.leaves(model.add_first_gradient(own, dx, at.batch, at)))

    def run_last(self, leaves: Any, frozen: Any, y: Any, at: At, *, is_part: bool) -> Any:
        """`last` of the model with the leaves that it uses, or `predict`; or a part of either."""
        model, facts = self._with(self.last, leaves, frozen), self.layout.facts
        return facts.after_layers(model, y, at, predicts=self._predicts, is_part=is_part)

    def _with(self, numbers: Sequence[Sequence[int]], *given: Any) -> Any:
        """The model with leaves of these numbers; of the others it has shapes."""
        return self.merge([*map(_replaced, self.leaves, numbers, given)])


def _is_layer(path: str) -> bool:
    return path.startswith(f"{LAYERS_OF_MODEL}/")


def _replaced(leaves: Sequence[Any], numbers: Sequence[int], values: Any) -> list[Any]:
    known = dict(zip(numbers, values, strict=True))
    return [known.get(n, shape_of(leaf)) for n, leaf in enumerate(leaves)]
