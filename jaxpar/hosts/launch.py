"""Starts several processes of `python -m jaxpar` here; `docs/` has scripts for Slurm and Kubernetes.

    python -m jaxpar launch --processes 2 --devices-per-process 4 -- train lm --mesh dp2pp2tp2

Each process has simulated devices of its own and reaches the others over the network, as on
several machines. When one fails, all end, with its exit code; with --elastic the others start again
from the last checkpoint. None outlives the launcher by more than 10 s.
"""

import contextlib
import errno
import itertools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal

from jaxpar.base import output
from jaxpar.base.checks import require
from jaxpar.base.display import format_count
from jaxpar.hosts.group import BIND_ADDRESS, COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, SECRET

Platform = Literal["gpu", "cpu"]

COMMANDS = ("train", "evaluate", "predict", "export")
OUT_DIR = "--train.out-dir"
MAX_RESTARTS = 100  # so that a run that always fails ends some day
# How long a process may take to end after SIGTERM: a run saves its state after the step under way, and those
# that wait for a dead one never end.
GRACE_SECONDS = 6.0
_LOOK_SECONDS = 0.05
_REFUSED, _NOT_FINITE = 2, 3  # exit codes that are not those of a process that died
# Reads the numbers of processes, and ends them when the launcher is gone, whatever ended it.
_GUARD = f"""
trap '' HUP INT TERM
while read -r one; do all="$all $one"; done
kill -TERM $all; kill -CONT $all; sleep {GRACE_SECONDS}; kill -KILL $all
"""
# Lines of what Gloo, under JAX's CPU collectives, prints: "[Gloo] Rank 0 is connected to 1 peer ranks.
# Expected number of connected peer ranks is : 1", in pieces, from several threads at once.
_GLOO = re.compile(r"(\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of|:|\d|\s)*\n?")


class Launcher:
    """Where processes run: on this machine, with simulated devices. `on_ray` derives another one.

    Attributes:
      settle_seconds: after a first failure, in which those that failed before it are seen to have done so.
    """

    settle_seconds = 1.5

    def find_room(self, least: int, most: int, devices: int, signals: Sequence[int]) -> int:
        """For how many processes of so many devices there is room now; 0 for fewer than the least."""
        return most if most >= least else 0

    @contextlib.contextmanager
    def start(self, command: Sequence[str], count: int, devices: int) -> Iterator[Sequence[Any]]:
        """Starts them, as of `subprocess.Popen`, and leaves none behind."""
        processes: list[subprocess.Popen[str]] = []
        guard = start_guard()
        try:
            processes.extend(start_command(command, e, guard) for e in environs(count, devices))
            yield processes
        finally:
            for process in processes:
                process.kill()
            guard.kill()
            guard.communicate()


def launch(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int,
    *,
    elastic: bool = False,
    min_processes: int = 1,
    launcher: Launcher | None = None,
) -> int:
    """Runs a command in several processes, and waits for them.

    Their lines appear as they come, on the same stream, after the number of the process: `[0] `. When nobody
    reads them any more they are dropped, and the run continues. SIGINT (Ctrl-C) and SIGTERM are passed on to
    all of them, SIGHUP as SIGTERM; a second one ends them at once.

    Args:
      command: arguments of `python -m jaxpar`.
      elastic: when processes die, start the others again with `train --elastic`, which continues from the
        last checkpoint. A number of processes that the run refuses, as no mesh fits it, is skipped.
      min_processes: with fewer the run is not started again.
      launcher: where they run; None is this machine, where what was lost does not come back.
    Returns:
      0, or the exit code of the first process that failed; 128 and the signal's number if a signal
      ended it.
    Raises:
      ValueError: a number is not positive, the command is not one for several processes, or there is no
        room.
    """
    output.DROPPED.add(errno.EPIPE)
    check_command(command, num_processes, devices_per_process)
    if elastic:
        command = elastic_command(command, num_processes, min_processes)
    elif min_processes != 1:
        fact = f"min_processes={min_processes} needs elastic"
        raise ValueError(f"{fact}\nFix: use --elastic, or leave it out.")
    least, most, code = min_processes if elastic else num_processes, num_processes, 0
    where = launcher or Launcher()
    with _receive_signals() as signals:
        for start in range(1 + MAX_RESTARTS):
            count = where.find_room(least, most, devices_per_process, signals)
            if signals:  # not reached: tests send none between two starts
                return 128 + signals[0]
            if not count and not start:
                raise ValueError(
                    f"no free devices for {format_count(least, 'process', 'es')} with "
                    f"{format_count(devices_per_process, 'device')} each\n"
                    f"Fix: add nodes (ray start --address ADDRESS), or start fewer processes."
                )
            if not count:
                fact = f"too few of {num_processes} processes are left (--min-processes {least})"
                remedy = "start the same command again when more are available."
                _print(f"error: {fact}\nFix: {remedy}", sys.stderr)
                return code
            if start or count < num_processes:
                what = "continuing" if start else "beginning"
                _print(f"{what} with {count} of {num_processes} processes", sys.stderr)
            with where.start(command, count, devices_per_process) as processes:
                code, num_lost = _Watch(processes, signals, where.settle_seconds).wait()
            is_final = code in (0, _NOT_FINITE) or (code == _REFUSED and count == num_processes)
            if not elastic or signals or is_final:
                return code
            most = num_processes if launcher and code != _REFUSED else count - num_lost
        return code


def elastic_command(command: Sequence[str], num_processes: int, min_processes: int) -> list[str]:
    """The command for processes that come and go, at every start of the run.

    Raises:
      ValueError: it does not train, names no folder to continue in, or would remove what is there; or the
        minimum is out of range.
    """
    options = options_of(command)
    if command[0] != "train" or not options.get(OUT_DIR):
        fact = "--elastic needs train and a run folder"
        raise ValueError(f"{fact}\nFix: add {OUT_DIR} FOLDER after -- train.")
    if "--overwrite" in options:
        raise ValueError(
            "--overwrite would remove an elastic run at every start\n"
            "Fix: remove the folder by hand, or name another --train.out-dir."
        )
    if not 1 <= min_processes <= num_processes:
        fact = f"min_processes={min_processes} is out of range"
        raise ValueError(f"{fact}\nFix: use 1 to processes={num_processes}.")
    more = ["--elastic"] * ("--elastic" not in options)
    more += ["--resume-or-begin"] * options.keys().isdisjoint({"--resume", "--resume-or-begin"})
    return [*command, *more]


def check_command(command: Sequence[str], num_processes: int, devices_per_process: int) -> None:
    """Raises a ValueError if a number is not positive, or the command not one for several processes."""
    fact = f"processes={num_processes}, devices_per_process={devices_per_process}: nothing to start"
    require(num_processes >= 1 and devices_per_process >= 1, f"{fact}\nFix: use 1 or more of each.")
    if not command or command[0] not in COMMANDS:
        raise ValueError(
            f"launch starts {', '.join(COMMANDS)}; got {command[0] if command else 'no command'}\n"
            f"Fix: write a command and its arguments after --, such as launch -- train lm --mesh dp2."
        )
    fact = "--simulate after --: launch gives each process its devices"
    require("--simulate" not in options_of(command), f"{fact}\nFix: use --devices-per-process.")


def options_of(command: Sequence[str]) -> dict[str, str]:
    """The options in a command, each with what follows it."""
    found = {}
    for argument, following in itertools.zip_longest(command, command[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            found[name.replace("_", "-")] = value if equals else following
    return found


class _Watch:
    """Sees processes to their end, whatever it is."""

    def __init__(self, processes: Sequence[Any], signals: Sequence[int], settle_seconds: float):
        self._processes, self._signals, self._settle_seconds = processes, signals, settle_seconds
        self._num_forwarded = 0
        self._ends: dict[int, int] = {}  # return codes, in the order of ending
        self._readers = [
            _start_thread(_relay, index, lines, stream)
            for index, each in enumerate(processes)
            for lines, stream in ((each.stdout, sys.stdout), (each.stderr, sys.stderr))
        ]

    def wait(self) -> tuple[int, int]:
        """When all have ended: the exit code, as of `launch`, and how many died by themselves."""
        self._watch(until_failure=True)
        if not self._failed:
            self._wait_for_readers()
            return max(map(_exit_code, self._ends.values()), default=0), 0
        self._watch(self._settle_seconds)
        first, lost, message = self._judge()
        self._send(signal.SIGTERM)
        self._watch(GRACE_SECONDS)
        # Those who were killed now were so neither by us, nor for the loss of another.
        lost |= {index for index, code in self._failed.items() if code == -signal.SIGKILL}
        self._send(signal.SIGKILL)
        self._watch()
        self._wait_for_readers()  # what is said next stands below what the others said
        _print(message, sys.stderr)
        return _exit_code(self._ends[first]), len(lost)

    @property
    def _failed(self) -> dict[int, int]:
        """Return codes of those that have failed: one that was told to stop says so with its own."""
        told = {0, *self._signals, *(128 + number for number in self._signals)}
        return {index: code for index, code in self._ends.items() if abs(code) not in told}

    @property
    def _running(self) -> list[int]:
        """The others; notes who has ended."""
        for index, process in enumerate(self._processes):
            if index not in self._ends and (code := process.poll()) is not None:
                self._ends[index] = code
        return [index for index in range(len(self._processes)) if index not in self._ends]

    def _watch(self, seconds: float = float("inf"), *, until_failure: bool = False) -> None:
        """Passes signals on, until that is over or all have ended."""
        until = time.monotonic() + seconds
        while self._running and time.monotonic() < until and not (until_failure and self._failed):
            if self._num_forwarded < len(self._signals):
                number = self._signals[self._num_forwarded]
                self._send(signal.SIGKILL if self._num_forwarded else number)
                self._num_forwarded += 1
            time.sleep(_LOOK_SECONDS)

    def _wait_for_readers(self) -> None:
        """Until all that was said is printed; not for what a process may have left behind to say more."""
        until = time.monotonic() + GRACE_SECONDS
        while any(reader.is_alive() for reader in self._readers) and len(self._signals) < 2:
            if time.monotonic() > until and not _printing.locked():
                break
            time.sleep(_LOOK_SECONDS)

    def _judge(self) -> tuple[int, set[int], str]:
        """Which failure was the first cause, the processes that are lost, and what to say of it.

        One that misses another may be gone before that other is: a process that was killed takes a while.
        """
        killed = [i for i, code in self._failed.items() if code < 0 and code != -signal.SIGABRT]
        first = (killed or list(self._failed))[0]
        code, total = self._ends[first], len(self._processes)
        end = f"ended with exit code {code}"
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
            end += ", or its machine was lost" * (not self._processes[first].pid)
        others = "; the others were ended" * (total > 1)
        return first, {*killed} or {first}, f"error: process {first} of {total} {end}{others}"

    def _send(self, number: int) -> None:
        for index in self._running:
            for each in (number, signal.SIGCONT):  # one that is stopped hears nothing else
                self._processes[index].send_signal(each)


def start_guard() -> subprocess.Popen[str]:
    """A process that reads the numbers of others, and ends them when this one is gone, whatever ended it."""
    return subprocess.Popen(
        ["sh", "-c", _GUARD],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


def start_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    guard: subprocess.Popen[str],
    folder: str | None = None,
) -> subprocess.Popen[str]:
    """`python -m jaxpar` as a child of this process, which reads what it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpar", *command],
        env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,  # Ctrl-C comes from here alone, and once
    )  # fmt: skip
    print(process.pid, file=guard.stdin, flush=True)
    return process


def _start_thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    """A thread that keeps no process from ending."""
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _exit_code(returncode: int) -> int:
    """Of a process, as a shell has it."""
    return returncode if returncode >= 0 else 128 - returncode


def _relay(index: int, source: Iterable[str], target: IO[str]) -> None:
    """Prints the lines of a process as they come; read to their end, or the process would wait."""
    for line in source:
        if target is sys.stdout or not _GLOO.fullmatch(line):
            _print(f"[{index}] {line.rstrip()}", target)


def _print(line: str, target: IO[str]) -> None:
    """Prints a line as a whole."""
    with _printing:
        print(line, file=target, flush=True)


_printing = threading.Lock()


@contextlib.contextmanager
def _receive_signals() -> Iterator[list[int]]:
    """Gathers the signals that end a run, in a list; SIGHUP, of a terminal that closes, as SIGTERM."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)

    def receive(number: int, _frame: object) -> None:
        received.append(signal.SIGTERM if number == signal.SIGHUP else number)

    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environs(
    num_processes: int, num_devices: int, environ: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """The environment of each process: this one's, where they meet, who it is, and its simulated devices."""
    flags = environ.get("XLA_FLAGS", "").split()
    count = "--xla_force_host_platform_device_count"  # JAX takes this or JAX_NUM_CPU_DEVICES
    # No proxy stands between processes of one machine.
    own = {name: value for name, value in environ.items() if not name.lower().endswith("_proxy")}
    with socket.socket() as probe:  # for a free port
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = {
        "OPENBLAS_NUM_THREADS": "1",  # as of `mesh.simulate_devices`; the launcher's counts
        **own,
        SECRET: secrets.token_hex(),
        COORDINATOR_ADDRESS: address,
        BIND_ADDRESS: address,  # other machines have no business here
        NUM_PROCESSES: str(num_processes),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(count)),
        "PYTHONUNBUFFERED": "1",
    }
    return [{**shared, PROCESS_ID: str(index)} for index in range(num_processes)]
