"""The layout of a run on other devices than it was made for: some are gone, or there are more."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxpar.mesh import MeshConfig
from jaxpar.parallel import Parallel, short_name
from jaxpar.planning.hardware import MACHINES
from jaxpar.planning.planner import describe, divisors, plan
from jaxpar.state import abstract_state
from jaxpar.task import Task
from jaxpar.training.settings import TrainConfig


class Layout(NamedTuple):
    """A layout, and why it is this one; "" if it is the one that was asked for."""

    parallel: Parallel
    reason: str


def fit_devices(task: Task, parallel: Parallel, train: TrainConfig, *, keep: bool = True) -> Layout:
    """The layout that was asked for if its mesh is of the devices that there are; else another one.

    Losses are the same on all. The cost model chooses, for the machine in `MACHINES` that the devices are of:
    nothing is measured, so all processes choose alike. It splits layers over `tensor` only if that was asked
    for, and in no more parts. Where that cannot be, stages and the split over
    `tensor` stay as they are as far as they divide the devices, and `data` takes the rest: pp2 is dp2pp2 on 4
    devices, dp2pp2tp2 is dp3pp2 on 6.

    Args:
      task: with the sizes that its data tell.
      keep: whether a mesh that fits is kept; else it is chosen in any case.
    Raises:
      ValueError: none fits; or the mesh names devices.
    """
    asked, num_devices = parallel.mesh, jax.device_count()
    if asked.devices is not None:
        raise ValueError(
            f"--elastic takes all devices, and devices={asked.devices} names some; give only one of the two"
        )
    if keep:
        with contextlib.suppress(ValueError):
            return Layout(parallel.resolve(num_devices), "")
    refused = None
    for layout, reason in _layouts(task, parallel, train, num_devices, keep):
        try:
            mesh = layout.mesh.build()
            resolved = task.resolve(layout, mesh)
            resolved.check(layout, mesh)
            abstract_state(resolved, layout, mesh, num_steps=train.num_steps)
        except ValueError as error:
            refused = refused or error
            continue
        why = f"{short_name(asked)} does not fit {num_devices} devices; " if keep else ""
        return Layout(layout, f"{why}{describe(layout)} {reason}")
    raise ValueError(f"no mesh of {num_devices} devices fits: {refused}") from refused


def _layouts(
    task: Task, parallel: Parallel, train: TrainConfig, num_devices: int, keep: bool
) -> Iterator[Layout]:
    """Those to be tried, the best first."""
    try:
        machine = _find_machine(jax.devices()[0])
        best = plan(
            *(task, Parallel(), train, num_devices, MACHINES[machine]),
            num_compiled=0,
            tensor=divisors(max(parallel.mesh.tensor, 1)) if keep else None,
        ).best.parallel
        yield Layout(best, f"is the quickest by the cost model for {machine}")
        why = "the quickest does not fit"
    except ValueError as error:
        why = str(error)
    for mesh in _meshes(parallel.mesh, num_devices):
        reason = f"keeps stages and tensor as far as they divide the devices, for {why}"
        yield Layout(parallel.on_mesh(mesh), reason)


def _meshes(asked: MeshConfig, num_devices: int) -> Iterator[MeshConfig]:
    """With as many stages as were asked for, or a divisor of them, and then of `tensor`."""
    for stage in reversed(divisors(max(asked.stage, 1))):
        for tensor in reversed(divisors(max(asked.tensor, 1))):
            if num_devices % (stage * tensor) == 0:
                yield MeshConfig(num_devices // (stage * tensor), stage, tensor)


def _find_machine(device: Any) -> str:
    """The machine that a device is of, by its name, or the first of its platform.

    Raises:
      ValueError: there is none.
    """
    kind = device.device_kind.lower().replace(" lite", "e").replace(" ", "-")
    of_platform = [name for name, each in MACHINES.items() if each.platform == device.platform]
    if not of_platform:
        raise ValueError(
            f"no machine is known whose devices are of the platform {device.platform!r}"
        )
    return next((name for name in of_platform if name in kind), of_platform[0])
