"""Batches that a user makes: what jaxpar cannot take is named before anything is traced."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.models import Regress, Regression

from jaxpar import (
    ArrayBatches,
    Parallel,
    adopt,
    init_state,
    make_predict_step,
    make_train_step,
    mean,
)

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return mean(jnp.square(model(batch["x"])).sum(-1), batch["weight"])


ONE = Parallel("dp1")


def task_of(make_batches):
    return adopt(Net, loss, "blocks", batches=make_batches, optimizer=optax.sgd(0.05))


# ---- their numbers ----


def batches_with(**numbers):
    batches = ArrayBatches({"x": X}, 16, 0)
    for name, number in numbers.items():
        setattr(batches, name, number)
    return batches


NUMBERS = {
    "fraction": ({"num_windows": 64 / 16}, r"num_windows=4\.0 \(float\): must be a whole number\nFix: "),
    "NumPy": ({"num_windows": np.float64(4)}, r"num_windows=.*4\.0.* must be a whole number\nFix: "),
    "text": ({"num_windows": "4"}, r"num_windows='4' \(str\): must be a whole number\nFix: "),
    "rows": ({"batch_size": 32 / 2}, r"batch_size=16\.0 \(float\): must be a whole number\nFix: "),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_batches_that_is_not_whole_is_named(name):
    numbers, message = NUMBERS[name]
    with pytest.raises(ValueError, match=rf"^ArrayBatches\.{message}"):
        init_state(task_of(lambda split, seed: batches_with(**numbers)), ONE)


def test_a_number_of_batches_of_an_evaluation_is_whole_too():
    task = task_of(lambda split, seed: batches_with())
    state = init_state(task, ONE)
    with pytest.raises(ValueError, match=r"num_windows=4\.0 \(float\): must be a whole number"):
        api.epoch_sums(task, ONE, state, batches_with(num_windows=4.0))


def test_whole_numbers_of_numpy_are_taken():
    numbers = {"num_windows": np.int64(4), "batch_size": np.int32(16)}
    task = task_of(lambda split, seed: batches_with(**numbers))
    sums = api.epoch_sums(task, ONE, init_state(task, ONE), batches_with(**numbers))
    assert sums["weight"] == 64


# ---- their names ----


def numbered_arrays(split, seed):
    return ArrayBatches({"x": X, 3: X}, 16, seed)


def numbered_below(split, seed):
    return ArrayBatches({"x": X, "static": {"y": X, 3: X}}, 16, seed)


def numbered_stream(split, seed):
    batches = ArrayBatches({"x": X}, 16, seed)
    batches.batch = lambda step, rows=slice(None): {"x": X[:16], "more": [{"y": X, 3: X[:16]}]}
    return batches


def numbers_only(split, seed):
    return ArrayBatches({3: X}, 16, seed)  # they get a weight, which has a text for a name


@pytest.mark.parametrize("make", [numbered_arrays, numbered_below, numbered_stream, numbers_only])
def test_a_number_among_names_of_arrays_is_named(make):
    message = (
        r"^the batch of task adopted has an array named 3, of type int, but other names are texts\."
    )
    with pytest.raises(ValueError, match=rf"{message}\nFix: use a text, such as '3'\.$"):
        init_state(task_of(make), ONE)


def test_a_number_among_names_of_a_later_batch_is_named():
    task = adopt(Net, loss, "blocks", batches={"x": X}, batch_size=16, optimizer=optax.sgd(0.05))
    state, step = init_state(task, "dp1"), make_train_step(task, "dp1")
    batch = task.make_batches("train", 0).batch(0)
    with pytest.raises(ValueError, match="batch for task adopted has an array named 3"):
        step(state, batch | {3: X[:16]})


class Named(Net):
    names = ("y", 3)

    def __call__(self, x):
        y = super().__call__(x)
        return dict.fromkeys(self.names, y)


class Numbered(Named):
    names = (0, 3)


def named_loss(model, batch):
    y = model(batch["x"])[3]
    return mean(jnp.square(y).sum(-1), batch["weight"])


def test_a_number_among_names_of_predictions_is_named():
    options = {"batches": {"x": X}, "batch_size": 16, "optimizer": optax.sgd(0.05)}
    with pytest.raises(
        ValueError, match="the predict of task adopted has an array named 3, of type"
    ):
        init_state(adopt(Named, named_loss, "blocks", **options), ONE)
    init_state(adopt(Numbered, named_loss, "blocks", **options), ONE)


def test_a_number_among_names_of_outputs_is_named():
    class Own(Regression):
        def predict(self, y, batch, at):
            return {"y": y, 3: y}

    class Owns(Regress):
        def make_model(self, rngs):
            return Own(self.kinds, rngs=rngs)

    with pytest.raises(ValueError, match="`predict` of Own has an array named 3, of type int"):
        make_predict_step(Owns(), ONE)


def test_an_own_predict_says_what_is_predicted():
    def predict(model, batch):
        return {"norms": jnp.linalg.norm(model(batch["x"]), axis=-1)}

    options = {"batches": {"x": X}, "batch_size": 16, "optimizer": optax.sgd(0.05)}
    task = adopt(Net, loss, "blocks", predict=predict, **options)
    outputs, _ = api.predictions(task, ONE, task.make_batches("test").batch(0))
    assert {name: a.shape for name, a in outputs.items()} == {"norms": (16,)}


# ---- their rows ----


class Rows:
    """One batch, as it is given."""

    batch_size, num_windows = 16, 1

    def __init__(self, **arrays):
        self.arrays = arrays

    def batch(self, step, rows=slice(None)):
        return self.arrays


@pytest.mark.parametrize(("shape", "rows"), [((8, 8), r"\[8, 16\]"), ((17,), r"\[16, 17\]")])
def test_arrays_of_other_numbers_of_rows_are_named(shape, rows):
    batches = Rows(x=X[:16], y=np.ones(shape, np.float32), weight=np.ones(16, np.float32))
    message = rf"^the arrays of a batch of task adopted have {rows} rows\.\nFix: make the rows"
    with pytest.raises(ValueError, match=message):
        init_state(task_of(lambda split, seed: batches), ONE)


# ---- their types ----


# Arrays whose types JAX doesn't have, and what to give.
NOT_OF_JAX = [
    (X.astype(np.longdouble), r"is an array of \w+\.\nFix: give its \.astype\(np\.float32\)\."),
    (X.astype(np.clongdouble), r"is an array of \w+\.\nFix: give its \.astype\(np\.complex64\)\."),
    (X.astype(str), r"is an array of <U\d+\.\nFix: give numbers"),
]
has_long_doubles = np.dtype(np.longdouble).itemsize > 8


@pytest.mark.skipif(not has_long_doubles, reason="long doubles have 64 bits here")
@pytest.mark.parametrize(("array", "message"), NOT_OF_JAX)
def test_types_that_jax_does_not_have_are_named(array, message):
    with pytest.raises(ValueError, match=rf"^batch\['y'\] of task adopted {message}"):
        init_state(task_of(lambda split, seed: ArrayBatches({"x": X, "y": array}, 16, seed)), ONE)


@pytest.mark.skipif(not has_long_doubles, reason="long doubles have 64 bits here")
@pytest.mark.parametrize(("array", "message"), NOT_OF_JAX)
def test_types_of_a_later_batch_are_named(array, message):
    task = adopt(Net, loss, "blocks", batches={"x": X}, batch_size=16, optimizer=optax.sgd(0.05))
    state, step = init_state(task, "dp1"), make_train_step(task, "dp1")
    batch = task.make_batches("train", 0).batch(0)
    with pytest.raises(ValueError, match=rf"^batch\['x'\] for task adopted {message}"):
        step(state, batch | {"x": array[:16]})


class DataFrame:
    """What pandas and polars have in common."""

    def to_numpy(self, dtype):
        return np.zeros((16, 8), dtype)


def test_a_table_in_a_batch_is_named():
    task = adopt(Net, loss, "blocks", batches={"x": X}, batch_size=16, optimizer=optax.sgd(0.05))
    state, step = init_state(task, "dp1"), make_train_step(task, "dp1")
    batch = task.make_batches("train", 0).batch(0)
    message = (
        r"^batch\['x'\] for task adopted is a DataFrame\.\nFix: give its \.to_numpy\(np\.float32\)"
    )
    with pytest.raises(ValueError, match=message):
        step(state, batch | {"x": DataFrame()})


def test_numbers_as_objects_are_told_of_the_batch():
    message = r"^batch\['x'\] of task adopted is an array of object\.\nFix: give numbers"
    with pytest.raises(ValueError, match=message):
        init_state(
            task_of(lambda split, seed: ArrayBatches({"x": X.astype(object)}, 16, seed)), ONE
        )


def test_doubles_are_taken_as_floats():
    losses = []
    for dtype in (np.float32, np.float64):
        task = task_of(lambda split, seed, own=dtype: ArrayBatches({"x": X.astype(own)}, 16, seed))
        batch = task.make_batches("train", 0).batch(0)
        losses.append(api.gradients(task, ONE, batch).loss)
    assert losses[0] == losses[1]
