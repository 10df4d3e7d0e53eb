"""From a task to a trained state, in a folder; mistakes are refused before it is touched."""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import Parallel, TrainConfig, short_name
from jaxpar.fields import require, require_instance
from jaxpar.files import make_folder
from jaxpar.hosts.agree import SharedError, agree, in_process_0, together
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.rows import check_rows_alone
from jaxpar.setup import Setup
from jaxpar.state import TrainState, abstract_state, audit, check_room, init_state, release
from jaxpar.task import Task, check_task
from jaxpar.training import profiler
from jaxpar.training.by_layer import abstract_by_layer
from jaxpar.training.checksums import checksum
from jaxpar.training.console import ConsoleReport
from jaxpar.training.evaluate import evaluate, in_batches
from jaxpar.training.fingerprint import HashedBatches, describe_data
from jaxpar.training.loop import Run
from jaxpar.training.report import Evaluation, Report, format_number
from jaxpar.training.run_folder import (
    TASK,
    RunFolder,
    newest_run_folder,
    next_run_folder,
    texts_of,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` leaves behind, besides the files in `out_dir`.

    Attributes:
      losses: of each step taken here; that of a skipped step may not be finite, and NaN is that of a batch in
        which nothing counts.
      first_step: the number of steps taken before; 0 unless resumed.
      state: after the last step.
      setup: task, layout, mesh and settings as they were used, with what was left open filled in.
      evaluations: of valid and test, by the split's name; empty if the run was stopped.
      stopped_by: SIGINT or SIGTERM, if one ended the run before its last step.
    """

    losses: list[float]
    first_step: int
    state: TrainState
    setup: Setup
    evaluations: dict[str, Evaluation]
    stopped_by: signal.Signals | None = None

    def __repr__(self) -> str:
        """What came of it, in a line."""
        facts = [f"{self.first_step + len(self.losses)} of {self.setup.train.num_steps} steps"]
        facts += [f"loss {format_number(self.losses[-1])}"] if self.losses else []
        for evaluation in self.evaluations.values():
            facts.append(dataclasses.replace(evaluation, baseline={}).to_text())
        facts += [f"stopped by {self.stopped_by.name}"] if self.stopped_by else []
        where = short_name(self.setup.parallel.mesh)
        return (
            f"FitResult({self.setup.task.name} on {where}: {'; '.join(facts)}; in {self.out_dir})"
        )

    @property
    def out_dir(self) -> Path:
        """Where metrics, settings and checkpoints are."""
        assert self.setup.train.out_dir is not None
        return Path(self.setup.train.out_dir)


def fit(
    task: Task,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    report: Report | None = None,
    quiet: bool = False,
) -> FitResult:
    """Trains a model as the task says, and evaluates it.

    SIGINT (Ctrl-C, or a notebook's stop button) and SIGTERM end the run after the step that is
    under way; the state is saved, and a resumed run continues with the same losses as if nothing had
    happened. A second signal ends it at once.

    Args:
      task: what it leaves open, such as sizes that follow from the data, is filled in.
      parallel: the layout on devices, or its mesh, or the shape of that such as "dp2pp2tp2"; None is the
        task's own.
      train: None is the task's own; `out_dir=None` takes the next free folder of runs/0001, runs/0002...
      resume: continue from the newest whole checkpoint in `train.out_dir` (None: of the latest numbered
        run), or from the start if there is none yet; the mesh may be another one.
      overwrite: remove the run that `train.out_dir` holds.
      profile: write a trace of a few steps into `out_dir`/profile, for Perfetto and TensorBoard.
      report: receives what happens while it runs; None prints it (`ConsoleReport`).
      quiet: prints nothing.

    Raises:
      ValueError: sizes do not fit each other or the mesh, a part of the model mixes rows of the batch, a
        split has no batches of the task's sizes, or the data have changed since the run began.
      FloatingPointError: a loss or gradient is not finite, and `train.nonfinite` does not allow the step to
        be skipped, or no more of them. The state before the step has been saved: a resumed run meets the
        same batch.
      OSError: the data or the checkpoint cannot be read (FileNotFoundError), `train.out_dir` holds
        a run already (FileExistsError), or another process trains there (BlockingIOError); or what a run
        writes cannot be written, in all of its processes, and the message says where the state is.
    """
    # Whatever can be refused is refused here, before a file is written or a step compiled.
    check_task(task)
    train = task.train if train is None else train
    require_instance("train", train, TrainConfig, "a TrainConfig")
    require_instance("report", report, Report | None, "a Report, such as ConsoleReport()")
    require(
        report is None or not quiet,
        "quiet=True is for what is printed, and report=... takes its place; leave out one of them",
    )
    given = Parallel.of(parallel, task.parallel)
    options = {"resume": resume, "overwrite": overwrite, "profile": profile}
    agree(
        task, given, {"task": task.name, "train": train, **options},
        remedy="start all of them with the same options",
    )  # fmt: skip
    folder = choose_folder(train.out_dir, resume=resume, overwrite=overwrite)
    setup = Setup.of(task, given, train)
    task, target = setup.task, abstract_state(setup)
    check_room(target, setup.mesh)
    if type(task).after_validation is not Task.after_validation and not train.eval_every:
        raise ValueError(
            f"task {task.name} goes by validations (after_validation), and eval_every=0 has none before the "
            f"end; set eval_every, such as to an epoch's steps"
        )
    check_rows_alone(setup.layout)
    abstract_by_layer(target, setup.layout)  # can it be stored?
    data = describe_data(setup)
    texts = texts_of(setup, data)  # and these?
    batches = HashedBatches(task, task.make_batches("train", train.seed))
    is_cut_alike = resume and folder is not None and folder.check_data(data)
    found = _what_was_found(data, texts, setup.parallel)
    agree(found, remedy="give all of them the same data, task and devices", last=True)
    silent = quiet or jax.process_index() > 0
    report = Report() if silent else report or ConsoleReport()
    report.plan(setup, target)

    with contextlib.ExitStack() as stack:
        state = None
        if resume and folder is not None:
            stack.enter_context(folder.lock())
            state = _restore(folder, setup, batches if is_cut_alike else None)
        if train.fallback_dir is not None:
            path = Path(train.fallback_dir).expanduser()
            together(lambda: make_folder(path, f"fallback_dir={str(path)!r}", "use another place"))
        if profile:
            _check_profile(train.num_steps, 0 if state is None else int(state.step))
        folder, setup = stack.enter_context(
            begin_run(folder, setup, texts, resume=resume, overwrite=overwrite)
        )
        checkpoints = stack.enter_context(folder.checkpoints(setup))
        if state is None:
            state = init_state(setup)
        audit(state)
        stack.callback(report.close)
        run = Run(setup, batches, folder, checkpoints, report, state, texts)
        try:
            first_step, losses, stopped_by = run.train(profile=profile)
            evaluations = run.finish(stopped_by)
        except OSError as error:
            if jax.process_count() > 1 and not isinstance(error, SharedError):
                raise  # the others do not know; they end when this process does
            raise run.rescue(error) from error
    return FitResult(losses, first_step, run.state, setup, evaluations, stopped_by)


def choose_folder(out_dir: str | None, *, resume: bool, overwrite: bool) -> RunFolder | None:
    """The folder of a run; None if it is to get a number.

    Raises:
      ValueError: resume and overwrite, both; or the run to resume is of an older version.
      OSError: there is no run to resume, or one that is not to be overwritten.
    """
    if resume and overwrite:
        raise ValueError("resume and overwrite contradict each other; use one of them")
    if resume:
        folder = newest_run_folder() if out_dir is None else RunFolder(out_dir)
        folder.check()
    else:
        folder = None if out_dir is None else RunFolder(out_dir)
        if folder is not None and not overwrite:
            _check_holds_no_run(folder)
    if folder is not None:
        folder.check_links()
    return folder


@contextlib.contextmanager
def begin_run(
    folder: RunFolder | None,
    setup: Setup,
    texts: Mapping[str, str],
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Iterator[tuple[RunFolder, Setup]]:
    """Makes the folder of a run, or continues in it, and keeps others out; the setup with its path.

    Args:
      folder: None takes the next number.
      texts: that it is continued from; see `texts_of`.
      resume: continue the run that is there.
      overwrite: remove the run that is there.
    Raises:
      OSError: the folder cannot be written, or is in use.
    """
    if folder is None:  # the same one for all processes
        folder = RunFolder(in_process_0(lambda: str(next_run_folder())))
    setup = setup.replace(out_dir=str(folder))

    def start() -> None:
        if overwrite:
            folder.clear()
        elif not resume:
            _check_holds_no_run(folder)  # since this process looked
        folder.start(texts)

    with folder.lock():
        in_process_0(start)
        yield folder, setup


def evaluate_run(
    folder: RunFolder,
    mesh: MeshConfig = ONE_DEVICE,
    *,
    best: bool = False,
    **sizes: int,
) -> list[Evaluation]:
    """Evaluates the newest state of a run on valid and test, on any mesh.

    Args:
      best: the state with the lowest validation loss, not the newest.
      sizes: fields of the task that shall differ from training, such as batch_size=1.
    Raises:
      ValueError: the model does not fit the mesh, or its data have changed since the run began.
      OSError: no run, no checkpoint, or data that cannot be read.
    """
    setup, state = folder.restore(mesh, best=best)
    folder.check_data(describe_data(setup))
    if sizes:
        setup, state = in_batches(setup, state, **sizes)
    return [evaluate(setup, state, split) for split in ("valid", "test")]


def _check_holds_no_run(folder: RunFolder) -> None:
    if folder.holds_run:
        raise FileExistsError(
            f"out_dir={str(folder)!r} holds a run already; go on with it (--resume), use another "
            f"--train.out-dir, or remove what is there (--overwrite)"
        )


def _what_was_found(
    data: Mapping[str, Any], texts: Mapping[str, str], parallel: Parallel
) -> dict[str, Any]:
    """What all processes must have found alike: the data, the file of the task, the kind of their devices."""
    found = dict(data)
    if TASK in texts:
        found[TASK] = checksum(texts[TASK].encode())
    if parallel.has_equal_shares:  # others say that devices differ
        found["devices"] = sorted({device.device_kind for device in jax.local_devices()})
    return found


def _check_profile(num_steps: int, taken: int) -> None:
    if num_steps - taken < profiler.LAST:
        done = f", {taken} of them taken" if taken else ""
        raise ValueError(
            f"num_steps={num_steps}{done}: a profile is of steps {profiler.FIRST} to {profiler.LAST}; "
            f"take {taken + profiler.LAST} or more"
        )


def _restore(folder: RunFolder, setup: Setup, batches: HashedBatches | None) -> TrainState | None:
    """The state to go on with; None if the run was killed before its first checkpoint.

    Args:
      batches: to be compared with those before the checkpoint; None if they are not comparable.
    """
    checkpoints = folder.checkpoints(setup)
    if not checkpoints.is_empty:
        state = checkpoints.restore()
        if batches is not None:
            step = int(state.step)
            batches.check(checkpoints.described(step)["batches"], f"the checkpoint of step {step}")
        return release(state, setup.train.allowed_skips)
    if jax.process_index() == 0:
        _log.warning("%s has no checkpoint yet: the run begins again", folder)
    return None
