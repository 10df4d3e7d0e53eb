"""Four ways to share a step: a chart that plays by itself, and a table."""

import textwrap

from jaxpar.base.console import FittingTable
from jaxpar.base.display import format_bytes, format_count, show
from jaxpar.pictures.chart import IDLE, Chart, Key, Row, round_marks
from jaxpar.pictures.picture import Drawing
from jaxpar.pictures.reports import ESTIMATE_ERROR
from jaxpar.pictures.style import color_of
from jaxpar.planning.search import describe
from jaxpar.planning.ways import WORK, Strategies, Strategy
from jaxpar.training.summary import describe_ends

# Pixels of the longest step, and of a row; letters of a line; seconds in which the time goes by.
WIDTH, ROW, LETTERS, SECONDS = 340, 15, 90, 8
COLORS = [color_of(n) for n in (0, 1, 5, 6, 3, 2)]  # of `WORK`
# What is sent, by the axis along which it is.
_SENT = {
    "data": "gradients, once a step",
    "tensor": "what layers make in parts",
    "stage": "activations on, their gradients back",
}


@show.register
def show_strategies(found: Strategies) -> Drawing:
    """A row for each device, in ms; a table of the strategies; and what is left out."""
    notes = [f"~: an estimate, by arithmetic on a data sheet; {ESTIMATE_ERROR}"]
    notes += [f"{name} is left out: {why}" for name, why in found.left_out.items()]
    return Drawing(_chart(found, notes), _table(found), "\n" + "\n".join(notes))


def _table(found: Strategies) -> FittingTable:
    table = FittingTable(
        "strategy", "config", ">step", ">memory", ">weights", "sent by a device", "idle"
    )
    for each in found.drawn:
        idle = [f"{each.idle_of(d):.0%}" for d in range(len(each.holds))]
        table.add_row(
            each.name,
            describe(each.cost.parallel),
            each.cost.seconds_text,
            each.cost.memory_text,
            format_bytes(each.weight_bytes),
            _sent(each),
            " ".join(idle if len({*idle}) > 1 else idle[:1]),
        )
    return table


def _sent(strategy: Strategy) -> str:
    along = strategy.cost.sent_along.items()
    return ", ".join(f"{format_bytes(size)} along {' '.join(axes)}" for axes, size in along)


def _chart(found: Strategies, notes: list[str]) -> Chart:
    rows, title = list[Row](), f"One training step of {found.task.name} on {found.machine.name}"
    heads, top = [(0.0, f"{title}: shared in {format_count(len(found.drawn), 'way')}")], 1.5
    for each in found.drawn:
        for line in _head(each):
            heads.append((top, line))
            top += 1.1
        end = 1000 * each.cost.seconds
        for device, holds in enumerate(each.holds):
            blocks = [
                b._replace(start=1000 * b.start, cost=1000 * b.cost) for b in each.blocks_of(device)
            ]
            rows.append(Row(f"{device}: {holds}", top + 0.4, [(0.0, end)], blocks))
            top += 1
        top += 0.9
    used = sorted({block.unit for each in found.drawn for block in each.blocks})
    return Chart(
        title=title,
        rows=rows,
        colors={kind: (color,) for kind, color in enumerate(COLORS)},
        marks=round_marks(max(1000 * each.cost.seconds for each in found.drawn)),
        unit="ms",
        width=WIDTH,
        legend=[*(Key((COLORS[kind],), WORK[kind]) for kind in used), Key((IDLE,), "idle")],
        caption="\n".join(line for note in notes for line in textwrap.wrap(note, LETTERS)),
        heads=heads,
        row=ROW,
        seconds=SECONDS,
    )


def _head(strategy: Strategy) -> list[str]:
    cost, idle = strategy.cost, [strategy.idle_of(d) for d in range(len(strategy.holds))]
    units = cost.parallel.num_units
    of = f" of {units} units" * (cost.parallel.mesh.stage > 1 and units > 1)
    words = [_SENT.get(axis, axis) for axes in cost.sent_along for axis in axes]
    head = (
        f"{strategy.name}: {cost.seconds_text} a step{of}, {cost.memory_text} on a device, "
        f"idle {sum(idle) / len(idle):.0%}"
    )
    holds = f"each holds {format_bytes(strategy.weight_bytes)} of weights"
    sends = (
        f"sends {_sent(strategy)} ({'; '.join(dict.fromkeys(words))})" if words else "sends nothing"
    )
    lines = [head, f"{holds}, {sends}"]
    for _, ends in describe_ends(cost.layout):
        if ends.startswith("1/"):
            lines = [head, f"{holds} (its layers, {ends.partition(';')[0]})", f"each {sends}"]
    return [part for line in lines for part in textwrap.wrap(line, LETTERS)]
