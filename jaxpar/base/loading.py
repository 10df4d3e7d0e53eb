"""Which file of a user's is being run, to find the task in it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

_file = ContextVar[Path | None]("file", default=None)


@contextlib.contextmanager
def loading(path: Path) -> Iterator[None]:
    """What is called meanwhile is called by a file that is loaded, not by a program."""
    token = _file.set(path)
    try:
        yield
    finally:
        _file.reset(token)


def guard_remedy(call: str) -> str | None:
    """What to do about a call of a file that is being loaded; None if none is."""
    if (path := _file.get()) is None:
        return None
    return (
        f"{path.name} is only loaded here, for the task in it; put what it runs besides, such as {call}, "
        f'under `if __name__ == "__main__":`'
    )
