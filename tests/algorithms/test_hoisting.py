"""`hoisted_scan` is `lax.scan`, its weight gradients taken out of the loop: for cells of any kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api
from lib.cells import ROWS, B, W, layer_of
from lib.laws import on_devices

from jaxpar import LayerContext, nn
from jaxpar.analysis import inspect_function
from jaxpar.nn import Recurrent, hoisted_scan

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5
T = 6


def assert_close(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(actual - expected) <= RELATIVE_ERROR * np.linalg.norm(expected)


def slow(self, carry, x_TBW, at):
    """What `Recurrent` is equal to."""
    initial = self.initial_carry(x_TBW.shape[1])

    def step(carry, inputs):
        x_BW, is_new_B = inputs
        if is_new_B is not None:
            carry = jax.tree.map(lambda a, b: jnp.where(is_new_B[:, None], a, b), initial, carry)
        return self.cell(carry, x_BW)

    return lax.scan(step, carry, (x_TBW, at.resets))


def inputs_of(with_resets):
    rng = np.random.default_rng(0)
    resets = {"resets": jnp.asarray(rng.random((T, B)) < 0.3)} if with_resets else {}
    return jnp.asarray(rng.normal(size=(T, B, W)), jnp.float32), LayerContext(0, 0, 0, batch=resets)


def gradients(call, layer, with_resets=True):
    """A function of parameters and inputs: outputs and gradients."""
    graphdef, params = nnx.split(layer)
    x, at = inputs_of(with_resets)

    def run(params, x):
        def loss(params, x):
            layer = nnx.merge(graphdef, params)
            after, y = call(layer, layer.initial_carry(B), x, at)
            leaves = jax.tree.leaves((after, y))
            weights = [jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in leaves]
            total = sum(jnp.sum(a * w) for a, w in zip(leaves, weights, strict=True))
            return total, leaves

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    return run, (params, x)


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("name", ROWS)
def test_recurrent_equals_a_scan(name):
    layer = layer_of(name)
    with jax.numpy_rank_promotion("allow"):  # Flax adds its bias so
        run, arguments = gradients(Recurrent.__call__, layer)
        expected = jax.jit(gradients(slow, layer)[0])(*arguments)
        jax.tree.map(assert_close, jax.jit(run)(*arguments), expected)


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(
    "length", [16, 11]
)  # two turns of 8 steps; no turn of several, or one and three steps
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.SLSTM, "cell"])
def test_turns_of_several_steps_equal_single_steps(make, length):
    """As GPUs have them: outputs, the last state and all gradients, with sequences that begin within."""
    draw = np.random.default_rng(0)
    layer = layer_of("GRUCell") if make == "cell" else make(W, num_heads=2, rngs=nnx.Rngs(0))
    x = jnp.asarray(draw.normal(size=(length, B, W)), jnp.float32)
    resets = {"resets": jnp.asarray(draw.random((length, B)) < 0.3)}
    graphdef, params = nnx.split(layer)

    def run(platform):
        def loss(params, x):
            layer = nnx.merge(graphdef, params)
            at = api.context_on(platform, batch=resets)
            after, y = layer(layer.initial_carry(B), x, at)
            return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves((after, y))), (after, y)

        program = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(params, x)
        return program.as_text(), program.compile()(params, x)

    with jax.numpy_rank_promotion("allow"):
        (text, found), (single, expected) = run("gpu"), run("cpu")
    assert (text != single) == (length == 16 or make is nn.LSTM)
    jax.tree.map(assert_close, found, expected)


def test_products_of_blocks_are_products():
    """From either side, of inputs before the loop and of the state in it."""
    heads = ((2,), (1,)), ((1,), (0,))  # [B, N, D] [N, D, D] -> [N, B, D]

    def step(params, h, x):
        early = lax.dot_general(x.reshape(B, 2, -1), params["x"], heads)
        late = lax.dot_general(params["h"], h.reshape(B, 2, -1), (heads[0][::-1], heads[1][::-1]))
        h = jnp.tanh(early.swapaxes(0, 1) + late.transpose(2, 0, 1)).reshape(h.shape)
        return h, h

    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=(2, W // 2, W // 2)), jnp.float32) for name in "xh"}
    xs, h = jnp.asarray(draw(size=(T, B, W)), jnp.float32), jnp.ones((B, W))

    def loss(scan):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(scan(*args)[1])), (0, 1, 2)))

    expected = loss(lambda params, h, xs: lax.scan(functools.partial(step, params), h, xs))
    found = loss(functools.partial(hoisted_scan, step))(params, h, xs)
    jax.tree.map(assert_close, found, expected(params, h, xs))


def named_gru(rngs):
    metadata = {"out_sharding": ("input", "hidden"), "eager_sharding": False}
    bias = {"out_sharding": ("hidden",), "eager_sharding": False}
    return nnx.GRUCell(
        W, W, kernel_metadata=metadata, recurrent_kernel_metadata=metadata, bias_metadata=bias,
        rngs=rngs,
    )  # fmt: skip


def by_last_dim(mesh, array):
    """As the names of its dims ask for: the last one is "hidden"."""
    return NamedSharding(mesh, P(*[None] * (array.ndim - 1), "tensor"))


def products_that_communicate(call):
    """Collectives of matrix products inside the backward time loop: kinds and shapes."""
    mesh = on_devices((1, 1, 2)).build()
    layer = Recurrent(named_gru(nnx.Rngs(0)))
    with jax.numpy_rank_promotion("allow"):
        run, (params, x) = gradients(call, layer, with_resets=False)
        params = jax.tree.map(lambda a: jax.device_put(a, by_last_dim(mesh, a)), params)
        found = inspect_function(jax.jit(run), params, x).collectives
    return [
        (c.op, c.shapes)
        for c in found
        if c.trip_counts and c.phase == "backward" and c.op_name.endswith("dot_general")
    ]


def test_no_weight_gradient_is_communicated_in_the_loop():
    """Autodiff of a scan gathers a factor of every step's product."""
    of_state = [("all-reduce", ((B, W),))]
    assert products_that_communicate(Recurrent.__call__) == of_state
    assert products_that_communicate(slow) != of_state


def test_what_a_step_prints_is_printed(capsys):
    def step(w, h, x):
        jax.debug.print("largest {}", jnp.max(x))
        return h * w + x, h

    xs = jnp.arange(3.0)[:, None]
    jax.jit(jax.grad(lambda w: hoisted_scan(step, w, jnp.ones(1), xs)[0].sum()))(jnp.float32(0.5))
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.split()[1::2]) == ["0.0", "1.0", "2.0"]


def test_a_carry_that_changes_its_kind_is_refused():
    with pytest.raises(ValueError, match=r"a step returns is bfloat16\[3, 8\], .* float32\[3, 8\]"):
        hoisted_scan(
            lambda _, h, x: (h.astype(jnp.bfloat16), x), (), jnp.zeros((B, W)), jnp.ones((T, B, W))
        )
    with pytest.raises(ValueError, match=r"output of a step is int32\[3\]\nFix: make it floating"):
        hoisted_scan(
            lambda _, h, x: (h, jnp.zeros(3, jnp.int32)), (), jnp.zeros((B, W)), jnp.ones((T, B, W))
        )
