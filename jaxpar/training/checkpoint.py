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
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import xxhash
from flax.traverse_util import unflatten_dict

from jaxpar.base.bucket import as_path, in_bucket
from jaxpar.base.checks import fact_of, fits, require
from jaxpar.base.files import check_file, checksum, read_json, remove_folder, sizes_of, write_file
from jaxpar.hosts.agree import Rendezvous
from jaxpar.model.task import Task
from jaxpar.partition.by_layer import abstract_by_layer, by_layer, from_layers
from jaxpar.sharding import named_leaves
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, abstract_state, check_room
from jaxpar.training.nonfinite import check_parameters
from jaxpar.training.writing import DESCRIPTION, Writing, is_half_written, open_arrays, withdraw

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
_HASH = "hash"  # of a table, in it
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
      saved_step: the step that was saved or restored last.
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
        path = as_path(folder)
        self._folder = path if in_bucket(path) else path.absolute()
        self._setup, self._run = setup, run
        self._check = check
        self.on_failure: Callable[[], None] = lambda: None
        self._together = Rendezvous()
        self._saving: Writing | None = None
        self.saved_step = -1

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
        A damaged one of this step is replaced. The step that was saved or restored last is not saved again.

        Args:
          state: may be donated to the next training step at once.
          batches, position, settings: what the data were; see `described`.
        Raises:
          OSError: this save, or the one before it in the background, failed.
          FloatingPointError: a parameter is not finite.
        """
        self.close()
        if (step := int(state.step)) == self.saved_step:
            return
        check_parameters(self._setup, state)
        self.saved_step = step
        arrays = unflatten_dict(by_layer(state, self._setup.storage), sep="/")
        losses = {str(each): repr(loss) for each, loss in self.losses.items()}
        own = {"run": self._run, "step": step, "losses": losses, "batches": dict(batches or {})}
        own |= {"position": position, "settings": settings}
        described = _describe(self._setup.task) | own
        with self._explained():
            self._saving = Writing(
                self._folder / str(step),
                arrays,
                together=self._together,
                check=self._check,
                seal=functools.partial(self._seal, described),
                clean_up=functools.partial(self._delete_old, step),
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

        self.saved_step = self._resolve(step, best)
        path = self._folder / str(self.saved_step)
        target = abstract_state(self._setup)
        if not with_optimizer:
            target = dataclasses.replace(target, opt_state=())
        check_room(target, self._setup.mesh)
        abstract = abstract_by_layer(target, self._setup.storage)
        before, now = self.described(int(path.name)), _describe(self._setup.task)
        _check_task(path, before, now)
        with _reading_in_words(path):
            stored = _stored_arrays(path)
        if not with_optimizer:
            stored = {n: own for n, own in stored.items() if not n.startswith("opt_state/")}
        _check_arrays(path, stored, abstract, (before["optimizer"], now["optimizer"]))
        asked_for_alone = orbax.Context()
        asked_for_alone.pytree.loading.partial_load = True
        with _reading_in_words(path), asked_for_alone:
            loaded = orbax.load(str(path), unflatten_dict(abstract, sep="/"))
        return from_layers(target, self._setup.storage, dict(named_leaves(loaded, "/")))

    def stored(self) -> tuple[int, dict[str, Any]]:
        """The variables of the newest whole checkpoint's model where they lie, to be read in parts.

        Returns:
          its step, and TensorStore's arrays by the names of `by_layer`: `array[0, 2:4].read().result()`.
        Raises:
          FileNotFoundError: there is no checkpoint that is whole.
          ValueError: it cannot be read.
        """
        path = self._folder / str(self._resolve(None))
        with _reading_in_words(path):
            names = [n for n in _stored_arrays(path) if n.startswith(("params/", "frozen/"))]
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

    def _seal(self, described: Mapping[str, Any], path: Path) -> None:
        """Writes what is said of a checkpoint whose other files are written, with their checksums."""
        files = checksums(path, list(sizes_of(path)))
        self._check()
        write_table(path / DESCRIPTION, {**described, "checksums": files})

    def _delete_old(self, step: int) -> None:
        """Deletes whole checkpoints before this step that are neither among the newest nor the best."""
        train = self._setup.train
        steps = [each for each in self.steps() if each <= step]  # later ones are damaged
        best = best_of(steps, self.losses if train.keep_best else {})
        for each in {*steps} - {*steps[-train.keep_checkpoints :], best}:
            remove_folder(withdraw(self._folder / str(each)))

    def close(self) -> None:
        """Waits for the save that is still running.

        Raises:
          OSError: it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._explained():
                saving.wait()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._together.do(self._check)  # a folder that is gone says so itself
            newest = max(self.steps(), default=None)
            left = "there is none" if newest is None else f"the newest is of step {newest}"
            raise type(error)(
                f"checkpoint {self._folder / str(self.saved_step)} could not be written: {fact_of(error)}\n"
                f"Fix: free some space, and continue from the newest whole checkpoint ({left})"
            ) from error

    def _examine(self) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """What whole checkpoints say of themselves, and what is wrong with others, as far as sizes tell."""
        whole, damaged = {}, {}
        for path in self._folder.glob("*"):
            if path.name.isdecimal() and not is_half_written(path):
                try:
                    whole[int(path.name)] = _read_whole(path, self._run)
                except (OSError, ValueError) as error:
                    damaged[int(path.name)] = str(error)
        return whole, damaged

    def _resolve(self, step: int | None, best: bool = False) -> int:
        """The step of a checkpoint that is whole; tells of damaged ones."""
        self.close()
        whole, damaged = self._examine()
        order = sorted(whole, reverse=True)
        if best:
            losses = {s: loss for s, loss in self.stored_losses().items() if math.isfinite(loss)}
            order = sorted(losses.keys() & whole, key=lambda s: (losses[s], -s))
        if step is not None:
            order = [step] if step in whole else []
        for each in order:
            problem = self._find_changed(each, whole[each]["checksums"])
            if problem is None:
                if step is None and jax.process_index() == 0:
                    for number, told in sorted(damaged.items()):
                        path = self._folder / str(number)
                        _log.warning("skipped %s, which is damaged: %s", path, told)
                return each
            damaged[each] = problem
        which = f" of step {step}" if step is not None else " of a validated step" if best else ""
        told = "".join(f"; {number}: {problem}" for number, problem in sorted(damaged.items()))
        left = sorted(whole.keys() - damaged.keys())
        remedy = f"use one of {left}" if left else "name a run that has saved one"
        raise FileNotFoundError(
            f"{self._folder} holds no whole checkpoint{which}{told}\nFix: {remedy}"
        )

    def _find_changed(self, step: int, expected: Mapping[str, str]) -> str | None:
        """What is wrong with a file of a checkpoint; None if all are as they were written.

        Every process reads a part of the files, and hears of the others'.
        """
        mine = sorted(expected)[jax.process_index() :: jax.process_count()]
        try:
            found = checksums(self._folder / str(step), mine)
            changed = (f"{n} is not what was written" for n in mine if found[n] != expected[n])
            problem = next(changed, None)
        except OSError as error:
            problem = str(error)
        return self._together.exchange(
            problem, lambda told: next(filter(None, told.values()), None)
        )


def checksums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Of files of a folder, by their names: the size, and XXH3 of 128 bits, which guards against damage."""
    with ThreadPoolExecutor() as threads:  # xxhash lets other threads go on
        return dict(
            zip(names, threads.map(lambda name: _checksum(folder / name), names), strict=True)
        )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return f"{file.tell()} {found}"


def best_of(steps: Sequence[int], losses: Mapping[int, float]) -> int | None:
    """The step with the lowest loss, the later one of equals; None if none has a loss that is finite."""
    known = (step for step in steps if math.isfinite(losses.get(step, math.inf)))
    return min(known, key=lambda step: (losses[step], -step), default=None)


def write_table(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a table as JSON, with its own hash; the file appears whole or not at all.

    Raises:
      OSError: it cannot be written.
    """
    text = json.dumps({**content, _HASH: _hash_of(content)}, indent=1)
    write_file(path, text.encode())


def read_table(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """The table that `write_table` has written into a file.

    Args:
      types: of the values by their keys, all of which there must be.
    Raises:
      OSError: it cannot be read.
      ValueError: it is not what was written.
    """
    check_file(path)
    content = {}
    with contextlib.suppress(ValueError):
        content = read_json(path.read_bytes())
    is_whole = content.pop(_HASH, None) == _hash_of(content)
    is_whole &= all(fits(content.get(key), kind) for key, kind in types.items())
    require(is_whole, f"{path.name} is not what was written")
    return content


def _hash_of(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def _read_whole(path: Path, run: str | None) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
      OSError: a file of it cannot be read.
      ValueError: it is not what was written, as far as sizes tell, or of another step or run.
    """
    sizes = sizes_of(path)
    require(DESCRIPTION in sizes, f"{DESCRIPTION} is missing")
    described = read_table(path / DESCRIPTION, _DESCRIBED)
    step, its_run = described["step"], described["run"]
    require(step == int(path.name), f"it is the checkpoint of step {step}")
    require(run in (None, its_run), f"it is of another run ({its_run}, not {run})")
    for name, told in described["checksums"].items():
        size = told.partition(" ")[0]
        require(name in sizes, f"{name} is missing")
        require(str(sizes[name]) == size, f"{name} has {sizes[name]} of {size} bytes")
    return described


def _stored_arrays(path: Path) -> dict[str, Any]:
    """What Orbax knows of the arrays of a checkpoint, by their names.

    Raises:
      ValueError: an array is stored in chunks larger than itself, and a chunk is unpacked whole.
    """
    from orbax.checkpoint import v1 as orbax

    stored = dict(named_leaves(orbax.metadata(str(path)).metadata, "/"))
    for name, array in stored.items():
        chunk = array.storage_metadata.chunk_shape
        fits = all(part <= max(size, 1) for part, size in zip(chunk, array.shape, strict=True))
        require(fits, f"{name} {list(array.shape)} is stored in chunks of {list(chunk)}")
    return stored


@contextlib.contextmanager
def _reading_in_words(path: Path) -> Iterator[None]:
    """What Orbax raises of files that it did not write may be anything, of many lines."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}".split("\n")[0]
        raise ValueError(f"{path} is damaged: {reason}\nFix: restore it from a backup") from error


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
    require(
        before["task"] == now["task"],
        f"{path} must be of the task {now['task']}, got {before['task']}\nFix: give that one's run",
    )
    for name, value in now["fields"].items():
        was = before["fields"].get(name, value)
        if was != value:
            raise ValueError(
                f"{path} is of {name}={was!r}, and the task has {name}={value!r}\n"
                f"Fix: set {name}={was!r}, {_ELSEWHERE}"
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
    was, is_now = (each.get("name") for each in optimizers)
    require(
        bool(of_model) or None in (was, is_now) or was == is_now,
        f"{path} is of another optimizer: expected name={is_now!r}, got name={was!r}\n"
        f"Fix: set it as it was, {_ELSEWHERE}",
    )
    for name in of_model or differ:
        raise ValueError(
            f"{path}: {name} must be {needed.get(name, 'absent')}, got {stored.get(name, 'nothing')}\n"
            f"Fix: set model, optimizer, frozen parameters and batch_size as they were, {_ELSEWHERE}"
        )
