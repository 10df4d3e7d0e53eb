"""Figures with matplotlib: charts, memory, bytes sent, and the curves of a run."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from jaxpar.analysis.program import ProgramReport
from jaxpar.base.display import format_bytes, format_count
from jaxpar.base.files import whole_file
from jaxpar.pictures.chart import FEET, IDLE, LETTER, Chart
from jaxpar.pictures.style import color_of, make_page, text_color_on
from jaxpar.training.progress import LOSSES, Curves

# Words stay words, in the fonts of the program that shows them; the same file for the same figure.
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "jaxpar", "pdf.fonttype": 42,
    "font.sans-serif": ["DejaVu Sans"],
}  # fmt: skip
# What hides the time to come in a browser: nothing where a picture does not move, or shall not.
_LATER = "later"
_MOVES = """#later path{transform-box:fill-box;transform-origin:right;animation:later 11s linear infinite}
@keyframes later{from{fill:#fff;opacity:.85;transform:none}75%,to{fill:#fff;opacity:.85;transform:scaleX(0)}}
@media(prefers-reduced-motion:reduce){#later path{animation:none}}"""
_INCH = 96  # pixels, as browsers count
_FONT: Any = {"fontsize": 8.25}  # 11 pixels
_LINE, _DIM = "#d1d9e0", "#59636e"  # the colors of marks, and of their labels


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a figure as .svg, .png or .pdf, or as .html with the picture inside; where it is."""
    with whole_file(path) as file:
        if path.suffix in (".svg", ".html"):
            svg = svg_of(figure)
            file.write_text(svg if path.suffix == ".svg" else make_page(path.stem, svg), "utf-8")
        else:
            _write(figure, file, path.suffix[1:])
    return path


def svg_of(figure: Figure) -> str:
    """An element of SVG, which moves where a chart's time goes by."""
    text = io.StringIO()
    _write(figure, text, "svg")
    svg = text.getvalue()
    moves = f"<style>{_MOVES}</style>" * (f'id="{_LATER}"' in svg)
    return svg[svg.index("<svg") :].replace("<defs>", f"<defs>{moves}", 1)


def _write(figure: Figure, file: Path | io.StringIO, kind: str) -> None:
    about = {"svg": ("Creator", "Date", "Format", "Type"), "pdf": ("Creator", "CreationDate")}
    own = {"metadata": dict.fromkeys(about.get(kind, ())), "bbox_inches": "tight"}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(file, format=kind, dpi=150, **own)


def draw_chart(chart: Chart) -> Figure:
    """Blocks in axes as large as the time and the rows; all else is around them."""
    bottom = chart.rows[-1].top + 1
    width, height, pixel = chart.width, chart.row * bottom, 1 / chart.scale
    figure = Figure((width / _INCH, height / _INCH))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width * pixel), ylim=(bottom, 0))
    axes.spines[:].set_visible(False)
    axes.set_yticks([row.top + 0.5 for row in chart.rows], [r.name for r in chart.rows], **_FONT)
    if chart.marks:
        axes.set_xticks(*zip(*chart.marks_with_room(), strict=True))
    axes.tick_params("x", color=_LINE, labelcolor=_DIM, labelsize=_FONT["fontsize"])
    axes.tick_params("y", length=0)
    if not chart.heads:  # no line through text
        axes.grid(axis="x", color=_LINE)
        axes.set_axisbelow("line")
    gap, flat = 1 / chart.row, dict[str, Any](linewidth=0, clip_on=False)
    for row in chart.rows:
        inside = row.top + gap, 1 - 2 * gap
        axes.broken_barh([(a, z - a) for a, z in row.spans], inside, color=IDLE, zorder=1, **flat)
        places, colors = [], [chart.colors[block.unit] for block in row.blocks]
        for block, color in zip(row.blocks, colors, strict=True):
            side = min(pixel, block.cost / 10)
            places.append((block.start + side, block.cost - 2 * side))
            if dark := FEET[block.letter]:
                foot = row.top + 1 - 6 * gap, 5 * gap
                axes.broken_barh(places[-1:], foot, color=("#000", dark), zorder=3, **flat)
            if chart.fits(block):
                place = block.start + block.cost / 2, row.top + 0.5
                own = {"color": text_color_on(color), **_FONT}
                axes.text(*place, block.label, ha="center", va="center", **own)
        axes.broken_barh(places, inside, color=colors, zorder=2, **flat)
        if chart.moves:
            axes.axhspan(row.top, row.top + 1, alpha=0, zorder=4, gid=_LATER)
    left, ends = -chart.left / width, axes.get_yaxis_transform()
    for top, line in chart.heads:
        name, colon, rest = line.rpartition(": ")
        own = {"weight": "bold", "va": "bottom", "transform": ends, **_FONT}
        bold = axes.text(left, top + 1, name + colon, **own)
        axes.annotate(rest, (1, 0), xycoords=bold, va="bottom", **_FONT)
    own = {"ha": "right", "va": "top", "color": _DIM, **_FONT}
    axes.text(-9 * pixel, bottom + 7 / chart.row, chart.unit, **own)
    keys = [tuple(Patch(color=color) for color in key.colors) for key in chart.legend]
    longest = LETTER * max(len(key.text) for key in chart.legend) + 44
    axes.legend(
        keys,
        [key.text for key in chart.legend],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.1)},
        title=chart.caption,
        title_fontsize=_FONT["fontsize"],
        **_FONT,
        loc="upper left",
        bbox_to_anchor=(left, -24 / height),
        alignment="left",
        borderaxespad=0,
        borderpad=0,
        frameon=False,
        ncols=max(int((width + chart.left) / longest), 1),
    )
    return figure


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
    note = f"; without {format_count(unknown, 'collective')} in loops of unknown length"
    told = dict.fromkeys(note.strip() for report in reports.values() for note in report.notes)
    lines = [line for note in told for line in textwrap.wrap(note, 90)]
    return _draw_bars(sent, f"sent per device in a step{note * bool(unknown)}", "along ", lines)


def draw_curves(runs: Mapping[str, Curves]) -> Figure:
    """Losses of runs against the step, by the names of the runs."""
    figure, axes = _figure()
    for i, (name, curves) in enumerate(runs.items()):
        for split, style in (("train", "-"), ("valid", "D--")):
            if points := curves.points[split]:
                steps, losses = zip(*points, strict=True)
                label = f"{name}, " * bool(name) + LOSSES[split]
                style = "." if len(points) == 1 else style
                axes.plot(steps, losses, style, color=color_of(i), label=label)
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
