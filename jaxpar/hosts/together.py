"""Work that every process does a part of: it succeeds in all of them, or fails in all with the same error.

    process 0    writes its part                       | reads what all say | raises
    process 1    writes its part, the disk is full     | waits for process 0 | raises

At a barrier the others would wait forever for a process that has failed on its way there. Here it comes all
the same, and says why. No device takes part, so a thread beside the steps may do such work.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
from jax._src.distributed import global_state  # there is no public way to its key-value store

from jaxpar.hosts.agreement import describe_processes, exchange

_Result = TypeVar("_Result")
_numbers = itertools.count()


class SharedError(OSError):
    """What failed in some processes, raised in all of them, at the same place."""


class DifferentError(ValueError):
    """What differs between processes, raised in all of them, at the same place."""


class Together:
    """Works that all processes do, one after the other, and in the same order.

    Of several such series, all processes begin the same ones in the same order.
    """

    def __init__(self) -> None:
        self._keys, self._turn = "", 0

    def do(
        self, work: Callable[[], _Result], describe: Callable[[Exception], str] = str
    ) -> _Result:
        """The result of this process's part, once those of all have succeeded.

        In a process that runs alone it is that of the part, or its error.

        Args:
          describe: what to say to the others of an error.
        Raises:
          SharedError: a part has failed; it names the processes and their errors.
        """
        if jax.process_count() == 1:
            return work()
        self._keys = self._keys or f"jaxpar/together/{next(_numbers)}"
        self._turn += 1
        cause, said, result = None, "", None
        try:
            result = work()
        except Exception as error:
            cause, said = error, describe(error) or type(error).__name__
        verdict = exchange(f"{self._keys}/{self._turn}", said, _judge)
        if jax.process_index() == 0:  # all have come here, so all have read the verdict before
            assert global_state.client is not None
            global_state.client.key_value_delete(f"{self._keys}/{self._turn - 1}/")
        if verdict:
            raise SharedError(verdict) from cause
        return result  # pyright: ignore[reportReturnType]  # there is one, for nothing has failed


_of_main_threads = Together()


def together(work: Callable[[], _Result]) -> _Result:
    """The result of a work that all processes do, in their main threads; see `Together.do`."""
    return _of_main_threads.do(work)


def in_process_0(work: Callable[[], object]) -> None:
    """Does a work in process 0 alone; the others wait for it.

    Raises:
      SharedError: it has failed; in a process that runs alone its own error.
    """
    together(lambda: work() if jax.process_index() == 0 else None)


def _judge(told: Mapping[int, str]) -> str:
    """The errors, each with the processes that it is of; "" if there is none."""
    processes: dict[str, list[int]] = {}
    for number, said in sorted(told.items()):
        if said:
            processes.setdefault(said, []).append(number)
    return "; ".join(f"{describe_processes(where)}: {said}" for said, where in processes.items())
