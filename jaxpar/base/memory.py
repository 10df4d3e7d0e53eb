"""The memory and the cores of this machine, and the memory of its devices."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def host_memory() -> tuple[int, int] | None:
    """Free and in all; of the container if that has a limit. None without Linux's files."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not reached: Linux has the file
        return None
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    free, total = kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())  # not reached: a container's
    except (OSError, ValueError):  # no such file, or "max"
        return free, total
    return min(free, limit - used), min(total, limit)  # not reached: a container with a limit


def num_cores() -> int:
    """Those that this process may use; macOS does not tell, and gives all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not reached: Linux tells


def device_memory(devices: Sequence[Any]) -> float | None:
    """Bytes of one of this process's devices, all of one kind; None if it is unknown.

    On a CPU they share the machine's.
    """
    if devices[0].platform == "cpu":
        machine = host_memory()
        return machine and machine[1] / len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")  # not reached: only GPUs and TPUs
