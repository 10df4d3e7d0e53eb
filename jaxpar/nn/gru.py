"""A GRU layer with PyTorch's formula.

Legend of the dim suffixes: T time, B batch, I input, H hidden, 3 the gates r z n, 4 these and n of the state.

    r_t = sigmoid(W_xr x_t + W_hr h_{t-1} + b_r)      z_t = sigmoid(W_xz x_t + W_hz h_{t-1} + b_z)
    n_t = tanh(W_xn x_t + b_n + r_t * (W_hn h_{t-1} + b_hn))
    h_t = (1 - z_t) * n_t + z_t * h_{t-1}

(Cho et al. 2014, with the reset gate applied after the product, as in `torch.nn.GRU` and cuDNN.)
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.types import Carry
from jaxpar.internal.hoisting import hoisted_scan
from jaxpar.internal.products import contract
from jaxpar.nn.hidden import GateParams, Recurrence, gates_of_state
from jaxpar.nn.resets import begin_anew


def gru_layer(
    params: GateParams,
    carry: jax.Array,
    x_TBI: jax.Array,
    resets_TB: jax.Array | None = None,
    initial_BH: jax.Array | None = None,
    unroll: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Runs a GRU layer over a window of time.

    The dtype of `x_TBI` is that of the matmuls' inputs; they accumulate in float32, and the state is float32.

    Args:
      carry: h before the first step, [B, H] float32; of heads [B, N, D] (`GateParams`), and so are outputs.
      resets_TB: where a sequence begins, from the state `initial_BH` (None: zeros); None means nowhere.
      unroll: how many steps a turn of the loops over time takes at most; see `hoisted_scan`.
    Returns:
      h after the last step, and the outputs h_TBH in the dtype of x.

    Example:
      gru = jaxpar.nn.GRU(16, rngs=rngs)
      params = jaxpar.nn.GateParams(gru.w_x[...], gru.w_h[...], gru.b[...])
      h, outputs = jaxpar.nn.gru_layer(params, jnp.zeros((2, 16)), jnp.ones((5, 2, 16)))
    """
    dtype = x_TBI.dtype

    def step(given, h_BH, inputs):
        params, initial_BH = given
        x_BI, is_new_B = inputs
        h_BH = begin_anew(is_new_B, initial_BH, h_BH)
        b_4H = params.b_GH
        zx_B3H = contract(x_BI, params.w_x_IGH.astype(dtype), out=jnp.float32) + b_4H[:3][None]
        zh_B3H = gates_of_state(h_BH.astype(dtype), params.w_h_HGH)
        r = nnx.sigmoid(zx_B3H[:, 0] + zh_B3H[:, 0])
        z = nnx.sigmoid(zx_B3H[:, 1] + zh_B3H[:, 1])
        n = jnp.tanh(zx_B3H[:, 2] + r * (zh_B3H[:, 2] + b_4H[3][None]))
        h_BH = n + z * (h_BH - n)
        return h_BH, h_BH.astype(dtype)

    given, inputs = (params, initial_BH), (x_TBI, resets_TB)
    return hoisted_scan(step, given, carry, inputs, unroll=unroll)


class GRU(Recurrence):
    """One GRU layer.

    Attributes:
      w_x: [I, 3, H]; `w_h`: [H, 3, H], of heads [N, D, 3, D].
      b: [4, H]; the last row belongs to n's product with the state.

    Example:
      layer = jaxpar.nn.GRU(16, rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    num_gates, num_biases = 3, 4

    def over_time(self, carry: Carry, x_TBH: jax.Array, at: LayerContext, initial: Carry):
        """See `gru_layer`."""
        return gru_layer(self.params, carry, x_TBH, at.resets, initial, at.unroll)
