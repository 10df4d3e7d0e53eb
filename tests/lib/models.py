"""A model that is none of jaxpar's: layers of any kinds in any order, for the tests of the laws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import LayerContext, OptimizerConfig, SeriesBatches, Stack, Sums, Task, lm, nn
from jaxpar.nn import LSTM, Recurrent, dropout, named_param

WIDTH, FEATURES = 16, 3
START = np.linspace(-0.5, 0.5, WIDTH, dtype=np.float32)
SGD = OptimizerConfig(name="sgd", learning_rate=0.05, warmup_steps=0)


def named(*dims):
    return jaxpar.named(nnx.initializers.lecun_normal(), dims)


def draw(rngs, *shape):
    return jax.random.normal(rngs.params(), shape) / shape[0] ** 0.5


class GRU(nnx.Module):
    """Its state begins anew where the batch says so."""

    carry_dims = ("batch", "hidden")

    def __init__(self, *, rngs):
        dims = ("input", "gates", "hidden")
        self.w_x = named_param(draw(rngs, WIDTH, 3, WIDTH), dims)
        self.w_h = named_param(draw(rngs, WIDTH, 3, WIDTH), dims)

    def initial_carry(self, rows):
        return jnp.broadcast_to(START, (rows, WIDTH))

    def __call__(self, h, x_TBW, at: LayerContext):
        x_TBW = dropout(x_TBW, 0.2, at)
        zx_TB3W = jnp.einsum("tbi,igh->tbgh", x_TBW, self.w_x[...])

        def step(h, inputs):
            zx, is_new = inputs
            h = jnp.where(is_new[:, None], START[None], h)
            zh = jnp.einsum("bi,igh->bgh", h, self.w_h[...])
            r, z = nnx.sigmoid(zx[:, 0] + zh[:, 0]), nnx.sigmoid(zx[:, 1] + zh[:, 1])
            h = (1 - z) * jnp.tanh(zx[:, 2] + r * zh[:, 2]) + z * h
            return h, h

        resets_TB = jnp.zeros(x_TBW.shape[:2], bool) if at.resets is None else at.resets
        return jax.lax.scan(step, h, (zx_TB3W, resets_TB))


class Block(nnx.Module):
    """Attention over the whole window, so it takes one chunk; heads and inner units are split."""

    def __init__(self, *, rngs):
        qkv = draw(rngs, WIDTH, 3, 2, WIDTH // 2)
        self.qkv = named_param(qkv, ("input", None, "heads", None))
        up, down = named("input", "inner"), named("inner", None)
        self.up = nnx.Linear(WIDTH, 32, kernel_init=up, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, kernel_init=down, use_bias=False, rngs=rngs)

    def __call__(self, carry, x_TBW, at: LayerContext):
        q, k, v = jnp.moveaxis(jnp.einsum("tbw,wchd->tbchd", x_TBW, self.qkv[...]), 2, 0)
        scores = jnp.einsum("tbhd,sbhd->tsbh", q, k) * (WIDTH // 2) ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[:2], bool))[..., None, None]
        mixed = jnp.einsum("tsbh,sbhd->tbhd", jax.nn.softmax(jnp.where(causal, scores, -1e9), 1), v)
        x_TBW = x_TBW + jnp.tanh(mixed.reshape(x_TBW.shape))
        return carry, x_TBW + self.down(dropout(nnx.gelu(self.up(x_TBW)), 0.2, at, number=1))


class Dense(nnx.Module):
    def __init__(self, *, rngs):
        self.kernel = nnx.Param(draw(rngs, WIDTH, WIDTH))  # without names: whole on each device
        self.bias = nnx.Param(jnp.linspace(-0.5, 0.5, WIDTH))

    def __call__(self, carry, x, at: LayerContext):
        return carry, x + jnp.tanh(x @ self.kernel[...] + self.bias[...][None, None])


class Wide(nnx.Module):
    """Of any inner width, none a multiple of a row's columns; what is not trained is of another dtype."""

    def __init__(self, inner, *, rngs):
        self.up = nnx.Linear(WIDTH, inner, kernel_init=named("input", "inner"), rngs=rngs)
        self.down = nnx.Linear(inner, WIDTH, kernel_init=named("inner", None), rngs=rngs)
        self.scale = nnx.Variable(jnp.linspace(0.5, 1, WIDTH).astype(jnp.bfloat16))

    def __call__(self, carry, x, at):
        y = self.down(jnp.tanh(dropout(self.up(x), 0.2, at)))
        return carry, 0.5 * x + y * self.scale[...].astype(x.dtype)[None, None]


def flax_cell(rngs):
    return Recurrent(nnx.SimpleCell(WIDTH, WIDTH, rngs=rngs))


MAKERS = {
    "gru": lambda rngs: GRU(rngs=rngs),
    "block": lambda rngs: Block(rngs=rngs),
    "dense": lambda rngs: Dense(rngs=rngs),
    "cell": flax_cell,
    "flax gru": lambda rngs: Recurrent(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)),
    "own gru": lambda rngs: nn.GRU(WIDTH, rngs=rngs, dropout=0.2),
    "mingru": lambda rngs: nn.MinGRU(WIDTH, rngs=rngs, dropout=0.2),
    "rglru": lambda rngs: nn.RGLRU(WIDTH, rngs=rngs, dropout=0.2),
    "slstm": lambda rngs: nn.SLSTM(WIDTH, rngs=rngs, dropout=0.2),
    "both ways": lambda rngs: nn.Bidirectional(
        nn.GRU(WIDTH, rngs=rngs, dropout=0.2), Recurrent(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))
    ),
    **{f"wide {inner}": lambda rngs, inner=inner: Wide(inner, rngs=rngs) for inner in (20, 50, 60)},
}


class Regression(nnx.Module):
    """`scale` is used before the layers and after them."""

    def __init__(self, kinds, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.layers = Stack([MAKERS[kind] for kind in kinds], rngs=rngs)

    def first(self, batch, at: LayerContext):
        return self.inputs(batch["x"]) * self.scale[...][None, None] * batch["level"][:, :, None]

    def last(self, y, batch, at: LayerContext):
        error = self.outputs(y * self.scale[...][None, None]) - batch["y"]
        weight = batch["weight"]
        return Sums(
            loss=jnp.sum(jnp.square(error) * weight[..., None]),
            weight=jnp.sum(weight),
            metrics={"mae": jnp.sum(jnp.abs(error) * weight[..., None])},
        )


class Series(SeriesBatches):
    """With one number a row that has no time, and weights that differ."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        level = 1 + batch["x"][:, :1, 0] ** 2
        weight = batch["weight"] * (0.5 + batch["x"][..., 1] ** 2).astype(np.float32)
        return {**batch, "level": level.astype(np.float32), "weight": weight}


class WithStatic(Series):
    """With arrays without time: the first numbers of each row, and their signs."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        first = batch["x"][:, 0]
        return {**batch, "static": {"first": first, "sign": np.sign(first)}}


@dataclasses.dataclass(frozen=True)
class Regress(jaxpar.Task):
    """A random walk, each step foretold from those before."""

    kinds: tuple[str, ...] = ("gru", "gru", "dense", "cell")
    batch_size: int = 16
    seq_len: int = 8
    freeze: str | None = None
    optimizer: OptimizerConfig = SGD

    @property
    def frozen(self):
        return nnx.Nothing() if self.freeze is None else nnx.PathContains(self.freeze)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"heads": "tensor", "inner": "tensor"})

    def make_model(self, rngs):
        return Regression(self.kinds, rngs=rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(["train", "valid", "test"].index(split))
        walk = rng.normal(size=(600, FEATURES)).cumsum(0).astype(np.float32) / 10
        resets = (rng.random(599) < 0.1).astype(np.float32)
        arrays = {"x": walk[:-1], "y": walk[1:], "resets": resets}
        return Series(arrays, self.batch_size, self.seq_len, seed)


class Tied(nnx.Module):
    """Most of its weights are one table of Flax, before the layers and after them; nothing names its dims."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(1000, 16, rngs=rngs)
        self.layers = Stack([lambda rngs: LSTM(16, rngs=rngs)] * 4, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        logits, weight = self.embed.attend(y), batch["weight"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return Sums(jnp.sum(losses * weight), jnp.sum(weight))


@dataclasses.dataclass(frozen=True)
class Tokens(Task):
    optimizer = SGD

    def make_model(self, rngs):
        return Tied(rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).integers(0, 1000, 1000).astype(np.int32)
        return SeriesBatches({"x": x[:-1], "y": x[1:]}, batch_size=8, seq_len=8, seed=seed)


@dataclasses.dataclass(frozen=True)
class OfNoText(lm.LM):
    """A language model that reads no corpus."""

    def describe(self):
        return []

    def make_batches(self, split, seed=None):
        tokens = np.zeros((self.batch_size, self.seq_len), np.int32)
        return jaxpar.ArrayBatches({"inputs": tokens}, self.batch_size, seed)
