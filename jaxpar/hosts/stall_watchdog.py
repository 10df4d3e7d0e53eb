"""Who stalls a run: a process in which no more steps begin says where it is, unless it waits for the others.

    process 0    step 41 | step 42 . . . . . . . .     waits in JAX for the others, and says nothing
    process 1    step 41 | reads a batch . . . . .     says that it is in read (data.py, line 31)

JAX notices a process that is gone or stopped. It does not notice one that runs or sleeps in Python forever,
and all wait. A healthy run pays for a look at its own thread twice a second. Where the looks stop, because
something keeps Python's lock, `faulthandler` prints the stack without it.
"""

import faulthandler
import sys
import threading
import time
from pathlib import Path

import jax

from jaxpar.hosts.agree import say

STALL_SECONDS = 20.0  # between two steps, before a process tells where it is
_FRAMES_NAMED = 3
_HERE = Path(__file__).parent
# A thread in these waits for devices or other processes.
_WAITING = (str(Path(jax.__file__).parent), str(_HERE), str(_HERE.parent / "step.py"))


class StallWatchdog:
    """Looks from another thread at the one that it was made in."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._num_steps, self._began, self._has_told = -1, 0.0, False
        self._instruction: tuple[int, int] | None = None  # at the last look

    def look(self, num_steps: int) -> None:
        """Call it about twice a second.

        Args:
          num_steps: that this process has begun; a change means that it is making progress.
        """
        faulthandler.dump_traceback_later(STALL_SECONDS)
        place, passed = self._find_place(), time.monotonic() - self._began
        if num_steps != self._num_steps:
            self._num_steps, self._began, self._has_told = num_steps, time.monotonic(), False
        elif passed > STALL_SECONDS and place and not self._has_told:
            self._has_told = True
            who = f"process {jax.process_index()} of {jax.process_count()}"
            say(f"warning: {who} hangs: no step has begun for {passed:.0f} s, and it is in {place}")

    def close(self) -> None:
        """Ends the watch."""
        faulthandler.cancel_dump_traceback_later()

    def _find_place(self) -> str:
        """Where the thread is, from the inside out; "" if it waits, and has since the last look."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return ""  # it has ended
        before, self._instruction = self._instruction, (id(frame), frame.f_lasti)
        if frame.f_code.co_filename.startswith(_WAITING) and before == self._instruction:
            return ""
        names = []
        while frame is not None and len(names) < _FRAMES_NAMED:
            code = frame.f_code
            names.append(f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})")
            frame = frame.f_back
        return ", from ".join(names)
