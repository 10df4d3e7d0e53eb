"""The mean of the parameters: of which steps, wherever it lies, and when it begins."""

import dataclasses
import functools

import numpy as np
import pytest
from lib import api
from lib.awd import awd
from lib.laws import on_devices, random_batch
from lib.models import Regress

from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Report,
    TrainConfig,
    fit,
    init_state,
    load_run,
    make_train_step,
)
from jaxpar.lm import LM
from recipes.awd import begin_average, is_worse

pytestmark = pytest.mark.usefixtures("compile_once")

more = functools.partial(pytest.param, marks=pytest.mark.more)

OPTIMIZER = OptimizerConfig(name="sgd", learning_rate=0.5, lr_schedule="constant", warmup_steps=0)


@pytest.mark.more
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ((2, 2, 2), {"update": "sharded"}),
        more((2, 1, 1), {"update": "host"}),
        more((2, 2, 2), {"fsdp": True}),
        more((1, 1, 1), {}),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.01])
def test_the_mean_is_that_of_the_steps_since_it_began(mesh, layout, weight_decay):
    optimizer = dataclasses.replace(OPTIMIZER, weight_decay=weight_decay)
    task = awd(num_layers=2, optimizer=optimizer)
    units = PipelineConfig(num_microbatches=2, num_chunks=2)
    parallel, shape = Parallel(on_devices(mesh), units, **layout), (task.batch_size, task.seq_len)
    state, history = init_state(task, parallel), []
    step = make_train_step(task, parallel)
    for number in range(5):
        if number == 2:
            opt_state = begin_average(state.opt_state)
            state = dataclasses.replace(state, opt_state=opt_state)
        batch = random_batch(task, np.random.default_rng(number), shape, number == 0)
        state, _ = step(state, batch)
        history.append(api.params_of(task, parallel, state))
        found = api.evaluated(task, parallel, state)
        api.audit(found)
        means = api.params_of(task, parallel, found)
        begun = history[2:] or history[-1:]
        for name, mean in means.items():
            expected = np.mean([np.float64(params[name]) for params in begun], axis=0)
            np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7)
            if number < 3:
                np.testing.assert_array_equal(mean, history[-1][name])
    assert int(state.opt_state.steps) == 3
    assert step.num_programs == 1


def test_decay_of_sgd_is_that_of_a_penalty():
    plain, decaying = (
        Regress(optimizer=dataclasses.replace(OPTIMIZER, weight_decay=decay)).make_optimizer(10)
        for decay in (0.0, 0.1)
    )
    params, grads = np.float32([1.0, -2.0]), np.float32([0.5, 0.25])
    update, _ = decaying.update(grads, decaying.init(params), params)
    expected, _ = plain.update(grads + np.float32(0.1) * params, plain.init(params), params)
    np.testing.assert_allclose(update, expected, rtol=1e-6)


def paper(losses, patience):
    """As the paper's repository has it."""
    best = []
    for loss in losses:
        if len(best) > patience and loss > min(best[:-patience]):
            return True
        best.append(loss)
    return False


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_the_mean_begins_when_the_paper_begins_it(patience):
    rng = np.random.default_rng(patience)
    for _ in range(50):
        losses = rng.integers(0, 12, 9).tolist()
        begun = [is_worse(dict(enumerate(losses[:n])), patience) for n in range(1, len(losses) + 1)]
        assert any(begun) == paper(losses, patience), losses


# ---- a run ----


class Began(Report):
    def __init__(self):
        self.steps = []

    def adjusted(self, step):
        self.steps.append(step)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Few words without any order, of which nothing but their number can be learned."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for split, count in (("train", 600), ("valid", 120), ("test", 60)):
        (folder / f"{split}.txt").write_text(" ".join(rng.choice(list("abcdef"), count)) + "\n")
    return str(folder)


def run(text, folder, num_steps=16, parallel=None, **options):
    task = LM(
        2, 8, 8, dropout=0.2, corpus=text, batch_size=4, seq_len=4,
        optimizer=dataclasses.replace(OPTIMIZER, learning_rate=3.0),
    )  # fmt: skip
    train = TrainConfig(
        num_steps=num_steps, eval_every=2, checkpoint_every=0, log_every=4, out_dir=str(folder)
    )
    report = Began()
    parallel = parallel or Parallel(MeshConfig(devices=(0,)))
    return fit(awd(task, average_after=1), parallel, train, report=report, **options), report.steps


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    return run(text, tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.full
def test_a_run_evaluates_the_mean(whole):
    result, began = whole
    assert len(began) == 1
    assert 2 < began[0] < 10
    assert int(result.state.opt_state.steps) == 16 - began[0]
    lines = load_run(result.out_dir).metrics()
    losses = [(line["step"], line["loss"]) for line in lines if line["split"] == "valid"]
    assert [
        paper([loss for step, loss in losses if step <= n], 1) for n in (began[0] - 2, began[0])
    ] == [False, True]
    for split, found in result.evaluations.items():
        again = load_run(result.out_dir).evaluate(split)
        np.testing.assert_allclose(again.loss, found.loss, rtol=1e-6)


# Where the mean begins, and in the middle of it.
@pytest.mark.more
@pytest.mark.parametrize("later", [0, more(1)])
def test_a_run_goes_on_with_its_mean_elsewhere(text, whole, tmp_path, later):
    result, (began,) = whole
    stop = began + later
    run(text, tmp_path, num_steps=stop)
    parallel = Parallel(MeshConfig(2, 1, 1, devices=(0, 1)), update="host")
    part, _ = run(text, tmp_path, parallel=parallel, resume=True)
    np.testing.assert_allclose(part.losses, result.losses[stop:], rtol=1e-5)
    assert int(part.state.opt_state.steps) == 16 - began
    for split, found in result.evaluations.items():
        np.testing.assert_allclose(part.evaluations[split].loss, found.loss, rtol=1e-5)


def test_a_run_without_validations_is_refused(text, tmp_path):
    task = awd(LM(2, 8, 8, corpus=text, batch_size=4, seq_len=4, optimizer=OPTIMIZER))
    with pytest.raises(
        ValueError, match="eval_every=0 has no validation before the end, but task AWD"
    ):
        fit(task, "dp2pp2tp2", TrainConfig(num_steps=4, out_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
