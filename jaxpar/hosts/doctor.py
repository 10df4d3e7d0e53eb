"""What is wrong with this machine's versions, devices, memory and network, and how to fix it.

    Machine (what there is)  -->  checks, one per subject  -->  findings (ok, warning, error)

A JAX that jaxpar does not run on, or a missing one, already ends the import, with the remedy.
"""

import dataclasses
import importlib.metadata
import ipaddress
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import jax
from jax._src.clusters import ClusterEnv  # there is no public list
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from jaxpar.display import format_count
from jaxpar.hosts.group import find_processes
from jaxpar.memory import host_memory
from jaxpar.tables import make_console

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
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
class Machine:
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


def examine() -> Machine:
    """This machine. Starts JAX's backend."""
    requirements = _requirements()
    names = (*PACKAGES, *(requirement.name for requirement in requirements))
    return Machine(
        environ=os.environ,
        python=sys.version_info[:3],
        requirements=requirements,
        versions={name: _version(name) for name in names},
        num_cores=_num_cores(),
        memory_bytes=host_memory(),
        devices=_devices(),
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        clusters=_detected_clusters(),
        resolve=lambda host: [str(info[4][0]) for info in socket.getaddrinfo(host, None)],
    )


def diagnose(machine: Machine) -> list[Finding]:
    """All findings, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check(machine)]


def check_versions(machine: Machine) -> list[Finding]:
    """A package is missing, or its version is not one that jaxpar runs with."""
    findings = []
    for requirement in machine.requirements:
        version = machine.versions[requirement.name]
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            fact = f"{requirement.name} {version or 'is not installed'}; jaxpar needs {requirement}"
            findings.append(Finding("error", "versions", fact, f"pip install '{requirement}'"))
    if not machine.requirements:
        fact = "jaxpar itself is not installed, so what it needs is not known"
        findings.append(Finding("warning", "versions", fact, "pip install -e . in its folder"))
    listed = [f"{name} {machine.versions[name]}" for name in PACKAGES if machine.versions[name]]
    python = ".".join(map(str, machine.python))
    return [*findings, Finding("ok", "versions", ", ".join([f"python {python}", *listed]))]


def check_devices(machine: Machine) -> list[Finding]:
    """JAX shows no devices, or not the GPUs that there are."""
    if isinstance(machine.devices, str):
        remedy = "mend what the message names; JAX_PLATFORMS=cpu does without an accelerator"
        return [Finding("error", "devices", f"none: {machine.devices}", remedy)]
    kinds = [(platform, kind) for platform, kind, _ in machine.devices]
    fact = ", ".join(
        f"{kinds.count(each)} x {each[1]} ({each[0]})" for each in dict.fromkeys(kinds)
    )
    only_cpu = all(platform == "cpu" for platform, _ in kinds)
    if (
        only_cpu
        and machine.has_nvidia_driver
        and "cpu" not in machine.environ.get("JAX_PLATFORMS", "")
    ):
        return [
            Finding(
                "warning",
                "devices",
                f"{fact}; this machine has NVIDIA GPUs, JAX does not use them",
                "pip install 'jax[cuda12]' or 'jax[cuda13]', as the driver allows",
            )
        ]
    return [Finding("ok", "devices", fact)]


def check_simulated(machine: Machine) -> list[Finding]:
    """More simulated devices than cores."""
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    in_flags = re.findall(flag, machine.environ.get("XLA_FLAGS", ""))
    in_variable = machine.environ.get("JAX_NUM_CPU_DEVICES")
    given = {"XLA_FLAGS": in_flags[-1]} if in_flags else {}
    if in_variable is not None:
        given["JAX_NUM_CPU_DEVICES"] = in_variable
    return [
        Finding(
            "warning",
            "simulated",
            f"{name} simulates {count} devices on {format_count(machine.num_cores, 'core')}: results "
            f"are right, speed says nothing",
            f"measure speed with at most {format_count(machine.num_cores, 'device')}",
        )
        for name, count in given.items()
        if count.isdecimal() and int(count) > machine.num_cores
    ]


def check_memory(machine: Machine) -> list[Finding]:
    """Too little to compile."""
    if machine.memory_bytes is None:
        return []
    free, total = machine.memory_bytes
    fact = f"{_gigabytes(free)} of {_gigabytes(total)} free"
    if not isinstance(machine.devices, str):
        sizes = [size for _, _, size in machine.devices if size is not None]
        if sizes:
            fact += f"; {_gigabytes(min(sizes))} on each device"
    if free < LITTLE_MEMORY_BYTES:
        remedy = "end other programs, or take a larger machine: the compiler may be killed"
        return [Finding("warning", "memory", fact, remedy)]
    return [Finding("ok", "memory", fact)]


def check_processes(machine: Machine) -> list[Finding]:
    """Settings of several processes that are incomplete, or an allocation with one process."""
    environ = machine.environ
    try:
        group = find_processes(environ)
    except ValueError as error:
        fact, _, remedy = str(error).partition("; ")
        return [Finding("error", "processes", fact, remedy)]
    detected = f"; JAX detects {', '.join(machine.clusters)}" if machine.clusters else ""
    if group is not None:
        which = "" if group.process_id is None else f", this is number {group.process_id}"
        number = "several" if group.num_processes is None else group.num_processes
        return [
            Finding("ok", "processes", f"{number}, started by {group.launcher}{which}{detected}")
        ]
    num_tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and num_tasks != "1":
        fact = f"one, in a Slurm allocation for {num_tasks}{detected}"
        return [Finding("warning", "processes", fact, f"srun --ntasks={num_tasks} starts them all")]
    return [Finding("ok", "processes", "one" + (detected or "; no cluster detected"))]


def check_coordinator(machine: Machine) -> list[Finding]:
    """Process 0 has an address that other machines do not reach."""
    address, num_hosts = _coordinator(machine)
    if address is None:
        return []
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = machine.resolve(host)
    except OSError as error:
        fact = f"{host!r} of {address} is unknown here: {error}"
        return [Finding("error", "coordinator", fact, "use a name or number of process 0's host")]
    loopback = [each for each in found if ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    if not loopback or num_hosts == 1:
        return [Finding("ok", "coordinator", f"{address} is {', '.join(dict.fromkeys(found))}")]
    return [
        Finding(
            "warning" if num_hosts is None else "error",
            "coordinator",
            f"{address} is {loopback[0]}, which only processes of this machine reach"
            + ("" if num_hosts is None else f"; there are {num_hosts} machines"),
            "set JAX_COORDINATOR_ADDRESS to an address of process 0 in the network of the others "
            "(on one machine alone it is right as it is)"
            if num_hosts is None
            else "set JAX_COORDINATOR_ADDRESS to an address of process 0 in the network of the "
            "others, or remove its name from the loopback line of /etc/hosts",
        )
    ]


def check_proxies(machine: Machine) -> list[Finding]:
    """A proxy stands between the processes."""
    environ = {name.lower(): value for name, value in machine.environ.items() if value}
    found = [name for name in _PROXIES if name in environ]
    if not found:
        return []
    fact = f"{', '.join(found)} set"
    try:
        alone = find_processes(machine.environ) is None
    except ValueError:
        alone = False  # as soon as it is mended
    if alone:
        return [Finding("ok", "proxies", f"{fact}; a single process does not mind")]
    address, _ = _coordinator(machine)
    host = "" if address is None else address.rpartition(":")[0].strip("[]")
    spared = next((environ[name] for name in _NO_PROXIES if name in environ), "")
    if host and any(part and host.endswith(part) for part in re.split(r"[,\s]+", spared)):
        return [Finding("ok", "proxies", f"{fact}, but not for {host}")]
    return [
        Finding(
            "warning",
            "proxies",
            f"{fact}: the processes may wait for each other until a timeout",
            f"unset {' '.join(found)}, or export no_proxy={host or 'HOST'}",
        )
    ]


# Subjects, in the order of the report.
CHECKS = (
    check_versions,
    check_devices,
    check_simulated,
    check_memory,
    check_processes,
    check_coordinator,
    check_proxies,
)


def _coordinator(machine: Machine) -> tuple[str | None, int | None]:
    """host:port of process 0 and the number of machines, as far as the environment tells them."""
    try:
        group = find_processes(machine.environ)
    except ValueError:
        return None, None
    return (None, None) if group is None else (group.coordinator_address, group.num_hosts)


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


def _num_cores() -> int:
    """Those that this process may use; macOS does not tell, and gives all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
