"""Predictions of a model for each row of some data, in the order of the data, from any mesh.

    out/log_likelihood.npy   the output of the model's `predict` by that name: [rows or steps of the data,
    ...]

The process that has an output writes it to its place at once, so the memory does not grow with the data.
Files get their names when all of them are whole. Dims: N places of the data, B batch rows, T time steps.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from rich.progress import Progress

from jaxpar.base.checks import require
from jaxpar.base.console import make_console
from jaxpar.base.files import WRITABLE, check_folder, check_path, friendly_errors, make_folder
from jaxpar.base.paths import local_path
from jaxpar.data.batches import Batches, place_batch
from jaxpar.data.order import DrawnBatches
from jaxpar.hosts.agree import in_process_0, together
from jaxpar.hosts.stopping import Interrupted, Stop
from jaxpar.step.functions import make_predict_step
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.step.step import batch_sharding, check_batch_shape
from jaxpar.training.evaluate import CheckedBatches, check_begins, do_not_run_ahead

# Puts values [n, ...] of an output, by its name, into its places [n].
Write = Callable[[str, np.ndarray, np.ndarray], None]

_NO_BATCH: tuple[int, int, dict[str, jax.Array]] = 0, 0, {}  # number, time steps, outputs


def predict(
    setup: Setup,
    state: TrainState,
    batches: Batches,
    out: str | os.PathLike[str] | None = None,
    *,
    quiet: bool = False,
) -> dict[str, np.ndarray]:
    """The predictions of a model for all batches of an epoch; see `LoadedRun.predict`.

    Args:
      setup: setup that the state was made with.
      state: state with the parameters; it is not changed.
    Raises:
      ValueError, OSError: as of `LoadedRun.predict`.
    """
    data = _Data(setup, batches)
    if out is not None:
        path = local_path(out)
        with _files(path, data) as write:
            _run(data, state, write, quiet=quiet)
        return {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in data.shapes}
    require(
        jax.process_count() == 1,
        "out=None: each of several processes would have only some of the predictions.\n"
        "Fix: give out, a folder that all processes see.",
    )
    arrays = {name: data.empty(name) for name in data.shapes}

    def put(name: str, at: np.ndarray, values: np.ndarray) -> None:
        arrays[name][at] = values

    _run(data, state, put, quiet=quiet)
    return arrays


def check_out(out: str | os.PathLike[str]) -> None:
    """Checks that predictions can be written there; all processes call it.

    Raises:
      ValueError, OSError: they cannot.
    """
    check_path("out", out)
    in_process_0(lambda: check_folder(local_path(out)))


def _run(data: "_Data", state: TrainState, write: Write, *, quiet: bool) -> None:
    """Predicts all batches.

    Raises:
      Interrupted: a signal has ended it after a batch.
    """
    total, console = data.num_batches, make_console(sys.stderr)
    is_hidden = quiet or jax.process_index() > 0
    with Stop() as stop, Progress(console=console, disable=is_hidden) as progress:
        bar = progress.add_task("predicting", total=total)
        for number in range(total):
            state = data.predict(state, number, write)
            progress.update(bar, completed=number + 1)
            if stop.now() and isinstance(stop.reason, signal.Signals) and number + 1 < total:
                text = f"stopped after {number + 1} of {total} batches; no predictions are saved"
                raise Interrupted(text, stop.reason)
        data.write_last(write)


@contextlib.contextmanager
def _files(path: Path, data: "_Data") -> Iterator[Write]:
    """Writes outputs to files of a folder; they get their names when everything is written.

    Raises:
      OSError: they cannot be written, or exist already.
      ValueError: the name of an output cannot name a file.
    """
    for name in data.shapes:
        require(
            Path(name).name == name,
            f"`predict` of the model gives {name!r}, which cannot name a file.\nFix: use another name.",
        )
    with contextlib.ExitStack() as stack:

        def begin() -> str:
            make_folder(path)
            for file in (path / f"{name}.npy" for name in data.shapes):
                if file.exists():
                    raise FileExistsError(
                        f"{file} exists already.\nFix: remove it, or use another folder."
                    )
            with friendly_errors(f"write {path}", WRITABLE):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".", dir=path))
                for name in data.shapes:
                    data.write_empty(name, Path(folder, f"{name}.npy"))
            return folder

        partial = Path(in_process_0(begin))

        def write(name: str, at: np.ndarray, values: np.ndarray) -> None:
            shape, place_bytes = data.shapes[name], values[:1].nbytes
            runs = np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) != 1) + 1)
            with (
                friendly_errors(f"write {path}", WRITABLE),
                (partial / f"{name}.npy").open("r+b") as file,
            ):
                first = file.seek(0, os.SEEK_END) - shape.size * shape.dtype.itemsize
                for run in (run for run in runs if run.size):
                    file.seek(first + int(at[run[0]]) * place_bytes)
                    file.write(values[run].tobytes())

        def finish() -> None:
            for name in data.shapes:
                os.replace(partial / f"{name}.npy", path / f"{name}.npy")

        yield write
        together(lambda: None)  # all processes have written
        in_process_0(finish)


class _Data:
    """Batches of an epoch, and the places of their predictions.

    Attributes:
      shapes: shapes of all outputs, [N, ...]; if places are rows, and the model has time, [N, T, ...].
    """

    def __init__(self, setup: Setup, batches: Batches):
        self.setup, self.batches = setup, CheckedBatches(setup, batches)
        facts = setup.facts
        require(
            batches.num_windows is not None,
            f"{type(batches).__name__} does not say how many batches it has.\n"
            f"Fix: give arrays, such as jaxpar.ArrayBatches.",
        )
        self.num_batches = batches.num_windows or 0
        message = "data has no batch to predict.\nFix: give more rows, or smaller batches."
        require(self.num_batches > 0, message)
        self._in_order, self.has_steps = None, False
        num_places = self.num_batches * batches.batch_size
        if isinstance(batches, DrawnBatches):
            has_steps = batches.indices(0).at.ndim > 1
            if facts.time_major or not has_steps:  # else there are outputs for rows alone
                self._in_order, self.has_steps = batches, has_steps
                num_places = batches.length

        def whole(output: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            steps = output.shape[: facts.time_major and not self.has_steps]
            dtype = output.dtype if np.dtype(output.dtype).kind != "V" else np.dtype(np.float32)
            rest = output.shape[1 + facts.time_major :]
            return jax.ShapeDtypeStruct((num_places, *steps, *rest), dtype)

        self._step, self._sharding = make_predict_step(setup).run, batch_sharding(setup)
        self._last = _NO_BATCH
        for name, output in sorted(facts.outputs.items()):
            require(
                not self.has_steps or output.shape[0] == facts.num_steps,
                f"`predict` gives {output.shape[0]} time steps as {name!r}, and {type(batches).__name__} has "
                f"predictions for each of {facts.num_steps}.\n"
                f"Fix: return one for each step, or predict rows of jaxpar.ArrayBatches.",
            )
        self.shapes = {name: whole(output) for name, output in sorted(facts.outputs.items())}

    def places(self, number: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """The place of each row of a batch, or of each of their steps, and whether it is no padding."""
        if self._in_order:
            at, inside, _ = self._in_order.indices(number, rows)
            return at, inside
        B = self.batches.batch_size
        at_B = number * B + np.arange(B)[rows]
        return at_B, np.ones(len(at_B), bool)

    def fill(self, name: str) -> float:
        """The value where nothing is predicted: NaN, or 0 for whole numbers."""
        return np.nan if self.shapes[name].dtype.kind in "fc" else 0

    def empty(self, name: str, num_places: int | None = None) -> np.ndarray:
        """An output without predictions, or so many places of it."""
        shape = self.shapes[name].shape
        shape = shape if num_places is None else (num_places, *shape[1:])
        return np.full(shape, self.fill(name), self.shapes[name].dtype)

    def write_empty(self, name: str, path: Path) -> None:
        """Writes a file of an output without predictions, a little at a time."""
        shape = self.shapes[name]
        num_places, *rest = shape.shape
        at_once = max(2**22 // max(int(np.prod(rest)), 1), 1)
        with path.open("wb") as file:
            header = {"descr": shape.dtype.str, "fortran_order": False, "shape": shape.shape}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, num_places, at_once):
                file.write(self.empty(name, min(at_once, num_places - start)).tobytes())

    def predict(self, state: TrainState, number: int, write: Write) -> TrainState:
        """The state after a batch; its predictions are written while the next batch is computed."""
        batch = place_batch(self.batches, number, self._sharding)
        if not number:
            check_begins(batch)
        length = check_batch_shape(self.setup.facts, batch)
        carry, outputs = self._step(state, batch)
        do_not_run_ahead(self.setup.mesh, outputs)
        self.write_last(write)
        self._last = number, length, outputs
        return dataclasses.replace(state, carry=carry)

    def write_last(self, write: Write) -> None:
        """Writes the part of the outputs of the last batch that this process has."""
        (number, length, outputs), self._last = self._last, _NO_BATCH
        for name, output in outputs.items():
            for shard in output.addressable_shards:
                if shard.replica_id:  # another device writes the same
                    continue
                at, inside = self.places(number, shard.index[0])
                values = np.asarray(shard.data).astype(self.shapes[name].dtype)
                if self.setup.facts.time_major:  # a number of steps of the model's own is kept
                    is_window = values.shape[1] == self.setup.facts.num_steps
                    values = values[:, : length if is_window else None]
                if self.setup.facts.time_major and not self.has_steps:
                    real, values = values, self.empty(name, len(values))
                    values[:, : real.shape[1]] = real
                write(name, at[inside], values[inside])
