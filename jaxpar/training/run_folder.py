"""The folder of a run: `train` writes it; `--resume`, `evaluate` and other commands read it.

runs/0001/
  config.toml        every setting; what was left open is filled in
  data.json          the identity of the run, its data and its program
  task.py            the file of the task as it was when the run began, if it is the user's own
  metrics.jsonl      one line for each report
  checkpoints/       the newest states
  vocabulary.json    and other files that the task keeps
  .lock              the process that uses the folder, or used it last

All but the checkpoints are plain files that people edit and other tools read.

The folder may be in a bucket, gs://BUCKET/FOLDER. Each file is an object there, and is written as a whole. A
checkpoint is written into its final place, and counts once its last object, its description, is there.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from jaxpar.base.bucket import as_path, in_bucket
from jaxpar.base.checks import fact_of, fits, leaves_of, require
from jaxpar.base.files import (
    WRITABLE,
    check_folder,
    check_path,
    checksum,
    friendly_errors,
    make_folder,
    read_file,
    read_json,
    remove_folder,
    write_file,
)
from jaxpar.base.parts import SPLITS
from jaxpar.base.paths import local_path
from jaxpar.base.types import Json
from jaxpar.hosts.agree import in_process_0, together
from jaxpar.hosts.distributed import OF_NUMBERS
from jaxpar.mesh import ONE_DEVICE, MeshConfig, num_simulated
from jaxpar.model.task import Settings, spec_of
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, evaluated
from jaxpar.training.changes import changed_keys, checked_keys, in_words
from jaxpar.training.checkpoint import Checkpoints
from jaxpar.training.config_file import read_config, read_toml, to_toml

ROOT = Path("runs")  # here runs without an `out_dir` get numbers
CONFIG, DATA, TASK = "config.toml", "data.json", "task.py"
_FOLDERS = ("checkpoints", "profile")
_OWN = (CONFIG, DATA, TASK, "metrics.jsonl", *_FOLDERS)
REMEDY = "restore it from a backup"
# The values of data.json.
_TYPES = {
    "run": str,
    "data": dict,
    "files": dict[str, str],
    "settings": str,
    "batches": dict,
    "num_batches": dict,
    "fields": dict,
}
_NAMED = 3  # most differences in a message
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_SEEN_SECONDS = 5.0  # until all machines must see a file
_PUT_SECONDS = 30.0  # between two writes of metrics.jsonl in a bucket

_log = logging.getLogger(__name__)


class FolderLock:
    """The lock of a folder, so that only one run writes there; a context manager for all processes.

    Process 0 holds it for all of them by `flock`, which ends with the process. On NFS, the server frees the
    lock of a dead machine, by default after 90 s. A bucket has no locks: there the run that began last owns
    the folder, and a run that finds the text of another one ends before it writes.
    """

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / ".lock"
        self._file: int | None = None
        self._text = ""  # of the lock while it is held

    def __enter__(self) -> "FolderLock":
        """Takes the lock; makes the folder if it does not exist.

        Raises:
          BlockingIOError: another process holds it; the message says which.
          OSError: the folder cannot be written, or another process of this run does not see it.
        """
        try:
            text = in_process_0(self._take)
            together(lambda: self._wait_for(text))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._text = None, ""

    def check(self) -> None:
        """Raises an OSError if the folder was removed, or another run has begun in it."""
        if not self._text:
            return
        try:
            holder = self._path.read_text()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self._folder} was removed during its run\nFix: start another run, and keep its folder"
            ) from None
        if holder != self._text:
            raise BlockingIOError(
                f"{self._folder} is in use by another run: {holder}\n"
                f"Fix: continue this one in another folder"
            )

    def _take(self) -> str:
        make_folder(self._folder)
        now = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S.%f}"
        text = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        if in_bucket(self._folder):
            write_file(self._path, text.encode())
        else:
            with friendly_errors(f"lock {self._folder}", WRITABLE):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                self._file = os.open(self._path, flags, 0o666)
                if is_free := self._lock(self._file):
                    os.ftruncate(self._file, 0)
                    os.pwrite(self._file, text.encode(), 0)
            if not is_free:
                raise BlockingIOError(
                    f"{self._folder} is in use by {self._path.read_text()}\n"
                    f"Fix: let it end, or use another folder"
                )
        self._text = text
        return text

    def _lock(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s has no locks: make sure that no other run uses it", self._folder)
        return True

    def _wait_for(self, text: str) -> None:
        """Raises an OSError if this process does not see the lock of process 0."""
        if jax.process_index() == 0:
            return
        if not in_bucket(self._folder):
            # NFS may report for a minute that there is no such folder, unless this makes one.
            self._folder.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + _SEEN_SECONDS
        while not self._path.exists() or self._path.read_text() != text:
            if time.monotonic() > end:
                with contextlib.suppress(OSError):
                    self._folder.rmdir()  # made above
                raise FileNotFoundError(
                    f"{self._folder} on {socket.gethostname()} is not that of process 0\nFix: give all "
                    f"processes a folder that they share, such as --train.out-dir gs://BUCKET/FOLDER"
                )
            time.sleep(0.1)


class RunFolder:
    """A run's folder by its path, also in a bucket; nothing is read or written until a method is called."""

    def __init__(self, path: str | os.PathLike[str]):
        check_path("folder", path, of_run=True)
        self.path = as_path(path)
        self.config_path = self.path / CONFIG
        self.data_path = self.path / DATA
        self.task_path = self.path / TASK
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.profile_path = self.path / "profile"
        self.lock = FolderLock(self.path)
        self._lines = ""  # of metrics, which a bucket is to get
        self._time = 0.0

    def __str__(self) -> str:
        return str(self.path)

    # ---- reading ----

    @property
    def holds_run(self) -> bool:
        """Whether a run has written here."""
        return self.config_path.exists() or any(self.checkpoints_path.glob("[0-9]*"))

    def check(self) -> None:
        """Checks that this version can continue the run; warns if the file of its task has changed.

        Raises:
          FileNotFoundError: no run has written here.
          ValueError: an older version has written the run, or its description is damaged.
        """
        file = self._task_file()
        if jax.process_index() != 0:
            return
        if self.data_path.exists():  # without it, only settings and numbers can be read
            self.data()
        both = [path for path in (file, self.task_path) if path is not None and path.is_file()]
        if len({path.read_bytes() for path in both}) == 2:
            _log.warning("%s has changed since the run began, see %s", *both)

    def check_writable(self) -> None:
        """Checks that a run can write here, before it writes anything.

        Raises:
          OSError: it cannot.
          ValueError: what is here by the name of a file of runs is a link or a folder, or the reverse.
        """
        check_folder(self.path)
        if in_bucket(self.path):
            return
        for path in (*self._own_paths(), *self.checkpoints_path.glob("*")):
            require(not path.is_symlink(), f"{path} is a link\nFix: put the file itself there")
        kinds = {True: "folder", False: "file"}
        for path in filter(Path.exists, self._own_paths()):
            keeps_folder, is_folder = path.name in _FOLDERS, path.is_dir()
            require(
                is_folder == keeps_folder,
                f"{path} is a {kinds[is_folder]}, but a run keeps a {kinds[keeps_folder]} there\n"
                f"Fix: use another folder",
            )

    def settings(self) -> Settings:
        """The run's settings.

        Raises:
          FileNotFoundError: no run has written here, or the file of its task is gone.
          ValueError: an older version has written here, or the settings are damaged.
        """
        file = self._task_file()
        if file is not None and not file.exists():
            raise FileNotFoundError(
                f"{file}, which has the task of the run in {self}, does not exist\n"
                f"Fix: restore it; {self.task_path} is a copy"
            )
        settings = read_config(self.config_path)
        # The folder may have been copied or moved since.
        return settings._replace(train=dataclasses.replace(settings.train, out_dir=str(self)))

    def data(self) -> Json:
        """The identity of the run, its data and its program, as of `describe_data` and `program_facts`.

        Raises:
          OSError: it cannot be read.
          ValueError: it is damaged.
        """
        content = read_file(self.data_path, remedy=REMEDY)
        try:
            found = read_json(content)
            require(all(fits(found.get(name), kind) for name, kind in _TYPES.items()), "")
            require(all(map(_is_file_name, found["files"])), "")
        except ValueError:
            raise ValueError(
                f"{self.data_path} is damaged, or of another version of jaxpar\n"
                f"Fix: {REMEDY}, or use that version"
            ) from None
        return found

    def check_program(self, facts: Mapping[str, str]) -> None:
        """Compares the program of the run with this one; warns if losses may differ in their last digits.

        Args:
          facts: as of `program_facts`.
        Raises:
          OSError, ValueError: as of `data`.
          ValueError: settings of JAX have changed, so the same seed gives other numbers.
        """
        was = self.data().get("program", {})
        # Versions of JAX have different settings.
        names = {n for n in {*was, *facts} if not n.startswith("jax_") or n in was.keys() & facts}
        was, now = ({name: each.get(name, "not set") for name in names} for each in (was, facts))
        for name in OF_NUMBERS:
            require(
                was.get(name) == now.get(name),
                f"{name} is {now.get(name)}, but was {was.get(name)} when the run in {self} began\n"
                f"Fix: set {name.upper()}={was.get(name)}, or start another run",
            )
        if (changed := _changes(was, now)) and jax.process_index() == 0:
            text = "the program of the run in %s has changed, so losses may differ slightly: %s"
            _log.warning(text, self, changed)

    def check_data(self, data: Json) -> bool:
        """Whether batches are cut as when the run began; checks that its data and files are the same.

        The seed and free fields may change batches. Other fields may change if batches are as they were.

        Args:
          data: as of `describe_data`.
        Raises:
          OSError, ValueError: as of `data`.
          ValueError: the data have changed, or nobody can tell because batches are cut otherwise.
        """
        known = self.data()
        before = known["fields"]
        settings = data["fields"]
        changed = changed_keys(before, settings)
        checked = checked_keys(changed, data["free"])
        cuts = [key for key in changed if key in data["free"]]
        words = in_words([*cuts, *checked], before, settings)
        batches = ("batches", "num_batches")
        has_same_batches = all(known[name] == data[name] for name in batches)
        if cuts and checked and not has_same_batches:
            raise ValueError(
                f"the run in {self} is resumed with other batches, so jaxpar cannot check that {checked[0]} "
                f"leaves its data as they were: {words}\n"
                f"Fix: change {checked[0]} alone, or the others alone, or start another run"
            )
        is_cut_alike = not cuts
        names = ["data", "files"]
        if is_cut_alike:
            names += batches
        was, now = {}, {}
        for name in names:
            was[name], now[name] = known[name], data[name]
        also, fix = "", "restore them"
        if words:
            also, fix = f", and so have settings ({words})", f"{fix} and the settings"
        require(
            was == now,
            f"the data of the run in {self} have changed{also}: {_changes(was, now)}\n"
            f"Fix: {fix}, or start another run",
        )
        return is_cut_alike

    def checkpoints(self, setup: Setup) -> Checkpoints:
        """The run's checkpoints.

        Raises:
          OSError, ValueError: as of `data`.
        """
        run = self.data()["run"]
        return Checkpoints(self.checkpoints_path, setup, run=run, check=self.lock.check)

    def read(self, name: str) -> str:
        """A file of the task, as it was written.

        Raises:
          OSError: it cannot be read.
          ValueError: it is damaged, or data.json is, or there is no such file.
        """
        files = self.data()["files"]
        require(name in files, f"the run in {self} keeps no {name}\nFix: name one of {[*files]}")
        content = read_file(self.path / name, remedy=REMEDY)
        require(checksum(content) == files[name], f"{self.path / name} is damaged\nFix: {REMEDY}")
        return content.decode()

    def restore(
        self, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
    ) -> tuple[Setup, TrainState]:
        """The run's setup and state on a mesh, which may differ from that of the run.

        With another number of stages, the layers get a new placement. The parameters are those that the task
        evaluates; the optimizer's state is left out.

        Args:
          best: restore the kept state with the lowest validation loss, not the newest one.
        Raises:
          ValueError: the model does not fit the mesh.
          FileNotFoundError: no run has written here, or no such checkpoint.
        """
        settings = self.settings()
        self.check()
        devices = mesh.build()
        parallel = settings.parallel.on_mesh(mesh.resolve(devices.size))
        setup = Setup.of(settings.task, parallel, settings.train, devices)
        checkpoints = self.checkpoints(setup)
        state = checkpoints.restore(best=best, with_optimizer=setup.task.evaluates_others)
        return setup, dataclasses.replace(evaluated(setup, state), opt_state=())

    # ---- writing, in process 0 ----

    def start(self, texts: Mapping[str, str]) -> None:
        """Writes the files that a run can be continued from; the settings come last.

        Args:
          texts: as of `texts_of`.
        Raises:
          OSError: it cannot be written.
        """
        run = self.data()["run"] if self.data_path.exists() else uuid.uuid4().hex[:16]
        texts = {**texts, DATA: json.dumps({**json.loads(texts[DATA]), "run": run}, indent=1)}
        for name in (*(name for name in texts if name != CONFIG), CONFIG):
            write_file(self.path / name, texts[name].encode())

    def clear(self) -> None:
        """Removes the files of a run, and no other files. Of a link it removes the link alone.

        Raises:
          ValueError: another program has written here.
        """
        files = ()
        if self.config_path.exists() and not self.data_path.exists():
            self._task_file()
        with contextlib.suppress(OSError, ValueError):
            files = self.data()["files"]
        for name in files:  # of the task: files, never folders
            path = self.path / name
            if not path.is_dir() or self._is_link(path):
                path.unlink(missing_ok=True)
        for path in self._own_paths():
            if path.is_dir() and not self._is_link(path):
                remove_folder(path)
            else:
                path.unlink(missing_ok=True)

    def _is_link(self, path: Path) -> bool:
        return not in_bucket(path) and path.is_symlink()

    def append_metrics(self, line: Json) -> None:
        """Adds a line to `metrics.jsonl`; in a bucket it may appear half a minute later.

        Raises:
          OSError: it cannot be written.
        """
        self._lines += f"{json.dumps(line)}\n"
        if not in_bucket(self.path) or time.monotonic() - self._time > _PUT_SECONDS:
            self.flush_metrics()

    def flush_metrics(self) -> None:
        """Writes the lines of `metrics.jsonl` that wait.

        Raises:
          OSError: they cannot be written.
        """
        self.lock.check()
        path, lines = self.metrics_path, self._lines.encode()
        if in_bucket(path):
            if lines:
                before = path.read_bytes() if path.exists() else b""
                write_file(path, before + lines)
        else:
            with friendly_errors(f"write {path}", WRITABLE), path.open("ab") as file:
                file.write(lines)
        self._lines, self._time = "", time.monotonic()

    def rewind_metrics(self, step: int) -> None:
        """Removes the lines after `step` from `metrics.jsonl`: a resumed run writes them again.

        If there are any, a copy of the old file is kept as metrics.before-1.jsonl.
        """
        path = self.metrics_path
        content = read_file(path, remedy=REMEDY) if path.exists() else b""
        lines = (line for line in self.metrics() if line["step"] <= step)
        kept = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        if content != kept:
            number = 1 + len([*self.path.glob("metrics.before-*.jsonl")])
            write_file(self.path / f"metrics.before-{number}.jsonl", content)
            write_file(path, kept)

    def metrics(self) -> list[Json]:
        """The lines of `metrics.jsonl`; none if there is no such file.

        Lines that no run writes are skipped with a warning. A last line that a killed process left unfinished
        is skipped without.
        """
        if not self.metrics_path.exists():
            return []
        # The last is b"" after a whole line.
        *contents, _ = read_file(self.metrics_path, remedy=REMEDY).split(b"\n")
        lines = [_line_of(content) for content in contents]
        if None in lines:
            _log.warning(
                "%s: line %d is not what a run writes", self.metrics_path, lines.index(None) + 1
            )
        return [line for line in lines if line is not None]

    def _own_paths(self) -> Iterator[Path]:
        yield from (self.path / name for name in _OWN)
        yield from self.path.glob("metrics.before-*.jsonl")

    def _task_file(self) -> Path | None:
        """The user's file that the run's task is in; None if it comes with jaxpar.

        Raises:
          FileNotFoundError: no run has written here.
          ValueError: the settings are damaged, or of another program.
        """
        if not self.config_path.exists():
            runs = [*_numbered(self.path), *_numbered(self.path.parent)][-_NAMED:]
            known = f", such as {', '.join(map(str, runs))}" if runs else ""
            raise FileNotFoundError(
                f"{self} holds no run: there is no {CONFIG} in it\n"
                f"Fix: give the folder that `train` wrote{known}"
            )
        try:
            name = read_toml(self.config_path).get("task")
            require(isinstance(name, str), "it names no task")
        except ValueError as error:
            raise ValueError(
                f"{self.config_path} is damaged: {fact_of(error)}\nFix: {REMEDY}"
            ) from error
        return _file_of(str(name))


def texts_of(setup: Setup, data: Json) -> dict[str, str]:
    """The texts that a run can be continued from, by the names of their files.

    Args:
      data: as of `describe_data`.
    Raises:
      ValueError: a setting cannot be written, or a file of the task has a name that is taken.
    """
    task = setup.task
    texts = dict(task.files())
    for name in texts:
        require(
            name == Path(name).name and name not in _OWN,
            f"the task keeps a file {name!r}, but this is a reserved name or a path\n"
            f"Fix: use another name",
        )
    if source := _file_of(spec_of(task)):
        texts[TASK] = source.read_bytes().decode()
    texts[DATA] = json.dumps(data)
    # The folder may be copied, so it does not name its own place. TOML cannot leave the limit open.
    limit = setup.settings.clip_norm or 0.0
    train = dataclasses.replace(setup.train, out_dir=task.train.out_dir, clip_norm=limit)
    texts[CONFIG] = to_toml(Settings(task, setup.parallel, train), num_simulated())
    return texts


def next_run_folder(root: Path = ROOT) -> RunFolder:
    """Makes a new folder: runs/0001, runs/0002, ... No two processes get the same one."""
    root.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in _numbered(root)), default=0)
    while True:
        number += 1
        path = root / f"{number:04d}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return RunFolder(path)


def newest_run_folder(root: Path = ROOT) -> RunFolder:
    """The numbered folder of the latest run.

    Raises:
      FileNotFoundError: there is none.
    """
    runs = [path for path in _numbered(root) if RunFolder(path).holds_run]
    if not runs:
        raise FileNotFoundError(
            f"{root.absolute()} holds no run to resume\n"
            f"Fix: name its folder with --train.out-dir, or leave --resume out to begin one"
        )
    return RunFolder(runs[-1])


def _numbered(root: Path) -> list[Path]:
    runs = [path for path in root.glob("*") if path.name.isdecimal() and path.is_dir()]
    return sorted(runs, key=lambda path: int(path.name))


def _file_of(spec: str) -> Path | None:
    """The user's file that a task is in; None if it comes with jaxpar, or is in no file."""
    file, colon, _ = spec.rpartition(":")
    return local_path(file) if colon else None


def _is_file_name(name: str) -> bool:
    """Whether a name is that of a file in its folder, not a path out of it."""
    return name == Path(name).name and name not in ("", "..")


def _changes(was: Json, now: Json) -> str:
    """In words, the differences between two tables."""
    before, after = leaves_of(was), leaves_of(now)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changes = [f"{name} was {before.get(name)}, is {after.get(name)}" for name in names]
    more = [f"{len(changes) - _NAMED} more"] if len(changes) > _NAMED else []
    return "; ".join(changes[:_NAMED] + more)


def _line_of(content: bytes) -> Json | None:
    """A line of metrics; None if no run writes such a line."""
    with contextlib.suppress(ValueError):
        line = read_json(content)
        split, has_loss = line.get("split"), type(line.get("loss")) in (int, float)
        is_known = split == "skipped" or (split in SPLITS and has_loss)
        if is_known and type(line.get("step")) is int:
            return line
    return None
