"""The loop: from a config to a trained state, with metrics, checkpoints and a clean stop."""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.batches import make_batches
from jaxpar.buckets import BucketedSentences
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import VOCAB_MULTIPLE, Config
from jaxpar.corpus import Corpus, load_corpus, unigram_perplexity
from jaxpar.data import TokenStreams
from jaxpar.evaluate import Evaluator, do_not_run_ahead
from jaxpar.mesh import MeshConfig
from jaxpar.optimizer import learning_rate
from jaxpar.report import Evaluation, Progress, Report
from jaxpar.run_folder import ONE_DEVICE, RunFolder, newest_run_folder, next_run_folder
from jaxpar.state import TrainState, abstract_state, audit, init_state
from jaxpar.step import Metrics, batch_sharding, make_train_step


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` leaves behind, besides the files in `out_dir`.

    Attributes:
      losses: of each step taken here, in nats.
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
    config: Config
    evaluations: dict[str, Evaluation]
    stopped_by: signal.Signals | None = None

    @property
    def out_dir(self) -> Path:
        """Where metrics, config, vocabulary and checkpoints are."""
        assert self.config.train.out_dir is not None
        return Path(self.config.train.out_dir)

    @property
    def valid_perplexity(self) -> float | None:
        """None if the run was stopped."""
        return self.evaluations["valid"].perplexity if self.evaluations else None

    @property
    def test_perplexity(self) -> float | None:
        """None if the run was stopped."""
        return self.evaluations["test"].perplexity if self.evaluations else None


def fit(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
) -> FitResult:
    """Trains a language model as the config says, and evaluates it.

    SIGINT (Ctrl-C, or a notebook's stop button) and SIGTERM end the run after the step that is
    under way; the state is saved, and a resumed run goes on with the same losses as if nothing had
    happened. A second signal ends it at once.

    Args:
      config: `model.vocab_size=None` takes what the corpus needs, padded to a multiple of
        `VOCAB_MULTIPLE`; `train.out_dir=None` takes the next free folder of runs/0001, runs/0002...
      resume: go on from the newest checkpoint in `train.out_dir` (None: of the latest numbered
        run); the mesh may be another one.
      overwrite: remove the run that `train.out_dir` holds.
      report: what is told while it runs, e.g. `ConsoleReport()`; None is silent.

    Raises:
      ValueError: sizes do not fit each other or the mesh, the text has changed since the run began,
        or the loss is no longer finite.
      OSError: a text or the checkpoint cannot be read (FileNotFoundError), or `train.out_dir` holds
        a run already (FileExistsError).
    """
    # Whatever can be refused is refused here, before a file is written or a step compiled.
    folder = _choose_folder(config, resume=resume, overwrite=overwrite)
    mesh = config.mesh.build()
    corpus = _load_corpus(config, folder if resume else None)
    config = resolve(config, mesh, corpus)
    report = report if report is not None and jax.process_index() == 0 else Report()
    separator = corpus.vocabulary.separator
    batches = make_batches(config, corpus.train, separator, config.train.seed)
    report.plan(config, mesh, corpus, abstract_state(config, mesh))
    if isinstance(batches, BucketedSentences):
        report.buckets(batches)

    if folder is None:
        folder = _claim_numbered_folder()
    config = _replace_train(config, out_dir=str(folder))
    if jax.process_index() == 0:
        if overwrite:
            folder.clear()
        folder.start(config, corpus)
    _barrier("jaxpar: the run's folder is ready")

    with Checkpoints(folder.checkpoints_path, keep=config.train.keep_checkpoints) as checkpoints:
        state = checkpoints.restore(config, mesh) if resume else init_state(config, mesh)
        audit(state)
        run = _Run(config, mesh, corpus, folder, checkpoints, report)
        return run.finish(*run.train(state, batches))


def resolve(config: Config, mesh: Mesh, corpus: Corpus) -> Config:
    """The config with its mesh and the size of its vocabulary filled in, all sizes checked.

    Raises:
      ValueError: sizes do not fit each other, or the vocabulary does not fit the model.
    """
    num_words, vocab_size = len(corpus.vocabulary), config.model.vocab_size
    if vocab_size is None:
        vocab_size = -(-num_words // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    elif vocab_size < num_words:
        raise ValueError(
            f"vocab_size={vocab_size} is less than the {num_words} words of corpus "
            f"{corpus.name!r}; leave it away, or use data.max_vocab={vocab_size}"
        )
    return dataclasses.replace(
        config,
        mesh=MeshConfig(**mesh.shape, devices=config.mesh.devices),
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
    ).check()


class _Run:
    """The parts that training and evaluation share."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        corpus: Corpus,
        folder: RunFolder,
        checkpoints: Checkpoints,
        report: Report,
    ):
        self.config, self.mesh, self.corpus = config, mesh, corpus
        self.folder, self.checkpoints, self.report = folder, checkpoints, report
        self.evaluator = Evaluator(config, mesh, corpus.vocabulary.separator)
        self.started = time.perf_counter()

    def train(
        self, state: TrainState, batches: TokenStreams | BucketedSentences
    ) -> tuple[TrainState, int, list[float], signal.Signals | None]:
        """Takes the steps that are left, and saves the state after the last."""
        settings = self.config.train
        step = first_step = int(state.step)
        losses: list[float] = []
        waiting: list[Metrics] = []  # on the device until the next log point
        step_once = make_train_step(self.config, self.mesh)
        sharding = batch_sharding(self.mesh, self.config)
        if jax.process_index() == 0:
            self.folder.rewind_metrics(step)
        self.report.begin(step, settings.num_steps, self.folder.path)
        clock, clock_step = time.perf_counter(), step
        with _signals() as signals:
            while step < settings.num_steps and not self._should_stop(signals, step, first_step):
                state, metrics = step_once(state, batches.batch_on(step, sharding))
                step += 1
                waiting.append(metrics)
                do_not_run_ahead(self.mesh, metrics)
                last = step == settings.num_steps
                # The first step is waited for as well: compiling it would hide the others' speed.
                if step % settings.log_every == 0 or last or step == first_step + 1:
                    fetched = jax.device_get(waiting)
                    losses += [float(part.loss) for part in fetched]
                    waiting.clear()
                    seconds = time.perf_counter() - clock
                    tokens = batches.num_targets / batches.num_windows * (step - clock_step)
                    self._log(step, fetched[-1], tokens / seconds)
                    clock, clock_step = time.perf_counter(), step
                if not last and settings.eval_every and step % settings.eval_every == 0:
                    self.evaluate(state, step, "valid")
                    clock = time.perf_counter()
                if settings.checkpoint_every and step % settings.checkpoint_every == 0:
                    self.checkpoints.save(state, self.config)
            losses += [float(part.loss) for part in jax.device_get(waiting)]
            if step > first_step and self.checkpoints.latest_step() != step:
                self.checkpoints.save(state, self.config)
        stopped_by = signals[0] if signals and step < settings.num_steps else None
        self.report.end(step, settings.num_steps, stopped_by)
        return state, first_step, losses, stopped_by

    def finish(
        self,
        state: TrainState,
        first_step: int,
        losses: list[float],
        stopped_by: signal.Signals | None,
    ) -> FitResult:
        """The result, with the perplexities of valid and test unless the run was stopped."""
        evaluations = {}
        if stopped_by is None:
            for split in ("valid", "test"):
                evaluations[split] = self.evaluate(state, int(state.step), split)
        self.checkpoints.close()  # what is named in the last lines is there
        self.report.finish(evaluations, self.folder.path, time.perf_counter() - self.started)
        return FitResult(losses, first_step, state, self.mesh, self.config, evaluations, stopped_by)

    def evaluate(self, state: TrainState, step: int, split: str) -> Evaluation:
        """Evaluates a split; reported and written down."""
        evaluation = evaluate(self.evaluator, state, self.corpus, split)
        self._write({"step": step, **dataclasses.asdict(evaluation)})
        self.report.evaluation(step, evaluation)
        return evaluation

    def _log(self, step: int, metrics: Metrics, tokens_per_second: float) -> None:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
            rate = np.asarray(learning_rate(self.config.train)(np.int32(step - 1))).item()
        progress = Progress(
            step=step,
            loss=float(metrics.loss),
            perplexity=perplexity(float(metrics.loss)),
            grad_norm=float(metrics.grad_norm),
            learning_rate=rate,
            tokens_per_second=tokens_per_second,
            seconds=time.perf_counter() - self.started,
        )
        if not math.isfinite(progress.loss):
            raise ValueError(
                f"loss={progress.loss} at step {step}: the run has diverged; use a "
                f"learning_rate below {self.config.train.learning_rate}, or a smaller clip_norm "
                f"(now {self.config.train.clip_norm}; 0 is none)"
            )
        self._write({"split": "train", **dataclasses.asdict(progress)})
        self.report.progress(progress, self.config.train.num_steps)

    def _write(self, line: dict[str, object]) -> None:
        if jax.process_index() == 0:
            self.folder.append_metrics(line)

    def _should_stop(self, signals: list[signal.Signals], step: int, first_step: int) -> bool:
        if jax.process_count() == 1:
            return bool(signals)
        # All processes must leave at the same step, or the others wait in a collective for ever.
        if step % self.config.train.log_every and step != first_step:
            return False
        return bool(np.max(multihost_utils.process_allgather(np.int32(bool(signals)))))


def evaluate(evaluator: Evaluator, state: TrainState, corpus: Corpus, split: str) -> Evaluation:
    """Loss and perplexity on a split of a corpus, beside that of its unigrams."""
    tokens = getattr(corpus, split)
    loss = evaluator.loss(state.params, tokens)
    # The first token is no target of the model either.
    unigram = unigram_perplexity(corpus.train, tokens[1:], len(corpus.vocabulary))
    return Evaluation(split, loss, perplexity(loss), unigram)


def evaluate_run(folder: RunFolder, mesh: MeshConfig = ONE_DEVICE) -> list[Evaluation]:
    """Evaluates the newest state of a run on valid and test, on any mesh.

    Raises:
      ValueError: the model does not fit the mesh, or the text has changed since the run began.
      OSError: no run, no checkpoint, or an unreadable text.
    """
    corpus = folder.load_corpus(folder.config())
    config, devices, state = folder.restore(mesh)
    evaluator = Evaluator(config, devices, corpus.vocabulary.separator)
    return [evaluate(evaluator, state, corpus, split) for split in ("valid", "test")]


def perplexity(loss: float) -> float:
    """`exp(loss)`; infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Gathers SIGINT and SIGTERM in a list and does not act on the first; a second acts as ever."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def receive(number: int, _frame: object) -> None:
        received.append(signal.Signals(number))
        restore()

    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()


def _choose_folder(config: Config, *, resume: bool, overwrite: bool) -> RunFolder | None:
    """The folder that the config names; None if it is to get a number."""
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


def _claim_numbered_folder() -> RunFolder:
    """A new numbered folder, the same one for all processes."""
    number = 0
    if jax.process_index() == 0:
        number = int(next_run_folder().path.name)
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return RunFolder(f"runs/{number:04d}")


def _load_corpus(config: Config, folder: RunFolder | None) -> Corpus:
    if folder is not None:
        return folder.load_corpus(config)
    return load_corpus(config.data.corpus, config.data.level, config.data.max_vocab)


def _replace_train(config: Config, **changes: object) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
