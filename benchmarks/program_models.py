"""Models whose training steps `benchmarks.programs` lowers: one for each way that a model can be made.

What an array is called, and in which class of layers, is part of a program: to rename one changes programs.

Legend of the dim suffixes: T time, B batch, W width, F features, E experts, K keys.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jax import lax

import jaxpar
from jaxpar import LayerContext, OptimizerConfig, Stack, Sums, Task, nn

WIDTH, FEATURES = 16, 3
START = np.linspace(-0.5, 0.5, WIDTH, dtype=np.float32)  # of the state of a GRU
SGD = OptimizerConfig(name="sgd", learning_rate=0.05, warmup_steps=0)


def draw(rngs, *shape):
    return jax.random.normal(rngs.params(), shape) / shape[0] ** 0.5


def named_kernel(*dims):
    """An initializer of a kernel whose dims have these names."""
    return jaxpar.named(nnx.initializers.lecun_normal(), dims)


# ---- layers ----


class GRU(nnx.Module):
    """A GRU whose state begins anew where the batch says so, and not at zero."""

    carry_dims = ("batch", "hidden")

    def __init__(self, *, rngs):
        dims = ("input", "gates", "hidden")
        self.w_x = nn.named_param(draw(rngs, WIDTH, 3, WIDTH), dims)
        self.w_h = nn.named_param(draw(rngs, WIDTH, 3, WIDTH), dims)

    def initial_carry(self, rows):
        return jnp.broadcast_to(START, (rows, WIDTH))

    def __call__(self, h_BW, x_TBW, at: LayerContext):
        x_TBW = nn.dropout(x_TBW, 0.2, at)
        zx_TB3W = jnp.einsum("tbi,igh->tbgh", x_TBW, self.w_x[...])

        def step(h_BW, inputs):
            zx_B3W, is_new_B = inputs
            h_BW = jnp.where(is_new_B[:, None], START[None], h_BW)
            zh_B3W = jnp.einsum("bi,igh->bgh", h_BW, self.w_h[...])
            r_BW = nnx.sigmoid(zx_B3W[:, 0] + zh_B3W[:, 0])
            z_BW = nnx.sigmoid(zx_B3W[:, 1] + zh_B3W[:, 1])
            h_BW = (1 - z_BW) * jnp.tanh(zx_B3W[:, 2] + r_BW * zh_B3W[:, 2]) + z_BW * h_BW
            return h_BW, h_BW

        return lax.scan(step, h_BW, (zx_TB3W, at.resets))


class Block(nnx.Module):
    """Attention over the whole window, so it takes one chunk; heads and inner units are split."""

    def __init__(self, *, rngs):
        qkv = draw(rngs, WIDTH, 3, 2, WIDTH // 2)
        self.qkv = nn.named_param(qkv, ("input", None, "heads", None))
        up, down = named_kernel("input", "inner"), named_kernel("inner", None)
        self.up = nnx.Linear(WIDTH, 32, kernel_init=up, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, kernel_init=down, use_bias=False, rngs=rngs)

    def __call__(self, carry, x_TBW, at: LayerContext):
        q, k, v = jnp.moveaxis(jnp.einsum("tbw,wchd->tbchd", x_TBW, self.qkv[...]), 2, 0)
        scores = jnp.einsum("tbhd,sbhd->tsbh", q, k) * (WIDTH // 2) ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[:2], bool))[..., None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), 1)
        mixed = jnp.einsum("tsbh,sbhd->tbhd", weights, v)
        x_TBW = x_TBW + jnp.tanh(mixed.reshape(x_TBW.shape))
        inner = nn.dropout(nnx.gelu(self.up(x_TBW)), 0.2, at, number=1)
        return carry, x_TBW + self.down(inner)


class Dense(nnx.Module):
    """Dims without names: each device has the parameters whole."""

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(draw(rngs, WIDTH, WIDTH))
        self.bias = nnx.Param(jnp.linspace(-0.5, 0.5, WIDTH))

    def __call__(self, carry, x_TBW, at: LayerContext):
        return carry, x_TBW + jnp.tanh(x_TBW @ self.kernel[...] + self.bias[...][None, None])


class Wide(nnx.Module):
    """Of any inner width; what is not trained is bfloat16."""

    def __init__(self, inner, *, rngs):
        up, down = named_kernel("input", "inner"), named_kernel("inner", None)
        self.up = nnx.Linear(WIDTH, inner, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(inner, WIDTH, kernel_init=down, rngs=rngs)
        self.scale = nnx.Variable(jnp.linspace(0.5, 1, WIDTH).astype(jnp.bfloat16))

    def __call__(self, carry, x_TBW, at: LayerContext):
        y_TBW = self.down(jnp.tanh(nn.dropout(self.up(x_TBW), 0.2, at)))
        return carry, 0.5 * x_TBW + y_TBW * self.scale[...].astype(x_TBW.dtype)[None, None]


class Penalized(nnx.Module):
    """A GRU of Flax that adds a penalty on its outputs to the loss, and counts how many are above 0."""

    def __init__(self, *, rngs):
        self.cell = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)

    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH))

    def __call__(self, carry, x_TBW, at: LayerContext):
        with jax.numpy_rank_promotion("allow"):
            carry, y_TBW = lax.scan(self.cell, carry, x_TBW)
        penalty = 0.3 * jnp.sum(jnp.square(y_TBW) * at.batch["weight"][..., None])
        return carry, y_TBW, Sums(penalty, 0, {"penalty": penalty, "above": jnp.sum(y_TBW > 0)})


class Silent(nnx.Module):
    """Beside layers that add to the loss, one that adds nothing."""

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 4)

    def __call__(self, carry, x_TBW, at: LayerContext):
        return carry, jnp.tanh(x_TBW @ self.kernel[...])


class Attention(nnx.Module):
    """Causal attention of each device's part of time to all keys and values, over an axis `context`."""

    whole_window = True

    def __init__(self, *, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, carry, x_TBW, at: LayerContext):
        q_TBW, k_TBW, v_TBW = jnp.split(self.qkv(nn.dropout(x_TBW, 0.2, at)), 3, -1)
        k_KBW = lax.all_gather(k_TBW, "context", tiled=True)
        v_KBW = lax.all_gather(v_TBW, "context", tiled=True)
        time_T1 = at.time + jnp.arange(len(q_TBW))[:, None]
        is_seen_TK = time_T1 >= jnp.arange(len(k_KBW))[None]
        scores_TKB = jnp.einsum("tbw,sbw->tsb", q_TBW, k_KBW) * WIDTH**-0.5
        weights_TKB = jax.nn.softmax(jnp.where(is_seen_TK[..., None], scores_TKB, -1e9), 1)
        return carry, x_TBW + jnp.einsum("tsb,sbw->tbw", weights_TKB, v_KBW)


class Experts(nnx.Module):
    """Rows go to one of four experts over an axis `expert`; the balance of use is a loss."""

    num_experts = 4

    def __init__(self, *, rngs):
        self.router = nnx.Linear(WIDTH, self.num_experts, use_bias=False, rngs=rngs)
        kernel_EWW = jax.random.normal(rngs.params(), (self.num_experts, WIDTH, WIDTH)) / 4
        self.kernel = nn.named_param(kernel_EWW, ("experts", None, None))

    def __call__(self, carry, x_TBW, at: LayerContext):
        scores_TBE = jax.nn.softmax(self.router(x_TBW))
        chosen_TBE = jax.nn.one_hot(scores_TBE.argmax(-1), self.num_experts)
        sent_ETBW = jnp.einsum("tbe,tbw->etbw", chosen_TBE, x_TBW)
        # From [all experts, own rows] to [own experts, all rows], and back.
        received_ETBW = lax.all_to_all(sent_ETBW, "expert", 0, 2, tiled=True)
        answer_ETBW = jnp.tanh(jnp.einsum("etbw,ewv->etbv", received_ETBW, self.kernel[...]))
        back_ETBW = lax.all_to_all(answer_ETBW, "expert", 2, 0, tiled=True)
        y_TBW = x_TBW + jnp.einsum("etbw,tbe->tbw", back_ETBW, chosen_TBE * scores_TBE)
        penalty = 0.1 * jnp.sum(jnp.square(scores_TBE))
        return carry, y_TBW, Sums(penalty, jnp.float32(0), {"penalty": penalty})


class Norm(nnx.Module):
    """Norms each time step by the statistics of four rows."""

    rows_together = 4

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))

    def __call__(self, carry, x_TBW, at: LayerContext):
        weight_TB1 = at.batch["weight"][..., None] + 0.1
        share_TB1 = weight_TB1 / weight_TB1.sum(1, keepdims=True)
        mean_T1W = jnp.sum(x_TBW * share_TB1, 1, keepdims=True)
        variance_T1W = jnp.sum((x_TBW - mean_T1W) ** 2 * share_TB1, 1, keepdims=True)
        y_TBW = (x_TBW - mean_T1W) * (variance_T1W + 1) ** -0.5 * self.scale[...][None, None]
        return carry, x_TBW + nn.dropout(y_TBW, 0.2, at)


class Balanced(nnx.Module):
    """A mixture whose loss asks that eight rows use both experts alike; its carry mixes rows, too."""

    rows_together = 8
    carry_dims = ("batch", "hidden")

    def __init__(self, *, rngs):
        self.router = nnx.Linear(WIDTH, 2, rngs=rngs)
        self.experts = nn.named_param(draw(rngs, WIDTH, 2, WIDTH), ("input", None, "hidden"))

    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH))

    def __call__(self, carry_BW, x_TBW, at: LayerContext):
        def step(carry_BW, x_BW):
            past_BE = carry_BW.mean(1, keepdims=True) * jnp.array([[1.0, -1.0]])
            chance_BE = jax.nn.softmax(x_BW @ self.router.kernel[...] + past_BE)
            answer_BEW = jnp.tanh(jnp.einsum("bi,iew->bew", x_BW, self.experts[...]))
            y_BW = x_BW + jnp.einsum("be,bew->bw", chance_BE, answer_BEW)
            unbalanced = jnp.sum(jnp.square(chance_BE.mean(0) - 0.5))
            return 0.5 * carry_BW + 0.1 * y_BW + y_BW.mean(0, keepdims=True), (y_BW, unbalanced)

        carry_BW, (y_TBW, unbalanced_T) = lax.scan(step, carry_BW, x_TBW)
        unbalanced = jnp.sum(unbalanced_T) * self.rows_together
        return carry_BW, y_TBW, Sums(0.3 * unbalanced, 0.0, {"unbalanced": unbalanced})


class Centred(nnx.Module):
    """Without time: subtracts the mean of eight rows."""

    rows_together = 8

    def __init__(self, *, rngs):
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, carry, x_BW, at: LayerContext):
        weight_B1 = at.batch["weight"][:, None]
        return carry, jnp.tanh(self.mix(x_BW - jnp.mean(x_BW * weight_B1, 0, keepdims=True)))


class Map(nnx.Module):
    """Gives two arrays in a dict: a linear map, and the square of a part of it."""

    def __init__(self, inputs, width, *, rngs):
        self.map = nnx.Linear(inputs, width, use_bias=False, rngs=rngs)

    def __call__(self, carry, x, at: LayerContext):
        y = self.map(x)
        return carry, {"y": y, "square": jnp.square(y[..., :2])}


class Join(nnx.Module):
    """Makes one array of those of `Map`."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, 2))

    def __call__(self, carry, x, at: LayerContext):
        both = jnp.concatenate([x["y"], x["square"] * self.scale[...][None, None]], -1)
        return carry, nn.dropout(both, 0.2, at)


class Conv(nnx.Module):
    """A convolution of images, with a stride."""

    def __init__(self, inputs, outputs, stride, *, rngs):
        strides = (stride, stride)
        self.conv = nnx.Conv(inputs, outputs, (3, 3), strides=strides, use_bias=False, rngs=rngs)

    def __call__(self, carry, x, at: LayerContext):
        return carry, jnp.tanh(self.conv(x))


class Cell(nnx.Module):
    """A recurrent layer, all of whose numbers are of one type."""

    carry_dims = ("batch", "hidden")

    def __init__(self, dtype, *, rngs):
        dims = ("input", "hidden")
        self.w_x = nn.named_param(draw(rngs, WIDTH, WIDTH).astype(dtype), dims)
        self.w_h = nn.named_param(draw(rngs, WIDTH, WIDTH).astype(dtype), dims)
        self.dtype = dtype

    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH), self.dtype)

    def __call__(self, h_BW, x_TBW, at: LayerContext):
        def step(h_BW, x_BW):
            h_BW = jnp.tanh(x_BW @ self.w_x[...] + h_BW @ self.w_h[...])
            return h_BW, h_BW

        return lax.scan(step, h_BW, x_TBW)


def both_ways(rngs):
    """Two GRUs, of jaxpar and of Flax: one reads forward, the other backward."""
    forward = nn.GRU(WIDTH, rngs=rngs, dropout=0.2)
    backward = nn.Recurrent(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))
    return nn.Bidirectional(forward, backward)


LAYERS = {
    "gru": lambda rngs: GRU(rngs=rngs),
    "block": lambda rngs: Block(rngs=rngs),
    "dense": lambda rngs: Dense(rngs=rngs),
    "cell": lambda rngs: nn.Recurrent(nnx.SimpleCell(WIDTH, WIDTH, rngs=rngs)),
    "wide 20": lambda rngs: Wide(20, rngs=rngs),
    "wide 50": lambda rngs: Wide(50, rngs=rngs),
    "wide 60": lambda rngs: Wide(60, rngs=rngs),
    "penalized": lambda rngs: Penalized(rngs=rngs),
    "silent": lambda rngs: Silent(rngs=rngs),
    "attention": lambda rngs: Attention(rngs=rngs),
    "experts": lambda rngs: Experts(rngs=rngs),
    "norm": lambda rngs: Norm(rngs=rngs),
    "balanced": lambda rngs: Balanced(rngs=rngs),
    "both ways": both_ways,
    "flax gru": lambda rngs: nn.Recurrent(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)),
    "own gru": lambda rngs: nn.GRU(WIDTH, rngs=rngs, dropout=0.2),
    "mingru": lambda rngs: nn.MinGRU(WIDTH, rngs=rngs, dropout=0.2),
    "rglru": lambda rngs: nn.RGLRU(WIDTH, rngs=rngs, dropout=0.2),
    "slstm": lambda rngs: nn.SLSTM(WIDTH, rngs=rngs, dropout=0.2),
    "mlstm": lambda rngs: nn.MLSTM(WIDTH, rngs=rngs, dropout=0.2),
    "gated_delta": lambda rngs: nn.GatedDeltaNet(
        WIDTH, rngs=rngs, dropout=0.2, negative_eigenvalues=True
    ),
}


def stack(kinds, rngs):
    return Stack([LAYERS[kind] for kind in kinds], rngs=rngs)


# ---- a random walk, whose next step is told by layers of any kinds ----


class SeriesWithLevels(jaxpar.SeriesBatches):
    """With a number of each row that has no time, and weights that differ."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        level_B1 = 1 + batch["x"][:, :1, 0] ** 2
        weight_BT = batch["weight"] * (0.5 + batch["x"][..., 1] ** 2)
        return {
            **batch,
            "level": level_B1.astype(np.float32),
            "weight": weight_BT.astype(np.float32),
        }


@dataclasses.dataclass(frozen=True)
class RandomWalk(Task):
    """Tells each step of a random walk from those before.

    Attributes:
      kinds: of layers, as of `LAYERS`.
      freeze: a part of the paths of parameters that are not trained.
    """

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
        return SeriesWithLevels(arrays, self.batch_size, self.seq_len, seed)


class Regression(nnx.Module):
    """`scale` is used before the layers and after them."""

    def __init__(self, kinds, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.layers = stack(kinds, rngs)

    def first(self, batch, at: LayerContext):
        return self.inputs(batch["x"]) * self.scale[...][None, None] * batch["level"][:, :, None]

    def last(self, y_TBW, batch, at: LayerContext):
        error_TBF = self.outputs(y_TBW * self.scale[...][None, None]) - batch["y"]
        weight_TB = batch["weight"]
        return Sums(
            loss=jnp.sum(jnp.square(error_TBF) * weight_TB[..., None]),
            weight=jnp.sum(weight_TB),
            metrics={"mae": jnp.sum(jnp.abs(error_TBF) * weight_TB[..., None])},
        )


# ---- layers of unequal shapes, which are stored in pools ----


@dataclasses.dataclass(frozen=True)
class UnequalLayers(RandomWalk):
    """Kinds of layers of unequal shapes, and ends that have arrays of their own."""

    kinds: tuple[str, ...] = ("gru", "wide 60", "wide 20", "gru")
    batch_size: int = 8
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=0.01, warmup_steps=0)

    def make_model(self, rngs):
        return RegressionWithMaps(self.kinds, rngs=rngs)


class RegressionWithMaps(Regression):
    """Each end has an array of its own, which is not called and so not in parts over stages."""

    def __init__(self, kinds, *, rngs):
        super().__init__(kinds, rngs=rngs)
        self.mix = nnx.Param(draw(rngs, WIDTH, 80))
        self.unmix = nnx.Param(draw(rngs, WIDTH, 90))

    def first(self, batch, at: LayerContext):
        x_TBW = super().first(batch, at)
        return x_TBW + jnp.tanh(x_TBW @ self.mix[...]) @ self.mix[...].T

    def last(self, y_TBW, batch, at: LayerContext):
        y_TBW = y_TBW + jnp.tanh(y_TBW @ self.unmix[...]) @ self.unmix[...].T
        return super().last(y_TBW, batch, at)


# ---- large ends, which stages share ----

WORDS = 64


@dataclasses.dataclass(frozen=True)
class LargeEnds(RandomWalk):
    """Tables of words at one end, a wide map at the other; `how` as of `EndsOfTables`."""

    how: tuple[str, ...] = ()

    def make_model(self, rngs):
        return EndsOfTables(self.how, rngs=rngs)


class EndsOfTables(nnx.Module):
    """Words and numbers go in through layers of jaxpar and Flax.

    `how` has "deep" for a map and back after them; "twice" where a table is used once more; "loop" where
    it is used in a loop.
    """

    def __init__(self, how, *, rngs):
        self.how = how
        self.words = nn.Embedding(WORDS, WIDTH, rngs=rngs)
        self.marks = nnx.List([nnx.Embed(WORDS, WIDTH, rngs=rngs)])
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dims=("input", None), rngs=rngs)
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.layers = stack(("gru", "gru", "dense", "cell"), rngs)
        self.out = nnx.Linear(WIDTH, 8 * FEATURES, rngs=rngs)

    def first(self, batch, at: LayerContext):
        word_TB = (jnp.abs(batch["x"][..., 0]) * 100).astype(jnp.int32) % WORDS
        mark_TB = (jnp.abs(batch["x"][..., 1]) * 100).astype(jnp.int32) % WORDS
        x_TBW = nn.dropout(self.words(word_TB), 0.2, at, number=7) + self.marks[0](mark_TB)
        if "twice" in self.how:
            x_TBW = x_TBW + self.words(mark_TB - WORDS)
        if "loop" in self.how:
            x_TBW = x_TBW + lax.map(self.marks[0], word_TB)
        x_TBW = x_TBW * self.scale[...][None, None] * batch["level"][:, :, None]
        if "deep" in self.how:
            x_TBW = x_TBW + self.down(jnp.tanh(self.up(x_TBW)))
        return x_TBW

    def last(self, y_TBW, batch, at: LayerContext):
        outputs = self.out(y_TBW * self.scale[...][None, None])
        outputs_TBF = outputs.reshape(*y_TBW.shape[:2], FEATURES, -1).mean(-1)
        error_TBF = outputs_TBF - batch["y"]
        loss = jnp.sum(jnp.square(error_TBF) * batch["weight"][..., None])
        loss = loss + 0.1 * jnp.sum(jnp.square(y_TBW))
        return Sums(loss, jnp.sum(batch["weight"]), {"most": jnp.sum(jnp.abs(error_TBF))})


# ---- axes of a mesh that the user adds ----


class Parted(nnx.Module):
    """A model whose layers may use axes of the user."""

    def __init__(self, kinds, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, use_bias=False, rngs=rngs)
        self.layers = stack(kinds, rngs)

    def first(self, batch, at: LayerContext):
        return jnp.tanh(self.inputs(batch["x"]))

    def last(self, y_TBW, batch, at: LayerContext):
        error_TBF = self.outputs(nn.dropout(y_TBW, 0.1, at)) - batch["y"]
        weight_TB = batch["weight"]
        return Sums(jnp.sum(jnp.square(error_TBF) * weight_TB[..., None]), jnp.sum(weight_TB))


@dataclasses.dataclass(frozen=True)
class TimeInParts(RandomWalk):
    """An axis `context` splits time."""

    kinds: tuple[str, ...] = ("attention", "dense", "attention", "dense")
    axes = ("context",)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"time": "context"})

    def make_model(self, rngs):
        return Parted(self.kinds, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class MixtureOfExperts(RandomWalk):
    """An axis `expert` splits experts, and rows as well."""

    kinds: tuple[str, ...] = ("gru", "experts", "dense", "experts")
    optimizer: OptimizerConfig = OptimizerConfig("sgd", 0.05, "constant", warmup_steps=0)
    axes = ("expert",)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"batch": ("data", "expert"), "experts": "expert"})

    def make_model(self, rngs):
        return Parted(self.kinds, rngs=rngs)


# ---- layers of several widths ----


@dataclasses.dataclass(frozen=True)
class Tapered(RandomWalk):
    """From 12 units to 4, by a dict of arrays."""

    def make_model(self, rngs):
        return Taper(rngs=rngs)


class Taper(nnx.Module):
    def __init__(self, *, rngs):
        self.inputs = nnx.Linear(FEATURES, 12, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(4, FEATURES, use_bias=False, rngs=rngs)
        makers = [
            lambda rngs: nn.LSTM(8, inputs=12, rngs=rngs, dropout=0.2),
            lambda rngs: nn.LSTM(8, rngs=rngs, dropout=0.2),
            lambda rngs: nn.LSTM(8, rngs=rngs, dropout=0.2),
            lambda rngs: Map(8, 14, rngs=rngs),
            lambda rngs: Join(rngs=rngs),
            lambda rngs: nn.MinGRU(4, inputs=16, rngs=rngs),
        ]
        self.layers = Stack(makers, rngs=rngs)

    def first(self, batch, at: LayerContext):
        return self.inputs(batch["x"])

    def last(self, y, batch, at: LayerContext):
        error = self.outputs(y) - batch["y"]
        return Sums(jnp.sum(jnp.square(error)), jnp.float32(error.size))


@dataclasses.dataclass(frozen=True)
class Pyramid(Task):
    """Convolutions of images, from 16 x 16 x 8 to 4 x 4 x 64."""

    batch_size: int = 8
    optimizer: OptimizerConfig = SGD

    def make_model(self, rngs):
        return Convolutions(rngs=rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(0)
        images = rng.normal(size=(32, 16, 16, 1)).astype(np.float32)
        labels = rng.integers(0, 3, 32).astype(np.int32)
        return jaxpar.ArrayBatches({"image": images, "label": labels}, self.batch_size, seed)


class Convolutions(nnx.Module):
    time_major = False

    def __init__(self, *, rngs):
        self.stem = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.head = nnx.Linear(64, 3, rngs=rngs)
        makers = [
            lambda rngs: Conv(8, 8, 1, rngs=rngs),
            lambda rngs: Conv(8, 16, 2, rngs=rngs),
            lambda rngs: Conv(16, 32, 2, rngs=rngs),
            lambda rngs: Conv(32, 64, 1, rngs=rngs),
        ]
        self.layers = Stack(makers, rngs=rngs)

    def first(self, batch, at: LayerContext):
        return self.stem(batch["image"])

    def last(self, y, batch, at: LayerContext):
        logits = self.head(y.mean((1, 2)))
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
        return Sums(jnp.sum(nll), jnp.float32(len(nll)))


# ---- a model without time, whose layers mix rows ----


@dataclasses.dataclass(frozen=True)
class Timeless(Task):
    batch_size: int = 32
    optimizer: OptimizerConfig = SGD

    def make_model(self, rngs):
        return Flat(rngs=rngs)

    def make_batches(self, split, seed=None):
        x_NF = np.random.default_rng(0).normal(size=(64, FEATURES)).astype(np.float32)
        weight_N = np.linspace(0.5, 1.5, 64, dtype=np.float32)
        arrays = {"x": x_NF, "y": np.sin(x_NF), "weight": weight_N}
        return jaxpar.ArrayBatches(arrays, self.batch_size, seed)


class Flat(nnx.Module):
    time_major = False

    def __init__(self, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, use_bias=False, rngs=rngs)
        self.layers = Stack([lambda rngs: Centred(rngs=rngs)] * 4, rngs=rngs)

    def first(self, batch, at: LayerContext):
        return self.inputs(batch["x"])

    def last(self, y_BW, batch, at: LayerContext):
        error_B = jnp.sum(jnp.square(self.outputs(y_BW) - batch["y"]), -1)
        return Sums(jnp.sum(error_B * batch["weight"]), jnp.sum(batch["weight"]), {})


# ---- words ----


def random_words(num_words, length, batch_size, seq_len, seed):
    """Batches of words, each with the word after it."""
    words = np.random.default_rng(0).integers(0, num_words, length).astype(np.int32)
    return jaxpar.SeriesBatches({"x": words[:-1], "y": words[1:]}, batch_size, seq_len, seed)


def cross_entropy(logits_TBV, batch):
    losses_TB = optax.softmax_cross_entropy_with_integer_labels(logits_TBV, batch["y"])
    return Sums(jnp.sum(losses_TB * batch["weight"]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class TiedTable(Task):
    optimizer = SGD

    def make_model(self, rngs):
        return TiedReader(rngs=rngs)

    def make_batches(self, split, seed=None):
        return random_words(1000, 1000, batch_size=8, seq_len=8, seed=seed)


class TiedReader(nnx.Module):
    """Most of its weights are one table of Flax, before the layers and after them; its dims have no names."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(1000, WIDTH, rngs=rngs)
        self.layers = Stack([lambda rngs: nn.LSTM(WIDTH, rngs=rngs)] * 4, rngs=rngs)

    def first(self, batch, at: LayerContext):
        return self.embed(batch["x"])

    def last(self, y_TBW, batch, at: LayerContext):
        return cross_entropy(self.embed.attend(y_TBW), batch)


@dataclasses.dataclass(frozen=True)
class FewDigits(Task):
    """All numbers are of one type: bfloat16, or float16."""

    dtype: str = "bfloat16"
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)

    def make_model(self, rngs):
        return ReaderOfFewDigits(jnp.dtype(self.dtype), rngs=rngs)

    def make_batches(self, split, seed=None):
        return random_words(32, 1001, batch_size=8, seq_len=8, seed=seed)


class ReaderOfFewDigits(nnx.Module):
    """The sums of its loss are of that type, too."""

    def __init__(self, dtype, *, rngs):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(32, WIDTH, **options)
        self.out = nnx.Linear(WIDTH, 32, use_bias=False, **options)
        self.layers = Stack([lambda rngs: Cell(dtype, rngs=rngs)] * 4, rngs=rngs)

    def first(self, batch, at: LayerContext):
        return self.embed(batch["x"])

    def last(self, y_TBW, batch, at: LayerContext):
        scores = jax.nn.log_softmax(self.out(y_TBW))
        weight_TB = batch["weight"].astype(y_TBW.dtype)
        nll_TB = -jnp.take_along_axis(scores, batch["y"][..., None], -1)[..., 0]
        loss = jnp.sum(nll_TB * weight_TB)
        return Sums(loss, jnp.sum(weight_TB), {"weight again": jnp.sum(weight_TB)})


# ---- optimizers of optax ----


def group_of_each(params):
    """The group of each parameter, "end" or "rest"."""

    def group(path, _):
        return "end" if "outputs" in jax.tree_util.keystr(path) else "rest"

    return jax.tree.map_with_path(group, params)


def is_in_rest(params):
    return jax.tree.map(lambda group: group == "rest", group_of_each(params))


def is_matrix(params):
    return jax.tree.map(lambda param: param.ndim > 1, params)


def by_group(end, rest):
    return optax.multi_transform({"end": end, "rest": rest}, group_of_each)


OPTIMIZERS = {
    "groups": lambda: by_group(end=optax.sgd(0.1), rest=optax.adam(1e-2)),
    "frozen": lambda: by_group(end=optax.set_to_zero(), rest=optax.sgd(0.1)),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), is_in_rest), optax.adam(1e-2)
    ),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=is_matrix),
    "muon": lambda: optax.contrib.muon(1e-2),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2)),
    "lars": lambda: optax.lars(0.1, momentum=0.9),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 100), momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class WithOwnOptimizer(RandomWalk):
    """With one of `OPTIMIZERS`."""

    own_optimizer: str = "adamw"

    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.own_optimizer]()


@dataclasses.dataclass(frozen=True)
class UnequalWithOwnOptimizer(UnequalLayers):
    """Layers in pools with one of `OPTIMIZERS`."""

    own_optimizer: str = "adamw"

    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.own_optimizer]()
