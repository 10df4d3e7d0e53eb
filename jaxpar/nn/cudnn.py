"""The LSTM layer by NVIDIA's cuDNN, behind the interface of `nn.lstm`.

Legend of the dim suffixes: T time, B batch, I input, H hidden, 4 the gates i f g o, 1 the layer.

cuDNN computes the equations of `nn.lstm`, its gates in the same order (cudnnRNNMode_t). What differs is how
it takes things: batch before time, kernels [4, H, I], two biases, and all weights in one flat array, W_x W_h
b_x b_h (`jax.experimental.rnn`). It could run several layers in one call; here each is a layer of its own,
between which there may be dropout or a link.

Our one bias is the first of the two, the second is zero. JAX has cuDNN's LSTM in float32 alone; its matmuls
round to TF32, as those of XLA on such a GPU do, unless `jax_default_matmul_precision` asks for more.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import rnn

from jaxpar.nn.lstm import LSTM, LSTMCarry, LSTMParams, Resets
from jaxpar.trees import vary_like


def is_cudnn_installed() -> bool:
    """Whether JAX came with cuDNN's LSTM, which its plugins for CUDA bring."""
    return hasattr(vars(rnn)["gpu_rnn"], "compute_rnn_workspace_reserve_space_sizes")


def cudnn_lstm(
    params: LSTMParams, carry: LSTMCarry, x_TBI: jax.Array, resets: Resets | None = None
) -> tuple[LSTMCarry, jax.Array]:
    """`lstm_layer` by cuDNN.

    For whole layers: H must not be sharded. Its residuals are x, the state, the outputs, and what cuDNN
    reserves for its backward pass, for which JAX allocates four times what cuDNN asks for (it takes its bytes
    for elements). Differentiable once.

    Args:
      carry: (h, c) before the first step, [B, H].
    Returns:
      (h, c) after the last step and the outputs [T, B, H].
    Raises:
      ValueError: x is not float32, or sequences begin within the window.
    """
    if resets is not None:
        raise ValueError(
            "the batch says where sequences begin within a window (resets), and cuDNN's LSTM cannot begin "
            "anew there; use nn.LSTM (kernel='scan')"
        )
    if x_TBI.dtype != jnp.float32:
        raise ValueError(f"inputs are {x_TBI.dtype}; cuDNN's LSTM takes float32")
    return _lstm(*vary_like((params, carry), x_TBI), x_TBI)


@jax.custom_vjp
def _lstm(params, carry, x_TBI):
    return _forward(params, carry, x_TBI)[0]


def _forward(params: LSTMParams, carry: LSTMCarry, x_TBI: jax.Array):
    (y_BTH, h_1BH, c_1BH), (*_, reserve) = rnn.lstm_fwd(
        x_TBI.swapaxes(0, 1), *_of_layer(carry), pack(params), _lengths(x_TBI), **_settings(params)
    )
    y_BTH, after, reserve = vary_like((y_BTH, LSTMCarry(h_1BH[0], c_1BH[0]), reserve), x_TBI)
    # The weights themselves, not their packed copy: the pipeline keeps no leaf of the parameters.
    return (after, y_BTH.swapaxes(0, 1)), (params, carry, x_TBI, y_BTH, reserve)


def _backward(saved, cotangents):
    params, carry, x_TBI, y_BTH, reserve = saved
    d_carry, dy_TBH = cotangents
    x_BTI, lengths = x_TBI.swapaxes(0, 1), _lengths(x_TBI)
    dx_BTI, dh_1BH, dc_1BH, d_weights, _ = rnn.lstm_bwd(
        **_settings(params),
        residuals=(x_BTI, *_of_layer(carry), pack(params), lengths, y_BTH, reserve),
        gradients=(dy_TBH.swapaxes(0, 1), *_of_layer(d_carry)),
    )
    d_start = LSTMCarry(dh_1BH[0], dc_1BH[0])
    return vary_like((unpack(d_weights, params), d_start, dx_BTI.swapaxes(0, 1)), x_TBI)


_lstm.defvjp(_forward, _backward)


def pack(params: LSTMParams) -> jax.Array:
    """The weights as cuDNN's flat array."""
    kernels = (jnp.moveaxis(kernel, 0, -1).ravel() for kernel in params[:2])
    b = params.b_4H.ravel()
    return jnp.concatenate([*kernels, b, jnp.zeros_like(b)])


def unpack(weights: jax.Array, like: LSTMParams) -> LSTMParams:
    """The other way round, with the first of the biases: the second is none of ours."""
    I, _, H = like.w_x_I4H.shape  # noqa: E741
    sizes = (4 * H * I, 4 * H * H, 4 * H)
    w_x, w_h, b, _ = jnp.split(weights, np.cumsum(sizes))
    return LSTMParams(
        jnp.moveaxis(w_x.reshape(4, H, I), -1, 0),
        jnp.moveaxis(w_h.reshape(4, H, H), -1, 0),
        b.reshape(4, H),
    )


def _of_layer(carry: LSTMCarry) -> tuple[jax.Array, jax.Array]:
    """h and c with a dim of layers, of which there is one."""
    return carry.h_BH[None], carry.c_BH[None]


def _lengths(x_TBI: jax.Array) -> jax.Array:
    """All rows have all steps: what pads a shorter text has no targets, and comes after it."""
    return jnp.full(x_TBI.shape[1], x_TBI.shape[0], jnp.int32)


def _settings(params: LSTMParams) -> dict[str, Any]:
    I, _, H = params.w_x_I4H.shape  # noqa: E741
    sizes = {"input_size": I, "hidden_size": H, "num_layers": 1}
    return {**sizes, "dropout": 0.0, "bidirectional": False, "precision": None}


class CuDNNLSTM(LSTM):
    """`LSTM` on cuDNN."""

    kernel = staticmethod(cudnn_lstm)
