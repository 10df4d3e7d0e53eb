"""The laws of the loop: losses fall, are the same on every mesh, and survive a stop."""

import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar.config import (
    VOCAB_MULTIPLE,
    Config,
    DataConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
)
from jaxpar.data.corpus import load_corpus
from jaxpar.mesh import MeshConfig
from jaxpar.state import make_model
from jaxpar.training.evaluate import Evaluator
from jaxpar.training.fit import evaluate_run, fit
from jaxpar.training.report import Report
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.sample import sample, sample_tokens

pytestmark = pytest.mark.usefixtures("compile_once")

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

SENTENCES = ["the cat sat on the mat", "a dog ran to the cat", "the mat ran", "a cat sat on a dog"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of a user's own text."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for split, num_lines in (("train", 120), ("valid", 20), ("test", 3)):
        lines = [SENTENCES[i] for i in rng.integers(len(SENTENCES), size=num_lines)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def make_config(text, out_dir, mesh=(1, 1, 1), units=(1, 1), **train):
    num_devices = math.prod(mesh)
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    return Config(
        mesh=MeshConfig(*mesh, devices=devices),
        model=ModelConfig(num_layers=2, hidden_size=8, embed_size=8, dropout=0.2),
        pipeline=PipelineConfig(num_microbatches=units[0], num_chunks=units[1]),
        data=DataConfig(corpus=str(text), batch_size=8, seq_len=4),
        train=TrainConfig(
            **{
                "num_steps": 20, "learning_rate": 0.02, "warmup_steps": 2, "log_every": 5,
                "out_dir": str(out_dir), **train,
            }
        ),
    )  # fmt: skip


def load_model(result):
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(result.config)))
    return nnx.merge(graphdef, result.state.params)


class Recorder(Report):
    """Keeps the names of what it is told, and may do something at a step."""

    def __init__(self, at_step=None, action=lambda: None):
        self.told, self.at_step, self.action = [], at_step, action

    def plan(self, config, mesh, corpus, state):
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
        self.told.append("plan")

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
    return fit(make_config(text, out_dir, eval_every=10), report=recorder), recorder


def test_losses_fall_and_everything_is_reported(whole_run):
    result, recorder = whole_run
    assert len(result.losses) == 20
    assert np.mean(result.losses[-3:]) < 0.8 * result.losses[0]
    assert result.config.model.vocab_size == VOCAB_MULTIPLE
    assert result.valid_perplexity < VOCAB_MULTIPLE / 4
    assert recorder.told == [
        "plan", "begin 0/20", 1, 5, 10, "valid 10", 15, 20, "end 20", "valid 20", "test 20", "finish",
    ]  # fmt: skip


def test_metrics_are_json_lines(whole_run):
    result, _ = whole_run
    lines = [
        json.loads(line) for line in (result.out_dir / "metrics.jsonl").read_text().splitlines()
    ]
    train = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in train] == [1, 5, 10, 15, 20]
    assert [line["loss"] for line in train] == [result.losses[line["step"] - 1] for line in train]
    for line in train:
        assert line["perplexity"] == math.exp(line["loss"])
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
    assert train[1]["seconds"] < train[2]["seconds"]
    assert train[0]["learning_rate"] == pytest.approx(0.01)  # the first of 2 steps of warm-up
    evaluations = [(line["step"], line["split"]) for line in lines if line["split"] != "train"]
    assert evaluations == [(10, "valid"), (20, "valid"), (20, "test")]


@pytest.fixture(scope="module")
def mesh_run(text, tmp_path_factory):
    """The same on 8 devices."""
    out_dir = tmp_path_factory.mktemp("runs") / "mesh"
    return fit(make_config(text, out_dir, mesh=(2, 2, 2), units=(2, 2)))


@pytest.mark.law
def test_losses_and_perplexities_are_the_same_on_another_mesh(whole_run, mesh_run):
    expected, result = whole_run[0], mesh_run
    np.testing.assert_allclose(result.losses, expected.losses, rtol=RELATIVE_ERROR)
    assert result.valid_perplexity == pytest.approx(expected.valid_perplexity, rel=RELATIVE_ERROR)
    assert result.test_perplexity == pytest.approx(expected.test_perplexity, rel=RELATIVE_ERROR)


@pytest.mark.parametrize(("mesh", "units"), [((1, 1, 1), (1, 1)), ((2, 2, 2), (2, 2))])
def test_a_stopped_run_resumes_with_the_same_losses(
    text, tmp_path, whole_run, mesh_run, mesh, units
):
    undisturbed = whole_run[0] if units == (1, 1) else mesh_run
    stop = Recorder(at_step=5, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    config = make_config(text, tmp_path / "run", mesh, units)
    first = fit(config, report=stop)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert first.stopped_by is signal.SIGTERM
    assert len(first.losses) == 5
    assert first.valid_perplexity is None
    assert stop.told[-2:] == ["end 5", "finish"]

    recorder = Recorder()
    second = fit(config, resume=True, report=recorder)
    assert recorder.told[1] == "begin 5/20"
    assert (second.first_step, len(second.losses)) == (5, 15)
    assert first.losses + second.losses == undisturbed.losses
    assert second.test_perplexity == undisturbed.test_perplexity


def test_a_finished_run_is_only_evaluated_again(text, tmp_path):
    config = make_config(text, tmp_path / "run", num_steps=1)
    first, again = fit(config), fit(config, resume=True)
    assert again.losses == []
    assert again.evaluations == first.evaluations


def test_resuming_an_earlier_state_keeps_the_metrics_of_the_later_one(text, tmp_path):
    config = make_config(text, tmp_path / "run", num_steps=8, log_every=2, checkpoint_every=4)
    folder = RunFolder(tmp_path / "run")
    whole = fit(config)
    written = folder.metrics_path.read_text()
    # As if the process had been killed between step 4 and step 8.
    for path in sorted(folder.checkpoints_path.glob("8/**/*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder.checkpoints_path / "8").rmdir()

    again = fit(config, resume=True)
    assert again.losses == whole.losses[4:]
    assert (folder.path / "metrics.before-1.jsonl").read_text() == written
    steps = [line["step"] for line in folder.metrics() if line["split"] == "train"]
    assert steps == [1, 2, 4, 5, 6, 8]


def test_a_run_killed_before_its_first_checkpoint_begins_again(text, tmp_path, whole_run, caplog):
    config = make_config(text, tmp_path / "run", checkpoint_every=5)
    killed = Recorder(at_step=1, action=lambda: os.kill(os.getpid(), signal.SIGINT))
    fit(config, report=killed)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    saved.rename(saved.with_name("1.orbax-checkpoint-tmp"))  # as if it had still been written
    assert fit(config, resume=True).losses == whole_run[0].losses
    assert "has no checkpoint yet: the run begins again" in caplog.text


def test_the_best_state_is_saved_and_kept(text, tmp_path):
    # So high a rate that the validation loss goes up and down.
    options = {"learning_rate": 0.3, "eval_every": 1, "log_every": 1, "checkpoint_every": 0}
    recorder = Recorder(at_step=7, action=lambda: os.kill(os.getpid(), signal.SIGINT))
    config = make_config(text, tmp_path / "run", num_steps=12, keep_checkpoints=1, **options)
    fit(config, report=recorder)
    fit(config, resume=True)
    folder = RunFolder(tmp_path / "run")
    losses = folder.valid_losses()
    assert sorted(losses) == list(range(1, 13))
    best = min(losses, key=losses.get)
    assert best < 12
    assert folder.checkpoints(config).steps() == [best, 12]
    assert evaluate_run(folder, best=True)[0].loss == losses[best]
    assert evaluate_run(folder)[0].loss == losses[12]


def test_without_keep_best_the_newest_are_kept(text, tmp_path):
    options = {"learning_rate": 0.3, "eval_every": 1, "checkpoint_every": 4, "keep_best": False}
    config = make_config(text, tmp_path / "run", num_steps=8, keep_checkpoints=1, **options)
    fit(config)
    assert RunFolder(tmp_path / "run").checkpoints(config).steps() == [8]


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


def test_a_state_that_cannot_be_saved_goes_to_the_fallback(text, tmp_path, whole_run):
    options = {"checkpoint_every": 5, "fallback_dir": str(tmp_path / "other" / "disk")}
    config = make_config(text, tmp_path / "run", **options)
    obstacle = Obstacle(tmp_path / "run")
    with pytest.raises(
        OSError,
        match=r"of step 10 could not be written in .*run/checkpoints: .*; the state of step 10 is "
        r"saved in .*other/disk/run-step-10: go on with --resume --train\.out-dir .*run-step-10$",
    ):
        fit(config, report=Recorder(at_step=10, action=obstacle.put))
    resumed = fit(make_config(text, tmp_path / "other/disk/run-step-10", **options), resume=True)
    assert resumed.losses == whole_run[0].losses[10:]
    lines = RunFolder(resumed.out_dir).metrics()
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 5, 10, 11, 15, 20]
    obstacle.remove()
    assert RunFolder(tmp_path / "run").checkpoints(config).steps() == [5]


def test_without_a_fallback_the_newest_checkpoint_is_named(text, tmp_path):
    config = make_config(text, tmp_path / "run", checkpoint_every=5)
    obstacle = Obstacle(tmp_path / "run")
    with pytest.raises(OSError, match=r"step 10 could not be written .*; free .*fallback-dir\)$"):
        fit(config, report=Recorder(at_step=10, action=obstacle.put))


def test_metrics_that_cannot_be_written_end_the_run_with_its_state_saved(text, tmp_path, whole_run):
    config = make_config(text, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def fill():
        metrics.unlink()
        metrics.symlink_to("/dev/full")

    with pytest.raises(
        OSError,
        match=r"cannot write .*metrics\.jsonl: No space .*; the state of step 10 is saved in",
    ):
        fit(config, report=Recorder(at_step=5, action=fill))
    metrics.unlink()
    assert fit(config, resume=True).losses == whole_run[0].losses[10:]


@pytest.mark.law
def test_a_run_can_be_stopped_and_resumed_on_another_mesh(text, tmp_path, whole_run):
    config = make_config(text, tmp_path / "run")
    stop = Recorder(at_step=5, action=lambda: os.kill(os.getpid(), signal.SIGINT))
    losses = fit(config, report=stop).losses
    config = make_config(text, tmp_path / "run", (2, 2, 2), (2, 2))
    losses += fit(config, resume=True).losses
    np.testing.assert_allclose(losses, whole_run[0].losses, rtol=RELATIVE_ERROR)


def test_fit_runs_outside_the_main_thread(text, tmp_path):
    results = []
    config = make_config(text, tmp_path / "run", num_steps=2)
    thread = threading.Thread(target=lambda: results.append(fit(config)))
    thread.start()
    thread.join()
    assert len(results[0].losses) == 2


def test_evaluating_a_run_gives_the_perplexities_of_fit(whole_run):
    result, _ = whole_run
    folder = RunFolder(result.out_dir)
    assert evaluate_run(folder) == list(result.evaluations.values())
    elsewhere = evaluate_run(folder, MeshConfig(data=2, stage=2, tensor=2))
    assert elsewhere[0].perplexity == pytest.approx(result.valid_perplexity, rel=RELATIVE_ERROR)


def test_evaluation_is_exact(whole_run, text):
    """Against the model applied to each stream at once."""
    result, _ = whole_run
    tokens = load_corpus(text).valid[:68]
    loss = Evaluator(result.config, result.mesh).loss(result.state.params, tokens)
    rows = result.config.data.batch_size
    bounds = np.arange(rows + 1) * 67 // rows
    assert len({*np.diff(bounds)}) == 2  # streams of unequal length
    model, nll = load_model(result), 0.0
    for start, stop in itertools.pairwise(bounds):
        logits = np.asarray(model(tokens[None, start:stop])[0], np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll -= log_probs[np.arange(stop - start), tokens[start + 1 : stop + 1]].sum()
    assert loss == pytest.approx(nll / 67, rel=RELATIVE_ERROR)


def test_a_text_shorter_than_the_batch_is_read_in_fewer_streams(whole_run):
    result, _ = whole_run
    loss = Evaluator(result.config, result.mesh).loss(result.state.params, np.arange(6))
    assert loss > 0
    with pytest.raises(ValueError, match=r"1 tokens are too few for batch_size=1"):
        Evaluator(result.config, result.mesh).loss(result.state.params, np.arange(1))


def test_a_changed_text_is_not_resumed(text, tmp_path):
    own = tmp_path / "text"
    own.mkdir()
    for path in text.iterdir():
        (own / path.name).write_text(path.read_text())
    config = make_config(own, tmp_path / "run", num_steps=1)
    fit(config)
    (own / "train.txt").write_text((own / "train.txt").read_text() + "the cat ran\n")
    with pytest.raises(
        ValueError, match=r"not the text that the run .* 4 train|bring the text back"
    ):
        fit(config, resume=True)


def test_a_run_is_not_overwritten_unless_asked_to(text, tmp_path):
    config = make_config(text, tmp_path / "run", num_steps=1)
    fit(config)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(FileExistsError, match=r"run' holds a run already; .*--resume"):
        fit(config)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == written
    fit(config, overwrite=True)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_runs_without_a_folder_are_numbered(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(text, "elsewhere", num_steps=1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, out_dir=None))
    assert [str(fit(config).out_dir) for _ in range(2)] == ["runs/0001", "runs/0002"]
    assert str(fit(config, resume=True).out_dir) == "runs/0002"


def test_sample_is_deterministic_in_the_seed(whole_run):
    out_dir = whole_run[0].out_dir
    first, again, other = (sample(out_dir, "the cat", length=30, seed=n) for n in (0, 0, 1))
    assert first == again != other
    assert first.startswith("the cat")
    assert sample(out_dir, "the", length=5, temperature=0) == sample(
        out_dir, "the", length=5, temperature=0, seed=3
    )


def test_sample_follows_the_carried_state(whole_run):
    """Greedy tokens are those of the model applied to the whole text so far."""
    result, _ = whole_run
    # Large random weights, so that the likeliest token depends on all that came before.
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda array: rng.normal(0, 2, array.shape).astype(np.float32), result.state.params
    )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(result.config)))
    greedy = functools.partial(
        sample_tokens, result.config, params, num_words=12, length=3, temperature=0
    )
    drawn = set()
    for prompt in rng.integers(12, size=(6, 5), dtype=np.int32):
        tokens = greedy(prompt)
        text = np.concatenate([prompt, tokens])
        logits = np.asarray(nnx.merge(graphdef, params)(text[None])[0, :, :12])
        np.testing.assert_array_equal(tokens, logits.argmax(-1)[len(prompt) - 1 : -1])
        drawn |= set(tokens.tolist())
    assert len(drawn) > 1


def test_lines_in_buckets_train_alike_on_any_mesh_and_resume_in_mid_epoch(text, tmp_path):
    def config(name, mesh, **train):
        made = make_config(text, tmp_path / name, mesh, lr_schedule="constant", **train)
        data = dataclasses.replace(made.data, num_buckets=3)
        return dataclasses.replace(made, data=data)

    whole = fit(config("whole", (1, 1, 1), num_steps=12))
    split = fit(config("split", (2, 2, 1), num_steps=12))
    fit(config("resumed", (2, 2, 1), num_steps=5))
    resumed = fit(config("resumed", (1, 2, 2), num_steps=12), resume=True)
    assert split.losses == pytest.approx(whole.losses, rel=RELATIVE_ERROR)
    assert resumed.losses == pytest.approx(whole.losses[5:], rel=RELATIVE_ERROR)
    assert split.valid_perplexity == pytest.approx(whole.valid_perplexity, rel=RELATIVE_ERROR)


def test_padding_of_buckets_changes_no_evaluation(whole_run, text):
    """Each line by itself, without a batch or padding."""
    result, _ = whole_run
    corpus = load_corpus(text)
    tokens, eos = corpus.valid, corpus.vocabulary.separator
    data = dataclasses.replace(result.config.data, num_buckets=3)
    config = dataclasses.replace(result.config, data=data)
    loss = Evaluator(config, result.mesh, eos).loss(result.state.params, tokens)
    model, nll = load_model(result), 0.0
    ends = np.unique([0, *np.flatnonzero(tokens == eos), len(tokens) - 1])
    for start, end in itertools.pairwise(ends):
        for first in range(start, end, data.seq_len):  # longer lines are cut
            last = min(first + data.seq_len, end)
            logits = np.asarray(model(tokens[None, first:last])[0], np.float64)
            log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            nll -= log_probs[np.arange(last - first), tokens[first + 1 : last + 1]].sum()
    assert loss == pytest.approx(nll / (len(tokens) - 1), rel=RELATIVE_ERROR)
    with pytest.raises(ValueError, match="num_buckets=3 needs the token that ends a line"):
        Evaluator(config, result.mesh).loss(result.state.params, tokens)
