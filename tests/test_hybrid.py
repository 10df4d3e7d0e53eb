"""The laws of the convolutional network: every strategy on every mesh is one device's, and it learns."""

import dataclasses
import functools
import json
import os
import re
import signal
import typing

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar.__main__ import main
from jaxpar.analysis import inspect_step
from jaxpar.config import CONFIGS, ConvNetConfig, ImageConfig, ImageDataConfig, TrainConfig
from jaxpar.config_file import read_config, write_config
from jaxpar.data.images import ImageBatch, ImageBatches, load_images
from jaxpar.mesh import MeshConfig
from jaxpar.sharding import STRATEGIES
from jaxpar.state import abstract_state, audit, init_state, make_model
from jaxpar.step import batch_sharding, make_eval_step, make_loss_and_grad
from jaxpar.training.fit import evaluate_run, fit
from jaxpar.training.report import Report
from jaxpar.training.run_folder import RunFolder

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

MODEL = ConvNetConfig(channels=(8, 16), hidden_sizes=(24, 16), dropout=0.3)
ROWS = 16


def make_config(strategy="hybrid", mesh=(1, 1), model=MODEL, **train):
    data, tensor = mesh
    return ImageConfig(
        mesh=MeshConfig(data=data, tensor=tensor, devices=tuple(range(data * tensor))),
        model=dataclasses.replace(model, strategy=strategy),
        data=ImageDataConfig(batch_size=ROWS),
        train=TrainConfig(**{"warmup_steps": 0, "optimizer": "sgd", **train}),
    )


@functools.cache
def digits():
    return load_images("digits")


def place(config, mesh, step=0):
    batches = ImageBatches(digits().train, config.data.batch_size, seed=0)
    return batches.batch_on(step, batch_sharding(mesh, config))


@functools.cache
def loss_and_grads(config):
    mesh = config.mesh.build()
    state = init_state(config, mesh)
    audit(state)
    run = jax.jit(make_loss_and_grad(config, mesh))
    (loss, _), grads = run(state.params, state.carry, place(config, mesh), state.step)
    return float(loss), [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]


LAYOUTS = [
    *(("hybrid", mesh) for mesh in [(1, 2), (1, 4), (1, 8), (2, 4), (8, 1)]),
    *((strategy, (2, 4)) for strategy in STRATEGIES if strategy != "hybrid"),
]


@pytest.mark.law
@pytest.mark.parametrize(("strategy", "mesh"), LAYOUTS, ids=str)
def test_loss_and_gradients_equal_one_device(strategy, mesh):
    loss, grads = loss_and_grads(make_config(strategy, mesh))
    expected_loss, expected_grads = loss_and_grads(make_config())
    assert abs(loss - expected_loss) <= RELATIVE_ERROR * expected_loss
    for actual, expected in zip(grads, expected_grads, strict=True):
        assert np.linalg.norm(actual - expected) <= RELATIVE_ERROR * np.linalg.norm(expected)


def test_parameters_lie_where_the_strategy_puts_them():
    shards = {
        "data": ((3, 3, 8, 16), (256, 24), (24, 16)),
        "model": ((3, 3, 8, 2), (32, 24), (24, 2)),
        "hybrid": ((3, 3, 8, 16), (32, 24), (24, 2)),
        "hybrid-gather": ((3, 3, 8, 16), (256, 3), (3, 16)),
    }
    for strategy, expected in shards.items():
        config = make_config(strategy, (2, 4))
        params = abstract_state(config, config.mesh.build()).params
        kernels = [
            layer["kernel"].get_value()
            for layer in (params["convs"][1], params["dense"][0], params["dense"][1])
        ]
        actual = tuple(kernel.sharding.shard_shape(kernel.shape) for kernel in kernels)
        assert actual == expected, strategy


@pytest.mark.law
def test_the_hybrid_sends_least_and_gathers_no_parameters():
    sent, gathered = {}, set()
    for strategy in STRATEGIES:
        config = ImageConfig(
            mesh=MeshConfig(data=2, tensor=4), model=ConvNetConfig(strategy=strategy)
        )
        collectives = inspect_step(config).collectives
        sent[strategy] = sum(c.sent_bytes for c in collectives)
        gathered |= {shape for c in collectives if c.op == "all-gather" for shape in c.shapes}
    assert min(sent, key=sent.__getitem__) == "hybrid"
    assert sent["hybrid"] < sent["hybrid-gather"] < sent["model"]
    assert sent["hybrid"] < sent["data"] / 5
    # Labels, features where they are stacked, the first convolution's outputs.
    assert gathered == {(128,), (128, 64, 4, 4), (128, 8, 8, 32)}


def test_names_of_strategies_and_models_agree():
    hints = typing.get_type_hints(ConvNetConfig)
    assert set(typing.get_args(hints["strategy"])) == set(STRATEGIES)
    assert {name: config.model.name for name, config in CONFIGS.items()} == {
        "lstm": "lstm",
        "hybrid": "hybrid",
    }


MISTAKES = {
    "stages": ({"mesh": MeshConfig(stage=8)}, r"stage=8.* has no pipeline; use stage=1"),
    "mesh to infer": ({"mesh": MeshConfig(data=-1)}, "a size is not inferred yet"),
    "fsdp": ({"train": TrainConfig(fsdp=True)}, "fsdp=True is not for model 'hybrid'"),
    "update": ({"train": TrainConfig(update="sharded")}, "update='sharded' is not for"),
    "batch": (
        {"mesh": MeshConfig(data=2, tensor=4), "data": ImageDataConfig(batch_size=12)},
        r"batch_size=12 does not divide by data=2 x tensor=4 = 8; use batch_size 8 or 16",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_refused(mistake):
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_config(), **changes).check()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"channels": ()}, r"channels=\(\): give one convolution or more"),
        ({"channels": (8, 0)}, r"channels=\(8, 0\): all must be positive"),
        ({"channels": (8,) * 8}, r"image_shape=\(8, 8, 1\) is too small for the 4 poolings of 8"),
        ({"image_shape": (8, 8)}, r"image_shape=\(8, 8\): give height, width and colours"),
        ({"strategy": "modell"}, r"strategy='modell': use 'hybrid' or"),
        ({"dropout": 1.0}, r"dropout=1.0: must be at least 0"),
    ],
)
def test_a_network_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ConvNetConfig(**sizes)


def test_a_width_that_does_not_split_is_refused_by_its_name():
    model = dataclasses.replace(MODEL, channels=(8, 12))
    with pytest.raises(ValueError, match=r"convs\.1\.\w+: dim 'channels' has size 12, .* = 8; use"):
        init_state(make_config("model", (2, 4), model))


@pytest.mark.parametrize(
    ("channels", "image_shape", "num_features"),
    [((8, 16), (8, 8, 1), 4 * 4 * 16), ((4, 4, 4, 4, 6), (9, 8, 3), 2 * 2 * 6)],
)
def test_every_second_convolution_is_pooled(channels, image_shape, num_features):
    config = dataclasses.replace(MODEL, channels=channels, image_shape=image_shape)
    assert config.num_features == num_features
    model = nnx.eval_shape(lambda: make_model(make_config(model=config)))
    assert model.dense[0].kernel.shape == (num_features, 24)
    graphdef, params = nnx.split(model)
    images = jax.ShapeDtypeStruct((2, *image_shape), np.float32)
    run = jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x), params, images)
    assert run.shape == (2, 10)


def test_batches_of_an_epoch_are_all_images_once_and_the_next_has_another_order():
    train = digits().train
    batches = ImageBatches(train, 100, seed=3)
    assert (batches.num_windows, batches.num_targets) == (12, 1200)
    first, again, second = (
        np.concatenate([b.batch(step).images_BHWC for step in range(epoch * 12, epoch * 12 + 12)])
        for b, epoch in ((batches, 0), (ImageBatches(train, 100, seed=3), 0), (batches, 1))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    rows = {row.tobytes() for row in train.images_BHWC}
    seen = [row.tobytes() for row in first]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= rows


def test_evaluation_counts_every_image_once():
    config = make_config(mesh=(2, 4))
    mesh = config.mesh.build()
    split = ImageBatch(*(array[:37] for array in digits().test))
    batches, state = ImageBatches(split, ROWS), init_state(config, mesh)
    assert (batches.num_windows, batches.num_targets) == (3, 37)
    step = make_eval_step(config, mesh)
    sums = [
        step((state.params, state.carry), batches.batch_on(n, batch_sharding(mesh, config)))[1]
        for n in range(3)
    ]
    assert [float(part.num_targets) for part in sums] == [16, 16, 5]
    graphdef, params = nnx.split(make_model(make_config()))
    run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))
    logits = np.asarray(run(params, split.images_BHWC))
    right = int((logits.argmax(-1) == split.labels_B).sum())
    assert sum(float(part.num_right) for part in sums) == right
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -log_p[np.arange(37), split.labels_B].sum()
    assert sum(float(part.nll) for part in sums) == pytest.approx(nll, rel=RELATIVE_ERROR)


def test_batches_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="batch_size=2000 is more than the 1257 images"):
        ImageBatches(digits().train, 2000, seed=0)
    with pytest.raises(ValueError, match="there are no images 'mnist'"):
        load_images("mnist")


def flags(*more):
    """A short run."""
    return [
        "train", "--model", "hybrid", "--simulate", "8", "--data.batch-size", "16",
        "--model.channels", "8", "8", "--model.hidden-sizes", "16",
        "--train.num-steps", "6", "--train.log-every", "2", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run."""
    out_dir = tmp_path_factory.mktemp("runs") / "run"
    assert main(flags("--mesh", "dp2tp4", "--train.out-dir", str(out_dir))) == 0
    return out_dir


def losses(out_dir):
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def test_the_command_line_trains_resumes_and_evaluates_on_any_mesh(run, tmp_path, capsys):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 4, 6]
    assert all(line["images_per_second"] > 0 for line in lines if line["split"] == "train")
    # Half of it, then the rest as pure data parallelism on another mesh: the same losses.
    half = tmp_path / "half"

    class Stop(Report):
        def progress(self, progress, num_steps):
            if progress.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    config = read_config(run / "config.toml")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, out_dir=str(half)))
    assert fit(config, report=Stop()).stopped_by is not None
    again = ["train", "--resume", "--train.out-dir", str(half), "--mesh", "dp8"]
    assert main([*again, "--model.strategy", "data"]) == 0
    printed = capsys.readouterr().out
    assert "resumed at step 4" in printed
    assert re.search(r"step 6  test accuracy +\d+\.\d %", printed)
    expected = losses(run)
    assert losses(half).keys() == {*expected, 5}  # the first of a resumed run is told as well
    for step, loss in expected.items():
        assert losses(half)[step] == pytest.approx(loss, rel=RELATIVE_ERROR)
    assert main(["evaluate", str(half), "--mesh", "tp8"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"valid +\d+\.\d % .*\ntest +\d+\.\d %", table)
    assert main(["sample", str(half)]) == 2
    assert "is on images; give one on text" in capsys.readouterr().err


def test_a_file_of_settings_names_its_model(tmp_path, capsys):
    file = tmp_path / "settings.toml"
    file.write_text('model = "hybrid"\nmesh = "dp2tp4"\n')
    config = read_config(file)
    assert config == ImageConfig(mesh=MeshConfig(data=2, tensor=4))
    write_config(dataclasses.replace(config, model=MODEL), file)
    assert read_config(file).model == MODEL
    assert main(["train", "--model", "lstm", "--config", str(file)]) == 2
    assert "--model lstm: the settings of" in capsys.readouterr().err
    file.write_text('[model]\nname = "hybird"\n')
    with pytest.raises(ValueError, match=r"model.name='hybird': use 'lstm' or 'hybrid'"):
        read_config(file)


def test_digits_are_told_right(tmp_path):
    out_dir = tmp_path / "run"
    assert (
        main(["train", "--model", "hybrid", "--simulate", "8", "--train.out-dir", str(out_dir)])
        == 0
    )
    assert min(part.accuracy for part in evaluate_run(RunFolder(out_dir))) >= 0.97
