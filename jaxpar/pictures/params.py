"""Pictures of parameters: shape, dims, what splits them, bytes on a device."""

from collections.abc import Mapping, Sequence

import jax
from flax import nnx
from jax.sharding import NamedSharding
from rich.table import Table
from rich.text import Text

from jaxpar.base.console import make_table
from jaxpar.base.display import format_bytes, format_shape, show
from jaxpar.base.trees import device_bytes
from jaxpar.base.types import Params
from jaxpar.pictures.picture import Picture
from jaxpar.sharding import (
    HELD,
    Axes,
    Held,
    array_of,
    axes_of_spec,
    base_of,
    dims_of,
    is_variable,
    named_leaves,
    user_name,
)
from jaxpar.step.state import TrainState


@show.register
def show_train_state(state: TrainState) -> Picture:
    """The parameters of a run, what is trained and what is not, and the bytes of all of its state."""
    parts = [_table(state.params)]
    if jax.tree.leaves(state.frozen):
        parts += ["", _table(state.frozen, "frozen")]
    return Picture(*parts, f"\n{_bytes_of(state)}")


@show.register(nnx.State)
@show.register(dict)
def show_tree(params: Params) -> Picture:
    """Parameters as `nnx.state` or `nnx.split` gives them, or arrays in dicts.

    Raises:
      ValueError: an abstract one has no sharding.
    """
    return Picture(_table(params))


@show.register
def show_module(module: nnx.Module) -> Picture:
    """The parameters of a module."""
    return show_tree(nnx.state(module, nnx.Param))


def _table(params: Params, heading: str = "parameter") -> Table:
    """Every parameter with its shape, dims, the axes that split it, and its bytes on one device.

    Args:
      params: Flax variables or arrays, with shardings if they are abstract.
      heading: of the names.
    Raises:
      ValueError: an abstract one has no sharding.
    """
    table = make_table(heading, "shape", "dims / axes that split them", "shard", ">bytes/device")
    for stored, leaf in named_leaves(params):
        name, array = user_name(stored, leaf), array_of(leaf)
        layout = array.sharding
        if layout is None:
            raise ValueError(
                f"parameter {name} of shape {array.shape} is abstract and has no sharding\n"
                f"Fix: give the params of abstract_state(setup), or real ones."
            )
        sizes = layout.mesh.shape if isinstance(layout, NamedSharding) else {}
        split = axes_of_spec(layout.spec if sizes else (), array.ndim)
        shape, shard = format_shape(array.shape), format_shape(layout.shard_shape(array.shape))
        dims = _dims(dims_of(leaf), split, sizes)
        held: tuple[Held, ...] = leaf.get_metadata(HELD, ()) if is_variable(leaf) else ()
        for own in held:
            text = _dims(own.dims, own.split, sizes)
            table.add_row(own.name, format_shape(own.shape), text, "together", "")
        if held:
            name, dims = f"together ({array.dtype})", Text("layers of each stage", "dim")
        elif layout.num_devices > 1 and layout.is_fully_replicated:
            dims.append(", " * bool(dims)).append("replicated", style="bold yellow")
        table.add_row(name, shape, dims, shard, format_bytes(device_bytes(array)))
    return table


def _dims(dims: Sequence[str | None], split: Sequence[Axes], sizes: Mapping[str, int]) -> Text:
    """The names of dims, each with the axes that split it."""
    text = Text()
    for dim, axes in zip(dims, split, strict=True):
        text.append(", " * bool(text) + (base_of(dim) or "-"))
        text.append("".join(f"/{axis}" for axis in axes if sizes[axis] > 1), style="bold cyan")
    return text


def _bytes_of(state: TrainState) -> str:
    """Parameters of the model, and what a device holds of the state."""
    where = "" if state.opt_memory is None else " in host memory"
    trees = {
        "parameters": state.params,
        "frozen": state.frozen,
        f"optimizer state{where}": state.opt_state,
        "recurrent state": state.carry,
    }
    count, num_bytes = state.model_size
    sizes = {name: device_bytes(tree) for name, tree in trees.items() if jax.tree.leaves(tree)}
    on_device = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return f"{count:,} parameters, {format_bytes(num_bytes)}; per device: {on_device}"
