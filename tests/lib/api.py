"""All that tests know of the inside of jaxpar.

Functions take what users have: a task, a layout, settings, a state, a batch, a folder. They give arrays,
numbers, texts and tables. Arrays have the names of the user's model ("layers.0.w_x"), or, where a function
says so, those of a checkpoint ("params/layers/gru/w_x", stacked by kind).
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar import (
    LayerContext,
    Parallel,
    Report,
    Start,
    Task,
    TrainConfig,
    init_state,
    make_predict_step,
    make_train_step,
    value_and_grad,
)
from jaxpar.analysis import ProgramReport, hlo, program
from jaxpar.base import display, jax_private, trees
from jaxpar.base.at import Processor
from jaxpar.base.keys import key_data
from jaxpar.base.sheets import SHEETS
from jaxpar.cli.commands import PlotRuns
from jaxpar.cli.main import main
from jaxpar.cli.parse import all_commands, read_command
from jaxpar.data import batches
from jaxpar.data.bucketed import BucketedBatches as BucketedBatches  # documented for users
from jaxpar.data.bucketed import choose_edges as choose_edges  # documented for users
from jaxpar.data.packed import PackedBatches as PackedBatches  # documented for users
from jaxpar.hosts import distributed, stopping
from jaxpar.hosts.launch import environs
from jaxpar.hosts.stopping import Stop
from jaxpar.lm.drawing import Draw
from jaxpar.lm.options import LAYERS
from jaxpar.lm.sampling import sample_tokens
from jaxpar.mesh import described_devices
from jaxpar.model import task as task_module
from jaxpar.model.adopt.variables import find_in
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import find_task
from jaxpar.nn.fused_lstm import Plan
from jaxpar.nn.gated_delta import gated_delta as gated_delta  # a function of arrays
from jaxpar.nn.mlstm import mlstm as mlstm  # a function of arrays
from jaxpar.partition import by_layer
from jaxpar.pictures import style
from jaxpar.pictures.chart import IDLE as IDLE
from jaxpar.pictures.style import PALETTE as PALETTE
from jaxpar.pipeline import Pipeline
from jaxpar.planning import Machine, StepCost, plan_in_steps, time_steps
from jaxpar.planning.cost import Step, estimate
from jaxpar.planning.counts import counts_of
from jaxpar.sharding import array_of, is_variable
from jaxpar.step import custom_backward, forward, independence, per_layer
from jaxpar.step import state as state_of
from jaxpar.step import step as step_of
from jaxpar.step.functions import make_eval_step
from jaxpar.step.parts import Parts
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.step.state import release as release  # documented for users
from jaxpar.step.step import CompiledStep, batch_sharding
from jaxpar.trace import surprises
from jaxpar.training import comparison, loop
from jaxpar.training.callbacks import TRACKERS
from jaxpar.training.checkpoint import Checkpoints, Writing, checksums, write_table
from jaxpar.training.evaluate import evaluate, sum_batches
from jaxpar.training.fingerprint import HashedBatches
from jaxpar.training.nonfinite import find_origin
from jaxpar.training.predict import predict
from jaxpar.training.progress import Curves, Evaluation, Progress
from jaxpar.training.run_folder import FolderLock, RunFolder
from jaxpar.training.summary import summarize
from jaxpar.training.weights import find_weights, model_of, open_files, outgoing, write_weights

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


# ---- losses, gradients, updates ----


def gradients(
    task: Task,
    parallel: Parallel,
    batch: Any,
    state: TrainState | None = None,
    train: TrainConfig | None = None,
) -> Gradients:
    """The loss of a batch, and all that comes with it; None begins from the initial state."""
    setup = Setup.of(task, parallel, train)
    if state is None:
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
            with tempfile.TemporaryDirectory() as folder:
                save(folder, setup, None, state)
                state, setup = restored(folder, resumed, None), resumed
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


def eval_step(task: Task, parallel: Parallel | None = None) -> CompiledStep:
    """(state, batch) -> (carry, sums), without dropout."""
    return make_eval_step(task, parallel)


def evaluation(
    task: Task, parallel: Parallel | None, state: TrainState, batch: Any
) -> tuple[dict[str, float], TrainState]:
    """Sums of a batch without dropout, by name ("loss" and "weight" as well), and the state after it."""
    carry, sums = make_eval_step(task, parallel)(state, batch)
    found = {"loss": float(sums.loss), "weight": float(sums.weight)}
    found |= {name: float(own) for name, own in sums.metrics.items()}
    return found, dataclasses.replace(state, carry=carry)


def evaluation_of_split(
    task: Task, parallel: Parallel | None, state: TrainState, split: str
) -> Evaluation:
    """An evaluation on "valid" or "test", as callbacks are given it."""
    return evaluate(Setup.of(task, parallel), state, split)


def sampled(
    task: Task,
    parallel: Parallel | None,
    state: TrainState,
    prompts: Sequence[np.ndarray],
    length: int,
    **draw: Any,
) -> np.ndarray:
    """The tokens that follow each prompt, drawn with these numbers: [prompts, length]."""
    draws = Draw.of(**draw)
    return np.array(sample_tokens(Setup.of(task, parallel), state, prompts, draws, length).tokens)


def epoch_sums(
    task: Task, parallel: Parallel | None, state: TrainState, batches: Any
) -> dict[str, float]:
    """Sums over all batches of an epoch, named as those of `evaluation`."""
    sums = sum_batches(Setup.of(task, parallel), state, batches)
    return {"loss": sums.loss, "weight": sums.weight, **sums.metrics}


def epoch_predictions(
    task: Task, parallel: Parallel | None, state: TrainState, batches: Any, out: Any = None
) -> Arrays:
    """What the model predicts for all rows of an epoch; `out` is a folder to write it to."""
    return predict(Setup.of(task, parallel), state, batches, out, quiet=True)


# ---- updates of a task's own optimizer ----


def optimizer_updates(
    task: Task, parallel: Parallel, params: Arrays, grads: Sequence[Arrays], losses: np.ndarray
) -> tuple[list[Arrays], Any]:
    """The updates for gradients and losses, step by step, and the optimizer's state after them.

    Parameters, gradients and updates have the names of a checkpoint.
    """
    optimizer, first = Setup.of(task, parallel).optimizer, init_state(task, parallel)

    def in_stacks(arrays: Arrays) -> Any:
        return with_arrays(task, parallel, first, arrays).params

    own, found = in_stacks(params), []
    with jax.numpy_dtype_promotion("standard"):
        opt_state, update = jax.jit(optimizer.init)(own), jax.jit(optimizer.update)
        for of_step, loss in zip(grads, losses, strict=True):
            updates, opt_state = update(in_stacks(of_step), opt_state, own, loss)
            own = optax.apply_updates(own, updates)
            arrays = stored(task, parallel, dataclasses.replace(first, params=updates))
            found.append({name: arrays[name] for name in params})
    return found, opt_state


def lowered_update(task: Task, parallel: Parallel) -> jax.stages.Lowered:
    """The program of (gradients, optimizer's state, parameters, loss) -> (updates, state)."""
    setup = Setup.of(task, parallel)
    state = state_of.abstract_state(setup)
    places = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    update = jax.jit(setup.optimizer.update, out_shardings=places)
    with jax.numpy_dtype_promotion("standard"):
        return update.lower(state.params, state.opt_state, state.params, np.float32(1))


@contextlib.contextmanager
def updates_of_single_layers() -> Iterator[list[str]]:
    """Collects the programs of updates that run for each layer by itself, not for all of a kind."""
    found, one_by_one = [], per_layer._one_by_one

    def run(program: Any, *args: Any) -> Any:
        found.append(str(program))
        return one_by_one(program, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(per_layer, "_one_by_one", run)
        yield found


# ---- states ----


def abstract_state(
    task: Task, parallel: Parallel | None = None, train: TrainConfig | None = None
) -> TrainState:
    """A state's shapes, dtypes and shardings."""
    return state_of.abstract_state(Setup.of(task, parallel, train))


def compiled_init(task: Task, parallel: Parallel | None = None) -> jax.stages.Compiled:
    """The program that makes the first state."""
    make = state_of._initializer(Setup.of(task, parallel), 0)
    return make.lower(key_data(0)).compile()


def audit(state: TrainState) -> None:
    """Raises ValueError where an array is not sharded as declared."""
    state_of.audit(state)


def model(
    task: Task, parallel: Parallel | None, state: TrainState, *, sharded: bool = False
) -> nnx.Module:
    """The user's model with the parameters of a state, on one device or on those of the mesh."""
    return model_of(Setup.of(task, parallel), state, sharded=sharded)


def evaluated(task: Task, parallel: Parallel | None, state: TrainState) -> TrainState:
    """The state with the parameters that are evaluated, such as their means."""
    return state_of.evaluated(Setup.of(task, parallel), state)


def params_of(task: Task, parallel: Parallel | None, state: TrainState) -> Arrays:
    """Parameters, by the names of the user's model."""
    return by_name(Setup.of(task, parallel), state.params, state.frozen)


def stored(task: Task, parallel: Parallel | None, state: TrainState) -> Arrays:
    """All arrays of a state, by the names of a checkpoint."""
    arrays = by_layer.by_layer(state, Setup.of(task, parallel).storage)
    return {name: np.asarray(array) for name, array in arrays.items()}


def stored_bytes(task: Task, parallel: Parallel | None, state: TrainState) -> dict[str, int]:
    """Of each array of a state that a checkpoint has, the bytes on one device while it is written."""
    arrays = by_layer.by_layer(state, Setup.of(task, parallel).storage)
    return {name: trees.device_bytes(array) for name, array in arrays.items()}


def with_arrays(
    task: Task, parallel: Parallel | None, state: TrainState, arrays: Arrays
) -> TrainState:
    """The state with other values of some arrays, by the names of a checkpoint."""
    storage = Setup.of(task, parallel).storage
    named = by_layer.by_layer(state, storage)
    for name, array in arrays.items():
        named[name] = jax.device_put(array, named[name].sharding)
    return by_layer.from_layers(state, storage, named)


def device_bytes(tree: Any) -> int:
    """Of an array or a tree of them, the bytes on one device."""
    return trees.device_bytes(tree)


def origin(
    task: Task, parallel: Parallel | None, state: TrainState, batch: Any
) -> tuple[str, tuple[int, ...], int | None]:
    """(place, rows, time step) of the first number of a step that is not finite."""
    return (*find_origin(Setup.of(task, parallel), state, batch),)


def precision(task: Task, platform: str) -> float:
    """The coarsest relative rounding that a step computes with."""
    return comparison._precision(ModelFacts.of(task, platform))


# ---- programs of steps ----


def abstract_batch(task: Task, parallel: Parallel | None = None) -> Any:
    """Shapes and shardings of a batch."""
    return step_of.abstract_batch(Setup.of(task, parallel))


def lowered_step(
    task: Task, parallel: Parallel | None = None, mesh: jax.sharding.Mesh | None = None
) -> jax.stages.Lowered:
    """A training step that is not compiled yet."""
    return program.lower_step(Setup.of(task, parallel, mesh=mesh))


class Ran(NamedTuple):
    """An instruction of a compiled program, at one of the places where it runs.

    Attributes:
      op_name: where it comes from in the traced program.
      arrays: (dtype, dims) of what it gives.
      attributes: the rest of its text.
      opcodes: of the instructions of a fusion; of any other, its own.
      beside: (opcode, op_name) of what computes while it is under way, such as a transfer.
      callers: the loops, branches and calls around it, outermost first.
      trip_counts: of the loops around it.
    """

    name: str
    opcode: str
    op_name: str
    shape: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    attributes: str
    opcodes: tuple[str, ...]
    beside: tuple[tuple[str, str], ...]
    callers: tuple["Ran", ...] = ()
    trip_counts: tuple[int | None, ...] = ()


def instructions(compiled: str) -> list[Ran]:
    """What a compiled program runs, from its text, in order."""
    module = hlo.Module(compiled)

    @functools.cache
    def ran(one: hlo.Instruction) -> Ran:
        inside = module.fused(one) or [one]
        return Ran(
            *(one.name, one.opcode, one.op_name, one.shape, (*hlo.arrays(one.shape),)),
            *(one.attributes, tuple(own.opcode for own in inside)),
            tuple((own.opcode, own.op_name) for own in module.beside.get(one.name, ())),
        )

    return [
        ran(visit.instruction)._replace(
            callers=tuple(map(ran, visit.callers)), trip_counts=visit.trip_counts
        )
        for visit in module.visits()
    ]


def gradients_on(platform: str, task: Task, parallel: Parallel) -> str:
    """The program of loss and gradients for devices that are not there, such as "cuda"."""
    function = jax.jit(step_of.make_loss_and_grad(Setup.of(task, parallel)))
    traced = function.trace(abstract_state(task, parallel), abstract_batch(task, parallel))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def lowered_evaluation(task: Task, parallel: Parallel | None = None) -> jax.stages.Lowered:
    """The evaluation of a batch that is not compiled yet."""
    given = abstract_state(task, parallel), abstract_batch(task, parallel)
    return make_eval_step(task, parallel).lower(*given)


def forget_warnings() -> None:
    """Of what models and optimizers do, this process is told again."""
    surprises.told_at.cache_clear()


def forget_programs() -> None:
    """What was compiled in this process is compiled again."""
    jax.clear_caches()
    jax_private._executables.clear()


# ---- what the planner knows ----


def machine_of(sheet: str) -> Machine:
    """Eight devices of one host, which are not there, with the numbers of a data sheet such as "cpu"."""
    return Machine(sheet, 8, 8, **SHEETS[sheet])


@contextlib.contextmanager
def cpus_have_memory(num_bytes: float) -> Iterator[None]:
    """The data sheet of CPUs says that each device has so much memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHEETS, "cpu", {**SHEETS["cpu"], "memory_bytes": num_bytes})
        yield


def placement(task: Task, parallel: Parallel) -> tuple[int, ...]:
    """How many layers are on each place."""
    return Setup.of(task, parallel).partition.placement


def step_seconds(task: Task, layouts: Sequence[Parallel], num_rounds: int) -> list[list[float]]:
    """Seconds of a training step with each layout, in each round."""
    return time_steps([Setup.of(task, parallel) for parallel in layouts], num_rounds)


def estimates(task: Task, layouts: Iterable[Parallel], machine: Machine) -> list[StepCost]:
    """As of `estimate_step` for each layout; the task is traced once."""
    counts = counts_of(task, task.train.num_steps, machine.platform)
    return [estimate(counts, parallel, task.train, machine) for parallel in layouts]


def layer_flops(task: Task) -> list[tuple[float, float]]:
    """What the planner counts for a batch: of each kind, (forward, gradients of weights on their own)."""
    counts = counts_of(task, task.train.num_steps, "cpu")
    unit = counts.unit(counts.facts.num_steps, task.batch_size)
    return [(kind.forward.flops, kind.weights.flops) for kind in unit.kinds]


def part_costs(task: Task) -> dict[str, list[tuple[float, float]]]:
    """FLOPs forward and backward of what is before the layers, of each layer, and of what is after them."""
    costs = ModelFacts.of(task).costs
    return {"first": [costs.first], "layers": [*costs.layers], "last": [costs.last]}


def devices_of(machine: str) -> list[Any]:
    """Devices of a machine that is not there; ValueError if there is no compiler for it."""
    return described_devices(machine)


def estimated_param_bytes(task: Task, parallel: Parallel) -> int:
    """What the planner counts for the parameters of a device."""
    step = Step(counts_of(task, task.train.num_steps, "cpu"), parallel, task.train)
    return step.bytes_of(step.counts.params, step.partition.param_rules)


# ---- what jaxpar finds out about a model ----


def check_before_run(task: Task, parallel: Parallel | None = None) -> None:
    """Raises ValueError where numbers would depend on the mesh, as before the first step."""
    parts = Setup.of(task, parallel).parts
    independence.check_rows_alone(parts)
    custom_backward.check_custom_backward(parts)


def check_all_rows(task: Task, parallel: Parallel | None = None) -> None:
    """Checks that no row depends on another, also in jaxpar's own modules, which a run leaves out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(independence, "_known_parts", lambda facts: ())
        independence.check_rows_alone(Setup.of(task, parallel).parts)


@contextlib.contextmanager
def checks_of_rows() -> Iterator[list[str]]:
    """Collects the names of tasks whose rows are checked before a run."""
    found, check = [], independence.IndependenceCheck

    def begin(parts: Parts, *args: Any, **options: Any) -> Any:
        found.append(parts.facts.task.name)
        return check(parts, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(independence, "IndependenceCheck", begin)
        yield found


@contextlib.contextmanager
def tried_backward_passes() -> Iterator[list[str]]:
    """Collects the functions of users whose backward passes checks before a run try."""
    tried, check = [], custom_backward._check_rule

    def check_rule(rule: Any, part: Any, function: str, *args: Any, **options: Any) -> bool:
        tried.append(function)
        return check(rule, part, function, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_backward, "_check_rule", check_rule)
        yield tried


# ---- batches ----


def identity_of_batch(task: Task, parallel: Parallel | None, step: int) -> dict[str, str]:
    """What a checkpoint of a step says of the batch that comes next."""
    batches = HashedBatches(Setup.of(task, parallel), task.make_batches("train", 0), "")
    return batches.describe(step)["batches"]


def put_batch(task: Task, parallel: Parallel, batch: Any) -> Any:
    """A whole batch on the devices of a mesh."""
    return batches.put_batch(batch, batch_sharding(Setup.of(task, parallel)))


def placed_batch(task: Task, parallel: Parallel, source: Any, number: int) -> Any:
    """A batch on the devices of a mesh, of which each process has read its rows."""
    return batches.place_batch(source, number, batch_sharding(Setup.of(task, parallel)))


# ---- several processes ----


def environments(
    num_processes: int, num_devices: int, environ: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Variables of processes of this machine that train together, each with so many devices."""
    return environs(num_processes, num_devices, environ)


def start_processes() -> None:
    """Joins the other processes, in one that has an environment of `environments`."""
    distributed.start_processes()


# ---- runs and commands ----


def save(
    folder: Any,
    task: Task,
    parallel: Parallel | None,
    *states: TrainState,
    keep: int = 1,
    run: str | None = None,
    losses: Mapping[int, float] = MappingProxyType({}),
) -> None:
    """Writes a checkpoint of each state.

    Args:
      keep: how many of the newest are kept.
      run: the name of the run that writes them.
      losses: of validation, by the step; each is known from its step on.
    """
    setup = Setup.of(task, parallel).replace(keep_checkpoints=keep)
    with Checkpoints(folder, setup, run=run) as checkpoints:
        for state in states:
            known = {step: loss for step, loss in losses.items() if step <= int(state.step)}
            checkpoints.losses |= known
            checkpoints.save(state)


@contextlib.contextmanager
def saving(folder: Any, task: Task, parallel: Parallel | None, state: TrainState) -> Iterator[None]:
    """Writes a checkpoint while other things happen."""
    with Checkpoints(folder, Setup.of(task, parallel).replace(keep_checkpoints=1)) as checkpoints:
        checkpoints.save(state)
        yield


def restored(
    folder: Any, task: Task, parallel: Parallel | None, *, run: str | None = None, **which: Any
) -> TrainState:
    """Reads the newest checkpoint, or the one of a `step`, or the `best`."""
    setup = Setup.of(task, parallel).replace(keep_checkpoints=1)
    return Checkpoints(folder, setup, run=run).restore(**which)


def begin_with(
    task: Task, parallel: Parallel | None, start: Start, train: TrainConfig | None = None
) -> tuple[TrainState, list[tuple[str, str, str, str]]]:
    """The first state of a run with these weights, and the rows of the table that says what is taken."""
    found = find_weights(Setup.of(task, parallel, train), start)
    return found.state(), found.to_rows()


def export(
    path: Any, task: Task, parallel: Parallel | None, state: TrainState, dtype: str | None = None
) -> list[Path]:
    """Writes the weights of a state; gives the files."""
    tensors = outgoing((state.params, state.frozen), Setup.of(task, parallel).storage)
    return write_weights(path, tensors, {"a": "text"}, dtype)


def tensors_in(path: Any) -> Arrays:
    """The tensors of a file of weights, of an index or of a folder, by name."""
    return {name: tensor.whole() for name, tensor in open_files(path).tensors.items()}


def run_steps(folder: Any) -> list[int]:
    """The steps of the checkpoints of a run that are whole."""
    return _checkpoints_of(folder).steps()


def run_state(folder: Any, **which: Any) -> TrainState:
    """The whole state of a run's newest checkpoint, or of that of a `step`, or of the `best`."""
    return _checkpoints_of(folder).restore(**which)


def _checkpoints_of(folder: Any) -> Checkpoints:
    run = RunFolder(folder)
    run.check()
    return run.checkpoints(Setup.of(*run.settings()))


def holds(folder: Any) -> contextlib.AbstractContextManager[Any]:
    """As if a run of this process were in the folder."""
    return RunFolder(folder).lock


def whole_steps(folder: Any, task: Task) -> list[int]:
    """The steps of the checkpoints in a folder that are whole."""
    return Checkpoints(folder, Setup.of(task)).steps()


def describe_checkpoint(folder: Any, changes: dict[str, Any]) -> None:
    """Changes what the file of a checkpoint says of it; None leaves a part out. Its hash fits."""
    path = Path(folder) / "checkpoint.json"
    content = json.loads(path.read_text()) | changes
    del content["hash"]
    write_table(path, {name: value for name, value in content.items() if value is not None})


def reseal_checkpoint(folder: Any) -> None:
    """Makes the checksums of a checkpoint those of the files that are there."""
    path = Path(folder)
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "checkpoint.json"]
    known = json.loads((path / "checkpoint.json").read_text())["checksums"]
    names = [str(file.relative_to(path)) for file in files]
    describe_checkpoint(path, {"checksums": known | checksums(path, names)})


def command(*words: str) -> int:
    """Runs a command line in this process, and gives its exit code."""
    return main(words)


def language_layers() -> list[str]:
    """Those that `--layer` of the language model takes."""
    return [*LAYERS]


def task_class(spec: str) -> type[Task]:
    """The class of "path/to/file.py:Name", as commands find it."""
    return find_task(spec)


def spec_of(task: Task) -> str:
    """The text by which commands find the class of a task."""
    return task_module.spec_of(task)


def command_names() -> list[str]:
    """Those of jaxpar and of its tasks."""
    return [*all_commands()]


def docstrings_of_commands() -> dict[str, str]:
    """Of commands, and of the options that they share, by the name of the class."""
    commands = (*all_commands().values(), PlotRuns)
    classes = {base for command in commands for base in command.__mro__ if base is not object}
    return {cls.__name__: inspect.getdoc(cls) or "" for cls in classes}


def settings(*words: str) -> tuple[Task, Parallel, TrainConfig]:
    """What a command line asks for; with --resume, what its run has."""
    asked = read_command([*words])
    return getattr(asked, "settings", (asked.task, asked.parallel, asked.train))


def read(*words: str) -> None:
    """Reads a command line, with as many devices as it may simulate, and does nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.cli.options.simulate_devices", lambda number: None)
        read_command([*words])


def summary(
    task: Task, parallel: Parallel | None = None, train: TrainConfig | None = None
) -> dict[str, str]:
    """The table that a run prints first."""
    rows = [*summarize(Setup.of(task, parallel, train))]
    assert len(rows) == len({name for name, _ in rows}), rows
    return dict(rows)


# ---- pictures ----


def format_bytes(num_bytes: float) -> str:
    """As tables and pictures write it."""
    return display.format_bytes(num_bytes)


def page(title: str, body: str) -> str:
    """A file of HTML with pictures."""
    return style.make_page(title, body)


def curves(num_steps: int, *lines: dict[str, Any]) -> Curves:
    """The curves of a run, as of `FitResult`, by lines of its metrics.jsonl."""
    return Curves(num_steps).add(*lines)


def progress(**fields: Any) -> Progress:
    """A line of progress, as callbacks are given it."""
    return Progress(**fields)


def result_of(split: str, loss: float, **metrics: float) -> Evaluation:
    """An evaluation, as callbacks are given it."""
    return Evaluation(split, loss, metrics, {})


def lstm_kernel(rows: int, width: int, dtype: str) -> Any:
    """What `lstm_layer` takes as `how` to run as one kernel, on the GPU of this machine."""
    return Plan.of(rows, width, dtype, jax.devices()[0].core_count)


# ---- what tests set up ----


@contextlib.contextmanager
def setups_are_shared() -> Iterator[None]:
    """Setups of equal tasks share what is traced and compiled."""
    facts_of, setup_of = functools.lru_cache(8)(ModelFacts.of), Setup.of
    kept = functools.lru_cache(8)(lambda partition, mesh: (Parts.of(partition), {}))

    def of(task: Any, *args: Any, **options: Any) -> Setup:
        setup = setup_of(task, *args, **options)
        if setup is task:
            return setup
        parts, made = kept(setup.partition, setup.mesh)
        return dataclasses.replace(setup, parts=parts, _made=made)

    def facts(task: Task, platform: str | None = None) -> ModelFacts:
        return facts_of(task, platform or jax.default_backend())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelFacts, "of", facts)
        patch.setattr(Setup, "of", of)
        yield


@contextlib.contextmanager
def all_but_steps_is_slow() -> Iterator[list[str]]:
    """Compiling, each save and each evaluation of a run take a minute; gives their names, as they happen."""
    clock, happened = time.perf_counter, list[str]()

    def slow(name: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            happened.append(name)
            return function(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.time, "perf_counter", lambda: clock() + 60 * len(happened))
        patch.setattr(Checkpoints, "save", slow("save", Checkpoints.save))
        patch.setattr(loop, "evaluate", slow("evaluate", loop.evaluate))
        patch.setattr(loop, "make_train_step", slow("compile", loop.make_train_step))
        yield happened


@contextlib.contextmanager
def clock_of_runs(rate: float) -> Iterator[None]:
    """The clock that a run reads is so many times as fast."""
    clock = time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: rate * clock()))
        yield


@contextlib.contextmanager
def tracker_is(name: str, tracker: Report) -> Iterator[None]:
    """`--train.track NAME` means this tracker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRACKERS, name, lambda: tracker)
        yield


MOMENTS = {
    "take the folder": (FolderLock, "_take"),
    "begin": (RunFolder, "start"),
    "add a line": (RunFolder, "append_metrics"),
    "save": (Checkpoints, "save"),
    "make the folder of a checkpoint": (Writing, "_make_folder"),
    "write arrays": (Writing, "_write"),
    "finish a checkpoint": (Writing, "_finish"),
    "look for a signal": (Stop, "now"),
}


@contextlib.contextmanager
def instead_of(moment: str, do: Callable[[Path | None, Callable[[], Any]], Any]) -> Iterator[None]:
    """Where jaxpar comes to a moment of `MOMENTS`, it calls this.

    Args:
      do: of the folder of the run or checkpoint, if there is one, and a function that does what jaxpar would
        do.
    """
    kind, name = MOMENTS[moment]
    work = getattr(kind, name)

    def other(self: Any, *args: Any) -> Any:
        folder = getattr(self, "path", None) or getattr(self, "_folder", None)
        return do(folder, lambda: work(self, *args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, other)
        yield


@contextlib.contextmanager
def devices_have_peak(flops: float) -> Iterator[None]:
    """Each device is known to do so many FLOPs a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.training.progress.peak_flops", lambda device, dtype: flops)
        yield


@contextlib.contextmanager
def lines_are_put_at_once() -> Iterator[None]:
    """A bucket gets each line of metrics.jsonl as soon as it is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.training.run_folder._PUT_SECONDS", 0.0)
        yield


def tell_stalls_after(seconds: float) -> None:
    """From here on, this process says where it is if no step begins for so long."""
    stopping.STALL_SECONDS = seconds


@contextlib.contextmanager
def files_of_weights_hold(num_bytes: int) -> Iterator[None]:
    """A file of weights holds no more than this, if it holds several tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.training.weights.LIMIT_BYTES", num_bytes)
        yield


@contextlib.contextmanager
def steps_and_waits() -> Iterator[list[str]]:
    """Gives each "step" put into the queue of the devices and each "wait" for one, as they happen."""
    happened, array = list[str](), type(jax.numpy.zeros(()))

    def noting(name: str, function: Any) -> Any:
        def note(*args: Any, **options: Any) -> Any:
            happened.append(name)
            return function(*args, **options)

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledStep, "run", noting("step", CompiledStep.run))
        patch.setattr(array, "_value", property(noting("wait", array._value.fget)))
        patch.setattr(array, "block_until_ready", noting("wait", array.block_until_ready))
        patch.setattr(jax, "block_until_ready", noting("wait", jax.block_until_ready))
        yield happened


@contextlib.contextmanager
def host_memory_is_apart() -> Iterator[None]:
    """Devices have a memory of their own, as GPUs have; what is kept on the host leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        keeps = property(lambda spec: spec.config.remat_keeps == "host")
        patch.setattr("jaxpar.pipeline.spec.Spec.keeps_on_host", keeps)
        yield


@contextlib.contextmanager
def buffers_hold_nan() -> Iterator[None]:
    """Pipelines keep NaN where nothing was written yet."""
    made = list[Pipeline]()

    def poisoned(**options: Any) -> Pipeline:
        made.append(Pipeline(**options, buffer_fill=float("nan")))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "Pipeline", poisoned)
        yield
    assert made, "no pipeline was made"


@contextlib.contextmanager
def search_for_origin_raises(error: Exception) -> Iterator[None]:
    """Runs cannot find out where numbers that are not finite come from."""

    def search(*_: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "find_origin", search)
        yield


@contextlib.contextmanager
def logits_are_in_pieces() -> Iterator[None]:
    """The scores of few words are computed in pieces, as those of many are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.lm.loss.LOGITS_ON_CPU", 1)
        yield


@contextlib.contextmanager
def limits_of_texts(**limits: int) -> Iterator[None]:
    """Vocabularies and what is read of texts are limited otherwise.

    Args:
      limits: most_words of a vocabulary, part that is read at once, longest_word.
    """
    names = {"most_words": "MOST_WORDS", "part": "_PART", "longest_word": "_LONGEST_WORD"}
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(f"jaxpar.lm.vocabulary.{names[name]}", limit)
        yield


@contextlib.contextmanager
def all_is_large() -> Iterator[None]:
    """What large models have in parts and in pools is so for small ones, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.partition.partition.LITTLE", 1e-9)
        patch.setattr("jaxpar.partition.partition.FEW", 0)
        patch.setattr("jaxpar.model.facts.ModelFacts.layer_flops", np.inf)
        patch.setattr("jaxpar.partition.pool.COLUMNS", 8)
        yield


@contextlib.contextmanager
def little_is_in_pools(most_filled: float | None = None) -> Iterator[None]:
    """Small layers and ends lie in pools, too, in short rows.

    Args:
      most_filled: rows are as long as the largest array's where planes are so many times their arrays.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.partition.partition.FEW", 0)
        patch.setattr("jaxpar.partition.pool.COLUMNS", 8)
        if most_filled is not None:
            patch.setattr("jaxpar.partition.pool.MOST_FILLED", most_filled)
        yield


@contextlib.contextmanager
def finalists_are(
    compiled: Callable[[int], list[ProgramReport | str]],
    timed: Callable[[list[Parallel], int], list[list[float]]] | None = None,
) -> Iterator[None]:
    """What a plan finds out about its finalists, which are not compiled and do not run.

    Args:
      compiled: of a number of layouts, the program of each, or why the compiler refuses it.
      timed: of layouts and a number of rounds, the seconds of each round of each.
    """

    def compile_steps(settings: list[Any], machine: Machine) -> Iterator[tuple[int, Any]]:
        yield from enumerate(compiled(len(settings)))

    def time_steps(settings: list[Any], num_rounds: int) -> list[list[float]]:
        assert timed is not None
        return timed([own.parallel for own in settings], num_rounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.planning.planner.described_devices", lambda machine: [])
        patch.setattr("jaxpar.planning.planner.setup_of", lambda cost: cost.settings)
        patch.setattr("jaxpar.planning.planner.compile_steps", compile_steps)
        patch.setattr("jaxpar.planning.planner.time_steps", time_steps)
        yield


@contextlib.contextmanager
def compiler_of_others(compiled: Callable[[], ProgramReport]) -> Iterator[None]:
    """Machines that are not there have the first two devices of this one, and this compiler."""
    with pytest.MonkeyPatch.context() as patch:
        module = "jaxpar.planning.compiled"
        patch.setattr(f"{module}.described_devices", lambda machine: jax.devices()[:2])
        patch.setattr(f"{module}.inspect_lowered", lambda setup, lowered: compiled())
        yield


@contextlib.contextmanager
def parallelisms_are_estimated(message: str) -> Iterator[None]:
    """The compiler of the machine is not installed, as the message says."""

    def refuse(cost: StepCost) -> None:
        raise ValueError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.planning.parallelisms.setup_of", refuse)
        yield


@contextlib.contextmanager
def compiler_of_parallelisms_fails(message: str) -> Iterator[None]:
    """It says this of each step."""

    def fail(setup: Setup, machine: Machine, *, runs: bool) -> None:
        raise ValueError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.planning.parallelisms.compile_step", fail)
        yield


@contextlib.contextmanager
def other_options_of_compilers() -> Iterator[None]:
    """As another version of jaxpar may compile."""
    with pytest.MonkeyPatch.context() as patch:
        options = {"gpu": (("stage",), {"xla_gpu_other": 1})}
        patch.setattr("jaxpar.planning.compiled.OPTIONS", options)
        yield


@contextlib.contextmanager
def nvidia_driver_is_installed() -> Iterator[None]:
    """Whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.cli.doctor.NVIDIA_DRIVER", Path(__file__))
        yield


@contextlib.contextmanager
def processes_have_seconds_to_end(seconds: float) -> Iterator[None]:
    """Those that are told to end, before they are killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.hosts.launch.GRACE_SECONDS", seconds)
        yield


@contextlib.contextmanager
def plans_are_estimated() -> Iterator[None]:
    """Commands that plan compile and time no layout."""
    with pytest.MonkeyPatch.context() as patch:
        no_finalists = functools.partial(plan_in_steps, num_finalists=0)
        patch.setattr("jaxpar.planning.plan_in_steps", no_finalists)
        yield


def context_on(platform: str, cores: int = 0, **fields: Any) -> LayerContext:
    """The context of a block on such a device.

    Args:
      cores: that a kernel may fill.
      fields: of `LayerContext`.
    """
    return LayerContext(0, 0, 0, processor=Processor(platform, cores), **fields)


# ---- names ----


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
