"""Predictions: for every row of the data, in its order, what one device gives; kills lose none."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.predictions import SEPARATOR, TASK, plain, predicted, text_of

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig, Stack, Sums
from jaxpar.lm import LM, LanguageModel
from jaxpar.nn import Stateless

Digits = api.task_class(f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits")
READ = {
    "stream": TASK,
    "packed": dataclasses.replace(TASK, packed=True),
    "buckets": dataclasses.replace(TASK, num_buckets=3, bucket_multiple=2),
}
ALL_AXES = Parallel("dp2pp2tp2", PipelineConfig(num_microbatches=2, num_chunks=4))


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("read", READ)
def test_every_token_has_its_log_likelihood(read):
    found = predicted(READ[read], ALL_AXES)
    expected = plain(READ[read], text_of())
    np.testing.assert_allclose(found["log_likelihood"], expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(found["log_likelihood"]).sum() == 1


class Whole(LanguageModel):
    """Its head is in parts for the loss, but not when it predicts."""

    predict_part = jaxpar.Model.predict_part


class OfWhole(LM):
    def make_model(self, rngs):
        return Whole(self, rngs=rngs)


@pytest.mark.full
def test_a_head_in_parts_is_gathered_where_a_model_predicts_as_a_whole():
    fields = {field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)}
    task = OfWhole(**fields | {"hidden_size": 6})
    found = predicted(task, Parallel("pp2", PipelineConfig(num_chunks=2, head="sharded")))
    expected = plain(task, text_of())
    np.testing.assert_allclose(found["log_likelihood"], expected, rtol=1e-5, atol=1e-6)


# ---- any model, any batches ----


class Silent(nnx.Module):
    """Rows without time; it does not say what it predicts."""

    time_major = False

    def __init__(self, rngs):
        def layer(rngs):
            return Stateless(nnx.Linear(4, 4, rngs=rngs))

        self.layers = Stack([layer] * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        return Sums(jnp.sum(y**2), jnp.float32(len(y)))


class Net(Silent):
    """What it predicts has many types."""

    def predict(self, y, batch, at):
        return {
            "y": y.astype(jnp.bfloat16), "sign": y[:, 0] > 0, "best": jnp.argmax(y, axis=1),
            "small": (batch["x"][:, :2] * 30).astype(jnp.int8),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rows(jaxpar.Task):
    """Arrays in memory, or batches of one's own."""

    batch_size: int = 8
    optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig(warmup_steps=0)

    def make_model(self, rngs):
        return Net(rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(1).standard_normal((21, 4)).astype(np.float32)
        return jaxpar.ArrayBatches({"x": x}, self.batch_size, seed)


class Own:
    """Batches that do not say where their rows lie."""

    batch_size, num_windows = 8, 2

    def batch(self, step, rows=slice(None)):
        x = np.arange(32, dtype=np.float32).reshape(8, 4) / 10 + step
        return {"x": x[rows], "weight": np.ones(8, np.float32)[rows]}


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("mesh", ["dp2", "pp2", "dp2pp2"])
def test_rows_without_time_come_in_their_order_and_in_their_types(mesh):
    parallel = Parallel(mesh, PipelineConfig(num_microbatches=2))
    task = Rows()
    found = predicted(task, parallel, task.make_batches("test"))
    one = predicted(task, "dp1", jaxpar.ArrayBatches(task.make_batches("test").arrays, 8))
    x = task.make_batches("test").arrays["x"]
    assert {name: a.dtype for name, a in found.items()} == {
        "y": np.float32, "sign": bool, "best": np.int32, "small": np.int8,
    }  # fmt: skip
    np.testing.assert_array_equal(found["small"], (x[:, :2] * 30).astype(np.int8))
    for name, array in found.items():
        assert len(array) == 21
        np.testing.assert_allclose(array, one[name], rtol=2**-7)
    assert found["sign"].any()
    assert not found["sign"].all()


def test_batches_that_do_not_know_their_places_keep_their_order():
    found = predicted(Rows(), Parallel("dp2"), Own())
    whole = np.concatenate([Own().batch(n)["x"] for n in range(2)])
    np.testing.assert_array_equal(found["small"], (whole[:, :2] * 30).astype(np.int8))


@pytest.mark.full
def test_short_batches_of_ones_own_end_in_nan():
    task = READ["buckets"]
    tokens = text_of()
    own = Listed(task.batches_of(tokens, SEPARATOR))
    found = predicted(task, Parallel("pp2", PipelineConfig(num_chunks=4)), own)["log_likelihood"]
    assert found.shape == (own.num_windows * task.batch_size, task.seq_len)
    for number in range(own.num_windows):
        batch = own.batch(number)
        rows = found[number * task.batch_size :][: task.batch_size]
        length = batch.targets_BT.shape[1]
        assert np.isnan(rows[:, length:]).all()
        assert (rows[:, :length] != 0)[batch.targets_BT >= 0].all()


class Listed:
    """Batches of others, without what else these can do."""

    def __init__(self, batches):
        self.batch, self.num_windows, self.batch_size = (
            batches.batch, batches.num_windows, batches.batch_size,
        )  # fmt: skip


# ---- in a folder ----


@pytest.mark.law
def test_a_folder_has_what_the_memory_has(tmp_path):
    inside = predicted(TASK, "dp4")
    outside = predicted(TASK, "dp4", out=tmp_path / "new")
    np.testing.assert_array_equal(outside["log_likelihood"], inside["log_likelihood"])
    loaded = np.load(tmp_path / "new/log_likelihood.npy")
    np.testing.assert_array_equal(loaded, inside["log_likelihood"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["log_likelihood.npy"]
    with pytest.raises(
        FileExistsError, match=r"new/log_likelihood\.npy exists already\.\nFix: rem"
    ):
        predicted(TASK, "dp4", out=tmp_path / "new")


def test_an_interrupted_prediction_leaves_nothing(tmp_path):
    batches = TASK.batches_of(text_of(), SEPARATOR)
    whole = batches.batch

    def stop(step, rows=slice(None)):
        if step == 2:
            raise KeyboardInterrupt
        return whole(step, rows)

    batches.batch = stop
    with pytest.raises(KeyboardInterrupt):
        predicted(TASK, "dp4", batches, out=tmp_path)
    assert not [*tmp_path.iterdir()]


# A task that kills its process where a file says so.
KILLED = """
import dataclasses, os, signal
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from flax import nnx
import jaxpar
from jaxpar.nn import GRU

class Batches(jaxpar.SeriesBatches):
    def batch(self, step, rows=slice(None)):
        at = Path(__file__).with_name("kill")
        if at.exists() and step == 12:
            os.kill(os.getpid(), getattr(signal, at.read_text()))
        return super().batch(step, rows)

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = jaxpar.Stack([lambda rngs: GRU(4, rngs=rngs)] * 2, rngs=rngs)
    def first(self, batch, at):
        return batch["x"]
    def last(self, y, batch, at):
        return jaxpar.Sums(jnp.sum((y - batch["x"]) ** 2), jnp.sum(batch["weight"]))
    def predict(self, y, batch, at):
        return {"next": y}

@dataclasses.dataclass(frozen=True)
class Series(jaxpar.Task):
    optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig()
    def make_model(self, rngs):
        return Model(rngs)
    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).standard_normal((400, 4)).astype(np.float32)
        return Batches({"x": x}, 4, 5, seed)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    (folder / "series.py").write_text(KILLED)
    assert command(folder, "train", "series.py:Series", "--train.num-steps", "2",
                   "--optimizer.warmup-steps", "0", "--train.out-dir", "run").returncode == 0  # fmt: skip
    assert command(folder, "predict", "run", "test", "--out", "whole").returncode == 0
    return folder


def command(folder, *arguments):
    """A command line that has run there."""
    run = [sys.executable, "-m", "jaxpar", *arguments]
    return subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.full
def test_two_processes_write_the_same_files(trained):
    launch = ["launch", "--processes", "2", "--", "predict", "--mesh", "dp2"]
    (trained / "kill").write_text("SIGKILL")
    assert command(trained, *launch, "run", "test", "--out", "two").returncode != 0
    (trained / "kill").unlink()
    assert not (trained / "two/next.npy").exists()
    assert command(trained, *launch, "run", "test", "--out", "two").returncode == 0
    whole, two = (np.load(trained / name / "next.npy") for name in ("whole", "two"))
    assert whole.shape == (400, 4)
    assert not np.isnan(whole).any()
    np.testing.assert_allclose(two, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_prediction_after_a_batch(name, trained):
    (trained / "kill").write_text(name)
    done = command(trained, "predict", "run", "test", "--out", name)
    (trained / "kill").unlink()
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stderr.endswith("stopped after 13 of 20 batches; no predictions are saved\n")
    assert not [*(trained / name).iterdir()]


@pytest.mark.full
def test_memory_does_not_grow_with_the_rows(tmp_path):
    """In a process of its own: what one output array has would show, and so would all of them."""
    code = f"""
import dataclasses, resource, sys
import jax.numpy as jnp, numpy as np
from flax import nnx
import jaxpar
sys.path.insert(0, {str(Path(__file__).parent)!r})
from lib import api

class Model(nnx.Module):
    time_major = False
    def __init__(self, rngs):
        self.layers = jaxpar.Stack([], rngs=rngs)
        self.out = nnx.Linear(1, 64, rngs=rngs)
    def first(self, batch, at):
        return batch["x"]
    def last(self, y, batch, at):
        return jaxpar.Sums(jnp.sum(self.out(y)), jnp.float32(len(y)))
    def predict(self, y, batch, at):
        return {{"y": self.out(y)}}

@dataclasses.dataclass(frozen=True)
class Task(jaxpar.Task):
    optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig()
    def make_model(self, rngs):
        return Model(rngs)
    def make_batches(self, split, seed=None):
        return jaxpar.ArrayBatches({{"x": np.ones((int(split), 1), np.float32)}}, 4096, seed)
    def example_batch(self):
        return {{"x": np.ones((4096, 1), np.float32), "weight": np.ones(4096, np.float32)}}

state = jaxpar.init_state(Task(), "dp1")
peaks = []
for rows in (8192, 600_000):
    batches = Task().make_batches(str(rows))
    api.epoch_predictions(Task(), "dp1", state, batches, f"{tmp_path}/{{rows}}")
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""
    run = [sys.executable, "-c", code]
    grown = int(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    output_bytes = (tmp_path / "600000/y.npy").stat().st_size
    assert output_bytes > 600_000 * 64 * 4
    assert grown < 0.3 * output_bytes


# ---- of a run ----


@pytest.fixture(scope="module")
def text_run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    options = [
        "--corpus", str(text), "--hidden-size", "8", "--embed-size", "8", "--num-layers", "2",
        "--optimizer.warmup-steps", "0", "--train.num-steps", "3", "--train.out-dir", str(folder),
    ]  # fmt: skip
    assert api.command("train", "lm", *options) == 0
    return jaxpar.load_run(folder)


@pytest.mark.full
def test_a_text_that_was_named_from_another_folder_is_found(text, tmp_path, monkeypatch):
    monkeypatch.chdir(text.parent)
    adam = jaxpar.OptimizerConfig(warmup_steps=0)
    sizes = {"vocab_size": None, "num_words": None}
    task = dataclasses.replace(TASK, corpus=text.name, optimizer=adam, **sizes)
    train = jaxpar.TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    loss = jaxpar.fit(task, "dp1", train, quiet=True).evaluations["valid"].loss
    monkeypatch.chdir(tmp_path)
    run = jaxpar.load_run("run")
    assert run.setup.task.corpus == str(text)
    assert run.evaluate("valid").loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.full
def test_progress_is_shown_unless_it_is_quiet(text_run, capsys):
    for quiet in (False, True):
        text_run.predict("valid", quiet=quiet)
        assert ("predicting" in capsys.readouterr().err) == (not quiet)


@pytest.mark.full
def test_a_run_predicts_its_splits_and_other_texts(text_run, text, tmp_path, capsys, caplog):
    found = text_run.predict("valid", quiet=True)["log_likelihood"]
    loss = text_run.evaluate("valid").loss
    np.testing.assert_allclose(-np.nanmean(found), loss, rtol=1e-5)
    (tmp_path / "other.txt").write_text((text / "valid.txt").read_text())
    other = text_run.predict(str(tmp_path / "other.txt"), quiet=True)["log_likelihood"]
    np.testing.assert_array_equal(other, found)
    assert caplog.text == ""
    (tmp_path / "new.txt").write_text("zebra " + (text / "valid.txt").read_text() + "zebra\n")
    assert len(text_run.batches(str(tmp_path / "new.txt")).arrays["tokens"]) == len(found) + 3
    assert f"2 of the {len(found) + 3} tokens of {tmp_path}/new.txt are not in the" in caplog.text
    one = text_run.predict("valid", quiet=True, batch_size=1)["log_likelihood"]
    np.testing.assert_allclose(one[:3], found[:3], rtol=1e-4)  # the first of 16 streams
    out = tmp_path / "out"
    words = [str(text_run.folder), "valid", "--mesh", "dp2pp2", "--out", str(out)]
    assert api.command("predict", *words) == 0
    assert f"{out}/log_likelihood.npy: float32[{len(found)}]" in capsys.readouterr().out
    np.testing.assert_allclose(np.load(out / "log_likelihood.npy"), found, rtol=1e-5, atol=1e-6)


CALLS = {
    "a field of the model": (
        lambda run: run.predict("test", num_layers=2),
        r"num_layers=2 is not a size of the data of task LM\nFix: use one of .*'batch_size', 'seq_len'",
    ),
    "a kind": (lambda run: run.predict("test", layer="gru"), "layer='gru' is not a size of the data"),
    "a size in words": (lambda run: run.predict("test", seq_len="8"), "seq_len='8': must be a whole number"),
    "a number": (lambda run: run.predict(3), r"data=3 \(int\): must be a split, suc"),
    "no file": (
        lambda run: run.predict("nowhere.txt"),
        r"nowhere\.txt is neither a split \(train, valid, test\) nor a file\.\nFix: give one",
    ),
    "into a number": (lambda run: run.predict("test", 3), r"out=3 \(int\): must be a path"),
    "no targets": (
        lambda run: run.predict(jaxpar.ArrayBatches({"inputs_BT": np.zeros((16, 32), np.int32)}, 16)),
        "the batch is a dict of inputs_BT, weight, those of task LM are a Batch of inputs_BT, targets_BT",
    ),
    "a mesh of a number": (lambda run: jaxpar.load_run(str(run.folder), 4), r"mesh=4 \(int\): must be"),
    "a run of a number": (lambda run: jaxpar.load_run(3), r"folder=3 \(int\): must be a path"),
    "a run without a name": (lambda run: jaxpar.load_run(""), "folder='' names nothing\nFix: give a path"),
    "a start without a name": (lambda run: jaxpar.Start(""), "start='' names nothing\nFix: give a path"),
    "an export to a number": (lambda run: run.export(3), r"path=3 \(int\): must be a path"),
    "words of a number": (lambda run: run.vocabulary.encode(5), r"text=5 \(int\): must be"),
}  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_of_a_run_is_told_at_once(name, text_run):
    call, message = CALLS[name]
    with pytest.raises((ValueError, OSError), match=message) as raised:
        call(text_run)
    assert str(raised.value).count("\n") <= 2


@dataclasses.dataclass(frozen=True)
class Wide(Rows):
    """A size of the data, and one of the model; batches of three splits."""

    width: int = 4

    def make_model(self, rngs):
        model = Net(rngs)
        model.more = nnx.Param(jnp.zeros(self.width))
        return model

    def make_batches(self, split, seed=None):
        arrays = {"x": super().make_batches(split).arrays["x"][:16]}
        return {name: jaxpar.ArrayBatches(arrays, self.batch_size, seed) for name in SPLITS}[split]


SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def wide_run(tmp_path_factory):
    train = jaxpar.TrainConfig(num_steps=1, out_dir=str(tmp_path_factory.mktemp("wide") / "run"))
    return jaxpar.load_run(jaxpar.fit(Wide(), "dp1", train, quiet=True).out_dir)


def test_a_size_that_changes_the_model_is_refused(wide_run):
    with pytest.raises(
        ValueError, match=r"'width': 5\} changes the parameters of the model\nFix: use"
    ):
        wide_run.predict("test", batch_size=4, width=5)
    task = wide_run.in_batches(batch_size=4).setup.task
    assert (task.batch_size, task.width) == (4, 4)


@pytest.mark.full
def test_images_have_probabilities():
    pytest.importorskip("sklearn")
    task = Digits(channels=(4, 4), widths=(8,), batch_size=64)
    one, many = (
        predicted(task, parallel, task.make_batches("test"))["probabilities"]
        for parallel in ("dp1", Parallel(MeshConfig(data=2, tensor=2)))
    )
    assert len(one) == len(task.make_batches("test").arrays["label"])
    np.testing.assert_allclose(one.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(one, many, rtol=1e-4, atol=1e-6)


def test_a_split_that_is_not_there_is_refused():
    with pytest.raises(
        ValueError, match=r"there is no split 'tset'\.\nFix: use one of train, valid, test"
    ):
        TASK.make_batches("tset")


def test_a_file_for_a_task_that_knows_splits_alone_is_refused(wide_run, monkeypatch):
    assert wide_run.batches("test").batch_size == 8
    message = r"data='new\.csv' is no split of task Wide \(KeyError: .*\)\.\nFix: use train"
    with pytest.raises(ValueError, match=message):
        wide_run.batches("new.csv")
    task_type = type(wide_run.setup.task)
    monkeypatch.setattr(task_type, "make_batches", lambda self, split, seed=None: {}[split])
    with pytest.raises(KeyError):  # a mistake of the task
        wide_run.batches("valid")


# ---- what is refused ----


def of_model(method):
    """A task whose model predicts so."""

    class Wrong(Net):
        predict = method

    @dataclasses.dataclass(frozen=True)
    class Other(Rows):
        def make_model(self, rngs):
            return Wrong(rngs)

    return Other()


REFUSED = {
    "an array": (lambda self, y, batch, at: y, r"`predict` of Wrong returns an array of shape \[8, 4\]"),
    "nothing": (lambda self, y, batch, at: None, r"returns nothing\.\nFix: return a dict of arrays by name"),
    "none in it": (lambda self, y, batch, at: {"y": None}, r"returns nothing in its dict\.\nFix"),
    "a sum": (
        lambda self, y, batch, at: {"y": jnp.sum(y)},
        r"an array of shape \[\] as 'y' for 8 rows\.\nFix: return arrays \[rows, \.\.\.\]",
    ),
    "a number of rows": (
        lambda self, y, batch, at: {"y": y.reshape(8, 4)},
        r"`predict` fails for fewer rows or time steps than a batch has: .*\nFix: take sizes from its",
    ),
    "rows that mix": (
        lambda self, y, batch, at: {"a": y, "p": jax.nn.softmax(y, axis=0)},
        r"`predict` mixes the rows of a batch: .* changes its output 'p' in other rows",
    ),
    "other arguments": (
        lambda self, y: {"y": y}, r"(?s)model Wrong: predict.*write predict\(self, y, batch, at\)",
    ),
}  # fmt: skip


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_prediction_is_refused(name):
    method, message = REFUSED[name]
    task = of_model(method)
    with pytest.raises(ValueError, match=message):
        predicted(task, "dp2", task.make_batches("test"))


def test_a_model_that_does_not_say_what_it_predicts_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Other(Rows):
        def make_model(self, rngs):
            return Silent(rngs)

    with pytest.raises(ValueError, match=r"model Silent has no method predict"):
        predicted(Other(), "dp1", Rows().make_batches("test"))


def test_a_state_of_training_is_not_gone_on_with():
    class Going(Own):
        def batch(self, step, rows=slice(None)):
            return {**super().batch(step, rows), "starts": False}

    class Carrying(Rows):
        def example_batch(self):
            return Going().batch(0)

    with pytest.raises(ValueError, match="starts must be True in the first batch"):
        predicted(Carrying(), "dp1", Going())
