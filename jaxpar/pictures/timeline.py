"""A schedule as a picture: a row a stage, units coloured by microbatch.

Units are drawn as wide as `Schedule.bubble` counts them: the share of grey is the bubble.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from jaxpar.display import format_count, show
from jaxpar.pictures.chart import IDLE, LETTER, Block, Chart, Drawing, Key, Row
from jaxpar.pictures.picture import PALETTE, color_of, text_color_on
from jaxpar.pipeline.schedule import Schedule

# Of a longer schedule the first ticks and the last are drawn: units stay as wide as their labels.
MAX_WIDTH = 2400  # pixels
GAP = 16  # of them, for what is left out
MAX_TEXT_TICKS = 48
FEET = {"F": 0.0, "B": 0.45, "W": 0.2}  # how dark the band along the bottom of a block is


def half_times(schedule: Schedule, costs: Sequence[float]) -> np.ndarray:
    """When each half of a tick begins, and when the last one ends, [2 * num_ticks + 1].

    Stages run in lockstep: a half lasts as long as its busiest stage has work.

    Args:
      costs: of a forward unit, a backward unit, and W if it is apart.
    """
    work_T2 = schedule.work_at(*costs)[: schedule.num_ticks].max(axis=2)
    return np.concatenate([[0.0], np.cumsum(work_T2)])


def blocks_of(schedule: Schedule, costs: Sequence[float]) -> list[Block]:
    """All units of a schedule; costs as of `half_times`."""
    times, blocks = half_times(schedule, costs), []
    begins = times[:-1, None].repeat(schedule.num_stages, 1)  # of what comes next in each half
    cost_of = dict(zip("FBW", costs, strict=False))
    for work in schedule.lanes:
        cost = cost_of.get(work.letter, 0.0) * work.num_units
        for tick, stage in np.argwhere(work.busy_TS).tolist():
            half = 2 * tick + work.half
            unit = int(work.lane.unit[tick, stage])
            label = schedule.label(work.letter, unit, work.lane.group[tick, stage])
            colors = (unit_color(schedule, unit),)
            start = float(begins[half, stage])
            blocks.append(Block(stage, start, cost, label, colors, FEET[work.letter]))
            begins[half, stage] += cost
    return blocks


def unit_color(schedule: Schedule, unit: int) -> str:
    """The colour of a microbatch, paler with each chunk."""
    microbatch, chunk = divmod(unit, schedule.num_chunks)
    return color_of(microbatch, 0.65 * chunk / max(schedule.num_chunks - 1, 1))


def legend_of(schedule: Schedule) -> list[Key]:
    """Colours of microbatches, chunks and idle time, what blocks look like, and what labels say."""
    s, n = schedule, len(PALETTE)
    legend = [Key((color_of(m),), f"microbatch {m}") for m in range(min(s.num_microbatches, n))]
    if s.num_microbatches > n:
        legend.append(Key((), "and so on, from the first colour again"))
    if s.num_chunks > 1:
        shades = tuple(unit_color(s, k) for k in range(min(s.num_chunks, 12)))
        legend.append(Key(shades, f"its chunks of time, 0 to {s.num_chunks - 1}"))
    legend.append(Key((IDLE,), "idle"))
    unit, group = s.num_units - 1, s.num_groups - 1
    words = f"forward of microbatch {s.num_microbatches - 1}"
    words += f", chunk {s.num_chunks - 1}" * (s.num_chunks > 1)
    words += f", through group {group} of the stage's layers" * (s.num_groups > 1)
    legend.append(Key((unit_color(s, unit),), f"{s.label('F', unit, group)}: {words}"))
    if s.num_slots:
        what = "its backward" + " for the inputs" * bool(s.weights)
        label = s.label("B", unit, group)
        legend.append(Key((unit_color(s, unit),), f"{label}: {what} (dark band)", FEET["B"]))
    if s.weights:
        label = s.label("W", unit, group)
        legend.append(
            Key((unit_color(s, unit),), f"{label}: gradients of the weights (grey band)", FEET["W"])
        )
    return legend


class Timeline(Drawing):
    """A schedule."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        """`Schedule.to_text` in colours, broken between ticks where the console ends."""
        *lines, caption = self.schedule.to_text().splitlines()
        names, *columns = zip(*(line.split("|") for line in lines), strict=True)
        shown = self._shown(MAX_TEXT_TICKS)
        band: list[tuple[str, ...]] = []
        for tick, before in zip(shown, (-1, *shown), strict=False):
            width = sum(len(column[0]) + 1 for column in (names, *band, columns[tick]))
            if band and (width > options.max_width or tick > before + 1):
                yield self._band(names, band)
                band = []
            if tick > before + 1:
                yield Text(f"... {format_count(tick - before - 1, 'tick')} left out")
            band.append(columns[tick])
        yield self._band(names, band)
        yield Text(caption)

    def chart(self) -> Chart:
        """A column a tick; of very many, those in the middle are left out."""
        s, times = self.schedule, half_times(self.schedule, self.schedule.unit_costs)[::2]
        blocks, end = blocks_of(s, s.unit_costs), float(times[-1])
        # A forward unit as wide as a label.
        scale = LETTER * max(len(b.label) for b in blocks) + 6
        room = (times + end - times[::-1]) * scale <= MAX_WIDTH  # for so many at either end
        shown = self._shown(2 * (int(np.argmin(room)) - 1) if not room.all() else s.num_ticks)
        spans, left_out = [(0.0, end)], s.num_ticks - len(shown)
        if left_out:
            half = len(shown) // 2
            first, last, gap = float(times[half]), float(times[-1 - half]), GAP / scale
            times = np.where(times < last, times, times - last + first + gap)
            blocks = [
                b if b.start < first else b._replace(start=b.start - last + first + gap)
                for b in blocks
                if b.start < first or b.start >= last
            ]
            end -= last - first - gap
            spans = [(0.0, first), (first + gap, end)]
        live = ", ".join(map(str, s.live_units))
        return Chart(
            title=f"{s.title}: bubble {s.bubble:.1%}"
            + f"; {left_out} of {s.num_ticks} ticks left out where the rows are cut"
            * bool(left_out),
            rows=[
                Row(f"stage {stage}", stage, spans, [b for b in blocks if b.stage == stage])
                for stage in range(s.num_stages)
            ],
            marks=[(float(times[tick]), str(tick)) for tick in shown],
            unit="tick",
            width=end * scale,
            legend=legend_of(s),
            caption=f"{s.title}: {format_count(s.num_stages, 'stage')}, "
            f"{format_count(s.num_microbatches, 'microbatch', 'es')} x {format_count(s.num_chunks, 'chunk')}"
            + f" x {s.num_groups} groups of layers" * (s.num_groups > 1)
            + f"; {format_count(s.num_ticks, 'tick')}"
            + f", {left_out} of them left out where the rows are cut" * bool(left_out)
            + f"; bubble {s.bubble:.1%}"
            + ", the share of grey" * (not left_out)
            + f"; live units on stage 0, 1, ...: {live}" * bool(s.num_slots),
        )

    def _shown(self, limit: int) -> list[int]:
        """The ticks, or as many of the first and last."""
        n, half = self.schedule.num_ticks, limit // 2
        return [*range(n)] if n <= limit else [*range(half), *range(n - half, n)]

    def _band(self, names: tuple[str, ...], columns: list[tuple[str, ...]]) -> Text:
        lines = map("|".join, zip(names, *columns, strict=True))
        text = Text("\n".join(lines), no_wrap=True)
        text.highlight_regex(r"[FBW]\d[\d./]*", self._style)
        return text

    def _style(self, label: str) -> str:
        numbers = [int(n) for n in re.findall(r"\d+", label.partition("/")[0])]
        microbatch, chunk = (*numbers, 0)[:2]
        color = unit_color(self.schedule, microbatch * self.schedule.num_chunks + chunk)
        return f"{text_color_on(color)} on {color}"


@show.register
def show_schedule(schedule: Schedule) -> Timeline:
    """Who works on what, when."""
    return Timeline(schedule)
