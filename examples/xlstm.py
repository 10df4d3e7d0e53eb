"""A language model of xLSTM blocks: two kinds of them, mLSTM and sLSTM, seven to one, in one stack.

The memories are those of jaxpar.nn; around them is what the paper has (Beck et al. 2024, arXiv:2405.04517,
sections 2.4 and A; numbers as in the authors' code, NX-AI/xlstm). A device of `tensor` has its heads with all
that belongs to them: from projection to projection nothing is sent but the sum that gates take of all heads.

    python -m jaxpar train examples/xlstm.py:XLSTM --simulate 8 --mesh dp2pp2tp2
    python -m jaxpar sample runs/0001 --prompt "the value of" --length 40

As a kind of `lm` it reads the same texts, in the same ways, and writes text as those do.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import Stack, lm
from jaxpar.base.checks import require
from jaxpar.nn import MLSTM, MLSTMCarry, SLSTMCarry, Stateless, dot_general, dropout, hoisted_scan
from jaxpar.nn.hidden import gates_of_state
from jaxpar.nn.matrix_memory import NOTHING
from jaxpar.nn.mlstm import LEAST_FORGET_BIAS, MOST_FORGET_BIAS, mlstm
from jaxpar.nn.param import kernel_param, named_param, uniform
from jaxpar.nn.resets import begin_anew
from jaxpar.nn.slstm import slstm_step

WINDOW = 4  # steps that a convolution sees
BLOCK = 4  # units that are projected together to q, k and v
PERIOD, PLACE = 8, 3  # of every 8 blocks the fourth is an sLSTM's

# --- The blocks. Legend: T time, B rows, W width, N heads of D units, G gates, F units of a perceptron.


class Norm(nnx.Module):
    """To mean 0 and variance 1 over the last dim, of the width or of a head, times a scale."""

    def __init__(self, *shape, dims):
        self.scale = named_param(jnp.ones(shape, jnp.float32), dims)

    def __call__(self, x):
        """Computed in float32, and as x."""
        z = x.astype(jnp.float32)
        z = z - jnp.mean(z, -1, keepdims=True)
        z = z * jax.lax.rsqrt(jnp.mean(jnp.square(z), -1, keepdims=True) + 1e-5)
        return (z * beside(self.scale[...], z)).astype(x.dtype)


class Convolution(nnx.Module):
    """Of each unit by itself, over this step and the three before it, which are its state."""

    def __init__(self, num_heads, size, *, rngs):
        shape, dims, draw = (num_heads, size), ("heads", None), uniform(WINDOW**-0.5)
        self.kernel = kernel_param(rngs, (WINDOW, *shape), (None, *dims), draw)
        self.bias = kernel_param(rngs, shape, dims, draw)

    def initial_carry(self, rows):
        """Zeros before the first step: float32 [rows, 3, N, D]."""
        return jnp.zeros((rows, WINDOW - 1, *self.bias.shape), jnp.float32)

    def __call__(self, past_B3ND, x_TBND, at):
        """The last inputs of the sequence that goes on, and SiLU of the sums, as x."""
        T, past = len(x_TBND), WINDOW - 1
        seen = jnp.concatenate([jnp.moveaxis(past_B3ND, 1, 0).astype(x_TBND.dtype), x_TBND])
        y = beside(self.bias[...], x_TBND)
        parts = [seen[n : n + T] for n in range(WINDOW)]
        if at.resets is not None:  # what is of another sequence counts as 0
            number = jnp.pad(jnp.cumsum(at.resets, 0, dtype=jnp.int32), ((past, 0), (0, 0)))
            own = [number[n : n + T] == number[past:] for n in range(WINDOW)]
            parts = [jnp.where(own[n][..., None, None], parts[n], 0) for n in range(WINDOW)]
            goes_on = (number[-past:] == number[-1:])[..., None, None]
            seen = jnp.where(goes_on, seen[-past:], 0)
        for n, part in enumerate(parts):
            y = y + beside(self.kernel[n], part) * part.astype(jnp.float32)
        after = jnp.moveaxis(seen[-past:], 0, 1).astype(jnp.float32)
        return after, nnx.silu(y).astype(x_TBND.dtype)


class MLSTMBlock(nnx.Module):
    """Up to twice the width, a matrix memory, and down again, added to what it is given."""

    carry_dims = (("batch", None, "heads", None), MLSTM.carry_dims)

    def __init__(self, task, *, rngs):
        W, N, D = task.hidden_size, task.heads, 2 * task.hidden_size // task.heads
        self.rate, heads = task.dropout, ("heads", None)
        small, last = task.initializers
        self.norm, self.head_norm = Norm(W, dims=(None,)), Norm(N, D, dims=heads)
        self.up = kernel_param(rngs, (W, 2, N, D), (None, None, *heads), small)
        self.conv = Convolution(N, D, rngs=rngs)
        blocks = (N, D // BLOCK, BLOCK, BLOCK)
        self.qk = kernel_param(rngs, (2, *blocks), (None, *heads, None, None), small)
        self.v = kernel_param(rngs, blocks, (*heads, None, None), small)
        self.w_g = named_param(jnp.zeros((3, N, D, 2, N)), (None, *heads, None, None))
        log_i = 0.1 * jax.random.normal(rngs.params(), (N,))
        log_f = jnp.linspace(LEAST_FORGET_BIAS, MOST_FORGET_BIAS, N)
        self.b_g = named_param(jnp.stack([log_i, log_f]), (None, "heads"))
        self.skip = named_param(jnp.ones((N, D)), heads)
        self.down = kernel_param(rngs, (N, D, W), (*heads, None), last)

    def initial_carry(self, rows):
        """Inputs before the first step, and a memory that nothing has entered."""
        n = jnp.zeros((rows, *self.skip.shape))
        memory = MLSTMCarry(jnp.zeros((*n.shape, n.shape[-1])), n, n[..., 0] + NOTHING)
        return self.conv.initial_carry(rows), memory

    def __call__(self, carry, x_TBW, at):
        """The block: q and k are of the convolution, v is not."""
        (T, B, _), dtype = x_TBW.shape, x_TBW.dtype
        N, D = self.skip.shape
        z = product(at.layout(self.norm(x_TBW), None, "batch", None), self.up[...])
        u, gate = z[:, :, 0].astype(dtype), z[:, :, 1]
        past, c = self.conv(carry[0], u, at)
        c_blocks, u_blocks = (a.reshape(T, B, N, -1, BLOCK) for a in (c, u))
        qk = jnp.einsum("tbnji,cnjio->tbcnjo", c_blocks, self.qk[...].astype(dtype))
        v = jnp.einsum("tbnji,njio->tbnjo", u_blocks, self.v[...].astype(dtype))
        qkv = jnp.concatenate([qk, v[:, :, None]], 2).reshape(T, B, 3, N, D)
        log = product(qkv, self.w_g[...], 3) + self.b_g[...][None, None]
        log = at.layout(log, None, "batch", None, "heads")
        gates = log[:, :, 0], nnx.log_sigmoid(log[:, :, 1])
        q, k, v = qkv[:, :, 0], qkv[:, :, 1] * D**-0.5, qkv[:, :, 2]
        initial = None if at.resets is None else self.initial_carry(B)[1]
        memory, h = mlstm(q, k, v, *gates, carry[1], at.resets, initial)
        h = self.head_norm(h) + beside(self.skip[...], h) * c.astype(jnp.float32)
        y = product((h * nnx.silu(gate)).astype(dtype), self.down[...], 2)
        return (past, memory), x_TBW + dropout(y.astype(dtype), self.rate, at)


class SLSTMBlock(nnx.Module):
    """A memory whose gates see its state, and a gated perceptron, each added to what it is given."""

    carry_dims = (("batch", None, "heads", None), SLSTMCarry(*[("batch", "heads", None)] * 4))

    def __init__(self, task, number, *, rngs):
        W, N, D = task.hidden_size, task.heads, task.hidden_size // task.heads
        F = -(-4 * W // (3 * 64)) * 64
        self.rate, heads = task.dropout, ("heads", None)
        small, last = task.initializers
        self.norm, self.head_norm = Norm(W, dims=(None,)), Norm(N, D, dims=heads)
        self.conv = Convolution(N, D, rngs=rngs)
        self.w_x = kernel_param(rngs, (4, N, D, D), (None, *heads, None), small)
        self.w_h = named_param(jnp.zeros((N, D, 4, D)), (*heads, None, None))
        # Forget gates of a head from 5 down to -7, in later blocks longer near 5.
        power = 0.3 + 1.3 * number / max(task.num_layers - 1, 1)
        forget_D = 5 - 12 * (jnp.arange(D) / max(D - 1, 1)) ** power
        self.b = named_param(jnp.zeros((4, N, D)).at[1].set(forget_D[None]), (None, *heads))
        self.up_norm = Norm(W, dims=(None,))
        self.up = kernel_param(rngs, (W, 2, F), (None, None, "hidden"), small)
        self.down = kernel_param(rngs, (F, W), ("hidden", None), last)

    def initial_carry(self, rows):
        """Inputs before the first step, and a memory that nothing has entered."""
        zeros = jnp.zeros((rows, *self.b.shape[1:]))
        return self.conv.initial_carry(rows), SLSTMCarry(zeros, zeros, zeros, zeros + NOTHING)

    def __call__(self, carry, x_TBW, at):
        """The block: the gates i and f are of the convolution, z and o are not."""
        (T, B, _), dtype = x_TBW.shape, x_TBW.dtype
        u = at.layout(self.norm(x_TBW), None, "batch", None).reshape(T, B, *self.b.shape[1:])
        past, c = self.conv(carry[0], u, at)
        inputs, w_x = jnp.stack([c, c, u, u], 2), self.w_x[...].astype(dtype)
        wide = {"preferred_element_type": jnp.float32}
        zx = jnp.einsum("tbgnd,gndo->tbgno", inputs, w_x, **wide) + self.b[...][None, None]
        initial = None if at.resets is None else self.initial_carry(B)[1]

        def step(given, memory, inputs):
            (w_h, initial), (zx, is_new) = given, inputs
            memory = begin_anew(is_new, initial, memory)
            memory = slstm_step(memory, zx + gates_of_state(memory.h_BH.astype(dtype), w_h))
            return memory, memory.h_BH

        memory, h = hoisted_scan(step, (self.w_h[...], initial), carry[1], (zx, at.resets))
        y = self.head_norm(h).astype(dtype).reshape(x_TBW.shape)
        x_TBW = x_TBW + dropout(y, self.rate, at)
        u = at.layout(self.up_norm(x_TBW), None, "batch", None)
        z = product(u, self.up[...])
        z = nnx.gelu(z[:, :, 0], approximate=False) * z[:, :, 1]
        y = product(z.astype(dtype), self.down[...]).astype(dtype)
        return (past, memory), x_TBW + dropout(y, self.rate, at, number=1)


def beside(a, x):
    """With dims of size 1 before its own, as many as x has more."""
    return jnp.expand_dims(a, range(x.ndim - a.ndim))


def product(x, kernel, num_summed=1):
    """Over the last dims of x and the first of a kernel; float32."""
    over = tuple(range(x.ndim - num_summed, x.ndim)), tuple(range(num_summed))
    kernel = kernel.astype(x.dtype)
    return dot_general(x, kernel, (over, ((), ())), preferred_element_type=jnp.float32)


# --- The task: that of `lm`, with other layers.


@dataclasses.dataclass(frozen=True)
class XLSTM(lm.LM):
    """A language model of blocks of xLSTM.

    Attributes:
      num_layers: blocks.
      num_heads: of each block's memory; None is 4.
    """

    layer: ClassVar[str] = "mlstm"
    forget_bias: ClassVar[float] = 1.0

    num_layers: int = 8

    def __post_init__(self):
        super().__post_init__()
        require(
            2 * self.hidden_size % (BLOCK * self.heads) == 0,
            f"hidden_size={self.hidden_size} with num_heads={self.heads}: heads of an mLSTM block have "
            f"2 x hidden_size / num_heads units, which must be blocks of {BLOCK}; use a hidden_size of "
            f"{2 * self.heads}, or a multiple",
        )

    @property
    def initializers(self):
        """Of kernels that read the residual stream, and of those that add to it."""
        W, normal = self.hidden_size, nnx.initializers.normal
        return normal((2 / (5 * W)) ** 0.5), normal(2 / self.num_layers * W**-0.5)

    def make_model(self, rngs):
        """The model of `lm`, its layers blocks and a norm after them."""
        model = super().make_model(rngs)
        makers = [lambda rngs: MLSTMBlock(self, rngs=rngs)] * self.num_layers
        for number in range(PLACE, self.num_layers, PERIOD):
            makers[number] = lambda rngs, n=number: SLSTMBlock(self, n, rngs=rngs)
        makers += [lambda rngs: Stateless(Norm(self.hidden_size, dims=(None,)))]
        model.layers = Stack(makers, rngs=rngs, unroll=1)
        return model
