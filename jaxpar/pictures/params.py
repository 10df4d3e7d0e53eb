"""Pictures of parameters: shape, dims, what splits them, bytes on a device."""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from rich.table import Table

from jaxpar.display import show
from jaxpar.pictures.picture import Tables
from jaxpar.state import TrainState
from jaxpar.training.summary import describe_bytes, parameter_table


class Params(Tables):
    """Tables of parameters, and a line about them."""

    def __init__(self, params: Any, frozen: Any = (), note: str = ""):
        self._parts: list[Table | str] = [parameter_table(params)]
        if jax.tree.leaves(frozen):
            self._parts += ["", parameter_table(frozen, "frozen")]
        if note:
            self._parts.append(f"\n{note}")

    def parts(self) -> Iterator[Table | str]:
        """What is trained, what is not, and the line."""
        yield from self._parts


@show.register
def show_train_state(state: TrainState) -> Params:
    """The parameters of a run, and the bytes of all of its state."""
    return Params(state.params, state.frozen, describe_bytes(state).strip())


@show.register(nnx.State)
@show.register(dict)
def show_tree(params: Any) -> Params:
    """Parameters as `nnx.state` or `nnx.split` gives them, or arrays in dicts."""
    return Params(params)


@show.register
def show_module(module: nnx.Module) -> Params:
    """The parameters of a module."""
    return Params(nnx.state(module, nnx.Param))
