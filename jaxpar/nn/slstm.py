"""An sLSTM layer, of xLSTM.

    z_t = tanh(.)   i_t = exp(.)   f_t = sigmoid(.)   o_t = sigmoid(.)     each of W x_t + R h_{t-1} + b
    c_t = f_t * c_{t-1} + i_t * z_t      n_t = f_t * n_{t-1} + i_t      h_t = o_t * c_t / n_t

(Beck et al. 2024, arXiv:2405.04517, section 2.2.) exp may overflow: c and n are held divided
by exp(m_t), m_t = max(log f_t + m_{t-1}, log i_t), which changes no output (equations 15 to 17). So no
gradient flows through m.

Legend of the dim suffixes: T time, B batch, H hidden, 4 the gates i f z o.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH, HIDDEN
from jaxpar.base.types import Carry, Dims
from jaxpar.internal.hoisting import hoisted_scan
from jaxpar.internal.products import contract
from jaxpar.nn.hidden import ForgetGate, gates_of_state
from jaxpar.nn.resets import begin_anew

NOTHING = -1e30  # m of a state that nothing has entered: exp(NOTHING - anything) is 0


class SLSTMCarry(NamedTuple):
    """The state between two windows of time, [B, H]. float32.

    Example:
      carry = jaxpar.nn.SLSTM(16, rngs=rngs).initial_carry(2)
      print(carry.m_BH.shape)  # (2, 16)
    """

    h_BH: jax.Array
    c_BH: jax.Array
    n_BH: jax.Array
    m_BH: jax.Array


def slstm_step(carry: SLSTMCarry, z_B4H: jax.Array) -> SLSTMCarry:
    """The state after a step: the formulas above.

    Args:
      z_B4H: what they take functions of, float32; H may be several dims, here and in the state.
    """
    _, c_BH, n_BH, m_BH = carry
    log_i, z, o = z_B4H[:, 0], jnp.tanh(z_B4H[:, 2]), nnx.sigmoid(z_B4H[:, 3])
    log_f = nnx.log_sigmoid(z_B4H[:, 1])
    m_next = lax.stop_gradient(jnp.maximum(log_f + m_BH, log_i))
    f, i = jnp.exp(log_f + lax.stop_gradient(m_BH) - m_next), jnp.exp(log_i - m_next)
    c_BH, n_BH = f * c_BH + i * z, f * n_BH + i
    return SLSTMCarry(o * c_BH / n_BH, c_BH, n_BH, m_next)


class SLSTM(ForgetGate):
    """One sLSTM layer.

    Attributes:
      carry_dims: of its state.
      w_x: [I, 4, H]; `w_h`: [H, 4, H], of heads [N, D, 4, D].
      b: [4, H].

    Example:
      layer = jaxpar.nn.SLSTM(16, num_heads=4, rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    carry_dims: ClassVar[Dims] = SLSTMCarry(*[(BATCH, HIDDEN)] * 4)  # pyright: ignore[reportArgumentType]

    def initial_carry(self, rows: int) -> SLSTMCarry:
        """The state that nothing has entered yet, [rows, H] each."""
        zeros = jnp.zeros((rows, self.width), jnp.float32)
        return SLSTMCarry(zeros, zeros, zeros, zeros + NOTHING)

    def over_time(self, carry: Carry, x_TBH: jax.Array, at: LayerContext, initial: Carry):
        """The formulas above."""
        dtype = x_TBH.dtype

        def step(given, carry, inputs):
            params, initial = given
            x_BH, is_new_B = inputs
            carry = begin_anew(is_new_B, initial, carry)
            zx_B4H = contract(x_BH, params.w_x_IGH.astype(dtype), out=jnp.float32)
            zh_B4H = gates_of_state(carry.h_BH.astype(dtype), params.w_h_HGH)
            carry = slstm_step(carry, zx_B4H + zh_B4H + params.b_GH[None])
            return carry, carry.h_BH.astype(dtype)

        inputs = x_TBH, at.resets
        return hoisted_scan(step, (self.params, initial), carry, inputs, unroll=at.unroll)
