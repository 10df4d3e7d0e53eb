"""Pictures of a run: its loss curves and its results."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from jaxpar.base.console import PlainTable
from jaxpar.base.display import show
from jaxpar.model.task import TASKS, spec_of
from jaxpar.pictures.picture import Drawing, Picture, find_figures
from jaxpar.training.fit import FitResult
from jaxpar.training.progress import LOSSES, Curves, evaluation_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 200  # of a curve: a stored notebook stays small
NUM_BARS = 40
_BARS = "▁▂▃▄▅▆▇█"
_Point = TypeVar("_Point")


class CurvesPicture(Drawing):
    """Losses against the step: a figure, bars in a terminal."""

    def __init__(self, curves: Curves):
        points = {name: thinned(each, MOST_POINTS) for name, each in curves.points.items()}
        self.curves = Curves(curves.num_steps, points)
        known = [(name, each) for name, each in points.items() if each]
        super().__init__(None, *(f"{sparkline(p, NUM_BARS)} {LOSSES[n]}" for n, p in known))

    def to_figure(self) -> "Figure":
        """A figure of matplotlib; raises as `Drawing.to_figure`."""
        return find_figures().draw_curves({"": self.curves})


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
    table = PlainTable.grid(padding=(0, 2))
    for row in ways_on(result):
        table.add_row(*row)
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
