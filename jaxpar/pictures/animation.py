"""The four ways to share a training step, moving: devices that wait, and then devices that work."""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxpar.pictures.chart import FEET, IDLE, ROW, Chart, Key, Row, draw, draw_legend
from jaxpar.pictures.style import STYLE, color_of, make_page
from jaxpar.pictures.timeline import unit_colors
from jaxpar.pipeline.lanes import Block, Schedule
from jaxpar.pipeline.schedules import make_schedule

WIDTH, NAME = 640, 32  # pixels of the longest step; letters before it


class Strategy(NamedTuple):
    """What every device does in one step, and what it holds.

    Attributes:
      name, words: title, and what is sent.
      holds: which weights, of each device.
      blocks: `stage` is the device; time 1 is the forward pass of one layer.
      colors: of their units, as a `Chart` takes them.
    """

    name: str
    words: str
    holds: list[str]
    blocks: list[Block]
    colors: Mapping[int, tuple[str, ...]]

    @property
    def end(self) -> float:
        """When the step is done."""
        return max(block.start + block.cost for block in self.blocks)

    @property
    def busy(self) -> float:
        """Share of the time of all devices, until the end, in which they work."""
        return sum(block.cost for block in self.blocks) / (self.end * len(self.holds))


def make_strategies(num_devices: int = 4, num_chunks: int = 2) -> list[Strategy]:
    """One training step of as many layers as devices, shared in four ways.

    All four do the same work: for each layer 1 forward and 2 backward. Sending takes no time here.

    Args:
      num_chunks: of time, in the pipeline; its microbatches are as many as devices.
    Raises:
      ValueError: a number is below 1.
    """
    n, devices = num_devices, range(num_devices)

    def blocks_of(schedule: Schedule) -> list[Block]:
        cost = 1 / schedule.num_units
        return [block._replace(label="") for block in schedule.blocks((cost, 2 * cost))]

    stripes = dict.fromkeys(devices, tuple(map(color_of, devices)))
    a_layer, pipeline = [f"layer {d}" for d in devices], make_schedule("1f1b", n, n, num_chunks)
    all_layers = blocks_of(make_schedule("gpipe", 1, 1))
    on_each = [block._replace(stage=d, unit=d) for d in devices for block in all_layers]
    return [
        Strategy(
            "model parallelism",
            "A layer on each device; activations go to the neighbour. One works, the others wait.",
            a_layer,
            blocks_of(make_schedule("gpipe", n, 1)),
            stripes,
        ),
        Strategy(
            "tensor parallelism",
            "A part of every layer on each device; all exchange at every time step of every layer.",
            [f"part {device} of all layers" for device in devices],
            on_each,
            stripes,
        ),
        Strategy(
            "data parallelism",
            "All layers on every device, for its rows of the batch; gradients are summed at the end.",
            ["all layers"] * n,
            on_each,
            {device: (color_of(device),) for device in devices},
        ),
        Strategy(
            "pipeline parallelism",
            f"A layer on each device, the batch in {n} parts, their sentences in {num_chunks}; pieces go to "
            f"the neighbour.",
            a_layer,
            blocks_of(pipeline),
            unit_colors(pipeline),
        ),
    ]


def make_animation(num_devices: int = 4, num_chunks: int = 2) -> str:
    """The strategies as one file of HTML, which plays by itself; `#t=2.5` at its end shows that moment.

    Raises:
      ValueError: a number is below 1.
    """
    strategies = make_strategies(num_devices, num_chunks)
    last = max(strategy.end for strategy in strategies)
    colors, width = tuple(map(color_of, range(num_devices))), WIDTH + 230
    keys = [
        Key(colors, "parts of the batch (stripes: all parts at once)"),
        Key((color_of(0), color_of(0, 0.65)), "paler: later in the sentences"),
        Key((color_of(0),), "dark band: backward, twice the work", FEET["B"]),
        Key((IDLE,), "idle"),
    ]
    legend, height = draw_legend(keys, "", width)
    style, script = (Path(__file__).with_suffix(s).read_text("utf-8") for s in (".css", ".js"))
    panels = "".join(_panel(strategy, last) for strategy in strategies)
    body = (
        f'<div class="jaxpar"><style>{STYLE}\n{style}</style>'
        f"<h1>One training step, {num_devices} layers, {num_devices} devices, four ways to share it</h1>"
        f'<svg width="{width}" viewBox="0 0 {width} {height:g}">{legend}</svg>'
        f'<p class="controls"><button type="button">pause</button> <input type="range" min="0" '
        f'max="{last:g}" step="any" value="{last:g}" aria-label="time"> <output></output></p>{panels}'
        f"<p>Time: 1 is the forward pass of one layer over the whole batch. Devices of a pipeline keep step. "
        f"What is sent takes no time in this picture.</p><script>{script}</script></div>"
    )
    return make_page("Four ways to share a training step", body)


def _panel(strategy: Strategy, last: float) -> str:
    end, rows = strategy.end, []
    for d, holds in enumerate(strategy.holds):
        blocks = [block for block in strategy.blocks if block.stage == d]
        rows.append(Row(f"device {d}: {holds}", d, [(0, end)], blocks))
    chart = Chart(
        title=strategy.name,
        rows=rows,
        colors=strategy.colors,
        marks=[(t, str(t)) for t in range(int(end) + 1)],
        unit="time",
        width=WIDTH * end / last,
        name_letters=NAME,  # time begins at one place in all pictures
    )
    elements, _, height = draw(chart)
    width, bottom = chart.left + WIDTH + 16, ROW * len(rows)
    work = [[[b.start, b.start + b.cost] for b in row.blocks] for row in rows]
    data = {"end": end, "left": chart.left, "unit": WIDTH / last, "work": work}
    says = f"busy {strategy.busy:.0%}, done at {end:.1f}"
    return (
        f'<section data-strategy="{html.escape(json.dumps(data))}"><h2>{strategy.name} <output>{says}'
        f'</output></h2><p>{strategy.words}</p><svg width="{width:g}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{strategy.name}: {says}">{elements}'
        f'<rect class="future" y="0" width="0" height="{bottom}"/>'
        f'<path class="now" d="M{chart.left:g} 0v{bottom}"/></svg></section>'
    )
