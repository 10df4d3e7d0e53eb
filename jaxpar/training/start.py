"""Weights that a run begins with: found by their names, told before they are read, and put in their places.

    layers.0-5.w_x of a file  --leave, rename-->  layers.0-3.w_x of the model, in the slots of its devices

Nothing is lost in silence: each tensor of the source has a place in the model, or is named as left out.
"""

import collections
import dataclasses
import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.bucket import as_path, in_bucket
from jaxpar.base.checks import check_fields, require, require_instance
from jaxpar.base.display import format_names, format_shape
from jaxpar.base.files import check_path
from jaxpar.base.keys import is_key
from jaxpar.base.output import PROGRAM
from jaxpar.hosts.agree import together
from jaxpar.mesh import release_freed_memory
from jaxpar.model import made
from jaxpar.setup import Setup
from jaxpar.sharding import array_of, named_leaves
from jaxpar.state import TrainState, abstract_state, draw_variables, state_of
from jaxpar.training.by_layer import each_by_name, kind_of
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.weights import (
    Rows,
    Tensor,
    Weights,
    in_ranges,
    named_rows,
    names_of_rows,
    open_files,
)

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 26  # at once; what is stored as one piece is unpacked whole for each
_NAMED = 4  # tensors whose shapes a message names
_LEAVE = "leave them out (--start-leave PATTERN, Start(leave=...))"


@dataclasses.dataclass(frozen=True)
class Start:
    r"""Weights that a run begins with, instead of drawn ones; without optimizer state, steps and data.

    Patterns are regular expressions of Python, for whole names: r"layers\.[45]\..*".

    Attributes:
      path: a safetensors file, the index of several, a folder with model.safetensors or its index; or the
        folder of a run, of which the newest state is taken, and which may be in a bucket.
      rename: pairs of a pattern for names of the source, and the name instead, which may have groups of the
        pattern: ((r"encoder\.(.*)", r"embedding.\1"),). The first pattern that matches counts.
      leave: patterns for names of the source, before they are renamed, that are left out.
    """

    path: str
    rename: tuple[tuple[str, str], ...] = ()
    leave: tuple[str, ...] = ()

    def __post_init__(self):
        check_fields(self)
        check_path("start", self.path, of_run=True)
        for pattern in (*self.leave, *(old for old, _ in self.rename)):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"start: {pattern!r} is not a valid regular expression: {error}; write one, such as "
                    r"'layers\.[45]\..*'"
                ) from None

    @classmethod
    def of(cls, start: "Start | str | PathLike[str] | None") -> "Start | None":
        """What `fit` is given: a path is a start without patterns."""
        if isinstance(start, str | PathLike):
            return cls(os.fspath(start))
        use = "a path, or jaxpar.Start(path, rename=..., leave=...)"
        require_instance("start", start, Start | None, use)
        return start

    def to_json(self) -> dict[str, Any]:
        """For the run's folder, wherever it is read from."""
        return {**dataclasses.asdict(self), "path": str(as_path(self.path).absolute())}

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> "Start | None":
        """The start that `to_json` gave, if there is one."""
        if content is None:
            return None
        return cls(**{**content, "rename": tuple(map(tuple, content["rename"]))})

    def new_name(self, name: str) -> str | None:
        """What a tensor of the source is called in the model; None if it is left out."""
        if any(re.fullmatch(pattern, name) for pattern in self.leave):
            return None
        for pattern, replacement in self.rename:
            if found := re.fullmatch(pattern, name):
                try:
                    return found.expand(replacement)
                except (re.error, IndexError) as error:
                    raise ValueError(
                        f"start: {replacement!r} cannot replace {pattern!r}: {error}; use groups that the "
                        rf"pattern has, as \1"
                    ) from None
        return name


@dataclasses.dataclass(frozen=True)
class Taken:
    """Weights that have their places, of which none is read yet.

    Attributes:
      weights: those that are taken, by the model's names.
      sources: the names that they had, where these are others.
      new: parameters that are drawn.
      left: names of the source that are left out.
      variables: parameters and other variables of the model, as shapes.
    """

    setup: Setup
    weights: Weights
    sources: Mapping[str, str]
    new: tuple[str, ...]
    left: Mapping[str, tuple[int, ...]]
    variables: Mapping[str, jax.ShapeDtypeStruct]

    def to_rows(self) -> list[tuple[str, str, str, str]]:
        """What is taken, new and left out: (which of them, names, shape, what is to be said)."""
        groups = collections.defaultdict[tuple[str, str, str, str, bool], list[str]](list)

        def add(what: str, name: str, shape: tuple[int, ...], note: str = "") -> None:
            key = re.sub(r"^(\w+)\.\d+\.", r"\1.*.", name)
            groups[what, key, format_shape(shape), note, name in self.sources].append(name)

        for name, tensor in self.weights.tensors.items():
            dtype, notes = self.variables[name].dtype, []
            if tensor.dtype != dtype:
                notes.append(f"{tensor.dtype} as {dtype}")
            if name in self.weights.rows:
                notes.append(self.weights.note)
            add("taken", name, self.variables[name].shape, "; ".join(notes))
        for name in self.new:
            add("new", name, self.variables[name].shape)
        for name, shape in self.left.items():
            add("left out", name, shape)
        rows = []
        for (what, _, shape, note, _), names in groups.items():
            before = in_ranges([self.sources[name] for name in names if name in self.sources])
            note = "; ".join(filter(None, [f"was {', '.join(before)}" if before else "", note]))
            rows.append((what, ", ".join(in_ranges(names)), shape, note))
        return rows

    def state(self) -> TrainState:
        """The state before the first step, on its devices; each process reads what its devices need.

        Raises:
          OSError: the weights cannot be read; in all processes.
        """
        target = abstract_state(self.setup)
        found = self.weights.tensors.keys() - self.weights.rows
        whole = {
            variable
            for tree in (target.params, target.frozen)
            for variable, _, names in named_rows(tree, self.setup.layout)
            if all(name in found for name in names if name)
        }
        trees = draw_variables(self.setup, without=whole)
        trees = together(lambda: [self._filled(tree) for tree in trees])
        release_freed_memory()
        return state_of(self.setup, *trees)

    def _filled(self, tree: nnx.State) -> nnx.State:
        """Variables with the values that are taken; the old ones are gone."""
        layout = self.setup.layout

        def fill(name: str, leaf: Any) -> jax.Array | None:
            names = enumerate(names_of_rows(name, leaf, layout))
            found = [(row, name) for row, name in names if name in self.weights.tensors]
            if not found:
                return None
            return self._fill(array_of(leaf), found, is_stacked=kind_of(leaf) is not None)

        return each_by_name(tree, layout, fill, ".")

    def _fill(
        self, array: jax.Array, names: list[tuple[int, str]], *, is_stacked: bool
    ) -> jax.Array:
        """An array with the tensors of these names in these rows, or as the whole of it."""
        parts = []
        for shard in array.addressable_shards:
            part, index = shard.data, shard.index
            if not is_stacked:
                part, index = part[None], (slice(None), *index)
            first = index[0].start or 0
            here = [(row - first, name) for row, name in names if 0 <= row - first < len(part)]
            part = self._fill_part(part, here, index[1:])
            parts.append(part if is_stacked else part[0])
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    def _fill_part(
        self, part: jax.Array, names: list[tuple[int, str]], index: tuple[slice, ...]
    ) -> jax.Array:
        """A device's rows, in place; of those of one stored array as many are read at once as are small."""
        most = max(_READ_BYTES // max(part.nbytes // max(len(part), 1), 1), 1)
        stored = collections.defaultdict[Any, list[tuple[int, str]]](list)
        for place, name in names:
            only = name if name in self.weights.rows else ""
            stored[id(self.weights.tensors[name].rows), only].append((place, name))
        for group in (g[at : at + most] for g in stored.values() for at in range(0, len(g), most)):
            tensors = [self.weights.tensors[name] for _, name in group]
            wanted, into = self._places(group[0][1], index)
            block = tensors[0].rows.read([tensor.row for tensor in tensors], wanted)
            for values, (place, name) in zip(block, group, strict=True):
                if name in self.weights.rows:
                    drawn = np.array(part[place])
                    drawn[into] = values
                    values = drawn
                part = _put(part, np.int32(place), np.array(values, part.dtype))
        return part

    def _places(self, name: str, index: tuple[slice, ...]) -> tuple[Any, Any]:
        """For each dim, what a device reads of a tensor, and where it goes in the device's part."""
        wanted: list[Any] = list(index)
        into: list[Any] = [slice(None)] * len(index)
        if name in self.weights.rows:
            dim, chosen = self.weights.rows[name]
            mine = chosen[index[dim]]
            into[dim] = np.flatnonzero(mine >= 0)
            wanted[dim] = mine[into[dim]]
        return tuple(wanted), tuple(into)


@functools.partial(jax.jit, donate_argnums=0)
def _put(part: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """The array with other values in a row, where it lay."""
    return jax.lax.dynamic_update_index_in_dim(part, values, row, 0)


def find_weights(setup: Setup, start: Start) -> Taken:
    """What a run takes from a start; nothing is read but names and shapes.

    Raises:
      OSError: there are no such files, or no such run.
      ValueError: a tensor has no place in the model, another shape, or a type that cannot become the
        model's; a pattern matches no name; or nothing is taken.
    """
    weights = _open(setup, start)
    names = {name: start.new_name(name) for name in weights.tensors}
    _check_patterns(start, weights.source, names)
    left = {name: weights.tensors[name].shape for name, new in names.items() if new is None}
    renamed = {new: name for name, new in names.items() if new is not None}
    tensors = {new: weights.tensors[name] for new, name in renamed.items()}
    weights = setup.task.take_weights(dataclasses.replace(weights, tensors=tensors))
    state, variables, frozen = abstract_state(setup), {}, set[str]()
    for tree in (state.params, state.frozen):
        for _, leaf, own in named_rows(tree, setup.layout):
            frozen |= {*own} if tree is state.frozen else set()
            shape = leaf.shape if kind_of(leaf) is None else leaf.shape[1:]
            one = jax.ShapeDtypeStruct(shape, leaf.dtype)
            variables |= {name: one for name in own if name}
    _check_places(weights, variables)
    for name in weights.rows.keys() & frozen if weights.num_new and not jax.process_index() else ():
        _log.warning(
            "%s is frozen, and %s of its words are new: their rows are drawn at random and never trained; "
            "train it, or keep to the words of %s",
            name, f"{weights.num_new:,}", weights.source,
        )  # fmt: skip
    weights = dataclasses.replace(
        weights, tensors={n: weights.tensors[n] for n in variables if n in weights.tensors}
    )
    sources = {new: name for new, name in renamed.items() if new != name}
    new = tuple(n for n, one in variables.items() if one.size and n not in weights.tensors)
    return Taken(setup, weights, sources, new, left, variables)


def _open(setup: Setup, start: Start) -> Weights:
    folder = RunFolder(start.path)
    if folder.config_path.exists() or in_bucket(folder.path):
        return _open_run(setup, folder)
    return open_files(folder.path)


def _open_run(setup: Setup, folder: RunFolder) -> Weights:
    """The newest state of a run, its layers by their numbers."""
    task = folder.settings().task
    folder.check()
    if task.evaluates_others:
        raise ValueError(
            f"the task of the run in {folder} evaluates other parameters than it trains; write them to a "
            f"file ({PROGRAM} export {folder} -o model.safetensors), and start from that"
        )
    step, arrays = folder.checkpoints(setup).stored()
    model = nnx.eval_shape(lambda: made(task.make_model, 0))
    stack, variables = model.layers, dict(named_leaves(nnx.state(model), "/"))
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        first, *rest = name.split("/")[1:]
        own = variables.get("/".join((first, *rest)))
        if own is not None and is_key(array_of(own)):
            continue
        is_layer = first == "layers" and rest[0] in stack.kinds

        def read(
            rows: Any, index: Any, array: Any = array, is_layer: bool = is_layer
        ) -> np.ndarray:
            found = array.oindex[rows, *index] if is_layer else array.oindex[index]
            values = found.read().result()
            return values if is_layer else values[None]

        shape = array.shape if is_layer else (1, *array.shape)
        stored = Rows(shape, np.dtype(array.dtype.numpy_dtype), read)
        if is_layer:
            kinds = enumerate(stack.kinds[kind] for kind in stack.kind_of)
            numbers = [number for number, kind in kinds if kind == rest[0]]
            own = [".".join((first, str(number), *rest[1:])) for number in numbers]
            tensors |= {each: Tensor(stored, row) for row, each in enumerate(own)}
        else:
            tensors[".".join((first, *rest))] = Tensor(stored)
    texts = {name: folder.read(name) for name in folder.data()["files"]}
    return Weights(f"{folder} after step {step}", tensors, texts)


def _check_patterns(start: Start, source: str, names: Mapping[str, str | None]) -> None:
    """Raises if a pattern matches no name, or two tensors get one."""
    for pattern in (*start.leave, *(old for old, _ in start.rename)):
        require(
            any(re.fullmatch(pattern, name) for name in names),
            f"start: {pattern!r} matches no tensor of {source}; it has {_some(names)}",
        )
    kept = collections.Counter(filter(None, names.values()))
    for new in (name for name, count in kept.items() if count > 1):
        both = [name for name, its_new in names.items() if its_new == new]
        raise ValueError(
            f"start: {' and '.join(both)} of {source} would both be {new}; rename one of them, or leave it "
            f"out"
        )


def _check_places(weights: Weights, variables: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises if a tensor has no place in the model, or does not fit it; or there is none."""
    homeless = [name for name in weights.tensors if name not in variables]
    if homeless:
        raise ValueError(
            f"{weights.source} has {_some(homeless)}, for which the model has no place; {_LEAVE}, or give "
            f"them names of the model's (--start-rename PATTERN=NAME, Start(rename=...)): it has "
            f"{_some(variables)}"
        )
    require(
        bool(weights.tensors),
        f"nothing of {weights.source} is taken; leave out less, or begin without it",
    )
    differ = list(_different_shapes(weights, variables))
    if differ:
        shapes = "; ".join(
            f"{name} is {format_shape(weights.tensors[name].shape)} there and "
            f"{format_shape(variables[name].shape)} here"
            for name in differ[:_NAMED]
        )
        more = f"; and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
        raise ValueError(
            f"{weights.source} has different sizes from the model's: {shapes}{more}; give the model the "
            f"sizes that it has there, or {_LEAVE}"
        )
    for name, tensor in weights.tensors.items():
        kinds = [
            jnp.floating if jnp.issubdtype(dtype, jnp.floating) else dtype
            for dtype in (tensor.dtype, variables[name].dtype)
        ]
        require(
            kinds[0] == kinds[1],
            f"{name} of {weights.source} is of the type {tensor.dtype}, the model's is "
            f"{variables[name].dtype}; convert it, or {_LEAVE}",
        )


def _different_shapes(
    weights: Weights, variables: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[str]:
    for name, tensor in weights.tensors.items():
        shape = list(tensor.shape)
        if name in weights.rows:
            dim, chosen = weights.rows[name]
            shape[dim] = len(chosen)
        if tuple(shape) != tuple(variables[name].shape):
            yield name


def _some(names: Iterable[str]) -> str:
    """Names of tensors, of many the first."""
    return format_names(in_ranges([*names]))
