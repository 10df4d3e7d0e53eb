"""cuDNN's LSTM, as far as a machine without a GPU can tell.

`jax.experimental.rnn` documents the layout of cuDNN's weights, and has a reference of what cuDNN computes
with them. Here JAX compiles its two calls of cuDNN as that reference, so that all around them runs: packing,
carried state, gradients, residuals in the slots of a pipeline. The calls themselves are looked at in programs
for CUDA.
"""

import dataclasses
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import rnn
from jax.interpreters import mlir
from test_equivalence import full

from jaxpar import At, MeshConfig, Parallel, PipelineConfig, init_state
from jaxpar.nn.cudnn import cudnn_lstm, pack, unpack
from jaxpar.nn.lstm import LSTM, LSTMCarry, LSTMParams, lstm_layer
from jaxpar.step import make_loss_and_grad
from jaxpar.tasks.lm import kernel
from jaxpar.tasks.lm.kernel import KernelChoice, Work
from jaxpar.tasks.lm.streams import Batch
from jaxpar.tasks.lm.task import LM

# float32 sums in another order.
RELATIVE_ERROR = 1e-5
WORKSPACE, RESERVE = 7, 3  # elements
TASK = LM(
    num_layers=3, hidden_size=8, embed_size=6, vocab_size=96, dropout=0.3, batch_size=8, seq_len=6
)


def assert_close(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(actual - expected) <= RELATIVE_ERROR * np.linalg.norm(expected)


def reference(x, h, c, w, lengths, *, input_size, hidden_size, num_layers, **_):
    """What cuDNN's forward pass computes; its reserve space marks what it was computed from."""
    sizes = input_size, hidden_size, num_layers
    kernels = rnn.unpack_lstm_weights(w, *sizes, False)
    out = rnn.lstm_ref(x, h, c, *kernels, lengths, *sizes, 0.0, False)
    return *out, jnp.stack([x.sum(), h.sum() + c.sum(), out[0].sum()])


def reference_backward(dy, dh, dc, x, h, c, w, y, reserve, lengths, **sizes):
    """And its backward pass: wrong when it gets the residuals of another unit."""
    (y_again, *_, reserve_again), vjp = jax.vjp(
        lambda x, h, c, w: reference(x, h, c, w, lengths, **sizes), x, h, c, w
    )
    is_same = jnp.allclose(reserve, reserve_again, 1e-4, 1e-4) & jnp.allclose(
        y, y_again, 1e-4, 1e-4
    )
    grads = vjp((dy, dh, dc, jnp.zeros_like(reserve)))
    return [jnp.where(is_same, grad, jnp.nan) for grad in grads]


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """A stand-in for what the CUDA plugin brings."""
    sizes = "compute_rnn_workspace_reserve_space_sizes"
    monkeypatch.setattr(rnn.gpu_rnn, sizes, lambda *_: (WORKSPACE, RESERVE), raising=False)
    plugin = types.SimpleNamespace(build_rnn_descriptor=lambda *numbers: repr(numbers).encode())
    for primitive, on_cpu, on_cuda in (
        (rnn.rnn_fwd_p, reference, rnn.gpu_rnn._rnn_fwd_lowering),
        (rnn.rnn_bwd_p, reference_backward, rnn.gpu_rnn._rnn_bwd_lowering),
    ):
        on_cpu = mlir.lower_fun(on_cpu, multiple_results=True)
        mlir.register_lowering(primitive, on_cpu, platform="cpu")
        on_cuda = functools.partial(on_cuda, plugin, "cu")
        mlir.register_lowering(primitive, on_cuda, platform="cuda")


def draw(T, B, I, H, seed=0):  # noqa: E741
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = LSTMParams(normal(I, 4, H) / I**0.5, normal(H, 4, H) / H**0.5, normal(4, H))
    return params, LSTMCarry(normal(B, H), normal(B, H)), normal(T, B, I)


def results(layer, params, carry, x):
    """State, outputs, and gradients with respect to everything."""

    @jax.jit
    def run(params, carry, x):
        out, vjp = jax.vjp(layer, params, carry, x)
        weights = [jnp.cos(jnp.arange(a.size) / 3).reshape(a.shape) for a in jax.tree.leaves(out)]
        return out, vjp(jax.tree.unflatten(jax.tree.structure(out), weights))

    return run(params, carry, x)


@pytest.mark.law
@settings(max_examples=6)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_packed_weights_in_the_reference_give_the_layer_and_its_gradients(sizes, seed):
    arguments = draw(*sizes, seed)
    expected, actual = (results(layer, *arguments) for layer in (lstm_layer, cudnn_lstm))
    jax.tree.map(assert_close, actual, expected)


def test_the_flat_array_is_as_long_as_cudnns_and_has_no_second_bias():
    params, *_ = draw(1, 1, 5, 7)
    weights = pack(params)
    assert weights.size == rnn.get_num_params_in_lstm(5, 7, 1, False)
    *_, second_bias = rnn.unpack_lstm_weights(weights, 5, 7, 1, False)
    assert not np.any(list(second_bias.values()))
    jax.tree.map(np.testing.assert_array_equal, unpack(weights, params), params)


def test_residuals_hold_no_weights():
    """A pipeline keeps them in its slots: nothing as large as the weights, packed or not."""
    params, carry, x = draw(2, 2, 9, 9)
    _, vjp = jax.vjp(lambda params: cudnn_lstm(params, carry, x), params)
    weights = {id(leaf) for leaf in jax.tree.leaves(params)}
    sizes = [leaf.size for leaf in jax.tree.leaves(vjp) if id(leaf) not in weights]
    assert max(sizes) == x.size


def test_other_dtypes_are_refused():
    params, carry, x = draw(2, 2, 4, 4)
    with pytest.raises(ValueError, match="inputs are bfloat16; cuDNN's LSTM takes float32"):
        cudnn_lstm(params, carry, x.astype(jnp.bfloat16))


# ---- whole steps ----

# data, stage, tensor; microbatches, chunks.
LAYOUTS = [((1, 1, 1), (1, 1)), ((2, 1, 1), (1, 1)), ((1, 1, 1), (2, 1)), ((2, 2, 1), (2, 2))]


@pytest.fixture
def no_obstacle(monkeypatch):
    monkeypatch.setattr(kernel, "_obstacle_to_cudnn", lambda *_: None)


def make_parallel(mesh, units, **pipeline):
    return Parallel(
        MeshConfig(*mesh, devices=tuple(range(math.prod(mesh)))),
        PipelineConfig(num_microbatches=units[0], num_chunks=units[1], **pipeline),
    )


def with_kernel(name, **changes):
    return dataclasses.replace(TASK, kernel=name, **changes)


def traced(task, parallel):
    """The program of loss and gradients, and arguments for it."""
    mesh = parallel.mesh.build()
    state = init_state(task, parallel, mesh)
    tokens = np.random.default_rng(0).integers(0, 96, (8, 7), dtype=np.int32)
    state = dataclasses.replace(state, carry=jax.tree.map(lambda a: a + 0.1, state.carry))
    arguments = state, Batch(tokens[:, :-1], tokens[:, 1:], False)
    return jax.jit(make_loss_and_grad(task, parallel, mesh)).trace(*arguments), arguments


def loss_and_grads(task, parallel):
    program, arguments = traced(task, parallel)
    return program.lower().compile()(*arguments)


@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "options"),
    [full(*LAYOUTS[1], {}), (*LAYOUTS[3], {}), full(*LAYOUTS[3], {"remat": True})],
)
def test_steps_equal_those_of_the_scan(no_obstacle, mesh, units, options):
    parallel = make_parallel(mesh, units, **options)
    (loss, (carry, sums)), grads = loss_and_grads(TASK, parallel)
    expected = (loss, tuple(carry.values()), sums, grads)
    (loss, (carry, sums)), grads = loss_and_grads(with_kernel("cudnn"), parallel)
    # The kind of layer has another name; all else is alike.
    actual = (loss, tuple(carry.values()), sums, grads)
    assert list(carry) == ["lstm"]
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(("mesh", "units"), LAYOUTS)
def test_programs_for_cuda_call_cudnn_once_forward_and_once_backward(no_obstacle, mesh, units):
    parallel = make_parallel(mesh, units)
    program = traced(with_kernel("cudnn", dropout=0.0), parallel)[0]
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    H, T, B = 8, 6 // parallel.num_chunks, parallel.microbatch_rows(8)
    x, state, w = f"{B}x{T}x{H}", f"1x{B}x{H}", f"{8 * H * (H + 1)}"
    calls = re.findall(
        r"custom_call @(cudnn_\w+)\(.*opaque = \"(.*?)\".*: (\(.*\)) -> (\(.*\))", text
    )
    calls = [
        (*call[:2], *(re.findall(r"<(.*?)xf32>", part) for part in call[2:])) for call in calls
    ]
    opaque = f"({H}, {H}, 1, {B}, {T}, 0.0, False, True, {WORKSPACE}, {RESERVE})"
    after = [str(WORKSPACE), str(RESERVE)]
    assert calls == [
        ("cudnn_rnn_ffi", opaque, [x, state, state, w], [x, state, state, *after]),
        (
            "cudnn_rnn_bwd_ffi", opaque, [x, state, state, x, state, state, w, x, str(RESERVE), w],
            [x, state, state, w, str(WORKSPACE)],
        ),
    ]  # fmt: skip


# ---- the choice ----


def mesh_of(platform="gpu", version="cuda 13000", kind="NVIDIA H200", tensor=1):
    client = types.SimpleNamespace(platform_version=version)
    device = types.SimpleNamespace(
        platform=platform, device_kind=kind, client=client, process_index=0
    )
    sizes = {"data": 1, "stage": 1, "tensor": tensor}
    return types.SimpleNamespace(devices=np.array([device]), shape=sizes)


OBSTACLES = {
    "cpu": ({}, {}, r"needs GPUs of NVIDIA, the mesh has cpu \(cpu\)", "use kernel='scan'"),
    "rocm": (
        {"version": "PJRT C API\nrocm 70000", "kind": "AMD Instinct MI300X"}, {},
        r"needs GPUs of NVIDIA, the mesh has AMD Instinct MI300X \(gpu\)", "use kernel='scan'",
    ),
    "tensor": (
        {"tensor": 4}, {}, "computes whole layers, tensor=4 splits them",
        "use tensor=1, or kernel='scan'",
    ),
    "bfloat16": (
        {"tensor": 1}, {"dtype": "bfloat16"}, "in float32 alone, dtype='bfloat16'",
        "use dtype='float32', or kernel='scan'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSTACLES)
def test_where_cudnn_cannot_run_it_is_refused_and_auto_says_why(name):
    mesh, changes, fact, remedy = OBSTACLES[name]
    mesh = mesh_of(**mesh) if mesh else MeshConfig(devices=(0,)).build()
    with pytest.raises(ValueError, match=f"kernel='cudnn' cannot run: .*{fact}; {remedy}$"):
        with_kernel("cudnn", **changes).check(Parallel(), mesh)
    task = with_kernel("auto", **changes).resolve(Parallel(), mesh)
    assert task.kernel == "scan"
    task.check(Parallel(), mesh)
    choice = kernel.choose_kernel(Work(8, 0.3, task.dtype, 6, 8), mesh)
    assert choice.name == "scan"
    assert re.match(f"cudnn cannot run: .*{fact}$", choice.reason)


def test_the_table_of_a_run_tells_why_a_kernel_was_chosen(text):
    task = LM(kernel="auto", corpus=str(text))
    mesh = MeshConfig(devices=(0,)).build()
    told = dict(task.resolve(Parallel(), mesh).describe())
    assert re.match(r"scan; cudnn cannot run: it needs GPUs of NVIDIA", told["kernel"])
    assert "kernel" not in dict(LM(corpus=str(text)).resolve(Parallel(), mesh).describe())


def test_a_mesh_without_the_plugin_is_refused(monkeypatch):
    monkeypatch.delattr(rnn.gpu_rnn, "compute_rnn_workspace_reserve_space_sizes")
    with pytest.raises(ValueError, match=r"this JAX came without it; use pip install .*cuda13"):
        with_kernel("cudnn").check(Parallel(), mesh_of())


def test_on_a_gpu_the_choice_is_the_tasks_or_the_faster_one(monkeypatch):
    parallel = Parallel("pp2", PipelineConfig(num_chunks=2, num_microbatches=4))
    for name in ("cudnn", "scan"):
        with_kernel(name).check(parallel, mesh_of())
        assert with_kernel(name).resolve(parallel, mesh_of()).kernel == name
    asked = []
    for scan, cudnn, faster in ((2e-3, 1e-3, "cudnn"), (1e-3, 2e-3, "scan")):

        def measure(seconds, work, device):
            asked.append(work)
            return seconds

        seconds = {"scan": scan, "cudnn": cudnn}
        monkeypatch.setattr(kernel, "measure_kernels", functools.partial(measure, seconds))
        work = Work(8, 0.3, "float32", 3, 2)
        said = f"a layer forward and backward: scan {1e3 * scan:.2f} ms, cudnn {1e3 * cudnn:.2f} ms"
        assert kernel.choose_kernel(work, mesh_of()) == KernelChoice(faster, said)
        assert with_kernel("auto").resolve(parallel, mesh_of()).kernel == faster
    assert asked == [work] * 4  # steps of a chunk, rows of a microbatch


def test_both_kernels_are_measured():
    seconds = kernel.measure_kernels(Work(8, 0.3, "float32", 4, 2), jax.devices()[0])
    assert list(seconds) == ["scan", "cudnn"]
    assert all(0 < value < math.inf for value in seconds.values())


@pytest.mark.law
def test_a_layer_on_cudnn_is_the_layer():
    layers = [made(6, rngs=nnx.Rngs(1), dropout=0.4) for made in kernel.LAYERS.values()]
    assert isinstance(layers[1], LSTM)
    graphdefs, params = zip(*map(nnx.split, layers), strict=True)
    _, carry, x = draw(5, 3, 6, 6)
    at = At(layer=2, time=0, row=0, key=jax.random.key(3))
    expected, actual = (
        results(lambda p, c, x, g=graphdef: nnx.merge(g, p)(c, x, at), params[0], carry, x)
        for graphdef in graphdefs
    )
    jax.tree.map(assert_close, actual, expected)
