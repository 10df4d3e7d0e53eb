"""Figures with matplotlib: schedule, bubble, memory, bytes sent, and the curves of a run."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from jaxpar.analysis.measured import REST, MeasuredStep
from jaxpar.analysis.program import ProgramReport
from jaxpar.pictures.blocks import Block
from jaxpar.pictures.picture import PALETTE, color_of, make_page, text_color_on
from jaxpar.pictures.timeline import MAX_TICKS, blocks_of
from jaxpar.pipeline.schedule import Schedule, make_schedule
from jaxpar.state import TrainState

GREY = "#e4e8ec"  # idle


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as .png, as .svg, or as .html with the picture inside."""
    if path.suffix == ".png":
        figure.savefig(path, dpi=150)
        return
    svg = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "jaxpar"}):  # the same file for the same figure
        figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    path.write_text(
        make_page(path.stem, text[text.index("<svg") :]) if path.suffix == ".html" else text
    )


def draw_schedule(schedule: Schedule) -> Figure:
    """A row a stage, units coloured by microbatch; the share of grey is the bubble.

    Raises:
      ValueError: the schedule is too long for a figure.
    """
    if schedule.num_ticks > MAX_TICKS:
        raise ValueError(
            f"{schedule.num_ticks} ticks are too many for a figure; use {MAX_TICKS} or fewer, or .html, "
            f"which leaves some out"
        )
    blocks = blocks_of(schedule)
    end = blocks[-1].start + blocks[-1].cost
    width = 1.2 + 0.3 * end
    figure, [axes] = _figure(
        12 if width > 18 else max(7.0, width), 1.5 + 0.36 * schedule.num_stages
    )
    # Inches that a label needs, and those that a forward unit has.
    labelled = 0.065 * max(len(b.label) for b in blocks) < (figure.get_figwidth() - 1.2) / end
    for block in blocks:
        _draw_block(axes, block, block.stage, 0.92, labelled=labelled)
    axes.set_xlim(0, end)
    axes.set_ylim(schedule.num_stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.num_stages), [f"stage {s}" for s in range(schedule.num_stages)])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("time (1: a forward unit)")
    live = " ".join(map(str, schedule.live_units))
    axes.set_title(
        f"{schedule.kind}: bubble {schedule.bubble:.1%}"
        + (f", live units by stage {live}" if schedule.num_slots else ""),
        fontsize=10,
    )
    _legend_below(figure, _legend(schedule))
    return figure


def draw_measured(measured: MeasuredStep) -> Figure:
    """A measured step: two rows a stage, what its schedule predicts and what was."""
    rows = measured.rows()
    last = max(end for _, end, _ in rows)
    figure, [axes] = _figure(12.0, 1.9 + 0.3 * len(rows))
    inches = (figure.get_figwidth() - 1.8) / last
    places = [1.1 * i + 0.5 * (i // 2) for i in range(len(rows))]
    for y, (_, end, blocks) in zip(places, rows, strict=True):
        axes.add_patch(Rectangle((0, y - 0.5), end, 1, fc=GREY, lw=0))
        for block in blocks:
            fits = 0.065 * len(block.label) < block.cost * inches
            _draw_block(axes, block, y, 1.0, labelled=fits)
    axes.set_xlim(0, 1.01 * last)
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.set_yticks(places, [name for name, _, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time (ms)")
    axes.set_title(
        f"{measured.schedule.kind}: idle {measured.bubble:.1%}, predicted "
        f"{measured.predicted_bubble:.1%}",
        fontsize=10,
    )
    head = Patch(fc=REST, label="the head: softmax and loss")
    _legend_below(figure, [*_legend(measured.schedule), head])
    return figure


def draw_bubble(
    kind: str,
    num_stages: int,
    num_groups: int = 1,
    microbatches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    chunks: Sequence[int] = (1, 2, 4, 8),
) -> Figure:
    """The bubble of schedules against the number of microbatches, a line for each number of chunks."""
    figure, [axes] = _figure()
    for i, K in enumerate(chunks):
        bubbles = [
            100 * make_schedule(kind, num_stages, M, K, num_groups).bubble for M in microbatches
        ]
        label = f"K = {K} chunk{'s' * (K > 1)} of time"
        axes.plot(microbatches, bubbles, marker="os^Dvp*"[i % 7], color=color_of(i), label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(microbatches, list(map(str, microbatches)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("M, microbatches")
    axes.set_ylabel("bubble (% of stage-time)")
    groups = f", {num_groups} groups of layers" * (num_groups > 1)
    axes.set_title(f"{kind}, {num_stages} stages{groups}", fontsize=10)
    axes.legend(frameon=False)
    return figure


def memory_by_kind(report: ProgramReport, state: TrainState) -> dict[str, int]:
    """Bytes on a device while a step runs, by what they are.

    Args:
      report: of the step.
      state: that it takes; may be abstract.
    Raises:
      ValueError: the report has no memory.
    """
    memory = report.memory
    if memory is None:
        raise ValueError("XLA does not tell the memory of a program on this backend; use the CPU's")
    kinds = {
        "parameters": _device_bytes(state.params),
        "optimizer state": 0 if state.opt_memory else _device_bytes(state.opt_state),
        "carried state": _device_bytes(state.carry),
    }
    return {
        **kinds,
        "batch and schedule": memory.arguments - sum(kinds.values()),
        "new outputs": memory.outputs - memory.aliased,
        "temporary": memory.temporary,
    }


def draw_memory(memory: Mapping[str, Mapping[str, int]]) -> Figure:
    """Stacked bars of bytes on a device: name of a mesh -> kind -> bytes."""
    return _draw_bars(memory, "memory per device")


def draw_bytes(reports: Mapping[str, ProgramReport]) -> Figure:
    """Stacked bars of what a device sends in a step, by axes of the mesh: name of a mesh -> report."""
    sent = {
        name: {" and ".join(total.axes): total.sent_bytes for total in report.totals}
        for name, report in reports.items()
    }
    unknown = sum(total.unknown for report in reports.values() for total in report.totals)
    note = f"; {unknown} collectives that run as often as data says are left out" if unknown else ""
    return _draw_bars(sent, f"sent by a device in a step{note}", "along ")


def draw_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Loss and speed of runs against the step: name of a run -> lines of its metrics.jsonl.

    Raises:
      ValueError: a run has no line of training, or runs differ in what they count.
    """
    figure, [losses, speeds] = _figure(height=6.0, rows=2)
    unit = ""
    for i, (name, lines) in enumerate(runs.items()):
        train = [line for line in lines if line["split"] == "train"]
        if not train:
            raise ValueError(f"{name} has no line of training in its metrics.jsonl; train it first")
        keys = [key for key in train[0] if key.endswith("_per_second")]
        if unit and keys != [unit]:
            raise ValueError(f"{name} counts {keys[0]}, the run before it {unit}; plot them apart")
        [unit] = keys
        steps = [line["step"] for line in train]
        dots = {"marker": "o", "markersize": 3} if len(steps) < 30 else {}
        losses.plot(
            steps,
            [line["loss"] for line in train],
            color=color_of(i),
            label=f"{name}, train",
            **dots,
        )
        valid = [(line["step"], line["loss"]) for line in lines if line["split"] == "valid"]
        if valid:
            style: Any = {"marker": "D", "linestyle": "--", "markeredgecolor": "black"}
            losses.plot(
                *zip(*valid, strict=True), color=color_of(i), label=f"{name}, valid", **style
            )
        # The first line counts compilation.
        speeds.plot(
            steps[1:], [line[unit] for line in train][1:], color=color_of(i), label=name, **dots
        )
    losses.set_ylabel("loss (nats)")
    losses.legend(frameon=False)
    speeds.set_ylabel(unit.replace("_per_second", "/s"))
    speeds.set_ylim(bottom=0)
    speeds.set_xlabel("step (the first, which compiles, has no speed)")
    speeds.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if len(runs) > 1:
        speeds.legend(frameon=False)
    return figure


def _draw_block(axes: Any, block: Block, y: float, height: float, *, labelled: bool) -> None:
    color = block.color or GREY
    corner = (block.start, y - height / 2)
    axes.add_patch(Rectangle(corner, block.cost, height, fc=color, ec="white", lw=0.8))
    if block.label and not block.is_forward:
        foot = (block.start, y + height / 2 - 0.2)
        axes.add_patch(Rectangle(foot, block.cost, 0.18, fc="black", alpha=0.45, lw=0))
    if labelled:
        style: Any = {"ha": "center", "va": "center", "fontsize": 7}
        middle = block.start + block.cost / 2
        axes.text(middle, y, block.label, color=text_color_on(color), **style)


def _legend(schedule: Schedule) -> list[Patch]:
    names = [f"microbatch {m}" for m in range(min(schedule.num_microbatches, len(PALETTE)))]
    patches = [Patch(fc=color_of(m), label=name) for m, name in enumerate(names)]
    if schedule.num_microbatches > len(PALETTE):
        patches[-1].set_label(f"{names[-1]}, then from the first colour")
    if schedule.num_chunks > 1:
        patches.append(Patch(fc=color_of(0, 0.65), label="paler: later chunks of time"))
    if schedule.num_slots:
        patches.append(Patch(fc="#777777", label="dark foot: backward"))
    return [*patches, Patch(fc=GREY, label="idle")]


def _draw_bars(bars: Mapping[str, Mapping[str, int]], what: str, before: str = "") -> Figure:
    kinds = dict.fromkeys(kind for parts in bars.values() for kind in parts)
    most = max(sum(parts.values()) for parts in bars.values())
    power = min(4, int(math.log10(max(most, 1)) / 3))
    figure, [axes] = _figure(height=1.9 + 0.42 * len(bars))
    left = [0.0] * len(bars)
    seen = [kind for kind in kinds if max(p.get(kind, 0) for p in bars.values()) > most / 400]
    unseen = ", ".join(kind for kind in kinds if kind not in seen)
    for i, kind in enumerate(seen):
        sizes = [parts.get(kind, 0) / 1000**power for parts in bars.values()]
        # Where colours come round again, hatches tell.
        hatch = "" if i < len(PALETTE) else "//"
        axes.barh(
            list(bars),
            sizes,
            left=left,
            color=color_of(i),
            hatch=hatch,
            ec="white",
            label=before + kind,
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, (end, parts) in enumerate(zip(left, bars.values(), strict=True)):
        axes.text(end, y, f" {sum(parts.values()) / 1000**power:.3g}", va="center", fontsize=9)
    axes.set_xlim(0, 1.1 * max(left) or 1)
    axes.invert_yaxis()
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    axes.set_xlabel(f"{what} ({unit})" + f"\ntoo little to be seen: {unseen}" * bool(unseen))
    _legend_below(figure, axes.get_legend_handles_labels()[0])
    return figure


def _figure(width: float = 7.0, height: float = 4.0, rows: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, sharex=rows > 1)[:, 0].tolist()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    columns = max(1, int(figure.get_figwidth() / 2.2))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def _device_bytes(tree: Any) -> int:
    """Of all arrays of a tree on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
