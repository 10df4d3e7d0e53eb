"""Files: read whatever their content, written whole or not at all; and the user's cache folder."""

import codecs
import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import xxhash

from jaxpar.base.bucket import SCHEME, as_path, in_bucket, storage
from jaxpar.base.checks import fact_of, require, require_instance
from jaxpar.base.paths import local_path

Json: TypeAlias = dict[str, Any]
"""A table by names, as JSON has it."""
Kind = TypeVar("Kind", Json, list[Any])
WRITABLE = "give a place that can be written"
_ELSEWHERE = "use another folder"


@contextlib.contextmanager
def friendly_errors(attempt: str, remedy: str) -> Iterator[None]:
    """Makes an error of the system one to act on: it says what cannot be done, why, and a remedy.

    Args:
      attempt: such as "read the config run.toml".
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).split("\n")[0]
        raise type(error)(f"cannot {attempt}: {reason}\nFix: {remedy}") from error


def read_file(
    path: str | os.PathLike[str], what: str = "", remedy: str = "give a readable file"
) -> bytes:
    """The bytes of a file.

    Args:
      what: the file is, for the message, such as "the config".
    Raises:
      OSError: as of `check_file`, or it cannot be read; in words.
    """
    with friendly_errors(f"read {f'{what} {path}'.lstrip()}", remedy):
        check_file(path)
        try:
            return as_path(path).read_bytes()
        except MemoryError:  # not reached: a test would fill this machine's memory
            raise MemoryError(
                f"{path} does not fit into the memory of this machine\nFix: use a smaller file"
            ) from None


def read_text(path: str | os.PathLike[str], what: str = "") -> str:
    """The text of a file in UTF-8, with lines that end in a newline alone.

    Args:
      what: as of `read_file`.
    Raises:
      OSError: as of `read_file`.
      ValueError: it is not UTF-8, or has NUL characters; names the first byte that is wrong.
    """
    content, encoding = read_file(path, what), "ENCODING"
    try:
        text = content.decode()
        place = text.find("\0")
        if place < 0:
            return text.removeprefix("\ufeff").replace("\r\n", "\n")
        place = len(text[:place].encode())
    except UnicodeDecodeError as error:
        place = error.start
    fact = f"byte {content[place]:#04x} at offset {place}"
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-32" if content[2:4] == b"\0\0" else "utf-16"
        fact = f"it begins as {encoding.upper()} does, with bytes {content[:2].hex(' ')}"
    raise ValueError(
        f"{f'{what} {path}'.lstrip()} is not UTF-8 text: {fact}\n"
        f"Fix: convert it from the encoding that it has: iconv -f {encoding} -t utf-8"
    )


def check_file(path: str | os.PathLike[str]) -> int:
    """The size of a file in bytes.

    Nothing else has one here: whoever opens a pipe waits for its writer, and a device has no end.

    Raises:
      OSError: it leads to something else or nowhere; as of the system, with `strerror` and `filename`.
    """
    if in_bucket(path):
        return as_path(path).stat().length  # pyright: ignore[reportAttributeAccessIssue]
    found = os.stat(path)
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        told = "it is a pipe, a socket or a device, not a file"
        raise OSError(errno.EINVAL, told, os.fspath(path))
    return found.st_size


def sizes_of(folder: Path) -> dict[str, int]:
    """The bytes of all files in a folder and its folders, by their names from there on.

    Raises:
      OSError: there is what is no file.
    """
    if in_bucket(folder):
        found = storage().find(str(folder), detail=True)
        start = len(str(folder)) - len(SCHEME) + 1
        return {name[start:]: int(told["size"]) for name, told in found.items()}
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): check_file(path) for path in files}


def remove_folder(folder: Path) -> None:
    """Removes a folder with all that is in it.

    Raises:
      OSError: something of it cannot be removed.
    """
    if in_bucket(folder):
        folder.rmtree(missing_ok=True)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        shutil.rmtree(folder)


def read_json(content: str | bytes, kind: type[Kind] = dict) -> Kind:
    """The object that a text of JSON holds, or its list.

    Raises:
      ValueError: it is not JSON in UTF-8, is nested too deeply, or holds something else.
    """
    name = "object" if kind is dict else kind.__name__
    told = f"it is not JSON, or nested too deeply, or no JSON {name}"
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(told) from None
    require(isinstance(found, kind), told)
    return found


def make_folder(path: Path) -> None:
    """Makes a folder, if it is not there; in a bucket it is there with the first object in it.

    Raises:
      OSError: it cannot be made; in words.
    """
    if not in_bucket(path):
        with friendly_errors(f"make the folder {path}", _ELSEWHERE):
            path.mkdir(parents=True, exist_ok=True)


def check_folder(path: Path) -> None:
    """Nothing, if a folder can be written, or made; to be asked before work that takes long.

    It is tried, in a folder that is removed at once: what may be written is not always what can be.

    Raises:
      OSError: it cannot; in words.
    """
    if in_bucket(path):
        return
    with friendly_errors(f"make the folder {path}", _ELSEWHERE):
        for folder in (path, *path.absolute().parents):
            try:
                os.stat(folder)
            except FileNotFoundError:
                continue
            with tempfile.TemporaryDirectory(prefix=".", dir=folder):
                return


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one letter is a drive


def check_output(path: Path) -> None:
    """Nothing, if a file can be written as of `whole_file`; to be asked before work that takes long.

    Raises:
      OSError: it cannot; in words.
    """
    with friendly_errors(f"write {path}", WRITABLE):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = _partial_of(path)
        partial.touch()
        partial.unlink()


def _partial_of(path: Path) -> Path:
    """Where a file is until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write instead of `path`, in the same folder; it takes that name when all went well.

    Raises:
      OSError: it cannot be written; the message names `path`, and what stood there is as it was.
    """
    path = Path(path)
    partial = _partial_of(path)
    with friendly_errors(f"write {path}", WRITABLE):
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file; it appears whole or not at all.

    Raises:
      OSError: as of `whole_file`.
    """
    if in_bucket(path):
        with friendly_errors(f"write {path}", WRITABLE):
            storage().pipe_file(str(path), content)  # at once, also if it is empty
        return
    with whole_file(path) as file:
        file.write_bytes(content)


def check_path(name: str, path: str | os.PathLike[str], *, of_run: bool = False) -> None:
    """Raises for what is no path, or an address such as s3://bucket/run, which would name a local folder.

    Args:
      name: of the setting that the path is of.
      of_run: it is the folder of a run, which may be in a bucket.
    Raises:
      ValueError: it is one, it is empty, or no path.
    """
    require_instance(name, path, str | os.PathLike, "a path")
    require(path != "", f"{name}='' names nothing\nFix: give a path")
    text = os.fspath(path)
    if _ADDRESS.match(text) and not (of_run and text.startswith(SCHEME)):
        allowed = "a folder of this machine" + " or gs://BUCKET/FOLDER" * of_run
        raise ValueError(
            f"{name}={text!r} must be {allowed}, got another address\n"
            f"Fix: mount that storage, and give the mounted folder"
        )


def cache_folder() -> Path:
    """For what can be made again: $XDG_CACHE_HOME/jaxpar, or ~/.cache/jaxpar.

    Raises:
      FileNotFoundError: the user has no home.
    """
    try:
        return local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxpar"
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{fact_of(error)}\nFix: set XDG_CACHE_HOME to a folder") from error


def checksum(content: bytes) -> str:
    """The size of some bytes, and their hash (XXH3, 128 bits), which guards against damage alone."""
    return f"{len(content)} {xxhash.xxh3_128_hexdigest(content)}"
