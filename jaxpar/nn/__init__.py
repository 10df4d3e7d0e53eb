"""Annotated modules: parameters that carry named dims, and the layers made of them."""

from jaxpar.nn.dropout import Position, dropout
from jaxpar.nn.embedding import Embedding
from jaxpar.nn.linear import Linear
from jaxpar.nn.lstm import LSTM, LSTMCarry, LSTMParams, lstm_layer
from jaxpar.nn.param import named_param
from jaxpar.nn.stack import Layer, run_layers

__all__ = [
    "LSTM",
    "Embedding",
    "LSTMCarry",
    "LSTMParams",
    "Layer",
    "Linear",
    "Position",
    "dropout",
    "lstm_layer",
    "named_param",
    "run_layers",
]
