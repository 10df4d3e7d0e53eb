"""metrics.jsonl: how it grows, and how it is read, as anybody may have left it."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.base.bucket import BucketPath
from jaxpar.base.files import WRITABLE, in_words, read_file, read_json, write_file
from jaxpar.training.record import REMEDY

_NAMED = 3  # lines that a message names
_PUT_SECONDS = 30.0

_log = logging.getLogger(__name__)


class MetricsFile:
    """A file that lines are added to: on a disk at once; in a bucket, as a whole, now and then.

    Args:
      check: called before anything is written.
    """

    def __init__(self, path: Path, check: Callable[[], object]):
        self._path, self._check = path, check
        self._content: bytearray | None = None  # of an object
        self._is_put, self._time = True, 0.0

    def add(self, text: str) -> None:
        """Adds text to the file, which is made if need be; in a bucket it may be there half a minute later.

        Raises:
          OSError: it cannot be written.
        """
        if not isinstance(self._path, BucketPath):
            self._check()
            with in_words(f"write {self._path}", WRITABLE), self._path.open("ab") as file:
                file.write(text.encode())
            return
        if self._content is None:
            self._content = bytearray(self._path.read_bytes() if self._path.exists() else b"")
        self._content += text.encode()
        self._is_put = False
        if time.monotonic() - self._time > _PUT_SECONDS:
            self.put()

    def put(self) -> None:
        """All that was added is there.

        Raises:
          OSError: it cannot be written.
        """
        if self._content is not None and not self._is_put:
            self.replace(bytes(self._content))

    def replace(self, content: bytes) -> None:
        """Writes the file anew.

        Raises:
          OSError: it cannot be written.
        """
        self._check()
        write_file(self._path, content)
        self._content, self._is_put, self._time = bytearray(content), True, time.monotonic()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics; none if there is no such file.

    Lines that no run writes are passed over with a warning; a last one that a killed process left
    unfinished without.
    """
    if not path.exists():
        return []
    # The last is b"" after a whole line.
    *contents, _ = read_file(path, remedy=REMEDY).split(b"\n")
    lines = [_from_line(content) for content in contents]
    if bad := [str(number) for number, line in enumerate(lines, 1) if line is None]:
        _log.warning(
            "%s: line %s is not what a run writes, and passed over; bring the file back from a copy, or "
            "remove what is wrong",
            path,
            ", ".join(bad[:_NAMED]) + ", ..." * (len(bad) > _NAMED),
        )
    return [line for line in lines if line is not None]


def _from_line(content: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is none that a run writes."""
    try:
        line = read_json(content)
    except ValueError:
        return None
    if type(line.get("step")) is not int:
        return None
    split, loss = line.get("split"), line.get("loss")
    of_split = split in ("train", "valid", "test") and type(loss) in (int, float)
    return line if of_split or split == "skipped" else None
