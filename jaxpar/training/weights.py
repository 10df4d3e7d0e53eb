"""Weights in files, for any task: safetensors, with the names of the model's own tree.

    embedding.table   layers.0.w_x   layers.1.w_x   head.kernel

Layers stand one by one, by their number in the whole stack. More than `LIMIT_BYTES` are in several files
and an index, as Hugging Face's tools write and read them:

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json

Files are written and read in parts: a host never has more than its own part of the model and one tensor.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.files import check_file, in_words, read_file, read_json, whole_file
from jaxpar.base.keys import is_key
from jaxpar.hosts.agree import in_process_0, together
from jaxpar.layout import Layout
from jaxpar.sharding import array_of, axes_of_spec, to_spec
from jaxpar.training.by_layer import each_by_name, kind_of

LIMIT_BYTES = 5 * 10**9  # of a file
SHA256 = "jaxpar_sha256"  # in a file's metadata: of the whole file, this hash all zeros
_NO_HASH = "0" * 64
_READ_BYTES = 1 << 20

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64,
    "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def named_rows(tree: Any, layout: Layout) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The names and variables of a model's state, each with the names of its tensors.

    Of one that stacks layers there is a name for each row, "" for an empty one; of others one name. Random
    keys are no weights, and are left out.

    Args:
      tree: parameters, or other variables, in the slots of the layout.
    """
    found: list[tuple[str, Any]] = []
    each_by_name(tree, layout, lambda *each: found.append(each), ".")
    for name, leaf in found:
        if not is_key(array_of(leaf)):
            yield name, leaf, names_of_rows(name, leaf, layout)


def names_of_rows(name: str, leaf: Any, layout: Layout) -> tuple[str, ...]:
    """The names of a variable's tensors, as of `named_rows`."""
    kind = kind_of(leaf)
    if kind is None:
        return (name,)
    stack, inner = name.split(f".{kind}.", 1)
    rows = layout.slots.rows[layout.facts.kinds.index(kind)]
    return tuple(f"{stack}.{n}.{inner}" if n >= 0 else "" for n in rows)


# ---- out ----


class Outgoing(NamedTuple):
    """A tensor to be written.

    Attributes:
      gather: its values on the host, as `dtype` or another of its kind; called in all processes at once, and
        process 0 uses what it gives.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    gather: Callable[[], np.ndarray]


def outgoing(trees: Sequence[Any], layout: Layout) -> dict[str, Outgoing]:
    """The tensors of a model's state, by their names.

    Args:
      trees: parameters and other variables, in the slots of the layout; on devices.
    """
    found: dict[str, Outgoing] = {}
    for _, leaf, names in (each for tree in trees for each in named_rows(tree, layout)):
        array, is_stacked = array_of(leaf), kind_of(leaf) is not None
        shape = array.shape[1:] if is_stacked else array.shape
        for row, name in enumerate(names):
            if name:
                gather = functools.partial(_gather, array, row if is_stacked else None)
                found[name] = Outgoing(shape, np.dtype(array.dtype), gather)
    return found


def write_weights(
    path: str | PathLike[str],
    tensors: Mapping[str, Outgoing],
    texts: Mapping[str, str],
    dtype: str | None = None,
) -> list[Path]:
    """Writes tensors as a safetensors file, or as several with an index; all processes take part.

    A file appears whole or not at all, and of several the index appears last.

    Args:
      path: of the one file, or the name that those of several begin with.
      texts: for the metadata of each file.
      dtype: such as "bfloat16", of all floating-point tensors; None leaves them as they are.
    Returns:
      what was written, the index last.
    Raises:
      ValueError: a tensor is of a type that such files do not have.
      OSError: a file cannot be written; in all processes.
    """
    path = Path(path).expanduser()
    wanted = {name: _as_dtype(name, tensor, dtype) for name, tensor in tensors.items()}
    # The largest numbers first, so that each lies at a multiple of its size.
    wanted = dict(sorted(wanted.items(), key=lambda item: -item[1].dtype.itemsize))
    files = _split(path, wanted)
    index = path.with_name(f"{path.name}.index.json")
    if len(files) > 1:  # which would be of other files for a while
        in_process_0(lambda: index.unlink(missing_ok=True))
    for file, part in files.items():
        _write_file(file, part, texts)
    if len(files) == 1:
        return [path]
    described = {
        "metadata": {"total_size": sum(map(_num_bytes, wanted.values()))},
        "weight_map": {name: file.name for file, part in files.items() for name in sorted(part)},
    }

    def write_index() -> None:
        with whole_file(index) as file:
            file.write_text(json.dumps(described, indent=2) + "\n")

    in_process_0(write_index)
    return [*files, index]


def _as_dtype(name: str, tensor: Outgoing, dtype: str | None) -> Outgoing:
    if dtype is not None and jnp.issubdtype(tensor.dtype, jnp.floating):
        tensor = tensor._replace(dtype=jnp.dtype(dtype))
    if tensor.dtype not in _CODES:
        raise ValueError(f"{name} is of the type {tensor.dtype}, which safetensors does not have")
    return tensor


def _num_bytes(tensor: Outgoing) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _split(path: Path, tensors: Mapping[str, Outgoing]) -> dict[Path, dict[str, Outgoing]]:
    """Which tensors are in which file."""
    parts, size = [dict[str, Outgoing]()], 0
    for name, tensor in tensors.items():
        if parts[-1] and size + _num_bytes(tensor) > LIMIT_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += _num_bytes(tensor)
    if len(parts) == 1:
        return {path: parts[0]}
    numbers = (f"-{n:05}-of-{len(parts):05}" for n in range(1, len(parts) + 1))
    names = (f"{path.stem}{number}{path.suffix}" for number in numbers)
    return {path.with_name(name): part for name, part in zip(names, parts, strict=True)}


def _write_file(path: Path, tensors: Mapping[str, Outgoing], texts: Mapping[str, str]) -> None:
    """Process 0 writes; the others take part in what it gathers, and hear of its errors."""
    opened: list[tuple[io.BufferedWriter, Any]] = []
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            file = stack.enter_context(stack.enter_context(whole_file(path)).open("wb"))
            header = _header(tensors, texts)
            file.write(header)
            opened.append((file, hashlib.sha256(header)))

        def add(array: np.ndarray, dtype: np.dtype) -> None:
            file, sha256 = opened[0]
            content = np.ascontiguousarray(array.astype(dtype, copy=False)).reshape(-1)
            sha256.update(content.view(np.uint8).data)
            file.write(content.view(np.uint8).data)

        def end() -> None:
            file, sha256 = opened[0]
            file.seek(_header(tensors, texts).index(_NO_HASH.encode()))
            file.write(sha256.hexdigest().encode())
            stack.close()

        in_process_0(begin)
        for tensor in tensors.values():
            array = tensor.gather()
            in_process_0(functools.partial(add, array, tensor.dtype))
        in_process_0(end)


def _header(tensors: Mapping[str, Outgoing], texts: Mapping[str, str]) -> bytes:
    """What such a file begins with, without its hash, which comes before any other text."""
    described: dict[str, Any] = {"__metadata__": {SHA256: _NO_HASH, "format": "pt", **texts}}
    at = 0
    for name, tensor in tensors.items():
        end = at + _num_bytes(tensor)
        described[name] = {
            "dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, end]
        }  # fmt: skip
        at = end
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
    """A row of a stack, split as the stack is; no device sees more of the others' rows than that one."""
    axes, *others = axes_of_spec(sharding.spec, stack.ndim)

    def pick(part: jax.Array, row: jax.Array) -> jax.Array:
        here = row - jax.lax.axis_index(axes) * len(part) if axes else row
        mine = jax.lax.dynamic_index_in_dim(part, here, keepdims=False)  # any, if it is elsewhere
        if not axes:
            return mine
        number = jnp.uint8 if mine.dtype == bool else f"uint{8 * mine.dtype.itemsize}"
        bits = jax.lax.bitcast_convert_type(mine, number) if mine.dtype != bool else mine
        bits = jnp.where((here >= 0) & (here < len(part)), bits.astype(number), 0)
        bits = jax.lax.psum(bits, axes)  # of whole numbers: -0.0 stays what it is
        if mine.dtype == bool:
            return bits.astype(bool)
        return jax.lax.bitcast_convert_type(bits, mine.dtype)

    specs = {"in_specs": (sharding.spec, P()), "out_specs": to_spec(others)}
    return jax.shard_map(pick, mesh=sharding.mesh, **specs)(stack, row)


# ---- in ----


@dataclasses.dataclass(frozen=True)
class Rows:
    """What tensors are read from: an array [rows, ...], of which each is a row.

    Attributes:
      read: (numbers of rows, and for each further dim a slice or numbers, which one of them may have) ->
        values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Sequence[int], tuple[Any, ...]], np.ndarray]

    @classmethod
    def of_one(cls, shape: tuple[int, ...], dtype: Any, make: Callable[[], np.ndarray]) -> "Rows":
        """The one tensor that a function makes, or opens, whenever it is read."""
        return cls((1, *shape), np.dtype(dtype), lambda _, index: make()[None][:, *index])


class Tensor(NamedTuple):
    """A tensor that can be read."""

    rows: Rows
    row: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.rows.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """Of its numbers, as they are stored."""
        return self.rows.dtype

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.rows.read([self.row], (slice(None),) * len(self.shape))[0]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights where they lie, before they are read.

    Attributes:
      source: what they are of, in words.
      tensors: by their names.
      texts: that came with them, such as a file's metadata, by their names.
      rows: for a tensor of which rows are taken, by its name: the dim that they are along, and for each row
        of the model the one that it takes, -1 for none.
      num_new: how many of these rows are of words, or the like, that the source lacks.
      note: what is to be said of that.
    """

    source: str
    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]
    rows: Mapping[str, tuple[int, np.ndarray]] = dataclasses.field(default_factory=dict)
    num_new: int = 0
    note: str = ""


def open_files(path: Path) -> Weights:
    """The weights of a safetensors file, of an index of such files, or of a folder that has one of the two.

    Files with the hash of `write_weights` are read once, by the processes in turns.

    Raises:
      OSError: a file cannot be read.
      ValueError: one is damaged, or not such a file; or the folder has neither or both.
    """
    path = _in_folder(path) if path.is_dir() else path
    places = _read_index(path) if path.suffix == ".json" else {}
    files = sorted({path.with_name(name) for name in places.values()}) if places else [path]
    opened = {file: _open(file) for file in files}
    mine = files[jax.process_index() :: jax.process_count()]
    together(lambda: _check_hashes({file: opened[file][1] for file in mine}))
    tensors, texts = dict[str, Tensor](), dict[str, str]()
    for file, (found, told) in opened.items():
        texts |= told
        tensors |= found
        listed = {name for name, its_file in places.items() if its_file == file.name}
        if places and listed != {*found}:
            differ = sorted(listed ^ {*found})
            raise ValueError(
                f"{path} and {file} do not belong together, they differ in {', '.join(differ[:3])}; bring "
                f"back the files as they were"
            )
    return Weights(str(path), tensors, texts)


def _in_folder(folder: Path) -> Path:
    names = "model.safetensors", "model.safetensors.index.json"
    found = [folder / name for name in names if (folder / name).is_file()]
    if len(found) != 1:
        raise ValueError(
            f"{folder} holds {'both ' if found else 'no run, and neither '}"
            f"{(' and ' if found else ' nor ').join(names)}; give the folder of a run, or a file"
        )
    return found[0]


def _read_index(path: Path) -> dict[str, str]:
    content = read_file(path, "the index", "give that of safetensors files")
    with contextlib.suppress(ValueError):
        places = read_json(content).get("weight_map")
        if isinstance(places, dict) and places:
            texts = all(isinstance(name, str) for name in places.values())
            if texts and all(name == Path(name).name for name in places.values()):
                return places
    raise ValueError(f"{path} is not an index of safetensors files; give one, or a file")


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and the texts of its metadata."""
    with in_words(f"read the weights {path}", "give a safetensors file, or the folder of a run"):
        check_file(path)
        try:
            with safetensors.safe_open(path, framework="np"):
                pass  # its header is right
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is not a safetensors file, or not all of it: {error}"
            ) from error
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    texts, tensors = header.pop("__metadata__", None) or {}, {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{path}: {name} is of the type {entry['dtype']}, which NumPy does not have; convert it to "
                f"F32 or BF16"
            )
        shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
        at = 8 + length + entry["data_offsets"][0]
        tensors[name] = Tensor(
            Rows.of_one(shape, dtype, functools.partial(_map, path, at, shape, dtype))
        )
    return tensors, texts


def _map(path: Path, at: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A tensor in a file; what is used of it is read."""
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", at, shape or (1,)).reshape(shape)


def _check_hashes(texts: Mapping[Path, Mapping[str, str]]) -> None:
    """Raises if a file has a hash that is not its own.

    Args:
      texts: of the metadata of each file.
    """
    for path, known in ((path, told[SHA256]) for path, told in texts.items() if SHA256 in told):
        sha256 = hashlib.sha256()
        with path.open("rb") as file:
            begin = file.read(8)
            header = file.read(struct.unpack("<Q", begin)[0])
            sha256.update(begin + header.replace(known.encode(), _NO_HASH.encode(), 1))
            while part := file.read(_READ_BYTES):
                sha256.update(part)
        if sha256.hexdigest() != known:
            raise ValueError(
                f"{path} is damaged: it is not what was exported; export it again. If another program has "
                f"changed it, have it leave {SHA256} out of the metadata"
            )


def in_ranges(names: Sequence[str]) -> list[str]:
    """Names of tensors, those of neighbouring layers as one: layers.0-3.w_x."""
    layers = collections.defaultdict[tuple[str, str], list[int]](list)
    for name in names:
        first, *rest = name.split(".", 2)
        is_layer = len(rest) == 2 and rest[0].isdecimal()
        layers[(first, rest[1]) if is_layer else (name, "")].append(int(rest[0]) if is_layer else 0)
    found = []
    for (first, inner), numbers in layers.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and runs[-1][-1] == number - 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        texts = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        found.append(f"{first}.{','.join(texts)}.{inner}" if inner else first)
    return found
