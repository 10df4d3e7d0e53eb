"""A run's folder has one run at a time: a lock that ends with its process, whatever ended it.

It is the operating system's (`flock`), on a file in the folder. On a file system that machines share it holds
for all of them; that of a machine that died ends when the server says so, by NFS's default after 90 s.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from jaxpar.hosts.agree import in_process_0

NAME = ".lock"
_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # to a file system without locks
_MESSAGE_BYTES = 2048

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
          OSError: the folder cannot be written.
          SharedError: either, where there are several processes.
        """
        in_process_0(self._take)
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

    def _take(self) -> None:
        self._make()
        while self._file is None:
            file = self._open()
            if self._is_there(file):
                self._file = file
            else:  # of a run that ended in between, and took its file away
                os.close(file)
        since = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        with contextlib.suppress(OSError):  # on a full disk it is locked all the same
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
            os.fsync(self._file)

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


def _describe(holder: bytes) -> str:
    try:
        who = json.loads(holder)
        return f"process {who['pid']} on {who['host']} has it since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process has it"
