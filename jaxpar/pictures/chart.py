"""Work as blocks in time, a row a device: what schedules, measured steps and parallelisms are drawn with.

A `Chart` is what is to be seen, `draw` makes an SVG's elements of it.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpar.pictures.style import text_color_on
from jaxpar.pipeline.lanes import Block

ROW = 26  # pixels of a row
LETTER, TEXT = 6.4, 5.9  # pixels that letters 11 pixels high take, in labels and in running text
IDLE, LINE = "var(--idle)", "var(--line)"  # the colours of waiting, and of marks
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
      heads: lines of text, by where they are in heights of a row; what has a colon is bold before it.
      row: pixels of the height of a row.
      seconds: in which the time goes by, again and again, where pictures move; 0: it stands still.
    """

    title: str
    rows: Sequence[Row]
    colors: Mapping[int, tuple[str, ...]]
    marks: Sequence[tuple[float, str]]
    unit: str
    width: float
    legend: Sequence[Key] = ()
    caption: str = ""
    heads: Sequence[tuple[float, str]] = ()
    row: float = ROW
    seconds: float = 0.0

    @property
    def left(self) -> float:
        """Pixels before time begins."""
        return LETTER * max(len(row.name) for row in self.rows) + 8

    @property
    def scale(self) -> float:
        """Pixels of a unit of time."""
        return self.width / max(end for row in self.rows for _, end in row.spans)

    def fits(self, block: Block) -> bool:
        """Whether there is room for a block's label."""
        return block.label != "" and LETTER * len(block.label) + 4 < block.cost * self.scale

    def marks_with_room(self) -> Iterator[tuple[float, str]]:
        """The marks whose labels do not touch the one before."""
        free = -math.inf
        for place, label in self.marks:
            half = (LETTER * len(label) / 2 + 3) / self.scale
            if place - half >= free:
                yield place, label
                free = place + half


def draw(chart: Chart) -> tuple[str, float, float]:
    """The elements of an SVG, later ones above earlier ones; its width and height."""
    left, scale, high = chart.left, chart.scale, chart.row
    bottom = high * (chart.rows[-1].top + 1)
    elements = [_text(left - 8, bottom + 17, chart.unit, 'class="dim"', "end")]
    for row in chart.rows:
        y = high * row.top
        elements.append(_text(left - 8, y + high / 2 + 4, row.name, 'class="row"', "end"))
        elements += [
            _rect(left + start * scale, y + 1, (end - start) * scale, high - 2, IDLE)
            for start, end in row.spans
        ]
    for place, label in chart.marks_with_room():
        x = left + place * scale
        y = bottom * bool(chart.heads)  # no line through text
        elements.append(_rect(x - 0.5, y, 1, bottom + 5 - y, LINE))
        elements.append(_text(x, bottom + 17, label, 'class="dim"', "middle"))
    elements += [_block(chart, b, high * row.top) for row in chart.rows for b in row.blocks]
    elements += _covers(chart) if chart.seconds else ()
    elements += [_head(high * (place + 1), line) for place, line in chart.heads]
    lines = *chart.caption.splitlines(), *(head for _, head in chart.heads)
    longest = TEXT * max(map(len, lines), default=0)
    width = max(left + chart.width + 16, 620.0 * (bool(chart.legend) and not chart.heads), longest)
    legend, height = draw_legend(chart.legend, chart.caption, width, bottom + 30)
    return "".join(elements) + legend, width, height


def _head(y: float, line: str) -> str:
    bold, colon, rest = line.partition(": ")
    words = f'<tspan style="font-weight:600">{html.escape(bold + colon)}</tspan>{html.escape(rest)}'
    return f'<text x="0" y="{y:g}">{words if colon else html.escape(line)}</text>'


def _covers(chart: Chart) -> list[str]:
    """What hides the time to come: nothing where a picture does not move, or shall not."""
    hides = "fill-opacity:.85;transform"
    style = (
        f".jaxpar .later{{fill-opacity:0;transform-box:fill-box;transform-origin:right;"
        f"animation:later {chart.seconds / 0.75:g}s linear infinite}}"
        f"@keyframes later{{from{{{hides}:none}}75%,to{{{hides}:scaleX(0)}}}}"
        "@media(prefers-reduced-motion:reduce){.jaxpar .later{animation:none}}"
    )
    size = f'x="{chart.left:.1f}" width="{chart.width:.1f}" height="{chart.row:g}"'
    covers = [
        f'<rect class="later" y="{chart.row * row.top:g}" {size} style="fill:var(--bg)" fill-opacity="0"/>'
        for row in chart.rows
    ]
    return [f"<style>{style}</style>", *covers]


def draw_legend(
    legend: Sequence[Key], caption: str, width: float, y: float = 0.0
) -> tuple[str, float]:
    """Explanations side by side as far as there is room, then lines of text; and where they end.

    Args:
      y: where they begin.
    """
    elements, x, lines = list[str](), 0.0, [Key((), line) for line in caption.splitlines()]
    for i, (colors, text, foot) in enumerate((*legend, *lines)):
        step = 15 * len(colors) + TEXT * len(text) + 20
        if x and (x + step > width or i >= len(legend)):
            x, y = 0.0, y + 19
        elements += [_rect(x + 15 * j, y, 14, 12, color) for j, color in enumerate(colors)]
        elements.append(_foot(x, y + 8, 15 * len(colors) - 1, 4, foot))
        elements.append(_text(x + 15 * len(colors) + 4 * bool(colors), y + 10, text))
        x += step
    return "".join(elements), y + 16 * bool(elements)


def _block(chart: Chart, block: Block, y: float) -> str:
    x, width = chart.left + block.start * chart.scale, block.cost * chart.scale
    colors, gap = chart.colors[block.unit], 1 if width > 8 else min(0.3, width / 10)
    high, inside = (chart.row - 2) / len(colors), (x + gap, width - 2 * gap)
    bands = [
        _rect(inside[0], y + 1 + i * high, inside[1], high, color, block.label)
        for i, color in enumerate(colors)
    ]
    text = ""
    if chart.fits(block):
        style = f'style="fill:{text_color_on(colors[0])}"'
        text = _text(x + width / 2, y + chart.row / 2 + 3, block.label, style, "middle")
    foot = _foot(inside[0], y + chart.row - 6, inside[1], 5, FEET[block.letter])
    return "".join([*bands, foot, text])


def _foot(x: float, y: float, width: float, height: float, darkness: float) -> str:
    return _rect(x, y, width, height, "#000", opacity=darkness) if darkness else ""


def _rect(
    x: float, y: float, width: float, height: float, fill: str, title: str = "", opacity: float = 1
) -> str:
    """A rectangle, whose title is told where it is pointed at."""
    size = f'x="{x:.1f}" width="{width:.1f}" y="{y:g}" height="{height:g}"'
    style = f'style="fill:{fill}"' + f' fill-opacity="{opacity:g}"' * (opacity < 1)
    return f"<rect {size} {style}>{f'<title>{html.escape(title)}</title>' * bool(title)}</rect>"


def _text(
    x: float, y: float, text: str, style: str = 'style="fill:var(--fg)"', anchor: str = "start"
) -> str:
    """A line of text: its anchor (start, middle, end) is at x, its letters stand on y."""
    place = f'x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"'
    return f"<text {place} {style}>{html.escape(text)}</text>"


def round_steps(least: float) -> list[float]:
    """Steps from one round number to the next: 1, 2 or 5 times a power of ten, around `least` and above."""
    power = 10.0 ** math.floor(math.log10(least))
    return [power * n for n in (1, 2, 5, 10, 20)]


def round_marks(end: float) -> list[tuple[float, str]]:
    """Marks at round numbers from 0 to `end`, about ten."""
    step = next(step for step in round_steps(end / 10) if step >= end / 10)
    return [(n * step, f"{n * step:g}") for n in range(int(end / step) + 1)]
