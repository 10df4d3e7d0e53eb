"""Loops that begin with constants, in any part of a model: on every mesh as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from lib.any_model import assert_same
from lib.laws import more, on_devices
from lib.models import SGD

import jaxpar
from jaxpar import (
    MeshConfig,
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    init_state,
    value_and_grad,
)

WIDTH, WORDS, STEPS = 8, 64, 6


def decayed(x, start=None):
    """A moving sum along the first dim."""
    start = jnp.zeros(x.shape[1:]) if start is None else start
    return lax.scan(lambda c, a: (0.9 * c + a, c), start, x)[1]


def counted(x):
    """Numbers of a loop that has no gradient, times x."""

    def more(state):
        n, total = state
        return n + 1, total + jnp.sin(lax.stop_gradient(x).mean(-1, keepdims=True)) * total + 1

    start = 0, jnp.zeros((*x.shape[:-1], 1))
    return x * lax.stop_gradient(lax.while_loop(lambda state: state[0] < 3, more, start)[1])


def doubled(x):
    return lax.fori_loop(0, 3, lambda n, total: total + jnp.tanh(x - total), jnp.zeros(x.shape))


@jax.custom_vjp
def own_backward(x, size):
    return decayed(x), size


def _backward(size, d_outs):
    return jnp.flip(decayed(jnp.flip(d_outs[0], 0)), 0) * size.astype(jnp.float32), None


own_backward.defvjp(lambda x, size: (own_backward(x, size), size), _backward)


@jax.custom_jvp
def own_derivative(x, size):
    return decayed(x), size


@own_derivative.defjvp
def _derivative(args, tangents):
    return own_derivative(*args), (decayed(tangents[0]) * args[1].astype(jnp.float32), tangents[1])


def poisson(x, at):
    def sample(key, shape):
        return jax.random.poisson(key, 3.0, shape)

    return x if at.key is None else x * at.draw(sample, x.shape).astype(x.dtype) / 3


# What a layer computes of x [T, B, W] and `at`.
COMPUTE = {
    "scan": lambda x, at: decayed(x),
    "while_loop": lambda x, at: counted(x),
    "fori_loop": lambda x, at: doubled(x),
    "cond": lambda x, at: lax.cond(at.layer % 2 == 0, lambda: x, lambda: jnp.ones(x.shape)),
    "checkpoint": lambda x, at: jax.checkpoint(decayed)(x),
    "jit": lambda x, at: jax.jit(decayed)(x),
    "custom_vjp": lambda x, at: own_backward(jnp.sin(x), jnp.int32(2))[0],
    "custom_jvp": lambda x, at: own_derivative(jnp.sin(x), jnp.int32(2))[0],
    "relu": lambda x, at: jax.nn.silu(jax.nn.relu(decayed(x)) - 0.1),
    "draw": poisson,
    "gelu": lambda x, at: jax.nn.gelu(x, approximate=False),
    "erf": lambda x, at: lax.map(lambda a: lax.erf(a) - lax.erfc(a), decayed(x)),
    "zeros_like": lambda x, at: decayed(x, jnp.zeros_like(x[0])),
    "of a sum": lambda x, at: decayed(x - lax.psum(jnp.sum(x, 0), "context")[None]),
    "gelu of all": lambda x, at: jax.nn.gelu(
        x + lax.all_gather(x, "context", tiled=True).mean(0, keepdims=True), approximate=False
    ),
    "of all": lambda x, at: decayed(lax.all_gather(x, "context", tiled=True))[: len(x)],
}


class Mixed(nnx.Module):
    def __init__(self, name, *, rngs):
        self.name, self.w = name, nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        if name == "RNN":
            self.rnn = RNN(rngs)

    def __call__(self, carry, x, at):
        y = self.w(x)
        y = self.rnn(y) if self.name == "RNN" else COMPUTE[self.name](y, at)
        return carry, x + jnp.tanh(y)


class RNN(nnx.Module):
    def __init__(self, rngs):
        self.loop = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), time_major=True, rngs=False)

    def __call__(self, x):
        return self.loop(x, rngs=nnx.Rngs(0))


class Words(nnx.Module):
    def __init__(self, kinds, rngs):
        inner, self.kinds = [name for name in kinds if name not in ("first", "last")], kinds
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        makers = [lambda rngs, name=name: Mixed(name, rngs=rngs) for name in inner]
        self.layers = Stack(makers, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)
        if "first" in kinds:
            self.rnn = RNN(rngs)

    def first(self, batch, at):
        x = self.embed(batch["x"])
        return self.rnn(x) if "first" in self.kinds else x

    def last(self, y, batch, at):
        logits, labels = self.head(y), batch["y"]
        if "last" not in self.kinds:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return Sums(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"]))
        logits, labels = jnp.swapaxes(logits, 0, 1), 1 + labels[:2].T % (WORDS - 1)
        real = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
        losses = optax.ctc_loss(logits, real[0], labels, real[1])
        weights = jnp.mean(batch["weight"], 0)  # of each row
        return Sums(jnp.sum(losses * weights), jnp.sum(weights))


@dataclasses.dataclass(frozen=True)
class Constants(jaxpar.Task):
    """
    Attributes:
      kinds: what begins with constants: layers, and "first" and "last".
    """

    kinds: tuple[str, ...] = ("scan",) * 2
    batch_size: int = 8
    optimizer = SGD

    def make_model(self, rngs):
        return Words(self.kinds, rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).integers(0, WORDS, 300).astype(np.int32)
        return SeriesBatches({"x": x[:-1], "y": x[1:]}, self.batch_size, STEPS, seed)


DP, PP, ALL = (2, 1, 1), (1, 2, 1), (2, 2, 2)


@pytest.mark.rows(2, "full")
@pytest.mark.parametrize(
    ("kinds", "mesh", "options"),
    [
        (("scan", "while_loop", "cond", "RNN"), DP, {}),
        (("scan", "while_loop", "cond", "RNN"), PP, {}),
        (("fori_loop", "custom_vjp", "custom_jvp", "checkpoint"), DP, {}),
        (("fori_loop", "custom_vjp", "custom_jvp", "checkpoint"), PP, {}),
        (("first", "jit", "relu", "draw", "jit", "last"), DP, {}),
        (("first", "jit", "relu", "draw", "jit", "last"), PP, {"head": "sharded"}),
        (("custom_vjp", "scan"), PP, {"zero_bubble": True}),
        (("RNN", "RNN"), PP, {"remat": True}),
        more(("first", "RNN", "custom_vjp", "last"), ALL, {"zero_bubble": True}),
        more(("first", "RNN", "custom_jvp", "last"), ALL, {"remat": True}),
        more(("RNN",) * 4, ALL, {"zero_bubble": True, "schedule": "v"}),
        (("gelu",) * 6, DP, {}),  # in a loop over layers
        (("gelu", "erf", "gelu", "RNN"), PP, {"zero_bubble": True}),
        (("gelu", "erf", "RNN", "erf"), ALL, {"remat": True}),
    ],
)
def test_loops_may_begin_with_constants(kinds, mesh, options):
    units = PipelineConfig(num_microbatches=2, **options)
    assert_same(Constants(kinds), Parallel(on_devices(mesh), units))


def lowered(task, parallel):
    batch = task.make_batches("train", 0).batch(0)
    return value_and_grad(task, parallel).lower(init_state(task, parallel), batch)


@pytest.mark.parametrize("mesh", [DP, more(PP)])
def test_they_cost_what_loops_that_begin_with_zeros_like_do(mesh):
    def costs(name):
        task, parallel = Constants((name,) * 2), Parallel(on_devices(mesh))
        program = lowered(task, parallel).compile()
        return [program.cost_analysis()[of] for of in ("flops", "bytes accessed")]

    assert costs("scan") == pytest.approx(costs("zeros_like"), rel=1e-3)


@dataclasses.dataclass(frozen=True)
class OwnAxis(Constants):
    axes = ("context",)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"time": "context"})


@pytest.mark.parametrize("name", ["of a sum", "of all"])
def test_a_layer_with_collectives_is_refused(name):
    parallel = Parallel(MeshConfig(axes=(("context", 2),), devices=(0, 1)))
    with pytest.raises(
        ValueError,
        match=r"^layer mixed has a loop or a branch .*\nFix: .*jnp\.zeros_like\(x\[0\]\)",
    ):
        lowered(OwnAxis((name,) * 2), parallel)


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize(("mesh", "num_layers"), [(DP, 6), (PP, 2)])
def test_derivatives_that_are_cast_go_with_collectives(mesh, num_layers):
    sizes = MeshConfig(*mesh, axes=(("context", 2),), devices=tuple(range(4)))
    assert_same(OwnAxis(("gelu of all",) * num_layers), Parallel(sizes))


@pytest.mark.full
def test_a_run_takes_them(tmp_path):
    """Its checks before the first step, too."""
    train = jaxpar.TrainConfig(num_steps=2, log_every=1, out_dir=str(tmp_path / "run"))
    one, many = (
        jaxpar.fit(Constants(("scan", "RNN", "last")), mesh, train, overwrite=True).history[
            "train/loss"
        ]
        for mesh in ("dp1", "dp2pp2")
    )
    assert many == pytest.approx(one, rel=1e-5)
