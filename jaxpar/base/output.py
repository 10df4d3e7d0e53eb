"""What is printed where nobody takes it, which is dropped; and what a reader is told to start."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

# As this process was started, for lines to copy; from Python of one's own it is the module.
PROGRAM = "jaxpar" if Path(sys.argv[0]).name == "jaxpar" else "python -m jaxpar"
# What is no error: of a full disk. Who shares a run with others adds that of a reader who has gone.
DROPPED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_Result = TypeVar("_Result")


def dropping(stream: TextIO) -> TextIO:
    """The stream, but an error of `DROPPED` is none: it is said once, on stderr."""
    return stream if isinstance(stream, _Dropping) else cast("TextIO", _Dropping(stream))


def open_streams() -> None:
    """Opens what a shell has closed (`>&-`) on nothing; else the next file or pipe gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # it stays open
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def keep_printing() -> None:
    """Makes this process's own stdout and stderr such streams; those of a notebook stay as they are."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):
            stream = dropping(getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def share_streams() -> None:
    """For one process of many: what libraries print goes to stderr, and a reader who has gone is no error.

    Gloo, under JAX's CPU collectives, prints a line for every group of devices, from several
    threads, in pieces that would fall between those of a report.
    """
    DROPPED.add(errno.EPIPE)  # the run is not this process's alone
    if sys.stdout is not sys.__stdout__:
        return  # a notebook's, or a test's: Gloo does not write there
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    descriptor = os.dup(1)
    os.dup2(2, 1)
    stdout = os.fdopen(descriptor, "w", buffering=1, encoding=encoding, errors=errors)
    sys.stdout = dropping(stdout)


class _Dropping:
    def __init__(self, stream: TextIO):
        self._stream, self._has_told = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._try(self._stream.flush, None)

    def _try(self, do: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return do()
        except OSError as error:
            if error.errno not in DROPPED:
                raise
            if not self._has_told:
                self._has_told = True
                if self is not sys.stderr:
                    print(f"warning: what is printed gets lost: {error.strerror}", file=sys.stderr)
            return otherwise
