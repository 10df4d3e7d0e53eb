"""An mLSTM layer, of xLSTM: a memory whose gates are exponential.

    q_t, k_t, v_t = W x_t + b of each head, k_t divided by sqrt(D)        o_t = sigmoid(W_o x_t + b_o)
    i_t = exp(w_i x_t + b_i)            f_t = sigmoid(w_f x_t + b_f)      of each head
    C_t = f_t C_{t-1} + i_t k_t v_t^T   n_t = f_t n_{t-1} + i_t k_t
    h_t = o_t * C_t^T q_t / max(|n_t^T q_t|, 1)

(Beck et al. 2024, arXiv:2405.04517, section 2.3.) exp may overflow: C and n are held divided by exp(m_t),
m_t = max(log f_t + m_{t-1}, log i_t), and 1 is exp(-m_t) then, which changes no output (appendix A). So no
gradient flows through m. Chunks of time are those of `matrix_memory`: with m_t the largest logarithm of what
step t reads, weights within a chunk are exp of what is not above 0.

Legend of the dim suffixes: as in `matrix_memory`; 4 is q k v o, 2 the gates i f.
"""

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH, GATES, HEADS
from jaxpar.base.types import Arrays, Carry, Dims
from jaxpar.nn.matrix_memory import CHUNK, NOTHING, MatrixMemory, Steps, over_chunks, product
from jaxpar.nn.param import named_param
from jaxpar.nn.resets import begin_anew

# Biases of the forget gates, from the first head to the last, and of the input gates (the authors' code,
# NX-AI/xlstm; Beck et al. 2025, arXiv:2503.13427, section 4). What enters a memory is small in the beginning.
FORGET_BIASES = 3.0, 6.0
INPUT_BIAS = -10.0

# Where q is 0 so is C^T q, and exp(-m) would be for a large m. exp(30) is finite, and so are gradients.
MOST_M = 30.0


class MLSTMCarry(NamedTuple):
    """The state between two windows of time. float32.

    Example:
      carry = jaxpar.nn.MLSTM(16, num_heads=4, rngs=rngs).initial_carry(2)
      print(carry.c_BNKV.shape)  # (2, 4, 4, 4)
    """

    c_BNKV: jax.Array
    n_BNK: jax.Array
    m_BN: jax.Array


def mlstm(
    q_TBNK: jax.Array,
    k_TBNK: jax.Array,
    v_TBNV: jax.Array,
    log_i_TBN: jax.Array,
    log_f_TBN: jax.Array,
    carry: MLSTMCarry,
    resets_TB: jax.Array | None = None,
    initial: MLSTMCarry | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[MLSTMCarry, jax.Array]:
    """The memories of all heads over a window of time, without the output gate.

    The dtype of q is that of the matmuls' inputs; they accumulate in float32, and the state is float32.

    Args:
      k_TBNK: divided by sqrt(K).
      log_i_TBN, log_f_TBN: logarithms of the gates, float32.
      carry: the state before the first step.
      resets_TB: where a sequence begins, from the state `initial`; None is nowhere.
      chunk: steps of a chunk.
    Returns:
      the state after the last step, and C^T q / max(|n^T q|, 1): float32 [T, B, N, V].
    """
    xs = q_TBNK, k_TBNK, v_TBNV, log_i_TBN, log_f_TBN
    return over_chunks(_chunk, carry, xs, resets_TB, initial, chunk)


def _chunk(before: MLSTMCarry, xs: Arrays, resets_Bt: jax.Array | None, initial: MLSTMCarry | None):
    q, k, v, log_i, log_f = xs  # [B, N, t, ...]
    dot = functools.partial(product, dtype=q.dtype)

    def of_state(state: MLSTMCarry):
        read = dot("bntk,bnkv->bntv", q, state.c_BNKV), dot("bntk,bnk->bnt", q, state.n_BNK)
        return *read, lax.stop_gradient(state.m_BN)[..., None]

    steps = Steps.of(log_f, resets_Bt)
    c_read, n_read, m_before = steps.read(of_state, before, initial)
    log_old, log_new = steps.since_BNt + m_before, steps.between_BNts + log_i[:, :, None]
    m = lax.stop_gradient(jnp.maximum(log_old, jnp.max(log_new, -1)))
    old, new = jnp.exp(log_old - m), jnp.exp(log_new - m[..., None])
    weights = new * dot("bntk,bnsk->bnts", q, k)
    n_read = old * n_read + jnp.sum(weights, -1)
    c_read = old[..., None] * c_read + dot("bnts,bnsv->bntv", weights, v)
    least = jnp.exp(-jnp.minimum(m, MOST_M))
    h = c_read / jnp.maximum(jnp.abs(n_read), least)[..., None]

    is_new_B = None if resets_Bt is None else jnp.any(resets_Bt, -1)
    c, n, _ = begin_anew(is_new_B, initial, before)
    old, written = old[..., -1], new[..., -1, :, None] * k.astype(new.dtype)
    c = old[..., None, None] * c + dot("bntk,bntv->bnkv", written, v)
    n = old[..., None] * n + jnp.sum(written, -2)
    return MLSTMCarry(c, n, m[..., -1]), h


class MLSTM(MatrixMemory):
    """One mLSTM layer.

    Attributes:
      carry_dims: of its state.
      w: [I, 4, N, D]; `b`: [4, N, D].
      w_g: [I, 2, N]; `b_g`: [2, N].

    Example:
      layer = jaxpar.nn.MLSTM(16, num_heads=4, rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    num_vectors = 4
    carry_dims: ClassVar[Dims] = MLSTMCarry(
        *((BATCH, HEADS, None, None), (BATCH, HEADS, None), (BATCH, HEADS))  # pyright: ignore[reportArgumentType]
    )

    def __init__(self, width: int, *, rngs: nnx.Rngs, **options: Any):
        """As every `MatrixMemory`; biases are 0 but for those of the gates.

        Those of the forget gates are from 3 to 6 over heads, those of the input gates -10.
        """
        super().__init__(width, rngs=rngs, **options)
        shape = (4, self.num_heads, self.head_size)
        self.b = named_param(jnp.zeros(shape, jnp.float32), (GATES, HEADS, None))
        forget_N = jnp.linspace(*FORGET_BIASES, self.num_heads, dtype=jnp.float32)
        input_N = jnp.full_like(forget_N, INPUT_BIAS)
        self.b_g = named_param(jnp.stack([input_N, forget_N]), (GATES, HEADS))

    def initial_carry(self, rows: int) -> MLSTMCarry:
        """The state that nothing has entered yet, [rows, N, ...]."""
        n = jnp.zeros((rows, self.num_heads, self.head_size), jnp.float32)
        c = jnp.zeros((*n.shape, self.head_size), jnp.float32)
        return MLSTMCarry(c, n, n[..., 0] + NOTHING)

    def over_time(self, carry: Carry, x_TBH: jax.Array, at: LayerContext, initial: Carry):
        """The formulas above."""
        dtype = x_TBH.dtype
        z_TB4ND = self.vectors(x_TBH) + self.b[...][None, None]
        z_TB2N = self.gates(x_TBH) + self.b_g[...][None, None]
        q, k, v, o = (z_TB4ND[:, :, number] for number in range(4))
        q, k, v = (a.astype(dtype) for a in (q, k * self.head_size**-0.5, v))
        log_i, log_f = z_TB2N[:, :, 0], nnx.log_sigmoid(z_TB2N[:, :, 1])
        carry, h_TBND = mlstm(q, k, v, log_i, log_f, carry, at.resets, initial)
        h_TBND = nnx.sigmoid(o) * h_TBND
        return carry, h_TBND.reshape(*x_TBH.shape[:2], self.width).astype(dtype)
