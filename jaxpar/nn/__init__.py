"""Annotated modules: parameters that carry named dims, and the layers made of them."""

# Without parameters, these work as they are on any layout.
from flax.nnx import avg_pool, max_pool, relu

from jaxpar.nn.conv import Conv
from jaxpar.nn.cudnn import CuDNNLSTM, cudnn_lstm
from jaxpar.nn.dropout import Position, dropout
from jaxpar.nn.embedding import Embedding
from jaxpar.nn.linear import Linear
from jaxpar.nn.lstm import LSTM, LSTMCarry, LSTMParams, lstm_layer
from jaxpar.nn.param import named_param
from jaxpar.nn.stack import Layer, run_layers

__all__ = [
    "LSTM",
    "Conv",
    "CuDNNLSTM",
    "Embedding",
    "LSTMCarry",
    "LSTMParams",
    "Layer",
    "Linear",
    "Position",
    "avg_pool",
    "cudnn_lstm",
    "dropout",
    "lstm_layer",
    "max_pool",
    "named_param",
    "relu",
    "run_layers",
]
