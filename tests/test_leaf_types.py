"""The law: what can be trained can be saved, restored and resumed, whatever the types of its arrays are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api

import jaxpar
from jaxpar import (
    ArrayBatches,
    MeshConfig,
    Parallel,
    Stack,
    Start,
    Sums,
    Task,
    TrainConfig,
    init_state,
    load_run,
    make_train_step,
)

W = 4
NUMBERS = (
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "int4",
    "uint8",
    "bool",
)
LEAVES = {
    "key": lambda: jax.random.key(5),
    "keys": lambda: jax.random.split(jax.random.key(6), 3),
    "rbg": lambda: jax.random.key(7, impl="rbg"),
    "old": lambda: jax.random.PRNGKey(8),
    "empty": lambda: jnp.zeros((0, 3)),
    "no keys": lambda: jax.random.split(jax.random.key(6), 0),
    "none": lambda: None,
    "python": lambda: 3,
    "a/b.c": lambda: jnp.ones(()),
    **{name: lambda name=name: jnp.ones((2, 3), name) for name in NUMBERS},
}


def keeps_all():
    """An optimizer that keeps an array of each type, and changes all; its updates depend on a random key."""

    def init(params):
        return {name: make() for name, make in LEAVES.items()}

    def change(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return (
                jax.random.fold_in(leaf, 1)
                if not leaf.ndim
                else jax.vmap(jax.random.fold_in, (0, None))(leaf, 1)
            )
        return ~leaf if leaf.dtype == bool else leaf + jnp.ones((), leaf.dtype)

    def update(updates, state, params=None):
        scale = 1 + 0.1 * jax.random.normal(state["key"], ())
        return jax.tree.map(lambda u: u * scale, updates), jax.tree.map(change, state)

    return optax.GradientTransformation(init, update)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(W, W, rngs=rngs)
        self.empty = nnx.Param(jnp.zeros((0, W)))
        self.narrow = nnx.Variable(jnp.full(3, 0.5, "float8_e4m3fn"))

    def __call__(self, carry, x, at):
        return carry, x + self.linear(x)


class Net(nnx.Module):
    time_major = False

    def __init__(self, rngs):
        self.embed, self.out = nnx.Linear(W, W, rngs=rngs), nnx.Linear(W, W, rngs=rngs)
        self.empty = nnx.Param(jnp.zeros((W, 0)))
        self.key = nnx.Variable(jax.random.key(9))
        self.narrow = nnx.Variable(jnp.full(3, 0.5, "float8_e5m2"))
        self.layers = Stack([Layer] * 4, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        return Sums(jnp.sum(self.out(y) ** 2 * batch["weight"][:, None]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class All(Task):
    def make_model(self, rngs):
        return Net(rngs)

    def make_optimizer(self, num_steps):
        return optax.chain(optax.sgd(0.005), keeps_all())

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).normal(size=(32, W)).astype(np.float32)
        return ArrayBatches({"x": x}, 8, seed)


ONE = Parallel(MeshConfig())
MESHES = {
    "dp1": ONE,
    "dp2": Parallel(MeshConfig(data=2)),
    "pp2": Parallel(MeshConfig(stage=2)),
    "fsdp": Parallel(MeshConfig(data=2), fsdp=True),
}


def numbers(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [("dp1", "dp1"), ("dp1", "pp2"), ("pp2", "fsdp"), ("fsdp", "dp2")],
)
def test_every_type_is_saved_and_restored(before, after, tmp_path):
    task, one, other = All(), MESHES[before], MESHES[after]
    batch = task.make_batches("train", 0).batch(0)
    state, _ = make_train_step(task, one)(init_state(task, one), batch)
    api.save(tmp_path, task, one, state)
    restored = api.restored(tmp_path, task, other)
    for part in ("opt_state", "frozen"):
        found, expected, target = (
            jax.tree.leaves_with_path(getattr(each, part))
            for each in (restored, state, api.abstract_state(task, other))
        )
        assert [path for path, _ in found] == [path for path, _ in target]
        for (path, leaf), (_, was), (_, wanted) in zip(found, expected, target, strict=True):
            assert (leaf.dtype, leaf.shape) == (wanted.dtype, wanted.shape)
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
            if "layers" not in jax.tree_util.keystr(path):  # which are in other places
                np.testing.assert_array_equal(numbers(leaf), numbers(was), str(path))
    make_train_step(task, other)(restored, batch)


def test_a_step_that_is_computed_again_has_arrays_without_elements():
    task, batch = All(), All().make_batches("train", 0).batch(0)
    batch["x"][5, 0] = np.inf
    assert api.origin(task, ONE, init_state(task, ONE), batch) == (
        "the output of first",
        (5,),
        None,
    )


@pytest.mark.more
@pytest.mark.parametrize("mesh", ["dp1", "pp2"])
def test_a_resumed_run_has_the_losses_that_it_would_have_had(mesh, tmp_path):
    def fit(name, steps, mesh, **options):
        train = TrainConfig(num_steps=steps, log_every=1, out_dir=str(tmp_path / name))
        return jaxpar.fit(All(), mesh, train, quiet=True, **options).losses

    whole = fit("whole", 4, "dp1")
    parts = fit("parts", 2, "dp1") + fit("parts", 4, mesh, resume=True)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert len({*whole}) == 4
    with pytest.raises(ValueError, match="float8_e4m3fn, which safetensors files cannot hold"):
        load_run(tmp_path / "parts").export(tmp_path / "model.safetensors")
    train = TrainConfig(num_steps=1, out_dir=str(tmp_path / "begun"))
    start = Start(str(tmp_path / "parts"))
    losses = jaxpar.fit(All(), mesh, train, start=start, quiet=True).losses
    assert losses[0] < whole[1]  # it goes on with weights that are trained


@dataclasses.dataclass(frozen=True)
class Keeps(All):
    """Its optimizer keeps arrays by these names."""

    what: str = ""

    def make_optimizer(self, num_steps):
        kept = REFUSED[self.what][0]()
        keep = optax.GradientTransformation(
            lambda _: kept, lambda updates, state, _=None: (updates, state)
        )
        return optax.chain(keep, optax.sgd(0.1))


REFUSED = {
    "uint4": (
        lambda: {"x": jnp.ones(3, "uint4")},
        r"opt_state/0/x is uint4\[3\], and checkpoints cannot hold uint4",
    ),
    "slash": (
        lambda: {"a/b": jnp.ones(3), "a": {"b": jnp.ones(2)}},
        "two arrays are called opt_state/0/a/b",
    ),
    "dot": (
        lambda: {"a.b": jnp.ones(3), "a": {"b": jnp.ones(2)}},
        r"a\.b and opt_state/0/a/b apart",
    ),
    "inside": (
        lambda: {"a/b": jnp.ones(3), "a": jnp.ones(2)},
        "opt_state/0/a and opt_state/0/a/b apart",
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(what, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=REFUSED[what][1]) as raised:
        jaxpar.fit(Keeps(what=what), "dp1", TrainConfig(out_dir=str(folder)), quiet=True)
    assert not folder.exists()
    assert len(str(raised.value).split()) <= 40


class HoldsKey(Layer):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.key = nnx.Variable(jax.random.key(9))


def test_a_key_in_a_layer_is_refused():
    with pytest.raises(
        ValueError, match="layer HoldsKey has key, a random key, the same in every step"
    ):
        nnx.eval_shape(lambda: Stack([HoldsKey], rngs=nnx.Rngs(0)))


def test_the_state_of_each_type_can_be_stored():
    stored = api.stored(All(), ONE, init_state(All(), ONE))
    assert {str(leaf.dtype) for leaf in stored.values()} >= {*NUMBERS, "uint32", "int32"}
    assert not [name for name in stored if "empty" in name or "no keys" in name]
