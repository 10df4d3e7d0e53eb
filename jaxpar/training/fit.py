"""`fit`: a run from its task to its result. Read it from top to bottom; each part is below its first use.

fit    check everything -> open the folder -> take steps -> evaluate -> close
"""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import jax

from jaxpar.base.bucket import as_path, in_bucket
from jaxpar.base.checks import check_names, fact_of, require, require_instance, see
from jaxpar.base.compiler import use_compile_cache
from jaxpar.base.display import Shown
from jaxpar.base.files import checksum
from jaxpar.base.jax_private import forget_traces
from jaxpar.base.loading import guard_remedy
from jaxpar.base.types import Module
from jaxpar.config import Parallel, TrainConfig
from jaxpar.data.batches import EndOfStreamError
from jaxpar.hosts.agree import agree, in_process_0
from jaxpar.hosts.distributed import program_facts
from jaxpar.hosts.stopping import Stop
from jaxpar.mesh import MeshConfig, short_name
from jaxpar.model.model import overrides
from jaxpar.model.task import Task, check_task
from jaxpar.partition.by_layer import abstract_by_layer
from jaxpar.step.custom_backward import check_custom_backward
from jaxpar.step.functions import init_state
from jaxpar.step.independence import check_rows_alone
from jaxpar.step.setup import Setup
from jaxpar.step.state import (
    TrainState,
    abstract_state,
    audit,
    check_room,
    evaluated,
    release,
)
from jaxpar.trace.varying import check_on_mesh
from jaxpar.training import profiler
from jaxpar.training.callbacks import TRACKERS, Callbacks, ConsoleReport, Report, describe_stop
from jaxpar.training.checkpoint import check_storable
from jaxpar.training.evaluate import check_last_batches, check_reported
from jaxpar.training.fingerprint import HashedBatches, describe_data
from jaxpar.training.loop import Run
from jaxpar.training.progress import Curves, Evaluation, columns_of, format_number
from jaxpar.training.run_folder import (
    ROOT,
    TASK,
    RunFolder,
    newest_run_folder,
    next_run_folder,
    texts_of,
)
from jaxpar.training.weights import MatchedWeights, Start, find_weights, model_of

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult(Shown):
    """The result of `fit`, besides the files in `out_dir`; a notebook shows it with its curves.

    Attributes:
      losses: loss of each step taken here. That of a skipped step may not be finite; NaN is that of a batch
        in which nothing counts.
      first_step: number of steps taken before; 0 unless the run was resumed.
      state: state after the last step.
      setup: task, layout, mesh and settings as they were used; what was left open is filled in.
      evaluations: evaluations of valid and test, by the split's name; empty if a signal ended the run.
      stopped_by: what ended the run before its last step: SIGINT or SIGTERM, or the reason of a `Report.stop`
        or of `patience`; None if nothing did.

    Example:
      result = jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), quiet=True)
      print(result.out_dir, result.evaluations["valid"].loss)
      model = result.model()  # a Flax module with the trained weights
    """

    losses: list[float]
    first_step: int
    state: TrainState
    setup: Setup
    evaluations: dict[str, Evaluation]
    stopped_by: signal.Signals | str | None = None

    def __repr__(self) -> str:
        return f"FitResult({self.describe()})"

    def describe(self) -> str:
        """One line: the task, the mesh, the number of steps, the losses and the folder."""
        facts = [f"{self.first_step + len(self.losses)} of {self.setup.train.num_steps} steps"]
        facts += [f"loss {format_number(self.losses[-1])}"] if self.losses else []
        for evaluation in self.evaluations.values():
            facts.append(dataclasses.replace(evaluation, baseline={}).to_text())
        facts += [describe_stop(self.stopped_by)] if self.stopped_by is not None else []
        where = short_name(self.setup.parallel.mesh)
        return f"{self.setup.task.name} on {where}: {'; '.join(facts)}; in {self.out_dir}"

    @property
    def out_dir(self) -> Path:
        """The folder with metrics, settings and checkpoints."""
        assert self.setup.train.out_dir is not None
        return as_path(self.setup.train.out_dir)

    @property
    def history(self) -> dict[str, list[float]]:
        """The numbers in metrics.jsonl as a table, also those before a resume; `pandas.DataFrame` takes it.

        Columns of equal lengths, with a row for each step that has numbers: `step`, `train/loss`,
        `train/learning_rate`, `valid/loss`, ..., as trackers name them; NaN where a step has none.
        """
        return columns_of(RunFolder(self.out_dir).metrics())

    def model(self, *, sharded: bool = False) -> Module:
        """The trained model, with the parameters that the task evaluates; see `LoadedRun.model`."""
        return model_of(self.setup, evaluated(self.setup, self.state), sharded=sharded)

    @property
    def curves(self) -> Curves:
        """The losses in metrics.jsonl against the step."""
        return Curves(self.setup.train.num_steps).add(*RunFolder(self.out_dir).metrics())


def fit(
    task: Task,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    *,
    start: Start | str | PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    report: Report | Sequence[Report] | None = None,
    quiet: bool = False,
) -> FitResult:
    """Trains and evaluates the model of a task.

    SIGINT (Ctrl-C, or a notebook's stop button) and SIGTERM end the run after the current step. The state is
    saved, and a resumed run continues with the same losses as an undisturbed one. A second signal ends it at
    once.

    Args:
      task: model, data and optimizer; settings that it leaves open, such as sizes of the data, are filled in.
      parallel: layout on the devices, or its mesh, or the shape of the mesh such as "dp2pp2tp2"; None is the
        task's own.
      train: settings of the run; None is the task's own. `out_dir=None` takes the next free folder of
        runs/0001, runs/0002, ...
      start: weights to begin with, instead of random ones: a run, files of safetensors, or a checkpoint
        of Orbax; see `Start`.
      resume: continue from the newest whole checkpoint in `train.out_dir` (None: of the latest numbered
        run). If there is none yet, the run begins again, with the same weights. The mesh may be another one.
      overwrite: remove the run that `train.out_dir` holds.
      profile: write a trace of a few steps into `out_dir`/profile, for Perfetto and TensorBoard.
      report: callback, or several, for the events of the run; None prints them (`ConsoleReport`).
      quiet: print nothing.

    Raises:
      ValueError: sizes do not fit each other or the mesh; a part of the model mixes rows of the batch; a
        split has no batches of the task's sizes; the data have changed since the run began; weights do not
        fit the model; or a file calls `fit` while it is loaded for its task.
      FloatingPointError: a loss or gradient is not finite, and `train.nonfinite` does not allow to skip the
        step, or no more steps. The state before the step is saved: a resumed run gets the same batch.
      OSError: the data or the checkpoint cannot be read (FileNotFoundError), `train.out_dir` holds a run
        already (FileExistsError), or another process trains there (BlockingIOError); or a file of the run
        cannot be written, in all of its processes. The newest checkpoint is whole.

    Example:
      result = jaxpar.fit(task, "dp2pp2", jaxpar.TrainConfig(num_steps=4), quiet=True)
      print(result.losses[-1], result.evaluations["test"].loss)
    """
    if remedy := guard_remedy("fit"):
        raise ValueError(f"fit would train once more\nFix: {remedy}.")
    check_task(task)
    use_compile_cache()
    train = task.train if train is None else train
    require_instance("train", train, TrainConfig, "a TrainConfig")
    printed = ConsoleReport() if report is None else report
    reports = [*printed] if isinstance(printed, Sequence) else [printed]
    for each in reports:
        use = "a Report, such as ConsoleReport(), or a list of them"
        require_instance("report", each, Report, use)
        check_names(f"report {type(each).__name__}", each, Report)
    trackers = [TRACKERS[name]() for name in train.track]
    require(
        report is None or not quiet,
        "quiet=True and report=... exclude each other\nFix: leave out one of them",
    )
    given, start = Parallel.of(parallel, task.parallel), Start.of(start)
    if not resume:
        given.check_splits()
    require(
        start is None or not resume,
        "start and resume exclude each other: a resumed run has its own weights\n"
        "Fix: leave out one of them",
    )
    options = {"resume": resume, "overwrite": overwrite, "profile": profile}
    agree(
        task, given, {"task": task.name, "train": train, "start": start, **options},
        remedy="start all of them with the same options, in a folder that they share",
    )  # fmt: skip
    folder = choose_folder(train.out_dir, resume=resume, overwrite=overwrite)
    setup = Setup.of(task, given, train)
    prepared = _prepare(setup, folder, start, resume=resume)
    told = [*reports * (not quiet), *trackers] if jax.process_index() == 0 else []
    callbacks = Callbacks(told)

    with callbacks, contextlib.ExitStack() as stack:
        stack.callback(forget_traces)
        callbacks.call(Report.plan, setup, prepared.target)
        if prepared.weights is not None:
            callbacks.call(Report.start, prepared.weights)
        run = _open_run(stack, callbacks, prepared, overwrite=overwrite, profile=profile)
        stopped_by = _take_steps(run, profile=profile)
        evaluations = dict[str, Evaluation]()
        if not isinstance(stopped_by, signal.Signals):
            known = run.validations.get(run.step)
            evaluations = {"valid": known or run.evaluate("valid"), "test": run.evaluate("test")}
        in_process_0(run.folder.flush_metrics)
        callbacks.call(Report.finish, evaluations, run.folder.path, run.times.parts())
        return FitResult(run.losses, run.first_step, run.state, run.setup, evaluations, stopped_by)


# ---- before the run: everything that can raise an error, before a file is written or a step compiled ----


def choose_folder(out_dir: str | None, *, resume: bool, overwrite: bool) -> RunFolder | None:
    """The folder of a run; None if it gets the next number.

    Raises:
      ValueError: both resume and overwrite are given; or an older version has written the run.
      OSError: there is no run to resume, or one that may not be overwritten, or none can be written.
    """
    fact = "resume and overwrite exclude each other"
    require(not (resume and overwrite), f"{fact}\nFix: leave out one of them")
    folder = None if out_dir is None else RunFolder(out_dir)
    if resume:
        folder = newest_run_folder() if folder is None else folder
        folder.check()
    (folder or RunFolder(ROOT)).check_writable()
    if folder is not None and not (resume or overwrite):
        _check_holds_no_run(folder)
    return folder


def _check_holds_no_run(folder: RunFolder) -> None:
    if folder.holds_run:
        raise FileExistsError(
            f"out_dir={str(folder)!r} holds a run already\n"
            f"Fix: continue it (--resume), use another --train.out-dir, or remove it (--overwrite)."
            f"{see('out_dir holds a run already')}"
        )


class _Prepared(NamedTuple):
    """The parts of a run after all checks.

    Attributes:
      folder: folder of the run; None if it gets the next number.
      resume: whether the run is in the folder already.
      target: the state, as shapes.
      weights: weights that the run begins with; None for randomly initialized ones.
      texts: files that the run can be resumed from, by their names.
      is_cut_alike: whether a resumed run reads the same batches as before.
    """

    setup: Setup
    folder: RunFolder | None
    resume: bool
    target: TrainState
    weights: MatchedWeights | None
    texts: dict[str, str]
    batches: HashedBatches
    is_cut_alike: bool


def _prepare(
    setup: Setup, folder: RunFolder | None, start: Start | None, *, resume: bool
) -> _Prepared:
    """Checks the model, the data and the weights; in all processes."""
    before, program, begins = folder if resume else None, program_facts(), True
    if before is not None:
        before.check_program(program)
    target = abstract_state(setup)
    check_room(target, setup.mesh)
    _check_model(setup, target)
    data = describe_data(setup)
    if before is not None:
        start = Start.from_json(before.data().get("start"))
        begins = before.checkpoints(setup).is_empty
    weights = find_weights(setup, start) if start is not None and begins else None
    texts = texts_of(setup, {**data, "program": program, "start": start and start.to_json()})
    batches = HashedBatches(
        setup, setup.task.make_batches("train", setup.train.seed), data["settings"]
    )
    is_cut_alike = before is not None and before.check_data(data)
    found: dict[str, object] = {
        "start": [] if weights is None else weights.to_rows(),
        TASK: checksum(texts.get(TASK, "").encode()),
    }
    if setup.parallel.has_equal_shares:  # with unequal shares, devices may differ
        found["devices"] = sorted({device.device_kind for device in jax.local_devices()})
    agree(
        data, program, found,
        remedy="give all of them the same data, task, settings and devices", last=True,
    )  # fmt: skip
    return _Prepared(setup, folder, resume, target, weights, texts, batches, is_cut_alike)


def _check_model(setup: Setup, target: TrainState) -> None:
    """Raises a ValueError if a run cannot use a task's model or optimizer."""
    task, facts = setup.task, setup.facts
    require(
        type(task).after_validation is Task.after_validation or setup.train.eval_every > 0,
        f"eval_every=0 has no validation before the end, but task {task.name} has after_validation\n"
        f"Fix: set eval_every, for example to the steps of an epoch",
    )
    _ = setup.optimizer  # raises an error if there is none
    facts.check_gradient()
    own = facts.cut_model.has_own_predict if facts.cut_model else overrides(facts.model, "predict")
    if own:
        _ = facts.outputs  # what is wrong with them is said before the training
    metrics: Mapping[str, float] = {}
    with contextlib.suppress(ArithmeticError, ValueError):  # these numbers may make no sense
        metrics = task.metrics(0.5, dict.fromkeys(facts.traces.sums.metrics, 0.5))
    check_reported(task, 0.5, metrics)
    if not task.axes and (setup.parallel.mesh.data > 1 or setup.parallel.runs_in_units):
        for what, (run, args) in facts.parts.items():
            check_on_mesh(what, run, *args)
    check_rows_alone(setup.parts)
    check_custom_backward(setup.parts)
    check_last_batches(setup)
    facts.warn_of_resets()
    check_storable(abstract_by_layer(target, setup.storage))


# ---- the folder ----


def _open_run(
    stack: contextlib.ExitStack,
    callbacks: Callbacks,
    prepared: _Prepared,
    *,
    overwrite: bool,
    profile: bool,
) -> Run:
    """A run with its first state, in a folder that is locked until the stack is closed."""
    setup, folder, state = prepared.setup, prepared.folder, None
    if folder is not None and prepared.resume:
        stack.enter_context(folder.lock)
        state = _restore(folder, prepared)
    if profile:
        _check_profile(setup.train, 0 if state is None else int(state.step))
    if folder is None:  # the same one for all processes
        folder = RunFolder(in_process_0(lambda: str(next_run_folder())))
    if not prepared.resume:
        stack.enter_context(folder.lock)
        in_process_0(folder.clear if overwrite else lambda: _check_holds_no_run(folder))
    in_process_0(lambda: folder.start(prepared.texts))
    setup = setup.replace(out_dir=str(folder))
    checkpoints = stack.enter_context(folder.checkpoints(setup))
    if state is not None:
        checkpoints.saved_step = int(state.step)
    else:
        state = init_state(setup) if prepared.weights is None else prepared.weights.state()
    audit(state)
    return Run(setup, prepared.batches, folder, checkpoints, callbacks, state)


def _restore(folder: RunFolder, prepared: _Prepared) -> TrainState | None:
    """The state to resume from; None if the run was killed before its first checkpoint."""
    checkpoints = folder.checkpoints(prepared.setup)
    if checkpoints.is_empty:
        if jax.process_index() == 0:
            _log.warning("%s has no checkpoint yet: the run starts from the beginning", folder)
        return None
    state = checkpoints.restore()
    if prepared.is_cut_alike:
        step = int(state.step)
        prepared.batches.check(checkpoints.described(step), f"the checkpoint of step {step}")
    return release(state, prepared.setup.train.allowed_skips)


def _check_profile(train: TrainConfig, num_taken: int) -> None:
    require(
        not in_bucket(train.out_dir or ""),
        f"out_dir={train.out_dir!r} is in a bucket, where JAX writes no profile\n"
        f"Fix: profile a run of a few steps with another --train.out-dir",
    )
    require(
        train.num_steps - num_taken >= profiler.LAST,
        f"num_steps={train.num_steps} must be at least {num_taken + profiler.LAST} for a profile (of steps "
        f"{profiler.FIRST} to {profiler.LAST} from here)\nFix: train more steps",
    )


# ---- the loop ----


def _take_steps(run: Run, *, profile: bool) -> signal.Signals | str | None:
    """Takes the steps that are left, and saves the state after the last one; returns what ended them early.

    Raises:
      OSError: something could not be written, such as on a full disk; the newest checkpoint is whole.
      FloatingPointError: a step is not finite, and may not be skipped.
      EndOfStreamError: the data have ended before the last step.
    """
    config, is_traced = run.config, profile and jax.process_index() == 0
    tracer = profiler.StepTracer(run.folder.profile_path if is_traced else None)
    ended: EndOfStreamError | None = None
    run.begin()
    with Stop() as stop, tracer:
        run.checkpoints.on_failure = stop.request
        # The run may have ended here during this validation, or because of it.
        continues = not run.is_validated or run.validate(stop)
        while continues and run.step < config.num_steps and not run.is_stopped(stop):
            tracer.before_step()
            try:
                batch = run.read_batch()
            except EndOfStreamError as error:  # in all processes
                ended = error
                break
            run.take_step(batch)
            tracer.after_step(run.state)
            is_due = run.checkpoints.is_due(run.step)
            is_due = is_due or (run.is_logged and run.is_time_to_save())
            if run.is_logged or run.is_validated or is_due:
                looked = run.look()
                if run.is_logged:
                    run.log(looked[-1])
            with run.off_the_clock():
                if run.is_validated:
                    continues = run.validate(stop)
                    is_due = is_due or (config.keep_best and run.is_best)
                if continues and is_due:
                    run.save()
        run.look()
        if run.step > run.first_step:
            run.save()
            run.checkpoints.close()  # it is whole before the last lines name it
    run.callbacks.call(Report.end, run.step, config.num_steps, stop.reason)
    if ended is not None:
        raise EndOfStreamError(
            f"{fact_of(ended)} The state of step {run.step} is saved.\nFix: make the stream "
            f"repeat its data, or give more, and use --resume --train.out-dir {run.folder}."
        ) from ended
    if tracer.path is not None:
        run.callbacks.call(Report.profile, tracer.path)
    return stop.reason
