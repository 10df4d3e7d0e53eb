"""From a task to a trained state, in a folder; mistakes are refused before it is touched."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike

import jax

from jaxpar.base.bucket import in_bucket
from jaxpar.base.checks import require, require_instance
from jaxpar.base.files import checksum
from jaxpar.base.loading import guard_remedy
from jaxpar.base.trees import check_varying
from jaxpar.config import Parallel, TrainConfig
from jaxpar.hosts.agree import agree, in_process_0
from jaxpar.hosts.distributed import program_facts
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.model.task import Task, check_task
from jaxpar.partition.storage import abstract_by_layer
from jaxpar.step.custom_backward import check_custom_backward
from jaxpar.step.independence import check_rows_alone
from jaxpar.step.setup import Setup
from jaxpar.step.state import (
    TrainState,
    abstract_state,
    audit,
    check_room,
    init_state,
    release,
)
from jaxpar.training import profiler
from jaxpar.training.console import ConsoleReport
from jaxpar.training.evaluate import check_reported, evaluate, in_batches
from jaxpar.training.fingerprint import HashedBatches, describe_data
from jaxpar.training.loop import Run
from jaxpar.training.progress import Evaluation
from jaxpar.training.report import FitResult, Report, Reports
from jaxpar.training.run_folder import (
    ROOT,
    TASK,
    RunFolder,
    newest_run_folder,
    next_run_folder,
    texts_of,
)
from jaxpar.training.weights import Start, find_weights
from jaxpar.training.writing import check_storable

_log = logging.getLogger(__name__)


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
    """Trains a model as the task says, and evaluates it.

    SIGINT (Ctrl-C, or a notebook's stop button) and SIGTERM end the run after the step that is
    under way; the state is saved, and a resumed run continues with the same losses as if nothing had
    happened. A second signal ends it at once.

    Args:
      task: what it leaves open, such as sizes that follow from the data, is filled in.
      parallel: the layout on devices, or its mesh, or the shape of that such as "dp2pp2tp2"; None is the
        task's own.
      train: None is the task's own; `out_dir=None` takes the next free folder of runs/0001, runs/0002...
      start: weights to begin with, instead of drawn ones: a run, or files of safetensors; see `Start`.
      resume: continue from the newest whole checkpoint in `train.out_dir` (None: of the latest numbered
        run), or from the start if there is none yet, with the same weights; the mesh may be another one.
      overwrite: remove the run that `train.out_dir` holds.
      profile: write a trace of a few steps into `out_dir`/profile, for Perfetto and TensorBoard.
      report: receives what happens while it runs, or several that do; None prints it (`ConsoleReport`).
      quiet: prints nothing.

    Raises:
      ValueError: sizes do not fit each other or the mesh, a part of the model mixes rows of the batch, a
        split has no batches of the task's sizes, the data have changed since the run began, weights to
        begin with do not fit the model, or a file calls it while it is loaded for the task in it.
      FloatingPointError: a loss or gradient is not finite, and `train.nonfinite` does not allow the step to
        be skipped, or no more of them. The state before the step has been saved: a resumed run meets the
        same batch.
      OSError: the data or the checkpoint cannot be read (FileNotFoundError), `train.out_dir` holds
        a run already (FileExistsError), or another process trains there (BlockingIOError); or what a run
        writes cannot be written, in all of its processes; the newest checkpoint is whole.
    """
    if remedy := guard_remedy("fit"):
        raise ValueError(f"fit would train once more\nFix: {remedy}.")
    check_task(task)
    train = task.train if train is None else train
    require_instance("train", train, TrainConfig, "a TrainConfig")
    reports = (
        report if isinstance(report, Sequence) else [ConsoleReport() if report is None else report]
    )
    for each in reports:
        require_instance(
            "report", each, Report, "a Report, such as ConsoleReport(), or a list of them"
        )
    require(
        report is None or not quiet,
        "quiet=True is for what is printed, and report=... takes its place\nFix: leave out one of them",
    )
    given, start = Parallel.of(parallel, task.parallel), Start.of(start)
    if not resume:
        given.check_splits()
    require(
        start is None or not resume,
        "start is for a run that begins, and resume for one with weights of its own\n"
        "Fix: leave out one of them",
    )
    options = {"resume": resume, "overwrite": overwrite, "profile": profile}
    agree(
        task, given, {"task": task.name, "train": train, "start": start, **options},
        remedy="start all of them with the same options, in a folder that they share",
    )  # fmt: skip
    folder = choose_folder(train.out_dir, resume=resume, overwrite=overwrite)
    setup = Setup.of(task, given, train)
    silent = quiet or jax.process_index() > 0
    heard_by = Reports([] if silent else reports)
    with open_run(setup, folder, heard_by, start=start, **options) as run:
        return run.train()


def choose_folder(out_dir: str | None, *, resume: bool, overwrite: bool) -> RunFolder | None:
    """The folder of a run; None if it is to get a number.

    Raises:
      ValueError: resume and overwrite, both; or the run to resume is of an older version.
      OSError: there is no run to resume, or one that is not to be overwritten, or none can be written.
    """
    require(not (resume and overwrite), "resume and overwrite contradict\nFix: use one of them")
    if resume:
        folder = newest_run_folder() if out_dir is None else RunFolder(out_dir)
        folder.check()
    else:
        folder = None if out_dir is None else RunFolder(out_dir)
    (folder or RunFolder(ROOT)).check_writable()
    if folder is not None and not (resume or overwrite):
        _check_holds_no_run(folder)
    return folder


@contextlib.contextmanager
def open_run(
    setup: Setup,
    folder: RunFolder | None,
    report: Reports,
    *,
    start: Start | None = None,
    resume: bool,
    overwrite: bool,
    profile: bool,
) -> Iterator[Run]:
    """A run that has begun or goes on in its folder, which is locked until it ends.

    Args:
      folder: as of `choose_folder`.
      report: hear of it, in each process its own.
      start, resume, overwrite, profile: as of `fit`.
    Raises:
      ValueError, OSError: as of `fit`.
    """
    # Whatever can be refused is refused here, before a file is written or a step compiled.
    before, program, train = folder if resume else None, program_facts(), setup.train
    if before is not None:
        before.check_program(program)
    target = abstract_state(setup)
    check_room(target, setup.mesh)
    _check_model(setup, target)
    data = describe_data(setup)
    if before is not None:
        start = Start.from_json(before.data().get("start"))
    begins = before is None or before.checkpoints(setup).is_empty
    taken = find_weights(setup, start) if start is not None and begins else None
    texts = texts_of(setup, {**data, "program": program, "start": start and start.to_json()})
    batches = HashedBatches(setup, setup.task.make_batches("train", train.seed), data["settings"])
    is_cut_alike = before is not None and before.check_data(data)
    told = [] if taken is None else taken.to_rows()
    found: dict[str, object] = {"start": told, TASK: checksum(texts.get(TASK, "").encode())}
    if setup.parallel.has_equal_shares:  # others say that devices differ
        found["devices"] = sorted({device.device_kind for device in jax.local_devices()})
    agree(
        data, program, found,
        remedy="give all of them the same data, task, settings and devices", last=True,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.push(lambda _, error, __: _hear_end(report, error))
        report.plan(setup, target)
        if taken is not None:
            report.start(taken)
        state = None
        if before is not None:
            stack.enter_context(before.lock)
            state = _restore(before, setup, batches if is_cut_alike else None)
        if profile:
            _check_profile(train, 0 if state is None else int(state.step))
        if folder is None:  # the same one for all processes
            folder = RunFolder(in_process_0(lambda: str(next_run_folder())))
        if before is None:
            stack.enter_context(folder.lock)
            in_process_0(folder.clear if overwrite else lambda: _check_holds_no_run(folder))
        in_process_0(lambda: folder.start(texts))
        setup = setup.replace(out_dir=str(folder))
        checkpoints = stack.enter_context(folder.checkpoints(setup))
        if state is None:
            state = init_state(setup) if taken is None else taken.state()
        else:
            checkpoints.saved_step = int(state.step)
        audit(state)
        yield Run(setup, batches, folder, checkpoints, report, state, profile)


def _check_model(setup: Setup, target: TrainState) -> None:
    """Raises a ValueError if a task's model or optimizer would not do in a run."""
    task, layout = setup.task, setup.layout
    require(
        type(task).after_validation is Task.after_validation or setup.train.eval_every > 0,
        f"eval_every=0 has no validation before the end, and task {task.name} has after_validation\n"
        f"Fix: set eval_every, such as to an epoch's steps",
    )
    _ = setup.optimizer  # is there one?
    layout.facts.check_gradient()
    metrics: Mapping[str, float] = {}
    with contextlib.suppress(ArithmeticError, ValueError):  # it makes no sense of these numbers
        metrics = task.metrics(0.5, dict.fromkeys(layout.facts.traces.sums.metrics, 0.5))
    check_reported(task, 0.5, metrics)
    if not task.axes and (setup.parallel.mesh.data > 1 or setup.parallel.runs_in_units):
        for what, (run, args) in layout.facts.parts.items():
            check_varying(what, run, *args)
    check_rows_alone(layout)
    check_custom_backward(layout)
    layout.facts.warn_of_resets()
    check_storable(abstract_by_layer(target, layout))


def _hear_end(report: Reports, error: BaseException | None) -> None:
    if error is not None:
        report.failed(error)
    report.close()


def evaluate_run(
    folder: RunFolder, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False, **sizes: int
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
            f"out_dir={str(folder)!r} holds a run already\n"
            f"Fix: continue it (--resume), use another --train.out-dir, or remove it (--overwrite)"
        )


def _check_profile(train: TrainConfig, taken: int) -> None:
    require(
        not in_bucket(train.out_dir or ""),
        f"out_dir={train.out_dir!r} is in a bucket, where JAX writes no profile\n"
        f"Fix: profile a run of a few steps with another --train.out-dir",
    )
    require(
        train.num_steps - taken >= profiler.LAST,
        f"num_steps={train.num_steps} must be at least {taken + profiler.LAST} for a profile, which is of "
        f"steps {profiler.FIRST} to {profiler.LAST} from here\nFix: take more steps",
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
            known = checkpoints.described(step)
            what = f"the checkpoint of step {step}"
            # A run that went on with other sizes may have ended before its next checkpoint.
            if known.get("settings") in (None, batches.settings):
                batches.check(known["batches"], what, known["position"])
        return release(state, setup.train.allowed_skips)
    if jax.process_index() == 0:
        _log.warning("%s has no checkpoint yet: the run begins again", folder)
    return None
