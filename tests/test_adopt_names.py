"""Parameters of a Flax model that jaxpar adopts have the names of its user, and it comes back as it was."""

import dataclasses
import re
import shutil
from typing import ClassVar

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from lib import api, gpt
from lib.gpt import ARRAYS, InGroups, Words, arrays_of, plain
from orbax import checkpoint as orbax

import jaxpar
from jaxpar import Parallel, Start, init_state, make_predict_step, make_train_step

BATCH = Words().make_batches("train", 0).batch(0)
RTOL = 1e-5


@pytest.fixture(autouse=True)
def models_of_users_convert_and_broadcast():
    """As JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def found_rows(kind, rows):
    """The names in rows of a kind, such as "taken", of the table that says what is taken."""
    return [name for what, name, *_ in rows if what == kind]


def assert_equal(found, expected, rtol=RTOL):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol, 1e-7, err_msg=name)


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
    parallel = Parallel("pp2tp2")
    state = init_state(task, parallel)
    assert_equal(api.params_of(task, parallel, state), arrays_of(plain(task.model)))
    in_checkpoint = {*api.stored(task, parallel, state)}
    parts = [own.split("/", 1) for own in in_checkpoint]
    variables = sorted(
        own for part, *names in parts for own in names if part in ("params", "frozen")
    )
    assert [own for own in variables if own.endswith("norm.scale")] == norms
    trained = [own for part, *names in parts for own in names if part == "params"]
    assert {f"opt_state/0/mu/{own}" for own in trained} <= in_checkpoint
    shown = str(jaxpar.show(state))
    assert all(own in shown for own in norms) or name == "pools"
    assert "embed.embedding" in shown
    assert "outer" not in shown
    table = api.summary(task, parallel)
    assert "outer" not in table["each stage"]
    assert "embed" in table["each stage"]


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize("name", ["list", "stacked"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_users_own_model_comes_back(name, sharded):
    task, parallel = Words(model=name, rate=0.5), Parallel("dp2pp2")
    state, own = init_state(task, parallel), plain(name, rate=0.5)
    model = api.model(task, parallel, state, sharded=sharded)
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
    parallel = Parallel("dp2pp2")
    state = init_state(task, parallel)
    for sharded, count in ((False, 1), (True, 4)):
        model = api.model(task, parallel, state, sharded=sharded)
        assert {len(a.devices()) for a in jax.tree.leaves(nnx.state(model))} == {count}


def test_a_frozen_block_stays_and_has_no_state():
    task = Words(freeze="blocks.1.")
    parallel = Parallel("pp2")
    state = init_state(task, parallel)
    before = api.params_of(task, parallel, state)
    state, _ = make_train_step(task, parallel)(state, BATCH)
    after = api.params_of(task, parallel, state)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("blocks.1.")}
    in_checkpoint = api.stored(task, parallel, state)
    assert [name for name in in_checkpoint if "blocks.1" in name and "opt_state" in name] == []


def test_a_filter_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"matches no parameter of .*blocks\.0-3\.mlp\.0\.bias"):
        init_state(Words(freeze="layers"))


def test_a_dim_that_does_not_divide_has_the_users_name():
    @dataclasses.dataclass(frozen=True)
    class Split(Words):
        dims: ClassVar = {"blocks.*.mlp.0.bias": ("tensor",)}

    error = (
        r"parameter blocks\.0-3\.mlp\.0\.bias: dim 'tensor' has size 16, which does not split over"
    )
    with pytest.raises(ValueError, match=error):
        init_state(Split(), "tp3")


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
    train = jaxpar.TrainConfig(num_steps=2, clip_norm=0.0)
    found = api.updates(task, Parallel(mesh), train, [BATCH] * 2)
    graphdef, params, others = nnx.split(plain(name), nnx.Param, ...)
    optimizer = gpt.in_groups()
    opt_state = optimizer.init(params)

    def mean(params):
        sums = task.loss(nnx.merge(graphdef, params, others, copy=True), BATCH)
        return sums.loss / sums.weight

    for _ in range(2):
        updates, opt_state = optimizer.update(jax.grad(mean)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_equal(found.trained, arrays_of(nnx.merge(graphdef, params, others)), 1e-4)


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
    task, parallel = Words(model=name, rate=0.5), Parallel("dp2pp2")
    state, rows = api.begin_with(task, parallel, Start(str(tmp_path / "7")))
    assert {what for what, *_ in rows} == {"taken"}
    block = "blocks.norm.scale" if name == "stacked" else "blocks.0-3.norm.scale"
    assert ("taken", block, "4x8" if name == "stacked" else "8", "") in rows
    assert_equal(api.params_of(task, parallel, state), arrays_of(trained))


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
        return api.tensors_in(folder)
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
    message = rf"{tmp_path}/_METADATA is damaged: {fact}\nFix: restore it from a backup"
    with pytest.raises(ValueError, match=message):
        api.begin_with(Words(), Parallel("dp1"), Start(str(tmp_path)))


@pytest.mark.parametrize("name", ["list", "stacked"])
def test_what_is_exported_comes_in_elsewhere(name, tmp_path):
    task, parallel = Words(model=name, freeze="embed"), Parallel("pp2")
    state = init_state(task, parallel, jaxpar.TrainConfig(seed=3))
    api.export(tmp_path / "w.safetensors", task, parallel, state)
    expected = arrays_of(plain(name, seed=3))
    assert_equal(safetensors.numpy.load_file(tmp_path / "w.safetensors"), expected)
    other, parallel = Words(model=name), Parallel("dp2pp4")
    state, _ = api.begin_with(other, parallel, Start(str(tmp_path / "w.safetensors")))
    assert_equal(api.params_of(other, parallel, state), expected)


@pytest.mark.full
def test_what_a_run_has_stacked_comes_in_elsewhere(tmp_path):
    train = jaxpar.TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    task, one, other = Words(model="stacked"), Parallel("dp1"), Parallel("pp2")
    result = jaxpar.fit(task, one, train, quiet=True)
    state, rows = api.begin_with(task, other, Start(result.out_dir))
    assert ("taken", "blocks.norm.scale", "4x8", "") in rows
    trained = api.params_of(task, one, result.state)
    assert_equal(api.params_of(task, other, state), trained)


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
    start, parallel = Start(str(path), **options), Parallel("dp1")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            api.begin_with(Words(), parallel, start)
    else:
        _, rows = api.begin_with(Words(), parallel, start)
        assert found_rows("new", rows) == expected


def test_stacked_weights_of_another_depth_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = arrays_of(plain("stacked"))
    safetensors.numpy.save_file({n: a[:3] if "blocks" in n else a for n, a in arrays.items()}, path)
    with pytest.raises(ValueError, match=r"blocks\.mlp\.0\.bias is 3x16 there and 4x16 here"):
        api.begin_with(Words(model="stacked"), Parallel("dp1"), Start(str(path)))


# ---- numbers that are not finite ----


@pytest.mark.parametrize(
    ("model", "name", "row", "place"),
    [
        ("list", "embed.embedding", None, "the output of what comes before the blocks"),
        ("list", "blocks.0-3.norm.scale", 2, "the output of blocks.2"),
        ("stacked", "blocks.norm.scale", 2, "the output of blocks[2]"),
        ("list", "head.kernel", None, "the output of the loss"),
    ],
)
def test_the_place_that_is_not_finite_is_in_the_users_model(model, name, row, place, tmp_path):
    task, parallel, stored_name = Words(model=model), Parallel("dp1"), f"params/{name}"
    state = init_state(task, parallel)
    array = api.stored(task, parallel, state)[stored_name].copy()
    array[... if row is None else row] = np.nan
    state = api.with_arrays(task, parallel, state, {stored_name: array})
    assert api.origin(task, parallel, state, BATCH)[0] == place
    message = f"parameter {name} is not finite".replace(".", r"\.")
    with pytest.raises(FloatingPointError, match=message):
        api.save(tmp_path, task, parallel, state)


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
    parallel = Parallel("dp1")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            make_predict_step(task, parallel)
    else:
        outputs, _ = api.predictions(task, parallel, BATCH)
        assert {name: own.shape for name, own in outputs.items()} == expected
