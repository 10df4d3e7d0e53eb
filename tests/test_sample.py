"""Samples: the same for the same seed, from the carried state, and of words alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar import MeshConfig, OptimizerConfig, Parallel, TrainConfig
from jaxpar.tasks.lm.loaded import TextRun, sample
from jaxpar.tasks.lm.task import LM
from jaxpar.tasks.lm.vocabulary import EOS
from jaxpar.training.fit import fit
from jaxpar.training.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("compile_once")

WORDS = {"the", "cat", "sat", "on", "mat", "a", "dog", "ran", "to", "<unk>"}


def loaded(run, **changes):
    """The run as it is loaded, with another setup or state."""
    own = {"setup": run.setup, "state": run.state, **changes}
    return TextRun(RunFolder(run.out_dir), **own)


def likeliest(run, state):
    """(prompt, ...) -> the three tokens that the model finds likeliest."""
    return functools.partial(loaded(run, state=state).sample_tokens, length=3, temperature=0)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A few steps, so that all words are still likely."""
    task = LM(
        num_layers=2, hidden_size=8, embed_size=8, corpus=str(text), batch_size=8, seq_len=4,
        optimizer=OptimizerConfig(warmup_steps=0),
    )  # fmt: skip
    train = TrainConfig(num_steps=2, out_dir=str(tmp_path_factory.mktemp("runs") / "run"))
    return fit(task, Parallel(MeshConfig(devices=(0,))), train)


def test_a_sample_is_a_function_of_the_seed(run):
    first, again, other = (sample(run.out_dir, "the cat", length=30, seed=n) for n in (0, 0, 1))
    assert first == again != other
    assert first.startswith("the cat")
    assert sample(run.out_dir, "the", length=5, temperature=0) == sample(
        run.out_dir, "the", length=5, temperature=0, seed=3
    )


def test_a_sample_is_the_same_on_another_mesh(run):
    mesh = MeshConfig(data=1, stage=2, tensor=2, devices=(0, 1, 2, 3))
    options = {"length": 20, "temperature": 0.5}
    assert sample(run.out_dir, "a", mesh=mesh, **options) == sample(run.out_dir, "a", **options)


def test_only_words_are_drawn(run):
    """Of 384 rows 11 are words; at so high a temperature all that can be drawn is."""
    drawn = sample(run.out_dir, length=300, temperature=1e6).split()
    assert set(drawn) == WORDS


def test_greedy_tokens_are_those_of_the_model_applied_to_the_whole_text_so_far(run):
    # Large random weights, so that the likeliest token depends on all that came before.
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda array: rng.normal(0, 2, array.shape).astype(np.float32), run.state.params
    )
    state = type(run.state)(**{**vars(run.state), "params": params})
    model = run.setup.layout.merge(params, run.state.frozen)
    greedy = likeliest(run, state)
    drawn = set()
    for prompt in rng.integers(11, size=(6, 5), dtype=np.int32):
        tokens = greedy(prompt)
        text = np.concatenate([prompt, tokens])
        logits = np.asarray(model(text[None])[0])
        np.testing.assert_array_equal(tokens, logits.argmax(-1)[len(prompt) - 1 : -1])
        drawn |= set(tokens.tolist())
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, r"temperature=nan: use a finite temperature"),
        ({"temperature": float("inf")}, r"temperature=inf: use a finite temperature"),
        ({"temperature": -1.0}, r"temperature=-1\.0: .* no negative number"),
        ({"length": 0}, r"length=0 is too small; use 1 or more"),
        ({"length": -3}, r"length=-3 is too small; use 1 or more"),
        ({"seed": -1}, r"seed=-1 is too small; use 0 or more"),
        ({"prompt": "the cst"}, r"'cst' is not among the 11 words; nearest are 'sat', 'cat'"),
    ],
)
def test_numbers_and_words_that_cannot_be_are_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        sample(run.out_dir, **options)


def test_prompts_that_cannot_be_are_refused(run):
    draw = functools.partial(loaded(run).sample_tokens, length=3)
    with pytest.raises(ValueError, match="num_tokens=0 is too small; use 1 or more"):
        draw(np.array([], np.int32))
    with pytest.raises(ValueError, match="token 11 at position 1 is outside the vocabulary of 11"):
        draw(np.array([0, 11]))


def test_a_run_is_loaded_by_its_folder(run):
    found = jaxpar.load_run(run.out_dir)
    assert isinstance(found, jaxpar.lm.TextRun)
    assert (found.step, found.setup.task.num_words) == (2, 11)
    assert set(found.vocabulary.words) >= WORDS
    jax.tree.map(np.testing.assert_array_equal, found.params, run.state.params)
    assert found.evaluate("valid") == run.evaluations["valid"]
    assert found.sample("the cat", length=5, seed=3) == sample(
        run.out_dir, "the cat", length=5, seed=3
    )
    # Row by row what the model expects next; and so no row depends on what comes after it.
    logits = found.logits("the cat sat")
    assert (logits.shape, logits.dtype) == ((4, 11), np.float32)
    np.testing.assert_allclose(found.logits("the")[:2], logits[:2], atol=1e-6)
    likeliest = found.vocabulary.words[logits[-1].argmax()]
    assert found.sample("the cat sat", length=1, temperature=0).split()[-1:] == [likeliest]
    tokens = found.vocabulary.encode("<eos> the cat sat")
    expected = found.model(tokens[None])[0, :, :11]
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert len(found.metrics()) > 2
    with pytest.raises(ValueError, match="'zebra' is not among the 11 words"):
        found.logits("a zebra")
    with pytest.raises(FileNotFoundError, match="nowhere holds no run"):
        jaxpar.load_run("nowhere")
    spread = jaxpar.load_run(run.out_dir, "pp2tp4")
    np.testing.assert_allclose(spread.logits("the cat sat"), logits, atol=1e-5)


def larger(state):
    """With larger weights, so that what is carried counts."""
    return dataclasses.replace(state, params=jax.tree.map(lambda a: 5 * a, state.params))


def test_a_model_of_lines_begins_each_of_them_anew(run):
    """After the separator comes what came after the first one."""
    separator, *words = np.int32([4, 7, 2, 9])
    once = np.int32([separator, *words])
    twice = np.int32([separator, 3, *once])
    state = larger(run.state)
    greedy = likeliest(run, state)
    np.testing.assert_array_equal(greedy(twice, separator=4), greedy(once, separator=4))
    model = run.setup.layout.merge(state.params, state.frozen)
    carry = model.layers.initial_carry(1)
    logits = {
        resets is None: model.unroll(twice[None], carry, resets)[1][-1, 0]
        for resets in (None, twice[None] == separator)
    }
    expected = model.unroll(once[None], carry)[1][-1, 0]
    np.testing.assert_allclose(logits[False], expected, rtol=1e-6)
    assert np.abs(logits[True] - expected).max() > 1e-3


def test_who_trains_on_lines_samples_lines(run):
    vocabulary, state = run.setup.task.read_text().vocabulary, larger(run.state)
    numbers = {"length": 40, "temperature": 1.0, "seed": 0}
    for task in (run.setup.task, dataclasses.replace(run.setup.task, packed=True)):
        setup = dataclasses.replace(run.setup, task=task)
        text = loaded(run, setup=setup, state=state).sample("a cat", **numbers)
        prompt = np.concatenate([vocabulary.encode([EOS]), vocabulary.encode("a cat")])
        separator = int(prompt[0]) if task.packed else None
        tokens = loaded(run, state=state).sample_tokens(prompt, separator, **numbers)
        assert text == vocabulary.decode(np.concatenate([prompt, tokens])[1:])
