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

from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.analysis import inspect_step
from jaxpar.cli.main import main
from jaxpar.config import OptimizerConfig
from jaxpar.data.batches import place_batch
from jaxpar.setup import Setup
from jaxpar.state import abstract_state, audit, init_state
from jaxpar.step import batch_sharding, make_eval_step, make_loss_and_grad
from jaxpar.tasks.images.digits import load_digits
from jaxpar.tasks.images.strategies import STRATEGIES
from jaxpar.tasks.images.task import Images
from jaxpar.training.fit import evaluate_run, fit
from jaxpar.training.report import Report
from jaxpar.training.run_folder import RunFolder

ROWS = 16


TASK = Images(
    channels=(8, 16), hidden_sizes=(24, 16), dropout=0.3, batch_size=ROWS,
    optimizer=OptimizerConfig("sgd", warmup_steps=0),
)  # fmt: skip


# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5


def make_task(strategy="hybrid", **changes):
    return dataclasses.replace(TASK, strategy=strategy, **changes)


def on_mesh(data=1, tensor=1):
    return Parallel(MeshConfig(data, 1, tensor, devices=tuple(range(data * tensor))))


@functools.cache
def loss_and_grads(task, parallel):
    mesh = parallel.mesh.build()
    state = init_state(task, parallel, mesh=mesh)
    audit(state)
    batch = place_batch(
        task.make_batches("train", 0), 0, batch_sharding(Setup.of(task, parallel, mesh=mesh))
    )
    (loss, _), grads = jax.jit(make_loss_and_grad(Setup.of(task, parallel, mesh=mesh)))(
        state, batch
    )
    return float(loss), [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]


LAYOUTS = [
    *(("hybrid", mesh) for mesh in [(1, 2), (1, 4), (1, 8), (2, 4), (8, 1)]),
    *((strategy, (2, 4)) for strategy in STRATEGIES if strategy != "hybrid"),
]


@pytest.mark.law
@pytest.mark.parametrize(("strategy", "mesh"), LAYOUTS, ids=str)
def test_loss_and_gradients_equal_one_device(strategy, mesh):
    loss, grads = loss_and_grads(make_task(strategy), on_mesh(*mesh))
    expected_loss, expected_grads = loss_and_grads(make_task(), on_mesh())
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
        params = abstract_state(Setup.of(make_task(strategy), on_mesh(2, 4))).params
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
        collectives = inspect_step(Images(strategy=strategy), on_mesh(2, 4)).collectives
        sent[strategy] = sum(c.sent_bytes for c in collectives)
        gathered |= {shape for c in collectives if c.op == "all-gather" for shape in c.shapes}
    assert min(sent, key=sent.__getitem__) == "hybrid"
    assert sent["hybrid"] < sent["hybrid-gather"] < sent["model"]
    assert sent["hybrid"] < sent["data"] / 5
    # Labels, features where they are stacked, the first convolution's outputs.
    assert gathered == {(128,), (128, 64, 4, 4), (128, 8, 8, 32)}


def test_names_of_strategies_agree():
    hints = typing.get_type_hints(Images)
    assert set(typing.get_args(hints["strategy"])) == set(STRATEGIES)


MISTAKES = {
    "stages": ({}, Parallel(MeshConfig(stage=8)), r"stage=8: .* has no pipeline; use stage=1"),
    "fsdp": ({}, Parallel(fsdp=True), "fsdp=True is not for the task images, whose strategy"),
    "update": ({}, Parallel(update="sharded"), "update='sharded' is not for"),
    "batch": (
        {"batch_size": 12}, on_mesh(2, 4),
        r"batch_size=12 does not divide by data=2 x tensor=4 = 8\nFix: use batch_size=8 or 16",
    ),
    "microbatches": (
        {}, Parallel("dp2tp4", PipelineConfig(num_microbatches=2)),
        r"split the batch over \('data', 'tensor'\); .*\nFix: .*num_microbatches=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_refused(mistake):
    changes, parallel, message = MISTAKES[mistake]
    if parallel.mesh.num_devices == 1:
        parallel = dataclasses.replace(parallel, mesh=MeshConfig(devices=(0,)))
    with pytest.raises(ValueError, match=message):
        init_state(make_task(**changes), parallel)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"channels": ()}, r"channels=\(\): give one convolution or more"),
        ({"channels": (8, 0)}, r"channels=\(8, 0\): must be positive"),
        ({"channels": (8,) * 8}, r"image_shape=\(8, 8, 1\) is too small for the 4 poolings of 8"),
        ({"image_shape": (8, 8)}, r"image_shape=\(8, 8\): give height, width and colours"),
        ({"strategy": "modell"}, r"strategy='modell': must be 'hybrid' or"),
        ({"dropout": 1.0}, r"dropout=1.0: must be at least 0"),
    ],
)
def test_a_network_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Images(**sizes)


def test_a_width_that_does_not_split_is_refused_by_its_name():
    task = make_task("model", channels=(8, 12))
    with pytest.raises(
        ValueError, match=r"convs\.1\.\w+: dim 'channels' has size 12, .*\nFix: use"
    ):
        init_state(task, on_mesh(2, 4))


@pytest.mark.parametrize(
    ("channels", "image_shape", "features"),
    [((8, 16), (8, 8, 1), 4 * 4 * 16), ((4, 4, 4, 4, 6), (9, 8, 3), 2 * 2 * 6)],
)
def test_every_second_convolution_is_pooled(channels, image_shape, features):
    task = make_task(channels=channels, image_shape=image_shape)
    assert task.num_features == features
    model = nnx.eval_shape(lambda: task.make_model(nnx.Rngs(0)))
    assert model.dense[0].kernel.shape == (features, 24)
    graphdef, params = nnx.split(model)
    images = jax.ShapeDtypeStruct((2, *image_shape), np.float32)
    run = jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x), params, images)
    assert run.shape == (2, 10)


def test_evaluation_counts_every_image_once():
    task, parallel = make_task(), on_mesh(2, 4)
    mesh = parallel.mesh.build()
    batches, state = task.make_batches("test"), init_state(task, parallel, mesh=mesh)
    images, labels = load_digits()["test"].values()
    assert (len(labels), batches.num_windows) == (360, 23)
    step, sharding = (
        make_eval_step(task, parallel, mesh=mesh),
        batch_sharding(Setup.of(task, parallel, mesh=mesh)),
    )
    sums = [step(state, place_batch(batches, n, sharding))[1] for n in range(23)]
    assert [float(part.weight) for part in sums] == [16] * 22 + [8]
    graphdef, params = nnx.split(task.make_model(nnx.Rngs(0)))
    run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))
    logits = np.asarray(run(params, images))
    right = int((logits.argmax(-1) == labels).sum())
    assert sum(float(part.metrics["accuracy"]) for part in sums) == right
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -log_p[np.arange(360), labels].sum()
    assert sum(float(part.loss) for part in sums) == pytest.approx(nll, rel=RELATIVE_ERROR)


def test_labels_and_images_of_another_network_are_refused():
    batch = {**TASK.example_batch(), "label": np.array([3, 10, 0])}
    with pytest.raises(ValueError, match="label 10 at position 1 is not one of the 10 classes"):
        TASK.check_batch(batch)
    with pytest.raises(ValueError, match=r"image_shape=\(9, 8, 1\) .* use image_shape=\(8, 8, 1\)"):
        make_task(image_shape=(9, 8, 1)).make_batches("train", 0)
    with pytest.raises(ValueError, match=r"num_classes=7 .* use num_classes=10"):
        make_task(num_classes=7).make_batches("train", 0)
    with pytest.raises(ValueError, match="batch_size=2000 is more than the 1257 rows"):
        make_task(batch_size=2000).make_batches("train", 0)


def flags(*more):
    """A short run."""
    return [
        "train", "images", "--simulate", "8", "--batch-size", "16", "--channels", "8", "8",
        "--hidden-sizes", "16", "--optimizer.warmup-steps", "2", "--train.num-steps", "6",
        "--train.log-every", "2", *more,
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
    speeds = [line["images_per_second"] for line in lines if line["split"] == "train"]
    assert speeds[0] is None
    assert all(speed > 0 for speed in speeds[1:])
    assert all(0 <= line["accuracy"] <= 1 for line in lines)
    # Half of it, then the rest as pure data parallelism on another mesh: the same losses.
    half = tmp_path / "half"

    class Stop(Report):
        def progress(self, progress, num_steps):
            if progress.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    task, parallel, train = RunFolder(run).settings()
    train = dataclasses.replace(train, out_dir=str(half))
    assert fit(task, parallel, train, report=Stop()).stopped_by is not None
    again = ["train", "images", "--resume", "--train.out-dir", str(half), "--mesh", "dp8"]
    assert main([*again, "--strategy", "data"]) == 0
    printed = capsys.readouterr().out
    assert "resumed at step 4" in printed
    assert re.search(r"step 6  test .*accuracy 0\.\d+", printed)
    expected = losses(run)
    assert losses(half).keys() == {*expected, 5}  # the first of a resumed run is told as well
    for step, loss in expected.items():
        assert losses(half)[step] == pytest.approx(loss, rel=RELATIVE_ERROR)
    assert main(["evaluate", str(half), "--mesh", "tp8"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"accuracy(.|\n)*valid .*0\.\d+(.|\n)*test .*0\.\d+", table)
    assert main(["sample", str(half)]) == 2
    assert "is of the task images; give one of the task lm" in capsys.readouterr().err


@pytest.mark.slow
def test_digits_are_told_right(tmp_path):
    train = dataclasses.replace(Images.train, out_dir=str(tmp_path / "run"))
    result = fit(Images(), train=train)
    assert result.setup.mesh.size == 8
    assert min(part.metrics["accuracy"] for part in result.evaluations.values()) >= 0.97
    assert evaluate_run(RunFolder(result.out_dir))[1].metrics == pytest.approx(
        result.evaluations["test"].metrics, rel=RELATIVE_ERROR
    )
