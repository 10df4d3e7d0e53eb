"""Runs `python -m jaxpar` as the child of a launcher, and ends it when that is gone, whatever ended it.

    python leash.py FD arguments...

FD is the end to read of a pipe that the launcher holds the other end of and never writes to: it closes when
the launcher dies, killed or not. A file of its own without JAX: the watch begins before the imports do.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

# A run saves its state after the step under way; all are gone 10 s after their launcher.
GRACE_SECONDS = 7.0
_PR_SET_PDEATHSIG = 1


def hold(descriptor: int) -> None:
    """Ends this process when the other end of the pipe is closed: SIGTERM, and soon the end.

    On Linux one that is stopped (SIGSTOP) is woken for it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_watch, args=(descriptor,), daemon=True).start()


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Nobody reads what is printed; a broken pipe would end the run before its state is saved.
    for stream in {1, 2, sys.stdout.fileno(), sys.stderr.fileno()}:
        os.dup2(nowhere, stream)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    hold(int(sys.argv[1]))
    sys.path[0] = os.getcwd()  # as of -m
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    runpy.run_module("jaxpar", run_name="__main__", alter_sys=True)
