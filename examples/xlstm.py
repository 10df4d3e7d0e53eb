"""A language model of xLSTM blocks: two kinds in one stack, seven with an mLSTM to one with an sLSTM.

The memories are those of `jaxpar.nn`, and around them is what the paper has (Beck et al. 2024,
arXiv:2405.04517, section 2.4 and the appendix's figures of blocks), with numbers and initial values of the
authors' code, NX-AI/xlstm. A device of `tensor` has some heads with all that belongs to them.

    python -m jaxpar train examples/xlstm.py:XLSTM --simulate 8 --mesh dp2pp2tp2

The task is `lm` with other layers: it has the options of that, reads text as that does, and writes text.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import Stack, TrainConfig, lm, nn
from jaxpar.base.checks import check_divides
from jaxpar.nn.hidden import gates_of_state
from jaxpar.nn.matrix_memory import NOTHING
from jaxpar.nn.mlstm import mlstm
from jaxpar.nn.param import kernel_param, uniform
from jaxpar.nn.resets import begin_anew
from jaxpar.nn.slstm import slstm_step

SEEN, BLOCK = 4, 4  # steps that a convolution sees; units that are projected together to q, k and v

# --- The blocks. Legend: T time, B rows, W width, N heads of D units, F units of a perceptron.


class Norm(nnx.Module):
    """To mean 0 and variance 1 over the last dim, that of the width or of a head, times a scale."""

    def __init__(self, *shape, dims=(None,)):
        self.scale = nn.named_param(jnp.ones(shape), dims)

    def __call__(self, x):
        """Computed in float32, and as x."""
        z = x.astype(jnp.float32)
        z -= jnp.mean(z, -1, keepdims=True)
        z *= jax.lax.rsqrt(jnp.mean(jnp.square(z), -1, keepdims=True) + 1e-5)
        return (z * self.scale[...][None, None]).astype(x.dtype)


class Convolution(nnx.Module):
    """Of each unit by itself, over this step and the three before it, which are its state; then SiLU."""

    def __init__(self, *shape, rngs):
        draw, dims = uniform(SEEN**-0.5), ("heads", None)
        self.kernel = kernel_param(rngs, (SEEN, *shape), (None, *dims), draw)
        self.bias = kernel_param(rngs, shape, dims, draw)

    def initial_carry(self, rows):
        """Zeros before the first step: float32 [rows, 3, N, D]."""
        return jnp.zeros((rows, SEEN - 1, *self.bias.shape))

    def __call__(self, past, x_TBND, at):
        """The last inputs of the sequence that goes on, and the outputs."""
        T, dtype, before = len(x_TBND), x_TBND.dtype, SEEN - 1
        x = jnp.concatenate([jnp.moveaxis(past, 1, 0).astype(dtype), x_TBND])
        # Which sequence each step is of: what is of another one counts as 0.
        resets = jnp.zeros(x_TBND.shape[:2], bool) if at.resets is None else at.resets
        number = jnp.cumsum(resets, 0, dtype=jnp.int32)[..., None, None]
        number = jnp.pad(number, ((before, 0), *[(0, 0)] * 3))
        y = self.bias[...][None, None]
        for n in range(SEEN):
            part = jnp.where(number[n : n + T] == number[before:], x[n : n + T], 0)
            y += self.kernel[n][None, None] * part.astype(jnp.float32)
        past = jnp.where(number[-before:] == number[-1:], x[-before:], 0)
        return jnp.moveaxis(past, 0, 1).astype(jnp.float32), nnx.silu(y).astype(dtype)


class MLSTMBlock(nnx.Module):
    """Up to twice the width, a memory of matrices, and down again, added to the inputs."""

    carry_dims = (("batch", None, "heads", None), nn.MLSTM.carry_dims)

    def __init__(self, task, *, rngs):
        W, N, D = task.hidden_size, task.heads, 2 * task.hidden_size // task.heads
        (small, last), heads, self.rate = task.initializers, ("heads", None), task.dropout
        self.norm, self.head_norm = Norm(W), Norm(N, D, dims=heads)
        self.up = kernel_param(rngs, (W, 2, N, D), (None, None, *heads), small)
        self.conv = Convolution(N, D, rngs=rngs)
        shape, dims = (3, N, D // BLOCK, BLOCK, BLOCK), (None, *heads, None, None)
        self.w = kernel_param(rngs, shape, dims, small)
        self.w_g = nn.named_param(jnp.zeros((3, N, D, 2, N)), dims)
        log_i = 0.1 * jax.random.normal(rngs.params(), (N,))
        self.b_g = nn.named_param(jnp.stack([log_i, jnp.linspace(3, 6, N)]), (None, "heads"))
        self.skip = nn.named_param(jnp.ones((N, D)), heads)
        self.down = kernel_param(rngs, (N, D, W), (*heads, None), last)

    def initial_carry(self, rows):
        """Inputs before the first step, and a memory that nothing has entered."""
        n = jnp.zeros((rows, *self.skip.shape))
        c, m = jnp.zeros((*n.shape, n.shape[-1])), n[..., 0] + NOTHING
        return self.conv.initial_carry(rows), nn.MLSTMCarry(c, n, m)

    def __call__(self, carry, x_TBW, at):
        """The block: q and k are of what the convolution gives, v is of what it is given."""
        T, B, _, N, D = *x_TBW.shape, *self.skip.shape
        dtype, (past, memory) = x_TBW.dtype, carry
        x = at.layout(nn.mask_padding(x_TBW, at), None, "batch", None)
        up = product(self.norm(x), self.up)
        u, gate = up[:, :, 0].astype(dtype), up[:, :, 1]
        past, c = self.conv(past, u, at)
        blocks = jnp.stack([c, c, u], 2).reshape(T, B, 3, N, -1, BLOCK)
        qkv = jnp.einsum("tbgnji,gnjio->tbgnjo", blocks, self.w[...].astype(dtype))
        qkv = qkv.reshape(T, B, 3, N, D)
        q, k, v = (qkv[:, :, n] for n in range(3))
        log_TB2N = product(qkv, self.w_g, 3) + self.b_g[...][None, None]
        log_TB2N = at.layout(log_TB2N, None, "batch", None, "heads")
        gates = log_TB2N[:, :, 0], nnx.log_sigmoid(log_TB2N[:, :, 1])
        memory, h = mlstm(q, k * D**-0.5, v, *gates, memory, at.resets, self.initial_carry(B)[1])
        h = self.head_norm(h) + self.skip[...][None, None] * c.astype(jnp.float32)
        y = product((h * nnx.silu(gate)).astype(dtype), self.down, 2).astype(dtype)
        return (past, memory), x_TBW + nn.dropout(y, self.rate, at)


class SLSTMBlock(nnx.Module):
    """A memory whose gates see its state, then a gated perceptron, each added to its inputs."""

    carry_dims = (("batch", None, "heads", None), nn.SLSTMCarry(*[("batch", "heads", None)] * 4))

    def __init__(self, task, number, *, rngs):
        W, N, D = task.hidden_size, task.heads, task.hidden_size // task.heads
        F = -(-4 * W // (3 * 64)) * 64
        (small, last), heads, self.rate = task.initializers, ("heads", None), task.dropout
        self.norms, self.head_norm = nnx.List([Norm(W), Norm(W)]), Norm(N, D, dims=heads)
        self.conv = Convolution(N, D, rngs=rngs)
        self.w_x = kernel_param(rngs, (4, N, D, D), (None, *heads, None), small)
        self.w_h = nn.named_param(jnp.zeros((N, D, 4, D)), (*heads, None, None))
        # Forget gates of a head begin from 5 down to -7; the later a block, the more of them near 5.
        power = 0.3 + 1.3 * number / (task.num_layers - 1)
        forget_D = 5 - 12 * (jnp.arange(D) / (D - 1)) ** power
        self.b = nn.named_param(jnp.zeros((4, N, D)).at[1].set(forget_D[None]), (None, *heads))
        self.up = kernel_param(rngs, (W, 2, F), (None, None, "hidden"), small)
        self.down = kernel_param(rngs, (F, W), ("hidden", None), last)

    def initial_carry(self, rows):
        """Inputs before the first step, and a memory that nothing has entered."""
        zeros = jnp.zeros((rows, *self.b.shape[1:]))
        return self.conv.initial_carry(rows), nn.SLSTMCarry(zeros, zeros, zeros, zeros + NOTHING)

    def __call__(self, carry, x_TBW, at):
        """The block: the gates i and f are of what the convolution gives, z and o of what it is given."""
        (T, B, _), dtype, (past, memory) = x_TBW.shape, x_TBW.dtype, carry
        u = self.norms[0](at.layout(x_TBW, None, "batch", None)).reshape(T, B, *self.b.shape[1:])
        past, c = self.conv(past, u, at)
        spec, both = "tbgnd,gndo->tbgno", (jnp.stack([c, c, u, u], 2), self.w_x[...].astype(dtype))
        z = jnp.einsum(spec, *both, preferred_element_type=jnp.float32) + self.b[...][None, None]

        def step(given, memory, inputs):
            (w_h, initial), (z, is_new) = given, inputs
            memory = begin_anew(is_new, initial, memory)
            memory = slstm_step(memory, z + gates_of_state(memory.h_BH.astype(dtype), w_h))
            return memory, memory.h_BH

        given = self.w_h[...], self.initial_carry(B)[1]
        memory, h = nn.hoisted_scan(step, given, memory, (z, at.resets), unroll=at.unroll)
        y = self.head_norm(h).astype(dtype).reshape(x_TBW.shape)
        x_TBW += nn.dropout(y, self.rate, at)
        up = product(self.norms[1](at.layout(x_TBW, None, "batch", None)), self.up)
        # By tanh, theirs by erf, which JAX 0.12 refuses on stages.
        z = nnx.gelu(up[:, :, 0]) * up[:, :, 1]
        y = product(z.astype(dtype), self.down).astype(dtype)
        return (past, memory), x_TBW + nn.dropout(y, self.rate, at, number=1)


def product(x, kernel, num_summed=1):
    """Over the last dims of x and the first of a kernel; float32."""
    over = tuple(range(x.ndim - num_summed, x.ndim)), tuple(range(num_summed))
    return nn.dot_general(x, kernel[...].astype(x.dtype), (over, ((), ())), None, jnp.float32)


# --- The task.


@dataclasses.dataclass(frozen=True)
class XLSTM(lm.LM):
    """A language model of xLSTM blocks; options as of `lm`, num_layers are blocks."""

    layer: ClassVar[str] = "mlstm"  # none of these three is an option
    forget_bias: ClassVar[float] = 1.0
    has_blocks: ClassVar[bool] = False  # those of `lm`
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=400, log_every=100)
    num_layers: int = 8
    hidden_size: int = 64
    embed_size: int = 64

    def __post_init__(self):
        super().__post_init__()
        blocks = {"num_heads": self.heads, "half a block": BLOCK // 2}
        check_divides("hidden_size", self.hidden_size, blocks)

    @property
    def initializers(self):
        """Of kernels that read what moves between blocks, and of those that add to it."""
        normal, scale = nnx.initializers.normal, self.hidden_size**-0.5
        return normal(0.4**0.5 * scale), normal(2 / self.num_layers * scale)

    def make_model(self, rngs):
        """That of `lm`, with blocks, and a norm after them."""
        makers = [lambda rngs: MLSTMBlock(self, rngs=rngs)] * self.num_layers
        for n in range(3, self.num_layers, 8):  # of 8 the fourth
            makers[n] = lambda rngs, n=n: SLSTMBlock(self, n, rngs=rngs)
        model = super().make_model(rngs)
        makers.append(lambda rngs: nn.Stateless(Norm(self.hidden_size)))
        model.layers = Stack(makers, rngs=rngs, unroll=1)
        return model
