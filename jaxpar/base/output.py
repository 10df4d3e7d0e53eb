"""What is printed while a disk is full: what does not fit is dropped, and the program goes on."""

import errno
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar, cast

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_Result = TypeVar("_Result")


def dropping(stream: TextIO) -> TextIO:
    """The stream, but writing to it on a full disk is no error: it is said once, on stderr."""
    return stream if isinstance(stream, _Dropping) else cast("TextIO", _Dropping(stream))


def keep_printing() -> None:
    """Makes this process's own stdout and stderr such streams; those of a notebook stay as they are."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):
            stream = dropping(getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


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
            if error.errno not in _FULL:
                raise
            if not self._has_told:
                self._has_told = True
                if self is not sys.stderr:
                    print(f"warning: what is printed gets lost: {error.strerror}", file=sys.stderr)
            return otherwise
