"""The rendezvous of processes before JAX joins them: who has come, who is missing, do their programs agree?

JAX reports neither: a process that waits in vain is aborted after minutes. So process 0 listens on the
coordinator's port until JAX's own service takes it over. Every other process sends a line of JSON, its number
and its facts, and gets one back: the verdict.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import ipaddress
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpar.base.files import read_file, read_json
from jaxpar.hosts.agree import describe_processes, differences, say, waiting
from jaxpar.hosts.group import COORDINATOR_ADDRESS, split_address

# What makes another program of the same sources, or other numbers of the same program.
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint")
_FLAGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# What is written down of a program, and where; how many devices there are is compared as such.
_HARMLESS = re.compile(
    r"xla_(\w+_)?dump_\w+|xla_force_host_platform_device_count|xla_gpu_cuda_data_dir"
)

_AFTER_A_CONFLICT_SECONDS = 5.0  # for the others to come and hear of it
_LINE_SECONDS, _LINE_BYTES = 2.0, 2**16


def program_facts(num_processes: int) -> dict[str, str]:
    """What must be the same in all processes before they join."""
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(str(path.relative_to(package)).encode() + path.read_bytes())
    version = sys.modules[package.name].__version__
    return {
        "the number of processes": str(num_processes),
        "jaxpar": f"{version} (sources {sources.hexdigest()[:12]})",
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        **{name: str(getattr(jax.config, name)) for name in _FLAGS},
        **{f"{name} {flag}": value for name in _VARIABLES for flag, value in _flags_of(name)},
    }


def _flags_of(variable: str) -> Iterator[tuple[str, str]]:
    """The compiler's flags in a variable of the environment that may change a program; the last of equals."""
    text = os.environ.get(variable, "")
    if text and not text.lstrip().startswith("-"):  # XLA takes it for the name of a file of flags
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = read_file(text).decode()
    flags = (flag.lstrip("-").partition("=") for flag in text.split())
    found = {name: value if equals else "true" for name, equals, value in flags}
    yield from ((name, found[name]) for name in sorted(found) if not _HARMLESS.fullmatch(name))


def meet(
    address: str,
    process_id: int,
    num_processes: int,
    facts: Mapping[str, str],
    seconds: float,
    bind_address: str | None = None,
) -> None:
    """Returns when all processes have come, with the same facts.

    Args:
      address: host:port of process 0.
      seconds: after which those that have not come are missing.
      bind_address: that process 0 listens on, as JAX takes it; None is all that it has.
    Raises:
      ValueError: processes are missing, too many, or differ; raised in all that have come.
      OSError: process 0 cannot listen there.
    """
    if process_id == 0:
        _receive(address, bind_address, num_processes, facts, seconds)
    else:
        _report(address, process_id, facts, seconds)


def listen_on(address: str) -> str | None:
    """The address that process 0 binds to: the one that the others know, and no other.

    Whoever reaches the coordinator can take part in the run: it asks for no password.

    Args:
      address: host:port, as all processes know it.
    Returns:
      ip:port; None where that is not known here, so all interfaces are needed: the name means this machine
      itself here, and something else to the others (127.0.1.1 in Debian's /etc/hosts), or the address is that
      of a gateway.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        ip = str(place[0])
        if ipaddress.ip_address(ip).is_loopback and host not in ("localhost", ip):
            return None
        with socket.socket(family) as probe:
            probe.bind((ip, 0))
    except OSError:  # unknown, or of another machine
        return None
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def _receive(
    address: str,
    bind_address: str | None,
    num_processes: int,
    facts: Mapping[str, str],
    seconds: float,
) -> None:
    """The part of process 0."""
    came: dict[int, Mapping[str, str]] = {0: facts}
    conflicts: list[str] = []
    until = float("inf")

    def who_came() -> str:
        missing = describe_processes([n for n in range(num_processes) if n not in came])
        return f"{len(came)} of {num_processes} processes have come, {missing} not yet"

    with contextlib.ExitStack() as connections:
        others: list[socket.socket] = []
        with _listen(address, bind_address) as server:
            server.settimeout(0.5)
            for passed in waiting(seconds):
                if passed:
                    say(f"{who_came()}; waiting for up to {seconds:.0f} s")
                if len(came) == num_processes or time.monotonic() > until:
                    break
                try:
                    connection = connections.enter_context(server.accept()[0])
                except TimeoutError:
                    continue
                connection.settimeout(_LINE_SECONDS)
                match _read_line(connection):
                    case {"process": int(number), "facts": dict(its_facts)}:
                        others.append(connection)
                    case _:  # a stranger
                        continue
                if number in came:
                    conflicts.append(f"two processes have the number {number}")
                came[number] = its_facts
                if conflicts or its_facts != facts:
                    until = min(until, time.monotonic() + _AFTER_A_CONFLICT_SECONDS)
        verdict = ""
        if different := "; ".join(filter(None, [*conflicts, differences(came)])):
            verdict = f"the processes do not agree: {different}; start all of them in the same way"
        elif len(came) < num_processes:
            verdict = (
                f"{who_came()} after {seconds:.0f} s; start all of them, or give all the number of those "
                f"that there are"
            )
        for connection in others:
            with contextlib.suppress(OSError):  # it is gone; JAX will miss it
                connection.sendall(json.dumps({"verdict": verdict}).encode() + b"\n")
    if verdict:
        raise ValueError(verdict)


def _report(address: str, process_id: int, facts: Mapping[str, str], seconds: float) -> None:
    """The part of any other process."""
    line, problem = json.dumps({"process": process_id, "facts": dict(facts)}), ""
    for passed in waiting(seconds):
        if passed:
            say(f"process {process_id} looks for process 0 at {address} ({problem})")
        try:
            with socket.create_connection(split_address(address), _LINE_SECONDS) as connection:
                connection.sendall(line.encode() + b"\n")
                connection.settimeout(seconds + 2 * _AFTER_A_CONFLICT_SECONDS)
                answer = _read_line(connection)
            match answer:
                case {"verdict": ""}:
                    return
                case {"verdict": str(verdict)}:
                    raise ValueError(verdict)
            problem = "what listens there is not process 0 of jaxpar"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(0.2)
    raise ValueError(
        f"process {process_id} has not found process 0 at {address} in {seconds:.0f} s ({problem}); start it "
        f"there, or give all of them its address"
    )


def _listen(address: str, bind_address: str | None) -> socket.socket:
    host, port = split_address(bind_address or f"[::]:{split_address(address)[1]}")
    on_all, both = host == "::", socket.has_dualstack_ipv6()  # the first as JAX by default
    family = socket.AF_INET6 if ":" in host and (both or not on_all) else socket.AF_INET
    try:
        return socket.create_server(
            ("" if on_all else host, int(port)), family=family, dualstack_ipv6=on_all and both
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                f"port {port} is in use on this machine, so process 0 cannot listen at {address}; end what "
                f"listens there, such as an earlier run, or give all processes another port "
                f"({COORDINATOR_ADDRESS})"
            ) from error
        raise OSError(
            f"process 0 cannot listen at {bind_address or address}: {error.strerror or error}; give all "
            f"processes an address of the machine that process 0 runs on ({COORDINATOR_ADDRESS})"
        ) from error


def _read_line(connection: socket.socket) -> Any:
    """An object as a line of JSON; None if there comes none in time, or something else."""
    try:
        with connection.makefile("rb") as lines:
            return read_json(lines.readline(_LINE_BYTES))
    except (OSError, ValueError):
        return None
