"""Layers, and what they are made of: parameters that carry named dims."""

from jaxpar.nn.adapters import Recurrent, Residual, Stateless
from jaxpar.nn.bidirectional import Bidirectional
from jaxpar.nn.conv import Conv
from jaxpar.nn.dropout import Dropout, dropout
from jaxpar.nn.embedding import Embedding
from jaxpar.nn.gru import GRU, GRUParams, gru_layer
from jaxpar.nn.hoisting import hoisted_scan
from jaxpar.nn.linear import Linear, dot_general
from jaxpar.nn.linear_recurrence import linear_recurrence
from jaxpar.nn.lstm import LSTM, LSTMCarry, LSTMParams, Resets, extend, lstm_layer
from jaxpar.nn.mingru import MinGRU
from jaxpar.nn.param import lecun_uniform, named_param
from jaxpar.nn.resets import begin_anew
from jaxpar.nn.rglru import RGLRU
from jaxpar.nn.slstm import SLSTM, SLSTMCarry, SLSTMParams, slstm_layer

__all__ = [
    "GRU",
    "LSTM",
    "RGLRU",
    "SLSTM",
    "Bidirectional",
    "Conv",
    "Dropout",
    "Embedding",
    "GRUParams",
    "LSTMCarry",
    "LSTMParams",
    "Linear",
    "MinGRU",
    "Recurrent",
    "Resets",
    "Residual",
    "SLSTMCarry",
    "SLSTMParams",
    "Stateless",
    "begin_anew",
    "dot_general",
    "dropout",
    "extend",
    "gru_layer",
    "hoisted_scan",
    "lecun_uniform",
    "linear_recurrence",
    "lstm_layer",
    "named_param",
    "slstm_layer",
]
