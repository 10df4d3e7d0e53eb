"""Deep LSTM: one layer as a pair (forward, backward), and stacked layers as an NNX module.

Legend of the dim suffixes: T time, B batch, I input, H hidden, 4 the gates i f g o, L layers.

    z_t = x_t W_x + h_{t-1} W_h + b        i, f, o = sigmoid(z_i, z_f, z_o)    g = tanh(z_g)
    c_t = f * c_{t-1} + i * g              h_t = o * tanh(c_t)

(Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000.) The input projection of all
steps is one matmul before the time loop, and so is every weight gradient after it: the backward loop
produces dz_t only. Autodiff of a scan would add an outer product into dW_h at every step instead, and
under data parallelism all-reduce it there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxpar.axes import GATES, HIDDEN, INPUT, LAYERS
from jaxpar.nn.dropout import Position, dropout
from jaxpar.nn.param import lecun_uniform, named_param, stacked
from jaxpar.nn.stack import Layer, run_layers


class LSTMParams(NamedTuple):
    """Weights of one layer, or of several stacked on a leading dim. float32."""

    w_x_I4H: jax.Array
    w_h_H4H: jax.Array
    b_4H: jax.Array


class LSTMCarry(NamedTuple):
    """The state between two windows of time: of one layer [B, H], or stacked [L, B, H]. float32."""

    h_BH: jax.Array
    c_BH: jax.Array


class LSTMResiduals(NamedTuple):
    """What the backward pass of one layer needs besides the weights."""

    x_TBI: jax.Array
    gates_TB4H: jax.Array  # i, f, g, o after their nonlinearity
    h_prev_TBH: jax.Array  # h_{t-1}
    c_prev_TBH: jax.Array  # c_{t-1}, float32
    c_last_BH: jax.Array


def lstm_forward(
    params: LSTMParams, carry: LSTMCarry, x_TBI: jax.Array
) -> tuple[LSTMCarry, jax.Array, LSTMResiduals]:
    """One layer over a window of time.

    The dtype of `x_TBI` is the compute dtype of the matmuls (they accumulate in float32); c and the gate
    arithmetic stay float32.

    Args:
      params: of one layer; H may be sharded over `tensor`.
      carry: (h, c) before the first step, [B, H] float32.
    Returns:
      (h, c) after the last step, the outputs h_TBH in the dtype of x, and the residuals.
    """
    dtype = x_TBI.dtype
    w_h = params.w_h_H4H.astype(dtype)
    zx_TB4H = _dot("tbi,igh->tbgh", x_TBI, params.w_x_I4H.astype(dtype)) + params.b_4H[None, None]

    def step(carry, zx_B4H):
        h_BH, c_BH = carry
        z_B4H = zx_B4H + _dot("bj,jgh->bgh", h_BH, w_h)
        i, f, o = (jax.nn.sigmoid(z_B4H[:, gate]) for gate in (0, 1, 3))
        g = jnp.tanh(z_B4H[:, 2])
        c_next = f * c_BH + i * g
        h_next = (o * jnp.tanh(c_next)).astype(dtype)
        gates_B4H = jnp.stack([i, f, g, o], axis=1).astype(dtype)
        return (h_next, c_next), (h_next, gates_B4H, h_BH, c_BH)

    start = (carry.h_BH.astype(dtype), carry.c_BH)
    (h, c), (y_TBH, gates, h_prev, c_prev) = lax.scan(step, start, zx_TB4H)
    residuals = LSTMResiduals(x_TBI, gates, h_prev, c_prev, c)
    return LSTMCarry(h.astype(jnp.float32), c), y_TBH, residuals


def lstm_backward(
    params: LSTMParams, residuals: LSTMResiduals, d_carry: LSTMCarry, dy_TBH: jax.Array
) -> tuple[LSTMParams, LSTMCarry, jax.Array]:
    """The vector-Jacobian product of `lstm_forward`.

    Args:
      d_carry: cotangent of the (h, c) after the last step.
      dy_TBH: cotangent of the outputs.
    Returns:
      cotangents of the weights (float32), of the (h, c) before the first step, and of x.
    """
    dtype = residuals.x_TBI.dtype
    # Transposed here, or it would be at every step.
    w_h_4HH = lax.optimization_barrier(params.w_h_H4H.astype(dtype).transpose(1, 2, 0))

    def step(carry, inputs):
        dh_BH, dc_BH, c_BH = carry
        dy_BH, gates_B4H, c_prev_BH = inputs
        i, f, g, o = (gates_B4H[:, gate].astype(jnp.float32) for gate in range(4))
        tanh_c = jnp.tanh(c_BH)
        dh_BH = dh_BH + dy_BH.astype(jnp.float32)
        dc_BH = dc_BH + dh_BH * o * (1 - tanh_c * tanh_c)
        dz_B4H = jnp.stack(
            [
                dc_BH * g * i * (1 - i),
                dc_BH * c_prev_BH * f * (1 - f),
                dc_BH * i * (1 - g * g),
                dh_BH * tanh_c * o * (1 - o),
            ],
            axis=1,
        ).astype(dtype)
        return (_dot("bgh,ghj->bj", dz_B4H, w_h_4HH), dc_BH * f, c_prev_BH), dz_B4H

    start = (d_carry.h_BH, d_carry.c_BH, residuals.c_last_BH)
    inputs = (dy_TBH, residuals.gates_TB4H, residuals.c_prev_TBH)
    (dh, dc, _), dz_TB4H = lax.scan(step, start, inputs, reverse=True)
    d_params = LSTMParams(
        w_x_I4H=_sum_of_outer_products(residuals.x_TBI, dz_TB4H),
        w_h_H4H=_sum_of_outer_products(residuals.h_prev_TBH, dz_TB4H),
        b_4H=jnp.sum(dz_TB4H.astype(jnp.float32), axis=(0, 1)),
    )
    dx_TBI = _dot("tbgh,igh->tbi", dz_TB4H, params.w_x_I4H.astype(dtype)).astype(dtype)
    return d_params, LSTMCarry(dh, dc), dx_TBI


@jax.custom_vjp
def lstm_layer(
    params: LSTMParams, carry: LSTMCarry, x_TBI: jax.Array
) -> tuple[LSTMCarry, jax.Array]:
    """`lstm_forward` without the residuals, differentiable by `lstm_backward`."""
    carry, y_TBH, _ = lstm_forward(params, carry, x_TBI)
    return carry, y_TBH


def _layer_fwd(params, carry, x_TBI):
    carry, y_TBH, residuals = lstm_forward(params, carry, x_TBI)
    return (carry, y_TBH), (params, residuals)


def _layer_bwd(saved, cotangents):
    return lstm_backward(*saved, *cotangents)


lstm_layer.defvjp(_layer_fwd, _layer_bwd)


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _sum_of_outer_products(a_TBI: jax.Array, b_TB4H: jax.Array) -> jax.Array:
    """Over T and B, in that order: einsum would sum over B and T, and transpose both arrays for it."""
    dims = (((0, 1), (0, 1)), ((), ()))
    return lax.dot_general(a_TBI, b_TB4H, dims, preferred_element_type=jnp.float32)


class LSTM(nnx.Module):
    """Stacked LSTM layers; the weights of all layers share three arrays.

    Attributes:
      kernel: what computes a layer, called as `lstm_layer`.
      w_x: [slots, H, 4, H]; an input narrower than H is zero-extended.
      w_h: [slots, H, 4, H].
      b: [slots, 4, H].
    """

    kernel = staticmethod(lstm_layer)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        rngs: nnx.Rngs,
        forget_bias: float = 1.0,
        dropout: float = 0.0,
        layer_ids: Sequence[int] | None = None,
    ):
        """Draws weights with variance 1 / hidden_size; biases are 0 but for the forget gate's.

        Args:
          forget_bias: initial bias of the forget gate (Jozefowicz et al. 2015 recommend 1).
          dropout: rate on the input of every layer; see `nn.dropout`.
          layer_ids: the layer in each slot of the stacked arrays, -1 for an empty slot; by default the
            layers in their order.
        Raises:
          ValueError: the input is wider than the layers, or `layer_ids` misses a layer.
        """
        if input_size > hidden_size:
            raise ValueError(
                f"input_size={input_size} is larger than hidden_size={hidden_size}; what moves between "
                f"stacked layers has one width, so use input_size <= hidden_size"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.dropout = dropout
        self.layer_ids = tuple(range(num_layers) if layer_ids is None else layer_ids)
        if sorted(layer for layer in self.layer_ids if layer >= 0) != list(range(num_layers)):
            raise ValueError(
                f"layer_ids={self.layer_ids} must hold each of the {num_layers} layers exactly once"
            )
        init = lecun_uniform(hidden_size)
        b_4H = jnp.zeros((4, hidden_size)).at[1].set(forget_bias)
        w_x = stacked(init, rngs.params(), self.layer_ids, (hidden_size, 4, hidden_size))
        w_h = stacked(init, rngs.params(), self.layer_ids, (hidden_size, 4, hidden_size))
        b = stacked(lambda *_: b_4H, rngs.params(), self.layer_ids, b_4H.shape)
        self.w_x = named_param(w_x, (LAYERS, INPUT, GATES, HIDDEN))
        self.w_h = named_param(w_h, (LAYERS, INPUT, GATES, HIDDEN))
        self.b = named_param(b, (LAYERS, GATES, HIDDEN))

    @property
    def params(self) -> LSTMParams:
        """The stacked weights."""
        return LSTMParams(self.w_x[...], self.w_h[...], self.b[...])

    def initial_carry(self, batch_size: int) -> LSTMCarry:
        """The zero state, [slots, B, H]."""
        zeros = jnp.zeros((len(self.layer_ids), batch_size, self.hidden_size), jnp.float32)
        return LSTMCarry(zeros, zeros)

    def layer(self, dropout_key: jax.Array | None = None) -> Layer:
        """One layer as a function, for `nn.run_layers` or a pipeline: dropout, then the LSTM."""

        @jax.named_scope("lstm")
        def run(params, carry, x_TBH, position):
            x_TBH = dropout(x_TBH, self.dropout, dropout_key, position)
            return self.kernel(params, carry, x_TBH)

        return run

    @jax.named_scope("lstm")
    def __call__(
        self,
        x_TBI: jax.Array,
        carry: LSTMCarry | None = None,
        *,
        dropout_key: jax.Array | None = None,
        first_row: jax.Array | int = 0,
    ) -> tuple[LSTMCarry, jax.Array]:
        """All layers over a window of time.

        Args:
          x_TBI: [T, B, input_size]; B may be sharded over `data`.
          carry: state before the window, [slots, B, H]; None starts from zeros.
          dropout_key: None means no dropout.
          first_row: where these rows begin in the whole batch.
        Returns:
          the state after the window and the outputs of the last layer, [T, B, hidden_size].
        Raises:
          ValueError: the inputs have another width.
        """
        if x_TBI.shape[-1] != self.input_size:
            raise ValueError(
                f"inputs of shape {x_TBI.shape} are {x_TBI.shape[-1]} wide, this LSTM was made for "
                f"input_size={self.input_size}; give it inputs of that width"
            )
        if carry is None:
            carry = self.initial_carry(x_TBI.shape[1])
        return self.run_all(carry, extend(x_TBI, self.hidden_size), dropout_key, first_row)

    def run_all(
        self,
        carry: LSTMCarry,
        x_TBH: jax.Array,
        dropout_key: jax.Array | None,
        first_row: jax.Array | int,
    ) -> tuple[LSTMCarry, jax.Array]:
        """All layers over inputs that are as wide as they are."""
        return run_layers(
            self.layer(dropout_key),
            self.params,
            carry,
            x_TBH,
            Position(0, 0, first_row),
            np.asarray(self.layer_ids, np.int32),
            has_empty_slots=-1 in self.layer_ids,
        )


def extend(x: jax.Array, width: int) -> jax.Array:
    """x with its last dim zero-extended to `width`."""
    if x.shape[-1] == width:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
