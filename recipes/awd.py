"""AWD-LSTM (Merity et al. 2017, arXiv:1708.02182): a language model, and what the paper adds to it.

    python -m jaxpar train recipes/awd.py:AWD --corpus ptb

The numbers are those of the paper's repository for the Penn Treebank. Not as there: a last layer as wide as
the others and no tied embedding; all initial weights within 0.03, there within 0.1 and, of the recurrent
layers, 0.029; windows of 80 steps at most.

Everything that is drawn is a function of the seed, the step and what it is for: any mesh and schedule draws
the same, and nothing is drawn in evaluation.

Legend of the dim suffixes: B batch, T time, H hidden, V vocabulary, W windows of an epoch.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from jaxpar import LayerContext, OptimizerConfig, Sums, TrainConfig, lm
from jaxpar.base.checks import require, require_not_negative, require_rate
from jaxpar.model.optimizer import learning_rate

LEAST = 5  # steps of a window
MATRICES = ("mlstm", "gated_delta")  # layers whose states are matrices
NLL = "nll"  # a metric: the loss without penalties
WORDS, KERNELS = 2**30, 2**30 + 1  # tell the keys of masks from those of layers


def option(default: Any) -> Any:
    """A field that may change between two runs of one checkpoint."""
    return dataclasses.field(default=default, metadata={"free": True})


# ---- options, and what follows from them ----


@dataclasses.dataclass(frozen=True)
class AWD(lm.LM):
    """The language model, its regularization, and averaged SGD.

    `dropout` is the rate between layers. All of its masks are held: one for all time steps of a window
    (variational dropout, Gal and Ghahramani 2016, arXiv:1512.05287).

    Attributes:
      input_dropout: rate on the embedded inputs.
      output_dropout: rate before the head.
      word_dropout: rate at which words lose their whole embedding, at all their places in a batch at once.
      drop_connect: rate on the weights of the recurrent kernels (DropConnect).
      ar: weight of the mean square of what goes into the head, in the loss of training.
      tar: weight of the mean square of how much the last layer's outputs, without dropout, change from one
        step of a window to the next.
      window_mean: of the normal distribution that lengths of windows are drawn from, in steps; 0 makes all of
        them `seq_len` steps long. Lengths are from 5 to `seq_len`, and the learning rate of a step is
        multiplied by length / mean.
      window_spread: its standard deviation.
      short_windows: the share of windows for which half the mean is taken.
      average_after: n: when a validation loss is above the lowest of all but the last n before it, parameters
        begin to be averaged over the steps that follow, and their mean is what is evaluated (NT-ASGD).
    """

    # 500 epochs.
    train: ClassVar[TrainConfig] = TrainConfig(
        340_500, clip_norm=0.25, log_every=100, eval_every=681, checkpoint_every=681
    )

    has_blocks: ClassVar[bool] = False  # layers of any widths, one after the other

    num_layers: int = 3
    hidden_size: int = 1150
    embed_size: int = 400
    dropout: float = option(0.25)
    forget_bias: float = option(0.0)
    init_range: float = option(0.03)
    batch_size: int = option(20)
    seq_len: int = option(80)
    optimizer: OptimizerConfig = option(
        OptimizerConfig("sgd", 30.0, "constant", warmup_steps=0, weight_decay=1.2e-6)
    )
    tie_embedding: bool = True
    input_dropout: float = option(0.4)
    output_dropout: float = option(0.4)
    word_dropout: float = option(0.1)
    drop_connect: float = option(0.5)
    ar: float = option(2.0)
    tar: float = option(1.0)
    window_mean: int = option(70)
    window_spread: float = option(5.0)
    short_windows: float = option(0.05)
    average_after: int = option(5)

    def __post_init__(self):
        super().__post_init__()
        for name in (
            "input_dropout", "output_dropout", "word_dropout", "drop_connect", "short_windows",
        ):  # fmt: skip
            require_rate(self, name)
        require_not_negative(self, "ar", "tar", "window_spread")
        require(
            self.drop_connect == 0 or self.layer not in ("rglru", "mingru", *MATRICES),
            f"drop_connect={self.drop_connect}: layer={self.layer!r} has no recurrent kernel to drop weights "
            f"of; use 0, or another layer",
        )
        require(
            self.tar == 0 or self.layer not in MATRICES,
            f"tar={self.tar}: the state of layer={self.layer!r} has no last output, with which "
            f"the first one is compared; use 0, or another layer",
        )
        mean = self.window_mean
        require(
            mean == 0 or mean >= LEAST,
            f"window_mean={mean}: windows have {LEAST} steps or more; use {LEAST}, or 0 for one length",
        )
        require(
            not (mean and self.reads_lines),
            f"window_mean={mean}: lengths are drawn where the text is one long stream, here its lines are "
            f"read; use window_mean=0, or num_buckets=0 and no packed",
        )
        require(
            self.average_after > 0,
            f"average_after={self.average_after}: must be 1 or more; with a large number nothing is averaged",
        )

    def make_model(self, rngs: nnx.Rngs) -> "AWDModel":
        """The model."""
        return AWDModel(self, rngs=rngs)

    @property
    def widths(self) -> tuple[int, ...]:
        """As published: the embedding's, those of the layers, and the embedding's again if it is the head."""
        inner = (self.hidden_size,) * (self.num_layers - 1)
        return self.embed_size, *inner, self.embed_size if self.tie_embedding else self.hidden_size

    @property
    def layer_class(self) -> Any:
        """That of the language model, with masks, late windows and the penalty on changes."""
        return awd_layer(super().layer_class, self.input_dropout, self.tar, self.num_layers - 1)

    def batches_of(self, tokens: np.ndarray, separator: int, seed: int | None = None) -> Any:
        """Windows of random lengths of any text.

        Raises:
          ValueError: it is too short, or windows of training are to be longer than seq_len in the mean.
        """
        if not self.window_mean:
            return super().batches_of(tokens, separator, seed)
        return RandomWindows(self, tokens, seed)

    def example_batch(self) -> Any:
        """Random tokens."""
        batch = super().example_batch()
        return late(batch) if self.window_mean else batch

    def metrics(self, loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Perplexity, without penalties."""
        return super().metrics(means.get(NLL, loss), means)

    def describe(self) -> list[tuple[str, str]]:
        """Text, vocabulary and batches."""
        *lines, (name, batch) = super().describe()
        if self.window_mean:
            batch = f"{self.batch_size} rows x {self.seq_len} steps or less, {self.window_mean} in the mean"
        return [*lines, (name, batch)]

    def make_optimizer(self, num_steps: int) -> optax.GradientTransformation:
        """With room for the mean of the parameters."""
        return averaging(super().make_optimizer(num_steps))

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """That of the settings, which `make_optimizer` uses."""
        return learning_rate(self.optimizer, num_steps)

    def after_validation(self, opt_state: "Averaged", losses: Mapping[int, float]) -> "Averaged":
        """The mean begins here, if it has not begun and validation has become worse."""
        if int(opt_state.steps) >= 0 or not is_worse(losses, self.average_after):
            return opt_state
        return begin_average(opt_state)

    def evaluated_params(self, params: Any, opt_state: "Averaged") -> Any:
        """The mean, if it has begun."""
        return mean_with(params, opt_state)


# ---- windows of random lengths ----


class Window(NamedTuple):
    """A batch whose text begins late; as `lm.Batch`, and with these.

    Attributes:
      padding: steps before the text.
      rate: what the learning rate is multiplied by.
      state: of a layer before the text, for that layer alone.
    """

    inputs_BT: Any
    targets_BT: Any
    starts: Any
    resets: Any = None
    draw: Any = None
    lengths: Any = None
    padding: Any = 0
    rate: Any = 1.0
    state: Any = None


def late(batch: lm.Batch) -> Window:
    """A batch whose text begins with its first step."""
    return Window(*batch)


class RandomWindows:
    """Windows of a text as one long stream for each row; their lengths are drawn from (seed, epoch).

    All are arrays of one length, the longest: one program. Shorter ones begin late:

        step of the window   0 1 2 3 4 5 6 7
        tokens                   d e f g h i     padding=2: before them nothing counts

    An epoch begins at a place of its own and has as many windows as read the text once in the mean. In
    evaluation (without a seed) all windows are of the longest length, as of `lm.TokenStreams`.
    """

    def __init__(self, task: AWD, tokens: np.ndarray, seed: int | None):
        self.task, self.tokens, self.seed, self.batch_size = task, tokens, seed, task.batch_size
        self.whole = lm.TokenStreams(tokens, task.batch_size, task.seq_len, seed)
        self.num_windows = self.whole.num_windows
        if seed is not None:
            require(
                task.window_mean <= task.seq_len,
                f"window_mean={task.window_mean} is more than seq_len={task.seq_len}, the longest; use "
                f"seq_len={round(task.window_mean + 2 * task.window_spread)}",
            )
            expected = task.window_mean * (1 - task.short_windows / 2)  # but for what is cut off
            self.num_windows = max(int((len(tokens) - 1) // task.batch_size / expected), 1)

    def batch(self, step: int, rows: slice = slice(None)) -> Window:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked."""
        if self.seed is None:
            return late(self.whole.batch(step, rows))
        epoch, window = divmod(step, self.num_windows)
        N, B, T = len(self.tokens), self.batch_size, self.task.seq_len
        begin = int(np.random.default_rng([self.seed, epoch]).integers(N))
        lengths_W = self.draw(np.random.default_rng([self.seed, epoch, 1]), self.num_windows)
        length, end = int(lengths_W[window]), int(lengths_W[: window + 1].sum())
        stream_B = np.arange(B)[rows] * (N - 1) // B
        place_BT = begin + stream_B[:, None] + end + np.arange(T) - T
        inside_T = np.arange(T) >= T - length
        inputs_BT, targets_BT = (self.tokens[(place_BT + ahead) % N] for ahead in (0, 1))
        return Window(
            np.where(inside_T, inputs_BT, 0).astype(np.int32),
            np.where(inside_T, targets_BT, lm.IGNORE).astype(np.int32),
            starts=window == 0,
            padding=T - length,
            rate=length / self.task.window_mean,
        )

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """The lengths of `count` windows, integers [count]."""
        task = self.task
        is_short = rng.random(count) < task.short_windows
        means = np.where(is_short, task.window_mean / 2, task.window_mean)
        lengths = rng.normal(means, task.window_spread).astype(np.int64)
        return np.clip(lengths, LEAST, task.seq_len)


# ---- the model ----


class AWDModel(lm.LanguageModel):
    """The language model with masks and penalties; its layers are of a class that `awd_layer` makes."""

    def __init__(self, task: AWD, *, rngs: nnx.Rngs):
        super().__init__(task, rngs=rngs)
        self.dropout = 0.0  # before the head: its mask is held, and drawn here
        self.output_dropout, self.word_dropout = task.output_dropout, task.word_dropout
        self.drop_connect, self.ar = task.drop_connect, task.ar

    def draw(self, key: jax.Array) -> "AWDModel":
        """The model with some weights of its recurrent kernels dropped; a mask is that of its layer."""
        if self.drop_connect == 0.0:
            return self
        model, key = nnx.clone(self), jax.random.fold_in(key, KERNELS)
        for kind, layers in zip(self.layers.kinds, self.layers.slots.rows, strict=True):
            w_h = getattr(model.layers, kind).w_h
            drop = functools.partial(drop_weights, rate=self.drop_connect, key=key)
            w_h[...] = jax.vmap(drop)(w_h[...], jnp.asarray(layers, jnp.int32))
        return model

    def first(self, batch: Any, at: LayerContext) -> jax.Array:
        """Embedded inputs, without the words that are dropped."""
        return self._drop_words(super().first(batch, at), batch, at)

    def last(self, y_TBH: jax.Array, batch: Any, at: LayerContext) -> Sums:
        """With the penalty in training; the metric `nll` is without it, and without that of layers."""
        y_TBH = held_dropout(y_TBH, self.output_dropout, at)
        return _with_cost(super().last(y_TBH, batch, at), self._cost(y_TBH, batch, at))

    def last_part(self, y_TBH: jax.Array, batch: Any, at: LayerContext) -> Sums:
        """`last` on every stage with its part of the vocabulary; all of them have all of y."""
        y_TBH = held_dropout(y_TBH, self.output_dropout, at)
        cost = self._cost(y_TBH, batch, at)
        cost = None if cost is None else lax.pmean(cost, "stage")
        return _with_cost(super().last_part(y_TBH, batch, at), cost)

    def _drop_words(self, x_TBH: jax.Array, batch: Any, at: LayerContext) -> jax.Array:
        """Embeddings, or their gradients, without those of the words that are dropped."""
        if self.word_dropout == 0.0 or at.key is None:
            return x_TBH
        key, rate = jax.random.fold_in(at.key, WORDS), self.word_dropout
        is_kept_V = jax.random.bernoulli(key, 1.0 - rate, (self.vocab_size,))
        scale_V = jnp.where(is_kept_V, 1.0 / (1.0 - rate), 0.0).astype(x_TBH.dtype)
        return x_TBH * scale_V[batch.inputs_BT][..., None]

    def _cost(self, y_TBH: jax.Array, batch: Any, at: LayerContext) -> jax.Array | None:
        """Of what goes into the head; None in evaluation."""
        return None if at.key is None else self.ar * over_targets(square_of(y_TBH), batch)


@functools.cache
def awd_layer(layer: Any, input_dropout: float, tar: float, last: int) -> Any:
    """A class of layers with held masks that begins late where the batch says so.

    Args:
      layer: a class of `jaxpar.nn`; the first array of its carry is its last output.
      input_dropout: rate of the first layer.
      tar: what the last layer adds to the loss, for the mean square of how much its outputs change.
      last: its number.
    """

    class AWDLayer(layer):
        kind_name = getattr(layer, "kind_name", layer.__name__)  # parameters are where they were

        def __init__(self, width: int, *, dropout: float, **options: Any):
            super().__init__(width, **options)
            self.held = dropout

        def begins_with(self, x_TBH: jax.Array, at: LayerContext) -> Any:
            state = getattr(at.batch, "state", None)
            return super().begins_with(x_TBH, at) if state is None else state

        def __call__(self, carry: Any, x_TBH: jax.Array, at: LayerContext) -> tuple[Any, ...]:
            (T, B, _), padding, inner = x_TBH.shape, getattr(at.batch, "padding", None), at
            begins_T = at.time + jnp.arange(T) == (0 if padding is None else padding)
            begins_TB = jnp.broadcast_to(begins_T[:, None], (T, B))
            if padding is not None:
                inner = at._replace(batch=at.batch._replace(resets=begins_TB, state=carry))
            rate = jnp.where(at.layer == 0, input_dropout, self.held)
            after, y_TBH = super().__call__(carry, held_dropout(x_TBH, rate, at), inner)
            if padding is not None:
                is_padding = at.time + T <= padding
                after = jax.tree.map(lambda a, b: jnp.where(is_padding, a, b), carry, after)
            if tar == 0.0:
                return after, y_TBH
            nothing = jnp.float32(0)
            if at.key is None:  # in evaluation
                return after, y_TBH, Sums(nothing, nothing)
            h_BH = jax.tree.leaves(carry)[0].astype(y_TBH.dtype)
            change_TB = square_of(y_TBH - jnp.concatenate([h_BH[None], y_TBH[:-1]]))
            if at.resets is not None:
                begins_TB |= at.resets
            cost = tar * over_targets(jnp.where(begins_TB, 0.0, change_TB), at.batch)
            return after, y_TBH, Sums(jnp.where(at.layer == last, cost, nothing), nothing)

    AWDLayer.__name__ = AWDLayer.__qualname__ = layer.__name__
    return AWDLayer


def over_targets(cost_TB: jax.Array, batch: Any) -> jax.Array:
    """The sum over the steps that count."""
    return jnp.sum(jnp.where(batch.targets_BT != lm.IGNORE, cost_TB, 0.0))


def held_dropout(x_TBH: jax.Array, rate: float | jax.Array, at: LayerContext) -> jax.Array:
    """Dropout with one mask for all time steps of a window, a function of key, layer and row."""
    if at.key is None:
        return x_TBH
    key = jax.random.fold_in(at.key, at.layer)
    rows_B = at.row + jnp.arange(x_TBH.shape[1], dtype=jnp.int32)

    def keep(row):
        return jax.random.bernoulli(jax.random.fold_in(key, row), 1.0 - rate, x_TBH.shape[2:])

    is_kept_BH = jax.vmap(keep)(rows_B)
    scaled_TBH = (x_TBH.astype(jnp.float32) / (1.0 - rate)).astype(x_TBH.dtype)
    return jnp.where(is_kept_BH[None], scaled_TBH, jnp.zeros((), x_TBH.dtype))


def drop_weights(w: jax.Array, layer: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """A layer's kernel with some weights dropped, the others scaled by 1 / (1 - rate)."""
    is_kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 1.0 - rate, w.shape)
    return jnp.where(is_kept, w / (1.0 - rate), 0.0)


def square_of(y_TBH: jax.Array) -> jax.Array:
    """The mean square over H, float32 [T, B]."""
    return jnp.mean(jnp.square(y_TBH.astype(jnp.float32)), axis=-1)


def _with_cost(sums: Sums, cost: jax.Array | None) -> Sums:
    loss = sums.loss if cost is None else sums.loss + cost
    return Sums(loss, sums.weight, {NLL: sums.loss})


# ---- averaged SGD with its trigger ----


class Averaged(NamedTuple):
    """The state of an optimizer, and the mean of the parameters after its steps but for the last one.

    Attributes:
      steps: since the mean has begun; -1: it has not. int32.
      mean: as the parameters.
      inner: the optimizer's own.
    """

    steps: jax.Array
    mean: Any
    inner: optax.OptState


def averaging(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with a mean of the parameters in its state.

    An optimizer sees the parameters before a step, which are those after the last one: the newest are
    missing, and `mean_with` adds them where the mean is used.
    """

    def init(params: Any) -> Averaged:
        return Averaged(jnp.int32(-1), jax.tree.map(jnp.copy, params), optimizer.init(params))

    def update(updates: Any, state: Averaged, params: Any = None) -> tuple[Any, Averaged]:
        updates, inner = optimizer.update(updates, state.inner, params)
        steps = jnp.where(state.steps < 0, -1, state.steps + 1)
        return updates, Averaged(steps, mean_with(params, state), inner)

    return optimizer._replace(init=init, update=update)


def begin_average(state: Averaged) -> Averaged:
    """The state, its mean now one of the parameters after the steps to come."""
    return state._replace(steps=jax.device_put(np.int32(0), state.steps.sharding))


def mean_with(params: Any, state: Averaged) -> Any:
    """The mean of the parameters after all steps since it began; until then the parameters themselves."""

    def mean_of(mean, new):
        count = state.steps.astype(mean.dtype)
        return jnp.where(state.steps <= 1, new, mean + (new - mean) / count)

    return jax.tree.map(mean_of, state.mean, params)


def is_worse(losses: Mapping[int, float], patience: int) -> bool:
    """Whether the last of some losses is above the lowest of all but the `patience` before it.

    Args:
      losses: by step.
    """
    *before, last = (losses[step] for step in sorted(losses))
    return any(last > loss for loss in before[: max(len(before) - patience, 0)])
