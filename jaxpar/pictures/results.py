"""Pictures of a run: its curves, and what came of it."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from jaxpar.base.display import show
from jaxpar.model.task import TASKS, spec_of
from jaxpar.pictures.chart import round_steps
from jaxpar.pictures.picture import Picture
from jaxpar.pictures.style import PALETTE
from jaxpar.training.fit import FitResult
from jaxpar.training.progress import Curves, evaluation_table

WIDTH, HEIGHT = 720, 180  # pixels of the curves
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 20, 20  # and of what is around them
MOST_POINTS = 200  # of a curve: a stored notebook stays small
NUM_BARS = 40
# Both can be seen on white and on black.
COLORS = {"train": PALETTE[0], "valid": PALETTE[4]}
NAMES = {"train": "training loss", "valid": "validation loss"}
_BARS = "▁▂▃▄▅▆▇█"
_Point = TypeVar("_Point")
_SVG = (
    '<svg role="img" aria-label="loss against the step" viewBox="0 0 {} {}" fill="currentColor" '
    'style="width:{}px;max-width:100%;font:11px system-ui,sans-serif;display:block;margin:8px 0">{}</svg>'
)


class CurvesPicture(Picture):
    """Losses against the step: an SVG in the colour of the text around it, bars in a terminal."""

    def __init__(self, curves: Curves):
        self.curves = curves
        known = ((name, points) for name, points in curves.points.items() if points)
        self.points = points = {name: thinned(each, MOST_POINTS) for name, each in known}
        super().__init__(*(f"{sparkline(p, NUM_BARS)} {NAMES[name]}" for name, p in points.items()))

    def to_html(self) -> str:
        """The SVG; "" without a point."""
        if not self.points:
            return ""
        losses = [loss for points in self.points.values() for _, loss in points]
        low, high = min(losses), max(losses)
        low, high = (low, high) if high > low else (low - 1, high + 1)
        across = (WIDTH - LEFT - RIGHT) / max(self.curves.num_steps, 1)
        up = (HEIGHT - TOP - BOTTOM) / (high - low)

        def place(step: float, loss: float) -> str:
            return f"{LEFT + step * across:.1f} {TOP + (high - loss) * up:.1f}"

        elements = [*self._axes(low, high, across, up)]
        x = LEFT
        for name, points in self.points.items():
            color = f'stroke="{COLORS[name]}" fill="none" stroke-linecap="round"'
            line = "M" + "L".join(place(*point) for point in points)
            elements.append(f'<path d="{line}" {color} stroke-width="1.6"/>')
            if name == "valid" or len(points) == 1:  # each is a dot
                dots = "".join(f"M{place(*point)}h0" for point in points)
                elements.append(f'<path d="{dots}" {color} stroke-width="5"/>')
            elements.append(f'<path d="M{x} 6h14" {color} stroke-width="3"/>')
            elements.append(f'<text x="{x + 20}" y="10">{NAMES[name]}</text>')
            x += 110
        return _SVG.format(WIDTH, HEIGHT, WIDTH, "".join(elements))

    def _axes(self, low: float, high: float, across: float, up: float) -> Iterator[str]:
        for loss in round_numbers(low, high, 6):
            y = TOP + (high - loss) * up
            yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".2"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>'
        yield f'<text x="{LEFT - 12}" y="{HEIGHT - 4}" text-anchor="end">step</text>'
        for step in round_numbers(0, self.curves.num_steps, 8):
            x = LEFT + step * across
            anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
            yield f'<text x="{x:.1f}" y="{HEIGHT - 4}" text-anchor="{anchor}">{step:g}</text>'


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, about so many, between two numbers."""
    step = next(s for s in round_steps((high - low) / most) if (high - low) / s < most)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def thinned(points: Sequence[_Point], most: int) -> list[_Point]:
    """At most so many of the points, evenly spread, with the last one."""
    every = max(-(-len(points) // most), 1)
    return [*points[(len(points) - 1) % every :: every]]


def sparkline(points: Sequence[tuple[int, float]], width: int) -> str:
    """Losses as bars of text; the lowest loss has the lowest bar, the highest loss the highest one."""
    losses = [loss for _, loss in thinned(points, width)]
    low, high = min(losses, default=0.0), max(losses, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((loss - low) * scale)] for loss in losses)


@show.register
def show_curves(curves: Curves) -> CurvesPicture:
    """Losses against the step."""
    return CurvesPicture(curves)


@show.register
def show_result(result: FitResult) -> Picture:
    """How far it came, its numbers and curves, and how to go on."""
    table = Table.grid(padding=(0, 2))
    for row in ways_on(result):
        table.add_row(*map(Text, row))
    evaluations = [*result.evaluations.values()]
    tables = [evaluation_table(evaluations)] if evaluations else []
    return Picture(result.describe(), *tables, show(result.curves), table)


def ways_on(result: FitResult) -> Iterator[tuple[str, str]]:
    """What can be done with a run, and by which command, or line of Python."""
    folder, spec = result.out_dir, spec_of(result.setup.task)
    if ":" in spec or spec in TASKS:  # else the class is a notebook's: no other process knows it
        yield "go on", f"python -m jaxpar train --resume --train.out-dir {folder}"
        yield "evaluate", f"python -m jaxpar evaluate {folder}"
    yield "in Python", "jaxpar.fit(*result.setup.settings, resume=True)"
