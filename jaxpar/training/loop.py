"""The loop: steps, with what is written and told of them, until the last one or a signal."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.config import RunConfig, replace_train
from jaxpar.data.buckets import BucketedSentences
from jaxpar.data.corpus import Corpus
from jaxpar.data.images import ImageBatches, Images
from jaxpar.data.streams import TokenStreams
from jaxpar.hosts.distributed import wait_for_processes
from jaxpar.optimizer import learning_rate
from jaxpar.state import TrainState, release
from jaxpar.step import Metrics, batch_sharding, make_train_step
from jaxpar.training.checkpoint import Checkpoints, best_of
from jaxpar.training.evaluate import do_not_run_ahead
from jaxpar.training.nonfinite import find_origin
from jaxpar.training.profiler import StepTracer
from jaxpar.training.report import Evaluation, Report, Skipped
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.tasks import Task

Batches = TokenStreams | BucketedSentences | ImageBatches


class Run:
    """A run while it goes on: its state, and all who are told of it."""

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
        """Takes the steps that are left, and saves the state after the last.

        Returns:
          the steps that had been taken before, the losses of these, and the signal that ended them early.
        """
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

    def finish(self, stopped_by: signal.Signals | None) -> dict[str, Evaluation]:
        """The evaluations of valid and test, unless the run was stopped; all files are written."""
        evaluations = {}
        if stopped_by is None:
            for split in ("valid", "test"):
                evaluations[split] = self.evaluate(int(self.state.step), split)
        self.checkpoints.close()  # what is named in the last lines is there
        self.report.finish(evaluations, self.folder.path, time.perf_counter() - self.started)
        return evaluations

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
                    config = replace_train(config, out_dir=str(folder))
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
        wait_for_processes("the state before a step that is not finite is saved")
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


def _fallback_folder(root: str, folder: RunFolder, step: int) -> RunFolder:
    """A folder for the state of a run that cannot be written in its own: `root/0001-step-700`."""
    name = f"{folder.path.name}-step-{step}"
    path, number = Path(root).expanduser() / name, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return RunFolder(path)
