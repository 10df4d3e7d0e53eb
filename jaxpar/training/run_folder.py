"""The folder of a run: what `train` writes, and `--resume`, `evaluate` and others read.

runs/0001/
  config.toml        every setting, with what was left open filled in
  data.json          what identifies the data
  task.py            the file of the task as it was when the run began, if it is the user's own
  metrics.jsonl      one line a report
  checkpoints/       the newest states
  vocabulary.json    and other files that the task keeps
"""

import dataclasses
import hashlib
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar.config_file import read_config, to_toml
from jaxpar.files import whole_file
from jaxpar.mesh import MeshConfig
from jaxpar.state import TrainState
from jaxpar.task import Task, spec_of
from jaxpar.training.checkpoint import Checkpoints, best_of
from jaxpar.training.settings import Settings

ROOT = Path("runs")  # where runs without a folder of their own are numbered
ONE_DEVICE = MeshConfig(devices=(0,))
_NAMED = 3  # differences that a message names


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
        return read_config(self.config_path)

    def _task_name(self) -> str:
        if not self.config_path.exists():
            raise FileNotFoundError(
                f"{self} holds no run: there is no {self.config_path.name} in it; give the "
                f"folder that `train` named as its own" + _known_runs(self.path.parent)
            )
        try:
            tables = tomllib.loads(self.config_path.read_bytes().decode())
        except ValueError as error:
            raise ValueError(f"{self.config_path} is damaged: {error}") from error
        name = tables.get("task")
        if not isinstance(name, str):
            raise ValueError(
                f"{self.config_path} names no task: the run in {self} is one of jaxpar 0.1; go on with it "
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
        files = {name: (self.path / name).read_bytes().decode() for name in self._data()["files"]}
        return Checkpoints(
            self.checkpoints_path, task, parallel, keep=train.keep_checkpoints, files=files
        )

    def _data(self) -> dict[str, Any]:
        """What the run has written of its data."""
        try:
            data = json.loads(self.data_path.read_bytes())
            if data.keys() != {"data", "files"}:
                raise ValueError("it has other keys than data and files")
            return data
        except OSError as error:
            raise type(error)(f"cannot read {self.data_path}: {error.strerror}") from error
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.data_path} is damaged: {error}; bring it back from a copy"
            ) from error

    def restore(
        self, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
    ) -> tuple[Settings, Mesh, TrainState]:
        """The run's settings for this mesh, the mesh, and a state there.

        The mesh need not be the one that the run had; with another number of stages the layers are
        placed anew.

        Args:
          best: the state with the lowest validation loss that has been kept, not the newest.
        Raises:
          ValueError: the model does not fit the mesh.
          FileNotFoundError: no run has written here, or no such checkpoint.
        """
        settings = self.settings()
        devices = mesh.build()
        parallel = settings.parallel.on_mesh(mesh.resolve(devices.size))
        task = settings.task.portable().resolve(parallel, devices)
        task.check(parallel, devices)
        settings = settings._replace(task=task, parallel=parallel)
        checkpoints, step = self.checkpoints(settings), None
        if best and (step := best_of(checkpoints.steps(), self.valid_losses())) is None:
            raise FileNotFoundError(
                f"{self} holds no checkpoint of a validated step; train with --train.eval-every, or "
                f"take the newest state"
            )
        return settings, devices, checkpoints.restore(devices, step)

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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                f"cannot make the folder {self}: {error.strerror}; use another --train.out-dir"
            ) from error
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
        texts[self.data_path.name] = json.dumps(_describe(task), indent=1) + "\n"
        texts[self.config_path.name] = to_toml(settings._replace(task=written))
        return texts

    def clear(self) -> None:
        """Removes the files of a run, and no others."""
        try:
            kept = self._data()["files"]
        except (OSError, ValueError):
            kept = ()
        for path in (*self._own_paths(), *(self.path / Path(name).name for name in kept)):
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
        self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        try:
            with self.metrics_path.open("a") as file:
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
        try:
            *lines, unfinished = self.metrics_path.read_text().split("\n")
            del unfinished  # "" after a last line that is whole
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise ValueError(
                f"{self.metrics_path} is damaged: {error}; move it away, the run goes on without it"
            ) from error

    def valid_losses(self) -> dict[int, float]:
        """Step -> loss on the validation split, of `metrics.jsonl`."""
        return {line["step"]: line["loss"] for line in self.metrics() if line["split"] == "valid"}

    def rewind_metrics(self, step: int) -> None:
        """Takes the lines after `step` out of `metrics.jsonl`: a resumed run writes them anew.

        If there are any, the file as it was stays beside it, as metrics.before-1.jsonl.
        """
        if not self.metrics_path.exists():
            return
        kept = self._metrics_until(step)
        if kept == self.metrics_path.read_text():
            return
        number = 1 + len(list(self.path.glob("metrics.before-*.jsonl")))
        with whole_file(self.path / f"metrics.before-{number}.jsonl") as file:
            shutil.copyfile(self.metrics_path, file)
        with whole_file(self.metrics_path) as file:
            file.write_text(kept)

    def take_metrics(self, other: "RunFolder", step: int) -> None:
        """Writes the lines of another run up to a step."""
        with whole_file(self.metrics_path) as file:
            file.write_text(other._metrics_until(step))

    def _metrics_until(self, step: int) -> str:
        kept = (line for line in self.metrics() if line["step"] <= step)
        return "".join(json.dumps(line) + "\n" for line in kept)


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
            f"--train.out-dir, or leave --resume away to begin one"
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
