"""Flax models as people write them, which `benchmarks.programs` adopts: nothing in them is made for jaxpar.

Legend of the dim suffixes: T time, B batch, W width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar

VOCAB, WIDTH, TIME, DEPTH = 32, 8, 8, 4
NUM_ROWS, BATCH_SIZE = 40, 16
SGD = jaxpar.OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0)
RULES = {"heads": "tensor", "mlp": "tensor"}


def named_kernel(*dims):
    """An initializer of a kernel whose dims have these names."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), dims)


# ---- blocks ----


class AttentionBlock(nnx.Module):
    """Attention of two heads and an MLP; the names of their dims say what is split."""

    def __init__(self, rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2,
            WIDTH,
            decode=False,
            use_bias=False,
            rngs=rngs,
            kernel_init=named_kernel(None, "heads", None),
            out_kernel_init=named_kernel("heads", None, None),
        )
        up, down = named_kernel(None, "mlp"), named_kernel("mlp", None)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=down, rngs=rngs)

    def __call__(self, x_BTW, mask=None):
        x_BTW = x_BTW + self.attention(self.norm1(x_BTW), mask=mask)
        return x_BTW + self.down(nnx.gelu(self.up(self.norm2(x_BTW))))


class ConvBlock(nnx.Module):
    """Mixes time by a causal convolution."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), padding="CAUSAL", rngs=rngs)
        self.gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x_BTW, mask=None):
        y_BTW = self.norm(x_BTW)
        return x_BTW + self.conv(y_BTW) * nnx.sigmoid(self.gate(y_BTW))


class DenseBlock(nnx.Module):
    """A small block without a residual connection of its own."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x_BTW):
        return nnx.silu(self.up(self.norm(x_BTW)))


class DropoutBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x_BTW):
        return x_BTW + self.dropout(nnx.silu(self.up(x_BTW)))


class FourierBlock(nnx.Module):
    """A filter over time, with complex activations in and out."""

    def __init__(self, rngs):
        self.filter = nnx.Param(jax.random.normal(rngs.params(), (TIME, WIDTH), jnp.complex64))
        self.mix = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.complex64, rngs=rngs)

    def __call__(self, z_BTW):
        filtered_BTW = jnp.fft.ifft(jnp.fft.fft(z_BTW, axis=1) * self.filter[...], axis=1)
        mixed_BTW = self.mix(filtered_BTW)
        return z_BTW + mixed_BTW / (1 + jnp.abs(mixed_BTW)).astype(z_BTW.dtype)


# ---- models of text ----


class Text(nnx.Module):
    """An embedding, blocks one after the other, and a head."""

    block_class = ConvBlock

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = self.make_blocks(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def make_blocks(self, rngs):
        return nnx.List([self.block_class(rngs) for _ in range(DEPTH)])

    def run_blocks(self, x_BTW, tokens_BT):
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return x_BTW

    def __call__(self, tokens_BT):
        return self.head(self.norm(self.run_blocks(self.embed(tokens_BT), tokens_BT)))


class GPT(Text):
    """All blocks are given one mask: of the words before, without padding."""

    block_class = AttentionBlock

    def run_blocks(self, x_BTW, tokens_BT):
        is_word = tokens_BT > 0
        mask = nnx.combine_masks(
            nnx.make_causal_mask(tokens_BT), nnx.make_attention_mask(is_word, is_word)
        )
        for block in self.blocks:
            x_BTW = block(x_BTW, mask)
        return x_BTW


class TwoKinds(GPT):
    """Blocks of unequal parameters, in turns."""

    def make_blocks(self, rngs):
        kinds = [ConvBlock, AttentionBlock] * (DEPTH // 2)
        return nnx.List([kind(rngs) for kind in kinds])


class TiedHead(Text):
    """Between blocks, padding is set to zero; the head is the embedding."""

    block_class = DenseBlock

    def run_blocks(self, x_BTW, tokens_BT):
        for block in self.blocks:
            x_BTW = jnp.where((tokens_BT > 0)[..., None], block(x_BTW) + x_BTW, 0)
        return x_BTW

    def __call__(self, tokens_BT):
        x_BTW = self.run_blocks(self.embed(tokens_BT), tokens_BT)
        return self.embed.attend(self.norm(x_BTW))


class UNet(Text):
    """Blocks of the second half are given what blocks of the first half gave."""

    block_class = DenseBlock

    def run_blocks(self, x_BTW, tokens_BT):
        skips = []
        for block in self.blocks[: DEPTH // 2]:
            x_BTW = block(x_BTW) + x_BTW
            skips.append(x_BTW)
        for block in self.blocks[DEPTH // 2 :]:
            x_BTW = block(x_BTW + skips.pop()) + x_BTW
        return x_BTW


class Stacked(Text):
    """Blocks are one module with stacked parameters, made by nnx.vmap and called by nnx.scan."""

    block_class = DenseBlock

    def make_blocks(self, rngs):
        make = nnx.vmap(self.block_class, in_axes=0, out_axes=0)
        return nnx.split_rngs(splits=DEPTH)(make)(rngs)

    def run_blocks(self, x_BTW, tokens_BT):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x_BTW):
            return x_BTW + block(x_BTW)

        return run(self.blocks, x_BTW)


class Remat(Text):
    """Activations of each block are computed again in the backward pass."""

    def run_blocks(self, x_BTW, tokens_BT):
        run = nnx.remat(lambda block, x_BTW: block(x_BTW))
        for block in self.blocks:
            x_BTW = run(block, x_BTW)
        return x_BTW


class Dropped(Text):
    """Dropout in every block, and on the embedding."""

    block_class = DropoutBlock

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def run_blocks(self, x_BTW, tokens_BT):
        return super().run_blocks(self.dropout(x_BTW), tokens_BT)


class Fourier(Text):
    """Complex activations go from block to block."""

    block_class = FourierBlock

    def run_blocks(self, x_BTW, tokens_BT):
        return super().run_blocks(x_BTW.astype(jnp.complex64), tokens_BT).real


class Recurrent(Text):
    """Blocks are nnx.RNN, which may read time in chunks."""

    def make_blocks(self, rngs):
        def make_block():
            return nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs))

        return nnx.List([make_block() for _ in range(DEPTH)])


class Sequential(nnx.Module):
    """The whole model is one nnx.Sequential; its blocks are a part of it."""

    def __init__(self, rngs):
        self.net = nnx.Sequential(
            nnx.Embed(VOCAB, WIDTH, rngs=rngs),
            *[ConvBlock(rngs) for _ in range(DEPTH)],
            nnx.Linear(WIDTH, VOCAB, rngs=rngs),
        )

    def __call__(self, tokens_BT):
        return self.net(tokens_BT)


def text_arrays():
    """Token 0 is padding."""
    text = np.random.default_rng(0).integers(0, VOCAB, (NUM_ROWS, TIME + 1), dtype=np.int32)
    return {"x": text[:, :-1], "y": text[:, 1:]}


def text_loss(model, batch):
    """The sum over the words that count, and their number."""
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    weight_BT = (batch["y"] > 0) * batch["weight"][:, None]
    return jnp.sum(losses_BT * weight_BT), jnp.sum(weight_BT)


# ---- a model of images ----


class MixerBlock(nnx.Module):
    """Two MLPs: one mixes the four patches of an image, the other their channels."""

    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.patches1 = nnx.Linear(4, 16, rngs=rngs)
        self.patches2 = nnx.Linear(16, 4, rngs=rngs)
        self.channels1 = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.channels2 = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        y = self.norm1(x).swapaxes(1, 2)
        x = x + self.patches2(nnx.gelu(self.patches1(y))).swapaxes(1, 2)
        return x + self.channels2(nnx.gelu(self.channels1(self.norm2(x))))


class Mixer(nnx.Module):
    """Without time; its blocks are within another module."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(3, WIDTH, (4, 4), (4, 4), rngs=rngs)
        self.encoder = nnx.Dict(blocks=nnx.List([MixerBlock(rngs) for _ in range(DEPTH)]))
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        for block in self.encoder["blocks"]:
            x = block(x)
        return self.head(x.mean(1))


def image_arrays():
    rng = np.random.default_rng(0)
    images = rng.standard_normal((NUM_ROWS, 8, 8, 3), dtype=np.float32)
    return {"x": images, "y": rng.integers(0, 10, NUM_ROWS, dtype=np.int32)}


def image_loss(model, batch):
    losses_B = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return jnp.sum(losses_B * batch["weight"]), jnp.sum(batch["weight"])


# ---- tasks ----


def adopt_text(model, optimizer=SGD, layers="blocks"):
    """A task of text, for a Flax model whose blocks are there."""
    return jaxpar.adopt(
        model,
        text_loss,
        layers,
        batches=text_arrays(),
        optimizer=optimizer,
        batch_size=BATCH_SIZE,
        rules=RULES,
    )


def adopt_images(model, layers):
    """A task of images, for a Flax model whose blocks are there."""
    return jaxpar.adopt(
        model,
        image_loss,
        layers,
        batches=image_arrays(),
        optimizer=SGD,
        batch_size=BATCH_SIZE,
        rules=RULES,
    )


MAKERS = {
    "gpt": lambda: adopt_text(GPT),
    "two kinds": lambda: adopt_text(TwoKinds),
    "tied head": lambda: adopt_text(TiedHead),
    "u-net": lambda: adopt_text(UNet),
    "stacked": lambda: adopt_text(Stacked),
    "remat": lambda: adopt_text(Remat),
    "dropped": lambda: adopt_text(Dropped),
    "fourier": lambda: adopt_text(Fourier),
    "recurrent": lambda: adopt_text(Recurrent),
    "sequential": lambda: adopt_text(Sequential, layers="net[1:5]"),
    "mixer": lambda: adopt_images(Mixer, layers="encoder.blocks"),
}


@functools.cache
def adopted(name):
    """The task of a model, one object for all programs of it."""
    return MAKERS[name]()
