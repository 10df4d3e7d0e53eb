"""Which layers keep track of a state, at lengths that they have not seen: all cells, and their page.

    python -m benchmarks.state_tracking

trains cell after cell, two at a time, each on a core of its own. What a cell has found is a line of
`results.jsonl`: when the command is stopped, it goes on from there the next time. Tables and picture are made
anew after every cell.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.layers.speed import KEEPS_MEMORY
from benchmarks.state_tracking.cell import BIN, MIXERS, TESTED, TRAINED
from benchmarks.state_tracking.words import PROBLEMS
from jaxpar.pictures.figures import save_figure
from jaxpar.pictures.style import color_of

FOLDER = Path(__file__).parent
MARK = "<!-- made by the command -->\n"
# Layer -> its name, and what arXiv:2411.12537, table 3, has for parity and for arithmetic without brackets.
ROWS = {
    "lstm": ("LSTM", "", ""),
    "gru": ("GRU", "", ""),
    "slstm": ("sLSTM", "1.000", "0.787"),
    "mlstm": ("mLSTM", "0.087", "0.040"),
    "mingru": ("minGRU", "", ""),
    "gated_delta": ("gated DeltaNet", "0.017", "0.314"),
    "gated_delta_negative": ("gated DeltaNet, negative eigenvalues", "1.000", "0.971"),
    "transformer": ("transformer", "0.022", "0.031"),
}
Cell = tuple[str, str, int]  # problem, layer, seed


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which cells there are.

    Attributes:
      name: of the files that they are kept and drawn in.
      seconds: of training that a cell has at most; compiling is among them, the test is not.
      seeds: of each.
      layers: by problem.
      on_cores: whether each cell has a core to itself.
    """

    name: str
    seconds: float
    seeds: int
    layers: dict[str, Sequence[str]]
    on_cores: bool

    def cells(self) -> Iterator[Cell]:
        """All, those of the first seed first."""
        for seed in range(self.seeds):
            for problem, layers in self.layers.items():
                yield from ((problem, layer, seed) for layer in layers)


FEW = ("lstm", "gated_delta", "gated_delta_negative")
DEFAULT = Plan(
    "results", 240, 2, {"parity": [*MIXERS], "arithmetic": [*MIXERS], "s5": FEW}, on_cores=True
)
FULL = Plan("full", 1200, 3, {problem: [*MIXERS] for problem in PROBLEMS}, on_cores=False)


def read(path: Path) -> dict[Cell, dict[str, Any]]:
    """What was found so far; a last line that was cut by a kill is none."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    found = map(json.loads, whole.splitlines())
    return {(each["problem"], each["layer"], each["seed"]): each for each in found}


def append(path: Path, found: dict[str, Any]) -> None:
    """Adds a line, in the place of one that was cut."""
    text = path.read_text() if path.exists() else ""
    if not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    with path.open("a") as file:
        file.write(json.dumps(found) + "\n")


def run_cells(
    cells: Sequence[Cell],
    run: Callable[[Cell, Any], dict[str, Any]],
    places: Sequence[Any],
    keep: Callable[[dict[str, Any]], None],
    stop: Callable[[], None],
) -> None:
    """Runs all cells, one at a time in each place, and keeps what each finds as soon as it is there.

    Args:
      run: (cell, place) -> what it finds.
      keep: called by one thread at a time.
      stop: ends the runs under way; called when one has failed, or at a signal.
    """
    free, lock = queue.SimpleQueue[Any](), threading.Lock()
    for place in places:
        free.put(place)

    def work(cell: Cell) -> None:
        place = free.get()
        try:
            found = run(cell, place)
        finally:
            free.put(place)
        with lock:
            keep(found)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
        futures = [threads.submit(work, cell) for cell in cells]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            stop()
            raise


class Processes:
    """Cells, each in a process of its own."""

    def __init__(self, seconds: float):
        """Takes the time that each has."""
        self._seconds, self._running = seconds, set[subprocess.Popen[str]]()

    def run(self, cell: Cell, core: int | None) -> dict[str, Any]:
        """What a cell finds; on one core, if one is named.

        Raises:
          RuntimeError: the process has failed.
        """
        command = [sys.executable, "-m", "benchmarks.state_tracking.cell", *map(str, cell)]
        process = subprocess.Popen(
            [*command, "--seconds", str(self._seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(KEEPS_MEMORY),
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, [core]),
        )
        self._running.add(process)
        printed, _ = process.communicate()
        self._running.discard(process)
        if process.returncode:
            raise RuntimeError(f"{cell} ended with code {process.returncode}")
        return json.loads(printed.splitlines()[-1])

    def stop(self) -> None:
        """Ends those that run."""
        for process in [*self._running]:
            process.terminate()


def scaled(accuracy: Any, problem: str) -> np.ndarray:
    """0 where it is that of guessing, 1 where there is no mistake."""
    chance = 1 / PROBLEMS[problem].num_labels
    return (np.asarray(accuracy) - chance) / (1 - chance)


def seen_and_unseen(found: dict[str, Any]) -> tuple[float, float]:
    """Scaled accuracy at the lengths of training, and at those above."""
    by_length = scaled(found["accuracy"], found["problem"])
    return by_length[: TRAINED // BIN].mean(), by_length[TRAINED // BIN :].mean()


def table(results: dict[Cell, dict[str, Any]], plan: Plan) -> str:
    """Markdown: scaled accuracies of all seeds, and how each cell ended."""

    def of(layer: str, problem: str, say: Callable[[dict[str, Any]], str], between: str) -> str:
        found = (results.get((problem, layer, seed)) for seed in range(plan.seeds))
        return between.join(say(each) for each in found if each)

    def accuracy(part: int) -> Callable[[dict[str, Any]], str]:
        return lambda found: f"{seen_and_unseen(found)[part]:.3f}"

    def end(found: dict[str, Any]) -> str:
        mark = "**" * (found["ended_by"] == "full accuracy")
        return f"{mark}{found['seconds']:.0f} s, {found['steps']:,}{mark}"

    lengths = f"1 to {TRAINED}", f"{TRAINED + 1} to {TESTED}"
    titles = [PROBLEMS[name].title for name in plan.layers]
    lines = [
        "| layer | " + " | ".join(f"{t}, {length}" for t in titles for length in lengths)
        + " | published: parity | arithmetic |",
        "|---|" + "---|" * 2 * len(titles) + "---:|---:|",
    ]  # fmt: skip
    ends = ["| layer | " + " | ".join(titles) + " |", "|---|" + "---|" * len(titles)]
    for layer, (name, *published) in ROWS.items():
        cells = [of(layer, p, accuracy(part), ", ") for p in plan.layers for part in (0, 1)]
        lines.append("| " + " | ".join([name, *cells, *published]) + " |")
        ends.append(
            "| " + " | ".join([name, *(of(layer, p, end, "; ") for p in plan.layers)]) + " |"
        )
    return "\n".join([*lines, "", *ends]) + "\n"


def draw(results: dict[Cell, dict[str, Any]], plan: Plan) -> Figure:
    """Scaled accuracy by length, the mean of the seeds: a picture for each problem."""
    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    middles = np.arange(BIN / 2, TESTED, BIN)
    for axes, problem in zip(
        figure.subplots(1, len(plan.layers), sharey=True), plan.layers, strict=True
    ):
        for number, (layer, (name, *_)) in enumerate(ROWS.items()):
            found = [results.get((problem, layer, seed)) for seed in range(plan.seeds)]
            lines = [scaled(each["accuracy"], problem) for each in found if each]
            if lines:
                style = {"marker": "os^Dvp*X"[number], "markersize": 3.5, "linewidth": 1.2}
                mean = np.mean(lines, axis=0)
                axes.plot(middles, mean, color=color_of(number), label=name, **style)
        axes.axvline(TRAINED, color="gray", linewidth=0.8, linestyle="--")
        axes.set_title(PROBLEMS[problem].title, fontsize=10)
        axes.set_xlabel("letters")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("scaled accuracy")
    handles = {h.get_label(): h for axes in figure.axes for h in axes.get_lines()}
    names = [name for name, *_ in ROWS.values() if name in handles]
    below: Any = {"loc": "outside lower center", "ncols": 4, "frameon": False, "fontsize": 8}
    figure.legend([handles[name] for name in names], names, **below)
    return figure


def write_page(results: dict[Cell, dict[str, Any]], plan: Plan, folder: Path) -> None:
    """Makes the picture, and the tables: those of the default on the page, others in a file beside it."""
    save_figure(draw(results, plan), folder / f"{plan.name}.svg")
    page, text = folder / "README.md", table(results, plan)
    if plan is DEFAULT:
        before, _, after = page.read_text().split(MARK)
        page.write_text(f"{before}{MARK}{text}{MARK}{after}")
    else:
        (folder / f"{plan.name}.md").write_text(text)


def main() -> None:
    """Trains what is not there yet, and makes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="for a GPU: all cells, three seeds")
    parser.add_argument("--workers", type=int, help="cells at a time; 2, and 1 with --full")
    args = parser.parse_args()
    plan = FULL if args.full else DEFAULT
    workers = args.workers or (2 if plan.on_cores else 1)
    cores = sorted(os.sched_getaffinity(0))
    if plan.on_cores and workers > len(cores):
        parser.error(
            f"--workers {workers}: each has a core to itself, and there are {len(cores)}; use "
            f"--workers {len(cores)} or less"
        )
    path = FOLDER / f"{plan.name}.jsonl"
    results, cells = read(path), [*plan.cells()]
    todo = [cell for cell in cells if cell not in results]

    def keep(found: dict[str, Any]) -> None:
        append(path, found)
        results[found["problem"], found["layer"], found["seed"]] = found
        seen, unseen = seen_and_unseen(found)
        print(
            f"{len(results)}/{len(cells)}  {found['problem']} {found['layer']} {found['seed']}: "
            f"scaled accuracy {seen:.3f}, above {TRAINED} letters {unseen:.3f}; {found['ended_by']} "
            f"after {found['seconds']:.0f} s, {found['steps']} steps",
            flush=True,
        )
        write_page(results, plan, FOLDER)

    write_page(results, plan, FOLDER)
    print(f"{len(todo)} of {len(cells)} cells to do, at most {plan.seconds:.0f} s each", flush=True)
    processes = Processes(plan.seconds)
    places = cores[:workers] if plan.on_cores else [None] * workers
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_cells(todo, processes.run, places, keep, processes.stop)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with the cells that are not done")


if __name__ == "__main__":
    main()
