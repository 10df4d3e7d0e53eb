"""Runs `python -m jaxpar` as the child of a launcher, and ends it when that is gone, whatever ended it.

    python parent_watchdog.py FD arguments...

FD is the reading end of a pipe whose other end the launcher holds and never writes to: it closes when
the launcher dies, killed or not. A thread then asks this process to stop with its state saved, and a process
beside it makes sure of the end: no thread runs in one that is stopped, or about to exit, or whose lock of
Python's is held. A file of its own without JAX: the watch begins before the imports do.
"""

import os
import runpy
import select
import signal
import sys
import threading
import time

# How long a process may take to end after SIGTERM: a run saves its state after the step under way, and those
# that wait for a dead one never end. All are gone 10 s after their launcher, or after the first has failed.
GRACE_SECONDS = 6.0
_LOOK_SECONDS = 0.5


def hold(descriptor: int) -> None:
    """Ends this process when the other end of the pipe is closed: SIGTERM, and soon SIGKILL."""
    held = os.getpid()
    if os.fork() == 0:
        try:
            _guard(held, descriptor)
        finally:
            os._exit(0)
    threading.Thread(target=_stop, args=(descriptor,), daemon=True).start()


def _stop(descriptor: int) -> None:
    """The thread: stops this process when the launcher is gone."""
    os.read(descriptor, 1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Nobody reads what is printed; a broken pipe would end the run before its state is saved.
    for stream in {1, 2, sys.stdout.fileno(), sys.stderr.fileno()}:
        os.dup2(nowhere, stream)
    os.kill(os.getpid(), signal.SIGTERM)


def _guard(held: int, descriptor: int) -> None:
    """The process beside it: until that has ended by itself or is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # as long as there is something to guard
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # the launcher waits for the end of what is printed
        os.dup2(nowhere, stream)
    while os.getppid() == held and not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
        pass
    until = time.monotonic() + GRACE_SECONDS
    while os.getppid() == held:
        os.kill(held, signal.SIGCONT if time.monotonic() < until else signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    hold(int(sys.argv[1]))
    sys.path[0] = os.getcwd()  # as of -m
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    runpy.run_module("jaxpar", run_name="__main__", alter_sys=True)
