"""Traces of what runs: files for Perfetto (ui.perfetto.dev), and for `analysis` to read."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.profiler import ProfileOptions

FIRST, LAST = 3, 5  # steps of a run that are traced; the first of all compiles


@contextlib.contextmanager
def trace(folder: str | Path, *, perfetto: bool = False) -> Iterator[None]:
    """Writes what the devices do meanwhile, operation by operation, into a new folder below `folder`.

    Calls of Python functions, of which there are many more, are left out.

    Args:
      perfetto: write `perfetto_trace.json.gz` as well.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, create_perfetto_trace=perfetto, profiler_options=options):
        yield


class StepTracer(contextlib.ExitStack):
    """Traces steps FIRST to LAST of those taken while it is open."""

    def __init__(self, folder: Path | None):
        """Traces into a folder; nothing, given None."""
        super().__init__()
        self._folder, self._step = folder, 0

    def before_step(self) -> None:
        """Begins with step FIRST."""
        self._step += 1
        if self._step == FIRST and self._folder is not None:
            self.enter_context(trace(self._folder, perfetto=True))

    def after_step(self, outputs: object) -> None:
        """Ends with step LAST, when what it computes is there."""
        if self._step == LAST and self._folder is not None:
            jax.block_until_ready(outputs)
            self.close()

    @property
    def path(self) -> Path | None:
        """The newest trace for Perfetto, if there is one."""
        found = () if self._folder is None else self._folder.rglob("perfetto_trace.json.gz")
        return max(found, default=None)
