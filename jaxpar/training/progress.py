"""What a run tells of itself: lines of progress, as numbers, as text and as JSON."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal


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
      mfu: model FLOPs utilization since the line before, as of `times.Utilization`, such as 0.4; None where
        the peak of the devices is not known, as of CPUs.
    """

    step: int
    loss: float
    metrics: Mapping[str, float]
    grad_norm: float
    learning_rate: float | None
    unit: str
    units_per_second: float | None
    seconds: float
    mfu: float | None = None

    def to_text(self) -> str:
        """What a person wants to know of it: loss, metrics, speed."""
        numbers = [f"loss {format_number(self.loss):>6}"]
        numbers += [f"{k} {format_number(v):>8}" for k, v in self.metrics.items() if k != "loss"]
        if self.units_per_second is not None:
            numbers.append(f"{self.units_per_second:9,.0f} {self.unit}/s")
        if self.mfu is not None:
            numbers.append(f"MFU {self.mfu:.1%}")
        return "  ".join(numbers)

    def to_json(self) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        mfu = {} if self.mfu is None else {"mfu": self.mfu}
        return _line(
            self.metrics,
            split="train",
            step=self.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            learning_rate=self.learning_rate,
            seconds=self.seconds,
            **{f"{self.unit}_per_second": self.units_per_second},
            **mfu,
        )


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that changed no parameter, because its loss, gradient or update was not finite.

    Attributes:
      step: as in `Progress`.
      nonfinite: which of them.
      epoch, window: the place of its batch in the data, counted from 0.
      num_windows: batches of an epoch; None in a stream.
      skipped: such steps up to this one.
    """

    step: int
    nonfinite: Literal["loss", "gradient"]
    epoch: int
    window: int
    num_windows: int | None
    skipped: int

    def to_text(self) -> str:
        """What is wrong, and where."""
        where = "the stream"
        if self.num_windows is not None:
            where = f"{self.num_windows} in epoch {self.epoch}"
        return (
            f"the {self.nonfinite} of step {self.step} is not finite (batch {self.window} of {where}, "
            f"from 0)"
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


def format_number(value: float) -> str:
    """With the digits that say something: 0.00921, 0.934, 5.628, 92.2, 3.2e+08."""
    size = abs(value)
    if not math.isfinite(value) or size >= 1e7 or 0 < size < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}"


def _line(numbers: Mapping[str, float], **known: Any) -> dict[str, Any]:
    """What is known of every line, then the task's numbers; where names are the same the first holds."""
    return {**known, **{name.replace(" ", "_"): value for name, value in numbers.items()}, **known}
