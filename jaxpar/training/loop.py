"""The parts of the loop over steps in `fit`: take a step, look at its numbers, log, validate, save."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from jaxpar.base.checks import see
from jaxpar.base.jax_private import call_once
from jaxpar.base.types import Batch, Json
from jaxpar.data.batches import place_batch
from jaxpar.hosts.agree import in_process_0
from jaxpar.hosts.stopping import Stop, Stopped
from jaxpar.model.task import Task
from jaxpar.step.functions import make_train_step
from jaxpar.step.optimizer_numbers import learning_rate
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, evaluated, release
from jaxpar.step.step import Metrics, batch_sharding
from jaxpar.trace.numbers import with_numbers
from jaxpar.training.callbacks import Callbacks, Report
from jaxpar.training.checkpoint import Checkpoints, best_of
from jaxpar.training.evaluate import check_reported, do_not_run_ahead, evaluate, mean_of
from jaxpar.training.fingerprint import HashedBatches
from jaxpar.training.nonfinite import check_parameters, find_in_batch, find_origin
from jaxpar.training.progress import Evaluation, Progress, Skipped, Times, Utilization
from jaxpar.training.run_folder import RunFolder


@dataclasses.dataclass
class Run:
    """A run in progress: its state, its numbers, and the places where they are written.

    Attributes:
      batches: batches of training.
      state: state after the last step.
      step: number of steps taken; known without waiting for the devices.
      first_step: number of steps taken before this process began.
      losses: loss of each step taken here that the host has looked at.
      validations: evaluations of valid, by their steps.
    """

    setup: Setup
    batches: HashedBatches
    folder: RunFolder
    checkpoints: Checkpoints
    callbacks: Callbacks
    state: TrainState

    def __post_init__(self) -> None:
        self.task, self.config = self.setup.task, self.setup.train
        self.step = self.first_step = int(self.state.step)
        self.losses: list[float] = []
        self.validations: dict[int, Evaluation] = {}
        self.times, self._utilization = Times(), Utilization(self.setup)
        self._step_once = make_train_step(self.setup).run
        self._sharding = batch_sharding(self.setup)
        self._rate = self.task.learning_rate(self.config.num_steps)
        if type(self.task).learning_rate is Task.learning_rate and self._rate is not None:
            numbers, rate = with_numbers(self._rate, np.int32(0))
            self._rate = functools.partial(call_once, jax.jit(rate), numbers)
        self._num_skipped = int(self.state.skipped)  # of the steps that the host has looked at
        self._waiting: list[Metrics] = []  # on the devices until the host looks at them
        self._written: list[Json] = []  # lines of metrics.jsonl from earlier processes
        self._units = 0.0  # since the last line of progress
        self._clock = self._saved = time.perf_counter()

    def begin(self) -> None:
        """Removes lines of later steps, which an earlier process has written, and reads the others."""
        in_process_0(lambda: self.folder.rewind_metrics(self.step))
        stored = self.checkpoints.stored_losses().items()
        self.checkpoints.losses |= {step: loss for step, loss in stored if step <= self.step}
        self._written = self.folder.metrics()
        self.callbacks.call(Report.begin, self.step, self.config.num_steps, self.folder.path)
        self._clock = time.perf_counter()

    # ---- a step ----

    def is_stopped(self, stop: Stop) -> bool:
        """Whether a signal or a callback ends the run here; in all processes after the same step."""
        if (reason := self.callbacks.stop_reason) is not None:
            stop.request(reason)
        return stop.now()

    def read_batch(self) -> Batch:
        """The batch of the next step, on the devices.

        Raises:
          EndOfStreamError: there is none; in all processes.
        """
        with self.times.of("input"):
            return place_batch(self.batches, self.step, self._sharding)

    def take_step(self, batch: Batch) -> None:
        """Takes the next step; its numbers stay on the devices."""
        with self.times.of_step(batch):
            self.state, metrics = self._step_once(self.state, batch)
        self.step += 1
        self._waiting.append(metrics)
        self._utilization.add(batch)
        with self.times.of("steps"):
            do_not_run_ahead(self.setup.mesh, metrics)

    # ---- its numbers ----

    @property
    def is_logged(self) -> bool:
        """Whether a line of progress follows the last step."""
        # The line of the first step keeps its compiling out of the speed of the others.
        is_end = self.step in (self.first_step + 1, self.config.num_steps)
        return is_end or self.step % self.config.log_every == 0

    def look(self) -> list[Metrics]:
        """Fetches the numbers of steps that wait on the devices, and reports the skipped ones.

        Raises:
          FloatingPointError: one of them has halted the state.
        """
        with self.times.of("steps"):
            fetched: list[Metrics] = jax.device_get(self._waiting)
        self._waiting.clear()
        for number, metrics in enumerate(fetched, self.step - len(fetched)):
            has_loss = bool(metrics.sums.weight != 0)
            if not has_loss:
                self.callbacks.call(
                    Report.warning,
                    f"the weights of batch {number} sum to 0, so step {number + 1} has no loss",
                )
            self.losses.append(float(metrics.loss) if has_loss else math.nan)
            self._units += float(metrics.sums.weight)
            if metrics.skipped != self._num_skipped:
                self._report_skipped(number, metrics)
        self.batches.keep_from(self.step)
        return fetched

    def _report_skipped(self, number: int, metrics: Metrics) -> None:
        """Reports a skipped step with the batch of this number."""
        self._num_skipped += 1
        num_windows, allowed = self.batches.num_windows, self.config.allowed_skips
        epoch, window = (0, number) if num_windows is None else divmod(number, num_windows)
        nonfinite = "gradient" if np.isfinite(metrics.loss) else "loss"
        skipped = Skipped(number + 1, nonfinite, epoch, window, num_windows, self._num_skipped)
        if self._num_skipped > allowed:
            raise self._halt(skipped)
        self._write(skipped.to_json())
        self.callbacks.call(Report.skipped, skipped, allowed)

    def _halt(self, last: Skipped) -> FloatingPointError:
        """Saves the state before a step that may not be skipped; returns the error to raise."""
        config = self.config
        self.state, self.step = release(self.state, config.allowed_skips), last.step - 1
        assert int(self.state.step) == self.step
        check_parameters(self.setup, self.state)
        self.save()
        self.checkpoints.close()  # it is written, in every process
        # The search computes with the whole batch at once, and may need more memory than there is.
        batch = self.read_batch()
        origin, data = find_origin(self.setup, self.state, batch), find_in_batch(self.setup, batch)
        self.callbacks.call(Report.end, self.step, config.num_steps, None)
        resume = f"continue with --resume --train.out-dir {self.folder}"
        skip = (
            f"--train.nonfinite skip with a larger --train.max-skipped (now {config.max_skipped})"
        )
        limit = self.setup.settings.clip_norm
        clip = "--train.clip-norm 1 (gradients are not clipped now)"
        if limit is not None:
            clip = f"a smaller --train.clip-norm (now {limit:g})"
        where, fix = origin, f"{resume} and a lower learning rate, {clip}, or {skip}"
        # Where the model replaces such numbers, the first may be in another row.
        if data and (not origin.rows or {*data.rows} & {*origin.rows}):
            where = f"the data: {data}"
            fix = f"give finite numbers, also where the weight is 0, or {resume} and {skip}"
        return FloatingPointError(
            f"{last.to_text()}; the first number that is not finite is in {where}. The state before this "
            f"step is saved\nFix: {fix}.{see('The loss is NaN')}"
        )

    def log(self, metrics: Metrics) -> None:
        """Writes and reports the numbers of the last step, unless it was skipped or has no loss."""
        seconds, loss = time.perf_counter() - self._clock, self.losses[-1]
        mfu = self._utilization.take(seconds)
        if np.isfinite(loss) and np.isfinite(metrics.grad_norm):
            is_first = self.step == self.first_step + 1
            reported = self.task.metrics(loss, mean_of(metrics.sums)[1])
            check_reported(self.task, loss, reported)
            progress = Progress(
                step=self.step,
                loss=loss,
                metrics=reported,
                grad_norm=float(metrics.grad_norm),
                learning_rate=self._learning_rate(),
                unit=self.task.unit,
                units_per_second=None if is_first else self._units / seconds,
                seconds=self.times.seconds,
                mfu=None if is_first else mfu,
            )
            self._write(progress.to_json())
            self.callbacks.call(Report.progress, progress, self.config.num_steps)
        self._clock, self._units = time.perf_counter(), 0.0

    def _learning_rate(self) -> float | None:
        """The learning rate of the last step; None if neither the task nor the optimizer's state has one."""
        if self._rate is None:
            rate = learning_rate(self.state.opt_state)
            return None if rate is None else float(rate)
        with jax.numpy_dtype_promotion("standard"):  # one of the user's may mix integers and floats
            return np.asarray(self._rate(np.int32(self.step - 1))).item()

    def _write(self, line: Json) -> None:
        """Writes a line of metrics.jsonl, in process 0."""
        in_process_0(lambda: self.folder.append_metrics(line))

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Leaves the time within out of the speed, which is that of steps."""
        before = time.perf_counter()
        yield
        self._clock += time.perf_counter() - before

    # ---- evaluations and checkpoints ----

    @property
    def is_validated(self) -> bool:
        """Whether a validation follows the last step."""
        every = self.config.eval_every
        return every > 0 and self.step > 0 and self.step % every == 0

    def validate(self, stop: Stop) -> bool:
        """Evaluates valid, unless that has been done; False if the run ends here.

        If a signal ends the evaluation, a resumed run does it before its first step.
        """
        losses, config = self.checkpoints.losses, self.config
        if self.step not in losses:
            try:
                self.validations[self.step] = self.evaluate("valid", stop.check)
            except Stopped:
                return False
            losses[self.step] = self.validations[self.step].loss
        if self.step == config.num_steps:
            return True
        counted = {step: loss for step, loss in losses.items() if step % config.eval_every == 0}
        if 0 < config.patience <= (since := validations_since_best(counted)):
            stop.reason = (
                f"patience={config.patience}: no lower validation loss in the last {since}"
            )
            return False
        adjusted = self.task.after_validation(self.state.opt_state, dict(losses))
        if adjusted is not self.state.opt_state:
            self.state = dataclasses.replace(self.state, opt_state=adjusted)
            self.callbacks.call(Report.adjusted, self.step)
        return True

    def evaluate(self, split: str, before_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluates a split; writes and reports the numbers."""
        state = evaluated(self.setup, self.state)
        with self.times.of("evaluation"):
            evaluation = evaluate(self.setup, state, split, before_batch)
        line = evaluation.to_json(self.step)
        # An earlier process may have written it before it was killed.
        in_process_0(lambda: line in self._written or self.folder.append_metrics(line))
        self.callbacks.call(Report.evaluation, self.step, evaluation)
        return evaluation

    @property
    def is_best(self) -> bool:
        """Whether the last step has the lowest validation loss."""
        losses = self.checkpoints.losses
        return self.step == best_of([*losses], losses)

    def is_time_to_save(self) -> bool:
        """Whether process 0 has saved nothing for `checkpoint_minutes`; all processes call it."""
        seconds = 60 * self.config.checkpoint_minutes
        return seconds > 0 and in_process_0(lambda: time.perf_counter() - self._saved >= seconds)

    def save(self) -> None:
        """Begins to write a checkpoint, if there is none of this step."""
        data = self.batches.describe(self.step)
        in_process_0(self.folder.flush_metrics)
        with self.times.of("checkpoints"):
            self.checkpoints.save(self.state, data)
        self._saved = time.perf_counter()


def validations_since_best(losses: Mapping[int, float]) -> int:
    """The number of validations after the first one with the lowest finite loss; all if there is none."""
    finite = [step for step in losses if math.isfinite(losses[step])]
    best = min(finite, key=lambda step: (losses[step], step), default=-1)
    return sum(step > best for step in losses)
