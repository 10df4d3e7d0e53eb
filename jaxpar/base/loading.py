"""The user's file that is being loaded to find its task."""

from contextvars import ContextVar
from pathlib import Path

LOADED = ContextVar[Path | None]("LOADED", default=None)


def guard_remedy(call: str) -> str | None:
    """What to do about a call of a file that is being loaded; None if none is."""
    if (path := LOADED.get()) is None:
        return None
    return (
        f'put {call} in {path.name} under if __name__ == "__main__", since the file is only loaded'
    )
