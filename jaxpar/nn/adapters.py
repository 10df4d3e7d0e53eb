"""Layers of a stack made from ordinary Flax modules."""

import jax
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH
from jaxpar.base.keys import new_key
from jaxpar.base.types import Activations, Carry, LayerOutput, Module
from jaxpar.internal.hoisting import hoisted_scan
from jaxpar.nn.resets import begin_anew, initial_of
from jaxpar.sharding import dims_of, is_variable


class Recurrent(nnx.Module):
    """A layer made of any Flax cell: `Recurrent(nnx.GRUCell(64, 64, rngs=rngs))`.

    The cell (a `flax.nnx.RNNCellBase`) is run over the time steps of its inputs [T, B, W], in a loop. Its
    outputs must be as wide as its inputs. Where a sequence begins, the cell starts from its initial carry.

    Gradients of its weights are taken after the loop, and products of inputs and weights before it
    (`internal.hoisting`), for Flax's cells and for your own of `nnx.Linear`, `einsum`, `@` and arithmetic.
    Whatever a cell does with a weight inside a loop or branch, in `jax.checkpoint`, or in a function with its
    own backward pass (`jax.custom_vjp`, such as `jaxpar.nn.Linear`: use `nnx.Linear`), stays in the time
    loop: equally correct, but as slow as `lax.scan`, and zero-bubble schedules find no separate W.

    Flax's cells cut their gates from one array. Unless its parameters have named dims, a cell is given inputs
    that are whole on each device, whatever splits the layers around it.

    Example:
      layer = jaxpar.nn.Recurrent(nnx.GRUCell(16, 16, rngs=rngs))
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    def __init__(self, cell: Module):
        self.cell = cell

    def initial_carry(self, rows: int) -> Carry:
        """The cell's own, zeros by Flax's default."""
        return self.cell.initialize_carry((rows, self.cell.in_features), nnx.Rngs(new_key(0)))

    def __call__(self, carry: Carry, x_TBW: jax.Array, at: LayerContext) -> LayerOutput:
        """The cell at every time step."""
        graphdef, state = nnx.split(self.cell)
        variables = jax.tree.leaves(state, is_leaf=is_variable)
        is_split = any(name for leaf in variables if is_variable(leaf) for name in dims_of(leaf))

        def whole(a_TBW: jax.Array) -> jax.Array:
            return a_TBW if is_split else at.layout(a_TBW, None, BATCH, None)

        x_TBW = whole(x_TBW)
        initial = initial_of(self, x_TBW, at)

        def step(given, carry, inputs):
            (state, initial), (x_BW, is_new_B) = given, inputs
            return nnx.merge(graphdef, state)(begin_anew(is_new_B, initial, carry), x_BW)

        xs = x_TBW, at.resets
        carry, y_TBW = hoisted_scan(step, (state, initial), carry, xs, unroll=at.unroll)
        return carry, whole(y_TBW)


class Stateless(nnx.Module):
    """A layer made of any module `x -> y` with y shaped as x: `Stateless(nnx.Linear(64, 64, rngs=rngs))`.

    Example:
      layer = jaxpar.nn.Stateless(nnx.LayerNorm(16, rngs=rngs))
      _, y = layer((), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    def __init__(self, module: Module):
        self.module = module

    def __call__(self, carry: Carry, x: Activations, at: LayerContext) -> LayerOutput:
        """The module; there is no state."""
        return carry, self.module(x)
