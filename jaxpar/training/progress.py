"""The numbers of a run, as lines of metrics.jsonl, text, tables and curves; and its times."""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from rich.table import Table

from jaxpar.base.console import make_table
from jaxpar.base.display import Shown
from jaxpar.base.sheets import peak_flops
from jaxpar.base.types import Batch, Json
from jaxpar.step.setup import Setup


@dataclasses.dataclass(frozen=True)
class Progress:
    """One line of training progress.

    Attributes:
      step: number of optimizer steps taken.
      loss: loss of the batch of this step.
      metrics: metrics that the task computes from the sums of that batch, by name.
      grad_norm: norm of the gradients before clipping.
      learning_rate: learning rate of this step; None if it is not known.
      unit: unit of the speed, such as "tokens".
      units_per_second: speed since the last line; None for the first step of a process, whose time includes
        compiling.
      seconds: time since this process began.
      mfu: model FLOPs utilization since the last line, as of `Utilization`, such as 0.4; None where the peak
        of the devices is unknown, as on CPUs.
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
        """The loss, the metrics and the speed, for a person."""
        numbers = [f"loss {format_number(self.loss):>6}"]
        numbers += [f"{k} {format_number(v):>8}" for k, v in self.metrics.items() if k != "loss"]
        if self.units_per_second is not None:
            numbers.append(f"{self.units_per_second:9,.0f} {self.unit}/s")
        if self.mfu is not None:
            numbers.append(f"MFU {self.mfu:.1%}")
        return "  ".join(numbers)

    def to_json(self) -> Json:
        """A line of metrics.jsonl."""
        known: Json = {"split": "train", "step": self.step, "loss": self.loss}
        known["grad_norm"] = self.grad_norm
        if self.learning_rate is not None:
            known["learning_rate"] = self.learning_rate
        known["seconds"] = self.seconds
        known[f"{self.unit}_per_second"] = self.units_per_second
        if self.mfu is not None:
            known["mfu"] = self.mfu
        return _line(known, self.metrics)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that changed no parameter, because its loss, gradient or update was not finite.

    Attributes:
      step: as in `Progress`.
      nonfinite: which of them.
      epoch, window: the place of its batch in the data, counted from 0.
      num_windows: number of batches in an epoch; None in a stream.
      skipped: number of skipped steps up to this one.
    """

    step: int
    nonfinite: Literal["loss", "gradient"]
    epoch: int
    window: int
    num_windows: int | None
    skipped: int

    def to_text(self) -> str:
        """The problem, and the place of the batch."""
        where = "the stream"
        if self.num_windows is not None:
            where = f"{self.num_windows} in epoch {self.epoch}"
        return (
            f"the {self.nonfinite} of step {self.step} is not finite (batch {self.window} of {where}, "
            f"from 0)"
        )

    def to_json(self) -> Json:
        """A line of metrics.jsonl."""
        return {"split": "skipped", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The loss and the metrics of a model on a split.

    Attributes:
      loss: mean over everything that counts in the split.
      metrics: metrics that the task computes from the sums of the split, by name.
      baseline: numbers to compare them with, by name.
    """

    split: str
    loss: float
    metrics: Mapping[str, float]
    baseline: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_text(self) -> str:
        """The metrics, and the baseline in parentheses."""
        metrics, baseline = (
            "  ".join(f"{name} {format_number(value)}" for name, value in numbers.items())
            for numbers in (self.metrics, self.baseline)
        )
        return f"{self.split} {metrics}" + f"  ({baseline})" * bool(baseline)

    def to_columns(self) -> dict[str, str]:
        """The same numbers for a table, by the headings of its columns."""
        numbers = {**self.metrics, **self.baseline}
        return {name: format_number(value) for name, value in numbers.items()}

    def to_json(self, step: int) -> Json:
        """A line of metrics.jsonl."""
        known = {"split": self.split, "step": step, "loss": self.loss}
        return _line(known, {**self.metrics, **self.baseline})


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """A table with a row for each split; there must be at least one."""
    table = make_table("", *(f">{name}" for name in evaluations[0].to_columns()))
    for evaluation in evaluations:
        table.add_row(evaluation.split, *evaluation.to_columns().values())
    return table


def format_number(value: float) -> str:
    """A number with its significant digits: 0.00921, 0.934, 5.628, 92.2, 3.2e+08."""
    size = abs(value)
    if not math.isfinite(value) or size >= 1e7 or 0 < size < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}"


def _line(known: Json, numbers: Mapping[str, float]) -> Json:
    """A line with what jaxpar knows, then the task's numbers; of two equal names the first counts."""
    return {**known, **{name.replace(" ", "_"): value for name, value in numbers.items()}, **known}


# ---- lines as columns and curves ----


def columns_of(lines: Iterable[Json]) -> dict[str, list[float]]:
    """Columns of equal lengths, with a row for each step that has numbers.

    Args:
      lines: lines of metrics.jsonl; those of skipped steps are left out.
    Returns:
      `step`, and numbers named after their split, as in trackers: `train/loss`, `valid/loss`; NaN where a
      step has none.
    """
    rows = dict[int, dict[str, float]]()
    for line in lines:
        if line["split"] != "skipped":
            rows.setdefault(line["step"], {}).update(
                (f"{line['split']}/{name}", math.nan if number is None else number)
                for name, number in line.items()
                if name not in ("split", "step")
            )
    names = dict.fromkeys(name for row in rows.values() for name in row)
    ordered = dict(sorted(rows.items()))
    columns = {name: [row.get(name, math.nan) for row in ordered.values()] for name in names}
    return {"step": [*ordered], **columns}


# What a split's losses are called.
LOSSES = {"train": "training loss", "valid": "validation loss"}


@dataclasses.dataclass
class Curves(Shown):
    """Losses against the step; a notebook shows them as a picture.

    Attributes:
      num_steps: number of steps of the whole run.
      points: finite losses of "train" and "valid" as pairs (step, loss), in their order.
    """

    num_steps: int
    points: dict[str, list[tuple[int, float]]] = dataclasses.field(
        default_factory=lambda: {split: [] for split in LOSSES}
    )

    def add(self, *lines: Json) -> "Curves":
        """Adds lines of metrics.jsonl, of any split; returns these curves."""
        for line in lines:
            if line["split"] in self.points and math.isfinite(line["loss"]):
                self.points[line["split"]].append((line["step"], line["loss"]))
        return self


# ---- times ----


class Times:
    """Seconds of a process since this object was made, by what its host did; each second counts once.

    Devices compute while the host continues. The time of a step is known only where the host waits for it.

      steps: queueing steps, and waiting for their results, at each line of progress; on simulated devices
        after every step
      compiling: calling a step with a batch of new shapes, which is traced and compiled
      input: reading, checking and placing batches, while devices may compute earlier steps
      evaluation: everything in it, also its input and its compiling
      checkpoints: copying states, and waiting for an earlier save to end; the rest is done in the background
      other: reports, metrics, and everything between these
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._seconds = collections.defaultdict[str, float](float)
        self._shapes = set[tuple[tuple[int, ...], ...]]()

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Counts the time within for one of these; not to be used within another one."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - begin

    def of_step(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Counts the call of a step, as steps or as compiling."""
        shapes = tuple(map(np.shape, jax.tree.leaves(batch)))
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        return self.of("compiling" if is_new else "steps")

    @property
    def seconds(self) -> float:
        """All seconds."""
        return time.perf_counter() - self._begin

    def parts(self) -> dict[str, float]:
        """Seconds by what they were spent on; their sum is all seconds."""
        names = ("steps", "compiling", "input", "evaluation", "checkpoints")
        parts = {name: self._seconds[name] for name in names}
        return {**parts, "other": self.seconds - sum(parts.values())}


class Utilization:
    """The model FLOPs utilization (MFU): the fraction of the devices' peak that the model uses.

    As in PaLM (arXiv:2204.02311, appendix B), it is the FLOPs of the matrix products of the model's forward
    and backward pass, without recomputation, divided by those that the devices could do in that time at their
    peak. Padding counts. A batch of fewer time steps counts by its fraction of the numbers in a full one.
    """

    def __init__(self, setup: Setup):
        self._facts = facts = setup.facts
        dtype = str(jax.tree.leaves(facts.passed)[0].dtype)
        peaks = [peak_flops(device, dtype) for device in setup.mesh.devices.flat]
        self._peak = None if None in peaks else sum(filter(None, peaks))
        self._full = _size(facts.batch)
        self._batches = 0.0

    def add(self, batch: Batch) -> None:
        """Counts a batch."""
        if self._peak is not None:
            self._batches += _size(batch) / self._full

    def take(self, seconds: float) -> float | None:
        """The utilization if the batches since the last call took so long; None if it is unknown."""
        batches, self._batches = self._batches, 0.0
        if self._peak is None:
            return None
        return self._facts.step_flops * batches / (self._peak * seconds)


def _size(batch: Batch) -> int:
    return sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(batch))
