"""A picture: tables, lines of text and a chart, for a terminal and as HTML."""

import html
import importlib.util
import io
from types import ModuleType
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from jaxpar.base.checks import require
from jaxpar.base.console import WIDTH, rendered
from jaxpar.pictures.chart import Chart
from jaxpar.pictures.style import HEAD, HTML_STYLE, make_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What rich calls a colour in a table, and the class of it here.
_CLASSES = {"cyan": "axis", "yellow": "warn"}


class Picture:
    """Something to look at: tables, lines of text and other pictures, from top to bottom."""

    def __init__(self, *parts: RenderableType):
        self.parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in self.parts:
            yield Text(part) if isinstance(part, str) else part  # brackets are no markup

    def to_html(self) -> str:
        """The same without a style sheet: `_repr_html_` puts it in."""
        return "".join(map(_part_html, self.parts))

    def to_page(self, title: str = "jaxpar") -> str:
        """A whole file of HTML, which needs no other."""
        return make_page(title, self._repr_html_())

    def _repr_html_(self) -> str:
        return f'<div class="jaxpar"><style>{HTML_STYLE}</style>{self.to_html()}</div>'

    def _repr_svg_(self) -> str | None:
        """What is a drawing may be SVG as well, which code hosts show in notebooks."""
        return None

    def __str__(self) -> str:
        # In a notebook rich would show it by itself.
        return rendered(self, Console(file=io.StringIO(), width=WIDTH, force_jupyter=False))

    __repr__ = __str__


class Drawing(Picture):
    """A figure, made of a chart, and in a terminal, or without matplotlib, what `parts` are."""

    def __init__(self, chart: Chart | None, *parts: RenderableType):
        super().__init__(*parts)
        self.chart = chart

    def to_html(self) -> str:
        """An SVG, which shrinks where there is less room, as far as it can be read, and the tables."""
        svg = self._repr_svg_()
        if svg is None:
            return f"<pre>{html.escape(str(self))}</pre>" * bool(self.parts)
        least = 0.7 * float(svg.partition('width="')[2].partition("pt")[0])
        svg = svg.replace("<svg", f'<svg style="max-width:100%;min-width:{least:.0f}pt"', 1)
        return svg + "".join(table_html(part) for part in self.parts if isinstance(part, Table))

    def to_figure(self) -> "Figure":
        """A figure of matplotlib.

        Raises:
          ValueError: it is not installed.
        """
        return find_figures().draw_chart(self.chart)

    def _repr_svg_(self) -> str | None:
        is_drawn = self.parts and has_matplotlib()
        return find_figures().svg_of(self.to_figure()) if is_drawn else None


def has_matplotlib() -> bool:
    """Whether it is installed: an extra, which only drawings need."""
    return importlib.util.find_spec("matplotlib") is not None


def find_figures() -> ModuleType:
    """What draws with matplotlib.

    Raises:
      ValueError: it is not installed.
    """
    fact = "this picture needs the package matplotlib"
    require(has_matplotlib(), f"{fact}\nFix: pip install matplotlib.")
    from jaxpar.pictures import figures

    return figures


def _part_html(part: RenderableType) -> str:
    if isinstance(part, Picture):
        return part.to_html()
    if isinstance(part, Table):
        return table_html(part)
    return f"<p>{html.escape(part.strip())}</p>" if isinstance(part, str) and part.strip() else ""


def table_html(table: Table) -> str:
    """A table of HTML; one with lines between its rows has them here too."""

    def row(cells: list[RenderableType], *, is_head: bool = False) -> str:
        return "<tr>" + "".join(
            _cell_html(column, cell, "th" if is_head or column.style == HEAD else "td")
            for column, cell in zip(table.columns, cells, strict=True)
        )

    rows = [row([column.header for column in table.columns], is_head=True)] * table.show_header
    rows += [row(list(cells)) for cells in zip(*(c.cells for c in table.columns), strict=True)]
    return f'<table class="{"grid" * table.show_lines}">{"".join(rows)}</table>'


def _cell_html(column: Column, cell: RenderableType, tag: str) -> str:
    text = cell if isinstance(cell, Text) else Text(str(cell))
    parts = []
    for piece, style, _ in text.render(Console(file=io.StringIO(), force_jupyter=False)):
        inner = html.escape(piece).replace("\n", "<br>")
        if style and style.bgcolor:
            inner = f'<span class="device" style="{style.get_html_style()}">{inner}</span>'
        elif style and style.color and style.color.name in _CLASSES:
            inner = f'<span class="{_CLASSES[style.color.name]}">{inner}</span>'
        parts.append(inner)
    return f'<{tag} class="{column.justify}">{"".join(parts)}</{tag}>'
