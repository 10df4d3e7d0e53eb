"""Buckets: every target once an epoch, the least padding, the same batches after a resume."""

import dataclasses
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lib.models import SGD, Regress

import jaxpar
from jaxpar import Stack, Sums
from jaxpar.data.batches import place_batch
from jaxpar.data.bucketed import BucketedBatches, choose_edges
from jaxpar.lm import IGNORE, load_corpus
from jaxpar.lm.streams import TOKENS, BucketedText, line_places
from jaxpar.lm.vocabulary import EOS
from jaxpar.mesh import ONE_DEVICE
from jaxpar.nn import GRU, Bidirectional
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding

SAME_LOSS = 1e-5  # relative, after 12 steps in float32
PYTHON_DOCS_PADDING = 0.15  # at most, with 5 buckets of lines up to 64 steps, in batches of 16


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


def epoch_of(bucketed: BucketedBatches, epoch: int = 0):
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


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


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
    bucketed = BucketedBatches({"x": letters}, lengths, batch_size=2, edges=(3, 5))
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


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    ("axes", "spec", "row_parts"),
    [
        ({"data": 8}, PartitionSpec("data"), 8),
        ({"data": 2, "stage": 4}, PartitionSpec("data"), 2),
        ({"data": 8}, PartitionSpec(), 1),
    ],
)
def test_placed_batch_equals_the_host_batch(axes, spec, row_parts, seed):
    bucketed = bucketed_lines(range(60), batch_size=8, edges=(4, 12, 40), seed=seed)
    sharding = NamedSharding(mesh_of(**axes), spec)
    for step in range(bucketed.num_windows + 2):
        placed, host = place_batch(bucketed, step, sharding), bucketed.batch(step)
        for on_mesh, on_host in zip(placed[:2], host[:2], strict=True):
            assert isinstance(on_mesh, jax.Array)
            assert on_mesh.sharding == sharding
            assert on_mesh.dtype == np.int32
            shard_shape = (8 // row_parts, on_host.shape[1])
            assert {shard.data.shape for shard in on_mesh.addressable_shards} == {shard_shape}
            np.testing.assert_array_equal(on_mesh, on_host)
        assert placed.starts is True


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
    edges = choose_edges(np.array(lengths), *arguments)
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
    assert choose_edges(np.array(lengths), *arguments) == edges


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


def test_python_docs_have_little_padding():
    corpus = load_corpus("python-docs")
    starts, lengths = line_places(corpus.train, corpus.vocabulary.words.index(EOS))
    edges = choose_edges(lengths, 5, multiple=4, max_len=64, batch_size=16)
    bucketed = BucketedText({TOKENS: corpus.train}, lengths, 16, edges, seed=0, starts=starts)
    ignored = sum((batch.targets_BT == IGNORE).sum() for batch in epoch_of(bucketed))
    steps = sum(batch.targets_BT.size for batch in epoch_of(bucketed))
    assert bucketed.padding == pytest.approx(ignored / steps)
    assert bucketed.padding < PYTHON_DOCS_PADDING
    assert steps - ignored == len(corpus.train) - 1


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
        choose_edges(**{**arguments, **changes})


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


def test_steps_and_shardings_that_do_not_fit():
    bucketed = bucketed_lines([6, 6, 6], batch_size=6, edges=(5,), seed=0)
    mesh = mesh_of(data=4, stage=2)
    with pytest.raises(ValueError, match="step=-1 is negative"):
        bucketed.batch(-1)
    with pytest.raises(ValueError, match="batch_size=6 does not divide by data=4"):
        place_batch(bucketed, 0, NamedSharding(mesh, PartitionSpec("data")))


TASK = jaxpar.lm.LM(
    num_layers=2, hidden_size=8, embed_size=8, vocab_size=2688, num_words=2688, seq_len=64, num_buckets=5,
    bucket_multiple=4,
)  # fmt: skip
PARALLEL = jaxpar.Parallel(
    jaxpar.MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3)), jaxpar.PipelineConfig(num_chunks=16)
)


@pytest.mark.full
def test_python_docs_in_five_buckets_are_one_program_of_a_pipeline():
    batches = TASK.make_batches("train", seed=0)
    assert len(batches.buckets) == 5
    assert batches.padding < PYTHON_DOCS_PADDING
    mesh = PARALLEL.mesh.build()
    sharding = batch_sharding(Setup.of(TASK, PARALLEL, mesh=mesh))
    state = jaxpar.init_state(TASK, PARALLEL, mesh=mesh)
    step = jaxpar.make_train_step(TASK, PARALLEL, mesh=mesh)
    lengths = set()
    for number in range(60):
        batch = place_batch(batches, number, sharding)
        if batch.inputs_BT.shape[1] not in lengths:
            lengths.add(batch.inputs_BT.shape[1])
            state, metrics = step(state, batch)
            assert np.isfinite(metrics.loss)
    assert lengths == set(batches.edges)
    assert step.num_programs == 1


class Walks(Regress):
    """Random walks of 1 to 16 steps."""

    variable_length = True

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(3)
        lengths = rng.integers(1, 17, 60)
        walks = rng.normal(size=(lengths.sum(), 3)).astype(np.float32)
        arrays = {"x": walks, "y": np.tanh(walks), "level": np.ones(len(walks), np.float32)}
        edges = choose_edges(lengths, 3, multiple=4, max_len=16, batch_size=self.batch_size)
        return BucketedBatches(arrays, lengths, self.batch_size, edges, seed)

    def example_batch(self):
        batches = self.make_batches("train")
        return batches.batch(batches.num_windows - 1)


@pytest.mark.full
def test_sequences_of_any_task_in_buckets_are_exact_in_a_pipeline(tmp_path):
    task = Walks(kinds=("own gru", "flax gru"), batch_size=8)
    assert {task.make_batches("train", 0).batch(n)["x"].shape[1] for n in range(12)} == {4, 8, 16}
    stages = jaxpar.Parallel(
        jaxpar.MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3)),
        jaxpar.PipelineConfig(num_chunks=4),
    )
    losses = []
    for folder, parallel in (("plain", jaxpar.Parallel(ONE_DEVICE)), ("piped", stages)):
        train = jaxpar.TrainConfig(num_steps=12, out_dir=str(tmp_path / folder))
        losses.append(jaxpar.fit(task, parallel, train, quiet=True).losses)
    np.testing.assert_allclose(*losses, rtol=SAME_LOSS)


class Uneven(Walks):
    def example_batch(self):
        batch = super().example_batch()
        return {**batch, "twice": np.concatenate([batch["x"]] * 2, 1)}


def test_arrays_of_a_batch_that_have_other_lengths_are_refused():
    message = (
        r"task Uneven may have any length .* 16 time steps \(x\) and .*\nFix: give arrays of one"
    )
    with pytest.raises(ValueError, match=message):
        Setup.of(Uneven(kinds=("own gru",)), "dp1")


def test_buckets_that_are_no_whole_chunks_are_refused():
    with pytest.raises(
        ValueError,
        match=r"(?s)bucket_multiple=6 does not divide seq_len=64, .* use seq_len=60 or 66",
    ):
        dataclasses.replace(TASK, bucket_multiple=6)
    task = dataclasses.replace(TASK, bucket_multiple=2)
    with pytest.raises(
        ValueError,
        match=r"(?s)bucket_multiple=2 is not a multiple of the 4 .*use bucket_multiple=4",
    ):
        task.check(PARALLEL)
    task.check(jaxpar.Parallel())  # no chunks, no matter


# A task of one's own.


class Centred(nnx.Module):
    """It takes the mean of two rows' real steps away."""

    rows_together = 2

    def __call__(self, carry, x, at):
        weight = at.batch["weight"][..., None]
        mean = jnp.sum(x * weight, 1, keepdims=True) / jnp.maximum(weight.sum(1, keepdims=True), 1)
        return carry, x - 0.1 * mean


class Tagger(nnx.Module):
    """A class for each sequence, by the mean of its steps, read both ways."""

    def __init__(self, rngs):
        self.out = nnx.Linear(4, 3, rngs=rngs)
        both = [lambda rngs: Bidirectional(GRU(4, rngs=rngs), GRU(4, rngs=rngs))]
        self.layers = Stack([*both, lambda rngs: Centred(), *both], rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        weight = batch["weight"]
        mean_BE = jnp.sum(y * weight[..., None], 0) / jnp.maximum(weight.sum(0), 1)[:, None]
        labels_B, is_real_B = batch["static"]["label"], weight[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(self.out(mean_BE), labels_B)
        return Sums(jnp.sum(losses * is_real_B), jnp.sum(is_real_B))


@dataclasses.dataclass(frozen=True)
class Tags(jaxpar.Task):
    edges: tuple[int, ...] = (4, 8)
    optimizer = SGD
    variable_length = True

    def make_model(self, rngs):
        return Tagger(rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 9, 24)
        arrays = {"x": rng.normal(size=(lengths.sum(), 4)).astype(np.float32)}
        arrays["static"] = {"label": rng.integers(0, 3, 24).astype(np.int32)}
        return BucketedBatches(arrays, lengths, 4, self.edges, seed)


class Steps(Tagger):
    """It counts each step by itself, and its layers read forward alone."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = Stack([lambda rngs: GRU(4, rngs=rngs)], rngs=rngs)

    def last(self, y, batch, at):
        return Sums(jnp.sum(y.mean(-1) * batch["weight"]), jnp.sum(batch["weight"]))


class Forgetful(Tags):
    variable_length = False


class Plain(Tags):
    def make_model(self, rngs):
        return Steps(rngs)


def test_layers_of_whole_windows_and_mixed_rows_read_buckets_on_stages():
    train = jaxpar.TrainConfig(num_steps=6)
    one, stages = (jaxpar.fit(Tags(), mesh, train, quiet=True).losses for mesh in ("dp1", "pp2"))
    np.testing.assert_allclose(one, stages, rtol=SAME_LOSS)


def test_buckets_that_do_not_fit_are_refused_before_a_run(tmp_path):
    train = jaxpar.TrainConfig(num_steps=2, out_dir=str(tmp_path / "run"))
    chunks = jaxpar.Parallel("pp2", jaxpar.PipelineConfig(num_chunks=2))
    with pytest.raises(ValueError, match=r"time chunks of 4 steps, but batches have \[6\]"):
        jaxpar.fit(Plain((4, 6, 8)), chunks, train, quiet=True)
    with pytest.raises(ValueError, match=r"have 2 lengths.*\nFix: write variable_length = True"):
        jaxpar.fit(Forgetful(), "dp1", train, quiet=True)
    assert not [*tmp_path.iterdir()]
