"""The folder of a run: what `train` writes, and `--resume`, `evaluate` and others read.

runs/0001/
  config.toml        every setting, with what was left open filled in
  data.json          what identifies the data and the run, and checksums of the files here as of the newest
                     checkpoint
  task.py            the file of the task as it was when the run began, if it is the user's own
  metrics.jsonl      one line a report
  checkpoints/       the newest states
  vocabulary.json    and other files that the task keeps
  .lock              while a run goes on: who it is

config.toml, task.py and metrics.jsonl are plain files that people edit and other tools read: a change since
the newest checkpoint is told, and the run goes on. The others change by damage alone, which is refused. A
checkpoint has checksums of its own.

The folder may be in a bucket, gs://BUCKET/FOLDER. Each file is an object there, put whole; a checkpoint is
written where it stays, and counts once its last object, its description, is there.
"""

import contextlib
import dataclasses
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpar.base.bucket import BucketPath, as_path
from jaxpar.base.files import (
    check_folder,
    check_path,
    free_path,
    make_folder,
    read_file,
    remove_folder,
    write_file,
)
from jaxpar.config_file import read_config, read_toml, to_toml
from jaxpar.mesh import ONE_DEVICE, MeshConfig, num_simulated
from jaxpar.setup import Setup
from jaxpar.state import TrainState, evaluated
from jaxpar.task import Settings, spec_of
from jaxpar.training.checkpoint import CHECKPOINT_NAMES, Checkpoints, run_of
from jaxpar.training.checksums import checksum
from jaxpar.training.lock import BucketLock, FolderLock
from jaxpar.training.metrics_file import MetricsFile, read_metrics
from jaxpar.training.record import REMEDY, Record

ROOT = Path("runs")  # where runs without a folder of their own are numbered
CONFIG, DATA, TASK = "config.toml", "data.json", "task.py"
_OWN = (CONFIG, DATA, TASK, "metrics.jsonl", "checkpoints", "profile")

_ELSEWHERE = "use another --train.out-dir"

_log = logging.getLogger(__name__)


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
        self.record = Record(self.data_path)
        kind = BucketLock if isinstance(self.path, BucketPath) else FolderLock
        self._lock = kind(self.path, self._make)
        self._metrics = MetricsFile(self.metrics_path, self._lock.check)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def holds_run(self) -> bool:
        """A run has written here."""
        saved = self.checkpoints_path.is_dir() and any(self.checkpoints_path.glob("[0-9]*"))
        return saved or self.config_path.exists()

    def check(self) -> None:
        """Nothing, if a run has written here that this version can go on with.

        Warns of files that people may change and that are not as they were written.

        Raises:
          FileNotFoundError: no run has written here.
          ValueError: an older version has, or what it has written of itself is damaged.
        """
        file = self._task_file()
        if jax.process_index() != 0:
            return
        # Settings and numbers alone can be looked at; without the rest no run goes on.
        written = self.record.read()["written"] if self.data_path.exists() else {}
        for path in (self.config_path, self.task_path, self.metrics_path):
            if (known := written.get(path.name)) is None:
                continue
            content = read_file(path, remedy=REMEDY) if path.exists() else b""
            size = known.partition(" ")[0]
            if path == self.metrics_path and size.isdecimal():  # lines may have been added since
                content = content[: int(size)]
            if checksum(content) != known:
                _log.warning(
                    "%s has changed since the run wrote it; if you have not changed it, bring it back from a "
                    "copy",
                    path,
                )
        both = [path for path in (file, self.task_path) if path is not None and path.is_file()]
        if len({path.read_bytes() for path in both}) == 2:
            _log.warning(
                "%s has changed since the run began; the task is as it is now, %s as it was", *both
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
                f"the task of the run in {self} is in {file}, which is not there any more; bring it back: "
                f"{self.task_path} is as it was when the run began"
            )
        settings = read_config(self.config_path)
        # A folder may have been copied or moved, or be somebody else's: it names no place to write to.
        train = dataclasses.replace(settings.train, out_dir=str(self))
        return settings._replace(train=train)

    def lock(self) -> FolderLock:
        """A context manager that keeps other runs out of the folder, which is made if need be.

        With several processes, all of them enter it.

        Raises:
          BlockingIOError: as it is entered, another run goes on here; the message says which.
          OSError: as it is entered, the folder cannot be written.
        """
        return self._lock

    def check_place(self) -> None:
        """Nothing, if a run can write here.

        Raises:
          OSError: it cannot.
        """
        check_folder(self.path, f"the folder {self}", _ELSEWHERE)

    def _make(self) -> None:
        make_folder(self.path, f"the folder {self}", _ELSEWHERE)

    def _task_file(self) -> Path | None:
        """The user's file that the run's task is in; None if it comes with jaxpar.

        Raises:
          FileNotFoundError: no run has written here.
          ValueError: what has is no run of jaxpar, or damaged.
        """
        if not self.config_path.exists():
            raise FileNotFoundError(
                f"{self} holds no run: there is no {self.config_path.name} in it; give the "
                f"folder that `train` wrote"
                + (_known_runs(self.path) or _known_runs(self.path.parent))
            )
        return _file_of(_task_of(self.config_path))

    def find_run(self) -> str | None:
        """The name of the run in the folder, by data.json or its newest checkpoint; None without both."""
        with contextlib.suppress(OSError, ValueError):
            return self.record.read()["run"]
        runs = map(run_of, reversed(_numbered(self.checkpoints_path)))
        return next(filter(None, runs), None)

    def check_links(self) -> None:
        """Nothing, if a run in the folder writes and deletes nowhere else.

        Links lead elsewhere. `checkpoints` may be one, to a folder of this run alone.

        Raises:
          ValueError: a file of the run is a link, or `checkpoints` is one to a folder with other things that
            have the names of checkpoints.
        """
        for path in self._own_paths():
            if path.is_symlink() and path != self.checkpoints_path:
                raise ValueError(
                    f"{path} is a link to {os.readlink(path)}; a run writes through no link but "
                    f"{self.checkpoints_path.name}: put the file itself there, or remove the link"
                )
        if not self.checkpoints_path.is_symlink() or not self.checkpoints_path.is_dir():
            return
        run = self.find_run()
        for path in sorted(self.checkpoints_path.iterdir()):
            if path.name.isdecimal() and (run is None or run_of(path) != run):
                raise ValueError(
                    f"{self.checkpoints_path} is a link to {os.readlink(self.checkpoints_path)}, where "
                    f"{path.name} is not a checkpoint of this run; link to an empty folder, or to this run's "
                    f"own"
                )

    def checkpoints(self, setup: Setup) -> Checkpoints:
        """The run's checkpoints, where the files that it keeps are whole; the task's data need not be there.

        Raises:
          OSError: no run has written here, or a file cannot be read.
          ValueError: a file is damaged.
        """
        known = self.record.read()
        for name in known["files"]:
            self.read(name)
        return Checkpoints(self.checkpoints_path, setup, run=known["run"], check=self._lock.check)

    def read(self, name: str) -> str:
        """A file of the task, as it was written.

        Raises:
          OSError: it cannot be read.
          ValueError: it is damaged, or data.json is, or there is no such file.
        """
        files = self.record.read()["files"]
        if name not in files:
            raise ValueError(f"the run in {self} keeps no {name}")
        content = read_file(self.path / name, remedy=REMEDY)
        if checksum(content) != files[name]:
            raise ValueError(f"{self.path / name} is damaged: it is not what was written; {REMEDY}")
        return content.decode()

    def restore(
        self, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
    ) -> tuple[Setup, TrainState]:
        """The run's setup on this mesh, and a state there, to be looked at and used.

        The mesh need not be the one that the run had; with another number of stages the layers are
        placed anew. Its parameters are those that the task evaluates; the optimizer's state is left out.

        Args:
          best: the state with the lowest validation loss that has been kept and is whole, not the newest.
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

    def start(self, texts: Mapping[str, str]) -> None:
        """Makes the folder and writes what a run can be continued from; the settings come last.

        Args:
          texts: as of `texts_of`.
        Raises:
          OSError: it cannot be written.
        """
        self._make()
        run = self.find_run() or uuid.uuid4().hex[:16]  # the same wherever the folder is copied
        self._metrics.add("")
        self._metrics.put()
        self.record.begin({**json.loads(texts[DATA]), "run": run})
        self.record.put(self.metrics_path.name, self.metrics_path.read_bytes())
        texts = {name: text for name, text in texts.items() if name != DATA}
        for name, text in texts.items():
            self.record.put(name, text.encode())
        self.write_checksums()
        for name, text in texts.items():
            write_file(self.path / name, text.encode())

    def write_checksums(self) -> None:
        """Writes down how the files of the run are, for whoever continues from here.

        Raises:
          OSError: it cannot be written.
        """
        self._lock.check()
        self._metrics.put()
        self.record.write()

    def clear(self) -> None:
        """Removes the files of a run, and no others. A link stays; where it leads, this run's checkpoints go.

        Raises:
          ValueError: as of `check_links`, or no run of jaxpar has written here.
        """
        self.check_links()
        if self.holds_run and not self.data_path.exists():
            self._task_file()
        try:
            kept = self.record.read()["files"]
        except (OSError, ValueError):
            kept = ()
        run = self.find_run()
        for path in (*self._own_paths(), *(self.path / name for name in kept)):
            if path.is_symlink() and path.is_dir():
                for inner in filter(Path.is_dir, path.iterdir()):
                    is_own = run is not None and run_of(inner) == run
                    if is_own and CHECKPOINT_NAMES.fullmatch(inner.name):
                        remove_folder(inner)
            elif path.is_dir():
                remove_folder(path)
            else:
                path.unlink(missing_ok=True)

    def _own_paths(self) -> Iterator[Path]:
        yield from (self.path / name for name in _OWN)
        yield from self.path.glob("metrics.before-*.jsonl")

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds a line to `metrics.jsonl`, as of `MetricsFile.add`.

        Raises:
          OSError: it cannot be written.
        """
        text = f"{json.dumps(line)}\n"
        self._metrics.add(text)
        self.record.extend(self.metrics_path.name, text.encode())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; see `read_metrics`."""
        return read_metrics(self.metrics_path)

    def rewind_metrics(self, step: int, other: "RunFolder | None" = None) -> None:
        """Leaves in `metrics.jsonl` the lines up to `step`: what continues from there writes the others anew.

        If there are others, the file as it was stays beside it, as metrics.before-1.jsonl.

        Args:
          other: whose lines they are; None are its own.
        """
        lines = (line for line in (other or self).metrics() if line["step"] <= step)
        kept = "".join(f"{json.dumps(line)}\n" for line in lines)
        content = self.metrics_path.read_bytes()
        if content == kept.encode():
            return
        if content:
            write_file(free_path(self.path, "metrics.before-", ".jsonl"), content)
        self._metrics.replace(kept.encode())
        self.record.put(self.metrics_path.name, kept.encode())
        self.write_checksums()


def texts_of(setup: Setup, data: Mapping[str, Any]) -> dict[str, str]:
    """What a run can be continued from, by the names of files.

    Args:
      data: as of `describe_data`.
    Raises:
      ValueError: a setting cannot be written, or a file of the task has a name that is taken.
    """
    task = setup.task
    texts = dict(task.files())
    for name in texts:
        if name != Path(name).name or name in _OWN:
            raise ValueError(
                f"the task keeps a file {name!r}, which is a name of the run's own or a path; use another"
            )
    if source := _file_of(spec_of(task)):
        texts[TASK] = source.read_bytes().decode()
    texts[DATA] = json.dumps(data)
    # The folder knows where it is, wherever it will be copied.
    train = dataclasses.replace(setup.train, out_dir=task.train.out_dir)
    texts[CONFIG] = to_toml(Settings(task, setup.parallel, train), num_simulated())
    return texts


def next_run_folder(root: Path = ROOT) -> RunFolder:
    """A new folder, made here: runs/0001, runs/0002, ... No two processes get the same."""
    root.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in _numbered(root)), default=0)
    while True:
        number += 1
        path = root / f"{number:04d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return RunFolder(path)


def newest_run_folder(root: Path = ROOT) -> RunFolder:
    """The numbered folder of the latest run.

    Raises:
      FileNotFoundError: there is none.
    """
    runs = [path for path in _numbered(root) if RunFolder(path).holds_run]
    if not runs:
        raise FileNotFoundError(
            f"there is no run to resume in {root.absolute()}; name its folder with "
            f"--train.out-dir, or leave --resume out to begin one"
        )
    return RunFolder(runs[-1])


def _numbered(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    runs = (path for path in root.iterdir() if path.is_dir() and path.name.isdecimal())
    return sorted(runs, key=lambda path: int(path.name))


def _known_runs(root: Path) -> str:
    names = [str(path) for path in _numbered(root) if RunFolder(path).holds_run]
    return f"; there are {', '.join(names[-3:])}" if names else ""


def _file_of(spec: str) -> Path | None:
    """The user's file that a task is in; None if it comes with jaxpar, or is in no file."""
    file, colon, _ = spec.rpartition(":")
    return Path(file).expanduser() if colon else None


def _task_of(config: Path) -> str:
    """The name of the task in a run's settings."""
    try:
        name = read_toml(config).get("task")
    except ValueError as error:
        raise ValueError(f"{config} is damaged: {error}; {REMEDY}") from error
    if not isinstance(name, str):
        raise ValueError(f"{config} names no task, so no run of jaxpar has written it; {REMEDY}")
    return name
