"""The layout of a run whose devices are not those it was made for: some are gone, or there are more."""

import contextlib
from typing import Any

import jax

from jaxpar.config import Parallel, TrainConfig, short_name
from jaxpar.facts import ModelFacts
from jaxpar.layout import Layout
from jaxpar.planning.hardware import MACHINES
from jaxpar.planning.planner import describe, divisors, plan
from jaxpar.task import Task


def fit_devices(
    task: Task, parallel: Parallel, train: TrainConfig, *, keep: bool = True
) -> tuple[Parallel, str]:
    """The layout that was asked for, if its mesh fits the devices that there are; else another one.

    Losses are the same on all of them. The cost model chooses, for the machine in `MACHINES` most like the
    devices; nothing is measured, so all processes choose alike. With `keep` it splits layers over `tensor`
    only if that was asked for, into a number of parts that divides the one asked for. If by its estimate no
    layout fits in memory, it takes the one that needs the least.

    Args:
      task: with the sizes that its data determine.
      keep: keeps a mesh that fits; if false, the cost model chooses in any case.
    Returns:
      how devices share a step, and the reason: "" if it is what was asked for.
    Raises:
      ValueError: no layout fits the sizes, or the mesh names devices.
    """
    asked, num_devices = parallel.mesh, jax.device_count()
    if asked.devices is not None:
        raise ValueError(
            f"--elastic takes all devices, and devices={asked.devices} names some; give only one of the two"
        )
    if keep:
        with contextlib.suppress(ValueError):
            kept = parallel.resolve(num_devices)
            if kept != parallel:  # a size was inferred, and rows may not divide by it
                Layout(ModelFacts.of(task), kept)
            return kept, ""
    machine = _find_machine(jax.devices()[0])
    tensor = divisors(max(asked.tensor, 1)) if keep else None
    ranking = plan(
        *(task, Parallel(), train, num_devices, MACHINES[machine]), num_compiled=0, tensor=tensor
    )
    found, how = (ranking.smallest, "needs the least memory")
    if ranking.costs:
        found, how = ranking.best, "is the quickest"
    assert found is not None
    why = f"{short_name(asked)} does not fit {num_devices} devices; " if keep else ""
    reason = f"{why}{describe(found.parallel)} {how} by the cost model for {machine}"
    return found.parallel, reason


def _find_machine(device: Any) -> str:
    """The machine that a device belongs to, by its kind; else the first of its platform, or of all."""
    kind = device.device_kind.lower().replace(" lite", "e").replace(" ", "-")
    of_platform = [name for name, each in MACHINES.items() if each.platform == device.platform]
    return next((name for name in of_platform if name in kind), [*of_platform, *MACHINES][0])
