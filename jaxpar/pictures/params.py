"""Pictures of parameters: shape, dims, what splits them, bytes on a device."""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from rich.table import Table

from jaxpar.display import show
from jaxpar.pictures.picture import Picture
from jaxpar.state import TrainState
from jaxpar.training.summary import describe_bytes, parameter_table


class Params(Picture):
    """Tables of parameters, and lines about them."""

    def __init__(self, *parts: Table | str):
        self._parts = parts

    def parts(self) -> Iterator[Table | str]:
        """The tables and lines."""
        yield from self._parts


@show.register
def show_train_state(state: TrainState) -> Params:
    """The parameters of a run, what is trained and what is not, and the bytes of all of its state."""
    parts = [parameter_table(state.params)]
    if jax.tree.leaves(state.frozen):
        parts += ["", parameter_table(state.frozen, "frozen")]
    return Params(*parts, f"\n{describe_bytes(state).strip()}")


@show.register(nnx.State)
@show.register(dict)
def show_tree(params: Any) -> Params:
    """Parameters as `nnx.state` or `nnx.split` gives them, or arrays in dicts."""
    return Params(parameter_table(params))


@show.register
def show_module(module: nnx.Module) -> Params:
    """The parameters of a module."""
    return show_tree(nnx.state(module, nnx.Param))
