"""Trackers of experiments, each a report: TensorBoard, Weights & Biases, trackio.

Numbers are named as in metrics.jsonl, after their split: `train/loss`, `valid/loss`. A resumed run goes on
under its name, and a step that is taken again after a crash gives the same numbers again.
"""

import importlib
import textwrap
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from jaxpar.base.bucket import in_bucket
from jaxpar.training.progress import Evaluation, Progress, Skipped
from jaxpar.training.report import Report
from jaxpar.training.run_folder import RunFolder


class Tracker(Report):
    """Hears the numbers of a run by their names; derive from it for a tracker of your own.

    Attributes:
      package: that it needs.
    Raises:
      ValueError: as it is made, the package is not there.
    """

    package: ClassVar[str]

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{type(self).__name__} needs the package {error.name}\nFix: pip install {error.name}"
            ) from error
        self.writer: Any = None  # from `begin` to `close`
        self.exit_code = 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes numbers of a step, by names such as "train/loss"."""
        raise NotImplementedError

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Numbers of a step."""
        self._log(progress.to_json())

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """How many there are."""
        self.log(skipped.step, {"train/skipped": skipped.skipped})

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Numbers of a split."""
        self._log(evaluation.to_json(step))

    def failed(self, error: BaseException) -> None:
        """Marks the run as failed, where the tracker can."""
        self.exit_code = 1

    def _log(self, line: dict[str, Any]) -> None:
        split, step = line.pop("split"), line.pop("step")
        numbers = {name: value for name, value in line.items() if value is not None}
        self.log(step, {f"{split}/{name}": value for name, value in numbers.items()})


class TensorBoard(Tracker):
    """Writes for TensorBoard: `tensorboard --logdir runs` shows all runs there.

    Args:
      folder: where to; None is `tensorboard` in the run's folder.
    """

    package = "tensorboardX"

    def __init__(self, folder: str | PathLike[str] | None = None):
        super().__init__()
        self._folder = folder

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Opens a file; what was written of later steps, before a crash, is not shown any more."""
        folder = out_dir / "tensorboard" if self._folder is None else self._folder
        self.writer = self.module.SummaryWriter(
            str(folder),
            purge_step=step + 1,
            filename_suffix=f".{step}",  # else a name has the seconds alone
        )
        text = RunFolder(out_dir).config_path.read_text("utf-8")
        self.writer.add_text("config", textwrap.indent(text, "    "), step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes them."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Everything is in the file."""
        if self.writer is not None:
            self.writer.close()


class WandB(Tracker):
    """Logs to Weights & Biases, which is set up by its variables, such as WANDB_PROJECT and WANDB_MODE.

    Args:
      options: for `wandb.init`.
    """

    package = "wandb"

    def __init__(self, **options: Any):
        super().__init__()
        self._options = options

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Begins the run there, or goes on with it."""
        folder = RunFolder(out_dir)
        own = {"id": folder.data()["run"], "name": out_dir.name}
        own |= {} if in_bucket(out_dir) else {"dir": str(out_dir)}
        own |= {"config": _settings(folder), "allow_val_change": True, "resume": "allow"}
        self.writer, self.exit_code = self.module.init(**{**own, **self._options}), 0
        # Its own steps never go back, as those of a run after a crash do.
        self.writer.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends them."""
        self.writer.log({"step": step, **numbers})

    def close(self) -> None:
        """Everything is sent, and how the run ended."""
        if self.writer is not None:
            self.writer.finish(exit_code=self.exit_code)


class Trackio(Tracker):
    """Logs to trackio: `trackio show` is its dashboard.

    Args:
      project: that the run belongs to.
      options: for `trackio.init`.
    """

    package = "trackio"

    def __init__(self, project: str = "jaxpar", **options: Any):
        super().__init__()
        self._options = {"project": project, **options}

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Begins the run there, or goes on with it."""
        folder = RunFolder(out_dir)
        own = {"name": f"{out_dir.name}-{folder.data()['run']}", "resume": "allow", "embed": False}
        own |= {"config": _settings(folder)}
        self.writer = self.module.init(**{**own, **self._options})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends them."""
        self.writer.log(dict(numbers), step=step)

    def close(self) -> None:
        """Everything is sent."""
        if self.writer is not None:
            self.writer.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def _settings(folder: RunFolder) -> dict[str, Any]:
    """Those in config.toml."""
    return tomllib.loads(folder.config_path.read_text("utf-8"))
