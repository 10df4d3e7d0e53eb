"""The law: a loss or gradient that is not finite changes nothing, on any mesh, and is told where it began."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest

from jaxpar.axes import STAGE
from jaxpar.config import (
    Config,
    ConvNetConfig,
    DataConfig,
    ImageConfig,
    ImageDataConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
)
from jaxpar.data.images import ImageBatch
from jaxpar.data.streams import Batch
from jaxpar.mesh import MeshConfig
from jaxpar.state import audit, init_state, release
from jaxpar.step import batch_sharding, make_train_step
from jaxpar.training.by_layer import by_layer, with_parameters
from jaxpar.training.fit import fit
from jaxpar.training.nonfinite import find_origin
from jaxpar.training.run_folder import RunFolder, load_data
from jaxpar.training.tasks import make_task

MODEL = ModelConfig(num_layers=4, hidden_size=8, embed_size=8, vocab_size=24, dropout=0.2)
RARE = 23  # a word that only bad batches have
ROWS, STEPS = 8, 4


def make_config(data=1, stage=1, tensor=1, shares=None, pipeline=None, **train):
    return Config(
        MeshConfig(data, stage, tensor, devices=tuple(range(data * stage * tensor))),
        MODEL,
        PipelineConfig(**{"num_chunks": 2, **(pipeline or {})}),
        DataConfig(batch_size=ROWS, seq_len=STEPS, shares=shares),
        TrainConfig(warmup_steps=0, **{"nonfinite": "skip", "max_skipped": 1, **train}),
    )


INTERLEAVED = {"schedule": "interleaved", "num_groups": 2, "num_microbatches": 2, "remat": True}
CONFIGS = {
    "one device": make_config(),
    "data, tensor, fsdp": make_config(2, 1, 2, fsdp=True),
    "shares, gradient accumulation": make_config(2, shares=(3, 1), update="sharded"),
    "all axes, sharded update": make_config(
        2, 2, 2, pipeline={"num_microbatches": 2}, update="sharded", optimizer="adamw"
    ),
    "uneven stages, update on the host": make_config(
        2, 2, pipeline={"placement": (1, 3), "head": "last"}, update="host"
    ),
    "interleaved": make_config(1, 2, pipeline=INTERLEAVED, optimizer="sgd", momentum=0.9),
}


def batch_of(config, mesh, number, rare_rows=(), length=STEPS):
    tokens = np.random.default_rng(number).integers(0, RARE, (2, ROWS, length), np.int32)
    tokens[0, list(rare_rows), -1] = RARE
    return Batch(*jax.device_put(tuple(tokens), batch_sharding(mesh, config)), starts=number == 0)


def change(state, config, name, function):
    """The state with another array of parameters, named and shaped as it is stored."""
    params = {
        key.removeprefix("params/"): np.array(array)
        for key, array in by_layer(state, config).items()
        if key.startswith("params/")
    }
    function(params[name])
    return with_parameters(state, config, params)


def poison(state, config, word=RARE):
    def put_infinity(table_VE):
        table_VE[word] = np.inf

    return change(state, config, "embedding/table", put_infinity)


def arrays_of(state):
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def assert_same(state, expected):
    for actual, array in zip(arrays_of(state), expected, strict=True):
        np.testing.assert_array_equal(actual, array)


@pytest.fixture(scope="module", params=CONFIGS)
def setup(request):
    config = CONFIGS[request.param]
    mesh = config.mesh.build()
    return config, mesh, make_train_step(config, mesh)


@pytest.mark.law
def test_a_bad_step_is_skipped_and_one_too_many_halts(setup):
    config, mesh, step = setup
    batch = functools.partial(batch_of, config, mesh)

    def begin():
        return step(poison(init_state(config, mesh), config), batch(0))[0]

    # What is to come out: the second step leaves no trace but in the counts and the carry.
    state = begin()
    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros_like(a), a.sharding), state.carry)
    counts = {
        "step": jax.device_put(np.int32(2), state.step.sharding),
        "skipped": jax.device_put(np.int32(1), state.skipped.sharding),
    }
    state, metrics = step(dataclasses.replace(state, carry=zeros, **counts), batch(2))
    expected, good_losses = arrays_of(state), float(metrics.loss)
    assert np.isfinite(good_losses)

    state, reported = begin(), []
    for number, rare_rows in ((1, (0, 6)), (2, ()), (3, (5,)), (4, ()), (5, ())):
        state, metrics = step(state, batch(number, rare_rows))
        reported.append(metrics)  # the host does not look before all have been started
    reported = jax.device_get(reported)
    assert [int(metrics.skipped) for metrics in reported] == [1, 1, 2, 2, 2]
    assert not np.isfinite([reported[0].loss, reported[2].loss]).any()
    assert float(reported[1].loss) == good_losses
    audit(state)
    state = release(state, config)
    assert int(state.step) == 3
    assert_same(state, expected)

    origin = find_origin(config, mesh, state, batch(3, (5, 7)))
    assert str(origin) == "the output of embedding, in rows 5, 7"
    assert_same(state, expected)
    state, metrics = step(state, batch(4))
    assert (int(state.step), np.isfinite(metrics.loss)) == (4, True)


def put_nan(where):
    def function(array):
        array[where] = np.nan

    return function


def scale(array):
    array *= 1e30


ORIGINS = {
    "first layer": ("lstm/w_h", put_nan((0, 3, 1, 5)), "the output of lstm layer 0"),
    "middle layer": ("lstm/w_x", put_nan((2, 7, 0, 2)), "the output of lstm layer 2"),
    "last layer": ("lstm/b", put_nan((3, 2, 4)), "the output of lstm layer 3"),
    "head": ("head/bias", put_nan(5), "the output of head"),
    # Logits and their loss are finite; so are the head's gradients, but not those of what is below.
    "on the way back": ("head/kernel", scale, "the gradient of lstm layer 3"),
}


def test_the_first_module_is_named(setup):
    config, mesh, step = setup
    batch = batch_of(config, mesh, 0)
    for parameter, function, place in ORIGINS.values():
        state = change(init_state(config, mesh), config, parameter, function)
        origin = find_origin(config, mesh, state, batch)
        assert origin.place == place
        if "lstm" in place and "output" in place:
            assert origin.rows == tuple(range(ROWS))
            assert str(origin).endswith(", in rows 0, 1, 2, 3, 4, 5, 6, 7")
        state, metrics = step(state, batch)
        assert int(metrics.skipped) == 1
        assert np.isfinite(metrics.loss) == ("gradient" in place)
    if mesh.shape[STAGE] > 1:  # a bucket's batch may be shorter
        state = poison(init_state(config, mesh), config)
        batch = batch_of(config, mesh, 0, rare_rows=(2,), length=STEPS // 2)
        assert str(find_origin(config, mesh, state, batch)) == "the output of embedding, in row 2"


@pytest.mark.parametrize("strategy", ["data", "hybrid"])
def test_a_network_for_images_is_halted_too(strategy):
    model = ConvNetConfig(channels=(4, 4), hidden_sizes=(8,), strategy=strategy)
    mesh_config = MeshConfig(2, devices=(0, 1))
    train = TrainConfig(warmup_steps=0)
    config = ImageConfig(mesh_config, model, ImageDataConfig(batch_size=8), train)
    mesh = config.mesh.build()
    step = make_train_step(config, mesh)
    rng = np.random.default_rng(0)
    images, labels = rng.random((8, 8, 8, 1), np.float32), rng.integers(0, 10, 8, np.int32)
    batch = ImageBatch(*jax.device_put((images, labels), batch_sharding(mesh, config)))
    for parameter, place in (("convs/1/bias", "convs.1"), ("dense/0/kernel", "dense.0")):
        state = change(init_state(config, mesh), config, parameter, put_nan(...))
        before = arrays_of(state)
        assert str(find_origin(config, mesh, state, batch)) == f"the parameters of {place}"
        for _ in range(2):
            state, metrics = step(state, batch)
        assert int(metrics.skipped) == 1
        assert_same(release(state, config), before)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A run after its first step, in which one word has gone bad; its config, and the steps that read it."""
    text, out_dir = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("runs") / "run"
    lines = ["the cat sat on the mat", "a dog ran to the cat"] * 60
    (text / "valid.txt").write_text("\n".join(lines[:10]))
    (text / "test.txt").write_text("\n".join(lines[:10]))
    for number in (33, 57, 71):
        lines[number] = "the zebra ran"
    (text / "train.txt").write_text("\n".join(lines))
    train = {"warmup_steps": 0, "lr_schedule": "constant", "log_every": 5, "checkpoint_every": 0}
    config = Config(
        MeshConfig(devices=(0,)),
        dataclasses.replace(MODEL, num_layers=2, vocab_size=None),
        data=DataConfig(corpus=str(text), batch_size=4, seq_len=8),
        train=TrainConfig(num_steps=1, out_dir=str(out_dir), **train),
    )
    result, folder = fit(config), RunFolder(out_dir)
    word = folder.vocabulary().words.index("zebra")
    shutil.rmtree(folder.checkpoints_path)
    with folder.checkpoints(result.config) as checkpoints:
        checkpoints.save(poison(result.state, result.config, word), result.config)
    batches = make_task(result.config, result.mesh, load_data(result.config)).batches()
    bad = [step for step in range(1, 21) if (batches.batch(step).inputs_BT == word).any()]
    assert len(bad) > 1
    assert bad[-1] < 19
    assert all(step % 5 for step in bad)  # steps are under way before the host looks
    return config, bad


def go_on(config, out_dir, num_steps, **train):
    if not out_dir.exists():
        shutil.copytree(config.train.out_dir, out_dir)
    train = dataclasses.replace(config.train, num_steps=num_steps, out_dir=str(out_dir), **train)
    return fit(dataclasses.replace(config, train=train), resume=True)


@pytest.mark.usefixtures("compile_once")
def test_a_run_stops_with_the_state_before_and_goes_on_if_told_to(poisoned, tmp_path):
    config, bad = poisoned
    folder = RunFolder(tmp_path / "run")
    message = (
        rf"the loss of step {bad[0] + 1} is not finite \(batch {bad[0]} of \d+ in epoch 0, from 0\); the "
        r"first number that is not finite is in the output of embedding, in row \d\. .*--train\.out-dir "
        rf"{folder} and a --train\.learning-rate below 0\.005, .*, or --train\.nonfinite skip$"
    )
    for _ in range(2):  # again the same batch
        with pytest.raises(FloatingPointError, match=message):
            go_on(config, folder.path, 20)
    assert folder.checkpoints(config).steps() == [1, bad[0]]
    _, _, state = folder.restore()
    assert_same(state, arrays_of(go_on(config, tmp_path / "before", bad[0]).state))

    result = go_on(config, folder.path, 20, nonfinite="skip", learning_rate=0.01)
    assert np.flatnonzero(~np.isfinite(result.losses)).tolist() == [n - bad[0] for n in bad]
    assert (int(result.state.step), int(result.state.skipped)) == (20, len(bad))
    lines = [line for line in folder.metrics() if line["split"] == "skipped"]
    assert [line["step"] for line in lines] == [n + 1 for n in bad]
    assert [line["skipped"] for line in lines] == list(range(1, len(bad) + 1))

    with pytest.raises(
        FloatingPointError,
        match=rf"step {bad[-1] + 1} is not .* larger --train\.max-skipped \(now {len(bad) - 1}\)$",
    ):
        go_on(config, tmp_path / "limit", 20, nonfinite="skip", max_skipped=len(bad) - 1)
    assert RunFolder(tmp_path / "limit").checkpoints(config).latest_step() == bad[-1]

    # What has been skipped does not stop a run that may skip no more.
    assert int(go_on(config, folder.path, 21).state.step) == 21
