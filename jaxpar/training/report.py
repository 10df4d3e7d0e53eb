"""Who listens to a run: what it tells before, while and after it trains."""

import dataclasses
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.mesh import short_name
from jaxpar.setup import Setup
from jaxpar.state import TrainState
from jaxpar.training.progress import Evaluation, Progress, Skipped, format_number

if TYPE_CHECKING:
    from jaxpar.training.start import Taken


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

    def start(self, taken: "Taken") -> None:
        """After `plan`, of a run that begins with weights; nothing of them is read yet."""

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
