"""Settings of JAX that change random numbers: the mesh changes nothing under any, and a run keeps its own."""

import ast
import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.models import Regress

import jaxpar
from jaxpar import (
    MeshConfig,
    Parallel,
    PipelineConfig,
    Stack,
    TrainConfig,
    init_state,
    make_train_step,
    nn,
)

PACKAGE = Path(jaxpar.__file__).parent
SETTINGS = {  # by which a model's own random numbers must not depend on the mesh
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "not partitionable": lambda: jax.threefry_partitionable(False),
}


def losses(task, mesh):
    state, step, found = init_state(task, mesh), make_train_step(task, mesh), []
    batches = task.make_batches("train", 0)
    for number in range(3):
        state, metrics = step(state, batches.batch(number))
        found.append(float(metrics.loss))
    return found


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("rbg", "dp2"),
        ("not partitionable", "pp2"),
        pytest.param("rbg", "pp2", marks=pytest.mark.more),
        pytest.param("not partitionable", "dp2", marks=pytest.mark.more),
    ],
)
def test_random_numbers_do_not_depend_on_the_mesh(name, mesh):
    own = Regress(("gru", "gru"))  # with dropout
    with SETTINGS[name]():
        expected = losses(own, "dp1")
        np.testing.assert_allclose(losses(own, mesh), expected, rtol=1e-5)
    # Keys of jaxpar have one implementation, whatever the default is.
    assert (losses(own, "dp1") == expected) is (name == "rbg")


class OwnKeys(nnx.Module):
    """Its weights are drawn from keys of its own, not from those that it is given."""

    def __init__(self, rngs):
        del rngs
        rngs = nnx.Rngs(3)
        self.embed, self.out = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        make = lambda rngs: nn.Stateless(nnx.Linear(8, 8, rngs=rngs))  # noqa: E731
        self.layers = Stack([make] * 3, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        return jaxpar.Sums(((self.out(y) - batch["x"]) ** 2).sum(), batch["weight"].sum())


@dataclasses.dataclass(frozen=True)
class WithOwnKeys(Regress):
    def make_model(self, rngs) -> Any:
        return OwnKeys(rngs)


@pytest.mark.full
def test_layers_of_other_keys_are_the_same_on_any_mesh():
    def layers(mesh):
        arrays = api.params_of(WithOwnKeys(), mesh, init_state(WithOwnKeys(), mesh))
        return {name: array for name, array in arrays.items() if name.startswith("layers")}

    with jax.default_prng_impl("rbg"):
        uneven = Parallel(MeshConfig(stage=2), PipelineConfig(placement=(1, 2)))
        expected, found = layers("dp1"), layers(uneven)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    drawn = [expected[f"layers.{number}.module.kernel"].ravel() for number in range(3)]
    assert len(np.unique(drawn, axis=0)) == 3  # no two layers are equal


def test_no_key_is_of_the_default_implementation():
    """Outside of `base/keys.py` nothing makes a key."""
    makers = {"key", "PRNGKey", "wrap_key_data"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in makers
        and ast.unparse(node.value) in ("jax.random", "random")
    ]
    assert {place.partition(":")[0] for place in found} == {"base/keys.py"}


# ---- a run keeps its settings ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    jaxpar.fit(Regress(("gru",)), "dp1", TrainConfig(num_steps=2, out_dir=str(folder)), quiet=True)
    return folder


@pytest.mark.full
def test_a_run_goes_on_under_its_own_settings_alone(run):
    train = TrainConfig(num_steps=3, out_dir=str(run))
    before = jax.config.jax_random_seed_offset  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_random_seed_offset", 5)
    try:
        with pytest.raises(ValueError, match="jax_random_seed_offset is 5, but was 0 when the run"):
            jaxpar.fit(Regress(("gru",)), "dp1", train, quiet=True, resume=True)
    finally:
        jax.config.update("jax_random_seed_offset", before)


def resume(run, tmp_path, changes):
    """Goes on with a copy of the run, of whose program its folder says something else."""
    folder = shutil.copytree(run, tmp_path / "run")
    record = json.loads((folder / "data.json").read_text())
    program = {**record["program"], **changes}
    record["program"] = {name: value for name, value in program.items() if value is not None}
    (folder / "data.json").write_text(json.dumps(record))
    train = TrainConfig(num_steps=2, out_dir=str(folder))
    jaxpar.fit(Regress(("gru",)), "dp1", train, quiet=True, resume=True)


# By which the same seed gives other numbers; those that this version of JAX has.
OF_NUMBERS = [
    name
    for name in (
        "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl",
        "jax_random_seed_offset", "jax_high_dynamic_range_gumbel", "jax_accurate_erf_inv",
    )
    if hasattr(jax.config, name)
]  # fmt: skip


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_other_numbers_are_refused(run, name, tmp_path):
    now = getattr(jax.config, name)
    message = f"{name} is {now}, but was other when .*\nFix: set {name.upper()}=other"
    with pytest.raises(ValueError, match=message) as raised:
        resume(run, tmp_path, {name: "other"})
    assert len(str(raised.value).split()) <= 40


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *(
            ({name: "9.9"}, f"{name} was 9.9, is ")
            for name in ("jaxpar", "jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint")
        ),
        ({"jax_default_matmul_precision": "highest"}, "precision was highest, is None"),
        ({"XLA_FLAGS xla_a": "1"}, "XLA_FLAGS xla_a was 1, is not set"),
        ({"jax_new_in_another_version": "True"}, ""),
        ({"jax_default_matmul_precision": None}, ""),
        ({}, ""),
    ],
)
def test_another_program_is_told(run, changes, told, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        resume(run, tmp_path, changes)
    messages = [text for text in caplog.messages if text.startswith("the program of the run in ")]
    assert len(messages) == bool(told)
    assert re.search(told, "".join(messages))


DEBUGGING = {
    "jax_disable_jit is on": jax.disable_jit,
    "jax_check_tracer_leaks is on": jax.checking_leaks,
    "jax_transfer_guard_host_to_device='disallow'": lambda: jax.transfer_guard("disallow"),
    "jax_transfer_guard_device_to_host='disallow_explicit'": (
        lambda: jax.transfer_guard_device_to_host("disallow_explicit")
    ),
}


@pytest.mark.parametrize("fact", DEBUGGING)
def test_settings_for_debugging_that_forbid_a_run_are_named(fact, tmp_path):
    train = TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    with DEBUGGING[fact](), pytest.raises(ValueError, match=f"^{re.escape(fact)}, but .*\nFix: "):
        jaxpar.fit(Regress(("dense",), batch_size=4), "dp1", train, quiet=True)
    assert not (tmp_path / "run").exists()


def test_transfers_that_are_allowed_or_logged_are_no_error():
    for level in ("allow", "log"):
        with jax.transfer_guard(level):
            init_state(Regress(("gru",)), "dp1")
