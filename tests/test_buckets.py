"""Sequences in buckets: one program of a pipeline, exact losses, and what does not fit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.models import SGD, Regress

import jaxpar
from jaxpar import Stack, Sums
from jaxpar.lm import IGNORE
from jaxpar.nn import GRU, Bidirectional

SAME_LOSS = 1e-5  # relative, after 12 steps in float32
PYTHON_DOCS_PADDING = 0.15  # at most, with 5 buckets of lines up to 64 steps, in batches of 16

TASK = jaxpar.lm.LM(
    num_layers=2, hidden_size=8, embed_size=8, vocab_size=2688, num_words=2688, seq_len=64, num_buckets=5,
    bucket_multiple=4,
)  # fmt: skip
PARALLEL = jaxpar.Parallel(
    jaxpar.MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3)), jaxpar.PipelineConfig(num_chunks=16)
)


def test_python_docs_have_little_padding():
    batches = TASK.make_batches("train", seed=0)
    epoch = [batches.batch(step).targets_BT for step in range(batches.num_windows)]
    ignored, steps = sum((a == IGNORE).sum() for a in epoch), sum(a.size for a in epoch)
    assert batches.padding == pytest.approx(ignored / steps)
    assert batches.padding < PYTHON_DOCS_PADDING
    assert steps - ignored == len(TASK.read_text().train) - 1


@pytest.mark.full
def test_python_docs_in_five_buckets_are_one_program_of_a_pipeline():
    batches = TASK.make_batches("train", seed=0)
    assert len(batches.buckets) == 5
    state, step = jaxpar.init_state(TASK, PARALLEL), jaxpar.make_train_step(TASK, PARALLEL)
    lengths = set()
    for number in range(60):
        batch = api.placed_batch(TASK, PARALLEL, batches, number)
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
        edges = api.choose_edges(lengths, 3, multiple=4, max_len=16, batch_size=self.batch_size)
        return api.BucketedBatches(arrays, lengths, self.batch_size, edges, seed)

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
    for folder, parallel in (("plain", jaxpar.Parallel("dp1")), ("piped", stages)):
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
        jaxpar.init_state(Uneven(kinds=("own gru",)), "dp1")


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
        return api.BucketedBatches(arrays, lengths, 4, self.edges, seed)


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


@pytest.mark.full
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
