"""Starts several processes of `python -m jaxpar` here; `scripts` has those for a cluster.

    python -m jaxpar launch --processes 2 --devices-per-process 4 -- train lm --mesh dp2pp2tp2

Each process has simulated devices of its own and reaches the others over the network, as on
several machines. When one fails, all end, with its exit code.
"""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from jaxpar.hosts.distributed import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID
from jaxpar.hosts.scripts import check_command

# How long a process may take to end after SIGTERM; those that wait for a dead one never do.
GRACE_SECONDS = 10.0
# Lines of what Gloo, under JAX's CPU collectives, prints: "[Gloo] Rank 0 is connected to 1 peer ranks.
# Expected number of connected peer ranks is : 1", in pieces, from several threads at once.
_CHATTER = re.compile(
    r"(\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of|:|\d|\s)*\n?"
)


def launch(command: Sequence[str], num_processes: int, devices_per_process: int) -> int:
    """Runs a command in several processes on simulated devices, and waits for them.

    Their lines appear as they come, on the same stream, after the number of the process: `[0] `.
    SIGINT (Ctrl-C) and SIGTERM go on to all of them; a second one ends them at once.

    Args:
      command: arguments of `python -m jaxpar`.
    Returns:
      0, or the exit code of the first process that failed; 128 and the signal's number if a signal
      ended it.
    Raises:
      ValueError: a number is not positive, or the command is not one for several processes.
    """
    check_command(command, num_processes, devices_per_process)
    if "--simulate" in {argument.partition("=")[0] for argument in command}:
        raise ValueError(
            f"launch simulates {devices_per_process} devices in each process already; leave "
            f"--simulate away after --, and use --devices-per-process"
        )
    return _Processes(command, num_processes, devices_per_process).wait()


class _Processes:
    """Started when made; `wait` sees them to their end, whatever it is."""

    def __init__(self, command: Sequence[str], num_processes: int, devices_per_process: int):
        self._signals: list[int] = []
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers, in the order of ending
        self._readers: list[threading.Thread] = []
        self._printing = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._handlers = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        address = f"127.0.0.1:{_free_port()}"
        for index in range(num_processes):
            environ = _environ(os.environ, address, num_processes, index, devices_per_process)
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxpar", *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C comes from here alone, and once
            )
            self._processes.append(process)
            assert process.stdout is not None
            assert process.stderr is not None
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                self._readers.append(self._thread(self._relay, index, source, target))
            self._thread(self._report_end, index)

    def wait(self) -> int:
        """The exit code of all, as `launch` gives it."""
        code, message, forwarded, kill_at = 0, "", 0, float("inf")
        running = set(range(len(self._processes)))
        try:
            while running:
                if forwarded < len(self._signals):
                    self._send(running, self._signals[forwarded])
                    forwarded += 1
                    if forwarded > 1:
                        kill_at = min(kill_at, time.monotonic())
                if time.monotonic() >= kill_at:
                    self._send(running, signal.SIGKILL)
                    kill_at = float("inf")
                try:
                    index = self._ended.get(timeout=0.1)
                except queue.Empty:
                    continue
                running.remove(index)
                returncode = self._processes[index].returncode
                # A run that was told to stop says so with an exit code, which is no failure.
                stopped = {128 + number for number in self._signals} | {-n for n in self._signals}
                if returncode and not code:
                    code = returncode if returncode > 0 else 128 - returncode
                    if returncode not in stopped:
                        message = self._describe(index, returncode)
                        self._send(running, signal.SIGTERM)
                        kill_at = time.monotonic() + GRACE_SECONDS
            for reader in self._readers:
                reader.join(GRACE_SECONDS)
            if message:  # the last line, below what the others said when they lost this one
                self._print(message, sys.stderr)
        finally:
            self._send(running, signal.SIGKILL)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        return code

    def _receive(self, number: int, _frame: object) -> None:
        self._signals.append(number)

    def _send(self, running: set[int], number: int) -> None:
        for index in running:
            self._processes[index].send_signal(number)

    def _describe(self, index: int, returncode: int) -> str:
        end = (
            f"ended with exit code {returncode}"
            if returncode > 0
            else f"was killed by {signal.Signals(-returncode).name}"
        )
        message = f"error: process {index} of {len(self._processes)} {end}"
        return message + "; the others were ended" * (len(self._processes) > 1)

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    def _relay(self, index: int, source: IO[str], target: IO[str]) -> None:
        for line in source:
            if target is sys.stdout or not _CHATTER.fullmatch(line):
                self._print(f"[{index}] {line.rstrip()}", target)

    def _report_end(self, index: int) -> None:
        self._processes[index].wait()
        self._ended.put(index)

    def _print(self, line: str, target: IO[str]) -> None:
        with self._printing:
            print(line, file=target, flush=True)


def _environ(
    environ: Mapping[str, str], address: str, num_processes: int, index: int, num_devices: int
) -> dict[str, str]:
    """The environment of a process: the launcher's, who it is, and its simulated devices."""
    flags = environ.get("XLA_FLAGS", "").split()
    count = "--xla_force_host_platform_device_count"  # JAX takes this or JAX_NUM_CPU_DEVICES
    return {
        # No proxy stands between processes of one machine.
        **{name: value for name, value in environ.items() if not name.lower().endswith("_proxy")},
        COORDINATOR_ADDRESS: address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # other machines have no business here
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
