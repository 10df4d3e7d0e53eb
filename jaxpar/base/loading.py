"""Which file of a user's is being run, to find the task in it."""

from contextvars import ContextVar
from pathlib import Path

LOADED = ContextVar[Path | None]("LOADED", default=None)


def guard_remedy(call: str) -> str | None:
    """What to do about a call of a file that is being loaded; None if none is."""
    if (path := LOADED.get()) is None:
        return None
    return (
        f"{path.name} is only loaded here, for the task in it; put what it runs besides, such as {call}, "
        f'under `if __name__ == "__main__":`'
    )
