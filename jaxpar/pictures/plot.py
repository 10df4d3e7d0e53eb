"""`python -m jaxpar plot`: from settings and runs to a file with a picture."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.analysis.measured import MeasuredStep, measure_step
from jaxpar.analysis.program import inspect_step
from jaxpar.config import Config, RunConfig
from jaxpar.pictures.animation import make_animation
from jaxpar.pictures.timeline import Timeline
from jaxpar.pipeline.schedule import Schedule
from jaxpar.state import abstract_state
from jaxpar.step import step_schedule
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.tasks import complete

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("schedule", "timeline", "bubble", "memory", "bytes", "curves", "strategies")
SUFFIXES = (".png", ".svg", ".html")
DEFAULTS = {"strategies": ".html", "schedule": ".svg", "timeline": ".svg"}  # need no matplotlib


def plot(
    kind: str,
    config: RunConfig,
    configs: Mapping[str, RunConfig] | None = None,
    runs: Sequence[str] = (),
    output: str | Path | None = None,
) -> Path:
    """Draws a picture into a file.

    Args:
      kind: one of `KINDS`.
      config: whose schedule, timeline, bubble, memory or bytes are drawn.
      configs: in its place, several by name, for memory and bytes.
      runs: folders of runs, for curves.
      output: ends in .png, .svg or .html; None is KIND and what suits it, in this folder.
    Returns:
      Where the picture is.
    Raises:
      ValueError: the config has no such picture, or the file cannot be written so.
      OSError: no such run or folder.
    """
    path = Path(output or kind + DEFAULTS.get(kind, ".png"))
    if path.suffix not in SUFFIXES:
        raise ValueError(f"cannot draw into {str(path)!r}; end its name in {', '.join(SUFFIXES)}")
    if kind == "strategies":
        if path.suffix != ".html":
            raise ValueError(f"strategies move, and {str(path)!r} cannot; end its name in .html")
        path.write_text(make_animation())
    elif kind in ("schedule", "timeline") and path.suffix != ".png":
        schedule = _schedule(config)
        picture = Timeline(schedule) if kind == "schedule" else _measured(config)
        path.write_text(picture.to_svg() if path.suffix == ".svg" else picture.to_page(kind))
    else:
        figure = _figure(kind, config, configs or {str(config.mesh): config}, runs)
        from jaxpar.pictures.figures import save_figure

        save_figure(figure, path)
    return path


def _figure(
    kind: str, config: RunConfig, configs: Mapping[str, RunConfig], runs: Sequence[str]
) -> "Figure":
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "this picture needs matplotlib; pip install 'jaxpar[plot]', in a clone -e '.[plot]'"
        )
    # An extra: what else is here works without.
    from jaxpar.pictures import figures

    if kind == "schedule":
        return figures.draw_schedule(_schedule(config))
    if kind == "timeline":
        return figures.draw_measured(_measured(config))
    if kind == "bubble":
        schedule = _schedule(config)
        if schedule.num_stages == 1:
            raise ValueError("a mesh of stage=1 has no bubble; give one with stages, such as pp4")
        return figures.draw_bubble(schedule.kind, schedule.num_stages, schedule.num_groups)
    if kind == "curves":
        if not runs:
            raise ValueError("curves of what? Name folders of runs, such as runs/0001")
        return figures.draw_curves({str(run): _metrics(RunFolder(run)) for run in runs})
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is no picture; use one of {', '.join(KINDS)}")
    reports, memory = {}, {}
    for name, each in configs.items():
        mesh = each.mesh.build()
        whole = complete(each, mesh)
        reports[name] = inspect_step(whole, mesh)
        if kind == "memory":
            memory[name] = figures.memory_by_kind(reports[name], abstract_state(whole, mesh))
    return figures.draw_memory(memory) if kind == "memory" else figures.draw_bytes(reports)


def _schedule(config: RunConfig) -> Schedule:
    if not isinstance(config, Config):
        raise ValueError(f"the model {config.model.name!r} has no pipeline; leave --model away")
    mesh = config.mesh if config.mesh.stage > 0 else config.mesh.resolve()
    return step_schedule(dataclasses.replace(config, mesh=mesh))


def _measured(config: RunConfig) -> MeasuredStep:
    mesh = config.mesh.build()
    return measure_step(complete(config, mesh), mesh)


def _metrics(folder: RunFolder) -> list[dict[str, object]]:
    folder.config()  # is there a run?
    return folder.metrics()
