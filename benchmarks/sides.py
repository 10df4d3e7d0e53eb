"""Speed comparisons: every side is a process on cores of its own, and the sides take turns.

A turn is a few steps. The time of a turn is held against that of the first side's turn in the same round,
so that whatever slows the machine for a while slows both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat


def peak_mib_of_host() -> float:
    """The largest resident memory of this process so far, MiB."""
    with open("/proc/self/status") as status:
        kib = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    return int(kib) / 1024


def processor() -> str:
    """What the machine calls its processor."""
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def serve(
    step: Callable[[], SupportsFloat], peak_mib: Callable[[], float] = peak_mib_of_host
) -> None:
    """What a side's process does: two steps to warm up, then as many as each line of the input says.

    Args:
      step: runs one training step, or puts it into a GPU's queue, and returns its loss; the number is asked
        for at the end of a turn.
      peak_mib: the largest memory so far, MiB.
    """
    _say({"losses": [float(step()), float(step())], "peak_mib": peak_mib()})
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            loss = step()
        float(loss)
        _say({"seconds": time.perf_counter() - start})


def _say(message: dict[str, Any]) -> None:
    print("@" + json.dumps(message), flush=True)


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
      name: for the table.
      arguments: of Python: ("-m", "benchmarks.jaxpar_side", ...).
      cores: of each of its processes; several processes run at the same time and do the work once each.
      python: the interpreter.
      env: more environment variables.
    """

    name: str
    arguments: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...]
    python: str = sys.executable
    env: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a side showed.

    Attributes:
      about: what its first process reported at its start: losses of the first two steps, peak memory.
      seconds: per step and round. With several processes, divided by their number.
    """

    side: Side
    about: dict[str, Any]
    seconds: list[float]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    def ratios(self, baseline: Measured) -> list[float]:
        """How many times as fast as the baseline it was in each round."""
        return [theirs / ours for theirs, ours in zip(baseline.seconds, self.seconds, strict=True)]


class _Process:
    def __init__(self, side: Side, cores: tuple[int, ...]):
        self._process = subprocess.Popen(
            [side.python, *side.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(side.env),
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self._name = side.name

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"{self._name} ended with code {self._process.wait()}")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(sides: Sequence[Side], *, num_rounds: int, num_steps: int) -> list[Measured]:
    """Steps all sides in turn, `num_steps` in a turn."""
    processes: list[list[_Process]] = []
    try:
        processes += [[_Process(side, cores) for cores in side.cores] for side in sides]
        abouts = [[process.receive() for process in mine][0] for mine in processes]  # noqa: RUF015
        seconds: list[list[float]] = [[] for _ in sides]
        for _ in range(num_rounds):
            for mine, own in zip(processes, seconds, strict=True):
                start = time.perf_counter()
                for process in mine:
                    process.send(str(num_steps))
                for process in mine:
                    process.receive()
                own.append((time.perf_counter() - start) / num_steps / len(mine))
        return [Measured(*parts) for parts in zip(sides, abouts, seconds, strict=True)]
    finally:
        for mine in processes:
            for process in mine:
                process.stop()


def table(results: Sequence[Measured], tokens: int) -> str:
    """Markdown: for every side its cores, time, and how many times as fast as the first side it is.

    Args:
      tokens: of a step.
    """
    lines = [
        "| side | cores | ms a step | tokens/s | times as fast (quartiles) | losses of two steps |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for result in results:
        ratios = result.ratios(results[0])
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        cores = len({core for cores in result.side.cores for core in cores})
        losses = ", ".join(f"{loss:.5f}" for loss in result.about["losses"])
        lines.append(
            f"| {result.side.name} | {cores} | {1e3 * result.median:#.3g} | {tokens / result.median:.0f} "
            f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {losses} |"
        )
    return "\n".join(lines)
