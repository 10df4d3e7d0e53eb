"""Paths of this machine, as a user writes them."""

import os
from pathlib import Path


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path that a user names: ~ is the user's home, and ~name that of another user.

    Raises:
      FileNotFoundError: there is no such home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        start = Path(path).parts[0]
        if start == "~":
            fact, remedy = "your home folder is unknown", "set HOME"
        else:
            fact, remedy = f"no user {start[1:]} has a home folder", f"write ./{start} for a folder"
        raise FileNotFoundError(f"{path}: {fact}\nFix: {remedy}, or give a whole path.") from error
