"""Programs of a process: runs that differ in numbers alone share them, and others do not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.programs import compiled

import jaxpar
from jaxpar import (
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    Report,
    Stack,
    Sums,
    Task,
    TrainConfig,
    init_state,
    make_train_step,
)
from jaxpar.nn import GRU

pytestmark = pytest.mark.fresh
FACTOR = 1.0


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = Stack([lambda rngs: GRU(4, rngs=rngs)] * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        return Sums(
            FACTOR * jnp.sum(y**2 * batch["weight"][None, :, None]), jnp.sum(batch["weight"])
        )


@dataclasses.dataclass(frozen=True)
class Small(Task):
    optimizer: OptimizerConfig = OptimizerConfig(warmup_steps=0)

    def make_model(self, rngs):
        return Model(rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).normal(size=(16, 6, 4)).astype(np.float32)
        return ArrayBatches({"x": x}, 4, seed)


@dataclasses.dataclass(frozen=True)
class Own(Small):
    rate: float = 1e-3

    def make_optimizer(self, num_steps):
        rates = optax.warmup_cosine_decay_schedule(0.0, self.rate, 2, num_steps)
        return optax.chain(optax.clip_by_global_norm(100 * self.rate), optax.lion(rates))


def losses(task, mesh, folder, **train):
    settings = TrainConfig(out_dir=str(folder), log_every=1, **train)
    return jaxpar.fit(task, mesh, settings, quiet=True).losses


OTHERS = {
    "of a config": (
        Small(OptimizerConfig("adamw", 1e-3, warmup_steps=2, weight_decay=0.01)),
        Small(OptimizerConfig("adamw", 2e-2, warmup_steps=3, weight_decay=0.1)),
    ),
    "one's own": (Own(), Own(rate=1e-2)),
}


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_run_with_other_numbers_compiles_nothing(kind, tmp_path):
    task, other = OTHERS[kind]
    mesh = "dp1" if kind == "of a config" else "dp2"
    # A run without clipping is another program.
    short = {"num_steps": 4, "clip_norm": 1.0}
    first = losses(task, mesh, tmp_path / "1", **short)
    with compiled() as programs:
        numbers = {"num_steps": 5, "clip_norm": 0.5, "seed": 1, "max_skipped": 3}
        second = losses(other, mesh, tmp_path / "2", nonfinite="skip", **numbers)
        assert programs == []
        again = losses(task, mesh, tmp_path / "3", **short)
    assert programs == []
    assert again == first
    assert second[:4] != first


def test_few_programs_are_compiled_before_the_first_step(tmp_path):
    """The step, its state, those that draw and run what is checked, and some small ones."""
    api.forget_programs()
    counts = list[int]()

    class Count(Report):
        def progress(self, progress, num_steps):
            counts.append(len(programs))

    with compiled() as programs:
        settings = TrainConfig(2, out_dir=str(tmp_path / "run"), log_every=1, checkpoint_every=0)
        jaxpar.fit(Small(), "dp2", settings, report=Count())
    first, second = counts
    assert first <= 16
    assert second == first


def test_what_the_model_reads_is_never_out_of_date(tmp_path, monkeypatch):
    first = losses(Small(), "dp1", tmp_path / "1", num_steps=2)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    second = losses(Small(), "dp1", tmp_path / "2", num_steps=2)
    assert second[0] == 4 * first[0]


@pytest.mark.parametrize("update", ["replicated", "host"])
def test_a_step_that_was_compiled_to_be_read_runs_as_it_is(update):
    task, parallel = Small(), Parallel("dp1", update=update)
    step, state = make_train_step(task, parallel), init_state(task, parallel)
    batch = api.placed_batch(task, parallel, task.make_batches("train", 0), 0)
    step.lower(state, batch).compile()
    with compiled() as programs:
        step(state, batch)
    assert not {"jit(step)", "jit(gradients)"} & {*programs}
