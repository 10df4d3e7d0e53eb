"""What is wrong with this machine's versions, devices, memory and network, and how to fix it.

    Examined (what there is)  -->  checks, one per subject  -->  findings (ok, warning, error)

A JAX that jaxpar does not run on, or a missing one, already ends the import, with the remedy.
"""

import collections
import dataclasses
import importlib.metadata
import ipaddress
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import jax
from jax._src.clusters import ClusterEnv  # there is no public list
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from jaxpar.base.console import make_console
from jaxpar.base.display import format_bytes, format_count
from jaxpar.base.memory import host_memory, num_cores
from jaxpar.hosts.distributed import PACKAGES
from jaxpar.hosts.group import COORDINATOR_ADDRESS, find_processes, split_address

LITTLE_MEMORY_BYTES = 2 * 10**9  # XLA's compiler and Python alone take about 1 GB
_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
# The variables that gRPC, by which processes find each other, takes its proxy from.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report; whatever is not `ok` has a remedy."""

    level: Literal["ok", "warning", "error"]
    subject: str
    fact: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Examined:
    """What the checks look at.

    Attributes:
      environ: such as `os.environ`.
      python: such as (3, 12, 1).
      requirements: what jaxpar needs; empty if it is not installed.
      versions: of `PACKAGES` and what is required; None where one is missing.
      num_cores: that this process may use.
      memory_bytes: free and in all, of the machine or the container; None if not known.
      devices: platform, kind and memory in bytes (None if not known) of each device of this process;
        a text says why JAX shows none.
      has_nvidia_driver: there are GPUs that JAX could use.
      clusters: names of those of JAX's detectors that find their cluster here.
      resolve: host name -> addresses; OSError if it is unknown.
    """

    environ: Mapping[str, str]
    python: tuple[int, int, int]
    requirements: tuple[Requirement, ...]
    versions: Mapping[str, str | None]
    num_cores: int
    memory_bytes: tuple[int, int] | None
    devices: tuple[tuple[str, str, int | None], ...] | str
    has_nvidia_driver: bool
    clusters: tuple[str, ...]
    resolve: Callable[[str], list[str]]


def main() -> int:
    """Prints the findings about this machine; 1 if one of them is an error, else 0."""
    findings = diagnose(examine())
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        said = Text(finding.fact)
        if finding.remedy:
            said.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(Text(finding.level, style=_COLOURS[finding.level]), finding.subject, said)
    make_console().print(table)
    return int(any(finding.level == "error" for finding in findings))


def examine() -> Examined:
    """This machine. Starts JAX's backend."""
    requirements = _requirements()
    names = (*PACKAGES, *(requirement.name for requirement in requirements))
    return Examined(
        environ=os.environ,
        python=sys.version_info[:3],
        requirements=requirements,
        versions={name: _version(name) for name in names},
        num_cores=num_cores(),
        memory_bytes=host_memory(),
        devices=_devices(),
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        clusters=_detected_clusters(),
        resolve=lambda host: [str(info[4][0]) for info in socket.getaddrinfo(host, None)],
    )


def diagnose(machine: Examined) -> list[Finding]:
    """All findings, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check(machine)]


def check_versions(machine: Examined) -> Iterator[Finding]:
    """A package is missing, or its version is not one that jaxpar runs with."""
    for requirement in machine.requirements:
        version = machine.versions[requirement.name]
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            fact = f"{requirement.name} {version or 'is not installed'}; jaxpar needs {requirement}"
            yield Finding("error", "versions", fact, f"pip install '{requirement}'")
    if not machine.requirements:
        fact = "jaxpar itself is not installed, so what it needs is not known"
        yield Finding("warning", "versions", fact, "pip install -e . in its folder")
    listed = [f"{name} {machine.versions[name]}" for name in PACKAGES if machine.versions[name]]
    python = ".".join(map(str, machine.python))
    yield Finding("ok", "versions", ", ".join([f"python {python}", *listed]))


def check_devices(machine: Examined) -> Iterator[Finding]:
    """JAX shows no devices, or not the GPUs that there are, or simulates more than there are cores."""
    if isinstance(machine.devices, str):
        remedy = "mend what the message names; JAX_PLATFORMS=cpu does without an accelerator"
        yield Finding("error", "devices", f"none: {machine.devices}", remedy)
        return
    counts = collections.Counter((kind, platform) for platform, kind, _ in machine.devices)
    fact = ", ".join(f"{n} x {kind} ({platform})" for (kind, platform), n in counts.items())
    only_cpu = all(platform == "cpu" for platform, _, _ in machine.devices)
    on_request = "cpu" in machine.environ.get("JAX_PLATFORMS", "")
    if machine.has_nvidia_driver and only_cpu and not on_request:
        fact += "; this machine has NVIDIA GPUs, JAX does not use them"
        remedy = "pip install 'jax[cuda12]' or 'jax[cuda13]', as the driver allows"
        yield Finding("warning", "devices", fact, remedy)
    elif only_cpu and len(machine.devices) > machine.num_cores:
        cores = format_count(machine.num_cores, "core")
        fact += f", simulated on {cores}: results are right, speed says nothing"
        remedy = f"measure speed with at most {format_count(machine.num_cores, 'device')}"
        yield Finding("warning", "devices", fact, remedy)
    else:
        yield Finding("ok", "devices", fact)


def check_memory(machine: Examined) -> Iterator[Finding]:
    """Too little to compile."""
    if machine.memory_bytes is None:
        return
    free, total = machine.memory_bytes
    fact = f"{format_bytes(free)} of {format_bytes(total)} free"
    devices = () if isinstance(machine.devices, str) else machine.devices
    if sizes := [size for _, _, size in devices if size is not None]:
        fact += f"; {format_bytes(min(sizes))} on each device"
    if free < LITTLE_MEMORY_BYTES:
        remedy = "end other programs, or take a larger machine: the compiler may be killed"
        yield Finding("warning", "memory", fact, remedy)
    else:
        yield Finding("ok", "memory", fact)


def check_processes(machine: Examined) -> Iterator[Finding]:
    """Settings of several processes: they are incomplete, or the processes do not reach each other."""
    try:
        group = find_processes(machine.environ)
    except ValueError as error:
        fact, _, remedy = str(error).partition("; ")
        yield Finding("error", "processes", fact, remedy)
        yield from _check_proxies(machine, "")  # as soon as it is mended
        return
    detected = f"; JAX detects {', '.join(machine.clusters)}" if machine.clusters else ""
    num_tasks = machine.environ.get("SLURM_NTASKS", "1")
    if group is not None:
        which = "" if group.process_id is None else f", this is number {group.process_id}"
        number = "several" if group.num_processes is None else group.num_processes
        fact = f"{number}, started by {group.launcher}{which}{detected}"
        yield Finding("ok", "processes", fact)
    elif "SLURM_JOB_ID" in machine.environ and num_tasks != "1":
        fact = f"one, in a Slurm allocation for {num_tasks}{detected}"
        yield Finding("warning", "processes", fact, f"srun --ntasks={num_tasks} starts them all")
    else:
        yield Finding("ok", "processes", "one" + (detected or "; no cluster detected"))
    host = ""
    if group is not None and group.coordinator_address is not None:
        host, _ = split_address(group.coordinator_address)
        yield _check_coordinator(machine, group.coordinator_address, host)
    yield from _check_proxies(machine, None if group is None else host)


def _check_coordinator(machine: Examined, address: str, host: str) -> Finding:
    """Process 0 has an address that other machines do not reach."""
    try:
        found = machine.resolve(host)
    except OSError as error:
        fact = f"{host!r} of {address} is unknown here: {error}"
        return Finding("error", "coordinator", fact, "use a name or number of process 0's host")
    loopback = [each for each in found if ipaddress.ip_address(each).is_loopback]
    if not loopback:
        return Finding("ok", "coordinator", f"{address} is {', '.join(dict.fromkeys(found))}")
    fact = f"{address} is {loopback[0]}, which only processes of this machine reach"
    remedy = (
        f"on one machine it is right as it is; else set {COORDINATOR_ADDRESS} to an address of process 0 in "
        f"the network of the others, or remove its name from the loopback line of /etc/hosts"
    )
    return Finding("warning", "coordinator", fact, remedy)


def _check_proxies(machine: Examined, host: str | None) -> Iterator[Finding]:
    """A proxy stands between the processes.

    Args:
      host: of process 0; "" if the environment does not tell, None if there is one process.
    """
    environ = {name.lower(): value for name, value in machine.environ.items() if value}
    found = [name for name in _PROXIES if name in environ]
    if not found:
        return
    fact = f"{', '.join(found)} set"
    spared = next((environ[name] for name in _NO_PROXIES if name in environ), "")
    if host is None:
        yield Finding("ok", "proxies", f"{fact}; a single process does not mind")
    elif host and any(part and host.endswith(part) for part in re.split(r"[,\s]+", spared)):
        yield Finding("ok", "proxies", f"{fact}, but not for {host}")
    else:
        fact += ": the processes may wait for each other until a timeout"
        remedy = f"unset {' '.join(found)}, or export no_proxy={host or 'HOST'}"
        yield Finding("warning", "proxies", fact, remedy)


# In the order of the report.
CHECKS = (check_versions, check_devices, check_memory, check_processes)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> tuple[Requirement, ...]:
    """Of the package as it was installed, without those of extras."""
    try:
        declared = map(Requirement, importlib.metadata.requires("jaxpar") or [])
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(each for each in declared if each.marker is None or each.marker.evaluate())


def _detected_clusters() -> tuple[str, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `check_processes` says it
        return tuple(
            cluster.__name__
            for cluster in ClusterEnv._cluster_types
            if not cluster.opt_in_only_method and cluster.is_env_present()
        )


def _devices() -> tuple[tuple[str, str, int | None], ...] | str:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return str(error)
    memory = [device.memory_stats() or {} for device in devices]
    return tuple(
        (device.platform, device.device_kind, stats.get("bytes_limit"))
        for device, stats in zip(devices, memory, strict=True)
    )
