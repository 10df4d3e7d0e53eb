"""Processes that begin a run agree on it, or all of them refuse and name who differs in what.

Every process gives its facts to the key-value store of JAX's coordinator; process 0 compares them, and its
verdict goes to all. No device takes part, so it comes before anything is compiled.
"""

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src.distributed import global_state  # there is no public way to its key-value store

from jaxpar.fields import leaves_of

_FAILED = "failed"
_NAMED = 5  # differences that a message names
_NOTICE_SECONDS = 20.0  # twice as long each time
_LEAVE_SECONDS = 10.0  # that a process which fails has for telling the others


def differences(facts: Mapping[int, Mapping[str, str]]) -> str:
    """In words, what differs between processes, with its value in each; "" if they agree.

    Args:
      facts: of each process, by its number; texts by their names.
    """
    names = list(dict.fromkeys(name for each in facts.values() for name in each))
    found = []
    for name in names:
        processes: dict[str, list[int]] = {}
        for number, each in sorted(facts.items()):
            processes.setdefault(each.get(name, "not there"), []).append(number)
        if len(processes) > 1:
            parts = (
                f"{value} in {describe_processes(where)}" for value, where in processes.items()
            )
            found.append(f"{name} is {', '.join(parts)}")
    more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return "; ".join(found[:_NAMED] + more)


def agree(*facts: Any, remedy: str, last: bool = False) -> None:
    """Returns when all processes have come here with the same facts; at once in a process that runs alone.

    Args:
      facts: tables and dataclasses, whose values are compared by their `repr`.
      remedy: what to do if they differ.
      last: from here on a process that fails need not tell the others.
    Raises:
      ValueError: they differ, or a process has failed on its way here; in all processes alike.
    """
    found = {
        name: re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # an object's address is its own
        for each in facts
        for name, value in leaves_of(each).items()
    }
    _state.agree(found, remedy, last=last)


def await_agreement() -> None:
    """Notes that the others will wait for this process in `agree`: if it fails before, it tells them."""
    _state.is_ahead = True


def tell_failure(message: str) -> None:
    """Lets the others know that this process ends, if they are about to wait for it in `agree`."""
    if _state.is_ahead:
        with contextlib.suppress(ValueError, RuntimeError):
            _state.agree({_FAILED: message}, "", last=True, seconds=_LEAVE_SECONDS)


class _Agreements:
    """The agreements of this process: all processes come to the same ones, one after the other."""

    def __init__(self):
        self.is_ahead = False  # another one, before anything else that needs all processes
        self._turn = 0

    def agree(
        self, facts: dict[str, str], remedy: str, *, last: bool, seconds: float = float("inf")
    ) -> None:
        if global_state.client is None or global_state.num_processes == 1:
            return
        self.is_ahead, self._turn = not last, self._turn + 1

        def judge(told: Mapping[int, str]) -> str:
            return _judge({number: json.loads(text) for number, text in told.items()}, remedy)

        verdict = exchange(
            f"jaxpar/agreement/{self._turn}", json.dumps(facts), judge,
            notice="to begin the run", until=time.monotonic() + seconds,
        )  # fmt: skip
        if verdict:
            self.is_ahead = False
            shut_down()
            raise ValueError(verdict)


_state = _Agreements()


def exchange(
    folder: str,
    text: str,
    judge: Callable[[Mapping[int, str]], str],
    *,
    notice: str = "",
    until: float = float("inf"),
) -> str:
    """What process 0 makes of the texts of all processes, in each of them; a thread of its own may call it.

    Args:
      folder: of keys that nothing else uses.
      text: of this process.
      judge: called in process 0 with the texts by the numbers of processes.
      notice: what a process is waited for that takes long, to be said on stderr; "" says nothing.
      until: when to give up, by the clock `time.monotonic`.
    Raises:
      RuntimeError: a process has not come here by then.
    """
    client = global_state.client
    assert client is not None
    number, verdict_key = global_state.process_id, f"{folder}/verdict"
    if number != 0:
        client.key_value_set(f"{folder}/{number}", text)
        return _wait_for(verdict_key, 0, notice, until)
    told = {0: text}
    for each in range(1, global_state.num_processes):
        told[each] = _wait_for(f"{folder}/{each}", each, notice, until)
    verdict = judge(told)
    client.key_value_set(verdict_key, verdict)
    return verdict


def _judge(facts: Mapping[int, Mapping[str, str]], remedy: str) -> str:
    """What is wrong, in words; "" if nothing is."""
    failed = [
        f"process {number} ended before the run began: {each[_FAILED]}"
        for number, each in facts.items()
        if _FAILED in each
    ]
    if failed:
        return "; ".join(failed[:_NAMED])
    found = differences(facts)
    return f"the processes do not agree: {found}; {remedy}" if found else ""


def _wait_for(key: str, process: int, notice: str, until: float) -> str:
    """The value of a key, once that process has set it.

    Raises:
      RuntimeError: it has not.
    """
    assert global_state.client is not None
    began, notice_at = time.monotonic(), time.monotonic() + _NOTICE_SECONDS
    while True:
        try:
            return global_state.client.blocking_key_value_get(key, 1000)  # then signals are heard
        except jax.errors.JaxRuntimeError as error:
            now = time.monotonic()
            if "DEADLINE_EXCEEDED" not in str(error) or now > until:
                raise
        if notice and now > notice_at:
            print(
                f"waiting for process {process} {notice}, for {now - began:.0f} s",
                file=sys.stderr,
            )
            notice_at = now + (now - began)


def shut_down() -> None:
    """Parts from the others, so that none ends for the loss of another; not forever."""
    thread = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    thread.start()
    thread.join(_LEAVE_SECONDS)


def describe_processes(numbers: Sequence[int]) -> str:
    """In words: `process 3`, or `processes 0 to 2, 5`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in ranges]
    return f"process{'es' * (len(numbers) > 1)} {', '.join(texts)}"
