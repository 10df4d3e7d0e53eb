"""Decides which variables of a model are stored in pools and which in stacks."""

import functools
import math
from collections.abc import Sequence

import jax
from flax import nnx

from jaxpar.base.axes import DATA, STAGE, TENSOR
from jaxpar.base.display import format_bytes
from jaxpar.base.trees import shape_of
from jaxpar.base.types import Module, Shapes
from jaxpar.model.abstract import abstract
from jaxpar.model.model import overrides
from jaxpar.model.outer import ENDS, STACK, name_dims, owner
from jaxpar.model.task import Task
from jaxpar.partition import partition
from jaxpar.partition.partition import Partition
from jaxpar.partition.pool import OTHER, Pool, dim_over_tensor
from jaxpar.sharding import PARAM_SHAPE, array_of, is_variable, named_leaves


class Packing:
    """What of a partition's model is in pools.

    Attributes:
      partition: of the model.
    """

    def __init__(self, partition: Partition):
        """Makes nothing; shapes are found when they are asked for."""
        self.partition, self.facts = partition, partition.facts

    def make(self, seed: int | jax.Array) -> Module:
        """The model with its values, of a seed or a key, its layers in their slots. Call under `jit`."""
        model = self.facts.make(seed)
        if self.partition.slots.layers:
            model.layers.place(self.partition.slots)
        for _, variable in nnx.iter_graph(model):
            if is_variable(variable):
                variable.set_metadata(PARAM_SHAPE, tuple(variable.shape))
        name_dims(model, self.facts.outer_modules)
        return model

    @functools.cached_property
    def _shapes(self) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        return self.facts.split(abstract(lambda: self.make(0)))

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the model."""
        return self._shapes[0]

    @property
    def params(self) -> nnx.State:
        """Shapes of the variables that are trained, layers in stacks."""
        return self._shapes[1]

    @property
    def frozen(self) -> nnx.State:
        """Shapes of all other variables, layers in stacks."""
        return self._shapes[2]

    @functools.cached_property
    def pools(self) -> tuple[Pool, Pool] | None:
        """One for each tree; None if nothing is in pools."""
        if self.pools_layers:
            return self.possible_pools
        return None if self._task_looks else self._pools_of_outer

    @functools.cached_property
    def pools_layers(self) -> bool:
        """Whether layers are in pools; otherwise they are in stacks.

        They are in stacks where a task's own axes may split them, where the task or the model's `draw` or
        `prepare` looks at them, and where the carry that they begin with depends on parameters.
        """
        return (
            self.possible_pools is not None
            and not (self.facts.task.axes or self._task_looks)
            and not any(path.startswith(f"{STACK}/") for path in self._looked_at)
            and not self.facts.starts_with_variables
        )

    @property
    def _task_looks(self) -> bool:
        """Whether the task, or a loop that updates by itself, looks at single variables of a state."""
        task, kind = self.facts.task, type(self.facts.task)
        names = "after_validation", "evaluated_params"
        looks = any(getattr(kind, name) is not getattr(Task, name) for name in names)
        on_host = task.has_own_optimizer and self.partition.parallel.update == "host"
        return looks or on_host or not task.has_optimizer

    @property
    def _looked_at(self) -> frozenset[str]:
        """The variables that the model's `draw` and `prepare` change or depend on."""
        sizes = tuple(self.partition.parallel.mesh.sizes.items())
        asked = {"draw": None, "prepare": sizes}
        found = (
            self.facts.looked_at(*a) for a in asked.items() if overrides(self.facts.model, a[0])
        )
        return frozenset().union(*found)

    @functools.cached_property
    def possible_pools(self) -> tuple[Pool, Pool] | None:
        """Pools, if layers can be in them and take so much less than in stacks that it matters.

        Layers of one kind take as much in a stack, which a scan reads without a copy.
        """
        if self.partition.parallel.mesh.stage == 1 or len(self.facts.kinds) < 2:
            return None
        if (pools := self._make_pools(self.facts.layer_stacks)) is None:
            return None
        in_stacks, in_pools = (
            sum(getattr(pool, name) for pool in pools) for name in ("stack_bytes", "num_bytes")
        )
        saves = in_stacks - in_pools > max(partition.LITTLE * in_stacks, partition.FEW * 4)
        return pools if saves else None

    @functools.cached_property
    def _pools_of_outer(self) -> tuple[Pool, Pool] | None:
        """Pools for the modules before and after the layers alone, if these are large.

        No stage but its own has them then, and their gradients are not summed over stages.
        """
        size = sum(array_of(leaf).size for own in self._outer[0] for leaf in own.values())
        of_stage = self.facts.layer_numbers / self.partition.parallel.mesh.stage
        if size <= max(partition.LITTLE * of_stage, partition.FEW):
            return None
        nothing = tuple({} for _ in self.facts.kinds)
        return self._make_pools((nothing, nothing))

    def _make_pools(self, layer_stacks: Sequence[Sequence[Shapes]]) -> tuple[Pool, Pool] | None:
        """Pools for layers by kind, and for both outer parts; None if their arrays do not fit."""
        sizes, rules = self.partition.parallel.mesh.sizes, self.partition.rules
        stages = sizes[STAGE]
        outer = [
            [0 if s == own else -1 for s in range(stages)] for own in self.partition.outer_stages
        ]
        pools = []
        for stacks, of_outer in zip(layer_stacks, self._outer, strict=True):
            shapes: list[Shapes] = [
                jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack)
                for stack in stacks
            ]
            leaves = [jax.tree.leaves(own, is_leaf=is_variable) for own in stacks]
            dims = [[dim_over_tensor(leaf, 1, rules, sizes) for leaf in own] for own in leaves]
            if any(dim == OTHER for own in dims for dim in own):
                return None  # or a mistake, which `check_sizes` reports
            for own in of_outer:
                shapes.append({name: shape_of(array_of(leaf)) for name, leaf in own.items()})
                dims += [[dim_over_tensor(leaf, 0, rules, sizes) for leaf in own.values()]]
            rows = (*self.partition.slots.rows, *outer)
            pools.append(Pool.of(shapes, dims, rows, stages, sizes[TENSOR]))
        return pools[0], pools[1]

    @functools.cached_property
    def _outer(self) -> list[list[dict[str, nnx.Variable]]]:
        """Variables outside of the layers that one stage alone uses, and that no rule splits over stages.

        For both trees: those that `first` uses and those that `last` uses, by name. A table that both use is
        the last stage's, if `first` does little but look words up and their rows are less than the table.
        """
        split, task = self.partition, self.facts.task
        if split.parallel.mesh.stage == 1 or task.axes:  # all stays where it is
            return [[{}, {}], [{}, {}]]
        first, last = self.facts.reads
        looked_at, sizes = self._looked_at, split.parallel.mesh.sizes
        before, after = first - last - looked_at, frozenset[str]()
        if split.head == "last":
            both, (of_first, _) = first & last, self.facts.uses
            if of_first.flops <= partition.LITTLE * self.facts.layer_flops:
                rows = {name: of_first.called[name] / sizes[DATA] for name in of_first.looked_up}
                known = {n: v for own in self.facts.outer_variables for n, v in own.items()}
                both = {n for n in both if rows.get(owner(n), math.inf) > math.prod(known[n].shape)}
            after = last - both - looked_at
        uses = before if after.isdisjoint(first) and not split.shares_first else (), after
        fits = [
            {n: v for n, v in own.items() if dim_over_tensor(v, 0, split.rules, sizes) != OTHER}
            for own in self.facts.outer_variables
        ]
        return [[{n: own[n] for n in own if n in names} for names in uses] for own in fits]

    @property
    def rows_of(self) -> dict[str, tuple[int, ...]]:
        """By kind, the layer in each row of its stack, -1 in empty rows; ends in pools are kinds too."""
        found = self.partition.rows_of
        if self.pools is not None:
            stages = range(self.partition.parallel.mesh.stage)
            for kind, own in zip(ENDS, self.partition.outer_stages, strict=True):
                found[kind] = tuple(0 if stage == own else -1 for stage in stages)
        return found

    @property
    def tied(self) -> frozenset[str]:
        """The tables that `first` looks up and the last stage alone has."""
        if self.pools is None:
            return frozenset()
        first = self.facts.reads[0]
        return frozenset(owner(name) for _, own in self._outer for name in own if name in first)

    def packed_names(self, number: int) -> list[list[str]]:
        """The variables in the pool of a tree: for each kind of layer, of `first`, and of `last`."""
        if self.pools is None:
            return []
        stacks = zip(self.facts.kinds, self.facts.layer_stacks[number], strict=True)
        names = [
            [f"{STACK}/{kind}/{name}" for name, _ in named_leaves(stack, "/")]
            if self.pools_layers
            else []
            for kind, stack in stacks
        ]
        return [*names, *map(list, self._outer[number])]

    def describe(self) -> list[tuple[str, str]]:
        """A row of the table before a run: how much layers of unequal kinds take."""
        if self.possible_pools is None:
            return []
        size = format_bytes(sum(pool.num_bytes for pool in self.possible_pools))
        pools = f"layers in pools, {size} per device"
        return [
            ("storage", pools if self.pools_layers else "layers in stacks by kind, not in pools")
        ]
