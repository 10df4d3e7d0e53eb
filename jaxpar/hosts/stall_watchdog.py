"""Who stalls a run: when no more steps begin, processes say where they are, and the culprit is named.

    process 0    step 41 | step 42 . . . . . . . .     waits in JAX for the others, and names
    process 1    step 41 | reads a batch . . . . .     process 1, which is in read (data.py, line 31)

JAX notices a process that is gone or stopped. It does not notice one that runs or sleeps in Python forever,
and all wait. A healthy run pays for a look at its own thread twice a second, and sends nothing.
"""

import sys
import threading
import time
from pathlib import Path

import jax

from jaxpar.hosts.agree import Board, describe_processes, say

STALL_SECONDS = 20.0  # between two steps, before a process tells where it is
_ANSWER_SECONDS = 3.0  # for the others to do so
_NO_ANSWER = "does not answer: a signal has stopped it, or it keeps Python's lock"
_FRAMES_NAMED = 3
_HERE = Path(__file__).parent
# A thread in these waits for devices or other processes.
_WAITING = (str(Path(jax.__file__).parent), str(_HERE), str(_HERE.parent / "step.py"))


class StallWatchdog:
    """Looks from another thread at the one that it was made in."""

    def __init__(self) -> None:
        self._board, self._thread = Board("stall"), threading.get_ident()
        self._own = str(jax.process_index())
        self._num_steps, self._began = -1, 0.0
        self._instruction: tuple[int, int] | None = None  # at the last look
        self._asked_at: float | None = None
        self._has_judged = False

    def look(self, num_steps: int) -> None:
        """Call it about twice a second.

        Args:
          num_steps: that this process has begun; a change means that it is making progress.
        """
        now, place = time.monotonic(), self._find_place()
        if num_steps != self._num_steps:
            if self._asked_at is not None:
                self._board.remove(self._own)
            self._num_steps, self._began = num_steps, now
            self._asked_at, self._has_judged = None, False
        elif now - self._began > STALL_SECONDS:
            self._board.put(self._own, place, again=True)
            self._asked_at = self._asked_at or now
            if now - self._asked_at > _ANSWER_SECONDS and not self._has_judged:
                self._has_judged = True
                self._judge(now - self._began)

    def _judge(self, seconds: float) -> None:
        """Names those that the others wait for; the first of these says it."""
        told, count = self._board.texts(), jax.process_count()
        places = [told.get(str(number), _NO_ANSWER) for number in range(count)]
        waiting = [number for number, place in enumerate(places) if not place]
        if jax.process_index() != min(waiting, default=None):
            return
        for number, place in enumerate(places):
            if place:
                say(
                    f"warning: process {number} of {count} hangs: no step has begun for {seconds:.0f} s, and "
                    f"{describe_processes(waiting)} wait{'s' * (len(waiting) == 1)} for it; it {place}"
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
