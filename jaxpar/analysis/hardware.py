"""Machines as a few numbers: those that data sheets promise, and those that `calibrate` measures."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.analysis.collectives import sent_bytes
from jaxpar.doctor import host_memory

# Those that a step uses, by their names in HLO.
COLLECTIVES = ("all-reduce", "all-gather", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins the devices along a mesh axis.

    Attributes:
      bytes_per_second: that a device sends, in one direction.
      seconds: from the start of a message to its arrival, when it is empty.
    """

    bytes_per_second: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A machine of equal devices, in hosts.

    Attributes:
      name, source: of the machine, and of the numbers.
      flops_per_second: of a device at its best, by the dtype of the matmuls' inputs; float32 as JAX
        multiplies it by default.
      memory_bytes, memory_bytes_per_second: of a device.
      near, far: the links within a host, and between hosts.
      devices_per_host: how many the near links join.
      loop_seconds: that one turn of a loop takes at least, such as a time step.
      platform: of JAX.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    near: Link
    far: Link
    devices_per_host: int
    loop_seconds: float
    platform: str
    source: str

    def link(self, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Link:
        """The slowest link among devices that differ along the axes of a mesh.

        Devices that follow each other in the mesh's order, its last axis fastest, share a host.

        Args:
          sizes: of all axes, in the mesh's order.
        """
        names = list(sizes)
        reach = 1  # devices from the first to the last of a group that lies close together
        for name in names[min(names.index(axis) for axis in axes) :]:
            reach *= sizes[name]
        return self.near if reach <= self.devices_per_host else self.far

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, for `load`."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Hardware":
        """What `save` wrote.

        Raises:
          ValueError: the file is of another kind.
        """
        try:
            fields = json.loads(Path(path).read_text())
            near, far = Link(**fields.pop("near")), Link(**fields.pop("far"))
            return cls(**fields, near=near, far=far)
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} describes no hardware ({error}); write it with calibrate().save(path)"
            ) from error


_GPU_LOOP = 10e-6  # two or three kernels; a launch takes 3 to 5 microseconds
_INFINIBAND = 5e-6

# Peak numbers, without sparsity. Bandwidths of links are one way: half of what is called bidirectional.
MACHINES: Mapping[str, Hardware] = {
    machine.name: machine
    for machine in (
        Hardware(
            name="h100",
            flops_per_second={"float32": 494.7e12, "bfloat16": 989.4e12},
            memory_bytes=80e9,
            memory_bytes_per_second=3.35e12,
            near=Link(450e9, 3e-6),
            far=Link(50e9, _INFINIBAND),
            devices_per_host=8,
            loop_seconds=_GPU_LOOP,
            platform="gpu",
            source="NVIDIA H100 SXM data sheet (TF32, BF16, HBM3, NVLink 4); DGX H100: one 400 Gb/s "
            "InfiniBand port a GPU; latencies are assumptions",
        ),
        Hardware(
            name="h200",
            flops_per_second={"float32": 494.7e12, "bfloat16": 989.4e12},
            memory_bytes=141e9,
            memory_bytes_per_second=4.8e12,
            near=Link(450e9, 3e-6),
            far=Link(50e9, _INFINIBAND),
            devices_per_host=8,
            loop_seconds=_GPU_LOOP,
            platform="gpu",
            source="NVIDIA H200 SXM data sheet (HBM3e; the rest as H100); latencies are assumptions",
        ),
        Hardware(
            name="a100",
            flops_per_second={"float32": 156e12, "bfloat16": 312e12},
            memory_bytes=80e9,
            memory_bytes_per_second=2.039e12,
            near=Link(300e9, 3e-6),
            far=Link(25e9, _INFINIBAND),
            devices_per_host=8,
            loop_seconds=_GPU_LOOP,
            platform="gpu",
            source="NVIDIA A100 80GB SXM data sheet (TF32, BF16, HBM2e, NVLink 3); DGX A100: one 200 Gb/s "
            "InfiniBand port a GPU; latencies are assumptions",
        ),
        Hardware(
            name="tpu-v5e",
            flops_per_second={"float32": 197e12, "bfloat16": 197e12},
            memory_bytes=16e9,
            memory_bytes_per_second=819e9,
            near=Link(100e9, 1e-6),
            far=Link(3.1e9, 20e-6),
            devices_per_host=256,
            loop_seconds=2e-6,
            platform="tpu",
            source="Google Cloud TPU v5e documentation: 197 TFLOPs bf16 (float32 in one bf16 pass, JAX's "
            "default), 16 GB at 819 GB/s, 1600 Gb/s a chip over four links, of which a ring uses two, one "
            "way each; a pod of 256 as one host, 6.4 Tb/s between pods; latencies are assumptions",
        ),
        Hardware(
            name="laptop-cpu",
            flops_per_second={"float32": 0.38e12, "bfloat16": 0.1e12},
            memory_bytes=16e9,
            memory_bytes_per_second=50e9,
            near=Link(10e9, 20e-6),
            far=Link(0.1e9, 100e-6),
            devices_per_host=64,
            loop_seconds=5e-6,
            platform="cpu",
            source="4 cores of 3 GHz with two AVX2 multiply-adds a cycle, two channels of DDR4-3200, gigabit "
            "Ethernet; the rest are assumptions, and calibrate() knows better",
        ),
    )
}


def find_machine(name: str) -> Hardware:
    """One of `MACHINES`, or what a file of that name describes.

    Raises:
      ValueError: there is neither.
    """
    if name in MACHINES:
        return MACHINES[name]
    if Path(name).is_file():
        return Hardware.load(name)
    raise ValueError(
        f"unknown machine {name!r}; use {', '.join(MACHINES)}, or a file that calibrate().save() wrote"
    )


def calibrate(num_seconds: float = 20.0) -> Hardware:
    """Measures the devices that JAX has, all of one kind: matmuls, a copy, an empty loop, each collective.

    Every measurement is the median of as many runs as fit in its part of the time, after one that compiles.
    Links are all called near; with one device they are those of its memory. Memory is what the device
    says, or on a CPU what the machine has.

    Args:
      num_seconds: of measuring, in all. Compiling adds a few seconds.
    Raises:
      ValueError: `num_seconds` is not positive.
    """
    if num_seconds <= 0:
        raise ValueError(f"num_seconds={num_seconds}: must be positive")
    devices = jax.devices()
    collectives = COLLECTIVES if len(devices) > 1 else ()
    part = num_seconds / (4 + 2 * len(collectives))
    size = 1024 if devices[0].platform == "cpu" else 8192

    def matmul_rate(dtype: Any) -> float:
        x = jnp.ones((size, size), dtype)
        return 2 * size**3 / _seconds(jax.jit(jnp.matmul), x, x, part=part)

    numbers = jnp.ones(2**25 if devices[0].platform == "cpu" else 2**28, jnp.float32)
    copy = _seconds(jax.jit(lambda x: x + 1), numbers, part=part)
    memory_rate = 2 * numbers.nbytes / copy  # read once, written once
    turns = 1000
    loop = jax.jit(lambda x: lax.fori_loop(0, turns, lambda _, x: jnp.sin(x @ x), x))
    loop_seconds = _seconds(loop, jnp.ones((8, 8)), part=part) / turns
    near = Link(memory_rate, 0.0)
    if collectives:
        links = [_measure_link(op, devices, part) for op in collectives]
        near = Link(
            min(link.bytes_per_second for link in links), max(link.seconds for link in links)
        )
    return Hardware(
        name=f"{len(devices)} x {devices[0].device_kind}",
        flops_per_second={
            "float32": matmul_rate(jnp.float32),
            "bfloat16": matmul_rate(jnp.bfloat16),
        },
        memory_bytes=_memory_bytes(devices),
        memory_bytes_per_second=memory_rate,
        near=near,
        far=near,
        devices_per_host=len(devices),
        loop_seconds=loop_seconds,
        platform=devices[0].platform,
        source=f"measured by calibrate() with jax {jax.__version__}",
    )


def _measure_link(op: str, devices: list[Any], part: float) -> Link:
    """Of a collective among all devices: seconds of a small one, and bytes a second of a large one."""
    n = len(devices)
    mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    run = {
        "all-reduce": lambda x: lax.psum(x, "x"),
        "all-gather": lambda x: lax.all_gather(x, "x", tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, "x", [(k, (k + 1) % n) for k in range(n)]),
    }[op]
    out = P() if op != "collective-permute" else P("x")
    function = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False)
    )

    def seconds(elements: int) -> float:
        x = jax.device_put(jnp.ones(n * elements), NamedSharding(mesh, P("x")))
        return _seconds(function, x, part=part)

    elements = 2**20
    small, large = seconds(8), seconds(elements)
    payload = 4 * elements * (n if op == "all-gather" else 1)
    return Link(sent_bytes(op, payload, n) / max(large - small, 1e-9), small)


def _seconds(function: Callable[..., Any], *args: Any, part: float) -> float:
    """The median time of a call."""
    jax.block_until_ready(function(*args))
    times, start = [], time.perf_counter()
    while not times or time.perf_counter() - start < part:
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _memory_bytes(devices: list[Any]) -> float:
    """Of one device; simulated ones share what the machine has. Infinity if nobody knows."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return float(limit)
    memory = host_memory()
    return memory[1] / len(devices) if memory else float("inf")
