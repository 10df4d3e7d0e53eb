"""Tables and consoles of rich that fit a terminal, a file or a pipe."""

from collections.abc import Iterable
from typing import Any, TextIO

import rich.box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 100  # of what goes into a file, a pipe or a notebook


class PlainTable(Table):
    """A table of texts as they are: brackets are no markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Adds a row of rich's."""
        super().add_row(*(Text(c) if isinstance(c, str) else c for c in cells), **options)


def make_table(*columns: str) -> Table:
    """A table with these columns; one whose name begins with > is of numbers."""
    table = PlainTable(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if is_number else "left")
    return table


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A line for each: what, in bold, and what there is to say of it."""
    table = PlainTable.grid(padding=(0, 2))
    table.add_column(style="bold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def rendered(thing: RenderableType, console: Console) -> str:
    """What a console would print of a thing; no line ends with spaces."""
    with console.capture() as capture:
        console.print(thing, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def make_console(file: TextIO | None = None) -> Console:
    """A console as wide as the terminal, or `WIDTH` columns elsewhere; None is stdout.

    A notebook gets lines of text: else rich would make a display of each.
    """
    console = Console(file=file, force_jupyter=False)
    return console if console.is_terminal else Console(file=file, force_jupyter=False, width=WIDTH)
