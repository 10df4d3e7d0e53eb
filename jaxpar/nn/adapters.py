"""Layers of a stack made from ordinary Flax modules."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.at import At


class Recurrent(nnx.Module):
    """A layer of any cell of Flax: `Recurrent(nnx.GRUCell(64, 64, rngs=rngs))`.

    The cell (a `flax.nnx.RNNCellBase`) is run over the time steps of its inputs [T, B, W], in a loop. Its
    outputs must be as wide as its inputs.
    """

    def __init__(self, cell: Any):
        self.cell = cell

    def initial_carry(self, rows: int) -> Any:
        """The cell's own, zeros by Flax's default."""
        return self.cell.initialize_carry((rows, self.cell.in_features), nnx.Rngs(0))

    def __call__(self, carry: Any, x_TBW: jax.Array, at: At) -> tuple[Any, jax.Array]:
        """The cell at every time step."""
        graphdef, state = nnx.split(self.cell)

        def step(carry, x_BW):
            return nnx.merge(graphdef, state)(carry, x_BW)

        return lax.scan(step, carry, x_TBW)


class Stateless(nnx.Module):
    """A layer of any module `x -> y` whose y is as x: `Stateless(nnx.Linear(64, 64, rngs=rngs))`."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, carry: Any, x: Any, at: At) -> tuple[Any, Any]:
        """The module; there is no state."""
        return carry, self.module(x)


class Residual(nnx.Module):
    """A layer of any module `x -> y`, added to its inputs: `x + module(x)`."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, carry: Any, x: Any, at: At) -> tuple[Any, Any]:
        """The inputs and what the module makes of them."""
        return carry, jax.tree.map(jnp.add, x, self.module(x))
