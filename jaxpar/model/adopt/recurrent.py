"""An `nnx.RNN` in a block: its state comes from the previous time chunk, in jaxpar's own loop."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.types import LayerOutput, Module, Tree
from jaxpar.model.adopt.marks import TRACING
from jaxpar.nn.adapters import Recurrent
from jaxpar.nn.hidden import GateParams
from jaxpar.nn.lstm import LSTMCarry, lstm_layer

_NOWHERE = LayerContext(0, 0, 0)  # no arrays: an import must not start JAX


class ChunkedRNN(nnx.RNN):
    """An `nnx.RNN` that begins with the carry of its block where a model is traced in parts."""

    def __call__(self, inputs, *, return_carry=None, time_major=None, **others):
        """As of `nnx.RNN`."""
        state = TRACING.get()
        block = state and state.block
        if block is None or not block.level.is_valid() or inputs.ndim != 3:
            return super().__call__(
                inputs, return_carry=return_carry, time_major=time_major, **others
            )
        if wrong := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"an nnx.RNN in a block is called with {', '.join(wrong)}.\n"
                f"Fix: leave them out; packed sequences are for models in the layer form."
            )
        time_major = self.time_major if time_major is None else time_major
        x_TBW = inputs if time_major else inputs.swapaxes(0, 1)
        start, tree = jax.tree.flatten(Recurrent(self.cell).initial_carry(x_TBW.shape[1]))
        block.starts.extend(start)
        given = [next(block.given, a) for a in start]
        carry, y_TBW = _over_time(self.cell, jax.tree.unflatten(tree, given), x_TBW)
        block.after.extend(jax.tree.leaves(carry))
        y = y_TBW if time_major else y_TBW.swapaxes(0, 1)
        return_carry = self.return_carry if return_carry is None else return_carry
        return (carry, y) if return_carry else y


def chunk_time(block: Module) -> None:
    """Changes each `nnx.RNN` of a block, if it runs forward from zeros."""
    both = [node for _, node in nnx.iter_graph(block) if isinstance(node, nnx.Bidirectional)]
    inside = {id(rnn) for node in both for rnn in (node.forward_rnn, node.backward_rnn)}
    for _, node in nnx.iter_graph(block):
        if type(node) is nnx.RNN and id(node) not in inside and _fits(node):
            node.__class__ = ChunkedRNN


def _fits(rnn: nnx.RNN) -> bool:
    if rnn.reverse or rnn.cell.num_feature_axes != 1:
        return False
    with jax.ensure_compile_time_eval():
        start = Recurrent(rnn.cell).initial_carry(1)
    return all(not np.any(np.asarray(a)) for a in jax.tree.leaves(start))


def _over_time(cell: Tree, carry: Tree, x_TBW: jax.Array) -> LayerOutput:
    """The cell over time; Flax's own LSTM by jaxpar's kernel."""
    if _is_plain_lstm(cell):
        c_BH, h_BH = carry
        w_x, w_h = (_by_gate(dense) for dense in (cell.dense_i, cell.dense_h))
        params = GateParams(w_x, w_h, cell.dense_h.bias[...].reshape(4, -1))
        carry = LSTMCarry(h_BH, c_BH)
        after, y_TBH = lstm_layer(params, carry, x_TBW, None, None, _NOWHERE.unroll)  # pyright: ignore[reportGeneralTypeIssues]
        return (after.c_BH, after.h_BH), y_TBH
    return Recurrent(cell)(carry, x_TBW, _NOWHERE)


def _is_plain_lstm(cell: Tree) -> bool:
    functions = getattr(cell, "gate_fn", None), getattr(cell, "activation_fn", None)
    is_lstm = type(cell) is nnx.OptimizedLSTMCell and functions == (nnx.sigmoid, nnx.tanh)
    return is_lstm and cell.dtype in (None, jnp.float32)


def _by_gate(dense: Tree) -> jax.Array:
    kernel = dense.kernel[...]
    return kernel.reshape(len(kernel), 4, -1)
