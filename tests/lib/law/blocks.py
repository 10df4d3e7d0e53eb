"""Models of Flax as people write them: blocks in a list, a dict or attributes, called in several ways."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar import ArrayBatches, Sums
from lib import flax_models
from lib.flax_models import VOCAB, WIDTH
from lib.law.training import Trained
from lib.layers import times_in_backward


@dataclasses.dataclass(frozen=True)
class Body:
    """What a block does.

    Attributes:
      make: of (rngs).
      is_recurrent: whether it carries a state along time, so that time can be cut.
      dims: of parameters that `tensor` splits, by the pattern of their path.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    is_recurrent: bool = False
    dims: tuple[tuple[str, tuple], ...] = ()


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class GLU(nnx.Module):
    def __init__(self, rngs):
        self.gate = nnx.LinearGeneral(WIDTH, (2, WIDTH), rngs=rngs)
        self.out = nnx.Einsum("btw,wv->btv", (WIDTH, WIDTH), rngs=rngs)

    def __call__(self, x):
        gate, y = jnp.moveaxis(self.gate(x), -2, 0)
        return self.out(nnx.sigmoid(gate) * y)


class Complex(nnx.Module):
    """Mixes units by a complex matrix."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(dtype=jnp.complex64)
        self.kernel = nnx.Param(init(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        y = x.astype(jnp.complex64) @ self.kernel[...]
        return jnp.tanh(y.real) + y.imag


class Heads(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, use_bias=False, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))


class Scanned(nnx.Module):
    """A loop over time of one's own, with a complex diagonal."""

    def __init__(self, rngs):
        self.phase = nnx.Param(jnp.linspace(0.1, 2, WIDTH))
        self.out = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        turn = 0.8 * jnp.exp(1j * self.phase[...].astype(jnp.complex64))

        def step(h, x):
            h = turn * h + x
            return h, h

        start = jnp.zeros((len(x), WIDTH), jnp.complex64)
        _, h = jax.lax.scan(step, start, x.swapaxes(0, 1))
        h = h.swapaxes(0, 1)
        return self.out(jnp.concatenate([h.real, h.imag], -1))


def rnn(cell):
    return Body(lambda rngs: nnx.RNN(cell(WIDTH, WIDTH, rngs=rngs)), is_recurrent=True)


BODIES = {
    "mlp": Body(MLP, dims=(("*.body.up.kernel", (None, "tensor")),)),
    "glu": Body(GLU),
    "complex": Body(Complex),
    "one head": Body(lambda rngs: flax_models.OneHead(WIDTH, rngs)),
    "heads": Body(Heads),
    "conv": Body(lambda rngs: nnx.Conv(WIDTH, WIDTH, (3,), padding="CAUSAL", rngs=rngs)),
    "group norm": Body(lambda rngs: nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs)),
    "linear": Body(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)),
    "lora": Body(lambda rngs: nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)),
    "rnn lstm": rnn(nnx.OptimizedLSTMCell),
    "rnn gru": rnn(nnx.GRUCell),
    "rnn simple": rnn(nnx.SimpleCell),
    "scan": Body(Scanned),  # jaxpar cuts the time of nnx.RNN alone
}
GIVEN = {
    "mask": lambda x, own: x * own,
    "positions": lambda x, own: x + own,
    "table": lambda x, own: x + own,
    "condition": lambda x, own: x * (1 + own),
}
HOLDS = {"list": "blocks", "dict": "parts.blocks", "sequential": "net[0:{}]", "numbered": "block_*"}


@dataclasses.dataclass(frozen=True)
class How:
    """How a model is written.

    Attributes:
      bodies: of its blocks, by name.
      given: what blocks are given besides x, of `GIVEN`; "" is nothing.
      returns: "x", "first" of a tuple, or a "pair" that goes into the next block.
      holds: the blocks, of `HOLDS`.
      calls: how blocks are called: "remat", "jit", "remat inside", or plainly.
      is_outside: whether the residual connection is outside of the blocks.
      is_tied: whether the head is the embedding.
      backward: "by depth" gives gradients another factor in each block.
    """

    bodies: tuple[str, ...]
    given: str = ""
    returns: str = "x"
    holds: str = "list"
    calls: str = "plain"
    is_outside: bool = False
    is_tied: bool = False
    backward: str = ""


class Block(nnx.Module):
    def __init__(self, how, number, rngs):
        self.how, self.norm = how, nnx.RMSNorm(WIDTH, rngs=rngs)
        self.body = BODIES[how.bodies[number]].make(rngs)
        by_depth = times_in_backward(1 / (1 + number))
        self.backward = by_depth if how.backward == "by depth" else lambda y: y

    def __call__(self, x, *given, deterministic=True):
        x, *total = x if self.how.returns == "pair" else [x]
        y = self.norm(x)
        for own in given:
            y = GIVEN[self.how.given](y, own)
        y = self.backward(self.body(y))
        y = y if self.how.is_outside else x + y
        mean = y.mean(-1, keepdims=True)
        return {"x": y, "first": (y, mean), "pair": (y, *(own + mean for own in total))}[
            self.how.returns
        ]


class RematBlock(Block):
    @nnx.remat
    def __call__(self, x, *given):
        return super().__call__(x, *given)


class Net(nnx.Module):
    def __init__(self, how, rngs):
        self.how = how
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.condition = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.table = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (1, WIDTH)))
        kind = RematBlock if how.calls == "remat inside" else Block
        blocks = [kind(how, number, rngs) for number in range(len(how.bodies))]
        if how.holds == "list":
            self.blocks = nnx.List(blocks)
        elif how.holds == "dict":
            self.parts = nnx.Dict(blocks=nnx.Dict({f"b{n}": own for n, own in enumerate(blocks)}))
        elif how.holds == "sequential":
            self.net = nnx.Sequential(*blocks, nnx.LayerNorm(WIDTH, rngs=rngs))
        for number, block in enumerate(blocks if how.holds == "numbered" else ()):
            setattr(self, f"block_{number}", block)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def _blocks(self):
        if self.how.holds == "list":
            return self.blocks
        if self.how.holds == "dict":
            return self.parts["blocks"].values()
        return [getattr(self, f"block_{number}") for number in range(len(self.how.bodies))]

    def _given(self, x, tokens):
        made = {
            "": lambda: [],
            "mask": lambda: [(tokens > 0)[..., None].astype(x.dtype)],
            "positions": lambda: [jnp.cos(jnp.arange(tokens.shape[1]))[:, None]],
            "table": lambda: [self.table[...]],
            "condition": lambda: [self.condition(x.mean(1, keepdims=True))],
        }
        return made[self.how.given]()

    def __call__(self, tokens):
        how, x = self.how, self.embed(tokens)
        if how.holds == "sequential":
            return self.head(self.net(x))
        given = self._given(x, tokens)
        options = {"deterministic": True} if how.calls == "plain" else {}

        def plain(block, x, *given):
            return block(x, *given, **options)

        run = {"remat": nnx.remat, "jit": nnx.jit}.get(how.calls, lambda f: f)(plain)
        pair = x, x.mean(-1, keepdims=True)
        for block in self._blocks():
            y = run(block, pair if how.returns == "pair" else x, *given)
            pair = y if how.returns == "pair" else pair
            y = y if how.returns == "x" else y[0]
            x = x + 0.5 * y if how.is_outside else y
        x = self.norm(x + pair[1] if how.returns == "pair" else x)
        return self.embed.attend(x) if how.is_tied else self.head(x)


@dataclasses.dataclass(frozen=True)
class FlaxTask(Trained):
    """A Flax model and its loss.

    Attributes:
      how: the model is written.
      splits: whether `tensor` splits parameters.
    """

    how: How = How(())
    splits: bool = False
    batch_size: int = 16
    seq_len: int = 8

    @property
    def layers(self):
        return HOLDS[self.how.holds].format(len(self.how.bodies))

    @property
    def dims(self):
        dims = [dims for name in self.how.bodies for dims in BODIES[name].dims]
        return dict(dims) if self.splits else {}

    def make_model(self, rngs):
        return Net(self.how, rngs)

    def loss(self, model, batch):
        logits = model(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        weight = batch["weight"][:, None] * (batch["y"] > 0)
        most = jnp.sum(logits.max(-1) * weight)
        return Sums(jnp.sum(losses * weight), jnp.sum(weight), {"most": most})

    def predict(self, model, batch):
        logits = model(batch["x"])
        return {"logits": logits, "best": logits.argmax(-1)}

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(["train", "valid", "test"].index(split))
        shape = 3 * self.batch_size, self.seq_len
        arrays = {name: rng.integers(0, VOCAB, shape).astype(np.int32) for name in ("x", "y")}
        return ArrayBatches(arrays, self.batch_size, seed)
