"""The devices of a mesh, or the shards of an array, as a table."""

import html
import itertools
import math

import jax
import numpy as np
import rich.box
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from jaxpar.base.checks import require
from jaxpar.base.console import PlainTable
from jaxpar.base.display import format_bytes, format_count, format_shape, show
from jaxpar.base.trees import device_bytes
from jaxpar.mesh import MeshConfig
from jaxpar.pictures.picture import Picture, table_html
from jaxpar.pictures.style import HEAD, color_of, style_on
from jaxpar.sharding import axes_of_spec, base_of, dims_of

HTML_WIDTH = 150  # letters of a table in a notebook


class Grid(Picture):
    """Devices in a table whose rows and columns run over any number of dims."""

    def __init__(self, caption: str, devices: dict[tuple[str, ...], list[int]]):
        """What is where.

        Args:
          devices: labels of a place along every dim, the outermost first -> numbers of the devices there.
        """
        super().__init__()
        self.caption, self.devices = caption, devices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.caption)
        yield self._table(options.max_width)

    def to_html(self) -> str:
        """The same."""
        table = table_html(self._table(HTML_WIDTH))
        return f"<p><b>{html.escape(self.caption)}</b></p>{table}"

    def _table(self, max_width: int) -> Table:
        """As many dims to the right as there is room for, the others downwards."""
        dims = [list(dict.fromkeys(labels)) for labels in zip(*self.devices, strict=True)]
        console = Console(width=10_000)
        for n in range(len(dims) // 2, len(dims)):
            table = self._table_of(dims[:n], dims[n:])
            if console.measure(table).maximum <= max_width:
                return table
        return self._table_of(dims, [])

    def _table_of(self, down: list[list[str]], right: list[list[str]]) -> Table:
        table = PlainTable(box=rich.box.SQUARE, show_lines=True, show_header=bool(right))
        columns = list(itertools.product(*right))
        for _ in down or ["devices"]:
            table.add_column("", style=HEAD, overflow="fold")
        for column in columns:
            table.add_column("\n".join(column), justify="center", overflow="fold")
        for row in itertools.product(*down):
            chips = (_chips(self.devices[row + column]) for column in columns)
            table.add_row(*(row or ["devices"]), *chips)
        return table


def _chips(devices: list[int]) -> Text:
    chips = (Text(f" {d} ", style=f"bold {style_on(color_of(d))}") for d in devices)
    return Text(" ").join(chips)


@show.register
def show_mesh_config(config: MeshConfig) -> Grid:
    """The devices of a mesh by their numbers; a size that is to be inferred counts as one."""
    shape = tuple(max(size, 1) for size in config.sizes.values())
    numbers, count = config.devices or (), math.prod(shape)
    inferred = [axis for axis, size in config.sizes.items() if size == -1]
    note = f"; {inferred[0]} takes all other devices" if inferred else ""
    numbers = numbers if len(numbers) == count else range(count)  # resolve() raises an error
    return _mesh_grid(np.reshape(numbers, shape), tuple(config.sizes), note)


@show.register
def show_mesh(mesh: Mesh) -> Grid:
    """The devices of a mesh by their ids."""
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    return _mesh_grid(ids, mesh.axis_names, f", {' and '.join(kinds)}")


@show.register(nnx.Variable)
def show_variable(variable: nnx.Variable) -> Grid:
    """The shards of a parameter, its dims by name."""
    return show_array(variable.get_value(), dims_of(variable))


@show.register(jax.Array)
@show.register(jax.ShapeDtypeStruct)
def show_array(array: jax.Array, names: tuple[str | None, ...] = ()) -> Grid:
    """Which devices hold which piece of an array; sides are the dims that are split.

    Args:
      array: a `jax.Array`, or a `jax.ShapeDtypeStruct` with a sharding.
      names: of its dims.
    Raises:
      ValueError: it has no sharding.
    """
    shape, sharding = tuple(array.shape), array.sharding
    fact = f"abstract array of shape {shape} has no sharding"
    require(sharding is not None, f"{fact}\nFix: give jax.ShapeDtypeStruct(..., sharding=...).")
    bounds = {
        device.id: tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    split = [d for d, ranges in enumerate(zip(*bounds.values(), strict=True)) if len({*ranges}) > 1]
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    axes_of = axes_of_spec(spec or (), len(shape))
    known = [base_of(name) for name in names or (None,) * len(shape)]
    heads = {d: "/".join([f"dim {d} {known[d]}".strip(), *axes_of[d]]) for d in split}
    devices: dict[tuple[str, ...], list[int]] = {}
    for device, ranges in sorted(bounds.items(), key=lambda item: item[::-1]):
        place = tuple(f"{heads[dim]} [{ranges[dim][0]}:{ranges[dim][1]}]" for dim in split)
        devices.setdefault(place, []).append(device)
    shard, copies = sharding.shard_shape(shape), len(bounds) // len(devices)
    held = f"{len(devices)} shards of {format_shape(shard)}"
    held += f", each on {copies} devices" * (copies > 1)
    if not split:
        held = f"whole on {format_count(copies, 'device')}"
    size = format_bytes(device_bytes(array))
    layout = "" if spec is None or not shape else f", {spec}".replace("PartitionSpec", "P")
    return Grid(f"{array.dtype} {format_shape(shape)}{layout}: {held}; {size} a device", devices)


def _mesh_grid(ids: np.ndarray, axes: tuple[str, ...], note: str) -> Grid:
    sizes = dict(zip(axes, ids.shape, strict=True))
    devices = {}
    for place in np.ndindex(ids.shape):
        labels = (f"{axis} {p}" for axis, p in zip(axes, place, strict=True) if sizes[axis] > 1)
        devices[tuple(labels)] = [int(ids[place])]
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    return Grid(f"mesh {shape}: {format_count(ids.size, 'device')}{note}", devices)
