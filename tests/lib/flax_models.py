"""Flax models as people write them: nothing in them is made for jaxpar."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar import Sums

VOCAB, WIDTH, TIME, ROWS, DEPTH = 32, 8, 8, 16, 4

linear_init, zeros_init = nnx.initializers.lecun_normal(), nnx.initializers.zeros
named = nnx.with_partitioning


# ---- language models ----


class Attention(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.att = nnx.MultiHeadAttention(
            heads,
            width,
            decode=False,
            use_bias=False,
            rngs=rngs,
            kernel_init=named(linear_init, (None, "heads", None)),
            out_kernel_init=named(linear_init, ("heads", None, None)),
        )

    def __call__(self, x, mask):
        return self.att(x, mask=mask)


class OneHead(nnx.Module):
    def __init__(self, width, rngs):
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x, mask=None):
        q, k, v = jnp.split(self.qkv(x), 3, -1)
        scores = jnp.einsum("btw,bsw->bts", q, k) / 4
        scores = scores if mask is None else jnp.where(mask[:, 0], scores, -1e9)
        return self.out(jnp.einsum("bts,bsw->btw", jax.nn.softmax(scores), v))


class Block(nnx.Module):
    """Attention and an MLP, which says what its dims are called."""

    def __init__(self, width, rngs):
        self.ln1, self.ln2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.att = self.attention(width, rngs)
        up, down = named(linear_init, (None, "mlp")), named(linear_init, ("mlp", None))
        bias = named(zeros_init, ("mlp",))
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, kernel_init=up, bias_init=bias)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, kernel_init=down)

    def __call__(self, x, mask=None, deterministic=True):
        x = x + self.att(self.ln1(x), mask)
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))

    def attention(self, width, rngs):
        return OneHead(width, rngs)


class GPTBlock(Block):
    def attention(self, width, rngs):
        return Attention(width, 2, rngs)


class MLPBlock(nnx.Module):
    """A small block without a residual connection of its own."""

    def __init__(self, width, rngs):
        self.norm, self.up = nnx.RMSNorm(width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return nnx.silu(self.up(self.norm(x)))


class GatedBlock(nnx.Module):
    """Mixes time by a causal convolution."""

    def __init__(self, width, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.conv = nnx.Conv(width, width, (3,), padding="CAUSAL", rngs=rngs)
        self.gate = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x, mask=None):
        y = self.norm(x)
        return x + self.conv(y) * nnx.sigmoid(self.gate(y))


class Text(nnx.Module):
    """An embedding with positions, blocks, and a head."""

    block, tied = MLPBlock, False

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.pos = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (64, WIDTH)))
        self.blocks = self.make_blocks(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        if not self.tied:
            self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def make_blocks(self, rngs):
        return nnx.List([self.block(WIDTH, rngs) for _ in range(DEPTH)])

    def mask(self, tokens):
        is_word = tokens > 0
        return nnx.combine_masks(
            nnx.make_causal_mask(tokens), nnx.make_attention_mask(is_word, is_word)
        )

    def run(self, x, tokens):
        """The blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens):
        x = self.embed(tokens) + self.pos[: tokens.shape[1]]
        x = self.norm(self.run(x, tokens))
        return self.embed.attend(x) if self.tied else self.head(x)


class GPT(Text):
    """All blocks are given a mask that is made once."""

    block = GPTBlock

    def run(self, x, tokens):
        mask = self.mask(tokens)
        for block in self.blocks:
            x = block(x, mask, deterministic=True)
        return x


class NoMask(Text):
    """Blocks are given x alone."""

    block = Block


class Caching(NoMask):
    """Returns a cache as well, which is no prediction."""

    def __call__(self, tokens):
        return super().__call__(tokens), {"block_0": None}


class Jitted(Text):
    """Blocks are called by a function that nnx.remat wraps, under nnx.jit."""

    block = Block

    @nnx.jit
    def __call__(self, tokens):
        return super().__call__(tokens)

    def run(self, x, tokens):
        run = nnx.remat(lambda block, x, mask: block(x, mask))
        for block in self.blocks:
            x = run(block, x, self.mask(tokens))
        return x


class Mapped(Text):
    """Blocks, the embedding and the head are written for one row."""

    def run(self, x, tokens):
        for block in self.blocks:
            x = x + jax.vmap(block)(x)
        return x

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        return jax.vmap(lambda x: self.head(self.norm(x)))(self.run(x, tokens))


class Padded(Text):
    """Between blocks, padding is set to zero; the head is the embedding."""

    tied = True

    def run(self, x, tokens):
        for block in self.blocks:
            x = jnp.where((tokens > 0)[..., None], block(x) + x, 0)
        return x


class UNet(Text):
    """Blocks of the second half are given what blocks of the first half gave."""

    def run(self, x, tokens):
        skips = []
        for number, block in enumerate(self.blocks):
            if number < DEPTH // 2:
                x = block(x) + x
                skips.append(x)
            else:
                x = block(x + skips.pop()) + x
        return x


class Watched(Text):
    """Also returns what each block gives, which the loss has no use for."""

    def __call__(self, tokens):
        x, seen = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return {"logits": self.head(self.norm(x)), "seen": seen}


class ScaledBlock(nnx.Module):
    """Has numbers of its own that are no arrays."""

    def __init__(self, width, number, rngs):
        self.up, self.number = nnx.Linear(width, width, rngs=rngs), number
        self.rate = 0.5 if number < DEPTH // 2 else 0.25

    def __call__(self, x):
        return x + self.rate * nnx.tanh(self.up(x))


class AsSequential(nnx.Module):
    """The whole model is one nnx.Sequential; its blocks are a part of it."""

    def __init__(self, rngs):
        self.net = nnx.Sequential(
            nnx.Embed(VOCAB, WIDTH, rngs=rngs),
            *[GatedBlock(WIDTH, rngs) for _ in range(DEPTH)],
            nnx.LayerNorm(WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, VOCAB, rngs=rngs),
        )

    def __call__(self, tokens):
        return self.net(tokens)


class Numbered(nnx.Module):
    """Blocks are attributes with numbers; they differ in one that is unused, and halves in a factor."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        for number in range(DEPTH):
            setattr(self, f"layer_{number}", ScaledBlock(WIDTH, number, rngs))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for number in range(DEPTH):
            x = getattr(self, f"layer_{number}")(x)
        return self.head(x)


class StackedBlock(nnx.Module):
    drop = None

    def __init__(self, width, rngs):
        self.norm, self.up = nnx.RMSNorm(width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x, mask):
        y = nnx.silu(self.up(self.norm(x)))
        return x + (self.drop(y) if self.drop else y) * mask


class Stacked(Text):
    """One module with stacked parameters, made by nnx.vmap and called by nnx.scan."""

    block = StackedBlock

    def make_blocks(self, rngs):
        make = nnx.vmap(lambda rngs: self.block(WIDTH, rngs), in_axes=0, out_axes=0)
        return nnx.split_rngs(splits=DEPTH)(make)(rngs)

    def run(self, x, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
        def run(block, x, mask):
            return block(x, mask)

        return run(self.blocks, x, (tokens > 0)[..., None].astype(x.dtype))


class NormBlock(nnx.Module):
    """Nothing in it is drawn."""

    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.norm(x))


class Norms(Text):
    block = NormBlock


class SharedKernel(Text):
    """Before the blocks, two layers share a kernel, and the kernel of a third is no parameter."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.a, self.b, self.c = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.b.kernel = self.a.kernel
        self.c.kernel = nnx.Variable(0.5 * jnp.eye(WIDTH))

    def run(self, x, tokens):
        return super().run(self.c(nnx.tanh(self.b(nnx.tanh(self.a(x))))), tokens)


class PairBlock(nnx.Module):
    """Two streams."""

    def __init__(self, width, rngs):
        self.a = nnx.Linear(width, width, rngs=rngs)
        self.b = nnx.Linear(width, width // 2, rngs=rngs)

    def __call__(self, streams):
        x, y = streams["x"], streams["y"]
        x = x + nnx.tanh(self.a(x)) * y.mean(-1, keepdims=True)
        return {"x": x, "y": y + self.b(nnx.relu(x))}


class Pair(Text):
    block = PairBlock

    def run(self, x, tokens):
        streams = {"x": x, "y": x[..., ::2]}
        for block in self.blocks:
            streams = block(streams)
        return streams["x"] + streams["y"].repeat(2, -1)


class RopeBlock(nnx.Module):
    """A causal mask that was made once and is no parameter; returns a tuple."""

    def __init__(self, width, rngs):
        self.norm, self.qkv = nnx.RMSNorm(width, rngs=rngs), nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.causal = jnp.tril(jnp.ones((TIME, TIME), bool))

    def __call__(self, x, freqs, attention_mask=None, output_attentions=False, deterministic=True):
        q, k, v = jnp.split(self.qkv(self.norm(x)), 3, -1)
        q, k = q * freqs, k * freqs
        scores = jnp.where(self.causal, jnp.einsum("btw,bsw->bts", q, k) / 4, -1e9)
        weights = jax.nn.softmax(jnp.where(attention_mask[:, None], scores, -1e9))
        return x + self.out(jnp.einsum("bts,bsw->btw", weights, v)), weights


class Rope(Text):
    """Rotary tables, a factor that is no parameter, flags, and a list of what went into each block."""

    block = RopeBlock

    def __init__(self, rngs):
        super().__init__(rngs)
        self.freqs = jnp.cos(jnp.arange(TIME)[:, None] / 10 ** jnp.linspace(0, 1, WIDTH))
        self.scale = nnx.Variable(jnp.float32(1.5))

    def run(self, x, tokens):
        x, mask, seen = x * self.scale[...], tokens > 0, ()
        for block in self.blocks:
            seen += (x,)
            x = block(x, self.freqs, attention_mask=mask, deterministic=True)[0]
        return x


# ---- with nnx.RNN: time may be in chunks ----


class RNNs(nnx.Module):
    """Recurrent layers, one after the other."""

    cell, depth = nnx.OptimizedLSTMCell, DEPTH

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.rnns = nnx.List([self.layer(rngs) for _ in range(self.depth)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def layer(self, rngs):
        return nnx.RNN(self.cell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for rnn in self.rnns:
            x = rnn(x)
        return self.head(x)


class GRUs(RNNs):
    """Blocks are given the batch alone, and a head follows."""

    cell = nnx.GRUCell

    def __init__(self, rngs):
        super().__init__(rngs)
        del self.embed

    def __call__(self, x):
        for rnn in self.rnns:
            x = rnn(x)
        return self.head(x)


class RNNBlock(nnx.Module):
    """A recurrent layer with a norm before it and a residual connection, and time-major inside."""

    drop = None

    def __init__(self, width, rngs):
        cell = nnx.LSTMCell(width, width, rngs=rngs)
        self.norm, self.rnn = nnx.RMSNorm(width, rngs=rngs), nnx.RNN(cell, time_major=True)

    def normed(self, x):
        return self.norm(x)

    def __call__(self, x):
        _, y = self.rnn(self.normed(x).swapaxes(0, 1), return_carry=True)
        y = y.swapaxes(0, 1)
        return x + (self.drop(y) if self.drop else y)


class ResidualRNNs(RNNs):
    def layer(self, rngs):
        return RNNBlock(WIDTH, rngs)


class RematRNNBlock(RNNBlock):
    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


class RematRNNs(RNNs):
    """Activations within blocks are computed again, so blocks read a window as a whole."""

    def layer(self, rngs):
        return RematRNNBlock(WIDTH, rngs)


class Bidirectional(RNNs):
    """Reads a window as a whole."""

    def layer(self, rngs):
        def rnn():
            return nnx.RNN(nnx.GRUCell(WIDTH, WIDTH // 2, rngs=rngs))

        return nnx.Bidirectional(rnn(), rnn())


class BackwardRNNs(RNNs):
    """Each layer reads from the last time step to the first."""

    def layer(self, rngs):
        return nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), reverse=True, keep_order=True)


class LRUCell(nnx.RNNCellBase):
    """A linear recurrence, whose parameters and state are complex (LRU, arXiv:2303.06349)."""

    def __init__(self, width, rngs):
        self.in_features = self.hidden_features = width
        angle = jnp.linspace(0.1, 3.0, width)
        self.decay = nnx.Param(jax.lax.complex(0.8 * jnp.cos(angle), 0.8 * jnp.sin(angle)))
        shape = width, width
        self.w_in, self.w_out = (
            nnx.Param(jax.random.normal(rngs.params(), shape, jnp.complex64) / width**0.5)
            for _ in range(2)
        )

    def initialize_carry(self, input_shape, rngs=None):
        return jnp.zeros((*input_shape[:-1], self.hidden_features), jnp.complex64)

    @property
    def num_feature_axes(self):
        return 1

    def __call__(self, h, x):
        h = self.decay[...] * h + x.astype(h.dtype) @ self.w_in[...]
        y = h @ self.w_out[...]
        return h, jnp.tanh(y.real) + 0.1 * jnp.tanh(y.imag)


class LRUBlock(RNNBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.rnn = nnx.RNN(LRUCell(width, rngs), time_major=True)


class LRUs(RNNs):
    def layer(self, rngs):
        return LRUBlock(WIDTH, rngs)


class ComplexBlock(nnx.Module):
    """A filter over time by a Fourier transform (S4), with complex activations in and out."""

    def __init__(self, width, rngs):
        key = rngs.params()
        self.filter = nnx.Param(jax.random.normal(key, (TIME, width), jnp.complex64))
        self.mix = nnx.Linear(width, width, param_dtype=jnp.complex64, rngs=rngs)

    def __call__(self, z):
        filtered = jnp.fft.ifft(jnp.fft.fft(z, axis=1) * self.filter[...], axis=1)
        mixed = self.mix(filtered)
        return z + mixed / (1 + jnp.abs(mixed)).astype(z.dtype)


class ComplexText(Text):
    """Complex activations go from block to block."""

    block = ComplexBlock

    def run(self, x, tokens):
        return super().run(x.astype(jnp.complex64), tokens).real


# ---- images ----


class MixerBlock(nnx.Module):
    def __init__(self, patches, width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.tokens, self.channels = (
            nnx.List([nnx.Linear(size, 16, rngs=rngs), nnx.Linear(16, size, rngs=rngs)])
            for size in (patches, width)
        )

    def __call__(self, x):
        y = self.norms[0](x).swapaxes(1, 2)
        x = x + self.tokens[1](nnx.gelu(self.tokens[0](y))).swapaxes(1, 2)
        return x + self.channels[1](nnx.gelu(self.channels[0](self.norms[1](x))))


class Mixer(nnx.Module):
    """Images, without time; its blocks are within another module."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(3, WIDTH, (4, 4), (4, 4), rngs=rngs)
        blocks = nnx.List([MixerBlock(4, WIDTH, rngs) for _ in range(DEPTH)])
        self.encoder = nnx.Dict(blocks=blocks)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        for block in self.encoder["blocks"]:
            x = block(x)
        return self.head(x.mean(1))


# ---- models that draw ----


class DropBlock(MLPBlock):
    """Dropout on what a block adds."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(super().__call__(x))


class Dropped(Text):
    """Dropout in every block, and on the embedding."""

    block = DropBlock

    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def run(self, x, tokens):
        return super().run(self.drop(x), tokens)


class DroppedBetween(Text):
    """One dropout, which is called between blocks."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def run(self, x, tokens):
        for block in self.blocks:
            x = x + self.drop(block(x))
        return x


class DropStackedBlock(StackedBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)


class DroppedStacked(Stacked):
    block = DropStackedBlock


class DropWidthsBlock(MLPBlock):
    """Dropout of whole features: one mask for all time steps of a row, and another for all features."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.of_time = nnx.Dropout(0.3, broadcast_dims=(1,), rngs=rngs)
        self.of_width = nnx.Dropout(0.2, broadcast_dims=(2,), rngs=rngs)

    def __call__(self, x):
        return x + self.of_width(self.of_time(super().__call__(x)))


class DroppedWidths(Text):
    block = DropWidthsBlock


class DroppedPlaces(Dropped):
    """All rows of a call have one mask, before, in and after the blocks."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.end = nnx.Dropout(0.2, rngs=rngs)
        for drop in (self.drop, self.end, *(block.drop for block in self.blocks)):
            drop.broadcast_dims = (0,)

    def run(self, x, tokens):
        return self.end(super().run(x, tokens))


class DropRNNBlock(RNNBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)


class DroppedRNNs(ResidualRNNs):
    """Dropout after each nnx.RNN."""

    depth = 2

    def layer(self, rngs):
        return DropRNNBlock(WIDTH, rngs)


# ---- data and losses ----


def text_batch(rng):
    """Token 0 is padding."""
    text = rng.integers(0, VOCAB, (ROWS, TIME + 1), dtype=np.int32)
    return {"x": text[:, :-1], "y": text[:, 1:]}


def series_batch(rng):
    x = rng.standard_normal((ROWS, TIME, WIDTH), dtype=np.float32)
    return {"x": x, "y": rng.integers(0, VOCAB, (ROWS, TIME), dtype=np.int32)}


def image_batch(rng):
    images = rng.standard_normal((ROWS, 8, 8, 3), dtype=np.float32)
    return {"x": images, "y": rng.integers(0, 10, ROWS, dtype=np.int32)}


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def text_loss(model, batch):
    """The sum over the words that count, and their number."""
    losses = cross_entropy(model(batch["x"]), batch["y"])
    weight = (batch["y"] > 0) * batch["weight"][:, None]
    return Sums(jnp.sum(losses * weight), jnp.sum(weight))


def logits_loss(model, batch):
    return text_loss(lambda tokens: model(tokens)["logits"], batch)


def first_loss(model, batch):
    """Of a model that returns more than logits."""
    return text_loss(lambda tokens: model(tokens)[0], batch)


def image_loss(model, batch):
    losses = cross_entropy(model(batch["x"]), batch["y"])
    return Sums(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"]))
