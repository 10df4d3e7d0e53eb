"""A run as a person reads it: tables before it begins and after it ends, progress lines in between."""

import datetime
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.base.console import facts_table, make_console, make_table
from jaxpar.base.display import format_seconds
from jaxpar.base.output import PROGRAM
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.training.progress import Evaluation, Progress, Skipped
from jaxpar.training.report import Report, describe_stop
from jaxpar.training.summary import summarize

if TYPE_CHECKING:
    from jaxpar.training.weights import Taken


class ConsoleReport(Report):
    """Prints tables and lines of progress, everywhere the same."""

    def __init__(self, console: Console | None = None):
        self.console = console or make_console(sys.stdout)
        self._mark: tuple[float, int] | None = None  # time and step of the first line of progress
        self._out_dir = Path()

    def plan(self, setup: Setup, state: TrainState) -> None:
        """Devices, mesh, placement, data, parameters."""
        self.console.print(facts_table(summarize(setup)), "")
        self.console.print(state, "", highlight=False)

    def start(self, taken: "Taken") -> None:
        """Which weights are taken, new and left out."""
        self._print(f"begins with the weights of {taken.weights.source}")
        table = make_table("", "parameter", "shape", "")
        for row in taken.to_rows():
            table.add_row(*map(Text, row))
        self.console.print(table, "", highlight=False)

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Where it goes."""
        self._mark = None
        self._out_dir = out_dir
        done = f", resumed at step {step}" if step else ""
        if step >= num_steps:
            self._print(
                f"the run in {out_dir} has taken all its {step} steps, and is evaluated alone; to train it "
                f"further, resume it with more: --train.num-steps {2 * step}"
            )
            return
        self._print(f"training {num_steps} steps into {out_dir}{done}; the first is being compiled")

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Loss, metrics, speed, ETA."""
        eta = self._eta(progress, num_steps - progress.step)
        if progress.units_per_second is None:
            eta = f"compiled in {format_seconds(progress.seconds)}"
        count = f"step {progress.step:{len(str(num_steps))}}/{num_steps}"
        self._print(f"{count}  {progress.to_text()}  {eta}")

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """A line."""
        self._print(f"{skipped.to_text()}: skipped, {skipped.skipped} of {allowed} allowed")

    def warning(self, text: str) -> None:
        """A line."""
        self._print(f"warning: {text}")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """A line."""
        self._print(f"step {step}  {evaluation.to_text()}")

    def adjusted(self, step: int) -> None:
        """A line."""
        self._print(f"step {step}  the task has changed the optimizer's state for this validation")

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | str | None) -> None:
        """Says so if the run was stopped."""
        if stopped_by is not None:
            self._print(
                f"{describe_stop(stopped_by)} after step {step}/{num_steps}; its state is saved, "
                f"go on with {PROGRAM} train --resume --train.out-dir {self._out_dir}"
            )

    def profile(self, path: Path) -> None:
        """How to look at it."""
        self._print(f"trace of a few steps: {path}; open it on ui.perfetto.dev")

    def finish(
        self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: Mapping[str, float]
    ) -> None:
        """Evaluations, where the time went, and where everything is."""
        if evaluations:
            self.console.print("", evaluation_table(list(evaluations.values())), "")
        files = ", ".join(sorted(p.name + "/" * p.is_dir() for p in out_dir.glob("[!.]*")))
        parts = [f"{what} {_duration(part)}" for what, part in seconds.items() if round(part)]
        if parts:
            self._print(f"time: {', '.join(parts)}")
        self._print(f"{_duration(sum(seconds.values()))} in all; {out_dir} holds {files}")

    def _eta(self, progress: Progress, steps_left: int) -> str:
        """From the mean speed since the first line, evaluations and saves included."""
        now = time.perf_counter()
        begin, first_step = self._mark = self._mark or (now, progress.step)
        if progress.step == first_step:
            return "ETA -:--"
        return f"ETA {_duration((now - begin) / (progress.step - first_step) * steps_left)}"

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """A row for each split, of at least one."""
    table = make_table("", *(f">{name}" for name in evaluations[0].to_columns()))
    for part in evaluations:
        table.add_row(part.split, *part.to_columns().values())
    return table


def _duration(seconds: float) -> str:
    text = str(datetime.timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")
