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
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.hosts import launch
from jaxpar.hosts.group import BIND_ADDRESS, COORDINATOR_ADDRESS

_PLACE_SECONDS = 10  # for Ray to find room; a node that was lost may count for a while


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
        where = {COORDINATOR_ADDRESS: address, BIND_ADDRESS: address}
        environ = {**os.environ, **variables, **where}
        self._guard = launch.start_guard()
        self._process = launch.start_command(command, environ, self._guard, folder)

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


class _Remote:
    """The process of an actor, as `launch` sees it."""

    pid = 0  # none of this machine's

    def __init__(self, ray: Any, host: Any):
        self._ray, self._host, self._end = ray, host, host.wait.remote()
        self.stdout, self.stderr = self._lines("stdout"), self._lines("stderr")

    def poll(self) -> int | None:
        if not self._ray.wait([self._end], timeout=0)[0]:
            return None
        try:
            return self._ray.get(self._end)
        except self._ray.exceptions.RayActorError as error:
            if error.actor_init_failed:
                fact = f"a process cannot start: {error}"
                raise ValueError(
                    f"{fact}\nFix: fix its node, or remove the node from the cluster."
                ) from None
            return -signal.SIGKILL  # the actor is gone, or its node

    def send_signal(self, sig: int, /) -> None:
        self._sent = self._host.send.remote(sig)

    def _lines(self, name: str) -> Iterator[str]:
        with contextlib.suppress(self._ray.exceptions.RayError):  # `poll` hears of it
            for line in self._host.lines.remote(name):
                yield self._ray.get(line)


class OnRay(launch.Launcher):
    """The cluster that RAY_ADDRESS names, or that this machine is part of, as a place for processes.

    Args:
      platform: of the devices: "gpu", or "cpu", whose devices are simulated.
    """

    settle_seconds = 15.0  # Ray may know of a lost actor later than that others miss its process

    def __init__(self, platform: launch.Platform):
        self._platform: launch.Platform = platform
        self._ray: Any = None
        self._room: Any = None

    def find_room(self, least: int, most: int, devices: int, signals: Sequence[int]) -> int:
        """Reserves a placement group for the most processes that there is room for; see `Launcher`.

        Raises:
          ValueError: Ray or its cluster is not there.
        """
        self._ray = self._ray or connect()
        kind = self._platform.upper()
        there = int(self._ray.cluster_resources().get(kind, 0)) // devices
        for count in range(min(most, there), least - 1, -1):
            self._room = self._ray.util.placement_group([{kind: devices}] * count, "SPREAD")
            if any(self._room.wait(1) or signals for _ in range(_PLACE_SECONDS)):
                return count
            self._ray.util.remove_placement_group(self._room)
        return 0

    @contextlib.contextmanager
    def start(self, command: Sequence[str], count: int, devices: int) -> Iterator[list[_Remote]]:
        """The processes of actors in the room that was found; see `Launcher`."""
        ray, room, processes = self._ray, self._room, []
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        own = {"num_cpus": 0, f"num_{self._platform}s": devices, "max_concurrency": 4}
        finder = ray.remote(num_cpus=0, scheduling_strategy=strategy(room, 0))(find_address)
        address = finder.remote()
        shared = {k: v for k, v in os.environ.items() if k.startswith(("JAX", "XLA_"))}
        try:
            for index, variables in enumerate(launch.environs(count, devices, shared)):
                variables["JAX_PLATFORMS"] = "cpu" if self._platform == "cpu" else "cuda,cpu"
                actor = ray.remote(scheduling_strategy=strategy(room, index), **own)(Host)
                host = actor.remote(command, variables, address, os.getcwd())
                processes.append(_Remote(ray, host))
            yield processes
        finally:
            ray.util.remove_placement_group(room)  # and with it the actors
            if sys.exc_info()[0] or any(each.poll() for each in processes):
                # Until none is left that the next start could meet.
                time.sleep(launch.GRACE_SECONDS + 1)


def find_address() -> str:
    """Of this node, with a port that is free there."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        ip = importlib.import_module("ray").util.get_node_ip_address()
        return f"{ip}:{probe.getsockname()[1]}"


def connect() -> Any:
    """Ray, connected to the cluster that RAY_ADDRESS names, or that this machine is part of.

    Raises:
      ValueError: it is not installed, or there is no cluster.
    """
    # A cluster that is no more is given up after 40 s, not 13 minutes.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ValueError("--on ray needs the package ray\nFix: pip install ray.") from error
    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ValueError(
            f"--on ray finds no cluster: {error}\n"
            f"Fix: start one (ray start --head), or set RAY_ADDRESS=host:port."
        ) from error
    signal.signal(signal.SIGTERM, handler)
    return ray
