"""Runs several processes of `python -m jaxpar` on a Ray cluster: an actor has the devices of each.

    ray start --head
    python -m jaxpar launch --on ray --processes 4 --devices-per-process 8 -- train lm --mesh dp8pp4

Ray says where: an actor asks it for as many GPUs as its process has devices, or CPUs, for simulated ones,
and they go to as many nodes as there are: several share a node only where there are fewer. The command is a
child of its actor's, with the Python and the environment that are there (JAX's and XLA's variables are the
launcher's), in the folder that the launcher is in. Its lines come to the launcher. It ends within 10 s of
its actor, and that ends with the raylet of its node, or with the launcher.
"""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.hosts import launch, parent_watchdog
from jaxpar.hosts.group import BIND_ADDRESS, COORDINATOR_ADDRESS
from jaxpar.hosts.parent_watchdog import GRACE_SECONDS
from jaxpar.hosts.scripts import Platform

_PLACE_SECONDS = 10  # for Ray to find room; a node that was lost may count for a while
_SETTLE_SECONDS = 15.0  # after the first failure, for Ray to know of an actor that was lost before
_KILLED = (
    -signal.SIGKILL
)  # also for a process whose actor or node is gone, which gives no return code


class Host:
    """The actor: starts the command as its child, when it is made.

    Args:
      variables: of the environment, beside the actor's own.
      address: of process 0.
      folder: to run in.
    Raises:
      OSError: there is no such folder on this node.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], address: str, folder: str
    ):
        held, self._lifeline = os.pipe()  # which closes when the actor ends
        where = {COORDINATOR_ADDRESS: address, BIND_ADDRESS: address}
        self._process = subprocess.Popen(
            [sys.executable, parent_watchdog.__file__, str(held), *command],
            env={**os.environ, **variables, **where},
            cwd=folder,
            pass_fds=[held],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            errors="replace",
            start_new_session=True,
        )
        os.close(held)

    def lines(self, stream: str) -> Iterator[str]:
        """What it prints on "stdout" or "stderr", as it comes."""
        for line in getattr(self._process, stream):  # noqa: UP028  # Ray sends to a generator
            yield line

    def wait(self) -> int:
        """Its return code, once it has ended."""
        return self._process.wait()

    def send(self, number: int) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)


def find_address() -> str:
    """Of this node, with a port that is free there."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        ip = importlib.import_module("ray").util.get_node_ip_address()
        return f"{ip}:{probe.getsockname()[1]}"


class OnRay:
    """The cluster: called as `launch` does, it starts processes there and sees them to their end.

    Args:
      platform: of the devices, as of `slurm_script`.
      max_processes: how many there are at most.
      min_processes: how many are enough; None if all are needed, and no start follows the first.
    """

    def __init__(self, platform: Platform, max_processes: int, min_processes: int | None = None):
        self._platform, self._most, self._least = platform, max_processes, min_processes
        self._ray: Any = None
        self._room: Any = None  # for the next start

    def __call__(
        self, command: Sequence[str], num_processes: int, num_devices: int, signals: Sequence[int]
    ) -> launch._End:
        """How the processes ended.

        Its `num_lost` is by how many their number is above that for which there is room now: negative if
        there is room for more. After a refusal it is that of one fewer.

        Raises:
          ValueError: Ray or its cluster is not there, or has no room.
        """
        self._ray = self._ray or connect()
        room = self._room or self._find_room(num_processes, num_devices, signals)
        if signals:
            return launch._End(128 + signals[0], 0)
        if room is None:
            raise ValueError(
                f"the Ray cluster has no room for {self._least or num_processes} processes of {num_devices} "
                f"{self._platform}s each; start more nodes (ray start --address), or fewer processes"
            )
        if (count := room.bundle_count) < num_processes:
            launch._say(f"there is room for {count} of {num_processes} processes")
        code = self._run(command, room, num_devices, signals)
        if self._least is None or signals or code in (0, launch._NOT_FINITE):
            return launch._End(code, 0)
        most = count - 1 if code == launch._REFUSED else self._most
        self._room = self._find_room(most, num_devices, signals)
        return launch._End(code, num_processes - (self._room.bundle_count if self._room else 0))

    def _find_room(self, most: int, num_devices: int, signals: Sequence[int]) -> Any:
        """A placement group for the most processes that there is room for; None if they are too few."""
        kind = self._platform.upper()
        there = int(self._ray.cluster_resources().get(kind, 0)) // num_devices
        for count in range(min(most, there), (self._least or most) - 1, -1):
            room = self._ray.util.placement_group([{kind: num_devices}] * count, "SPREAD")
            if any(room.wait(1) or signals for _ in range(_PLACE_SECONDS)):
                return room
            self._ray.util.remove_placement_group(room)
        return None

    def _run(
        self, command: Sequence[str], room: Any, num_devices: int, signals: Sequence[int]
    ) -> int:
        """The exit code of all, or of the first that failed; says which."""
        ray, count, hosts, readers = self._ray, room.bundle_count, [], []
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        own = {"num_cpus": 0, f"num_{self._platform}s": num_devices, "max_concurrency": 4}
        finder = ray.remote(num_cpus=0, scheduling_strategy=place(room, 0))(find_address)
        address = finder.remote()
        shared = {k: v for k, v in os.environ.items() if k.startswith(("JAX", "XLA_"))}
        for index in range(count):
            variables = launch._environ(shared, "", count, index, num_devices)
            variables["JAX_PLATFORMS"] = "cpu" if self._platform == "cpu" else "cuda,cpu"
            actor = ray.remote(scheduling_strategy=place(room, index), **own)(Host)
            hosts.append(actor.remote(command, variables, address, os.getcwd()))
            for name in ("stdout", "stderr"):
                lines = self._lines(hosts[-1], name)
                readers.append(launch._thread(launch._relay, index, lines, getattr(sys, name)))
        try:
            code, failed = self._wait(hosts, signals)
        finally:
            ray.util.remove_placement_group(room)  # and with it the actors that are left
        for reader in readers:
            reader.join(GRACE_SECONDS)
        if failed:
            time.sleep(GRACE_SECONDS + 1)  # until none is left that the next start could meet
            # Those that miss another may end before Ray knows that it is lost.
            index = min(failed, key=lambda i: failed[i] >= 0 or failed[i] == -signal.SIGABRT)
            end, code = f"ended with exit code {failed[index]}", launch._exit_code(failed[index])
            if failed[index] < 0:
                end = f"was killed by {signal.Signals(-failed[index]).name}, or its node was lost"
            others = "; the others were ended" * (count > 1)
            launch._say(f"error: process {index} of {count} {end}{others}")
        return code

    def _lines(self, host: Any, name: str) -> Iterator[str]:
        with contextlib.suppress(self._ray.exceptions.RayError):  # `_wait` hears of it
            for line in host.lines.remote(name):
                yield self._ray.get(line)

    def _wait(self, hosts: Sequence[Any], signals: Sequence[int]) -> tuple[int, dict[int, int]]:
        """The exit code of those that ended as they were told to, and the return codes of others."""
        running = {host.wait.remote(): index for index, host in enumerate(hosts)}
        code, failed, until, sent = 0, dict[int, int](), float("inf"), []
        while running and time.monotonic() < until and len(signals) < 2:
            if signals and not sent:
                sent = [hosts[index].send.remote(signals[0]) for index in running.values()]
            for ref in self._ray.wait(list(running), timeout=0.1)[0]:
                index = running.pop(ref)
                try:
                    returncode = self._ray.get(ref)
                except self._ray.exceptions.RayActorError as error:
                    if error.actor_init_failed:
                        raise ValueError(f"process {index} cannot begin: {error}") from None
                    returncode = _KILLED
                if {-returncode, returncode - 128} & {*signals}:
                    code = code or launch._exit_code(returncode)
                elif returncode and not code:
                    failed[index] = returncode
                    until = min(until, time.monotonic() + _SETTLE_SECONDS)
        if running and not failed:  # a second signal has ended them
            code = launch._exit_code(_KILLED)
        return code, failed


def connect() -> Any:
    """Ray, connected to the cluster that RAY_ADDRESS names, or that this machine is part of.

    Raises:
      ValueError: it is not installed, or there is no cluster.
    """
    os.environ.setdefault(
        "RAY_NUM_REDIS_GET_RETRIES", "1"
    )  # 40 s for a cluster that is no more, not 13 min
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ValueError("--on ray needs the package ray; pip install ray") from error
    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ValueError(
            f"--on ray finds no cluster: {error}; start one (ray start --head), or set RAY_ADDRESS=host:port"
        ) from error
    signal.signal(signal.SIGTERM, handler)
    return ray
