"""JAX's derivatives of all its operations, in a branch of one stage: as outside of a mesh.

JAX types arrays by the axes of a mesh that they differ over. Some of its derivatives compute with constants
that have another type, and it refuses them.
"""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental.xla_metadata import set_xla_metadata
from jax.scipy import linalg, special
from jax.scipy.sparse.linalg import cg, gmres
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lib.programs import equations_in

from jaxpar.trace.varying import on_any_mesh

pytestmark = pytest.mark.law

rng = np.random.default_rng(0)
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
# Numbers between 0 and 1, complex ones, a positive definite matrix, and places of rows.
X, Y = rng.uniform(0.1, 0.9, (2, 4, 4)).astype(np.float32)
Z, W = X + 1j * Y, Y - 1j * X
SPD = X @ X.T + 4 * np.eye(4, dtype=np.float32)
V = X[0]
ROWS = np.array([0, 2, 1, 3], np.int32)


def of_lax(names, *args):
    """Functions of `jax.lax`, those that this version of JAX has."""
    return {name: (getattr(lax, name), args) for name in names.split() if hasattr(lax, name)}


def of_special(names, *args):
    return {f"special {name}": (getattr(special, name), args) for name in names.split()}


def along(names):
    """Functions of `jax.lax` along the first dim."""
    return {name: (functools.partial(getattr(lax, name), axis=0), (X,)) for name in names.split()}


def at_rows(*names, **options):
    """Updates of two rows of an array."""

    def changed(name, a, b):
        return getattr(a.at[jnp.asarray(ROWS[:2])], name)(b[:2], **options)

    return {f"at {name}": (functools.partial(changed, name), (X, Y)) for name in names}


ELEMENTWISE = {
    **of_lax("abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma", X),
    **of_lax("erf erf_inv erfc exp exp2 expm1 floor lgamma log log1p log2 logistic neg round", X),
    **of_lax("rsqrt sign sin sinh sqrt square tan tanh reciprocal is_finite", X),
    **of_lax("acosh", X + 1.5),
    **of_lax("add sub mul div max min atan2 pow rem igamma igammac", X, Y),
    **{f"complex {n}": f for n, f in of_lax("abs cos exp log real imag conj sqrt tanh", Z).items()},
    **{f"complex {n}": f for n, f in of_lax("add mul div pow sub", Z, W).items()},
    "complex": (lax.complex, (X, Y)),
    "integer power": (lambda x: lax.integer_pow(x, 3), (X,)),
    "power of integers": (lambda x: lax.pow(x, jnp.full(x.shape, 2, jnp.int32)), (X,)),
    "constant power": (lambda x: x**0.37, (X,)),
    "polygamma": (lambda x: lax.polygamma(lax.full_like(x, 2.0), x), (X,)),
    "clamp": (lambda x, y: lax.clamp(0.5 * y, x, y), (X, Y)),
    "clip": (lambda x: jnp.clip(x, 0.2, 0.6), (X,)),
    "select": (lambda x, y: lax.select_n(jnp.asarray(X > 0.5), x, y), (X, Y)),
    "compare": (lambda x: x * (x > 0.3) * (x >= 0.1) * (x < 0.8) * (x <= 0.8) * (x != 0.5), (X,)),
    "bits": (lambda x: x * ((jnp.asarray(ROWS) ^ 3) << 1 >> 1 & 7 | 8).astype(x.dtype), (X,)),
    "rounded": (lambda x: lax.reduce_precision(x, 8, 7), (X,)),
    "converted": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (X,)),
    "to complex": (lambda x: x.astype(jnp.complex64) * jnp.complex64(1 + 1j), (X,)),
    "exact gelu": (functools.partial(jax.nn.gelu, approximate=False), (X,)),
    "derivative of erf": (jax.grad(lambda x: jnp.sum(lax.erf(x))), (X,)),
    "derivative along ones": (
        lambda x: jax.jvp(jnp.sin, (x,), (jnp.ones((4, 4), jnp.float32),))[1],
        (X,),
    ),
    **of_special("ndtr log_ndtr ndtri erfinv logit entr i1 expit", X),
    **of_special("xlogy xlog1py gammainc betaln", X, Y),
}
if hasattr(lax, "polynomial"):
    ELEMENTWISE["polynomial"] = (lambda x: lax.polynomial(x, [1.0, 2.0, 3.0]), (X,))
if jax.__version_info__ >= (0, 12):  # before, JAX compiles it on no mesh
    ELEMENTWISE["betainc"] = (
        lambda x: lax.betainc(lax.full_like(x, 1.5), lax.full_like(x, 0.7), x),
        (X,),
    )

ACROSS = {
    **along("cumsum cumprod cummax cummin cumlogsumexp"),
    "sort": (lambda x, y: lax.sort((x, y), num_keys=1), (X, Y)),
    "argmax": (lambda x: x[jnp.arange(4), jnp.argmax(x, 1)], (X,)),
    "argmin": (lambda x: x[jnp.arange(4), jnp.argmin(x, 1)], (X,)),
    "top_k": (lambda x: lax.top_k(x, 2)[0], (X,)),
    "approx_max_k": (lambda x: lax.approx_max_k(x, 2)[0], (X,)),
    **{name: (functools.partial(getattr(jnp, name), axis=0), (X,)) for name in ("max", "min")},
    **{name: (functools.partial(getattr(jnp, name), axis=0), (Z,)) for name in ("prod", "sum")},
    "reduce": (lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b * 1.0, (0,)), (X,)),
    "window sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"), (X,)),
    "window max": (lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 1), "SAME"), (X,)),
    "window min": (lambda x: lax.reduce_window(x, np.inf, lax.min, (2, 2), (2, 2), "SAME"), (X,)),
    "product": (jnp.matmul, (X, Y)),
    "complex product": (jnp.matmul, (Z, W)),
    "product with ones": (lambda x: x @ jnp.ones((4, 4)), (X,)),
    "ragged product": (
        lambda x, y: lax.ragged_dot(x, jnp.stack([y, 2 * y]), jnp.array([1, 3], jnp.int32)),
        (X, Y),
    ),
    "convolution": (
        lambda x, y: lax.conv_general_dilated(
            x[None, None], y[None, None, :2, :2], (2, 2), "SAME", rhs_dilation=(2, 2)
        ),
        (X, Y),
    ),
    "fft": (jnp.fft.fft, (Z,)),
    "rfft": (jnp.fft.rfft, (X,)),
    "irfft": (jnp.fft.irfft, (Z,)),
}

MOVES = {
    "gather": (lambda x: x[ROWS], (X,)),
    "take along": (lambda x: jnp.take_along_axis(x, jnp.tile(ROWS, (4, 1)), 1), (X,)),
    **at_rows("set", "add", "max", "min"),
    **{f"{n}, unique": f for n, f in at_rows("multiply", unique_indices=True).items()},
    "at, subtract": (lambda x, y: x.at[1].subtract(y[0]), (X, Y)),
    "into zeros": (lambda x: jnp.zeros((6, 4)).at[jnp.asarray(ROWS)].set(x), (X,)),
    "segments": (lambda x: jax.ops.segment_max(x, jnp.asarray([0, 0, 1, 1]), 2), (X,)),
    "slice": (lambda x: x[::2, 1:], (X,)),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (2, 2)), (X,)),
    "dynamic update": (lambda x: lax.dynamic_update_slice(jnp.zeros((6, 6)), x, (1, 1)), (X,)),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((-1, 1, 0), (0, 0, 1))), (X,)),
    "reflect": (lambda x: jnp.pad(x, 1, mode="reflect"), (X,)),
    "concatenate": (lambda x: jnp.concatenate([x, jnp.zeros((1, 4))]), (X,)),
    "stack": (lambda x: jnp.stack([x, jnp.zeros((4, 4))]), (X,)),
    "split": (lambda x: lax.split(x, (1, 3))[1], (X,)),
    "unstack": (lambda x: jnp.unstack(x)[0], (X,)),
    "reshape": (lambda x: x[None].reshape(-1)[::-1], (X,)),
    "squeeze": (lambda x: x[None].squeeze(0), (X,)),
    "transpose": (jnp.transpose, (X,)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, 4, 4)), (X,)),
    "tile": (lambda x: jnp.tile(x, 2), (X,)),
    "copy": (jnp.copy, (X,)),
    "device_put": (jax.device_put, (X,)),
    "bitcast": (lambda x: x * lax.bitcast_convert_type(X.view(np.int32), jnp.float32), (X,)),
}

ALGEBRA = {
    "cholesky": (jnp.linalg.cholesky, (SPD,)),
    "triangular_solve": (linalg.solve_triangular, (SPD, Y)),
    "tridiagonal_solve": (
        lambda x, y: lax.linalg.tridiagonal_solve(x[0], x[1] + 3, x[2], y),
        (X, Y),
    ),
    "lu": (lambda x: linalg.lu_factor(x)[0], (SPD,)),
    "qr": (jnp.linalg.qr, (X + np.eye(4, dtype=np.float32),)),
    "eigh": (lambda x: jnp.linalg.eigh(x)[0], (SPD,)),
    "eig": (lambda x: jnp.abs(jnp.linalg.eigvals(x)), (X,)),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), (X,)),
    "det": (jnp.linalg.det, (X,)),
    "inverse": (jnp.linalg.inv, (SPD,)),
    "expm": (linalg.expm, (X,)),
    "cg": (lambda x, v: cg(lambda u: x @ u, v, maxiter=5)[0], (SPD, V)),
    "gmres": (lambda x, v: gmres(lambda u: x @ u, v, maxiter=2, restart=3)[0], (SPD, V)),
}


@custom_vmap
def doubled(x):
    return 2 * x


@doubled.def_vmap
def _doubled_rows(size, is_mapped, x):
    return 2 * x, is_mapped[0]


def no_step(x):
    return lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, state[1]), (0, x)
    )[1]


def shared(names):
    return jax.checkpoint_policies.save_only_these_names(names)


CONTROL = {
    "scan": (lambda x: lax.scan(lambda c, b: (jnp.sin(c + b), c), jnp.zeros(4), x)[1], (X,)),
    "scan of erf": (lambda x: lax.scan(lambda c, b: (lax.erf(c + b), c), x[0], x)[1], (X,)),
    "while": (lambda x: x * no_step(lax.stop_gradient(x)), (X,)),
    "cond": (lambda x: lax.cond(x.sum() > 1, lax.erf, jnp.zeros_like, x), (X,)),
    "map": (lambda x: lax.map(lax.erfc, x), (X,)),
    "associative scan": (lambda x: lax.associative_scan(jnp.multiply, x), (X,)),
    "checkpoint": (jax.checkpoint(lambda x: lax.erf(lax.erf(x))), (X,)),
    "named": (
        jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")), policy=shared("a")),
        (X,),
    ),
    "jit": (jax.jit(lax.erf), (X,)),
    "vmap": (jax.vmap(lambda x: doubled(lax.erf(x))), (X,)),
    "linear_call": (lambda x: linear_call(lambda _, x: 2 * x, lambda _, g: 2 * g, (), x), (X,)),
    "custom gradient": (jax.custom_gradient(lambda x: (2 * x, lambda g: 2 * lax.erf(g))), (X,)),
    "no gradient": (lambda x: x * lax.nextafter(lax.stop_gradient(x), jnp.float32(1)), (X,)),
    "barrier": (lax.optimization_barrier, (X,)),
    "marked": (lambda x: set_xla_metadata(jnp.sin(x), mark="a"), (X,)),
    "print": (lambda x: (jax.debug.callback(lambda _: None, x), 2 * x)[1], (X,)),
    "drawn": (
        lambda x: x * jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), (4, 4)),
        (X,),
    ),
    "gamma": (lambda x: jax.random.gamma(jax.random.key(0), x), (X,)),
    "bits of rbg": (lambda x: x * jax.random.uniform(jax.random.key(0, impl="rbg"), (4, 4)), (X,)),
    "split keys": (lambda x: x * jax.random.uniform(jax.random.split(jax.random.key(0))[0]), (X,)),
}

TABLE = {**ELEMENTWISE, **ACROSS, **MOVES, **ALGEBRA, **CONTROL}
# What JAX doesn't differentiate in a `shard_map` as it is, on either end of the version range.
IS_CAST = [
    *("erf", "erfc", "exact gelu", "derivative of erf", "polynomial", "betainc", "reduce", "gamma"),
    *("special ndtr", "special ndtri", "gmres", "linear_call", "custom gradient", "scan"),
    *("scan of erf", "cond", "map", "checkpoint", "jit", "vmap"),
]

LEFT_OUT = {
    "collectives: a task's own layers call them by an axis, and JAX has types for them": """
        all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pbroadcast_dynamic ppermute
        preduced psum psum_invariant pvary ragged_all_to_all reduce_scatter reduced_vary_cast
        reduced_vary_cast_p unreduced_psum unreduced_reduce_scatter vary_unreduced_cast
        vary_unreduced_cast_p""",
    "where arrays lie: a model leaves it to jaxpar": """
        from_edtype global_array_to_host_local_array host_local_array_to_global_array inspect_sharding
        layout_constraint relayout reshard sharding_constraint to_edtype with_memory_space_constraint""",
    "mutable arrays: a traced part of a model has none": """
        accum_grad_in_ref addupdate box_get box_set empty_ref free_ref freeze get log_extend log_read new_box
        new_log new_ref run_state swap""",
    "JAX makes them in its own passes, after a part is traced": """
        call_hi_primitive check dce_sink eq_to eval_jaxpr le_to lt_to random_unwrap random_wrap
        remat_opt select_and_gather_add stage tie""",
    "JAX has no gradient for them": """
        composite custom_vmap_call debug_print ffi_call io_callback mulhi nextafter pure_callback
        reduce_window regularized_incomplete_beta""",
    "kernels of Pallas: they have no derivative but one of their own": """
        get_global masked_load masked_swap mpmd_map pallas_call""",
    "scheduling groups: JAX 0.10 refuses their gradient in a branch on a mesh": "xla_metadata_call",
    "of Flax and jaxpar": "block get_variable new_variable outer_module set_variable",
}
PRINTS_OPERATIONS = """
import flax.nnx, jax.experimental.pallas, jax.scipy.linalg, jax.scipy.special, jaxpar
from jax.interpreters import ad
print(*(operation.name for operation in ad.primitive_jvps))
"""
CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_linear_solve", "linear_call", "remat2"}


def floats(tree):
    return [a for a in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(a), jnp.inexact)]


def varying(a, like):
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(a).manual_axis_type.varying
    return lax.pcast(a, tuple(axes), to="varying") if axes else a


def with_gradients(function, args):
    """What a function returns, and the gradients of some sum of it."""
    outs, vjp = jax.vjp(lambda *args: floats(function(*args)), *args)
    weights = [jnp.sin(1.0 + jnp.arange(a.size)).reshape(a.shape).astype(a.dtype) for a in outs]
    return outs, vjp([varying(weight, a) for weight, a in zip(weights, outs, strict=True)])


def in_a_branch(function, args, run):
    """The same on the first of two devices; zeros on the second."""

    def on_device(*args):
        number = lax.axis_index("data")
        args = [varying(a, number) for a in args]

        def first():
            return jax.tree.map(lambda a: varying(a, number), run(function, args))

        def second():
            return jax.tree.map(jnp.zeros_like, first())

        return jax.tree.map(lambda a: a[None], lax.cond(number < 1, first, second))

    specs = {"in_specs": P(), "out_specs": P("data")}
    return jax.shard_map(on_device, mesh=MESH, **specs)(*args)


def differentiated_within(function, args):
    """By `jax.vjp` of a call, as stages do."""
    return with_gradients(on_any_mesh("part", function), args)


def differentiated_later(function, args):
    """By `jax.vjp` of a loop that has been traced, as a step without stages does."""
    part = on_any_mesh("part", function, casts_derivatives=True)

    def looped(*args):
        outs = lax.scan(lambda carry, _: (carry, floats(part(*carry))), [*args], None, length=1)[1]
        return [a[0] for a in outs]

    return with_gradients(looped, args)


@pytest.fixture(autouse=True)
def settings_of_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", TABLE)
def test_each_operation_is_differentiated_in_a_branch_of_a_mesh(name):
    function, args = TABLE[name]
    args = [*map(jnp.asarray, args)]
    expected = jax.eval_shape(lambda *args: with_gradients(function, args), *args)
    runs = [differentiated_within, differentiated_later]
    if name not in IS_CAST:
        runs.append(with_gradients)  # as it is
    for run in runs:
        found = jax.eval_shape(functools.partial(in_a_branch, function, run=run), args)
        assert [a.shape[1:] for a in jax.tree.leaves(found)] == [
            a.shape for a in jax.tree.leaves(expected)
        ]


@pytest.mark.parametrize("run", [differentiated_within, differentiated_later])
@pytest.mark.parametrize("name", [name for name in IS_CAST if name in TABLE])
def test_derivatives_that_are_cast_equal_those_outside(name, run):
    function, args = TABLE[name]
    args = [*map(jnp.asarray, args)]
    expected = jax.jit(lambda *args: with_gradients(function, args))(*args)
    found = jax.jit(functools.partial(in_a_branch, function, run=run))(args)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for seen, wanted in pairs:
        largest = np.max(np.abs(wanted), initial=1.0)
        np.testing.assert_allclose(seen[0], wanted, rtol=1e-4, atol=1e-5 * largest)


def test_the_table_has_every_operation_with_a_derivative():
    names = set()
    for function, args in TABLE.values():
        args = [*map(jnp.asarray, args)]
        for run in (function, lambda *args, f=function: with_gradients(f, args)):
            program = jax.make_jaxpr(run)(*args)
            names |= {eqn.primitive.name for eqn in equations_in(program.jaxpr)}
    left_out = {name for group in LEFT_OUT.values() for name in group.split()}
    # In a process of its own: other tests load modules of JAX that no model needs.
    found = subprocess.run(
        [sys.executable, "-c", PRINTS_OPERATIONS], capture_output=True, text=True, check=True
    )
    wanted = set(found.stdout.split()) | CUSTOM
    assert "sin" in wanted
    assert wanted - names - left_out == set()
