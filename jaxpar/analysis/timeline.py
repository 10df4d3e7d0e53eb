"""A schedule as a picture: a row a stage, a column a tick, units coloured by microbatch.

A backward unit is drawn twice as wide as a forward unit, as `Schedule.bubble` counts it: the share of grey is
the bubble.
"""

import html
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from jaxpar.analysis.picture import Picture, color_of, text_color_on
from jaxpar.display import show
from jaxpar.schedule import Schedule

MAX_TICKS = 200  # of a longer schedule the first and the last are drawn,
MAX_TEXT_TICKS = 48  # and fewer of them as text
MAX_WIDTH = 2400  # pixels that a picture with labels may have
ROW = 26  # pixels
LEFT = 60


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
            pictures.append(self._svg(ticks))
        s = self.schedule
        live = ", ".join(map(str, s.live_units))
        caption = (
            f"<p><b>{s.kind}</b>: {s.num_stages} stages, {s.num_microbatches} microbatches "
            f"x {s.num_chunks} chunks"
            + f" x {s.num_groups} groups of layers" * (s.num_groups > 1)
            + f"; {s.num_ticks} ticks; <b>bubble {s.bubble:.1%}</b>, the share of grey"
            + (f"; live units on stage 0, 1, ...: <b>{live}</b>" if s.num_slots else "")
            + "</p>"
        )
        return "".join(pictures) + self._legend() + caption

    def _shown(self, limit: int) -> list[range]:
        """The ticks, or as many of the first and last."""
        n = self.schedule.num_ticks
        return [range(n)] if n <= limit else [range(limit // 2), range(n - limit // 2, n)]

    def _svg(self, ticks: range) -> str:
        blocks = [block for tick in ticks for block in self._blocks[tick]]
        first, last = blocks[0].start, blocks[-1].start + blocks[-1].cost
        scale = 6.3 * self._label_width + 7  # pixels of a forward unit
        labelled = (last - first) * scale <= MAX_WIDTH
        if not labelled:
            scale = max(MAX_WIDTH / (last - first), 4.0)
        width = (last - first) * scale
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
        return (
            f'<svg role="img" aria-label="schedule {self.schedule.kind}" width="{LEFT + width + 2:.0f}" '
            f'height="{height + 2}">{"".join(parts)}</svg>'
        )

    def _legend(self) -> str:
        s = self.schedule
        items = [f"{swatch(color_of(m))} microbatch {m}" for m in range(min(s.num_microbatches, 7))]
        if s.num_microbatches > 7:
            items.append("and so on, from the first colour again")
        if s.num_chunks > 1:
            shades = "".join(swatch(unit_color(s, k)) for k in range(min(s.num_chunks, 12)))
            items.append(f"{shades} its chunks of time, 0 to {s.num_chunks - 1}")
        items.append(f"{swatch('var(--idle)')} idle")
        name = "microbatch" + ".chunk" * (s.num_chunks > 1) + "/group" * (s.num_groups > 1)
        words = f"F{s.label('', 0, 0)} forward"
        if s.num_slots:
            words += f", B{s.label('', 0, 0)} backward (dark foot, twice the time)"
        items.append(f"{words} of {name}")
        return legend_html(items)

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


@show.register
def show_schedule(schedule: Schedule) -> Timeline:
    """Who works on what, when."""
    return Timeline(schedule)


def legend_html(items: Sequence[str]) -> str:
    """A line of explanations, broken between them only."""
    return "<p>" + " &nbsp; ".join(f'<span class="nowrap">{item}</span>' for item in items) + "</p>"


def swatch(color: str) -> str:
    """A spot of colour for a legend."""
    return (
        f'<span style="display:inline-block;width:14px;height:12px;vertical-align:-1px;background:{color}">'
        f"</span>"
    )
