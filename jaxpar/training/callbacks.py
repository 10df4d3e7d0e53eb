"""Callbacks, which receive the events of a run: the console, experiment trackers, and your own.

Trackers name numbers after their split, as `train/loss` and `valid/loss`. A resumed run keeps its name. If it
repeats steps after a crash, it gives the same numbers again.
"""

import datetime
import importlib
import logging
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Concatenate, ParamSpec

from rich.console import Console
from rich.text import Text

from jaxpar.base.bucket import in_bucket
from jaxpar.base.console import facts_table, make_console, make_table
from jaxpar.base.display import format_seconds
from jaxpar.base.output import PROGRAM
from jaxpar.base.paths import local_path
from jaxpar.base.types import Json
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.training.config_file import read_toml
from jaxpar.training.progress import Evaluation, Progress, Skipped, evaluation_table
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.summary import summarize
from jaxpar.training.weights import MatchedWeights

_Facts = ParamSpec("_Facts")

_log = logging.getLogger(__name__)


class Report:
    """A callback that does nothing. Derive from it, and write the methods that you need.

    With several processes, process 0 calls it. If a method raises an error, jaxpar logs a warning and the run
    continues.

    Attributes:
      stop_reason: the reason given to `stop`, if that was called in this run.

    Example:
      class Plateau(jaxpar.Report):
        def evaluation(self, step, evaluation):
          if evaluation.loss < 0.01:
            self.stop("good enough")

      jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), report=[Plateau(), jaxpar.ConsoleReport()])
    """

    stop_reason: str | None = None

    def stop(self, reason: str = "by a report") -> None:
        """Ends the run after the current step, in all processes; any method or thread may call it.

        The state is saved, and valid and test are evaluated. A resumed run continues from there.
        """
        self.stop_reason = reason

    def plan(self, setup: Setup, state: TrainState) -> None:
        """Called before anything is compiled; `state` is abstract."""

    def start(self, weights: MatchedWeights) -> None:
        """Called after `plan` if the run begins with given weights, before their values are read."""

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Called before the first step; `step` steps were taken in earlier processes."""

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Called after the first step, after every `log_every` steps and after the last one."""

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """Called for each skipped step, when the host looks at it; a run may skip `allowed` steps."""

    def warning(self, text: str) -> None:
        """Called for a problem that is no error, but needs attention."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Called after each evaluation of a split."""

    def adjusted(self, step: int) -> None:
        """Called after a validation for which the task has changed the optimizer's state."""

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | str | None) -> None:
        """Called after the last step of this process; `stopped_by` is as in `FitResult`."""

    def failed(self, error: BaseException) -> None:
        """Called if the run ends with an error; only `close` follows."""

    def close(self) -> None:
        """Called last, if `plan` was called, however the run ends."""

    def profile(self, path: Path) -> None:
        """Called after `end`, if steps were traced; `path` is a file for Perfetto."""

    def finish(
        self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: Mapping[str, float]
    ) -> None:
        """Called when everything is written; `evaluations` is empty if a signal ended the run.

        `seconds` are those of this process, by what they were spent on: "steps", "compiling", "input",
        "evaluation", "checkpoints", "other"; see `progress.Times`.
        """


class Callbacks:
    """The callbacks of a run. An error in one of them is logged once, and the run continues.

    Use it as a context manager around the run: it calls `failed` if there is an error, and `close`.
    """

    def __init__(self, reports: Sequence[Report]):
        self._reports, self._warned_of = reports, set[int]()
        for report in reports:
            report.stop_reason = None  # it may be that of an earlier run

    def __enter__(self) -> "Callbacks":
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            self.call(Report.failed, error)
        self.call(Report.close)

    @property
    def stop_reason(self) -> str | None:
        """The reason of a callback that asks to end the run; None if there is none."""
        return next((r.stop_reason for r in self._reports if r.stop_reason is not None), None)

    def call(
        self,
        method: Callable[Concatenate[Report, _Facts], None],
        *facts: _Facts.args,
        **named: _Facts.kwargs,
    ) -> None:
        """Calls the method of this name of each callback, such as `Report.begin`."""
        for number, report in enumerate(self._reports):
            try:
                getattr(report, method.__name__)(*facts, **named)
            except Exception as error:
                if number not in self._warned_of:
                    self._warned_of.add(number)
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    _log.warning(
                        "%s.%s: %s: %s (%s, line %d); training continues, and further errors of this "
                        "callback are not shown",
                        *(type(report).__name__, method.__name__, type(error).__name__, error),
                        *(place.filename, place.lineno),
                    )


def describe_stop(stopped_by: signal.Signals | str) -> str:
    """In words, the reason why a run ended before its last step."""
    if isinstance(stopped_by, signal.Signals):
        return f"stopped by {stopped_by.name}"
    return f"stopped ({stopped_by})"


# ---- the console ----


class ConsoleReport(Report):
    """Prints tables and lines of progress; the same in a terminal, a notebook and a file.

    Example:
      console = rich.console.Console(width=120)
      jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), report=jaxpar.ConsoleReport(console))
    """

    def __init__(self, console: Console | None = None):
        self.console = console or make_console(sys.stdout)
        self._mark: tuple[float, int] | None = None  # time and step of the first line of progress
        self._out_dir = Path()

    def plan(self, setup: Setup, state: TrainState) -> None:
        """Prints devices, mesh, placement, data and parameters."""
        self.console.print(facts_table(summarize(setup)), "")
        self.console.print(state, "", highlight=False)

    def start(self, weights: MatchedWeights) -> None:
        """Prints which weights are taken, new and ignored."""
        self._print(f"begins with the weights of {weights.weights.source}")
        table = make_table("", "parameter", "shape", "")
        for row in weights.to_rows():
            table.add_row(*map(Text, row))
        self.console.print(table, "", highlight=False)

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Prints the number of steps and the folder."""
        self._mark = None
        self._out_dir = out_dir
        done = f", resumed at step {step}" if step else ""
        if step >= num_steps:
            self._print(
                f"the run in {out_dir} already finished its {step} steps, so it is only evaluated; to train "
                f"longer, resume it with --train.num-steps {2 * step}"
            )
            return
        self._print(f"training {num_steps} steps into {out_dir}{done}; the first is being compiled")

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Prints loss, metrics, speed and the time that is left."""
        now = time.perf_counter()
        begin, first_step = self._mark = self._mark or (now, progress.step)
        eta = "ETA -:--"
        if progress.units_per_second is None:
            eta = f"compiled in {format_seconds(progress.seconds)}"
        elif progress.step > first_step:  # from the mean speed, with evaluations and saves
            seconds_per_step = (now - begin) / (progress.step - first_step)
            eta = f"ETA {_duration(seconds_per_step * (num_steps - progress.step))}"
        count = f"step {progress.step:{len(str(num_steps))}}/{num_steps}"
        self._print(f"{count}  {progress.to_text()}  {eta}")

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """Prints a line."""
        self._print(f"{skipped.to_text()}: skipped, {skipped.skipped} of {allowed} allowed")

    def warning(self, text: str) -> None:
        """Prints a line."""
        self._print(f"warning: {text}")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Prints a line."""
        self._print(f"step {step}  {evaluation.to_text()}")

    def adjusted(self, step: int) -> None:
        """Prints a line."""
        self._print(f"step {step}  optimizer state updated by Task.after_validation")

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | str | None) -> None:
        """Prints a line if the run was stopped."""
        if stopped_by is not None:
            self._print(
                f"{describe_stop(stopped_by)} after step {step}/{num_steps}; its state is saved, "
                f"continue with {PROGRAM} train --resume --train.out-dir {self._out_dir}"
            )

    def profile(self, path: Path) -> None:
        """Prints how to look at the trace."""
        self._print(f"profile of a few steps: {path}; view it at ui.perfetto.dev")

    def finish(
        self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: Mapping[str, float]
    ) -> None:
        """Prints evaluations, times and the files of the run."""
        if evaluations:
            self.console.print("", evaluation_table(list(evaluations.values())), "")
        files = ", ".join(sorted(p.name + "/" * p.is_dir() for p in out_dir.glob("[!.]*")))
        parts = [f"{what} {_duration(part)}" for what, part in seconds.items() if round(part)]
        if parts:
            self._print(f"time: {', '.join(parts)}")
        self._print(f"{_duration(sum(seconds.values()))} in all; {out_dir} holds {files}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    text = str(datetime.timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")


# ---- trackers ----


class Tracker(Report):
    """A callback that receives the numbers of a run by their names; derive from it for another tracker.

    Args:
      options: options for the package, as `begin` uses them.
    Attributes:
      package: name of the package that it needs.
      module: that package.
      writer: object that writes the numbers, from `begin` to `close`.
      exit_code: 1 if the run has failed, else 0.
    Raises:
      ValueError: the package is not installed.

    Example:
      class Lines(jaxpar.Tracker):
        package = "json"

        def log(self, step, numbers):
          print(self.module.dumps({"step": step, **numbers}))

      jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), report=Lines())
    """

    package: ClassVar[str]

    def __init__(self, **options: object) -> None:
        try:
            self.module: ModuleType = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{type(self).__name__} needs the package {error.name}\nFix: pip install {error.name}"
            ) from error
        self.writer: Any = None
        self.exit_code, self._options = 0, options

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes numbers of a step, by names such as "train/loss"."""
        raise NotImplementedError

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Writes numbers of a step."""
        self._log(progress.to_json())

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """Writes the number of skipped steps."""
        self.log(skipped.step, {"train/skipped": skipped.skipped})

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Writes numbers of a split."""
        self._log(evaluation.to_json(step))

    def failed(self, error: BaseException) -> None:
        """Marks the run as failed, if the tracker supports that."""
        self.exit_code = 1

    def _log(self, line: Json) -> None:
        split, step = line.pop("split"), line.pop("step")
        self.log(step, {f"{split}/{name}": n for name, n in line.items() if n is not None})


class TensorBoard(Tracker):
    """Writes for TensorBoard: `tensorboard --logdir runs` shows all runs there.

    Args:
      folder: where to write; None is `tensorboard` in the run's folder.

    Example:
      reports = [jaxpar.ConsoleReport(), jaxpar.TensorBoard()]
      jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), report=reports)
    """

    package = "tensorboardX"

    def __init__(self, folder: str | PathLike[str] | None = None):
        super().__init__()
        if folder is not None and str(folder).startswith("~"):
            folder = local_path(folder)
        self._folder = folder

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Opens a file; lines of later steps, from before a crash, are hidden."""
        folder = out_dir / "tensorboard" if self._folder is None else self._folder
        self.writer = self.module.SummaryWriter(
            str(folder),
            purge_step=step + 1,
            filename_suffix=f".{step}",  # without it, a name has only the seconds
        )
        text = RunFolder(out_dir).config_path.read_text("utf-8")
        self.writer.add_text("config", textwrap.indent(text, "    "), step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes the numbers."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the file."""
        if self.writer is not None:
            self.writer.close()


class WandB(Tracker):
    """Logs to Weights & Biases, which reads its own variables, such as WANDB_PROJECT and WANDB_MODE.

    Args:
      options: options for `wandb.init`.

    Example:
      reports = [jaxpar.ConsoleReport(), jaxpar.WandB(project="small", mode="offline")]
      jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), report=reports)
    """

    package = "wandb"

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Begins the run there, or continues it."""
        folder = RunFolder(out_dir)
        own = {
            "id": folder.data()["run"],
            "name": out_dir.name,
            "config": read_toml(folder.config_path),
        }
        own |= {} if in_bucket(out_dir) else {"dir": str(out_dir)}
        own |= {"allow_val_change": True, "resume": "allow"}
        self.writer, self.exit_code = self.module.init(**{**own, **self._options}), 0
        # Its own steps never go back, as those of a run after a crash do.
        self.writer.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers."""
        self.writer.log({"step": step, **numbers})

    def close(self) -> None:
        """Sends everything that is left, and how the run ended."""
        if self.writer is not None:
            self.writer.finish(exit_code=self.exit_code)


class Trackio(Tracker):
    """Logs to trackio: `trackio show` is its dashboard.

    Args:
      project: name of the project that the run belongs to.
      options: options for `trackio.init`.

    Example:
      reports = [jaxpar.ConsoleReport(), jaxpar.Trackio(project="small")]
      jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), report=reports)
    """

    package = "trackio"

    def __init__(self, project: str = "jaxpar", **options: object):
        super().__init__(project=project, **options)

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Begins the run there, or continues it."""
        folder = RunFolder(out_dir)
        own = {
            "name": f"{out_dir.name}-{folder.data()['run']}",
            "config": read_toml(folder.config_path),
        }
        own |= {"resume": "allow", "embed": False}
        self.writer = self.module.init(**{**own, **self._options})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers."""
        self.writer.log(dict(numbers), step=step)

    def close(self) -> None:
        """Sends everything that is left."""
        if self.writer is not None:
            self.writer.finish()


TRACKERS = {kind.__name__.lower(): kind for kind in (TensorBoard, WandB, Trackio)}
