"""Samples: the same for the same seed, from the carried state, and of words alone."""

import dataclasses
import functools
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.drawn import RELATIVE_ERRORS, Draw, assert_drawn_by_definition, by_definition, larger
from lib.laws import more

import jaxpar
from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
    fit,
    init_state,
)
from jaxpar.lm import LM, sample

pytestmark = pytest.mark.usefixtures("compile_once")

WORDS = {"the", "cat", "sat", "on", "mat", "a", "dog", "ran", "to", "<unk>"}
NUM_WORDS = 11  # with <eos>
CALL_STEPS = 32  # between two looks for a signal
COLDEST, HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
ONE = Parallel(MeshConfig(devices=(0,)))


def drawn(run, prompt, state=None, length=3, **numbers):
    """The tokens that follow one prompt."""
    state = run.state if state is None else state
    return api.sampled(run.setup.task, ONE, state, [prompt], length, **numbers)[0]


def likeliest(run, state):
    """(prompt, ...) -> the three tokens that the model finds likeliest."""
    return functools.partial(drawn, run, state=state, temperature=0)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A few steps, so that all words are still likely."""
    task = LM(
        num_layers=2, hidden_size=8, embed_size=8, corpus=str(text), batch_size=8, seq_len=4,
        optimizer=OptimizerConfig(warmup_steps=0),
    )  # fmt: skip
    train = TrainConfig(num_steps=2, out_dir=str(tmp_path_factory.mktemp("runs") / "run"))
    return fit(task, ONE, train)


@pytest.mark.full
def test_a_sample_is_a_function_of_the_seed(run):
    first, again, other = (sample(run.out_dir, "the cat", length=30, seed=n) for n in (0, 0, 1))
    assert first == again != other
    assert first.startswith("the cat")
    assert sample(run.out_dir, "the", length=5, temperature=0) == sample(
        run.out_dir, "the", length=5, temperature=0, seed=3
    )


@pytest.mark.full
def test_a_sample_is_the_same_on_another_mesh(run):
    mesh = MeshConfig(data=1, stage=2, tensor=2, devices=(0, 1, 2, 3))
    options = {"length": 20, "temperature": 0.5}
    assert sample(run.out_dir, "a", mesh=mesh, **options) == sample(run.out_dir, "a", **options)


@pytest.mark.full
def test_only_words_are_drawn(run):
    """Of 384 rows 11 are words; at so high a temperature all that can be drawn is."""
    text = sample(run.out_dir, length=300, temperature=1e6)
    assert set(text.split()) == WORDS


LIMITS = {
    "no limit": {},
    "top_k": {"top_k": 3},
    "top_k of more than the words": {"top_k": 300},
    "top_p": {"top_p": 0.9999999},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_padding_is_drawn_at_no_temperature(run, limit):
    prompt, numbers = np.array([0, 4], np.int32), LIMITS[limit]
    greedy = drawn(run, prompt, length=300, temperature=0)
    cold = drawn(run, prompt, length=300, temperature=COLDEST, **numbers)
    np.testing.assert_array_equal(cold, greedy)
    for temperature in (1.0, 1e30, HOTTEST):
        tokens = drawn(run, prompt, length=300, temperature=temperature, **numbers)
        assert tokens.max() < NUM_WORDS
        if limit == "no limit":
            assert set(tokens) == set(range(NUM_WORDS))


def test_padding_is_drawn_on_no_stage(run):
    # Each stage has a part of the vocabulary; the last one has the padding.
    mesh = MeshConfig(data=1, stage=2, devices=(0, 1))
    text = sample(run.out_dir, length=300, mesh=mesh, temperature=HOTTEST)
    assert set(text.split()) == WORDS
    assert text == sample(run.out_dir, length=300, temperature=HOTTEST)


@pytest.mark.full
def test_greedy_tokens_are_those_of_the_model_applied_to_the_whole_text_so_far(run):
    # Large random weights, so that the likeliest token depends on all that came before.
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda array: rng.normal(0, 2, array.shape).astype(np.float32), run.state.params
    )
    state = dataclasses.replace(run.state, params=params)
    model = api.model(run.setup.task, ONE, state)
    greedy = likeliest(run, state)
    found = set()
    for prompt in rng.integers(11, size=(6, 5), dtype=np.int32):
        tokens = greedy(prompt)
        text = np.concatenate([prompt, tokens])
        logits = np.asarray(model(text[None])[0])
        np.testing.assert_array_equal(tokens, logits.argmax(-1)[len(prompt) - 1 : -1])
        found |= set(tokens.tolist())
    assert len(found) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1\.0 must be 0, or from 1\.2e-38 to 3\.4e\+38"),
        ({"length": 0}, r"length=0 is too small"),
        ({"length": -3}, r"length=-3 is too small"),
        ({"temperature": 1e39}, r"temperature=1e\+39 must be 0, or from .*\nFix: use 1, or 0"),
        ({"temperature": 1e-39}, r"temperature=1e-39 must be 0, or from"),
        ({"temperature": float("inf")}, r"temperature=inf must be 0, or from"),
        ({"temperature": float("nan")}, r"temperature=nan must be 0, or from"),
        ({"temperature": 10**400}, r"temperature=10+ must be 0, or from"),
        ({"temperature": 1j}, r"temperature=1j \(complex\): must be a number"),
        ({"length": 10**20}, r"length=10+ is too large\.\nFix: use 2147483646 or less"),
        ({"length": 2**31}, r"length=2147483648 is too large\.\nFix: use 2147483646 or less"),
        ({"length": 1.0}, r"length=1\.0 \(float\): must be a whole number"),
        ({"top_p": float("nan")}, r"top_p=nan is not a probability"),
        ({"top_p": 10**400}, r"top_p=10+ is not a probability"),
        ({"top_p": "half"}, r"top_p='half' \(str\): must be a number"),
        ({"top_k": 1.5}, r"top_k=1\.5 \(float\): must be a whole number"),
        ({"seed": 2**31}, r"seed=2147483648 is too large\.\nFix: use less than 2147483648"),
        ({"seed": 2**63}, r"seed=\d+ is too large"),
        ({"seed": -(2**63)}, r"seed=-\d+ is too small"),
        ({"end": "the cat"}, r"end='the cat' is 2 tokens of the run's vocabulary\nFix: use one"),
        ({"top_k": -1}, r"top_k=-1 is too small"),
        ({"top_p": 0.0}, r"top_p=0\.0 is not a probability above 0\.\nFix: use 1"),
        ({"seed": -1}, r"seed=-1 is too small"),
        ({"prompt": "the cst"}, r"(?s)'cst' is not among the 11 words.*use 'sat', 'cat'"),
    ],
)
def test_numbers_and_words_that_cannot_be_are_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        sample(run.out_dir, **options)


@pytest.mark.parametrize("number", [2**31, 2**63, 10**400])
def test_more_words_than_there_are_is_all_of_them(run, number):
    assert sample(run.out_dir, "the", top_k=number) == sample(run.out_dir, "the")


@pytest.mark.parametrize("temperature", [0.5, np.float16(0.5), np.float32(0.5)])
def test_temperatures_are_numbers_of_any_type(run, temperature):
    found = sample(run.out_dir, "the", temperature=temperature)
    assert found == sample(run.out_dir, "the", temperature=0.5) != sample(run.out_dir, "the")


# ---- a signal while it samples ----


def test_a_text_is_the_same_in_however_many_calls_it_is_drawn(run):
    text = jaxpar.load_run(run.out_dir)
    prompts = [" ".join(["the"] * (CALL_STEPS + 3)), "a"]
    length = 2 * CALL_STEPS + 5
    whole = text.sample(prompts, length=length, seed=1)
    parts = text.sample(prompts, length=CALL_STEPS, seed=1)
    for one, part in zip(whole, parts, strict=True):
        assert one.startswith(part)
    assert text.sample(prompts[0], length=length, seed=1) == whole[0]


def test_a_sample_that_is_stopped_has_the_texts_so_far(run):
    text, looks = jaxpar.load_run(run.out_dir), []
    prompts = ["the cat", "a"]
    whole = text.sample(prompts, length=100)

    def look(_, work):
        looks.append(1)
        if len(looks) == 2:
            signal.raise_signal(signal.SIGTERM)
        return work()

    num_drawn = CALL_STEPS - 2  # two steps read the longer prompt
    message = f"stopped after {num_drawn} of 100 tokens"
    with (
        api.instead_of("look for a signal", look),
        pytest.raises(KeyboardInterrupt, match=message) as stopped,
    ):
        text.sample(prompts, length=100)
    for one, so_far in zip(whole, stopped.value.texts, strict=True):
        assert one.startswith(so_far)
    assert len(text.vocabulary.encode(stopped.value.texts[0])) == 2 + num_drawn


SAMPLING = """
import sys
tests, *words = sys.argv[1:]
sys.path.insert(0, tests)
from lib import api

def look(_, work):
    print("sampling", flush=True)
    return work()

with api.instead_of("look for a signal", look):
    code = api.command(*words)
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_long_sample_hears_a_signal(run, number):
    command = ["sample", str(run.out_dir), "--length", "2000000000"]
    with subprocess.Popen(
        [sys.executable, "-c", SAMPLING, str(Path(__file__).parent), *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        for _ in range(3):
            assert process.stdout.readline() == "sampling\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert re.fullmatch(r"stopped after \d+ of 2000000000 tokens\n", err)
    assert set(out.split()) - {"sampling"} <= WORDS
    assert len(out.splitlines()[-1].split()) > 1


def test_prompts_that_cannot_be_are_refused(run):
    with pytest.raises(ValueError, match="num_tokens=0 is too small"):
        drawn(run, np.array([], np.int32))
    with pytest.raises(
        ValueError, match=r"token 11 at position 1 of the \w+ is outside the vocabulary of 11"
    ):
        drawn(run, np.array([0, 11]))
    with pytest.raises(ValueError, match="num_prompts=0 is too small"):
        sample(run.out_dir, [])


class Attention(nnx.Module):
    """A layer that would."""

    whole_window = True

    def __init__(self, rngs):
        self.scale = nnx.Param(np.ones(8, np.float32))

    def __call__(self, carry, x, at):
        return carry, x * self.scale[...][None, None]


@dataclasses.dataclass(frozen=True)
class OfWindows(LM):
    def make_model(self, rngs):
        model = super().make_model(rngs)
        model.layers = jaxpar.Stack([Attention] * 2, rngs=rngs)
        return model


def test_layers_that_need_a_whole_window_are_refused(run):
    fields = dataclasses.fields(run.setup.task)
    task = OfWindows(**{field.name: getattr(run.setup.task, field.name) for field in fields})
    with pytest.raises(
        ValueError, match="layer attention reads the whole window at once, but text"
    ):
        api.sampled(task, ONE, init_state(task, ONE), [np.array([0])], 3)


@pytest.mark.full
def test_a_run_is_loaded_by_its_folder(run):
    found = jaxpar.load_run(run.out_dir)
    assert isinstance(found, jaxpar.lm.TextRun)
    assert (found.step, found.setup.task.num_words) == (2, 11)
    assert set(found.vocabulary.words) >= WORDS
    values = jax.tree.leaves(found.params)
    for value, expected in zip(values, jax.tree.leaves(run.state.params), strict=True):
        np.testing.assert_array_equal(value, expected)
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
    expected = found.model()(tokens[None])[0, :, :11]
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert len(found.metrics()) > 2
    with pytest.raises(ValueError, match="'zebra' is not among the 11 words"):
        found.logits("a zebra")
    for wrong, named in ([1, 2, 3], "1"), (np.zeros(3), r"0\.0"):
        message = (
            rf"a word of the text=.*{named}.*: must be a string; `decode` makes a text of token ids"
        )
        with pytest.raises(ValueError, match=message):
            found.logits(wrong)
    with pytest.raises(ValueError, match=r"prompt=3 \(int\): must be a text, or a list of texts"):
        found.sample(3)
    with pytest.raises(ValueError, match=r"temperature='hot' \(str\): must be a number"):
        found.sample("the", temperature="hot")
    with pytest.raises(ValueError, match=r"data=3 \(int\): must be a path"):
        found.batches(3)
    with pytest.raises(FileNotFoundError, match="nowhere holds no run"):
        jaxpar.load_run("nowhere")
    spread = jaxpar.load_run(run.out_dir, "pp2tp4")
    np.testing.assert_allclose(spread.logits("the cat sat"), logits, atol=1e-5)


@pytest.mark.full
def test_a_model_of_lines_begins_each_of_them_anew(run):
    """After the separator comes what came after the first one."""
    separator, *words = np.int32([4, 7, 2, 9])
    once = np.int32([separator, *words])
    twice = np.int32([separator, 3, *once])
    state = larger(run.state)
    greedy = likeliest(run, state)
    model = api.model(run.setup.task, ONE, state)
    np.testing.assert_array_equal(greedy(twice, separator=4), greedy(once, separator=4))
    carry = model.layers.initial_carry(1)
    logits = {
        resets is None: model.unroll(twice[None], carry, resets)[1][-1, 0]
        for resets in (None, twice[None] == separator)
    }
    expected = model.unroll(once[None], carry)[1][-1, 0]
    np.testing.assert_allclose(logits[False], expected, rtol=1e-6)
    assert np.abs(logits[True] - expected).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_who_trains_on_lines_samples_lines(text, tmp_path, packed):
    task = LM(
        num_layers=2, hidden_size=8, embed_size=8, corpus=str(text), batch_size=8, seq_len=4,
        packed=packed, optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=0),
    )  # fmt: skip
    fit(task, ONE, TrainConfig(num_steps=4, out_dir=str(tmp_path / "run")), quiet=True)
    run = jaxpar.load_run(tmp_path / "run")
    numbers = {"length": 40, "temperature": 1.0, "seed": 0}
    prompt = run.vocabulary.encode("<eos> a cat")
    separators = {False: None, True: int(prompt[0])}
    texts = {}
    for is_told, separator in separators.items():
        tokens = drawn(run, prompt, separator=separator, **numbers)
        texts[is_told] = run.vocabulary.decode(np.concatenate([prompt, tokens])[1:])
    assert texts[False] != texts[True]
    assert run.sample("a cat", **numbers) == texts[packed]


# ---- on any mesh ----


@dataclasses.dataclass(frozen=True)
class Frozen(LM):
    frozen: ClassVar = nnx.PathContains("embedding")


MESHES = [
    ("pp2", {}, {"temperature": 0.7}),
    more("dp2pp2tp2", {"tie_embedding": True}, {"top_k": 3}),
    more("dp1", {}, {"temperature": 0.0}),
    more("dp2tp2", {}, {"top_p": 0.6}),
    more("tp2", {}, {"top_k": 4}),
    more("pp4", {"packed": True}, {"top_k": 5, "top_p": 0.8}),
    more("pp8", {"layer": "gru", "num_layers": 2}, {"temperature": 1.5}),
    more("pp2tp4", {"layer": "slstm", "num_buckets": 2}, {}),
    more("dp2pp2tp2", {"layer": "mlstm", "packed": True}, {}),
]


@pytest.mark.law
@pytest.mark.parametrize(("mesh", "sizes", "numbers"), MESHES)
def test_tokens_are_those_of_the_definition_on_any_mesh(mesh, sizes, numbers, text):
    """For prompts of several lengths, more than the groups are, and not as many as would fill them."""
    options = {"num_layers": 4, "hidden_size": 16, "embed_size": 16, "batch_size": 8, "seq_len": 4}
    make = Frozen if mesh == "pp2" else LM
    task = make(**options | sizes, corpus=str(text))
    state = larger(init_state(task, mesh, seed=1))
    separator = 4 if task.reads_lines else None
    draw = Draw(seed=5, separator=separator, **numbers)
    assert_drawn_by_definition(task, mesh, state, draw, (1, 4, 2, 1, 3))


# On two stages, in groups of one row; interleaved has the layers elsewhere than the sampler.
INTERLEAVED = Parallel(
    MeshConfig(stage=2, data=2), PipelineConfig(schedule="interleaved", num_groups=2)
)
ROUNDED = [
    ("bfloat16", 0.0, "dp2pp2"), more("bfloat16", 1.0, INTERLEAVED), more("float32", 1.0, "dp2pp2"),
]  # fmt: skip


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("dtype", "temperature", "on_stages"), ROUNDED)
def test_texts_part_at_a_draw_whose_best_scores_are_within_rounding(
    dtype, temperature, on_stages, text
):
    """In groups of a few rows matrix products round in another order, and greedy texts of bfloat16 part here.

    Texts of so many tokens that whether a table is better in parts goes another way than in training.
    """
    options = {"num_layers": 4, "hidden_size": 64, "embed_size": 64, "batch_size": 8, "seq_len": 4}
    task, draw = LM(**options, dtype=dtype, corpus=str(text)), Draw(5, temperature)
    prompts = [*np.random.default_rng(0).integers(11, size=(4, 3), dtype=np.int32)]
    states = [larger(init_state(task, parallel, seed=1), 2) for parallel in ("dp1", on_stages)]
    found, other = (
        api.sampled(task, parallel, state, prompts, 120, **draw._asdict())
        for parallel, state in zip(("dp1", on_stages), states, strict=True)
    )
    assert len(np.unique(found)) > 3
    model = api.model(task, "dp1", states[0])
    for row, (prompt, tokens, theirs) in enumerate(zip(prompts, found, other, strict=True)):
        for first in np.flatnonzero(tokens != theirs)[:1]:
            whole = np.concatenate([prompt, tokens])[None]
            scale = np.abs(np.asarray(model(whole))[..., :11]).max()
            _, ahead = by_definition(model, prompt, tokens, row, draw)
            # Each of the two scores may be off by so much.
            assert ahead[first] < 2 * RELATIVE_ERRORS[dtype] * scale, (row, first)


@pytest.mark.full
def test_many_prompts_are_sampled_at_once(run, capsys):
    prompts = ["the cat", "a", "the dog ran to"]
    alone = sample(run.out_dir, prompts[0], length=9, seed=2)
    texts = sample(run.out_dir, prompts, length=9, seed=2)
    assert capsys.readouterr() == ("", "")
    on_stages = {"length": 9, "seed": 2, "mesh": MeshConfig.parse("dp2pp2")}
    assert texts == sample(run.out_dir, prompts, **on_stages)
    assert capsys.readouterr() == ("", "")
    assert texts[0] == alone
    assert [text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True)] == [
        True
    ] * 3
    word = texts[1].split()[4]
    ended = sample(run.out_dir, prompts, length=9, seed=2, end=word)
    assert ended[1].split() == texts[1].split()[: texts[1].split().index(word, 1)]
