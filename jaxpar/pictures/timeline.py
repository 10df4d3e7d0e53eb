"""A schedule as a picture: one row per stage, units colored by microbatch.

Units are drawn as wide as `Schedule.bubble` counts them: the share of grey is the bubble.
"""

import itertools

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from jaxpar.base.display import format_count, show
from jaxpar.pictures.chart import IDLE, LETTER, Chart, Key, Row
from jaxpar.pictures.picture import Drawing
from jaxpar.pictures.style import PALETTE, color_of, style_on
from jaxpar.pipeline.lanes import Schedule

# Of a longer schedule the first ticks are drawn: units stay as wide as their labels.
MAX_WIDTH = 2400  # pixels
MAX_TEXT_TICKS = 48


def unit_color(schedule: Schedule, unit: int) -> str:
    """The colour of a microbatch, paler with each chunk."""
    microbatch, chunk = divmod(unit, schedule.num_chunks)
    return color_of(microbatch, 0.65 * chunk / max(schedule.num_chunks - 1, 1))


def unit_colors(schedule: Schedule) -> dict[int, str]:
    """Of all units, as a `Chart` takes them."""
    return {unit: unit_color(schedule, unit) for unit in range(schedule.num_units)}


def legend_of(schedule: Schedule) -> list[Key]:
    """Colours of microbatches, chunks and idle time, what blocks look like, and what labels say."""
    s, n = schedule, len(PALETTE)
    legend = [Key((color_of(m),), f"microbatch {m}") for m in range(min(s.num_microbatches, n))]
    if s.num_microbatches > n:
        legend.append(Key(("none",), "and so on: colors repeat"))
    if s.num_chunks > 1:
        shades = tuple(unit_color(s, k) for k in range(min(s.num_chunks, 12)))
        legend.append(Key(shades, f"its time chunks, 0 to {s.num_chunks - 1}"))
    legend.append(Key((IDLE,), "idle"))
    unit, group = s.num_units - 1, s.num_groups - 1
    words = {
        "F": f"forward of microbatch {s.num_microbatches - 1}"
        + f", chunk {s.num_chunks - 1}" * (s.num_chunks > 1)
        + f", through group {group} of the stage's layers" * (s.num_groups > 1),
        "B": f"its backward{' for the inputs' * bool(s.weights)} (dark band)",
        "W": "gradients of the weights (grey band)",
    }
    for letter in "F" + "B" * bool(s.num_slots) + "W" * bool(s.weights):
        text = f"{s.label(letter, unit, group)}: {words[letter]}"
        legend.append(Key((unit_color(s, unit),), text))
    return legend


@show.register
def show_schedule(schedule: Schedule) -> Drawing:
    """A column a tick; of very many, the first."""
    return Drawing(_chart(schedule), _Text(schedule))


class _Text:
    """A schedule in coloured letters: a row a stage, a column a tick, and its numbers below.

    Each half of a tick is as wide as the work of its busiest stage: the share of dots is the bubble at equal
    costs. Lines are broken between ticks where the console ends.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, *columns = _columns(self.schedule)
        band = [names]
        for column in columns[:MAX_TEXT_TICKS]:
            width = sum(len(other[0]) + 1 for other in (*band, column))
            if len(band) > 1 and width > options.max_width:
                yield _join(band)
                band = [names]
            band.append(column)
        yield _join(band)
        if (left_out := len(columns) - MAX_TEXT_TICKS) > 0:
            yield Text(f"... {format_count(left_out, 'tick')} left out")
        yield Text(_caption(self.schedule))


def _columns(s: Schedule) -> list[list[Text]]:
    """Names of the rows, then a column per tick, whose cells are as wide."""
    costs = (1.0, 1.0, 1.0)  # one label of any kind takes 1
    bounds = s.half_times(costs)[::2].round().astype(int).tolist()
    blocks = s.blocks(costs)
    width = max(len(block.label) for block in blocks)
    cells_SC = [[Text(".".ljust(width)) for _ in range(bounds[-1])] for _ in range(s.num_stages)]
    for b in blocks:
        cell = Text().append(b.label, style_on(unit_color(s, b.unit)))
        cell.align("left", width)
        cells_SC[b.stage][round(b.start)] = cell
    columns = [[Text("tick"), *(Text(f"stage {stage}") for stage in range(s.num_stages))]]
    for tick, (begin, end) in enumerate(itertools.pairwise(bounds)):
        columns.append([Text(str(tick)), *(Text(" ").join(row[begin:end]) for row in cells_SC)])
    for column in columns:
        for text in column:
            text.pad_right(max(map(len, column)) - len(text))
    return columns


def _join(columns: list[list[Text]]) -> Text:
    lines = [Text("|", end="").join(row) for row in zip(*columns, strict=True)]
    for line in lines:
        line.rstrip()
    return Text("\n", no_wrap=True).join(lines)


def _caption(s: Schedule) -> str:
    """Kind, ticks, bubble, live units, and what the labels mean."""
    live = " ".join(map(str, s.live_units))
    name = "microbatch" + ".chunk" * (s.num_chunks > 1) + "/group" * (s.num_groups > 1)
    parts = "B backward" if not s.weights else "B backward and W weight gradients"
    return (
        f"{s.title}: {s.num_ticks} ticks, bubble {s.bubble:.1%}, live units {live}  "
        f"(F forward, {parts} of {name})"
    )


def _chart(s: Schedule) -> Chart:
    costs = s.unit_costs
    blocks, times = s.blocks(costs), s.half_times(costs)[::2]
    # A forward unit as wide as a label.
    scale = LETTER * max(len(b.label) for b in blocks) + 6
    shown = int(np.searchsorted(times * scale, MAX_WIDTH, "right")) - 1  # whole ticks in that width
    end, left_out = float(times[shown]), s.num_ticks - shown
    live, stages = " ".join(map(str, s.live_units)), range(s.num_stages)
    shown_blocks = [[b for b in blocks if b.stage == n and b.start < end] for n in stages]
    return Chart(
        title=f"{s.title}: bubble {s.bubble:.1%}"
        + f"; the first {shown} of {s.num_ticks} ticks" * bool(left_out),
        rows=[Row(f"stage {n}", n, [(0.0, end)], shown_blocks[n]) for n in stages],
        colors=unit_colors(s),
        marks=[(float(times[tick]), str(tick)) for tick in range(shown)],
        unit="tick",
        width=end * scale,
        legend=legend_of(s),
        caption=f"{s.title}: {s.num_ticks} ticks"
        + f", {left_out} of them left out" * bool(left_out)
        + f"; bubble {s.bubble:.1%}, live units {live}",
    )
