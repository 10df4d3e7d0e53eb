"""Layers, and what they are made of: parameters that carry named dims."""

from jaxpar.nn.adapters import Recurrent, Residual, Stateless
from jaxpar.nn.conv import Conv
from jaxpar.nn.dropout import dropout
from jaxpar.nn.embedding import Embedding
from jaxpar.nn.linear import Linear, dot_general
from jaxpar.nn.lstm import LSTM, LSTMCarry, LSTMParams, extend, lstm_layer
from jaxpar.nn.param import lecun_uniform, named_param

__all__ = [
    "LSTM",
    "Conv",
    "Embedding",
    "LSTMCarry",
    "LSTMParams",
    "Linear",
    "Recurrent",
    "Residual",
    "Stateless",
    "dot_general",
    "dropout",
    "extend",
    "lecun_uniform",
    "lstm_layer",
    "named_param",
]
