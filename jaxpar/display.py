"""How things are shown: sizes and times in words, consoles, and pictures, which `pictures` draws."""

import functools
import importlib
from typing import Any, TextIO

import rich.box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 100  # of what goes into a file or pipe


@functools.singledispatch
def show(thing: Any) -> Any:
    """A picture of a mesh, a sharded array, parameters, a schedule, a report, a cost or a plan.

    A notebook shows it as HTML, `rich.print` in colour, `print` as text; `to_page()` is a file of HTML.

    Args:
      thing: a `MeshConfig` or `Mesh`; an array, also an abstract one, or a Flax variable; a `TrainState`, an
        `nnx.State`, an `nnx.Module`; a `Schedule`; a `ProgramReport`; a `MeasuredStep`; a `Cost`, a
        `Comparison` or a `Ranking`.
    Raises:
      ValueError: there is no picture of such an object.
    """
    # What draws registers itself, and is not imported before it is needed.
    nobody = show.dispatch(object)
    for module in ("grid", "params", "timeline", "measured", "reports"):
        importlib.import_module(f"jaxpar.pictures.{module}")
        if (draw := show.dispatch(type(thing))) is not nobody:
            return draw(thing)
    raise ValueError(
        f"there is no picture of type {type(thing).__name__}; give a mesh, an array, a state or module of "
        f"Flax, a TrainState, a Schedule, a ProgramReport or a MeasuredStep"
    )


class Shown:
    """A class whose objects a notebook and `rich.print` show as their picture."""

    def _repr_html_(self) -> str:
        return show(self)._repr_html_()

    def _repr_svg_(self) -> str | None:
        return show(self)._repr_svg_()

    def __rich__(self) -> Any:
        return show(self)


class Printed(Shown):
    """One whose objects `print` shows so too, and a prompt, if it is a dataclass with `repr=False`."""

    def __str__(self) -> str:
        return str(show(self))

    __repr__ = __str__


class FittingTable(Table):
    """A table that does not break words: where there is no room for its columns, every row is a paragraph.

    A column whose name begins with > is of numbers.
    """

    def __init__(self, *columns: str):
        super().__init__(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for column in columns:
            justify = "right" if column.startswith(">") else "left"
            self.add_column(column.removeprefix(">"), justify=justify)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        endless = options.update(width=10_000)
        ranges = [
            [Measurement.get(console, endless, cell) for cell in (column.header, *column.cells)]
            for column in self.columns
        ]
        least = [max(cell.minimum for cell in column) for column in ranges]
        widths = [max(cell.maximum for cell in column) for column in ranges]
        # A space after every column, and one between two.
        excess = sum(widths) + 2 * len(widths) - 1 - options.max_width
        if excess - sum(widths) + sum(least) > 0:
            yield from self._paragraphs(console)
            return
        for _ in range(excess):
            widest = max((w, i) for i, w in enumerate(widths) if w > least[i])[1]
            widths[widest] -= 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _paragraphs(self, console: Console) -> RenderResult:
        """The first cell of a row on a line, the others below it, each after the name of its column."""

        def text(cell: Any) -> Text:
            return cell if isinstance(cell, Text) else console.render_str(str(cell))

        names = [text(column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = map(text, cells)
            parts = [
                Text(" ").join((n, c)) for n, c in zip(names[1:], others, strict=True) if c.plain
            ]
            yield first
            yield Padding(Text("; ").join(parts), (0, 0, 0, 2))


def make_console(file: TextIO | None = None) -> Console:
    """A console as wide as the terminal, or `WIDTH` columns in a file or pipe; None is stdout."""
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=WIDTH)


def format_count(number: int, noun: str, ending: str = "s") -> str:
    """1 chunk, 2 chunks."""
    return f"{number} {noun}{ending * (number != 1)}"


def format_shape(shape: tuple[int, ...]) -> str:
    """4x4x192; a scalar's is "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


def format_seconds(seconds: float) -> str:
    """With three digits: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def format_bytes(num_bytes: float) -> str:
    """In powers of 1000: 516.1 kB."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
