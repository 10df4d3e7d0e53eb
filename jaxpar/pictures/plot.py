"""`python -m jaxpar plot`: from settings and runs to a file with a picture."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.analysis.measured import measure_step
from jaxpar.analysis.program import inspect_step
from jaxpar.facts import ModelFacts
from jaxpar.files import whole_file
from jaxpar.layout import Layout
from jaxpar.mesh import MeshConfig
from jaxpar.pictures.animation import make_animation
from jaxpar.pictures.measured import show_measured
from jaxpar.pictures.picture import Drawing
from jaxpar.pictures.timeline import show_schedule
from jaxpar.pipeline.schedule import Schedule
from jaxpar.setup import Setup
from jaxpar.state import abstract_state
from jaxpar.step import step_schedule
from jaxpar.task import Settings
from jaxpar.training.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")
IN_TERMINAL = ("schedule", "timeline")  # can be seen as text, and need no matplotlib but for a .png


def plot(
    kind: str,
    settings: Settings | None = None,
    meshes: Mapping[str, MeshConfig] | None = None,
    runs: Sequence[str] = (),
    output: str | Path | None = None,
) -> Path | Drawing:
    """Draws a picture into a file, or for a terminal.

    Args:
      kind: "schedule", "timeline", "bubble", "memory" or "bytes", of a step; "curves", of runs; "strategies".
      settings: of the step whose schedule, timeline, bubble, memory or bytes are drawn.
      meshes: several by name, for memory and bytes; without them, that of the settings.
      runs: folders of runs, for curves.
      output: ends in .png, .svg or .html; None writes no file, for a schedule or timeline.
    Returns:
      Where the picture is, or without `output` the picture, which `print` and notebooks show.
    Raises:
      ValueError: the settings have no such picture, or the file cannot be written so.
      OSError: no such run or folder.
    """
    if output is None:
        if kind in IN_TERMINAL:
            return _drawing(kind, settings)
        suffix = ".html" if kind == "strategies" else ".png"
        raise ValueError(f"a picture of {kind} is a file; say which, such as -o {kind}{suffix}")
    path = Path(output).expanduser()
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: there is no folder {path.parent}; make it first"
        )
    if path.suffix not in SUFFIXES:
        raise ValueError(f"cannot draw into {str(path)!r}; end its name in {', '.join(SUFFIXES)}")
    if kind == "strategies":
        if path.suffix != ".html":
            raise ValueError(f"strategies move, and {str(path)!r} cannot; end its name in .html")
        text = make_animation()
    elif kind in IN_TERMINAL and path.suffix != ".png":
        picture = _drawing(kind, settings)
        text = picture.to_svg() if path.suffix == ".svg" else picture.to_page(kind)
    else:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("this picture needs the package matplotlib; pip install matplotlib")
        # An extra: what else is here works without.
        from jaxpar.pictures.figures import save_figure

        save_figure(_figure(kind, settings, meshes, runs), path)
        return path
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")
    return path


def _figure(
    kind: str,
    settings: Settings | None,
    meshes: Mapping[str, MeshConfig] | None,
    runs: Sequence[str],
) -> "Figure":
    from jaxpar.pictures import figures

    if kind == "curves":
        if not runs:
            raise ValueError("curves of what? Name folders of runs, such as runs/0001")
        folders = {str(run): RunFolder(run) for run in runs}
        for folder in folders.values():
            folder.check()
        return figures.draw_curves({name: folder.metrics() for name, folder in folders.items()})
    if kind in IN_TERMINAL:
        return figures.draw_chart(_drawing(kind, settings).chart)
    if kind == "bubble":
        s = _schedule(settings)
        if s.num_stages == 1:
            raise ValueError("a mesh of stage=1 has no bubble; give one with stages, such as pp4")
        return figures.draw_bubble(s.kind, s.num_stages, s.num_groups, zero_bubble=s.zero_bubble)
    assert settings is not None
    task, parallel, train = settings
    reports, memory = {}, {}
    for name, shape in (meshes or {str(parallel.mesh): parallel.mesh}).items():
        on_shape = dataclasses.replace(parallel, mesh=shape)
        setup = Setup.of(task, on_shape, train)
        reports[name] = inspect_step(setup)
        if kind == "memory":
            memory[name] = figures.memory_by_kind(reports[name], abstract_state(setup))
    return figures.draw_memory(memory) if kind == "memory" else figures.draw_bytes(reports)


def _drawing(kind: str, settings: Settings | None) -> Drawing:
    if kind == "schedule":
        return show_schedule(_schedule(settings))
    assert settings is not None
    return show_measured(measure_step(*settings))


def _schedule(settings: Settings | None) -> Schedule:
    """Of a step that can be: the devices need not be there."""
    assert settings is not None
    task, parallel, _ = settings
    shape = parallel.mesh if parallel.mesh.stage > 0 else parallel.mesh.resolve()
    sizes = {axis: max(size, 1) for axis, size in shape.sizes.items()}
    shape = dataclasses.replace(shape, **sizes, devices=None)
    parallel = dataclasses.replace(parallel, mesh=shape)
    return step_schedule(Layout(ModelFacts.of(task.resolve()), parallel).parallel)
