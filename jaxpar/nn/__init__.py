"""Layers, and what they are made of: parameters that carry named dims."""

from jaxpar.nn.adapters import Recurrent as Recurrent
from jaxpar.nn.adapters import Stateless as Stateless
from jaxpar.nn.bidirectional import Bidirectional as Bidirectional
from jaxpar.nn.conv import Conv as Conv
from jaxpar.nn.dropout import dropout as dropout
from jaxpar.nn.embedding import Embedding as Embedding
from jaxpar.nn.gated_block import GatedBlock as GatedBlock
from jaxpar.nn.gated_delta import GatedDeltaNet as GatedDeltaNet
from jaxpar.nn.gru import GRU as GRU
from jaxpar.nn.gru import gru_layer as gru_layer
from jaxpar.nn.hidden import GateParams as GateParams
from jaxpar.nn.hoisting import hoisted_scan as hoisted_scan
from jaxpar.nn.linear import Linear as Linear
from jaxpar.nn.linear import dot_general as dot_general
from jaxpar.nn.linear_recurrence import linear_recurrence as linear_recurrence
from jaxpar.nn.lstm import LSTM as LSTM
from jaxpar.nn.lstm import LSTMCarry as LSTMCarry
from jaxpar.nn.lstm import extend as extend
from jaxpar.nn.lstm import lstm_layer as lstm_layer
from jaxpar.nn.mingru import MinGRU as MinGRU
from jaxpar.nn.mlstm import MLSTM as MLSTM
from jaxpar.nn.mlstm import MLSTMCarry as MLSTMCarry
from jaxpar.nn.param import named_param as named_param
from jaxpar.nn.rglru import RGLRU as RGLRU
from jaxpar.nn.slstm import SLSTM as SLSTM
from jaxpar.nn.slstm import SLSTMCarry as SLSTMCarry
