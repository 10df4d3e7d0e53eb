"""The folder of a run: what `train` writes, and `--resume`, `evaluate` and others read.

runs/0001/
  config.toml        every setting, with what was left open filled in
  data.json          what identifies the data
  task.py            the file of the task as it was when the run began, if it is the user's own
  metrics.jsonl      one line a report
  checkpoints/       the newest states
  vocabulary.json    and other files that the task keeps
  .lock              while a run goes on: who it is

Each file tells whether it is as it was written: config.toml by its last line, data.json for itself and the
files of the task, each line of metrics.jsonl for itself, a checkpoint by a file in it.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import shutil
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar.config_file import read_config, to_toml
from jaxpar.files import read_file, whole_file
from jaxpar.mesh import MeshConfig, num_simulated
from jaxpar.state import TrainState, averaged
from jaxpar.task import Task, spec_of
from jaxpar.training.checkpoint import CHECKPOINT_NAMES, Checkpoints
from jaxpar.training.checksums import digest
from jaxpar.training.lock import FolderLock
from jaxpar.training.settings import Settings

ROOT = Path("runs")  # where runs without a folder of their own are numbered
ONE_DEVICE = MeshConfig(devices=(0,))
_NAMED = 3  # differences that a message names
_SHA256 = "sha256"
# The last line of config.toml, and the end of a line of metrics.jsonl.
_SEAL = "# sha256 of what is above: {} (remove this line if you change the file by hand)\n"
_SEALED = re.compile(rb"(.*\n)# sha256 of what is above: ([0-9a-f]{64})\b[^\n]*\n", re.DOTALL)
_CHECKED_LINE = re.compile(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}')

_log = logging.getLogger(__name__)


class RunFolder:
    """A run's folder by its path; nothing is read or written until a method is called."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.config_path = self.path / "config.toml"
        self.data_path = self.path / "data.json"
        self.task_path = self.path / "task.py"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.profile_path = self.path / "profile"
        self._lock: FolderLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def holds_run(self) -> bool:
        """A run has written here."""
        return self.config_path.exists() or self.checkpoints_path.exists()

    def check(self) -> None:
        """Nothing, if a run has written here that this version can go on with.

        Raises:
          FileNotFoundError: no run has written here.
          ValueError: an older version has, or its settings are damaged.
        """
        self._task_name()

    def settings(self) -> Settings:
        """The run's settings.

        Raises:
          FileNotFoundError: no run has written here, or the file of its task is gone.
          ValueError: an older version has written here, or the settings are damaged.
        """
        file = _file_of(self._task_name())
        if file is not None and not file.exists():
            raise FileNotFoundError(
                f"the task of the run in {self} is in {file}, which is not there any more; bring it back: "
                f"{self.task_path} is as it was when the run began"
            )
        settings = read_config(self.config_path)
        # A folder may have been copied or moved, or be somebody else's: it names no place to write to.
        train = dataclasses.replace(settings.train, out_dir=str(self), fallback_dir=None)
        return settings._replace(train=train)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other runs out of the folder, which is made if need be; again inside itself it does nothing.

        With several processes, all of them call it.

        Raises:
          BlockingIOError: another run goes on here; the message says which.
          OSError: the folder cannot be written.
        """
        if self._lock is not None:
            yield
            return
        with FolderLock(self.path, self._make) as self._lock:
            try:
                yield
            finally:
                self._lock = None

    def check_lock(self) -> None:
        """Nothing, if the folder is still there, or nobody has locked it.

        Raises:
          FileNotFoundError: it was removed since.
        """
        if self._lock is not None:
            self._lock.check()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                f"cannot make the folder {self}: {error.strerror}; use another --train.out-dir"
            ) from error

    def _task_name(self) -> str:
        if not self.config_path.exists():
            raise FileNotFoundError(
                f"{self} holds no run: there is no {self.config_path.name} in it; give the "
                f"folder that `train` wrote"
                + (_known_runs(self.path) or _known_runs(self.path.parent))
            )
        content = self.config_path.read_bytes()
        sealed = _SEALED.fullmatch(content)
        if sealed is not None and hashlib.sha256(sealed[1]).hexdigest() != sealed[2].decode():
            raise ValueError(
                f"{self.config_path} is damaged: it is not what was written; bring it back from a copy, or "
                f"remove its last line if you have changed it yourself"
            )
        try:
            tables = tomllib.loads(content.decode())
        except ValueError as error:
            raise ValueError(
                f"{self.config_path} is damaged: {error}; bring it back from a copy"
            ) from error
        name = tables.get("task")
        if not isinstance(name, str):
            raise ValueError(
                f"{self.config_path} names no task: the run in {self} is from jaxpar 0.1; continue it "
                f"there, or begin another"
            )
        return name

    def checkpoints(self, settings: Settings) -> Checkpoints:
        """The run's checkpoints, with the files that it keeps; the task's data need not be there.

        Raises:
          OSError: no run has written here, or a file cannot be read.
          ValueError: a file is damaged.
        """
        task, parallel, train = settings
        files = {name: self.read(name) for name in self._data()["files"]}
        return Checkpoints(
            self.checkpoints_path, task, parallel, keep=train.keep_checkpoints, files=files
        )

    def read(self, name: str) -> str:
        """A file of the task, as it was written.

        Raises:
          OSError: it cannot be read.
          ValueError: it is damaged, or data.json is, or there is no such file.
        """
        files = self._data()["files"]
        if name not in files:
            raise ValueError(f"the run in {self} keeps no {name}")
        content = _read(self.path / name)
        if hashlib.sha256(content).hexdigest() != files[name][_SHA256]:
            raise _damaged(self.path / name)
        return content.decode()

    def _data(self) -> dict[str, Any]:
        """What the run has written of its data."""
        content = _read(self.data_path)
        try:
            data = json.loads(content)
        except ValueError:
            raise _damaged(self.data_path) from None
        # An older version wrote no digest.
        if not isinstance(data, dict) or data.keys() - {_SHA256} != {"data", "files"}:
            raise _damaged(self.data_path)
        if (written := data.pop(_SHA256, None)) is not None and written != digest(data):
            raise _damaged(self.data_path)
        return data

    def restore(
        self, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
    ) -> tuple[Settings, Mesh, TrainState]:
        """The run's settings for this mesh, the mesh, and a state there, to be looked at and used.

        The mesh need not be the one that the run had; with another number of stages the layers are
        placed anew. Its parameters are their mean, where the optimizer takes it.

        Args:
          best: the state with the lowest validation loss that has been kept and is whole, not the newest.
        Raises:
          ValueError: the model does not fit the mesh.
          FileNotFoundError: no run has written here, or no such checkpoint.
        """
        settings = self.settings()
        devices = mesh.build()
        parallel = settings.parallel.on_mesh(mesh.resolve(devices.size))
        task = settings.task.resolve(parallel, devices)
        task.check(parallel, devices)
        settings = settings._replace(task=task, parallel=parallel)
        checkpoints = self.checkpoints(settings)
        if best:
            checkpoints.losses |= self.valid_losses()
        return settings, devices, averaged(checkpoints.restore(devices, best=best), devices)

    def check_data(self, task: Task) -> None:
        """Nothing, if a task's data and files are those that the run began with.

        Raises:
          OSError: what the run has written cannot be read.
          ValueError: they have changed.
        """
        was, now = self._data(), _describe(task)
        if was != now:
            before, after = dict(_flatten(was)), dict(_flatten(now))
            changed = [n for n in {**before, **after} if before.get(n) != after.get(n)]
            named = (f"{n} was {before.get(n)}, is {after.get(n)}" for n in changed[:_NAMED])
            raise ValueError(
                f"the data are not those that the run in {self} began with: {'; '.join(named)}; bring them "
                f"back (what comes with Python or a package needs the same version), or start another run"
            )

    def start(self, settings: Settings, asked: Task | None = None) -> None:
        """Makes the folder and writes what a run can be continued from; the settings come last.

        Args:
          asked: the task as it was given. What it left open is written as it was filled in, all else as it
            was asked for: other devices may fill it in otherwise.
        Raises:
          OSError: it cannot be written.
          ValueError: as of `texts`.
        """
        texts = self.texts(settings, asked)
        self._make()
        self._append("")
        for name, text in texts.items():
            with whole_file(self.path / name) as file:
                file.write_bytes(text.encode())

    def texts(self, settings: Settings, asked: Task | None = None) -> dict[str, str]:
        """What `start` writes, by the names of files.

        Raises:
          ValueError: a setting cannot be written, or a file of the task has a name that is taken.
        """
        task = settings.task
        written = task if asked is None else _filled_in(asked, task)
        texts = dict(task.files())
        for name in texts:
            if name != Path(name).name or name in {path.name for path in self._own_paths()}:
                raise ValueError(
                    f"the task keeps a file {name!r}, which is a name of the run's own or a path; use another"
                )
        if source := _file_of(spec_of(task)):
            texts[self.task_path.name] = source.read_bytes().decode()
        data = _describe(task)
        texts[self.data_path.name] = json.dumps({**data, _SHA256: digest(data)}, indent=1) + "\n"
        # The folder knows where it is, wherever it will be copied.
        train = dataclasses.replace(settings.train, out_dir=task.train.out_dir)
        text = to_toml(settings._replace(task=written, train=train), num_simulated())
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        texts[self.config_path.name] = text + _SEAL.format(sha256)
        return texts

    def clear(self) -> None:
        """Removes the files of a run, and no others. A link to a folder stays, what a run writes goes."""
        try:
            kept = self._data()["files"]
        except (OSError, ValueError):
            kept = ()
        for path in (*self._own_paths(), *(self.path / Path(name).name for name in kept)):
            if path.is_symlink() and path.is_dir():
                for inner in filter(Path.is_dir, path.iterdir()):
                    if CHECKPOINT_NAMES.fullmatch(inner.name):
                        shutil.rmtree(inner)
                continue
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)

    def _own_paths(self) -> Iterator[Path]:
        yield from (self.config_path, self.data_path, self.task_path, self.metrics_path)
        yield from (self.checkpoints_path, self.profile_path)
        yield from self.path.glob("metrics.before-*.jsonl")

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds a line to `metrics.jsonl`.

        Raises:
          OSError: it cannot be written.
        """
        self.check_lock()
        self._append(_to_line(line))

    def _append(self, text: str) -> None:
        try:
            with self.metrics_path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise type(error)(
                f"cannot write {self.metrics_path}: {error.strerror}; give a place that can be written"
            ) from error

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; none if there is no such file.

        A last line that a killed process left unfinished is passed over.

        Raises:
          ValueError: another line is damaged.
        """
        if not self.metrics_path.exists():
            return []
        *contents, unfinished = _read(self.metrics_path).split(b"\n")  # b"" after a whole line
        lines: list[dict[str, Any]] = []
        checked = False  # an older version may have written the first lines
        for number, content in enumerate(contents, 1):
            match = _CHECKED_LINE.fullmatch(content)
            line = _from_line(content, match)
            if line is None or (checked and match is None):
                raise self._damaged_metrics(number)
            checked = match is not None
            lines.append(line)
        if _CHECKED_LINE.match(unfinished[:-1]):  # one byte too many for a process that was killed
            raise self._damaged_metrics(len(lines) + 1)
        return lines

    def _damaged_metrics(self, number: int) -> ValueError:
        return ValueError(
            f"{self.metrics_path} is damaged: line {number} is not what was written; move it aside, or "
            f"remove this line; the run goes on without it"
        )

    def valid_losses(self) -> dict[int, float]:
        """Step -> loss on the validation split, of `metrics.jsonl`."""
        return {line["step"]: line["loss"] for line in self.metrics() if line["split"] == "valid"}

    def rewind_metrics(self, step: int) -> None:
        """Takes the lines after `step` out of `metrics.jsonl`: a resumed run writes them anew.

        If there are any, the file as it was stays beside it, as metrics.before-1.jsonl.
        """
        if not self.metrics_path.exists():
            return
        lines, kept = self.metrics(), self._metrics_until(step)
        content = self.metrics_path.read_bytes()
        if len(lines) == kept.count("\n") and content[-1:] in (b"", b"\n"):
            return
        number = 1 + len(list(self.path.glob("metrics.before-*.jsonl")))
        with whole_file(self.path / f"metrics.before-{number}.jsonl") as file:
            shutil.copyfile(self.metrics_path, file)
        with whole_file(self.metrics_path) as file:
            file.write_text(kept, encoding="utf-8")

    def take_metrics(self, other: "RunFolder", step: int) -> None:
        """Writes the lines of another run up to a step."""
        with whole_file(self.metrics_path) as file:
            file.write_text(other._metrics_until(step), encoding="utf-8")

    def _metrics_until(self, step: int) -> str:
        kept = (line for line in self.metrics() if line["step"] <= step)
        return "".join(map(_to_line, kept))


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


def _read(path: Path) -> bytes:
    return read_file(path, remedy="bring it back from a copy")


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged: it is not what was written; bring it back from a copy")


def _to_line(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl, with its CRC-32 as its last value."""
    text = json.dumps(line)
    return f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def _from_line(content: bytes, match: re.Match[bytes] | None) -> dict[str, Any] | None:
    """What a line says, without its CRC-32; None if it is none that a run writes."""
    if match is not None:
        content = match[1] + b"}"
        if zlib.crc32(content) != int(match[2], 16):
            return None
    try:
        line = json.loads(content)
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    split, loss = line.get("split"), line.get("loss")
    of_split = split in ("train", "valid", "test") and type(loss) in (int, float)
    return line if of_split or split == "skipped" else None


def _file_of(spec: str) -> Path | None:
    """The user's file that a task is in; None if it comes with jaxpar, or is in no file."""
    file, colon, _ = spec.rpartition(":")
    return Path(file).expanduser() if colon else None


def _filled_in(asked: Task, task: Task) -> Task:
    """The task as it was asked for, with values of another one for its fields that are None."""
    names = [
        field.name for field in dataclasses.fields(asked) if getattr(asked, field.name) is None
    ]
    return dataclasses.replace(asked, **{name: getattr(task, name) for name in names})


def _describe(task: Task) -> dict[str, Any]:
    """What identifies a task's data, as JSON has it."""
    files = {
        name: {"characters": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        for name, text in task.files().items()
    }
    return json.loads(json.dumps({"data": task.fingerprint(), "files": files}))


def _flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in tables of tables, each with the names that lead to it."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for name, value in tree.items():
        yield from _flatten(value, f"{path}.{name}" if path else name)
