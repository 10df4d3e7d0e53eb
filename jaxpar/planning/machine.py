"""Machines as a few numbers of their data sheets, for estimates."""

import dataclasses
import math
from collections.abc import Mapping

import jax

from jaxpar.base.checks import require
from jaxpar.base.memory import device_memory
from jaxpar.base.sheets import SHEETS, Link, sheet_of
from jaxpar.mesh import find_devices, split_machine
from jaxpar.trace.counts import Amount


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal devices, grouped into hosts.

    Attributes:
      name: as it was asked for, such as "v5e:4x8"; of the devices that JAX has, what they are.
      num_devices: in all.
      devices_per_host: how many the near links join.
      source: of its numbers.
      flops_per_second: of a device at its best, by the dtype of the matmuls' inputs; float32 as JAX
        multiplies it by default.
      memory_bytes, memory_bytes_per_second: of a device.
      host_bytes_per_second: between a device and its host's memory, in one direction.
      near: the links within a host (of a TPU: within a slice).
      far: those between hosts.
      loop_seconds: the least time of one iteration of a loop, such as a time step.
      tick_seconds: the time of a pipeline's tick in which there is nothing to compute or to send.
      platform: as JAX calls it.
      is_here: whether they are the devices that JAX has, on which steps can be run.

    Example:
      machine = jaxpar.planning.find_machine("h100:2x8")
      print(machine.num_devices, machine.memory_bytes)
    """

    name: str
    num_devices: int
    devices_per_host: int
    source: str
    flops_per_second: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    host_bytes_per_second: float
    near: Link
    far: Link
    loop_seconds: float
    tick_seconds: float
    platform: str
    is_here: bool = False

    def link(self, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Link:
        """The slowest link among devices that differ along the axes of a mesh.

        Consecutive devices in the mesh's order, its last axis fastest, share a host.

        Args:
          axes: one or more.
          sizes: of all axes, in the mesh's order.
        """
        names = list(sizes)
        first = min(names.index(axis) for axis in axes)
        reach = math.prod(sizes[name] for name in names[first:])  # devices from first to last
        return self.near if reach <= self.devices_per_host else self.far

    def seconds(self, amount: Amount, dtype: str) -> float:
        """The least seconds that a device needs: its roofline (Williams et al. 2009), and the turns of loops.

        Args:
          dtype: of the inputs of matmuls; one that the sheet does not have counts as float32.
        """
        rate = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        work, moving = amount.flops / rate, amount.bytes / self.memory_bytes_per_second
        return max(work, moving, amount.turns * self.loop_seconds)


def find_machine(name: Machine | str | None = None, memory_bytes: float | None = None) -> Machine:
    """The machine that a text describes, as of `mesh.split_machine`; None: the devices that JAX has.

    Args:
      name: a machine is itself.
      memory_bytes: of one device, to replace the machine's own figure.
    Raises:
      ValueError: there is no such machine, or `memory_bytes` is not positive and finite.

    Example:
      machine = jaxpar.planning.find_machine("v5e:4x8", memory_bytes=8e9)
    """
    if memory_bytes is not None:
        fact = f"memory_bytes={memory_bytes} is not positive and finite"
        require(0 < memory_bytes < math.inf, f"{fact}\nFix: use a number such as 16e9.")
        return dataclasses.replace(find_machine(name), memory_bytes=memory_bytes)
    if isinstance(name, Machine):
        return name
    if name is None:
        return _find_here()
    kind, sides = split_machine(name)
    num_devices, sheet = math.prod(sides), SHEETS[kind]
    near = num_devices if sheet["platform"] == "tpu" else sides[-1]
    return Machine(name, num_devices, near, **sheet)


def _find_here() -> Machine:
    devices = find_devices()
    name, sheet = f"{len(devices)} x {devices[0].device_kind}", SHEETS[sheet_of(devices[0])]
    machine = Machine(name, len(devices), len(jax.local_devices()), **sheet, is_here=True)
    room = device_memory(jax.local_devices()) or machine.memory_bytes
    return dataclasses.replace(machine, memory_bytes=float(room))
