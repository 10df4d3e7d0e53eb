"""Checksums of a folder's files, which show that a bit of them has changed.

XXH3 of every 64 MiB, 128 bits. It guards against damage, not against forgery. On one core it reads
27 GB/s, CRC-32 of zlib 7 GB/s, SHA-256 of OpenSSL 2 GB/s (`benchmarks/checkpoints`).
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from jaxpar.files import check_file, read_json, whole_file

BLOCK_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
_MOST_THREADS = 8
_SHA256 = "sha256"

# A file's size, and the hash of each of its blocks as 32 digits, one after the other.
Checksum = tuple[int, str]


def checksums(folder: Path, names: Iterable[str]) -> dict[str, Checksum]:
    """Of files of a folder, by their names.

    Raises:
      OSError: one cannot be read.
    """
    found = {}
    for name, checksum in _read(folder, names):
        if isinstance(checksum, OSError):
            raise checksum
        found[name] = checksum
    return found


def find_changed(folder: Path, expected: Mapping[str, Checksum]) -> dict[str, str]:
    """What is wrong with files of a folder, by their names; files that are as expected are left out."""
    changed = {}
    for name, checksum in _read(folder, expected):
        if isinstance(checksum, OSError):
            changed[name] = f"{name}: {checksum.strerror}"
        elif checksum != tuple(expected[name]):
            changed[name] = f"{name} is not what was written, its checksum differs"
    return changed


def digest(content: Any) -> str:
    """SHA-256 of what JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_table(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a table as JSON, with its own hash; the file appears whole or not at all.

    Raises:
      OSError: it cannot be written.
    """
    with whole_file(path) as file:
        file.write_text(json.dumps({**content, _SHA256: digest(content)}, indent=1) + "\n")


def read_table(path: Path, types: Mapping[str, type]) -> dict[str, Any]:
    """What `write_table` wrote.

    Args:
      types: of the values by their keys, all of which there must be.
    Raises:
      OSError: it cannot be read.
      ValueError: it is not what was written.
    """
    content = read_object(path)
    if content.pop(_SHA256, None) != digest(content) or not has_types(content, types):
        raise ValueError(f"{path.name} is not what was written")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not what was written.
    """
    check_file(path)
    try:
        return read_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is not what was written: {error}") from error


def has_types(content: Mapping[str, Any], types: Mapping[str, type]) -> bool:
    """Whether a table has these keys, with values of these types."""
    return all(isinstance(content.get(key), kind) for key, kind in types.items())


def _read(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Checksum | OSError]]:
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        files = [(name, *_submit(threads, folder / name)) for name in names]
        for name, size, blocks in files:
            try:
                yield name, (size, "".join(block.result() for block in blocks))
            except OSError as error:
                yield name, error


def _submit(threads: ThreadPoolExecutor, path: Path) -> tuple[int, list[Future[str]]]:
    """The size of a file, and the hash of each of its blocks; xxhash lets other threads go on."""
    try:
        size = path.stat().st_size
    except OSError:
        size = 1  # the one block will say it
    return size, [threads.submit(_hash, path, start) for start in range(0, size, BLOCK_BYTES)]


def _hash(path: Path, start: int) -> str:
    found, left, buffer = xxhash.xxh3_128(), BLOCK_BYTES, memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[:left])):
            found.update(buffer[:count])
            left -= count
    return found.hexdigest()
