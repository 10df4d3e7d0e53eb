"""Four kinds of parallelism for one step: an animated chart, and a table."""

import textwrap
from collections.abc import Sequence

from rich.table import Table

from jaxpar.analysis.program import Total
from jaxpar.base.console import make_table
from jaxpar.base.display import format_bytes, format_count, show
from jaxpar.pictures.chart import IDLE, Chart, Key, Row
from jaxpar.pictures.picture import Drawing
from jaxpar.pictures.reports import ESTIMATE_ERROR
from jaxpar.pictures.style import color_of
from jaxpar.planning.cost import LEAST_BYTES
from jaxpar.planning.parallelisms import WORK, Parallelism, Parallelisms
from jaxpar.planning.search import describe

# Pixels of the longest step, and of a row; letters of a line, and of a row's name.
WIDTH, ROW, LETTERS, NAME = 340, 15, 90, 44
COLORS = [color_of(n) for n in (0, 1, 5, 6, 3, 2)]  # of `WORK`
# What is sent, by the axis along which it is.
_SENT = {"data": "gradients", **dict.fromkeys(("tensor", "stage"), "activations and gradients")}


@show.register
def show_parallelisms(found: Parallelisms) -> Drawing:
    """A row for each device, in ms; a table of the parallelisms; and what is left out."""
    notes = [f"~: estimated from a data sheet; {ESTIMATE_ERROR}"]
    notes += [f"{name} is left out: {why}" for name, why in found.left_out.items()]
    for why in dict.fromkeys(each.unknown for each in found.drawn if each.unknown):
        names = ", ".join(each.name for each in found.drawn if each.unknown == why)
        notes.append(f"memory and sent bytes of {names} are unknown: {why}")
    programs = [each.cost.program for each in found.drawn if each.cost.program]
    notes += dict.fromkeys(note.strip() for program in programs for note in program.notes)
    return Drawing(_chart(found, notes), _table(found), "\n" + "\n".join(notes))


def _table(found: Parallelisms) -> Table:
    columns = "parallelism", "layout", ">step", ">memory", ">weights", "sent per device", "idle"
    table = make_table(*columns)
    for each in found.drawn:
        idle, cost = [f"~{each.idle_of(d):.0%}" for d in range(len(each.holds))], each.cost
        row = each.name, describe(cost.parallel), cost.seconds_text, cost.memory_text
        moved = format_bytes(each.weight_bytes), _sent(_totals(each))
        table.add_row(*row, *moved, " ".join(idle if len({*idle}) > 1 else idle[:1]))
    return table


def _totals(parallelism: Parallelism) -> list[Total]:
    """What the compiled step sends, by axes; without sums of the loss and of norms."""
    totals = parallelism.cost.program.totals if parallelism.cost.program else ()
    return [each for each in totals if each.sent_bytes >= LEAST_BYTES or each.unknown]


def _sent(totals: Sequence[Total]) -> str:
    sizes = ("at least " * bool(each.unknown) + format_bytes(each.sent_bytes) for each in totals)
    pairs = zip(sizes, totals, strict=True)
    return ", ".join(f"{size} along {' '.join(total.axes)}" for size, total in pairs)


def _chart(found: Parallelisms, notes: list[str]) -> Chart:
    rows, title = list[Row](), f"One training step of {found.task.name} on {found.machine.name}"
    heads, top = [(0.0, f"{title}: shared in {format_count(len(found.drawn), 'way')}")], 1.5
    for each in found.drawn:
        for line in _head(each):
            heads.append((top, line))
            top += 1.1
        end = 1000 * each.cost.seconds
        for device, holds in enumerate(each.holds):
            own = each.blocks_of(device)
            blocks = [b._replace(start=1000 * b.start, cost=1000 * b.cost) for b in own]
            name = _shorten(f"{device}: {holds}")
            rows.append(Row(name, top + 0.4, [(0.0, end)], blocks))
            top += 1
        top += 0.9
    used = sorted({block.unit for each in found.drawn for block in each.blocks})
    return Chart(
        title=title,
        rows=rows,
        colors=dict(enumerate(COLORS)),
        unit="ms",
        width=WIDTH,
        legend=[*(Key((COLORS[kind],), WORK[kind]) for kind in used), Key((IDLE,), "idle")],
        caption="\n".join(line for note in notes for line in textwrap.wrap(note, LETTERS)),
        heads=heads,
        row=ROW,
        moves=True,
    )


def _head(parallelism: Parallelism) -> list[str]:
    cost, idle = parallelism.cost, [parallelism.idle_of(d) for d in range(len(parallelism.holds))]
    units = cost.parallel.num_units
    of = f" of {units} units" * (cost.parallel.mesh.stage > 1 and units > 1)
    memory = f", {cost.memory_text} on a device" * bool(cost.memory_text)
    head = f"{parallelism.name}: {cost.seconds_text} a step{of}{memory}, idle ~{sum(idle) / len(idle):.0%}"
    line = f"each holds {format_bytes(parallelism.weight_bytes)} of weights"
    if totals := _totals(parallelism):
        axes = {axis for total in totals for axis in total.axes}
        words = dict.fromkeys(what for axis, what in _SENT.items() if axis in axes)
        line += f", sends {_sent(totals)} ({'; '.join(words)})"
    elif cost.program:
        line += ", sends nothing"
    named = [f"{device}: {holds}" for device, holds in enumerate(parallelism.holds)]
    lines = [head, line, *(name for name in named if name != _shorten(name))]
    return [part for line in lines for part in textwrap.wrap(line, LETTERS)]


def _shorten(name: str) -> str:
    return textwrap.shorten(name, NAME, placeholder=" ...")
