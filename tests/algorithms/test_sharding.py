"""Arrays are laid out by the names of their dims, and layers that are split give what one device gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import RULES, MeshConfig, Rules, nn
from jaxpar.analysis import inspect_function
from jaxpar.sharding import Constraint, shardings

DATA, TENSOR = "data", "tensor"
# Dims of these models.
BATCH, INPUT, CHANNELS, FEATURES, UNITS = "batch", "input", "channels", "features", "units"

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 2)]  # data, tensor
ROWS, WIDTH = 8, 16

BY_DATA = {BATCH: DATA, INPUT: None}


def make_layout(mesh, table):
    data, tensor = mesh
    config = MeshConfig(data=data, tensor=tensor, devices=tuple(range(data * tensor)))
    return Constraint(config.build(), Rules.make({**BY_DATA, **table}))


class Column(nnx.Module):
    """One dense layer split by its second dim: results stacked."""

    def __init__(self, gather, rngs):
        self.gather = gather
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dims=(INPUT, UNITS), rngs=rngs)

    def __call__(self, x_BI, layout):
        y_BU = layout(self.up(layout(x_BI, BATCH, None)), BATCH, UNITS)
        return layout(y_BU, BATCH, None) if self.gather else y_BU


class Row(nnx.Module):
    """One dense layer split by its first dim: results added."""

    def __init__(self, rngs):
        self.down = nn.Linear(WIDTH, WIDTH // 2, dims=(UNITS, None), rngs=rngs)

    def __call__(self, x_BU, layout):
        return layout(self.down(layout(x_BU, BATCH, UNITS)), BATCH, None)


class ColumnRow(nnx.Module):
    """Both, one after the other; `linear` may be Flax's own with names as metadata."""

    def __init__(self, rngs, plain_flax=False):
        def linear(in_size, out_size, dims):
            if not plain_flax:
                return nn.Linear(in_size, out_size, dims=dims, rngs=rngs)
            return nnx.Linear(
                in_size,
                out_size,
                kernel_metadata={"out_sharding": dims, "eager_sharding": False},
                bias_metadata={"out_sharding": dims[1:], "eager_sharding": False},
                rngs=rngs,
            )

        self.up = linear(WIDTH, 2 * WIDTH, (INPUT, UNITS))
        self.down = linear(2 * WIDTH, WIDTH, (UNITS, None))

    def __call__(self, x_BI, layout):
        y_BU = layout(nnx.relu(self.up(layout(x_BI, BATCH, None))), BATCH, UNITS)
        return layout(self.down(y_BU), BATCH, None)


class Convs(nnx.Module):
    """A column-parallel convolution, a row-parallel one, pooling between them."""

    def __init__(self, rngs):
        self.first = nn.Conv(2, 16, (3, 3), dims=(None, None, INPUT, CHANNELS), rngs=rngs)
        self.second = nn.Conv(16, 4, (3, 3), dims=(None, None, CHANNELS, None), rngs=rngs)

    def __call__(self, x_BHWC, layout):
        y_BHWC = nnx.max_pool(nnx.relu(self.first(x_BHWC)), (2, 2), (2, 2))
        y_BHWC = layout(y_BHWC, BATCH, None, None, CHANNELS)
        return layout(self.second(y_BHWC), BATCH, None, None, None)


MODELS = {
    "column, kept": (lambda rngs: Column(False, rngs), (ROWS, WIDTH)),
    "column, gathered": (lambda rngs: Column(True, rngs), (ROWS, WIDTH)),
    "row": (Row, (ROWS, WIDTH)),
    "column, row": (ColumnRow, (ROWS, WIDTH)),
    "column, row of Flax": (lambda rngs: ColumnRow(rngs, plain_flax=True), (ROWS, WIDTH)),
    "convolutions": (Convs, (ROWS, 8, 8, 2)),
}
SPLIT = {UNITS: TENSOR, CHANNELS: TENSOR}


def compiled(name, layout):
    """(params, x) -> (output, gradients), its arguments, all laid out by the names."""
    make, shape = MODELS[name]
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def loss(params, x):
        y = nnx.merge(graphdef, params)(x, layout)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(jnp.sin(y) * weights), y

    def run(params, x):
        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, grads

    params = nnx.state(make(nnx.Rngs(0)))
    params = jax.device_put(params, shardings(params, layout.mesh, layout.rules))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.jit(run), (params, jax.device_put(x, NamedSharding(layout.mesh, P(DATA))))


@functools.cache
def results(name, mesh):
    run, arguments = compiled(name, make_layout(mesh, SPLIT))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run(*arguments))]


@pytest.mark.rows(4)
@pytest.mark.law
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_equal_one_device(name, mesh):
    for actual, expected in zip(results(name, mesh), results(name, (1, 1)), strict=True):
        error = np.linalg.norm(actual - expected)
        assert error <= RELATIVE_ERROR * np.linalg.norm(expected)


# Forward and backward. The backward pass of a layer is a row-parallel one where the forward pass is a
# column-parallel one, and the other way round.
COLLECTIVES = {
    "column, kept": ["all-reduce"],  # dx
    "column, gathered": ["all-gather", "all-reduce"],  # y, dx
    "row": ["all-reduce", "all-gather"],  # y, dx
    "column, row": ["all-reduce", "all-reduce"],  # y, dx: nothing in between
    "column, row of Flax": ["all-reduce", "all-reduce"],
    "convolutions": ["all-reduce", "all-reduce"],
}


@pytest.mark.rows(5)
@pytest.mark.law
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_communicated_but_what_the_names_ask_for(name):
    layout = make_layout((1, 4), SPLIT)
    run, (params, x) = compiled(name, layout)
    whole = layout(x, *[None] * x.ndim)
    out = jax.tree.map(lambda leaf: leaf.sharding, (params, whole))
    run = jax.jit(run, out_shardings=(None, out))
    found = inspect_function(run, params, whole).collectives
    assert [c.op for c in found] == COLLECTIVES[name]
    assert {c.axes for c in found} == {(TENSOR,)}


def test_a_kept_output_is_split_and_a_gathered_one_is_whole():
    layout = make_layout((2, 4), SPLIT)
    for name, shape in (("column, kept", (4, 8)), ("column, gathered", (4, 32))):
        run, arguments = compiled(name, layout)
        assert run(*arguments)[0].addressable_shards[0].data.shape == shape


def test_a_layout_refuses_what_does_not_divide():
    layout = make_layout((2, 4), SPLIT)
    with pytest.raises(ValueError, match=r"shape \(8, 6\): dim 'units' has size 6, .* tensor=4"):
        layout(jnp.zeros((8, 6)), BATCH, UNITS)
    with pytest.raises(ValueError, match=r"do not fit an array of shape \(8, 6\)"):
        layout(jnp.zeros((8, 6)), BATCH)
    with pytest.raises(ValueError, match=r"do not fit an array of shape \(3, 3, 1, 8\)"):
        nn.Conv(1, 8, (3, 3), dims=(None, INPUT, CHANNELS), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dim 'chanels' has no rule"):
        layout(jnp.zeros((8, 8)), BATCH, "chanels")
    conv = nn.Conv(1, 8, (3, 3), dims=(None, None, INPUT, "chanels"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dim 'chanels' has no rule"):
        shardings(nnx.state(conv), layout.mesh, RULES)


def test_a_convolution_without_bias_has_none():
    conv = nn.Conv(1, 8, 3, dims=(None, FEATURES, CHANNELS), use_bias=False, rngs=nnx.Rngs(0))
    assert conv.bias is None
    assert conv.kernel.out_sharding == (None, FEATURES, CHANNELS)
    assert conv(jnp.ones((2, 5, 1))).shape == (2, 5, 8)
