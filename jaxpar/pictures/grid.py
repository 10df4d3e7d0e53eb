"""Which device has what, as a table of any number of dims: a mesh, or the shards of an array."""

import html
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.box
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from jaxpar.display import format_bytes, format_count, format_shape, show
from jaxpar.mesh import MeshConfig
from jaxpar.pictures.picture import Picture, color_of, text_color_on

MAX_COLUMNS = 16
MAX_CHIPS = 8  # more devices in one place are written as ranges


class Side(NamedTuple):
    """A dim of the table: its name, and a label for each place along it."""

    name: str
    labels: tuple[str, ...]


class Grid(Picture):
    """Devices in a table whose rows and columns run over any number of dims."""

    def __init__(
        self, caption: str, sides: tuple[Side, ...], devices: dict[tuple[int, ...], list[int]]
    ):
        """What is where.

        Args:
          sides: outermost first.
          devices: place along every side -> numbers of the devices there.
        """
        self.caption, self.sides, self.devices = caption, sides, devices

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        # As many sides to the right as the console has room for, the others downwards.
        unlimited = console.options.update(max_width=10_000)
        num_rows = len(self.sides) // 2
        table = self._table(num_rows)
        while (
            num_rows < len(self.sides)
            and console.measure(table, options=unlimited).maximum > options.max_width
        ):
            num_rows += 1
            table = self._table(num_rows)
        yield Text(self.caption)
        yield table

    def to_html(self) -> str:
        """A table, with a header for each side."""
        num_rows = len(self.sides) // 2
        while math.prod(len(side.labels) for side in self.sides[num_rows:]) > MAX_COLUMNS:
            num_rows += 1
        lines, across = [], 1
        for side in self.sides[num_rows:]:
            span = (
                math.prod(len(s.labels) for s in self.sides[num_rows:])
                // across
                // len(side.labels)
            )
            name = f'<th colspan="{max(1, num_rows)}">{html.escape(side.name)}</th>'
            cells = [
                f'<th colspan="{span}">{html.escape(label)}</th>' for label in side.labels * across
            ]
            lines.append(f"<tr>{name}{''.join(cells)}</tr>")
            across *= len(side.labels)
        for place in self._places(0, num_rows):
            heads = "".join(self._row_heads(place)) or "<th>devices</th>"
            cells = (self._chips(place + rest) for rest in self._places(num_rows, len(self.sides)))
            lines.append(f"<tr>{heads}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        return (
            f'<p><b>{html.escape(self.caption)}</b></p><table class="grid">{"".join(lines)}</table>'
        )

    def _row_heads(self, place: tuple[int, ...]) -> Iterator[str]:
        """Headers of the sides that begin a new label in this row."""
        for i, (index, side) in enumerate(zip(place, self.sides, strict=False)):
            if not any(place[i + 1 :]):
                span = math.prod(len(s.labels) for s in self.sides[i + 1 : len(place)])
                yield f'<th rowspan="{span}">{html.escape(f"{side.name} {side.labels[index]}")}</th>'

    def _chips(self, place: tuple[int, ...]) -> str:
        devices = self.devices[place]
        if len(devices) > MAX_CHIPS:
            return html.escape(_ranges(devices))
        chips = []
        for d in devices:
            color = color_of(d)
            style = f"background:{color};color:{text_color_on(color)}"
            chips.append(f'<span class="device" style="{style}">{d}</span>')
        return " ".join(chips)

    def _table(self, num_rows: int) -> Table:
        table = Table(box=rich.box.SQUARE, show_lines=True, show_header=num_rows < len(self.sides))
        for _ in range(max(1, num_rows)):
            table.add_column("", style="dim", overflow="fold")
        for place in self._places(num_rows, len(self.sides)):
            sides = zip(self.sides[num_rows:], place, strict=True)
            head = "\n".join(f"{side.name} {side.labels[index]}" for side, index in sides)
            table.add_column(head, justify="center", overflow="fold")
        for place in self._places(0, num_rows):
            sides = zip(self.sides[:num_rows], place, strict=True)
            heads = [f"{side.name} {side.labels[index]}" for side, index in sides] or ["devices"]
            cells = (self._text(place + rest) for rest in self._places(num_rows, len(self.sides)))
            table.add_row(*heads, *cells)
        return table

    def _text(self, place: tuple[int, ...]) -> Text:
        devices = self.devices[place]
        if len(devices) > MAX_CHIPS:
            return Text(_ranges(devices))
        chips = []
        for d in devices:
            color = color_of(d)
            chips.append(Text(f" {d} ", style=f"bold {text_color_on(color)} on {color}"))
        return Text(" ").join(chips)

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(len(side.labels)) for side in self.sides[start:stop]))


@show.register
def show_mesh_config(config: MeshConfig) -> Grid:
    """The devices of a mesh by their numbers; a size that is to be inferred counts as one."""
    shape = tuple(max(size, 1) for size in config.sizes.values())
    numbers = config.devices or range(math.prod(shape))
    inferred = [axis for axis, size in config.sizes.items() if size == -1]
    note = f"; {inferred[0]} takes as many more as there are" if inferred else ""
    if len(numbers) != math.prod(shape):  # of which resolve() complains
        note += f"; {len(numbers)} are given"
        numbers = range(math.prod(shape))
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
    return array_grid(variable.get_value(), variable.get_metadata("out_sharding", None) or ())


@show.register(jax.Array)
@show.register(jax.ShapeDtypeStruct)
def show_array(array: Any) -> Grid:
    """The shards of an array."""
    return array_grid(array)


def array_grid(array: Any, names: tuple[str | None, ...] = ()) -> Grid:
    """Which devices hold which piece of an array; sides are the dims that are split.

    Args:
      array: a `jax.Array`, or a `jax.ShapeDtypeStruct` with a sharding.
      names: of its dims.
    Raises:
      ValueError: it has no sharding.
    """
    shape, sharding = tuple(array.shape), array.sharding
    if sharding is None:
        raise ValueError(
            f"an abstract array of shape {shape} has no sharding; give "
            f"jax.ShapeDtypeStruct(..., sharding=...)"
        )
    bounds = {
        device.id: tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    pieces = [sorted(set(ranges)) for ranges in zip(*bounds.values(), strict=True)]
    split = [dim for dim, ranges in enumerate(pieces) if len(ranges) > 1]
    spec = (*sharding.spec, *[None] * len(shape)) if isinstance(sharding, NamedSharding) else ()
    sides = []
    for dim in split:
        axes = spec[dim] if spec else ()
        axes = (axes,) if isinstance(axes, str) else axes
        name = " ".join(["dim", str(dim), names[dim] or "" if names else ""]).strip()
        labels = tuple(f"[{start}:{stop}]" for start, stop in pieces[dim])
        sides.append(Side("/".join([name, *(axes or ())]), labels))
    devices: dict[tuple[int, ...], list[int]] = {}
    for device, ranges in sorted(bounds.items()):
        devices.setdefault(tuple(pieces[dim].index(ranges[dim]) for dim in split), []).append(
            device
        )
    shard = sharding.shard_shape(shape)
    copies = len(bounds) // len(devices)
    each = f", each on {copies} devices" if copies > 1 else ""
    held = (
        f"{len(devices)} shards of {format_shape(shard)}{each}"
        if split
        else f"whole on {format_count(copies, 'device')}"
    )
    size = format_bytes(math.prod(shard) * array.dtype.itemsize)
    layout = f", {sharding.spec}".replace("PartitionSpec", "P") if spec else ""
    return Grid(
        f"{array.dtype} {format_shape(shape)}{layout}: {held}; {size} a device",
        tuple(sides),
        dict(sorted(devices.items())),
    )


def _mesh_grid(ids: np.ndarray, axes: tuple[str, ...], note: str) -> Grid:
    sizes = dict(zip(axes, ids.shape, strict=True))
    sides = tuple(Side(a, tuple(map(str, range(size)))) for a, size in sizes.items() if size > 1)
    by_place = {tuple(map(int, place)): [int(ids[place])] for place in np.ndindex(ids.shape)}
    devices = {
        tuple(p for p, size in zip(place, ids.shape, strict=True) if size > 1): numbers
        for place, numbers in by_place.items()
    }
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    return Grid(f"mesh {shape}: {format_count(ids.size, 'device')}{note}", sides, devices)


def _ranges(numbers: list[int]) -> str:
    """0-3 8-11."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
