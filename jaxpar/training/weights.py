"""Weights in files and runs: `export` writes them, and a run can begin with them (`fit(start=...)`).

    embedding.table   layers.0.w_x   layers.1.w_x   head.kernel

Files are safetensors, with the names of the model's own tree. Each layer has its own tensors, with its number
in the whole stack. More than `LIMIT_BYTES` are split into several files and an index, as Hugging Face's tools
write and read them:

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json

Files are written and read in parts: a host never holds more than its own part of the model and one tensor.
No tensor of a start is dropped silently: each one has a place in the model, or is reported as ignored.
"""

import collections
import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.bucket import as_path, in_bucket
from jaxpar.base.checks import check_fields, fits, require, require_instance
from jaxpar.base.display import format_names, format_ranges, format_shape
from jaxpar.base.files import (
    check_file,
    check_path,
    friendly_errors,
    read_file,
    read_json,
    whole_file,
    write_file,
)
from jaxpar.base.keys import is_key
from jaxpar.base.output import PROGRAM
from jaxpar.base.paths import local_path
from jaxpar.base.types import Json, Module, Tree
from jaxpar.hosts.agree import in_process_0, together
from jaxpar.mesh import release_freed_memory
from jaxpar.model.abstract import abstract
from jaxpar.model.facts import ModelFacts
from jaxpar.model.tracing import made
from jaxpar.model.weights import Rows, Tensor, Weights
from jaxpar.partition.by_layer import Rows as LayerRows
from jaxpar.partition.by_layer import kind_of, places_in_order
from jaxpar.partition.storage import Storage
from jaxpar.sharding import (
    array_of,
    axes_of_spec,
    named_leaves,
    to_spec,
    user_name,
    user_names,
)
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, abstract_state, draw_variables, state_of
from jaxpar.training.checkpoint import open_arrays, reading_in_words
from jaxpar.training.run_folder import RunFolder

if TYPE_CHECKING:
    from tensorstore import TensorStore

Part = TypeVar("Part")

LIMIT_BYTES = 5 * 10**9  # of a file
_IGNORE = "ignore it (--start-ignore PATTERN)"
_ORBAX = "_METADATA"  # a file of each checkpoint of Orbax
_LAYER = re.compile(
    r"(?<![^._])\d+(?=\.)"
)  # in the name of a tensor: the first is its layer's number

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64,
    "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_, "C64": np.complex64,
}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


# ---- names ----


def named_rows(
    trees: Sequence[Tree], storage: Storage
) -> Iterator[tuple[str, Tree, tuple[str, ...]]]:
    """The names and variables of a model's state, each with the names of its tensors.

    A variable that stacks layers has a name for each row, "" for an empty row; other variables have one name.
    Random keys are no weights, and are left out.

    Args:
      trees: parameters and other variables, in the slots of the storage.
    """
    found: list[tuple[str, Tree]] = []
    for tree in trees:
        storage.each_by_name(tree, lambda *each: found.append(each), ".")
    for name, leaf in found:
        if not is_key(array_of(leaf)):
            yield name, leaf, names_of_rows(name, leaf, storage.partition.rows_of)


def names_of_rows(name: str, leaf: Tree, rows_of: Mapping[str, LayerRows]) -> tuple[str, ...]:
    """The names of a variable's tensors, as of `named_rows`; those of adopted models are the user's.

    Row 3 of blocks that the user has stacked is "blocks.kernel@3", a part of the tensor "blocks.kernel".

    Args:
      rows_of: by kind, the layers in the rows of its stack.
    """
    kind, known = kind_of(leaf), user_names(leaf)
    if kind is None:
        return (name,) if known is None else known.names
    rows = rows_of[kind]
    if known is not None:
        return tuple(known.names[n] if n >= 0 else "" for n in places_in_order(rows))
    stack, inner = name.split(f".{kind}.", 1)
    return tuple(f"{stack}.{n}.{inner}" if n >= 0 else "" for n in rows)


def in_ranges(names: Iterable[str]) -> list[str]:
    """Names of tensors; those of consecutive layers become one: layers.0-3.w_x."""
    layers = collections.defaultdict[str, list[int]](list)
    for name in names:
        number = _LAYER.search(name)
        key = f"{name[: number.start()]}{{}}{name[number.end() :]}" if number else name
        layers[key].append(int(number[0]) if number else 0)
    return [key.format(",".join(format_ranges(numbers))) for key, numbers in layers.items()]


# ---- writing files ----


class Outgoing(NamedTuple):
    """A tensor to be written.

    Attributes:
      gather: gives its values on the host, as `dtype` or another type of its kind. All processes call it at
        once, and process 0 uses the result.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    gather: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def outgoing(trees: Sequence[Tree], storage: Storage) -> dict[str, Outgoing]:
    """The tensors of a model's state, by their names.

    Args:
      trees: parameters and other variables, in the slots of the storage; on devices.
    """
    found: dict[str, Outgoing] = {}
    for _, leaf, names in named_rows(trees, storage):
        array, is_stacked = array_of(leaf), kind_of(leaf) is not None
        for row, name in enumerate(names):
            if name:
                gather = functools.partial(_gather, array, row if is_stacked else None)
                found[name] = Outgoing(array.shape[is_stacked:], np.dtype(array.dtype), gather)

    def stack(rows: Sequence[Outgoing]) -> Outgoing:
        shape = (len(rows), *rows[0].shape)
        return Outgoing(shape, rows[0].dtype, lambda: np.stack([row.gather() for row in rows]))

    return _whole(found, stack)


def _whole(rows: Mapping[str, Part], stack: Callable[[list[Part]], Part]) -> dict[str, Part]:
    """By name, with one in place of the rows of what the user has stacked."""
    found, stacks = dict[str, Part](), collections.defaultdict[str, dict[int, Part]](dict)
    for name, one in rows.items():
        whole, is_row, number = name.partition("@")
        if is_row:
            stacks[whole][int(number)] = one
        else:
            found[name] = one
    whole = {name: stack([own[n] for n in range(len(own))]) for name, own in stacks.items()}
    return found | whole


def write_weights(
    path: str | PathLike[str],
    tensors: Mapping[str, Outgoing],
    texts: Mapping[str, str],
    dtype: str | None = None,
) -> list[Path]:
    """Writes tensors as a safetensors file, or as several with an index; all processes take part.

    A file appears whole or not at all, and of several the index appears last.

    Args:
      path: path of the file; if there are several, their names begin like it.
      texts: texts for the metadata of each file.
      dtype: type of all floating-point tensors, such as "bfloat16"; None keeps their own.
    Returns:
      the files that were written, the index last.
    Raises:
      ValueError: such files cannot hold the type of a tensor.
      OSError: a file cannot be written; in all processes.
    """
    path = local_path(path)
    wanted = {name: _as_dtype(name, tensor, dtype) for name, tensor in tensors.items()}
    # The largest types come first, so that each number is at a multiple of its size.
    wanted = dict(sorted(wanted.items(), key=lambda item: -item[1].dtype.itemsize))
    files = _split(path, wanted)
    index = path.with_name(f"{path.name}.index.json")
    if len(files) > 1:  # an old index would not fit the new files
        in_process_0(lambda: index.unlink(missing_ok=True))
    for file, part in files.items():
        _write_file(file, part, texts)
    if len(files) == 1:
        return [path]
    described = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in wanted.values())},
        "weight_map": {name: file.name for file, part in files.items() for name in sorted(part)},
    }
    in_process_0(lambda: write_file(index, f"{json.dumps(described, indent=2)}\n".encode()))
    return [*files, index]


def _as_dtype(name: str, tensor: Outgoing, dtype: str | None) -> Outgoing:
    if dtype is not None and jnp.issubdtype(tensor.dtype, jnp.floating):
        tensor = tensor._replace(dtype=jnp.dtype(dtype))
    require(
        tensor.dtype in _CODES,
        f"{name} has the type {tensor.dtype}, which safetensors files cannot hold.\n"
        f"Fix: store it as another type.",
    )
    return tensor


def _split(path: Path, tensors: Mapping[str, Outgoing]) -> dict[Path, dict[str, Outgoing]]:
    """The tensors of each file."""
    parts = [dict[str, Outgoing]()]
    for name, tensor in tensors.items():
        size = sum(each.num_bytes for each in (*parts[-1].values(), tensor))
        if parts[-1] and size > LIMIT_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        return {path: parts[0]}
    numbers = (f"-{n:05}-of-{len(parts):05}" for n in range(1, len(parts) + 1))
    names = (f"{path.stem}{number}{path.suffix}" for number in numbers)
    return {path.with_name(name): part for name, part in zip(names, parts, strict=True)}


def _write_file(path: Path, tensors: Mapping[str, Outgoing], texts: Mapping[str, str]) -> None:
    """Process 0 writes; the others take part in gathering, and raise its errors."""
    opened: list[io.BufferedWriter] = []
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            opened.append(stack.enter_context(stack.enter_context(whole_file(path)).open("wb")))
            opened[0].write(_header(tensors, texts))

        def add(array: np.ndarray, dtype: np.dtype) -> None:
            content = np.ascontiguousarray(array.astype(dtype, copy=False)).reshape(-1)
            opened[0].write(content.view(np.uint8).data)

        in_process_0(begin)
        for tensor in tensors.values():
            in_process_0(functools.partial(add, tensor.gather(), tensor.dtype))
        in_process_0(stack.close)


def _header(tensors: Mapping[str, Outgoing], texts: Mapping[str, str]) -> bytes:
    """The beginning of such a file: the type, the shape and the place of each tensor."""
    described: Json = {"__metadata__": {"format": "pt", **texts}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        described[name] = {"dtype": _CODES[tensor.dtype], "shape": tensor.shape}
        described[name]["data_offsets"] = [start, end]
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _gather(array: jax.Array, row: int | None) -> np.ndarray:
    """An array, or a row of a stack, whole on the host."""
    if row is not None:
        array = _pick(array, np.int32(row), array.sharding)
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        array = jax.device_put(array, NamedSharding(array.sharding.mesh, P()))
    return np.asarray(array)


@functools.partial(jax.jit, static_argnames="sharding")
def _pick(stack: jax.Array, row: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A row of a stack, sharded like the stack; a device receives no other rows of other devices."""
    axes, *others = axes_of_spec(sharding.spec, stack.ndim)

    def pick(part: jax.Array, row: jax.Array) -> jax.Array:
        here = row - jax.lax.axis_index(axes) * len(part) if axes else row
        mine = jax.lax.dynamic_index_in_dim(part, here, keepdims=False)  # another row, if not here
        if not axes:
            return mine
        is_here = (here >= 0) & (here < len(part))
        if mine.dtype == bool:
            return jax.lax.psum((mine & is_here).astype(jnp.uint8), axes).astype(bool)
        if jnp.iscomplexobj(mine):
            return jax.lax.complex(sum_of(mine.real, is_here), sum_of(mine.imag, is_here))
        return sum_of(mine, is_here)

    def sum_of(mine: jax.Array, is_here: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(mine, f"uint{8 * mine.dtype.itemsize}")
        bits = jax.lax.psum(jnp.where(is_here, bits, 0), axes)  # a sum of numbers would lose -0.0
        return jax.lax.bitcast_convert_type(bits, mine.dtype)

    specs = {"in_specs": (sharding.spec, P()), "out_specs": to_spec(others)}
    return jax.shard_map(pick, mesh=sharding.mesh, **specs)(stack, row)


def model_of(setup: Setup, state: TrainState, *, sharded: bool) -> Module:
    """The task's model with the values of a state; see `LoadedRun.model`."""
    storage, cut_model = setup.storage, setup.facts.cut_model
    trees = state.params, state.frozen
    if cut_model is None:
        model = storage.merge(*map(storage.in_stacks, trees))
    else:
        model = cut_model.variables.user_model(_arrays_of(trees, storage))
    if sharded:
        return model
    graphdef, values = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(functools.partial(_on_one_device, setup.mesh), values))


def _arrays_of(trees: Sequence[Tree], storage: Storage) -> dict[str, jax.Array]:
    """The parameters of an adopted model by the user's names, as they are sharded."""
    found = dict[str, jax.Array]()
    for _, leaf, names in named_rows(trees, storage):
        array = array_of(leaf)
        for row, name in enumerate(names):
            if name:
                is_whole = kind_of(leaf) is None
                found[name] = array if is_whole else _pick(array, np.int32(row), array.sharding)
    return _whole(found, jnp.stack)


def _on_one_device(mesh: Mesh, array: jax.Array) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P())).addressable_data(0)


# ---- opening files and runs; no values are read yet ----


def open_files(path: Path) -> Weights:
    """The weights of a safetensors file, of an index of such files, or of a folder with one of the two.

    A folder may also be a checkpoint of Orbax, as plain Flax writes it.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file is damaged, or of another kind; or the folder has neither or both.
    """
    if found := [own for own in (path, *path.glob("*")) if (own / _ORBAX).is_file()]:
        return _open_orbax(found[0])
    path = _in_folder(path) if path.is_dir() else path
    places = _read_index(path) if path.suffix == ".json" else {}
    files = sorted({path.with_name(name) for name in places.values()}) if places else [path]
    tensors, texts, found = dict[str, Tensor](), dict[str, str](), dict[str, str]()
    for file in files:
        own, metadata = _open(file)
        tensors, texts = {**tensors, **own}, {**texts, **metadata}
        found |= dict.fromkeys(own, file.name)
    if places and places != found:
        differ = sorted(name for name in {**places, **found} if places.get(name) != found.get(name))
        raise ValueError(
            f"{path} does not belong to its files: they differ in {', '.join(differ[:3])}.\n"
            f"Fix: restore the files as they were."
        )
    return Weights(str(path), tensors, texts)


def _open_orbax(folder: Path) -> Weights:
    """The arrays of a checkpoint of Orbax, by their paths in it."""
    path = folder / _ORBAX
    content = read_file(path, "the metadata", "restore it from a backup")
    paths = dict[str, str]()
    with reading_in_words(path):
        described = read_json(content)
        for entry in described["tree_metadata"].values():
            keys = [str(step["key"]) for step in entry["key_metadata"]]
            if not entry["value_metadata"]["skip_deserialize"]:
                paths[".".join(keys).removesuffix(".value")] = ".".join(keys)
        driver = "zarr3" if described.get("use_zarr3", False) else "zarr"
    with reading_in_words(folder):
        arrays = open_arrays(folder, paths, driver)
    tensors = dict[str, Tensor]()
    for name, array in arrays.items():
        tensors[name] = Tensor(_rows_in(array[None], folder))
    return Weights(str(folder), tensors, {})


def _in_folder(folder: Path) -> Path:
    names = "model.safetensors", "model.safetensors.index.json"
    found = [folder / name for name in names if (folder / name).is_file()]
    require(
        len(found) == 1,
        f"{folder} holds {'both' if found else 'no run and none of'} {' and '.join(names)}.\n"
        f"Fix: give the folder of a run or of a checkpoint of Orbax, or a file.",
    )
    return found[0]


def _read_index(path: Path) -> dict[str, str]:
    content = read_file(path, "the index", "give that of safetensors files")
    places: Json = {}
    with contextlib.suppress(ValueError):
        places = read_json(content).get("weight_map", {})
    require(
        bool(places)
        and fits(places, dict[str, str])
        and all(n == Path(n).name for n in places.values()),
        f"{path} is not an index of safetensors files.\nFix: give one, or a safetensors file.",
    )
    return places


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and the texts of its metadata."""
    with friendly_errors(
        f"read the weights {path}", "give a safetensors file, or the folder of a run"
    ):
        check_file(path)
        try:
            with safetensors.safe_open(path, framework="np"):
                pass  # this checks its header
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is not a whole safetensors file: {error}.\nFix: export it again."
            ) from error
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    texts, tensors = header.pop("__metadata__", None) or {}, {}
    require(
        "DCP_SHARDING_INFO" not in texts,
        f"{path} is one shard of a distributed checkpoint of torch: it has only parts of tensors.\n"
        f"Fix: save it with HuggingFaceStorageWriter(..., enable_consolidation=True).",
    )
    for name, entry in header.items():
        require(
            entry["dtype"] in _DTYPES,
            f"{path}: {name} has the type {entry['dtype']}, which NumPy lacks.\n"
            f"Fix: convert it to F32 or BF16.",
        )
        shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
        at = 8 + length + entry["data_offsets"][0]
        make = functools.partial(_map, path, at, shape, dtype)
        tensors[name] = Tensor(Rows.of_one(shape, dtype, make))
    return tensors, texts


def _map(path: Path, at: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A tensor in a file; only the used part is read."""
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", at, shape or (1,)).reshape(shape)


def _open_run(setup: Setup, folder: RunFolder) -> Weights:
    """The newest state of a run; its layers by their numbers."""
    task = folder.settings().task
    folder.check()
    require(
        not task.evaluates_others,
        f"the task of the run in {folder} evaluates other parameters than it trains.\n"
        f"Fix: start from a file, by {PROGRAM} export {folder} -o model.safetensors.",
    )
    step, arrays = folder.checkpoints(setup).stored()
    if task.adopts:
        model = ModelFacts.of(task, setup.facts.platform).model
    else:
        model = abstract(lambda: made(task.make_model, 0))
    stack, tensors = model.layers, dict[str, Tensor]()
    rows_of = dict(zip(stack.kinds, stack.slots.rows, strict=True))
    leaves = named_leaves(nnx.state(model))
    variables = {user_name(name, leaf): (name, leaf) for name, leaf in leaves}
    for stored, array in arrays.items():
        stored = stored.partition("/")[2].replace("/", ".")
        name, leaf = variables.get(stored, (stored, None))
        if is_key(array_of(leaf)):
            continue
        array = array if kind_of(leaf) else array[None]
        for row, own in enumerate(names_of_rows(name, leaf, rows_of)):
            tensors[own] = Tensor(_rows_in(array, folder.path), row)

    def join(rows: Sequence[Tensor]) -> Tensor:
        shape, dtype = (len(rows), *rows[0].shape), rows[0].dtype
        return Tensor(Rows.of_one(shape, dtype, lambda: np.stack([row.whole() for row in rows])))

    tensors = _whole(tensors, join)
    texts = {name: folder.read(name) for name in folder.data()["files"]}
    return Weights(f"{folder} after step {step}", tensors, texts)


def _rows_in(array: "TensorStore", folder: Path) -> Rows:
    """The rows of an array that is stored in a folder, to be read in parts."""

    def read(rows: Sequence[int], index: tuple[Tree, ...]) -> np.ndarray:
        with reading_in_words(folder):
            return array.oindex[rows, *index].read().result()

    return Rows(array.shape, np.dtype(array.dtype.numpy_dtype), read)


# ---- matching them with a model ----


@dataclasses.dataclass(frozen=True)
class Start:
    r"""Initial weights of a run, for fine-tuning. Optimizer state, steps and data start from the beginning.

    Patterns are regular expressions of Python, for whole names: r"layers\.[45]\..*".

    Attributes:
      path: a safetensors file, the index of several, or a folder with model.safetensors or its index; the
        folder of a run, which may be in a bucket, and whose newest state is taken; or a checkpoint that Orbax
        has written, as plain Flax does, of which random streams are left out.
      rename: pairs of a pattern for names of the source, and the new name, which may use groups of the
        pattern: ((r"encoder\.(.*)", r"embedding.\1"),). The first pattern that matches counts.
      ignore: patterns for names of the source, before they are renamed, that are not taken.

    Example:
      train = jaxpar.TrainConfig(num_steps=4)
      first = jaxpar.fit(task, "dp1", train, quiet=True)
      start = jaxpar.Start(first.out_dir, ignore=(r"head\..*",))  # a new head
      second = jaxpar.fit(task, "dp1", train, start=start, quiet=True)
    """

    path: str | PathLike[str]
    rename: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self):
        check_fields(self)
        check_path("start", self.path, of_run=True)
        for pattern, replacement in (*((pattern, "") for pattern in self.ignore), *self.rename):
            try:
                re.compile(pattern).sub(replacement, "")
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"start: {pattern!r} as {replacement!r} is not a valid pattern: {error}.\n"
                    rf"Fix: write a regular expression, such as 'layers\.[45]\..*', and groups it has."
                ) from None

    @classmethod
    def of(cls, start: "Start | str | PathLike[str] | None") -> "Start | None":
        """The start that `fit` is given; a path is a start without patterns."""
        if isinstance(start, str | PathLike):
            return cls(start)
        use = "a path, or jaxpar.Start(path, rename=..., ignore=...)"
        require_instance("start", start, Start | None, use)
        return start

    def to_json(self) -> Json:
        """The start for the run's folder, with an absolute path."""
        return {**dataclasses.asdict(self), "path": str(as_path(self.path).absolute())}

    @classmethod
    def from_json(cls, content: Json | None) -> "Start | None":
        """The start that `to_json` gave, if there is one."""
        if content is None:
            return None
        return cls(**{**content, "rename": tuple(map(tuple, content["rename"]))})

    def new_name(self, name: str) -> str | None:
        """The name in the model of a tensor of the source; None if it is ignored."""
        if any(re.fullmatch(pattern, name) for pattern in self.ignore):
            return None
        for pattern, replacement in self.rename:
            if found := re.fullmatch(pattern, name):
                return found.expand(replacement)
        return name


@dataclasses.dataclass(frozen=True)
class MatchedWeights:
    """Weights that have their places in a model; their values are not read yet.

    Attributes:
      weights: tensors that are taken, by the model's names; those that the user has stacked in rows.
      tensors: the same, whole.
      sources: names that they had in the source, where these differ.
      new: names of parameters that are randomly initialized.
      ignored: shapes of tensors in the source that are ignored, by their names.
      variables: parameters and other variables of the model, as shapes.
    """

    setup: Setup
    weights: Weights
    tensors: Mapping[str, Tensor]
    sources: Mapping[str, str]
    new: tuple[str, ...]
    ignored: Mapping[str, tuple[int, ...]]
    variables: Mapping[str, jax.ShapeDtypeStruct]

    def to_rows(self) -> list[tuple[str, str, str, str]]:
        """Rows of a table: ("taken", "new" or "ignored"; names; shape; note)."""
        groups = collections.defaultdict[tuple[str, str, str, str, bool], list[str]](list)

        def add(what: str, name: str, shape: tuple[int, ...], note: str = "") -> None:
            key = _LAYER.sub("*", name, count=1)
            groups[what, key, format_shape(shape), note, name in self.sources].append(name)

        for name, tensor in self.tensors.items():
            own = self.variables[name]
            notes = [f"{tensor.dtype} as {own.dtype}"] if tensor.dtype != own.dtype else []
            notes += [self.weights.note] if name in self.weights.rows else []
            add("taken", name, own.shape, "; ".join(notes))
        for name in self.new:
            add("new", name, self.variables[name].shape)
        for name, shape in self.ignored.items():
            add("ignored", name, shape)
        rows = []
        for (what, _, shape, note, is_renamed), names in groups.items():
            if is_renamed:
                before = ", ".join(in_ranges(self.sources[name] for name in names))
                note = "; ".join(filter(None, [f"was {before}", note]))
            rows.append((what, ", ".join(in_ranges(names)), shape, note))
        return rows

    def state(self) -> TrainState:
        """The state before the first step, on its devices; each process reads what its devices need.

        Raises:
          OSError: the weights cannot be read; in all processes.
        """
        target = abstract_state(self.setup)
        found = self.weights.tensors.keys() - self.weights.rows
        variables = named_rows((target.params, target.frozen), self.setup.storage)
        whole = {name for name, _, names in variables if found.issuperset(filter(None, names))}
        trees = draw_variables(self.setup, without=whole)
        trees = together(lambda: [self._filled(tree) for tree in trees])
        release_freed_memory()
        return state_of(self.setup, *trees)

    def _filled(self, tree: nnx.State) -> nnx.State:
        """Variables with the values that are taken; the old values are donated."""
        storage = self.setup.storage

        def fill(name: str, leaf: Tree) -> jax.Array | None:
            names = enumerate(names_of_rows(name, leaf, storage.partition.rows_of))
            taken = [(row, name) for row, name in names if name in self.weights.tensors]
            if not taken:
                return None
            array, is_stacked = array_of(leaf), kind_of(leaf) is not None
            parts = [self._fill(shard, taken, is_stacked) for shard in array.addressable_shards]
            return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

        return storage.each_by_name(tree, fill, ".")

    def _fill(self, shard: jax.Shard, taken: list[tuple[int, str]], is_stacked: bool) -> jax.Array:
        """A device's part, with the tensors of these names in these rows, or as the whole part."""
        part, index = shard.data, shard.index
        assert part is not None  # it is on this host
        if not is_stacked:
            part, index = part[None], (slice(None), *index)
        first = index[0].start or 0
        stored = collections.defaultdict[int, dict[int, str]](dict)
        for row, name in taken:
            if 0 <= row - first < len(part):
                stored[id(self.weights.tensors[name].rows)][row - first] = name
        for names in stored.values():
            part = _put(part, np.array([*names]), self._read(part, [*names.values()], index[1:]))
        return part if is_stacked else part[0]

    def _read(self, part: jax.Array, names: list[str], index: tuple[slice, ...]) -> np.ndarray:
        """The part that a device needs of tensors that are rows of one stored array."""
        tensors = [self.weights.tensors[name] for name in names]
        rows, read = [tensor.row for tensor in tensors], tensors[0].rows.read
        if names[0] not in self.weights.rows:
            return np.array(read(rows, index), part.dtype)
        dim, chosen = self.weights.rows[names[0]]
        wanted = chosen[index[dim]]
        places = np.flatnonzero(wanted >= 0)
        found = read(rows, (*index[:dim], wanted[places], *index[dim + 1 :]))
        values = np.array(part)  # other places keep their initial values
        np.moveaxis(values, dim + 1, 0)[places] = np.moveaxis(found, dim + 1, 0)
        return values


@functools.partial(jax.jit, donate_argnums=0)
def _put(part: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """The array with other values in some rows, in the same memory."""
    return part.at[rows].set(values)


def find_weights(setup: Setup, start: Start) -> MatchedWeights:
    """Matches the weights of a start with the model; reads only names and shapes.

    Raises:
      OSError: there are no such files, or no such run.
      ValueError: a tensor has no place in the model, another shape, or a type that cannot become the
        model's; a pattern matches no name; or nothing is taken.
    """
    folder = RunFolder(start.path)
    is_run = folder.config_path.exists() or in_bucket(folder.path)
    weights = _open_run(setup, folder) if is_run else open_files(folder.path)
    if (cut_model := setup.facts.cut_model) is not None:
        weights = _without(weights, cut_model.variables.other_names)
    renamed, ignored = _new_names(start, weights)
    tensors = {new: weights.tensors[name] for new, name in renamed.items()}
    weights = setup.task.take_weights(dataclasses.replace(weights, tensors=tensors))
    state, own_rows = abstract_state(setup), dict[str, jax.ShapeDtypeStruct]()
    for _, leaf, own in named_rows((state.params, state.frozen), setup.storage):
        shape = leaf.shape[kind_of(leaf) is not None :]
        own_rows |= dict.fromkeys(filter(None, own), jax.ShapeDtypeStruct(shape, leaf.dtype))

    def stack(rows: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(rows), *rows[0].shape), rows[0].dtype)

    variables = _whole(own_rows, stack)
    _check_places(weights, variables)
    tensors = {name: weights.tensors[name] for name in variables if name in weights.tensors}
    rows = dict[str, Tensor]()
    for name, tensor in tensors.items():
        is_whole = name in own_rows
        own = [tensor] if is_whole else tensor.each_row()
        rows |= {name if is_whole else f"{name}@{n}": row for n, row in enumerate(own)}
    return MatchedWeights(
        setup,
        dataclasses.replace(weights, tensors=rows),
        tensors,
        {new: name for new, name in renamed.items() if new != name},
        tuple(n for n, one in variables.items() if one.size and n not in tensors),
        ignored,
        variables,
    )


def _without(weights: Weights, names: Collection[str]) -> Weights:
    tensors = {name: own for name, own in weights.tensors.items() if name not in names}
    return dataclasses.replace(weights, tensors=tensors)


def _new_names(start: Start, weights: Weights) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """The names in the source by those in the model, and the shapes of ignored tensors.

    Raises:
      ValueError: a pattern matches no name, or two tensors get one.
    """
    for pattern in (*start.ignore, *(old for old, _ in start.rename)):
        require(
            any(re.fullmatch(pattern, name) for name in weights.tensors),
            f"start: {pattern!r} matches no tensor of {weights.source}.\n"
            f"Fix: match some of {_some(weights.tensors)}.",
        )
    renamed, ignored = dict[str, str](), dict[str, tuple[int, ...]]()
    for name, tensor in weights.tensors.items():
        new = start.new_name(name)
        if new is None:
            ignored[name] = tensor.shape
            continue
        require(
            new not in renamed,
            f"start: {renamed.get(new)} and {name} of {weights.source} would both be {new}.\n"
            f"Fix: rename one of them, or ignore it.",
        )
        renamed[new] = name
    return renamed, ignored


def _check_places(weights: Weights, variables: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises a ValueError if a tensor has no place in the model, or does not fit; or there is no tensor."""
    if homeless := [name for name in weights.tensors if name not in variables]:
        raise ValueError(
            f"{weights.source} has {_some(homeless)}, which the model lacks; it has "
            f"{_some(variables)}.\nFix: {_IGNORE}, or rename it (--start-rename PATTERN=NAME)."
        )
    require(
        bool(weights.tensors),
        f"start: no weights of {weights.source} are used.\nFix: ignore fewer of them, or leave start out.",
    )
    shapes = [
        f"{name} is {format_shape(shape)} there and {format_shape(variables[name].shape)} here"
        for name, shape in ((name, weights.shape_of(name)) for name in weights.tensors)
        if shape != tuple(variables[name].shape)
    ]
    require(
        not shapes,
        f"{weights.source} has other sizes than the model: {'; '.join(shapes[:3])}.\n"
        f"Fix: change the model's sizes, or {_IGNORE}.",
    )
    for name, tensor in weights.tensors.items():
        own = variables[name].dtype
        both_float = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (tensor.dtype, own))
        require(
            both_float or tensor.dtype == own,
            f"{name} of {weights.source} has the type {tensor.dtype}, but the model's has {own}.\n"
            f"Fix: convert it, or {_IGNORE}.",
        )


def _some(names: Iterable[str]) -> str:
    """Names of tensors; only the first of many."""
    return format_names(in_ranges(names))
