"""SIGINT and SIGTERM end a run after the step under way, in all of its processes after the same one.

    process 0    step 41 | step 42 | stop        gets a signal in step 41, and asks all to stop
    process 1    step 41 | step 42 | stop        was in step 42 then: all go as far as the farthest

They talk by way of the coordinator, in threads of their own that look twice a second: what a step pays is
a lock that nobody else holds. If each left after its own step, some would wait in a collective forever. What
one of them cannot write ends the run in the same way, and so does a report that asks for it.

The same threads look for stalls: a process in which no step begins for a while prints its stacks on stderr,
and again as long as that lasts: a slow step may be followed at once by one that keeps Python's lock.
"""

import contextlib
import faulthandler
import json
import re
import signal
import threading
import time

import jax

from jaxpar.hosts.agree import KeyValueBoard, describe_processes

POLL_SECONDS = 0.5
STALL_SECONDS = 300.0  # between two calls, before a process prints its stacks

_ASKED, _LOST = "asked", "lost/"
_ANSWER_POLLS = 10
# In an error of a step, when it is another process that is gone.
_OF_OTHERS = re.compile("gloo|nccl|connection|UNAVAILABLE|heartbeat", re.IGNORECASE)


class Stopped(Exception):  # noqa: N818
    """This is the place to stop."""


class Interrupted(KeyboardInterrupt):
    """Something has ended after a signal, with what it has done saved; says how it goes on.

    Attributes:
      signal: that ended it.
    """

    def __init__(self, told: str, signal: signal.Signals):
        super().__init__(told)
        self.signal = signal


class Stop:
    """Whether to stop: ask before every piece of work, while it is open as a context manager.

    The first signal is noted; a second one acts as usual. With several processes, all of them open it and
    ask equally often.

    Attributes:
      reason: a signal, or the reason of a request, that ended the run; None as long as `now` says no.
    """

    def __init__(self) -> None:
        self.reason: signal.Signals | str | None = None
        self._received: list[int | str] = []  # numbers of signals, and reasons
        self._handlers = {}
        self._group = _Group() if jax.process_count() > 1 else None

    def __enter__(self) -> "Stop":
        # Python delivers signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._handlers = {number: signal.getsignal(number) for number in numbers}
            for number in numbers:
                signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore()
        if self._group is not None:
            is_of_others = isinstance(error, jax.errors.JaxRuntimeError) and _OF_OTHERS.search(
                str(error)
            )
            lost = self._group.find_lost() if is_of_others else []
            self._group.close()
            if lost:
                raise LostProcessError(
                    f"{describe_processes(lost)} of {jax.process_count()} ended in the middle of a step\n"
                    f"Fix: start all processes again with --resume."
                ) from error

    def now(self) -> bool:
        """Whether this is the place to stop."""
        reason = self._received[0] if self._received else None
        if self._group is not None:
            reason = self._group.pass_by(reason)
        self.reason = signal.Signals(reason) if isinstance(reason, int) else reason
        return reason is not None

    def request(self, reason: str = "") -> None:
        """Asks to stop as a signal does; any thread of any process may."""
        self._received.append(reason)

    def check(self) -> None:
        """Asks in the middle of something.

        Raises:
          Stopped: this is the place to stop.
        """
        if self.now():
            raise Stopped

    def _receive(self, number: int, _frame: object) -> None:
        self._received.append(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class LostProcessError(RuntimeError):
    """Other processes have ended before this one."""


class _Group:
    """Several processes, which agree on the call of `pass_by` at which all stop."""

    def __init__(self) -> None:
        self._board = KeyValueBoard("stop")
        self._num_calls = 0
        self._agreed: tuple[int, int | str] | None = None  # after how many calls, and why
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def pass_by(self, received: int | str | None) -> int | str | None:
        """Counts the call; why all stop here, if they do.

        Args:
          received: why this process asks for it.
        """
        if received is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it has been asked for already
                self._board.put(_ASKED, json.dumps(received))
        with self._lock:
            if self._agreed is not None and self._num_calls >= self._agreed[0]:
                return self._agreed[1]
            self._num_calls += 1
        return None

    def find_lost(self) -> list[int]:
        """The numbers of processes whose threads do not answer."""
        alive = {jax.process_index()}
        try:
            self._board.put(f"{_LOST}{jax.process_index()}", "")
            for _ in range(_ANSWER_POLLS):
                time.sleep(POLL_SECONDS)
                told = (name.partition("/") for name in self._board.texts())
                alive |= {int(number) for what, _, number in told if number}
                if len(alive) == jax.process_count():
                    break
        except jax.errors.JaxRuntimeError:  # not reached: process 0, the coordinator, is lost
            return [0]
        return sorted({*range(jax.process_count())} - alive)

    def close(self) -> None:
        """For a process that will not call again: the others do not wait for it."""
        self._closed.set()
        # It may have told already, or process 0 may be gone.
        with self._lock, contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell()
        self._watcher.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        num_calls, answered = -1, False
        while not self._closed.wait(POLL_SECONDS):
            if num_calls != self._num_calls:  # it needs no lock of Python's to print
                num_calls = self._num_calls
                faulthandler.dump_traceback_later(STALL_SECONDS, repeat=True)
            try:
                texts = self._board.texts()
                if not answered and any(name.startswith(_LOST) for name in texts):
                    answered = True
                    self._board.put(f"alive/{jax.process_index()}", "")
                if (asked := texts.get(_ASKED)) is None:
                    continue
                with self._lock:  # no more steps here until it is known how far the others are
                    self._tell()
                    told = [self._board.wait_for(str(n), n) for n in range(jax.process_count())]
                    self._agreed = max(map(int, told)), json.loads(asked)
            except jax.errors.JaxRuntimeError:  # not reached: a process has ended meanwhile
                pass  # this process has closed, or the coordinator is gone and JAX ends this one
            return

    def _tell(self) -> None:
        self._board.put(str(jax.process_index()), str(self._num_calls))
