"""Windows of drawn lengths: what is in them, and that a late one is a short one, on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from lib import api
from lib.awd import awd
from lib.laws import MODEL, assert_same_as_plain, make_settings, more, state_with_carry

from jaxpar import MeshConfig, Parallel, init_state, make_train_step
from jaxpar.lm import LM, Batch, TokenStreams
from recipes.awd import AWD, MATRICES, RandomWindows, Window

ONE = Parallel(MeshConfig(devices=(0,)))
PENALTIES = {"ar": 2.0, "tar": 1.0}


def stream(num_tokens, seed=0, rows=3, seq_len=20, mean=12):
    task = AWD(batch_size=rows, seq_len=seq_len, window_mean=mean)
    return RandomWindows(task, np.arange(num_tokens), seed)


# ---- what is drawn ----


def test_windows_follow_each_other_and_nothing_counts_before_their_text():
    text = stream(2000)
    next_B = None
    for number in range(text.num_windows):
        batch = text.batch(number)
        length = 20 - batch.padding
        assert 5 <= length <= 20
        assert batch.rate == length / 12
        assert batch.starts == (number == 0)
        inputs, targets = batch.inputs_BT[:, -length:], batch.targets_BT[:, -length:]
        np.testing.assert_array_equal(targets, (inputs + 1) % 2000)
        np.testing.assert_array_equal(np.diff(inputs) % 2000, 1)
        if next_B is not None:
            np.testing.assert_array_equal(inputs[:, 0], next_B)
        next_B = targets[:, -1]
        assert (batch.targets_BT[:, : batch.padding] == -1).all()
        part = text.batch(number, slice(1, 3))
        np.testing.assert_array_equal(part.inputs_BT, batch.inputs_BT[1:])
        assert part.padding == batch.padding


def test_lengths_are_those_of_the_paper():
    windows = stream(2000, seq_len=90, mean=70)
    drawn = windows.draw(np.random.default_rng(0), 20_000)
    is_short = drawn < 52
    np.testing.assert_allclose(is_short.mean(), 0.05, atol=0.006)
    np.testing.assert_allclose(drawn[~is_short].mean(), 69.5, atol=0.3)  # cut to whole numbers
    np.testing.assert_allclose(drawn[~is_short].std(), 5, atol=0.2)
    np.testing.assert_allclose(2000 // 3 / drawn.mean(), windows.num_windows, atol=1)


def test_lengths_are_drawn_from_seed_and_epoch():
    def paddings(seed, epoch=0):
        text = stream(2000, seed)
        return [text.batch(epoch * text.num_windows + n).padding for n in range(text.num_windows)]

    assert paddings(0) == paddings(0)
    assert len({tuple(paddings(*of)) for of in ((0, 0), (1, 0), (0, 1))}) == 3


def test_evaluation_has_windows_of_one_length():
    text, plain = stream(100, None, 3, 8, 6), TokenStreams(np.arange(100), 3, 8)
    assert text.num_windows == plain.num_windows
    assert stream(100, None, 3, 8, 70).num_windows == plain.num_windows
    for number in range(text.num_windows):
        batch, expected = text.batch(number), plain.batch(number)
        np.testing.assert_array_equal(batch.inputs_BT, expected.inputs_BT)
        np.testing.assert_array_equal(batch.targets_BT, expected.targets_BT)
        assert batch.padding == 0


# ---- a late window is a short one ----

SHORT = awd(LM(3, 6, 6, 11, dropout=0.0, batch_size=4, seq_len=5), **PENALTIES)
LATE = dataclasses.replace(SHORT, seq_len=9, window_mean=7)


def loss_and_grads(task, batch):
    found = api.gradients(task, ONE, batch, state_with_carry(task, ONE))
    return {"loss": found.loss, **found.metrics}, found.grads, found.carry


@pytest.mark.more
@pytest.mark.parametrize(
    "layer", ["lstm", more("gru"), *map(more, ("mingru", "rglru", "slstm", "mlstm"))]
)
@pytest.mark.parametrize("starts", [False, more(True)])
def test_a_late_window_is_a_short_one(layer, starts):
    options = {"layer": layer}
    if layer in MATRICES:
        options |= {"hidden_size": 8, "embed_size": 8, "tar": 0.0}
    tokens = np.random.default_rng(0).integers(0, 11, (4, 6), dtype=np.int32)
    short = Batch(tokens[:, :-1], tokens[:, 1:], starts)
    inputs, targets = (
        np.pad(a, ((0, 0), (4, 0)), constant_values=fill)
        for a, fill in zip(short[:2], (3, -1), strict=True)
    )
    late = Window(inputs, targets, starts, padding=4, rate=1.0)
    expected = loss_and_grads(dataclasses.replace(SHORT, **options), short)
    actual = loss_and_grads(dataclasses.replace(LATE, **options), late)
    for own, others in zip(actual, expected, strict=True):
        for name in others:
            np.testing.assert_allclose(own[name], others[name], rtol=1e-5, atol=1e-6, err_msg=name)


# A chunk of padding, and one with some.
DRAWN = awd(window_mean=6, **PENALTIES)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "options"),
    [
        ((2, 2, 2), (2, 4), {}),
        more((1, 2, 1), (1, 4), {"remat": True, "remat_keeps": "carries"}),
        more((8, 1, 1), (1, 1), {}),
        more((1, 4, 2), (2, 4), {"schedule": "v"}),
        more((4, 2, 1), (2, 2), {"head": "last", "zero_bubble": False}),
    ],
)
def test_late_windows_are_the_same_on_every_mesh(mesh, units, options):
    assert_same_as_plain(make_settings(mesh, units, DRAWN, **options))


@pytest.mark.law
@pytest.mark.parametrize("layer", [more("gru"), more("slstm"), more("rglru")])
def test_late_windows_of_other_layers_are_the_same_on_every_mesh(layer):
    task = dataclasses.replace(DRAWN, layer=layer)
    assert_same_as_plain(make_settings((2, 2, 2), (2, 4), task))


@pytest.mark.more
@pytest.mark.parametrize("update", ["replicated", more("host")])
def test_one_program_takes_all_lengths_and_the_rate_of_each(update):
    task = dataclasses.replace(LATE, optimizer=MODEL.optimizer)
    parallel = Parallel(MeshConfig(devices=(0,)), update=update)
    step = make_train_step(task, parallel)
    tokens = np.random.default_rng(0).integers(0, 11, (4, 10), dtype=np.int32)

    def moved(padding, rate):
        state = init_state(task, parallel)
        before = jax.tree.map(np.asarray, state.params)
        batch = Window(tokens[:, :-1], tokens[:, 1:].copy(), True, padding=padding, rate=rate)
        batch.targets_BT[:, :padding] = -1
        after = step(state, batch)[0].params
        return jax.tree.leaves(jax.tree.map(lambda a, b: np.asarray(a) - b, after, before))

    for whole, half in zip(moved(2, 1.0), moved(2, 0.5), strict=True):
        np.testing.assert_allclose(half, whole / 2, atol=1e-7)
    assert np.any(moved(0, 1.0)[0] != moved(2, 1.0)[0])
    assert step.num_programs == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AWD(window_mean=3), "window_mean=3: windows have 5 steps or more"),
        (lambda: AWD(window_spread=-1.0), r"window_spread=-1\.0"),
        (lambda: AWD(short_windows=1.0), r"short_windows=1\.0"),
        (lambda: stream(2000, seq_len=32, mean=33), "window_mean=33 is more than seq_len=32"),
        (lambda: AWD(packed=True), "its lines are read"),
    ],
)
def test_impossible_windows_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
