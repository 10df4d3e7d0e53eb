"""Packing: every sequence once an epoch, whole where it fits, little padding, the same after a resume."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from lib import api

import jaxpar
from jaxpar.lm import IGNORE

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)
SEEDS = st.none() | st.integers(0, 2**40)
PYTHON_DOCS_PADDING = 0.05  # at most, at the sizes that the language model has by default


def packed(lengths, batch_size, seq_len, seed=None):
    """Every step tells its sequence and its number within it."""
    lengths = np.array(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return api.PackedBatches(
        {"sequence": sequence, "step": step}, lengths, batch_size, seq_len, seed
    )


def streams(batches, epoch=0):
    """The windows of an epoch, one after the other: [rows, steps]."""
    first = epoch * batches.num_windows
    windows = [batches.batch(step) for step in range(first, first + batches.num_windows)]
    assert [window["starts"] for window in windows] == [True] + [False] * (len(windows) - 1)
    names = ("sequence", "step", "weight", "resets")
    return {name: np.concatenate([window[name] for window in windows], axis=1) for name in names}


@hypothesis.given(LENGTHS, st.integers(1, 5), st.integers(1, 12), SEEDS, st.integers(0, 2))
def test_every_sequence_is_there_once_in_one_piece_and_begins_with_a_reset(
    lengths, batch_size, seq_len, seed, epoch
):
    batches = packed(lengths, batch_size, seq_len, seed)
    stream = streams(batches, epoch)
    found = set()
    for row, at in np.argwhere(stream["resets"]):
        sequence = stream["sequence"][row, at]
        here = row, slice(at, at + lengths[sequence])
        assert (stream["sequence"][here] == sequence).all()
        assert stream["step"][here].tolist() == list(range(lengths[sequence]))
        assert (stream["weight"][here] == 1).all()
        assert stream["resets"][here].sum() == 1
        # What fits a window lies in one; what does not begins with one.
        is_long = lengths[sequence] > seq_len
        assert at % seq_len == 0 if is_long else at % seq_len + lengths[sequence] <= seq_len
        assert sequence not in found
        found.add(sequence)
    assert found == {n for n, length in enumerate(lengths) if length}
    assert stream["weight"].sum() == sum(lengths)
    assert batches.padding == pytest.approx(1 - stream["weight"].mean(dtype=np.float64))


@hypothesis.given(LENGTHS, st.integers(1, 12))
def test_each_goes_where_it_first_fits_the_longest_first(lengths, seq_len):
    rooms = []
    for length in sorted((length for length in lengths if length), reverse=True):
        where = next((n for n, room in enumerate(rooms) if room >= length), None)
        if length > seq_len or where is None:
            rooms.append(-length % seq_len)
        else:
            rooms[where] -= length
    stream = streams(packed(lengths, 1, seq_len))
    ends = [
        window[-seq_len:]
        for window in np.split(stream["weight"][0], stream["weight"].shape[1] // seq_len)
    ]
    found = sorted(int(seq_len - window.sum()) for window in ends)
    full = len(found) - len(rooms)  # of the windows of long ones, all but the last are full
    assert found == sorted(rooms + [0] * full)


@hypothesis.given(LENGTHS, st.integers(1, 5), st.integers(1, 12), st.integers(0, 99))
def test_a_batch_is_a_function_of_seed_and_step_row_by_row(lengths, batch_size, seq_len, seed):
    batches = packed(lengths, batch_size, seq_len, seed)
    step = 2 * batches.num_windows - 1
    whole = batches.batch(step)
    again = packed(lengths, batch_size, seq_len, seed)
    for row in range(batch_size):
        part = again.batch(step, slice(row, row + 1))
        for name in ("sequence", "step", "weight", "resets"):
            np.testing.assert_array_equal(part[name], whole[name][row : row + 1])


def test_epochs_and_seeds_differ_and_lines_of_one_length_change_places():
    def order(seed, epoch):
        return streams(packed([3] * 40 + [11] * 3, 2, 8, seed), epoch)["sequence"].tolist()

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for n, a in enumerate(orders) for b in orders[:n])
    assert order(None, 0) == order(None, 1)


@pytest.mark.parametrize(("rows", "steps"), [(16, 32), (16, 64)])
def test_python_docs_have_little_padding(rows, steps):
    task = jaxpar.lm.LM(packed=True, batch_size=rows, seq_len=steps)
    for split in ("train", "valid"):
        batches = task.make_batches(split, 0)
        weights = [batches.batch(n).targets_BT != IGNORE for n in range(batches.num_windows)]
        if split == "train":
            assert 1 - np.mean(weights) <= PYTHON_DOCS_PADDING
    assert "lines packed" in dict(task.describe())["batch"]
    assert task.make_batches("train", 0).to_text().endswith("% of positions are padding")


def test_packed_sequences_tell_of_their_padding():
    words = "3 sequences (1 longer than a window) in 4 batches; 6.2% of positions are padding"
    assert packed([3, 3, 9], 1, 4, 0).to_text() == words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 0], 0, 4), "batch_size=0 is too small"),
        (([3, 0], 1, 0), "seq_len=0 is too small"),
        (([0, 0], 1, 4), "none of 2 sequences has a step"),
        (([3.0], 1, 4), "type float64\\.?\nFix: give one whole"),
        (([3, -1], 1, 4), "a length of -1"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        api.PackedBatches({"x": np.zeros(max(int(sum(arguments[0])), 0))}, *arguments)


def test_other_mistakes_are_told():
    with pytest.raises(ValueError, match=r"arrays of 4 steps for sequences of 3 steps"):
        api.PackedBatches({"x": np.zeros(4)}, [1, 2], 1, 4)
    with pytest.raises(ValueError, match="2 starts for 1 lengths"):
        api.PackedBatches({"x": np.zeros(4)}, [3], 1, 4, starts=[0, 1])
    for starts in ([0, 3], [-1, 0]):
        with pytest.raises(
            ValueError, match=rf"sequence .* of 2 steps begins at step {max(starts, key=abs)} of 4"
        ):
            api.PackedBatches({"x": np.zeros(4)}, [2, 2], 1, 4, starts=starts)
    with pytest.raises(ValueError, match="step=-1 is negative"):
        api.PackedBatches({"x": np.zeros(3)}, [3], 1, 4).batch(-1)
    with pytest.raises(ValueError, match="packed and num_buckets=3 exclude each other"):
        dataclasses.replace(jaxpar.lm.LM(packed=True), num_buckets=3)
