"""Files that appear whole or not at all, whenever the process is killed; and the user's cache folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write instead of `path`, in the same folder; it takes that name when all went well.

    Raises:
      OSError: it cannot be written; the message names `path`, and what stood there is as it was.
    """
    path = Path(path)
    if not path.parent.is_dir():
        known = "is no folder" if path.parent.exists() else "does not exist"
        kind = NotADirectoryError if path.parent.exists() else FileNotFoundError
        raise kind(
            f"cannot write {path}: {path.parent} {known}; make that folder, or give another place"
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise type(error)(
            f"cannot write {path}: {error.strerror or error}; give a place that can be written"
        ) from error


def cache_folder() -> Path:
    """For what can be made again: $XDG_CACHE_HOME/jaxpar, or ~/.cache/jaxpar.

    Raises:
      FileNotFoundError: the user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxpar"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}; set XDG_CACHE_HOME to a folder") from error
