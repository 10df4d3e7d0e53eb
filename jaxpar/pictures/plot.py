"""`python -m jaxpar plot`: from settings and runs to a file with a picture."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from jaxpar.analysis.measured import measure_step
from jaxpar.analysis.program import ProgramReport, inspect_step
from jaxpar.base.checks import require
from jaxpar.base.files import check_output, whole_file
from jaxpar.mesh import MeshConfig
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Settings
from jaxpar.partition.partition import Partition
from jaxpar.pictures.measured import show_measured
from jaxpar.pictures.parallelisms import show_parallelisms
from jaxpar.pictures.picture import Drawing
from jaxpar.pictures.timeline import show_schedule
from jaxpar.pipeline.lanes import Schedule
from jaxpar.planning.parallelisms import compare_parallelisms
from jaxpar.step.forward import step_schedule
from jaxpar.step.setup import Setup
from jaxpar.training.run_folder import RunFolder

DRAWN = ("schedule", "timeline", "parallelisms")  # without matplotlib
# What the names of files end in.
DRAWINGS, FIGURES = (".svg", ".html"), (".png", ".svg", ".html")


def plot_step(
    kind: str,
    settings: Settings,
    meshes: Mapping[str, MeshConfig] | None = None,
    output: str | Path | None = None,
    machine: str | None = None,
) -> Path | Drawing:
    """Draws a picture of a task's step into a file, or for a terminal.

    Args:
      kind: "schedule", "timeline", "parallelisms", "memory" or "bytes".
      settings: of the step.
      meshes: several by name, for memory and bytes; without them, that of the settings.
      output: of the first three it ends in .svg or .html, and may be None; of the others in .png too.
      machine: of parallelisms, one that need not be there, as of `find_machine`.
    Returns:
      Where the picture is, or without `output` the picture, which `print` and notebooks show.
    Raises:
      ValueError: the settings have no such picture, or the file cannot be written so.
      OSError: no such folder.
    """
    if machine is not None and kind != "parallelisms":
        raise ValueError(f"machine={machine!r} has no effect on {kind}\nFix: leave it out.")
    if kind in DRAWN:
        path = None if output is None else _path_of(kind, output, DRAWINGS)
        if kind == "schedule":
            drawing = show_schedule(_schedule(settings))
        elif kind == "parallelisms":
            drawing = show_parallelisms(compare_parallelisms(*settings, machine))
        else:
            drawing = show_measured(measure_step(*settings))
        if path is None:
            return drawing
        with whole_file(path) as file:
            text = drawing.to_svg() if path.suffix == ".svg" else drawing.to_page(kind)
            file.write_text(text, encoding="utf-8")
        return path
    path, figures = _path_of(kind, output, FIGURES), _figures()
    task, parallel, train = settings
    meshes = meshes or {str(parallel.mesh): parallel.mesh}
    facts, reports = ModelFacts.of(task.resolve()), dict[str, ProgramReport]()
    for name, shape in meshes.items():
        layout = dataclasses.replace(parallel, mesh=shape)
        reports[name] = inspect_step(Setup.of(task, layout, train, facts=facts))
    figure = (figures.draw_memory if kind == "memory" else figures.draw_bytes)(reports)
    return figures.save_figure(figure, path)


def plot_runs(runs: Sequence[str] = (), output: str | Path | None = None) -> Path:
    """Draws the losses of runs into a file.

    Args:
      runs: their folders.
      output: ends in .png, .svg or .html.
    Raises:
      ValueError: the file cannot be written so, or there is no run.
      OSError: no such run or folder.
    """
    path, figures = _path_of("curves", output, FIGURES), _figures()
    require(bool(runs), "plot curves needs runs\nFix: name their folders, such as runs/0001.")
    folders = {str(run): RunFolder(run) for run in runs}
    for folder in folders.values():
        folder.check()
    lines = {name: folder.metrics() for name, folder in folders.items()}
    return figures.save_figure(figures.draw_curves(lines), path)


def _path_of(kind: str, output: str | Path | None, ends: Sequence[str]) -> Path:
    """Of a file that can be written."""
    if output is None:
        raise ValueError(f"plot {kind} needs a file\nFix: add one, such as -o {kind}{ends[0]}.")
    path = Path(output).expanduser()
    fact = f"cannot draw {kind} into {str(path)!r}"
    require(path.suffix in ends, f"{fact}\nFix: end it in {', '.join(ends)}.")
    check_output(path)
    return path


def _figures() -> ModuleType:
    """What draws with matplotlib, an extra: the rest works without."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("this picture needs the package matplotlib\nFix: pip install matplotlib.")
    from jaxpar.pictures import figures

    return figures


def _schedule(settings: Settings) -> Schedule:
    """Of a step that can be: the devices need not be there."""
    task, parallel, _ = settings
    shape = parallel.mesh if parallel.mesh.stage > 0 else parallel.mesh.resolve()
    sizes = {axis: max(size, 1) for axis, size in shape.sizes.items()}
    shape = dataclasses.replace(shape, **sizes, devices=None)
    parallel = dataclasses.replace(parallel, mesh=shape)
    return step_schedule(Partition(ModelFacts.of(task.resolve()), parallel).parallel)
