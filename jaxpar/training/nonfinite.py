"""Where a number that is not finite comes from: its step, repeated from the state before it.

    forward    first -> layer 0 -> layer 1 -> last -> loss    the first whose output is not finite, and when
    backward   first <- layer 0 <- layer 1 <- last            else the first whose gradient is not, and when

An update is not looked at. `check_parameters` does that before a state is saved.

Batch and dropout are functions of the step, so it is the same step again. A run whose numbers are finite
pays nothing for this. Dims: S rows of stacked layers, B batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.trees import vary_like
from jaxpar.model.model import mean_loss
from jaxpar.partition.by_layer import by_layer, kind_of
from jaxpar.pipeline.spec import Layer
from jaxpar.pipeline.tables import TickTable
from jaxpar.sharding import array_of, named_leaves
from jaxpar.step.forward import full_table, make_forward
from jaxpar.step.parts import Outer
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.step.step import CompiledStep, dropout_key

NEVER = 2**22  # a time step that no batch has; float32 tells all before it apart

_LAST = "last"  # all that is computed after the layers
_ROWS_NAMED = 8


class Origin(NamedTuple):
    """The first place in a step with a number that is not finite.

    Attributes:
      place: such as "the output of layer 2 (lstm)".
      rows: of the batch that have such numbers there; none if they cannot be told apart.
      time: the first time step of those rows that has one, from 0; on the way back the last. None if there is
        no time, or it cannot be told.
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


def find_origin(setup: Setup, state: TrainState, batch: Any) -> Origin:
    """Where the first number is that is not finite, in the order of computing.

    What is computed before and after the layers is one place each. The first call compiles a program; with
    several processes, all of them call it. Layers in pools are looked at in stacks, which take more room.

    Args:
      setup: that the state was made with.
      state: before the step, as a halted state is; not consumed.
      batch: of the step.
    """
    parallel = setup.parallel  # the gradients of weights would be cut from what is looked at
    pipeline = dataclasses.replace(parallel.pipeline, zero_bubble=False)
    parallel = dataclasses.replace(parallel, pipeline=pipeline)
    layout = Layout(setup.facts, parallel, may_pool=False)
    train, state = setup.train, setup.storage.in_stacks(state)
    look = dataclasses.replace(setup, layout=layout).cached(_make_look, parallel, train.seed)
    state = dataclasses.replace(state, opt_state=())
    found = jax.device_get(look.run(state, batch))
    loss, watched, marks, params, grads = found
    layers, watched = _layers(layout), [watched[name].swapaxes(1, 2) for name in layout.facts.kinds]
    for place, marks_B in zip(["first", *layers], _between(layout, watched), strict=False):
        if marks_B.any():
            time = NEVER - int(marks_B.max()) if layout.facts.time_major else None
            return Origin(f"the output of {place}", tuple(np.flatnonzero(marks_B).tolist()), time)
    parts = _parts_on_the_way_back(layout)
    if not np.isfinite(loss):
        is_bad = _by_part(layout, params)
        bad = [] if layout.facts.kinds else [part for part in reversed(parts) if is_bad.get(part)]
        return Origin(f"the parameters of {bad[0]}" if bad else f"the output of {_LAST}")
    is_bad = _by_part(layout, grads)
    marks_of = dict(zip([*layers, _LAST], _between(layout, marks), strict=False))
    bad = [part for part in parts if is_bad.get(part) or np.any(marks_of.get(part, 0))]
    if bad:
        part = _LAST if parts.index(bad[0]) < parts.index(_LAST) else bad[0]
        times, rows = map(np.unique, np.nonzero(marks_of.get(part, np.zeros((0, 0)))))
        time = int(times[-1]) if layout.facts.time_major and len(times) else None
        return Origin(f"the gradient of {bad[0]}", tuple(rows.tolist()), time)
    return Origin("the norm of all gradients, each of which is finite")


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
def _are_finite(tree: Any) -> jax.Array:
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))


def _make_look(setup: Setup, *_: Any) -> CompiledStep:
    """(state, batch) -> the loss, and what is not finite: activations, gradients, arrays."""
    value_and_grad = watched_loss_and_grad(setup, setup.train.seed)

    def look(state: TrainState, batch: Any, table: TickTable | None):
        (loss, watched), (grads, marks) = value_and_grad(state, batch, table)
        # As in the norm that the step goes by, a square may overflow.
        squares = jax.tree.map(jnp.square, grads)
        return loss, watched, marks, _bad_arrays(state.params), _bad_arrays(squares)

    replicated = NamedSharding(setup.mesh, P())
    return CompiledStep(look, setup.layout, backward=True, out_shardings=replicated)


def watched_loss_and_grad(setup: Setup, seed: int) -> Callable[..., Any]:
    """(state, batch, table=None) -> ((mean loss, watched), (gradients, marks)); not compiled.

    `watched` is by kind float32 [rows of the stack, B, 2], in which time step t inputs and outputs of layers
    were not finite for the first time: `NEVER` - t, or 0. Marks, for every kind [rows of the stack, 2, T, B],
    are not 0 where the gradients of these inputs and outputs are not finite.
    """
    layout = setup.layout
    forward = make_forward(layout, setup.mesh, functools.partial(_watched, layout))
    T, B = layout.facts.num_steps or 1, layout.facts.batch_size

    def loss(params, state, batch, table):
        params, probes = params
        flags = tuple(jnp.zeros((len(rows), B, 2)) for rows in layout.slots.rows)
        key = dropout_key(seed, state)
        watched, sums = forward(
            *(params, state.frozen, state.carry, batch, key, table), beside=(probes, flags)
        )
        return mean_loss(sums), watched

    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def run(state, batch, table=None):
        table = full_table(layout.parallel, backward=True) if table is None else table
        probes = tuple(jnp.zeros((len(rows), 2, T, B)) for rows in layout.slots.rows)
        return value_and_grad((state.params, probes), state, batch, table)

    return run


def _watched(layout: Layout, layer: Layer) -> Layer:
    """A layer that tells where its inputs and outputs, and the gradients of both, are not finite.

    Its parameters are (parameters, probe), its carry (carry, marks); see `watched_loss_and_grad`.
    """

    def bad(tree):
        parts = []
        for leaf in jax.tree.leaves(tree):
            leaf_TB = leaf if layout.facts.time_major else leaf[None]
            parts.append(~jnp.isfinite(leaf_TB).all(tuple(range(2, leaf_TB.ndim))))
        return functools.reduce(jnp.logical_or, parts)

    def first_bad(tree, at):
        bad_TB = bad(lax.stop_gradient(tree))
        step_B = at.time + bad_TB.argmax(0)
        return jnp.where(bad_TB.any(0), (NEVER - step_B).astype(jnp.float32), 0.0)

    @jax.custom_vjp
    def tap(tree, probe_TB, place):
        return tree

    def pull_back(place, d_tree):
        marks_TB = bad(d_tree).astype(jnp.float32)
        room_TB = vary_like(
            jnp.zeros((layout.facts.num_steps or 1, layout.facts.batch_size)), marks_TB
        )
        return d_tree, lax.dynamic_update_slice(room_TB, marks_TB, place), None

    tap.defvjp(lambda tree, probe_TB, place: (tree, place), pull_back)

    def run(params, frozen, carry, x, at):
        (params, probe_2TB), (carry, marks_B2) = params, carry
        x = tap(x, probe_2TB[0], (at.time, at.row))
        after, y, *sums = layer(params, frozen, carry, x, at)
        y = tap(y, probe_2TB[1], (at.time, at.row))
        now_B2 = jnp.stack([first_bad(x, at), first_bad(y, at)], axis=1)
        return (after, jnp.maximum(lax.stop_gradient(marks_B2), now_B2)), y, *sums

    return run


def _bad_arrays(tree: Any) -> dict[str, jax.Array]:
    """By the name of each array whether its sum is not finite: [], or [S] of stacked layers."""
    sums = {}
    for name, leaf in named_leaves(tree):
        array, is_stacked = array_of(leaf), kind_of(leaf) is not None
        sums[name] = ~jnp.isfinite(array.sum(tuple(range(is_stacked, array.ndim))))
    return sums


def _between(layout: Layout, marks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The marks of what goes into the first layer, then of what comes out of each.

    Args:
      marks: by kind [rows of the stack, 2, ...]; see `watched_loss_and_grad`.
    """
    kinds, rows = layout.facts.kind_of, layout.slots.rows
    of_layers = [marks[kind][rows[kind].index(number)] for number, kind in enumerate(kinds)]
    return [into for into, _ in of_layers[:1]] + [out for _, out in of_layers]


def _layers(layout: Layout) -> list[str]:
    return [_layer(n, layout.facts.kinds[kind]) for n, kind in enumerate(layout.facts.kind_of)]


def _parts_on_the_way_back(layout: Layout) -> list[str]:
    """What a model is made of, in the order in which gradients are computed."""
    outer = Outer(layout, layout.merge(layout.params, layout.frozen))
    modules = [_module(name) for name, _ in named_leaves(layout.params)]
    last = dict.fromkeys(modules[n] for n in outer.last[0] if n not in outer.first[0])
    return list(dict.fromkeys([*last, _LAST, *reversed(_layers(layout)), *reversed(modules)]))


def _by_part(layout: Layout, bad: Mapping[str, np.ndarray]) -> dict[str, bool]:
    """The arrays' marks by the layer or module that they are of."""
    parts: dict[str, bool] = {}
    for name, value in bad.items():
        if value.ndim:
            kind = name.split(".")[1]  # layers.gru.w_x
            rows = storage.partition.slots.rows[storage.facts.kinds.index(kind)]
            marks = {_layer(n, kind): bool(value[row]) for row, n in enumerate(rows) if n >= 0}
        else:
            marks = {_module(name): bool(value)}
        for part, is_bad in marks.items():
            parts[part] = parts.get(part, False) or is_bad
    return parts


def _layer(number: int, kind: str) -> str:
    return f"layer {number} ({kind})"


def _module(name: str) -> str:
    """head for head.kernel; what is in no module keeps its name."""
    return name.rpartition(".")[0] or name
