"""The base of layers whose state is a matrix per head: a memory that every step writes to.

    C_t = f_t C_{t-1} + k_t v_t^T          y_t = C_t^T q_t          q, k, v of x_t; f_t at most 1

A loop over steps would read and write all of C at each. Here a window is cut into chunks of steps. What a
chunk's steps read of each other is a product of matrices, q_t k_s^T times what is left of step s at step t,
and so is what they read of the state before it; `lax.scan` carries that from chunk to chunk (Hua et al. 2022,
arXiv:2202.10447; Sun et al. 2023, arXiv:2307.08621). Only q, k, v and gates of the whole window, and the
state before each chunk, are kept for the backward pass.

A head reads nothing of the others, so that no device waits for another within the loop where `tensor` splits
heads. What is not finite at a step is so in all of its chunk; padding counts as zeros.

Legend of the dim suffixes: T time steps of a window, or t and s those of a chunk, B batch, I input, N heads,
K and V units of keys and values of a head (D if they are the same), H all of them.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import GATES, HEADS, INPUT
from jaxpar.base.checks import require
from jaxpar.base.trees import vary_like, wide
from jaxpar.base.types import Arrays, Carry, DType, LayerOutput
from jaxpar.nn.hidden import Recurrence
from jaxpar.nn.linear import matmul
from jaxpar.nn.param import Initializer, kernel_param
from jaxpar.nn.resets import mask_padding

CHUNK = 64  # steps
NOTHING = -1e30  # the logarithm of nothing: exp(NOTHING - anything) is 0
# 64 sums of numbers above -1024, in steps of a 256th, are exact in float32.
STEPS_OF_ONE = 256


class MatrixMemory(Recurrence):
    """A layer of heads, each with a matrix for its state and two gates.

    Attributes:
      num_vectors: q, k, v, and what else there is of a head at each step.
      w: [I, vectors, N, D].
      w_g: [I, 2, N], of the gates.
    """

    kernels: ClassVar[tuple[str, ...]] = ("w", "w_g")
    num_vectors: ClassVar[int]
    w: nnx.Param
    w_g: nnx.Param

    def __init__(self, width: int, *, num_heads: int = 4, **options: Any):
        """Draws the kernels.

        Args:
          width: H, of outputs: all heads'.
          num_heads: N.
          options: `rngs`, `inputs`, `init` and `dropout`, as of every `Recurrence`.
        Raises:
          ValueError: width does not divide by num_heads.
        """
        require(
            num_heads > 0 and width % num_heads == 0,
            f"num_heads={num_heads} does not divide width={width}.\n"
            f"Fix: use another num_heads, or a width that it divides.",
        )
        super().__init__(width, num_heads=num_heads, **options)

    def draw_params(self, rngs: nnx.Rngs, init: Initializer | None) -> None:
        """Draws the kernels."""
        self.head_size = self.width // self.num_heads
        shape = (self.inputs, self.num_vectors, self.num_heads, self.head_size)
        self.w = kernel_param(rngs, shape, (INPUT, GATES, HEADS, None), init)
        self.w_g = kernel_param(rngs, (self.inputs, 2, self.num_heads), (INPUT, GATES, HEADS), init)

    def __call__(self, carry: Carry, x_TBH: jax.Array, at: LayerContext) -> LayerOutput:
        """As of every `Recurrence`."""
        return super().__call__(carry, mask_padding(x_TBH, at), at)

    def vectors(self, x_TBI: jax.Array) -> jax.Array:
        """x W of all heads: float32 [T, B, vectors, N, D]."""
        return matmul(x_TBI, self.w[...])

    def gates(self, x_TBI: jax.Array) -> jax.Array:
        """x W of the gates: float32 [T, B, 2, N]."""
        return matmul(x_TBI, self.w_g[...])


class Steps(NamedTuple):
    """How the steps of a chunk depend on each other, and on the state before it.

    Attributes:
      between_BNts: logarithms of what is left at step t of what is written at step s; NOTHING if s is later,
        or of another sequence.
      since_BNt: the same of the state that step t's sequence has before its first step, or the chunk's.
      is_new_Bt: whether that state is the initial one: a sequence began at t or before; None is nowhere.
    """

    between_BNts: jax.Array
    since_BNt: jax.Array
    is_new_Bt: jax.Array | None

    @classmethod
    def of(cls, log_f_BNt: jax.Array, resets_Bt: jax.Array | None) -> "Steps":
        """From the logarithms of what each step leaves of what was there before."""
        size = log_f_BNt.shape[-1]
        reads_Bts = jnp.tri(size, dtype=bool)[None]
        # Differences of large sums are exact in coarse steps; what these leave has small sums.
        coarse = lax.stop_gradient(jnp.round(log_f_BNt * STEPS_OF_ONE) / STEPS_OF_ONE)
        parts = [jnp.cumsum(part, -1) for part in (coarse, log_f_BNt - coarse)]
        first, second = (part[..., :, None] - part[..., None, :] for part in parts)
        between_BNts = first + second
        since_BNt, is_new_Bt = parts[0] + parts[1], None
        if resets_Bt is not None:
            number_Bt = jnp.cumsum(resets_Bt, -1, dtype=jnp.int32)
            reads_Bts &= number_Bt[:, :, None] == number_Bt[:, None, :]
            is_new_Bt = number_Bt > 0
            since_BNt = jnp.sum(jnp.where(reads_Bts[:, None], log_f_BNt[:, :, None], 0.0), -1)
        return cls(jnp.where(reads_Bts[:, None], between_BNts, NOTHING), since_BNt, is_new_Bt)

    def read(self, of_state: Callable[[Carry], Arrays], before: Carry, initial: Carry) -> Arrays:
        """What steps read of the state that their sequence has before: arrays [B, N, t, ...].

        Args:
          of_state: a state -> what they read of it.
          before: the state before the chunk.
          initial: that which sequences within it begin with; None where none does.
        """
        is_new_Bt = self.is_new_Bt
        if is_new_Bt is None:
            return of_state(before)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(jnp.expand_dims(is_new_Bt, (1, *range(3, old.ndim))), new, old)

        return jax.tree.map(choose, of_state(initial), of_state(before))


def product(spec: str, a: jax.Array, b: jax.Array, dtype: DType) -> jax.Array:
    """An einsum of two arrays in a dtype, which accumulates in float32 and returns that, at least."""
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), preferred_element_type=wide(dtype))


def over_chunks(
    run: Callable[[Carry, Arrays, jax.Array | None, Carry], LayerOutput],
    carry: Carry,
    xs: Arrays,
    resets_TB: jax.Array | None,
    initial: Carry,
    chunk: int,
) -> LayerOutput:
    """Runs a function over the chunks of a window.

    Args:
      run: (carry, xs, resets, initial) -> (carry, y) of a chunk; xs and y are [B, N, t, ...], resets [B, t].
      carry: the state before the first step.
      xs: arrays [T, B, N, ...].
      resets_TB: where a sequence begins, from the state `initial`; None is nowhere.
      chunk: steps of one; the last one is shorter where they do not divide T.
    Returns:
      the state after the last step, and y: [T, B, N, ...].
    """
    given = carry, initial, xs, resets_TB
    carry, initial, xs, resets_TB = vary_like(given, given)

    @jax.checkpoint
    def step(carry, inputs):
        xs, resets_tB = inputs
        xs = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 2), xs)
        carry, y_BNtV = run(carry, xs, None if resets_tB is None else resets_tB.T, initial)
        return carry, jnp.moveaxis(y_BNtV, 2, 0)

    steps, ys = len(jax.tree.leaves(xs)[0]), []
    whole = steps // chunk * chunk
    if whole:
        chunks = jax.tree.map(lambda a: a[:whole].reshape(-1, chunk, *a.shape[1:]), (xs, resets_TB))
        carry, y = lax.scan(step, carry, chunks)
        ys.append(y.reshape(whole, *y.shape[2:]))
    if whole < steps:
        carry, y = step(carry, jax.tree.map(lambda a: a[whole:], (xs, resets_TB)))
        ys.append(y)
    return carry, ys[0] if len(ys) == 1 else jnp.concatenate(ys)
