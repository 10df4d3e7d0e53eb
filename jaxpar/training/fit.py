"""From a config to a trained state, in a folder; what can be refused is refused before it is touched."""

import dataclasses
import logging
import signal
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.config import RunConfig, replace_train
from jaxpar.data.buckets import BucketedSentences
from jaxpar.data.corpus import Corpus
from jaxpar.data.images import Images
from jaxpar.hosts.distributed import wait_for_processes
from jaxpar.mesh import MeshConfig
from jaxpar.state import TrainState, abstract_state, audit, init_state, release
from jaxpar.training import profiler
from jaxpar.training.loop import Run
from jaxpar.training.report import Evaluation, Report, TextEvaluation
from jaxpar.training.run_folder import (
    ONE_DEVICE,
    RunFolder,
    load_data,
    newest_run_folder,
    next_run_folder,
)
from jaxpar.training.tasks import TextTask, make_task

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` leaves behind, besides the files in `out_dir`.

    Attributes:
      losses: of each step taken here, in nats; of one that was skipped it may not be finite.
      first_step: the steps that had been taken before; 0 unless resumed.
      state: after the last step, on `mesh`.
      config: with the mesh, `vocab_size` and `out_dir` that were used.
      evaluations: of valid and test, by the split's name; empty if the run was stopped.
      stopped_by: SIGINT or SIGTERM, if one ended the run before its last step.
    """

    losses: list[float]
    first_step: int
    state: TrainState
    mesh: Mesh
    config: RunConfig
    evaluations: dict[str, Evaluation]
    stopped_by: signal.Signals | None = None

    @property
    def out_dir(self) -> Path:
        """Where metrics, config, vocabulary and checkpoints are."""
        assert self.config.train.out_dir is not None
        return Path(self.config.train.out_dir)

    @property
    def valid_perplexity(self) -> float | None:
        """None if the run was stopped, or is not on text."""
        return self._perplexity("valid")

    @property
    def test_perplexity(self) -> float | None:
        """None if the run was stopped, or is not on text."""
        return self._perplexity("test")

    def _perplexity(self, split: str) -> float | None:
        evaluation = self.evaluations.get(split)
        return evaluation.perplexity if isinstance(evaluation, TextEvaluation) else None


def fit(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    report: Report | None = None,
) -> FitResult:
    """Trains a model as the config says, and evaluates it.

    SIGINT (Ctrl-C, or a notebook's stop button) and SIGTERM end the run after the step that is
    under way; the state is saved, and a resumed run goes on with the same losses as if nothing had
    happened. A second signal ends it at once.

    Args:
      config: `model.vocab_size=None` takes what the corpus needs, padded to a multiple of
        `VOCAB_MULTIPLE`; `train.out_dir=None` takes the next free folder of runs/0001, runs/0002...
      resume: go on from the newest whole checkpoint in `train.out_dir` (None: of the latest numbered
        run), or from the start if there is none yet; the mesh may be another one.
      overwrite: remove the run that `train.out_dir` holds.
      profile: write a trace of a few steps into `out_dir`/profile, for Perfetto and TensorBoard.
      report: what is told while it runs, e.g. `ConsoleReport()`; None is silent.

    Raises:
      ValueError: sizes do not fit each other or the mesh, or the text or the images have changed since
        the run began.
      FloatingPointError: a loss or gradient is not finite, and `train.nonfinite` does not let it be skipped,
        or no more of them. The state before its step has been saved: a resumed run meets the same batch.
      OSError: a text or the checkpoint cannot be read (FileNotFoundError), or `train.out_dir` holds
        a run already (FileExistsError).
    """
    # Whatever can be refused is refused here, before a file is written or a step compiled.
    if config.train.fallback_dir is not None and jax.process_count() > 1:
        raise ValueError(
            f"fallback_dir={config.train.fallback_dir!r} is for one process, there are "
            f"{jax.process_count()}: they cannot agree once one of them cannot write; leave it away"
        )
    folder = choose_folder(config, resume=resume, overwrite=overwrite)
    mesh = config.mesh.build()
    data = folder.load_data(config) if resume and folder is not None else load_data(config)
    task = make_task(config, mesh, data)
    config = task.config
    report = report if report is not None and jax.process_index() == 0 else Report()
    batches = task.batches()
    report.plan(config, mesh, data, abstract_state(config, mesh))
    if isinstance(batches, BucketedSentences):
        report.buckets(batches)
    if isinstance(task, TextTask) and task.kernel.reason is not None:
        report.kernel(task.kernel)

    state = _restore(folder, config, mesh) if resume and folder is not None else None
    if config.train.fallback_dir is not None:
        _make_fallback(Path(config.train.fallback_dir).expanduser())

    if profile:
        _check_profile(config.train.num_steps, 0 if state is None else int(state.step))

    folder, config = begin_run(folder, config, data, overwrite=overwrite)
    with folder.checkpoints(config) as checkpoints:
        state = init_state(config, mesh) if state is None else state
        audit(state)
        run = Run(config, mesh, data, task, folder, checkpoints, report, state)
        try:
            first_step, losses, stopped_by = run.train(batches, profile=profile)
            evaluations = run.finish(stopped_by)
        except OSError as error:
            if jax.process_count() > 1:
                raise  # the others do not know; they end when this process does
            raise run.rescue(error) from error
    return FitResult(losses, first_step, run.state, mesh, config, evaluations, stopped_by)


def choose_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> RunFolder | None:
    """The folder that the config names; None if it is to get a number.

    Raises:
      ValueError: resume and overwrite, both.
      OSError: there is no run to resume, or one that is not to be overwritten.
    """
    if resume and overwrite:
        raise ValueError("resume and overwrite contradict each other; use one of them")
    out_dir = config.train.out_dir
    if resume:
        folder = newest_run_folder() if out_dir is None else RunFolder(out_dir)
        folder.config()  # is there a run?
        return folder
    folder = None if out_dir is None else RunFolder(out_dir)
    if folder is not None and folder.holds_run and not overwrite:
        raise FileExistsError(
            f"out_dir={out_dir!r} holds a run already; go on with it (--resume), use another "
            f"--train.out-dir, or remove what is there (--overwrite)"
        )
    return folder


def _check_profile(num_steps: int, taken: int) -> None:
    if num_steps - taken < profiler.LAST:
        done = f", {taken} of them taken" if taken else ""
        raise ValueError(
            f"num_steps={num_steps}{done}: a profile is of steps {profiler.FIRST} to {profiler.LAST}; "
            f"take {taken + profiler.LAST} or more"
        )


def begin_run(
    folder: RunFolder | None, config: RunConfig, data: Corpus | Images, *, overwrite: bool
) -> tuple[RunFolder, RunConfig]:
    """Makes the folder of a run, or goes on in it; the config with its path.

    Args:
      folder: None takes the next number.
      overwrite: remove the run that is there.
    Raises:
      OSError: the folder cannot be written.
    """
    folder = _claim_numbered_folder() if folder is None else folder
    config = replace_train(config, out_dir=str(folder))
    if jax.process_index() == 0:
        if overwrite:
            folder.clear()
        folder.start(config, data)
    wait_for_processes("the run's folder is ready")
    return folder, config


def evaluate_run(
    folder: RunFolder, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
) -> list[Evaluation]:
    """Evaluates the newest state of a run on valid and test, on any mesh.

    Args:
      best: the state with the lowest validation loss, not the newest.
    Raises:
      ValueError: the model does not fit the mesh, or its data have changed since the run began.
      OSError: no run, no checkpoint, or an unreadable text.
    """
    data = folder.load_data(folder.config())
    config, devices, state = folder.restore(mesh, best=best)
    task = make_task(config, devices, data)
    return [task.evaluate(state.params, split) for split in ("valid", "test")]


def _claim_numbered_folder() -> RunFolder:
    """A new numbered folder, the same one for all processes."""
    number = 0
    if jax.process_index() == 0:
        number = int(next_run_folder().path.name)
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return RunFolder(f"runs/{number:04d}")


def _restore(folder: RunFolder, config: RunConfig, mesh: Mesh) -> TrainState | None:
    """The state to go on with; None if the run was killed before its first checkpoint."""
    folder.metrics()  # can they be read?
    checkpoints = folder.checkpoints(config)
    if not checkpoints.is_empty:
        return release(checkpoints.restore(config, mesh), config)
    if jax.process_index() == 0:
        _log.warning("%s has no checkpoint yet: the run begins again", folder)
    return None


def _make_fallback(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"cannot make fallback_dir={str(path)!r}: {error.strerror}; use another place"
        ) from error
