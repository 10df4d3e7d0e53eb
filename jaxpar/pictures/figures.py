"""Figures with matplotlib: memory, bytes sent, and the curves of a run."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from jaxpar.analysis.program import ProgramReport
from jaxpar.base.checks import require
from jaxpar.base.display import format_bytes, format_count
from jaxpar.base.files import whole_file
from jaxpar.base.types import Json
from jaxpar.pictures.style import color_of, make_page
from jaxpar.training.progress import Curves


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a figure as .png, as .svg, or as .html with the picture inside; where it is."""
    with whole_file(path) as file:
        if path.suffix == ".png":
            figure.savefig(file, dpi=150, format="png")
            return path
        svg = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": "jaxpar"}):  # the same file for the same figure
            figure.savefig(svg, format="svg", metadata={"Date": None})
        text = svg.getvalue()
        if path.suffix == ".html":
            text = make_page(path.stem, text[text.index("<svg") :])
        file.write_text(text, encoding="utf-8")
    return path


def draw_memory(reports: Mapping[str, ProgramReport]) -> Figure:
    """Stacked bars of bytes on a device, by what they are for: name of a mesh -> report.

    Raises:
      ValueError: a report has no memory.
    """
    memory = {name: report.memory for name, report in reports.items() if report.memory}
    if len(memory) < len(reports):
        raise ValueError("XLA reports no memory on this backend\nFix: use JAX_PLATFORMS=cpu.")
    bars = {name: each.parts for name, each in memory.items()}
    return _draw_bars(bars, "memory per device")


def draw_bytes(reports: Mapping[str, ProgramReport]) -> Figure:
    """Stacked bars of what a device sends in a step, by axes of the mesh: name of a mesh -> report."""
    sent = {
        name: {" and ".join(total.axes): total.sent_bytes for total in report.totals}
        for name, report in reports.items()
    }
    unknown = sum(total.unknown for report in reports.values() for total in report.totals)
    note = f"; not counted: {format_count(unknown, 'collective')} in loops as long as data says"
    told = dict.fromkeys(note.strip() for report in reports.values() for note in report.notes)
    lines = [line for note in told for line in textwrap.wrap(note, 90)]
    return _draw_bars(sent, f"sent by a device in a step{note * bool(unknown)}", "along ", lines)


def draw_curves(runs: Mapping[str, Sequence[Json]]) -> Figure:
    """Losses of runs against the step: name of a run -> lines of its metrics.jsonl.

    Raises:
      ValueError: a run has no line of training.
    """
    figure, axes = _figure()
    for i, (name, lines) in enumerate(runs.items()):
        points = Curves(0).add(*lines).points
        fact = f"{name} has no line of training in its metrics.jsonl"
        require(bool(points["train"]), f"{fact}\nFix: train it first.")
        for split, style in (("train", "-"), ("valid", "D--")):
            if points[split]:
                steps, losses = zip(*points[split], strict=True)
                axes.plot(steps, losses, style, color=color_of(i), label=f"{name}, {split}")
    axes.set_ylabel("loss")
    axes.set_xlabel("step")
    axes.legend(frameon=False)
    return figure


def _draw_bars(
    bars: Mapping[str, Mapping[str, int]], what: str, before: str = "", notes: Sequence[str] = ()
) -> Figure:
    kinds = dict.fromkeys(kind for parts in bars.values() for kind, size in parts.items() if size)
    figure, axes = _figure(height=1.9 + 0.42 * len(bars) + 0.2 * len(notes))
    left = [0] * len(bars)
    for i, kind in enumerate(kinds):
        sizes = [parts.get(kind, 0) for parts in bars.values()]
        axes.barh(list(bars), sizes, left=left, label=before + kind, color=color_of(i), ec="white")
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, end in enumerate(left):
        axes.text(end, y, f" {format_bytes(end)}", va="center", fontsize=9)
    axes.set_xlim(0, 1.2 * max(left) or 1)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set_xlabel("\n".join([what, *notes]))
    below: Any = {"loc": "outside lower center", "ncols": 3, "frameon": False, "fontsize": 8}
    figure.legend(*axes.get_legend_handles_labels(), **below)
    return figure


def _figure(height: float = 4.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.0, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
