"""The folder of a run: what `train` writes, and `--resume`, `evaluate` and `sample` read.

runs/0001/
  config.toml        every setting, resolved: mesh, size of the vocabulary
  vocabulary.json    the words, in the order of their ids; not with images
  corpus.json        tokens or images and checksum of each split
  metrics.jsonl      one line a report
  checkpoints/       the newest states
"""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpar.axes import STAGE
from jaxpar.config import Config, RunConfig
from jaxpar.config_file import read_config, write_config
from jaxpar.data.corpus import SPLITS, Corpus, Vocabulary, load_corpus
from jaxpar.data.images import Images, load_images
from jaxpar.files import whole_file
from jaxpar.kernel import KernelChoice, with_kernel
from jaxpar.mesh import MeshConfig
from jaxpar.state import TrainState
from jaxpar.training.checkpoint import Checkpoints, best_of

ROOT = Path("runs")  # where runs without a folder of their own are numbered
ONE_DEVICE = MeshConfig(devices=(0,))


class RunFolder:
    """A run's folder by its path; nothing is read or written until a method is called."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.config_path = self.path / "config.toml"
        self.vocabulary_path = self.path / "vocabulary.json"
        self.corpus_path = self.path / "corpus.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.profile_path = self.path / "profile"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def holds_run(self) -> bool:
        """A run has written here."""
        return self.config_path.exists() or self.checkpoints_path.exists()

    def config(self) -> RunConfig:
        """The run's config.

        Raises:
          FileNotFoundError: no run has written here.
          ValueError: the file is damaged.
        """
        if not self.config_path.exists():
            raise FileNotFoundError(
                f"{self} holds no run: there is no {self.config_path.name} in it; give the "
                f"folder that `train` named as its own" + _known_runs(self.path.parent)
            )
        return read_config(self.config_path)

    def vocabulary(self) -> Vocabulary:
        """The run's vocabulary.

        Raises:
          OSError: no run has written here, or the file cannot be read.
          ValueError: the run is on images, or the file is damaged.
        """
        if not isinstance(self.config(), Config):
            raise ValueError(f"the run in {self} is on images; give one on text")
        return Vocabulary.load(self.vocabulary_path)

    def checkpoints(self, config: RunConfig) -> Checkpoints:
        """The run's checkpoints, of its vocabulary if it has one.

        Raises:
          OSError: no run has written here, or a file cannot be read.
        """
        vocabulary = self.vocabulary() if isinstance(config, Config) else None
        keep = config.train.keep_checkpoints
        return Checkpoints(self.checkpoints_path, keep=keep, vocabulary=vocabulary)

    def restore(
        self, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
    ) -> tuple[RunConfig, Mesh, TrainState]:
        """The run's config for this mesh, the mesh, and a state there.

        The mesh need not be the one that the run had, nor have what the kernel of its layers needs: the
        config names the scan, which runs anywhere.

        Args:
          best: the state with the lowest validation loss that has been kept, not the newest.
        Raises:
          ValueError: the model does not fit the mesh.
          FileNotFoundError: no run has written here, or no such checkpoint.
        """
        config = self.config()
        devices = mesh.build()
        if isinstance(config, Config) and devices.shape[STAGE] != config.mesh.stage:
            balanced = dataclasses.replace(config.pipeline, placement="balanced")
            config = dataclasses.replace(config, pipeline=balanced)
        if isinstance(config, Config):
            config = with_kernel(config, KernelChoice("scan"))
        config = dataclasses.replace(config, mesh=MeshConfig(**devices.shape, devices=mesh.devices))
        checkpoints, step = self.checkpoints(config), None
        if best and (step := best_of(checkpoints.steps(), self.valid_losses())) is None:
            raise FileNotFoundError(
                f"{self} holds no checkpoint of a validated step; train with --train.eval-every, or "
                f"take the newest state"
            )
        return config, devices, checkpoints.restore(config, devices, step)

    def load_data(self, config: RunConfig) -> Corpus | Images:
        """What the run learns from, after a check that it still is what the run began with.

        Raises:
          OSError: a file cannot be read.
          ValueError: the text or its vocabulary has changed, or the images have.
        """
        data = load_data(config)
        try:
            recorded = json.loads(self.corpus_path.read_bytes())
        except OSError as error:
            raise type(error)(f"cannot read {self.corpus_path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(
                f"{self.corpus_path} is damaged: {error}; bring it back from a copy"
            ) from error
        known = _fingerprint(data)
        if isinstance(data, Images):
            if recorded != known:
                raise ValueError(
                    f"the images {data.name!r} are not those that the run in {self} began with; bring "
                    f"back the version of the package that they come with, or start another run"
                )
            return data
        vocabulary = self.vocabulary()
        if vocabulary != data.vocabulary or recorded != known:
            raise ValueError(
                f"corpus {data.name!r} is not the text that the run in {self} began with: "
                f"{_describe(recorded, vocabulary)} then, "
                f"{_describe(known, data.vocabulary)} now; bring the text back (python-docs and "
                f"python-source need the same version of Python), or start another run"
            )
        return data

    def start(self, config: RunConfig, data: Corpus | Images) -> None:
        """Makes the folder and writes what a run can be continued from; the config comes last.

        Raises:
          OSError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                f"cannot make the folder {self}: {error.strerror}; use another --train.out-dir"
            ) from error
        self._append("")
        if isinstance(data, Corpus):
            data.vocabulary.save(self.vocabulary_path)
        with whole_file(self.corpus_path) as file:
            file.write_text(json.dumps(_fingerprint(data), indent=1) + "\n")
        write_config(config, self.config_path)

    def clear(self) -> None:
        """Removes the files of a run, and no others."""
        for path in (self.config_path, self.vocabulary_path, self.corpus_path, self.metrics_path):
            path.unlink(missing_ok=True)
        for path in self.path.glob("metrics.before-*.jsonl"):
            path.unlink()
        for path in (self.checkpoints_path, self.profile_path):
            if path.exists():
                shutil.rmtree(path)

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
        """Step -> loss on the validation text, of `metrics.jsonl`."""
        return {line["step"]: line["loss"] for line in self.metrics() if line["split"] == "valid"}

    def rewind_metrics(self, step: int) -> None:
        """Takes the lines after `step` out of `metrics.jsonl`: a resumed run writes them anew.

        If there are any, the file as it was stays beside it, as metrics.before-1.jsonl.
        """
        lines = self.metrics()
        kept = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step)
        if not self.metrics_path.exists() or kept == self.metrics_path.read_text():
            return
        number = 1 + len(list(self.path.glob("metrics.before-*.jsonl")))
        with whole_file(self.path / f"metrics.before-{number}.jsonl") as file:
            shutil.copyfile(self.metrics_path, file)
        with whole_file(self.metrics_path) as file:
            file.write_text(kept)

    def take_metrics(self, other: "RunFolder", step: int) -> None:
        """Writes the lines of another run up to a step."""
        kept = (json.dumps(line) + "\n" for line in other.metrics() if line["step"] <= step)
        with whole_file(self.metrics_path) as file:
            file.write_text("".join(kept))


def load_data(config: RunConfig) -> Corpus | Images:
    """The text or the images of a config.

    Raises:
      OSError: a file cannot be read.
      ValueError: there is no such thing, or it is too small.
    """
    if isinstance(config, Config):
        return load_corpus(config.data.corpus, config.data.level, config.data.max_vocab)
    return load_images(config.data.dataset)


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


def _fingerprint(data: Corpus | Images) -> dict[str, dict[str, Any]]:
    def sha256(*arrays: np.ndarray) -> str:
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

    splits = {split: getattr(data, split) for split in SPLITS}
    if isinstance(data, Images):
        return {
            split: {
                "images": len(labels_N),
                "sha256": sha256(images_NHWC.astype("<f4"), labels_N.astype("<i4")),
            }
            for split, (images_NHWC, labels_N) in splits.items()
        }
    return {
        split: {"tokens": len(ids), "sha256": sha256(np.ascontiguousarray(ids, "<i4"))}
        for split, ids in splits.items()
    }


def _describe(fingerprint: dict[str, dict[str, Any]], vocabulary: Vocabulary) -> str:
    tokens = ", ".join(f"{part['tokens']} {split}" for split, part in fingerprint.items())
    checksum = fingerprint[SPLITS[0]]["sha256"][:8]
    return f"{tokens} tokens (checksum {checksum}), {len(vocabulary)} words"
