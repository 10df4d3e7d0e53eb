"""Chunks of time in adopted models: where they run, and the line of the user's code where they cannot."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api

import jaxpar
from jaxpar import Parallel, PipelineConfig

TIME, WIDTH = 8, 4
ARRAYS = {"x": np.zeros((40, TIME), np.int32), "y": np.zeros((40, TIME), np.int32)}


class LSTMs(nnx.Module):
    """Recurrent layers, and something before them."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(8, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 8, rngs=rngs)
        cells = [nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs) for _ in range(2)]
        self.rnns = nnx.List([nnx.RNN(cell) for cell in cells])
        self.make_more(rngs)

    def make_more(self, rngs):
        pass

    def before(self, x):
        return x

    def __call__(self, x):
        x = self.before(self.embed(x))
        for rnn in self.rnns:
            x = rnn(x)
        return self.head(x)


class Places(LSTMs):
    """A table of positions that is as long as the window."""

    size = TIME

    def make_more(self, rngs):
        self.places = nnx.Param(rngs.normal((self.size, WIDTH)))

    def before(self, x):
        return x + self.places[None, : x.shape[1]]  # places


class LongPlaces(Places):
    """A longer table: the places of the first chunk would be those of all."""

    size = 4 * TIME


class Conv(LSTMs):
    """A convolution over time."""

    def make_more(self, rngs):
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), padding="CAUSAL", rngs=rngs)

    def before(self, x):
        return self.conv(x)  # conv


class Mean(LSTMs):
    """Subtracts a mean over time."""

    def before(self, x):
        return x - x.mean(1, keepdims=True)  # mean


class Dropped(LSTMs):
    """A mask for each row, the same for all time steps."""

    def make_more(self, rngs):
        self.drop = nnx.Dropout(0.5, broadcast_dims=(1,), rngs=rngs)

    def before(self, x):
        return self.drop(x)


class NoiseInLoop(LSTMs):
    """Noise that a loop adds, which nothing tells apart from what it computes."""

    def make_more(self, rngs):
        self.rngs = rngs.fork()

    def before(self, x):
        key = self.rngs.dropout.key[...]

        def add(n, x):
            return x + jax.random.normal(jax.random.fold_in(key, n), x.shape)

        return jax.lax.fori_loop(0, 2, add, x)


class Sometimes(LSTMs):
    """Another program for a whole window."""

    def before(self, x):
        return x - x.mean(1, keepdims=True) if x.shape[1] == TIME else x


class Convs(LSTMs):
    """Blocks without state."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.rnns = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])


def check(model, arrays=ARRAYS):
    def loss(model, batch):
        logits = model(batch["x"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jaxpar.mean(nll, batch["weight"])

    task = jaxpar.adopt(lambda rngs: model(rngs), loss, "rnns", batches=arrays, batch_size=4)
    api.check_before_run(task, Parallel("pp2", PipelineConfig(num_chunks=4)))


def line_of(comment):
    with open(__file__) as file:
        return 1 + next(n for n, text in enumerate(file) if text.endswith(f"# {comment}\n"))


def test_recurrent_layers_run_in_chunks():
    check(LSTMs)


def test_arrays_with_other_numbers_of_time_steps_are_refused():
    message = r"in the model LSTMs arrays of a batch have 8 time steps \(x\) .* and 6 time steps \(z\); put"
    with pytest.raises(ValueError, match=message):
        check(LSTMs, ARRAYS | {"z": np.zeros((40, 6), np.float32)})


REFUSED = {
    Places: (
        "its code has a fixed number of time steps (test_adopt_time.py, line {places})",
        "num_chunks=1",
    ),
    LongPlaces: (
        "(test_adopt_time.py, line {places}) gives other numbers",
        "each time step independently",
    ),
    Conv: ("(test_adopt_time.py, line {conv}) gives other numbers", "each time step independently"),
    Mean: ("(test_adopt_time.py, line {mean}) gives other numbers", "each time step independently"),
    Dropped: ("random numbers are drawn that are not of one row and one time step", "num_chunks=1"),
    NoiseInLoop: (
        "random numbers are drawn that are not of one row and one time step",
        "num_chunks=1",
    ),
    Sometimes: ("before the blocks gives other numbers when", "each time step independently"),
    Convs: ("no block has an nnx.RNN", "num_chunks=1"),
}


@pytest.mark.rows(3, "full")
@pytest.mark.parametrize("model", REFUSED)
def test_refused(model):
    lines = {name: line_of(name) for name in ("places", "conv", "mean")}
    fact, remedy = REFUSED[model]
    with pytest.raises(ValueError, match="Fix: ") as error:
        check(model)
    wrong, _, fix = str(error.value).partition("\nFix: ")
    assert fact.format(**lines) in wrong
    assert remedy in fix
