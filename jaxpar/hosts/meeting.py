"""Processes meet before JAX joins them: who has come, who is missing, and whether their programs agree.

JAX reports neither: a process that waits in vain is aborted after minutes. So process 0 listens on the
coordinator's port until JAX's own service takes it over. Every other process sends a line of JSON, its number
and its facts, and gets one back: the verdict.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpar.files import read_file, read_json
from jaxpar.hosts.agree import describe_processes, differences

# What makes another program of the same sources, or other numbers of the same program.
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint")
_FLAGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# What is written down of a program, and where; how many devices there are is compared as such.
_HARMLESS = re.compile(
    r"xla_(\w+_)?dump_\w+|xla_force_host_platform_device_count|xla_gpu_cuda_data_dir"
)

_NOTICE_SECONDS = 15.0
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
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
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


def _receive(
    address: str,
    bind_address: str | None,
    num_processes: int,
    facts: Mapping[str, str],
    seconds: float,
) -> None:
    """The part of process 0."""
    came: dict[int, Mapping[str, str]] = {0: facts}
    connections: list[socket.socket] = []
    conflicts: list[str] = []
    began = time.monotonic()
    until, notice_at = began + seconds, began + _NOTICE_SECONDS
    try:
        with _listen(address, bind_address) as server:
            server.settimeout(0.5)
            while len(came) < num_processes and time.monotonic() < until:
                if time.monotonic() > notice_at:
                    _say(f"{_who_came(came, num_processes)}; waiting for up to {seconds:.0f} s")
                    notice_at += 2 * _NOTICE_SECONDS
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                connection.settimeout(_LINE_SECONDS)
                match _read_line(connection):
                    case {"process": int(number), "facts": dict(its_facts)}:
                        connections.append(connection)
                    case _:
                        connection.close()  # a stranger
                        continue
                if number in came:
                    conflicts.append(f"two processes have the number {number}")
                came[number] = its_facts
                if conflicts or its_facts != facts:
                    until = min(until, time.monotonic() + _AFTER_A_CONFLICT_SECONDS)
        found = differences(came)
        if conflicts or found:
            verdict = "; ".join([*conflicts, *([found] if found else [])])
            verdict = f"the processes do not agree: {verdict}; start all of them in the same way"
        elif len(came) < num_processes:
            verdict = (
                f"{_who_came(came, num_processes)} after {seconds:.0f} s; start all of them, or give all the "
                f"number of those that there are"
            )
        else:
            verdict = ""
        for connection in connections:
            connection.settimeout(_LINE_SECONDS)
            try:
                connection.sendall(json.dumps({"verdict": verdict}).encode() + b"\n")
            except OSError:
                continue  # it is gone; JAX will miss it
    finally:
        for connection in connections:
            connection.close()
    if verdict:
        raise ValueError(verdict)


def _report(address: str, process_id: int, facts: Mapping[str, str], seconds: float) -> None:
    """The part of any other process."""
    host, _, port = address.rpartition(":")
    target = host.strip("[]"), int(port)
    began = time.monotonic()
    until, notice_at = began + seconds, began + _NOTICE_SECONDS
    while True:
        try:
            with socket.create_connection(target, timeout=_LINE_SECONDS) as connection:
                line = json.dumps({"process": process_id, "facts": dict(facts)})
                connection.sendall(line.encode() + b"\n")
                connection.settimeout(seconds + 2 * _AFTER_A_CONFLICT_SECONDS)
                answer = _read_line(connection)
            match answer:
                case {"verdict": ""}:
                    return
                case {"verdict": str(verdict)}:
                    raise ValueError(verdict)
            problem = "what listens there is no process 0 of jaxpar"
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() > until:
            raise ValueError(
                f"process {process_id} has not found process 0 at {address} in {seconds:.0f} s "
                f"({problem}); start it there, or give all of them its address"
            )
        if time.monotonic() > notice_at:
            _say(f"process {process_id} looks for process 0 at {address} ({problem})")
            notice_at += 2 * _NOTICE_SECONDS
        time.sleep(0.2)


def _listen(address: str, bind_address: str | None) -> socket.socket:
    host, _, port = (bind_address or f"[::]:{address.rpartition(':')[2]}").rpartition(":")
    host, both = host.strip("[]"), socket.has_dualstack_ipv6()
    try:
        if host == "::":  # of JAX by default: all interfaces
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", int(port)), family=family, dualstack_ipv6=both)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                f"port {port} is in use on this machine, so process 0 cannot listen at {address}; end what "
                f"listens there, such as an earlier run, or give all processes another port "
                f"(JAX_COORDINATOR_ADDRESS)"
            ) from error
        raise OSError(
            f"process 0 cannot listen at {bind_address or address}: {error.strerror or error}; give all "
            f"processes an address of the machine that process 0 runs on (JAX_COORDINATOR_ADDRESS)"
        ) from error


def _read_line(connection: socket.socket) -> Any:
    """An object as a line of JSON; None if there comes none in time, or something else."""
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < _LINE_BYTES:
            if not (part := connection.recv(4096)):
                return None
            text += part
        return read_json(text)
    except (OSError, ValueError):
        return None


def _who_came(came: Collection[int], num_processes: int) -> str:
    missing = [number for number in range(num_processes) if number not in came]
    return (
        f"{len(came)} of {num_processes} processes have come, {describe_processes(missing)} not yet"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
