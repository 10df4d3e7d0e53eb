"""Weights of a language model: rows matched by words, and PyTorch's names and layout.

Legend of the dim suffixes: V vocabulary, E embedding, H hidden, G gates (i f g o, or r z n), L layers.

    embedding.weight      [V, E]
    lstm.weight_ih_l{k}   [GH, E], and [GH, H] for k > 0
    lstm.weight_hh_l{k}   [GH, H]
    lstm.bias_ih_l{k}     [GH]     the bias is the sum of the two, but for n of a GRU
    lstm.bias_hh_l{k}     [GH]
    head.weight           [V, H]
    head.bias             [V]

So does `torch.nn.Module` name them if it has an Embedding, an LSTM and a Linear of these names; or a GRU
by the name `gru`. V is then the number of words: what pads the vocabulary is left out. The words, in the
order of their ids, are in the metadata of every file.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxpar.base.checks import require
from jaxpar.base.display import format_shape
from jaxpar.base.files import read_json
from jaxpar.lm.options import Options
from jaxpar.lm.vocabulary import Vocabulary
from jaxpar.model.weights import Rows, Tensor, Weights
from jaxpar.training.weights import Outgoing

WORDS = "words"  # in the metadata of a file: a JSON list

# Layers that PyTorch has, too: how many gates, and how many biases of the state apart, the last rows of ours.
_GATES = {"lstm": (4, 0), "gru": (3, 1)}
_Make = Callable[[np.ndarray], np.ndarray]
# The parameters that have a row for each word, along this dim.
_OF_WORDS = {"embedding.table": 0, "head.kernel": 1, "head.bias": 0, "head_bias": 0}


# ---- in ----


def with_words(weights: Weights, task: Options, vocabulary: str | None) -> Weights:
    """The weights with PyTorch's names changed to the model's, and its rows those of the same words.

    Args:
      vocabulary: that a run has kept, as JSON; None: the words are in a file's metadata, if anywhere.
    Raises:
      ValueError: the words are not told, or not those of the rows.
    """
    weights = dataclasses.replace(weights, tensors=_from_torch(weights, task))
    found = {name: dim for name, dim in _OF_WORDS.items() if name in weights.tensors}
    if not found:
        return weights
    words = _words_of(weights) if vocabulary is None else Vocabulary.from_json(vocabulary).words
    own = task.read_text().vocabulary.words
    num_rows = {weights.tensors[name].shape[dim] for name, dim in found.items()}
    ids = {word: number for number, word in enumerate(words)}
    require(
        len(ids) == len(words) <= min(num_rows),
        f"{weights.source} names {len(words)} words ({len(ids)} different) for {min(num_rows)} rows.\n"
        f"Fix: give it the words that the model was trained with.",
    )
    if tuple(words) == tuple(own) and num_rows == {task.known_vocab_size}:
        return weights  # with what pads them
    chosen = np.full(task.known_vocab_size, -1)
    chosen[: len(own)] = [ids.get(word, -1) for word in own]
    num_taken = int((chosen >= 0).sum())
    note = f"{num_taken:,} of its {len(words):,} words, {len(own) - num_taken:,} are new"
    rows = {name: (dim, chosen) for name, dim in found.items()}
    return dataclasses.replace(weights, rows=rows, note=note)


def _words_of(weights: Weights) -> Sequence[str]:
    """The words by the metadata of files."""
    require(
        WORDS in weights.texts,
        f"{weights.source} does not name the words of its rows.\n"
        f"Fix: save it with metadata={{'words': json.dumps(words)}}, in the order of their ids.",
    )
    with contextlib.suppress(ValueError):
        words = read_json(weights.texts[WORDS], list)
        if all(isinstance(word, str) for word in words):
            return words
    fact = f"{weights.source}: {WORDS!r} in its metadata is not a JSON list of strings."
    raise ValueError(f"{fact}\nFix: export it again.")


def _from_torch(weights: Weights, task: Options) -> dict[str, Tensor]:
    """The tensors, where they are PyTorch's by the model's names; others as they are.

    Each is made whole where it is read: PyTorch's are those of one device.
    """
    theirs, kind = dict(weights.tensors), task.layer
    names = [re.fullmatch(r"(lstm|gru)\.weight_hh_l(\d+)", name) for name in theirs]
    layers = sorted((name[1], int(name[2])) for name in names if name)
    if not layers and "embedding.weight" not in theirs:
        return theirs
    for other, _ in layers:
        fact = f"layer={kind!r}: {weights.source} holds layer={other!r}."
        require(other == kind, f"{fact}\nFix: use --layer {other}.")
    own: dict[str, Tensor] = {}

    def move(old: str, new: str, make: _Make = np.asarray) -> None:
        if old in theirs:
            tensor = theirs.pop(old)
            shape = make(np.broadcast_to(np.empty((), tensor.dtype), tensor.shape)).shape
            rows = Rows.of_one(shape, tensor.dtype, lambda: make(tensor.whole()))
            own[new] = Tensor(rows)

    move("embedding.weight", "embedding.table")
    tied = task.tie_embedding
    if tied and "head.weight" in theirs and "embedding.table" in own:
        head = theirs.pop("head.weight").whole()
        fact = f"tie_embedding=True: {weights.source} has its own head.weight."
        require(np.array_equal(head, own["embedding.table"].whole()), f"{fact}\nFix: leave it off.")
    move("head.weight", "head.kernel", np.transpose)
    move("head.bias", "head_bias" if tied else "head.bias")
    for _, layer in layers:
        own |= _layer_from_torch(theirs, weights.source, kind, layer)
    return {**own, **theirs}


def _layer_from_torch(
    theirs: dict[str, Tensor], source: str, kind: str, layer: int
) -> dict[str, Tensor]:
    """The tensors of a layer, which are taken out of theirs.

    Raises:
      ValueError: one is missing, or they do not fit each other.
    """
    G, num_apart = _GATES[kind]
    names = [f"{kind}.{name}_l{layer}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    fact = f"{source} has {names[1]} and no {names[0]}."
    require(names[0] in theirs, f"{fact}\nFix: export it again.")
    w_ih, w_hh, *biases = (theirs.pop(name, None) for name in names)
    assert w_ih is not None
    assert w_hh is not None
    H, num_inputs = (tensor.shape[-1] if tensor.shape else 0 for tensor in (w_hh, w_ih))
    wanted = (G * H, num_inputs), (G * H, H), (G * H,), (G * H,)
    for name, tensor, shape in zip(names, (w_ih, w_hh, *biases), wanted, strict=True):
        require(
            tensor is None or (tensor.shape == shape and H > 0),
            f"{source}: {name} has the wrong size for {G} gates of {H} units, {format_shape(shape)}.\n"
            f"Fix: give an {kind.upper()} of one direction, without projections.",
        )

    def to_kernel(tensor: Tensor) -> np.ndarray:
        # The rows beyond E meet nothing but zeros; more inputs than H are refused by their shape.
        kernel = tensor.whole().T.reshape(-1, G, H)
        return np.pad(kernel, ((0, max(H - len(kernel), 0)), (0, 0), (0, 0)))

    def to_bias() -> np.ndarray:
        zeros = np.zeros((G, H), np.float32)  # in which they are added
        b_x, b_h = (zeros if b is None else zeros + b.whole().reshape(G, H) for b in biases)
        apart = G - num_apart
        return np.concatenate([b_x[:apart] + b_h[:apart], b_x[apart:], b_h[apart:]])

    made = {
        "w_x": ((max(num_inputs, H), G, H), w_ih.dtype, functools.partial(to_kernel, w_ih)),
        "w_h": ((H, G, H), w_hh.dtype, functools.partial(to_kernel, w_hh)),
        "b": ((G + num_apart, H), np.float32, to_bias),
    }
    return {f"layers.{layer}.{name}": Tensor(Rows.of_one(*one)) for name, one in made.items()}


# ---- out ----


def to_torch(tensors: Mapping[str, Outgoing], task: Options) -> dict[str, Outgoing]:
    """A model's tensors by PyTorch's names, without what pads the vocabulary.

    Raises:
      ValueError: its layers are neither LSTM nor GRU, have several heads, or are of unequal widths.
    """
    H, kind, num_words = task.hidden_size, task.layer, task.num_words or task.known_vocab_size
    others = {
        f"layer={kind!r}": kind not in _GATES,
        f"num_heads={task.heads}": task.heads > 1,
        f"layers of widths {task.widths}": len({*task.widths}) > 1,
    }
    for what in (what for what, is_other in others.items() if is_other):
        raise ValueError(
            f"{what}: PyTorch has only LSTMs and GRUs of one head and one width.\n"
            f"Fix: leave out --torch, for the names of the model's parameters."
        )
    (G, num_apart), found = _GATES[kind], dict[str, Outgoing]()

    def add(name: str, shape: tuple[int, ...], source: str, make: _Make) -> None:
        tensor = tensors[source]
        found[name] = Outgoing(shape, tensor.dtype, lambda: make(tensor.gather()))

    def words_first(array: np.ndarray) -> np.ndarray:
        return array[:num_words]

    add("embedding.weight", (num_words, task.embed_size), "embedding.table", words_first)
    if task.tie_embedding:
        add("head.weight", (num_words, H), "embedding.table", words_first)
    else:
        add("head.weight", (num_words, H), "head.kernel", lambda kernel: kernel.T[:num_words])
    bias = "head_bias" if task.tie_embedding else "head.bias"
    add("head.bias", (num_words,), bias, words_first)

    def bias_hh(b: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(((G - num_apart), H), b.dtype), b[G:]]).ravel()

    for layer in range(task.num_layers):
        # The input of the first layer is zero-extended to H: the rows beyond E meet nothing but zeros.
        num_inputs = H if layer else task.embed_size
        kernels = {"weight_ih": ("w_x", num_inputs), "weight_hh": ("w_h", H)}
        for name, (own, size) in kernels.items():
            flat = functools.partial(lambda w, size: w[:size].reshape(size, G * H).T, size=size)
            add(f"{kind}.{name}_l{layer}", (G * H, size), f"layers.{layer}.{own}", flat)
        for name, make in (("bias_ih", lambda b: b[:G].ravel()), ("bias_hh", bias_hh)):
            add(f"{kind}.{name}_l{layer}", (G * H,), f"layers.{layer}.b", make)
    return found
