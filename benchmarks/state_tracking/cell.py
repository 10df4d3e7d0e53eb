"""One cell of the table: a layer learns a task from words of 40 letters, and is tested on 256.

    python -m benchmarks.state_tracking.cell parity lstm 0 --seconds 240

prints a line of JSON: how the training ended, and the accuracy in the test by length. Activations are
[time, rows, width].
"""

import argparse
import dataclasses
import functools
import json
import tempfile
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from benchmarks.state_tracking.words import NOTHING, PROBLEMS
from jaxpar import OptimizerConfig, Sums, Task, TrainConfig
from jaxpar.training.callbacks import Report

TRAINED, TESTED = 40, 256  # letters
BIN = 8  # lengths whose accuracy is one number; both are multiples of it
TEST_BATCHES = 8
HELD = 10  # validations in a row without a mistake


class Attention(nnx.Module):
    """That of `examples/transformer.py`, four heads."""

    def __init__(self, width, *, rngs):
        self.attention = nnx.MultiHeadAttention(4, width, use_bias=False, decode=False, rngs=rngs)

    def initial_carry(self, rows):
        """It has no state."""
        return ()

    def __call__(self, carry, x, at):
        """Each step sees itself and those before it."""
        x = x.swapaxes(0, 1)
        return carry, self.attention(x, mask=nnx.make_causal_mask(x[..., 0])).swapaxes(0, 1)


def mlstm(width, *, rngs):
    """One whose input gates begin at exp(0), as here since the first results."""
    layer = jaxpar.nn.MLSTM(width, rngs=rngs)
    layer.b_g[...] = layer.b_g[...].at[0].set(0.0)
    return layer


# By the names that the command has for them.
MIXERS = {
    "lstm": jaxpar.nn.LSTM,
    "gru": jaxpar.nn.GRU,
    "slstm": jaxpar.nn.SLSTM,
    "mlstm": mlstm,
    "mingru": jaxpar.nn.MinGRU,
    "gated_delta": jaxpar.nn.GatedDeltaNet,
    "gated_delta_negative": functools.partial(jaxpar.nn.GatedDeltaNet, negative_eigenvalues=True),
    "transformer": Attention,
}


class Block(nnx.Module):
    """A layer along time and a perceptron, each after a norm, and added to what it is given."""

    def __init__(self, mixer, width, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.mixer = mixer(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def initial_carry(self, rows):
        """That of the layer."""
        return self.mixer.initial_carry(rows)

    def __call__(self, carry, x, at):
        """The layer's state, and the block's outputs."""
        carry, y = self.mixer(carry, self.norms[0](x), at)
        x = x + y
        return carry, x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Reader(nnx.Module):
    """Letters in, blocks, logits of the labels out."""

    def __init__(self, layer, problem, width, num_layers, *, rngs):
        self.embed = nnx.Embed(problem.num_letters, width, rngs=rngs)
        self.has_places = layer == "transformer"
        block = functools.partial(Block, MIXERS[layer], width)
        self.layers = jaxpar.Stack([lambda rngs: block(rngs=rngs)] * num_layers, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, problem.num_labels, rngs=rngs)

    def first(self, batch, at):
        """What goes into the first block."""
        x = self.embed(batch["letters"])
        return x + places(at.time + jnp.arange(len(x)), x.shape[-1]) if self.has_places else x

    def last(self, y, batch, at):
        """Loss and right answers, summed over letters after which something is asked."""
        logits, labels = self.head(self.norm(y)), batch["labels"]
        asked = labels != NOTHING
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        right = jnp.sum(logits.argmax(-1) == labels, dtype=jnp.float32)
        count = jnp.sum(asked, dtype=jnp.float32)
        return Sums(jnp.sum(nll, where=asked), count, {"accuracy": right})

    def predict(self, y, batch, at):
        """The likeliest label after each letter."""
        return {"label": self.head(self.norm(y)).argmax(-1)}


def places(times, width):
    """Sines and cosines, [time, 1, width] (Vaswani et al. 2017): they go on for any length."""
    rates = 1e4 ** -jnp.linspace(0, 1, width // 2, endpoint=False)
    angles = times.astype(jnp.float32)[:, None, None] * rates[None, None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


@dataclasses.dataclass(frozen=True)
class Words:
    """Fresh words in each batch."""

    problem: str
    batch_size: int
    seq_len: int
    split: str
    seed: int
    num_windows: int

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        """The words of a step, and their labels; int32 [rows, time]."""
        # All of them are drawn: a row is the same, whatever others are asked for.
        rng = np.random.default_rng([self.seed, ("train", "valid", "test").index(self.split), step])
        drawn = PROBLEMS[self.problem].draw(rng, self.batch_size, self.seq_len)
        return dict(
            zip(("letters", "labels"), (a[rows].astype(np.int32) for a in drawn), strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Tracking(Task):
    """What was read so far, in a word?

    Attributes:
      problem: a name in `PROBLEMS`.
      layer: a name in `MIXERS`.
      num_layers: blocks.
      width: of what moves between them.
      batch_size: words in a batch.
      seq_len: letters of a word.
      seed: of validation and test.
      optimizer: how it learns.
    """

    problem: str = "parity"
    layer: str = "lstm"
    num_layers: int = 2
    width: int = 128
    batch_size: int = 64
    seq_len: int = TRAINED
    seed: int = 0
    optimizer: OptimizerConfig = OptimizerConfig("adam", 2e-3, "constant", warmup_steps=50)

    unit: ClassVar[str] = "answers"

    def make_model(self, rngs):
        """The network, with its initial values."""
        sizes = PROBLEMS[self.problem], self.width, self.num_layers
        return Reader(self.layer, *sizes, rngs=rngs)

    def make_batches(self, split, seed=None):
        """Words; an evaluation has a few batches."""
        sizes = self.batch_size, self.seq_len
        return Words(self.problem, *sizes, split, self.seed if seed is None else seed, TEST_BATCHES)


class Until(Report):
    """Ends a run that makes no mistake any more, or whose time is over."""

    def __init__(self, seconds: float):
        """Takes the time that a run has, compiling included."""
        self.seconds, self.held = seconds, 0

    def progress(self, progress, num_steps):
        """Looks at the clock."""
        if clock() > self.seconds:
            self.stop("budget")

    def evaluation(self, step, evaluation):
        """Counts validations without a mistake."""
        if evaluation.split == "valid":
            self.held = self.held + 1 if evaluation.metrics["accuracy"] == 1 else 0
            print(f"step {step}, {clock():.0f} s: {evaluation.to_text()}", flush=True)
        if self.held == HELD:
            self.stop("full accuracy")


def clock() -> float:
    """Seconds of the processor since the process began; on a GPU those that pass."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter() - START


START = time.perf_counter()


def train(problem: str, layer: str, seed: int, seconds: float) -> dict[str, Any]:
    """A cell: how its training ended, and its accuracy in the test, by length.

    Args:
      seconds: of training at most; see `clock`.
    Raises:
      InterruptedError: a signal has ended it.
    """
    task = Tracking(problem, layer, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainConfig(
            10**6, seed=seed, log_every=20, eval_every=40, keep_best=False, out_dir=f"{folder}/run"
        )
        result = jaxpar.fit(task, "dp1", settings, report=Until(seconds))
    if not result.evaluations:
        raise InterruptedError(f"{problem} {layer} {seed}: {result}")
    return {
        "problem": problem,
        "layer": layer,
        "seed": seed,
        "ended_by": str(result.stopped_by),
        "steps": len(result.losses),
        "seconds": round(clock(), 1),
        "accuracy": [round(float(a), 4) for a in accuracy_by_length(task, result.state)],
    }


def accuracy_by_length(task: Tracking, state: Any) -> np.ndarray:
    """Of test words of 1 to 8 letters, 9 to 16, ... 249 to 256."""
    longer = dataclasses.replace(task, seq_len=TESTED)
    batches, step = longer.make_batches("test"), jaxpar.make_predict_step(longer, "dp1")
    right_T, asked_T = np.zeros((2, TESTED))
    for number in range(TEST_BATCHES):
        batch = batches.batch(number)
        found_BT, labels_BT = np.asarray(step(state, batch)[1]["label"]), batch["labels"]
        right_T += np.sum(found_BT == labels_BT, axis=0)
        asked_T += np.sum(labels_BT != NOTHING, axis=0)
    return right_T.reshape(-1, BIN).sum(axis=1) / asked_T.reshape(-1, BIN).sum(axis=1)


def main() -> None:
    """Trains one, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("layer", choices=MIXERS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seconds", type=float, default=240.0)
    args = parser.parse_args()
    print(json.dumps(train(args.problem, args.layer, args.seed, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
