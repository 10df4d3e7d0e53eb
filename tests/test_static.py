"""Arrays of a batch that have no time: whole in every chunk, on every mesh; and what the rule refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.any_model import Calm
from lib.law.check import assert_near
from lib.laws import RELATIVE_ERROR, SGD
from lib.layers import GROUP, Ends
from lib.models import WIDTH, WithStatic

import jaxpar
from jaxpar import (
    ArrayBatches,
    IteratorBatches,
    LayerContext,
    MeshConfig,
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    TrainConfig,
    init_state,
)
from jaxpar.nn import GRU, LSTM, Bidirectional, dropout
from jaxpar.planning import estimate_step

pytestmark = pytest.mark.law
TWO_STEPS = TrainConfig(num_steps=2)


class Gate(nnx.Module):
    """A layer that reads an array without time; `together` rows of it are mixed."""

    def __init__(self, together, rngs):
        self.rows_together = together
        self.project = nnx.Linear(3, WIDTH, rngs=rngs)

    def __call__(self, carry, x, at):
        gate_BW = jnp.tanh(self.project(at.batch["static"]["first"]))
        gate_BW = gate_BW + (0.0 if self.rows_together is None else gate_BW.mean(0)[None])
        return carry, x + dropout(gate_BW[None] * x, 0.2, at)


class Gated(Ends):
    """Before the layers, in them and after them."""

    def __init__(self, rngs):
        super().__init__((), rngs=rngs)
        makers = [lambda rngs: Gate(None, rngs), lambda rngs: GRU(WIDTH, rngs=rngs)]
        self.layers = Stack([*makers, lambda rngs: Gate(GROUP, rngs), *makers], rngs=rngs)
        self.of_static = nnx.Linear(3, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def first(self, batch, at):
        return self.drop(super().first(batch, at)) + self.of_static(batch["static"]["first"])[None]

    def last(self, y, batch, at):
        loss_TB3 = (y[..., :3] - batch["static"]["sign"][None]) ** 2
        sums = super().last(y, batch, at)
        return sums._replace(loss=sums.loss + jnp.sum(loss_TB3))


@dataclasses.dataclass(frozen=True)
class Static(Calm):
    def make_model(self, rngs):
        return Gated(rngs)

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        batches.__class__ = WithStatic
        return batches


def test_arrays_without_time_are_whole_in_every_unit():
    mesh = MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3))
    pipeline = PipelineConfig(num_microbatches=2, num_chunks=4)
    batch = Static().make_batches("train", 0).batch(1)
    found, expected = (
        api.gradients(Static(), parallel, batch)
        for parallel in (Parallel(mesh, pipeline), Parallel("dp1"))
    )
    assert_near({"loss": found.loss}, {"loss": expected.loss}, RELATIVE_ERROR)
    assert_near(found.grads, expected.grads, RELATIVE_ERROR)
    assert_near(found.carry, expected.carry, RELATIVE_ERROR)


class Readings(nnx.Module):
    """Readings [rows, 16, 6] beside a wider label [rows, 40], with layers of unequal widths."""

    def __init__(self, rngs):
        self.embed, self.out = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(12, 40, rngs=rngs)
        makers = [lambda rngs: LSTM(8, rngs=rngs), lambda rngs: LSTM(12, inputs=8, rngs=rngs)]
        self.layers = Stack(makers, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        label_BC = batch["static"]["label"] if "static" in batch else batch["label"].T
        losses_BC = optax.sigmoid_binary_cross_entropy(self.out(y[-1]), label_BC)
        weight = jnp.where(at.time + len(y) == 16, batch["weight"], 0.0)
        return Sums(jnp.sum(losses_BC.mean(-1) * weight), jnp.sum(weight))

    def predict(self, y, batch, at):
        return {"p": nnx.sigmoid(self.out(y))}


@dataclasses.dataclass(frozen=True)
class Labels(Task):
    is_static: bool = True
    optimizer = SGD

    def make_model(self, rngs):
        return Readings(rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(32, 16, 6)).astype(np.float32)
        label = {"label": (rng.random((32, 40)) < 0.2).astype(np.float32)}
        return ArrayBatches({"x": x} | ({"static": label} if self.is_static else label), 8, seed)


@pytest.mark.full
def test_a_label_of_each_row_is_no_time():
    chunks = Parallel("pp2", PipelineConfig(num_chunks=4))
    many = jaxpar.fit(Labels(), chunks, TWO_STEPS, quiet=True)
    other = jaxpar.fit(Labels(is_static=False), "dp1", TWO_STEPS, quiet=True)
    np.testing.assert_allclose(many.losses, other.losses, rtol=RELATIVE_ERROR)
    assert jaxpar.load_run(other.out_dir).predict("test", quiet=True)["p"].shape == (32, 16, 40)


def test_lengths_that_differ_are_named_where_time_is_cut():
    task, chunks = Labels(is_static=False), PipelineConfig(num_chunks=2)
    with pytest.raises(
        ValueError, match=r"(?s)40 time steps \(label\) and 16 time steps \(x\).*static"
    ):
        init_state(task, Parallel("pp2", chunks))
    init_state(task, "pp2")


class Strided(nnx.Module):
    """It takes every other step; `how` says what it predicts."""

    def __init__(self, how, rngs):
        self.how, self.layers = how, Stack([lambda rngs: GRU(8, rngs=rngs)] * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"] if self.how == "last" else batch["x"][::2]

    def last(self, y, batch, at):
        if "half" in batch:
            y = y - batch["half"][..., None]
        return Sums(jnp.sum(y**2 * batch["weight"][None, :, None]), jnp.sum(batch["weight"]))

    def predict(self, y, batch, at):
        return {"y": {"rows": y.mean(0), "last": y[-1:]}.get(self.how, y)}


@dataclasses.dataclass(frozen=True)
class Strides(Task):
    how: str = ""
    has_half: bool = False
    optimizer = SGD

    def make_model(self, rngs):
        return Strided(self.how, rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(0)
        arrays = {"x": rng.normal(size=(32, 12, 8)), "half": rng.normal(size=(32, 6))}
        arrays = {name: a.astype(np.float32) for name, a in arrays.items()}
        return ArrayBatches(arrays if self.has_half else {"x": arrays["x"]}, 16, seed)


def test_predictions_may_have_a_length_of_their_own():
    result = jaxpar.fit(Strides(), Parallel("pp2"), TWO_STEPS, quiet=True)
    found, one = (
        jaxpar.load_run(result.out_dir, mesh).predict("test", quiet=True)["y"]
        for mesh in ("pp2", "dp1")
    )
    assert found.shape == (32, 6, 8)
    np.testing.assert_allclose(found, one, rtol=RELATIVE_ERROR, atol=1e-6)


def test_what_cannot_be_predicted_is_told_before_the_training(tmp_path):
    with pytest.raises(ValueError, match=r"`predict` of Strided .*\[16, 8\] as 'y' for 16 rows"):
        jaxpar.fit(Strides("rows"), "dp1", TrainConfig(2, out_dir=str(tmp_path)), quiet=True)
    assert not [*tmp_path.iterdir()]
    chunks = Parallel("pp2", PipelineConfig(num_chunks=2))
    with pytest.raises(
        ValueError, match=r"`first` returns 6 time steps for 12.*\nFix: use num_chunks=1"
    ):
        init_state(Strides(), chunks)
    with pytest.raises(ValueError, match="`predict` gives 1 time steps as 'y' for a window of 12"):
        jaxpar.make_predict_step(Strides("last"), chunks)


@pytest.mark.parametrize("has_half", [False, True])
def test_the_planner_counts_a_strided_model(has_half):
    costs = [estimate_step(Strides(has_half=has_half), mesh) for mesh in ("dp4", "dp2pp2")]
    assert all(cost.seconds > 0 for cost in costs)


def test_static_goes_through_all_batches():
    rng = np.random.default_rng(0)
    lengths, label = np.array([3, 5, 0, 9, 2]), np.arange(5)
    arrays = {"x": np.repeat(label, lengths), "static": {"label": label, "more": label[:, None]}}
    batches = api.BucketedBatches(arrays, lengths, 2, (4, 8), seed=0)
    for number in range(batches.num_windows):
        batch = batches.batch(number)
        real = batch["lengths"] > 0
        np.testing.assert_array_equal(batch["x"][real, 0], batch["static"]["label"][real])
        np.testing.assert_array_equal(batch["x"][real, :1], batch["static"]["more"][real])
    assert batches.batch(batches.longest)["x"].shape == (2, 8)
    with pytest.raises(ValueError, match=r"'static': 4, 'lengths': 5"):
        api.BucketedBatches({"x": arrays["x"], "static": label[:4]}, lengths, 2, (4, 8))
    with pytest.raises(
        ValueError, match="SeriesBatches has arrays of steps, but 'static' has no time"
    ):
        SeriesBatches({"x": label, "static": label}, 1, 2)

    rows = {"x": rng.normal(size=(5, 4)), "static": {"label": label}}
    of_arrays = ArrayBatches(rows, 4)
    stream = IteratorBatches(lambda: [jax.tree.map(lambda a: a[:4], rows)], 4)
    for each in (of_arrays, stream):
        np.testing.assert_array_equal(each.batch(0, slice(1, 3))["static"]["label"], [1, 2])
    assert of_arrays.batch(1)["static"]["label"].shape == (4,)
    with pytest.raises(ValueError, match=r"'static.label': 3"):
        ArrayBatches({"x": rows["x"], "static": {"label": label[:3]}}, 2)


class Tagger(nnx.Module):
    """A Flax model whose input has a part without time."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.blocks = nnx.List([nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs)) for _ in range(2)])
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x, static):
        x = self.drop(self.embed(x)) + static[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)[..., 0]


@pytest.mark.full
def test_adopted_models_have_arrays_without_time():
    def loss(model, batch):
        error = model(batch["x"], batch["static"]) - batch["static"][:, :1]
        return jaxpar.mean(error**2, batch["weight"])

    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(40, 8, 3)), "static": rng.normal(size=(40, 8))}
    arrays = {name: a.astype(np.float32) for name, a in arrays.items()}
    task = jaxpar.adopt(Tagger, loss, batches=arrays, optimizer=optax.sgd(0.1), batch_size=8)
    chunks = Parallel("pp2", PipelineConfig(num_chunks=2))
    one, many = (jaxpar.fit(task, own, TWO_STEPS, quiet=True).losses for own in ("dp1", chunks))
    np.testing.assert_allclose(one, many, rtol=RELATIVE_ERROR)


class Plus(nnx.Module):
    """A layer that adds an array without time."""

    def initial_carry(self, rows):
        return ()

    def __call__(self, carry, x, at):
        return carry, x + at.batch["static"]["first"][None]


@pytest.mark.parametrize("lengths", [{}, {"lengths": np.array([5, 2, 4])}])
def test_both_directions_see_arrays_without_time_as_they_are(lengths):
    rng = np.random.default_rng(0)
    x, first = (rng.normal(size=size).astype(np.float32) for size in ((5, 3, 2), (3, 2)))
    at = LayerContext(0, 0, 0, batch={"static": {"first": first}, **lengths})
    _, y = Bidirectional(Plus(), Plus())((), jnp.asarray(x), at)
    np.testing.assert_allclose(y, 2 * (x + first), rtol=1e-6)


class Gap(WithStatic):
    def batch(self, step, rows=slice(None)):
        batch = super().batch(step)
        first = batch["static"]["first"].copy()
        first[3, 1] = np.nan
        batch = {**batch, "static": {**batch["static"], "first": first}}
        return jax.tree.map(lambda a: a[rows] if np.ndim(a) else a, batch)


class WithGap(Static):
    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        batches.__class__ = Gap
        return batches


@pytest.mark.full
def test_what_is_not_finite_in_an_array_without_time_has_no_time_step(tmp_path):
    train = TrainConfig(1, out_dir=str(tmp_path / "run"))
    message = r"is in the data: batch\['static'\]\['first'\], in row 3\."
    with pytest.raises(FloatingPointError, match=message):
        jaxpar.fit(WithGap(), "dp2", train, quiet=True)
