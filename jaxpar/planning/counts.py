"""What a task's step computes, keeps and holds, on any devices: traced once, and scaled by arithmetic.

Legend: t time steps of a unit (None if the model has no time), b its rows.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import At
from jaxpar.base.axes import LAYERS
from jaxpar.base.trees import shape_of, whole_bytes
from jaxpar.config import Parallel
from jaxpar.ends import with_calls
from jaxpar.facts import ModelFacts
from jaxpar.layout import Layout, Outer
from jaxpar.mesh import MeshConfig
from jaxpar.model import KIND
from jaxpar.pipeline.spec import Layer
from jaxpar.pipeline.split import SplitLayer
from jaxpar.pipeline.walk import with_sums
from jaxpar.sharding import Rules, array_of, axes_of_spec, check_split, dims_of, named_leaves
from jaxpar.task import Task
from jaxpar.trace.bound import in_bound
from jaxpar.trace.counts import Amount, Collectives, amount, amount_and_sent, needed_inputs


class Array(NamedTuple):
    """An array of the state.

    Attributes:
      dims, shape: all layers of a kind are in one stack.
      itemsize: bytes of an element.
      kind: number of the kind of layers in whose stack it is; None outside of all stacks.
    """

    name: str
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    itemsize: int
    kind: int | None

    @property
    def path(self) -> str:
        """The name as the model's modules have it."""
        return self.name.replace(".", "/")


class Part(NamedTuple):
    """A device's part of an array: the mesh axes that split each dim, and the number of elements left."""

    axes: tuple[tuple[str, ...], ...]
    elements: int


@functools.lru_cache(maxsize=1 << 16)
def part_of(array: Array, rows: int, rules: Rules, sizes: tuple[tuple[str, int], ...]) -> Part:
    """The part of an array that a device of a mesh holds.

    Args:
      rows: of its stack, if it is in one.
      sizes: of the mesh's axes.
    Raises:
      ValueError: a dim does not divide by the axes that split it.
    """
    on, shape = dict(sizes), array.shape
    if array.kind is not None:
        shape = (rows, *shape[1:])
    spec = rules.spec(array.dims, shape, on)
    check_split(f"parameter {array.name}", array.dims, shape, spec, on)
    axes = tuple(axes_of_spec(spec))
    return Part(axes, math.prod(shape) // math.prod(on[axis] for each in axes for axis in each))


class Kind(NamedTuple):
    """One layer of a kind, on one unit.

    Attributes:
      forward, backward, weights: what F, B and W do; W is nothing where B does it too.
      kept: bytes that F leaves for B and W.
      sent: over axes of one's own, by F, and by B and W; see `trace.counts.amount_and_sent`.
    """

    forward: Amount
    backward: Amount
    weights: Amount
    kept: float
    sent: tuple[Collectives, ...] = ()


class Unit(NamedTuple):
    """What a unit takes.

    Attributes:
      steps: t; 1 if the model has no time.
      x: bytes of what goes from layer to layer.
      kinds: of each kind, one layer.
      first, first_gradient, last: before the layers; its gradient; after them, with gradients.
    """

    steps: float
    x: float
    kinds: tuple[Kind, ...]
    first: Amount
    first_gradient: Amount
    last: Amount


def _own_axes(counts: "Counts") -> tuple[str, ...]:
    return counts.facts.task.axes


class Counts:
    """Of a task's model, whatever the devices.

    Attributes:
      facts: of the task.
      params, frozen, opt_state, carry: the arrays of the state.
      first, last: numbers of the parameters that are used before the layers, and after them.
      dtype, width: of what goes from layer to layer; the size of its last dim.
      batch_bytes: of a whole batch.
    """

    def __init__(self, facts: ModelFacts, num_steps: int):
        """Traces shapes; no array is made.

        Args:
          num_steps: of the run that the optimizer is made for.
        Raises:
          ValueError: the task's model is not valid; see `layout.Layout`.
        """
        self.facts = facts
        self._layout = layout = Layout(facts, Parallel(MeshConfig()))
        optimizer = facts.task.make_optimizer(num_steps)
        self.params, self.frozen, self.opt_state, self.carry = (
            tuple(self._arrays(tree))
            for tree in (
                layout.params,
                layout.frozen,
                jax.eval_shape(lambda params: optimizer.init(params), layout.params),
                jax.eval_shape(layout.initial_carry, layout.params, layout.frozen),
            )
        )
        self._outer = Outer(layout, layout.abstract_model())
        self.first, self.last = self._outer.first[0], self._outer.last[0]
        passed = jax.tree.leaves(facts.passed)[0]
        self.dtype, self.width = str(passed.dtype), passed.shape[-1]
        self.batch_bytes = whole_bytes(facts.batch)
        self._traced = functools.cache(self._trace)

    def _arrays(self, tree: Any) -> Iterator[Array]:
        for name, leaf in named_leaves(tree):
            dims, value, number = dims_of(leaf), array_of(leaf), None
            if dims[:1] == (LAYERS,):
                number = self.facts.kinds.index(leaf.get_metadata(KIND))
            yield Array(name, dims, tuple(value.shape), value.dtype.itemsize, number)

    @functools.cached_property
    def summed(self) -> tuple[dict[str, tuple[int, int, int]], ...]:
        """What is summed over stages for modules in parts, before the layers and after them, by name.

        For each, of a whole batch: the numbers that it gives; those of them that its gradients need, which
        before the layers are computed again; and those of its inputs whose cotangents are summed.
        """
        return tuple(map(self._summed, (0, -1)))

    @in_bound(_own_axes)
    def _summed(self, place: int) -> dict[str, tuple[int, int, int]]:
        facts, names = self.facts, []
        graphdef, state = nnx.split(facts.model)
        arrays, structure = jax.tree.flatten(state)
        floats = [n for n, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]
        called = facts.uses[place].called

        def run(own, outs, x):
            """The first result, what modules are called with and what they give: `outs` if there are any."""
            leaves, inputs, made = list(arrays), [], []
            for n, leaf in zip(floats, own, strict=True):
                leaves[n] = leaf

            def call(name, own, *args, **options):
                out = own(*args, **options)
                if outs:  # the value alone, so that cotangents go on
                    out += jax.lax.stop_gradient(outs[len(made)] - out)
                names.append(name)
                inputs.append(args[0])
                made.append(out)
                return out

            calls = {name: functools.partial(call, name) for name in called}
            model = with_calls(nnx.merge(graphdef, jax.tree.unflatten(structure, leaves)), calls)
            return jax.tree.leaves(facts.run_end(place, model, x))[:1], inputs, made

        own, x = [shape_of(arrays[n]) for n in floats], jax.tree.map(shape_of, facts.traces.y)
        y, inputs, made = jax.eval_shape(functools.partial(run, outs=None), own, x=x)
        found: dict[str, tuple[int, int, int]] = dict.fromkeys(called, (0, 0, 0))

        def gradients(own, outs, x, dy):
            return jax.vjp(lambda own, x: run(own, outs, x)[0], own, x)[1](dy)

        needed = needed_inputs(gradients, own, made, x, y)[len(own) :]
        for n, (name, given, out) in enumerate(zip(names[: len(made)], inputs, made, strict=True)):
            depends = any(needed_inputs(lambda *args, n=n: run(*args)[1][n], own, made, x))
            is_float = jnp.issubdtype(given.dtype, jnp.floating)
            before, size = found[name], math.prod(out.shape)
            summed = math.prod(given.shape) * (depends and is_float)
            found[name] = before[0] + size, before[1] + size * needed[n], before[2] + summed
        return found

    @property
    def counted(self) -> int:
        """The size of a full batch in what the task counts (`Task.unit`): rows, or rows times time steps."""
        return self.facts.batch_size * (self.facts.num_steps or 1)

    def unit(self, t: int | None, b: int) -> Unit:
        """A unit of any size.

        Its numbers are linear in b, and mostly bilinear in t and b: then four units determine them.
        """
        whole = self.facts.num_steps
        if whole is None:
            return self._of_rows(None, b)
        t, fewer = t or 1, whole // least_factor(whole)
        if t not in (fewer, whole) and not self._is_linear_in_time:
            return self._of_rows(t, b)
        low, high = (self._of_rows(size, b) for size in (fewer, whole))
        return _between(low, high, fewer, whole, t)

    @functools.cached_property
    def _is_linear_in_time(self) -> bool:
        """Whether two lengths tell all: not where products are of steps with steps, as of matrix memories."""
        whole, rows = self.facts.num_steps or 1, self.facts.batch_size
        fewer = whole // least_factor(whole)
        low, high, one = (self._traced(size, rows) for size in (fewer, whole, 1))
        pairs = zip(_between(low, high, fewer, whole, 1).kinds, one.kinds, strict=True)
        return all(
            math.isclose(a.flops, b.flops, rel_tol=1e-6)
            for pair in pairs
            for a, b in zip(*(kind[:3] for kind in pair), strict=True)
        )

    def _of_rows(self, t: int | None, b: int) -> Unit:
        rows, together = self.facts.batch_size, math.lcm(*self.facts.rows_together.values())
        fewer = rows // least_factor(rows // together)
        return _between(self._traced(t, fewer), self._traced(t, rows), fewer, rows, b)

    @in_bound(_own_axes)
    def _trace(self, t: int | None, b: int) -> Unit:
        facts, outer, functions = self.facts, self._outer, self._layout.layer_functions()

        def cut(leaf: Any) -> Any:
            """A unit's part of an array of the batch, as the model sees it."""
            shape = list(leaf.shape)
            if shape:
                shape[0] = b
            if facts.time_major and len(shape) > 1:
                shape[:2] = t if leaf.shape[0] > 1 else 1, b
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        batch = jax.tree.map(cut, facts.block)

        def first(leaves, frozen, batch):
            return outer.run_first(leaves, frozen, facts.at(batch))

        def first_gradient(grads, leaves, frozen, batch, dx):
            return outer.add_first_gradient(grads, leaves, frozen, facts.at(batch), dx)

        def last(leaves, frozen, y, batch):
            def loss(leaves, y):
                sums = outer.run_last(leaves, frozen, y, facts.at(batch), is_part=False)
                return jax.tree.leaves(sums)[0]

            return jax.grad(loss, (0, 1))(leaves, y)

        def used(numbers: Any) -> Any:
            pairs = zip(outer.leaves, numbers, strict=True)
            return [tuple(shape_of(own[n]) for n in each) for own, each in pairs]

        of_first, of_last = used(outer.first), used(outer.last)
        x = jax.tree.map(shape_of, jax.eval_shape(first, *of_first, batch))
        kinds = []
        for function, (_, (_, carry, _, _)), params, frozen in zip(
            functions, facts.traces.layers, *self._layout.of_row, strict=True
        ):
            carry = jax.tree.map(lambda a: jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype), carry)
            x_and_sums = x, facts.no_sums
            kinds.append(_count_layer(function, params, frozen, carry, x_and_sums, facts.at(batch)))
        gradient = Amount()
        if of_first[0]:
            gradient = amount(first_gradient, of_first[0], *of_first, batch, x)
        return Unit(
            steps=t or 1,
            x=whole_bytes(x),
            kinds=tuple(kinds),
            first=amount(first, *of_first, batch),
            first_gradient=gradient,
            last=amount(last, *of_last, x, batch),
        )


def _count_layer(function: Layer, params: Any, frozen: Any, carry: Any, x: Any, at: At) -> Kind:
    """What a layer does in parts, as the engine has them."""
    split = SplitLayer(with_sums(function), params, frozen, carry, x, at, splits=True)

    def forward(params, frozen, carry, x, batch):
        return split.forward(params, frozen, carry, x, at._replace(batch=batch))

    prepared, weights = jax.eval_shape(split.prepare, params, frozen), Amount()
    of_forward, sent = amount_and_sent(forward, params, frozen, carry, x, at.batch)
    of_backward, back = amount_and_sent(split.backward, prepared, split.saved, carry, x)
    if split.has_weights:
        needed = [split.saved[n] for n in split.needed]
        weights, later = amount_and_sent(split.weights, prepared, needed, split.later)
        back = {key: back.get(key, 0) + later.get(key, 0) for key in {**back, **later}}
    kept = whole_bytes(split.saved_and_room)
    return Kind(of_forward, of_backward, weights, kept, (sent, back))


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
      ValueError: the task's model is not valid; see `layout.Layout`.
    """
    return Counts(ModelFacts.of(task.resolve(), platform), num_steps)
