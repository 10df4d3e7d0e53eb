"""Chooses a layout for a run whose devices have changed."""

import contextlib

import jax

from jaxpar.base.checks import require
from jaxpar.base.sheets import SHEETS, sheet_of
from jaxpar.config import Parallel, TrainConfig
from jaxpar.mesh import MeshConfig, short_name
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Task
from jaxpar.partition.partition import Partition
from jaxpar.planning.machine import Machine
from jaxpar.planning.search import describe, divisors, rank


def fit_devices(
    task: Task, parallel: Parallel, train: TrainConfig, *, keep: bool = True
) -> tuple[Parallel, str]:
    """Returns the given layout if its mesh fits the available devices, or else another layout.

    Losses are the same on all of them. Arithmetic alone chooses, by the data sheet of such devices, so all
    processes choose alike. With `keep` it splits layers over `tensor` only if that was asked for, into a
    number of parts that divides the one asked for. If by its estimate no layout fits in memory, it takes
    the one that needs the least.

    Args:
      task: with the sizes that its data determine.
      keep: keeps a mesh that fits; if false, arithmetic chooses in any case.
    Returns:
      how devices share a step, and the reason: "" if it is what was asked for.
    Raises:
      ValueError: no layout fits the sizes, or the mesh names devices.

    Example:
      asked = jaxpar.Parallel(jaxpar.MeshConfig(data=16))
      parallel, reason = jaxpar.planning.fit_devices(task, asked, jaxpar.TrainConfig())
      print(reason)
    """
    asked, num_devices = parallel.mesh, jax.device_count()
    fact = f"--elastic uses all devices, but devices={asked.devices} names some"
    require(asked.devices is None, f"{fact}\nFix: leave one of the two out.")
    if keep:
        with contextlib.suppress(ValueError):
            kept = parallel.resolve(num_devices)
            if kept != parallel:  # a size was inferred, and rows may not divide by it
                Partition(ModelFacts.of(task), kept)
            return kept, ""
    device, tensor = jax.devices()[0], divisors(max(asked.tensor, 1)) if keep else ()
    name = sheet_of(device)
    # Its own memory may differ from process to process.
    machine = Machine(name, num_devices, len(jax.local_devices()), **SHEETS[name])
    own_axes = Parallel(MeshConfig(axes=asked.axes))
    costs, how = rank(task, own_axes, train, machine, tensor=tensor), "is the fastest"
    found = next((cost for cost in costs if cost.fits), None)
    if found is None:
        found, how = min(costs, key=lambda cost: cost.estimated_bytes), "needs the least memory"
    why = f"{short_name(asked)} does not fit {num_devices} devices; " if keep else ""
    return found.parallel, f"{why}{describe(found.parallel)} {how} by estimates for {name}"
