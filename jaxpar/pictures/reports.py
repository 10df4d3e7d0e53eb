"""Tables of the communication, memory and time of compiled programs and planned steps."""

import re
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from jaxpar.analysis.collectives import Collective
from jaxpar.analysis.program import ProgramReport, Total
from jaxpar.base.axes import TENSOR
from jaxpar.base.console import PlainTable, make_table
from jaxpar.base.display import format_bytes, format_count, format_seconds, format_shape, show
from jaxpar.pictures.picture import Picture
from jaxpar.planning.cost import StepCost
from jaxpar.planning.planner import SHOWN, Ranking
from jaxpar.planning.search import describe

NUM_SHOWN, NUM_REFUSED = 12, 4  # of a ranking
# Of all that benchmarks/planner measured.
ESTIMATE_ERROR = "measured steps took 0.6 to 12 times as long"


@show.register
def show_report(report: ProgramReport) -> Picture:
    """Collectives, totals, FLOPs and memory."""
    parts: list[Table | str] = ["no collectives"]
    if report.collectives:
        note = "\nbytes: payload of one run; sent: in all runs, by the busiest device of a ring"
        note += "; if: in a branch" * any(c.conditional for c in report.collectives)
        if any(c.beside is not None for c in report.collectives):
            note += "\noverlaps: work that runs during the transfer; waits: no work does"
        parts = [_collectives_table(report.collectives), note, "", _totals_table(report.totals), ""]
    facts = PlainTable.grid(padding=(0, 2))
    if report.flops is not None:
        facts.add_row("FLOPs per device", f"{report.flops:,.0f} (each loop body counted once)")
    if report.memory:
        facts.add_row("memory per device", str(report.memory))
    return Picture(*parts, facts, *report.notes)


@show.register
def show_cost(cost: StepCost) -> Picture:
    """The estimated, compiled and measured numbers of a step, side by side.

    Bytes over `tensor` depend on the whole program and its compiler: there is no estimate worth showing.
    Memory is the compiler's.
    """
    program, notes = cost.program, cost.program.notes if cost.program else ()
    table = make_table("", "axes", ">estimated", ">compiled", ">measured")
    sums = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for part in cost.sent:
        if TENSOR not in part.axes:
            sums[0][part.op, " ".join(part.axes)] += round(part.runs * part.bytes)
    for part in program.collectives if program else ():
        sums[1][part.op, " ".join(part.axes)] += (part.count or 0) * part.bytes
    for op, axes in sorted({*sums[0], *sums[1]}):
        texts = [format_bytes(each[op, axes]) for each in sums]
        estimated = texts[0] if TENSOR not in axes.split() else ""
        table.add_row(op, axes, estimated, texts[1] if program else "", "")
    table.add_row("memory", "", "", cost.refusal or cost.memory_text, "")
    measured = cost.seconds_text if cost.measured else ""
    table.add_row("step", "", format_seconds(sum(cost.parts.values())), "", measured)
    facts = PlainTable.grid(padding=(0, 2))
    parts = (f"{SHOWN[name]} {format_seconds(seconds)}" for name, seconds in cost.parts.items())
    facts.add_row("estimated step", ", ".join(parts))
    return Picture(describe(cost.parallel), "", table, "", facts, *notes)


@show.register
def show_ranking(ranking: Ranking) -> Picture:
    """The best layouts of the ranking, and what takes the time of the first."""
    table = make_table("layout", ">step", ">waits", ">memory", "status")
    for cost in ranking.fitting[:NUM_SHOWN]:
        known = "measured" if cost.measured else "compiled" if cost.program else "estimated"
        waits = format_seconds(cost.waiting) if cost.program else ""
        table.add_row(describe(cost.parallel), cost.seconds_text, waits, cost.memory_text, known)
    compiled = [cost for cost in ranking.refused if cost.program or cost.refusal]
    for cost in compiled[:NUM_REFUSED]:
        why = cost.refusal or "too large"
        table.add_row(describe(cost.parallel), "", "", cost.memory_text, why)
    costs, machine = (*ranking.fitting, *ranking.refused), ranking.machine
    notes = [f"~: estimated from a data sheet; {ESTIMATE_ERROR}"]
    if any(cost.program for cost in ranking.fitting):
        notes.append("waits: estimated time for transfers that no computation overlaps")
    with_tensor = [cost for cost in costs if cost.parallel.mesh.tensor > 1]
    if with_tensor and not any(TENSOR in each.axes for cost in with_tensor for each in cost.sent):
        remedy = "Fix: give rules, such as those that jaxpar.suggest_rules prints."
        notes.append(f"tensor splits no parameter of this model, so it saves nothing\n{remedy}")
    if ranking.no_compiler:
        fact, _, remedy = ranking.no_compiler.partition("\n")
        left_out = "how much memory a layout needs, what its compiler refuses, and what overlaps"
        notes.append(f"{fact}: the estimates leave out {left_out}\n{remedy}")
    devices = format_count(machine.num_devices, "device")
    heading = f"{machine.name}, {devices}: {len(costs):,} layouts, best first:\n"
    return Picture(heading, table, *notes, f"\n{ranking.explain()}")


def _collectives_table(collectives: Sequence[Collective]) -> Table:
    overlap = any(c.beside is not None for c in collectives)
    columns = "collective", "axes", "payload", ">bytes", ">runs", "in loops", ">sent", "pass"
    table = make_table(*columns, "module", *["overlaps"] * overlap)
    for c in sorted(collectives, key=lambda c: -(c.count or 1) * c.sent_bytes):
        dims = format_shape(c.shapes[0])
        more = f" +{len(c.shapes) - 1}" if len(c.shapes) > 1 else ""
        loops = "x".join("?" if trips is None else str(trips) for trips in c.trip_counts)
        runs = "?" if c.count is None else f"{c.count:,}"
        sent = "?" if c.count is None else format_bytes(c.count * c.sent_bytes)
        where = re.sub(rf"^{c.phase}(/|$)", "", c.module) or c.source
        payload = " ".join(c.axes), f"{c.dtypes[0]} {dims}{more}", format_bytes(c.bytes)
        table.add_row(
            *(c.op.removeprefix("collective-"), *payload, runs, loops + " if" * c.conditional),
            *(sent, c.phase if c.phase != "neither" else "", where, *[_beside(c)] * overlap),
        )
    return table


def _beside(collective: Collective) -> str:
    """The first parts of the program that compute beside a transfer, and how many more do."""
    parts = [*dict.fromkeys(word.partition("/")[0] for word in collective.beside or ())]
    more = f" +{len(parts) - 2}" if len(parts) > 2 else ""
    return " ".join(parts[:2]) + more or "waits"


def _totals_table(totals: Sequence[Total]) -> Table:
    table = make_table("axes", ">collectives", ">runs", ">total payload", ">sent per device")
    for total in totals:
        runs = f"{total.count:,}" + f" + {total.unknown} x ?" * bool(total.unknown)
        sizes = format_bytes(total.bytes), format_bytes(total.sent_bytes)
        table.add_row(" ".join(total.axes), str(total.collectives), runs, *sizes)
    return table
