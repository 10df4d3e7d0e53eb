"""A run as a person reads it: tables before it begins and after it ends, progress lines in between."""

import datetime
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rich.progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from jaxpar.display import format_seconds
from jaxpar.output import dropping
from jaxpar.setup import Setup
from jaxpar.state import TrainState
from jaxpar.tables import FittingTable, make_console
from jaxpar.training.notebook import NotebookConsole
from jaxpar.training.report import Evaluation, Progress, Report, Skipped
from jaxpar.training.summary import summarize

ROOM_FOR_BAR = 90  # columns of a terminal that has room for a bar beside the numbers


class ConsoleReport(Report):
    """Prints tables and progress with rich.

    A terminal has a live line, a notebook one display that changes; elsewhere lines are plain.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or _make_console()
        self._live: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        # When the line before was told, and of which step.
        self._mark: tuple[float, int] | None = None
        self._out_dir = Path()

    def plan(self, setup: Setup, state: TrainState) -> None:
        """Devices, mesh, placement, data, parameters."""
        if isinstance(self.console, NotebookConsole):
            self.console = NotebookConsole()  # of its own for each run
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold")
        for name, value in summarize(setup):
            facts.add_row(name, Text(value))  # brackets are no markup
        self.console.print(facts, "")
        self.console.print(state, "", highlight=False)

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Where it goes; a live line where there can be one."""
        self._mark = None
        self._out_dir = out_dir
        done = f", resumed at step {step}" if step else ""
        self._print(f"training {num_steps} steps into {out_dir}{done}; the first is being compiled")
        if self.console.is_terminal or isinstance(self.console, NotebookConsole):
            columns = rich.progress
            # Where there is little room, the metrics give way first; the bar is not there at all.
            whole, part = Column(no_wrap=True), Column(no_wrap=True, ratio=1, overflow="ellipsis")
            bar = [columns.BarColumn(bar_width=20)] * (self.console.width >= ROOM_FOR_BAR)
            live = columns.Progress(
                columns.TextColumn("{task.fields[step]}", table_column=whole),
                *bar,
                columns.TextColumn("{task.fields[eta]}", table_column=whole),
                columns.TextColumn("{task.fields[text]}", table_column=part),
                console=self.console,
                expand=True,
            )
            self._task = live.add_task(
                "",
                total=num_steps,
                completed=step,
                step=f"step {step}/{num_steps}",
                eta="",
                text="",
            )
            if self.console.is_terminal:
                live.start()
            self._live = live

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Loss, metrics, speed, ETA."""
        eta = self._eta(progress, num_steps - progress.step)
        if progress.units_per_second is None:
            eta = f"compiled in {format_seconds(progress.seconds)}"
        width = len(str(num_steps))
        step = f"step {progress.step:{width}}/{num_steps}"
        if self._live is not None and self._task is not None:
            self._live.update(
                self._task, completed=progress.step, step=step, eta=eta, text=progress.to_text()
            )
            if isinstance(self.console, NotebookConsole):
                self.console.show_below(self._live.get_renderable())
        else:
            self._print(f"{step}  {progress.to_text()}  {eta}")

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

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | None) -> None:
        """Says so if the run was stopped."""
        self.close()
        if stopped_by is not None:
            self._print(
                f"stopped by {stopped_by.name} after step {step}/{num_steps}; its state is saved, "
                f"go on with python -m jaxpar train --resume --train.out-dir {self._out_dir}"
            )

    def close(self) -> None:
        """The live line changes no more."""
        live, self._live = self._live, None
        if live is not None and isinstance(self.console, NotebookConsole):
            self.console.print(live.get_renderable())
        elif live is not None:
            live.stop()

    def profile(self, path: Path) -> None:
        """How to look at it."""
        self._print(f"trace of a few steps: {path}; open it on ui.perfetto.dev")

    def finish(self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: float) -> None:
        """Evaluations, and where everything is."""
        if evaluations:
            self.console.print("", evaluation_table(list(evaluations.values())), "")
        files = ", ".join(sorted(p.name + "/" * p.is_dir() for p in out_dir.glob("[!.]*")))
        self._print(f"{_duration(seconds)} in all; {out_dir} holds {files}")

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
    table = FittingTable("", *(f">{name}" for name in evaluations[0].to_columns()))
    for part in evaluations:
        table.add_row(part.split, *part.to_columns().values())
    return table


def _make_console() -> Console:
    return NotebookConsole() if Console().is_jupyter else make_console(dropping(sys.stdout))


def _duration(seconds: float) -> str:
    text = str(datetime.timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")
