"""Checkpoints of a training run: Orbax behind one door.

A checkpoint does not know the mesh that wrote it. Arrays are stored under plain names such as
`params/lstm/w_x`, stacked layers in the order of the layers, `[num_layers, ...]`, without the empty
slots that a placement needs. A restore puts each array where the mesh of the new run wants it.

    slots of (1, 2)             stored              slots of (3,)
    0  -  |  1  2       -->     0  1  2     -->     0  1  2

Masks of dropout and batches of text are functions of the seed and the step, so these two are the
random state and the place in the data. A checkpoint gets its name when all of it is written, and
tells the size of every file in it: one that is not whole is recognised and passed over.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as orbax

from jaxpar.axes import LAYERS
from jaxpar.config import RunConfig
from jaxpar.data.corpus import Vocabulary
from jaxpar.sharding import is_variable, named_leaves
from jaxpar.state import TrainState, abstract_state

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
        abstract = {name: _stored_form(leaf, config) for name, leaf in named_leaves(target, "/")}
        _check_compatible(path, abstract, config, self._vocabulary)
        stored = _flatten(orbax.load(str(path), _nest(abstract)))
        leaves = []
        for name, leaf in named_leaves(target, "/"):
            value, dim = stored[name], _layers_dim(leaf)
            if dim is not None and _is_reordered(config):
                value = _take_layers(value, dim, config.layer_ids, value.sharding)
                value = jax.device_put(value, _array(leaf).sharding)
            leaves.append(leaf.replace(value) if isinstance(leaf, nnx.Variable) else value)
        return jax.tree.unflatten(jax.tree.structure(target, is_leaf=is_variable), leaves)

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
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxpar: the folder has whole checkpoints only")
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


def by_layer(state: TrainState, config: RunConfig) -> dict[str, jax.Array]:
    """The arrays of a state as they are stored: by name, stacked layers in the order of the layers.

    They stay sharded; where layers change their places, over another dim than that of the layers.

    Args:
      config: the one that the state was made with.
    Raises:
      ValueError: the state has another number of slots than the config's placement.
    """
    layer_ids = config.layer_ids
    order = tuple(layer_ids.index(layer) for layer in sorted(layer_ids) if layer >= 0)
    arrays = {}
    for name, leaf in named_leaves(state, "/"):
        array, dim = _array(leaf), _layers_dim(leaf)
        if dim is not None and array.shape[dim] != len(layer_ids):
            raise ValueError(
                f"{name} has {array.shape[dim]} slots for layers, the placement layer_ids={layer_ids} "
                f"needs {len(layer_ids)}; give the config that the state was made with"
            )
        if dim is not None and _is_reordered(config):
            array = jax.device_put(array, array.sharding.with_memory_kind("device"))
            array = _take_layers(array, dim, order, _without_layers(array, dim))
        arrays[name] = array
    return arrays


def with_parameters(
    state: TrainState, config: RunConfig, arrays: Mapping[str, np.ndarray]
) -> TrainState:
    """The state with other values of its parameters.

    Args:
      config: the one that the state was made with.
      arrays: on the host, named (without "params/") and shaped as `by_layer` gives them.
    """
    layer_ids, leaves = np.array(config.layer_ids), []
    for name, leaf in named_leaves(state.params, "/"):
        value, dim = arrays[name], _layers_dim(leaf)
        if dim is not None:
            empty = np.zeros_like(np.take(value, [0], dim))
            value = np.take(np.concatenate([value, empty], dim), layer_ids, dim)  # -1 is the last
        assert value.shape == leaf.shape, (name, value.shape, leaf.shape)
        leaves.append(leaf.replace(jax.device_put(value, _array(leaf).sharding)))
    structure = jax.tree.structure(state.params, is_leaf=is_variable)
    return dataclasses.replace(state, params=jax.tree.unflatten(structure, leaves))


def _stored_form(leaf: Any, config: RunConfig) -> jax.ShapeDtypeStruct:
    """The array to read for a leaf of the abstract state, sharded over this mesh."""
    array, dim = _array(leaf), _layers_dim(leaf)
    if dim is None or not _is_reordered(config):
        return array
    num_layers = max(config.layer_ids) + 1
    shape = (*array.shape[:dim], num_layers, *array.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=_without_layers(array, dim))


def _is_reordered(config: RunConfig) -> bool:
    """Whether the slots are anything but the layers in their order."""
    return config.layer_ids != tuple(range(len(config.layer_ids)))


def _without_layers(array: Any, dim: int) -> NamedSharding:
    """The array's sharding, the axes that split `dim` moved to the first other dim they divide.

    Every device can then pick layers in any order, and none holds more than its share. If there is
    no such dim (a bias of odd size), the axes are dropped. It is in the devices' own memory, where
    picking is compiled.
    """
    mesh = array.sharding.mesh
    split = [
        (axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in array.sharding.spec
    ]
    split += [()] * (array.ndim - len(split))
    moved, split[dim] = split[dim], ()
    for other, size in enumerate(array.shape):
        axes = split[other] + moved
        if other != dim and size % math.prod(mesh.shape[axis] for axis in axes) == 0:
            split[other] = axes
            break
    return NamedSharding(mesh, P(*(axes[0] if len(axes) == 1 else axes or None for axes in split)))


@functools.partial(jax.jit, static_argnames=("dim", "index", "sharding"))
def _take_layers(
    array: jax.Array, dim: int, index: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """The slices `index` of a dim that `sharding` leaves whole; zeros where the index is -1."""
    array = jax.lax.with_sharding_constraint(array, sharding)
    taken = jnp.take(array, np.array(index, np.int32), axis=dim, mode="clip")
    others = tuple(other for other in range(array.ndim) if other != dim)
    wanted = np.expand_dims(np.array(index) >= 0, others)
    return jax.lax.with_sharding_constraint(
        jnp.where(wanted, taken, jnp.zeros_like(taken)), sharding
    )


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


def _array(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _layers_dim(leaf: Any) -> int | None:
    dims = leaf.get_metadata("out_sharding", None) if isinstance(leaf, nnx.Variable) else None
    return dims.index(LAYERS) if dims and LAYERS in dims else None


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
