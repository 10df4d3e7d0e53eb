"""Checkpoints of a training run. Orbax writes and reads the arrays.

A checkpoint does not know the mesh that wrote it: it holds the arrays of `by_layer`. A restore puts each
array where the mesh of the new run wants it. Masks of dropout and batches are functions of the seed and the
step, so these two are the random state and the place in the data.

    checkpoints/60.orbax-checkpoint-tmp-1/   made by process 0; each process writes its shards there
    checkpoints/60/                          its name, once process 0 has put the parts together
    checkpoints/60/checkpoint.json           its task, its losses, and checksums of its files
    checkpoints/60/_CHECKPOINT_METADATA, commit_success.txt, state/...   the arrays, as Orbax stores them

All processes write in the background, and a checkpoint is whole or not there at all. It holds the size and
the checksum of every file in it, its step and its run. A checkpoint that is not as it was written, or not
where it was written, is found and skipped. It also holds the losses of all validations up to its step, so the
best one is known from checkpoints alone.

In a bucket, nothing can be renamed at once. Everything is written into its place there, and checkpoint.json
last: without it, a checkpoint is half-written.

Orbax's own checkpointers wait at barriers, which a process that cannot write never reaches. Here an error of
one process becomes the error of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xxhash
from flax.traverse_util import unflatten_dict

from jaxpar.base.bucket import as_path, in_bucket
from jaxpar.base.checks import fact_of, fits, require
from jaxpar.base.files import check_file, checksum, read_json, remove_folder, sizes_of, write_file
from jaxpar.base.types import Arrays, Json, Shapes
from jaxpar.hosts.agree import Rendezvous, SharedError
from jaxpar.partition.by_layer import abstract_by_layer, by_layer, from_layers
from jaxpar.sharding import named_leaves
from jaxpar.step.optimizer_numbers import as_texts, first_numbers, with_given_numbers
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, abstract_state, check_room
from jaxpar.training.changes import (
    changed_keys,
    checked_keys,
    describe_settings,
    free_keys,
    in_words,
)
from jaxpar.training.nonfinite import check_parameters

if TYPE_CHECKING:  # it takes a fifth of a second, and most commands do not need it
    from etils import epath
    from orbax import checkpoint as orbax
    from tensorstore import TensorStore

# The values of checkpoint.json.
_DESCRIBED = {
    "task": str,
    "fields": dict,
    "optimizer": dict,
    "numbers": dict[str, str],
    "run": str | None,
    "step": int,
    "losses": dict[str, str],
    "batches": dict[str, str],
    "position": str | None,
    "settings": str | None,
    "checksums": dict[str, str],
}
_HASH = "hash"  # of a table, in it
_ELSEWHERE = "or use another out_dir"
_DESCRIPTION = "checkpoint.json"
# Orbax's names; in a bucket it does not read what is not committed.
_METADATA, _COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"
_HALF_WRITTEN = ".orbax-checkpoint-tmp"
_ARRAYS = "state"
_MIN_PART_BYTES = 2**20

_attempts = itertools.count(1)  # late writes of a failed attempt do not get into the next one
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder, one subfolder for each step, named by its number.

    Use it as a context manager, or call `close`: saves run in the background. With several processes, all of
    them call every method, in the same order.

    Args:
      folder: folder of the checkpoints; the first save makes it.
      setup: setup of the states that are saved and restored. Its `train` says how many of the newest are
        kept, and whether the one with the lowest of `losses` is; a save deletes the others.
      run: name of the run; checkpoints of another one are not restored. None accepts those of any run.
      check: called in process 0 before a save writes, and before its checkpoint counts; raises an OSError if
        the folder belongs to another run by then.
    Attributes:
      losses: step -> validation loss, filled in by the caller; stored in every checkpoint.
      saved_step: step that was saved or restored last.
      on_failure: set by the caller; called from another thread if a save in the background fails. The next
        method that waits for the save raises the error, in all processes.
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
        self._rendezvous = Rendezvous()
        self._saving: Writing | None = None
        self.saved_step = -1

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(self, state: TrainState, data: Json | None = None) -> None:
        """Begins to write a checkpoint of `state.step`; returns as soon as the state may change.

        A checkpoint counts once all of it is written. The task's fields are in it, as JSON. A damaged one of
        this step is replaced. The step that was saved or restored last is not saved again.

        Args:
          state: may be donated to the next training step at once.
          data: identity of the next batch, as of `HashedBatches.describe`.
        Raises:
          OSError: this save, or the last one in the background, failed.
          FloatingPointError: a parameter is not finite.
        """
        self.close()
        if (step := int(state.step)) == self.saved_step:
            return
        check_parameters(self._setup, state)
        self.saved_step = step
        arrays = unflatten_dict(by_layer(state, self._setup.storage), sep="/")
        described = _describe(self._setup) | {
            "run": self._run,
            "step": step,
            "losses": {str(each): repr(loss) for each, loss in self.losses.items()},
            **(data or {"batches": {}, "position": None, "settings": None}),
        }
        with self._explained():
            self._saving = Writing(
                self._folder / str(step),
                arrays,
                described,
                rendezvous=self._rendezvous,
                check=self._check,
                clean_up=functools.partial(self._delete_old, step),
                on_failure=self.on_failure,
            )

    @property
    def is_empty(self) -> bool:
        """Whether no checkpoint was ever written completely; damaged ones count."""
        return not any(self._examine())

    def is_due(self, step: int) -> bool:
        """Whether the settings ask for a checkpoint of a step."""
        every = self._setup.train.checkpoint_every
        return every > 0 and step % every == 0

    def steps(self) -> list[int]:
        """The steps of whole checkpoints, in their order."""
        return sorted(self._examine()[0])

    def restore(
        self, step: int | None = None, *, best: bool = False, with_optimizer: bool = True
    ) -> TrainState:
        """The state of a checkpoint, on the mesh of the setup, in its placement and layout.

        Every process reads the shards of its own devices. Mesh, placement, microbatches, `fsdp`, `update` and
        all settings that leave the arrays as they are may differ from those of the run that wrote it. A
        warning names the settings that do. Numbers that the optimizer is given, such as the rate of
        `optax.inject_hyperparams`, are those of this setup; see `with_given_numbers`.

        Args:
          step: step of the checkpoint; None takes the latest, or with `best` the one with the lowest of
            `losses`.
          with_optimizer: whether to read the optimizer's state; otherwise it is empty.
        Raises:
          FileNotFoundError: there is no such checkpoint that is whole.
          ValueError: it holds another task, another optimizer, or a recurrent state with a different number
            of rows; or sizes do not fit the mesh.
        """
        from orbax.checkpoint import v1 as orbax

        self.saved_step = self._resolve(step, best)
        path = self._folder / str(self.saved_step)
        target = abstract_state(self._setup)
        if not with_optimizer:
            target = dataclasses.replace(target, opt_state=())
        check_room(target, self._setup.mesh)
        abstract = abstract_by_layer(target, self._setup.storage)
        before, now = self.described(self.saved_step), _describe(self._setup)
        _check_task(path, before, now)
        with reading_in_words(path):
            stored = _stored_arrays(path)
        if not with_optimizer:
            stored = {n: own for n, own in stored.items() if not n.startswith("opt_state/")}
        _check_arrays(path, stored, abstract, before, now, free_keys(self._setup))
        context = orbax.Context()
        context.pytree.loading.partial_load = True  # only what `abstract` names
        with reading_in_words(path), context:
            loaded = orbax.load(str(path), unflatten_dict(abstract, sep="/"))
        state = from_layers(target, self._setup.storage, dict(named_leaves(loaded, "/")))
        changes = []
        changed = changed_keys(before["fields"], now["fields"])
        if changed:
            changes.append(in_words(changed, before["fields"], now["fields"]))
        if with_optimizer:
            given = first_numbers(self._setup)
            opt_state, numbers = with_given_numbers(state.opt_state, before["numbers"], given)
            state = dataclasses.replace(state, opt_state=opt_state)
            changes += [str(number) for number in numbers]
        if changes and jax.process_index() == 0:
            _log.warning("%s was saved with other settings: %s", path, "; ".join(changes))
        return state

    def stored(self) -> tuple[int, dict[str, TensorStore]]:
        """The variables of the newest whole checkpoint's model, opened to be read in parts.

        Returns:
          the step, and arrays by the names of `by_layer`: `array[0, 2:4].read().result()`.
        Raises:
          FileNotFoundError: there is no checkpoint that is whole.
          ValueError: it cannot be read.
        """
        path = self._folder / str(self._resolve(None))
        with reading_in_words(path):
            names = [n for n in _stored_arrays(path) if n.startswith(("params/", "frozen/"))]
            paths = {name: name.replace("/", ".") for name in names}
            return int(path.name), open_arrays(path / _ARRAYS, paths)

    def described(self, step: int) -> Json:
        """The description of a checkpoint, with that of its task, its losses and its data.

        Raises:
          OSError, ValueError: there is no such checkpoint, or it is damaged.
        """
        return read_table(self._folder / str(step) / _DESCRIPTION, _DESCRIBED)

    def stored_losses(self) -> dict[int, float]:
        """Step -> validation loss, of all validations in whole checkpoints."""
        found: dict[int, float] = {}
        for _, described in sorted(self._examine()[0].items()):
            found |= {int(number): float(loss) for number, loss in described["losses"].items()}
        return found

    def _delete_old(self, step: int) -> None:
        """Deletes whole checkpoints before this step, except the newest and the best."""
        train = self._setup.train
        steps = [each for each in self.steps() if each <= step]  # later ones are damaged
        best = best_of(steps, self.losses if train.keep_best else {})
        for each in {*steps} - {*steps[-train.keep_checkpoints :], best}:
            remove_folder(_withdraw(self._folder / str(each)))

    def close(self) -> None:
        """Waits for a save in the background.

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
            self._rendezvous.do(self._check)  # its message is better if the folder is gone
            newest = max(self.steps(), default=None)
            left = "there is none" if newest is None else f"the newest is of step {newest}"
            raise type(error)(
                f"checkpoint {self._folder / str(self.saved_step)} could not be written: {fact_of(error)}\n"
                f"Fix: free some space, and continue from the newest whole checkpoint ({left})"
            ) from error

    def _examine(self) -> tuple[dict[int, Json], dict[int, str]]:
        """The descriptions of whole checkpoints, and the problems of others; only sizes are compared."""
        whole, damaged = {}, {}
        for path in self._folder.glob("*"):
            if path.name.isdecimal() and not _is_half_written(path):
                try:
                    whole[int(path.name)] = _read_whole(path, self._run)
                except (OSError, ValueError) as error:
                    damaged[int(path.name)] = str(error)
        return whole, damaged

    def _resolve(self, step: int | None, best: bool = False) -> int:
        """The step of a checkpoint that is whole; warns of damaged ones."""
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
                        _log.warning("skipped the damaged checkpoint %s: %s", path, told)
                return each
            damaged[each] = problem
        which = f" of step {step}" if step is not None else " of a validated step" if best else ""
        told = "".join(f"; {number}: {problem}" for number, problem in sorted(damaged.items()))
        left = sorted(whole.keys() - damaged.keys())
        remedy = f"use one of {left}" if left else "name a run that has saved one"
        raise FileNotFoundError(
            f"{self._folder} holds no complete checkpoint{which}{told}\nFix: {remedy}"
        )

    def _find_changed(self, step: int, expected: Mapping[str, str]) -> str | None:
        """The problem with a file of a checkpoint; None if all are as they were written.

        Every process reads a part of the files, and all get the same answer.
        """
        mine = sorted(expected)[jax.process_index() :: jax.process_count()]
        try:
            found = checksums(self._folder / str(step), mine)
            changed = (f"{n} is not what was written" for n in mine if found[n] != expected[n])
            problem = next(changed, None)
        except OSError as error:
            problem = str(error)
        return self._rendezvous.exchange(
            problem, lambda told: next(filter(None, told.values()), None)
        )


# ---- writing ----


@dataclasses.dataclass
class Writing:
    """Begins to write a checkpoint; returns as soon as the arrays may change.

    Attributes:
      path: folder of the checkpoint, once it is whole.
      arrays: nested tables of arrays; may be donated afterwards.
      described: content of checkpoint.json, without checksums.
      rendezvous: exchange between processes; all of them do the same.
      check: called in process 0 before anything is made, and before the checkpoint counts; may raise an
        OSError.
      clean_up: called in process 0 when the checkpoint is whole.
      on_failure: called in every process, from another thread, if the checkpoint cannot be written.
    Raises:
      OSError: its folder cannot be made; in every process alike.
    """

    path: Path
    arrays: dataclasses.InitVar[Arrays]
    described: Json
    rendezvous: Rendezvous
    check: Callable[[], object]
    clean_up: Callable[[], object]
    on_failure: Callable[[], object]

    def __post_init__(self, arrays: Arrays) -> None:
        self._partial = self.path
        if not in_bucket(self.path):
            name = f"{self.path.name}{_HALF_WRITTEN}-{next(_attempts)}"
            self._partial = self.path.with_name(name)
        self._is_first, self._error = jax.process_index() == 0, None
        self._do(self._make_folder)
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(arrays,), name="checkpoint")
        self._thread.start()
        self._copied.wait()

    def wait(self) -> None:
        """Returns when the checkpoint is whole.

        Raises:
          OSError: it could not be written; in every process alike.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            self.rendezvous.do(work, self._describe)
        except SharedError:
            raise
        except Exception as error:
            raise OSError(self._describe(error)) from error

    def _run(self, arrays: Arrays) -> None:
        try:
            array_handler = _array_handler_class()()
            handler = _tree_handler(array_handler)
            self._do(lambda: self._write(handler, array_handler, arrays))
            self._do(lambda: self._finish(handler))
        except Exception as error:
            self._error = error
            if self._is_first:
                self._remove()
            self.on_failure()
        finally:
            self._copied.set()

    def _make_folder(self) -> None:
        if self._is_first:
            self.check()
            for folder in filter(_is_half_written, self.path.parent.glob("*")):
                with contextlib.suppress(OSError):
                    remove_folder(folder)
            if in_bucket(self._partial):
                remove_folder(self._partial)  # nothing of another attempt comes into this one
            else:
                (self._partial / _ARRAYS).mkdir(parents=True)

    def _remove(self) -> None:
        """Removes the half-written files if they are this run's: the next save may need the space."""
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):  # the folder is gone, with its lock
                self.check()
            if _is_half_written(self._partial):
                remove_folder(self._partial)

    def _write(
        self, handler: orbax.PyTreeCheckpointHandler, array_handler: Any, arrays: Arrays
    ) -> None:
        """Writes the shards of this process. No write is left, whether it returns or raises."""
        from orbax import checkpoint as orbax

        loop = asyncio.new_event_loop()
        written = handler.async_save(self._path_of_arrays(), args=orbax.args.PyTreeSave(arrays))
        with _errors_once():
            try:
                futures = loop.run_until_complete(written)
                self._copied.set()
                for future in futures or []:
                    future.result()
            finally:
                array_handler.wait()
                loop.close()

    def _finish(self, handler: orbax.PyTreeCheckpointHandler) -> None:
        """Puts the parts of all processes together, and gives the folder its name."""
        if not self._is_first:
            return
        from orbax.checkpoint import v1

        handler.finalize(self._path_of_arrays())
        reader = v1.handlers.PyTreeHandler
        described = {
            "item_handlers": {_ARRAYS: f"{reader.__module__}.{reader.__qualname__}"},
            "commit_timestamp_nsecs": time.time_ns(),
        }
        (self._partial / _METADATA).write_bytes(json.dumps(described).encode())
        (self._partial / _COMMITTED).write_bytes(b"all arrays are written")
        files = checksums(self._partial, list(sizes_of(self._partial)))
        self.check()
        write_table(self._partial / _DESCRIPTION, {**self.described, "checksums": files})
        if self._partial != self.path:
            if self.path.exists():  # a damaged one
                remove_folder(_withdraw(self.path))
            self._partial.rename(self.path)
        self.clean_up()

    def _path_of_arrays(self) -> epath.Path:
        """The folder of the arrays, as Orbax takes it."""
        from orbax.checkpoint import v1

        return v1.options.FileOptions().path_class(self._partial / _ARRAYS)

    @staticmethod
    def _describe(error: Exception) -> str:
        """The reason that the operating system gives."""
        text = str(error)
        if code := re.search(r"os_error_code='(\d+)'", text):  # TensorStore's, in a ValueError
            return os.strerror(int(code[1]))
        return getattr(error, "strerror", None) or text.split("\n")[0] or type(error).__name__


def check_storable(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Checks that a checkpoint can hold arrays: writes and reads one number of each type, in memory.

    Args:
      arrays: shapes and types by names with slashes.
    Raises:
      ValueError: TensorStore does not know a type, or takes a name for that of another array.
    """
    import tensorstore

    names = sorted((f"{name.replace('/', '.')}.", name) for name in arrays)
    for (path, name), (other_path, other) in itertools.pairwise(names):
        require(
            not other_path.startswith(path),
            f"a checkpoint cannot tell {name} and {other} apart\nFix: use keys without '/' and '.'",
        )
    memory = {"driver": "zarr3", "kvstore": {"driver": "memory"}}
    for dtype, name in {np.dtype(leaf.dtype): name for name, leaf in arrays.items()}.items():
        one = np.ones(1, dtype)
        try:
            stored = tensorstore.open(memory, create=True, dtype=dtype, shape=[1]).result()
            stored.write(one).result()
            is_same = stored.read().result().tobytes() == one.tobytes()
        except (TypeError, ValueError):
            is_same = False
        require(
            is_same,
            f"{name} is {dtype}{list(arrays[name].shape)}, and checkpoints cannot hold {dtype}\n"
            f"Fix: use another type, such as float32 or int32",
        )


def _is_half_written(path: Path) -> bool:
    """Whether a save that did not end has left this in a folder of checkpoints."""
    if not in_bucket(path):
        return _HALF_WRITTEN in path.name
    return path.name.isdecimal() and not (path / _DESCRIPTION).exists()


def _withdraw(path: Path) -> Path:
    """Marks a checkpoint as half-written, so that the next save removes it; returns where it is now."""
    if not in_bucket(path):
        return path.rename(path.with_name(f"{path.name}{_HALF_WRITTEN}"))
    (path / _DESCRIPTION).unlink()
    return path


def open_arrays(
    folder: Path, paths: Mapping[str, str], driver: str = "zarr3"
) -> dict[str, TensorStore]:
    """Arrays that Orbax has written, by any names, opened to be read in parts.

    Args:
      paths: of the arrays in the folder.
    """
    import tensorstore

    context = tensorstore.Context()  # they are in one database
    base: Json | str = f"{folder}/"
    if not in_bucket(folder):
        base = {"driver": "file", "path": f"{folder.resolve()}/"}
    opened = {}
    for name, path in paths.items():
        spec = {
            "driver": driver,
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{path}/"},
        }
        opened[name] = tensorstore.open(spec, context=context, read=True, open=True)
    return {name: array.result() for name, array in opened.items()}


@functools.cache
def _array_handler_class() -> Callable[[], Any]:
    """A class of Orbax's that can wait for all writes; made late, as importing Orbax takes long."""
    from orbax import checkpoint as orbax

    class ArrayHandler(orbax.type_handlers.ArrayHandler):
        def __init__(self):
            # Each replica of a large array writes a part; for a small one, compiling the cuts takes longer.
            super().__init__(min_slice_bytes_for_replica_parallel=_MIN_PART_BYTES)
            self._futures: list[orbax.Future] = []

        async def serialize(self, values, infos, args=None):
            # Orbax awaits the folder of an array in each event loop that writes something of it.
            infos = [info.replace(await_path_creation=_close_last) for info in infos]
            futures = await super().serialize(values, infos, args)
            self._futures.extend(futures)
            return futures

        def wait(self) -> None:
            """Returns when all writes have ended, also those that failed."""
            for future in self._futures:
                with contextlib.suppress(Exception):
                    future.result()

    return ArrayHandler


def _tree_handler(array_handler: Any) -> orbax.PyTreeCheckpointHandler:
    """Of a tree of arrays."""
    from orbax import checkpoint as orbax

    registry = orbax.type_handlers.create_type_handler_registry((jax.Array, array_handler))
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, type_handler_registry=registry
    )


async def _close_last() -> None:
    """Makes the running event loop wait for all of its tasks before it closes.

    Orbax closes it at the first error, while other writes go on. Each of them would report to the closed loop
    and print a traceback.
    """
    loop = asyncio.get_running_loop()
    if "close" in vars(loop):  # done for another array
        return
    close = loop.close

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # now who waits for a task sees its error, or Python would print it

    def close_last() -> None:
        loop.run_until_complete(end())
        close()

    loop.close = close_last


@contextlib.contextmanager
def _errors_once() -> Iterator[None]:
    """Drops what Orbax logs of errors with their tracebacks: it raises them as well."""
    logger = logging.getLogger("absl")

    def is_new(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


# ---- files and checks ----


def checksums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The size and the hash (XXH3, 128 bits) of files of a folder, by their names; they detect damage."""
    with ThreadPoolExecutor() as threads:  # xxhash releases Python's lock
        found = threads.map(lambda name: _checksum(folder / name), names)
        return dict(zip(names, found, strict=True))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return f"{file.tell()} {found}"


def best_of(steps: Sequence[int], losses: Mapping[int, float]) -> int | None:
    """The step with the lowest finite loss, the later one of equals; None if there is none."""
    known = (step for step in steps if math.isfinite(losses.get(step, math.inf)))
    return min(known, key=lambda step: (losses[step], -step), default=None)


def write_table(path: Path, content: Json) -> None:
    """Writes a table as JSON, with its own hash; the file appears whole or not at all.

    Raises:
      OSError: it cannot be written.
    """
    text = json.dumps({**content, _HASH: _hash_of(content)}, indent=1)
    write_file(path, text.encode())


def read_table(path: Path, types: Json) -> Json:
    """The table that `write_table` has written into a file.

    Args:
      types: types of the values by their keys, all of which are needed.
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


def _hash_of(content: Json) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def _read_whole(path: Path, run: str | None) -> Json:
    """The description of a checkpoint.

    Raises:
      OSError: one of its files cannot be read.
      ValueError: a file has another size than was written, or the checkpoint is of another step or run.
    """
    sizes = sizes_of(path)
    require(_DESCRIPTION in sizes, f"{_DESCRIPTION} is missing")
    described = read_table(path / _DESCRIPTION, _DESCRIBED)
    step, its_run = described["step"], described["run"]
    require(step == int(path.name), f"it is the checkpoint of step {step}")
    require(run in (None, its_run), f"it is of another run ({its_run}, not {run})")
    for name, expected in described["checksums"].items():
        size = expected.partition(" ")[0]
        require(name in sizes, f"{name} is missing")
        require(str(sizes[name]) == size, f"{name} has {sizes[name]} of {size} bytes")
    return described


def _stored_arrays(path: Path) -> Shapes:
    """Shapes and types of the arrays of a checkpoint, by their names.

    Raises:
      ValueError: an array is stored in chunks larger than itself; a chunk is unpacked whole.
    """
    from orbax.checkpoint import v1 as orbax

    stored = dict(named_leaves(orbax.metadata(str(path)).metadata, "/"))
    for name, array in stored.items():
        chunk = array.storage_metadata.chunk_shape
        fits = all(part <= max(size, 1) for part, size in zip(chunk, array.shape, strict=True))
        require(fits, f"{name} {list(array.shape)} is stored in chunks of {list(chunk)}")
    return stored


@contextlib.contextmanager
def reading_in_words(path: Path) -> Iterator[None]:
    """Orbax may raise any error for damaged files, with many lines; this raises a ValueError of one line."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}".split("\n")[0]
        raise ValueError(f"{path} is damaged: {reason}\nFix: restore it from a backup") from error


def _describe(setup: Setup) -> Json:
    """The task, the settings and the optimizer of a setup, as JSON has them."""
    optimizer = setup.task.config_of_optimizer
    described = {
        "task": type(setup.task).__name__,
        "fields": describe_settings(setup),
        "optimizer": vars(optimizer) if dataclasses.is_dataclass(optimizer) else {},
        "numbers": as_texts(first_numbers(setup)),
    }
    return json.loads(json.dumps(described, default=repr))


def _check_task(path: Path, before: Json, now: Json) -> None:
    """Raises a ValueError if a checkpoint is of another task than this one, both as of `_describe`."""
    require(
        before["task"] == now["task"],
        f"{path} must be of the task {now['task']}, got {before['task']}\nFix: use a run of this task",
    )


def _check_arrays(
    path: Path, stored: Shapes, needed: Shapes, before: Json, now: Json, free: list[str]
) -> None:
    """Raises a ValueError if a checkpoint lacks an array of a state; names the settings that differ.

    Args:
      stored, needed: arrays by their names, with shapes and types.
      before, now: as of `_describe`.
      free: keys of the settings that mostly leave arrays as they are.
    """
    has, wants = (
        {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
        for arrays in (stored, needed)
    )
    differ = [name for name in {**wants, **has} if wants.get(name) != has.get(name)]
    of_model = [name for name in differ if name.startswith(("params/", "frozen/"))]
    was, is_now = (described["optimizer"].get("name") for described in (before, now))
    require(
        bool(of_model) or None in (was, is_now) or was == is_now,
        f"{path} is of another optimizer: expected name={is_now!r}, got name={was!r}\n"
        f"Fix: set it as it was, {_ELSEWHERE}",
    )
    changed = changed_keys(before["fields"], now["fields"])
    why, fix = "", "set model, optimizer, frozen parameters and batch_size as they were"
    if changed:
        why = f"; settings have changed: {in_words(changed, before['fields'], now['fields'])}"
        fix = f"set {' and '.join(checked_keys(changed, free) or changed)} as before"
    for name in of_model or differ:
        raise ValueError(
            f"{path}: {name} must be {wants.get(name, 'absent')}, got {has.get(name, 'nothing')}{why}\n"
            f"Fix: {fix}, {_ELSEWHERE}"
        )
