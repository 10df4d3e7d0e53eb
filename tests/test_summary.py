"""The summary of a run names its data, its batch, its optimizer and whether gradients are clipped."""

import optax
import pytest
from lib import api
from lib.regression import Regression, X, make_task

import jaxpar
from jaxpar import OptimizerConfig, Parallel, PipelineConfig, TrainConfig


def own_chain():
    return optax.chain(optax.scale_by_adam(), optax.scale(-0.1))


def moving(decay):
    return optax.GradientTransformation(
        lambda _: (), lambda grads, state, params=None: (grads, state)
    )


# Optimizers, and what is said of each.
SAID = {
    "a config": (
        OptimizerConfig("sgd", 0.1, momentum=0.9, weight_decay=0.01),
        "sgd, learning rate 0.1 (cosine), momentum 0.9, weight decay 0.01",
    ),
    "a chain": (own_chain(), "your own (scale_by_adam, scale)"),
    "no momentum": (optax.sgd(0.1), "your own (scale)"),
    "chains": (optax.chain(own_chain(), moving(0.9)), "your own (scale_by_adam, scale, moving)"),
    "injected": (optax.inject_hyperparams(optax.adam)(0.1), "your own (adam)"),
    "steps": (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), "your own (MultiSteps)"),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_a_summary_says_what_the_optimizer_is(what):
    optimizer, words = SAID[what]
    rows = api.summary(make_task(optimizer), "dp1", TrainConfig(num_steps=8))
    assert rows["optimizer"] == f"{words}, 8 steps"
    before = "" if what == "a config" else " before your optimizer"
    clipped = "clipped to norm 1" if what == "a config" else f"not clipped{before}"
    assert rows["clipping"] == f"gradients are {clipped}"


def test_a_summary_has_lines_of_the_data_the_batch_and_the_clipping():
    parallel = Parallel("pp2", PipelineConfig(num_microbatches=2))
    rows = api.summary(Regression(), parallel, TrainConfig(clip_norm=0.5))
    assert rows["data"] == "64 rows to train on (ArrayBatches): x float32[8]"
    assert rows["batch"] == "16 rows, in 2 microbatches of 8 rows"
    assert rows["clipping"] == "gradients are clipped to norm 0.5"


def test_a_summary_has_lines_of_shares_and_speeds():
    rows = api.summary(Regression(), Parallel("dp2", shares=(3, 1)))
    assert rows["shares"] == "3 : 1"
    rows = api.summary(Regression(), Parallel("pp2", speeds=(1, 2.5)))
    assert rows["speeds"] == "1 : 2.5"


class Streamed(Regression):
    def make_batches(self, split, seed=None):
        arrays = dict.fromkeys("abcdex", X[:16])
        return jaxpar.IteratorBatches(lambda: [arrays], 16)


def test_a_stream_of_many_arrays_is_described_in_one_line():
    rows = api.summary(Streamed(), "dp1")
    assert rows["data"] == (
        "a stream (IteratorBatches): a float32[8], b float32[8], c float32[8], d float32[8], and 2 more"
    )


def test_a_task_describes_its_data_and_batch_in_its_own_words():
    class Told(Regression):
        def describe(self):
            return [("batch", "16 of 64"), ("data", "noise"), ("note", "own")]

    rows = api.summary(Told(), Parallel("dp1", PipelineConfig(num_microbatches=2)))
    assert rows["data"] == "noise"
    assert rows["batch"] == "16 of 64, in 2 microbatches of 8 rows"
    assert rows["note"] == "own"
