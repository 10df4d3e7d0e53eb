"""Who hangs: when no more steps begin, processes say where they are, and the culprit is named.

    process 0    step 41 | step 42 . . . . . . . .     waits in JAX for the others, and names
    process 1    step 41 | reads a batch . . . . .     process 1, which is in read (data.py, line 31)

JAX notices a process that is gone or stopped. It does not notice one that runs or sleeps in Python forever,
and all wait. A healthy run pays for a look at its own thread twice a second, and sends nothing.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from jaxpar.hosts.agree import describe_processes

STALL_SECONDS = 20.0  # between two steps, before a process tells where it is
_ANSWER_SECONDS = 3.0  # for the others to do so
_NO_ANSWER = "does not answer: a signal has stopped it, or it keeps Python's lock"
_KEY, _FRAMES_NAMED = "jaxpar/hanging", 3
_HERE = Path(__file__).parent
# A thread in these waits for devices or other processes.
_WAITING = (str(Path(jax.__file__).parent), str(_HERE), str(_HERE.parent / "step.py"))


class HangWatch:
    """Looks from another thread at the one that it was made in.

    Args:
      client: of JAX's coordinator.
    """

    def __init__(self, client: Any):
        self._client, self._thread = client, threading.get_ident()
        self._num_steps, self._began, self._num_looks = -1, 0.0, 0
        self._instruction: tuple[int, int] | None = None  # at the last look
        self._asked_at, self._has_judged = float("inf"), False
        self._before: dict[str, str] = {}  # what had been told then

    def look(self, num_steps: int) -> None:
        """Call it about twice a second.

        Args:
          num_steps: that this process has begun; a change means that it is making progress.
        """
        now, place = time.monotonic(), self._find_place()
        self._num_looks += 1
        if num_steps != self._num_steps:
            self._num_steps, self._began = num_steps, now
            self._asked_at, self._has_judged = float("inf"), False
        elif now - self._began > STALL_SECONDS:
            key = f"{_KEY}/{jax.process_index()}"
            self._client.key_value_set(
                key, json.dumps([self._num_looks, place]), allow_overwrite=True
            )
            if self._asked_at == float("inf"):
                self._asked_at, self._before = now, self._read()
            elif now - self._asked_at > _ANSWER_SECONDS and not self._has_judged:
                self._has_judged = True
                self._judge(now - self._began)

    def _read(self) -> dict[str, str]:
        return dict(self._client.key_value_dir_get(_KEY))

    def _judge(self, seconds: float) -> None:
        """Names those that the others wait for; the first of these says it."""
        told, count, places = self._read(), jax.process_count(), {}
        for number in range(count):
            key = f"{_KEY}/{number}"
            is_new = key in told and told[key] != self._before.get(key)
            places[number] = json.loads(told[key])[1] if is_new else _NO_ANSWER
        waiting = [number for number, place in places.items() if not place]
        if jax.process_index() != min(waiting, default=None):
            return
        for number in sorted(places.keys() - {*waiting}):
            print(
                f"warning: process {number} of {count} hangs: no step has begun for {seconds:.0f} s, and "
                f"{describe_processes(waiting)} wait{'s' * (len(waiting) == 1)} for it; it "
                f"{places[number]}",
                file=sys.stderr,
                flush=True,
            )

    def _find_place(self) -> str:
        """Where the thread is, from the inside out; "" if it waits, and has since the last look."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "has ended"
        before, self._instruction = self._instruction, (id(frame), frame.f_lasti)
        if frame.f_code.co_filename.startswith(_WAITING) and before == self._instruction:
            return ""
        names = []
        while frame is not None and len(names) < _FRAMES_NAMED:
            code = frame.f_code
            names.append(f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})")
            frame = frame.f_back
        return f"is in {', from '.join(names)}"
