"""Layers, and what they are made of: parameters that carry named dims."""

from jaxpar.nn.adapters import Recurrent, Stateless
from jaxpar.nn.bidirectional import Bidirectional
from jaxpar.nn.conv import Conv
from jaxpar.nn.dropout import Dropout, dropout
from jaxpar.nn.embedding import Embedding
from jaxpar.nn.gru import GRU, gru_layer
from jaxpar.nn.hidden import GateParams
from jaxpar.nn.hoisting import hoisted_scan
from jaxpar.nn.linear import Linear, dot_general
from jaxpar.nn.linear_recurrence import linear_recurrence
from jaxpar.nn.lstm import LSTM, LSTMCarry, extend, lstm_layer
from jaxpar.nn.mingru import MinGRU
from jaxpar.nn.param import named_param
from jaxpar.nn.rglru import RGLRU
from jaxpar.nn.slstm import SLSTM, SLSTMCarry

__all__ = [
    "GRU",
    "LSTM",
    "RGLRU",
    "SLSTM",
    "Bidirectional",
    "Conv",
    "Dropout",
    "Embedding",
    "GateParams",
    "LSTMCarry",
    "Linear",
    "MinGRU",
    "Recurrent",
    "SLSTMCarry",
    "Stateless",
    "dot_general",
    "dropout",
    "extend",
    "gru_layer",
    "hoisted_scan",
    "linear_recurrence",
    "lstm_layer",
    "named_param",
]
