"""Programs of a process: runs that differ in numbers alone share them, and others do not."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import ArrayBatches, OptimizerConfig, Parallel, Report, Stack, Sums, Task, TrainConfig
from jaxpar.base.jax_private import _executables, call_once
from jaxpar.base.keys import key_data, new_key
from jaxpar.data.batches import put_batch
from jaxpar.nn import GRU
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding
from jaxpar.trace.numbers import with_numbers

pytestmark = pytest.mark.fresh
FACTOR = 1.0


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = Stack([lambda rngs: GRU(4, rngs=rngs)] * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        return Sums(
            FACTOR * jnp.sum(y**2 * batch["weight"][None, :, None]), jnp.sum(batch["weight"])
        )


@dataclasses.dataclass(frozen=True)
class Small(Task):
    optimizer: OptimizerConfig = OptimizerConfig(warmup_steps=0)

    def make_model(self, rngs):
        return Model(rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).normal(size=(16, 6, 4)).astype(np.float32)
        return ArrayBatches({"x": x}, 4, seed)


@dataclasses.dataclass(frozen=True)
class Own(Small):
    rate: float = 1e-3

    def make_optimizer(self, num_steps):
        rates = optax.warmup_cosine_decay_schedule(0.0, self.rate, 2, num_steps)
        return optax.chain(optax.clip_by_global_norm(100 * self.rate), optax.lion(rates))


@contextlib.contextmanager
def compiled():
    """The names of programs that are compiled meanwhile: a list that grows."""
    events = []

    def note(name, *_, fun_name="", **__):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def losses(task, mesh, folder, **train):
    settings = TrainConfig(out_dir=str(folder), log_every=1, **train)
    return jaxpar.fit(task, mesh, settings, quiet=True).losses


OTHERS = {
    "of a config": (
        Small(OptimizerConfig("adamw", 1e-3, warmup_steps=2, weight_decay=0.01)),
        Small(OptimizerConfig("adamw", 2e-2, warmup_steps=3, weight_decay=0.1)),
    ),
    "one's own": (Own(), Own(rate=1e-2)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_run_with_other_numbers_compiles_nothing(kind, tmp_path):
    task, other = OTHERS[kind]
    mesh = "dp1" if kind == "of a config" else "dp2"
    # A run without clipping is another program.
    short = {"num_steps": 4, "clip_norm": 1.0}
    first = losses(task, mesh, tmp_path / "1", **short)
    with compiled() as programs:
        numbers = {"num_steps": 5, "clip_norm": 0.5, "seed": 1, "max_skipped": 3}
        second = losses(other, mesh, tmp_path / "2", nonfinite="skip", **numbers)
        assert programs == []
        again = losses(task, mesh, tmp_path / "3", **short)
    assert programs == []
    assert again == first
    assert second[:4] != first


def test_few_programs_are_compiled_before_the_first_step(tmp_path):
    """The step, its state, those that draw and run what is checked, and some small ones."""
    jax.clear_caches()
    _executables.clear()
    counts = list[int]()

    class Count(Report):
        def progress(self, progress, num_steps):
            counts.append(len(programs))

    with compiled() as programs:
        settings = TrainConfig(2, out_dir=str(tmp_path / "run"), log_every=1, checkpoint_every=0)
        jaxpar.fit(Small(), "dp2", settings, report=Count())
    first, second = counts
    assert first <= 16
    assert second == first


def test_what_the_model_reads_is_never_out_of_date(tmp_path, monkeypatch):
    first = losses(Small(), "dp1", tmp_path / "1", num_steps=2)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    second = losses(Small(), "dp1", tmp_path / "2", num_steps=2)
    assert second[0] == 4 * first[0]


def test_only_equal_programs_are_one():
    x = np.arange(3, dtype=np.float32)

    def run(factor, **options):
        return call_once(jax.jit(lambda x: x * jnp.arange(3) * factor, **options), x)

    with jax.numpy_dtype_promotion("standard"), compiled() as programs:
        found = [run(2.0), run(2.0)]
        assert len(programs) == 1
        found += [run(3.0)]
        assert len(programs) == 2
        other = jax.local_devices()[1]
        moved = run(3.0, out_shardings=jax.sharding.SingleDeviceSharding(other))
    np.testing.assert_array_equal(found, [[0, 2, 8], [0, 2, 8], [0, 3, 12]])
    assert moved.devices() == {other}


def test_a_program_that_calls_python_is_its_own():
    def run(number):
        shape = jax.ShapeDtypeStruct((), np.float32)
        called = lambda: jax.pure_callback(lambda: np.float32(number), shape)  # noqa: E731
        return float(call_once(jax.jit(called)))

    assert [run(1), run(2)] == [1, 2]


OPTIMIZERS = {
    "adamw": lambda n: optax.adamw(optax.cosine_decay_schedule(n, 7), b1=1 - n, weight_decay=n),
    "lion": lambda n: optax.chain(optax.clip(n), optax.lion(n, b2=1 - n)),
    "adafactor": lambda n: optax.adafactor(n),
    "noise": lambda n: optax.chain(optax.add_noise(n, n, 3), optax.sgd(n, momentum=1 - n)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_given_numbers_is_the_same_one(name):
    """With those of another one it is that other one."""
    params = {
        "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(3, np.float32),
    }
    one, two = map(OPTIMIZERS[name], (0.01, 0.03))

    def moved(update, *numbers):
        @jax.jit
        def step(grads, state, *numbers):
            with jax.numpy_dtype_promotion("standard"):
                return update(*numbers, grads, state, params)

        state = one.init(params)
        for _ in range(3):
            updates, state = step(params, state, *numbers)
        return updates

    _, run = with_numbers(one.update, params, one.init(params), params)
    numbers, _ = with_numbers(two.update, params, one.init(params), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        moved(run, numbers), moved(two.update),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, -1, 2**40 + 5])
@pytest.mark.parametrize("x64", [False, True])
def test_the_numbers_of_a_key_are_jax_s(seed, x64):
    with jax.enable_x64(x64):
        expected = jax.random.key_data(new_key(seed))
        np.testing.assert_array_equal(key_data(seed), expected)
        assert key_data(seed).dtype == expected.dtype


@pytest.mark.parametrize("update", ["replicated", "host"])
def test_a_step_that_was_compiled_to_be_read_runs_as_it_is(update):
    setup = Setup.of(Small(), Parallel("dp1", update=update))
    step, state = setup.train_step(), setup.init_state()
    batch = put_batch(setup.task.example_batch(), batch_sharding(setup))
    step.lower(state, batch).compile()
    with compiled() as programs:
        step.run(state, batch)
    assert not {"jit(step)", "jit(gradients)"} & {*programs}
