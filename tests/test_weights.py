"""The law: a model that leaves as safetensors, or comes in, gives the same logits there and here."""

import dataclasses
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from lib import api
from lib.regression import Regression
from lib.regression import fit as fit_regression

from jaxpar import MeshConfig, OptimizerConfig, Parallel, Start, TrainConfig, fit, load_run
from jaxpar.lm import LM, Vocabulary
from jaxpar.nn import GateParams, gru_layer

pytestmark = pytest.mark.usefixtures("compile_once")

# Sums in another order, in float32; of the largest logit.
RELATIVE_ERROR = 1e-5

LINES = ["the cat sat on the mat", "a dog ran to the cat", "the mat ran", "a cat sat on a dog"]
RATE = OptimizerConfig(learning_rate=0.05, warmup_steps=0)
ONE = Parallel(MeshConfig(devices=(0,)))
SIZES = ("num_layers", "hidden_size", "embed_size", "vocab_size", "num_words", "tie_embedding")
TASK = LM(
    num_layers=3, hidden_size=8, embed_size=6, dropout=0.0, batch_size=8, seq_len=4, optimizer=RATE
)
TASKS = {
    "narrow": TASK,
    "tied": dataclasses.replace(TASK, num_layers=2, embed_size=8, tie_embedding=True),
    "gru": dataclasses.replace(TASK, num_layers=2, layer="gru"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for split, num_lines in (("train", 120), ("valid", 20), ("test", 20)):
        lines = [LINES[i] for i in rng.integers(len(LINES), size=num_lines)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module", params=TASKS)
def run(request, text, tmp_path_factory):
    """A run of three steps, and its weights in a file."""
    out_dir = tmp_path_factory.mktemp("runs") / request.param
    task = dataclasses.replace(TASKS[request.param], corpus=str(text))
    result = fit(task, ONE, make_train(out_dir))
    load_run(out_dir).export(out_dir / "model.safetensors", torch=True)
    return result


def make_train(out_dir):
    return TrainConfig(num_steps=3, log_every=3, out_dir=str(out_dir))


def started(path, text, task=TASK, **options):
    """The task and state of a run that begins with the weights of a file."""
    task = dataclasses.replace(task, corpus=str(text)).resolve()
    state, _ = api.begin_with(task, ONE, Start(str(path), **options), make_train("nowhere"))
    return task, state


def logits_of(run_dir, tokens_BT):
    """Of the words that a run knows."""
    run = load_run(run_dir)
    return np.asarray(run.model()(tokens_BT))[..., : run.setup.task.num_words]


def logits(task, state, tokens_BT):
    return np.asarray(api.model(task, ONE, state)(tokens_BT))[..., : task.num_words]


def torch_logits(tensors, tokens_BT, names=("embedding", "lstm", "head")):
    """By the formulas in the documentation of torch.nn.LSTM and torch.nn.GRU, in float64."""
    embedding, recurrent, head = names

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    x_BTI = np.asarray(tensors[f"{embedding}.weight"], np.float64)[tokens_BT]
    layer = 0
    while f"{recurrent}.weight_ih_l{layer}" in tensors:
        w_ih, w_hh, b_ih, b_hh = (
            np.asarray(tensors.get(f"{recurrent}.{name}_l{layer}", np.zeros(1)), np.float64)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = c = np.zeros((x_BTI.shape[0], w_hh.shape[1]))
        outputs = []
        for x in x_BTI.swapaxes(0, 1):
            of_x, of_h = x @ w_ih.T + b_ih, h @ w_hh.T + b_hh
            if len(w_hh) == 3 * w_hh.shape[1]:
                (r_x, z_x, n_x), (r_h, z_h, n_h) = (np.split(a, 3, axis=1) for a in (of_x, of_h))
                z = sigmoid(z_x + z_h)
                h = (1 - z) * np.tanh(n_x + sigmoid(r_x + r_h) * n_h) + z * h
            else:
                i, f, g, o = np.split(of_x + of_h, 4, axis=1)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
            outputs.append(h)
        x_BTI, layer = np.stack(outputs, axis=1), layer + 1
    return x_BTI @ tensors[f"{head}.weight"].T + tensors.get(f"{head}.bias", 0.0)


def assert_close(actual, expected):
    assert np.abs(actual - expected).max() <= RELATIVE_ERROR * np.abs(expected).max()


def tokens_of(run):
    return np.random.default_rng(1).integers(len(words_of(run)), size=(4, 9), dtype=np.int32)


def words_of(run):
    return words_in(run.out_dir)


def words_in(run_dir):
    return Vocabulary.from_json((run_dir / "vocabulary.json").read_bytes()).words


@pytest.mark.more
@pytest.mark.law
def test_exported_weights_give_the_same_logits_by_the_formulas_of_torch(run):
    tensors = safetensors.numpy.load_file(run.out_dir / "model.safetensors")
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    tokens = tokens_of(run)
    names = "embedding", run.setup.task.layer, "head"
    assert_close(logits_of(run.out_dir, tokens), torch_logits(tensors, tokens, names))


@pytest.mark.more
def test_exported_tensors_are_those_of_torch(run):
    kind, task = run.setup.task.layer, run.setup.task
    tensors = safetensors.numpy.load_file(run.out_dir / "model.safetensors")
    V, E, H, L = len(words_of(run)), task.embed_size, task.hidden_size, task.num_layers
    assert V == task.num_words < task.vocab_size == 384  # padded
    expected = {"embedding.weight": (V, E), "head.weight": (V, H), "head.bias": (V,)}
    for layer in range(L):
        rows = {"lstm": 4, "gru": 3}[kind] * H
        expected[f"{kind}.weight_ih_l{layer}"] = (rows, H if layer else E)
        expected[f"{kind}.weight_hh_l{layer}"] = (rows, H)
        for name in ("ih", "hh"):
            expected[f"{kind}.bias_{name}_l{layer}"] = (rows,)
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected


@pytest.mark.more
@pytest.mark.law
def test_a_run_that_begins_with_exported_weights_gives_their_logits(run, text):
    path = run.out_dir / "model.safetensors"
    task, state = started(path, text, TASKS[run.out_dir.name])
    tokens = tokens_of(run)
    np.testing.assert_array_equal(logits(task, state, tokens), logits_of(run.out_dir, tokens))
    sums = api.epoch_sums(task, ONE, state, task.make_batches("valid"))
    assert sums["loss"] / sums["weight"] == run.evaluations["valid"].loss


def foreign(seed=0, *, num_words=12, num_biases=2, names=("embedding", "lstm", "head"), **change):
    """A model as PyTorch would draw it."""
    embedding, lstm, head = names
    V, E, H, L = (change.get(name, size) for name, size in zip("VEHL", (14, 6, 8, 2), strict=True))
    shapes = {f"{embedding}.weight": (V, E), f"{head}.weight": (V, H), f"{head}.bias": (V,)}
    for layer in range(L):
        shapes[f"{lstm}.weight_ih_l{layer}"] = (4 * H, H if layer else E)
        shapes[f"{lstm}.weight_hh_l{layer}"] = (4 * H, H)
        for name in ("ih", "hh")[:num_biases]:
            shapes[f"{lstm}.bias_{name}_l{layer}"] = (4 * H,)
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def save(path, tensors, words=None):
    metadata = None if words is None else {"words": json.dumps(words)}
    safetensors.numpy.save_file(tensors, path, metadata)


WORDS = ["<eos>", "a", "cat", "dog", "mat", "on", "ran", "sat", "the", "to", "<unk>", "zebra"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer": "rglru"}, r"layer='rglru': PyTorch has .*\nFix: leave out --torch"),
        ({"num_heads": 2}, r"num_heads=2: PyTorch has .*\nFix: leave out --torch"),
    ],
)
def test_layers_that_torch_does_not_have_are_refused(text, tmp_path, fields, message):
    task = dataclasses.replace(TASK, num_layers=1, corpus=str(text), **fields)
    fit(task, ONE, make_train(tmp_path / "run"), quiet=True)
    with pytest.raises(ValueError, match=message):
        load_run(tmp_path / "run").export(tmp_path / "model.safetensors", torch=True)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_run_that_is_no_language_model_has_no_names_of_torch(tmp_path):
    run = load_run(fit_regression(Regression(), tmp_path / "run", 1).out_dir)
    with pytest.raises(ValueError, match=r"is for language models .* task Regression\nFix: leave"):
        run.export(tmp_path / "model.safetensors", torch=True)


def test_a_gru_of_torch_gives_its_outputs_in_a_language_model(text, tmp_path):
    """The stored one, whose biases are all drawn, beside what PyTorch made of it."""
    with np.load(Path(__file__).with_name("torch_gru.npz")) as file:
        stored = dict(file)
    own = {name.removeprefix("weights/"): a for name, a in stored.items() if "weights/" in name}
    save(tmp_path / "model.safetensors", {f"gru.{name}": a for name, a in own.items()})
    depth, H = len(stored["h_0"]), stored["x"].shape[-1]
    task = LM(layer="gru", num_layers=depth, hidden_size=H, embed_size=H, optimizer=RATE)
    task, state = started(tmp_path / "model.safetensors", text, task)
    found = api.params_of(task, ONE, state)
    y = jnp.asarray(stored["x"])
    for layer, h_0 in enumerate(stored["h_0"]):
        params = (found[f"layers.{layer}.{name}"] for name in ("w_x", "w_h", "b"))
        _, y = gru_layer(GateParams(*params), jnp.asarray(h_0), y)
    assert_close(np.asarray(y), stored["y"])


FOREIGN = dataclasses.replace(TASK, num_layers=2)


@pytest.mark.rows(1)
@pytest.mark.parametrize("num_biases", [0, 1, 2])
def test_a_foreign_model_gives_its_logits_whatever_the_order_of_its_words(
    text, tmp_path, num_biases
):
    names = ("encoder", "rnn", "decoder")
    tensors = foreign(names=names, num_biases=num_biases)
    save(tmp_path / "model.safetensors", tensors, WORDS)
    rename = ((r"encoder\.(.*)", r"embedding.\1"), (r"rnn\.(.*)", r"lstm.\1"))
    rename = (*rename, (r"decoder\.(.*)", r"head.\1"))
    task, state = started(tmp_path / "model.safetensors", text, FOREIGN, rename=rename)
    ours = Vocabulary.from_json(task.files()["vocabulary.json"]).words
    assert ours != tuple(WORDS[:11])
    theirs_of_ours = np.array([WORDS.index(word) for word in ours])
    tokens = np.random.default_rng(1).integers(len(ours), size=(4, 9))
    expected = torch_logits(tensors, theirs_of_ours[tokens], names)
    assert_close(logits(task, state, tokens), expected[..., theirs_of_ours])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floating_point_types_are_read(text, tmp_path, dtype):
    tensors = {name: tensor.astype(dtype) for name, tensor in foreign().items()}
    save(tmp_path / "model.safetensors", tensors, WORDS)
    task, state = started(tmp_path / "model.safetensors", text, FOREIGN)
    own = Vocabulary.from_json(task.files()["vocabulary.json"]).words
    rows = [WORDS.index(word) for word in own]
    kernel = np.asarray(state.params["head"]["kernel"][...])
    expected = np.asarray(tensors["head.weight"], np.float32).T[:, rows]
    np.testing.assert_array_equal(kernel[:, : len(own)], expected)


def test_layers_alone_are_read_without_words(text, tmp_path):
    tensors = {name: a for name, a in foreign().items() if name.startswith("lstm")}
    save(tmp_path / "model.safetensors", tensors)
    task, state = started(tmp_path / "model.safetensors", text, FOREIGN)
    found = api.params_of(task, ONE, state)
    for layer in range(2):
        kernel = tensors[f"lstm.weight_hh_l{layer}"].T.reshape(8, 4, 8)
        np.testing.assert_array_equal(found[f"layers.{layer}.w_h"], kernel)


def without(*names):
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


FILES = {
    "a layer is missing": (
        without("lstm.weight_ih_l0"), r"has lstm\.weight_hh_l0 and no lstm\.weight_ih_l0",
    ),
    "half a layer": (
        without("lstm.weight_hh_l1"), r"has lstm\.bias_hh_l1, .*weight_ih_l1, which the model lacks",
    ),
    "projections": (
        lambda t: t | {"lstm.weight_hr_l0": t["head.weight"]}, r"has lstm\.weight_hr_l0, which the model",
    ),
    "three gates": (
        lambda t: {n: a[:24] if "_l" in n else a for n, a in t.items()},
        r"weight_ih_l0 has the wrong size for 4 gates of 8 units, 32x6\.\nFix: give an LSTM of one direction",
    ),
    "a GRU": (
        lambda t: {n.replace("lstm", "gru"): a for n, a in t.items()},
        r"layer='lstm': .* holds layer='gru'\.\nFix: use --layer gru",
    ),
    "whole numbers": (
        lambda t: t | {"head.bias": t["head.bias"].astype(np.int32)},
        r"head\.bias of .* has the type int32, but the model's has float32\.\nFix: convert it",
    ),
    "wider than the layers": (
        lambda _: foreign(E=12), r"embedding\.table is \d+x12 there and 384x6 here; layers\.0\.w_x is 12x4",
    ),
    "fewer rows than words": (lambda _: foreign(V=11), r"12 words \(12 different\) for 11 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_model_are_refused(name, text, tmp_path):
    change, message = FILES[name]
    save(tmp_path / "model.safetensors", change(foreign()), WORDS)
    with pytest.raises(ValueError, match=message):
        started(tmp_path / "model.safetensors", text, FOREIGN)


def test_layers_of_several_heads_are_none_of_torch(text, tmp_path):
    save(tmp_path / "model.safetensors", foreign(), WORDS)
    task = dataclasses.replace(FOREIGN, num_heads=2)
    with pytest.raises(ValueError, match=r"has other sizes than the model: .*layers\.0\.w_h is"):
        started(tmp_path / "model.safetensors", text, task)


def test_vocabularies_that_do_not_fit_are_refused(text, tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, foreign())
    with pytest.raises(
        ValueError, match="does not name the words of its rows\\.\nFix: save it with"
    ):
        started(path, text, FOREIGN)
    save(path, foreign(), [*WORDS, "a"])
    with pytest.raises(ValueError, match=r"13 words \(12 different\)"):
        started(path, text, FOREIGN)


def test_a_head_of_its_own_is_not_tied(text, tmp_path):
    path, tied = tmp_path / "model.safetensors", dataclasses.replace(TASKS["tied"], embed_size=8)
    save(path, foreign(E=8), WORDS)
    with pytest.raises(ValueError, match=r"tie_embedding=True: .* has its own head\.weight"):
        started(path, text, tied)


def test_broken_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match=r"cannot read the weights .*model\.safetensors"):
        api.tensors_in(path)
    save(path, foreign())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is not a whole safetensors file"):
        api.tensors_in(path)


def raw_file(path, header, data=b"", length=None):
    """A safetensors file of this header, of which it may lie."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", length) + header + data)


def tensor(dtype, *shape, at=0, size=0):
    return {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}


def test_a_tensor_without_elements_is_read_where_no_page_can_be_mapped(tmp_path):
    """At the end of a file of whole pages, with NumPy before 2.3."""
    path = tmp_path / "model.safetensors"
    header = json.dumps({"empty": tensor("F32", 0, 4)}).ljust(mmap.PAGESIZE - 8)
    raw_file(path, header.encode())
    found = api.tensors_in(path)["empty"]
    assert (found.shape, found.dtype) == ((0, 4), np.float32)


# What a header says, and what follows it.
CRAFTED = {
    **{
        dtype: ({"embedding.weight": tensor(dtype, 4, 4, size=16)}, bytes(16), f"has the type {dtype}, which")
        for dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0")
    },
    "a longer header": ({}, b"", "header too large", 2**60),
    "no header": ({}, b"", "is not a whole safetensors file", 0),
    "deep": (b'{"a": ' * 100_000, b"", "is not a whole safetensors file"),
    "huge": ({"embedding.weight": tensor("F32", 10**19, 4)}, b"", "overflow computing buffer size"),
    "metadata": ({"__metadata__": {"words": 3}}, b"", "is not a whole safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(name, tmp_path):
    header, data, message, *length = CRAFTED[name]
    path = tmp_path / "model.safetensors"
    raw_file(path, header, data, *length)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}\W.*{message}"):
            api.tensors_in(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * path.stat().st_size + 2**26


def test_a_pipe_is_no_file_of_weights(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(
        OSError, match=r"cannot read the weights .*: it is a pipe, .*\nFix: give a safet"
    ):
        api.tensors_in(path)


@pytest.mark.more
def test_words_that_are_no_list_are_refused(run, text, tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(run.out_dir / path.name)
    safetensors.numpy.save_file(tensors, path, {"words": '{"a"'})
    with pytest.raises(ValueError, match=r"'words' in its metadata is not a JSON list of strings"):
        started(path, text, TASKS[run.out_dir.name])


# Reads a model as PyTorch does, or draws one; writes its logits.
TORCH_SIDE = """
import json, sys, torch
from safetensors.torch import load_file, save_file
path, tokens, logits, kind, sizes = sys.argv[1:]
V, E, H, L = map(int, sizes.split(","))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, E)
        self.add_module(kind, getattr(torch.nn, kind.upper())(E, H, L, batch_first=True))
        self.head = torch.nn.Linear(H, V)
    def forward(self, tokens):
        return self.head(getattr(self, kind)(self.embedding(tokens))[0])
torch.manual_seed(0)
model = Model()
if path.endswith("drawn.safetensors"):
    save_file(model.state_dict(), path)
else:
    model.load_state_dict(load_file(path))
with torch.no_grad():
    tokens = load_file(tokens)["tokens"]
    save_file({"logits": model(tokens)}, logits)
"""


@pytest.fixture(scope="module")
def torch_python():
    """A Python with PyTorch and safetensors; JAXPAR_TORCH_PYTHON names it, or it is this one."""
    python = os.environ.get("JAXPAR_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch, safetensors"], capture_output=True).returncode:
        pytest.skip(f"{python} has no torch and safetensors; name one in JAXPAR_TORCH_PYTHON")
    return python


def run_torch(python, path, tokens, folder, task):
    sizes = task.num_words, task.embed_size, task.hidden_size, task.num_layers
    save(folder / "tokens.safetensors", {"tokens": tokens.astype(np.int64)})
    arguments = [str(folder / name) for name in ("tokens.safetensors", "logits.safetensors")]
    arguments += [task.layer, ",".join(map(str, sizes))]
    subprocess.run([python, "-c", TORCH_SIDE, str(path), *arguments], check=True)
    return safetensors.numpy.load_file(folder / "logits.safetensors")["logits"]


@pytest.mark.more
def test_torch_gives_the_same_logits(torch_python, run, tmp_path):
    tokens = tokens_of(run)
    expected = logits_of(run.out_dir, tokens)
    path = run.out_dir / "model.safetensors"
    assert_close(run_torch(torch_python, path, tokens, tmp_path, run.setup.task), expected)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_model_of_torch_gives_its_logits_here(torch_python, text, tmp_path, kind):
    path, task = tmp_path / "drawn.safetensors", dataclasses.replace(FOREIGN, layer=kind)
    tokens = np.random.default_rng(1).integers(11, size=(4, 9))
    drawn = dataclasses.replace(task, num_words=12)
    expected = run_torch(torch_python, path, tokens, tmp_path, drawn)
    save(path, safetensors.numpy.load_file(path), WORDS)
    task, state = started(path, text, task)
    ours = Vocabulary.from_json(task.files()["vocabulary.json"]).words
    order = [ours.index(word) for word in WORDS[:11]]
    actual = logits(task, state, np.array(order)[tokens])
    assert_close(actual[..., order], expected[..., :11])


@pytest.mark.more
@pytest.mark.parametrize("run", ["narrow", "tied"], indirect=True)
def test_the_class_of_the_page_gives_the_same_logits(torch_python, run, tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "use" / "export.md").read_text()
    blocks = re.findall(r"(?s)^```py\n(.*?)^```", page, re.MULTILINE)
    [block] = (block for block in blocks if "class LanguageModel" in block)
    path, tokens = run.out_dir / "model.safetensors", tokens_of(run)
    save(tmp_path / "tokens.safetensors", {"tokens": tokens.astype(np.int64)})
    script = block.partition("model = ")[0] + (
        "import sys\n"
        "from safetensors.torch import load_file, save_file\n"
        "tokens = load_file(sys.argv[2])['tokens']\n"
        "with torch.no_grad():\n"
        "    logits, _ = LanguageModel(sys.argv[1])(tokens)\n"
        "save_file({'logits': logits.contiguous()}, sys.argv[3])\n"
    )
    files = [str(tmp_path / name) for name in ("tokens.safetensors", "logits.safetensors")]
    subprocess.run([torch_python, "-c", script, str(path), *files], check=True)
    found = safetensors.numpy.load_file(files[1])["logits"]
    assert_close(found, logits_of(run.out_dir, tokens))
