"""Checkpoints of a training run: Orbax behind one door.

A checkpoint does not know the mesh that wrote it: it holds the arrays of `by_layer`. A restore puts
each array where the mesh of the new run wants it.

Masks of dropout and batches are functions of the seed and the step, so these two are the random state
and the place in the data. A checkpoint gets its name when all of it is written, and holds the size and the
checksum of every file in it, its step and its run: one that is not as it was written, or not where it was
written, is recognised and skipped. It also holds the losses of all validations up to its step, so that which
is the best is known from checkpoints alone.

    60/checkpoint.json     what it is of, and checksums of its files; process 0 reads what all have written
    60/_CHECKPOINT_METADATA, 60/commit_success.txt, 60/state/...   the arrays, as Orbax writes and reads them
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from jaxpar.base.bucket import as_path
from jaxpar.base.files import check_file, free_path, remove_folder, sizes_of
from jaxpar.hosts.agree import SharedError, Together
from jaxpar.setup import Setup
from jaxpar.sharding import named_leaves
from jaxpar.state import TrainState, abstract_state, check_room
from jaxpar.task import Task
from jaxpar.training.by_layer import abstract_by_layer, by_layer, from_layers
from jaxpar.training.checksums import checksums, find_changed, read_table, write_table
from jaxpar.training.nonfinite import check_parameters
from jaxpar.training.writing import (
    DESCRIPTION,
    HALF_WRITTEN,
    Writing,
    is_half_written,
    open_arrays,
    withdraw,
)

# What a checkpoint says of itself.
_DESCRIBED = {
    "task": str,
    "fields": dict,
    "optimizer": dict,
    "run": str | None,
    "step": int,
    "losses": dict[str, str],
    "batches": dict[str, str],
    "position": str | None,
    "checksums": dict[str, str],
}
# Of what stands in the folder.
CHECKPOINT_NAMES = re.compile(rf"\d+(\.damaged-\d+|{re.escape(HALF_WRITTEN)}.*)?")
FREE = "free"  # in the metadata of a task's field: it may change between two runs of one state
_ELSEWHERE = "or use another out_dir"

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder, one subfolder for each step, named by its number.

    Use it as a context manager, or call `close`: saves run in the background. With several
    processes, all of them call every method, in the same order.

    Args:
      folder: made by the first save, if need be.
      setup: of the states that are saved and restored. As its `train` says, the newest are kept, and the one
        with the lowest of `losses` as well; others are deleted as new ones are written.
      run: the name of the run; checkpoints of another one are not restored. None: of no run.
      check: called in process 0 before a save writes, and before what it has written counts; raises an
        OSError if the folder is not this run's any more.
    Attributes:
      losses: step -> validation loss, to be filled in by the caller; stored in every checkpoint.
      on_failure: called from another thread if a save in the background fails, to be set by the caller; the
        next call of a method that waits for it raises the error, in all processes.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        setup: Setup,
        *,
        run: str | None = None,
        check: Callable[[], object] = lambda: None,
    ):
        self.losses: dict[int, float] = {}
        self._folder, self._setup, self._run = as_path(folder).absolute(), setup, run
        self._check = check
        self.on_failure: Callable[[], None] = lambda: None
        self._together, self._is_tidy = Together(), False
        self._saving: Writing | None = None
        self._saving_step = -1

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(
        self,
        state: TrainState,
        batches: Mapping[str, str] | None = None,
        position: str | None = None,
        settings: str | None = None,
    ) -> None:
        """Begins to write a checkpoint of `state.step`; returns as soon as the state may change.

        Nothing counts as a checkpoint until all of it is written. The task's fields are in it, as JSON.
        What is not whole in the folder is moved aside.

        Args:
          state: may be donated to the next training step at once.
          batches, position, settings: what the data were; see `described`.
        Raises:
          ValueError: the folder has a checkpoint of this step or a later one.
          OSError: this save, or the one before it in the background, failed.
          FloatingPointError: a parameter is not finite.
        """
        self.close()
        step = int(state.step)
        check_parameters(self._setup, state)
        arrays = unflatten_dict(by_layer(state, self._setup.layout), sep="/")
        self._saving_step = step
        if not self._is_tidy:
            _leave_out_late_writes()
            with self._failing_in_words():
                self._together.do(lambda: self._move_damaged_aside(step))
            self._is_tidy = True
        if later := [s for s in self.steps() if s >= step]:
            raise ValueError(
                f"cannot save step {step}: {self._folder} has step {max(later)} already; continue "
                f"from that one, delete it, or use another out_dir"
            )
        losses = {str(each): repr(loss) for each, loss in self.losses.items()}
        own = {"run": self._run, "step": step, "losses": losses, "batches": dict(batches or {})}
        own |= {"position": position, "settings": settings}
        described = _describe(self._setup.task) | own
        with self._failing_in_words():
            self._saving = Writing(
                self._folder / str(step),
                arrays,
                together=self._together,
                check=self._check,
                seal=functools.partial(self._seal, described),
                clean_up=self._delete_old,
                on_failure=self.on_failure,
            )

    @property
    def is_empty(self) -> bool:
        """Whether no checkpoint, intact or damaged since, was ever written completely."""
        return not any(self._examine())

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows a step."""
        every = self._setup.train.checkpoint_every
        return every > 0 and step % every == 0

    def latest_step(self) -> int | None:
        """The newest step of which there is a whole checkpoint; None if there is none.

        Waits for a save that is still running.

        Raises:
          OSError: that save failed.
        """
        self.close()
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Steps of which there is a whole checkpoint, in their order."""
        return sorted(self._examine()[0])

    def restore(
        self, step: int | None = None, *, best: bool = False, with_optimizer: bool = True
    ) -> TrainState:
        """The state of a checkpoint, on the mesh of the setup, in its placement and layout.

        Every process reads the shards of its own devices. Mesh, placement, microbatches, `fsdp`,
        `update`, learning rate and the task's free fields may differ from those of the run that wrote it.

        Args:
          step: None takes the latest; or with `best` that with the lowest of `losses`.
          with_optimizer: whether the optimizer's state is read; else it is empty.
        Raises:
          FileNotFoundError: there is no such checkpoint that is whole.
          ValueError: it holds another task, another optimizer, or carried state with a different
            number of rows; or sizes do not fit the mesh.
        """
        from orbax.checkpoint import v1 as orbax

        path = self._folder / str(self._resolve(step, best))
        target = abstract_state(self._setup)
        if not with_optimizer:
            target = dataclasses.replace(target, opt_state=())
        check_room(target, self._setup.mesh)
        abstract = abstract_by_layer(target, self._setup.layout)
        before, now = self.described(int(path.name)), _describe(self._setup.task)
        _check_task(path, before, now)
        with _reading_in_words(path):
            stored = dict(named_leaves(orbax.metadata(str(path)).metadata, "/"))
            _check_chunks(stored)
        if not with_optimizer:
            stored = {n: own for n, own in stored.items() if not n.startswith("opt_state/")}
        _check_arrays(path, stored, abstract, (before["optimizer"], now["optimizer"]))
        asked_for_alone = orbax.Context()
        asked_for_alone.pytree.loading.partial_load = True
        with _reading_in_words(path), asked_for_alone:
            loaded = orbax.load(str(path), unflatten_dict(abstract, sep="/"))
        return from_layers(target, self._setup.layout, dict(named_leaves(loaded, "/")))

    def stored(self) -> tuple[int, dict[str, Any]]:
        """The variables of the newest whole checkpoint's model where they lie, to be read in parts.

        Returns:
          its step, and TensorStore's arrays by the names of `by_layer`: `array[0, 2:4].read().result()`.
        Raises:
          FileNotFoundError: there is no checkpoint that is whole.
          ValueError: it cannot be read.
        """
        from orbax.checkpoint import v1 as orbax

        path = self._folder / str(self._resolve(None))
        with _reading_in_words(path):
            known = dict(named_leaves(orbax.metadata(str(path)).metadata, "/"))
            _check_chunks(known)
            names = [name for name in known if name.startswith(("params/", "frozen/"))]
            return int(path.name), open_arrays(path, names)

    def described(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself: `batches`, the checksums of those before it, and more.

        `position` is where a stream was before the first of these, if it can tell; `settings` a checksum of
        those by which batches are cut, which older versions have not written.

        Raises:
          OSError, ValueError: there is no such checkpoint, or it is damaged.
        """
        return read_table(self._folder / str(step) / DESCRIPTION, _DESCRIBED)

    def stored_losses(self) -> dict[int, float]:
        """Step -> validation loss, of all validations that whole checkpoints know of."""
        found: dict[int, float] = {}
        for _, described in sorted(self._examine()[0].items()):
            found |= {int(number): float(loss) for number, loss in described["losses"].items()}
        return found

    def note_loss(self, step: int, loss: float) -> None:
        """Writes a validation loss into the checkpoint of its step, if that is whole; for process 0.

        Raises:
          OSError: it cannot be written; the checkpoint is as it was.
        """
        described = self._examine()[0].get(step)
        if described is not None and described["losses"].get(str(step)) != repr(loss):
            described["losses"][str(step)] = repr(loss)
            write_table(self._folder / str(step) / DESCRIPTION, described)

    def _seal(self, described: Mapping[str, Any], path: Path) -> None:
        """Writes what is said of a checkpoint whose other files are written, with their checksums."""
        files = checksums(path, sorted(sizes_of(path)))
        self._check()
        write_table(path / DESCRIPTION, {**described, "checksums": files})

    def _delete_old(self) -> None:
        """Deletes whole checkpoints that are neither among the newest nor the best."""
        steps, train = self.steps(), self._setup.train
        best = best_of(steps, self.losses if train.keep_best else {})
        for step in {*steps} - {*steps[-train.keep_checkpoints :], best}:
            remove_folder(withdraw(self._folder / str(step)))

    def close(self) -> None:
        """Waits for the save that is still running.

        Raises:
          OSError: it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._failing_in_words():
                saving.wait()

    @contextlib.contextmanager
    def _failing_in_words(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._is_tidy = False
            try:
                newest = max(self.steps(), default=None)
                left = (
                    "there is none"
                    if newest is None
                    else f"the newest whole one is of step {newest}"
                )
            except OSError as unknown:
                left = f"of others it says: {unknown.strerror}"
            kind = SharedError if isinstance(error, SharedError) else OSError
            raise kind(
                f"the checkpoint of step {self._saving_step} could not be written in {self._folder}: "
                f"{error}; {left}"
            ) from error

    def _examine(self) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """What whole checkpoints say of themselves, and what is wrong with others, as far as sizes tell."""
        whole, damaged = {}, {}
        for path in self._folder.glob("*"):
            if not path.name.isdecimal() or is_half_written(path):
                continue
            try:
                whole[int(path.name)] = _read_whole(path, self._run)
            except OSError as error:
                name = as_path(error.filename).relative_to(path)
                damaged[int(path.name)] = f"{name}: {error.strerror}"
            except ValueError as error:
                damaged[int(path.name)] = str(error)
        return whole, damaged

    def _move_damaged_aside(self, step: int) -> None:
        """Moves what would be in the way of a step and those after it; process 0 does."""
        if jax.process_index() != 0:
            return
        whole, damaged = self._examine()
        for each, described in whole.items():
            if each >= step:  # passed over by a restore, or else an error
                changed = find_changed(self._folder / str(each), described["checksums"])
                damaged.update((each, problem) for problem in changed.values())
        for each, problem in damaged.items():
            path = self._folder / str(each)
            aside = path.rename(free_path(self._folder, f"{each}.damaged-"))
            _log.warning("moved %s to %s: %s", path, aside.name, problem)

    def _resolve(self, step: int | None, best: bool = False) -> int:
        def rank(step: int) -> tuple[float, int]:
            # That of a damaged one may not be known: it may have been the best.
            return (-losses.get(step, -math.inf) if best else 0.0), step

        self.close()
        (whole, damaged), losses = self._examine(), {}
        if best:
            losses = {s: loss for s, loss in self.stored_losses().items() if math.isfinite(loss)}
            whole = {s: described for s, described in whole.items() if s in losses}
            if not whole and not damaged:
                raise FileNotFoundError(
                    f"{self._folder} holds no checkpoint of a validated step; train with "
                    f"--train.eval-every, or take the newest state"
                )
        for each in sorted(whole, key=rank, reverse=True) if step is None else {step} & {*whole}:
            if (problem := self._find_changed(each, whole[each]["checksums"])) is None:
                if jax.process_index() == 0 and step is None:
                    for better in sorted(s for s in damaged if rank(s) > rank(each)):
                        _log.warning(
                            "skipped %s, which cannot be used: %s; the state of step %d is taken",
                            *(self._folder / str(better), damaged[better], each),
                        )
                return each
            damaged[each] = problem
        steps = sorted(whole.keys() - damaged.keys())
        if step in damaged:
            raise FileNotFoundError(
                f"the checkpoint {self._folder / str(step)} cannot be used: {damaged[step]}; use "
                + (f"one of {steps}" if steps else "another one, there is none beside it")
            )
        if not steps:
            raise FileNotFoundError(
                f"there is no whole checkpoint in {self._folder}: "
                + "; ".join(f"{step} cannot be used, {damaged[step]}" for step in sorted(damaged))
                + "; bring it back from a copy, or "
                + ("take the newest state" if best else "begin anew (--overwrite)")
                if damaged
                else f"there is no checkpoint in {self._folder}; train first, or name "
                f"the folder of a run that has saved one"
            )
        raise FileNotFoundError(
            f"there is no checkpoint of step {step} in {self._folder}; use one of {steps}"
        )

    def _find_changed(self, step: int, expected: Mapping[str, str]) -> str | None:
        """What is wrong with a file of a checkpoint; None if all are as they were written.

        Every process reads a part of the files, and hears of the others'.
        """
        mine = sorted(expected)[jax.process_index() :: jax.process_count()]
        changed = find_changed(self._folder / str(step), {name: expected[name] for name in mine})
        problem = next(iter(changed.values()), None)
        return self._together.exchange(
            problem, lambda told: next(filter(None, told.values()), None)
        )


@functools.cache
def _leave_out_late_writes() -> None:
    """Where a save fails, its other writes end after Orbax has closed the event loop that they report to.

    TensorStore and asyncio would print a traceback for each of them, tens of pages beside the one error that
    tells.
    """
    show = sys.unraisablehook

    def show_others(raised: sys.UnraisableHookArgs) -> None:
        error = raised.exc_value
        if not (isinstance(error, RuntimeError) and error.args == ("Event loop is closed",)):
            show(raised)

    def is_other(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not ("never retrieved" in record.msg and isinstance(error, OSError | ValueError))

    sys.unraisablehook = show_others
    logging.getLogger("asyncio").addFilter(is_other)
    warnings.filterwarnings("ignore", r"coroutine '.*write_fragment' was never awaited")


def best_of(steps: Sequence[int], losses: Mapping[int, float]) -> int | None:
    """The step with the lowest loss, the later one of equals; None if none has a loss that is finite."""
    known = (step for step in steps if math.isfinite(losses.get(step, math.inf)))
    return min(known, key=lambda step: (losses[step], -step), default=None)


def run_of(path: Path) -> str | None:
    """The name of the run that a folder is a checkpoint of; None if nothing tells."""
    try:
        return read_table(path / DESCRIPTION, _DESCRIBED)["run"]
    except (OSError, ValueError):
        return None


def _read_whole(path: Path, run: str | None) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
      OSError: a file of it cannot be read.
      ValueError: it is not what was written, as far as sizes tell, or of another step or run.
    """
    described = read_table(path / DESCRIPTION, _DESCRIBED)
    if described["step"] != int(path.name):
        raise ValueError(f"it is the checkpoint of step {described['step']}")
    if run is not None and described["run"] != run:
        raise ValueError(f"it is of another run ({described['run']}, not {run})")
    sizes = sizes_of(path)
    for name, checksum in described["checksums"].items():
        found = sizes[name] if name in sizes else check_file(path / name)
        size = checksum.partition(" ")[0]
        if str(found) != size:
            raise ValueError(f"{name} has {found} of {size} bytes")
    return described


@contextlib.contextmanager
def _reading_in_words(path: Path) -> Iterator[None]:
    """What Orbax raises of files that it did not write may be anything, of many lines."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}".split("\n")[0]
        raise ValueError(f"{path} cannot be read ({reason}); bring it back from a copy") from error


def _check_chunks(arrays: Mapping[str, Any]) -> None:
    """Raises if an array is stored in chunks larger than itself: a chunk is unpacked whole."""
    for name, array in arrays.items():
        chunk = array.storage_metadata.chunk_shape
        if any(part > max(size, 1) for part, size in zip(chunk, array.shape, strict=True)):
            raise ValueError(f"{name} {list(array.shape)} is stored in chunks of {list(chunk)}")


def _describe(task: Task) -> dict[str, Any]:
    """What is stored of a task beside its arrays, as JSON has it."""
    fields = {
        field.name: getattr(task, field.name)
        for field in dataclasses.fields(task)
        if not field.metadata.get(FREE) and field.name != "optimizer"
    }
    optimizer = task.config_of_optimizer
    described = {
        "task": type(task).__name__,
        "fields": fields,
        "optimizer": vars(optimizer) if dataclasses.is_dataclass(optimizer) else {},
    }
    return json.loads(json.dumps(described, default=repr))


def _check_task(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises if a checkpoint is of another task than this one, both as `_describe` gives them."""
    if before["task"] != now["task"]:
        raise ValueError(f"{path} holds a state of {before['task']}, not of {now['task']}")
    for name, value in now["fields"].items():
        was = before["fields"].get(name, value)
        if was != value:
            raise ValueError(
                f"{path} holds a state of {name}={was!r}, the task has {name}={value!r}; set "
                f"{name}={was!r}, {_ELSEWHERE}"
            )


def _check_arrays(
    path: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
) -> None:
    """Raises if a checkpoint has not the arrays that a state needs, naming what is to blame.

    Args:
      before, now: by their names, with shapes and dtypes.
      optimizers: settings of the optimizer, before and now.
    """
    stored, needed = (
        {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
        for arrays in (before, now)
    )
    differ = [name for name in {**needed, **stored} if needed.get(name) != stored.get(name)]
    of_model = [name for name in differ if name.startswith(("params/", "frozen/"))]
    for name in of_model:
        part, _, inner = name.partition("/")
        if part == "frozen" and f"params/{inner}" in of_model:
            was, is_now = ("frozen", "trained") if name in stored else ("trained", "frozen")
            raise ValueError(
                f"{path}: {inner} was {was} then and is {is_now} now; leave it {was}, {_ELSEWHERE}"
            )
    was, is_now = optimizers
    of_optimizer = any(name.startswith("opt_state/") for name in differ)
    is_other = bool(was and is_now) and was.get("name") != is_now.get("name")
    if not of_model and (of_optimizer or is_other):
        changed = [name for name in {**was, **is_now} if was.get(name) != is_now.get(name)]
        then, today = (
            ", ".join(f"{name}={each.get(name)!r}" for name in changed) or "other arrays"
            for each in optimizers
        )
        raise ValueError(
            f"{path} holds the state of another optimizer: {then} then, {today} now; set it as it was, "
            f"{_ELSEWHERE}"
        )
    for name in of_model or differ:
        if name.startswith("carry/") and name in stored.keys() & needed.keys():
            was, is_now = (arrays[name].shape[1] for arrays in (before, now))
            if was != is_now:
                raise ValueError(
                    f"{path} holds the carried state of {was} rows, the batch has {is_now}; set its size to "
                    f"{was}, {_ELSEWHERE}"
                )
        raise ValueError(
            f"{path}: {name} is {stored.get(name, 'not there')}, the task needs "
            f"{needed.get(name, 'no such array')}; use model and jaxpar as they were, {_ELSEWHERE}"
        )
