"""What a run tells of itself: what will happen, how it goes on, how it ended. Pure data, and who listens."""

import dataclasses
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxpar.config import short_name
from jaxpar.setup import Setup
from jaxpar.state import TrainState


@dataclasses.dataclass(frozen=True)
class Progress:
    """One line of training progress.

    Attributes:
      step: optimizer steps taken.
      loss: of the batch of this step.
      metrics: what the task makes of that batch's sums, by name.
      grad_norm: before clipping.
      learning_rate: of this step; None if the task does not tell.
      unit: what is counted, such as "tokens".
      units_per_second: since the line before; None for the first step of a process, which is compiled in
        that time.
      seconds: since this process began.
    """

    step: int
    loss: float
    metrics: Mapping[str, float]
    grad_norm: float
    learning_rate: float | None
    unit: str
    units_per_second: float | None
    seconds: float

    def to_text(self) -> str:
        """What a person wants to know of it: loss, metrics, speed."""
        numbers = [f"loss {format_number(self.loss):>6}"]
        numbers += [f"{k} {format_number(v):>8}" for k, v in self.metrics.items() if k != "loss"]
        if self.units_per_second is not None:
            numbers.append(f"{self.units_per_second:9,.0f} {self.unit}/s")
        return "  ".join(numbers)

    def to_json(self) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return _line(
            self.metrics,
            split="train",
            step=self.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            learning_rate=self.learning_rate,
            seconds=self.seconds,
            **{f"{self.unit}_per_second": self.units_per_second},
        )


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that changed no parameter, because its loss, gradient or update was not finite.

    Attributes:
      step: as in `Progress`.
      nonfinite: which of them.
      epoch, window: the place of its batch in the data, counted from 0.
      num_windows: batches of an epoch.
      skipped: such steps up to this one.
    """

    step: int
    nonfinite: Literal["loss", "gradient", "update"]
    epoch: int
    window: int
    num_windows: int
    skipped: int

    def to_text(self) -> str:
        """What is wrong, and where."""
        return (
            f"the {self.nonfinite} of step {self.step} is not finite (batch {self.window} of "
            f"{self.num_windows} in epoch {self.epoch}, from 0)"
        )

    def to_json(self) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return {"split": "skipped", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How good a model is on a split.

    Attributes:
      loss: mean over all that counts in the split.
      metrics: what the task makes of the split's sums, by name.
      baseline: numbers to compare them with, by name.
    """

    split: str
    loss: float
    metrics: Mapping[str, float]
    baseline: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_text(self) -> str:
        """What a person wants to know of it: the metrics, and the baseline beside them."""
        known, beside = (
            "  ".join(f"{name} {format_number(value)}" for name, value in numbers.items())
            for numbers in (self.metrics, self.baseline)
        )
        return f"{self.split} {known}" + f"  ({beside})" * bool(beside)

    def to_columns(self) -> dict[str, str]:
        """The same for a table, by its headings."""
        numbers = {**self.metrics, **self.baseline}
        return {name: format_number(value) for name, value in numbers.items()}

    def to_json(self, step: int) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        numbers = {**self.metrics, **self.baseline}
        return _line(numbers, split=self.split, step=step, loss=self.loss)


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


class Report:
    """Hears what a run does, and says nothing. Derive from it to say something."""

    def plan(self, setup: Setup, state: TrainState) -> None:
        """Before anything is compiled; `state` is abstract."""

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Before the first step taken here; `step` were taken before."""

    def progress(self, progress: Progress, num_steps: int) -> None:
        """After the first step and every `log_every`."""

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """After a step that was skipped, when the host looks; up to `allowed` of them in a run."""

    def warning(self, text: str) -> None:
        """Of something that is no error, and should be looked at."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """After each evaluation of a split."""

    def adjusted(self, step: int) -> None:
        """After an evaluation for which the task has changed the optimizer's state."""

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | None) -> None:
        """After the last step taken here."""

    def close(self) -> None:
        """At the end of a run that has begun, however it ends; nothing follows if that is an error."""

    def profile(self, path: Path) -> None:
        """After `end`, if steps were traced; `path` is for Perfetto."""

    def finish(self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: float) -> None:
        """When everything is written; `evaluations` is empty if the run was stopped."""


def format_number(value: float) -> str:
    """With the digits that say something: 0.00921, 0.934, 5.628, 92.2, 3.2e+08."""
    size = abs(value)
    if not math.isfinite(value) or size >= 1e7 or 0 < size < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}"


def _line(numbers: Mapping[str, float], **known: Any) -> dict[str, Any]:
    """What is known of every line, then the task's numbers; where names are the same the first holds."""
    return {**known, **{name.replace(" ", "_"): value for name, value in numbers.items()}, **known}
