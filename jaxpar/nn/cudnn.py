"""The LSTM layer by NVIDIA's cuDNN, behind the interface of `nn.lstm`.

Legend of the dim suffixes: T time, B batch, I input, H hidden, 4 the gates i f g o, L layers.

cuDNN computes the equations of `nn.lstm`, its gates in the same order (cudnnRNNMode_t). What differs is how
it takes things: batch before time, kernels [4, H, I], two biases a layer, and all weights in one flat array
(`jax.experimental.rnn`):

    W_x W_h of the first layer, W_x W_h of the next, ..., b_x b_h of the first, b_x b_h of the next, ...

Our one bias is the first of the two, the second is zero. JAX has cuDNN's LSTM in float32 alone; its matmuls
round to TF32, as those of XLA on such a GPU do, unless `jax_default_matmul_precision` asks for more.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import rnn

from jaxpar.nn.lstm import LSTM, LSTMCarry, LSTMParams
from jaxpar.nn.stack import vary_like


def is_cudnn_installed() -> bool:
    """Whether JAX came with cuDNN's LSTM, which its plugins for CUDA bring."""
    return hasattr(vars(rnn)["gpu_rnn"], "compute_rnn_workspace_reserve_space_sizes")


def cudnn_lstm(
    params: LSTMParams, carry: LSTMCarry, x_TBI: jax.Array
) -> tuple[LSTMCarry, jax.Array]:
    """`lstm_layer` by cuDNN: one layer, or stacked ones, one after the other in one call.

    For whole layers: H must not be sharded. Its residuals are x, the state, the outputs, and what cuDNN
    reserves for its backward pass, for which JAX allocates four times what cuDNN asks for (it takes its bytes
    for elements). Differentiable once.

    Args:
      params: of one layer, or stacked [L, ...] with I = H.
      carry: (h, c) before the first step, [B, H] or [L, B, H].
    Returns:
      (h, c) after the last step and the outputs of the last layer [T, B, H].
    Raises:
      ValueError: x is not float32.
    """
    if x_TBI.dtype != jnp.float32:
        raise ValueError(f"inputs are {x_TBI.dtype}; cuDNN's LSTM takes float32")
    return _lstm(*vary_like((params, carry), x_TBI), x_TBI)


@jax.custom_vjp
def _lstm(params, carry, x_TBI):
    return _forward(params, carry, x_TBI)[0]


def _forward(params: LSTMParams, carry: LSTMCarry, x_TBI: jax.Array):
    h_LBH, c_LBH = (a.reshape(-1, *a.shape[-2:]) for a in carry)
    (y_BTH, *after), (*_, reserve) = rnn.lstm_fwd(
        x_TBI.swapaxes(0, 1), h_LBH, c_LBH, pack(params), _lengths(x_TBI), **_settings(params)
    )
    y_BTH, after, reserve = vary_like((y_BTH, after, reserve), x_TBI)
    carry_after = LSTMCarry(*(a.reshape(carry.h_BH.shape) for a in after))
    # The weights themselves, not their packed copy: the pipeline keeps no leaf of the parameters.
    return (carry_after, y_BTH.swapaxes(0, 1)), (params, carry, x_TBI, y_BTH, reserve)


def _backward(saved, cotangents):
    params, carry, x_TBI, y_BTH, reserve = saved
    d_carry, dy_TBH = cotangents
    h_LBH, c_LBH, dh_LBH, dc_LBH = (a.reshape(-1, *a.shape[-2:]) for a in (*carry, *d_carry))
    weights, lengths = pack(params), _lengths(x_TBI)
    residuals = (x_TBI.swapaxes(0, 1), h_LBH, c_LBH, weights, lengths, y_BTH, reserve)
    dx_BTI, *d_start, d_weights, _ = rnn.lstm_bwd(
        **_settings(params),
        residuals=residuals,
        gradients=(dy_TBH.swapaxes(0, 1), dh_LBH, dc_LBH),
    )
    d_start = LSTMCarry(*(a.reshape(carry.h_BH.shape) for a in d_start))
    return vary_like((unpack(d_weights, params), d_start, dx_BTI.swapaxes(0, 1)), x_TBI)


_lstm.defvjp(_forward, _backward)


def pack(params: LSTMParams) -> jax.Array:
    """The weights of one layer, or of several stacked, as cuDNN's flat array."""
    num_layers = _num_layers(params)

    def flat(kernel):
        return jnp.moveaxis(kernel, -3, -1).reshape(num_layers, -1)

    b = params.b_4H.reshape(num_layers, -1)
    kernels = jnp.concatenate([flat(params.w_x_I4H), flat(params.w_h_H4H)], axis=1)
    biases = jnp.concatenate([b, jnp.zeros_like(b)], axis=1)
    return jnp.concatenate([kernels.reshape(-1), biases.reshape(-1)])


def unpack(weights: jax.Array, like: LSTMParams) -> LSTMParams:
    """The other way round, with the first bias of each layer: the second is none of ours."""
    num_layers = _num_layers(like)
    num_kernels = like.w_x_I4H.size + like.w_h_H4H.size
    kernels = weights[:num_kernels].reshape(num_layers, -1)
    biases = weights[num_kernels:].reshape(num_layers, -1)
    num_inputs = like.w_x_I4H.size // num_layers

    def kernel(flat, shape):
        return jnp.moveaxis(flat.reshape(*shape[:-3], *shape[-2:], shape[-3]), -1, -3)

    return LSTMParams(
        kernel(kernels[:, :num_inputs], like.w_x_I4H.shape),
        kernel(kernels[:, num_inputs:], like.w_h_H4H.shape),
        biases[:, : biases.shape[1] // 2].reshape(like.b_4H.shape),
    )


def _lengths(x_TBI: jax.Array) -> jax.Array:
    """All rows have all steps: what pads a shorter text has no targets, and comes after it."""
    return jnp.full(x_TBI.shape[1], x_TBI.shape[0], jnp.int32)


def _settings(params: LSTMParams) -> dict[str, Any]:
    I, _, H = params.w_x_I4H.shape[-3:]  # noqa: E741
    sizes = {"input_size": I, "hidden_size": H, "num_layers": _num_layers(params)}
    return {**sizes, "dropout": 0.0, "bidirectional": False, "precision": None}


def _num_layers(params: LSTMParams) -> int:
    return math.prod(params.b_4H.shape[:-2])


class CuDNNLSTM(LSTM):
    """`LSTM` on cuDNN: all layers in one call, or one layer at a time with dropout or empty slots between."""

    kernel = staticmethod(cudnn_lstm)

    def run_all(self, carry, x_TBH, dropout_key, first_row):
        """See `LSTM.run_all`."""
        is_one_call = self.dropout == 0.0 or dropout_key is None
        if not is_one_call or -1 in self.layer_ids:
            return super().run_all(carry, x_TBH, dropout_key, first_row)
        return cudnn_lstm(self.params, carry, x_TBH)
