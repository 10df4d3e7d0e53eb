"""Predictions: what a model says of every row of some data, in the order of the data, from any mesh.

    out/log_likelihood.npy   what the model's `predict` gives by that name: [rows or steps of the data, ...]
    out/predictions.json     of what they are, and how many batches are finished
    out/carry-120/           until all are: the state of the layers after so many

Every output is written to its place as it comes, by the process that has it, so the memory that it takes does
not grow with the data. Batches are finished by parts, of about `PART_SECONDS`: what was killed goes on after
the last part, and ends with the same files. Dims: N places of the data, B batch rows, T time steps.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from rich.progress import Progress

from jaxpar.base.checks import require
from jaxpar.base.console import make_console
from jaxpar.base.files import WRITABLE, check_folder, check_path, in_words
from jaxpar.data.batches import Batches, place_batch
from jaxpar.data.order import DrawnBatches
from jaxpar.hosts.agree import Together, in_process_0, together
from jaxpar.hosts.stopping import Interrupted, Stop
from jaxpar.setup import Setup
from jaxpar.sharding import named_leaves
from jaxpar.state import TrainState, abstract_state
from jaxpar.step import batch_sharding, check_batch_shape, make_predict_step
from jaxpar.training.by_layer import abstract_by_layer, by_layer, from_layers
from jaxpar.training.checkpoint import read_table, write_table
from jaxpar.training.evaluate import CheckedBatches, check_begins, do_not_run_ahead
from jaxpar.training.fingerprint import hash_rows
from jaxpar.training.run_folder import FolderLock
from jaxpar.training.writing import Writing

PART_SECONDS = 30.0  # about what is lost where a process is killed
_DESCRIPTION, _CARRY = "predictions.json", "carry-"
_NO_BATCH: tuple[int, int, dict[str, jax.Array]] = 0, 0, {}  # number, time steps, outputs
_FOLDER = "folder"  # of the run, which is not compared
_ELSEWHERE = "use another --out"
_TYPES = {"of": dict, "finished": int}


def predict(
    setup: Setup,
    state: TrainState,
    batches: Batches,
    out: str | os.PathLike[str] | None = None,
    *,
    of: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, np.ndarray]:
    """What the model predicts for all batches of an epoch; see `LoadedRun.predict`.

    Args:
      setup: that the state was made with.
      state: its parameters are used; it is not changed.
      of: what the predictions are of, as JSON has it: a folder with those of something else is refused.
    Raises:
      ValueError, OSError: as of `LoadedRun.predict`.
    """
    data = _Data(setup, batches)
    if out is None:
        if jax.process_count() > 1:
            raise ValueError(
                "each of several processes has a part of the predictions; give out=..., a folder that all "
                "of them see"
            )
        memory = _Memory(data)
        _run(data, state, memory, quiet=quiet)
        return memory.arrays
    folder = _Folder(Path(out).expanduser(), data, of or {})
    with folder.lock, folder.opened:
        _run(data, state, folder, quiet=quiet)
    return {name: np.load(folder.path_of(name), mmap_mode="r") for name in data.shapes}


def check_out(out: str | os.PathLike[str]) -> None:
    """Nothing, if predictions can be written there; all processes ask.

    Raises:
      ValueError, OSError: they cannot.
    """
    check_path("out", out)
    path = Path(out).expanduser()
    in_process_0(lambda: check_folder(path))


def _run(data: "_Data", state: TrainState, out: "_Memory", *, quiet: bool) -> None:
    """Predicts all batches that are not finished, part by part.

    Raises:
      Interrupted: a signal has ended it after a batch.
    """
    finished, total, part = out.begin(), data.num_batches, 1
    is_hidden = quiet or jax.process_index() > 0
    if finished == total:
        if not is_hidden:
            print(
                f"{out.kept_in} was complete already; nothing is predicted again", file=sys.stderr
            )
        return
    state, console = out.restored(state), make_console(sys.stderr)
    with Stop() as stop, Progress(console=console, disable=is_hidden) as progress:
        bar = progress.add_task("predicting", total=total, completed=finished)
        while finished < total:
            began, end = time.monotonic(), min(finished + part, total)
            while finished < end:
                state = data.predict(state, finished, out)
                finished += 1
                progress.update(bar, completed=finished)
                if stop.now():
                    break
            data.write_last(out)
            out.finish(state, finished)
            if isinstance(stop.reason, signal.Signals) and finished < total:
                kept = f"which are in {out.kept_in}; the same again goes on there"
                lost = "which are lost; a folder (out=...) would keep them"
                told = (
                    f"stopped after {finished} of {total} batches, {kept if out.kept_in else lost}"
                )
                raise Interrupted(told, stop.reason)
            seconds = time.monotonic() - began
            part = in_process_0(functools.partial(_next_part, part, seconds))


def _next_part(part: int, seconds: float) -> int:
    """How many batches the part after one of so many has, which took so long."""
    return part if seconds >= PART_SECONDS / 2 else 2 * part


class _Data:
    """Batches of an epoch, and where what is predicted for them belongs.

    Attributes:
      shapes: of all outputs, [N, ...]; where places are rows, and the model has time, [N, T, ...].
    """

    def __init__(self, setup: Setup, batches: Batches):
        self.setup, self.batches = setup, CheckedBatches(setup, batches)
        facts = setup.layout.facts
        require(
            batches.num_windows is not None,
            f"{type(batches).__name__} does not tell how many batches there are, which predictions are "
            f"stored by; give arrays, such as jaxpar.ArrayBatches",
        )
        self.num_batches = batches.num_windows or 0
        if not self.num_batches:
            raise ValueError("there are no batches to predict; give more rows, or smaller batches")
        self._in_order, self.has_steps = None, False
        num_places = self.num_batches * batches.batch_size
        if isinstance(batches, DrawnBatches):
            has_steps = batches.places(0).at.ndim > 1
            if facts.time_major or not has_steps:  # else there are outputs for rows alone
                self._in_order, self.has_steps = batches, has_steps
                num_places = batches.length

        def whole(output: Any) -> jax.ShapeDtypeStruct:
            steps = output.shape[: facts.time_major and not self.has_steps]
            dtype = output.dtype if np.dtype(output.dtype).kind != "V" else np.dtype(np.float32)
            rest = output.shape[1 + facts.time_major :]
            return jax.ShapeDtypeStruct((num_places, *steps, *rest), dtype)

        self._step, self._sharding = make_predict_step(setup).run, batch_sharding(setup)
        self._last = _NO_BATCH
        self.shapes = {name: whole(output) for name, output in sorted(facts.outputs.items())}

    def places(self, number: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Of rows of a batch, or of their steps: where each belongs, and whether it does (or is padding)."""
        if self._in_order:
            at, inside, _ = self._in_order.places(number, rows)
            return at, inside
        B = self.batches.batch_size
        at_B = number * B + np.arange(B)[rows]
        return at_B, np.ones(len(at_B), bool)

    def fill(self, name: str) -> Any:
        """What stands where nothing is predicted: NaN, or 0 if the numbers are no floats."""
        return np.nan if self.shapes[name].dtype.kind in "fc" else 0

    def empty(self, name: str, num_places: int | None = None) -> np.ndarray:
        """An output with nothing predicted, or so many places of it."""
        shape = self.shapes[name].shape
        shape = shape if num_places is None else (num_places, *shape[1:])
        return np.full(shape, self.fill(name), self.shapes[name].dtype)

    def predict(self, state: TrainState, number: int, out: "_Memory") -> TrainState:
        """The state after a batch; what is predicted for it is written while the next one is computed."""
        batch = place_batch(self.batches, number, self._sharding)
        if not number:
            check_begins(batch)
        length = check_batch_shape(self.setup.layout, batch)
        carry, outputs = self._step(state, batch)
        do_not_run_ahead(self.setup.mesh, outputs)
        self.write_last(out)
        self._last = number, length, outputs
        return dataclasses.replace(state, carry=carry)

    def write_last(self, out: "_Memory") -> None:
        """Writes what this process has of the outputs of the last batch."""
        (number, length, outputs), self._last = self._last, _NO_BATCH
        for name, output in outputs.items():
            for shard in output.addressable_shards:
                if shard.replica_id:  # another device writes the same
                    continue
                at, inside = self.places(number, shard.index[0])
                values = np.asarray(shard.data).astype(self.shapes[name].dtype)
                if self.has_steps:
                    values = values[:, :length]
                elif self.setup.layout.facts.time_major:
                    values[:, length:] = self.fill(name)
                out.write(name, at[inside], values[inside])


class _Memory:
    """Predictions in memory.

    Attributes:
      kept_in: their folder, if they have one.
    """

    kept_in: str | None = None

    def __init__(self, data: _Data):
        self.arrays = {name: data.empty(name) for name in data.shapes}

    def begin(self) -> int:
        """How many batches are finished."""
        return 0

    def restored(self, state: TrainState) -> TrainState:
        """The state after these."""
        return state

    def write(self, name: str, at: np.ndarray, values: np.ndarray) -> None:
        """Puts values [n, ...] of an output into its places [n]."""
        self.arrays[name][at] = values

    def finish(self, state: TrainState, number: int) -> None:
        """Notes that all before this batch are finished; the state is the one after them."""


class _Folder(_Memory):
    """Predictions in a folder, which all processes see.

    Attributes:
      lock: keeps others out.
      opened: closes the files at the end.
    """

    def __init__(self, path: Path, data: _Data, of: Mapping[str, Any]):
        self._path, self.kept_in = path, str(path)
        self._data, self._together = data, Together()
        self.lock = FolderLock(path)
        arrays = {name: f"{s.dtype}{list(s.shape)}" for name, s in data.shapes.items()}
        first = f"{hash_rows(data.batches.batch(0), 0):016x}"
        sizes = {
            "batch_size": data.batches.batch_size,
            "number of steps": data.setup.layout.facts.num_steps,
        }
        sizes |= {"number of batches": data.num_batches, "arrays": arrays}
        self._of = {**of, **sizes, "checksum of the first batch": first}
        self.opened = contextlib.ExitStack()
        self._finished, self._files = 0, dict[str, int]()
        for name in arrays:
            require(
                Path(name).name == name,
                f"`predict` of the model gives {name!r}, which is not a valid file name; use another",
            )

    def path_of(self, name: str) -> Path:
        """Of an output."""
        return self._path / f"{name}.npy"

    def begin(self) -> int:
        self._finished = in_process_0(self._begin)
        return self._finished

    def restored(self, state: TrainState) -> TrainState:
        if not self._finished or not jax.tree.leaves(state.carry):
            return state
        from orbax.checkpoint import v1 as orbax

        layout = self._data.setup.layout
        target = abstract_state(self._data.setup).carry
        abstract = unflatten_dict(abstract_by_layer(target, layout), sep="/")
        path = self._path / f"{_CARRY}{self._finished}"
        with in_words(f"read {path}", f"remove {self._path}, and predict anew"):
            loaded = orbax.load(str(path.absolute()), abstract)
        return dataclasses.replace(
            state, carry=from_layers(target, layout, dict(named_leaves(loaded, "/")))
        )

    def write(self, name: str, at: np.ndarray, values: np.ndarray) -> None:
        path, shape = self.path_of(name), self._data.shapes[name]
        if name not in self._files:
            self._files[name] = os.open(path, os.O_RDWR)
            self.opened.callback(os.close, self._files[name])
        file, place_bytes = self._files[name], values[:1].nbytes
        first = os.fstat(file).st_size - shape.size * shape.dtype.itemsize
        with in_words(f"write {path}", WRITABLE):
            for run in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) != 1) + 1):
                if run.size:
                    os.pwrite(file, values[run].tobytes(), first + int(at[run[0]]) * place_bytes)

    def finish(self, state: TrainState, number: int) -> None:
        together(self._sync)
        if number < self._data.num_batches and jax.tree.leaves(state.carry):
            Writing(
                self._path.absolute() / f"{_CARRY}{number}",
                unflatten_dict(by_layer(state.carry, self._data.setup.layout), sep="/"),
                together=self._together,
            ).wait()
        in_process_0(lambda: self._note(number))

    def _begin(self) -> int:
        """Makes the files, or finds them as they were left."""
        if not (self._path / _DESCRIPTION).exists():
            if others := [path.name for path in self._path.iterdir() if path.name[0] != "."]:
                raise FileExistsError(
                    f"{self._path} holds {others[0]}, and no predictions; give an empty or a new folder"
                )
            self._note(0)
        found = read_table(self._path / _DESCRIPTION, _TYPES)
        for name, value in self._of.items():
            if (was := found["of"].get(name)) != value and name != _FOLDER:  # a run may be moved
                where = f" (in {found['of'].get(_FOLDER)})" * (name == "run")
                raise ValueError(
                    f"{self._path} holds other predictions: their {name} is {was}{where}, and {value} is "
                    f"asked for; give another folder, or remove this one"
                )
        for name in self._data.shapes:
            if not found["finished"]:
                self._make_file(name)
            elif not self.path_of(name).exists():
                raise FileNotFoundError(
                    f"{self.path_of(name)} is gone; remove {self._path}, and predict anew"
                )
        return found["finished"]

    def _make_file(self, name: str) -> None:
        """An output with nothing in it, written a little at a time."""
        shape, path = self._data.shapes[name], self.path_of(name)
        num_places, *rest = shape.shape
        at_once = max(2**22 // max(int(np.prod(rest)), 1), 1)
        with in_words(f"write {path}", WRITABLE), path.open("wb") as file:
            header = {"descr": shape.dtype.str, "fortran_order": False, "shape": shape.shape}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, num_places, at_once):
                file.write(self._data.empty(name, min(at_once, num_places - start)).tobytes())

    def _sync(self) -> None:
        for name, file in self._files.items():
            with in_words(f"write {self.path_of(name)}", WRITABLE):
                os.fsync(file)

    def _note(self, number: int) -> None:
        write_table(self._path / _DESCRIPTION, {"of": self._of, "finished": number})
        for path in self._path.glob(f"{_CARRY}*"):
            if path.name != f"{_CARRY}{number}":
                shutil.rmtree(path)
