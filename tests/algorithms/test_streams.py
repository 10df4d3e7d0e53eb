"""Lines of a text: every target once an epoch, the least padding, the same batches after a resume."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from lib import api
from lib.batches import hash_of_ten_batches

from jaxpar.lm import IGNORE
from jaxpar.lm.streams import TOKENS, BucketedText, PackedText, line_places


def bucketed_lines(sizes, batch_size, edges, seed=None) -> BucketedText:
    """Lines of these numbers of tokens; a token is its own position, so that it tells its place."""
    text, lengths = {TOKENS: np.arange(sum(sizes))}, np.maximum(np.array(sizes, int) - 1, 0)
    return BucketedText(
        text, lengths, batch_size, edges, seed, starts=np.cumsum(sizes) - np.array(sizes, int)
    )


SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(lambda sizes: max(sizes) > 1)
EDGES = st.sets(st.integers(1, 35), min_size=1, max_size=5).map(lambda edges: tuple(sorted(edges)))
SEEDS = st.none() | st.integers(0, 2**40)
BUCKETED = st.builds(bucketed_lines, SIZES, st.integers(1, 7), EDGES, SEEDS)


def epoch_of(bucketed: api.BucketedBatches, epoch: int = 0):
    first = epoch * bucketed.num_windows
    return [bucketed.batch(step) for step in range(first, first + bucketed.num_windows)]


def rows_of(batches) -> list[list[int]]:
    """The targets of each row that has some, sorted by their place in the text."""
    rows = [row[row != IGNORE].tolist() for batch in batches for row in batch.targets_BT]
    return sorted(row for row in rows if row)


def targets_of(bucketed: BucketedText) -> list[int]:
    """What must be read once an epoch, of `bucketed_lines`."""
    spans = zip(bucketed.starts_S.tolist(), bucketed.lengths_S.tolist(), strict=True)
    return [start + 1 + t for start, length in spans for t in range(length)]


# What an epoch reads.


@pytest.mark.full
@hypothesis.given(BUCKETED, st.integers(0, 2))
def test_every_target_is_read_exactly_once_in_every_epoch(bucketed, epoch):
    targets = np.concatenate([batch.targets_BT.ravel() for batch in epoch_of(bucketed, epoch)])
    counted = targets[targets != IGNORE]
    assert sorted(counted.tolist()) == targets_of(bucketed)


@hypothesis.given(SIZES, st.integers(1, 7), SEEDS, st.integers(0, 2))
def test_every_line_is_one_row(sizes, batch_size, seed, epoch):
    bucketed = bucketed_lines(sizes, batch_size, (5, 10, 29), seed)
    stops = np.cumsum(sizes).tolist()
    wanted = [
        list(range(stop - size + 1, stop))
        for size, stop in zip(sizes, stops, strict=True)
        if size > 1
    ]
    assert rows_of(epoch_of(bucketed, epoch)) == wanted
    assert (bucketed.num_cut, bucketed.num_left_out) == (0, len(sizes) - len(wanted))


@hypothesis.given(BUCKETED, st.integers(0, 1))
def test_targets_are_the_next_tokens_and_padding_is_ignored(bucketed, epoch):
    for batch in epoch_of(bucketed, epoch):
        inside_BT = batch.targets_BT != IGNORE
        np.testing.assert_array_equal(batch.targets_BT[inside_BT], batch.inputs_BT[inside_BT] + 1)
        assert np.all(batch.inputs_BT[~inside_BT] == 0)
        assert batch.inputs_BT.dtype == batch.targets_BT.dtype == np.int32
        assert batch.starts is True
        # A row is a stretch of the text, then padding; rows without a line are the last ones.
        lengths_B = inside_BT.sum(axis=1)
        np.testing.assert_array_equal(inside_BT, np.arange(inside_BT.shape[1]) < lengths_B[:, None])
        assert np.all(np.diff(batch.targets_BT, axis=1)[inside_BT[:, 1:]] == 1)
        assert lengths_B[0] > 0
        assert np.all(np.diff(np.sign(lengths_B)) <= 0)


@hypothesis.given(BUCKETED)
def test_a_line_is_in_the_shortest_bucket_that_holds_it(bucketed):
    for batch in epoch_of(bucketed):
        i = bucketed.edges.index(batch.inputs_BT.shape[1])
        lengths_B = (batch.targets_BT != IGNORE).sum(axis=1)
        assert lengths_B.max() <= bucketed.edges[i]
        if i:
            assert np.all((lengths_B == 0) | (lengths_B > bucketed.edges[i - 1]))


@hypothesis.given(BUCKETED)
def test_rows_without_a_line_are_spread_over_the_batches_of_a_bucket(bucketed):
    rows_of_bucket = {edge: [] for edge in bucketed.edges}
    for batch in epoch_of(bucketed):
        filled_B = (batch.targets_BT != IGNORE).any(axis=1)
        rows_of_bucket[batch.inputs_BT.shape[1]].append(int(filled_B.sum()))
    for bucket in bucketed.buckets:
        rows = rows_of_bucket[bucket.length]
        assert len(rows) == bucket.num_batches == math.ceil(sum(rows) / bucketed.batch_size)
        assert sum(rows) == bucket.num_sequences
        assert not rows or max(rows) - min(rows) <= 1


def test_a_long_line_is_cut_and_an_empty_one_left_out():
    bucketed = bucketed_lines([12, 0, 1, 5, 6], batch_size=2, edges=(4,))
    # 11 steps in pieces of 4, 4 and 3; 4 steps; 5 steps in pieces of 4 and 1.
    assert rows_of(epoch_of(bucketed)) == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11],
        [14, 15, 16, 17],
        [19, 20, 21, 22],
        [23],
    ]
    assert (bucketed.num_cut, bucketed.num_left_out) == (2, 2)


def test_the_picture_of_a_text_in_buckets():
    text = np.array([".abcdefghijkl".index(token) for token in "ab.cdef.g.hi.jkl."])
    starts, lengths = line_places(text, separator=0)
    bucketed = BucketedText({TOKENS: text}, lengths, batch_size=2, edges=(3, 5), starts=starts)
    batches = [
        [
            "".join("_" if target == IGNORE else ".abcdefghijkl"[token] for token, target in row)
            for row in np.stack([batch.inputs_BT, batch.targets_BT], axis=-1)
        ]
        for batch in epoch_of(bucketed)
    ]
    assert batches == [["ab_", "___"], [".g_", ".hi"], [".cdef", ".jkl_"]]
    np.testing.assert_array_equal(
        epoch_of(bucketed)[2].targets_BT, [[3, 4, 5, 6, 0], [10, 11, 12, 0, IGNORE]]
    )


def test_evaluation_reads_short_buckets_first_in_the_order_of_the_text():
    bucketed = bucketed_lines([3, 9, 2, 8, 3], batch_size=2, edges=(2, 8))
    firsts = [batch.inputs_BT[:, 0].tolist() for batch in epoch_of(bucketed)]
    assert firsts == [[0, 0], [12, 22], [3, 14]]
    for before, after in zip(epoch_of(bucketed), epoch_of(bucketed, 1), strict=True):
        np.testing.assert_array_equal(before.inputs_BT, after.inputs_BT)


def test_the_picture_of_the_module():
    letters, lengths = np.array([*"abcdefghijklmnop"]), [2, 5, 2, 3, 4]
    bucketed = api.BucketedBatches({"x": letters}, lengths, batch_size=2, edges=(3, 5))
    batches = [
        ["".join(row) for row in np.where(batch["weight"] == 1, batch["x"], "_")]
        for batch in epoch_of(bucketed)
    ]
    assert batches == [["ab_", "___"], ["hi_", "jkl"], ["cdefg", "mnop_"]]
    assert all(batch["starts"] is True for batch in epoch_of(bucketed))


# Determinism.


@hypothesis.given(BUCKETED, st.data())
def test_batch_is_a_function_of_seed_and_step(bucketed, data):
    step = data.draw(st.integers(0, 3 * bucketed.num_windows))
    for earlier in range(step):  # what was asked before does not matter
        bucketed.batch(earlier)
    like = bucketed.batch_size, bucketed.edges, bucketed.seed
    resumed = BucketedText(bucketed.arrays, bucketed.lengths_S, *like, starts=bucketed.starts_S)
    np.testing.assert_array_equal(bucketed.batch(step).inputs_BT, resumed.batch(step).inputs_BT)
    np.testing.assert_array_equal(bucketed.batch(step).targets_BT, resumed.batch(step).targets_BT)


def test_every_epoch_and_every_seed_shuffles_lines_and_buckets():
    orders, bucket_orders = set(), set()
    for seed, epoch in itertools.product((0, 1), range(5)):
        batches = epoch_of(bucketed_lines([2, 6] * 200, 4, (1, 5), seed), epoch)
        orders.add(tuple(int(batch.inputs_BT[0, 0]) for batch in batches))
        bucket_orders.add(tuple(batch.inputs_BT.shape[1] for batch in batches))
        # Lines that are neighbours in the text do not stay together in a batch.
        assert not any(np.all(np.diff(batch.inputs_BT[:, 0]) == 8) for batch in batches)
    assert len(orders) == len(bucket_orders) == 10


# Rows and meshes.


@hypothesis.given(BUCKETED, st.data())
def test_rows_equal_those_of_the_full_batch(bucketed, data):
    rows = data.draw(st.slices(bucketed.batch_size))
    step = data.draw(st.integers(0, 2 * bucketed.num_windows))
    part, full = bucketed.batch(step, rows), bucketed.batch(step)
    np.testing.assert_array_equal(part.inputs_BT, full.inputs_BT[rows])
    np.testing.assert_array_equal(part.targets_BT, full.targets_BT[rows])


# Lines.


@hypothesis.given(st.lists(st.integers(0, 3), min_size=2, max_size=60).filter(lambda t: 0 in t))
def test_splitting_a_text_loses_no_target(tokens):
    starts, lengths = line_places(np.array(tokens), separator=0)
    targets = [
        tokens[start + 1 : start + 1 + length]
        for start, length in zip(starts, lengths, strict=True)
    ]
    assert list(itertools.chain.from_iterable(targets)) == tokens[1:]
    assert all(0 not in line[:-1] for line in targets)  # a separator ends its line
    assert all(tokens[start] == 0 for start in starts[1:])  # and begins the next


# Edges and padding.


def brute_force_steps(lengths, num_buckets, multiple, max_len, batch_size) -> int:
    """The fewest time steps, padding and all, that any edges need."""
    pieces = [min(max_len, n - first) for n in lengths for first in range(0, n, max_len)]
    last = -(-max(pieces) // multiple) * multiple
    return min(
        sum(
            edge * batch_size * math.ceil(sum(low < n <= edge for n in pieces) / batch_size)
            for low, edge in itertools.pairwise((0, *edges, last))
        )
        for k in range(num_buckets)
        for edges in itertools.combinations(range(multiple, last, multiple), k)
    )


@hypothesis.given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(2, 7),
    st.integers(1, 5),
)
def test_edges_are_optimal(lengths, num_buckets, multiple, max_chunks, batch_size):
    max_len = multiple * max_chunks
    arguments = num_buckets, multiple, max_len, batch_size
    edges = api.choose_edges(np.array(lengths), *arguments)
    assert 1 <= len(edges) <= num_buckets
    assert all(edge % multiple == 0 for edge in edges)
    assert list(edges) == sorted(set(edges))
    longest = min(max(lengths), max_len)
    assert longest <= edges[-1] < longest + multiple
    bucketed = bucketed_lines([n + 1 for n in lengths], batch_size, edges)
    fewest = brute_force_steps(lengths, *arguments)
    assert bucketed.padding == pytest.approx(1 - sum(lengths) / fewest, abs=1e-12)


@pytest.mark.parametrize(
    ("lengths", "arguments", "edges"),
    [
        ([3, 3, 3, 8], (2, 1, 10), (3, 8)),
        ([3, 3, 3, 8], (2, 4, 12), (4, 8)),
        ([3, 3, 3, 8], (1, 4, 12), (8,)),
        ([5, 5], (9, 1, 10), (5,)),  # more buckets would not help
        ([4, 5, 8, 8], (3, 1, 8, 4), (8,)),  # nor here, where each costs 4 rows
        ([20], (3, 4, 12), (8, 12)),  # in pieces of 12 and 8
    ],
)
def test_edges_of_a_few_sequences(lengths, arguments, edges):
    assert api.choose_edges(np.array(lengths), *arguments) == edges


@hypothesis.given(BUCKETED)
def test_padding_is_the_share_of_ignored_targets_in_an_epoch(bucketed):
    ignored = np.concatenate([(b.targets_BT == IGNORE).ravel() for b in epoch_of(bucketed, 1)])
    assert bucketed.padding == pytest.approx(ignored.mean())
    for bucket in bucketed.buckets:
        shares = [
            (batch.targets_BT == IGNORE).mean()
            for batch in epoch_of(bucketed)
            if batch.inputs_BT.shape[1] == bucket.length
        ]
        assert bucket.padding == pytest.approx(np.mean(shares) if shares else 0)


def test_table_of_the_buckets():
    bucketed = bucketed_lines([12, 0, 1, 4, 3], batch_size=2, edges=(2, 4))
    assert bucketed.to_text().splitlines() == [
        "length  sequences  batches  padding",
        "     2          1        1    50.0%",
        "     4          4        2    12.5%",
        " total          5        3    20.0%",
        "cut into pieces, longer than 4: 1",
        "left out, without a step: 2",
    ]
    whole = bucketed_lines([3], batch_size=1, edges=(2,))
    assert whole.to_text().splitlines()[-1] == " total          1        1     0.0%"


# Errors.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_buckets": 0}, "num_buckets=0 is too small"),
        ({"multiple": 0}, "multiple=0 is too small"),
        ({"max_len": 0}, "max_len=0 is too small"),
        ({"batch_size": -3}, "batch_size=-3 is too small"),
        (
            {"max_len": 35},
            "max_len=35 does not divide by multiple=4\nFix: use max_len=32 or 36, or",
        ),
        ({"max_len": 3}, "max_len=3 does not divide by multiple=4\nFix: use max_len=4, or"),
        ({"lengths_S": np.array([0, 0])}, "none of 2 sequences has a step"),
        ({"lengths_S": np.array([], int)}, "none of 0 sequences has a step"),
        ({"lengths_S": np.array([])}, "type float64"),
    ],
)
def test_edges_that_cannot_be_chosen(changes, message):
    arguments = {"lengths_S": np.array([3, 9]), "num_buckets": 2, "multiple": 4, "max_len": 12}
    with pytest.raises(ValueError, match=message):
        api.choose_edges(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is too small"),
        ({"seed": -1}, "seed=-1 is too small"),
        ({"edges": ()}, r"edges=\(\) do not increase"),
        ({"edges": (4, 4)}, r"edges=\(4, 4\) do not increase from 1 or more"),
        ({"edges": (0, 4)}, r"edges=\(0, 4\) do not increase"),
        ({"sizes": [1, 0]}, "none of 2 sequences has a step"),
    ],
)
def test_arguments_out_of_range(changes, message):
    arguments = {"sizes": [5, 9], "batch_size": 2, "edges": (4, 8), "seed": 0}
    with pytest.raises(ValueError, match=message):
        bucketed_lines(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, 2, 3]), "separator=0 is not one of the 3 tokens"),
        (np.array([], np.int32), "separator=0 is not one of the 0 tokens"),
        (np.array([1, -1, 0]), "token -1 at position 1 is negative"),
        (np.zeros(3), "type float64"),
        (np.zeros((2, 3), np.int32), r"shape \(2, 3\)"),
    ],
)
def test_texts_that_do_not_split(tokens, message):
    with pytest.raises(ValueError, match=message):
        line_places(tokens, separator=0)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step=-1 is negative"):
        bucketed_lines([6, 6, 6], batch_size=6, edges=(5,), seed=0).batch(-1)


# Packed lines.


def test_lines_are_packed_with_their_targets():
    tokens = np.arange(1, 30)
    starts, lengths = np.array([0, 4, 6, 17, 18]), np.array([3, 1, 10, 0, 10])
    lines = PackedText({TOKENS: tokens}, lengths, 2, 5, seed=3, starts=starts)
    batches = [lines.batch(step) for step in range(lines.num_windows)]
    targets = np.concatenate([batch.targets_BT.ravel() for batch in batches])
    inputs = np.concatenate([batch.inputs_BT.ravel() for batch in batches])
    counted = targets != IGNORE
    assert sorted(targets[counted]) == sorted({*tokens} - {1, 5, 7, 18, 19})
    assert (inputs[counted] == targets[counted] - 1).all()
    begins = np.concatenate([batch.resets.ravel() for batch in batches])
    assert sorted(inputs[begins]) == [1, 5, 7, 19]


def test_a_last_token_that_has_none_after_it_is_refused():
    with pytest.raises(ValueError, match="sequence 0 of 4 steps begins at step 0 of 4"):
        PackedText({TOKENS: np.zeros(4, int)}, [4], 1, 4, starts=[0])


# What is drawn stays: numbers that were published can be had again.

TEXT = np.arange(1, 4002, dtype=np.int32) ** 2 % 977
STARTS, LENGTHS = line_places(TEXT, separator=1)
LINES, IN_BUCKETS = ({TOKENS: TEXT}, LENGTHS, 4), (32, 64, 128)


@pytest.mark.parametrize(
    ("batches", "hashed"),
    [
        (lambda: PackedText(*LINES, 64, starts=STARTS), "a63d901ca8ad369f"),
        (lambda: PackedText(*LINES, 64, 7, starts=STARTS), "e07da27c2c321a60"),
        (lambda: BucketedText(*LINES, IN_BUCKETS, starts=STARTS), "049feaaf9718d78c"),
        (lambda: BucketedText(*LINES, IN_BUCKETS, 7, starts=STARTS), "486369274d17a074"),
    ],
)
def test_the_first_ten_batches_are_those_of_the_published_numbers(batches, hashed):
    assert hash_of_ten_batches(batches()) == hashed
