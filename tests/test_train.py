"""The laws of the loop: losses fall, are the same on every mesh, and survive a stop."""

import dataclasses
import io
import itertools
import math
import os
import re
import shutil
import signal
import threading
import time
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.runs import (
    flip_a_bit,
    make_layout,
    make_run,
    make_train,
    metrics_of,
    whole_checkpoints,
)
from rich.console import Console

from jaxpar import (
    ConsoleReport,
    MeshConfig,
    Report,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    TrainConfig,
    fit,
    init_state,
    load_run,
)
from jaxpar.lm import load_corpus
from jaxpar.nn import named_param

pytestmark = pytest.mark.usefixtures("compile_once")

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
SENTENCES = ["the cat sat on the mat", "a dog ran to the cat", "the mat ran", "a cat sat on a dog"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of a user's own text."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for split, num_lines in (("train", 120), ("valid", 20), ("test", 1)):
        lines = [SENTENCES[i] for i in rng.integers(len(SENTENCES), size=num_lines)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


RELATIVE_ERROR = 1e-5


def perplexity_of(result, split):
    return result.evaluations[split].metrics["perplexity"]


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)


def log_probabilities(result, tokens):
    """Of every next token, by the model applied to all tokens at once: float64 [tokens, words]."""
    logits = np.asarray(logits_of(result.model(), tokens[None])[0], np.float64)
    logits = logits[:, : result.setup.task.num_words]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Recorder(Report):
    """Keeps the names of what it is told, and may do something at a step."""

    def __init__(self, at_step=None, action=lambda: None):
        self.told, self.at_step, self.action = [], at_step, action

    def plan(self, setup, state):
        is_abstract = all(isinstance(n, jax.ShapeDtypeStruct) for n in jax.tree.leaves(state))
        self.told.append("plan" if is_abstract else "plan of a state that is not abstract")

    def begin(self, step, num_steps, out_dir):
        self.told.append(f"begin {step}/{num_steps}")

    def progress(self, progress, num_steps):
        self.told.append(progress.step)
        if progress.step == self.at_step:
            self.action()

    def evaluation(self, step, evaluation):
        self.told.append(f"{evaluation.split} {step}")

    def end(self, step, num_steps, stopped_by):
        self.told.append(f"end {step}")

    def finish(self, evaluations, out_dir, seconds):
        self.told.append("finish")


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    """20 undisturbed steps on one device."""
    recorder = Recorder()
    out_dir = tmp_path_factory.mktemp("runs") / "whole"
    return fit(*make_run(text, out_dir, eval_every=10), report=recorder), recorder


def test_losses_fall_and_everything_is_reported(whole_run):
    result, recorder = whole_run
    assert len(result.losses) == 20
    assert np.mean(result.losses[-3:]) < 0.8 * result.losses[0]
    assert result.setup.task.vocab_size == 384  # padded, so that it splits
    assert (
        perplexity_of(result, "valid") < result.evaluations["valid"].baseline["unigram perplexity"]
    )
    assert recorder.told == [
        "plan", "begin 0/20", 1, 5, 10, "valid 10", 15, 20, "valid 20", "end 20", "test 20", "finish",
    ]  # fmt: skip


def test_metrics_are_json_lines(whole_run):
    result, _ = whole_run
    lines = metrics_of(result.out_dir)
    train = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in train] == [1, 5, 10, 15, 20]
    assert [line["loss"] for line in train] == [result.losses[line["step"] - 1] for line in train]
    for line in train:
        assert line["perplexity"] == math.exp(line["loss"])
        assert line["grad_norm"] > 0
        assert (line["tokens_per_second"] is None) == (line["step"] == 1)
        assert line["step"] == 1 or line["tokens_per_second"] > 0
    assert train[1]["seconds"] < train[2]["seconds"]
    assert train[0]["learning_rate"] == pytest.approx(0.05)  # the first of 2 steps of warm-up
    of_splits = [line for line in lines if line["split"] != "train"]
    evaluations = [(line["step"], line["split"]) for line in of_splits]
    assert all(line["perplexity"] == math.exp(line["loss"]) for line in of_splits)
    assert of_splits[0]["unigram_perplexity"] == of_splits[1]["unigram_perplexity"] > 1
    assert evaluations == [(10, "valid"), (20, "valid"), (20, "test")]


@pytest.fixture(scope="module")
def mesh_run(text, tmp_path_factory):
    """The same on 8 devices."""
    out_dir = tmp_path_factory.mktemp("runs") / "mesh"
    return fit(*make_run(text, out_dir, mesh=(2, 2, 2), units=(2, 2)))


@pytest.mark.full
def test_speed_is_that_of_steps_before_and_after_a_resume(text, tmp_path):
    """Compiling, evaluations and what a save waits for do not lower it: the curve of speed has no dips."""
    run = make_run(
        text, tmp_path / "run", num_steps=6, log_every=2, eval_every=4, checkpoint_every=2
    )
    with api.all_but_steps_is_slow() as times:
        fit(*run)
        train = dataclasses.replace(run.train, num_steps=12)
        fit(run.task, run.parallel, train, resume=True)
    assert len(times) >= 10
    lines = metrics_of(tmp_path / "run")
    speeds = {e["step"]: e["tokens_per_second"] for e in lines if e["split"] == "train"}
    assert [step for step, speed in speeds.items() if speed is None] == [1, 7]
    tokens = 2 * 8 * 4  # of a line
    assert all(speed is None or speed > tokens / 10 for speed in speeds.values()), speeds


@pytest.mark.full
@pytest.mark.law
def test_losses_and_perplexities_are_the_same_on_another_mesh(whole_run, mesh_run):
    expected, result = whole_run[0], mesh_run
    np.testing.assert_allclose(result.losses, expected.losses, rtol=RELATIVE_ERROR)
    assert perplexity_of(result, "valid") == pytest.approx(
        perplexity_of(expected, "valid"), rel=RELATIVE_ERROR
    )
    assert perplexity_of(result, "test") == pytest.approx(
        perplexity_of(expected, "test"), rel=RELATIVE_ERROR
    )


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "units"), [((1, 1, 1), (1, 1)), ((2, 2, 2), (2, 2))])
def test_a_stopped_run_resumes_with_the_same_losses(
    text, tmp_path, whole_run, mesh_run, mesh, units
):
    undisturbed = whole_run[0] if units == (1, 1) else mesh_run
    stop = Recorder(at_step=5, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run = make_run(text, tmp_path / "run", mesh, units)
    first = fit(*run, report=stop)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert first.stopped_by is signal.SIGTERM
    assert len(first.losses) == 5
    assert first.evaluations == {}
    assert stop.told[-2:] == ["end 5", "finish"]

    recorder = Recorder()
    second = fit(*run, resume=True, report=recorder)
    assert recorder.told[1] == "begin 5/20"
    assert (second.first_step, len(second.losses)) == (5, 15)
    assert first.losses + second.losses == undisturbed.losses
    assert second.evaluations == undisturbed.evaluations


@pytest.mark.full
def test_a_finished_run_is_only_evaluated_again(text, tmp_path):
    run = make_run(text, tmp_path / "run", num_steps=1)
    first, again = fit(*run), fit(*run, resume=True)
    assert again.losses == []
    assert again.evaluations == first.evaluations


@pytest.mark.full
def test_resuming_an_earlier_state_keeps_the_metrics_of_the_later_one(text, tmp_path):
    out_dir = tmp_path / "run"
    run = make_run(text, out_dir, num_steps=8, log_every=2, checkpoint_every=4)
    whole = fit(*run)
    written = (out_dir / "metrics.jsonl").read_text()
    shutil.rmtree(out_dir / "checkpoints/8")  # as if the process had been killed after step 4

    again = fit(*run, resume=True)
    assert again.losses == whole.losses[4:]
    assert (out_dir / "metrics.before-1.jsonl").read_text() == written
    steps = [line["step"] for line in metrics_of(out_dir) if line["split"] == "train"]
    assert steps == [1, 2, 4, 5, 6, 8]


def test_a_run_killed_before_its_first_checkpoint_begins_again(text, tmp_path, whole_run, caplog):
    run = make_run(text, tmp_path / "run", checkpoint_every=5)
    killed = Recorder(at_step=1, action=lambda: os.kill(os.getpid(), signal.SIGINT))
    fit(*run, report=killed)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    saved.rename(saved.with_name("1.orbax-checkpoint-tmp"))  # as if it had still been written
    assert fit(*run, resume=True).losses == whole_run[0].losses
    assert "has no checkpoint yet: the run starts" in caplog.text


# A rate that rises until the losses do.
RESTLESS = {"learning_rate": 5.0, "lr_schedule": "constant", "warmup_steps": 8}


@pytest.mark.full
def test_the_best_state_is_saved_and_kept(text, tmp_path, caplog):
    options = {"optimizer": RESTLESS, "eval_every": 1, "log_every": 1, "checkpoint_every": 0}
    recorder = Recorder(at_step=7, action=lambda: os.kill(os.getpid(), signal.SIGINT))
    out_dir = tmp_path / "run"
    run = make_run(text, out_dir, num_steps=12, keep_checkpoints=1, **options)
    fit(*run, report=recorder)
    fit(*run, resume=True)
    losses = {
        line["step"]: line["loss"] for line in metrics_of(out_dir) if line["split"] == "valid"
    }
    assert sorted(losses) == list(range(1, 13))
    best = min(losses, key=losses.get)
    assert best < 12
    assert whole_checkpoints(out_dir) == [best, 12]

    def valid_loss(**options):
        return load_run(out_dir, **options).evaluate("valid").loss

    assert valid_loss(best=True) == losses[best]
    assert valid_loss() == losses[12]
    damaged = flip_a_bit(out_dir / f"checkpoints/{best}")
    assert valid_loss(best=True) == losses[12]
    assert f"checkpoints/{best}: {damaged} is not what was written" in caplog.text
    damaged = flip_a_bit(out_dir / "checkpoints/12")
    with pytest.raises(
        FileNotFoundError,
        match=rf"no complete checkpoint of a validated step; .*12: {damaged} is not what was written",
    ):
        load_run(out_dir, best=True)


@pytest.mark.full
def test_without_keep_best_the_newest_are_kept(text, tmp_path):
    options = {"optimizer": RESTLESS, "eval_every": 1, "checkpoint_every": 4}
    run = make_run(
        text, tmp_path / "run", num_steps=8, keep_checkpoints=1, keep_best=False, **options
    )
    fit(*run)
    assert whole_checkpoints(tmp_path / "run") == [8]


class Obstacle:
    """Makes the folder of a run's checkpoints one that nothing can be written in, and back."""

    def __init__(self, out_dir):
        self.folder, self.aside = out_dir / "checkpoints", out_dir / "aside"

    def put(self):
        while not (self.folder / "5").exists():  # it is saved in the background
            time.sleep(0.01)
        self.folder.rename(self.aside)
        self.folder.write_text("no folder")

    def remove(self):
        self.folder.unlink()
        self.aside.rename(self.folder)


def test_a_state_that_cannot_be_saved_ends_the_run(text, tmp_path, whole_run):
    run = make_run(text, tmp_path / "run", checkpoint_every=5)
    obstacle = Obstacle(tmp_path / "run")
    with pytest.raises(OSError, match=r"checkpoints/10 could not be written: .*\nFix: .*newest"):
        fit(*run, report=Recorder(at_step=10, action=obstacle.put))
    obstacle.remove()
    assert fit(*run, resume=True).losses == whole_run[0].losses[5:]


def test_metrics_that_cannot_be_written_end_the_run(text, tmp_path, whole_run):
    run = make_run(text, tmp_path / "run", checkpoint_every=2)
    metrics, aside = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "aside"

    def fill():
        metrics.rename(aside)
        metrics.symlink_to("/dev/full")

    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl: No space"):
        fit(*run, report=Recorder(at_step=5, action=fill))
    metrics.unlink()
    aside.rename(metrics)
    resumed = fit(*run, resume=True)
    assert resumed.losses == whole_run[0].losses[resumed.first_step :]
    assert resumed.first_step >= 4


@pytest.mark.law
def test_a_run_can_be_stopped_and_resumed_on_another_mesh(text, tmp_path, whole_run):
    run = make_run(text, tmp_path / "run")
    stop = Recorder(at_step=5, action=lambda: os.kill(os.getpid(), signal.SIGINT))
    losses = fit(*run, report=stop).losses
    run = make_run(text, tmp_path / "run", (2, 2, 2), (2, 2))
    losses += fit(*run, resume=True).losses
    np.testing.assert_allclose(losses, whole_run[0].losses, rtol=RELATIVE_ERROR)


@pytest.mark.full
def test_fit_runs_outside_the_main_thread(text, tmp_path):
    results = []
    run = make_run(text, tmp_path / "run", num_steps=2)
    thread = threading.Thread(target=lambda: results.append(fit(*run)))
    thread.start()
    thread.join()
    assert len(results[0].losses) == 2


def test_evaluating_a_run_gives_the_perplexities_of_fit(whole_run):
    result, _ = whole_run
    here = load_run(result.out_dir)
    assert {split: here.evaluate(split) for split in result.evaluations} == result.evaluations
    elsewhere = load_run(result.out_dir, MeshConfig(data=2, stage=2, tensor=2))
    expected = result.evaluations["valid"].loss
    assert elsewhere.evaluate("valid").loss == pytest.approx(expected, rel=RELATIVE_ERROR)


def test_evaluation_is_exact(whole_run, text):
    """Against the model applied to each stream at once."""
    result, _ = whole_run
    tokens = load_corpus(text).valid
    rows, nll = result.setup.task.batch_size, 0.0
    bounds = np.arange(rows + 1) * (len(tokens) - 1) // rows
    assert len({*np.diff(bounds)}) == 2  # streams of unequal length
    for start, stop in itertools.pairwise(bounds):
        log_probs = log_probabilities(result, tokens[start:stop])
        nll -= log_probs[np.arange(stop - start), tokens[start + 1 : stop + 1]].sum()
    loss = result.evaluations["valid"].loss
    assert loss == pytest.approx(nll / (len(tokens) - 1), rel=RELATIVE_ERROR)


def test_a_text_shorter_than_the_batch_is_read_in_fewer_streams(whole_run, text):
    result, _ = whole_run
    tokens = load_corpus(text).test
    assert 2 < len(tokens) <= result.setup.task.batch_size
    nll = [
        -log_probabilities(result, tokens[n : n + 1])[0, tokens[n + 1]]
        for n in range(len(tokens) - 1)
    ]
    loss = result.evaluations["test"].loss
    assert loss == pytest.approx(np.mean(nll), rel=RELATIVE_ERROR)
    with pytest.raises(ValueError, match="1 tokens are fewer than the 2 that"):
        result.setup.task.batches_of(np.arange(1), None)


@pytest.mark.full
def test_a_changed_text_is_not_resumed(text, tmp_path):
    own = tmp_path / "text"
    shutil.copytree(text, own)
    run = make_run(own, tmp_path / "run", num_steps=1)
    fit(*run)
    (own / "train.txt").write_text((own / "train.txt").read_text() + "the cat ran\n")
    with pytest.raises(
        ValueError,
        match=r"data of the run .* have changed: data\.train\.array was \S+\[732\], "
        r"is \S+\[736\]; .*\nFix: restore them",
    ):
        fit(*run, resume=True)


@pytest.mark.full
def test_words_that_have_changed_are_not_resumed(text, tmp_path):
    """Though the tokens are the same."""
    own = tmp_path / "text"
    shutil.copytree(text, own)
    run = make_run(own, tmp_path / "run", num_steps=1)
    fit(*run)
    for path in own.iterdir():
        path.write_text(path.read_text().replace("cat", "cow"))
    message = r" have changed: files\.vocabulary\.json was \d+ \w+, is \d+ \w+\nFix: restore them"
    with pytest.raises(ValueError, match=message):
        fit(*run, resume=True)


@pytest.mark.full
def test_a_state_is_read_where_its_text_is_gone(text, tmp_path):
    own, out_dir = tmp_path / "text", tmp_path / "run"
    shutil.copytree(text, own)
    result = fit(*make_run(own, out_dir, num_steps=1))
    shutil.rmtree(own)
    run = load_run(out_dir)
    assert run.setup.task.num_words == result.setup.task.num_words
    expected = dataclasses.replace(result.state, opt_state=())
    for own, other in zip(*map(jax.tree.leaves, (run.state, expected)), strict=True):
        np.testing.assert_array_equal(np.array(own), np.array(other))
    words = (out_dir / "vocabulary.json").read_text()
    (out_dir / "vocabulary.json").write_text(words.replace("cat", "cow"))
    with pytest.raises(ValueError, match=r"vocabulary\.json is damaged\nFix: restore it"):
        load_run(out_dir).sample("the cat")
    (out_dir / "data.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.json is damaged, or of .*\nFix: restore it"):
        load_run(out_dir)


@pytest.mark.full
def test_a_run_is_not_overwritten_unless_asked_to(text, tmp_path):
    run = make_run(text, tmp_path / "run", num_steps=1)
    fit(*run)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(FileExistsError, match=r"run' holds a run already\nFix: .*--resume"):
        fit(*run)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == written
    fit(*run, overwrite=True)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_runs_without_a_folder_are_numbered(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(text, "elsewhere", num_steps=1)
    run = run._replace(train=dataclasses.replace(run.train, out_dir=None))
    assert [str(fit(*run).out_dir) for _ in range(2)] == ["runs/0001", "runs/0002"]
    assert str(fit(*run, resume=True).out_dir) == "runs/0002"


@pytest.fixture(scope="module")
def bucket_run(text, tmp_path_factory):
    """A run of lines in buckets: of (name, mesh, number of steps)."""
    folder = tmp_path_factory.mktemp("buckets")

    def run(name, mesh, num_steps, **options):
        rate = {"lr_schedule": "constant"}
        task, parallel, train = make_run(
            text, folder / name, mesh, (1, 4), num_steps=num_steps, optimizer=rate
        )
        return fit(dataclasses.replace(task, num_buckets=3), parallel, train, **options)

    return run


@pytest.fixture(scope="module")
def whole_bucket_run(bucket_run):
    return bucket_run("whole", (1, 1, 1), 12)


@pytest.mark.full
def test_lines_in_buckets_train_alike_on_any_mesh_and_resume_in_mid_epoch(
    bucket_run, whole_bucket_run
):
    whole, split = whole_bucket_run, bucket_run("split", (2, 2, 1), 12)
    bucket_run("resumed", (2, 2, 1), 5)
    resumed = bucket_run("resumed", (1, 2, 2), 12, resume=True)
    assert split.losses == pytest.approx(whole.losses, rel=RELATIVE_ERROR)
    assert resumed.losses == pytest.approx(whole.losses[5:], rel=RELATIVE_ERROR)
    assert split.evaluations["valid"].loss == pytest.approx(
        whole.evaluations["valid"].loss, rel=RELATIVE_ERROR
    )


@pytest.mark.full
def test_padding_of_buckets_changes_no_evaluation(whole_bucket_run, text):
    """Each line by itself, without a batch or padding."""
    result, nll, corpus = whole_bucket_run, 0.0, load_corpus(text)
    tokens, eos = corpus.valid, corpus.vocabulary.separator
    ends = np.unique([0, *np.flatnonzero(tokens == eos), len(tokens) - 1])
    for start, end in itertools.pairwise(ends):
        for first in range(start, end, result.setup.task.seq_len):  # longer lines are cut
            last = min(first + result.setup.task.seq_len, end)
            log_probs = log_probabilities(result, tokens[first:last])
            nll -= log_probs[np.arange(last - first), tokens[first + 1 : last + 1]].sum()
    loss = result.evaluations["valid"].loss
    assert loss == pytest.approx(nll / (len(tokens) - 1), rel=RELATIVE_ERROR)


# A task of one's own, whose layers carry state of two kinds and whose batches are a dict.


class Filter(nnx.Module):
    """A leaky sum of its inputs; its state is a dict."""

    def __init__(self, width, *, rngs):
        self.mix = named_param(0.5 * rngs.params.normal((width, width)), ("input", "hidden"))

    def initial_carry(self, rows):
        return {"h": jnp.ones((rows, self.mix.shape[0])), "count": jnp.zeros((rows, 1))}

    def __call__(self, carry, x, at):
        def step(h, x):
            h = 0.9 * h + jnp.tanh(x @ self.mix[...])
            return h, h

        h, y = jax.lax.scan(step, carry["h"], x)
        return {"h": h, "count": carry["count"] + x.shape[0]}, x + 0.1 * y


class Dense(nnx.Module):
    def __init__(self, width, *, rngs):
        self.kernel = named_param(0.5 * rngs.params.normal((width, width)), ("input", "hidden"))

    def __call__(self, carry, x, at):
        return carry, x + 0.1 * jnp.tanh(x @ self.kernel[...])


class Walker(nnx.Module):
    """Filters and dense layers in turn, between an embedding that is not trained and a head."""

    def __init__(self, width, *, rngs):
        self.embed, self.out = nnx.Linear(1, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        makers = [lambda rngs: Filter(width, rngs=rngs), lambda rngs: Dense(width, rngs=rngs)]
        self.layers = Stack(makers * 3, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"][..., None])

    def last(self, y, batch, at):
        error = (self.out(y)[..., 0] - batch["y"]) * batch["weight"]
        return Sums(jnp.sum(error**2), jnp.sum(batch["weight"]), {"mae": jnp.sum(abs(error))})


@dataclasses.dataclass(frozen=True)
class Walk(Task):
    width: int = 4
    rate: float = dataclasses.field(default=0.03, metadata={"free": True})
    note: str | None = "one"

    unit: ClassVar[str] = "steps"
    frozen: ClassVar = nnx.PathContains("embed")

    def make_model(self, rngs):
        return Walker(self.width, rngs=rngs)

    def make_optimizer(self, num_steps):
        return optax.chain(optax.scale_by_adam(), optax.scale(-self.rate))

    def make_batches(self, split, seed=None):
        size, phase = {"train": (900, 0), "valid": (200, 1), "test": (150, 2)}[split]
        series = np.sin(np.arange(size + 1) / 5 + phase).astype(np.float32)
        return SeriesBatches({"x": series[:-1], "y": series[1:]}, 8, 8, seed)

    def metrics(self, loss, means):
        return {"rmse": loss**0.5, "mean error": means["mae"]}

    def describe(self):
        return [("series", "a sine [of one wave]")]

    def fingerprint(self):
        return {"series": self.note}

    def files(self):
        return {"notes.txt": "Grüße"}


@pytest.fixture(scope="module")
def whole_walk(tmp_path_factory):
    return fit(Walk(), make_layout(), make_train(tmp_path_factory.mktemp("walk") / "run"))


@pytest.mark.full
def test_the_lines_of_a_task_of_ones_own_have_its_names(whole_walk):
    assert np.mean(whole_walk.losses[-3:]) < 0.5 * whole_walk.losses[0]
    _, line, *_, last = metrics_of(whole_walk.out_dir)
    assert list(line) == [
        "split", "step", "loss", "grad_norm", "seconds", "steps_per_second", "rmse", "mean_error",
    ]  # fmt: skip
    assert line["rmse"] == line["loss"] ** 0.5
    assert list(last) == ["split", "step", "loss", "rmse", "mean_error"]
    elsewhere = load_run(whole_walk.out_dir, MeshConfig(data=2, devices=(3, 4)))
    expected = whole_walk.evaluations["test"].loss
    assert elsewhere.evaluate("test").loss == pytest.approx(expected, rel=RELATIVE_ERROR)


@pytest.mark.full
def test_what_is_frozen_stays_as_it_was(whole_walk):
    before = init_state(Walk(), make_layout())
    changed = jax.tree.map(
        lambda a, b: bool(np.any(a != b)),
        (before.params, before.frozen),
        (whole_walk.state.params, whole_walk.state.frozen),
    )
    assert [any(jax.tree.leaves(part)) for part in changed] == [True, False]


@pytest.mark.full
def test_a_run_tells_of_itself_unless_it_is_to_be_quiet(tmp_path, capsys):
    """Where there is no terminal, in plain lines; what is returned is short enough to be looked at."""
    run = (Walk(), make_layout(), make_train(tmp_path / "run", num_steps=10))
    result = fit(*run)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "devices    1 x cpu (cpu)"
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == ["1/10", "5/10", "10/10", "10", "10"]
    assert lines[-1].endswith(
        f"{tmp_path / 'run'} holds checkpoints/, config.toml, data.json, metrics.jsonl, "
        "notes.txt, task.py"
    )
    assert re.fullmatch(
        rf"FitResult\(Walk on dp1: 10 of 10 steps; loss [\d.]+; valid rmse [\d.]+  .*; test rmse [\d.]+  "
        rf".*; in {tmp_path}/run\)", repr(result)
    )  # fmt: skip
    again = fit(*run, resume=True, quiet=True)
    assert "Walk on dp1: 10 of 10 steps; valid rmse" in repr(again)
    stopped = fit(
        *run, overwrite=True, report=Recorder(5, lambda: signal.raise_signal(signal.SIGINT))
    )
    assert re.search(r": 5 of 10 steps; loss [\d.]+; stopped by SIGINT; in ", repr(stopped))
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match=r"quiet=True and report=\.\.\. exclude each other"):
        fit(*run, report=Recorder(), quiet=True)


def test_a_plan_says_what_is_known_of_any_task(tmp_path):
    layout = make_layout((2, 4, 1), (2, 2))
    rows = api.summary(Walk(), layout, TrainConfig(num_steps=1))
    assert rows["layers"] == (
        "3 filter, 3 dense (first, 0 | 1-2 | 3-4 | 5, last); 2 microbatches x 2 time chunks"
    )
    assert rows["work"].startswith("stage 0: ~17%, stage 1: ~32%")
    assert rows["series"] == "a sine [of one wave]"
    assert rows["optimizer"] == "your own (scale_by_adam, scale), 1 step"
    assert rows["clipping"] == "gradients are not clipped before your optimizer"
    assert rows["data"] == "900 steps to train on (SeriesBatches): x float32[8], y float32[8]"
    assert rows["batch"] == "8 rows x 8 steps, in 2 microbatches of 4 rows"
    console = Console(width=100, file=io.StringIO())
    train = make_train(tmp_path / "run", num_steps=1)
    fit(Walk(), layout, train, report=ConsoleReport(console))
    printed = console.file.getvalue()
    assert "a sine [of one wave]" in printed
    assert re.search(
        r"^layers\.filter\.mix +4x4x4 +layers/stage, input, hidden +1x4x4 +64 B", printed, re.M
    )
    assert re.search(r"^embed\.kernel +1x4 +-, -, replicated", printed, re.M)
    assert "109 parameters, 436 B; per device: parameters 148 B, frozen 32 B, optimizer" in printed


# ---- what is kept of a task's file ----


def test_a_run_keeps_the_file_of_its_task(tmp_path, caplog):
    file, out_dir = tmp_path / "own.py", tmp_path / "run"
    file.write_text(
        "import dataclasses\nfrom lib.regression import Regression\n"
        "@dataclasses.dataclass(frozen=True)\nclass Own(Regression):\n    depth: int = 1\n"
    )
    options = ["--depth", "2", "--train.num-steps", "1", "--train.out-dir", str(out_dir)]
    assert api.command("train", f"{file}:Own", *options) == 0
    assert (out_dir / "task.py").read_text() == file.read_text()
    run = load_run(out_dir)
    assert (run.setup.task.depth, run.setup.train.out_dir) == (2, str(out_dir))
    assert not caplog.messages

    file.write_text(file.read_text() + "# another line\n")
    assert load_run(out_dir).setup.task.depth == 2
    (said,) = caplog.messages
    assert re.search(r"own\.py has changed since the run began, see .*run/task\.py$", said)

    file.unlink()
    message = (
        r"own\.py, which has the task of the run in .*, does not exist\n.*run/task\.py is a copy"
    )
    with pytest.raises(FileNotFoundError, match=message):
        load_run(out_dir)


def test_a_run_of_an_older_version_is_named(tmp_path):
    (tmp_path / "config.toml").write_text('[model]\nname = "lstm"\n')
    for use in (
        lambda: load_run(tmp_path),
        lambda: fit(Walk(), resume=True, train=make_train(tmp_path)),
    ):
        with pytest.raises(ValueError, match=r"is damaged: it names no task\nFix: restore it"):
            use()


def test_what_a_task_keeps_may_not_take_the_names_of_the_run(tmp_path):
    class Bad(Walk):
        def files(self):
            return {"config.toml": ""}

    with pytest.raises(
        ValueError, match=r"keeps a file 'config\.toml', but this is a reserved name"
    ):
        fit(Bad(), make_layout(), make_train(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_settings_that_no_file_can_hold_are_refused_before_a_file_is_written(tmp_path):
    task = Walk(note=None)
    with pytest.raises(ValueError, match="note=None"):
        fit(task, make_layout(), make_train(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_overwriting_takes_away_what_the_task_before_kept(tmp_path):
    class Without(Walk):
        def files(self):
            return {}

    out_dir = tmp_path / "run"
    train = make_train(out_dir, num_steps=1)
    fit(Walk(), make_layout(), train)
    assert (out_dir / "notes.txt").read_text(encoding="utf-8") == "Grüße"
    (out_dir / "mine.txt").write_text("mine")
    fit(Without(), make_layout(), train, overwrite=True)
    assert not (out_dir / "notes.txt").exists()
    assert (out_dir / "mine.txt").exists()


# ---- what is refused ----


def test_a_value_that_the_task_refuses_ends_the_run_before_it_begins(tmp_path):
    class Checked(Walk):
        def check_batch(self, batch):
            if batch["x"].min() < -0.99:
                raise ValueError(f"x={batch['x'].min():.3f} is too low")

    with pytest.raises(ValueError, match=r"x=-\S+ is too low"):
        fit(Checked(), make_layout(), make_train(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: {"starts": False}, "starts must be True in the first batch; False"),
        (
            lambda rows: {"weight": np.zeros((8, 8), np.float32)[rows]},
            r"split 'valid': its weights must be above 0, got 0\.0",
        ),
    ],
)
def test_an_evaluation_that_would_give_a_wrong_number_is_refused(tmp_path, wrong, message):
    class Wrong(Walk):
        def make_batches(self, split, seed=None):
            batches = super().make_batches(split, seed)
            whole = batches.batch
            if split == "valid":
                batches.batch = lambda n, rows=slice(None): {**whole(n, rows), **wrong(rows)}
            return batches

    with pytest.raises(ValueError, match=message):
        fit(Wrong(), make_layout(), make_train(tmp_path / "run", num_steps=1))


@pytest.mark.full
def test_the_host_waits_for_a_device_at_log_lines_alone(text, tmp_path):
    """Between them steps are put into its queue, each with a batch that is put on the device before."""
    task, parallel, train = make_run(text, tmp_path / "run", eval_every=0)
    with api.steps_and_waits() as happened:
        fit(task, parallel, dataclasses.replace(train, num_steps=13, log_every=4))
    steps = [n for n, name in enumerate(happened) if name == "step"]
    assert len(steps) >= 13
    # After the first step, which compiles, each line of four has its steps without a wait between them.
    assert "wait" in happened[steps[3] : steps[4]]
    for first in (steps[4], steps[8]):
        assert happened[first : first + 4] == ["step"] * 4
