"""Folders in Google Cloud Storage, gs://BUCKET/FOLDER, as paths: what a run needs of its folder there.

An object is whole or not there, and what one process has put all others see. No object grows, a folder is
what names begin with, and several objects change one after the other.
"""

import contextlib
import errno
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

from jaxpar.base.checks import require

SCHEME = "gs://"


class BucketPath(PurePosixPath):
    """A path in a bucket, with those methods of `pathlib.Path` that serve there.

    Raises:
      OSError: by every method that asks the storage, it is not there or cannot be reached; with `strerror`
        and `filename`, as those of the system.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text.replace("/", "//", 1) if text.startswith("gs:/") else text

    def __fspath__(self) -> str:
        return str(self)

    def _ask(self, name: str, *args: Any, **options: Any) -> Any:
        """What a method of the storage gives."""
        try:
            return getattr(_storage(), name)(str(self), *args, **options)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from None
        except Exception as error:  # of several packages, some of them no OSError
            reason = f"{error}".split("\n")[0] or type(error).__name__
            raise OSError(errno.EIO, f"the storage says: {reason}", str(self)) from error

    def _kind(self) -> str | None:
        try:
            return self._ask("info")["type"]
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """There is such an object, or one in such a folder."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """There is an object in such a folder."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """There is such an object."""
        return self._kind() == "file"

    def is_symlink(self) -> bool:
        """No: there are no links."""
        return False

    def absolute(self) -> "BucketPath":
        """Itself."""
        return self

    def iterdir(self) -> Iterator["BucketPath"]:
        """What is in the folder, but not in a folder of that."""
        for name in self._ask("ls", detail=False):
            yield self / name.rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """What in the folder has such a name; nothing, if there is no folder."""
        with contextlib.suppress(FileNotFoundError):
            yield from (path for path in self.iterdir() if path.match(pattern))

    def sizes(self) -> dict[str, int]:
        """Bytes of all objects in the folder, by their names from here on."""
        found: dict[str, dict[str, Any]] = self._ask("find", detail=True)
        start = len(str(self)) - len(SCHEME) + 1
        return {name[start:]: int(told["size"]) for name, told in found.items()}

    def size(self) -> int:
        """Bytes of the object."""
        told = self._ask("info")
        if told["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        return int(told["size"])

    def read_bytes(self) -> bytes:
        """The object."""
        return self._ask("cat_file")

    def read_part(self, start: int, end: int) -> bytes:
        """Of the object what is from one byte to before another."""
        return self._ask("cat_file", start=start, end=end)

    def read_text(self, encoding: str = "utf-8") -> str:
        """The object's text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Puts the object; what stood there is gone."""
        self._ask("pipe_file", content)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the object."""
        try:
            self._ask("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmtree(self) -> None:
        """Removes all objects of the folder, if there are any."""
        with contextlib.suppress(FileNotFoundError):
            self._ask("rm", recursive=True)

    def rename(self, target: "BucketPath") -> "BucketPath":
        """Moves the objects of the folder, one after the other."""
        for name in self.sizes():
            (self / name)._ask("mv", str(target / name))
        return target


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path that a user names: ~ is the user's home, and gs:// a bucket.

    Returns:
      of a bucket a `BucketPath`, which has those methods of a Path that such a folder has.
    Raises:
      ValueError: it is a bucket itself, or its package is not there.
    """
    text = os.fspath(path)
    if not text.startswith(SCHEME):
        return Path(path).expanduser()
    found = BucketPath(text)
    require(len(found.parts) > 2, f"{text} names no folder; use gs://BUCKET/FOLDER")
    require(
        importlib.util.find_spec("gcsfs") is not None,
        f"{text} needs the package gcsfs; pip install gcsfs",
    )
    return cast(Path, found)


@functools.cache
def _storage() -> Any:
    """Asks the storage each time: others write there, too. So does Orbax's own, by etils."""
    os.environ.setdefault("EPATH_USE_TF", "false")  # TensorFlow's remembers
    import fsspec
    from fsspec.config import conf

    conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs")
