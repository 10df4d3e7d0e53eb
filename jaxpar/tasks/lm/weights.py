"""Weights in and out: safetensors files with the names and the layout of PyTorch.

Legend of the dim suffixes: V vocabulary, E embedding, H hidden, G gates (i f g o, or r z n), L layers.

    embedding.weight      [V, E]
    lstm.weight_ih_l{k}   [GH, E], and [GH, H] for k > 0
    lstm.weight_hh_l{k}   [GH, H]
    lstm.bias_ih_l{k}     [GH]     the bias is the sum of the two, but for n of a GRU
    lstm.bias_hh_l{k}     [GH]
    head.weight           [V, H]
    head.bias             [V]

So does `torch.nn.Module` name them if it has an Embedding, an LSTM and a Linear of these names; or a GRU
by the name `gru`.
The words of the vocabulary, in the order of their ids, are in the file's metadata, and a hash of all that the
file says. V is the number of words: what pads the vocabulary is left out, and comes back when it is read.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxpar.base.checks import require
from jaxpar.base.files import check_file, in_words, read_json, read_text, whole_file
from jaxpar.config import Parallel, TrainConfig
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.setup import Setup
from jaxpar.state import init_state
from jaxpar.tasks.lm.corpus import load_corpus
from jaxpar.tasks.lm.loaded import load_text_run
from jaxpar.tasks.lm.task import LM, NAMES, VOCABULARY, padded
from jaxpar.tasks.lm.vocabulary import EOS, UNK, Vocabulary
from jaxpar.training.by_layer import by_layer, with_parameters
from jaxpar.training.fingerprint import describe_data
from jaxpar.training.fit import begin_run, choose_folder
from jaxpar.training.run_folder import RunFolder, texts_of

# In the metadata of a file: a JSON list, and the hash of it and of the tensors.
WORDS, SHA256 = "words", "jaxpar_sha256"

# Layers that PyTorch has, too: how many gates, and how many biases of the state apart, the last rows of ours.
_GATES = {"lstm": (4, 0), "gru": (3, 1)}


@dataclasses.dataclass(frozen=True)
class Weights:
    """What a file holds, float32. Legend as above.

    Attributes:
      kind: of the layers, "lstm" or "gru".
      table_VE: the embedding.
      layers: of all layers, the kernels "w_x" and "w_h" [L, H, G, H], rows beyond E of the first w_x are
        zero, and the biases "b" [L, rows, H].
      head_VH, bias_V: the head.
      words: in the order of their ids; None if the file does not tell.
    """

    kind: str
    table_VE: np.ndarray
    layers: Mapping[str, np.ndarray]
    head_VH: np.ndarray
    bias_V: np.ndarray
    words: Sequence[str] | None

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of `LM`: num_layers, hidden_size, embed_size and tie_embedding."""
        (L, H, *_), E = self.layers["w_h"].shape, self.table_VE.shape[1]
        tied = np.array_equal(self.head_VH, self.table_VE)
        return {"num_layers": L, "hidden_size": H, "embed_size": E, "tie_embedding": tied}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """By the names of the parameters without "params/", as `by_layer` stores them."""
        arrays = {f"layers/{self.kind}/{name}": array for name, array in self.layers.items()}
        arrays["embedding/table"] = self.table_VE
        if self.sizes["tie_embedding"]:
            return arrays | {"head_bias": self.bias_V}
        return arrays | {"head/kernel": self.head_VH.T, "head/bias": self.bias_V}


def export_weights(
    run_dir: str | PathLike[str],
    path: str | PathLike[str],
    *,
    num_biases: int = 2,
    mesh: MeshConfig = ONE_DEVICE,
    best: bool = False,
) -> LM:
    """Writes the newest weights of a run as a safetensors file; it appears whole or not at all.

    Args:
      run_dir: the folder that `fit` wrote.
      num_biases: 2 for `torch.nn.GRU` and `torch.nn.LSTM`, its second all zero; 1 leaves that one out.
      mesh: what the state is read on.
      best: the state with the lowest validation loss, not the newest.
    Returns:
      the task of the run.
    Raises:
      ValueError: `num_biases` is neither, or 1 for a GRU; the layers are neither LSTM nor GRU, the run is of
        another task, or the model does not fit the mesh.
      OSError: no run, no checkpoint in it, or the file cannot be written.
    """
    if num_biases not in (1, 2):
        raise ValueError(f"num_biases={num_biases}: use 2, as torch.nn.LSTM has, or 1")
    run = load_text_run(run_dir, mesh, best=best)
    task = run.setup.task
    assert isinstance(task, LM)
    _check_layer(task.layer)
    if task.layer == "gru" and num_biases == 1:
        raise ValueError(
            "num_biases=1: a GRU has a bias of its own for the state; use 2, as torch.nn.GRU has"
        )
    arrays = by_layer(run.state.params, run.setup.layout)
    tensors = to_torch(jax.device_get(arrays), task, num_biases)
    words = json.dumps(run.vocabulary.words)
    metadata = {"format": "pt", WORDS: words, SHA256: _sha256(tensors, words)}
    with whole_file(Path(path).expanduser()) as file:
        safetensors.numpy.save_file(tensors, file, metadata)
    return task


def import_weights(
    path: str | PathLike[str],
    run_dir: str | PathLike[str],
    task: LM,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    *,
    vocabulary: str | PathLike[str] | None = None,
    names: tuple[str, str, str] = NAMES,
    overwrite: bool = False,
) -> LM:
    """Begins a run with the weights of a file: its folder with a checkpoint at step 0.

    The folder is one for `evaluate_run`, `sample` and `fit(..., resume=True)`. The rows of the
    embedding and the head are put into the order of the corpus's vocabulary; those of words that the
    corpus does not have come after them. Rows that no word has get no probability.

    Args:
      run_dir: holds no run yet.
      task: its `corpus` is the text that the model is to be used on; its model sizes are ignored, those of
        the weights are used; its `layer` says whether they are an LSTM or a GRU.
      parallel, train: None are the task's own.
      names: what the file calls the embedding, the LSTM or GRU ("auto": "lstm" or "gru"), and the head.
      vocabulary: of the model, for a file without words: a run's vocabulary.json, or a text of one
        word a line in the order of the ids.
      overwrite: remove the run that `run_dir` holds.
    Returns:
      the task of the run.
    Raises:
      ValueError: the file holds another model, the task's layers are neither LSTM nor GRU, or the corpus has
        words that the model does not have.
      OSError: a file cannot be read, or `run_dir` holds a run already (FileExistsError).
    """
    _check_layer(task.layer)
    folder = choose_folder(str(run_dir), resume=False, overwrite=overwrite)
    weights = read_weights(path, names, layer=task.layer)
    words = weights.words if vocabulary is None else _read_words(Path(vocabulary).expanduser())
    if words is None:
        raise ValueError(
            f"{path} does not contain the words of its vocabulary; give them with --vocabulary: a "
            f"run's vocabulary.json, or a text with one word per line in the order of the ids"
        )
    own = load_corpus(task.corpus, task.level, task.max_vocab).vocabulary
    weights = _in_order_of(own, weights, words)
    sizes = {**weights.sizes, "num_words": len(words), "vocab_size": padded(len(words))}
    task = dataclasses.replace(task, **sizes)
    setup = Setup.of(task, parallel, train)
    texts = texts_of(setup, describe_data(setup))
    with (
        begin_run(folder, setup, texts, overwrite=overwrite) as (folder, setup),
        folder.checkpoints(setup) as checkpoints,
    ):
        checkpoints.save(with_parameters(init_state(setup), setup.layout, weights.arrays))
    assert isinstance(setup.task, LM)
    return setup.task


def _check_layer(layer: str) -> None:
    if layer not in _GATES:
        raise ValueError(
            f"files of weights hold an LSTM or a GRU, the layers that PyTorch has, too; this task has "
            f"layer={layer!r}: use layer='lstm' or 'gru', or take its parameters from jaxpar.load_run"
        )


def to_torch(
    arrays: Mapping[str, np.ndarray], task: LM, num_biases: int = 2
) -> dict[str, np.ndarray]:
    """Tensors by their names in PyTorch, without what pads the vocabulary.

    Args:
      arrays: as of `Weights`.
      num_biases: of each recurrent layer, 1 or 2.
    """
    H, kind = task.hidden_size, task.layer
    G, num_apart = _GATES[kind]
    table_VE = arrays["embedding/table"]
    if task.tie_embedding:
        head_VH, bias_V = table_VE, arrays["head_bias"]
    else:
        head_VH, bias_V = arrays["head/kernel"].T, arrays["head/bias"]
    w_x, w_h, b = (arrays[f"layers/{kind}/{name}"] for name in ("w_x", "w_h", "b"))
    tensors = {"embedding.weight": table_VE, "head.weight": head_VH, "head.bias": bias_V}
    tensors = {name: tensor[: task.num_words] for name, tensor in tensors.items()}
    for layer in range(task.num_layers):
        # The input of the first layer is zero-extended to H: the rows beyond E meet nothing but zeros.
        num_inputs = H if layer else task.embed_size
        bias_hh_GH = np.zeros((G, H), np.float32)
        bias_hh_GH[G - num_apart :] = b[layer, G:]
        own = {
            "weight_ih": w_x[layer, :num_inputs].reshape(num_inputs, G * H).T,
            "weight_hh": w_h[layer].reshape(H, G * H).T,
            "bias_ih": b[layer, :G].ravel(),
            "bias_hh": bias_hh_GH.ravel(),
        }
        if num_biases == 1:
            del own["bias_hh"]
        tensors |= {f"{kind}.{name}_l{layer}": tensor for name, tensor in own.items()}
    # safetensors writes the memory of an array as it lies.
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def read_weights(
    path: str | PathLike[str],
    names: tuple[str, str, str] = NAMES,
    layer: str = "lstm",
) -> Weights:
    """The weights of a safetensors file, their sizes, and its words.

    A head without a bias, and a layer without biases, has zeros; a head that is missing, or equals the
    embedding, is tied to it.

    Args:
      names: as of `import_weights`.
      layer: "lstm" or "gru".
    Raises:
      OSError: the file cannot be read.
      ValueError: it is not such a file, or holds another model; the message names the tensor.
    """
    path = Path(path).expanduser()
    embedding, recurrent, head = names
    names = embedding, layer if recurrent == "auto" else recurrent, head
    try:
        with in_words(f"read the weights {path}", "give a safetensors file"):
            check_file(path)
            with safetensors.safe_open(path, framework="np") as file:
                tensors = {name: _tensor(file, name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        words = metadata.get(WORDS)
        if SHA256 in metadata and metadata[SHA256] != _sha256(tensors, words):
            raise ValueError(
                f"the file is damaged: it is not what was exported; export it again. If another program has "
                f"changed it, have it leave {SHA256} out of the metadata"
            )
        words = None if words is None else _parse_words(words)
        return _from_torch(tensors, layer, names, words)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or not all of it: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _tensor(file: Any, name: str) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except (AttributeError, TypeError):
        dtype = file.get_slice(name).get_dtype()
        raise ValueError(
            f"{name} is of the type {dtype}, which NumPy does not have; convert it to F32 or BF16"
        ) from None


def _sha256(tensors: Mapping[str, np.ndarray], words: str | None) -> str:
    """Of all that a file says: its words, and the names, types, shapes and values of its tensors."""
    sha256 = hashlib.sha256(repr(words).encode())
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        sha256.update(tensor.tobytes())
    return sha256.hexdigest()


def _parse_words(text: str) -> Sequence[str]:
    try:
        words = read_json(text, list)
        require(all(isinstance(word, str) for word in words), "its words are not texts")
    except ValueError as error:
        raise ValueError(
            f"{WORDS!r} in its metadata is not a JSON list of texts; export it again"
        ) from error
    return words


class _Tensors:
    """The tensors of a file, of which each is taken once."""

    def __init__(self, tensors: Mapping[str, np.ndarray], kind: str):
        self.all, self.left, self.kind = tensors, dict(tensors), kind

    def find(self, name: str, *shape: int | None) -> np.ndarray:
        """One that is left, of floating-point numbers; None is any size.

        Raises:
          ValueError: it is not there, or another.
        """
        if name not in self.left:
            raise ValueError(
                f"there is no tensor {name}; the file has {', '.join(sorted(self.all))}. "
                f"If embedding, {self.kind.upper()} and head have other names, give all three with --names"
            )
        tensor = self.left[name]
        fits = len(shape) == tensor.ndim and all(
            size in (None, real) for size, real in zip(shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype.kind not in "fV":  # V is bfloat16
            wanted = " x ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(
                f"{name} is {' x '.join(map(str, tensor.shape))} of {tensor.dtype}, to fit the "
                f"others it must be {wanted} of a floating-point type"
            )
        return tensor

    def take(self, name: str, *shape: int | None) -> np.ndarray:
        """That one, float32."""
        tensor = self.find(name, *shape)
        del self.left[name]
        return tensor.astype(np.float32)

    def take_bias(self, name: str, size: int) -> np.ndarray:
        """Likewise; zeros if it is not there."""
        return self.take(name, size) if name in self.left else np.zeros(size, np.float32)


def _from_torch(
    tensors: Mapping[str, np.ndarray],
    kind: str,
    names: tuple[str, str, str],
    words: Sequence[str] | None,
) -> Weights:
    """The weights that tensors are.

    Raises:
      ValueError: they are of another model; names a tensor.
    """
    file, (embedding, recurrent, head) = _Tensors(tensors, kind), names
    (G, num_apart), first = _GATES[kind], f"{recurrent}.weight_hh_l0"
    table_VE = file.take(f"{embedding}.weight", None, None)
    (V, E), (rows, H) = table_VE.shape, file.find(first, None, None).shape
    if 0 in (V, E, H):
        raise ValueError(
            f"{embedding}.weight is {V} x {E} and {first} {rows} x {H}: that is no model; give all of its "
            f"weights"
        )
    for other, (num_gates, _) in _GATES.items():
        if other != kind and rows == num_gates * H:
            raise ValueError(
                f"{first} is {rows} x {H}, that of {num_gates} gates: the layers are layer={other!r}, the "
                f"task has layer={kind!r}; use --layer {other}"
            )
    pattern = re.compile(re.escape(recurrent) + r"\.weight_hh_l\d+")
    found, apart = [], G - num_apart
    for layer in range(sum(1 for name in tensors if pattern.fullmatch(name))):
        w_x, w_h = (
            file.take(f"{recurrent}.weight_{name}_l{layer}", G * H, size)
            for name, size in (("ih", H if layer else E), ("hh", H))
        )
        b_x, b_h = (
            file.take_bias(f"{recurrent}.bias_{name}_l{layer}", G * H).reshape(G, H)
            for name in ("ih", "hh")
        )
        b = np.concatenate([b_x[:apart] + b_h[:apart], b_x[apart:], b_h[apart:]])
        # The rows beyond E meet nothing but zeros; an E beyond H is refused by the task.
        w_x = np.pad(w_x, ((0, 0), (0, max(H - w_x.shape[1], 0))))[:, :H]
        found.append([w_x.T.reshape(H, G, H), w_h.T.reshape(H, G, H), b])
    stacks = map(np.stack, zip(*found, strict=True))
    bias_V = file.take_bias(f"{head}.bias", V)
    weight = f"{head}.weight"
    head_VH = file.take(weight, V, H) if weight in file.left or E != H else table_VE
    if file.left:
        raise ValueError(
            f"there is no place for {', '.join(sorted(file.left))} in an embedding, layers of one direction "
            f"without projections ({kind}), and a linear head"
        )
    layers: dict[str, np.ndarray] = dict(zip(("w_x", "w_h", "b"), stacks, strict=True))
    return Weights(kind, table_VE, layers, head_VH, bias_V, words)


def _read_words(path: Path) -> Sequence[str]:
    if path.suffix == ".json":
        folder = RunFolder(path.parent)
        if folder.data_path.exists() and path.name == VOCABULARY:
            folder.read(VOCABULARY)  # is it as it was written?
        return Vocabulary.load(path).words
    return read_text(path, "the vocabulary").removesuffix("\n").split("\n")


def _in_order_of(vocabulary: Vocabulary, weights: Weights, words: Sequence[str]) -> Weights:
    """The weights with row i of embedding and head for word i of the vocabulary, padded with zeros."""
    rows, num_rows = {word: row for row, word in enumerate(words)}, len(weights.table_VE)
    if len(rows) != len(words) or len(words) > num_rows:
        raise ValueError(
            f"the vocabulary has {len(words)} words, {len(rows)} different ones, the weights have "
            f"{num_rows} rows; give the vocabulary that the model was trained with"
        )
    if missing := [word for word in vocabulary.words if word not in rows]:
        raise ValueError(
            f"{len(missing)} of the {len(vocabulary)} words of the corpus are unknown to the "
            f"model, such as {', '.join(map(repr, missing[:3]))}; give the corpus that it was "
            f"trained on, with {UNK} and {EOS} as it had them, or a smaller max_vocab"
        )
    known = [rows[word] for word in vocabulary.words]
    order = np.array([*known, *np.setdiff1d(np.arange(len(words)), known)], np.int64)
    padding = padded(len(words)) - len(words)

    def arrange(array: np.ndarray) -> np.ndarray:
        return np.pad(array[order], [(0, padding), (0, 0)][: array.ndim])

    changed = {name: arrange(getattr(weights, name)) for name in ("table_VE", "head_VH", "bias_V")}
    return dataclasses.replace(weights, **changed)
