"""The law: a batch is jaxpar's own as soon as the call that takes it has returned, or the next one is read.

Each caller here fills the same arrays again and again. On CPU, JAX may use an array that begins at a
multiple of 64 bytes without a copy, and may copy another one later; the tables have one of each.
"""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api

import jaxpar
from jaxpar import (
    IteratorBatches,
    OptimizerConfig,
    Parallel,
    Stack,
    Sums,
    Task,
    TrainConfig,
    init_state,
    make_predict_step,
    make_train_step,
    nn,
    value_and_grad,
)

B, T, WIDTH = 4, 3, 8
OFFSETS = (0, 16)  # bytes after a multiple of 64
MESHES = ("dp1", "dp2")


def buffer(offset):
    """Zeros float32 [B, T, 1] that begin so many bytes after a multiple of 64."""
    raw = np.zeros(B * T * 4 + 192, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + B * T * 4].view(np.float32).reshape(B, T, 1)


TABLES = {name: buffer(name) for name in OFFSETS}  # that models are made of


def values(number):
    return np.random.default_rng(number).normal(size=(B, T, 1)).astype(np.float32)


class Slow(nnx.Module):
    """It looks at its batch late, so that whoever fills an array again comes first."""

    def __init__(self, table, rngs):
        self.table = nnx.Variable(jnp.asarray(TABLES[table]))
        self.embed, self.out = nnx.Linear(1, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        self.layers = Stack([lambda rngs: nn.GRU(WIDTH, rngs=rngs)], rngs=rngs)

    def first(self, batch, at):
        one = jax.lax.fori_loop(0, 12, lambda _, w: w @ w, jnp.eye(256))
        return self.embed(batch["x"] * one[0, 0])

    def last(self, y, batch, at):
        loss = jnp.sum((self.out(y) - batch["x"]) ** 2)
        return Sums(loss, jnp.float32(batch["x"].size))

    def predict(self, y, batch, at):
        return {"y": self.out(y)[..., 0], "x": batch["x"][..., 0]}


class Refilled:
    """Batches of the user's own, whose rows are written into one array."""

    def __init__(self, offset, reuse=True, num_windows=3):
        self.batch_size, self.num_windows = B, num_windows
        self.x, self.starts, self.reuse, self.offset = (
            buffer(offset),
            np.ones((), bool),
            reuse,
            offset,
        )

    def batch(self, step, rows=slice(None)):
        if not self.reuse:
            self.x = buffer(self.offset)
        x = self.x[: len(range(*rows.indices(B)))]
        x[:] = values(step % self.num_windows)[rows]
        return {"x": x, "starts": self.starts}


@dataclasses.dataclass(frozen=True)
class Refilling(Task):
    offset: int = 0
    table: int = 0
    reuse: bool = True
    stream: bool = True
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=0.1, warmup_steps=0)

    def make_model(self, rngs):
        return Slow(self.table, rngs)

    def make_batches(self, split, seed=None):
        if not self.stream:
            return Refilled(self.offset, self.reuse)

        def read():
            source = Refilled(self.offset, self.reuse)
            for number in itertools.count() if split == "train" else range(3):
                yield source.batch(number)

        return IteratorBatches(read, B)


@pytest.mark.rows(5)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("is_whole", [True, False])
def test_placed_batch_stays_as_it_was(is_whole, mesh, offset):
    source, task, parallel = Refilled(offset), Refilling(), Parallel(mesh)
    if is_whole:
        batch = api.put_batch(task, parallel, source.batch(0))
    else:  # on two devices, two halves are read one after the other into the same array
        batch = api.placed_batch(task, parallel, source, 0)
    source.x[:], source.starts[()] = np.nan, False
    np.testing.assert_array_equal(batch["x"], values(0))
    assert batch["starts"]


@pytest.mark.parametrize("offset", OFFSETS)
def test_batches_of_a_stream_stay_as_they_were(offset):
    """Also where several are kept."""
    batches = Refilling(offset).make_batches("train")
    assert isinstance(batches, IteratorBatches)
    batches.keep_from(0)
    kept = [batches.batch(number)["x"] for number in range(3)]
    for number in range(3):
        np.testing.assert_array_equal(kept[number], values(number))
        np.testing.assert_array_equal(batches.batch(number)["x"], values(number))


@pytest.mark.more
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "make", [make_train_step, value_and_grad, api.eval_step, make_predict_step]
)
def test_step_returns_with_its_batch_read(make, mesh):
    task = Refilling(stream=False)
    step, state = make(task, mesh), init_state(task, mesh)
    expected = jax.device_get(step(state, {"x": values(1), "starts": np.True_}))
    for offset in OFFSETS:
        state = init_state(task, mesh)
        x, starts = buffer(offset), np.ones((), bool)
        x[:] = values(1)
        found = step(state, {"x": x, "starts": starts})
        x[:], starts[()] = np.nan, False
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


def numbers(folder, mesh, **options):
    train = TrainConfig(num_steps=4, log_every=1, eval_every=2, out_dir=str(folder))
    result = jaxpar.fit(Refilling(**options), mesh, train, quiet=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return result.losses, [line["loss"] for line in lines]


@pytest.mark.more
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mesh", ["dp1", pytest.param("dp2", marks=pytest.mark.more)])
def test_run_is_that_of_fresh_arrays(tmp_path, mesh, stream):
    fresh = numbers(tmp_path / "fresh", mesh, reuse=False, stream=stream)
    assert numbers(tmp_path / "refilled", mesh, stream=stream) == fresh


@pytest.mark.more
@pytest.mark.parametrize("offset", OFFSETS)
def test_predictions_are_those_of_fresh_arrays(offset):
    task, parallel = Refilling(stream=False), Parallel("dp1")
    state = init_state(task, parallel)
    found = api.epoch_predictions(task, parallel, state, Refilled(offset))
    np.testing.assert_array_equal(found["x"], np.concatenate([*map(values, range(3))])[..., 0])


@pytest.mark.parametrize("table", OFFSETS)
def test_array_that_a_model_is_made_of_may_be_filled_again(table):
    TABLES[table][:] = values(7)
    state = init_state(Refilling(table=table), "dp1")
    TABLES[table][:] = 0.0
    np.testing.assert_array_equal(state.frozen["table"][...], values(7))
