"""Batches that a user makes: what jaxpar cannot take is named before anything is traced."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar import ArrayBatches, adopt, mean
from jaxpar.step.setup import Setup
from jaxpar.training.evaluate import CheckedBatches

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


def setup_of(make_batches):
    task = adopt(Net, loss, "blocks", batches=make_batches, optimizer=optax.sgd(0.05))
    return Setup.of(task, "dp1")


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
        _ = setup_of(lambda split, seed: batches_with(**numbers)).facts


def test_a_number_of_batches_of_an_evaluation_is_whole_too():
    setup = setup_of(lambda split, seed: batches_with())
    with pytest.raises(ValueError, match=r"num_windows=4\.0 \(float\): must be a whole number"):
        CheckedBatches(setup, batches_with(num_windows=4.0))


def test_whole_numbers_of_numpy_are_taken():
    numbers = {"num_windows": np.int64(4), "batch_size": np.int32(16)}
    setup = setup_of(lambda split, seed: batches_with(**numbers))
    assert CheckedBatches(setup, batches_with(**numbers)).batch(0)["x"].shape == (16, 8)
