"""Work as blocks in time, a row a device: what schedules, measured steps and the animation are drawn with.

A `Chart` is what is to be seen. Its renderers are `draw`, for SVG, and `figures.draw_chart`, for matplotlib.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpar.pictures.style import text_color_on
from jaxpar.pipeline.schedule import Block

ROW = 26  # pixels of a row
LETTER, TEXT = 6.4, 5.9  # pixels that letters 11 pixels high take, in labels and in running text
IDLE = "var(--idle)"  # the colour of waiting
FEET = {"F": 0.0, "B": 0.45, "W": 0.2, "H": 0.0}  # how dark the band along the bottom of a block is


class Key(NamedTuple):
    """An entry of a legend: colours side by side, and what they mean; `foot` as in `FEET`."""

    colors: Sequence[str]
    text: str
    foot: float = 0.0


class Row(NamedTuple):
    """What is done beside a name.

    Attributes:
      top: where the row is, in heights of a row.
      spans: begin and end of the time that there is; without a block it is idle.
    """

    name: str
    top: float
    spans: Sequence[tuple[float, float]]
    blocks: Sequence[Block]


class Chart(NamedTuple):
    """Rows above an axis of time.

    Attributes:
      title: of few words.
      rows: from top to bottom.
      colors: of each unit of the blocks, from top to bottom.
      marks: places on the axis, and what is written there.
      unit: what the axis counts.
      width: pixels of the whole time.
      caption: lines below the legend.
      name_letters: room for names at least.
    """

    title: str
    rows: Sequence[Row]
    colors: Mapping[int, tuple[str, ...]]
    marks: Sequence[tuple[float, str]]
    unit: str
    width: float
    legend: Sequence[Key] = ()
    caption: str = ""
    name_letters: int = 0

    @property
    def end(self) -> float:
        """Of time."""
        return max(end for row in self.rows for _, end in row.spans)

    @property
    def height(self) -> float:
        """Of all rows, in heights of one."""
        return self.rows[-1].top + 1

    @property
    def left(self) -> float:
        """Pixels before time begins."""
        return LETTER * max(self.name_letters, *(len(row.name) for row in self.rows)) + 8

    def fits(self, label: str, time: float, width: float) -> bool:
        """Whether there is room for a label on something that lasts so long, `width` being all of time."""
        return label != "" and LETTER * len(label) + 4 < time * width / self.end

    def marks_with_room(self, width: float) -> Iterator[tuple[float, str]]:
        """The marks whose labels do not touch the one before."""
        free = -math.inf
        for place, label in self.marks:
            half = (LETTER * len(label) / 2 + 3) * self.end / width
            if place - half >= free:
                yield place, label
                free = place + half


def draw(chart: Chart) -> tuple[str, float, float]:
    """A chart as SVG, and its width and height."""
    left, scale, bottom = chart.left, chart.width / chart.end, ROW * chart.height
    parts = [_text(left - 8, bottom + 17, chart.unit, 'class="dim" text-anchor="end"')]
    for row in chart.rows:
        y = ROW * row.top
        parts.append(_text(left - 8, y + ROW / 2 + 4, row.name, 'class="row" text-anchor="end"'))
        parts += [
            _rect(left + start * scale, y + 1, (end - start) * scale, ROW - 2, IDLE, 'class="idle"')
            for start, end in row.spans
        ]
    for place, label in chart.marks_with_room(chart.width):
        x = left + place * scale
        parts.append(f'<path class="tick" d="M{x:.1f} 0V{bottom + 5:g}"/>')
        parts.append(_text(x, bottom + 17, label, 'class="dim" text-anchor="middle"'))
    for row in chart.rows:
        y = ROW * row.top
        for block in row.blocks:
            x, width, colors = (
                left + block.start * scale,
                block.cost * scale,
                chart.colors[block.unit],
            )
            gap, high = 1 if width > 8 else 0.3, (ROW - 2) / len(colors)
            title = f"<title>{html.escape(block.label)}</title>" * bool(block.label)
            for i, color in enumerate(colors):
                parts.append(
                    _rect(x + gap, y + 1 + i * high, width - 2 * gap, high, color, inside=title)
                )
            parts += _foot(x + gap, y + ROW - 6, width - 2 * gap, 5, FEET[block.letter])
            if chart.fits(block.label, block.cost, chart.width):
                style = f'style="fill:{text_color_on(colors[0])}" text-anchor="middle"'
                middle = left + (block.start + block.cost / 2) * scale
                parts.append(_text(middle, ROW * (row.top + 0.5) + 3, block.label, style))
    lines = [TEXT * len(line) for line in chart.caption.splitlines()]
    width = max(left + chart.width + 16, 620.0 * bool(chart.legend), *lines)
    legend, height = draw_legend(chart.legend, chart.caption, width, bottom + 30)
    return "".join((*parts, legend)), width, height


def draw_legend(
    legend: Sequence[Key], caption: str, width: float, y: float = 0.0
) -> tuple[str, float]:
    """Explanations side by side as far as there is room, then lines of text; and where they end.

    Args:
      y: where they begin.
    """
    parts, x, lines = [], 0.0, [Key((), line) for line in caption.splitlines()]
    for i, (colors, text, foot) in enumerate((*legend, *lines)):
        step = 15 * len(colors) + TEXT * len(text) + 20
        if x and (x + step > width or i >= len(legend)):
            x, y = 0.0, y + 19
        parts += [_rect(x + 15 * j, y, 14, 12, color) for j, color in enumerate(colors)]
        parts += _foot(x, y + 8, 15 * len(colors) - 1, 4, foot)
        parts.append(_text(x + 15 * len(colors) + 4 * bool(colors), y + 10, text))
        x += step
    return "".join(parts), y + 16 * bool(parts)


def round_marks(end: float) -> list[tuple[float, str]]:
    """Marks at round numbers from 0 to `end`, about ten."""
    power = 10.0 ** math.floor(math.log10(end / 10))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= end / 10)
    return [(n * step, f"{n * step:g}") for n in range(int(end / step) + 1)]


def _foot(x: float, y: float, width: float, height: float, darkness: float) -> list[str]:
    return [_rect(x, y, width, height, "#000", f'fill-opacity="{darkness:g}"')] * bool(darkness)


def _rect(
    x: float, y: float, width: float, height: float, fill: str, more: str = "", inside: str = ""
) -> str:
    size = f'x="{x:.1f}" width="{width:.1f}" y="{y:g}" height="{height:g}"'
    return f'<rect {size} style="fill:{fill}" {more}>{inside}</rect>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:g}" {more}>{html.escape(text)}</text>'
