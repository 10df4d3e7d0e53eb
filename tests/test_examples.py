"""The examples learn, and each is on a mesh what a loop over its layers computes."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx
from lib import any_model, api
from lib.any_model import assert_same, batch_of
from lib.law import plain
from lib.law.check import assert_near
from lib.laws import more
from lib.references import FOLDER, RELATIVE_ERROR
from sklearn.linear_model import LinearRegression
from statsmodels.datasets import co2

import jaxpar
from jaxpar import (
    LayerContext,
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
    init_state,
    load_run,
)
from jaxpar.analysis import inspect_step

pytestmark = pytest.mark.law


SGD = OptimizerConfig(name="sgd", learning_rate=0.05, lr_schedule="constant", warmup_steps=0)
SIZES = {
    "forecaster.py:Forecast": {"num_layers": 8, "width": 16, "seq_len": 8},
    "transformer.py:Characters": {"num_layers": 4, "width": 16, "seq_len": 8},
    "translation.py:Translate": {
        "num_encoders": 3, "num_decoders": 2, "width": 16, "max_tokens": 11,
    },
    "mixed.py:Digits": {"num_convs": 2, "num_lstms": 3, "num_denses": 3, "width": 16},
    "hybrid.py:Digits": {"widths": (32,)},
    "mamba.py:Mamba": {"num_layers": 4, "width": 32, "state_size": 4, "block_size": 4, "seq_len": 8},
}  # fmt: skip
FORECAST, CHARACTERS, TRANSLATE, DIGITS, HYBRID, MAMBA = SIZES


@pytest.fixture(autouse=True)
def models_of_packages_convert_and_broadcast(request):
    """As JAX does by default."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    with contextlib.ExitStack() as stack:
        if MAMBA in params.values():
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


def make_task(name, **options):
    if name == MAMBA:
        pytest.importorskip("mamba2_jax", reason="mamba2-jax is not installed")
    options = {"batch_size": 16, "optimizer": SGD, **SIZES[name], **options}
    return api.task_class(f"{FOLDER}/{name}")(**options)


def make_parallel(mesh, shares=None, **pipeline):
    num_devices = int(np.prod(mesh))
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    return Parallel(MeshConfig(*mesh, devices=devices), PipelineConfig(**pipeline), shares)


# --- Each is on a mesh what a loop over its layers computes.

LAYOUTS = [
    (FORECAST, make_parallel((1, 8, 1), num_microbatches=2, num_chunks=4)),
    (CHARACTERS, make_parallel((2, 2, 2), num_microbatches=2, remat=True)),
    (TRANSLATE, make_parallel((2, 2, 2), shares=(1, 3), num_microbatches=4)),
    more(DIGITS, make_parallel((2, 2, 2), num_microbatches=2, num_chunks=2, remat=True)),
    (HYBRID, make_parallel((2, 1, 4))),
    (MAMBA, make_parallel((2, 4, 1), num_microbatches=2)),
]


def label(value):
    if not dataclasses.is_dataclass(value):
        return value.partition(":")[2]
    pipeline = value.pipeline
    parts = [*value.mesh.sizes.values(), f"M{pipeline.num_microbatches}", f"K{pipeline.num_chunks}"]
    return "-".join(map(str, parts))


class Ends(any_model.Ends):
    def predict(self, arrays, x, batch, at):
        return plain.with_arrays(self.model, arrays).predict(x, batch, at)


class OfRows(plain.Form):
    """A model in the layer form whose arrays have no time: each layer on all rows."""

    def __init__(self, task):
        self.ends = Ends(task)
        self.layers = [layer for layer, _ in self.ends.layers()]
        layers = nnx.Dict({str(number): layer for number, layer in enumerate(self.layers)})
        self.trained = self.ends.trained | plain.trained_of(nnx.Dict(layers=layers), task.frozen)

        def loss_of(trained, others, batch, carry, key):
            sums = self.outputs({**others, **trained}, batch, key, self.ends.last)
            loss, metrics = plain.mean_of([sums])
            return loss, (metrics, carry)

        self.run = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

    def outputs(self, arrays, batch, key, last):
        """What `last` makes of the output of the layers."""
        at = LayerContext(0, 0, 0, key, batch, time_major=False)
        x = self.ends.first(arrays, batch, at)
        for number, layer in enumerate(self.layers):
            own = plain.with_arrays(layer, arrays, f"layers.{number}.")
            _, x = own((), x, at._replace(layer=number))
        return last(arrays, x, batch, at._replace(layer=len(self.layers)))


@pytest.fixture
def without_a_mesh():
    """Plain models have dims with names, too."""
    with nnx.use_eager_sharding(False):
        yield


@pytest.mark.more
@pytest.mark.usefixtures("without_a_mesh")
@pytest.mark.parametrize(("name", "parallel"), LAYOUTS, ids=label)
def test_loss_metrics_and_gradients_equal_plain(name, parallel):
    task = make_task(name)
    if name in (FORECAST, TRANSLATE):  # in the layer form
        assert_same(task, parallel)
        return
    batch, model = batch_of(task), OfRows(task) if name == HYBRID else plain.FlaxForm(task)
    found = api.gradients(task, parallel, batch)
    weights = model.split(found.weights)
    (loss, (metrics, _)), grads = model.run(*weights, batch, model.start(), plain.step_key(0))
    assert_near({"loss": found.loss}, {"loss": loss}, RELATIVE_ERROR)
    assert_near(found.metrics, metrics, RELATIVE_ERROR)
    assert_near({name: found.grads[name] for name in grads}, grads, RELATIVE_ERROR)


@pytest.mark.trains
@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "mesh", "rate"),
    [
        (FORECAST, "dp2pp2tp2", 0.005),
        more(CHARACTERS, "pp2tp4", 0.01),
        more(TRANSLATE, "dp4pp2", 0.01),
        more(DIGITS, "dp2pp4", 0.01),
        more(MAMBA, "dp2pp4", 0.01),
    ],
)
def test_example_learns(name, mesh, rate, tmp_path):
    task = make_task(name, optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=0))
    train = TrainConfig(num_steps=20, checkpoint_every=0, out_dir=str(tmp_path / "run"))
    result = jaxpar.fit(task, mesh, train)
    assert np.mean(result.losses[-4:]) < 0.95 * np.mean(result.losses[:4])
    for split in ("valid", "test"):
        evaluation = result.evaluations[split]
        assert np.isfinite([*evaluation.metrics.values(), *evaluation.baseline.values()]).all()
        assert evaluation.baseline


# --- What a command prints of the forecaster and the translator, beside a simple guess.

PRINTED = 6e-4  # numbers below 1 have three decimals


def trained(name, module, monkeypatch, caches, capsys, folder, *options):
    """The rows of valid and test that a command prints after two steps, and the model."""
    for cache in caches:  # those of a file are for its data alone
        monkeypatch.setattr(module, cache, functools.cache(getattr(module, cache).__wrapped__))
    train = ["--train.num-steps", "2", "--train.out-dir", str(folder)]
    train += ["--optimizer.warmup-steps", "0"]
    assert api.command("train", f"{FOLDER}/{name}", *options, *train) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = {row[0]: list(map(float, row[1:])) for row in rows if {*row[:1]} & {"valid", "test"}}
    return numbers, load_run(folder).model()


@nnx.jit
def outputs(model, batch):
    """What a model's layers make of a whole batch, from zero state."""
    rows = jax.tree.leaves(batch)[0].shape[1]
    at = LayerContext(0, 0, 0, None, batch, lambda x, *dims: x)
    return model.layers(model.layers.initial_carry(rows), model.first(batch, at), at)[1]


@pytest.mark.full
def test_the_forecaster_is_printed_beside_two_guesses(capsys, monkeypatch, tmp_path):
    rng, num_weeks, context = np.random.default_rng(0), 800, 52
    year = np.arange(num_weeks) * 2 * np.pi / 52.18
    values = 315 + 3 * np.sin(year) + np.sin(2 * year) + 0.2 * rng.normal(size=num_weeks)
    values[[3, 100, 639, 650, 715, 760, 799]] = np.nan
    weeks = pd.Series(values, pd.date_range("1960-01-02", periods=num_weeks, freq="W-SAT"))
    monkeypatch.setattr(co2, "load", lambda: SimpleNamespace(data=pd.DataFrame({"co2": weeks})))
    module = sys.modules[api.task_class(f"{FOLDER}/{FORECAST}").__module__]
    options = ["--num-layers", "2", "--width", "4", "--batch-size", "4", "--mesh", "dp2pp2tp2"]
    numbers, model = trained(
        FORECAST, module, monkeypatch, ["load_series"], capsys, tmp_path / "run", *options
    )

    filled, angle = weeks.interpolate().to_numpy(), weeks.index.day_of_year * 2 * np.pi / 365.25

    def change(week):  # since the week before
        return filled[week] - filled[week - 1]

    def sample(week):
        waves = [f(n * angle[week]) for n in (1, 2, 3, 4) for f in (np.sin, np.cos)]
        return [*(change(week - n) for n in range(8)), *waves]

    def known(first, end):
        return [
            week for week in range(first, end - 1) if not np.isnan(values[week : week + 2]).any()
        ]

    def mean_error(forecasts):
        return np.mean([abs(change(week + 1) - forecast) for week, forecast in forecasts.items()])

    train = known(context + 1, 640)
    linear = LinearRegression().fit(
        [sample(week) for week in train], [change(w + 1) for w in train]
    )
    for split, first, end in (("valid", 641, 720), ("test", 721, 800)):
        here, network = known(first, end), {}
        for begin, stop in itertools.pairwise(first + np.arange(5) * (end - 1 - first) // 4):
            read = np.arange(begin - context, stop)
            seen = np.stack([change(read) / 0.5, np.sin(angle[read]), np.cos(angle[read])], -1)
            y = outputs(model, {"seen": jnp.float32(seen[:, None])})
            means = 0.5 * np.asarray(model.out(y))[context:, 0, 0]
            network |= dict(zip(read[context:], means, strict=True))
        expected = [
            {week: network[week] for week in here},
            dict.fromkeys(here, 0.0),
            dict(zip(here, linear.predict([sample(week) for week in here]), strict=True)),
        ]
        np.testing.assert_allclose(
            numbers[split][1:], list(map(mean_error, expected)), atol=PRINTED
        )


@pytest.mark.full
def test_the_translator_is_printed_beside_a_memory_of_german(capsys, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    words = {"a": "eins", "b": "einsam", "c": "sam", "d": "samt", "e": "einst"}
    drawn = [" ".join(rng.choice(list(words), n)) for n in rng.integers(1, 4, 60)]
    pairs = {text: " ".join(words[word] for word in text.split()) for text in sorted(drawn)}
    module = sys.modules[api.task_class(f"{FOLDER}/{TRANSLATE}").__module__]
    monkeypatch.setattr(module, "load_pairs", lambda path: pairs)
    options = ["--width", "8", "--batch-size", "8", "--devices", "0", "--max-tokens", "20"]
    caches = ["load_vocabulary", "load_split"]
    numbers, model = trained(
        TRANSLATE, module, monkeypatch, caches, capsys, tmp_path / "run", *options
    )

    numbered = list(enumerate(pairs.items()))
    train = [f"\n{target}\n" for number, (_, target) in numbered if number % 10 < 8]
    number = module.load_vocabulary("", 0).encode

    def followers(ending):
        """Letters after it in train, the most frequent first."""
        found = [
            text[match.start() + len(ending)]
            for text in train
            for match in re.finditer(f"(?={re.escape(ending)})", text[:-1])
            if match.start() + len(ending)
        ]
        return [letter for letter, _ in collections.Counter(found).most_common()]

    def in_numbers(texts):
        rows = [(number(text) + 1).tolist() for text in texts]
        return np.array([row + [0] * (21 - len(row)) for row in rows], np.int32).T

    for split, rest in (("valid", 8), ("test", 9)):
        sources, targets = zip(*(pair for n, pair in numbered if n % 10 == rest), strict=True)
        source, given, wanted = (
            in_numbers(form.format(text) for text in texts)
            for form, texts in (("{}\n", sources), ("\n{}", targets), ("{}\n", targets))
        )
        logits = model.head(outputs(model, {"source": source, "given": given})["target"])
        by_network = (np.argmax(logits, -1) == wanted)[wanted > 0]
        by_memory = []
        for target in targets:
            for end, letter in enumerate(f"{target}\n", start=1):
                text = f"\n{target}"[max(end - 8, 0) : end]
                endings = [text[n:] for n in range(len(text) + 1)]
                by_memory.append(letter == next(filter(None, map(followers, endings)))[0])
        expected = np.mean(by_network), np.mean(by_memory)
        np.testing.assert_allclose(numbers[split][1:], expected, atol=PRINTED)


def test_translation_refuses_chunks_of_time():
    parallel = make_parallel((1, 2, 4), num_chunks=2)
    with pytest.raises(ValueError, match="num_chunks=2 would show a decoder one part"):
        init_state(make_task(TRANSLATE), parallel)


def test_the_hybrid_sends_a_fifth_of_what_data_parallelism_sends():
    reports = [
        inspect_step(make_task(HYBRID, strategy=strategy, widths=(512,), batch_size=128), "dp8")
        for strategy in ("hybrid", "data")
    ]
    hybrid, data = (sum(each.sent_bytes for each in own.collectives) for own in reports)
    assert hybrid < data / 5
    assert {each.op for each in reports[0].collectives} >= {"all-to-all"}


@pytest.mark.full
def test_unequal_shares_have_the_losses_of_even_ones(capsys, monkeypatch):
    module = sys.modules[api.task_class(f"{FOLDER}/shares.py:Slowed").__module__]
    monkeypatch.setattr(module, "WORK", 1)
    module.main(num_steps=3)
    (shares, rows, loss), unequal = re.findall(
        r"shares (.*)  rows (.*?)  .*loss (.*)", capsys.readouterr().out
    )
    assert (shares, rows) == ("(1, 1)", "[16, 16]")
    assert unequal[:2] == ("(3, 1)", "[24, 8]")
    assert float(unequal[2]) == pytest.approx(float(loss), rel=RELATIVE_ERROR)


# --- Translations.

IN_GERMAN = {"a": "eins", "b": "zwei", "c": "acht", "d": "neun"}


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """Mesh, beam -> what a short run translates there, with log-likelihoods; sources, and its model."""
    folder = tmp_path_factory.mktemp("translation")
    sources = [" ".join(words) for n in (1, 2, 3) for words in itertools.product("abcd", repeat=n)]
    lines = [
        f"{text}\t{' '.join(IN_GERMAN[word] for word in reversed(text.split()))}"
        for text in sources
    ]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    options = {"num_encoders": 1, "num_decoders": 1, "dropout": 0.0, "max_tokens": 15}
    rate = OptimizerConfig(learning_rate=0.03, warmup_steps=0)
    task = make_task(TRANSLATE, pairs=str(folder / "pairs.tsv"), optimizer=rate, **options)
    train = TrainConfig(num_steps=60, checkpoint_every=0, out_dir=str(folder / "run"))
    jaxpar.fit(task, MeshConfig(devices=(0,)), train, report=[])
    module, found = sys.modules[type(task).__module__], {}
    for mesh, beams in (("dp1", (1, 4)), ("pp2", (4,))):
        run = load_run(folder / "run", MeshConfig.parse(mesh))
        found |= {(mesh, beam): module.translate(run, sources[::3], beam) for beam in beams}
    return found, sources[::3], task, load_run(folder / "run").model()


@pytest.mark.full
def test_a_beam_of_one_is_greedy_search(translated):
    found, sources, task, model = translated
    source = task.numbers([f"{text}\n" for text in sources]).T
    end = task.vocabulary.separator + 1
    given = np.zeros_like(source)
    given[0] = end
    for t in range(len(given)):
        y = outputs(model, {"source": source, "given": given})["target"]
        token = np.argmax(model.head(y[t]), axis=-1)
        is_open = (given[1 : t + 1] != end).all(axis=0)
        if t + 1 < len(given):
            given[t + 1] = np.where(is_open, token, 0)
    texts = [task.vocabulary.decode(row[(row > 0) & (row != end)] - 1) for row in given.T]
    assert found["dp1", 1][0] == texts
    assert len({*texts}) > len(texts) / 2


@pytest.mark.full
def test_a_beam_of_four_finds_likelier_translations(translated):
    found, *_ = translated
    greedy, beam = found["dp1", 1][1], found["dp1", 4][1]
    assert (beam >= greedy - 1e-5).all()
    assert (beam > greedy + 1e-3).any()


@pytest.mark.full
def test_translations_are_the_same_on_stages(translated):
    found, *_ = translated
    assert found["pp2", 4][0] == found["dp1", 4][0]
    np.testing.assert_allclose(found["pp2", 4][1], found["dp1", 4][1], rtol=RELATIVE_ERROR)


@pytest.mark.more
@pytest.mark.parametrize("beam", [1, 4])
def test_a_likelihood_is_the_loss_of_that_translation(beam, translated):
    found, sources, task, model = translated
    texts, scores = found["dp1", beam]
    batch = {
        "source": task.numbers([f"{text}\n" for text in sources]).T,
        "given": task.numbers([f"\n{text}" for text in texts]).T,
        "wanted": task.numbers([f"{text}\n" for text in texts]).T,
    }
    assert all(len(text) <= task.max_tokens for text in texts)
    at, y = LayerContext(0, 0, 0, None, batch, lambda x, *dims: x), outputs(model, batch)
    losses = [
        float(model.last(y, {**batch, "weight": weight}, at).loss)
        for weight in np.eye(len(texts), dtype=np.float32)
    ]
    np.testing.assert_allclose(-scores, losses, rtol=RELATIVE_ERROR)


@pytest.mark.full
def test_translation_prints_bleu_and_refuses_what_is_no_pair(translated, capsys, tmp_path):
    *_, task, _ = translated
    module = sys.modules[type(task).__module__]
    module.main(str(Path(task.pairs).with_name("run")), beam=2)
    printed = capsys.readouterr().out
    assert re.search(r"\d+ sentences, log-likelihood -\d+\.\d+, beam 2\nBLEU = ", printed)
    with pytest.raises(ValueError, match="beam=9: must be from 1 to 8"):
        module.translate(SimpleNamespace(setup=SimpleNamespace(task=task)), ["a"], beam=9)
    (tmp_path / "pairs.tsv").write_text("a\teins\nb zwei\n")
    with pytest.raises(ValueError, match=r"line 2 of .*pairs.tsv has 0 tabs; give a sentence, one"):
        module.load_pairs(str(tmp_path / "pairs.tsv"))


# --- Two models with one loss between them.


def of_distillation(**options):
    return api.task_class(f"{FOLDER}/distillation.py:Digits")(width=8, batch_size=16, **options)


@pytest.mark.more
@pytest.mark.parametrize(
    "parallel",
    [
        make_parallel((2, 2, 1), num_microbatches=2),
        more(make_parallel((2, 2, 2), shares=(1, 3))),
    ],
    ids=label,
)
@pytest.mark.usefixtures("without_a_mesh")
def test_a_pair_has_the_loss_and_the_gradients_of_one_device(parallel):
    tasks = of_distillation(num_layers=6), of_distillation(num_layers=4, told=3)
    module, models = sys.modules[type(tasks[0]).__module__], []
    batches = [task.make_batches("train", 0).batch(0) for task in tasks]
    states = [init_state(task, parallel) for task in tasks]
    weights = [api.params_of(*own) for own in zip(tasks, [parallel] * 2, states, strict=True)]
    models = [OfRows(task) for task in tasks]
    said = models[0].outputs(weights[0], batches[1], None, models[0].ends.predict)
    expected, expected_grads = 0.0, []
    for model, own, batch in zip(models, weights, (batches[0], batches[1] | said), strict=True):
        arrays = model.split(own)
        (loss, _), grads = model.run(*arrays, batch, model.start(), plain.step_key(0))
        expected += float(loss)
        expected_grads.append(grads)

    (found, states), grads = module.make_pair_step(tasks, parallel)(states, batches)
    assert abs(float(found) - expected) <= RELATIVE_ERROR * expected
    for task, state, own, wanted in zip(tasks, states, grads, expected_grads, strict=True):
        arrays = api.params_of(task, parallel, dataclasses.replace(state, params=own))
        assert_near({name: arrays[name] for name in wanted}, wanted, RELATIVE_ERROR)
    assert [int(state.step) for state in states] == [1, 1]


@pytest.mark.full
def test_a_student_gains_by_its_teacher(capsys):
    module = sys.modules[type(of_distillation()).__module__]
    with jax.numpy_dtype_promotion("standard"):  # strict is of these tests
        module.main("dp4pp2", 100)
    printed = capsys.readouterr().out
    found = dict(re.findall(r"^([\w ]+?)  .*accuracy (\S+)$", printed, re.MULTILINE))
    assert float(found["student"]) > 0.03 + float(found["student without teacher"]), printed
    assert float(found["teacher"]) > 0.9, printed
