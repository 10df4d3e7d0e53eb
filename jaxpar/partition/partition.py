"""Where everything of a task's model lies: layers in slots, parameters and state on the axes of a mesh.

The facts say what the model is, a `Parallel` how devices share it; here the two meet, before anything is
made. `state` makes the arrays, `step` computes with them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.base.at import At
from jaxpar.base.axes import BATCH, DATA, POOL_ROWS, STAGE, TENSOR
from jaxpar.base.checks import check_divides
from jaxpar.base.trees import add, constants_told, shape_of, vary_like, vary_over, zeros
from jaxpar.config import Parallel
from jaxpar.model.facts import ModelFacts, flatten
from jaxpar.model.model import NO_SLOTS, run_layer, says
from jaxpar.model.outer import (
    LAYERS_OF_MODEL,
    Call,
    End,
    Uses,
    add_rows,
    call_as_it_is,
    modules,
    name_dims,
    owner,
    part_call,
    size_of,
    with_calls,
)
from jaxpar.model.task import Task
from jaxpar.pipeline.placement import (
    PartCosts,
    Route,
    Slots,
    make_slots,
    resolve_placement,
    route_of,
)
from jaxpar.pipeline.pool import Pool
from jaxpar.sharding import (
    PARAM_SHAPE,
    Constraint,
    Rules,
    array_of,
    dims_of,
    is_variable,
    named_leaves,
    off_stages,
    split_over_data,
    to_spec,
)
from jaxpar.trace.bound import bound, in_bound
from jaxpar.trace.counts import used_inputs

# The share of a stage's layers, or of the work of one, that is not worth a thought; nor are so few numbers.
LITTLE, FEW = 0.1, 2**18

# In a state of a layout with pools, instead of what lies in them: the planes of what is trained, and of what
# is not.
POOLS = ("@pool", "@pool of frozen")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A task's model on devices: arithmetic, but for the structure of the model in its slots.

    Attributes:
      facts: of the task.
      parallel: with no -1 left.
      may_pool: False leaves all that could lie in pools where it is, whatever that takes.
    Raises:
      ValueError: the two do not fit each other.
    """

    facts: ModelFacts
    parallel: Parallel
    may_pool: bool = True

    def __post_init__(self):
        facts, task, mesh = self.facts, self.facts.task, self.parallel.mesh
        parallel = dataclasses.replace(self.parallel, mesh=mesh.of_task(task.name, task.axes))
        object.__setattr__(self, "parallel", parallel)
        stages = parallel.mesh.stage
        parallel.check(facts.batch_size, facts.num_steps)
        if task.axes:
            self._check_own_axes()
        task.check(parallel)
        if parallel.num_segments > 1 and task.variable_length:
            raise ValueError(
                f"remat_keeps='carries' needs batches of one length, those of task {task.name} have any.\n"
                f"Fix: use remat_keeps='device' or 'host'."
            )
        if parallel.runs_in_units and not facts.divides_by_hand:
            raise ValueError(
                f"the rules of task {task.name} split the batch over {task.rules.axes_of(BATCH)}; pipelines "
                f"need {DATA!r}.\nFix: use stage=1, num_microbatches=1 and equal shares, or other rules."
            )
        if parallel.num_chunks > 1 and facts.whole_window:
            raise ValueError(
                f"layer {facts.whole_window[0]} reads the whole window at once, "
                f"num_chunks={parallel.num_chunks} cuts it.\nFix: use num_chunks=1, and more microbatches."
            )
        for name, size in facts.rows_together.items():
            groups = {**self._row_parts, f"rows_together of layer {name}": size}
            check_divides("batch_size", facts.batch_size, groups)
        if stages > 1 and not facts.kind_of:
            raise ValueError(
                f"stage={stages}: the model of task {task.name} has no layers in its stack.\n"
                f"Fix: use stage=1, and data and tensor for all devices."
            )
        _ = facts.traces  # what is wrong with them is said now
        if stages > 1:
            self._check_ends()
        _ = self.placement  # likewise

    @property
    def _row_parts(self) -> dict[str, int]:
        """Into how many parts the rows of a batch are divided, by what divides them."""
        parallel, sizes = self.parallel, self.parallel.mesh.sizes
        shares = "sum of shares", sum(parallel.group_shares)
        name, groups = (DATA, sizes[DATA]) if parallel.has_equal_shares else shares
        own = {axis: sizes[axis] for axis in self.facts.row_axes}
        return {name: groups, "num_microbatches": parallel.pipeline.num_microbatches, **own}

    def _check_own_axes(self) -> None:
        """Raises where axes of one's own split rows or time, and cannot."""
        facts, parallel, sizes = self.facts, self.parallel, self.parallel.mesh.sizes
        rows, times = ({axis: sizes[axis] for axis in a} for a in (facts.row_axes, facts.time_axes))
        check_divides("batch_size", facts.batch_size, self._row_parts)
        if math.prod(rows.values()) > 1 and not parallel.has_equal_shares:
            raise ValueError(
                f"shares={parallel.shares}: the rules split rows over {', '.join(rows)} as well.\n"
                f"Fix: use equal shares."
            )
        if not times or math.prod(times.values()) == 1:
            return
        check_divides("seq_len", facts.num_steps or 1, times)
        if parallel.num_chunks > 1 or facts.task.variable_length:
            raise ValueError(
                f"the rules split time over {', '.join(times)}, and num_chunks={parallel.num_chunks} cuts "
                f"it, or batches have any length.\nFix: use num_chunks=1, and batches of one length."
            )
        for name, (_, (_, carry, _, _)) in zip(facts.kinds, facts.traces.layers, strict=True):
            if jax.tree.leaves(carry):
                raise ValueError(
                    f"the rules split time over {', '.join(times)}, and layer {name} carries state from step "
                    f"to step.\nFix: use layers without a state, or leave time whole."
                )

    def _check_ends(self) -> None:
        """Raises where what comes before and after the layers cannot lie as it was asked for."""
        model, pipeline = type(self.facts.model).__name__, self.parallel.pipeline
        named = pipeline.named_placement
        if self.head == "sharded" and not self._can_share_head:
            what = f"placement={str(named)!r} leaves out last" if named else "head='sharded'"
            raise ValueError(
                f"{what}: model {model} has no method last_part, and `last` calls no linear layer whose "
                f"outputs divide by stage={self.parallel.mesh.stage}.\n"
                f"Fix: have all of it on the last stage, or write last_part."
            )
        if named and named.has_first == self.shares_first:
            raise ValueError(
                f"placement={str(named)!r} {'names' if named.has_first else 'leaves out'} first: what comes "
                f"before the layers of model {model} is {'in parts' if named.has_first else 'whole'}.\n"
                f"Fix: {'leave it out, or name last as well' if named.has_first else 'name it'}."
            )

    @property
    def _can_share_head(self) -> bool:
        """Whether all stages can have a part of what follows the layers."""
        return self.facts.has_last_part or any(end.num_outputs[1] for end in self._splittable)

    @property
    def task(self) -> Task:
        """Whose model it is."""
        return self.facts.task

    # ---- how devices share it ----

    @functools.cached_property
    def head(self) -> str:
        """Where what follows the layers runs in a pipeline: "last" or "sharded"."""
        asked = self._asked[1] if self.parallel.mesh.stage > 1 else None
        return "sharded" if (self._can_share_head if asked is None else asked) else "last"

    @property
    def _asked(self) -> tuple[bool | None, bool | None]:
        """Whether what comes before the layers shall be in parts, and what comes after; None if unsaid."""
        pipeline = self.parallel.pipeline
        if named := pipeline.named_placement:
            return not named.has_first, not named.has_last
        return None, None if pipeline.head == "auto" else pipeline.head == "sharded"

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
        costs, parallel = self.facts.costs, self.parallel
        if parallel.speeds:
            costs = costs._replace(speeds=tuple(parallel.speeds[s] for s in self.route.stages))
        if self.shares_first:
            costs = costs._replace(first=(0.0, 0.0))
        alone = parallel.mesh.stage > 1 and self.head == "last"
        return costs if alone else costs._replace(last=(0.0, 0.0))

    @property
    def shares_first(self) -> bool:
        """Whether all stages run what comes before the layers, with their parts of it."""
        return bool(self.parts[0])

    @functools.cached_property
    def split_ends(self) -> tuple[End, ...]:
        """What comes before and after the layers and no stage holds whole, but for what the rules split."""
        whole = self._asked[0] is False, self.head == "last"
        return tuple(end for end in self._splittable if not any(_both(whole, end.num_outputs)))

    @functools.cached_property
    def _splittable(self) -> tuple[End, ...]:
        """The same, if the head is on all stages."""
        if self.parallel.mesh.stage == 1:
            return ()
        return tuple(
            end
            for end in self.facts.ends.values()
            if not self.why_whole(end)
            or (any(_both(self._asked, end.num_outputs)) and not end.size % self.num_parts(end))
        )

    def num_parts(self, end: End) -> int:
        """Into how many parts an end would be split, those over other axes counted."""
        axes = STAGE, *self.task.rules.axes_of(end.dim)
        return math.prod(self.parallel.mesh.sizes[axis] for axis in axes)

    def why_whole(self, end: End) -> str:
        """Why a stage has all of an end, in words; "" where a part is the better choice.

        Whole, its gradient is summed over stages once a step; in parts, what it gives for each unit, and the
        cotangent of that. Fewer bytes win, but an end that is large beside the layers of a stage is in parts
        all the same, for the room: before the layers alone, since after them a part of y goes to all stages
        as well. And what else `first` or `last` does is done on every stage.
        """
        sizes, facts = self.parallel.mesh.sizes, self.facts
        before, after = (number / sizes[DATA] for number in end.num_outputs)
        numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(facts.passed))
        x = numbers / sizes[DATA] if after else 0.0
        rest = sum(uses.flops for uses in facts.uses if end.name in uses.called)
        layers = facts.layer_numbers / sizes[STAGE]
        if end.size % self.num_parts(end):
            return f"{end.size:,} {end.what} do not divide by {self.num_parts(end)}"
        if rest > LITTLE * facts.layer_flops:
            return "all stages would compute what is with it"
        is_large = not after and end.num_params > max(LITTLE * layers, FEW)
        if 2 * before + after + 2 * x <= end.num_params or is_large:
            return ""
        return "parts would send more"

    @functools.cached_property
    def parts(self) -> tuple[frozenset[str], ...]:
        """The modules that each stage has a part of: those that `first` calls, and those that `last` does."""
        if self.parallel.mesh.stage == 1:
            return frozenset(), frozenset()
        dims = self.facts.split_dims
        split = {name for name, dim in dims.items() if STAGE in self._rules.axes_of(dim)}
        return tuple(frozenset(split.intersection(uses.called)) for uses in self.facts.uses)

    @functools.cached_property
    def rules(self) -> Rules:
        """How parameters lie while a step computes."""
        rules = self._rules
        return rules if self.pools is None else rules.replace({POOL_ROWS: TENSOR})

    @functools.cached_property
    def _rules(self) -> Rules:
        """The same, of a state that has its layers in stacks."""
        head_is_last = self.parallel.mesh.stage > 1 and self.head == "last"
        rules = off_stages(self.task.rules) if head_is_last else self.task.rules
        own = {end.dim: (STAGE, *rules.axes_of(end.dim)) for end in self.split_ends}
        return rules.replace(own) if own else rules

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
        return Constraint(mesh, self.rules, (*manual, *self.task.axes))

    @property
    def microbatch_rows(self) -> int:
        """Rows of a microbatch on a device."""
        rows = self.parallel.microbatch_rows(self.facts.batch_size)
        return rows // math.prod(self.parallel.mesh.sizes[axis] for axis in self.facts.row_axes)

    @property
    def chunk_len(self) -> int | None:
        """Time steps of a chunk on a device; None if the model has no time."""
        parts = math.prod(self.parallel.mesh.sizes[axis] for axis in self.facts.time_axes)
        steps = self.facts.num_steps
        return steps // self.parallel.num_chunks // parts if steps else None

    def specs(self, tree: Any, *axes: str) -> Any:
        """Partition specs over these axes and those of one's own, of a tree of variables."""
        axes = (*axes, *self.task.axes)

        def of(leaf: Any) -> Any:
            split = self.rules.split(dims_of(leaf)) if is_variable(leaf) else ()
            spec = to_spec([tuple(a for a in own if a in axes) for own in split])
            return jax.tree.map(lambda _: spec, leaf)

        return jax.tree.map(of, tree, is_leaf=is_variable)

    @property
    def rows_of(self) -> dict[str, tuple[int, ...]]:
        """By kind the layer in each row of its stack, -1 in empty rows."""
        return dict(zip(self.facts.kinds, self.slots.rows, strict=True))

    # ---- layers and ends in pools ----

    @functools.cached_property
    def pools(self) -> tuple[Pool, Pool] | None:
        """For what is trained and for what is not; None if nothing lies in pools."""
        if self.pools_layers:
            return self.possible_pools
        return self._pools_of_ends if self.may_pool and not self._has_own_optimizer else None

    @functools.cached_property
    def pools_layers(self) -> bool:
        """Whether layers lie in pools; otherwise they are in stacks.

        They are where axes of one's own may split them, or an optimizer that is not an `OptimizerConfig` may
        look at single parameters; where the model's `draw` or `prepare` looks at them; and where what they
        carry begins with parameters.
        """
        return (
            self.may_pool
            and self.possible_pools is not None
            and not (self.task.axes or self._has_own_optimizer)
            and not any(path.startswith(f"{LAYERS_OF_MODEL}/") for path in self._looked_at)
            and not self.facts.starts_with_variables
        )

    @property
    def _has_own_optimizer(self) -> bool:
        names = "make_optimizer", "after_validation", "evaluated_params"
        kind, task = type(self.task), self.task
        is_own = any(getattr(kind, name) is not getattr(Task, name) for name in names)
        return is_own or not task.has_optimizer

    @property
    def _looked_at(self) -> frozenset[str]:
        """The variables that the model's `draw` and `prepare` change or depend on."""
        sizes, model = tuple(self.parallel.mesh.sizes.items()), self.facts.model
        asked = [("draw", None)] * says(model, "draw") + [("prepare", sizes)] * says(
            model, "prepare"
        )
        return frozenset().union(*(self.facts.looked_at(*each) for each in asked))

    @functools.cached_property
    def possible_pools(self) -> tuple[Pool, Pool] | None:
        """Pools, if layers can lie in them and take so much less than in stacks that it matters.

        Layers of one kind take as much in a stack, which a scan reads without a copy.
        """
        if self.parallel.mesh.stage == 1 or len(self.facts.kinds) < 2:
            return None
        if (pools := self._make_pools(self.facts.layer_stacks)) is None:
            return None
        in_stacks, in_pools = (
            sum(getattr(pool, name) for pool in pools) for name in ("stack_bytes", "num_bytes")
        )
        saves = in_stacks - in_pools > max(LITTLE * in_stacks, FEW * 4)
        return pools if saves else None

    @functools.cached_property
    def _pools_of_ends(self) -> tuple[Pool, Pool] | None:
        """Pools for what comes before and after the layers alone, if that is much beside those of a stage.

        No stage but its own has it then, and its gradients are not summed over stages.
        """
        size = sum(array_of(leaf).size for own in self._own_ends[0] for leaf in own.values())
        if size <= max(LITTLE * self.facts.layer_numbers / self.parallel.mesh.stage, FEW):
            return None
        nothing = tuple({} for _ in self.facts.kinds)
        return self._make_pools((nothing, nothing))

    def _make_pools(self, layer_stacks: Sequence[Sequence[Any]]) -> tuple[Pool, Pool] | None:
        """Pools for layers, trained ones and others by kind, and for both ends; None if they do not fit."""
        sizes, stages = self.parallel.mesh.sizes, self.parallel.mesh.stage
        ends = [[0 if s == end else -1 for s in range(stages)] for end in self.ends_on]
        pools = []
        for stacks, of_ends in zip(layer_stacks, self._own_ends, strict=True):
            shapes: list[Any] = [
                jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack)
                for stack in stacks
            ]
            leaves = [jax.tree.leaves(own, is_leaf=is_variable) for own in stacks]
            dims = [
                [_dim_over_tensor(leaf, 1, self._rules, sizes) for leaf in own] for own in leaves
            ]
            if any(dim == _OTHER for own in dims for dim in own):
                return None  # or a mistake, of which `check_sizes` tells
            for own in of_ends:
                shapes.append({name: shape_of(array_of(leaf)) for name, leaf in own.items()})
                dims += [[_dim_over_tensor(leaf, 0, self._rules, sizes) for leaf in own.values()]]
            pools.append(Pool.of(shapes, dims, (*self.slots.rows, *ends), stages, sizes[TENSOR]))
        return pools[0], pools[1]

    @property
    def ends_on(self) -> tuple[int, int]:
        """The stages of the first layer and of the last."""
        return self.route.stages[0], self.route.stages[-1]

    @functools.cached_property
    def _own_ends(self) -> list[list[dict[str, Any]]]:
        """Variables outside of the layers that one stage alone uses, and no rule splits over stages.

        Of those that are trained, and of all others: what `first` uses and what `last` does, by name.
        """
        if self.parallel.mesh.stage == 1 or self.task.axes:  # all stays where it is
            return [[{}, {}], [{}, {}]]
        first, last = self.facts.reads
        looked_at, sizes = self._looked_at, self.parallel.mesh.sizes
        uses = (
            frozenset() if self.shares_first else first - last - looked_at,
            last - first - looked_at if self.head == "last" else frozenset(),
        )
        fits = [
            {n: v for n, v in own.items() if _dim_over_tensor(v, 0, self._rules, sizes) != _OTHER}
            for own in self.facts.outer_variables
        ]
        return [[{n: own[n] for n in own if n in names} for names in uses] for own in fits]

    def pooled_names(self, number: int) -> list[list[str]]:
        """The variables in a pool, for each kind of layer, and what `first` uses and `last`, as it has them.

        Args:
          number: 0 of what is trained, 1 of other variables.
        """
        if self.pools is None:
            return []
        stacks = zip(self.facts.kinds, self.facts.layer_stacks[number], strict=True)
        names = [
            [f"{LAYERS_OF_MODEL}/{kind}/{name}" for name, _ in named_leaves(stack, "/")]
            if self.pools_layers
            else []
            for kind, stack in stacks
        ]
        return [*names, *map(list, self._own_ends[number])]

    def in_pools(self, trees: Sequence[nnx.State], planes: Sequence[Sequence[Any]]) -> Any:
        """Parameters and other variables as a state has them, with those that are in pools in planes.

        Args:
          trees: with layers in stacks.
          planes: of both pools, [stage, rows, COLUMNS].
        """
        assert self.pools is not None
        made, classes = [], (nnx.Param, nnx.Variable)
        for n, (tree, pool, arrays, of) in enumerate(
            zip(trees, self.pools, planes, classes, strict=True)
        ):
            own = {}
            for plane, array in zip(pool.planes, arrays, strict=True):
                own[plane.name] = of(array, out_sharding=plane.dims, eager_sharding=False)
            rest = self._not_pooled(tree, n)
            made.append(nnx.State({**rest, POOLS[n]: nnx.State(own)} if own else rest))
        return tuple(made)

    def _not_pooled(self, tree: nnx.State, number: int) -> nnx.State:
        """What of a model's variables is in no pool."""
        names = {name for kind in self.pooled_names(number) for name in kind}
        flat = nnx.to_flat_state(tree)
        return nnx.from_flat_state([(p, v) for p, v in flat if "/".join(map(str, p)) not in names])

    @functools.cached_property
    def stored(self) -> tuple[nnx.State, nnx.State]:
        """Shapes of parameters and other variables as a state has them."""
        if self.pools is None:
            return self.params, self.frozen
        planes = [
            [jax.ShapeDtypeStruct(pool.shape_of(plane), plane.dtype) for plane in pool.planes]
            for pool in self.pools
        ]
        return self.in_pools((self.params, self.frozen), planes)

    def _without_pools(self, params: nnx.State, frozen: nnx.State) -> tuple[nnx.State, ...]:
        """The same, with zeros for what is in pools, which nobody reads."""
        made = []
        for state, key, shapes in zip(
            (params, frozen), POOLS, (self.params, self.frozen), strict=True
        ):
            if key in state:
                rest = {name: part for name, part in state.items() if name != key}
                own = dict(nnx.to_flat_state(nnx.State(rest)))
                flat = nnx.to_flat_state(shapes)
                state = nnx.from_flat_state(
                    [(p, own[p] if p in own else zeros(v)) for p, v in flat]
                )
            made.append(state)
        return tuple(made)

    # ---- the model in its slots ----

    def make(self, seed: int | jax.Array) -> Any:
        """The model with its values, of a seed or a key, its layers in their slots. Call under `jit`."""
        model = self.facts.make(seed)
        if self.slots.layers:
            model.layers.place(self.slots)
        for _, variable in nnx.iter_graph(model):
            if is_variable(variable):
                variable.set_metadata(PARAM_SHAPE, tuple(variable.shape))
        name_dims(model, self.facts.ends)
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
        """The model with these values; of layers that are in pools it has zeros."""
        return nnx.merge(self.graphdef, *self._without_pools(params, frozen))

    def drawn(self, params: nnx.State, frozen: nnx.State, key: jax.Array) -> nnx.State:
        """The parameters with what the model draws of them for a step; see `model.Model`."""
        model = self.merge(params, frozen)
        if not says(model, "draw"):
            return params
        drawn = self.facts.split(model.draw(key))[1]
        if POOLS[0] not in params:
            return drawn
        rest = self._not_pooled(drawn, 0)
        return nnx.State({**rest, POOLS[0]: params[POOLS[0]]})

    def of_layers(self, state: nnx.State) -> tuple[Any, ...]:
        """For each kind its part of parameters or frozen variables; `nnx.State`s, maybe empty."""
        stack = state.get(LAYERS_OF_MODEL, {})
        return tuple(nnx.State(stack.get(kind, {})) for kind in self.facts.kinds)

    def layer_functions(self, *, in_units: bool = True) -> tuple[Callable[..., Any], ...]:
        """For each kind (params, frozen, carry, x, at) -> (carry, y), or with sums if layers add any.

        Args:
          in_units: whether x and y are blocks of one shape (`ModelFacts.traces`).
        """
        functions = [
            functools.partial(self._run_layer, kind, self._graphdef_of(kind))
            for kind in self.facts.kinds
        ]
        if not (in_units and self.facts.traces.padding.width):
            return tuple(functions)
        shapes = (args[2] for _, args in self.facts.traces.layers)
        pairs = zip(functions, shapes, strict=True)
        return tuple(functools.partial(self.facts.run_padded, *pair) for pair in pairs)

    def carry_specs(self, *axes: str) -> list[list[P]]:
        """Of each kind those of the arrays of its carry, over these axes and those of one's own."""
        carry = jax.eval_shape(self.initial_carry, self.params, self.frozen)
        return [jax.tree.leaves(self.specs(carry[kind], *axes)) for kind in self.facts.kinds]

    @functools.cached_property
    @in_bound(lambda self: self.task.axes)
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

    def abstract_model(self) -> Any:
        """The model of shapes, in its slots."""
        return nnx.eval_shape(self.merge, self.params, self.frozen)

    def initial_carry(self, params: nnx.State, frozen: nnx.State) -> dict[str, Any]:
        """The state of the layers at the start, as variables."""
        return self.merge(params, frozen).layers.initial_carry(self.facts.batch_size)

    def _run_layer(
        self, kind: str, graphdef: Any, params: Any, frozen: Any, carry: Any, x: Any, at: At
    ) -> tuple[Any, ...]:
        """A kind of layer as a function of its variables; mistakes inside are told with its name."""
        with constants_told(f"layer {kind}"):
            out = run_layer(kind, nnx.merge(graphdef, params, frozen), carry, x, at)
        return self.facts.of_layer(kind, out)


_OTHER = -1


def _dim_over_tensor(leaf: Any, first: int, rules: Rules, sizes: Mapping[str, int]) -> int | None:
    """The dim of a variable, from its first, that `tensor` splits; `_OTHER` if it cannot lie in a pool."""
    try:
        split = rules.split(dims_of(leaf))[first:]
    except ValueError:
        return _OTHER
    found = [dim for dim, axes in enumerate(split) if math.prod(sizes[axis] for axis in axes) > 1]
    if not found and isinstance(leaf.dtype, np.dtype):
        return None
    axes = {axis for dim in found for axis in split[dim] if sizes[axis] > 1}
    fits = axes == {TENSOR} and leaf.shape[first:][found[0]] % sizes[TENSOR] == 0
    return found[0] if fits else _OTHER


def _both(ones: Iterable[Any], others: Iterable[Any]) -> Iterator[bool]:
    return (bool(one and other) for one, other in zip(ones, others, strict=True))


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
        self._paths, self.leaves, self._structures = zip(*map(flatten, self.states), strict=True)
        self._sizes = {name: size_of(module) for name, module in modules(model)}
        look = functools.partial(facts.uses_of, model, predicts=predicts)
        self.uses = bound(layout.task.axes, look)
        self.first, self.last = map(self._numbers, self.uses)

    def _numbers(self, uses: Uses) -> tuple[list[int], ...]:
        """Of the leaves outside of the stack that a function reads."""
        return tuple(
            [
                n
                for n, path in enumerate(own)
                if path in uses.read and not path.startswith(f"{LAYERS_OF_MODEL}/")
            ]
            for own in self._paths
        )

    def names(self, numbers: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        """Of leaves, trained and others."""
        return tuple(
            tuple(paths[n].removesuffix("/value") for n in own)
            for paths, own in zip(self._paths, numbers, strict=True)
        )

    def specs(self, numbers: Sequence[Sequence[int]], names: Container[str] | None) -> Any:
        """Partition specs over `stage`, and axes of one's own, of leaves, trained and others, by the rules.

        Args:
          names: of the modules that are in parts over `stage`, the others are whole; None if all are.
        """

        def specs(state: Any, paths: Sequence[str], own: Sequence[int]) -> tuple[P, ...]:
            of_all, of_others = (
                jax.tree.leaves(self.layout.specs(state, *axes)) for axes in ([STAGE], [])
            )
            in_parts = (names is None or owner(path) in names for path in paths)
            found = [
                each[0] if part else each[1]
                for part, *each in zip(in_parts, of_all, of_others, strict=True)
            ]
            return tuple(found[n] for n in own)

        return tuple(map(specs, self.states, self._paths, numbers))

    def merge(self, leaves: Sequence[Sequence[Any]]) -> Any:
        """The model of all its leaves, which may be shapes where they are not used."""
        return nnx.merge(self.graphdef, *map(jax.tree.unflatten, self._structures, leaves))

    def run_first(
        self, leaves: Any, frozen: Any, at: At, look_up: Callable[..., Any] | None = None
    ) -> Any:
        """`first` of the model with the leaves that it uses, which may be parts over `stage`; a block.

        Args:
          look_up: instead of the call of an embedding that is trained: (its name, that call, words) -> rows.
        """
        at = at._replace(layer=len(self.layout.facts.kind_of) + 1)
        model = self._with(self.first, leaves, frozen)
        calls = self._part_calls(model)
        for name in () if look_up is None else self._tables:
            assert look_up is not None
            calls[name] = functools.partial(look_up, name, calls.get(name, call_as_it_is))
        with constants_told("`first`"):
            x = with_calls(model, calls).first(at.batch, at)
        return self.layout.facts.traces.padding.pad(x, at.layout)

    def add_first_gradient(self, grads: Any, leaves: Any, frozen: Any, at: At, dx: Any) -> Any:
        """The gradients of these leaves, with what a unit adds: to a table only in the rows of its words."""
        tables, found, grads = self._tables, [], list(grads)
        others = [n for n in range(len(grads)) if n not in tables.values()]

        def note(name, call, *args, **options):
            found.append((name, args[1], call(*args, **options)))
            return found[-1][-1]

        def run(own, rows):
            given, whole = iter(rows), list(leaves)
            for n, leaf in zip(others, own, strict=True):
                whole[n] = leaf
            return vary_like(self.run_first(whole, frozen, at, lambda *_, **__: next(given)), dx)

        self.run_first(leaves, frozen, at, note)
        _, vjp = jax.vjp(run, [leaves[n] for n in others], [rows for *_, rows in found])
        d_own, d_rows = vjp(dx)
        for n, d_leaf in zip(others, d_own, strict=True):
            grads[n] = add(grads[n], d_leaf)
        for (name, ids, _), rows in zip(found, d_rows, strict=True):
            n = tables[name]
            grads[n] = add_rows(grads[n], ids, rows, self._sizes[name])
        return tuple(grads)

    @functools.cached_property
    def _tables(self) -> dict[str, int]:
        """Embeddings that `first` looks up and are trained: the place of each among the leaves it uses."""
        names = [owner(self._paths[0][n]) for n in self.first[0]]
        return {name: names.index(name) for name in sorted(self.uses[0].looked_up & {*names})}

    def _part_calls(self, model: Any) -> dict[str, Call]:
        """How the modules of a model that have parts of their parameters are called."""
        return {
            name: part_call(module, self._sizes[name])
            for name, module in modules(model)
            if size_of(module) < self._sizes[name]
        }

    def run_last(self, leaves: Any, frozen: Any, y: Any, at: At, *, is_part: bool) -> Any:
        """`last` of the model with the leaves that it uses, or `predict`, of a block; or a part of either."""
        model, facts = self._with(self.last, leaves, frozen), self.layout.facts
        y = facts.traces.padding.unpad(y, facts.traces.y, at.layout)
        if is_part:  # each part of y has a cotangent of its own
            y = jax.tree.map(lambda a: vary_over(a, frozenset([STAGE])), y)
        else:
            y = jax.tree.map(lambda a, shape: a.astype(shape.dtype), y, facts.traces.y)
            model = with_calls(model, self._part_calls(model))
        with constants_told("`predict`" if self._predicts else "`last`"):
            return facts.after_layers(model, y, at, predicts=self._predicts, is_part=is_part)

    def _with(self, numbers: Sequence[Sequence[int]], *given: Any) -> Any:
        """The model with leaves of these numbers; of the others it has shapes."""
        return self.merge([*map(_replaced, self.leaves, numbers, given)])


def _replaced(leaves: Sequence[Any], numbers: Sequence[int], values: Any) -> list[Any]:
    known = dict(zip(numbers, values, strict=True))
    return [known.get(n, shape_of(leaf)) for n, leaf in enumerate(leaves)]
