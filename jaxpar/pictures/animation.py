"""The strategies, moving: devices that wait, and then devices that work."""

import html
import json
from pathlib import Path

from rich.table import Table

from jaxpar.base.display import format_bytes
from jaxpar.pictures.chart import FEET, IDLE, ROW, Chart, Key, Row, draw, draw_legend
from jaxpar.pictures.picture import table_html
from jaxpar.pictures.strategies import (
    MXNETS_LSTM,
    Strategy,
    make_placements,
    make_strategies,
)
from jaxpar.pictures.style import STYLE, color_of, make_page

WIDTH, NAME = 640, 32  # pixels of the longest step; letters before it


def make_animation(num_devices: int = 4, num_chunks: int = 2) -> str:
    """The strategies as one file of HTML, which plays by itself; `#t=2.5` at its end shows that moment.

    Raises:
      ValueError: a number is below 1.
    """
    strategies, placements = make_strategies(num_devices, num_chunks), make_placements()
    last = max(strategy.end for strategy in (*strategies, *placements))
    colors, width = tuple(map(color_of, range(num_devices))), WIDTH + 230
    keys = [
        Key(colors, "parts of the batch (stripes: all parts at once)"),
        Key((color_of(0), color_of(0, 0.65)), "paler: later in the sentences"),
        Key((color_of(0),), "dark band: backward, twice the work", FEET["B"]),
        Key((IDLE,), "idle"),
    ]
    legend, height = draw_legend(keys, "", width)
    style, script = (Path(__file__).with_suffix(s).read_text("utf-8") for s in (".css", ".js"))
    panels, placed = (
        "".join(_panel(strategy, last) for strategy in each) for each in (strategies, placements)
    )
    L, H, E, V, B, T = MXNETS_LSTM.values()
    body = (
        f'<div class="jaxpar"><style>{STYLE}\n{style}</style>'
        f"<h1>One training step, {num_devices} layers, {num_devices} devices, four ways to share it</h1>"
        f'<svg width="{width}" viewBox="0 0 {width} {height:g}">{legend}</svg>'
        f'<p class="controls"><button type="button">pause</button> <input type="range" min="0" '
        f'max="{last:g}" step="any" value="{last:g}" aria-label="time"> <output></output></p>{panels}'
        f"<p>Time: 1 is the forward pass of one layer over the whole batch. Devices of a pipeline keep step. "
        f"What is sent takes no time in this picture.</p>"
        f"<h1>Where embedding and head go: the two placements that MXNet drew</h1>"
        f"<p>Its LSTM: {L} layers of {H}, an embedding of {E}, {V:,} words, {B} sentences of {T}. A piece is "
        f"a time step; all go forward before the first goes back. The head works both ways as a piece leaves "
        f"the last layer. Time: 1 is the forward pass of two layers.</p>{placed}"
        f"<p>Weights: what a device holds. Sent: in a step, to its neighbours: activations on, and their "
        f"gradients back.</p><script>{script}</script></div>"
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
    work = [
        [[round(t, 4) for t in (b.start, b.start + b.cost)] for b in row.blocks] for row in rows
    ]
    data = {"end": round(end, 4), "left": chart.left, "unit": WIDTH / last, "work": work}
    says = f"busy {strategy.busy:.0%}, done at {end:.1f}"
    table = table_html(_table(strategy)) if strategy.weight_bytes else ""
    return (
        f'<section data-strategy="{html.escape(json.dumps(data))}"><h2>{strategy.name} <output>{says}'
        f'</output></h2><p>{strategy.words}</p><svg width="{width:g}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{strategy.name}: {says}">{elements}'
        f'<rect class="future" y="0" width="0" height="{bottom}"/>'
        f'<path class="now" d="M{chart.left:g} 0v{bottom}"/></svg>{table}</section>'
    )


def _table(strategy: Strategy) -> Table:
    """What each device holds, sends and waits for."""
    table = Table("device", "holds")
    for name in ("weights", "sent", "idle"):
        table.add_column(name, justify="right")
    numbers = zip(strategy.holds, strategy.weight_bytes, strategy.sent_bytes, strict=True)
    for device, (holds, held, sent) in enumerate(numbers):
        idle = f"{1 - strategy.busy_of(device):.0%}"
        table.add_row(str(device), holds, format_bytes(held), format_bytes(sent), idle)
    return table
