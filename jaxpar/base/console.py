"""Tables and consoles of rich that fit a terminal, a file or a pipe."""

from collections.abc import Iterable
from typing import Any, TextIO

import rich.box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 100  # of what goes into a file or pipe


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


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A line for each: what, in bold, and what there is to say of it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for name, value in facts:
        table.add_row(name, Text(value))  # brackets are no markup
    return table


def rendered(thing: Any, console: Console) -> str:
    """What a console would print of a thing; no line ends with spaces."""
    with console.capture() as capture:
        console.print(thing, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def make_console(file: TextIO | None = None) -> Console:
    """A console as wide as the terminal, or `WIDTH` columns in a file or pipe; None is stdout."""
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=WIDTH)
