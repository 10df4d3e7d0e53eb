"""`value_and_grad`: what a loop of one's own is given, and that it then trains as `fit` does.

That loss, gradients and carry are those of one device is the law.
"""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lib import api
from lib.laws import MODEL, assert_close, make_batch, make_settings, more
from lib.models import Regress, Regression

import jaxpar
from jaxpar import (
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
    init_state,
    make_train_step,
    value_and_grad,
)
from jaxpar.planning import plan

RATE, CLIP = 1e-3, 0.1
ADAM = OptimizerConfig(learning_rate=RATE, lr_schedule="constant", warmup_steps=0)
TASK = dataclasses.replace(MODEL, num_layers=4, optimizer=ADAM)
TRAIN = TrainConfig(num_steps=2, clip_norm=CLIP, seed=3)


def batches(settings):
    """Two windows: the second goes on with the carry."""
    return [make_batch(settings, seed=step, starts=step == 0) for step in range(2)]


def with_jaxpar(settings):
    """Losses, norms of gradients, and the state after two steps of jaxpar's own."""
    state, step, found = init_state(*settings), make_train_step(*settings), []
    for batch in batches(settings):
        state, metrics = step(state, batch)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return found, state


def with_optax(settings, caplog):
    """The same, by a loop of one's own, which looks at where everything lies."""
    state, optimizer = init_state(*settings), optax.adam(RATE)
    state = dataclasses.replace(state, opt_state=optimizer.init(state.params))
    api.audit(state)  # so moments lie as parameters do, but for those that jaxpar splits
    opt_state, where, found = state.opt_state, shardings(state.params), []
    run = value_and_grad(*settings)

    @jax.jit
    def update(params, grads, opt_state):
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, norm

    for number, batch in enumerate(batches(settings)):
        with jax.log_compiles(number > 0):
            (loss, (after, sums)), grads = run(state, batch)
        assert "Compiling" not in caplog.text  # once more, for parameters that optax has made
        for old, new in zip(*map(jax.tree.leaves, (state.params, after.params)), strict=True):
            assert old is new
        assert (loss.shape, loss.dtype) == ((), jnp.float32)
        assert float(loss) == float(sums.loss / sums.weight)
        assert (int(after.step), int(after.skipped)) == (number + 1, 0)
        assert shardings(grads) == where
        assert shardings(after.carry) == shardings(state.carry)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
            params, opt_state, norm = update(after.params, grads, opt_state)
        state = dataclasses.replace(after, params=params)
        assert shardings(state.params) == shardings(opt_state[0].mu) == where
        found.append((float(loss), float(norm)))
    api.audit(state)
    return found, state


def arrays(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def shardings(tree):
    """Where each array lies: which part on which device."""
    return [leaf.sharding.devices_indices_map(leaf.shape) for leaf in jax.tree.leaves(tree)]


LAYOUTS = [
    ((2, 2, 1), (2, 2), {"fsdp": True}, {}),
    more((1, 2, 2), (2, 4), {}, {"zero_bubble": False}),
    more((2, 2, 1), (2, 1), {"shares": (1, 3)}, {}),
    more((1, 2, 1), (2, 2), {}, {"schedule": "interleaved", "num_groups": 2}),
    more((4, 1, 1), (1, 1), {"fsdp": True}, {}),
]


@pytest.mark.more
@pytest.mark.parametrize(("mesh", "units", "layout", "pipeline"), LAYOUTS)
def test_a_loop_of_ones_own_trains_as_jaxpar_does(mesh, units, layout, pipeline, caplog):
    settings = make_settings(mesh, units, TASK, train=TRAIN, layout=layout, **pipeline)
    expected, wanted = with_jaxpar(settings)
    found, state = with_optax(settings, caplog)
    assert min(norm for _, norm in expected) > CLIP  # so both have clipped
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert_close(arrays(state.params), arrays(wanted.params))
    assert_close(arrays(state.carry), arrays(wanted.carry))


# The loop of docs/build/custom-loop.md, as each of several processes runs it.
LOOP = """
import dataclasses
import jax
import optax
from lib import api
from lib.models import Regress

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig

api.start_processes()
task, optimizer = Regress(("gru", "dense"), batch_size=8, seq_len=4), optax.adam(1e-2)
mesh = MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3)) if jax.device_count() > 4 else "dp2pp2"
parallel = Parallel(mesh, PipelineConfig(num_microbatches=2), fsdp=True)
state, step = jaxpar.init_state(task, parallel), jaxpar.value_and_grad(task, parallel)
opt_state, batches = optimizer.init(state.params), task.make_batches("train", 0)

@jax.jit
def update(params, grads, opt_state):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

losses = []
for number in range(3):
    if number == 2:
        batch = batches.batch(number)  # whole in each process
    else:
        batch = api.placed_batch(task, parallel, batches, number)
    (loss, (state, _)), grads = step(state, batch)
    with jax.numpy_dtype_promotion("standard"):
        params, opt_state = update(state.params, grads, opt_state)
    state = dataclasses.replace(state, params=params)
    losses.append(float(loss))
print(losses)
"""


@pytest.mark.full
def test_several_processes_share_a_loop(capsys):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOOP], env=environ,
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
        )
        for environ in api.environments(2, 2)
    ]  # fmt: skip
    found = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    exec(LOOP, {})
    expected = json.loads(capsys.readouterr().out)
    assert len({*expected}) == 3
    for losses in found:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


# --- A task without an optimizer.


@dataclasses.dataclass(frozen=True)
class Bare(jaxpar.Task):
    """Another task's model and data."""

    of: ClassVar[Regress] = Regress(("gru", "dense"), batch_size=8, seq_len=4)
    rules: ClassVar[Any] = of.rules

    def make_model(self, rngs):
        return Regression(self.of.kinds, rngs=rngs)

    def make_batches(self, split, seed=None):
        return self.of.make_batches(split, seed)


PARALLEL = Parallel("dp4pp2", PipelineConfig(num_microbatches=2, num_chunks=2))


@functools.cache
def bare():
    return init_state(Bare(), PARALLEL), value_and_grad(Bare(), PARALLEL)


@pytest.mark.full
def test_a_task_needs_no_optimizer_for_its_gradients():
    state, run = bare()
    assert (Bare().has_optimizer, Bare.of.has_optimizer, state.opt_state) == (False, True, ())
    batch, with_one = Bare().make_batches("train", 0).batch(0), init_state(Bare.of, PARALLEL)
    (loss, (after, _)), grads = run(state, batch)
    (wanted, _), expected = value_and_grad(Bare.of, PARALLEL)(with_one, batch)
    assert float(loss) == float(wanted)
    assert after.opt_state == ()
    for own, other in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.full
def test_a_loss_that_is_not_finite_comes_back_as_it_is():
    state, run = bare()
    batch = Bare().make_batches("train", 0).batch(0)
    batch["x"] = batch["x"] * np.float32(np.inf)
    (loss, (after, _)), grads = run(state, batch)
    assert not np.isfinite(float(loss))
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert (int(after.step), int(after.skipped)) == (1, 0)


NEEDS_ONE = {
    "a run": lambda out: jaxpar.fit(Bare(), PARALLEL, TrainConfig(out_dir=str(out / "run"))),
    "a training step": lambda out: make_train_step(Bare(), PARALLEL),
    "a look at its step": lambda out: jaxpar.inspect_step(Bare(), PARALLEL),
    "a measurement": lambda out: jaxpar.measure_step(Bare(), PARALLEL),
    "a plan": lambda out: plan(Bare()),
    "an update on the host": lambda out: init_state(
        Bare(), dataclasses.replace(PARALLEL, update="host")
    ),
}


@pytest.mark.parametrize("what", NEEDS_ONE)
def test_what_needs_an_optimizer_says_so_before_it_is_traced(what, tmp_path, monkeypatch):
    bare()  # what jaxpar knows of the model is known

    def traced(*args, **kwargs):
        raise AssertionError("a step was made")

    monkeypatch.setattr(Regression, "last", traced)
    with pytest.raises(ValueError, match="task Bare has no optimizer"):
        NEEDS_ONE[what](tmp_path)
    assert not list(tmp_path.iterdir())


def test_steps_of_other_seeds_are_others():
    assert value_and_grad(Bare(), PARALLEL) is bare()[1]
    assert value_and_grad(Bare(), PARALLEL, TrainConfig(seed=1)) is not bare()[1]
