"""The loop: steps, with what is written and reported of them, until the last one or a signal."""

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from jaxpar.base.checks import fact_of
from jaxpar.data.batches import EndOfStreamError, place_batch
from jaxpar.hosts.agree import in_process_0
from jaxpar.hosts.stopping import Stop, Stopped
from jaxpar.step.functions import make_train_step
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, evaluated, release
from jaxpar.step.step import Metrics, batch_sharding
from jaxpar.training.checkpoint import Checkpoints, best_of
from jaxpar.training.evaluate import check_reported, do_not_run_ahead, evaluate, mean_of
from jaxpar.training.fingerprint import HashedBatches
from jaxpar.training.nonfinite import check_parameters, find_origin
from jaxpar.training.profiler import StepTracer
from jaxpar.training.progress import Evaluation, Progress, Skipped
from jaxpar.training.report import FitResult, Reports
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.times import Times, Utilization


@dataclasses.dataclass
class Run:
    """A run in progress: its state, and everything that records or reports it.

    Attributes:
      state: after the last step taken.
      profile: whether steps are traced.
    """

    setup: Setup
    batches: HashedBatches
    folder: RunFolder
    checkpoints: Checkpoints
    report: Reports
    state: TrainState
    profile: bool

    def __post_init__(self) -> None:
        self.task, self.config = self.setup.task, self.setup.train
        self.num_skipped = int(self.state.skipped)  # of the steps that have been looked at
        self.sharding = batch_sharding(self.setup)
        self.rate = self.task.learning_rate(self.config.num_steps)
        self.lines: list[dict[str, Any]] = []  # that a process before this one has written
        self.validations: dict[int, Evaluation] = {}  # of steps
        self.times, self.utilization = Times(), Utilization(self.setup)
        self.saved = time.perf_counter()

    def train(self) -> FitResult:
        """Takes the steps that are left, saves the state after the last, and evaluates it.

        Raises:
          OSError: something could not be written, such as on a full disk; the newest checkpoint is whole.
          FloatingPointError: a step is not finite, and may not be skipped.
        """
        first_step, losses, stopped_by = self._take_steps()
        evaluations = self._finish(stopped_by)
        return FitResult(losses, first_step, self.state, self.setup, evaluations, stopped_by)

    def _take_steps(self) -> tuple[int, list[float], signal.Signals | str | None]:
        """Takes the steps that are left, and saves the state after the last.

        Returns:
          the steps that had been taken before, the losses of these, and what ended them early.
        """
        config = self.config
        step = first_step = int(self.state.step)
        losses: list[float] = []
        ended: EndOfStreamError | None = None
        waiting: list[Metrics] = []  # on the device until the next log point
        step_once = make_train_step(self.setup)
        in_process_0(lambda: self.folder.rewind_metrics(step))
        stored = self.checkpoints.stored_losses().items()
        self.checkpoints.losses |= {each: loss for each, loss in stored if each <= step}
        self.lines = self.folder.metrics()
        self.report.begin(step, config.num_steps, self.folder.path)
        clock, units = time.perf_counter(), 0.0  # since the last line
        traces = self.profile and jax.process_index() == 0
        tracer = StepTracer(self.folder.profile_path if traces else None)
        with Stop() as stop, tracer:
            self.checkpoints.on_failure = stop.request
            # What ended the run here may have ended this validation, or what follows it.
            goes_on = not self._validates(step) or self._validate(step, stop)
            while goes_on and step < config.num_steps and not self._is_stopped(stop):
                tracer.before_step()
                try:
                    with self.times.of("input"):
                        batch = place_batch(self.batches, step, self.sharding)
                except EndOfStreamError as error:  # in all processes
                    ended = error
                    break
                with self.times.of_step(batch):
                    self.state, metrics = step_once.run(self.state, batch)
                step += 1
                waiting.append(metrics)
                self.utilization.add(batch)
                with self.times.of("steps"):
                    do_not_run_ahead(self.setup.mesh, metrics)
                tracer.after_step(self.state)
                last = step == config.num_steps
                # The first step is waited for as well: compiling it would hide the others' speed.
                is_logged = step % config.log_every == 0 or last or step == first_step + 1
                evaluates = self._validates(step)
                is_due = self.checkpoints.is_due(step) or (is_logged and self._is_time_to_save())
                if is_logged or evaluates or is_due:
                    for metrics in self._look(waiting, step):
                        losses.append(float(metrics.loss))
                        units += float(metrics.sums.weight)
                if is_logged:
                    seconds = time.perf_counter() - clock
                    mfu = self.utilization.take(seconds)
                    speed = (None, None) if step == first_step + 1 else (units / seconds, mfu)
                    self._log(step, metrics, *speed)
                    clock, units = time.perf_counter(), 0.0
                before, is_best = time.perf_counter(), False
                if evaluates:
                    if not self._validate(step, stop):
                        break
                    is_best = step == best_of([*self.checkpoints.losses], self.checkpoints.losses)
                if (is_best and config.keep_best) or is_due:
                    self._save()
                clock += time.perf_counter() - before  # speed is that of steps
            losses += [float(each.loss) for each in self._look(waiting, step)]
            if step > first_step:
                self._save()
                self.checkpoints.close()  # what is named in the last lines is there
        self.report.end(step, config.num_steps, stop.reason)
        if ended is not None:
            raise EndOfStreamError(
                f"{fact_of(ended)} The state of step {step} is saved.\nFix: let the stream "
                f"repeat its data, or give more, and use --resume --train.out-dir {self.folder}."
            ) from ended
        if tracer.path is not None:
            self.report.profile(tracer.path)
        return first_step, losses, stop.reason

    def _is_stopped(self, stop: Stop) -> bool:
        """Whether the run ends here, by a signal or a report; in all processes after the same step."""
        if (reason := self.report.asked) is not None:
            stop.request(reason)
        return stop.now()

    def _finish(self, stopped_by: signal.Signals | str | None) -> dict[str, Evaluation]:
        """The evaluations of valid and test, unless a signal ended the run; all files are written."""
        evaluations, step = {}, int(self.state.step)
        if not isinstance(stopped_by, signal.Signals):
            for split in ("valid", "test"):
                known = self.validations.get(step) if split == "valid" else None
                evaluations[split] = known or self.evaluate(step, split)
        in_process_0(self.folder.flush_metrics)
        self.report.finish(evaluations, self.folder.path, self.times.parts())
        return evaluations

    def _save(self) -> None:
        """Begins to write a checkpoint, if there is none of this step."""
        step = int(self.state.step)
        read, position = self.batches.checksums(step), self.batches.position(step)
        in_process_0(self.folder.flush_metrics)
        with self.times.of("checkpoints"):
            self.checkpoints.save(self.state, read, position, self.batches.settings)
        self.saved = time.perf_counter()

    def _is_time_to_save(self) -> bool:
        """Whether a checkpoint is due by the clock of process 0."""
        seconds = 60 * self.config.checkpoint_minutes
        return seconds > 0 and in_process_0(lambda: time.perf_counter() - self.saved >= seconds)

    def _validates(self, step: int) -> bool:
        """Whether a validation follows this step of the loop."""
        every = self.config.eval_every
        return every > 0 and step > 0 and step % every == 0

    def _validate(self, step: int, stop: Stop) -> bool:
        """Evaluates valid, unless that has been done; False if the run ends with it.

        A signal ends it before: a resumed run does it before its first step.
        """
        losses = self.checkpoints.losses
        if step not in losses:
            try:
                self.validations[step] = self.evaluate(step, "valid", stop.check)
            except Stopped:
                return False
            losses[step] = self.validations[step].loss
        patience, every = self.config.patience, self.config.eval_every
        if step == self.config.num_steps:
            return True
        since = validations_since_best({s: loss for s, loss in losses.items() if s % every == 0})
        if 0 < patience <= since:
            stop.reason = f"patience={patience}: no lower validation loss in the last {since}"
            return False
        self._adjust(step)
        return True

    def _adjust(self, step: int) -> None:
        """Lets the task change the optimizer's state for the validation of this step."""
        before, losses = self.state.opt_state, dict(self.checkpoints.losses)
        after = self.task.after_validation(before, losses)
        if after is not before:
            self.state = dataclasses.replace(self.state, opt_state=after)
            self.report.adjusted(step)

    def evaluate(
        self, step: int, split: str, before_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Evaluates a split; reported and written down."""
        state = evaluated(self.setup, self.state)
        with self.times.of("evaluation"):
            evaluation = evaluate(self.setup, state, split, before_batch)
        line = evaluation.to_json(step)
        # One that was killed may have written it.
        in_process_0(lambda: line in self.lines or self.folder.append_metrics(line))
        self.report.evaluation(step, evaluation)
        return evaluation

    def _look(self, waiting: list[Metrics], step: int) -> list[Metrics]:
        """What the last steps tell, which waits on the device; reports those that were skipped.

        Raises:
          FloatingPointError: one of them has halted the state.
        """
        with self.times.of("steps"):
            fetched: list[Metrics] = jax.device_get(waiting)
        waiting.clear()
        for number, metrics in enumerate(fetched, step - len(fetched)):
            if metrics.sums.weight == 0:
                fetched[number - step] = metrics._replace(loss=np.float32(np.nan))
                self.report.warning(
                    f"the weights of batch {number} sum to 0, so step {number + 1} has no loss"
                )
            if metrics.skipped == self.num_skipped:
                continue
            self.num_skipped += 1
            num_windows = self.batches.num_windows
            epoch, window = (0, number) if num_windows is None else divmod(number, num_windows)
            skipped = Skipped(
                step=number + 1,
                nonfinite=_first_not_finite(metrics),
                epoch=epoch,
                window=window,
                num_windows=num_windows,
                skipped=self.num_skipped,
            )
            if self.num_skipped > self.config.allowed_skips:
                raise self._halt(skipped)
            self._write(skipped.to_json())
            self.report.skipped(skipped, self.config.allowed_skips)
        self.batches.keep_from(step)
        return fetched

    def _halt(self, last: Skipped) -> FloatingPointError:
        """Saves the state before the step that was not to be skipped.

        Returns:
          the error to raise.
        """
        config, step = self.config, last.step - 1
        self.state = release(self.state, config.allowed_skips)
        assert int(self.state.step) == step
        check_parameters(self.setup, self.state)
        batch = place_batch(self.batches, step, self.sharding)
        origin = find_origin(self.setup, self.state, batch)
        self._save()
        self.checkpoints.close()  # it is written, in every process
        self.report.end(step, config.num_steps, None)
        return FloatingPointError(
            f"{last.to_text()}; the first number that is not finite is in {origin}. The state before this "
            f"step is saved\nFix: continue with --resume --train.out-dir {self.folder} and a lower learning "
            f"rate, a smaller --train.clip-norm (now {config.clip_norm:g}; 0 is none), or --train.nonfinite "
            f"skip with a larger --train.max-skipped (now {config.max_skipped})"
        )

    def _log(
        self, step: int, metrics: Metrics, units_per_second: float | None, mfu: float | None
    ) -> None:
        if not np.isfinite(metrics.loss) or not np.isfinite(metrics.grad_norm):
            return  # a step that was skipped, or has no loss
        rate = None
        if self.rate is not None:
            with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
                rate = np.asarray(self.rate(np.int32(step - 1))).item()
        loss = float(metrics.loss)
        reported = self.task.metrics(loss, mean_of(metrics.sums)[1])
        check_reported(self.task, loss, reported)
        progress = Progress(
            step=step,
            loss=loss,
            metrics=reported,
            grad_norm=float(metrics.grad_norm),
            learning_rate=rate,
            unit=self.task.unit,
            units_per_second=units_per_second,
            seconds=self.times.seconds,
            mfu=mfu,
        )
        self._write(progress.to_json())
        self.report.progress(progress, self.config.num_steps)

    def _write(self, line: dict[str, object]) -> None:
        """Process 0 writes a line."""
        in_process_0(lambda: self.folder.append_metrics(line))


def validations_since_best(losses: Mapping[int, float]) -> int:
    """How many follow the first one with the lowest loss, which is finite; all, if there is none."""
    finite = [step for step in losses if math.isfinite(losses[step])]
    best = min(finite, key=lambda step: (losses[step], step), default=-1)
    return sum(step > best for step in losses)


def _first_not_finite(metrics: Metrics) -> Literal["loss", "gradient"]:
    """Of a step that was skipped."""
    return "gradient" if np.isfinite(metrics.loss) else "loss"
