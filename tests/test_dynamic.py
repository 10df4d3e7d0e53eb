"""Evaluation in one stream, and dynamic evaluation: as a plain loop has it, and on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, TrainConfig, fit, load_run
from jaxpar.lm import LM
from recipes.dynamic_evaluation import evaluate_dynamically

pytestmark = pytest.mark.usefixtures("compile_once")

more = functools.partial(pytest.param, marks=pytest.mark.more)
ADAPTATION = {"rate": 0.5, "decay": 0.1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The task and the folder of a run of few steps, on words that follow each other in a few ways."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    sentences = ["a cat sat", "a dog ran to the cat", "the dog sat on a mat"]
    for split, count in (("train", 60), ("valid", 13), ("test", 3)):
        lines = [sentences[n] for n in rng.integers(3, size=count)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    task = LM(
        2, 8, 8, dropout=0.3, corpus=str(folder), batch_size=4, seq_len=8,
        optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=0),
    )  # fmt: skip
    train = TrainConfig(num_steps=6, out_dir=str(folder / "run"))
    parallel = Parallel(MeshConfig(devices=(0,)), PipelineConfig(num_chunks=4))
    result = fit(task, parallel, train)
    return task, result.out_dir


def plain_loop(task, folder, split, batch_size, seq_len, rate=0.0, decay=0.0):
    """Perplexity, window by window: each is scored by what was learned of those before it."""
    loaded, tokens = load_run(folder), getattr(task.read_text(), split)
    graphdef, trained = nnx.split(loaded.model())
    params, total, count = trained, 0.0, 0
    carry = loaded.model().layers.initial_carry(batch_size)
    bounds = np.arange(batch_size + 1) * (len(tokens) - 1) // batch_size
    longest = int(np.diff(bounds).max())

    @jax.jit
    def score(params, carry, inputs, targets, counts):
        def loss(params):
            after, logits_TBV = nnx.merge(graphdef, params).unroll(inputs, carry)
            log_p = jax.nn.log_softmax(logits_TBV)
            picked = jnp.take_along_axis(log_p, targets.T[..., None], -1)[..., 0]
            return -jnp.sum(picked * counts.T) / jnp.maximum(counts.sum(), 1.0), after

        return jax.value_and_grad(loss, has_aux=True)(params)

    for first in range(0, longest, seq_len):
        places = bounds[:-1, None] + first + np.arange(seq_len)
        counts = places < bounds[1:, None]
        inputs = np.where(counts, tokens[np.minimum(places, len(tokens) - 1)], 0)
        targets = np.where(counts, tokens[np.minimum(places + 1, len(tokens) - 1)], 0)
        (mean, carry), grads = score(params, carry, inputs, targets, counts.astype(np.float32))
        total, count = total + float(mean) * counts.sum(), count + counts.sum()
        params = jax.tree.map(
            lambda p, g, p0: p - rate * g + decay * (p0 - p),
            params, grads, trained,
        )  # fmt: skip
    assert count == len(tokens) - 1
    return np.exp(total / count)


@pytest.mark.more
@pytest.mark.parametrize(
    ("sizes", "adaptation"),
    [
        ({"batch_size": 1, "seq_len": 5}, ADAPTATION),
        more({"batch_size": 1}, {}),
        more({}, {"rate": 0.5}),
    ],
)
def test_evaluation_is_a_plain_loop(run, sizes, adaptation):
    (_, folder), of_run = run, {"batch_size": 4, "seq_len": 8}
    if adaptation:
        evaluations = evaluate_dynamically(folder, **adaptation, **sizes)
    else:
        loaded = load_run(folder).in_batches(**sizes)
        evaluations = [loaded.evaluate(split) for split in ("valid", "test")]
    for found in evaluations:
        expected = plain_loop(*run, found.split, **{**of_run, **sizes}, **adaptation)
        np.testing.assert_allclose(found.metrics["perplexity"], expected, rtol=1e-5)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("mesh", ["dp2pp2tp2", more("dp4tp2"), more("pp2dp4")])
def test_dynamic_evaluation_is_the_same_on_every_mesh(run, mesh):
    _, folder = run
    expected = evaluate_dynamically(folder, **ADAPTATION, batch_size=8)
    found = evaluate_dynamically(folder, mesh, **ADAPTATION, batch_size=8)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own.loss, other.loss, rtol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: evaluate_dynamically(folder, rate=-1.0),
            r"rate=-1\.0: must be above 0",
        ),
        (
            lambda folder: evaluate_dynamically(folder, rate=0.1, decay=1.5),
            r"decay=1\.5: must be from 0 to 1",
        ),
        (
            lambda folder: load_run(folder).in_batches(rows=1),
            r"rows=1 is not a size of the data of task LM\nFix: use",
        ),
    ],
)
def test_impossible_evaluations_are_refused(run, make, message):
    _, folder = run
    with pytest.raises(ValueError, match=message):
        make(folder)
