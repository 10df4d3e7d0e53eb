"""A run in a terminal: tables before it begins and when it has ended, a line of progress between."""

import datetime
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import rich.box
import rich.progress
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.display import make_console
from jaxpar.state import TrainState
from jaxpar.training.report import Evaluation, Progress, Report, Skipped
from jaxpar.training.settings import Settings
from jaxpar.training.summary import describe_bytes, describe_plan, parameter_table


class ConsoleReport(Report):
    """Prints tables and progress with rich: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None):
        self.console = console or make_console()
        self._live: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._mark: tuple[float, int] | None = (
            None  # when the line before was told, and of which step
        )
        self._out_dir = Path()

    def plan(self, settings: Settings, mesh: Mesh, state: TrainState) -> None:
        """Devices, mesh, placement, data, parameters."""
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold")
        for name, value in describe_plan(settings, mesh):
            facts.add_row(name, Text(value))  # brackets are no markup
        self.console.print(facts, "")
        self.console.print(parameter_table(state.params))
        if jax.tree.leaves(state.frozen):
            self.console.print("", parameter_table(state.frozen, "frozen"))
        self._print("\n" + describe_bytes(state))

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Where it goes; a live line on a terminal."""
        self._out_dir = out_dir
        done = f", resumed at step {step}" if step else ""
        self._print(f"training {num_steps} steps into {out_dir}{done}; the first is being compiled")
        if self.console.is_terminal:
            columns = rich.progress
            live = columns.Progress(
                columns.TextColumn("step {task.completed}/{task.total}"),
                columns.BarColumn(bar_width=20),
                columns.TextColumn("{task.description}"),
                console=self.console,
            )
            self._task = live.add_task("", total=num_steps, completed=step)
            live.start()
            self._live = live

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Loss, metrics, speed, ETA."""
        line = f"{progress.to_text()}  ETA {self._eta(progress, num_steps - progress.step)}"
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=progress.step, description=line)
        else:
            width = len(str(num_steps))
            self._print(f"step {progress.step:{width}}/{num_steps}  {line}")

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """A line."""
        self._print(f"{skipped.to_text()}: skipped, {skipped.skipped} of {allowed} allowed")

    def warning(self, text: str) -> None:
        """A line."""
        self._print(f"warning: {text}")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """A line."""
        self._print(f"step {step}  {evaluation.to_text()}")

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | None) -> None:
        """Says so if the run was stopped."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if stopped_by is not None:
            self._print(
                f"stopped by {stopped_by.name} after step {step}/{num_steps}; its state is saved, "
                f"go on with --resume --train.out-dir {self._out_dir}"
            )

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
        """From the speed since the line before."""
        now = time.perf_counter()
        mark, self._mark = self._mark, (now, progress.step)
        if mark is None or progress.step == mark[1]:
            return "-:--"
        return _duration((now - mark[0]) / (progress.step - mark[1]) * steps_left)

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """A row for each split, of at least one."""
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("", *evaluations[0].to_columns()):
        table.add_column(name, justify="right" if name else "left")
    for part in evaluations:
        table.add_row(part.split, *part.to_columns().values())
    return table


def _duration(seconds: float) -> str:
    text = str(datetime.timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")
