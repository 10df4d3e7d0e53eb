"""Finds the origin of NaN or infinity by repeating the failed step part by part.

    forward    first -> layer 0 -> layer 1 -> last -> loss    the first output that is not finite, and when
    backward   first <- layer 0 <- layer 1 <- last            else the first gradient that is not, and when

    data       the arrays of the batch; theirs is told instead, if it is of the same rows

Batch and dropout are functions of the step, so this is the same step. Each kind of part is a program of its
own, for the whole batch and window. A run with finite numbers compiles none of them. The search does not look
at an update: `check_parameters` does that before a state is saved. Dims: S layers of a kind, T time, B batch.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.keys import is_key, key_as
from jaxpar.base.parts import starts_of
from jaxpar.base.trees import add, has_time, in_float32, vary_like
from jaxpar.base.types import Activations, Arrays, Batch, Carry, Cotangents, Index, Params
from jaxpar.model.model import Sums, mean_loss, overrides
from jaxpar.model.stack import values
from jaxpar.partition.by_layer import by_layer, kind_of
from jaxpar.sharding import (
    Constraint,
    array_of,
    is_variable,
    named_leaves,
    off_stages,
    user_name,
)
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.step.step import dropout_key

_ROWS_NAMED = 8


class Origin(NamedTuple):
    """The first place in a step with a number that is not finite.

    Attributes:
      place: such as "the output of layer 2 (lstm)".
      rows: of the batch that have such numbers there; none if they are unknown.
      time: the first time step of those rows that has one, from 0; in the backward pass the last. None if the
        model has no time, or if it is unknown.
    """

    place: str
    rows: tuple[int, ...] = ()
    time: int | None = None

    def __str__(self) -> str:
        text = self.place if self.time is None else f"{self.place} at time step {self.time}"
        if not self.rows:
            return text
        more = len(self.rows) - _ROWS_NAMED
        rows = ", ".join(map(str, self.rows[:_ROWS_NAMED])) + f" and {more} more" * (more > 0)
        return f"{text}, in row{'s' * (len(self.rows) > 1)} {rows}"


def find_origin(setup: Setup, state: TrainState, batch: Batch) -> Origin:
    """The place of the first number that is not finite, in the order of computing.

    All that is computed before the layers is one place, and all after them is one. The first call compiles
    two programs for each kind of part. With several processes, all of them call it.

    Args:
      setup: that the state was made with.
      state: before the step, as a halted state is; not consumed.
      batch: of the step.
    """
    facts, repeat = setup.facts, setup.cached(_Repeat, setup.train.seed)
    step, parts, has_time = repeat.step(state, batch), _parts_of(setup), facts.time_major
    x, sums, inputs = (), Sums(jnp.float32(0), jnp.float32(0)), list[Activations]()
    for part in parts:
        inputs.append(x)
        x, sums, marks_TB = repeat.forward(part.kind, part.place, step, x, sums)
        if facts.kinds and marks_TB.any():
            return _origin(f"the output of {part.name}", marks_TB, 0 if has_time else None)
    loss, d_sums = repeat.loss(sums)
    modules = list(dict.fromkeys(_module(*named) for named in named_leaves(facts.params)))
    if not np.isfinite(loss):
        is_bad = _by_place(setup, repeat.bad_arrays(step.params))
        bad = [] if facts.kinds else [module for module in modules if is_bad[module]]
        return Origin(f"the parameters of {bad[0]}" if bad else f"the output of {parts[-1].name}")
    first, last = ({path.removesuffix("/value") for path in own.read} for own in facts.uses)
    outer = facts.outer_variables[0].items()
    after_layers = [_module(n.replace("/", "."), leaf) for n, leaf in outer if n in last - first]
    begin, *layers, end = (part.name for part in parts)
    others = {end: [*after_layers, end], begin: [*reversed(layers), *reversed(modules)]}
    dx, grads = (), jax.tree.map(jnp.zeros_like, step.params)
    for part in reversed(parts):
        x, cotangents = inputs.pop(), (dx, d_sums)
        grads, dx, marks_TB, bad = repeat.backward(
            part.kind, part.place, step, x, cotangents, grads
        )
        is_bad = _by_place(setup, bad)
        is_bad[part.name] = is_bad.get(part.name, False) or bool(marks_TB.any())
        for place in others.get(part.name, [part.name]):
            if is_bad.get(place):
                return _origin(f"the gradient of {place}", marks_TB, -1 if has_time else None)
    return Origin("the norm of all gradients, each of which is finite")


def find_in_batch(setup: Setup, batch: Batch) -> Origin | None:
    """The first array of a batch that is not finite; with several processes, all of them call it."""
    everywhere = NamedSharding(setup.mesh, P())

    @functools.partial(jax.jit, out_shardings=everywhere, static_argnums=1)
    def marks(leaf: jax.Array, timed: bool) -> jax.Array:  # [B, T], or [B, 1]
        bad = ~jnp.isfinite(leaf)
        return bad.any((*range(1 + timed, bad.ndim),)).reshape(len(bad), -1)

    timed_of = jax.tree.leaves(has_time(batch))
    for (path, leaf), timed in zip(jax.tree.leaves_with_path(batch), timed_of, strict=True):
        timed = timed and setup.facts.time_major
        if np.ndim(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            marks_TB = np.asarray(marks(leaf, timed)).T
            if marks_TB.any():
                place = f"batch{jax.tree_util.keystr(path)}"
                return _origin(place, marks_TB, first=0 if timed else None)
    return None


def check_parameters(setup: Setup, state: TrainState) -> None:
    """Checks parameters before they are saved; with several processes, in all of them.

    Raises:
      FloatingPointError: one is not finite.
    """
    if _are_finite(state.params):
        return
    arrays = by_layer(state.params, setup.storage)
    name = next(name for name, array in arrays.items() if not _are_finite(array))
    raise FloatingPointError(
        f"parameter {name.replace('/', '.')} is not finite after step {int(state.step)}: an update "
        f"overflowed. The last checkpoint is whole.\nFix: resume with a lower learning rate, or with another "
        f"optimizer."
    )


@jax.jit
def _are_finite(tree: Arrays) -> jax.Array:
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))


class _Part(NamedTuple):
    """A part of a step: a layer, all that is before the layers, or all that is after them.

    Attributes:
      kind: the number of a layer's kind, "first" or "last".
      place: its `LayerContext.layer`, and its row among the layers of its kind.
    """

    name: str
    kind: int | str
    place: tuple[Index, Index]


def _parts_of(setup: Setup) -> list[_Part]:
    kinds, (first, *names, last) = setup.facts.kind_of, setup.facts.part_names
    L, layers = len(kinds), []
    for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        layers.append(_Part(name, kind, (number, kinds[:number].count(kind))))
    return [_Part(first, "first", (L + 1, 0)), *layers, _Part(last, "last", (L, 0))]


class _Step(NamedTuple):
    """All that a step reads; stacked layers are in their order, whatever the placement."""

    params: Params
    frozen: Params
    carry: Carry
    batch: Batch
    key: jax.Array | None


class _Repeat:
    """The parts of a step as compiled functions of the whole batch.

    Activations have one more dim in front. Along axes of the task that split neither rows nor time, devices
    may have different numbers: each has its own place there. Otherwise there is one place.
    """

    def __init__(self, setup: Setup, seed: int):
        self._setup, self._facts, self._seed = setup, setup.facts, seed
        self._layers = setup.parts.layer_functions(in_units=False)
        self.forward = jax.jit(self._forward, static_argnums=0)
        self.backward = jax.jit(self._backward, static_argnums=0, donate_argnums=5)
        self.bad_arrays = jax.jit(self._bad_arrays)
        self.loss = jax.jit(jax.value_and_grad(mean_loss))

    def step(self, state: TrainState, batch: Batch) -> _Step:
        """The step from a state."""
        _, params, frozen = self._facts.split(self._facts.model)
        shapes = {"params": params, "frozen": frozen, "carry": state.carry}
        own = {name: getattr(state, name) for name in shapes}
        arrays = by_layer(own, self._setup.storage)

        def of(path: jax.tree_util.KeyPath, leaf: nnx.Variable) -> nnx.Variable:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            shape, array = array_of(leaf), arrays.get(user_name(name, leaf, "/"))
            if array is None:  # without elements
                array = jnp.zeros(shape.shape, shape.dtype)
            return leaf.replace(key_as(shape, array) if is_key(shape) else array)

        found = jax.tree.map_with_path(of, shapes, is_leaf=is_variable)
        return _Step(**found, batch=batch, key=dropout_key(self._seed, state))

    def _forward(
        self, kind: int | str, place: tuple[Index, Index], step: _Step, x: Activations, sums: Sums
    ) -> tuple[Activations, Sums, jax.Array]:
        """The output of a part, the sums with its own, and where the output is not finite: [T, B]."""
        y, own = self._compute(kind, place, step, x)
        return y, add(sums, own), self._marks(y)

    def _backward(
        self,
        kind: int | str,
        place: tuple[Index, Index],
        step: _Step,
        x: Activations,
        cotangents: Cotangents,
        grads: Params,
    ) -> tuple[Params, Cotangents, jax.Array, dict[str, jax.Array]]:
        """The gradients with those of a part, that of its input, and where each is not finite.

        Args:
          cotangents: of its output and of the sums.
          grads: of the parts after this one.
        """

        def run(params: Params, x: Activations) -> tuple[Activations, Sums]:
            return self._compute(kind, place, step._replace(params=params), x)

        d_params, dx = jax.vjp(run, step.params, x)[1](cotangents)
        grads = add(grads, d_params)
        # As in the norm that the step is judged by, a square may overflow.
        return grads, dx, self._marks(dx), self._bad_arrays(jax.tree.map(jnp.square, grads))

    def _compute(
        self, kind: int | str, place: tuple[Index, Index], step: _Step, x: Activations
    ) -> tuple[Activations, Sums]:
        """The output of a part, and its loss and weight."""
        facts, parts, (params, frozen, carry, batch, _) = self._facts, self._setup.parts, step
        number, row = place
        if overrides(facts.model, "draw"):
            drawn = nnx.merge(facts.graphdef, params, frozen).draw(step.key)
            params = facts.split(drawn)[1]
        if isinstance(kind, str):
            own = params, frozen, ()
            specs = parts.partition.specs(own)
        else:
            name = facts.kinds[kind]
            stacks = *(parts.of_layers(tree)[kind] for tree in (params, frozen)), carry[name]
            specs = jax.tree.map(lambda spec: P(*spec[1:]), parts.partition.specs(stacks))
            params, frozen, carry = jax.tree.map(functools.partial(_row, row), stacks)
            layer = nnx.merge(nnx.graphdef(getattr(facts.model.layers, name)), params, frozen)
            initial = (
                layer.initial_carry(facts.batch_size) if hasattr(layer, "initial_carry") else ()
            )
            starts = starts_of(batch)
            carry = jax.tree.map(lambda a, b: jnp.where(starts, b, a), values(carry), initial)
            own, specs = (params, frozen, carry), values(specs)
        run = functools.partial(self._on_device, kind)
        inputs = *own, x, facts.to_block(batch), number, step.key
        return self._over_axes(run, inputs, specs)

    def _on_device(
        self,
        kind: int | str,
        params: Params,
        frozen: Params,
        carry: Carry,
        x: Activations,
        block: Batch,
        number: Index,
        key: jax.Array,
    ) -> tuple[Activations, Sums]:
        """The same for the rows and time steps of one device along the task's axes."""
        facts, parts, axes = self._facts, self._setup.parts, self._facts.task.axes
        at, x = facts.at(block, draws=False), jax.tree.map(lambda a: a[0], x)
        rules = off_stages(parts.partition.carry_rules)
        at = at._replace(layer=number, key=key, layout=Constraint(self._setup.mesh, rules, axes))
        group: Index = 0
        if axes:
            group = sum(map(lax.axis_index, axes))
            params, carry, x = vary_like((params, carry, x), group)
            sizes = self._setup.mesh.shape
            num_rows = facts.batch_size // math.prod(sizes[axis] for axis in facts.row_axes)
            time = lax.axis_index(facts.time_axes) * (parts.partition.chunk_len or 0)
            at = at._replace(row=lax.axis_index(facts.row_axes) * num_rows, time=time)
        y, sums = (), []
        if kind == "first":
            y = nnx.merge(facts.graphdef, params, frozen).first(at.batch, at)
        elif kind == "last":
            model = nnx.merge(facts.graphdef, params, frozen)
            sums = [parts.after_layers(model, x, at, predicts=False)]
        else:
            _, y, *sums = self._layers[int(kind)](params, frozen, carry, x, at)
        loss, weight = sums[0][:2] if sums else (jnp.float32(0), jnp.float32(0))
        y = jax.tree.map(lambda a: a[None], y)
        if axes:
            y, sums = vary_like((y, Sums(loss, weight)), group)
            return y, lax.psum(sums, axes)
        return y, Sums(loss, weight)

    def _over_axes(self, run, inputs, specs):
        """A function of each device's part along the task's axes, on whole arrays."""
        facts, axes = self._facts, self._facts.task.axes
        if not axes:
            return run(*inputs)
        rows, times = facts.row_axes or None, facts.time_axes or None
        apart = tuple(axis for axis in axes if axis not in (*facts.row_axes, *facts.time_axes))
        of_time = (times,) if facts.time_major else ()

        def of_batch(a: jax.Array, timed: bool) -> P:
            if not timed or not facts.time_major:
                return P(*(rows,)[: a.ndim])
            return P(times if len(a) > 1 else None, rows)

        of_x = P(apart or None, *of_time, rows)
        of_block = jax.tree.map(of_batch, inputs[4], has_time(inputs[4]))
        return jax.shard_map(
            run,
            mesh=self._setup.mesh,
            axis_names={*axes},
            in_specs=(*specs, of_x, of_block, P(), P()),
            out_specs=(of_x, P()),
        )(*inputs)

    def _marks(self, tree: Activations) -> jax.Array:
        """Where activations are not finite: bool [T, B], the same on all devices."""
        marks_TB = jnp.zeros((1, 1), bool)
        for leaf in jax.tree.leaves(tree):
            leaf_ATB = leaf if self._facts.time_major else leaf[:, None]
            marks_TB |= ~jnp.isfinite(leaf_ATB).all((0, *range(3, leaf_ATB.ndim)))
        return self._replicated(marks_TB)

    def _bad_arrays(self, tree: Params) -> dict[str, jax.Array]:
        """By name whether the sum of an array is not finite: bool [S] of stacked layers, else []."""
        sums = {}
        for name, leaf in named_leaves(tree):
            array, is_stacked = array_of(leaf), kind_of(leaf) is not None
            sums[name] = ~jnp.isfinite(array.sum(tuple(range(is_stacked, array.ndim))))
        return self._replicated(sums)

    def _replicated(self, tree: Arrays) -> Arrays:
        return lax.with_sharding_constraint(tree, NamedSharding(self._setup.mesh, P()))


def _row(row: Index, stack: jax.Array) -> jax.Array:
    """A layer of a stack; devices that have others send nothing but zeros."""
    is_row = jnp.arange(len(stack)) == row
    is_row = is_row.reshape(-1, *[1] * (stack.ndim - 1))
    return in_float32(jnp.where(is_row, stack, jnp.zeros_like(stack))).sum(0).astype(stack.dtype)


def _origin(place: str, marks_TB: np.ndarray, first: int | None) -> Origin:
    """A place with the rows that are marked, and a time step: the first, or the last (-1)."""
    times, rows = map(np.unique, np.nonzero(marks_TB))
    time = None if first is None or not len(times) else int(times[first])
    return Origin(place, tuple(rows.tolist()), time)


def _by_place(setup: Setup, bad_arrays: Mapping[str, np.ndarray]) -> dict[str, bool]:
    """The arrays' marks by the layer or module that they are of."""
    facts, places = setup.facts, dict[str, bool]()
    leaves, (_, *layers, _) = dict(named_leaves(facts.params)), facts.part_names
    for name, value in bad_arrays.items():
        if value.ndim:
            kind = kind_of(leaves[name])
            names = [
                n for n, of in zip(layers, facts.kind_of, strict=True) if facts.kinds[of] == kind
            ]
            marks = dict(zip(names, value, strict=True))
        else:
            marks = {_module(name, leaves[name]): value}
        for place, is_bad in marks.items():
            places[place] = places.get(place, False) or bool(is_bad)
    return places


def _module(name: str, leaf: nnx.Variable) -> str:
    """head for head.kernel; what is in no module keeps its name."""
    name = user_name(name, leaf)
    return name.rpartition(".")[0] or name
