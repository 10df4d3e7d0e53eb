"""Counts the operations, saved activations and memory of a task's step, for any devices.

Legend: t time steps of a unit (None if the model has no time), b its rows.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import LAYERS
from jaxpar.base.trees import has_time, shape_of, whole_bytes
from jaxpar.base.types import Shapes
from jaxpar.config import Parallel
from jaxpar.internal.split import SplitLayer
from jaxpar.mesh import MeshConfig
from jaxpar.model.facts import ModelFacts
from jaxpar.model.stack import KIND
from jaxpar.model.task import Task
from jaxpar.partition.partition import Partition
from jaxpar.pipeline.spec import Layer
from jaxpar.pipeline.walk import with_sums
from jaxpar.sharding import array_of, dims_of, named_leaves
from jaxpar.step.parts import Outer, Parts
from jaxpar.trace.bound import in_bound
from jaxpar.trace.counts import Amount, amount


class Array(NamedTuple):
    """A variable of the model.

    Attributes:
      name: as the model's modules have it, such as "embedding/table".
      dims, shape: all layers of a kind are in one stack.
      itemsize: bytes of an element.
      kind: number of the kind of layers in whose stack it is; None outside of all stacks.
    """

    name: str
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    itemsize: int
    kind: int | None


class Kind(NamedTuple):
    """One layer of a kind, on one unit.

    Attributes:
      forward, backward, weights: what F, B and W do; W is nothing where B does it too.
      kept: bytes that F leaves for B and W.
    """

    forward: Amount
    backward: Amount
    weights: Amount
    kept: float


class Unit(NamedTuple):
    """What a unit takes.

    Attributes:
      steps: of x; 1 if the model has no time.
      x: bytes of what goes from layer to layer.
      kinds: of each kind, one layer.
      first, last: before the layers, without gradients; after them, with gradients.
    """

    steps: float
    x: float
    kinds: tuple[Kind, ...]
    first: Amount
    last: Amount


class Counts:
    """Of a task's model, whatever the devices.

    Attributes:
      facts: of the task.
      params, frozen: the variables of the model.
      opt_copies: bytes of the optimizer's state for each byte of parameters.
      dtype: of what goes from layer to layer.
    """

    def __init__(self, facts: ModelFacts, num_steps: int):
        """Traces shapes; no array is made.

        Args:
          num_steps: of the run that the optimizer is made for.
        Raises:
          ValueError: the task's model is not valid; see `partition.Partition`.
        """
        self.facts = facts
        self._parts = parts = Parts.of(Partition(facts, Parallel(MeshConfig())))
        storage = parts.storage
        self.params, self.frozen = map(tuple, map(self._arrays, (storage.params, storage.frozen)))
        optimizer = facts.task.make_optimizer(num_steps)
        opt_state = jax.eval_shape(lambda params: optimizer.init(params), storage.params)
        self.opt_copies = whole_bytes(opt_state) / max(whole_bytes(storage.params), 1)
        self._outer = Outer(parts, parts.abstract_model())
        self.dtype = str(jax.tree.leaves(facts.passed)[0].dtype)
        self._traced = functools.cache(self._trace)

    def _arrays(self, tree: Shapes) -> Iterator[Array]:
        for name, leaf in named_leaves(tree, "/"):
            dims, value, number = dims_of(leaf), array_of(leaf), None
            if dims[:1] == (LAYERS,):
                number = self.facts.kinds.index(leaf.get_metadata(KIND))
            yield Array(name, dims, tuple(value.shape), value.dtype.itemsize, number)

    @property
    def size_of_batch(self) -> tuple[int, str]:
        """Of a full batch, and its unit: the task's own, one in each time step; rows if there is no time."""
        rows, steps, unit = self.facts.batch_size, self.facts.num_steps, self.facts.task.unit
        return (rows, "rows") if steps is None or unit == "rows" else (rows * steps, unit)

    def unit(self, t: int | None, b: int) -> Unit:
        """A unit of any size: four units determine it, for its numbers are taken as bilinear in t and b."""
        rows, whole = self.facts.batch_size, self.facts.num_steps
        together = math.lcm(*self.facts.rows_together.values())
        fewer = rows // least_factor(rows // together)

        def of_rows(t: int | None) -> Unit:
            return _between(self._traced(t, fewer), self._traced(t, rows), fewer, rows, b)

        if t is None or whole is None or self.facts.whole_window or self.facts.why_whole:
            return of_rows(t)
        shorter = whole // least_factor(whole)
        return _between(of_rows(shorter), of_rows(whole), shorter, whole, t)

    @in_bound(lambda self: self.facts.task.axes)
    def _trace(self, t: int | None, b: int) -> Unit:
        facts, outer = self.facts, self._outer

        def cut(leaf: jax.ShapeDtypeStruct, timed: bool) -> jax.ShapeDtypeStruct:
            """A unit's part of an array of the batch, as the model sees it."""
            shape = [b, *leaf.shape[1:]][: len(leaf.shape)]
            if facts.time_major and timed:
                shape[:2] = t if leaf.shape[0] == facts.num_steps else leaf.shape[0], b
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        batch = jax.tree.map(cut, facts.block, has_time(facts.block))

        def first(leaves, frozen, batch):
            return outer.run_first(leaves, frozen, facts.at(batch))

        def last(leaves, frozen, y, batch):
            def loss(leaves, y):
                sums = outer.run_last(leaves, frozen, y, facts.at(batch), is_part=False)
                return jax.tree.leaves(sums)[0]

            return jax.grad(loss, (0, 1))(leaves, y)

        def shapes(numbers):
            pairs = zip(outer.leaves, numbers, strict=True)
            return [tuple(shape_of(own[n]) for n in each) for own, each in pairs]

        of_first, of_last = shapes(outer.first), shapes(outer.last)
        x = jax.eval_shape(first, *of_first, batch)
        kinds, layers = [], (self._parts.layer_functions(), facts.traces.layers)
        each = zip(*layers, *self._parts.of_row, strict=True)
        for function, (_, (_, carry, _, _)), params, frozen in each:
            carry = jax.tree.map(lambda a: jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype), carry)
            x_and_sums = x, self._parts.no_sums
            kinds.append(_count_layer(function, params, frozen, carry, x_and_sums, facts.at(batch)))
        ends = amount(first, *of_first, batch), amount(last, *of_last, x, batch)
        sized = (leaf.shape[0] for leaf in jax.tree.leaves(x) if leaf.ndim and facts.time_major)
        return Unit(next(sized, 1), whole_bytes(x), tuple(kinds), *ends)


def _count_layer(
    function: Layer, params: Any, frozen: Any, carry: Any, x: Any, at: LayerContext
) -> Kind:
    """What a layer does in parts, as the engine has them."""
    split = SplitLayer(with_sums(function), params, frozen, carry, x, at, splits=True)

    def forward(params, frozen, carry, x, batch):
        return split.forward(params, frozen, carry, x, at._replace(batch=batch))

    prepared, weights = jax.eval_shape(split.prepare, params, frozen), Amount()
    if split.has_weights:
        needed = [split.saved[n] for n in split.needed]
        weights = amount(split.weights, prepared, needed, split.later)
    return Kind(
        amount(forward, params, frozen, carry, x, at.batch),
        amount(split.backward, prepared, split.saved, carry, x),
        weights,
        whole_bytes(split.saved_and_room),
    )


def least_factor(n: int) -> int:
    """The least prime factor of n; 1 for 1."""
    return next((d for d in range(2, n + 1) if n % d == 0), 1)


def _between(low: Unit, high: Unit, start: int, end: int, at: int) -> Unit:
    """On the line through two units of sizes `start` and `end`."""
    share = (at - start) / (end - start) if end > start else 1.0
    return jax.tree.map(lambda a, b: max(a + (b - a) * share, 0.0), low, high)


def counts_of(task: Task, num_steps: int, platform: str) -> Counts:
    """The counts of a task, traced now.

    Args:
      num_steps: of the run that the optimizer is made for.
      platform: that computes.
    Raises:
      ValueError: the task's model is not valid; see `partition.Partition`.
    """
    return Counts(ModelFacts.of(task.resolve(), platform), num_steps)
