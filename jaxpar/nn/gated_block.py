"""A recurrent layer in a residual block: norms, a gate and a last product around it.

    n = norm(x)      y = x + W_o (silu(W_g n) * norm(layer(n)))      norm(x) = x / sqrt(mean of x^2)

The norm of the layer's outputs is taken for each head.

Papers have such blocks around RG-LRU (De et al. 2024, arXiv:2402.19427, section 2.3), sLSTM and mLSTM (Beck
et al. 2024, arXiv:2405.04517, section 2.4) and gated DeltaNet (Yang et al. 2024, arXiv:2412.06464, section
3.4), each of its own kind. Most have all of this, and a convolution over the last four steps. Norms have no
scale here: products of matrices follow, which can have one.

Legend of the dim suffixes: T time, B batch, H hidden, N heads of D units.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH, HIDDEN, INPUT
from jaxpar.base.checks import require
from jaxpar.base.trees import wide
from jaxpar.base.types import Carry, Dims
from jaxpar.nn.hidden import Recurrence
from jaxpar.nn.linear import matmul
from jaxpar.nn.param import Initializer, kernel_param

LEAST_SQUARE = 1e-6  # added to the mean of squares that something is divided by


def rms_norm(x: jax.Array) -> jax.Array:
    """x divided by its root mean square over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467).

    Computed in float32, and returned as x; zeros stay zeros.
    """
    z = x.astype(wide(x.dtype))
    square = jnp.mean(jnp.square(z), -1, keepdims=True)
    return (z * lax.rsqrt(square + LEAST_SQUARE)).astype(x.dtype)


class GatedBlock(nnx.Module):
    """A layer in a gated residual block: `GatedBlock(MLSTM(64, rngs=rngs), rngs=rngs)`.

    In a stack its kind has the name of the layer, and its state is the layer's.

    Attributes:
      layer: a `Recurrence`, such as `MLSTM`.
      gate, out: W_g and W_o, [H, H].

    Example:
      layer = jaxpar.nn.GatedBlock(jaxpar.nn.MLSTM(16, num_heads=4, rngs=rngs), rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    def __init__(self, layer: Recurrence, *, rngs: nnx.Rngs, init: Initializer | None = None):
        """Draws the kernels.

        Args:
          layer: drawn already, of H units and as many inputs.
          init: of the kernels; None draws them with variance 1 / H.
        Raises:
          ValueError: the layer has another number of inputs than of units.
        """
        self.layer, H = layer, layer.width
        require(
            layer.inputs == H,
            f"inputs={layer.inputs} of a layer of width={H}: a GatedBlock adds its inputs to its outputs.\n"
            f"Fix: use inputs={H}, or the layer without a block.",
        )
        self.gate = kernel_param(rngs, (H, H), (INPUT, HIDDEN), init)
        self.out = kernel_param(rngs, (H, H), (HIDDEN, None), init)

    @property
    def kind_name(self) -> str:
        """That of the layer."""
        return getattr(self.layer, "kind_name", None) or type(self.layer).__name__

    @property
    def carry_dims(self) -> Dims:
        """Of the layer's state."""
        return self.layer.carry_dims

    def initial_carry(self, rows: int) -> Carry:
        """Of the layer."""
        return self.layer.initial_carry(rows)

    def __call__(self, carry: Carry, x_TBH: jax.Array, at: LayerContext) -> tuple[Any, ...]:
        """The block over a window of time; sums of the layer are passed on."""
        x_TBH = at.layout(x_TBH, None, BATCH, None)
        n_TBH = rms_norm(x_TBH)
        carry, y_TBH, *sums = self.layer(carry, n_TBH, at)
        gate_TBH = nnx.silu(matmul(n_TBH, self.gate[...])).astype(y_TBH.dtype)
        y_TBND = rms_norm(y_TBH.reshape(*y_TBH.shape[:2], self.layer.num_heads, -1))
        y_TBH = matmul(gate_TBH * y_TBND.reshape(y_TBH.shape), self.out[...]).astype(x_TBH.dtype)
        y_TBH = at.layout(y_TBH, None, BATCH, None)
        return carry, x_TBH + y_TBH, *sums
