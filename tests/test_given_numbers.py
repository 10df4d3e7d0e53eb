"""A resumed run uses the numbers that its optimizer and its task are given now, and says what changed."""

import dataclasses
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api, regression
from lib.regression import Regression, fit, make_task

from jaxpar import OptimizerConfig, Parallel, init_state, load_run


def rates_of(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line.get("learning_rate", "none") for line in lines if line["split"] == "train"]


def save(optimizer, folder, step=0, change=lambda opt_state: opt_state):
    task, parallel = make_task(optimizer), Parallel("dp1")
    state = init_state(task, parallel)
    place = state.step.sharding
    state = dataclasses.replace(
        state,
        step=jax.device_put(jnp.int32(step), place),
        opt_state=change(state.opt_state),
    )
    api.save(folder, task, parallel, state)


def restore(optimizer, folder, mesh="dp1"):
    return api.restored(folder, make_task(optimizer), Parallel(mesh)).opt_state


def learning_rate(opt_state):
    return optax.tree.get(opt_state, "learning_rate")


# ---- the rate in the state of an optimizer ----


def injected(rate):
    return optax.inject_hyperparams(optax.adam)(learning_rate=rate)


def scheduled(rate):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=schedule)


def of_kernels(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def by_dims(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


# Where the state of `inject_hyperparams` is: at the top, and within others.
WHERE = {
    "alone": injected,
    "with a schedule": scheduled,
    "in a chain": lambda rate: optax.chain(optax.scale(1.0), injected(rate)),
    "masked": lambda rate: optax.masked(injected(rate), of_kernels),
    "in groups": lambda rate: optax.partition(
        {"matrix": injected(rate), "vector": optax.sgd(0.1)}, by_dims
    ),
    "in steps": lambda rate: optax.MultiSteps(injected(rate), 2).gradient_transformation(),
    "if finite": lambda rate: optax.apply_if_finite(injected(rate), 3),
}


@pytest.mark.rows(2, "full")
@pytest.mark.parametrize("where", WHERE)
def test_a_rate_in_the_state_is_the_one_that_is_given_now(where, tmp_path, caplog):
    make = WHERE[where]
    save(make(0.5), tmp_path)
    for mesh in ("dp1", "pp2"):
        caplog.clear()
        state = restore(make(0.25), tmp_path, mesh)
        assert learning_rate(state) == 0.25
        assert "learning_rate was 0.5, is 0.25" in caplog.text
    caplog.clear()
    assert learning_rate(restore(make(0.5), tmp_path)) == 0.5
    assert not caplog.text


def test_every_injected_number_is_the_one_that_is_given_now(tmp_path):
    make = optax.inject_hyperparams(optax.adam)
    save(make(0.5, b1=0.75, eps=0.125), tmp_path)
    hyperparams = restore(make(0.5, b1=0.5, eps=0.25), tmp_path).hyperparams
    assert (hyperparams["learning_rate"], hyperparams["b1"], hyperparams["eps"]) == (0.5, 0.5, 0.25)


def changed_by_hand(opt_state):
    rate = opt_state.hyperparams["learning_rate"]
    place = rate.sharding
    hyperparams = {
        **opt_state.hyperparams,
        "learning_rate": jax.device_put(jnp.asarray(0.0625, rate.dtype), place),
    }
    return opt_state._replace(hyperparams=hyperparams)


def test_a_rate_that_changed_in_training_stays_until_another_one_is_given(tmp_path):
    save(injected(0.5), tmp_path, change=changed_by_hand)
    assert learning_rate(restore(injected(0.5), tmp_path)) == 0.0625
    assert learning_rate(restore(injected(0.25), tmp_path)) == 0.25


def test_what_a_checkpoint_was_given_is_its_own(tmp_path):
    """A run that was resumed with another rate and killed before it saved still has the old state."""
    save(injected(0.5), tmp_path, step=1)
    for _ in range(2):
        assert learning_rate(restore(injected(0.25), tmp_path)) == 0.25
    save(injected(0.25), tmp_path, step=2, change=changed_by_hand)
    assert learning_rate(restore(injected(0.25), tmp_path)) == 0.0625


def test_another_schedule_is_no_number_that_stays(tmp_path, caplog):
    def make(first):
        return optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(first, 0.0, 10))

    save(make(1.0), tmp_path, change=changed_by_hand)  # as a step changes it
    restore(make(0.5), tmp_path)
    assert not caplog.messages


class OwnState(NamedTuple):
    rate: jax.Array
    largest: jax.Array
    count: jax.Array


def own_optimizer(rate, largest=1.0):
    """One of a user's that keeps its rate in its state, and a number that training changes."""

    def init(params):
        return OwnState(jnp.float32(rate), jnp.float32(largest), jnp.int32(0))

    def update(updates, state, params=None):
        moved = jax.tree.map(lambda g: -state.rate * g, updates)
        return moved, state._replace(largest=2 * state.largest, count=state.count + 1)

    return optax.GradientTransformation(init, update)


def one_step(opt_state):
    large = jax.device_put(2 * opt_state.largest, opt_state.largest.sharding)
    return opt_state._replace(largest=large)


def test_a_number_in_the_state_of_an_own_optimizer_is_the_one_that_is_given_now(tmp_path, caplog):
    save(own_optimizer(0.5), tmp_path, change=one_step)
    state = restore(own_optimizer(0.25), tmp_path)
    assert (state.rate, state.largest) == (0.25, 2)
    assert "opt_state.rate was 0.5, is 0.25" in caplog.text


def test_a_number_that_training_has_made_stays_and_is_named(tmp_path, caplog):
    save(own_optimizer(0.5), tmp_path, change=one_step)
    state = restore(own_optimizer(0.5, largest=8.0), tmp_path)
    assert (state.rate, state.largest) == (0.5, 2)
    fact = (
        "opt_state.largest began with 1.0, now begins with 8.0, and stays 2.0 as training has made"
    )
    assert fact in caplog.text


def test_numbers_that_depend_on_parameters_are_not_given(tmp_path, caplog):
    def make(rate):
        def init(params):
            return {"norm": rate * optax.tree.norm(params), "rate": jnp.float32(rate)}

        return optax.GradientTransformation(
            init, lambda updates, state, params=None: (updates, state)
        )

    save(make(0.5), tmp_path)
    norm = init_state(make_task(make(0.5)), "dp1").opt_state["norm"]
    state = restore(make(0.25), tmp_path)
    assert (state["norm"], state["rate"]) == (norm, 0.25)
    assert "opt_state.rate was 0.5, is 0.25" in caplog.text
    assert "norm" not in caplog.text


def test_a_resumed_run_moves_by_the_rate_of_now_and_reports_it(tmp_path):
    make = optax.inject_hyperparams(optax.sgd)
    before = fit(make_task(make(learning_rate=0.001)), tmp_path, 2)
    after = fit(make_task(make(learning_rate=0.0)), tmp_path, 4, "pp2", resume=True)
    for old, new in zip(
        *(jax.tree.leaves(nnx.state(run.model())) for run in (before, after)), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    assert rates_of(tmp_path) == pytest.approx([0.001, 0.001, 0, 0])
    assert after.history["train/learning_rate"][:2] == pytest.approx([0.001, 0.001])


def falling(step):
    return 0.001 * 0.5 ** step.astype(jnp.float32)


# Optimizers, and the rates of three steps that are reported: those that are used, or none.
REPORTED = {
    "injected": (WHERE["in a chain"](0.5), [0.5] * 3),
    "injected schedule": (
        optax.inject_hyperparams(optax.sgd)(learning_rate=falling),
        [0.001, 0.0005, 0.00025],
    ),
    "none": (optax.sgd(0.001), ["none"] * 3),
    "two": (
        optax.partition({"matrix": injected(0.5), "vector": injected(0.25)}, by_dims),
        ["none"] * 3,
    ),
    "config": (
        OptimizerConfig("sgd", 0.001, "constant", warmup_steps=0),
        [0.001] * 3,
    ),
}


@pytest.mark.parametrize("kind", REPORTED)
def test_the_rate_that_is_reported_is_used_or_is_not_reported(kind, tmp_path):
    optimizer, expected = REPORTED[kind]
    result = fit(make_task(optimizer), tmp_path, 3)
    assert rates_of(tmp_path) == pytest.approx(expected)
    assert ("train/learning_rate" in result.history) == ("none" not in expected)


# ---- a task's own fields ----


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of one step."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    fit(Regression(), folder, 1)
    return folder


def resume(begun, tmp_path, task, train=None):
    """What a copy of the run gives after one more step."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in begun.rglob("*"):
        copy = folder / path.relative_to(begun)
        copy.mkdir() if path.is_dir() else copy.write_bytes(path.read_bytes())
    return fit(task, folder, 2, resume=True, train=train or {})


MAY_CHANGE = {
    "a rate": ({"rate": 0.0}, {}, "rate was 0.001, is 0.0"),
    "a meaning": ({"slope": 2.0}, {}, "slope was 1.0, is 2.0"),
    "several": ({"rate": 0.5, "slope": 2.0}, {}, "rate was 0.001, is 0.5; slope was 1.0, is 2.0"),
    "a free field": ({"rows": 8}, {}, "rows was 16, is 8"),
    "an optimizer": (
        {"optimizer": OptimizerConfig(learning_rate=0.5)}, {},
        "optimizer.learning_rate was 0.005, is 0.5",
    ),
    "clipping": ({}, {"clip_norm": 0.5}, "train.clip_norm was None, is 0.5"),
    "the seed": ({}, {"seed": 1}, "train.seed was 0, is 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", MAY_CHANGE)
def test_settings_that_change_neither_arrays_nor_data_may_change_and_are_named(
    what, begun, tmp_path, caplog
):
    fields, train, words = MAY_CHANGE[what]
    result = resume(begun, tmp_path, Regression(**fields), train)
    assert result.first_step == 1
    saved = [text for text in caplog.messages if "was saved with other settings" in text]
    assert saved == [f"{result.out_dir}/checkpoints/1 was saved with other settings: {words}"]


def test_a_field_that_changes_is_used(begun, tmp_path):
    result = resume(begun, tmp_path, Regression(rate=0.0))
    before = load_run(begun)
    for old, new in zip(*map(jax.tree.leaves, (before.params, result.state.params)), strict=True):
        np.testing.assert_array_equal(old, new)


MAY_NOT_CHANGE = {
    "a shape": (
        {"width": 4},
        r"params/head.* must be float32\[.*; settings have changed: width was 8, is 4\n"
        r"Fix: set width as before, or use another out_dir",
    ),
    "the data": (
        {"shift": 1.0},
        r"data of the run in .* have changed, and so have settings \(shift was 0\.0, is 1\.0\): "
        r"batches\.train .*\nFix: restore them and the settings",
    ),
    "the batches": ({"batch_size": 8}, r"so have settings \(batch_size was 16, is 8\): "),
    "the number of batches": ({"num_valid": 32}, r"so have settings \(num_valid was 64, is 32\): "),
    "one of two": (
        {"rate": 0.5, "shift": 1.0},
        r"so have settings \(rate was 0\.001, is 0\.5; shift was 0\.0, is 1\.0\): ",
    ),
    "data and batches": (
        {"shift": 1.0, "rows": 8},
        r"resumed with other batches, so jaxpar cannot check that shift leaves its data as they were: "
        r"rows was 16, is 8; shift was 0\.0, is 1\.0\nFix: change shift alone",
    ),
}


@pytest.mark.parametrize("what", MAY_NOT_CHANGE)
def test_settings_that_change_arrays_or_data_are_refused_by_their_names(what, begun, tmp_path):
    fields, message = MAY_NOT_CHANGE[what]
    with pytest.raises(ValueError, match=message):
        resume(begun, tmp_path, Regression(**fields))


def test_other_data_are_refused_also_where_a_rate_changes(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(regression, "X", regression.X + 1)
    with pytest.raises(ValueError, match=r"data .* have changed, and so have settings \(rate was"):
        resume(begun, tmp_path, Regression(rate=0.5))
