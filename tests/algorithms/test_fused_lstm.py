"""The LSTM kernels for GPUs like H100: in interpret mode on a CPU, and their plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from lib import api
from lib.programs import equations_in

from jaxpar.nn import LSTM, GateParams, LSTMCarry, fused_lstm, lstm_layer
from jaxpar.nn.fused_lstm import Plan

pytestmark = [
    pytest.mark.law,
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernels need JAX 0.12"),
]


@pytest.fixture
def interpreted(monkeypatch):
    """Interpret mode has no counters in memory: a barrier of a cluster of all blocks stands for each."""
    counters, mesh, run_scoped = [], plgpu.Mesh, pl.run_scoped

    def in_cluster(grid, grid_names, num_threads, thread_name):
        arrivals.append(num_threads - 1)
        return mesh(
            cluster=grid, cluster_names=grid_names, num_threads=num_threads, thread_name=thread_name
        )

    def with_counters(body, *types, collective_axes=(), **scratch):
        if "full" not in scratch:
            return run_scoped(body, *types, collective_axes=collective_axes, **scratch)

        def run(*refs, counter0, counter1, **own):
            counters[:] = counter0, counter1
            return body(*refs, **own)

        barrier = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=arrivals[-1])
        more = {"counter0": barrier, "counter1": barrier}
        return run_scoped(run, *types, collective_axes=collective_axes, **scratch, **more)

    arrivals = []
    monkeypatch.setattr(plgpu, "Mesh", in_cluster)
    monkeypatch.setattr(pl, "run_scoped", with_counters)
    monkeypatch.setattr(pl, "get_global", lambda kind: counters.pop(0))
    monkeypatch.setattr(fused_lstm, "_signal", plgpu.barrier_arrive)
    monkeypatch.setattr(fused_lstm, "_wait_for", lambda barrier, count: plgpu.barrier_wait(barrier))
    with plgpu.force_gpu_interpret_mode():
        yield


@pytest.mark.parametrize(
    ("resets", "is_learned", "sizes", "most"),
    [
        (False, False, (3, 64, 64), 256),
        (True, True, (4, 5, 60), 256),
        (True, False, (3, 70, 64), 256),
        (True, True, (3, 70, 64), 128),
    ],
    ids=[
        "plain",
        "resets to a learned state, padded",
        "resets, two groups of rows",
        "rows of two kernels",
    ],
)
def test_the_kernels_equal_the_loop(interpreted, resets, is_learned, sizes, most, monkeypatch):
    """Outputs, the state after, and all gradients, in float32."""
    monkeypatch.setattr(fused_lstm, "MAX_ROWS", most)
    T, B, H = sizes
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    params = GateParams(draw(8, 4, H) / 3, draw(H, 4, H) / H**0.5, draw(4, H))
    carry, x, d = LSTMCarry(draw(B, H), draw(B, H)), draw(T, B, 8), draw(T, B, H)
    new = LSTMCarry(draw(B, H), draw(B, H)) if is_learned else None
    resets_TB = jnp.asarray(rng.random((T, B)) < 0.4) if resets else None

    def loss(params, carry, x, new, how):
        after, y = lstm_layer(params, carry, x, resets_TB, new, how)
        return jnp.sum(d * y) + sum(map(jnp.sum, after)), (after, y)

    run = functools.partial(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), params, carry, x)
    plan = Plan.of(B, H, jnp.float32, cores=132)
    assert plan is not None
    assert plan.rows == min(-(-B // 64) * 64, most // 2)
    assert plan.width >= H
    found, wanted = (jax.jit(lambda new, how=how: run(new, how))(new) for how in (plan, 1))
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b), (a.shape, a, b)


def test_a_plan_fits_every_width():
    """From 256 to 3,072 units in steps of 64, for 1 to 256 rows; others are left to the loop."""
    for width in range(256, 3073, 64):
        for rows, dtype in ((1, "bfloat16"), (64, "float32"), (128, "bfloat16"), (256, "float32")):
            plan = Plan.of(rows, width, dtype, cores=132)
            assert plan is not None, (width, rows)
            assert plan.width - width <= 128
            assert plan.blocks <= 132
            assert plan.blocks % 4 == 0
            assert plan.width % plan.units == 0
    assert Plan.of(257, 1024, "float32", cores=132) is None
    assert Plan.of(64, 1024, "float64", cores=132) is None
    assert Plan.of(64, 4096, "float32", cores=132) is None


def runs_as_kernel(**options):
    """Whether a layer does, on a GPU that has room for it."""
    layer, x = LSTM(256, rngs=nnx.Rngs(0), **options), jnp.zeros((4, 64, 256))
    at = api.context_on("gpu", 132)
    program = jax.make_jaxpr(lambda x: layer(layer.initial_carry(64), x, at))(x)
    return any(equation.primitive.name == "run_scoped" for equation in equations_in(program.jaxpr))


@pytest.mark.parametrize("precision", ["highest", "float32"])
def test_products_that_are_not_rounded_are_left_to_the_loop(precision):
    assert runs_as_kernel(fused=True)
    with jax.default_matmul_precision(precision):
        assert not runs_as_kernel(fused=True)


@pytest.mark.parametrize("options", [{}, {"fused": True, "num_heads": 4}])
def test_other_layers_are_left_to_the_loop(options):
    assert not runs_as_kernel(**options)
