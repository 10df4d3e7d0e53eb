"""The examples learn, and each is on every mesh and schedule what a loop over its layers computes."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_equivalence import full, slow

import jaxpar
from jaxpar import At, MeshConfig, OptimizerConfig, Parallel, PipelineConfig, TrainConfig
from jaxpar.batches import place_batch
from jaxpar.layout import lay_out
from jaxpar.sharding import is_variable
from jaxpar.state import audit, init_state
from jaxpar.step import batch_sharding, make_loss_and_grad, make_train_step
from jaxpar.task import find_task

pytestmark = pytest.mark.law

FOLDER = Path(__file__).parent.parent / "examples"

# Sums in another order differ by float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

SGD = OptimizerConfig(name="sgd", learning_rate=0.05, lr_schedule="constant", warmup_steps=0)
SIZES = {
    "forecaster.py:Forecast": {"num_layers": 8, "width": 16, "seq_len": 8},
    "transformer.py:Characters": {"num_layers": 4, "width": 16, "seq_len": 8},
    "translation.py:Translate": {
        "num_encoders": 3, "num_decoders": 2, "width": 16, "max_letters": 11,
    },
    "mixed.py:Digits": {"num_convs": 2, "num_lstms": 3, "num_denses": 3, "width": 16},
}  # fmt: skip
FORECAST, CHARACTERS, TRANSLATE, DIGITS = SIZES


def make_task(name, **options):
    options = {"batch_size": 16, "optimizer": SGD, **SIZES[name], **options}
    return find_task(f"{FOLDER}/{name}")(**options)


def make_parallel(mesh, shares=None, **pipeline):
    num_devices = int(np.prod(mesh))
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    return Parallel(MeshConfig(*mesh, devices=devices), PipelineConfig(**pipeline), shares)


# --- The plain program: the user's modules on whole arrays, one after the other, on one device.


class PlainStack(nnx.Module):
    """In the place of a Stack: a list of layers, each by itself."""

    def __init__(self, makers, *, rngs):
        with nnx.use_eager_sharding(False):
            self.items = nnx.List([make(rngs) for make in makers])


def run_plainly(model, carry, batch, key):
    """Sums of a batch, and the carry of every layer after it."""
    time_major = getattr(model, "time_major", True)
    block = jax.tree.map(
        lambda a: jnp.swapaxes(a, 0, 1) if time_major and np.ndim(a) > 1 else jnp.asarray(a), batch
    )
    at = At(0, 0, 0, key, block, lambda x, *dims: x, time_major)
    x, after = model.first(block, at), []
    for number, layer in enumerate(model.layers.items):
        new, x = layer(carry[number], x, at._replace(layer=number))
        after.append(new)
    return model.last(x, block, at._replace(layer=len(after))), after


class Plain:
    """A task's model as plain arrays by name, on one device."""

    def __init__(self, task, monkeypatch):
        self.task, self.batches = task, task.make_batches("train", 0)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[type(task).__module__], "Stack", PlainStack)
            self.model = task.make_model(nnx.Rngs(0))
        self.graphdef, self.state = nnx.split(self.model)
        self.grads = jax.jit(jax.value_and_grad(self.loss, has_aux=True))

    def initial_carry(self):
        return [
            layer.initial_carry(self.batches.batch_size) if hasattr(layer, "initial_carry") else ()
            for layer in self.model.layers.items
        ]

    def loss(self, params, carry, batch, step):
        leaves, structure = jax.tree.flatten_with_path(self.state)
        values = [params[name_of(path)] for path, _ in leaves]
        model = nnx.merge(self.graphdef, jax.tree.unflatten(structure, values))
        key = jax.random.fold_in(jax.random.key(0), step)
        sums, carry = run_plainly(model, carry, batch, key)
        return sums.loss / sums.weight, (sums, carry)

    def two_batches(self, params):
        """Of each of two batches loss, sums, gradients and the carry after it, by name."""
        carry, found = self.initial_carry(), []
        for step in range(2):
            batch = self.batches.batch(step)
            carry = self.initial_carry() if starts(batch) else carry
            (loss, (sums, carry)), grads = self.grads(params, carry, batch, step)
            found.append((float(loss), named(sums), grads, carry_by_name(carry)))
        return found

    def two_updates(self, params):
        """The losses of two optimizer steps, and the parameters after them."""
        clip = optax.clip_by_global_norm(TrainConfig().clip_norm)
        optimizer = optax.chain(clip, self.task.make_optimizer(2))
        state, carry, losses = optimizer.init(params), self.initial_carry(), []
        for step in range(2):
            batch = self.batches.batch(step)
            carry = self.initial_carry() if starts(batch) else carry
            (loss, (_, carry)), grads = self.grads(params, carry, batch, step)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
        return losses, params


def starts(batch):
    return bool(batch.get("starts", True))


def name_of(path):
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def named(tree):
    return {name_of(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def carry_by_name(carry):
    return named({str(number): own for number, own in enumerate(carry)})


# --- The same of a state that is laid out on a mesh.


def by_layer(state, layout):
    """Parameters or gradients by the names that they have in the plain program; empty rows are zeros."""
    arrays = {}
    for path, variable in jax.tree.leaves_with_path(state, is_leaf=is_variable):
        name, array = name_of(path), np.asarray(variable.get_value())
        top, _, rest = name.partition("/")
        if top != "layers":
            arrays[name] = array
            continue
        kind, _, rest = rest.partition("/")
        for row, layer in enumerate(layout.slots.rows[layout.kinds.index(kind)]):
            if layer < 0:
                assert not array[row].any(), f"{name}: the empty row {row} is not zero"
            else:
                arrays[f"layers/items/{layer}/{rest}"] = array[row]
    return arrays


def carry_by_layer(carry, layout):
    arrays = {}
    for kind, rows in zip(layout.kinds, layout.slots.rows, strict=True):
        whole = jax.tree.map(lambda v: np.asarray(v.get_value()), carry[kind], is_leaf=is_variable)
        for row, layer in enumerate(rows):
            if layer >= 0:
                own = jax.tree.map(lambda a, row=row: a[row], whole)
                arrays |= named({str(layer): own})
    return arrays


@functools.cache
def plain_program(task):
    with pytest.MonkeyPatch.context() as patch:
        return Plain(task, patch)


@functools.cache
def initial_params(task):
    parallel = make_parallel((1, 1, 1))
    return by_layer(init_state(task, parallel).params, lay_out(task, parallel))


@functools.cache
def plain_batches(task):
    return plain_program(task).two_batches(initial_params(task))


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = np.linalg.norm(actual[name] - value), np.linalg.norm(value)
        assert error <= RELATIVE_ERROR * scale, f"{name}: error {error:.1e} of {scale:.1e}"


def assert_batches_equal_plain(task, parallel):
    """Loss, sums, every gradient and the carry at two batches; the second goes on with the carry."""
    mesh, layout = parallel.mesh.build(), lay_out(task, parallel)
    state, batches = init_state(task, parallel, mesh), task.make_batches("train", 0)
    audit(state)
    assert_close(by_layer(state.params, layout), initial_params(task))
    run = jax.jit(make_loss_and_grad(task, parallel, mesh))
    for number, (loss, sums, grads, carry) in enumerate(plain_batches(task)):
        batch = place_batch(batches, number, batch_sharding(task, parallel, mesh))
        state = dataclasses.replace(state, step=jnp.int32(number))
        (actual, (after, actual_sums)), actual_grads = run(state, batch)
        assert abs(float(actual) - loss) <= RELATIVE_ERROR * abs(loss)
        assert_close(named(actual_sums), sums)
        assert_close(by_layer(actual_grads, layout), grads)
        assert_close(carry_by_layer(after, layout), carry)
        where = jax.tree.map(lambda a: a.sharding, state.carry)
        state = dataclasses.replace(state, carry=jax.device_put(after, where))


LAYOUTS = [
    slow(FORECAST, make_parallel((1, 1, 1), num_microbatches=2)),
    slow(FORECAST, make_parallel((8, 1, 1))),
    (FORECAST, make_parallel((1, 8, 1), num_microbatches=2, num_chunks=4)),
    full(FORECAST, make_parallel((1, 2, 4), num_chunks=2, remat=True)),
    (FORECAST, make_parallel((2, 2, 2), shares=(3, 1), num_microbatches=2, num_chunks=8)),
    full(FORECAST, make_parallel((4, 2, 1), num_chunks=2, placement=(5, 3))),
    slow(CHARACTERS, make_parallel((1, 1, 1))),
    slow(CHARACTERS, make_parallel((8, 1, 1))),
    full(CHARACTERS, make_parallel((1, 2, 4), num_microbatches=4)),
    (CHARACTERS, make_parallel((2, 2, 2), num_microbatches=2, remat=True)),
    (CHARACTERS, make_parallel((4, 2, 1), shares=(1, 1, 1, 5), placement=(1, 3))),
    slow(TRANSLATE, make_parallel((1, 1, 1))),
    slow(TRANSLATE, make_parallel((8, 1, 1))),
    full(TRANSLATE, make_parallel((1, 2, 4), num_microbatches=2)),
    (TRANSLATE, make_parallel((2, 2, 2), shares=(1, 3), num_microbatches=4)),
    (TRANSLATE, make_parallel((4, 2, 1), num_microbatches=2, remat=True)),
    slow(DIGITS, make_parallel((1, 1, 1))),
    slow(DIGITS, make_parallel((8, 1, 1))),
    (DIGITS, make_parallel((1, 8, 1), num_chunks=2)),
    full(DIGITS, make_parallel((1, 2, 4), num_microbatches=2, num_chunks=4)),
    (DIGITS, make_parallel((2, 2, 2), num_microbatches=2, num_chunks=2, remat=True)),
    full(DIGITS, make_parallel((4, 2, 1), num_microbatches=4, num_chunks=8)),
]


def label(value):
    if not dataclasses.is_dataclass(value):
        return value.partition(":")[2]
    pipeline = value.pipeline
    parts = [*value.mesh.sizes.values(), f"M{pipeline.num_microbatches}", f"K{pipeline.num_chunks}"]
    return "-".join(map(str, parts))


@pytest.mark.parametrize(("name", "parallel"), LAYOUTS, ids=label)
def test_loss_metrics_and_gradients_equal_plain(name, parallel):
    assert_batches_equal_plain(make_task(name), parallel)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_layouts_drawn_at_random_equal_plain(seed):
    rng = np.random.default_rng(seed)
    name = rng.choice([FORECAST, CHARACTERS, TRANSLATE, DIGITS])
    has_chunks = name in (FORECAST, DIGITS)
    mesh = rng.permutation([1, 2, 4]) if rng.random() < 0.5 else (2, 4, 1)
    parallel = make_parallel(
        tuple(map(int, mesh)),
        num_microbatches=int(rng.choice([1, 2, 4])),
        num_chunks=int(rng.choice([1, 2, 4])) if has_chunks else 1,
        schedule=str(rng.choice(["1f1b", "gpipe"])),
        remat=bool(rng.random() < 0.5),
    )
    assert_batches_equal_plain(make_task(str(name)), parallel)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        (FORECAST, make_parallel((2, 2, 2), num_microbatches=2, num_chunks=4)),
        (CHARACTERS, make_parallel((1, 2, 4), num_microbatches=2)),
        (TRANSLATE, make_parallel((4, 2, 1), num_microbatches=2)),
        (DIGITS, make_parallel((1, 8, 1), num_microbatches=2, num_chunks=2)),
    ],
    ids=label,
)
def test_parameters_agree_after_two_optimizer_steps(name, parallel):
    task = make_task(name)
    expected_losses, expected = plain_program(task).two_updates(initial_params(task))
    mesh = parallel.mesh.build()
    state, losses = init_state(task, parallel, mesh), []
    step = make_train_step(task, parallel, TrainConfig(num_steps=2), mesh)
    for number in range(2):
        batches = task.make_batches("train", 0)
        batch = place_batch(batches, number, batch_sharding(task, parallel, mesh))
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    audit(state)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(by_layer(state.params, lay_out(task, parallel)), expected)


@pytest.mark.parametrize(
    ("name", "mesh", "rate"),
    [
        (FORECAST, "dp2pp2tp2", 0.005),
        full(CHARACTERS, "pp2tp4", 0.01),
        full(TRANSLATE, "dp4pp2", 0.01),
        full(DIGITS, "dp2pp4", 0.01),
    ],
)
def test_example_learns(name, mesh, rate, tmp_path):
    task = make_task(name, optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=0))
    train = TrainConfig(num_steps=20, checkpoint_every=0, out_dir=str(tmp_path / "run"))
    result = jaxpar.fit(task, mesh, train)
    assert np.mean(result.losses[-4:]) < 0.95 * np.mean(result.losses[:4])
    for split in ("valid", "test"):
        evaluation = result.evaluations[split]
        assert np.isfinite([*evaluation.metrics.values(), *evaluation.baseline.values()]).all()
        assert evaluation.baseline


def test_translation_refuses_chunks_of_time():
    parallel = make_parallel((1, 2, 4), num_chunks=2)
    with pytest.raises(ValueError, match="num_chunks=2 would show a decoder one part"):
        init_state(make_task(TRANSLATE), parallel)
