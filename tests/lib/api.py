"""What tests need to know of the inside of jaxpar, as arrays and numbers.

The law is tested with this file and the public packages alone.
"""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar import (
    Parallel,
    Task,
    TrainConfig,
    init_state,
    make_predict_step,
    make_train_step,
    value_and_grad,
)
from jaxpar.model.adopt.variables import find_in
from jaxpar.sharding import array_of, is_variable
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, audit
from jaxpar.training.checkpoint import Checkpoints

Arrays = dict[str, np.ndarray]


class Gradients(NamedTuple):
    """Of one batch.

    Attributes:
      loss, metrics: as reported.
      grads, weights: of each variable by its name in the user's model; layers of a stack are "layers.0".
      carry: what layers carry on, by layer; {} for a Flax model.
    """

    loss: float
    metrics: dict[str, float]
    grads: Arrays
    weights: Arrays
    carry: Arrays


class Updates(NamedTuple):
    """Of some steps.

    Attributes:
      losses: of each step.
      weights: before all of them.
      trained: after them.
    """

    losses: list[float]
    weights: Arrays
    trained: Arrays


def gradients(task: Task, parallel: Parallel, batch: Any) -> Gradients:
    """The loss of a batch, and all that comes with it."""
    setup = Setup.of(task, parallel)
    state = init_state(setup)
    audit(state)
    (loss, (after, sums)), grads = value_and_grad(setup)(state, batch)
    metrics = {name: float(own / sums.weight) for name, own in sums.metrics.items()}
    named = by_name(setup, grads, state.frozen), by_name(setup, state.params, state.frozen)
    return Gradients(float(loss), metrics, *named, _carry_by_layer(setup, after))


def updates(
    task: Task,
    parallel: Parallel,
    train: TrainConfig,
    batches: Sequence[Any],
    then: Parallel | None = None,
) -> Updates:
    """A step for each batch.

    Args:
      then: where the run is resumed after the first step, from a checkpoint; None goes on.
    """
    setup = Setup.of(task, parallel, train)
    state, losses = init_state(setup), []
    weights = by_name(setup, state.params, state.frozen)
    for number, batch in enumerate(batches):
        if number == 1 and then is not None:
            resumed = Setup.of(task, then, train)
            state, setup = _resumed(setup, state, resumed), resumed
        state, metrics = make_train_step(setup)(state, batch)
        losses.append(float(metrics.loss))
    audit(state)
    return Updates(losses, weights, by_name(setup, state.params, state.frozen))


def predictions(task: Task, parallel: Parallel, batch: Any) -> tuple[Arrays, Arrays]:
    """What the model predicts for a batch, and its weights."""
    setup = Setup.of(task, parallel)
    state = init_state(setup)
    _, outputs = make_predict_step(setup)(state, batch)
    found = {name: np.asarray(own) for name, own in outputs.items()}
    return found, by_name(setup, state.params, state.frozen)


@contextlib.contextmanager
def all_is_large() -> Iterator[None]:
    """What large models have in parts and in pools is so for small ones, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.partition.partition.LITTLE", 1e-9)
        patch.setattr("jaxpar.partition.partition.FEW", 0)
        patch.setattr("jaxpar.model.facts.ModelFacts.layer_flops", np.inf)
        patch.setattr("jaxpar.partition.pool.COLUMNS", 8)
        yield


def _resumed(setup: Setup, state: TrainState, on: Setup) -> TrainState:
    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(folder, setup.replace(keep_checkpoints=1)) as checkpoints:
            checkpoints.save(state)
        return Checkpoints(folder, on.replace(keep_checkpoints=1)).restore()


def by_name(setup: Setup, params: nnx.State, frozen: nnx.State) -> Arrays:
    """Arrays by the names that they have in the user's model."""
    storage = setup.storage
    model = storage.merge(*map(storage.in_stacks, (params, frozen)))
    model = nnx.merge(*jax.device_get(nnx.split(model)))
    if setup.facts.cut_model is not None:
        return _by_users_name(setup, model)
    found = {}
    for number in range(len(model.layers.kind_of)):
        layer = nnx.state(model.layers.layer(number))
        found |= _named(nnx.to_flat_state(layer), f"layers.{number}.")
    flat = nnx.to_flat_state(nnx.state(model))
    return found | _named((path, leaf) for path, leaf in flat if path[0] != "layers")


def _named(flat: Iterable[tuple[Any, Any]], prefix: str = "") -> Arrays:
    return {prefix + ".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def _by_users_name(setup: Setup, model: nnx.Module) -> Arrays:
    variables, found = setup.facts.cut_model.variables, dict[str, Any]()
    for name, owner in zip(variables.names, variables.owners, strict=True):
        holder = model.outer if owner < 0 else model.layers.layer(owner).own
        array = np.asarray(array_of(find_in(holder, variables.inner(name, owner))))
        name, is_stacked, _ = name.partition("@")
        found.setdefault(name, []).append(array)
        if not is_stacked:
            found[name] = array
    return {name: np.stack(a) if isinstance(a, list) else a for name, a in found.items()}


def _carry_by_layer(setup: Setup, state: TrainState) -> Arrays:
    if setup.facts.cut_model is not None:
        return {}
    storage, found = setup.storage, dict[str, np.ndarray]()
    tree = storage.in_stacks(state.carry)
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_variable):
        kind, *rest = path
        rows = storage.partition.slots.rows[storage.facts.kinds.index(kind.key)]
        array = np.asarray(array_of(leaf))
        for row, layer in enumerate(rows):
            if layer >= 0:
                found[f"layers.{layer}{jax.tree_util.keystr(tuple(rest))}"] = array[row]
    return found
