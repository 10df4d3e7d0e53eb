"""data.json: what identifies the data of a run and the run itself, and how its other files are."""

import collections
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import xxhash

from jaxpar.base.checks import leaves_of, require
from jaxpar.base.files import in_words
from jaxpar.hosts.distributed import OF_NUMBERS
from jaxpar.training.checksums import read_table, write_table

REMEDY = "bring it back from a copy"  # what a run has written
_TYPES = {"data": dict, "files": dict[str, str], "settings": str, "batches": dict}
_TYPES |= {"run": str, "written": dict[str, str]}
_OF_SETTINGS = ("settings", "batches")  # what depends on the settings
_NAMED = 3  # differences that a message names

_log = logging.getLogger(__name__)


class Record:
    """What is known of a run, in a file that it writes anew with every checkpoint.

    It has the checksums of what the run has written, for which no file is read again. So damage on a disk is
    not taken for the run's own writing.

    Args:
      path: of the file; nothing is read or written until a method is called.
    """

    def __init__(self, path: Path):
        self._path = path
        self.begin({})

    def begin(self, known: Mapping[str, Any]) -> None:
        """Notes what identifies the run that this process writes; of its files there is none yet."""
        self._known = dict(known)
        self._sizes = collections.Counter[str]()
        self._hashes = collections.defaultdict[str, xxhash.xxh3_128](xxhash.xxh3_128)

    def put(self, name: str, content: bytes) -> None:
        """Notes a file that is written anew."""
        self._sizes[name], self._hashes[name] = len(content), xxhash.xxh3_128(content)

    def extend(self, name: str, content: bytes) -> None:
        """Notes what is added to a file."""
        self._sizes[name] += len(content)
        self._hashes[name].update(content)

    def write(self) -> None:
        """Writes down what is noted; checksums are as of `checksum`.

        Raises:
          OSError: it cannot be written.
        """
        written = {name: f"{n} {self._hashes[name].hexdigest()}" for name, n in self._sizes.items()}
        write_table(self._path, {**self._known, "written": written})

    def read(self) -> dict[str, Any]:
        """What stands in the file.

        Raises:
          OSError: it cannot be read.
          ValueError: it is damaged.
        """
        try:
            with in_words(f"read {self._path}", REMEDY):
                data = read_table(self._path, _TYPES)
            require(all(name == Path(name).name for name in data["files"]), "a file is elsewhere")
            return data
        except ValueError as error:
            raise ValueError(
                f"{self._path} is damaged: it is not what was written; {REMEDY} (a run of another "
                f"version of jaxpar needs that version)"
            ) from error

    def check_program(self, facts: Mapping[str, str]) -> None:
        """Compares the program of the run with this one; warns where losses may differ in their last digits.

        Args:
          facts: as of `program_facts`.
        Raises:
          OSError: what the run has written cannot be read.
          ValueError: settings of JAX are not as they were, by which the same seed gives other numbers.
        """
        was = self.read().get("program") or facts  # an older version has written none
        folder = self._path.parent
        known = [n for n in {**was, **facts} if not n.startswith("jax_") or n in was.keys() & facts]
        changed = [name for name in known if was.get(name) != facts.get(name)]
        for name in (name for name in changed if name in OF_NUMBERS):
            raise ValueError(
                f"{name} is {facts[name]}, and was {was[name]} when the run in {folder} began: the same seed "
                f"gives other numbers. Fix: set {name.upper()}={was[name]}, or start another run"
            )
        if changed and jax.process_index() == 0:
            told = [
                f"{n} was {was.get(n, 'not set')}, is {facts.get(n, 'not set')}" for n in changed
            ]
            more = [f"{len(told) - _NAMED} more"] if len(told) > _NAMED else []
            _log.warning(
                "the program is another one than that of the run in %s, so losses may differ in their last "
                "digits: %s", folder, "; ".join(told[:_NAMED] + more),
            )  # fmt: skip

    def check_data(self, data: Mapping[str, Any]) -> bool:
        """Whether batches are cut as when the run began; its data and files are the same.

        Args:
          data: as of `describe_data`.
        Raises:
          OSError: what the run has written cannot be read.
          ValueError: they have changed.
        """
        known = self.read()
        is_cut_alike = known["settings"] == data["settings"]
        was, now = (
            {name: each[name] for name in data if is_cut_alike or name not in _OF_SETTINGS}
            for each in (known, data)
        )
        if was != now:
            before, after = leaves_of(was), leaves_of(now)
            changed = [n for n in {**before, **after} if before.get(n) != after.get(n)]
            named = (f"{n} was {before.get(n)}, is {after.get(n)}" for n in changed[:_NAMED])
            raise ValueError(
                f"the data are not those that the run in {self._path.parent} began with: "
                f"{'; '.join(named)}; bring them back (what comes with Python or a package needs the same "
                f"version), or start another run"
            )
        return is_cut_alike
