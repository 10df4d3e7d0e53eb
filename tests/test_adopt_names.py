"""Parameters of a Flax model that jaxpar adopts have the names of its user, and it comes back as it was."""

import dataclasses
import re
import shutil
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from lib import gpt
from lib.gpt import ARRAYS, InGroups, Words, arrays_of, plain
from orbax import checkpoint as orbax

import jaxpar
from jaxpar import Start, init_state, make_train_step
from jaxpar.base.display import join_names
from jaxpar.partition.by_layer import by_layer
from jaxpar.sharding import array_of, user_name
from jaxpar.step.setup import Setup
from jaxpar.training.nonfinite import check_parameters, find_origin
from jaxpar.training.summary import summarize
from jaxpar.training.weights import (
    find_weights,
    in_ranges,
    model_of,
    open_files,
    outgoing,
    write_weights,
)

BATCH = Words().make_batches("train", 0).batch(0)
RTOL = 1e-5


@pytest.fixture(autouse=True)
def models_of_users_convert_and_broadcast():
    """As JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def stored(setup, state):
    """What is exported."""
    tensors = outgoing((state.params, state.frozen), setup.storage)
    return {name: tensor.gather() for name, tensor in tensors.items()}


def assert_equal(found, expected, rtol=RTOL):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol, 1e-7, err_msg=name)


def test_names_that_differ_in_a_step_become_one():
    assert join_names(["blocks.0.up", "blocks.2.up", "blocks.1.up"]) == "blocks.0-2.up"
    assert join_names(["a.block_3.b", "a.block_1.b"]) == "a.block_1,3.b"
    assert join_names(["a.x.b", "a.y.b"]) == "a.x,y.b"
    assert in_ranges(["e.blocks.0.mlp.1.w", "e.blocks.1.mlp.1.w"]) == ["e.blocks.0-1.mlp.1.w"]
    assert in_ranges(["layer_0.w", "layer_1.w", "b16.w"]) == ["layer_0-1.w", "b16.w"]


# The model, and the names that a block's first norm has in a checkpoint.
TASKS = {
    "list": (Words(), ["blocks.0-3.norm.scale"]),
    "stacked": (Words(model="stacked"), ["blocks.norm.scale"]),
    "frozen block": (Words(freeze="blocks.1."), ["blocks.0,2-3.norm.scale", "blocks.1.norm.scale"]),
    "frozen embedding": (Words(freeze="embed"), ["blocks.0-3.norm.scale"]),
    "pools": (Words(freeze="blocks.1.mlp"), ["blocks.0,2-3.norm.scale", "blocks.1.norm.scale"]),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", TASKS)
def test_parameters_have_the_names_and_values_of_the_users_model(name):
    task, norms = TASKS[name]
    setup = Setup.of(task, "pp2tp2")
    state = init_state(setup)
    expected = arrays_of(plain(task.model))
    assert_equal(stored(setup, state), expected)
    in_checkpoint = {
        **by_layer(state.params, setup.storage),
        **by_layer(state.frozen, setup.storage),
    }
    assert [own for own in in_checkpoint if own.endswith("norm.scale")] == norms
    of_adam = by_layer(state.opt_state, setup.storage)
    trained = by_layer(state.params, setup.storage)
    assert {f"0/mu/{own}" for own in trained} <= {own.removeprefix("0/") for own in of_adam} | {
        *of_adam
    }
    shown = str(jaxpar.show(dataclasses.replace(state)))
    assert all(own in shown for own in norms) or (setup.storage.pools is not None)
    assert "embed.embedding" in shown
    assert "outer" not in shown
    table = dict(summarize(setup))
    assert "outer" not in table["each stage"]
    assert "embed" in table["each stage"]


@pytest.mark.parametrize("name", ["list", "stacked"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_users_own_model_comes_back(name, sharded):
    setup = Setup.of(Words(model=name, rate=0.5), "dp2pp2")
    state, own = init_state(setup), plain(name, rate=0.5)
    model = model_of(setup, state, sharded=sharded)
    assert type(model) is type(own)
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(own))
    assert_equal(arrays_of(model), arrays_of(own))
    devices = (
        model.blocks[1].norm.scale[...].devices()
        if name == "list"
        else model.head.kernel[...].devices()
    )
    assert len(devices) == (4 if sharded else 1)
    model.eval()
    own.eval()
    np.testing.assert_allclose(model(ARRAYS["x"]), own(ARRAYS["x"]), RTOL, 1e-6)
    nnx.update(own, nnx.state(model))  # trees of the two fit each other


def test_a_model_in_the_form_of_layers_comes_back_on_one_device():
    task = jaxpar.lm.LM(
        num_layers=2, hidden_size=8, embed_size=8, vocab_size=16, batch_size=4, seq_len=4
    )
    setup = Setup.of(task, "dp2pp2")
    state = init_state(setup)
    for sharded, count in ((False, 1), (True, 4)):
        model = model_of(setup, state, sharded=sharded)
        assert {len(a.devices()) for a in jax.tree.leaves(nnx.state(model))} == {count}


def test_a_frozen_block_stays_and_has_no_state():
    task = Words(freeze="blocks.1.")
    setup = Setup.of(task, "pp2")
    state, batch = init_state(setup), BATCH
    before = stored(setup, state)
    state, _ = make_train_step(setup)(state, batch)
    after = stored(setup, state)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("blocks.1.")}
    assert not any("blocks.1" in name for name in by_layer(state.opt_state, setup.storage))


def test_a_filter_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"matches no parameter of .*blocks\.0-3\.mlp\.0\.bias"):
        Setup.of(Words(freeze="layers"))


def test_a_dim_that_does_not_divide_has_the_users_name():
    @dataclasses.dataclass(frozen=True)
    class Split(Words):
        dims: ClassVar = {"blocks.*.mlp.0.bias": ("tensor",)}

    error = (
        r"parameter blocks\.0-3\.mlp\.0\.bias: dim 'tensor' has size 16, which does not split over"
    )
    with pytest.raises(ValueError, match=error):
        init_state(Setup.of(Split(), "tp3"))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("list", "dp1"),
        pytest.param("list", "pp2", marks=pytest.mark.more),
        pytest.param("stacked", "pp2", marks=pytest.mark.more),
    ],
)
def test_an_optimizer_by_path_does_as_in_plain_flax(name, mesh):
    task = InGroups(model=name)
    setup = Setup.of(task, mesh, jaxpar.TrainConfig(num_steps=2, clip_norm=0.0))
    state, step = init_state(setup), make_train_step(setup)
    graphdef, params, others = nnx.split(plain(name), nnx.Param, ...)
    optimizer = gpt.in_groups()
    opt_state = optimizer.init(params)

    def mean(params):
        sums = task.loss(nnx.merge(graphdef, params, others, copy=True), BATCH)
        return sums.loss / sums.weight

    for _ in range(2):
        state, _ = step(state, BATCH)
        updates, opt_state = optimizer.update(jax.grad(mean)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_equal(stored(setup, state), arrays_of(nnx.merge(graphdef, params, others)), 1e-4)


# ---- weights that come in ----


def save(what, path):
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, what)


def save_step(what, path):
    with orbax.CheckpointManager(path.parent) as manager:
        manager.save(int(path.name), args=orbax.args.StandardSave(what))


FORMS = {
    "state": lambda model, path: save(nnx.state(model), path),
    "split": lambda model, path: save(nnx.split(model, nnx.Param, ...)[1], path),
    "pure dict": lambda model, path: save(nnx.to_pure_dict(nnx.state(model)), path),
    "manager": lambda model, path: save_step(nnx.state(model, nnx.Param), path),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["list", "stacked"])
def test_what_plain_flax_has_saved_comes_in(name, form, tmp_path):
    trained = plain(name, seed=1, rate=0.5)
    FORMS[form](trained, tmp_path / "7")
    setup = Setup.of(Words(model=name, rate=0.5), "dp2pp2")
    weights = find_weights(setup, Start(str(tmp_path / "7")))
    assert (weights.new, weights.ignored) == ((), {})
    block = "blocks.norm.scale" if name == "stacked" else "blocks.0-3.norm.scale"
    assert ("taken", block, "4x8" if name == "stacked" else "8", "") in weights.to_rows()
    assert_equal(stored(setup, weights.state()), arrays_of(trained))


def flipped(content, rng):
    changed = bytearray(content)
    changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


DAMAGES = {
    "empty": lambda content, rng: b"",
    "no UTF-8": lambda content, rng: b"\xff\xfe{}",
    "no entries": lambda content, rng: b"{}",
    "nested": lambda content, rng: b"[" * 100_000,
    "cut": lambda content, rng: content[: rng.integers(len(content))],
    "a bit": flipped,
}


def read_or_refuse(folder):
    """The tensors of a checkpoint, or the error for them."""
    try:
        weights = open_files(folder)
        return {name: tensor.whole() for name, tensor in weights.tensors.items()}
    except (ValueError, OSError) as error:
        return str(error)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_a_checkpoint_of_orbax_is_told_or_changes_nothing(damage, tmp_path):
    whole, rng = tmp_path / "whole", np.random.default_rng(0)
    save(nnx.state(plain("list")), whole)
    expected = read_or_refuse(whole)
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    refused = set()
    for name in names:
        content = DAMAGES[damage]((whole / name).read_bytes(), rng)
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        (folder / name).write_bytes(content)
        found = read_or_refuse(folder)
        if isinstance(found, str):
            assert re.search(r"is damaged: .*\nFix: restore it from a backup", found), name
            assert str(folder) in found
            refused.add(name.name)
        else:
            assert found.keys() <= expected.keys()  # no hash guards the names of arrays
            assert_equal(found, {array: expected[array] for array in found})
        shutil.rmtree(folder)
    if damage != "a bit":
        assert {"_METADATA", "manifest.ocdbt"} <= refused


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("{}", "KeyError: 'tree_metadata'"),
        ('{"tree_metadata": null}', "AttributeError: .*"),
        ('{"tree_metadata": [3]}', "AttributeError: .*"),
        ('{"tree_metadata": {"a": 3}}', "TypeError: .*"),
        ('{"tree_metadata": {"a": {}}}', "KeyError: 'key_metadata'"),
        ("{", "it is not JSON, or nested too deeply, or no JSON object"),
        ("\x80", "it is not JSON, or nested too deeply, or no JSON object"),
    ],
)
def test_damaged_metadata_of_orbax_are_named(content, fact, tmp_path):
    (tmp_path / "_METADATA").write_text(content, encoding="latin1")
    setup = Setup.of(Words(model="list"), "dp1")
    message = rf"{tmp_path}/_METADATA is damaged: {fact}\nFix: restore it from a backup"
    with pytest.raises(ValueError, match=message):
        find_weights(setup, Start(str(tmp_path)))


@pytest.mark.parametrize("name", ["list", "stacked"])
def test_what_is_exported_comes_in_elsewhere(name, tmp_path):
    setup = Setup.of(Words(model=name, freeze="embed"), "pp2")
    state = setup.init_state(3)
    tensors = outgoing((state.params, state.frozen), setup.storage)
    write_weights(tmp_path / "w.safetensors", tensors, {})
    expected = arrays_of(plain(name, seed=3))
    assert_equal(safetensors.numpy.load_file(tmp_path / "w.safetensors"), expected)
    other = Setup.of(Words(model=name), "dp2pp4")
    weights = find_weights(other, Start(str(tmp_path / "w.safetensors")))
    assert_equal(stored(other, weights.state()), expected)


@pytest.mark.full
def test_what_a_run_has_stacked_comes_in_elsewhere(tmp_path):
    train = jaxpar.TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    result = jaxpar.fit(Words(model="stacked"), "dp1", train, quiet=True)
    setup = Setup.of(Words(model="stacked"), "pp2")
    weights = find_weights(setup, Start(result.out_dir))
    assert ("taken", "blocks.norm.scale", "4x8", "") in weights.to_rows()
    assert_equal(
        stored(setup, weights.state()), stored(Setup.of(Words(model="stacked")), result.state)
    )


# What is changed in a file of weights, how it begins a run, and the error or what is new.
def without(name):
    return lambda weights: {own: a for own, a in weights.items() if own != name}


WRONG = {
    "extra": (
        lambda w: {**w, "blocks.9.norm.scale": w["head.kernel"]},
        {},
        r"has blocks\.9\.norm\.scale, which the model lacks",
    ),
    "other size": (
        lambda w: {**w, "embed.embedding": w["embed.embedding"][:-1]},
        {},
        r"embed\.embedding is 15x8 there and 16x8 here",
    ),
    "missing": (without("blocks.2.norm.bias"), {}, ["blocks.2.norm.bias"]),
    "renamed": (
        lambda w: {n.replace("blocks.", "h_"): a for n, a in w.items()},
        {"rename": ((r"h_(\d+)\.(.*)", r"blocks.\1.\2"),), "ignore": (r"head\..*",)},
        ["head.kernel"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_weights_that_differ_are_named_as_their_user_does(case, tmp_path):
    change, options, expected = WRONG[case]
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(change(arrays_of(plain())), path)
    setup = Setup.of(Words())
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            find_weights(setup, Start(str(path), **options))
    else:
        assert list(find_weights(setup, Start(str(path), **options)).new) == expected


def test_stacked_weights_of_another_depth_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = arrays_of(plain("stacked"))
    safetensors.numpy.save_file({n: a[:3] if "blocks" in n else a for n, a in arrays.items()}, path)
    with pytest.raises(ValueError, match=r"blocks\.mlp\.0\.bias is 3x16 there and 4x16 here"):
        find_weights(Setup.of(Words(model="stacked")), Start(str(path)))


# ---- numbers that are not finite ----


def with_nan(setup, name, row=None):
    """The first state, with a number in a parameter that is not finite."""
    state = init_state(setup)

    def of(path, leaf):
        stored_name = jax.tree_util.keystr(path, simple=True, separator=".")
        if user_name(stored_name, leaf) != name:
            return leaf
        return leaf.replace(array_of(leaf).at[... if row is None else row].set(jnp.nan))

    is_leaf = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return dataclasses.replace(
        state, params=jax.tree.map_with_path(of, state.params, is_leaf=is_leaf)
    )


@pytest.mark.parametrize(
    ("model", "name", "row", "place"),
    [
        ("list", "embed.embedding", None, "the output of what comes before the blocks"),
        ("list", "blocks.0-3.norm.scale", 2, "the output of blocks.2"),
        ("stacked", "blocks.norm.scale", 2, "the output of blocks[2]"),
        ("list", "head.kernel", None, "the output of the loss"),
    ],
)
def test_the_place_that_is_not_finite_is_in_the_users_model(model, name, row, place):
    setup = Setup.of(Words(model=model), "dp1")
    state = with_nan(setup, name, row)
    assert find_origin(setup, state, BATCH).place == place
    with pytest.raises(
        FloatingPointError, match=f"parameter {name} is not finite".replace(".", r"\.")
    ):
        check_parameters(setup, state)


# ---- predictions ----


class Pair(gpt.GPT):
    """Returns two arrays."""

    def __call__(self, tokens):
        logits = super().__call__(tokens)
        return logits, logits.mean(-1)


@dataclasses.dataclass(frozen=True)
class Pairs(Words):
    def make_model(self, rngs):
        return Pair(rngs)

    def loss(self, model, batch):
        nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"])[0], batch["y"])
        return nll.sum(), nll.size


@dataclasses.dataclass(frozen=True)
class Methods(Words):
    """The model's call is not used."""

    def loss(self, model, batch):
        nll = model.head(model.run_blocks(model.embed(batch["x"]))).mean((1, 2))
        return nll.sum(), nll.size


@dataclasses.dataclass(frozen=True)
class Best(Pairs):
    def predict(self, model, batch):
        logits, means = model(batch["x"])
        return {"best": logits.argmax(-1), "mean": means}


@dataclasses.dataclass(frozen=True)
class Mean(Words):
    def predict(self, model, batch):
        return model(batch["x"]).mean()


PREDICTIONS = {
    "call": (Words(), {"output": (8, 4, 16)}),
    "by name": (Best(), {"best": (8, 4), "mean": (8, 4)}),
    "two arrays": (
        Pairs(),
        r"Pair contains a tuple.*\.\nFix: write predict\(self, model, batch\)",
    ),
    "not called": (
        Methods(),
        r"does not call the model GPT itself.*\nFix: write predict\(self, model, batch\)",
    ),
    "no rows": (Mean(), r"`predict` of GPT returns an array of shape \[\] as 'output'"),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_predictions_are_of_the_call_or_of_the_task(case):
    task, expected = PREDICTIONS[case]
    facts = Setup.of(task).facts
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            _ = facts.outputs
    else:
        assert {name: own.shape for name, own in facts.outputs.items()} == expected
