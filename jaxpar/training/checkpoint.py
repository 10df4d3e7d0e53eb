"""Checkpoints of a training run: Orbax behind one door.

A checkpoint does not know the mesh that wrote it: it holds the arrays of `by_layer`. A restore puts
each array where the mesh of the new run wants it.

Masks of dropout and batches of text are functions of the seed and the step, so these two are the
random state and the place in the data. A checkpoint gets its name when all of it is written, and
tells the size of every file in it: one that is not whole is recognised and passed over.
"""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from orbax.checkpoint import v1 as orbax

from jaxpar.config import RunConfig
from jaxpar.data.corpus import Vocabulary
from jaxpar.hosts.distributed import wait_for_processes
from jaxpar.sharding import named_leaves
from jaxpar.state import TrainState, abstract_state
from jaxpar.training.by_layer import abstract_by_layer, by_layer, from_layers

# Of the model, what may change between two runs: no array has another shape or meaning for it.
_FREE_OF_MODEL = ("dropout", "forget_bias", "dtype", "kernel", "strategy")
# Of the optimizer, what decides which arrays it keeps.
_NAMES_OF_OPTIMIZER = ("optimizer", "momentum")
# By Orbax the first two, by us the third.
_METADATA, _HALF_WRITTEN, _SIZES = "_CHECKPOINT_METADATA", ".orbax-checkpoint-tmp", "sizes.json"

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder, one subfolder for each step, named by its number.

    Use it as a context manager, or call `close`: saves run in the background. With several
    processes, all of them call every method, in the same order.

    Args:
      folder: made by the first save, if need be.
      keep: the newest checkpoints kept; older ones are deleted as new ones are written.
      vocabulary: of the model; stored in every checkpoint, and compared when one is restored.
    Attributes:
      losses: step -> validation loss, to be filled in by the caller; of the checkpoints of these
        steps, the one with the lowest loss is kept as well.
    Raises:
      ValueError: `keep` is not positive.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        keep: int,
        vocabulary: Vocabulary | None = None,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least 1 checkpoint")
        self.losses: dict[int, float] = {}
        self._folder = Path(folder).absolute()
        self._keep, self._vocabulary = keep, vocabulary
        self._writer: orbax.training.Checkpointer | None = None
        self._saving: orbax.AsyncResponse[bool] | None = None
        self._saving_step = -1

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(self, state: TrainState, config: RunConfig) -> None:
        """Begins to write a checkpoint of `state.step`; returns as soon as the state may change.

        Nothing counts as a checkpoint until all of it is written. Config and vocabulary are in it,
        as JSON. What is not whole in the folder is moved aside.

        Args:
          state: may be donated to the next training step at once.
          config: as given to `init_state`.
        Raises:
          ValueError: the folder has a checkpoint of this step or a later one.
          OSError: this save, or the one before it in the background, failed.
        """
        self._wait()
        step = int(state.step)
        if later := [s for s in self.steps() if s >= step]:
            raise ValueError(
                f"cannot save step {step}: {self._folder} has step {max(later)} already; continue "
                f"from that one, delete it, or use another out_dir"
            )
        arrays = _nest(by_layer(state, config))
        metadata: dict[str, Any] = {"config": dataclasses.asdict(config)}
        if self._vocabulary is not None:
            metadata["vocabulary"] = dataclasses.asdict(self._vocabulary)
        self._saving_step = step
        try:
            if self._writer is None:
                self._writer = self._make_writer()
            # Forced, for the caller has decided when.
            self._saving = self._writer.save_async(
                step, arrays, force=True, custom_metadata=metadata
            )
        except Exception as error:
            self._writer = None
            raise self._failure(error) from error
        assert self._saving is not None, "a forced save is never skipped"

    @property
    def is_empty(self) -> bool:
        """No checkpoint has been written to the end, whole or damaged since."""
        return not self._examine()

    def latest_step(self) -> int | None:
        """The newest step of which there is a whole checkpoint; None if there is none.

        Waits for a save that is still running.

        Raises:
          OSError: that save failed.
        """
        self._wait()
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Steps of which there is a whole checkpoint, in their order."""
        return sorted(step for step, problem in self._examine().items() if problem is None)

    def restore(self, config: RunConfig, mesh: Mesh, step: int | None = None) -> TrainState:
        """The state of a checkpoint, on this mesh, in this config's placement and layout.

        Every process reads the shards of its own devices. Mesh, placement, microbatches, `fsdp`,
        `update`, learning rate and dropout may differ from those of the run that wrote it.

        Args:
          config: as given to `init_state`.
          step: None takes the latest.
        Raises:
          FileNotFoundError: there is no such checkpoint that is whole.
          ValueError: it holds another model, vocabulary, optimizer or batch size; or sizes do not fit the
            mesh.
        """
        path = self._folder / str(self._resolve(step))
        config.check()
        target = abstract_state(config, mesh)
        abstract = abstract_by_layer(target, config)
        _check_compatible(path, abstract, config, self._vocabulary)
        return from_layers(target, config, _flatten(orbax.load(str(path), _nest(abstract))))

    def close(self) -> None:
        """Waits for the save that is still running.

        Raises:
          OSError: it failed.
        """
        try:
            self._wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _make_writer(self) -> orbax.training.Checkpointer:
        """Made by the first save: a reader makes no folder, and deletes no half-written one."""
        if jax.process_index() == 0:
            self._move_damaged_aside()
        wait_for_processes("the folder has whole checkpoints only")
        kept: Any = _Kept(self._keep, self.losses)  # Any: Orbax's hints contradict each other
        context = orbax.Context()
        # Called when all is written, before the folder gets its name. A function, for Orbax copies the
        # options deeply, and with a method the object that it belongs to.
        context.asynchronous.post_finalization_callback = lambda: self._write_sizes()
        # Where a folder cannot be made, threads would wait for it for minutes, at the end of the process too.
        context.asynchronous.create_directories_asynchronously = False
        return orbax.training.Checkpointer(
            str(self._folder),
            context=context,
            preservation_policy=kept,
            cleanup_tmp_directories=True,
        )

    def _write_sizes(self) -> None:
        """Notes the size of every file of the checkpoint that is being written."""
        path = self._folder / f"{self._saving_step}{_HALF_WRITTEN}"
        sizes = {
            str(file.relative_to(path)): file.stat().st_size
            for file in sorted(path.rglob("*"))
            if file.is_file() and file != path / _METADATA  # not finished yet
        }
        (path / _SIZES).write_text(json.dumps(sizes, indent=1))

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result()
            except Exception as error:
                self._writer = None  # it would raise the same again, for ever
                raise self._failure(error) from error

    def _failure(self, error: Exception) -> OSError:
        """In words; TensorStore has the operating system's error in the text of a ValueError."""
        code = re.search(r"os_error_code='(\d+)'", str(error))
        reason = os.strerror(int(code[1])) if code else str(error).split("\n")[0]
        newest = max(self.steps(), default=None)
        left = (
            f"the newest whole one is of step {newest}" if newest is not None else "there is none"
        )
        return OSError(
            f"the checkpoint of step {self._saving_step} could not be written in {self._folder}: "
            f"{reason}; {left}"
        )

    def _examine(self) -> dict[int, str | None]:
        """Steps that have a subfolder, and what is wrong with it."""
        if not self._folder.is_dir():
            return {}
        paths = (path for path in self._folder.iterdir() if path.name.isdecimal())
        return {int(path.name): _problem(path) for path in paths}

    def _move_damaged_aside(self) -> None:
        for step, problem in self._examine().items():
            if problem is not None:
                path, number = self._folder / str(step), 1
                while (aside := path.with_name(f"{step}.damaged-{number}")).exists():
                    number += 1
                path.rename(aside)
                _log.warning("moved %s to %s: %s", path, aside.name, problem)

    def _resolve(self, step: int | None) -> int:
        self._wait()
        examined = self._examine()
        damaged = {step: problem for step, problem in examined.items() if problem is not None}
        steps = sorted(examined.keys() - damaged.keys())
        if step in damaged:
            raise FileNotFoundError(
                f"the checkpoint {self._folder / str(step)} is damaged: {damaged[step]}; use "
                + (f"one of {steps}" if steps else "another one, there is none beside it")
            )
        if not steps:
            raise FileNotFoundError(
                f"there is no whole checkpoint in {self._folder}: "
                + "; ".join(f"{step} is damaged, {damaged[step]}" for step in sorted(damaged))
                + "; bring it back from a copy, or begin anew (--overwrite)"
                if damaged
                else f"there is no checkpoint in {self._folder}; train first, or set out_dir to "
                f"the folder of a run that has saved one"
            )
        if step is None:
            if jax.process_index() == 0:
                for each in sorted(each for each in damaged if each > steps[-1]):
                    path = self._folder / str(each)
                    _log.warning("skipped %s, which is damaged: %s", path, damaged[each])
            return steps[-1]
        if step not in steps:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self._folder}; use one of {steps}"
            )
        return step


class _Kept:
    """What Orbax asks which checkpoints to keep: the newest, and the one with the lowest loss."""

    def __init__(self, newest: int, losses: Mapping[int, float]):
        self._newest, self._losses = newest, losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        kept = {*steps[-self._newest :], best_of(steps, self._losses)}
        return [checkpoint.step in kept for checkpoint in checkpoints]


def best_of(steps: Sequence[int], losses: Mapping[int, float]) -> int | None:
    """The step with the lowest loss, the later one of equals; None if none has a loss."""
    return min((s for s in steps if s in losses), key=lambda s: (losses[s], -s), default=None)


def _problem(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        metadata = json.loads((path / _METADATA).read_bytes())
        if "config" not in (metadata["custom_metadata"] or {}):
            return "it has no config, so jaxpar did not write it"
        sizes = json.loads((path / _SIZES).read_bytes())
        for name, size in sizes.items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} of {size} bytes"
    except OSError as error:
        return f"{Path(error.filename).relative_to(path)}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_METADATA} or {_SIZES} is not what was written"
    return None


def _check_compatible(
    path: Path,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    config: RunConfig,
    vocabulary: Vocabulary | None,
) -> None:
    """Raises if the checkpoint does not hold the arrays that the config needs, naming the field."""
    metadata = orbax.metadata(str(path))
    custom: Any = metadata.custom_metadata
    written = custom["config"]
    stored = _flatten(metadata.metadata)

    for name, now in json.loads(json.dumps(dataclasses.asdict(config.model))).items():
        was = written["model"].get(name, "lstm" if name == "name" else None)
        if name not in _FREE_OF_MODEL and was != now:
            raise ValueError(
                f"{path} holds a model of {name}={was!r}, the config has {name}={now!r}; "
                f"set {name}={was!r}, or use another out_dir"
            )

    if vocabulary is not None and "vocabulary" in custom:
        was = Vocabulary(tuple(custom["vocabulary"]["words"]), custom["vocabulary"]["tokenizer"])
        if was != vocabulary:
            pairs = zip(was.words, vocabulary.words, strict=False)
            differ = [f"{old!r} is now {new!r}" for old, new in pairs if old != new]
            raise ValueError(
                f"{path} holds a model of another vocabulary: {len(was)} words ({was.tokenizer}) then, "
                f"{len(vocabulary)} ({vocabulary.tokenizer}) now"
                + "".join(f", {each}" for each in differ[:1])
                + "; bring back the vocabulary.json of its run"
            )

    was, now = (
        ", ".join(f"{name}={train.get(name)!r}" for name in _NAMES_OF_OPTIMIZER)
        for train in (written["train"], dataclasses.asdict(config.train))
    )
    kept, needed = (
        {n for n in names if n.startswith("opt_state/")} for names in (stored, abstract)
    )
    if written["train"]["optimizer"] != config.train.optimizer or kept != needed:
        raise ValueError(
            f"{path} holds the state of another optimizer: {was}; the config has {now}; set them "
            f"as they were, or use another out_dir"
        )

    was, now = written["data"]["batch_size"], config.data.batch_size
    if was != now and any(name.startswith("carry/") for name in stored):
        raise ValueError(
            f"{path} holds the recurrent state of batch_size={was} rows, the config has "
            f"batch_size={now}; set batch_size={was}, or use another out_dir"
        )

    was, now = ({n: (a.shape, a.dtype) for n, a in each.items()} for each in (stored, abstract))
    if was != now:
        name = min(n for n in was.keys() | now.keys() if was.get(n) != now.get(n))
        raise ValueError(
            f"{path}: {name} is {was.get(name)}, this version of jaxpar needs {now.get(name)}; "
            f"restore it with the version that wrote it"
        )


def _nest(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a/b": x}` -> `{"a": {"b": x}}`."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


def _flatten(tree: Any) -> dict[str, Any]:
    """`{"a": {"b": x}}` -> `{"a/b": x}`."""
    return dict(named_leaves(tree, "/"))
