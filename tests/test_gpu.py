"""On a GPU: the numbers of the CPU, and what a CPU cannot show.

Run where there is one:

    JAX_PLATFORMS=cuda,cpu python -m pytest -n 0 -m gpu
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.laws import MODEL, RELATIVE_ERROR, assert_close, make_batch, make_settings, with_optimizer
from lib.models import MAKERS, Regress

from jaxpar import OptimizerConfig, init_state, make_train_step, value_and_grad
from jaxpar.lm import LM
from jaxpar.nn import LSTM, LSTMCarry, lstm_layer
from jaxpar.planning import compare, estimate_step, find_machine

pytestmark = pytest.mark.gpu

# A number may differ by what so large a change of every parameter, a few roundings of 6e-8, makes of it by
# the mean square of some draws: each platform rounds in its own way, and these models make much of it.
ROUNDINGS, DRAWS = 2.5e-7, 4


@pytest.fixture(autouse=True)
def full_float32():
    """Not TF32, whose rounding would hide mistakes."""
    if {device.platform for device in jax.devices()} != {"gpu"}:
        pytest.fail("JAX uses no GPU; set JAX_PLATFORMS=cuda,cpu")
    with jax.default_matmul_precision("highest"):
        yield


def mesh_on(platform, parallel):
    """A mesh of one device."""
    return parallel.mesh.build(jax.devices(platform)[:1])


def numbers(settings, platform, change=0.0, seed=0):
    """Loss, and gradients and carry by name; of parameters that are changed by so much, in relation."""
    task, parallel, _ = settings
    mesh, rng = mesh_on(platform, parallel), np.random.default_rng(seed)
    state = init_state(task, parallel, mesh=mesh)
    params = jax.tree.map(
        lambda a: a * (1 + change * rng.standard_normal(a.shape).astype(a.dtype)), state.params
    )
    is_language = isinstance(task, LM)
    batch = make_batch(settings) if is_language else task.make_batches("train", 0).batch(0)
    step = value_and_grad(task, parallel, mesh=mesh)
    (loss, (after, _)), grads = step(dataclasses.replace(state, params=params), batch)
    arrays = api.stored(task, parallel, dataclasses.replace(after, params=grads))
    found = {n: a for n, a in arrays.items() if n.startswith(("params/", "carry/"))}
    return {"loss": np.asarray(loss)} | found


LAYOUTS = {
    "at once": ((1, 1), {}),
    "in units": ((2, 4), {"remat": True}),
    "carries": ((1, 4), {"remat": True, "remat_keeps": "carries"}),
    "host": ((1, 4), {"remat": True, "remat_keeps": "host"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_language_model_is_the_cpus(name):
    units, options = LAYOUTS[name]
    expected = numbers(make_settings(), "cpu")
    actual = numbers(make_settings(units=units, **options), "gpu")
    assert_close(actual, expected)


@pytest.mark.parametrize(("width", "rows"), [(192, 5), (1024, 64), (2048, 128), (1024, 200)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_equals_the_loop(width, rows, dtype):
    """And itself, when it runs twice."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    layer = LSTM(width, rngs=nnx.Rngs(0), learn_initial=True)
    carry, d = (draw(rows, width), draw(rows, width)), draw(12, rows, width)
    x, resets = draw(12, rows, width).astype(dtype), jnp.asarray(rng.random((12, rows)) < 0.1)
    new = LSTMCarry(draw(rows, width), draw(rows, width))
    plan = api.lstm_kernel(rows, width, dtype)

    def loss(params, carry, x, new, how):
        after, y = lstm_layer(params, LSTMCarry(*carry), x, resets, new, how)
        return jnp.sum(d * y) + sum(map(jnp.sum, after)), (after, y)

    def run(how):
        with jax.default_matmul_precision("default"):
            of = jax.jit(
                jax.value_and_grad(lambda *args: loss(*args, how), (0, 1, 2, 3), has_aux=True)
            )
            return jax.tree.leaves(of(layer.params, carry, x, new))

    found, again, wanted = run(plan), run(plan), run(8)
    for a, b, c in zip(found, again, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
        far = np.linalg.norm(np.float32(a) - np.float32(c)) / np.linalg.norm(np.float32(c))
        assert far < (1e-2 if dtype == "bfloat16" else 2e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_language_model_with_kernels_is_that_with_loops(name):
    """Packed text, chunks of time and what is computed again: up to the rounding to TF32."""
    units, options = LAYOUTS[name]

    def of(**own):
        task = LM(
            2, 256, 256, vocab_size=512, batch_size=64, seq_len=32, packed=True, dropout=0.0, **own
        )
        with jax.default_matmul_precision("default"):
            return numbers(make_settings(units=units, task=task, **options), "gpu")

    found, wanted = of(fused=True), of()
    for key, array in wanted.items():
        assert np.linalg.norm(found[key] - array) <= 2e-3 * np.linalg.norm(array), key


KINDS = [kind for kind in MAKERS if "wide" not in kind]
PAIRS = zip(KINDS[::2], KINDS[1::2], strict=True)
IMAGES = api.task_class(f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits")(
    channels=(8, 16), widths=(24, 16), batch_size=16,
    optimizer=OptimizerConfig("sgd", warmup_steps=0),
)  # fmt: skip
MODELS = {**{" and ".join(kinds): Regress(kinds) for kinds in PAIRS}, "convolutions": IMAGES}


@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_the_cpus(name):
    """Up to what a few roundings of its parameters do to it there."""
    settings = make_settings(task=MODELS[name])
    expected = numbers(settings, "cpu")
    changed = [numbers(settings, "cpu", ROUNDINGS, seed) for seed in range(DRAWS)]
    actual = numbers(settings, "gpu")
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        error, *moved = (np.linalg.norm(part[key] - value) for part in (actual, *changed))
        allowed = np.sqrt(np.mean(np.square(moved)))
        least = RELATIVE_ERROR * np.linalg.norm(value)
        assert error <= max(allowed, least), f"{key}: error {error:.1e}, allowed {allowed:.1e}"


def test_updates_on_the_host_are_those_on_the_gpu():
    """Adam's moments lie in the host's memory, and three steps give the same parameters."""
    reached = {}
    for mode in ("replicated", "host"):
        settings = make_settings(task=with_optimizer("adam"), layout={"update": mode})
        state, step = init_state(*settings), make_train_step(*settings)
        for seed in range(3):
            state, _ = step(state, make_batch(settings, seed=seed))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)}
        assert ("pinned_host" in kinds) == (mode == "host")
        reached[mode] = api.params_of(settings.task, settings.parallel, state)
    assert_close(reached["host"], reached["replicated"])


def test_what_remat_keeps_on_the_host_leaves_the_gpus_memory():
    task = dataclasses.replace(MODEL, seq_len=4096, batch_size=64)
    temporary = {}
    for keeps in ("device", "host"):
        settings = make_settings(units=(1, 64), task=task, remat=True, remat_keeps=keeps)
        compiled = api.lowered_step(task, settings.parallel).compile()
        temporary[keeps] = compiled.memory_analysis()
    steps_rows_units, chunks = 4096 * 64 * 16, 64
    inputs, carries = steps_rows_units, chunks * task.num_layers * 2 * 64 * 16
    kept = 4 * (inputs + carries)  # bytes
    saved = temporary["device"].temp_size_in_bytes - temporary["host"].temp_size_in_bytes
    assert saved >= 0.99 * kept
    assert temporary["host"].host_temp_size_in_bytes >= kept


def test_a_step_runs_beside_what_is_said_of_it():
    machine = find_machine()
    assert machine.platform == "gpu"
    assert machine.memory_bytes > 4e9
    cost = compare(estimate_step(LM(2, 64, 64, batch_size=8, seq_len=16), "dp1"))
    assert len(cost.measured) == 3
    assert cost.memory_bytes == cost.program.memory.total


def test_a_run_begun_on_the_gpu_ends_on_two_simulated_devices(tmp_path, text):
    """As one that the CPU ran alone: the checkpoint, the place in the text, the dropout masks."""

    def run(folder, platform, num_steps, *options):
        arguments = [
            *("train", "lm", "--corpus", text, "--hidden-size", 32, "--embed-size", 32, "--num-layers", 2),
            *("--batch-size", 4, "--seq-len", 16, "--dropout", 0.2, "--train.num-steps", num_steps),
            *("--optimizer.name", "sgd", "--optimizer.learning-rate", 0.5, "--optimizer.warmup-steps", 0),
            *("--optimizer.lr-schedule", "constant"),
            *("--train.log-every", 1, "--train.checkpoint-every", 10),
            *("--train.out-dir", tmp_path / folder, *options),
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "jaxpar", *map(str, arguments)],
            env={**os.environ, "JAX_PLATFORMS": platform, "JAX_DEFAULT_MATMUL_PRECISION": "highest"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert re.search(r"devices +1 x (?!cpu)", run("mixed", "cuda", 10))
    pipeline = ("--simulate", 2, "--mesh", "pp2", "--pipeline.num-microbatches", 2)
    run("mixed", "cpu", 20, "--resume", *pipeline)
    run("alone", "cpu", 20)
    mixed, alone = (losses_of(tmp_path / name) for name in ("mixed", "alone"))
    assert len(alone) == 20
    np.testing.assert_allclose(mixed, alone, rtol=RELATIVE_ERROR)


def losses_of(folder):
    """Of training, step by step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "tokens_per_second" in line]
