"""Units of work as rectangles in time, with their legend, for schedules, measured steps and the animation."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.pictures.picture import STYLE, text_color_on

ROW = 26  # pixels of a stage
LEFT = 60  # before time begins
IDLE = "var(--idle)"

# Colours, and what they mean.
Legend = Sequence[tuple[Sequence[str], str]]


class Block(NamedTuple):
    """A unit at its place; idle where label is empty.

    Attributes:
      start, cost: in forward units.
      color: by microbatch, paler with each chunk of time.
    """

    tick: int
    stage: int
    start: float
    cost: float
    is_forward: bool
    label: str
    color: str


def block_svg(
    block: Block,
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    labelled: bool = True,
    stripes: tuple[str, ...] = (),
) -> str:
    """A unit as a rectangle, a backward unit with a dark foot; in several colours, given `stripes`."""
    gap = 1 if width > 8 else 0.3
    left = f'x="{x + gap:.1f}" width="{width - 2 * gap:.1f}"'
    if not block.label:
        # Its own style: rules for classes do not reach what is drawn by <use>.
        style = 'class="idle" style="fill:var(--idle)"'
        return f'<rect {style} {left} y="{y + 1:.1f}" height="{height - 2:g}"/>'
    colors = stripes or (block.color,)
    high = (height - 2) / len(colors)
    parts = [
        f'<rect {left} y="{y + 1 + i * high:.1f}" height="{high:g}" fill="{color}">'
        f"<title>{html.escape(block.label)}</title></rect>"
        for i, color in enumerate(colors)
    ]
    if not block.is_forward:
        foot = f'{left} y="{y + height - 6:.1f}" height="5"'
        parts.append(f'<rect {foot} fill="#000" fill-opacity=".45"/>')
    if labelled:
        middle = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 3:.1f}"'
        parts.append(
            f'<text {middle} text-anchor="middle" style="fill:{text_color_on(block.color)}">'
            f"{html.escape(block.label)}</text>"
        )
    return "".join(parts)


def legend_html(legend: Legend) -> str:
    """A line of explanations, broken between them only."""
    style = "display:inline-block;width:14px;height:12px;vertical-align:-1px"
    items = (
        "".join(f'<span style="{style};background:{color}"></span>' for color in colors)
        + f" {text}"
        for colors, text in legend
    )
    return "<p>" + " &nbsp; ".join(f'<span class="nowrap">{item}</span>' for item in items) + "</p>"


def svg_file(drawing: str, width: float, height: float, legend: Legend, *lines: str) -> str:
    """A drawing, its legend and lines of text, as a file of SVG that needs no other."""
    width = max(width, 620.0, *(5.6 * len(line) for line in lines))
    parts, x, y = [], 0.0, height + 8.0
    for colors, text in (*legend, *(((), line) for line in lines)):
        step = 15 * len(colors) + 6.4 * len(text) + 22  # of letters 11 pixels high
        if (x and x + step > width) or text in lines:
            x, y = 0.0, y + 19
        for i, color in enumerate(colors):
            parts.append(
                f'<rect x="{x + 15 * i:g}" y="{y:g}" width="14" height="12" style="fill:{color}"/>'
            )
        left = x + 15 * len(colors) + 4 * bool(colors)
        parts.append(f'<text x="{left:g}" y="{y + 10:g}">{html.escape(text)}</text>')
        x += step
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jaxpar" width="{width + 24:.0f}" '
        f'height="{y + 32:.0f}"><style>{STYLE}</style><rect width="100%" height="100%" rx="6" '
        f'style="fill:var(--bg)"/><svg x="12" y="10">{drawing}{"".join(parts)}</svg></svg>\n'
    )
