"""The laws of the convolutional network: every strategy on every mesh is one device's, and it learns."""

import dataclasses
import functools
import json
import os
import re
import signal
import sys
import typing
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.law.check import assert_near

from jaxpar import (
    LayerContext,
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Report,
    fit,
    init_state,
)
from jaxpar.analysis import inspect_step

SPEC = f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits"
Digits = api.task_class(SPEC)
STRATEGIES = sys.modules[Digits.__module__].STRATEGIES
load_digits = sys.modules[Digits.__module__].load_digits

ROWS = 16
SGD = OptimizerConfig("sgd", warmup_steps=0)
TASK = Digits(channels=(8, 16), widths=(24, 16), batch_size=ROWS, optimizer=SGD)


# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5


def make_task(strategy="hybrid", **changes):
    return dataclasses.replace(TASK, strategy=strategy, **changes)


def on_mesh(data=1, tensor=1):
    return Parallel(MeshConfig(data, 1, tensor, devices=tuple(range(data * tensor))))


@functools.cache
def gradients(task, parallel):
    return api.gradients(task, parallel, task.make_batches("train", 0).batch(0))


LAYOUTS = [
    *(("hybrid", mesh) for mesh in [(1, 2), (1, 4), (1, 8), (2, 4), (8, 1)]),
    *((strategy, (2, 4)) for strategy in STRATEGIES if strategy != "hybrid"),
]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(("strategy", "mesh"), LAYOUTS, ids=str)
def test_loss_and_gradients_equal_one_device(strategy, mesh):
    found, expected = gradients(make_task(strategy), on_mesh(*mesh)), gradients(TASK, on_mesh())
    assert_near({"loss": found.loss}, {"loss": expected.loss}, RELATIVE_ERROR)
    assert_near(found.grads, expected.grads, RELATIVE_ERROR)


def test_parameters_lie_where_the_strategy_puts_them():
    shards = {
        "data": ((3, 3, 8, 16), (256, 24), (24, 16)),
        "model": ((3, 3, 8, 2), (32, 24), (24, 2)),
        "hybrid": ((3, 3, 8, 16), (32, 24), (24, 2)),
        "hybrid-gather": ((3, 3, 8, 16), (256, 3), (3, 16)),
    }
    for strategy, expected in shards.items():
        params = api.abstract_state(make_task(strategy), on_mesh(2, 4)).params
        kernels = [
            layer["kernel"].get_value()
            for layer in (params["convs"][1], params["dense"][0], params["dense"][1])
        ]
        actual = tuple(kernel.sharding.shard_shape(kernel.shape) for kernel in kernels)
        assert actual == expected, strategy


@pytest.mark.full
@pytest.mark.law
def test_the_hybrid_sends_least_and_gathers_no_parameters():
    sent, gathered = {}, set()
    for strategy in STRATEGIES:
        collectives = inspect_step(Digits(strategy=strategy), on_mesh(2, 4)).collectives
        sent[strategy] = sum(c.sent_bytes for c in collectives)
        gathered |= {shape for c in collectives if c.op == "all-gather" for shape in c.shapes}
    assert min(sent, key=sent.__getitem__) == "hybrid"
    assert sent["hybrid"] < sent["hybrid-gather"] < sent["model"]
    assert sent["hybrid"] < sent["data"] / 5
    # Labels, features where they are stacked, the first convolution's outputs.
    assert gathered == {(128,), (128, 64, 4, 4), (128, 8, 8, 32)}


def test_names_of_strategies_agree():
    hints = typing.get_type_hints(Digits)
    assert set(typing.get_args(hints["strategy"])) == set(STRATEGIES)


def test_microbatches_are_refused():
    parallel = Parallel("dp2tp4", PipelineConfig(num_microbatches=2))
    with pytest.raises(ValueError, match=r"(?s)split the batch over .*num_microbatches=1"):
        init_state(make_task(), parallel)


def test_a_width_that_does_not_split_is_refused_by_its_name():
    task = make_task("model", channels=(8, 12))
    with pytest.raises(
        ValueError, match=r"convs\.1\.\w+: dim 'channels' has size 12, .*\nFix: use"
    ):
        init_state(task, on_mesh(2, 4))


@pytest.mark.full
def test_evaluation_counts_every_image_once():
    task, parallel = make_task(), on_mesh(2, 4)
    batches, state = task.make_batches("test"), init_state(task, parallel)
    images, labels = load_digits("test").values()
    assert (len(labels), batches.num_windows) == (179, 12)
    sums = [api.evaluation(task, parallel, state, batches.batch(n))[0] for n in range(12)]
    assert [part["weight"] for part in sums] == [16] * 11 + [3]
    graphdef, params = nnx.split(task.make_model(nnx.Rngs(0)))
    at, batch = LayerContext(layer=0, time=0, row=0, time_major=False), {"image": images}

    def run(params):
        model = nnx.merge(graphdef, params)
        return model.classify(model.first(batch, at), at)

    logits = np.asarray(jax.jit(run)(params))
    right = int((logits.argmax(-1) == labels).sum())
    assert sum(part["accuracy"] for part in sums) == right
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -log_p[np.arange(179), labels].sum()
    assert sum(part["loss"] for part in sums) == pytest.approx(nll, rel=RELATIVE_ERROR)


def flags(*more):
    """A short run."""
    return [
        "train", SPEC, "--simulate", "8", "--batch-size", "16", "--channels", "8", "8",
        "--widths", "16", "--optimizer.warmup-steps", "2", "--train.num-steps", "6",
        "--train.log-every", "2", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run."""
    out_dir = tmp_path_factory.mktemp("runs") / "run"
    assert api.command(*flags("--mesh", "dp2tp4", "--train.out-dir", str(out_dir))) == 0
    return out_dir


def losses(out_dir):
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


@pytest.mark.full
def test_the_command_line_trains_resumes_and_evaluates_on_any_mesh(run, tmp_path, capsys):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 4, 6]
    speeds = [line["digits_per_second"] for line in lines if line["split"] == "train"]
    assert speeds[0] is None
    assert all(speed > 0 for speed in speeds[1:])
    assert all(0 <= line["accuracy"] <= 1 for line in lines)
    # Half of it, then the rest as pure data parallelism on another mesh: the same losses.
    half = tmp_path / "half"

    class Stop(Report):
        def progress(self, progress, num_steps):
            if progress.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    task, parallel, train = api.settings("train", SPEC, "--resume", "--train.out-dir", str(run))
    train = dataclasses.replace(train, out_dir=str(half))
    assert fit(task, parallel, train, report=Stop()).stopped_by is not None
    again = ["train", SPEC, "--resume", "--train.out-dir", str(half), "--mesh", "dp8"]
    assert api.command(*again, "--strategy", "data") == 0
    printed = capsys.readouterr().out
    assert "resumed at step 4" in printed
    assert re.search(r"step 6  test .*accuracy 0\.\d+", printed)
    expected = losses(run)
    assert losses(half).keys() == {*expected, 5}  # the first of a resumed run is told as well
    for step, loss in expected.items():
        assert losses(half)[step] == pytest.approx(loss, rel=RELATIVE_ERROR)
    assert api.command("evaluate", str(half), "--mesh", "tp8") == 0
    table = capsys.readouterr().out
    assert re.search(r"accuracy(.|\n)*valid .*0\.\d+(.|\n)*test .*0\.\d+", table)
    assert api.command("sample", str(half)) == 2
    assert "hybrid.py:Digits.\nFix: give a run of the task lm." in capsys.readouterr().err
