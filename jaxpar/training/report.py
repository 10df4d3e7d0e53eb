"""What a run tells of itself: what will happen, how it goes on, how it ended. Pure data, and who listens."""

import dataclasses
import signal
from pathlib import Path
from typing import Literal

from jax.sharding import Mesh

from jaxpar.config import RunConfig
from jaxpar.data.buckets import BucketedSentences
from jaxpar.data.corpus import Corpus
from jaxpar.data.images import Images
from jaxpar.kernel import KernelChoice
from jaxpar.state import TrainState


@dataclasses.dataclass(frozen=True)
class Progress:
    """One line of training progress.

    Attributes:
      step: optimizer steps taken.
      loss: of the batch of this step, in nats.
      grad_norm: before clipping.
      learning_rate: of this step.
      seconds: since this process began.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float

    def to_text(self) -> str:
        """What a person wants to know of it."""
        return f"loss {self.loss:6.3f}"


@dataclasses.dataclass(frozen=True)
class TextProgress(Progress):
    """Progress on a text: perplexity of the batch of this step, speed since the line before."""

    perplexity: float
    tokens_per_second: float

    def to_text(self) -> str:
        """Loss, perplexity, tokens/s."""
        speed = f"{self.tokens_per_second:9,.0f} tokens/s"
        return f"{super().to_text()}  perplexity {self.perplexity:8.1f}  {speed}"


@dataclasses.dataclass(frozen=True)
class ImageProgress(Progress):
    """Progress on images: speed since the line before."""

    images_per_second: float

    def to_text(self) -> str:
        """Loss, images/s."""
        return f"{super().to_text()}  {self.images_per_second:9,.0f} images/s"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that changed no parameter, because its loss or gradient was not finite.

    Attributes:
      step: as in `Progress`.
      nonfinite: which of them.
      epoch, window: the place of its batch in the data, counted from 0.
      num_windows: batches of an epoch.
      skipped: such steps up to this one.
    """

    step: int
    nonfinite: Literal["loss", "gradient"]
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


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss (nats) on a split."""

    split: str
    loss: float

    def to_text(self) -> str:
        """What a person wants to know of it."""
        return f"{self.split} " + "  ".join(f"{k} {v}" for k, v in self.to_columns().items())

    def to_columns(self) -> dict[str, str]:
        """The same for a table, by its headings."""
        return {"loss": f"{self.loss:.4f}"}


@dataclasses.dataclass(frozen=True)
class TextEvaluation(Evaluation):
    """Perplexity on a split, and that which word frequencies reach."""

    perplexity: float
    unigram_perplexity: float

    def to_text(self) -> str:
        """Both in a line."""
        known = self.unigram_perplexity
        return f"{self.split} perplexity {self.perplexity:.1f}  (unigram {known:.1f})"

    def to_columns(self) -> dict[str, str]:
        """Both, and their ratio."""
        return {
            "perplexity": f"{self.perplexity:.1f}",
            "unigram perplexity": f"{self.unigram_perplexity:.1f}",
            "ratio": f"{self.perplexity / self.unigram_perplexity:.2f}",
        }


@dataclasses.dataclass(frozen=True)
class ImageEvaluation(Evaluation):
    """Share of the images of a split that are told right."""

    accuracy: float

    def to_columns(self) -> dict[str, str]:
        """Accuracy in percent, loss."""
        return {"accuracy": f"{100 * self.accuracy:.1f} %", **super().to_columns()}


class Report:
    """Is told what a run does, and says nothing. Derive from it to say something."""

    def plan(self, config: RunConfig, mesh: Mesh, data: Corpus | Images, state: TrainState) -> None:
        """Before anything is compiled; `state` is abstract."""

    def buckets(self, batches: BucketedSentences) -> None:
        """After the plan, if the lines of the text are read in buckets."""

    def kernel(self, choice: KernelChoice) -> None:
        """After the plan, if the config left the kernel of the layers open."""

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Before the first step taken here; `step` were taken before."""

    def progress(self, progress: Progress, num_steps: int) -> None:
        """After the first step and every `log_every`."""

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """After a step that was skipped, when the host looks; up to `allowed` of them in a run."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """After each evaluation of a split."""

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | None) -> None:
        """After the last step taken here."""

    def profile(self, path: Path) -> None:
        """After `end`, if steps were traced; `path` is for Perfetto."""

    def finish(self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: float) -> None:
        """When everything is written; `evaluations` is empty if the run was stopped."""
