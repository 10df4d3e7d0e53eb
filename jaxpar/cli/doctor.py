"""Versions, devices and memory of this machine, and missing packages.

If JAX is missing or of an unsupported version, the import of jaxpar already fails and names the remedy.
"""

import collections
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from packaging.requirements import Requirement

from jaxpar.base.console import facts_table, make_console
from jaxpar.base.display import format_bytes, format_count
from jaxpar.base.memory import host_memory, num_cores
from jaxpar.hosts.distributed import PACKAGES

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def main() -> int:
    """Prints what is installed and what is missing; returns 1 if something is missing, else 0."""
    missing = list(missing_packages())
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        devices = []
        remedy = "fix the cause that the message names, or set JAX_PLATFORMS=cpu."
        missing.append(f"devices: {error}\nFix: {remedy}")
    counts = collections.Counter(f"{each.device_kind} ({each.platform})" for each in devices)
    has_accelerator = any(each.platform != "cpu" for each in devices)
    asks_for_cpu = "cpu" in os.environ.get("JAX_PLATFORMS", "")
    if NVIDIA_DRIVER.exists() and devices and not has_accelerator and not asks_for_cpu:
        missing.append(
            "NVIDIA GPUs: this machine has some, but JAX does not use them\n"
            "Fix: pip install 'jax[cuda12]' or 'jax[cuda13]', whichever the driver supports."
        )
    versions = ((name, _version(name)) for name in PACKAGES)
    known = [f"{name} {version}" for name, version in versions if version is not None]
    shown = [f"{number} x {kind}" for kind, number in counts.items()] or ["none"]
    rows = [
        ("versions", ", ".join([f"python {platform.python_version()}", *known])),
        ("devices", ", ".join(shown)),
        ("cores", format_count(num_cores(), "core")),
        ("memory", describe_memory(devices)),
        *(("missing", each) for each in missing),
    ]
    make_console().print(facts_table(rows))
    return int(bool(missing))


def missing_packages() -> Iterator[str]:
    """Packages that jaxpar needs, as it was installed, and that are not here in the right version."""
    try:
        declared = map(Requirement, importlib.metadata.requires("jaxpar") or [])
    except importlib.metadata.PackageNotFoundError:
        yield "jaxpar: not installed as a package\nFix: pip install -e . in its folder."
        return
    for needed in declared:
        version = _version(needed.name)
        if needed.marker is not None and not needed.marker.evaluate():
            continue  # of an extra
        if version is None or not needed.specifier.contains(version, prereleases=True):
            got = version or "no version"
            yield f"{needed.name}: expected {needed}, got {got}\nFix: pip install '{needed}'."


def describe_memory(devices: Sequence[Any]) -> str:
    """Free and total memory of this machine and of each device, as far as known."""
    known = list[str]()
    if (memory := host_memory()) is not None:
        known.append("{} of {} free".format(*map(format_bytes, memory)))
    sizes = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    if any(sizes):
        known.append(f"{format_bytes(min(filter(None, sizes)))} on each device")
    return "; ".join(known) or "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
