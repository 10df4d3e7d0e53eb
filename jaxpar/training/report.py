"""Who listens to a run: what it tells before, while and after it trains."""

import dataclasses
import functools
import logging
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.base.bucket import as_path
from jaxpar.base.display import Shown
from jaxpar.mesh import short_name
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.training.history import Curves, columns_of
from jaxpar.training.progress import Evaluation, Progress, Skipped, format_number
from jaxpar.training.run_folder import RunFolder

if TYPE_CHECKING:
    from jaxpar.training.weights import Taken

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult(Shown):
    """What `fit` leaves behind, besides the files in `out_dir`; a notebook shows it with its curves.

    Attributes:
      losses: of each step taken here; that of a skipped step may not be finite, and NaN is that of a batch in
        which nothing counts.
      first_step: the number of steps taken before; 0 unless resumed.
      state: after the last step.
      setup: task, layout, mesh and settings as they were used, with what was left open filled in.
      evaluations: of valid and test, by the split's name; empty if a signal ended the run.
      stopped_by: what ended the run before its last step: SIGINT or SIGTERM, or the reason of a `Report.stop`
        or of `patience`; None if nothing did.
    """

    losses: list[float]
    first_step: int
    state: TrainState
    setup: Setup
    evaluations: dict[str, Evaluation]
    stopped_by: signal.Signals | str | None = None

    def __repr__(self) -> str:
        """What came of it, in a line."""
        return f"FitResult({self.describe()})"

    def describe(self) -> str:
        """What was trained where, how far it came, with which numbers, and where it is."""
        facts = [f"{self.first_step + len(self.losses)} of {self.setup.train.num_steps} steps"]
        facts += [f"loss {format_number(self.losses[-1])}"] if self.losses else []
        for evaluation in self.evaluations.values():
            facts.append(dataclasses.replace(evaluation, baseline={}).to_text())
        facts += [describe_stop(self.stopped_by)] if self.stopped_by is not None else []
        where = short_name(self.setup.parallel.mesh)
        return f"{self.setup.task.name} on {where}: {'; '.join(facts)}; in {self.out_dir}"

    @property
    def out_dir(self) -> Path:
        """Where metrics, settings and checkpoints are."""
        assert self.setup.train.out_dir is not None
        return as_path(self.setup.train.out_dir)

    @property
    def history(self) -> dict[str, list[Any]]:
        """The numbers in metrics.jsonl as a table, also those before a resume; `pandas.DataFrame` takes it.

        Columns of equal lengths, a row for each step of which there are numbers: `step`, `train/loss`,
        `train/learning_rate`, `valid/loss`, ..., as trackers name them; NaN where a step has none.
        """
        return columns_of(RunFolder(self.out_dir).metrics())

    @property
    def curves(self) -> Curves:
        """The losses in metrics.jsonl against the step."""
        return Curves(self.setup.train.num_steps).add(*RunFolder(self.out_dir).metrics())


def describe_stop(stopped_by: signal.Signals | str) -> str:
    """In words, what ended a run before its last step."""
    if isinstance(stopped_by, signal.Signals):
        return f"stopped by {stopped_by.name}"
    return f"stopped ({stopped_by})"


class Report:
    """Hears what a run does, and says nothing. Derive from it to say something.

    With several processes, those of process 0 hear it. An error that one raises is a warning, and the run
    goes on.

    Attributes:
      stop_reason: of `stop`, if that was called in this run.
    """

    stop_reason: str | None = None

    def stop(self, reason: str = "by a report") -> None:
        """Ends the run after the step under way, in all processes; any method or thread may call it.

        The state is saved, valid and test are evaluated, and a resumed run goes on from there.
        """
        self.stop_reason = reason

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

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | str | None) -> None:
        """After the last step taken here; `stopped_by` is as in `FitResult`."""

    def failed(self, error: BaseException) -> None:
        """When the run ends with an error; only `close` follows."""

    def close(self) -> None:
        """The last after `plan`, however the run ends."""

    def profile(self, path: Path) -> None:
        """After `end`, if steps were traced; `path` is for Perfetto."""

    def finish(
        self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: Mapping[str, float]
    ) -> None:
        """When everything is written; `evaluations` is empty if a signal ended the run.

        `seconds` are all of this process, by what they were spent on: "steps", "compiling", "input",
        "evaluation", "checkpoints", "other"; see `times.Times`.
        """


class Reports:
    """Several that hear of a run, as one `Report`. What one raises is told once, and ends no run."""

    def __init__(self, reports: Sequence[Report]):
        self._reports, self._told = reports, set[int]()
        for report in reports:
            report.stop_reason = None  # of a run before

    @property
    def asked(self) -> str | None:
        """Why one of them asks for an end; None if none does."""
        return next((r.stop_reason for r in self._reports if r.stop_reason is not None), None)

    def __getattr__(self, method: str) -> Callable[..., None]:
        return functools.partial(self._tell, method)

    def _tell(self, method: str, *facts: Any) -> None:
        for number, report in enumerate(self._reports):
            try:
                getattr(report, method)(*facts)
            except Exception as error:
                if number not in self._told:
                    self._told.add(number)
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    _log.warning(
                        "%s.%s: %s: %s (%s, line %d); training goes on, and further errors of this report "
                        "are not told",
                        *(type(report).__name__, method, type(error).__name__, error),
                        *(place.filename, place.lineno),
                    )
