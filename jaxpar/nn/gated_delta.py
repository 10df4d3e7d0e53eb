"""A gated DeltaNet layer: a matrix memory that overwrites the value stored at a key.

    q_t, k_t, v_t = W x_t of each head, q_t and k_t divided by their lengths
    a_t = exp(-exp(L) softplus(w_a x_t + b))        b_t = sigmoid(w_b x_t)        of each head
    S_t = a_t (1 - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T          y_t = S_t^T q_t

(Yang et al. 2024, arXiv:2412.06464, equation 10, with the gate a_t of Mamba-2, Dao and Gu 2024,
arXiv:2405.21060; its block has convolutions, norms and an output gate around it.) A step takes from S what it
has at k_t, and puts v_t there, b_t of both. With `negative_eigenvalues` b_t is twice the sigmoid: what S has
at k_t may change its sign, so that a layer can count parities (Grazzi et al. 2024, arXiv:2411.12537).

Chunks of time are those of `matrix_memory`, of what is written at each step, u_t. With d_ts what is left at
step t of step s, and d_t of the state S before the chunk,

    u_t = b_t (v_t - d_t S^T k_t - sum of d_ts (k_t^T k_s) u_s over s < t)

is solved for all steps of a chunk at once: u = (1 + A)^-1 b (v - d S^T k), A strictly lower triangular
(section 3.3).

Legend of the dim suffixes: as in `matrix_memory`; 3 is q k v, 2 the gates a b.
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH, HEADS
from jaxpar.base.types import Arrays, Carry, Dims
from jaxpar.nn.matrix_memory import CHUNK, MatrixMemory, Steps, over_chunks, product
from jaxpar.nn.param import named_param
from jaxpar.nn.resets import begin_anew

# What exp(L), and the softplus at x = 0, are drawn from, as in Mamba-2: uniformly, and so in logarithms.
LEAST_DECAY, MOST_DECAY = 1.0, 16.0
LEAST_STEP, MOST_STEP = 1e-3, 0.1
LEAST_SQUARE = 1e-6  # added to the square of a length that something is divided by


def gated_delta(
    q_TBNK: jax.Array,
    k_TBNK: jax.Array,
    v_TBNV: jax.Array,
    log_a_TBN: jax.Array,
    b_TBN: jax.Array,
    carry_BNKV: jax.Array,
    resets_TB: jax.Array | None = None,
    initial_BNKV: jax.Array | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """The memories of all heads over a window of time.

    The dtype of q is that of the matmuls' inputs, but for those of A and its inverse, which are float32; they
    accumulate in float32, and the state is float32.

    Args:
      log_a_TBN, b_TBN: the logarithm of a, and b, float32.
      carry_BNKV: S before the first step.
      resets_TB: where a sequence begins, from the state `initial_BNKV`; None is nowhere.
      chunk: steps of a chunk.
    Returns:
      S after the last step, and y: float32 [T, B, N, V].
    """
    xs = q_TBNK, k_TBNK, v_TBNV, log_a_TBN, b_TBN
    return over_chunks(_chunk, carry_BNKV, xs, resets_TB, initial_BNKV, chunk)


def _chunk(before: jax.Array, xs: Arrays, resets_Bt: jax.Array | None, initial: jax.Array | None):
    q, k, v, log_a, b = xs  # [B, N, t, ...]
    size, dot = q.shape[2], functools.partial(product, dtype=q.dtype)

    def of_state(state: jax.Array):
        return tuple(dot("bntk,bnkv->bntv", each, state) for each in (q, k))

    steps = Steps.of(log_a, resets_Bt)
    q_read, k_read = steps.read(of_state, before, initial)
    old, left = jnp.exp(steps.since_BNt)[..., None], jnp.exp(steps.between_BNts)
    qk, kk = (left * dot("bntk,bnsk->bnts", each, k) for each in (q, k))
    earlier = jnp.tri(size, k=-1, dtype=kk.dtype)[None, None]
    b, v = b[..., None], v.astype(kk.dtype)
    u = jnp.einsum("bnts,bnsv->bntv", inverse(b * kk * earlier), b * (v - old * k_read))
    y = old * q_read + dot("bnts,bnsv->bntv", qk, u)
    state = begin_anew(None if resets_Bt is None else jnp.any(resets_Bt, -1), initial, before)
    written = left[..., -1, :, None] * k.astype(left.dtype)
    return old[..., -1:, :] * state + dot("bntk,bntv->bnkv", written, u), y


def inverse(a: jax.Array) -> jax.Array:
    """(1 + A)^-1 of strictly lower triangular matrices A, [..., n, n].

    By blocks: [[1 + A, 0], [B, 1 + C]]^-1 is [[X, 0], [-Z B X, Z]], X and Z the inverses of the two. Powers
    of A may be far larger than what they add up to.
    """
    *outer, n, _ = a.shape
    whole = 1 << (n - 1).bit_length()
    a = jnp.pad(a, [(0, 0)] * len(outer) + [(0, whole - n)] * 2)
    found = jnp.ones((*outer, whole, 1, 1), a.dtype)
    for size in (1 << level for level in range((n - 1).bit_length())):
        blocks = a.reshape(*outer, whole // (2 * size), 2, size, whole // (2 * size), 2, size)
        below = jnp.diagonal(blocks[..., :, 1, :, :, 0, :], axis1=-4, axis2=-2)
        below = jnp.moveaxis(below, -1, -3)
        x, z = found[..., 0::2, :, :], found[..., 1::2, :, :]
        rows = [x, jnp.zeros_like(x)], [-z @ below @ x, z]
        found = jnp.concatenate([jnp.concatenate(row, -1) for row in rows], -2)
    return found[..., 0, :n, :n]


class GatedDeltaNet(MatrixMemory):
    """One gated DeltaNet layer.

    Attributes:
      w: [I, 3, N, D].
      w_g: [I, 2, N].
      b: of a; `decay`: L; [N].
      negative_eigenvalues: whether b_t is in (0, 2), not (0, 1).

    Example:
      layer = jaxpar.nn.GatedDeltaNet(16, num_heads=4, negative_eigenvalues=True, rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    kind_name = "gated_delta"
    num_vectors = 3
    carry_dims: ClassVar[Dims] = (BATCH, HEADS, None, None)

    def __init__(
        self, width: int, *, negative_eigenvalues: bool = False, rngs: nnx.Rngs, **options: Any
    ):
        """As every `MatrixMemory`; `decay` and `b` are drawn as in Mamba-2."""
        super().__init__(width, rngs=rngs, **options)
        self.negative_eigenvalues = negative_eigenvalues

        def draw(low: float | jax.Array, high: float | jax.Array) -> jax.Array:
            shape, dtype = (self.num_heads,), jnp.dtype(jnp.float32)
            return jax.random.uniform(rngs.params(), shape, dtype, low, high)

        self.decay = named_param(jnp.log(draw(LEAST_DECAY, MOST_DECAY)), (HEADS,))
        step_N = jnp.exp(draw(jnp.log(LEAST_STEP), jnp.log(MOST_STEP)))
        self.b = named_param(jnp.log(jnp.expm1(step_N)), (HEADS,))

    def initial_carry(self, rows: int) -> jax.Array:
        """Zeros, [rows, N, D, D]."""
        return jnp.zeros((rows, self.num_heads, self.head_size, self.head_size), jnp.float32)

    def over_time(self, carry: Carry, x_TBH: jax.Array, at: LayerContext, initial: Carry):
        """The formulas above."""
        dtype = x_TBH.dtype
        z_TB3ND, z_TB2N = self.vectors(x_TBH), self.gates(x_TBH)
        q, k, v = (z_TB3ND[:, :, number] for number in range(3))
        q, k, v = (a.astype(dtype) for a in (_of_length_1(q), _of_length_1(k), v))
        rate_N = jnp.exp(self.decay[...])
        log_a = -rate_N[None, None] * jax.nn.softplus(z_TB2N[:, :, 0] + self.b[...][None, None])
        b = nnx.sigmoid(z_TB2N[:, :, 1]) * (1.0 + self.negative_eigenvalues)
        carry, y_TBND = gated_delta(q, k, v, log_a, b, carry, at.resets, initial)
        return carry, y_TBND.reshape(*x_TBH.shape[:2], self.width).astype(dtype)


def _of_length_1(a: jax.Array) -> jax.Array:
    return a * lax.rsqrt(jnp.sum(jnp.square(a), -1, keepdims=True) + LEAST_SQUARE)
