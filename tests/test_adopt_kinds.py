"""Blocks of Flax models with functions that have derivatives of their own, or that call NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.custom_derivatives import linear_call
from lib import api
from lib.adopted import Adopted, assert_as_plain
from lib.flax_models import WIDTH, Text
from lib.layers import clipped_in_backward, times_in_backward

from jaxpar import Parallel, PipelineConfig

pytestmark = pytest.mark.law


def times_in_jvp(factor):
    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda args, d_args: (args[0], factor * d_args[0]))
    return identity


def times_in_transpose(factor):
    def identity(x):
        return linear_call(lambda _, x: x, lambda _, dx: factor * dx, (), x)

    return identity


def times_in_numpy(factor):
    def plus(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        made = jax.pure_callback(
            lambda a: np.float32(factor) * np.asarray(a), shape, jax.lax.stop_gradient(x)
        )
        return x + made

    return plus


def times_table(factor):
    table = np.full(WIDTH, factor, np.float32)
    return lambda x: x * table


def times_long_table(factor):
    """The text of its array has no number of the middle."""
    table = np.zeros(2000, np.float32)
    table[1000] = factor
    return lambda x: x * jnp.asarray(table)[1000]


def times_in_loop(factor):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x * factor, x)


def printed(x):
    jax.debug.print("{}", x[0, 0, 0])
    return x


BY_DEPTH = {
    "custom_vjp": times_in_backward,
    "custom_jvp": times_in_jvp,
    "linear_call": times_in_transpose,
    "pure_callback": times_in_numpy,
    "a closed-over array": times_table,
    "a long closed-over array": times_long_table,
    "a loop": times_in_loop,
}
# Where blocks of the last two are told apart, all else is as for a closed-over array.
ON_ONE_DEVICE = {"pure_callback", "a long closed-over array", "a loop"}
EXACT_GELU = functools.partial(nnx.gelu, approximate=False)
ALIKE = {
    "gelu": lambda: nnx.gelu,
    "exact gelu": lambda: EXACT_GELU,
    "silu": lambda: nnx.silu,
    "relu": lambda: jax.nn.relu,
    "softmax": lambda: lambda x: jax.nn.softmax(x),
    "printing": lambda: printed,
    **{name: functools.partial(make, 0.5) for name, make in BY_DEPTH.items()},
}


@pytest.fixture(autouse=True)
def settings_of_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Block(nnx.Module):
    def __init__(self, change, rngs):
        self.up, self.change = nnx.Linear(WIDTH, WIDTH, rngs=rngs), change

    def __call__(self, x):
        return x + jnp.tanh(self.up(self.change(x)))


class ChangesOutput(Block):
    def __call__(self, x):
        return self.change(x + jnp.tanh(self.up(x)))


class Net(Text):
    block = Block

    def __init__(self, changes, rngs):
        self.changes = changes
        super().__init__(rngs)

    def make_blocks(self, rngs):
        return nnx.List([self.block(change, rngs) for change in self.changes])


class NetOfOutputs(Net):
    block = ChangesOutput


def task_of(changes, net=Net):
    return Adopted(functools.partial(net, tuple(changes)))


def blocks_of(task):
    """How many blocks there are of each kind: one program runs all of a kind."""
    return api.summary(task, Parallel("dp1"))["blocks"]


@pytest.mark.rows(2, "full")
# JAX runs no callback where the compiler splits an axis.
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, "dp1") for name in BY_DEPTH),
        *((name, "pp2") for name in BY_DEPTH if name not in ON_ONE_DEVICE),
    ],
)
def test_functions_that_differ_by_depth_are_those_of_each_block(name, mesh):
    task = task_of(BY_DEPTH[name](1 / (1 + number)) for number in range(4))
    assert_as_plain(task, Parallel(mesh))


@pytest.mark.parametrize("name", ALIKE)
def test_blocks_with_one_function_are_of_one_kind(name):
    assert blocks_of(task_of(ALIKE[name]() for _ in range(4))) == "Net.blocks: 4 block"


@pytest.mark.parametrize("name", BY_DEPTH)
def test_blocks_with_functions_that_differ_are_of_other_kinds(name):
    changes = [BY_DEPTH[name](factor) for factor in (0.5, 0.25, 0.5, 2.0)]
    assert blocks_of(task_of(changes)) == "Net.blocks: 2 block0, 1 block1, 1 block2"


class Types(Block):
    """Computes in the type of its factor: of equal factors, one may be a number of NumPy."""

    def __call__(self, x):
        y = self.up(x).astype(jnp.bfloat16) * self.change
        return x + jnp.tanh(y.astype(jnp.float32))


class NetOfTypes(Net):
    block = Types


def test_equal_numbers_of_other_types_make_other_kinds():
    factors = 0.5, np.float32(0.5), 0.5, np.float32(0.5)
    assert blocks_of(task_of(factors, NetOfTypes)) == "NetOfTypes.blocks: 2 types0, 2 types1"


class WithTable(Block):
    """One of its parameters begins as a table that differs in the middle."""

    def __init__(self, number, rngs):
        super().__init__(number, rngs)
        table = np.zeros(2000, np.float32)
        table[1000] = number
        self.table = nnx.Param(jnp.asarray(table))

    def __call__(self, x):
        return x + jnp.tanh(self.up(x)) * self.table[1000]


class NetOfTables(Net):
    block = WithTable


def test_blocks_begin_with_their_own_tables():
    assert_as_plain(task_of(range(4), NetOfTables), Parallel("dp1"))


@pytest.mark.parametrize(
    "parallel", [Parallel("dp2"), Parallel("dp1", PipelineConfig(num_microbatches=2))]
)
def test_a_backward_pass_that_combines_rows_is_refused(parallel):
    task = task_of([clipped_in_backward] * 2, NetOfOutputs)
    said = r"layer changesoutput: the backward pass of clipped_in_backward \(\S+\.py, line \d+\) gives other"
    with pytest.raises(ValueError, match=said):
        assert_as_plain(task, parallel)


class SmallBranch(Block):
    """Most of the gradient goes past its function."""

    def __call__(self, x):
        return x + 0.01 * jnp.tanh(self.up(self.change(x)))


class NetOfSmallBranches(Net):
    block = SmallBranch


def without_mean(dx):
    return dx - dx.mean(0, keepdims=True)


def without_mean_in_jvp():
    function = jax.custom_jvp(lambda x: x)
    function.defjvp(lambda x, dx: (x[0], without_mean(dx[0])))
    return function


def without_mean_in_transpose():
    return lambda x: linear_call(lambda _, x: x, lambda _, dx: without_mean(dx), (), x)


def flattened(x):
    return clipped_in_backward(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def at_each_step(x):
    return jax.lax.map(clipped_in_backward, x.swapaxes(0, 1)).swapaxes(0, 1)


def with_mask(x):
    """A mask that random numbers would make otherwise."""

    def backward(mask, dx):
        kept = jnp.where(mask, dx, 0)
        return kept / (1e-9 + jnp.linalg.norm(kept)), None

    function = jax.custom_vjp(lambda x, mask: x)
    function.defvjp(lambda x, mask: (x, mask), backward)
    return function(x, x > -10)


def with_roots(x):
    """Of positive numbers."""

    def backward(root, dx):
        return (root * dx / jnp.linalg.norm(root * dx),)

    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, jnp.sqrt(x)), backward)
    return function(jax.nn.sigmoid(x))


def of_a_function_of_jax(x):
    function = jax.custom_jvp(jnp.tanh)

    @function.defjvp
    def rule(args, d_args):
        return jnp.tanh(*args), d_args[0] - jnp.mean(d_args[0])

    return function(x)


def scaled_in_bfloat16(x):
    """By the root mean square, which is much alike in all pieces of random numbers."""

    def backward(_, dx):
        wide = dx.astype(jnp.float32)
        return ((wide / jnp.sqrt(1e-30 + jnp.mean(wide**2))).astype(dx.dtype),)

    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), backward)
    return function(x.astype(jnp.bfloat16)).astype(x.dtype)


COMBINES_ROWS = {
    "with a mask": lambda: with_mask,
    "with roots": lambda: with_roots,
    "custom_jvp of a function of JAX": lambda: of_a_function_of_jax,
    "in bfloat16": lambda: scaled_in_bfloat16,
    "custom_vjp": lambda: clipped_in_backward,
    "custom_vjp of [rows * time, width]": lambda: flattened,
    "custom_vjp in a loop": lambda: at_each_step,
    "custom_vjp in jit": lambda: jax.jit(clipped_in_backward),
    "custom_jvp": without_mean_in_jvp,
    "linear_call": without_mean_in_transpose,
}


@pytest.mark.rows(2, "full")
@pytest.mark.parametrize("name", COMBINES_ROWS)
def test_a_backward_pass_that_combines_rows_is_refused_though_it_changes_little(name):
    task = task_of([COMBINES_ROWS[name]()] * 2, NetOfSmallBranches)
    with pytest.raises(
        ValueError, match=r"^layer smallbranch: the backward pass of .* gives other"
    ):
        api.check_before_run(task, Parallel("dp2"))


def signed_in_backward(x):
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, dx: (1e-3 * jnp.sign(dx),))
    return function(x)


def clipped_rows(x):
    """Clips each row by its norm."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(
        lambda x: (x, None),
        lambda _, dx: (
            dx * jnp.minimum(1, 1e-3 / jnp.linalg.norm(dx, axis=(1, 2), keepdims=True)),
        ),
    )
    return function(x)


def clipped_in_loop(x):
    """Clips each row, in a loop over rows."""
    return jax.lax.map(clipped_in_backward, x)


@pytest.mark.parametrize("change", [signed_in_backward, clipped_rows, clipped_in_loop])
def test_a_backward_pass_of_each_row_is_taken(change):
    api.check_before_run(task_of([change] * 2, NetOfSmallBranches), Parallel("dp2"))


@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
def test_the_exact_gelu_has_a_gradient_on_every_mesh(mesh):
    assert_as_plain(task_of([EXACT_GELU] * 2), Parallel(mesh))
