"""Traces of steps: files for Perfetto (ui.perfetto.dev), which `analysis.measured` reads, too."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions

FIRST, LAST = 3, 5  # steps of a run that are traced; the first of all compiles


@contextlib.contextmanager
def trace(folder: str | Path, *, perfetto: bool = False) -> Iterator[None]:
    """Traces each operation of the devices, into a new folder below `folder`.

    Calls of Python functions are left out.

    Args:
      perfetto: write `perfetto_trace.json.gz` as well.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, create_perfetto_trace=perfetto, profiler_options=options):
        yield


class Operation(NamedTuple):
    """One execution of an HLO instruction.

    Attributes:
      run: number of the execution of its program.
      device: id of the device.
      thread: number of its thread; operations of one thread follow or enclose each other.
      name: name of the instruction.
      start, end: seconds, on one clock.
    """

    run: int
    device: int
    thread: int
    name: str
    start: float
    end: float


def read_trace(folder: str | Path) -> list[Operation]:
    """The operations of CPU devices in a trace."""
    [path] = Path(folder).glob("**/*.xplane.pb")
    operations, threads = [], itertools.count()
    with warnings.catch_warnings():
        # From Python 3.13 on jaxlib's types warn when they are first used; as an error it would abort.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in ProfileData.from_file(str(path)).planes:
            for line, thread in zip(plane.lines, threads, strict=False):
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" in stats:
                        run, device = int(stats["run_id"]), int(stats["device_ordinal"])
                        name, times = stats["hlo_op"], (1e-9 * event.start_ns, 1e-9 * event.end_ns)
                        operations.append(Operation(run, device, thread, str(name), *times))
    return operations


class StepTracer(contextlib.ExitStack):
    """Traces steps FIRST to LAST of those taken while it is open.

    Args:
      folder: folder of the trace; None traces nothing.
    """

    def __init__(self, folder: Path | None):
        super().__init__()
        self._folder, self._step = folder, 0

    def before_step(self) -> None:
        """Begins with step FIRST."""
        self._step += 1
        if self._step == FIRST and self._folder is not None:
            self.enter_context(trace(self._folder, perfetto=True))

    def after_step(self, outputs: object) -> None:
        """Ends with step LAST, once its outputs are computed."""
        if self._step == LAST and self._folder is not None:
            jax.block_until_ready(outputs)
            self.close()

    @property
    def path(self) -> Path | None:
        """The newest trace for Perfetto, if there is one."""
        found = () if self._folder is None else self._folder.rglob("perfetto_trace.json.gz")
        return max(found, default=None)
