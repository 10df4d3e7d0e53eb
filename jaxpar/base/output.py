"""Printed output that nobody reads is dropped; and the name of the program."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

# As this process was started, for lines to copy; from Python of one's own it is the module.
PROGRAM = "jaxpar" if Path(sys.argv[0]).name == "jaxpar" else "python -m jaxpar"
# Errors of a full disk end no run. Who shares a run with others adds that of a reader who has gone.
DROPPED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Lossy(io.FileIO):
    """A file that drops what it cannot take, and says so once on stderr."""

    has_warned = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in DROPPED:  # not reached: nothing that tests write to says so
                raise
            if not self.has_warned:
                self.has_warned = True
                print(f"warning: printed output is lost: {error.strerror}", file=sys.stderr)
            return len(data)


def open_streams() -> None:
    """Opens what a shell has closed (`>&-`) on nothing; else the next file or pipe gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # it stays open
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def keep_printing() -> None:
    """Makes this process's own stdout and stderr lossy; those of a notebook stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            stream.flush()
            file = io.BufferedWriter(_Lossy(os.dup(stream.fileno()), "w"))
            lossy = io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, lossy)
            setattr(sys, f"__{name}__", lossy)


def share_streams() -> None:
    """For one process of many: what libraries print goes to stderr, and a reader who has gone is no error.

    Gloo, under JAX's CPU collectives, prints a line for every group of devices, from several
    threads, in pieces that would fall between those of a report.
    """
    DROPPED.add(errno.EPIPE)  # the run is not this process's alone
    # Gloo writes to no stdout of a notebook or a test.
    if sys.stdout is sys.__stdout__:
        keep_printing()  # stdout gets a descriptor of its own
        os.dup2(2, 1)
