"""A schedule as a picture: a row a stage, a column a tick, units coloured by microbatch.

A backward unit is drawn twice as wide as a forward unit, as `Schedule.bubble` counts it: the share of grey is
the bubble.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from jaxpar.display import show
from jaxpar.pictures.blocks import IDLE, LEFT, ROW, Block, Legend, block_svg, legend_html, svg_file
from jaxpar.pictures.picture import Picture, color_of, text_color_on
from jaxpar.pipeline.schedule import Schedule

MAX_TICKS = 200  # of a longer schedule the first and the last are drawn,
MAX_TEXT_TICKS = 48  # and fewer of them as text
MAX_WIDTH = 2400  # pixels that a picture with labels may have


def blocks_of(
    schedule: Schedule, forward_cost: float = 1.0, backward_cost: float = 2.0
) -> list[Block]:
    """All units of a schedule and the gaps between them, tick by tick.

    Stages run in lockstep: a tick has a forward part if any stage runs one, and a backward part likewise.
    """
    blocks, start = [], 0.0
    lanes = (("F", schedule.forward, forward_cost), ("B", schedule.backward, backward_cost))
    for tick in range(schedule.num_ticks):
        for letter, lane, cost in lanes:
            units = lane.unit[tick]
            if not (units >= 0).any():
                continue
            for stage, unit in enumerate(units):
                busy = unit >= 0
                label = schedule.label(letter, unit, lane.group[tick, stage]) if busy else ""
                color = unit_color(schedule, int(unit)) if busy else ""
                blocks.append(Block(tick, stage, start, cost, letter == "F", label, color))
            start += cost
    return blocks


def unit_color(schedule: Schedule, unit: int) -> str:
    """The colour of a microbatch, paler with each chunk."""
    microbatch, chunk = divmod(unit, schedule.num_chunks)
    return color_of(microbatch, 0.65 * chunk / max(schedule.num_chunks - 1, 1))


class Timeline(Picture):
    """A schedule."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self._blocks = {
            t: list(b) for t, b in itertools.groupby(blocks_of(schedule), lambda b: b.tick)
        }
        self._label_width = max(len(b.label) for blocks in self._blocks.values() for b in blocks)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        yield from self._bands(options.max_width)
        yield Text(self.schedule.caption)

    def to_html(self) -> str:
        """An SVG for the ticks, another after a gap; legend and caption below."""
        pictures = []
        for ticks in self._shown(MAX_TICKS):
            if pictures:
                pictures.append(f"<p>{self.schedule.num_ticks - MAX_TICKS} ticks are left out</p>")
            drawing, width, height = self._draw(ticks)
            pictures.append(
                f'<svg role="img" aria-label="schedule {self.schedule.kind}" width="{width:.0f}" '
                f'height="{height:.0f}">{drawing}</svg>'
            )
        return "".join(pictures) + legend_html(self._legend()) + f"<p>{self._caption()}</p>"

    def to_svg(self) -> str:
        """The same as a file of SVG.

        Raises:
          ValueError: the schedule is too long for one.
        """
        n = self.schedule.num_ticks
        if n > MAX_TICKS:
            raise ValueError(
                f"{n} ticks are too many for one picture; use {MAX_TICKS} or fewer, or .html, which leaves "
                f"some out"
            )
        return svg_file(*self._draw(range(n)), self._legend(), self._caption())

    def _repr_svg_(self) -> str | None:
        return self.to_svg() if self.schedule.num_ticks <= MAX_TICKS else None

    def _caption(self) -> str:
        s = self.schedule
        live = ", ".join(map(str, s.live_units))
        return (
            f"{s.kind}: {s.num_stages} stages, {s.num_microbatches} microbatches x {s.num_chunks} chunks"
            + f" x {s.num_groups} groups of layers" * (s.num_groups > 1)
            + f"; {s.num_ticks} ticks; bubble {s.bubble:.1%}, the share of grey"
            + f"; live units on stage 0, 1, ...: {live}" * bool(s.num_slots)
        )

    def _shown(self, limit: int) -> list[range]:
        """The ticks, or as many of the first and last."""
        n = self.schedule.num_ticks
        return [range(n)] if n <= limit else [range(limit // 2), range(n - limit // 2, n)]

    def _draw(self, ticks: range) -> tuple[str, float, float]:
        """SVG, its width and height."""
        blocks = [block for tick in ticks for block in self._blocks[tick]]
        first, last = blocks[0].start, blocks[-1].start + blocks[-1].cost
        scale = 6.3 * self._label_width + 7  # pixels of a forward unit
        labelled = (last - first) * scale <= MAX_WIDTH
        if not labelled:
            scale = max(MAX_WIDTH / (last - first), 4.0)
        height = 20 + ROW * self.schedule.num_stages
        parts, free = ['<text class="dim" x="0" y="13">tick</text>'], 0.0
        for tick in ticks:
            x = LEFT + (self._blocks[tick][0].start - first) * scale
            parts.append(f'<path class="tick" d="M{x:.1f} 4V{height}"/>')
            if x >= free:  # right of the number before
                parts.append(f'<text class="dim" x="{x + 3:.1f}" y="13">{tick}</text>')
                free = x + 7 * len(str(tick)) + 5
        for stage in range(self.schedule.num_stages):
            y = 20 + ROW * (stage + 0.5) + 4
            parts.append(f'<text x="0" y="{y:g}">stage {stage}</text>')
        for block in blocks:
            x, y = LEFT + (block.start - first) * scale, 20 + ROW * block.stage
            parts.append(block_svg(block, x, y, block.cost * scale, ROW, labelled=labelled))
        return "".join(parts), LEFT + (last - first) * scale + 2, height + 2

    def _legend(self) -> Legend:
        s = self.schedule
        first = range(min(s.num_microbatches, 7))
        legend: list[Any] = [((color_of(m),), f"microbatch {m}") for m in first]
        if s.num_microbatches > 7:
            legend.append(((), "and so on, from the first colour again"))
        if s.num_chunks > 1:
            shades = tuple(unit_color(s, k) for k in range(min(s.num_chunks, 12)))
            legend.append((shades, f"its chunks of time, 0 to {s.num_chunks - 1}"))
        legend.append(((IDLE,), "idle"))
        name = "microbatch" + ".chunk" * (s.num_chunks > 1) + "/group" * (s.num_groups > 1)
        words = f"F{s.label('', 0, 0)} forward"
        if s.num_slots:
            words += f", B{s.label('', 0, 0)} backward (dark foot, twice the time)"
        return [*legend, ((), f"{words} of {name}")]

    def _bands(self, max_width: int) -> Iterator[Text]:
        """As many ticks beside each other as there is room for, then the next."""
        columns: dict[int, list[list[Block]]] = {}
        for tick, blocks in self._blocks.items():
            columns[tick] = [list(b) for _, b in itertools.groupby(blocks, lambda b: b.is_forward)]
        names = ["tick", *(f"stage {s}" for s in range(self.schedule.num_stages))]
        left = max(map(len, names)) + 1
        for ticks in self._shown(MAX_TEXT_TICKS):
            if ticks[0]:
                yield Text(f"... {ticks[0] - MAX_TEXT_TICKS // 2} ticks are left out")
            band, used = [], left
            for tick in ticks:
                width = max(len(columns[tick]) * (self._label_width + 1), len(str(tick)) + 1)
                if band and used + width > max_width:
                    yield self._band(band, columns, names, left)
                    band, used = [], left
                band.append(tick)
                used += width
            yield self._band(band, columns, names, left)

    def _band(
        self, ticks: list[int], columns: dict[int, list[list[Block]]], names: list[str], left: int
    ) -> Text:
        lines = [Text(name.ljust(left)) for name in names]
        for tick in ticks:
            width = max(len(columns[tick]) * (self._label_width + 1), len(str(tick)) + 1)
            lines[0].append(str(tick).ljust(width))
            for stage, line in enumerate(lines[1:]):
                for column in columns[tick]:
                    block = column[stage]
                    style = (
                        f"{text_color_on(block.color)} on {block.color}" if block.label else "dim"
                    )
                    line.append((block.label or ".").ljust(self._label_width), style=style)
                    line.append(" ")
                line.append(" " * (width - len(columns[tick]) * (self._label_width + 1)))
        return Text("\n", no_wrap=True).join(lines)


@show.register
def show_schedule(schedule: Schedule) -> Timeline:
    """Who works on what, when."""
    return Timeline(schedule)
