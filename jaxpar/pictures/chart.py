"""Work as blocks in time, a row a device: what schedules, measured steps and the animation are drawn with.

A `Chart` is what is to be seen, `draw` says which shapes that are. `to_svg` writes them, and
`figures.draw_chart` gives them to matplotlib.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpar.pictures.style import text_color_on
from jaxpar.pipeline.schedule import Block

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

    @property
    def scale(self) -> float:
        """Pixels of a unit of time."""
        return self.width / self.end

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


class Rect(NamedTuple):
    """A rectangle, in pixels; `title` is told where it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float = 1.0
    title: str = ""


class Words(NamedTuple):
    """A line of text: its `anchor` (start, middle, end) is at `x`, its letters stand on `y`."""

    x: float
    y: float
    text: str
    kind: str = ""
    anchor: str = "start"
    fill: str = "var(--fg)"


Shapes = list[Rect | Words]


def draw(chart: Chart) -> tuple[Shapes, float, float]:
    """What is to be drawn, later shapes above earlier ones; its width and height."""
    left, scale, bottom = chart.left, chart.scale, ROW * chart.height
    shapes: Shapes = [Words(left - 8, bottom + 17, chart.unit, "dim", "end")]
    for row in chart.rows:
        y = ROW * row.top
        shapes.append(Words(left - 8, y + ROW / 2 + 4, row.name, "row", "end"))
        shapes += [
            Rect(left + start * scale, y + 1, (end - start) * scale, ROW - 2, IDLE)
            for start, end in row.spans
        ]
    for place, label in chart.marks_with_room():
        x = left + place * scale
        shapes.append(Rect(x - 0.5, 0, 1, bottom + 5, LINE))
        shapes.append(Words(x, bottom + 17, label, "dim", "middle"))
    for row in chart.rows:
        for block in row.blocks:
            shapes += _draw_block(chart, block, ROW * row.top)
    lines = [TEXT * len(line) for line in chart.caption.splitlines()]
    width = max(left + chart.width + 16, 620.0 * bool(chart.legend), *lines)
    legend, height = draw_legend(chart.legend, chart.caption, width, bottom + 30)
    return shapes + legend, width, height


def _draw_block(chart: Chart, block: Block, y: float) -> Shapes:
    x, width = chart.left + block.start * chart.scale, block.cost * chart.scale
    colors, gap = chart.colors[block.unit], 1 if width > 8 else 0.3
    high, inside = (ROW - 2) / len(colors), (x + gap, width - 2 * gap)
    shapes: Shapes = [
        Rect(inside[0], y + 1 + i * high, inside[1], high, color, title=block.label)
        for i, color in enumerate(colors)
    ]
    shapes += _foot(inside[0], y + ROW - 6, inside[1], 5, FEET[block.letter])
    if chart.fits(block):
        style = "", "middle", text_color_on(colors[0])
        shapes.append(Words(x + width / 2, y + ROW / 2 + 3, block.label, *style))
    return shapes


def draw_legend(
    legend: Sequence[Key], caption: str, width: float, y: float = 0.0
) -> tuple[Shapes, float]:
    """Explanations side by side as far as there is room, then lines of text; and where they end.

    Args:
      y: where they begin.
    """
    shapes, x, lines = list[Rect | Words](), 0.0, [Key((), line) for line in caption.splitlines()]
    for i, (colors, text, foot) in enumerate((*legend, *lines)):
        step = 15 * len(colors) + TEXT * len(text) + 20
        if x and (x + step > width or i >= len(legend)):
            x, y = 0.0, y + 19
        shapes += [Rect(x + 15 * j, y, 14, 12, color) for j, color in enumerate(colors)]
        shapes += _foot(x, y + 8, 15 * len(colors) - 1, 4, foot)
        shapes.append(Words(x + 15 * len(colors) + 4 * bool(colors), y + 10, text))
        x += step
    return shapes, y + 16 * bool(shapes)


def _foot(x: float, y: float, width: float, height: float, darkness: float) -> list[Rect]:
    return [Rect(x, y, width, height, "#000", darkness)] * bool(darkness)


def to_svg(shapes: Shapes) -> str:
    """Shapes as elements of an SVG."""
    return "".join(map(_element, shapes))


def _element(shape: Rect | Words) -> str:
    if isinstance(shape, Words):
        style = f'class="{shape.kind}"' if shape.kind else f'style="fill:{shape.fill}"'
        place = f'x="{shape.x:.1f}" y="{shape.y:g}" text-anchor="{shape.anchor}"'
        return f"<text {place} {style}>{html.escape(shape.text)}</text>"
    size = f'x="{shape.x:.1f}" width="{shape.width:.1f}" y="{shape.y:g}" height="{shape.height:g}"'
    style = f'style="fill:{shape.fill}"' + f' fill-opacity="{shape.opacity:g}"' * (
        shape.opacity < 1
    )
    title = f"<title>{html.escape(shape.title)}</title>" * bool(shape.title)
    return f"<rect {size} {style}>{title}</rect>"


def round_marks(end: float) -> list[tuple[float, str]]:
    """Marks at round numbers from 0 to `end`, about ten."""
    power = 10.0 ** math.floor(math.log10(end / 10))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= end / 10)
    return [(n * step, f"{n * step:g}") for n in range(int(end / step) + 1)]
