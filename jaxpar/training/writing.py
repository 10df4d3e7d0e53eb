"""A checkpoint while it is written: by all processes, in the background, and whole or not at all.

    checkpoints/60.orbax-checkpoint-tmp-1/   made by process 0; each process writes its shards there
    checkpoints/60/                          its name, once process 0 has put the parts together

In a bucket, where nothing gets another name at once, all is written there, and checkpoint.json last: without
it that is half of a checkpoint.

Orbax writes and reads the arrays. Its own checkpointers wait at barriers, where a process that cannot write
never comes; here a failure of one is the error of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpar.base.bucket import in_bucket
from jaxpar.base.checks import require
from jaxpar.base.files import remove_folder
from jaxpar.hosts.agree import Rendezvous, SharedError

if TYPE_CHECKING:  # it takes a fifth of a second, and most commands need none of it
    from orbax import checkpoint as orbax

DESCRIPTION = "checkpoint.json"
# By these names Orbax knows them; what is not committed it does not read in a bucket.
_METADATA, _COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"
HALF_WRITTEN = ".orbax-checkpoint-tmp"
_ARRAYS = "state"
_MIN_PART_BYTES = 2**20

_attempts = itertools.count(1)  # late writes of one that failed do not come into the next


class Writing:
    """Begins to write a checkpoint; returns as soon as the arrays may change.

    Args:
      path: its folder, once it is whole.
      arrays: nested tables of arrays; may be donated afterwards.
      together: how the processes keep pace; all of them do the same.
      check: called in process 0 before anything is made; raises an OSError if it is not to be.
      seal: called in process 0 when all else is written, with the folder, to write `DESCRIPTION` there.
      clean_up: called in process 0 after that.
      on_failure: called in every process, from another thread, if the checkpoint cannot be written.
    Raises:
      OSError: its folder cannot be made; in every process alike.
    """

    def __init__(
        self,
        path: Path,
        arrays: Mapping[str, Any],
        *,
        together: Rendezvous,
        check: Callable[[], object] = lambda: None,
        seal: Callable[[Path], object] = lambda _: None,
        clean_up: Callable[[], object] = lambda: None,
        on_failure: Callable[[], object] = lambda: None,
    ):
        self._path, self._together = path, together
        self._check, self._seal, self._clean_up = check, seal, clean_up
        self._on_failure, self._partial = on_failure, path
        if not in_bucket(path):
            self._partial = path.with_name(f"{path.name}{HALF_WRITTEN}-{next(_attempts)}")
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
            self._together.do(work, self._describe)
        except SharedError:
            raise
        except Exception as error:
            raise OSError(self._describe(error)) from error

    def _run(self, arrays: Mapping[str, Any]) -> None:
        try:
            handler = _handler()
            self._do(lambda: self._write(handler, arrays))
            self._do(lambda: self._finish(handler))
        except Exception as error:
            self._error = error
            if self._is_first:
                self._remove()
            self._on_failure()
        finally:
            self._copied.set()

    def _make_folder(self) -> None:
        if self._is_first:
            self._check()
            for folder in filter(is_half_written, self._path.parent.glob("*")):
                with contextlib.suppress(OSError):
                    remove_folder(folder)
            if in_bucket(self._partial):
                remove_folder(self._partial)  # nothing of another attempt comes into this one
            else:
                (self._partial / _ARRAYS).mkdir(parents=True)

    def _remove(self) -> None:
        """Removes what is half-written, where it is this run's: the room may be needed for the next."""
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):  # the folder is gone, with its lock
                self._check()
            if is_half_written(self._partial):
                remove_folder(self._partial)

    def _write(self, handler: orbax.PyTreeCheckpointHandler, arrays: Mapping[str, Any]) -> None:
        """Writes the shards of this process."""
        from orbax import checkpoint as orbax

        loop = asyncio.new_event_loop()
        try:
            written = handler.async_save(self._path_of_arrays(), args=orbax.args.PyTreeSave(arrays))
            futures = loop.run_until_complete(written)
            self._copied.set()
            for future in futures or []:
                future.result()
        finally:
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
        self._seal(self._partial)
        if self._partial != self._path:
            if self._path.exists():  # a damaged one
                remove_folder(withdraw(self._path))
            self._partial.rename(self._path)
        self._clean_up()

    def _path_of_arrays(self) -> Any:
        """Of the kind that Orbax wants."""
        from orbax.checkpoint import v1

        return v1.options.FileOptions().path_class(self._partial / _ARRAYS)

    @staticmethod
    def _describe(error: Exception) -> str:
        """The operating system's reason."""
        text = str(error)
        if code := re.search(r"os_error_code='(\d+)'", text):  # TensorStore's, in a ValueError
            return os.strerror(int(code[1]))
        return getattr(error, "strerror", None) or text.split("\n")[0] or type(error).__name__


def check_storable(arrays: Mapping[str, Any]) -> None:
    """Checks that a checkpoint can hold arrays: one number of each type is written and read, in memory.

    Args:
      arrays: by names with slashes; their shapes and types will do.
    Raises:
      ValueError: the type of one is unknown to TensorStore, or its name is taken for that of another.
    """
    import tensorstore

    names = sorted((f"{name.replace('/', '.')}.", name) for name in arrays)
    for (path, name), (other_path, other) in itertools.pairwise(names):
        require(
            not other_path.startswith(path),
            f"a checkpoint cannot tell {name} and {other} apart\nFix: use keys without '/' and '.'",
        )
    memory: Any = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "create": True}
    for dtype, name in {np.dtype(leaf.dtype): name for name, leaf in arrays.items()}.items():
        one = np.ones(1, dtype)
        try:
            stored = tensorstore.open(memory, dtype=dtype, shape=[1]).result()
            stored.write(one).result()
            is_same = stored.read().result().tobytes() == one.tobytes()
        except (TypeError, ValueError):
            is_same = False
        require(
            is_same,
            f"{name} is {dtype}{list(arrays[name].shape)}, and checkpoints cannot hold {dtype}\n"
            f"Fix: use another type, such as float32 or int32",
        )


def is_half_written(path: Path) -> bool:
    """Whether it is what a save that did not end has left in a folder of checkpoints."""
    if not in_bucket(path):
        return HALF_WRITTEN in path.name
    return path.name.isdecimal() and not (path / DESCRIPTION).exists()


def withdraw(path: Path) -> Path:
    """Makes a checkpoint half of one, which whoever comes next removes; where it is now."""
    if not in_bucket(path):
        return path.rename(path.with_name(f"{path.name}{HALF_WRITTEN}"))
    (path / DESCRIPTION).unlink()
    return path


def open_arrays(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Arrays of a whole checkpoint, by names with slashes, as TensorStore's, of which parts are read."""
    import tensorstore

    context = tensorstore.Context()  # they are in one database
    base: Any = f"{path}/{_ARRAYS}/"
    if not in_bucket(path):
        base = {"driver": "file", "path": f"{path.resolve()}/{_ARRAYS}/"}
    opened = {
        name: tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {
                    "driver": "ocdbt", "base": base, "path": f"{name.replace('/', '.')}/"
                },
            },
            context=context, read=True, open=True,
        )
        for name in names
    }  # fmt: skip
    return {name: array.result() for name, array in opened.items()}


def _handler() -> orbax.PyTreeCheckpointHandler:
    """Replicas of a large array write a part of it each; of a small one, compiling the cuts takes longer."""
    from orbax import checkpoint as orbax

    handlers = orbax.type_handlers
    array_handler = handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_MIN_PART_BYTES)
    registry = handlers.create_type_handler_registry((jax.Array, array_handler))
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, type_handler_registry=registry
    )
