"""Folders in Google Cloud Storage, gs://BUCKET/FOLDER, as paths of `etils.epath`, by which Orbax writes, too.

An object is whole or not there, and what one process has put all others see. No object grows, a folder is
what names begin with, and several objects change one after the other.
"""

import functools
import importlib.util
import os
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, cast

from jaxpar.base.checks import require
from jaxpar.base.paths import local_path

SCHEME = "gs://"


def in_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one in a bucket."""
    return os.fspath(path).startswith(SCHEME)


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path that a user names: ~ is the user's home, and gs:// a bucket.

    Returns:
      of a bucket an `epath.Path`, which has most methods of a Path.
    Raises:
      ValueError: it is a bucket itself, or its package is not there.
      OSError: the bucket cannot be reached.
    """
    if not in_bucket(path):
        return local_path(path)
    if isinstance(path, PurePath):
        return cast(Path, path)
    found = importlib.util.find_spec("gcsfs") is not None
    require(found, f"{path} needs the package gcsfs\nFix: pip install gcsfs")
    has_folder = len(PurePosixPath(path).parts) > 2
    require(has_folder, f"{path} names no folder\nFix: use gs://BUCKET/FOLDER")
    return _reach(os.fspath(path))


@functools.cache
def _reach(address: str) -> Path:
    """The path of a folder in a bucket that answers."""
    os.environ.setdefault("EPATH_USE_TF", "false")  # TensorFlow's storage remembers what it read
    from etils import epath
    from fsspec.config import conf

    conf.setdefault("gcs", {})["use_listings_cache"] = False  # others write there, too
    path = cast(Path, epath.Path(address))
    try:
        path.exists()
    except Exception as error:  # of several packages, some of them no OSError
        reason = str(error).split("\n")[0] or type(error).__name__
        raise OSError(
            f"cannot reach {address}: {reason}\nFix: check the bucket's name and your credentials"
        ) from error
    return path


def storage() -> Any:
    """What epath asks, by fsspec, for what it does not offer."""
    import fsspec

    return fsspec.filesystem("gcs")
