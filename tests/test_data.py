"""Batches: streams continue, every target counts once, and rows are the same on every mesh."""

import itertools
import tracemalloc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from lib import api
from lib.batches import hash_of_ten_batches

from jaxpar import ArrayBatches, IteratorBatches, SeriesBatches
from jaxpar.lm import IGNORE, TokenStreams
from recipes.awd import AWD, RandomWindows


@st.composite
def streams(draw, seeds) -> TokenStreams:
    """Streams over a text whose tokens are their own positions, so that a token tells its place."""
    seed = draw(seeds)
    batch_size = draw(st.integers(1, 7))
    seq_len = draw(st.integers(1, 9))
    least = 2 if seed is None else batch_size * seq_len + 1
    num_tokens = draw(st.integers(least, least + 100))
    return TokenStreams(np.arange(num_tokens), batch_size, seq_len, seed)


SEEDS = st.integers(0, 2**40)
EVALUATION = streams(st.none())
TRAINING = streams(SEEDS)
BOTH = streams(st.none() | SEEDS)


def epoch_of(text: TokenStreams, epoch: int = 0):
    first = epoch * text.num_windows
    return [text.batch(step) for step in range(first, first + text.num_windows)]


# What is drawn stays: numbers that were published can be had again.

TEXT = np.arange(1, 4002, dtype=np.int32) ** 2 % 977
LENGTHS = np.arange(190) * 37 % 41  # as many steps as TEXT has, but for its end
STEPS = {"x": TEXT[: LENGTHS.sum()]}
MANY = 2**22 + 1  # rows whose order is not held


@pytest.mark.parametrize(
    ("batches", "hashed"),
    [
        (lambda: TokenStreams(TEXT, 20, 35), "3e292925fc60455e"),
        (lambda: TokenStreams(TEXT, 20, 35, 0), "cb23acf8b2cb9983"),
        (lambda: TokenStreams(TEXT, 20, 35, 7), "371cefbf9fbd6618"),
        (lambda: TokenStreams(TEXT, 4, 8, 0), "b1f18a59385996b7"),
        (
            lambda: RandomWindows(AWD(batch_size=3, seq_len=30, window_mean=20), TEXT, 0),
            "d6252ea3bc7682cf",
        ),
        (lambda: SeriesBatches({"x": TEXT}, 4, 8, 0), "d255924d4acca8f9"),
        (lambda: SeriesBatches({"x": TEXT}, 4, 8, warmup=5), "334e9493b2004d38"),
        (lambda: api.PackedBatches(STEPS, LENGTHS, 4, 16), "a37b20157d4d6022"),
        (lambda: api.PackedBatches(STEPS, LENGTHS, 4, 16, 0), "76b3e282bdfc146c"),
        (lambda: ArrayBatches({"x": TEXT}, 64, 0), "c21970fcfcc5709f"),
        (lambda: ArrayBatches({"x": TEXT}, 64), "00d739be62361514"),
        (
            lambda: ArrayBatches({"x": np.arange(MANY, dtype=np.int32)}, 64, 7),
            "1e9195e2e7f2a816",
        ),
    ],
)
def test_the_first_ten_batches_are_those_of_the_published_numbers(batches, hashed):
    assert hash_of_ten_batches(batches()) == hashed


# Orders of many rows are computed place by place.


def test_an_epoch_of_many_rows_has_each_once_and_begins_anywhere():
    rows, batch_size = {"x": np.arange(MANY)}, 2**19
    batches = ArrayBatches(rows, batch_size, 0)
    assert batches.num_windows == 8
    steps = [batches.batch(step)["x"] for step in range(16)]
    for epoch in (np.concatenate(steps[:8]), np.concatenate(steps[8:])):
        assert np.bincount(epoch).max() == 1
    assert not np.array_equal(steps[0], steps[8])
    for step in (13, 3):  # another process, some of its rows
        found = ArrayBatches(rows, batch_size, 0).batch(step, slice(4, 7))["x"]
        np.testing.assert_array_equal(found, steps[step][4:7])


@pytest.mark.parametrize("seed", [None, 0])
def test_the_order_of_many_rows_is_not_held(seed):
    rows = {"x": np.broadcast_to(np.float32(0), (200_000_000,))}
    tracemalloc.start()
    try:
        batches = ArrayBatches(rows, 64, seed)
        for step in (0, batches.num_windows - 1, batches.num_windows, 5 * batches.num_windows):
            batches.batch(step)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_lists_are_taken_as_arrays():
    batch = ArrayBatches({"x": [[1, 2], [3, 4], [5, 6]], "y": (1.0, 2.0, 3.0)}, 2).batch(0)
    np.testing.assert_array_equal(batch["x"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(batch["y"], [1, 2])


# Evaluation.


@hypothesis.given(EVALUATION)
def test_evaluation_counts_every_target_exactly_once(text):
    targets = np.concatenate([batch.targets_BT.ravel() for batch in epoch_of(text)])
    counted = targets[targets != IGNORE]
    np.testing.assert_array_equal(np.sort(counted), np.arange(1, text.length))


@hypothesis.given(EVALUATION)
def test_evaluation_reads_streams_in_plain_order(text):
    epoch = epoch_of(text)
    inputs_BN = np.concatenate([batch.inputs_BT for batch in epoch], axis=1)
    targets_BN = np.concatenate([batch.targets_BT for batch in epoch], axis=1)
    inside_BN = targets_BN != IGNORE
    np.testing.assert_array_equal(inputs_BN[inside_BN], np.arange(text.length - 1))
    np.testing.assert_array_equal(targets_BN[inside_BN], np.arange(1, text.length))
    assert np.all(inputs_BN[~inside_BN] == 0)
    lengths_B = inside_BN.sum(axis=1)
    assert lengths_B.max() - lengths_B.min() <= 1
    # Padding stands at the ends, after the last target, and fills no window of its own.
    np.testing.assert_array_equal(inside_BN, np.arange(inside_BN.shape[1]) < lengths_B[:, None])
    assert inside_BN[:, -text.seq_len :].any()


def test_evaluation_repeats_itself_in_every_epoch():
    text = TokenStreams(np.arange(50), batch_size=3, seq_len=4)
    for first, second in zip(epoch_of(text, 0), epoch_of(text, 1), strict=True):
        np.testing.assert_array_equal(first.inputs_BT, second.inputs_BT)
        np.testing.assert_array_equal(first.targets_BT, second.targets_BT)


def test_the_picture_of_the_module():
    text = TokenStreams(np.arange(13), batch_size=2, seq_len=3)
    first, second = epoch_of(text)
    np.testing.assert_array_equal(first.inputs_BT, [[0, 1, 2], [6, 7, 8]])
    np.testing.assert_array_equal(second.inputs_BT, [[3, 4, 5], [9, 10, 11]])
    np.testing.assert_array_equal(second.targets_BT, [[4, 5, 6], [10, 11, 12]])
    assert (first.starts, second.starts) == (True, False)


# Training.


@hypothesis.given(TRAINING, st.integers(0, 3))
def test_training_windows_are_full_and_continue_their_stream(text, epoch):
    batches, num_tokens = epoch_of(text, epoch), text.length
    for batch in batches:
        assert batch.inputs_BT.shape == (text.batch_size, text.seq_len)
        np.testing.assert_array_equal(batch.targets_BT, (batch.inputs_BT + 1) % num_tokens)
        np.testing.assert_array_equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])
    for before, after in itertools.pairwise(batches):
        np.testing.assert_array_equal(after.inputs_BT[:, 0], before.targets_BT[:, -1])


@hypothesis.given(TRAINING)
def test_training_reads_no_target_twice_in_an_epoch(text):
    targets = np.concatenate([batch.targets_BT.ravel() for batch in epoch_of(text)])
    assert len(targets) == len(set(targets.tolist()))
    # What is left out is less than a window of every stream.
    assert text.length - 1 - len(targets) < text.batch_size * (text.seq_len + 1)


@hypothesis.given(BOTH, st.data())
def test_batch_is_a_function_of_seed_and_step(text, data):
    step = data.draw(st.integers(0, 3 * text.num_windows))
    again = TokenStreams(text.arrays["tokens"], text.batch_size, text.seq_len, text.seed)
    again.batch(data.draw(st.integers(0, 20)))  # what was asked before does not matter
    np.testing.assert_array_equal(text.batch(step).inputs_BT, again.batch(step).inputs_BT)
    np.testing.assert_array_equal(text.batch(step).targets_BT, again.batch(step).targets_BT)
    assert text.batch(step).starts == (step % text.num_windows == 0)


def test_windows_fall_differently_in_every_epoch_and_for_every_seed():
    first = {
        int(epoch_of(TokenStreams(np.arange(10_000), 4, 8, seed), epoch)[0].inputs_BT[0, 0])
        for seed in (0, 1)
        for epoch in range(5)
    }
    assert len(first) == 10


def test_epochs_begin_anywhere_in_the_text():
    text = TokenStreams(np.arange(1000), batch_size=1, seq_len=999, seed=0)
    begins = [int(text.batch(epoch).inputs_BT[0, 0]) for epoch in range(200)]
    assert max(begins) > 950
    assert min(begins) < 50


def test_training_reaches_the_whole_text_over_the_epochs():
    text = TokenStreams(np.arange(30), batch_size=2, seq_len=8, seed=0)
    assert text.num_windows == 1
    seen = {int(t) for epoch in range(20) for t in epoch_of(text, epoch)[0].targets_BT.ravel()}
    assert seen == set(range(30))


# A series.


@hypothesis.given(
    st.integers(1, 60), st.integers(1, 7), st.integers(1, 9), st.integers(0, 12), st.data()
)
def test_evaluation_of_a_series_counts_every_step_once_after_those_before_it(
    more, batch_size, seq_len, warmup, data
):
    num_steps = warmup + more  # also fewer than rows
    series = SeriesBatches({"x": np.arange(num_steps)}, batch_size, seq_len, warmup=warmup)
    epoch = [series.batch(window) for window in range(series.num_windows)]
    assert [batch["starts"] for batch in epoch] == [True] + [False] * (len(epoch) - 1)
    x_BN, weight_BN = (np.concatenate([b[name] for b in epoch], 1) for name in ("x", "weight"))
    np.testing.assert_array_equal(x_BN[weight_BN > 0], np.arange(warmup, num_steps))
    assert {*weight_BN.ravel()} <= {0.0, 1.0}
    for x_N, weight_N in zip(x_BN, weight_BN, strict=True):
        end = np.flatnonzero(weight_N).max(initial=warmup - 1) + 1
        np.testing.assert_array_equal(np.diff(x_N[:end]), 1)
        assert not weight_N[:warmup].any()
        assert weight_N[warmup:end].all()
    assert weight_BN[:, -seq_len:].any()
    rows = data.draw(st.slices(batch_size))
    for name, part in series.batch(0, rows).items():
        np.testing.assert_array_equal(
            part, epoch[0][name][rows] if np.ndim(part) else epoch[0][name]
        )


# Rows and meshes.


@hypothesis.given(BOTH, st.data())
def test_rows_equal_those_of_the_full_batch(text, data):
    rows = data.draw(st.slices(text.batch_size))
    step = data.draw(st.integers(0, 2 * text.num_windows))
    part, full = text.batch(step, rows), text.batch(step)
    np.testing.assert_array_equal(part.inputs_BT, full.inputs_BT[rows])
    np.testing.assert_array_equal(part.targets_BT, full.targets_BT[rows])
    assert part.inputs_BT.dtype == part.targets_BT.dtype == np.int32
    assert part.starts == full.starts


# Errors.


@pytest.mark.parametrize(
    ("num_tokens", "seed", "message"),
    [
        (40, 0, "40 tokens are fewer than the 41 that .* need"),
        (6, 0, "6 tokens are fewer than the 41 that batch_size=8, seq_len=5"),
        (1, None, "1 tokens are fewer than the 2 that batch_size=8, seq_len=5"),
        (0, 0, "0 tokens are fewer than the 41 that"),
    ],
)
def test_text_that_is_too_short(num_tokens, seed, message):
    with pytest.raises(ValueError, match=message):
        TokenStreams(np.arange(num_tokens), batch_size=8, seq_len=5, seed=seed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is too small\\.\nFix: use 1"),
        ({"seq_len": -2}, "seq_len=-2 is too small\\.\nFix: use 1"),
        ({"seed": -1}, "seed=-1 is too small\\.\nFix: use 0"),
        ({"tokens": np.zeros((2, 30), np.int32)}, r"shape \(2, 30\)"),
        ({"tokens": np.zeros(30)}, "type float64"),
        ({"tokens": np.array([0] * 9 + [-1] + [0] * 20)}, "token -1 at position 9 is negative"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenStreams(**{"tokens": np.arange(30), "batch_size": 2, "seq_len": 3, **arguments})


def test_negative_step():
    with pytest.raises(ValueError, match="step=-1 is negative"):
        TokenStreams(np.arange(30), 2, 3).batch(-1)


def test_masked_values_are_refused_and_arrays_without_them_are_taken():
    x = np.ma.masked_greater(np.arange(20, dtype=np.float32), 17)
    message = (
        r"arrays\['x'\] has 2 masked values, which would count as data\.\nFix: replace them with"
    )
    with pytest.raises(ValueError, match=message):
        ArrayBatches({"x": x}, 4)
    assert ArrayBatches({"x": x[:8]}, 4).batch(1)["x"].tolist() == [4, 5, 6, 7]


class OfFile:
    """As a variable of NetCDF gives missing values."""

    shape, ndim, dtype = (20,), 1, np.dtype(np.float32)

    def __len__(self):
        return 20

    def __getitem__(self, rows):
        return np.ma.masked_greater(np.arange(20, dtype=np.float32)[rows], 17)


MASKED = np.ma.masked_greater(np.arange(20), 17)
READERS = {
    "rows in a list": lambda: ArrayBatches({"x": [MASKED, MASKED]}, 1),
    "a file": lambda: ArrayBatches({"x": OfFile()}, 4).batch(4),
    "a stream": lambda: IteratorBatches(lambda: iter([{"x": MASKED}]), 20).batch(0),
    "lengths": lambda: api.PackedBatches({"x": np.arange(171)}, MASKED, 2, 4),
    "starts": lambda: api.PackedBatches({"x": np.arange(30)}, [1] * 20, 2, 4, starts=MASKED),
    "tokens": lambda: TokenStreams(MASKED, 2, 3),
}


@pytest.mark.parametrize("name", READERS)
def test_masked_values_are_refused_wherever_they_are_read(name):
    with pytest.raises(ValueError, match=r"has [24] masked values, which would count as data"):
        READERS[name]()
