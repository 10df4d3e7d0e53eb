"""Pictures of parameters: shape, dims, what splits them, bytes on a device."""

from collections.abc import Iterator
from typing import Any

from flax import nnx
from rich.table import Table

from jaxpar.display import show
from jaxpar.pictures.picture import Tables
from jaxpar.state import TrainState
from jaxpar.training.summary import describe_bytes, parameter_table


class Params(Tables):
    """A table of parameters, and a line about them."""

    def __init__(self, params: Any, note: str = ""):
        self._parts = (parameter_table(params), *([f"\n{note}"] if note else []))

    def parts(self) -> Iterator[Table | str]:
        """The table, then the line."""
        yield from self._parts


@show.register
def show_train_state(state: TrainState) -> Params:
    """The parameters of a run, and the bytes of all of its state."""
    return Params(state.params, describe_bytes(state).strip())


@show.register(nnx.State)
@show.register(dict)
def show_tree(params: Any) -> Params:
    """Parameters as `nnx.state` or `nnx.split` gives them, or arrays in dicts."""
    return Params(params)


@show.register
def show_module(module: nnx.Module) -> Params:
    """The parameters of a module."""
    return Params(nnx.state(module, nnx.Param))
