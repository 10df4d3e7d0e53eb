"""Starts several processes of `python -m jaxpar` here; `on_ray` does so on Ray, `scripts` has scripts.

    python -m jaxpar launch --processes 2 --devices-per-process 4 -- train lm --mesh dp2pp2tp2

Each process has simulated devices of its own and reaches the others over the network, as on
several machines. When one fails, all end, with its exit code; with --elastic the others start again
from the last checkpoint. None outlives the launcher by more than 10 s.
"""

import contextlib
import dataclasses
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxpar.hosts import parent_watchdog
from jaxpar.hosts.group import BIND_ADDRESS, COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID
from jaxpar.hosts.parent_watchdog import GRACE_SECONDS
from jaxpar.hosts.scripts import MAX_RESTARTS, OUT_DIR, check_command, how_to_go_on, options_of

_SETTLE_SECONDS = 1.5  # after the first failure, to see whether another process had failed before
_REFUSED, _NOT_FINITE = 2, 3  # exit codes that are not those of a process that died
# Lines of what Gloo, under JAX's CPU collectives, prints: "[Gloo] Rank 0 is connected to 1 peer ranks.
# Expected number of connected peer ranks is : 1", in pieces, from several threads at once.
_CHATTER = re.compile(
    r"(\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of|:|\d|\s)*\n?"
)


def launch(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int,
    *,
    elastic: bool = False,
    min_processes: int = 1,
    on: "Callable[[Sequence[str], int, int, Sequence[int]], _End] | None" = None,
) -> int:
    """Runs a command in several processes on simulated devices here, and waits for them.

    Their lines appear as they come, on the same stream, after the number of the process: `[0] `. When nobody
    reads them any more they are dropped, and the run continues. SIGINT (Ctrl-C) and SIGTERM are passed on to
    all of them, SIGHUP as SIGTERM; a second one ends them at once.

    Args:
      command: arguments of `python -m jaxpar`.
      elastic: when processes die, start the others again with `train --elastic`, which continues from the
        last checkpoint. A number of processes that the run refuses, as no mesh fits it, is skipped.
      min_processes: with fewer the run is not started again.
      on: where the processes run instead, such as `OnRay`: called with the command, how many they are, the
        devices of each, and the signals that have come, it returns when all have ended.
    Returns:
      0, or the exit code of the first process that failed; 128 and the signal's number if a signal
      ended it.
    Raises:
      ValueError: a number is not positive, or the command is not one for several processes.
    """
    check_command(command, num_processes, devices_per_process)
    if "--simulate" in options_of(command):
        raise ValueError(
            f"launch simulates {devices_per_process} devices in each process already; leave "
            f"--simulate out after --, and use --devices-per-process"
        )
    if elastic:
        command = elastic_command(command, num_processes, min_processes)
    elif min_processes != 1:
        raise ValueError(
            f"min_processes={min_processes} needs elastic; use --elastic, or leave it out"
        )
    left, num_starts = num_processes, 0
    with _receive_signals() as signals:
        while True:
            run = on or (lambda *what: _Processes(*what).wait())
            end = run(command, left, devices_per_process, signals)
            refused_first = end.code == _REFUSED and left == num_processes
            num_starts += 1
            is_over = end.code in (0, _NOT_FINITE) or num_starts > MAX_RESTARTS
            if not elastic or signals or refused_first or is_over:
                return end.code
            left -= end.num_lost
            if left < min_processes:
                _say(
                    f"error: {left} of {num_processes} processes are left, and --min-processes is "
                    f"{min_processes}; start the same command again when there are more"
                )
                return end.code
            _say(f"continuing with {left} of {num_processes} processes")


def elastic_command(command: Sequence[str], num_processes: int, min_processes: int) -> list[str]:
    """The command for processes that come and go, at every start of the run.

    Raises:
      ValueError: it does not train, names no folder to continue in, or would remove what is there; or the
        minimum is out of range.
    """
    options = options_of(command)
    if not command or command[0] != "train" or not options.get(OUT_DIR):
        raise ValueError(
            f"--elastic continues a run in its folder; write train and {OUT_DIR} FOLDER after --"
        )
    if not 1 <= min_processes <= num_processes:
        raise ValueError(
            f"min_processes={min_processes}: use a number from 1 to processes={num_processes}"
        )
    more = ["--elastic"] * ("--elastic" not in options)
    return [*command, *more, *how_to_go_on(command, options[OUT_DIR])]


@dataclasses.dataclass(frozen=True)
class _End:
    """How processes ended.

    Attributes:
      code: as `launch` gives it.
      num_lost: that died or hung by themselves, not for the others; 0 if none failed. Negative if there is
        room for more now.
    """

    code: int
    num_lost: int


class _Processes:
    """Started when made; `wait` sees them to their end, whatever it is."""

    def __init__(
        self,
        command: Sequence[str],
        num_processes: int,
        devices_per_process: int,
        signals: Sequence[int],
    ):
        self._signals, self._num_forwarded = signals, 0
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers, in the order of ending
        self._readers: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._running: set[int] = set()
        self._code = 0  # of the first that ended as it was told to
        self._failed: dict[int, int] = {}  # return codes of the others, in the order of ending
        # The children have one end, this process alone the other: they notice when it closes.
        held, self._lifeline = os.pipe()
        try:
            address = f"127.0.0.1:{_free_port()}"
            for index in range(num_processes):
                environ = _environ(os.environ, address, num_processes, index, devices_per_process)
                self._start(index, command, environ, held)
        except BaseException:
            self._send(signal.SIGKILL)
            os.close(self._lifeline)
            raise
        finally:
            os.close(held)

    def _start(
        self, index: int, command: Sequence[str], environ: Mapping[str, str], held: int
    ) -> None:
        process = subprocess.Popen(
            [sys.executable, parent_watchdog.__file__, str(held), *command],
            env=environ,
            pass_fds=[held],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes from here alone, and once
        )
        self._processes.append(process)
        self._running.add(index)
        assert process.stdout is not None
        assert process.stderr is not None
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            self._readers.append(_thread(_relay, index, source, target))
        _thread(self._report_end, index)

    def wait(self) -> _End:
        """Returns when all have ended."""
        code, lost, message = 0, set(), ""
        try:
            self._watch(until_failure=True)
            if self._failed:
                self._watch(_SETTLE_SECONDS)
                code, lost, message = self._judge()
                self._send(signal.SIGTERM)
                self._watch(GRACE_SECONDS)
                # Those who were killed now were so neither by us, nor for the loss of another.
                lost |= {i for i, code in self._failed.items() if code == -signal.SIGKILL}
                self._send(signal.SIGKILL)
                self._watch()
            self._wait_for_readers()
            if message:  # the last line, below what the others said when they lost this one
                _say(message)
        finally:
            self._send(signal.SIGKILL)
            os.close(self._lifeline)
        return _End(code or self._code, len(lost))

    def _watch(self, seconds: float = float("inf"), *, until_failure: bool = False) -> None:
        """Passes signals on, and notes who ends, until that is over or all have ended."""
        until = time.monotonic() + seconds
        while self._running and time.monotonic() < until and not (until_failure and self._failed):
            if self._num_forwarded < len(self._signals):
                number = self._signals[self._num_forwarded]
                self._send(signal.SIGKILL if self._num_forwarded else number)
                self._num_forwarded += 1
            with contextlib.suppress(queue.Empty):
                self._note_end(self._ended.get(timeout=0.1))

    def _wait_for_readers(self) -> None:
        """Until all that was said is printed; not for what a process may have left behind to say more."""
        until = time.monotonic() + GRACE_SECONDS
        for reader in self._readers:
            while reader.is_alive() and len(self._signals) < 2:
                if time.monotonic() > until and not _printing.locked():
                    break
                reader.join(0.1)

    def _note_end(self, index: int) -> None:
        self._running.remove(index)
        returncode = self._processes[index].returncode
        # A run that was told to stop says so with an exit code, which is no failure.
        if {-returncode, returncode - 128} & {*self._signals}:
            self._code = self._code or _exit_code(returncode)
        elif returncode and not self._code:
            self._failed[index] = returncode

    def _judge(self) -> tuple[int, set[int], str]:
        """Which failure was the first cause: its exit code, the processes that are lost, and what to say.

        One that misses another may be gone before that other is: a process that was killed takes a while.
        """
        killed = [i for i, code in self._failed.items() if code < 0 and code != -signal.SIGABRT]
        index = (killed or list(self._failed))[0]
        hung = set() if killed else {i for i in self._running if self._is_stopped(i)}
        returncode, total = self._failed[index], len(self._processes)
        end = (
            f"ended with exit code {returncode}"
            if returncode > 0
            else f"was killed by {signal.Signals(-returncode).name}"
        )
        message = f"error: process {index} of {total} {end}" + "; the others were ended" * (
            total > 1
        )
        if hung:
            who = " and ".join(map(str, sorted(hung)))
            message = (
                f"error: process {who} of {total} hung, stopped by a signal (SIGSTOP), so process {index} "
                f"{end}; all were ended"
            )
        return _exit_code(returncode), {*killed} or hung or {index}, message

    def _is_stopped(self, index: int) -> bool:
        """Whether a signal has stopped it: it neither runs nor ends, and the others wait for it."""
        try:
            stat = Path(f"/proc/{self._processes[index].pid}/stat").read_bytes()
        except OSError:
            return False  # it is gone; or this is no Linux
        return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")

    def _send(self, number: int) -> None:
        for index in self._running:
            self._processes[index].send_signal(number)
            if self._is_stopped(index):  # it hears nothing else
                self._processes[index].send_signal(signal.SIGCONT)

    def _report_end(self, index: int) -> None:
        self._processes[index].wait()
        self._ended.put(index)


def _exit_code(returncode: int) -> int:
    """Of a process, as a shell has it."""
    return returncode if returncode > 0 else 128 - returncode


def _relay(index: int, source: IO[str], target: IO[str]) -> None:
    """Prints the lines of a process as they come; read to their end, or the process would wait."""
    for line in source:
        if target is sys.stdout or not _CHATTER.fullmatch(line):
            _print(f"[{index}] {line.rstrip()}", target)


def _print(line: str, target: IO[str]) -> None:
    """Prints a line as a whole; nothing, from the time on when nobody can read the target any more."""
    with _printing:
        try:
            print(line, file=target, flush=True)
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), target.fileno())


def _say(line: str) -> None:
    """Prints a line of the launcher's own; not if another one is stuck, for its reader has paused."""
    if _printing.acquire(timeout=GRACE_SECONDS):
        _printing.release()
        _print(line, sys.stderr)


_printing = threading.Lock()


def _thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


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


def _environ(
    environ: Mapping[str, str], address: str, num_processes: int, index: int, num_devices: int
) -> dict[str, str]:
    """The environment of a process: the launcher's, who it is, and its simulated devices."""
    flags = environ.get("XLA_FLAGS", "").split()
    count = "--xla_force_host_platform_device_count"  # JAX takes this or JAX_NUM_CPU_DEVICES
    return {
        "OPENBLAS_NUM_THREADS": "1",  # as of `mesh.simulate_devices`; the launcher's counts
        # No proxy stands between processes of one machine.
        **{name: value for name, value in environ.items() if not name.lower().endswith("_proxy")},
        COORDINATOR_ADDRESS: address,
        BIND_ADDRESS: address,  # other machines have no business here
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(index),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(count)),
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
