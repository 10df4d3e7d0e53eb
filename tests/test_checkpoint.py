"""The law: nothing lost. A run that stops goes on where it was, on the same or another mesh."""

import dataclasses
import errno
import functools
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api
from lib.laws import more
from lib.runs import validation_losses
from orbax.checkpoint import v1 as orbax

from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
    init_state,
    make_train_step,
)
from jaxpar.lm import LM, Batch
from jaxpar.nn import named_param

# Another mesh sums in another order: float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5


@dataclasses.dataclass(frozen=True)
class Toy(LM):
    """Of another name."""


TASK = Toy(
    num_layers=8, hidden_size=16, embed_size=16, vocab_size=64, dropout=0.1, batch_size=8, seq_len=4,
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
)  # fmt: skip


TRAIN = TrainConfig(num_steps=30)


def make_setup(mesh=(1, 1, 1), placement="even", task=TASK, num_groups=1, **layout):
    """A task and its layout on devices."""
    num_devices = int(np.prod(mesh))
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    schedule = "1f1b" if num_groups == 1 else "interleaved"
    pipeline = PipelineConfig(schedule, num_chunks=4, num_groups=num_groups, placement=placement)
    return task, Parallel(MeshConfig(*mesh, devices=devices), pipeline, **layout)


def batch_of(step, task):
    shape = (2, task.batch_size, task.seq_len)
    tokens = np.random.default_rng(step).integers(0, task.vocab_size, shape, np.int32)
    return Batch(*tokens, starts=step == 0)


def assert_bit_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@functools.cache
def step_of(setup):
    return make_train_step(*setup, TRAIN)


def leaves_of(state):
    """Host copies of all arrays, as they are on the devices."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


class Saved(NamedTuple):
    """A run of some steps.

    Attributes:
      folder: with the checkpoint after two steps.
      arrays: of the state at that time, by the names of a checkpoint.
      losses: of the next steps.
    """

    folder: Path
    arrays: dict[str, np.ndarray]
    losses: list[float]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """setup -> `Saved`: each run once."""
    runs = {}

    def run_once(setup):
        if setup not in runs:
            folder = tmp_path_factory.mktemp("run") / "checkpoints"
            state = init_state(*setup)
            for number in range(2):
                state, _ = step_of(setup)(state, batch_of(number, setup[0]))
            arrays = api.stored(*setup, state)
            with api.saving(folder, *setup, state):
                # The state is donated to the third step while it is being written.
                losses = next_losses(setup, state)
            runs[setup] = Saved(folder, arrays, losses)
        return runs[setup]

    return run_once


def next_losses(setup, state):
    """Of the 20 steps after the second."""
    losses = []
    for number in range(2, 22):
        state, metrics = step_of(setup)(state, batch_of(number, setup[0]))
        losses.append(float(metrics.loss))
    return losses


SMALL = dataclasses.replace(TASK, num_layers=2)


@pytest.fixture
def small():
    """A state that costs nothing, and its setup."""
    setup = make_setup(task=SMALL)
    return init_state(*setup), setup


def newest(folder, setup):
    return int(api.restored(folder, *setup).step)


def at_step(state, step):
    return dataclasses.replace(state, step=jax.device_put(jnp.int32(step), state.step.sharding))


ONE = make_setup()
DATA_ONLY = make_setup((8, 1, 1))
STAGES_ONLY = make_setup((1, 8, 1))
ALL_AXES = make_setup((2, 2, 2))
ALL_FSDP = make_setup((2, 2, 2), fsdp=True)
ALL_SHARDED = make_setup((2, 2, 2), update="sharded")
UNEVEN = make_setup((1, 4, 1), (3, 2, 2, 1))
UNEVEN_HOST = make_setup((2, 2, 2), (3, 5), update="host")
INTERLEAVED = make_setup((2, 2, 2), (3, 2, 2, 1), num_groups=2)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ALL_AXES, ONE),
        more(ALL_AXES, DATA_ONLY),
        more(ALL_AXES, STAGES_ONLY),
        more(ALL_AXES, UNEVEN),
        (ALL_AXES, ALL_SHARDED),
        (ONE, ALL_AXES),
        more(DATA_ONLY, ALL_AXES),
        more(STAGES_ONLY, ALL_AXES),
        (ONE, ALL_FSDP),
        more(UNEVEN, ONE),
        (UNEVEN, INTERLEAVED),
        more(INTERLEAVED, UNEVEN),
        (ALL_SHARDED, UNEVEN),
        more(ALL_FSDP, ONE),
        (ALL_SHARDED, UNEVEN_HOST),
        (UNEVEN_HOST, ONE),
    ],
)
def test_goes_on_on_another_mesh(run, before, after):
    saved = run(before)
    state = api.restored(saved.folder, *after)
    api.audit(state)
    assert_bit_equal(api.stored(*after, state), saved.arrays)
    np.testing.assert_allclose(next_losses(after, state), saved.losses, rtol=RELATIVE_ERROR)


@pytest.mark.rows(1)
@pytest.mark.parametrize("setup", [ONE, ALL_FSDP, ALL_SHARDED, UNEVEN, UNEVEN_HOST, INTERLEAVED])
def test_goes_on_bit_for_bit_on_the_same_mesh(run, setup):
    saved = run(setup)
    state = api.restored(saved.folder, *setup)
    api.audit(state)
    assert_bit_equal(api.stored(*setup, state), saved.arrays)
    assert next_losses(setup, state) == saved.losses


def test_a_state_comes_back_as_it_was_where_stages_have_fewer_layers_than_others(tmp_path):
    state = init_state(*UNEVEN)
    api.save(tmp_path, *UNEVEN, state)
    assert_bit_equal(leaves_of(api.restored(tmp_path, *UNEVEN)), leaves_of(state))


@pytest.mark.more
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw", "weight_decay": 0.1},
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.9},
        {"name": "rmsprop"},
    ],
)
def test_every_optimizer_comes_back(tmp_path, optimizer):
    setup = make_setup(task=dataclasses.replace(SMALL, optimizer=OptimizerConfig(**optimizer)))
    state = jax.tree.map(lambda a: a + jnp.ones_like(a), init_state(*setup))
    api.save(tmp_path, *setup, state)
    restored = api.restored(tmp_path, *setup)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_bit_equal(leaves_of(restored), leaves_of(state))


def test_stored_arrays_have_readable_names_and_no_empty_slots():
    arrays = api.stored(*UNEVEN, init_state(*UNEVEN))
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes["params/layers/lstm/w_x"] == (8, 16, 4, 16)
    assert shapes["opt_state/0/mu/layers/lstm/w_x"] == (8, 16, 4, 16)
    assert shapes["carry/lstm/h_BH"] == (8, 8, 16)
    assert shapes["step"] == ()


@pytest.mark.rows(2)
@pytest.mark.parametrize("num_layers", [8, 7])
@pytest.mark.parametrize("mesh", [(1, 4, 1), (1, 4, 2), (2, 4, 1)])
def test_no_device_holds_more_for_a_checkpoint_than_for_a_step(mesh, num_layers):
    placement = (num_layers - 5, 2, 2, 1)
    setup = make_setup(mesh, placement, dataclasses.replace(TASK, num_layers=num_layers))
    state = init_state(*setup)
    leaves = jax.tree.leaves_with_path(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    held = {
        jax.tree_util.keystr(path, simple=True, separator="/"): api.device_bytes(leaf)
        for path, leaf in leaves
    }
    stored = api.stored_bytes(*setup, state)
    assert stored.keys() == held.keys()
    for name, num_bytes in stored.items():
        assert num_bytes <= held[name], name


def test_the_task_is_stored_as_text(tmp_path, small):
    state, setup = small
    api.save(tmp_path, *setup, at_step(state, 3))
    stored = json.loads((tmp_path / "3" / "checkpoint.json").read_text())
    assert stored["task"] == "Toy"
    optimizer = dataclasses.asdict(setup[0].optimizer)
    fields = dataclasses.asdict(setup[0]) | {
        f"optimizer.{key}": optimizer[key] for key in optimizer
    }
    del fields["optimizer"]
    assert stored["fields"] == {**fields, "train.clip_norm": 1.0, "train.seed": 0}
    assert stored["optimizer"] == optimizer


def test_the_newest_are_kept(tmp_path, small):
    state, setup = small
    states = [at_step(state, step) for step in (2, 4, 6, 10)]
    api.save(tmp_path, *setup, *states, keep=2)
    assert newest(tmp_path, setup) == 10
    api.save(tmp_path, *setup, at_step(state, 11), keep=2)
    assert {each.name for each in tmp_path.iterdir()} == {"10", "11"}
    assert int(api.restored(tmp_path, *setup, step=10).step) == 10


def test_half_written_checkpoints_do_not_count(tmp_path, small):
    state, setup = small
    api.save(tmp_path, *setup, at_step(state, 3), keep=2)
    killed = tmp_path / "4.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "3", killed)
    assert api.whole_steps(tmp_path, SMALL) == [3]
    assert newest(tmp_path, setup) == 3
    assert killed.exists()  # it may be another process's, still at work
    api.save(tmp_path, *setup, at_step(state, 5), keep=2)
    assert api.whole_steps(tmp_path, SMALL) == [3, 5]
    assert not killed.exists()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, place, bit=0):
    """Changes a bit at a place from 0, the first byte, to 1."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGES = {
    "half of the data": (lambda folder: cut(largest(folder)), r"d/\w+ has \d+ of \d+ bytes"),
    "no data": (lambda folder: largest(folder).unlink(), r"d/\w+ is missing"),
    "half of the manifest": (
        lambda folder: cut(folder / "state/manifest.ocdbt"), r"manifest\.ocdbt has \d+ of \d+ bytes",
    ),
    "half of the checksums": (
        lambda folder: cut(folder / "checkpoint.json"), r"checkpoint\.json is not what was written",
    ),
    "no checksums": (
        lambda folder: (folder / "checkpoint.json").unlink(), r"checkpoint\.json is missing",
    ),
    "other checksums": (
        lambda folder: flip(folder / "checkpoint.json", 1 / 2), r"checkpoint\.json is not what was writ",
    ),
    "a bit of the data": (
        lambda folder: flip(largest(folder), 1 / 2), r"d/\w+ is not what was written",
    ),
    "a bit of the description": (
        lambda folder: flip(folder / "state/_METADATA", 1 / 2), r"state/_METADATA is not what was written",
    ),
    "a bit of the metadata": (
        lambda folder: flip(folder / "_CHECKPOINT_METADATA", 1 / 2), "_CHECKPOINT_METADATA is not what was",
    ),
    "half of the metadata": (
        lambda folder: cut(folder / "_CHECKPOINT_METADATA"), r"_CHECKPOINT_METADATA has \d+ of \d+ bytes",
    ),
    "the state alone": (
        lambda folder: [p.unlink() for p in folder.iterdir() if p.is_file()],
        r"checkpoint\.json is missing",
    ),
    "nothing": (shutil.rmtree, None),
}  # fmt: skip


def test_a_checkpoint_that_the_disk_cannot_read_is_skipped(tmp_path, small, monkeypatch, caplog):
    state, setup = small
    api.save(tmp_path, *setup, at_step(state, 3), at_step(state, 8), keep=3)
    path, opened = largest(tmp_path / "8"), Path.open

    def open_others(file, mode="r", **options):
        if file == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return opened(file, mode, **options)

    monkeypatch.setattr(Path, "open", open_others)
    assert newest(tmp_path, setup) == 3
    said = f"skipped the damaged checkpoint {tmp_path}/8: [Errno 5] Input/output error: '{path}'"
    assert caplog.messages[-1] == said


@pytest.mark.rows(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, small, damage, caplog):
    state, setup = small
    api.save(tmp_path, *setup, at_step(state, 3), at_step(state, 8), keep=3)
    change, message = DAMAGES[damage]
    change(tmp_path / "8")

    if "a bit of the" not in damage:  # that is not looked for in passing
        assert api.whole_steps(tmp_path, SMALL) == [3]
    assert newest(tmp_path, setup) == 3
    if message is not None:
        assert re.search(
            rf"^skipped the damaged checkpoint {tmp_path}/8: .*{message}", caplog.messages[-1]
        )
        with pytest.raises(
            FileNotFoundError,
            match=rf"no complete checkpoint of step 8; 8: .*{message}.*\nFix: use one of \[3\]",
        ):
            api.restored(tmp_path, *setup, step=8)
    # The run comes to this step again.
    api.save(tmp_path, *setup, at_step(state, 7), at_step(state, 8), keep=3)
    assert api.whole_steps(tmp_path, SMALL) == [3, 7, 8]
    aside = [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()]
    assert aside == []


def test_a_checkpoint_knows_its_step_and_its_run(tmp_path, small, caplog):
    (state, setup), one = small, tmp_path / "one"
    for run, step in (("one", 3), ("other", 5)):
        api.save(tmp_path / run, *setup, at_step(state, step), keep=2, run=run)
    shutil.copytree(one / "3", one / "8")  # renamed
    assert int(api.restored(one, *setup, run="one").step) == 3
    assert re.search(r"one/8: it is the checkpoint of step 3", caplog.text)
    caplog.clear()
    shutil.rmtree(one / "8")
    shutil.copytree(tmp_path / "other" / "5", one / "5")
    assert int(api.restored(one, *setup, run="one").step) == 3
    assert re.search(r"one/5: it is of another run \(other, not", caplog.text)
    shutil.rmtree(one / "3")
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint; 5: it is of another run"):
        api.restored(one, *setup, run="one")
    # What is in the way is replaced.
    api.save(one, *setup, at_step(state, 5), keep=2, run="one")
    assert sorted(path.name for path in one.iterdir()) == ["5"]


def test_nothing_but_damage_is_an_error(tmp_path, small):
    state, setup = small
    api.save(tmp_path, *setup, at_step(state, 3))
    cut(tmp_path / "3" / "checkpoint.json")
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint; 3: .*\nFix: name a run"):
        newest(tmp_path, setup)


def test_the_best_is_kept_beside_the_newest(tmp_path, small):
    state, setup = small
    losses = {2: 3.0, 4: 1.0, 6: 1.0, 8: 2.0}
    for steps in ((2, 4), (6, 7, 8, 9)):  # in two processes, the second told of the losses before
        states = [at_step(state, step) for step in steps]
        api.save(tmp_path, *setup, *states, losses=losses)
    assert api.whole_steps(tmp_path, SMALL) == [6, 9]
    assert int(api.restored(tmp_path, *setup, best=True).step) == 6
    assert validation_losses(tmp_path / "9") == losses


def test_no_loss_that_is_not_finite_is_the_best(tmp_path, small):
    state, setup = small
    losses = {1: math.nan, 2: 3.0, 3: -math.inf, 4: 4.0, 5: math.inf}
    api.save(tmp_path, *setup, *(at_step(state, step) for step in losses), losses=losses)
    assert api.whole_steps(tmp_path, SMALL) == [2, 5]
    assert int(api.restored(tmp_path, *setup, best=True).step) == 2
    np.testing.assert_equal(validation_losses(tmp_path / "5"), losses)
    shutil.rmtree(tmp_path / "2")
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint of a validated step"):
        api.restored(tmp_path, *setup, best=True)


def test_a_failed_save_is_reported_and_takes_nothing_away(tmp_path, small, monkeypatch):
    state, setup = small
    api.save(tmp_path, *setup, at_step(state, 3), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", fail)
        patch.setattr("os.replace", fail)
        patch.setattr("shutil.move", fail)
        with pytest.raises(
            OSError,
            match=r"/4 could not be written: .*No space left on device\nFix: .*newest is of step 3",
        ):
            api.save(tmp_path, *setup, at_step(state, 4), keep=2)
    assert newest(tmp_path, setup) == 3


def fail(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_reader_leaves_no_trace(tmp_path):
    folder = tmp_path / "nothing"
    assert api.whole_steps(folder, SMALL) == []
    assert not folder.exists()


def test_nothing_is_printed(tmp_path, small, capfd):
    state, setup = small
    api.save(tmp_path, *setup, *(at_step(state, step) for step in range(3)))
    newest(tmp_path, setup)
    assert capfd.readouterr() == ("", "")


def test_missing_checkpoints_are_errors(tmp_path, small):
    state, setup = small
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(
            FileNotFoundError, match=rf"{folder} holds no complete checkpoint\nFix: name a run that"
        ):
            newest(folder, setup)
    api.save(tmp_path, *setup, at_step(state, 3), at_step(state, 5), keep=2)
    with pytest.raises(
        FileNotFoundError, match=r"no complete checkpoint of step 4\nFix: use one of \[3, 5\]"
    ):
        api.restored(tmp_path, *setup, step=4)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with a checkpoint of a small state."""
    folder, setup = tmp_path_factory.mktemp("stored"), make_setup(task=SMALL)
    api.save(folder, *setup, init_state(*setup))
    return folder


SGD = OptimizerConfig("sgd", 0.01, warmup_steps=2, momentum=0.5)


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_layers": 3},
            r"must be float32\[.*\], got .*; settings have changed: num_layers was 2, is 3\n"
            "Fix: set num_layers as before, or",
        ),
        ({"hidden_size": 32}, "hidden_size was 16, is 32"),
        ({"embed_size": 8}, "embed_size was 16, is 8"),
        ({"vocab_size": 128}, "vocab_size was 64, is 128"),
        ({"tie_embedding": True}, "tie_embedding was False, is True"),
        (
            {"optimizer": OptimizerConfig("adamw", 0.02)},
            r"another optimizer: expected name='adamw', got name='adam'\n",
        ),
        (
            {"optimizer": SGD},
            r"another optimizer: expected name='sgd', got name='adam'\n",
        ),
        (
            {"batch_size": 4},
            r"carry/lstm/\w+ must be float32\[2, 4, 16\], got float32\[2, 8, 16\].*batch_size was 8, is 4\n",
        ),
    ],
)
def test_what_does_not_fit_is_named(stored, change, message):
    with pytest.raises(ValueError, match=message):
        api.restored(stored, *make_setup(task=dataclasses.replace(SMALL, **change)))


def test_what_makes_no_other_arrays_may_differ_and_is_named(stored, caplog):
    optimizer = OptimizerConfig(learning_rate=0.5, lr_schedule="constant", warmup_steps=0)
    changes = {"dropout": 0.5, "dtype": "bfloat16", "corpus": "elsewhere", "optimizer": optimizer}
    changes["num_words"] = 60
    restored = api.restored(stored, *make_setup(task=dataclasses.replace(SMALL, **changes)))
    assert_bit_equal(leaves_of(restored), leaves_of(init_state(*make_setup(task=SMALL))))
    for change in (
        "num_words was None, is 60", "dropout was 0.1, is 0.5", "dtype was float32, is bfloat16",
        "optimizer.lr_schedule was cosine, is constant",
    ):  # fmt: skip
        assert change in caplog.text


class Other(Toy):
    """Of another name."""


class Biased(Toy):
    """Its head has a second bias."""

    def make_model(self, rngs):
        model = super().make_model(rngs)
        model.more = named_param(jnp.zeros(3), (None,))
        return model


class Frozen(Toy):
    """Does not train its embedding."""

    frozen = nnx.PathContains("embedding")


class Halved(Toy):
    """Its embedding has half of the bits."""

    def make_model(self, rngs):
        model = super().make_model(rngs)
        model.embedding = jax.tree.map(lambda a: a.astype(jnp.bfloat16), model.embedding)
        return model


Biased.__name__ = Frozen.__name__ = Halved.__name__ = (
    "Toy"  # as if the file of the task had changed
)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Other, "must be of the task Other, got Toy"),
        (Biased, r"params/more must be float32\[3\], got nothing\nFix: set model"),
        (Frozen, "frozen/embedding/table must be float32.*, got nothing"),
        (Halved, "params/embedding/table must be bfloat16.*, got float32"),
    ],
)
def test_another_model_of_the_same_fields_is_named(stored, kind, message):
    with pytest.raises(ValueError, match=message):
        api.restored(stored, *make_setup(task=kind(**vars(SMALL))))


@pytest.mark.full
def test_saving_in_another_placement_is_an_error(tmp_path):
    state = init_state(*UNEVEN)
    with pytest.raises(ValueError, match=r"has 12 rows of layers, but the placement has 8"):
        api.save(tmp_path, *make_setup((1, 4, 1)), state)


class Factored(Toy):
    """Its optimizer keeps state of other shapes than parameters."""

    def make_optimizer(self, num_steps):
        def init(params):
            return jax.tree.map(lambda a: jnp.ones(a.shape[1:]), params)

        return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


@pytest.mark.more
@pytest.mark.parametrize("placement", [(1, 1), (1, 3)])
def test_state_of_other_shapes_is_stored_by_layer(placement, tmp_path):
    task = Factored(**vars(dataclasses.replace(SMALL, num_layers=sum(placement))))
    setup = make_setup((1, 2, 1), placement, task)
    state = init_state(*setup)
    api.save(tmp_path, *setup, state)
    one = make_setup(task=setup[0])
    restored = api.restored(tmp_path, *one)
    assert_bit_equal(api.stored(*one, restored), api.stored(*setup, state))


@pytest.mark.parametrize("metadata", [None, {"config": {}}, {"task": "LM", "fields": 1}])
def test_a_foreign_checkpoint_is_an_error(tmp_path, metadata):
    setup = make_setup(task=SMALL)
    array = jax.device_put(jnp.zeros(3), NamedSharding(setup[1].mesh.build(), P()))
    orbax.save(str(tmp_path / "1"), {"weights": array}, custom_metadata=metadata)
    with pytest.raises(
        FileNotFoundError, match=r"no complete checkpoint; 1: checkpoint\.json is missing"
    ):
        newest(tmp_path, setup)
