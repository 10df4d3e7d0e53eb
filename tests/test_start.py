"""The law: weights that leave a run and come into another are the same numbers, wherever either lies."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from lib import api
from lib.models import Regress

from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Report,
    Start,
    TrainConfig,
    fit,
    init_state,
    lm,
    load_run,
    make_train_step,
)

pytestmark = pytest.mark.usefixtures("compile_once")

ONE = Parallel(MeshConfig(devices=(0,)))
ADAM = OptimizerConfig(learning_rate=0.01, warmup_steps=0)
MIXED = Regress(kinds=("gru", "dense", "gru", "cell", "dense"))
FROZEN = dataclasses.replace(MIXED, freeze="outputs")
TEXT = lm.LM(num_layers=3, hidden_size=8, embed_size=4, batch_size=8, seq_len=4, optimizer=ADAM)
SIZED = dataclasses.replace(TEXT, num_words=11, vocab_size=384)


def on(mesh, placement="balanced", num_groups=1):
    schedule = "1f1b" if num_groups == 1 else "interleaved"
    pipeline = PipelineConfig(placement=placement, schedule=schedule, num_groups=num_groups)
    return Parallel(mesh, dataclasses.replace(pipeline, num_microbatches=2))


# Task, where it is written, and where it is read.
LAYOUTS = {
    "empty slots": (MIXED, on("pp2", (3, 2)), on("dp2pp2", (1, 4))),
    "interleaved": (MIXED, on("pp2", (2, 1, 1, 1), 2), Parallel("dp2", fsdp=True)),
    "frozen": (FROZEN, on("pp2tp2", (4, 1)), ONE),
    "words": (SIZED, on("pp2tp2", (1, 2)), on("tp2")),
}


def tensors_of(task, parallel=ONE):
    """Every tensor of a first state, by its name."""
    return api.params_of(task, parallel, init_state(task, parallel, seed=1))


def first_state(task, parallel, start):
    state, _ = api.begin_with(task, parallel, start, TrainConfig(num_steps=4))
    return state


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def write(path, task, parallel, **options):
    return api.export(path, task, parallel, init_state(task, parallel, seed=1), **options)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    "name",
    [
        "empty slots",
        "frozen",
        *(pytest.param(n, marks=pytest.mark.more) for n in ("interleaved", "words")),
    ],
)
def test_weights_are_the_same_numbers_wherever_they_lie(name, tmp_path):
    task, source, target = LAYOUTS[name]
    path = tmp_path / "model.safetensors"
    assert write(path, task, source) == [path]
    tensors = safetensors.numpy.load_file(path)
    assert_same(tensors, tensors_of(task, source))
    drawn = init_state(task, target)
    state = first_state(task, target, Start(str(path), ignore=LEFT if task is SIZED else ()))
    api.audit(state)
    if task is SIZED:
        left = api.params_of(task, target, drawn)
        tensors |= {n: a for n, a in left.items() if re.fullmatch(LEFT[0], n)}
    assert_same(api.params_of(task, target, state), tensors)
    # Stages that have fewer layers than others have no numbers instead.
    api.save(tmp_path / "checkpoints", task, target, init_state(task, target, seed=1))
    expected = api.restored(tmp_path / "checkpoints", task, target)
    for one, other, drawn_leaf in zip(
        *(jax.tree.leaves_with_path(each.params) for each in (state, expected, drawn)), strict=True
    ):
        (where, leaf), (_, like), (_, place) = one, other, drawn_leaf
        assert (leaf.shape, leaf.sharding) == (place.shape, place.sharding), where
        if task is not SIZED:
            np.testing.assert_array_equal(leaf, like)


LEFT = (r"(embedding|head)\..*",)  # nobody knows the words of a task without a text


@pytest.mark.full
def test_many_tensors_are_in_several_files_with_an_index(tmp_path):
    with api.files_of_weights_hold(4000):
        *files, index = write(tmp_path / "model.safetensors", MIXED, on("pp2", (3, 2)))
    number = len(files)
    names = [f"model-{n:05}-of-{number:05}.safetensors" for n in range(1, number + 1)]
    assert number > 2
    assert [file.name for file in files] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, index.name]
    described = json.loads(index.read_text())
    expected, found = tensors_of(MIXED), {}
    for file in files:
        tensors = safetensors.numpy.load_file(file)
        assert sum(array.nbytes for array in tensors.values()) <= 4000 or len(tensors) == 1
        assert {described["weight_map"][name] for name in tensors} == {file.name}
        found |= tensors
    assert_same(found, expected)
    assert described["metadata"]["total_size"] == sum(a.nbytes for a in expected.values())
    assert described["weight_map"].keys() == expected.keys()
    for path in (index, tmp_path):
        assert_same(api.tensors_in(path), expected)
    name = min(described["weight_map"])
    wrong = {
        r"is not an index of safetensors files": {"weight_map": {name: "../model"}},
        r"does not belong to its files: they differ in ": {"weight_map": {name: names[0]}},
        r"cannot read the weights .*/none": {"weight_map": {name: "none"}},
    }
    for message, content in wrong.items():
        index.write_text(json.dumps(content))
        with pytest.raises((ValueError, OSError), match=message):
            api.tensors_in(index)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        ValueError, match=r"holds both model\.safetensors and model\.safetensors\.index"
    ):
        api.tensors_in(tmp_path)


def test_numbers_of_16_bits_are_asked_for(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, MIXED, on("pp2", (3, 2)), dtype="bfloat16")
    expected = {name: a.astype(ml_dtypes.bfloat16) for name, a in tensors_of(MIXED).items()}
    assert_same(safetensors.numpy.load_file(path), expected)
    state, rows = api.begin_with(MIXED, ONE, Start(str(path)))
    assert {note for *_, note in rows} == {"bfloat16 as float32"}
    scale = api.params_of(MIXED, ONE, state)["scale"]
    np.testing.assert_array_equal(scale, expected["scale"].astype(np.float32))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model of one's own on a pipeline, with empty slots."""
    out_dir = tmp_path_factory.mktemp("runs") / "run"
    return fit(MIXED, on("pp2", (3, 2)), train(out_dir), quiet=True)


def train(out_dir, num_steps=2):
    return TrainConfig(num_steps=num_steps, log_every=2, out_dir=str(out_dir))


class Notes(Report):
    """What it hears of weights."""

    def __init__(self):
        self.rows = []

    def start(self, taken):
        self.rows += taken.to_rows()


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    "optimizer", [pytest.param(ADAM, marks=pytest.mark.more), MIXED.optimizer], ids=lambda o: o.name
)
def test_a_run_that_begins_with_weights_takes_the_steps_of_a_state_that_has_them(
    run, tmp_path, optimizer
):
    """By hand, with another optimizer, and by a run and by its file."""
    task, parallel = dataclasses.replace(MIXED, optimizer=optimizer), on("dp2pp2", (1, 4))
    loaded = load_run(run.out_dir, "dp2pp2")
    loaded.export(tmp_path / "model.safetensors")
    start = Start(str(tmp_path / "model.safetensors"))
    state, losses = first_state(task, parallel, start), []
    step, batches = make_train_step(task, parallel, train(None)), task.make_batches("train", 0)
    for number in range(2):
        state, metrics = step(state, batches.batch(number))
        losses.append(float(metrics.loss))
    for number, start in enumerate((run.out_dir, tmp_path / "model.safetensors")):
        folder = tmp_path / str(number)
        result = fit(task, parallel, train(folder), start=start, quiet=True)
        assert result.losses == losses
        assert result.first_step == 0


@pytest.mark.full
def test_parts_are_renamed_left_out_and_new(run, tmp_path):
    """Fewer layers, another order of kinds, another head, one part frozen; told before the first step."""
    kinds = ("dense", "gru", "cell", "cell")
    task = Regress(kinds=kinds, freeze="inputs", optimizer=ADAM)
    start = Start(
        str(run.out_dir),
        rename=(
            (r"layers\.0\.(.*)", r"layers.1.\1"),
            (r"layers\.1\.(.*)", r"layers.0.\1"),
            (r"layers\.3\.(.*)", r"layers.2.\1"),
        ),
        ignore=(r"layers\.[24]\..*", r"outputs\..*"),
    )
    notes = Notes()
    result = fit(task, on("pp2"), train(tmp_path / "run", 1), start=start, report=notes)
    old = api.params_of(MIXED, ONE, load_run(run.out_dir).state)
    new = api.params_of(task, ONE, first_state(task, ONE, start))
    drawn = api.params_of(task, ONE, init_state(task, ONE))
    for name, before in (
        ("inputs.kernel", "inputs.kernel"),
        ("scale", "scale"),
        ("layers.1.w_x", "layers.0.w_x"),
        ("layers.0.kernel", "layers.1.kernel"),
    ):
        np.testing.assert_array_equal(new[name], old[before], err_msg=name)
    np.testing.assert_array_equal(new["outputs.kernel"], drawn["outputs.kernel"])
    assert not np.array_equal(new["outputs.kernel"], old["outputs.kernel"])
    cells = [name for name in old if name.startswith("layers.3.")]
    assert cells
    for name in cells:
        taken, not_there = name.replace("layers.3.", "layers.2."), name
        np.testing.assert_array_equal(new[taken], old[name], err_msg=name)
        np.testing.assert_array_equal(new[not_there], drawn[not_there], err_msg=name)
    assert len(result.losses) == 1
    told = {(what, name): note for what, name, _, note in notes.rows}
    assert told["taken", "layers.1.w_x"] == "was layers.0.w_x"
    assert told["taken", "scale"] == ""
    assert told["new", "outputs.kernel"] == ""
    assert told["ignored", "layers.4.kernel"] == ""
    assert told["ignored", "outputs.kernel"] == ""
    assert {what for what, _ in told} == {"taken", "new", "ignored"}


@dataclasses.dataclass(frozen=True)
class Copies(Regress):
    """Its optimizer keeps where the parameters began, and its run evaluates that."""

    def make_optimizer(self, num_steps):
        def init(params):
            return jax.tree.map(jnp.copy, params)

        def update(updates, state, params=None):
            return jax.tree.map(lambda g: -0.01 * g, updates), state

        return optax.GradientTransformation(init, update)

    def evaluated_params(self, params, opt_state):
        return opt_state[-1] if isinstance(opt_state, tuple) else opt_state


@pytest.mark.full
def test_the_optimizer_begins_with_the_weights_too(run):
    state = first_state(Copies(kinds=MIXED.kinds), ONE, Start(str(run.out_dir)))
    kept = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    for own, copied in zip(jax.tree.leaves(state.params), kept, strict=True):
        np.testing.assert_array_equal(own, copied)


@pytest.mark.full
def test_what_is_evaluated_is_exported(tmp_path, run):
    """A run of such a task is not started from: its file is."""
    task = Copies(kinds=MIXED.kinds)
    begun = fit(task, ONE, train(tmp_path / "run"), start=run.out_dir, quiet=True)
    with pytest.raises(
        ValueError, match=r"evaluates other parameters than it trains\.\nFix: start"
    ):
        api.begin_with(MIXED, ONE, Start(str(begun.out_dir)))
    loaded = load_run(begun.out_dir)
    [path] = loaded.export(tmp_path / "model.safetensors")
    load_run(run.out_dir).export(tmp_path / "before.safetensors")
    found = safetensors.numpy.load_file(path)
    assert_same(found, safetensors.numpy.load_file(tmp_path / "before.safetensors"))


@pytest.mark.full
def test_a_run_that_ends_before_its_first_checkpoint_begins_with_the_same_weights(run, tmp_path):
    task, out_dir = dataclasses.replace(MIXED, optimizer=ADAM), tmp_path / "new"
    start = Start(os.path.relpath(run.out_dir), ignore=("scale",))
    first = fit(task, ONE, train(out_dir), start=start, quiet=True)
    shutil.rmtree(out_dir / "checkpoints")
    notes = Notes()
    again = fit(task, ONE, train(out_dir), resume=True, report=notes)
    assert again.losses == first.losses
    assert ("ignored", "scale") in {row[:2] for row in notes.rows}
    notes = Notes()
    more = fit(task, ONE, train(out_dir, 3), resume=True, report=notes)
    assert more.first_step == 2
    assert notes.rows == []
    shutil.rmtree(out_dir / "checkpoints")  # and what it began with is known still
    assert fit(task, ONE, train(out_dir), resume=True, quiet=True).losses == first.losses


OTHER = "a zebra ran to the mat\nthe cat sat\n"


@pytest.mark.more
@pytest.mark.parametrize("mesh", ["dp1", "pp2tp2"])
def test_the_rows_of_words_that_both_texts_have_are_taken(mesh, text, tmp_path):
    """The others of the new text are drawn; and what was of the old one alone is told."""
    folder = tmp_path / "other"
    folder.mkdir()
    for split, times in (("train", 50), ("valid", 5), ("test", 5)):
        (folder / f"{split}.txt").write_text(OTHER * times)
    first = fit(
        dataclasses.replace(TEXT, corpus=str(text)), ONE, train(tmp_path / "run"), quiet=True
    )
    task, parallel = dataclasses.replace(TEXT, corpus=str(folder)).resolve(), on(mesh)
    old = load_run(first.out_dir)
    [path] = old.export(tmp_path / "model.safetensors")
    old_words, words = old.vocabulary.words, task.read_text().vocabulary.words
    known = [word for word in words if word in old_words]
    assert {"the", "<eos>"} < {*known}
    assert {*words} - {*known} == {"zebra"}
    drawn = api.params_of(task, parallel, init_state(task, parallel))
    there = api.params_of(old.setup.task, ONE, old.state)
    for source in (first.out_dir, path):
        state, rows = api.begin_with(task, parallel, Start(str(source)))
        assert {note for *_, note in rows if note} == {
            f"{len(known)} of its {len(old_words)} words, 1 are new"
        }
        here = api.params_of(task, parallel, state)
        assert_same(
            *({n: a for n, a in each.items() if n.startswith("layers")} for each in (here, there))
        )
        for name, axis in (("embedding.table", 0), ("head.kernel", 1), ("head.bias", 0)):
            for row, word in enumerate([*words, ""]):  # then what pads them
                is_known = word in known
                like = there if is_known else drawn
                other = old_words.index(word) if is_known else row
                expected = np.take(like[name], other, axis)
                np.testing.assert_array_equal(
                    np.take(here[name], row, axis), expected, err_msg=word
                )


# A model that is too big to be held twice, in each of two processes.
WIDE = """
import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpar


class Dense(nnx.Module):
    def __init__(self, width, *, rngs):
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (width, width)))

    def __call__(self, carry, x, at):
        return carry, x + jnp.tanh(x @ self.w[...])


class Model(nnx.Module):
    time_major = False

    def __init__(self, width, rngs):
        self.layers = jaxpar.Stack([lambda rngs: Dense(width, rngs=rngs)] * 8, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        return jaxpar.Sums(jnp.sum((y - 1) ** 2), jnp.float32(y.size))

    def predict(self, y, batch, at):
        return {"y": y}


@dataclasses.dataclass(frozen=True)
class Wide(jaxpar.Task):
    width: int = 2048
    optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig(warmup_steps=0)

    def make_model(self, rngs):
        return Model(self.width, rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).standard_normal((16, self.width)).astype(np.float32)
        return jaxpar.ArrayBatches({"x": x}, 8, seed)
"""
WORK = """
import re
import sys

import jax
import jaxpar
from lib import api
from wide import Wide

def memory(name):
    status = open("/proc/self/status").read()
    return int(re.search(rf"{name}:\\s+(\\d+)", status)[1]) * 1024

def train(folder, width):
    train = jaxpar.TrainConfig(num_steps=1, out_dir=folder)
    jaxpar.fit(Wide(width), "pp2", train, quiet=True)
    return ()  # its step has gradients beside the state

def use(folder, width):
    run = jaxpar.load_run(folder, "pp2")
    run.predict("test", folder + "/predicted", quiet=True)
    yield memory("VmHWM")
    run.export(folder + "/model.safetensors")
    yield memory("VmHWM")

def start(source, width):
    state = api.begin_with(Wide(width), "pp2", jaxpar.Start(source))
    yield memory("VmHWM")

api.start_processes()
work, *file = sys.argv[1].partition("/")
for folder, width in (("small", 16), ("wide", 2048)):
    before = memory("VmRSS")  # of the wide one: with all that is imported and compiled once
    done = {"train": train, "use": use, "start": start}[work](folder + "".join(file), width)
    peaks = [peak - before for peak in done]
print(*peaks)
"""
STATE_BYTES = 3 * 8 * 2048**2 * 4  # parameters, and two moments of each


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory of a process")
def test_no_process_holds_what_two_share(tmp_path):
    """What is trained by two is predicted with, exported, and started from by two."""
    (tmp_path / "wide.py").write_text(WIDE)
    tests = Path(__file__).parent
    own = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"}

    def run(what):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WORK, what], env=environ,
                stdout=subprocess.PIPE, text=True, cwd=tmp_path,
            )
            for environ in api.environments(2, 1, own)
        ]  # fmt: skip
        found = [process.communicate(timeout=300)[0] for process in processes]
        return [[int(peak) / STATE_BYTES for peak in printed.split()] for printed in found]

    run("train")
    for what in ("use", "start", "start/model.safetensors"):
        for peaks in run(what):
            assert peaks
            assert max(peaks) < 0.75, (what, peaks)
