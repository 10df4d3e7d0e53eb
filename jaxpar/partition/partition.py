"""The division of a task's model over devices, computed from its facts and a `Parallel`.

The facts say what the model is, a `Parallel` how devices share the work. A partition says on which stage each
layer is, which rules split its arrays, and which sizes follow.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.base.axes import BATCH, DATA, POOL_ROWS, STAGE, TENSOR
from jaxpar.base.types import Arrays, Tree
from jaxpar.config import Parallel
from jaxpar.model.facts import ModelFacts
from jaxpar.model.outer import OuterModule
from jaxpar.model.stack import NO_SLOTS
from jaxpar.model.task import Task
from jaxpar.partition.checks import check_fit
from jaxpar.pipeline.placement import (
    PartCosts,
    Route,
    Slots,
    balanced,
    make_slots,
    resolve_placement,
    route_of,
    tick_cost,
)
from jaxpar.sharding import (
    Axes,
    Constraint,
    Rules,
    axes_of_spec,
    dims_of,
    is_variable,
    off_stages,
    split_over_data,
    to_spec,
)

# The part of a stage's layers, or of the work of one, that is too small to matter; so are so few numbers.
LITTLE, FEW = 0.1, 2**18


@dataclasses.dataclass(frozen=True)
class Partition:
    """A task's model divided over devices.

    Attributes:
      facts: of the task.
      parallel: with no -1 left.
    Raises:
      ValueError: the two do not fit each other.
    """

    facts: ModelFacts
    parallel: Parallel

    def __post_init__(self):
        task, mesh = self.facts.task, self.parallel.mesh
        parallel = dataclasses.replace(self.parallel, mesh=mesh.of_task(task.name, task.axes))
        object.__setattr__(self, "parallel", parallel)
        check_fit(self.facts, parallel)
        _ = self.facts.traces  # mistakes in the model are reported now
        if parallel.mesh.stage > 1:
            self._check_outer()
        _ = self.placement  # likewise

    def _check_outer(self) -> None:
        """Raises a ValueError if the input layers or the output head cannot be placed as requested."""
        model, pipeline = type(self.facts.model).__name__, self.parallel.pipeline
        named = pipeline.named_placement
        if self.head == "sharded" and not self._can_share_head:
            what = f"placement={str(named)!r} leaves out last" if named else "head='sharded'"
            raise ValueError(
                f"{what}: model {model} has no method last_part, and `last` calls no linear layer whose "
                f"outputs divide by stage={self.parallel.mesh.stage}.\n"
                f"Fix: keep the whole head on the last stage (head='last'), or write last_part."
            )
        if named and named.has_first == self.shares_first:
            raise ValueError(
                f"placement={str(named)!r} {'names' if named.has_first else 'leaves out'} first, but the "
                f"input part of model {model} is {'split over stages' if named.has_first else 'whole'}.\n"
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
        if asked is None:
            asked = self._can_share_head and not (self.parallel.speeds and self._is_faster_alone)
        return "sharded" if asked else "last"

    @property
    def _is_faster_alone(self) -> bool:
        """Whether stages of unequal speed wait less if the last has the whole head: parts are equal."""
        both, places = map(self._costs, (False, True)), len(self.route.stages)
        alone, shared = (tick_cost(costs, balanced(costs, places)) for costs in both)
        return alone < shared

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
    def rows_of(self) -> dict[str, tuple[int, ...]]:
        """By kind, the layer in each row of its stack; -1 in empty rows."""
        return dict(zip(self.facts.kinds, self.slots.rows, strict=True))

    @property
    def costs(self) -> PartCosts:
        """Of the parts of the model, in FLOPs; what all stages share counts where their speeds differ."""
        is_shared = self.parallel.mesh.stage == 1 or self.head == "sharded"
        costs = self._costs(is_shared)
        return costs._replace(first=(0.0, 0.0)) if self.shares_first else costs

    def _costs(self, is_shared: bool) -> PartCosts:
        """The same, if all stages share the head or not."""
        costs, places = self.facts.costs, self.route.stages
        if speeds := self.parallel.speeds:
            costs = costs._replace(speeds=tuple(speeds[stage] for stage in places))
        if not is_shared:
            return costs
        part = sum(costs.last) / len(places) if speeds else 0.0
        return costs._replace(last=(0.0, 0.0), shared=(part, 0.0))

    @property
    def shares_first(self) -> bool:
        """Whether all stages run what comes before the layers, with their parts of it."""
        return bool(self.split_modules[0])

    @functools.cached_property
    def split_outer(self) -> tuple[OuterModule, ...]:
        """What comes before and after the layers and no stage holds whole, but for what the rules split."""
        whole = self._asked[0] is False, self.head == "last"
        return tuple(end for end in self._splittable if not any(_both(whole, end.num_outputs)))

    @functools.cached_property
    def _splittable(self) -> tuple[OuterModule, ...]:
        """The same, if the head is on all stages."""
        if self.parallel.mesh.stage == 1:
            return ()
        return tuple(
            end
            for end in self.facts.outer_modules.values()
            if not self.why_whole(end)
            or (any(_both(self._asked, end.num_outputs)) and not end.size % self.num_parts(end))
        )

    def num_parts(self, end: OuterModule) -> int:
        """Into how many parts an end would be split, those over other axes counted."""
        axes = STAGE, *self.task.rules.axes_of(end.dim)
        return math.prod(self.parallel.mesh.sizes[axis] for axis in axes)

    def why_whole(self, end: OuterModule) -> str:
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
            return "splitting it would repeat other work on every stage"
        is_large = not after and end.num_params > max(LITTLE * layers, FEW)
        if 2 * before + after + 2 * x <= end.num_params or is_large:
            return ""
        return "splitting it would send more data"

    @functools.cached_property
    def split_modules(self) -> tuple[frozenset[str], ...]:
        """The modules that each stage has a part of: those that `first` calls, and those of `last`."""
        if self.parallel.mesh.stage == 1:
            return frozenset(), frozenset()
        dims = self.facts.split_dims
        split = {name for name, dim in dims.items() if STAGE in self.rules.axes_of(dim)}
        return tuple(frozenset(split.intersection(uses.called)) for uses in self.facts.uses)

    @functools.cached_property
    def rules(self) -> Rules:
        """How parameters are split while a step computes."""
        head_is_last = self.parallel.mesh.stage > 1 and self.head == "last"
        rules = off_stages(self.task.rules) if head_is_last else self.task.rules
        own = {end.dim: (STAGE, *rules.axes_of(end.dim)) for end in self.split_outer}
        return rules.replace({POOL_ROWS: TENSOR, **own})

    @functools.cached_property
    def param_rules(self) -> Rules:
        """How parameters lie between steps."""
        return split_over_data(self.rules) if self.parallel.fsdp else self.rules

    @functools.cached_property
    def gathers_layers(self) -> bool:
        """Whether FSDP gathers one layer's parameters at a time, for each pass through it.

        A stage gathers all of its layers once a step instead: it passes them once for each unit. So do groups
        with unequal shares, which aren't in a layer at the same time.
        """
        parallel, facts = self.parallel, self.facts
        is_split = parallel.fsdp and parallel.mesh.data > 1 and parallel.mesh.stage == 1
        is_able = parallel.has_equal_shares and facts.divides_by_hand and bool(facts.kind_of)
        return is_split and is_able

    @property
    def runs_in_units(self) -> bool:
        """Whether a step runs unit by unit on a schedule, if only as one unit; if not, it runs as a whole."""
        return self.parallel.runs_in_units or self.gathers_layers

    @property
    def step_rules(self) -> Rules:
        """How a step takes parameters."""
        return self.param_rules if self.gathers_layers else self.rules

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
        """For activations (`LayerContext.layout`)."""
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
        steps = self.facts.num_steps or 1  # one chunk has all steps, however many
        return steps // self.parallel.num_chunks // parts if self.facts.time_major else None

    def step_split(self, dims: tuple[str | None, ...], shape: tuple[int, ...]) -> list[Axes]:
        """The axes that split each dim of a parameter as a step takes it.

        Where layers are gathered, `data` is among them; but not of a dim that `tensor` splits as well: a part
        of it would lie in many pieces.
        """
        if not self.gathers_layers:
            return self.rules.split(dims)
        sizes = self.parallel.mesh.sizes
        split = axes_of_spec(self.param_rules.spec(dims, shape, sizes))
        return [
            tuple(a for a in own if a != DATA or TENSOR not in own or sizes[TENSOR] == 1)
            for own in split
        ]

    def specs(self, tree: Tree, *axes: str) -> Arrays:
        """Partition specs over these axes and those of one's own, of a tree of variables."""
        return self._specs(tree, axes, lambda dims, _: self.rules.split(dims))

    def param_specs(self, tree: Tree, *axes: str) -> Arrays:
        """The same of parameters as a step takes them: over `data`, too, where they are split over it."""
        return self._specs(tree, (*axes, *[DATA] * self.gathers_layers), self.step_split)

    def _specs(self, tree: Tree, axes: Axes, split_of: Callable[..., list[Axes]]) -> Arrays:
        axes = (*axes, *self.task.axes)

        def of(leaf: Any) -> Arrays:
            split = split_of(dims_of(leaf), tuple(leaf.shape)) if is_variable(leaf) else ()
            spec = to_spec([tuple(a for a in own if a in axes) for own in split])
            return jax.tree.map(lambda _: spec, leaf)

        return jax.tree.map(of, tree, is_leaf=is_variable)

    @property
    def outer_stages(self) -> tuple[int, int]:
        """The stages of the first layer and of the last."""
        return self.route.stages[0], self.route.stages[-1]


def _both(ones: Iterable[Any], others: Iterable[Any]) -> Iterator[bool]:
    return (bool(one and other) for one, other in zip(ones, others, strict=True))
