"""A run's folder has one run at a time: a lock that ends with its process, whatever ended it.

It is the operating system's (`flock`), on a file in the folder. On a file system that machines share it holds
for all of them; that of a machine that died ends when the server says so, by NFS's default after 90 s.

A bucket knows no lock, and nobody there says that a process has died. So the run that began last has the
folder: each puts a text of its own into `.lock`, and one that finds another's there ends before it writes.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import jax

from jaxpar.base.bucket import BucketPath
from jaxpar.base.files import check_file, write_file
from jaxpar.hosts.agree import in_process_0, together

NAME = ".lock"
_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # to a file system without locks
_MESSAGE_BYTES = 2048
_SEEN_SECONDS = 5.0  # in which a file is to be seen by all machines

_log = logging.getLogger(__name__)


class FolderLock:
    """A folder that nobody else writes to meanwhile; use it as a context manager, in all processes.

    Process 0 holds it for all of them.

    Args:
      make: makes the folder, if it is not there.
    """

    def __init__(self, folder: Path, make: Callable[[], None]):
        self._folder, self._path, self._make = folder, folder / NAME, make
        self._file: int | None = None

    def __enter__(self) -> "FolderLock":
        """Takes the lock.

        Raises:
          BlockingIOError: another process holds it; the message says which.
          OSError: the folder cannot be written, or another process of this run does not see it.
          SharedError: any of them, where there are several processes.
        """
        try:
            holder = in_process_0(self._take)
            together(lambda: jax.process_index() == 0 or self._see(holder))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            if self._is_there(self._file):
                self._path.unlink()
            os.close(self._file)
            self._file = None

    def check(self) -> None:
        """Nothing, if the folder is still the one that was locked, or nobody has locked it.

        Raises:
          FileNotFoundError: it was removed, or another one has its place.
        """
        if self._file is not None and not self._is_there(self._file):
            raise FileNotFoundError(f"{self._folder} was removed or replaced during its run")

    def _see(self, holder: str) -> None:
        """Raises if the lock of process 0 is not to be seen here."""
        if not isinstance(self._folder, BucketPath):
            # NFS may believe for a minute that there is no such folder, unless one is made.
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
        deadline, problem = time.monotonic() + _SEEN_SECONDS, ""
        while time.monotonic() < deadline:
            try:
                check_file(self._path)
                if self._path.read_text() == holder:
                    return
                problem = "another one is there"
            except OSError as error:
                problem = str(error.strerror)
            time.sleep(0.1)
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # made above
        raise FileNotFoundError(
            f"{self._folder} is not shared: the file {self._path.name} of process 0 is not to be seen on "
            f"{socket.gethostname()} ({problem}); give all processes a folder that they share, or one in a "
            f"bucket (--train.out-dir gs://BUCKET/FOLDER)"
        )

    def _take(self) -> str:
        """Locks the folder; the text that the lock has."""
        self._make()
        while self._file is None:
            file = self._open()
            if self._is_there(file):
                self._file = file
            else:  # of a run that ended in between, and took its file away
                os.close(file)
        with contextlib.suppress(OSError):  # on a full disk it is locked all the same
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, _own_text().encode(), 0)
            os.fsync(self._file)
        return os.pread(self._file, _MESSAGE_BYTES, 0).decode()

    def _open(self) -> int:
        """The file, locked if its file system knows locks."""
        try:
            # Never through a link: what is written would replace another file.
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(
                    f"{self._path} is a link, and a lock must not be one; remove it"
                ) from error
            raise self._failure(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, _MESSAGE_BYTES, 0)
            os.close(file)
            raise BlockingIOError(
                f"{self._folder} is in use: {_describe(holder)}; let it end, or use another folder"
            ) from None
        except OSError as error:
            if error.errno not in _UNKNOWN:
                os.close(file)
                raise self._failure(error) from error
            _log.warning(
                "%s cannot be locked (%s): make sure that no other run uses it",
                self._folder,
                error.strerror,
            )
        return file

    def _failure(self, error: OSError) -> OSError:
        return type(error)(
            f"cannot lock {self._folder}: {error.strerror}; give a place that can be written"
        )

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except OSError:
            return False


class BucketLock(FolderLock):
    """A folder in a bucket, which the run has that began last."""

    _own = ""

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            if self._own and self._path.read_text() == self._own:
                self._path.unlink()
        self._own = ""

    def check(self) -> None:
        """Nothing, if no other run has begun in the folder, or this one holds no lock.

        Raises:
          BlockingIOError: another one has; the message says which.
          FileNotFoundError: the folder was removed.
          OSError: it cannot be read.
        """
        if not self._own:
            return
        try:
            holder = self._path.read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self._folder} was removed or replaced during its run"
            ) from None
        if holder != self._own.encode():
            raise BlockingIOError(
                f"another run has begun in {self._folder}: {_describe(holder)}; this one writes nothing "
                f"more there"
            )

    def _take(self) -> str:
        self._own = _own_text()
        write_file(self._path, self._own.encode())
        return self._own


def _own_text() -> str:
    """Who this process is; no other lock has the same text."""
    since = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
    host, pid = socket.gethostname(), os.getpid()
    return json.dumps({"host": host, "pid": pid, "since": since, "key": uuid.uuid4().hex})


def _describe(holder: bytes) -> str:
    try:
        who = json.loads(holder)
        return f"process {who['pid']} on {who['host']} has it since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process has it"
