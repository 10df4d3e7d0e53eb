"""Exchanges between processes: all come to the same place and receive the same result.

    process 0    its value, or its error  |  reads all of them, and makes an answer  |  goes on, or raises
    process 1    its value, or its error  |  waits for process 0                     |  goes on, or raises

At a barrier the others would wait forever for a process that has failed on its way there. Here it comes all
the same, and says why. No device takes part, so it may come before anything is compiled, and a thread beside
the steps may do it.
"""

import collections
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxpar.base.checks import Table, leaves_of, see
from jaxpar.base.jax_private import global_state
from jaxpar.base.types import JsonValue

_Result = TypeVar("_Result")
_Answer = Callable[[Mapping[int, JsonValue]], _Result]  # made of the values of all processes
_NAMED = 5  # differences that a message names
_NOTICE_SECONDS = 15.0  # twice as long each time
_numbers = collections.defaultdict[str, Iterator[int]](itertools.count)


class SharedError(OSError):
    """What failed in some processes, raised in all of them, at the same place."""


class DifferentError(ValueError):
    """What differs between processes, raised in all of them, at the same place."""


class KeyValueBoard:
    """Texts that processes leave for each other, by names, with JAX's coordinator.

    All processes make those of one kind in the same order.

    Raises:
      jax.errors.JaxRuntimeError: by every method, the coordinator is gone.
    """

    def __init__(self, kind: str) -> None:
        assert global_state.client is not None  # `start_processes` has made it
        self._client = global_state.client
        self._folder = f"jaxpar/{kind}/{next(_numbers[kind])}"

    def put(self, name: str, text: str) -> None:
        """Leaves a text. It is an error if there is one of that name."""
        self._client.key_value_set(f"{self._folder}/{name}", text)

    def texts(self) -> dict[str, str]:
        """All that are there now."""
        found = self._client.key_value_dir_get(self._folder)
        return {name.removeprefix(f"{self._folder}/"): text for name, text in found}

    def remove(self, name: str) -> None:
        """Takes a text away, or all whose names begin so, if the name ends in /."""
        self._client.key_value_delete(f"{self._folder}/{name}")

    def wait_for(self, name: str, process: int, notice: str = "") -> str:
        """A text, once that process has left it.

        Args:
          notice: as of `Rendezvous.exchange`.
        """
        for passed in waiting():
            if passed and notice:  # not reached: tests do not wait for so long
                say(f"waiting for process {process} {notice}, for {passed:.0f} s")
            try:  # then signals are heard
                return self._client.blocking_key_value_get(f"{self._folder}/{name}", 1000)
            except jax.errors.JaxRuntimeError as error:  # not reached: tests answer within a second
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise AssertionError  # not reached: the loop never ends


class Rendezvous:
    """Exchanges that all processes take part in, one after the other, and in the same order.

    Of several such series, all processes begin the same ones in the same order.
    """

    def __init__(self) -> None:
        self._board: KeyValueBoard | None = None
        self._turn = 0

    def exchange(
        self, value: JsonValue, answer: _Answer[_Result], *, error: str = "", notice: str = ""
    ) -> _Result:
        """What process 0 makes of the values of all processes, in each of them.

        Args:
          value: of this process, as JSON has it.
          answer: called in process 0 with the values by the numbers of processes; what it gives is JSON too.
          error: why this process has no value, to follow the words "process 1"; "" if it has.
          notice: what a process is waited for that takes long, to be said on stderr; "" says nothing.
        Raises:
          SharedError: some have no value; it names them and their errors.
          RuntimeError: the coordinator is gone.
        """
        if global_state.client is None or global_state.num_processes == 1:
            return answer({0: value})
        board = self._board = self._board or KeyValueBoard("together")
        self._turn += 1
        turn = self._turn
        board.put(f"{turn}/{global_state.process_id}", json.dumps([value, error]))
        if global_state.process_id == 0:
            numbers = range(global_state.num_processes)
            told = [json.loads(board.wait_for(f"{turn}/{n}", n, notice)) for n in numbers]
            values = {number: its_value for number, (its_value, _) in enumerate(told)}
            errors = _by_value({number: said for number, (_, said) in enumerate(told) if said})
            failed = "; ".join(describe_processes(n) + said for said, n in errors.items())
            made = None if failed else answer(values)
            board.put(f"{turn}/answer", json.dumps([made, failed]))
            # All have come here, so all have read the answer before.
            board.remove(f"{turn - 1}/")
        made, failed = json.loads(board.wait_for(f"{turn}/answer", 0, notice))
        if failed:
            raise SharedError(failed)
        return made

    def do(
        self,
        work: Callable[[], _Result],
        describe: Callable[[Exception], str] = str,
        answer: _Answer[_Result] | None = None,
    ) -> _Result:
        """The result of this process's part of a work, once those of all have succeeded.

        In a process that runs alone it is that of the part, or its error.

        Args:
          describe: what to say to the others of an error.
          answer: as of `exchange`, makes the result of all parts of theirs, which are JSON then.
        Raises:
          SharedError: a part has failed; it names the processes and their errors.
        """
        if jax.process_count() == 1:
            return work()
        cause, said, result = None, "", None
        try:
            result = work()
        except Exception as error:
            cause, said = error, f": {describe(error) or type(error).__name__}"
        try:
            if answer is not None:
                return self.exchange(result, answer, error=said)
            self.exchange(None, lambda _: None, error=said)
        except SharedError as error:
            raise error from cause
        return result  # pyright: ignore[reportReturnType]  # there is one, for nothing has failed


_of_main_threads = Rendezvous()
_is_awaited = False  # in `agree`, before anything else that needs all processes


def together(work: Callable[[], _Result], answer: _Answer[_Result] | None = None) -> _Result:
    """The result of a work that all processes do, in their main threads; see `Rendezvous.do`."""
    return _of_main_threads.do(work, answer=answer)


def in_process_0(work: Callable[[], _Result]) -> _Result:
    """Does a work in process 0 alone; the others wait for it.

    Returns:
      its result, which JSON must have, in all processes.
    Raises:
      SharedError: it has failed; in a process that runs alone its own error.
    """

    def part() -> Any:
        return work() if jax.process_index() == 0 else None

    return _of_main_threads.do(part, answer=lambda told: told[0])


def agree(*facts: Table, remedy: str, last: bool = False) -> None:
    """Returns when all processes have come here with the same facts; at once in a process that runs alone.

    Args:
      facts: tables and dataclasses, whose values are compared by their `repr`.
      remedy: what to do if they differ.
      last: from here on a process that fails need not tell the others.
    Raises:
      DifferentError: they differ; in all processes alike.
      SharedError: a process has failed on its way here; likewise.
    """
    global _is_awaited
    found = {
        name: re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # an object's address is its own
        for each in facts
        for name, value in leaves_of(each).items()
    }
    _is_awaited = not last
    if differ := _of_main_threads.exchange(found, differences, notice="to begin the run"):
        more = see("The processes do not agree")
        raise DifferentError(f"the processes do not agree: {differ}\nFix: {remedy}.{more}")


def await_agreement() -> None:
    """Notes that the others will wait for this process in `agree`: if it fails before, it tells them."""
    global _is_awaited
    _is_awaited = True


def tell_failure(message: str) -> bool:
    """Lets the others know that this process ends, if they are about to wait for it in `agree`.

    Returns:
      whether all know it.
    """
    if not _is_awaited:
        return False
    error = f" ended before the run began: {message}"
    try:
        _of_main_threads.exchange(None, lambda _: None, error=error)
    except SharedError:
        return True
    return False  # it runs alone


def differences(facts: Mapping[int, Mapping[str, str]]) -> str:
    """In words, what differs between processes, with its value in each; "" if they agree.

    Args:
      facts: of each process, by its number; texts by their names.
    """
    names = list(dict.fromkeys(name for each in facts.values() for name in each))
    found = []
    for name in names:
        values = {number: each.get(name, "not there") for number, each in sorted(facts.items())}
        if len(processes := _by_value(values)) > 1:
            parts = (f"{value} in {describe_processes(n)}" for value, n in processes.items())
            found.append(f"{name} is {', '.join(parts)}")
    more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return "; ".join(found[:_NAMED] + more)


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The numbers of the processes that have each value."""
    processes: dict[str, list[int]] = {}
    for number, value in values.items():
        processes.setdefault(value, []).append(number)
    return processes


def describe_processes(numbers: Sequence[int]) -> str:
    """In words: `process 3`, or `processes 0, 1`."""
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def waiting(seconds: float = float("inf")) -> Iterator[float]:
    """Goes on for so long. Gives the time that has passed when what is waited for is to be said, else 0."""
    began, notice_after = time.monotonic(), _NOTICE_SECONDS
    while (passed := time.monotonic() - began) < seconds:
        if is_long := passed > notice_after:  # not reached: tests do not wait for so long
            notice_after *= 2
        yield passed if is_long else 0.0


def say(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr, flush=True)
