"""Machines as a few numbers: those that data sheets promise, and those that `calibrate` measured."""

import dataclasses
import json
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxpar.files import read_file, read_json, whole_file


@dataclasses.dataclass(frozen=True)
class Work:
    """A piece of a step as a machine sees it, the same wherever in the step it runs.

    Attributes:
      kind: which samples give its slowness: a piece of a model (`pieces.works_of`), or "" for none.
      sizes: what the slowness depends on, each at least 1.
      flops, bytes: of its matmuls, and moved between the device and its memory.
      turns: loop iterations that run one after the other.
    """

    kind: str
    sizes: tuple[int, ...]
    flops: float
    bytes: float
    turns: int = 0


@dataclasses.dataclass(frozen=True)
class Sample:
    """How many times as long as its roofline a piece of work took; `kind` and `sizes` as in `Work`."""

    kind: str
    sizes: tuple[int, ...]
    slowness: float

    def __post_init__(self):
        _check_positive(slowness=self.slowness, **{f"size {n}": n for n in self.sizes})


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins the devices along a mesh axis.

    Attributes:
      bytes_per_second: sent by a device, in one direction.
      seconds: the latency: from the start of an empty message to its arrival.
      sizes: where it was measured: (bytes that a device sends in a collective, bytes per second), ascending.
    """

    bytes_per_second: float
    seconds: float
    sizes: tuple[tuple[float, float], ...] = ()

    def __post_init__(self):
        _check_positive(bytes_per_second=self.bytes_per_second)
        _check_positive(0, seconds=self.seconds)
        for size, rate in self.sizes:
            _check_positive(size=size, rate=rate)

    def time(self, num_bytes: float, messages: int) -> float:
        """Seconds of a collective in which a device sends `num_bytes`, in `messages` one after the other.

        Between measured sizes the logarithm of the rate is interpolated.
        """
        rate = self.bytes_per_second
        if self.sizes and num_bytes > 0:
            sizes, rates = np.log(self.sizes).T
            rate = math.exp(np.interp(math.log(num_bytes), sizes, rates))
        return self.seconds * messages + num_bytes / rate


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A machine: equal devices, grouped into hosts.

    Attributes:
      name, source: of the machine, and of its numbers.
      flops_per_second: of a device at its best, by the dtype of the matmuls' inputs; float32 as JAX
        multiplies it by default.
      memory_bytes, memory_bytes_per_second: of a device.
      host_bytes_per_second: between a device and its host's memory, in one direction.
      near, far: the links within a host, and between hosts.
      devices_per_host: how many the near links join.
      loop_seconds: the least time of one iteration of a loop, such as a time step.
      tick_seconds: the time of a pipeline's tick in which there is nothing to compute or to send.
      platform: as JAX calls it.
      samples: measured pieces of a step; without any, the machine is taken to reach its peaks.
    Raises:
      ValueError: a number is not positive (for times: negative) or not finite; memory may be infinite.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    host_bytes_per_second: float
    near: Link
    far: Link
    devices_per_host: int
    loop_seconds: float
    tick_seconds: float
    platform: str
    source: str
    samples: tuple[Sample, ...] = ()

    def __post_init__(self):
        rates = ("memory_bytes_per_second", "host_bytes_per_second", "devices_per_host")
        _check_positive(
            **{name: getattr(self, name) for name in rates},
            **{f"flops_per_second of {d}": rate for d, rate in self.flops_per_second.items()},
        )
        _check_positive(0, loop_seconds=self.loop_seconds, tick_seconds=self.tick_seconds)
        if not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes={self.memory_bytes}: must be positive, such as 16e9")

    def link(self, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Link:
        """The slowest link among devices that differ along the axes of a mesh.

        Consecutive devices in the mesh's order, its last axis fastest, share a host.

        Args:
          axes: one or more.
          sizes: of all axes, in the mesh's order.
        """
        names = list(sizes)
        reach = 1  # devices from the first to the last of one group
        for name in names[min(names.index(axis) for axis in axes) :]:
            reach *= sizes[name]
        return self.near if reach <= self.devices_per_host else self.far

    def seconds(self, work: Work, dtype: str = "float32") -> float:
        """Seconds that a device needs for a piece of work: its roofline times the slowness of like samples.

        Between samples the logarithm of the slowness is interpolated by inverse distance (Shepard 1968), in
        the logarithms of the sizes; at a sample it is the sample's own.

        Raises:
          ValueError: `flops_per_second` lacks the dtype.
        """
        if dtype not in self.flops_per_second:
            raise ValueError(
                f"{self.name} has no flops_per_second for dtype={dtype!r}, only for "
                f"{', '.join(self.flops_per_second)}"
            )
        return self.roofline(work, dtype) * math.exp(self._log_slowness(work))

    def roofline(self, work: Work, dtype: str = "float32") -> float:
        """The least seconds possible (Williams et al. 2009, with a least time per loop iteration)."""
        return max(self._limits(work, dtype).values())

    def limit(self, work: Work, dtype: str = "float32") -> str:
        """Which attribute of the work takes the longest: "flops", "bytes" or "turns"."""
        limits = self._limits(work, dtype)
        return max(limits, key=limits.__getitem__)

    def _limits(self, work: Work, dtype: str) -> dict[str, float]:
        return {
            "flops": work.flops / self.flops_per_second[dtype],
            "bytes": work.bytes / self.memory_bytes_per_second,
            "turns": work.turns * self.loop_seconds,
        }

    def _log_slowness(self, work: Work) -> float:
        weights, total = 0.0, 0.0
        for sample in self.samples:
            if sample.kind == work.kind:
                pairs = zip(sample.sizes, work.sizes, strict=True)
                distance = sum(math.log(a / b) ** 2 for a, b in pairs)
                weight = 1 / max(distance, 1e-9) ** 2
                weights, total = weights + weight, total + weight * math.log(sample.slowness)
        return total / weights if weights else 0.0

    def save(self, path: str | Path) -> None:
        """Writes a JSON file for `load`; missing folders are created.

        Raises:
          OSError: the file cannot be written.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Hardware":
        """Reads what `save` wrote.

        Raises:
          OSError: the file cannot be read.
          ValueError: it does not describe hardware.
        """
        content = read_file(path, "the machine")
        try:
            fields = read_json(content)
            near, far = (
                Link(**{**link, "sizes": tuple(map(tuple, link["sizes"]))})
                for link in (fields.pop("near"), fields.pop("far"))
            )
            samples = tuple(
                Sample(**{**sample, "sizes": tuple(sample["sizes"])})
                for sample in fields.pop("samples")
            )
            return cls(**fields, near=near, far=far, samples=samples)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} describes no hardware ({error}); write it with calibrate().save(path)"
            ) from error


def _check_positive(zero: float | None = None, **numbers: float) -> None:
    """Raises if one of the numbers is not finite, or not above zero; one that equals `zero` is allowed."""
    for name, value in numbers.items():
        if not (0 < value < sys.float_info.max or value == zero):
            least = "positive" if zero is None else "0 or more"
            raise ValueError(f"{name}={value}: must be {least} and finite")


def _machines() -> Iterator[Hardware]:
    """Those of `machines.toml`."""
    tables = tomllib.loads(Path(__file__).with_name("machines.toml").read_text("utf-8"))
    for name, table in tables.items():
        near, far = (Link(**table.pop(link)) for link in ("near", "far"))
        yield Hardware(name=name, near=near, far=far, **table)


MACHINES: Mapping[str, Hardware] = {machine.name: machine for machine in _machines()}
