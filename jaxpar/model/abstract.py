"""Modules of shapes, in place of arrays."""

from typing import Any

import jax
from flax import nnx

from jaxpar.base.types import Function, Tree


def abstract(make: Function, *args: Tree) -> Tree:
    """The result of `make(*args)`, with shapes in place of arrays, as `nnx.eval_shape` gives it.

    JAX keeps the trees that a traced function takes and returns. The tree of a module has all of its
    attributes, so a model would never leave the memory. Here JAX receives states alone.

    Args:
      make: returns a module, or a tree of arrays.
      args: modules, or trees of arrays or of shapes.
    """
    graphdef_of_args, state_of_args = nnx.split(args)
    graphdef: Any = None

    def run(state: nnx.State) -> nnx.State:
        nonlocal graphdef
        graphdef, state_of_result = nnx.split(make(*nnx.merge(graphdef_of_args, state)))
        return state_of_result

    state = jax.eval_shape(run, state_of_args)
    return nnx.merge(graphdef, state)
