"""What keeps a language model from learning by heart: as NumPy has it, and the same on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from lib import api
from lib.awd import awd
from lib.float64 import forward
from lib.laws import MODEL, assert_same_as_plain, make_settings, more

from jaxpar import MeshConfig, Parallel, TrainConfig, init_state
from jaxpar.lm import LM, Batch
from recipes.awd import AWD, KERNELS, WORDS

ALL = {
    "input_dropout": 0.4,
    "output_dropout": 0.1,
    "word_dropout": 0.2,
    "drop_connect": 0.5,
    "ar": 2.0,
    "tar": 1.0,
}
B, T, H, V = 4, 5, 6, 11
ONE = Parallel(MeshConfig(devices=(0,)))
SMALL = LM(3, H, H, V, dropout=0.3, batch_size=B, seq_len=T)
SINGLE = {
    "plain": SMALL,
    "held": awd(SMALL),
    "inputs": awd(SMALL, input_dropout=0.5),
    "outputs": awd(SMALL, output_dropout=0.0),
    "words": awd(SMALL, word_dropout=0.5),
    "kernels": awd(SMALL, drop_connect=0.5),
    "ar": awd(SMALL, ar=2.0),
    "tar": awd(SMALL, tar=3.0),
    "all": awd(SMALL, **ALL),
}


# ---- NumPy ----


def kept(key, rate, shape):
    """0 where dropped, 1 / (1 - rate) elsewhere."""
    return np.asarray(jax.random.bernoulli(key, 1 - rate, shape), np.float64) / (1 - rate)


def mask_of_inputs(key, layer, rate, is_held):
    """[T, B, H]: by layer, time and row; by layer and row alone where it is held."""
    fold, key = jax.random.fold_in, jax.random.fold_in(key, layer)
    if is_held:
        return np.stack([kept(fold(key, row), rate, (H,)) for row in range(B)])[None]
    return np.stack(
        [[kept(fold(fold(key, time), row), rate, (H,)) for row in range(B)] for time in range(T)]
    )


def textbook_loss(params, batch, task, key):
    """The sum of the negative log-likelihoods, and what large and quick activations cost."""
    num_layers, fold, is_held = SMALL.num_layers, jax.random.fold_in, isinstance(task, AWD)
    how = task if is_held else awd(task)
    rates = [how.input_dropout, *[how.dropout] * (num_layers - 1), how.output_dropout]
    masks = [mask_of_inputs(key, n, rate, is_held) for n, rate in enumerate(rates)]
    inputs, targets = batch.inputs_BT.T, batch.targets_BT.T
    scale_V = kept(fold(key, WORDS), how.word_dropout, (V,))
    x = params["embedding.table"][inputs] * scale_V[inputs][..., None]
    for n in range(num_layers):
        w_x, w_h, b = (params[f"layers.{n}.{name}"] for name in ("w_x", "w_h", "b"))
        w_h = w_h * kept(fold(fold(key, KERNELS), n), how.drop_connect, w_h.shape)
        zeros = np.zeros((B, H))
        x = forward((w_x, w_h, b), (zeros, zeros), x * masks[n])[1]
    y = x * masks[-1]
    changes_TB = np.mean(np.diff(x, axis=0, prepend=x[:1]) ** 2, -1)
    logits = y @ params["head.kernel"] + params["head.bias"]
    counts = targets >= 0
    picked = np.take_along_axis(logits, np.where(counts, targets, 0)[..., None], -1)[..., 0]
    nll = np.log(np.sum(np.exp(logits), -1)) - picked
    cost = how.ar * np.mean(y**2, -1) + how.tar * changes_TB
    return np.sum(np.where(counts, nll + cost, 0))


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.more) if n == "tar" else n for n in SINGLE]
)
def test_loss_and_gradients_are_those_of_a_textbook_in_float64(name):
    task, train = SINGLE[name], TrainConfig(seed=3)
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, V, (2, B, T), dtype=np.int32)
    targets[0, 1] = -1
    batch = Batch(inputs, targets, starts=True)
    state = init_state(task, ONE, train)
    state = dataclasses.replace(state, step=state.step + 7)
    found = api.gradients(task, ONE, batch, state, train)

    key = jax.random.fold_in(jax.random.key(3), 7)
    params = {name: np.float64(array) for name, array in found.weights.items()}
    num_targets = B * T - 1
    expected = textbook_loss(params, batch, task, key) / num_targets
    np.testing.assert_allclose(found.loss, expected, rtol=1e-6)
    # Along a random direction, by a step into the complex plane.
    for moved in params:
        direction = rng.normal(size=params[moved].shape)
        there = {**params, moved: params[moved] + 1e-30j * direction}
        slope = textbook_loss(there, batch, task, key).imag / 1e-30 / num_targets
        grad = np.float64(found.grads[moved])
        size = np.linalg.norm(grad) * np.linalg.norm(direction)
        assert abs(np.sum(grad * direction) - slope) <= 1e-6 * size, moved


@pytest.mark.full
def test_in_evaluation_nothing_is_dropped_and_nothing_is_added():
    def evaluated(task):
        sums, _ = api.evaluation(task, ONE, init_state(task, ONE), task.example_batch())
        weight = sums.pop("weight")
        means = {name: total / weight for name, total in sums.items()}
        return task.metrics(means.pop("loss"), means)

    assert evaluated(SINGLE["all"]) == evaluated(SMALL)


def test_perplexity_is_that_of_the_loss_without_the_penalty():
    assert awd(SMALL).metrics(9.0, {"nll": 2.0})["perplexity"] == pytest.approx(np.exp(2.0))


# ---- the law ----


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "options"),
    [
        ((2, 2, 2), (2, 4), {}),
        ((8, 1, 1), (1, 1), {}),
        pytest.param((1, 4, 2), (1, 2), {"head": "last", "remat": True}, marks=pytest.mark.more),
        pytest.param((2, 4, 1), (2, 2), {"zero_bubble": False}, marks=pytest.mark.more),
    ],
)
def test_the_masks_are_the_same_on_every_mesh(mesh, units, options):
    task = awd(MODEL, **ALL)
    assert_same_as_plain(make_settings(mesh, units, task, **options))


@pytest.mark.full
@pytest.mark.law
@pytest.mark.parametrize("placement", [(1, 5, 1)])
def test_the_masks_of_weights_are_those_of_their_layers(placement):
    task = awd(MODEL, num_layers=7, tie_embedding=True, **ALL)
    assert_same_as_plain(make_settings((1, 3, 1), (2, 2), task, placement=placement))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word_dropout": 1.0}, r"word_dropout=1\.0"),
        ({"drop_connect": -0.1}, r"drop_connect=-0\.1"),
        ({"layer": "mingru"}, r"drop_connect=0\.5: layer='mingru' has no recurrent kernel"),
        ({"input_dropout": 2.0}, r"input_dropout=2\.0"),
        ({"ar": -1.0}, r"ar=-1\.0: must not be negative"),
        ({"tar": -1.0}, r"tar=-1\.0: must not be negative"),
    ],
)
def test_impossible_rates_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AWD(**{"forget_bias": 1.0, **options})


@pytest.mark.more
@pytest.mark.parametrize("zero_bubble", [True, more(False)])
def test_a_pipeline_equals_plain_with_numbers_of_64_bits(zero_bubble):
    """JAX_ENABLE_X64 makes Python's whole numbers int64, beside the int32 of ticks and units."""
    task = awd(num_layers=2, window_mean=6)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # strict is of these tests
        assert_same_as_plain(make_settings((1, 2, 1), (2, 4), task, zero_bubble=zero_bubble))
