"""The loop: from a config to a trained state, with metrics, checkpoints and a clean stop."""

import contextlib
import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.config import RunConfig
from jaxpar.data.buckets import BucketedSentences
from jaxpar.data.corpus import Corpus
from jaxpar.data.images import ImageBatches, Images
from jaxpar.data.streams import TokenStreams
from jaxpar.mesh import MeshConfig
from jaxpar.optimizer import learning_rate
from jaxpar.state import TrainState, abstract_state, audit, init_state, release
from jaxpar.step import Metrics, batch_sharding, make_train_step
from jaxpar.training import profiler
from jaxpar.training.checkpoint import Checkpoints, best_of
from jaxpar.training.evaluate import do_not_run_ahead
from jaxpar.training.nonfinite import find_origin
from jaxpar.training.profiler import StepTracer
from jaxpar.training.report import Evaluation, Report, Skipped, TextEvaluation
from jaxpar.training.run_folder import (
    ONE_DEVICE,
    RunFolder,
    load_data,
    newest_run_folder,
    next_run_folder,
)
from jaxpar.training.tasks import Task, TextTask, make_task

Batches = TokenStreams | BucketedSentences | ImageBatches

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` leaves behind, besides the files in `out_dir`.

    Attributes:
      losses: of each step taken here, in nats; of one that was skipped it may not be finite.
      first_step: the steps that had been taken before; 0 unless resumed.
      state: after the last step, on `mesh`.
      config: with the mesh, `vocab_size` and `out_dir` that were used.
      evaluations: of valid and test, by the split's name; empty if the run was stopped.
      stopped_by: SIGINT or SIGTERM, if one ended the run before its last step.
    """

    losses: list[float]
    first_step: int
    state: TrainState
    mesh: Mesh
    config: RunConfig
    evaluations: dict[str, Evaluation]
    stopped_by: signal.Signals | None = None

    @property
    def out_dir(self) -> Path:
        """Where metrics, config, vocabulary and checkpoints are."""
        assert self.config.train.out_dir is not None
        return Path(self.config.train.out_dir)

    @property
    def valid_perplexity(self) -> float | None:
        """None if the run was stopped, or is not on text."""
        return self._perplexity("valid")

    @property
    def test_perplexity(self) -> float | None:
        """None if the run was stopped, or is not on text."""
        return self._perplexity("test")

    def _perplexity(self, split: str) -> float | None:
        evaluation = self.evaluations.get(split)
        return evaluation.perplexity if isinstance(evaluation, TextEvaluation) else None


def fit(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    report: Report | None = None,
) -> FitResult:
    """Trains a model as the config says, and evaluates it.

    SIGINT (Ctrl-C, or a notebook's stop button) and SIGTERM end the run after the step that is
    under way; the state is saved, and a resumed run goes on with the same losses as if nothing had
    happened. A second signal ends it at once.

    Args:
      config: `model.vocab_size=None` takes what the corpus needs, padded to a multiple of
        `VOCAB_MULTIPLE`; `train.out_dir=None` takes the next free folder of runs/0001, runs/0002...
      resume: go on from the newest whole checkpoint in `train.out_dir` (None: of the latest numbered
        run), or from the start if there is none yet; the mesh may be another one.
      overwrite: remove the run that `train.out_dir` holds.
      profile: write a trace of a few steps into `out_dir`/profile, for Perfetto and TensorBoard.
      report: what is told while it runs, e.g. `ConsoleReport()`; None is silent.

    Raises:
      ValueError: sizes do not fit each other or the mesh, or the text or the images have changed since
        the run began.
      FloatingPointError: a loss or gradient is not finite, and `train.nonfinite` does not let it be skipped,
        or no more of them. The state before its step has been saved: a resumed run meets the same batch.
      OSError: a text or the checkpoint cannot be read (FileNotFoundError), or `train.out_dir` holds
        a run already (FileExistsError).
    """
    # Whatever can be refused is refused here, before a file is written or a step compiled.
    if config.train.fallback_dir is not None and jax.process_count() > 1:
        raise ValueError(
            f"fallback_dir={config.train.fallback_dir!r} is for one process, there are "
            f"{jax.process_count()}: they cannot agree once one of them cannot write; leave it away"
        )
    folder = choose_folder(config, resume=resume, overwrite=overwrite)
    mesh = config.mesh.build()
    data = folder.load_data(config) if resume and folder is not None else load_data(config)
    task = make_task(config, mesh, data)
    config = task.config
    report = report if report is not None and jax.process_index() == 0 else Report()
    batches = task.batches()
    report.plan(config, mesh, data, abstract_state(config, mesh))
    if isinstance(batches, BucketedSentences):
        report.buckets(batches)
    if isinstance(task, TextTask) and task.kernel.reason is not None:
        report.kernel(task.kernel)

    state = _restore(folder, config, mesh) if resume and folder is not None else None
    if config.train.fallback_dir is not None:
        _make_fallback(Path(config.train.fallback_dir).expanduser())

    if profile:
        _check_profile(config.train.num_steps, 0 if state is None else int(state.step))

    folder, config = begin_run(folder, config, data, overwrite=overwrite)
    with folder.checkpoints(config) as checkpoints:
        state = init_state(config, mesh) if state is None else state
        audit(state)
        run = _Run(config, mesh, data, task, folder, checkpoints, report, state)
        try:
            return run.finish(*run.train(batches, profile=profile))
        except OSError as error:
            if jax.process_count() > 1:
                raise  # the others do not know; they end when this process does
            raise run.rescue(error) from error


def choose_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> RunFolder | None:
    """The folder that the config names; None if it is to get a number.

    Raises:
      ValueError: resume and overwrite, both.
      OSError: there is no run to resume, or one that is not to be overwritten.
    """
    if resume and overwrite:
        raise ValueError("resume and overwrite contradict each other; use one of them")
    out_dir = config.train.out_dir
    if resume:
        folder = newest_run_folder() if out_dir is None else RunFolder(out_dir)
        folder.config()  # is there a run?
        return folder
    folder = None if out_dir is None else RunFolder(out_dir)
    if folder is not None and folder.holds_run and not overwrite:
        raise FileExistsError(
            f"out_dir={out_dir!r} holds a run already; go on with it (--resume), use another "
            f"--train.out-dir, or remove what is there (--overwrite)"
        )
    return folder


def _check_profile(num_steps: int, taken: int) -> None:
    if num_steps - taken < profiler.LAST:
        done = f", {taken} of them taken" if taken else ""
        raise ValueError(
            f"num_steps={num_steps}{done}: a profile is of steps {profiler.FIRST} to {profiler.LAST}; "
            f"take {taken + profiler.LAST} or more"
        )


def begin_run(
    folder: RunFolder | None, config: RunConfig, data: Corpus | Images, *, overwrite: bool
) -> tuple[RunFolder, RunConfig]:
    """Makes the folder of a run, or goes on in it; the config with its path.

    Args:
      folder: None takes the next number.
      overwrite: remove the run that is there.
    Raises:
      OSError: the folder cannot be written.
    """
    folder = _claim_numbered_folder() if folder is None else folder
    config = _replace_train(config, out_dir=str(folder))
    if jax.process_index() == 0:
        if overwrite:
            folder.clear()
        folder.start(config, data)
    _barrier("jaxpar: the run's folder is ready")
    return folder, config


class _Run:
    """The parts that training and evaluation share."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        data: Corpus | Images,
        task: Task,
        folder: RunFolder,
        checkpoints: Checkpoints,
        report: Report,
        state: TrainState,
    ):
        self.config, self.mesh, self.data, self.task = config, mesh, data, task
        self.folder, self.checkpoints, self.report = folder, checkpoints, report
        self.state = state  # after the last step taken
        self.num_skipped = int(state.skipped)  # of the steps that have been looked at
        self.started = time.perf_counter()

    def train(
        self, batches: Batches, *, profile: bool = False
    ) -> tuple[int, list[float], signal.Signals | None]:
        """Takes the steps that are left, and saves the state after the last."""
        settings = self.config.train
        step = first_step = int(self.state.step)
        losses: list[float] = []
        waiting: list[Metrics] = []  # on the device until the next log point
        step_once = make_train_step(self.config, self.mesh)
        sharding = batch_sharding(self.mesh, self.config)
        if jax.process_index() == 0:
            self.folder.rewind_metrics(step)
        if settings.keep_best:  # a line after this step may still be there, for another process
            losses_before = self.folder.valid_losses().items()
            self.checkpoints.losses |= {s: loss for s, loss in losses_before if s <= step}
        self.report.begin(step, settings.num_steps, self.folder.path)
        clock, clock_step = time.perf_counter(), step
        traces = profile and jax.process_index() == 0
        tracer = StepTracer(self.folder.profile_path if traces else None)
        with _signals() as signals, tracer:
            while step < settings.num_steps and not self._should_stop(signals, step, first_step):
                tracer.before_step()
                self.state, metrics = step_once(self.state, batches.batch_on(step, sharding))
                step += 1
                waiting.append(metrics)
                do_not_run_ahead(self.mesh, metrics)
                tracer.after_step(self.state)
                last = step == settings.num_steps
                # The first step is waited for as well: compiling it would hide the others' speed.
                is_logged = step % settings.log_every == 0 or last or step == first_step + 1
                evaluates = not last and settings.eval_every and step % settings.eval_every == 0
                is_due = settings.checkpoint_every and step % settings.checkpoint_every == 0
                if is_logged or evaluates or is_due:
                    losses += self._look(waiting, step, batches)
                if is_logged:
                    seconds = time.perf_counter() - clock
                    targets = batches.num_targets / batches.num_windows * (step - clock_step)
                    self._log(step, metrics, targets / seconds)
                    clock, clock_step = time.perf_counter(), step
                is_best = False
                if evaluates:
                    self.evaluate(step, "valid")
                    is_best = step == best_of([*self.checkpoints.losses], self.checkpoints.losses)
                    clock = time.perf_counter()
                if is_best or is_due:
                    self.checkpoints.save(self.state, self.config)
            losses += self._look(waiting, step, batches)
            if step > first_step and self.checkpoints.latest_step() != step:
                self.checkpoints.save(self.state, self.config)
        stopped_by = signals[0] if signals and step < settings.num_steps else None
        self.report.end(step, settings.num_steps, stopped_by)
        if tracer.path is not None:
            self.report.profile(tracer.path)
        return first_step, losses, stopped_by

    def finish(
        self,
        first_step: int,
        losses: list[float],
        stopped_by: signal.Signals | None,
    ) -> FitResult:
        """The result, with the evaluations of valid and test unless the run was stopped."""
        evaluations = {}
        if stopped_by is None:
            for split in ("valid", "test"):
                evaluations[split] = self.evaluate(int(self.state.step), split)
        self.checkpoints.close()  # what is named in the last lines is there
        self.report.finish(evaluations, self.folder.path, time.perf_counter() - self.started)
        return FitResult(
            losses, first_step, self.state, self.mesh, self.config, evaluations, stopped_by
        )

    def rescue(self, error: OSError) -> OSError:
        """Saves the state where that is possible, when something could not be written.

        Returns:
          the error to raise, which tells where the state is.
        """
        step, places = int(self.state.step), [self.folder]
        self.report.end(step, self.config.train.num_steps, None)
        message = str(error)
        if self.config.train.fallback_dir is not None:
            places.append(_fallback_folder(self.config.train.fallback_dir, self.folder, step))
        for folder in places:
            try:
                config = self.config
                if folder is not self.folder:
                    config = _replace_train(config, out_dir=str(folder))
                    folder.start(config, self.data)
                    folder.take_metrics(self.folder, step)
                with folder.checkpoints(config) as checkpoints:
                    if checkpoints.latest_step() != step:
                        checkpoints.save(self.state, config)
            except OSError as another:
                message += "" if str(another) == message else f"; and {another}"
                continue
            return type(error)(
                f"{message}; the state of step {step} is saved in {folder}: go on with --resume "
                f"--train.out-dir {folder}"
            )
        return type(error)(
            f"{message}; free some space and go on with --resume, or name another place for the state "
            f"beforehand (--train.fallback-dir)"
        )

    def evaluate(self, step: int, split: str) -> Evaluation:
        """Evaluates a split; reported and written down."""
        evaluation = self.task.evaluate(self.state.params, split)
        if split == "valid" and self.config.train.keep_best:
            self.checkpoints.losses[step] = evaluation.loss
        line = {"step": step, **dataclasses.asdict(evaluation)}
        if line not in self.folder.metrics():  # a process that was killed may have written it
            self._write(line)
        self.report.evaluation(step, evaluation)
        return evaluation

    def _look(self, waiting: list[Metrics], step: int, batches: Batches) -> list[float]:
        """The losses of the last steps, which wait on the device; reports those that were skipped.

        Raises:
          FloatingPointError: one of them has halted the state.
        """
        fetched: list[Metrics] = jax.device_get(waiting)
        waiting.clear()
        for number, metrics in enumerate(fetched, step - len(fetched)):
            if metrics.skipped == self.num_skipped:
                continue
            self.num_skipped += 1
            epoch, window = divmod(number, batches.num_windows)
            skipped = Skipped(
                step=number + 1,
                nonfinite="gradient" if np.isfinite(metrics.loss) else "loss",
                epoch=epoch,
                window=window,
                num_windows=batches.num_windows,
                skipped=self.num_skipped,
            )
            if self.num_skipped > self.config.train.allowed_skips:
                raise self._halt(skipped, batches)
            self._write({"split": "skipped", **dataclasses.asdict(skipped)})
            self.report.skipped(skipped, self.config.train.allowed_skips)
        return [float(metrics.loss) for metrics in fetched]

    def _halt(self, last: Skipped, batches: Batches) -> FloatingPointError:
        """Saves the state before the step that was not to be skipped.

        Returns:
          the error to raise.
        """
        settings, step = self.config.train, last.step - 1
        self.state = release(self.state, self.config)
        assert int(self.state.step) == step
        batch = batches.batch_on(step, batch_sharding(self.mesh, self.config))
        origin = find_origin(self.config, self.mesh, self.state, batch)
        if self.checkpoints.latest_step() != step:
            self.checkpoints.save(self.state, self.config)
            self.checkpoints.latest_step()  # it is written
        _barrier("jaxpar: the state before a step that is not finite is saved")
        self.report.end(step, settings.num_steps, None)
        skip = (
            f"a larger --train.max-skipped (now {settings.max_skipped})"
            if settings.nonfinite == "skip"
            else "--train.nonfinite skip"
        )
        return FloatingPointError(
            f"{last.to_text()}; the first number that is not finite is in {origin}. The state before this "
            f"step is saved: go on with --resume --train.out-dir {self.folder} and a --train.learning-rate "
            f"below {settings.learning_rate:g}, a smaller --train.clip-norm (now "
            f"{settings.clip_norm:g}; 0 is none), or {skip}"
        )

    def _log(self, step: int, metrics: Metrics, targets_per_second: float) -> None:
        if not np.isfinite(metrics.loss) or not np.isfinite(metrics.grad_norm):
            return  # a step that was skipped
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
            rate = np.asarray(learning_rate(self.config.train)(np.int32(step - 1))).item()
        progress = self.task.progress(
            targets_per_second,
            step=step,
            loss=float(metrics.loss),
            grad_norm=float(metrics.grad_norm),
            learning_rate=rate,
            seconds=time.perf_counter() - self.started,
        )
        self._write({"split": "train", **dataclasses.asdict(progress)})
        self.report.progress(progress, self.config.train.num_steps)

    def _write(self, line: dict[str, object]) -> None:
        if jax.process_index() == 0:
            self.folder.append_metrics(line)

    def _should_stop(self, signals: list[signal.Signals], step: int, first_step: int) -> bool:
        if jax.process_count() == 1:
            return bool(signals)
        # All processes must leave at the same step, or the others wait in a collective for ever.
        if step % self.config.train.log_every and step != first_step:
            return False
        return bool(np.max(multihost_utils.process_allgather(np.int32(bool(signals)))))


def evaluate_run(
    folder: RunFolder, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
) -> list[Evaluation]:
    """Evaluates the newest state of a run on valid and test, on any mesh.

    Args:
      best: the state with the lowest validation loss, not the newest.
    Raises:
      ValueError: the model does not fit the mesh, or its data have changed since the run began.
      OSError: no run, no checkpoint, or an unreadable text.
    """
    data = folder.load_data(folder.config())
    config, devices, state = folder.restore(mesh, best=best)
    task = make_task(config, devices, data)
    return [task.evaluate(state.params, split) for split in ("valid", "test")]


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Gathers SIGINT and SIGTERM in a list and does not act on the first; a second acts as ever."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def receive(number: int, _frame: object) -> None:
        received.append(signal.Signals(number))
        restore()

    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()


def _claim_numbered_folder() -> RunFolder:
    """A new numbered folder, the same one for all processes."""
    number = 0
    if jax.process_index() == 0:
        number = int(next_run_folder().path.name)
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return RunFolder(f"runs/{number:04d}")


def _restore(folder: RunFolder, config: RunConfig, mesh: Mesh) -> TrainState | None:
    """The state to go on with; None if the run was killed before its first checkpoint."""
    folder.metrics()  # can they be read?
    checkpoints = folder.checkpoints(config)
    if not checkpoints.is_empty:
        return release(checkpoints.restore(config, mesh), config)
    if jax.process_index() == 0:
        _log.warning("%s has no checkpoint yet: the run begins again", folder)
    return None


def _make_fallback(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"cannot make fallback_dir={str(path)!r}: {error.strerror}; use another place"
        ) from error


def _fallback_folder(root: str, folder: RunFolder, step: int) -> RunFolder:
    """A folder for the state of a run that cannot be written in its own: `root/0001-step-700`."""
    name = f"{folder.path.name}-step-{step}"
    path, number = Path(root).expanduser() / name, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return RunFolder(path)


def _replace_train(config: RunConfig, **changes: object) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
