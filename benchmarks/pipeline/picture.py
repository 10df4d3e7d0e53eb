"""Draws the memory of a pipeline by its number of microbatches: the picture of the README.

    python -m benchmarks.pipeline.picture -o docs/memory.svg

The numbers are those of `memory.csv`: MiB of temporary memory per device, as `benchmarks.pipeline.memory`
prints them (8 layers of 256 on 4 stages, 8 rows a microbatch, 64 steps in 4 chunks; jax 0.10.1).
Needs the extra `plot`.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

NUMBERS = Path(__file__).with_name("memory.csv")
# Column -> label, color, and where the label ends: microbatches, MiB, alignment.
LINES = {
    "autodiff": ("differentiated GPipe loop: {:.0f} MiB", "#c2410c", (26.5, 742, "right")),
    "zero-bubble": ("jaxpar: {:.0f} MiB", "#1d4ed8", (32, 66, "right")),
    "remat": ("jaxpar, activations recomputed: {:.0f} MiB", "#0f766e", (32, -32, "right")),
}
TEXT, GRID = "#24292f", "#d8dee4"


def read() -> dict[str, list[float]]:
    """The columns of the table by their names."""
    with NUMBERS.open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def draw(path: str | Path) -> None:
    """Writes the picture; on a white card, so that it can be read on any background."""
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    columns = read()
    counts = columns["microbatches"]
    style = {
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
        "svg.hashsalt": "jaxpar",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(7.6, 3.8), facecolor="white")
        for name, (label, color, (x, y, align)) in LINES.items():
            axes.plot(counts, columns[name], color=color, marker="o", markersize=5, linewidth=2.2)
            text = label.format(columns[name][-1])
            axes.text(x, y, text, color=color, ha=align, va="center", fontweight="bold")
        axes.set_title(
            "Temporary memory per device: 8 LSTM layers on 4 pipeline stages", loc="left", pad=12
        )
        axes.set_xlabel("microbatches of 8 rows")
        axes.set_ylabel("MiB")
        axes.set_xticks(counts, [f"{count:.0f}" for count in counts])
        axes.set_xlim(3, 33)
        axes.set_yticks(range(0, 900, 200))
        axes.set_ylim(-70, 870)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(length=0)
        figure.savefig(path, bbox_inches="tight", pad_inches=0.2, metadata={"Date": None})


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", default="docs/memory.svg")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
