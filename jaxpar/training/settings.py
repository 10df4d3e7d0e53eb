"""How a run proceeds, and what is kept of it; and all the settings of a run together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple

from jaxpar.fields import check_fields, require, require_positive
from jaxpar.files import refuse_address
from jaxpar.parallel import Parallel

if TYPE_CHECKING:  # a task has a TrainConfig
    from jaxpar.task import Task


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The steps of a run, what happens to bad ones, and what is printed and kept.

    Attributes:
      num_steps: optimizer steps.
      clip_norm: bound on the global norm of the gradients; 0 for none.
      nonfinite: what happens when the loss, gradient norm or update of a step is not finite. "stop": the run
        ends, and the state before the step is saved. "skip": parameters and optimizer state stay as they
        are, the carried state is reset, and the next batch is taken.
      max_skipped: how many steps of a run "skip" may skip; one more stops it.
      seed: of initial values, dropout and the order of the data.
      log_every: steps between lines of progress.
      eval_every: steps between validations; 0 for the end only.
      checkpoint_every: steps between checkpoints; 0 for the end only.
      keep_checkpoints: the newest ones kept.
      keep_best: also save and keep the state with the lowest validation loss.
      fallback_dir: where the state is saved, in a folder of its own, when out_dir can no longer be written:
        the disk is full, or read-only. All processes write there.
      out_dir: where metrics, settings and checkpoints are written; None takes the next free folder of
        runs/0001, runs/0002, ...
    """

    num_steps: int = 800
    clip_norm: float = 1.0
    nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = 10
    seed: int = 0
    log_every: int = 25
    eval_every: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    keep_best: bool = True
    fallback_dir: str | None = None
    out_dir: str | None = None

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "num_steps", "log_every", "keep_checkpoints", "max_skipped")
        for name in ("clip_norm", "eval_every", "checkpoint_every"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value}: must not be negative")
        require(0 <= self.seed < 2**32, f"seed={self.seed}: must be from 0 to {2**32 - 1}")
        for name in ("num_steps", "max_skipped"):  # a state counts with 32 bits
            value = getattr(self, name)
            require(value < 2**31, f"{name}={value}: must be below {2**31}")
        for name in ("out_dir", "fallback_dir"):
            require(getattr(self, name) != "", f"{name}='' names no folder; leave it out")
            refuse_address(name, getattr(self, name) or "")

    @property
    def allowed_skips(self) -> int:
        """Steps that may be skipped."""
        return self.max_skipped if self.nonfinite == "skip" else 0


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Dynamic evaluation (Krause et al. 2017, arXiv:1709.07432): a model learns from what it was tested on.

    After each window, when its loss is counted, p goes to p - rate * gradient + decay * (trained p - p).

    Attributes:
      rate: of gradient descent on the mean loss of a window; 0 evaluates the model as it is.
      decay: towards the parameters as they were trained.
    """

    rate: float = 0.0
    decay: float = 0.0

    def __post_init__(self):
        check_fields(self)
        require(self.rate >= 0, f"rate={self.rate}: must not be negative")
        require(0 <= self.decay <= 1, f"decay={self.decay}: must be from 0 to 1")
        require(
            self.rate > 0 or self.decay == 0,
            f"decay={self.decay} has no effect with rate=0; use decay=0, or a rate",
        )


class Settings(NamedTuple):
    """All that a run is made from: what is learned, on which devices, and how it proceeds."""

    task: Task
    parallel: Parallel
    train: TrainConfig
