"""`python -m jaxpar plot`: from settings and runs to a file with a picture."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxpar.analysis.measured import measure_step
from jaxpar.analysis.program import ProgramReport, inspect_step
from jaxpar.base.checks import require
from jaxpar.base.files import check_output
from jaxpar.base.paths import local_path
from jaxpar.mesh import MeshConfig
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Settings
from jaxpar.partition.partition import Partition
from jaxpar.pictures.measured import show_measured
from jaxpar.pictures.parallelisms import show_parallelisms
from jaxpar.pictures.picture import Drawing, find_figures
from jaxpar.pictures.timeline import show_schedule
from jaxpar.pipeline.lanes import Schedule
from jaxpar.planning.parallelisms import compare_parallelisms
from jaxpar.step.forward import step_schedule
from jaxpar.step.setup import Setup
from jaxpar.training.progress import Curves
from jaxpar.training.run_folder import RunFolder

DRAWN = ("schedule", "timeline", "parallelisms")  # in a terminal, too
ENDS = (".svg", ".png", ".pdf", ".html")  # of names of files


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
      output: ends in .svg, .png, .pdf or .html; of the first three it may be None.
      machine: of parallelisms, one that need not be there, as of `find_machine`.
    Returns:
      Where the picture is, or without `output` the picture, which `print` and notebooks show.
    Raises:
      ValueError: the settings have no such picture, or the file cannot be written so.
      OSError: no such folder.
    """
    if machine is not None and kind != "parallelisms":
        raise ValueError(f"machine={machine!r} has no effect on {kind}\nFix: leave it out.")
    path = None if kind in DRAWN and output is None else _path_of(kind, output)
    if kind in DRAWN:
        if kind == "schedule":
            drawing = show_schedule(_schedule(settings))
        elif kind == "parallelisms":
            drawing = show_parallelisms(compare_parallelisms(*settings, machine))
        else:
            drawing = show_measured(measure_step(*settings))
        return drawing if path is None else find_figures().save_figure(drawing.to_figure(), path)
    task, parallel, train = settings
    meshes = meshes or {str(parallel.mesh): parallel.mesh}
    facts, reports = ModelFacts.of(task.resolve()), dict[str, ProgramReport]()
    for name, shape in meshes.items():
        layout = dataclasses.replace(parallel, mesh=shape)
        reports[name] = inspect_step(Setup.of(task, layout, train, facts=facts))
    figures = find_figures()
    figure = (figures.draw_memory if kind == "memory" else figures.draw_bytes)(reports)
    return figures.save_figure(figure, path)


def plot_runs(runs: Sequence[str] = (), output: str | Path | None = None) -> Path:
    """Draws the losses of runs into a file.

    Args:
      runs: their folders.
      output: ends in .svg, .png, .pdf or .html.
    Raises:
      ValueError: the file cannot be written so, or there is no run.
      OSError: no such run or folder.
    """
    path, figures = _path_of("curves", output), find_figures()
    require(bool(runs), "plot curves needs runs\nFix: name their folders, such as runs/0001.")
    curves = dict[str, Curves]()
    for run in map(str, runs):
        folder = RunFolder(run)
        folder.check()
        curves[run] = Curves(0).add(*folder.metrics())
        fact = f"{run} has no training loss in its metrics.jsonl"
        require(bool(curves[run].points["train"]), f"{fact}\nFix: train it first.")
    return figures.save_figure(figures.draw_curves(curves), path)


def _path_of(kind: str, output: str | Path | None) -> Path:
    """Of a file that can be written, with what writes it."""
    if output is None:
        raise ValueError(f"plot {kind} needs a file\nFix: add one, such as -o {kind}.svg.")
    path = local_path(output)
    fact = f"cannot draw {kind} into {str(path)!r}"
    require(path.suffix in ENDS, f"{fact}\nFix: use a file that ends in {', '.join(ENDS)}.")
    check_output(path)
    find_figures()
    return path


def _schedule(settings: Settings) -> Schedule:
    """Of a step that can be: the devices need not be there."""
    task, parallel, _ = settings
    shape = parallel.mesh if parallel.mesh.stage > 0 else parallel.mesh.resolve()
    sizes = {axis: max(size, 1) for axis, size in shape.sizes.items()}
    shape = dataclasses.replace(shape, **sizes, devices=None)
    parallel = dataclasses.replace(parallel, mesh=shape)
    return step_schedule(Partition(ModelFacts.of(task.resolve()), parallel).parallel)
