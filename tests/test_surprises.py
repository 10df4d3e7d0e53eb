"""What JAX, Flax, Optax, Orbax and NumPy do against the first guess, and what jaxpar says of it.

Each test of the first part states a guess, and what happens instead. If one fails, a version does something
else: change the row of docs/help/surprises.md.
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api
from lib.laws import RELATIVE_ERROR
from lib.programs import equations_in, programs_in
from optax import microbatching

import jaxpar
from jaxpar import (
    ArrayBatches,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    init_state,
    make_train_step,
    value_and_grad,
)

ROOT = Path(__file__).parents[1]
LOW = jnp.bfloat16


def mesh_of(size):
    return jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture(autouse=True)
def types_as_users_have_them():
    with jax.numpy_dtype_promotion("standard"):
        yield


# ---- JAX ----


@pytest.mark.parametrize(("cast", "gradient"), [(False, 8), (True, 23)])
def test_jax_cond_on_the_place_of_a_device(cast, gradient):
    """Guess: a device's branch has its gradient. It loses terms, unless operands are cast before."""

    def loss(w, x):
        w = lax.pcast(w, "data", to="varying") if cast else w
        branches = (lambda w, x: w * x), (lambda w, x: w * w * x)
        y = lax.cond(lax.axis_index("data") == 0, *branches, w, x)
        return lax.psum(jnp.sum(y), "data")

    run = jax.shard_map(loss, mesh=mesh_of(2), in_specs=(P(), P("data")), out_specs=P())
    value, found = jax.jit(jax.value_and_grad(run))(jnp.float32(2), jnp.array([3.0, 5.0]))
    assert (value, found) == (2 * 3 + 4 * 5, gradient)  # 3 + 2 * 2 * 5 is right


def test_jax_ref_under_checkpoint():
    """Guess: a checkpoint changes no number. A Ref is written twice, and read with its later value."""

    def run(wrap):
        ref = jax.new_ref(jnp.float32(1))

        def part(x):
            y = jnp.sin(x) * ref[...]
            ref[...] = ref[...] * 3
            return jnp.sin(y)

        return jax.grad(wrap(part))(0.5), ref[...]

    (plain, once), (again, twice) = run(lambda part: part), run(jax.checkpoint)
    assert (once, twice) == (3, 9)
    assert abs(plain - again) > 0.4


@pytest.mark.parametrize(("offset", "shared"), [(0, True), (4, False)])
def test_jax_shares_buffers_that_begin_at_64_bytes(offset, shared):
    """Guess: device_put copies, with may_alias=False at least. It shares what is aligned."""
    raw = np.zeros(512, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    buffer = raw[start : start + 256].view(np.float32)
    put = [jax.device_put(buffer), jax.device_put(buffer, may_alias=False), jnp.array(buffer)]
    buffer[:] = 1
    assert [float(a[0]) for a in put] == [shared, shared, 0]


def test_jax_draws_in_bfloat16():
    """Guess: a mean of 0. A million normal numbers have 128 values and a mean of -0.012, initial ones too."""
    low, full = (
        np.float32(jax.random.normal(jax.random.key(0), (1 << 20,), dtype))
        for dtype in (LOW, jnp.float32)
    )
    assert len(np.unique(low)) == 128
    assert -0.014 < low.mean() < -0.010
    assert abs(full.mean()) < 0.003
    kernel = nnx.initializers.lecun_normal()(jax.random.key(0), (4096, 64), LOW)
    assert np.float32(kernel).sum(0).mean() < -0.8  # what ones give; 0 +- 0.1 is right


def test_jax_categorical_in_bfloat16():
    """Guess: 50,000 equal logits are drawn alike. Ids from 1,000 on never are."""
    draws = [
        jax.random.categorical(jax.random.key(0), jnp.zeros(50_000, dtype), shape=(40,))
        for dtype in (LOW, jnp.float32)
    ]
    assert max(draws[0]) < 1000
    assert np.mean(draws[1]) > 20_000


@pytest.mark.parametrize(("dtype", "found"), [(LOW, 256), (None, 10_000)])
def test_jax_gradient_of_a_frequent_id(dtype, found):
    """Guess: an id that occurs 10,000 times has 10,000 times the gradient. In bfloat16 it has 256 times."""
    embed = nnx.Embed(4, 1, dtype=dtype, rngs=nnx.Rngs(0))
    ids = jnp.zeros(10_000, jnp.int32)
    grads = nnx.grad(lambda embed: jnp.sum(embed(ids).astype(jnp.float32)))(embed)
    assert grads.embedding[...][0, 0] == found


def test_jax_gradient_through_a_long_loop_in_bfloat16():
    """Guess: a carry that is read 1,000 times has the gradient 1,000. It has 256."""

    def loss(w):
        outs = lax.scan(lambda c, _: (c, c * 1), w, length=1000)[1]
        return jnp.sum(outs.astype(jnp.float32))

    assert jax.grad(loss)(jnp.ones((), LOW)) == 256


@pytest.mark.parametrize(("cast", "num_sums"), [(False, 1), (True, 0)])
def test_jax_sums_a_recurrent_gradient_at_every_step(cast, num_sums):
    """Guess: devices add up the gradient of a weight once. They do at each step, unless it is cast before."""

    def loss(w, x):
        w = lax.pcast(w, "data", to="varying") if cast else w
        h, _ = lax.scan(lambda h, x: (jnp.tanh(h * w + x), None), x[0] * 0, x)
        return lax.psum(jnp.sum(h), "data")

    run = jax.shard_map(loss, mesh=mesh_of(8), in_specs=(P(), P(None, "data")), out_specs=P())
    program = jax.make_jaxpr(jax.grad(run))(jnp.ones(()), jnp.ones((5, 8)))
    loops = [eqn for eqn in equations_in(program.jaxpr) if eqn.primitive.name == "scan"]
    inside = [eqn for loop in loops for part in programs_in(loop) for eqn in equations_in(part)]
    assert sum(eqn.primitive.name.startswith("psum") for eqn in inside) == num_sums


@pytest.mark.parametrize("part", ["RNN", "Embed", "ctc_loss"])
def test_jax_axes_are_explicit_by_default(part):
    """Guess: jax.make_mesh((8,), ...) runs a model of Flax. Its axes are Explicit, where these fail."""
    mesh = jax.make_mesh((8,), ("data",))
    x = jax.device_put(jnp.ones((8, 5, 2)), NamedSharding(mesh, P("data")))
    rngs, zeros = nnx.Rngs(0), jnp.zeros((8, 5))
    rnn, embed = nnx.RNN(nnx.SimpleCell(2, 3, rngs=rngs), rngs=rngs), nnx.Embed(4, 2, rngs=rngs)
    run = {
        "RNN": lambda: rnn(x),
        "Embed": lambda: embed(x[:, 0, 0].astype(jnp.int32)),
        "ctc_loss": lambda: optax.ctc_loss(x, zeros, jnp.ones((8, 1), jnp.int32), zeros[:, :1]),
    }[part]
    with (
        jax.set_mesh(mesh),
        pytest.raises(Exception, match=r"equal types|out_sharding|same sharding"),
    ):
        run()


def test_jax_mesh_leaves_devices_out():
    """Guess: a mesh of 2 of 8 devices is an error. It takes the first two."""
    assert jax.make_mesh((2,), ("data",)).devices.size == 2 < jax.device_count()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
def test_xla_cpu_sums_bfloat16_in_float32():
    """Guess: a laptop shows the bytes that a TPU sends. Its sums over devices are float32."""
    sharded, whole = (NamedSharding(mesh_of(8), spec) for spec in (P("data"), P()))
    x = jax.ShapeDtypeStruct((8, 64), LOW, sharding=sharded)
    text = jax.jit(lambda x: x.sum(0), out_shardings=whole).lower(x).compile().as_text()
    assert "f32[64]{0} all-reduce(" in text
    assert "bf16[64]{0} all-reduce(" not in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
@pytest.mark.parametrize("function", [lambda x: lax.top_k(x, 2), lambda x: lax.cumsum(x, 1)])
def test_xla_cpu_gathers_what_is_ranked_or_summed(function):
    """Guess: of a split dim each device sends its own best, or its sum. It gathers the whole array."""
    x = jax.ShapeDtypeStruct(
        (2, 64), jnp.float32, sharding=NamedSharding(mesh_of(8), P(None, "data"))
    )
    assert "f32[2,64]{0,1} all-gather(" in jax.jit(function).lower(x).compile().as_text()


def test_xla_counts_the_body_of_a_loop_once():
    """Guess: 100 products have 100 times the FLOPs of one. cost_analysis counts one."""

    def flops(length):
        run = jax.jit(lambda x: lax.scan(lambda c, _: (c @ x, None), x, length=length)[0])
        return run.lower(jnp.ones((64, 64))).compile().cost_analysis()["flops"]

    assert flops(100) < 1.01 * flops(1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
def test_xla_takes_options_of_another_platform():
    """Guess: an option that does nothing is an error. Those of GPUs are taken on CPU; "true" is not."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True})
    for options in ({"xla_gpu_enable_latency_hiding_scheduler": "true"}, {"xla_no_such": True}):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"not a valid bool|No such compile"):
            lowered.compile(compiler_options=options)


# ---- Flax ----


def test_flax_rnn_of_a_row_without_steps():
    """Guess: a row of length 0 keeps its initial state. It has the state after all of the padding."""
    rnn = nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0)), return_carry=True, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, 2))
    none, _ = rnn(x, seq_lengths=jnp.array([0, 5]))
    whole, _ = rnn(x)
    np.testing.assert_array_equal(none, whole)
    assert jnp.all(none != 0)


@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell])
def test_flax_cells_with_dtype_return_float32(cell):
    """Guess: dtype=bfloat16 halves the state. It is made in param_dtype, and stays float32."""
    made = cell(2, 3, dtype=LOW, rngs=nnx.Rngs(0))
    carry = made.initialize_carry((1, 2), nnx.Rngs(0))
    carry, y = made(carry, jnp.ones((1, 2), LOW))
    assert {a.dtype for a in jax.tree.leaves((carry, y))} == {jnp.dtype("float32")}


def test_flax_optimized_lstm_has_smaller_gates():
    """Guess: it is the same cell. Its recurrent weights are orthonormal over all gates together."""
    plain, together = (
        cell(8, 8, rngs=nnx.Rngs(0)) for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell)
    )
    gates = jnp.split(together.dense_h.kernel[...], 4, axis=1)
    assert np.sqrt(np.mean([jnp.sum(gate**2) for gate in gates])) == pytest.approx(np.sqrt(2))
    assert jnp.linalg.norm(plain.hf.kernel[...]) == pytest.approx(np.sqrt(8))


def test_flax_vmap_names_a_dim_and_does_not_split_it():
    """Guess: PARTITION_NAME splits the stack. The name is there, and every device has all layers."""
    with jax.set_mesh(mesh_of(8)):

        @nnx.split_rngs(splits=8)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "data"})
        def make(rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, None))
            return nnx.Linear(2, 2, kernel_init=init, rngs=rngs)

        stack = make(nnx.Rngs(0))
    named = nnx.get_partition_spec(nnx.state(stack))["kernel"].get_value()
    assert named == P("data", None, None)
    assert stack.kernel[...].sharding.is_fully_replicated


# ---- Optax ----


def after(optimizer, param, grad, num_steps):
    """The optimizer's state, and its last updates, after steps with one gradient."""

    def step(carry, _):
        updates, state = optimizer.update(grad, carry[1], param)
        return (updates, state), None

    first = optimizer.update(grad, optimizer.init(param), param)
    return lax.scan(step, first, length=num_steps - 1)[0]


@pytest.mark.parametrize(("dtype", "nu"), [(LOW, 0.5), (jnp.float32, 0.993)])
def test_optax_adam_in_bfloat16(dtype, nu):
    """Guess: the mean of ones comes near 1, with mu_dtype=float32 at least. It stops at 0.5."""
    one = jnp.ones((), dtype)
    _, (state, *_) = after(optax.adam(1e-3, mu_dtype=jnp.float32), one, one, 5000)
    assert state.nu.dtype == dtype
    assert state.nu == pytest.approx(nu, rel=1e-3)


def test_optax_inject_hyperparams_in_bfloat16():
    """Guess: Adam is Adam. b2 is rounded to 1, so the first update divides 0 by 0."""
    one = jnp.ones((), LOW)
    updates, state = after(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), one, one, 1)
    assert state.hyperparams["b2"] == 1
    assert jnp.isnan(updates)


@pytest.mark.parametrize(("dtype", "found"), [(LOW, 16), (jnp.float32, 1000**0.5)])
def test_optax_norm_of_many_arrays(dtype, found):
    """Guess: a thousand ones have the norm 31.6. In bfloat16 it is 16, so clipping leaves twice too much."""
    ones = [jnp.ones(1, dtype)] * 1000
    assert optax.tree.norm(ones) == pytest.approx(found)
    clip = optax.clip_by_global_norm(1.0)
    updates, _ = clip.update(ones, clip.init(ones))
    assert np.linalg.norm(np.float64(updates)) == pytest.approx(1000**0.5 / found, rel=1e-2)


@pytest.mark.parametrize(
    ("inner", "skip", "updates"),
    [
        (optax.sgd(1.0), None, [0, np.nan, 0, np.nan, 0, np.nan, 0, np.nan]),
        (optax.apply_if_finite(optax.sgd(1.0), 2), None, [0, 0, 0, 0, 0, np.nan, 0, np.nan]),
        (optax.sgd(1.0), optax.skip_not_finite, [0, 0, -1, 0, -1, 0, -1, 0]),
    ],
)
def test_optax_multi_steps_after_a_nan(inner, skip, updates):
    """Guess: a NaN spoils one mean, and apply_if_finite keeps it out. It stays for ever."""
    skips = {} if skip is None else {"should_skip_update_fn": skip}
    optimizer, found = optax.MultiSteps(inner, 2, **skips), []
    state = optimizer.init(jnp.float32(0))
    for grad in (1.0, np.nan, *[1.0] * 6):
        update, state = optimizer.update(jnp.float32(grad), state, jnp.float32(0))
        found.append(float(update))
    np.testing.assert_array_equal(found, updates)


def test_optax_microbatch():
    """Guess: neighbours, and a mean of those that are real. Every second row, and a mean of all."""
    kinds = microbatching.AccumulationType
    rows = microbatching.microbatch(lambda x: x, 0, 2, kinds.SUM)(jnp.arange(4.0))
    np.testing.assert_array_equal(rows, [0 + 1, 2 + 3])
    mean = microbatching.microbatch(jnp.mean, 0, 2, kinds.MEAN, num_real_microbatches=1)
    assert mean(jnp.ones(8)) == 1 / 4


def test_optax_labels_out_of_range():
    """Guess: -1 and -100 are ignored. -1 is the last class; -100 is NaN, with a finite gradient."""
    logits, loss = jnp.zeros(3), optax.softmax_cross_entropy_with_integer_labels
    assert loss(logits, jnp.array(-1)) == loss(logits, jnp.array(2))
    np.testing.assert_array_equal(*(jax.grad(loss)(logits, jnp.array(n)) for n in (-1, 2)))
    value, grad = jax.value_and_grad(loss)(logits, jnp.array(-100))
    assert jnp.isnan(value)
    assert jnp.all(jnp.isfinite(grad))


def test_optax_ctc_of_an_impossible_label():
    """Guess: infinite, or an error. A row of three labels in two steps has a loss of 100,000."""
    loss = optax.ctc_loss(
        jnp.zeros((1, 2, 4)), jnp.zeros((1, 2)), jnp.array([[1, 1, 1]]), jnp.zeros((1, 3))
    )
    assert 9e4 < loss[0] < 2e5


@pytest.mark.parametrize(
    ("optimizer", "is_alike"),
    [(optax.contrib.muon(0.1), False), (optax.lars(0.1), False), (optax.adam(0.1), True)],
)
def test_optax_sees_a_stack_as_one_parameter(optimizer, is_alike):
    """Guess: layers in one array [layers, ...] are updated one by one. Norms and shapes are of the stack."""
    keys = jax.random.split(jax.random.key(0))
    params, grads = (
        jax.random.normal(key, (3, 4, 5)) * jnp.array([[[1.0]], [[10]], [[99]]]) for key in keys
    )

    def update(grad, param):
        return optimizer.update(grad, optimizer.init(param), param)[0]

    whole = update(grads, params)
    alone = jnp.stack([update(*pair) for pair in zip(grads, params, strict=True)])
    assert np.allclose(whole, alone, rtol=1e-3) == is_alike


def test_optax_takes_the_first_dim_for_outputs():
    """Guess: centralize takes the mean off each output's weights. Of Flax's kernels, off each input's."""
    kernel = jnp.arange(6.0).reshape(3, 2) ** 2  # [inputs, outputs]
    optimizer = (
        optax.contrib.centralize() if hasattr(optax.contrib, "centralize") else optax.centralize()
    )
    found, _ = optimizer.update(kernel, optimizer.init(kernel))
    np.testing.assert_allclose(found.sum(1), 0, atol=1e-6)
    assert jnp.all(found.sum(0) != 0)


# ---- Orbax and NumPy ----


@pytest.mark.parametrize(
    "target", [np.zeros(3, np.float32), jax.ShapeDtypeStruct((3,), jnp.float32)]
)
def test_orbax_ignores_the_shape_of_a_target(target, tmp_path):
    """Guess: six numbers don't fit a target of three. They are returned."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"w": np.arange(6, dtype=np.float32)})
        checkpointer.wait_until_finished()
        assert checkpointer.restore(tmp_path / "step", {"w": target})["w"].shape == (6,)


def test_orbax_wraps_floats_in_whole_numbers(tmp_path):
    """Guess: 300 doesn't fit int8. It becomes 44."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"w": np.array([1.9, 300, -1], np.float32)})
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "step", {"w": np.zeros(3, np.int8)})["w"]
    np.testing.assert_array_equal(found, [1, 44, -1])


def test_orbax_keeps_the_step_of_a_nan(tmp_path):
    """Guess: a loss of NaN is the worst. It is the best, and the best weights are deleted."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in ((1, 0.5), (2, float("nan"))):
            args = ocp.args.StandardSave({"w": np.ones(2)})
            manager.save(step, args=args, metrics={"loss": loss})
            manager.wait_until_finished()
        assert manager.best_step() == 2
        assert [*manager.all_steps()] == [2]


def test_numpy_sorts_bfloat16_with_a_nan_wrongly():
    """Guess: NaN goes to the end, and a median with one is NaN. It stays, and the median is 1."""
    numbers = np.array([3, np.nan, 1, 2, 0, 7, 5], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.float32(np.sort(numbers))[:2], [3, np.nan])
    assert np.median(numbers) == 1
    assert np.isnan(np.sort(np.float32(numbers))[-1])


# ---- the page ----


def test_the_page_names_what_is_there():
    """Each row has a source, and each test and each script of the page exists."""
    page = (ROOT / "docs" / "help" / "surprises.md").read_text()
    rows = [
        line for line in page.splitlines() if line.startswith("| ") and "| source |" not in line
    ]
    for row in rows:
        assert re.search(r"test_\w+|\w+\.sh|#\d+|the same script", row.split(" | ")[-2]), row
    for script in set(re.findall(r"`(\w+\.sh)`", page)):
        assert (ROOT / "findings" / script).is_file()
    for file, name in set(re.findall(r"`(?:(test_\w+)\.py::)?(test_\w+)`", page)):
        paths = (ROOT / "tests").rglob(f"{file or Path(__file__).stem}.py")
        assert any(f"def {name}(" in path.read_text() for path in paths), (file, name)


# ---- what jaxpar says before a run ----

WIDTH = 4
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adam of few steps": optax.adam(1e-3, b2=0.95),
    "every second step": optax.MultiSteps(optax.adam(1e-3), 2),
    "hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
    "clip, every second step": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)), 2
    ),
    "scaled by 1": optax.chain(optax.trace(0.9), optax.scale(1.0), optax.scale(-0.1)),
}


class Dense(nnx.Module):
    def __init__(self, param_dtype, rngs):
        options = {"param_dtype": param_dtype, "dtype": param_dtype, "rngs": rngs}
        self.linear = nnx.Linear(WIDTH, WIDTH, **options)

    def __call__(self, carry, x, at):
        return carry, jnp.tanh(self.linear(x))


class Words(nnx.Module):
    def __init__(self, task, rngs):
        param_dtype, dtype = map(jnp.dtype, (task.param_dtype, task.embed_dtype))
        self.embed = nnx.Embed(9, WIDTH, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.layers = Stack([lambda rngs: Dense(param_dtype, rngs)] * 2, rngs=rngs)
        cell = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs) if task.takes_state else None
        self.rnn = cell and nnx.RNN(cell, return_carry=True, time_major=True, rngs=False)
        self.param_dtype = param_dtype

    def first(self, batch, at):
        x = self.embed(batch["x"])
        places = self.embed(jnp.arange(300) % 9)  # told of nothing: one dim, as of positions
        return (x + 0 * jnp.sum(places)).astype(self.param_dtype)

    def last(self, y, batch, at):
        if self.rnn:
            y, _ = self.rnn(y, seq_lengths=batch["count"], rngs=nnx.Rngs(0))
        return Sums(jnp.sum(y.astype(jnp.float32) ** 2), jnp.float32(y.size))


@dataclasses.dataclass(frozen=True)
class Told(jaxpar.Task):
    param_dtype: str = "float32"
    embed_dtype: str = "float32"
    takes_state: bool = False
    chosen: str = "adam"

    def make_model(self, rngs):
        return Words(self, rngs)

    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.chosen]

    def make_batches(self, split, seed=None):
        x, count = np.zeros((64, 40), np.int32), np.full(64, 5, np.int32)
        return ArrayBatches({"x": x, "count": count}, 16, 0)


class AsItStands(nnx.Module):
    """A model of Flax without the layer form."""

    def __init__(self, task, rngs):
        options = {"dtype": LOW, "param_dtype": jnp.dtype(task.param_dtype), "rngs": rngs}
        self.embed = nnx.Embed(9, WIDTH, **options)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, **options) for _ in range(2)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass(frozen=True)
class Adopted(Told):
    def make_model(self, rngs):
        return AsItStands(self, rngs)

    def loss(self, model, batch):
        return jaxpar.mean(jnp.sum(model(batch["x"]).astype(jnp.float32) ** 2, (1, 2)))


LINE = r"test_surprises\.py, line \d+"
DRAWS = rf"^{LINE} draws random numbers in bfloat16: .*Fix: draw them in float32"
LOOKS_UP = rf"^{LINE} looks up rows in bfloat16: .*Fix: look up in float32"
STATE = rf"^{LINE} takes the last state of nnx\.RNN by seq_lengths: .*Fix: use jnp\.where"
MADE = rf"^Told\.make_optimizer \({LINE}\)"
MEAN = rf"{MADE} keeps a mean over steps in bfloat16, .*Fix: keep parameters in float32"
ROUNDS = rf"{MADE} rounds its hyperparameters to bfloat16, .*Fix: keep parameters in float32"
NORM = rf"{MADE} adds up a norm of all arrays in bfloat16, .*Fix: set TrainConfig\.clip_norm"


def low(chosen):
    return Told("bfloat16", "bfloat16", chosen=chosen)


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    ("task", "mesh", "expected"),
    [
        (Told(), "pp2", []),
        (Adopted("bfloat16"), "pp2", [DRAWS, LOOKS_UP, MEAN]),
        (low("adam"), "dp1", [DRAWS, LOOKS_UP, MEAN]),
        (low("clip"), "pp2", [DRAWS, LOOKS_UP, NORM]),
        (low("hyperparams"), "dp1", [DRAWS, LOOKS_UP, ROUNDS]),
        (Told(embed_dtype="bfloat16", takes_state=True), "dp1", [LOOKS_UP, STATE]),
        (low("every second step"), "pp2", [DRAWS, LOOKS_UP, MEAN]),
        (low("clip, every second step"), "dp1", [DRAWS, LOOKS_UP, NORM]),
        (low("adam of few steps"), "dp1", [DRAWS, LOOKS_UP]),
        (low("scaled by 1"), "dp1", [DRAWS, LOOKS_UP]),
    ],
)
def test_what_costs_numbers_is_told_once_before_a_run(task, mesh, expected, caplog):
    api.forget_warnings()
    for _ in range(2):
        make_train_step(task, mesh)
    told = [record.getMessage() for record in caplog.records]
    assert len({*told}) == len(told)
    for pattern in expected:
        assert any(re.search(pattern, text) for text in told)
    for text in told:
        assert any(re.search(pattern, text) for pattern in expected)


OUTSIDE = jax.new_ref(jnp.ones(()))


class Counting(nnx.Module):
    """A layer with a Ref."""

    def __init__(self, kind, rngs):
        self.kind, self.linear = kind, nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        if kind in ("ref", "hijax"):
            self.count = nnx.Variable(jnp.ones(()), **{kind: True})
        elif kind == "held":
            self.count = jax.new_ref(jnp.ones(()))

    def __call__(self, carry, x, at):
        x = self.linear(x)
        if self.kind in ("own", "outside"):
            ref = jax.new_ref(jnp.ones(())) if self.kind == "own" else OUTSIDE
            ref[...] += 1
            x = x * ref[...]
        return carry, x


class Counted(nnx.Module):
    def __init__(self, kind, rngs):
        self.layers = Stack([lambda rngs: Counting(kind, rngs)] * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        return Sums(jnp.sum(y**2), jnp.float32(y.size))


class Blocks(nnx.Module):
    """The same, as a model of Flax as it stands."""

    def __init__(self, kind, rngs):
        self.blocks = nnx.List([Counting(kind, rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            _, x = block((), x, None)
        return x


@dataclasses.dataclass(frozen=True)
class WithRefs(jaxpar.Task):
    kind: str = "own"

    def make_model(self, rngs):
        return Counted(self.kind, rngs)

    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": np.ones((8, 3, WIDTH), np.float32)}, 4, 0)


@dataclasses.dataclass(frozen=True)
class BlocksWithRefs(WithRefs):
    def make_model(self, rngs):
        return Blocks(self.kind, rngs)

    def loss(self, model, batch):
        return jaxpar.mean(model(batch["x"]) ** 2)


HELD = r"count, a Ref: remat would read it again after it was written, .*\nFix: keep numbers"
READ = r"\(test_surprises\.py, line \d+\) has a Ref from outside: remat would read it again"
MODEL = r"^the model of task BlocksWithRefs, a Blocks"


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (WithRefs("ref"), rf"^layer Counting has {HELD}"),
        (WithRefs("outside"), rf"^layer counting {READ}"),
        (BlocksWithRefs("held"), rf"{MODEL} has blocks\.0\.{HELD}"),
        (BlocksWithRefs("outside"), rf"^block 0 {READ}"),
        (WithRefs("hijax"), rf"^layer Counting has {HELD}"),
        (WithRefs("held"), rf"^layer Counting has {HELD}"),
        (BlocksWithRefs("ref"), rf"{MODEL} has blocks\.0\.{HELD}"),
    ],
)
def test_a_ref_of_a_model_is_refused(task, message):
    with pytest.raises(ValueError, match=message):
        make_train_step(task, "dp1")


@pytest.mark.full
def test_a_ref_within_a_call_trains_with_remat():
    task = WithRefs()
    batch, units = (
        task.make_batches("train").batch(0),
        PipelineConfig(num_microbatches=2, remat=True),
    )
    (plain, grads), (again, other_grads) = (
        value_and_grad(task, own)(init_state(task, own), batch)
        for own in (Parallel("dp1"), Parallel("pp2", pipeline=units))
    )
    np.testing.assert_allclose(again[0], plain[0], rtol=RELATIVE_ERROR)
    norms = map(optax.tree.norm, (grads, other_grads))
    np.testing.assert_allclose(*norms, rtol=RELATIVE_ERROR)
