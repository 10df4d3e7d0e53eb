"""manifest.json of a run's folder: which run it is, and checksums of its files as of the newest checkpoint.

A run knows what it has written, and reads no file again: damage on a disk is not taken for its own writing.
"""

import collections
import uuid
from pathlib import Path

import xxhash

from jaxpar.files import read_file
from jaxpar.training.checksums import checksum, read_table, write_table

NAME = "manifest.json"
REMEDY = "bring it back from a copy"  # what a run has written


class Manifest:
    """What a run has written into its folder.

    Args:
      run: its name, the same wherever the folder is copied; None makes a new one.
    """

    def __init__(self, run: str | None = None):
        self.run = run or uuid.uuid4().hex[:16]
        self._sizes = collections.Counter[str]()
        self._hashes = collections.defaultdict[str, xxhash.xxh3_128](xxhash.xxh3_128)

    def put(self, name: str, content: bytes) -> None:
        """Notes a file that was written anew."""
        self._sizes[name], self._hashes[name] = len(content), xxhash.xxh3_128(content)

    def extend(self, name: str, content: bytes) -> None:
        """Notes what was added to a file."""
        self._sizes[name] += len(content)
        self._hashes[name].update(content)

    def write(self, folder: Path) -> None:
        """Writes the file.

        Raises:
          OSError: it cannot be written.
        """
        known = {
            name: f"{size} {self._hashes[name].hexdigest()}" for name, size in self._sizes.items()
        }
        write_table(folder / NAME, {"run": self.run, "files": known})


def read_manifest(folder: Path) -> tuple[str, dict[str, str]] | None:
    """The run's name, and the checksums of its files; None if there is no such file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = read_table(path, {"run": str, "files": dict[str, str]})
    except ValueError:
        raise ValueError(
            f"{path} is damaged: it is not what was written; bring it back from a copy, or remove it: then "
            f"nothing tells whether other files of the folder are as they were written"
        ) from None
    return content["run"], content["files"]


def is_changed(path: Path, known: str, *, grows: bool = False) -> bool:
    """Whether a file is not what it was.

    Args:
      known: its checksum.
      grows: lines may have been added since.
    """
    if not path.exists():
        return True
    content, size = read_file(path, remedy=REMEDY), known.partition(" ")[0]
    return checksum(content[: int(size)] if grows and size.isdecimal() else content) != known
