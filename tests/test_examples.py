"""The examples learn, and each is on every mesh and schedule what a loop over its layers computes."""

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
import optax
import pandas as pd
import pytest
from flax import nnx
from lib.laws import more
from lib.references import FOLDER, RELATIVE_ERROR, assert_close
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
    make_train_step,
)
from jaxpar.analysis import inspect_step
from jaxpar.cli.main import main
from jaxpar.data.batches import place_batch
from jaxpar.model.task import find_task
from jaxpar.sharding import is_variable
from jaxpar.step.setup import Setup
from jaxpar.step.state import audit
from jaxpar.step.step import batch_sharding

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
    return find_task(f"{FOLDER}/{name}")(**options)


def make_parallel(mesh, shares=None, **pipeline):
    num_devices = int(np.prod(mesh))
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    return Parallel(MeshConfig(*mesh, devices=devices), PipelineConfig(**pipeline), shares)


# --- The plain program: the user's modules on whole arrays, one after the other, on one device.


class PlainStack(nnx.Module):
    """In the place of a Stack: a list of layers, each by itself."""

    def __init__(self, makers, *, rngs):
        with nnx.use_eager_sharding(False):
            self.items = nnx.List([make(rngs) for make in makers])


def run_plainly(model, carry, batch, key, last="last"):
    """Sums of a batch, or what another method for them gives, and the carry of every layer after it."""
    time_major = getattr(model, "time_major", True)
    block = jax.tree.map(
        lambda a: jnp.swapaxes(a, 0, 1) if time_major and np.ndim(a) > 1 else jnp.asarray(a), batch
    )
    at = LayerContext(0, 0, 0, key, block, lambda x, *dims: x, time_major)
    x, after = model.first(block, at), []
    for number, layer in enumerate(model.layers.items):
        new, x = layer(carry[number], x, at._replace(layer=number))
        after.append(new)
    return getattr(model, last)(x, block, at._replace(layer=len(after))), after


class Plain:
    """A task's model as plain arrays by name, on one device."""

    def __init__(self, task, monkeypatch):
        self.task, self.batches = task, task.make_batches("train", 0)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[type(task).__module__], "Stack", PlainStack, raising=False)
            with nnx.use_eager_sharding(False):
                self.model = task.make_model(nnx.Rngs(0))
        self.graphdef, self.state, self.others = nnx.split(self.model, nnx.Param, ...)
        self.grads = jax.jit(jax.value_and_grad(self.loss, has_aux=True))

    def initial_carry(self):
        if self.task.adopts:
            return []
        return [
            layer.initial_carry(self.batches.batch_size) if hasattr(layer, "initial_carry") else ()
            for layer in self.model.layers.items
        ]

    def model_of(self, params):
        leaves, structure = jax.tree.flatten_with_path(self.state)
        values = [params[name_of(path)] for path, _ in leaves]
        params = jax.tree.unflatten(structure, values)
        return nnx.merge(self.graphdef, params, self.others, copy=True)

    def loss(self, params, carry, batch, step):
        key = jax.random.fold_in(jax.random.key(0), step)
        if self.task.adopts:
            sums = self.task.loss(self.model_of(params), batch)
        else:
            sums, carry = run_plainly(self.model_of(params), carry, batch, key)
        return sums.loss / sums.weight, (sums, carry)

    def two_batches(self, params):
        """Of each of two batches loss, sums, gradients and the carry after it, by name."""
        carry, found = self.initial_carry(), []
        for step in range(2):
            batch = self.batches.batch(step)
            carry = self.initial_carry() if starts(batch) else carry
            (loss, (sums, carry)), grads = self.grads(params, carry, batch, step)
            found.append((float(loss), named(sums), grads, carry_by_name(carry)))
        return found

    def two_updates(self, params):
        """The losses of two optimizer steps, and the parameters after them."""
        clip = optax.clip_by_global_norm(1.0)  # the default of an OptimizerConfig
        optimizer = optax.chain(clip, self.task.make_optimizer(2))

        @jax.jit
        def update(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state, carry, losses = jax.jit(optimizer.init)(params), self.initial_carry(), []
        for step in range(2):
            batch = self.batches.batch(step)
            carry = self.initial_carry() if starts(batch) else carry
            (loss, (_, carry)), grads = self.grads(params, carry, batch, step)
            params, state = update(grads, state, params)
            losses.append(float(loss))
        return losses, params


def starts(batch):
    return bool(batch.get("starts", True))


def name_of(path):
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def named(tree):
    return {name_of(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def carry_by_name(carry):
    return named({str(number): own for number, own in enumerate(carry)})


# --- The same of a state that is laid out on a mesh.


def by_layer(state, partition):
    """Parameters or gradients by the names that they have in the plain program; empty rows are zeros."""
    arrays = {}
    for path, variable in jax.tree.leaves_with_path(state, is_leaf=is_variable):
        name, array = name_of(path), np.asarray(variable.get_value())
        top, _, rest = name.partition("/")
        if top != "layers":
            arrays[name.removeprefix("outer/")] = array
            continue
        kind, _, rest = rest.partition("/")
        model = partition.facts.cut_model  # of an example in plain Flax
        layers = "layers/items" if model is None else model.layers.replace(".", "/")
        for row, layer in enumerate(partition.slots.rows[partition.facts.kinds.index(kind)]):
            if layer < 0:
                assert not array[row].any(), f"{name}: the empty row {row} is not zero"
            else:
                arrays[f"{layers}/{layer}/{rest.removeprefix('own/')}"] = array[row]
    return arrays


def carry_by_layer(carry, partition):
    arrays = {}
    for kind, rows in zip(partition.facts.kinds, partition.slots.rows, strict=True):
        whole = jax.tree.map(lambda v: np.asarray(v.get_value()), carry[kind], is_leaf=is_variable)
        for row, layer in enumerate(rows):
            if layer >= 0:
                own = jax.tree.map(lambda a, row=row: a[row], whole)
                arrays |= named({str(layer): own})
    return arrays


@functools.cache
def plain_program(task):
    with pytest.MonkeyPatch.context() as patch:
        return Plain(task, patch)


@functools.cache
def initial_params(task):
    parallel = make_parallel((1, 1, 1))
    return by_layer(init_state(task, parallel).params, Setup.of(task, parallel).partition)


@functools.cache
def plain_batches(task):
    return plain_program(task).two_batches(initial_params(task))


def assert_batches_equal_plain(task, parallel):
    """Loss, sums, every gradient and the carry at two batches; the second goes on with the carry."""
    mesh, partition = parallel.mesh.build(), Setup.of(task, parallel).partition
    state, batches = init_state(task, parallel, mesh=mesh), task.make_batches("train", 0)
    audit(state)
    assert_close(by_layer(state.params, partition), initial_params(task))
    run = jaxpar.value_and_grad(task, parallel, mesh=mesh)
    for number, (loss, sums, grads, carry) in enumerate(plain_batches(task)):
        batch = place_batch(batches, number, batch_sharding(Setup.of(task, parallel, mesh=mesh)))
        (actual, (state, actual_sums)), actual_grads = run(state, batch)
        assert abs(float(actual) - loss) <= RELATIVE_ERROR * abs(loss)
        assert_close(named(actual_sums), sums)
        assert_close(by_layer(actual_grads, partition), grads)
        if not task.adopts:
            assert_close(carry_by_layer(state.carry, partition), carry)
        audit(dataclasses.replace(state, params=actual_grads))


LAYOUTS = [
    more(FORECAST, make_parallel((1, 1, 1), num_microbatches=2)),
    more(FORECAST, make_parallel((8, 1, 1))),
    (FORECAST, make_parallel((1, 8, 1), num_microbatches=2, num_chunks=4)),
    more(FORECAST, make_parallel((1, 2, 4), num_chunks=2, remat=True)),
    more(FORECAST, make_parallel((2, 2, 2), shares=(3, 1), num_microbatches=2, num_chunks=8)),
    more(FORECAST, make_parallel((4, 2, 1), num_chunks=2, placement=(5, 3))),
    more(CHARACTERS, make_parallel((1, 1, 1))),
    more(CHARACTERS, make_parallel((8, 1, 1))),
    more(CHARACTERS, make_parallel((1, 2, 4), num_microbatches=4)),
    (CHARACTERS, make_parallel((2, 2, 2), num_microbatches=2, remat=True)),
    more(CHARACTERS, make_parallel((4, 2, 1), shares=(1, 1, 1, 5), placement=(1, 3))),
    more(TRANSLATE, make_parallel((1, 1, 1))),
    more(TRANSLATE, make_parallel((8, 1, 1))),
    more(TRANSLATE, make_parallel((1, 2, 4), num_microbatches=2)),
    (TRANSLATE, make_parallel((2, 2, 2), shares=(1, 3), num_microbatches=4)),
    more(TRANSLATE, make_parallel((4, 2, 1), num_microbatches=2, remat=True)),
    more(DIGITS, make_parallel((1, 1, 1))),
    more(DIGITS, make_parallel((8, 1, 1))),
    more(DIGITS, make_parallel((1, 8, 1), num_chunks=2)),
    more(DIGITS, make_parallel((1, 2, 4), num_microbatches=2, num_chunks=4)),
    more(DIGITS, make_parallel((2, 2, 2), num_microbatches=2, num_chunks=2, remat=True)),
    more(DIGITS, make_parallel((4, 2, 1), num_microbatches=4, num_chunks=8)),
    (HYBRID, make_parallel((2, 1, 4))),
    more(HYBRID, make_parallel((8, 1, 1))),
    more(MAMBA, make_parallel((8, 1, 1))),
    (MAMBA, make_parallel((2, 4, 1), num_microbatches=2)),
]


def label(value):
    if not dataclasses.is_dataclass(value):
        return value.partition(":")[2]
    pipeline = value.pipeline
    parts = [*value.mesh.sizes.values(), f"M{pipeline.num_microbatches}", f"K{pipeline.num_chunks}"]
    return "-".join(map(str, parts))


@pytest.mark.more
@pytest.mark.parametrize(("name", "parallel"), LAYOUTS, ids=label)
def test_loss_metrics_and_gradients_equal_plain(name, parallel):
    assert_batches_equal_plain(make_task(name), parallel)


@pytest.mark.more
@pytest.mark.parametrize("seed", [0, *map(more, (1, 2))])
def test_layouts_drawn_at_random_equal_plain(seed):
    rng = np.random.default_rng(seed)
    name = rng.choice([FORECAST, CHARACTERS, TRANSLATE, DIGITS])
    has_chunks = name in (FORECAST, DIGITS)
    mesh = rng.permutation([1, 2, 4]) if rng.random() < 0.5 else (2, 4, 1)
    parallel = make_parallel(
        tuple(map(int, mesh)),
        num_microbatches=int(rng.choice([1, 2, 4])),
        num_chunks=int(rng.choice([1, 2, 4])) if has_chunks else 1,
        schedule=str(rng.choice(["1f1b", "gpipe"])),
        remat=bool(rng.random() < 0.5),
    )
    assert_batches_equal_plain(make_task(str(name)), parallel)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        (FORECAST, make_parallel((2, 2, 2), num_microbatches=2, num_chunks=4)),
        more(CHARACTERS, make_parallel((1, 2, 4), num_microbatches=2)),
        (TRANSLATE, make_parallel((4, 2, 1), num_microbatches=2)),
        more(DIGITS, make_parallel((1, 8, 1), num_microbatches=2, num_chunks=2)),
    ],
    ids=label,
)
def test_parameters_agree_after_two_optimizer_steps(name, parallel):
    task = make_task(name)
    expected_losses, expected = plain_program(task).two_updates(initial_params(task))
    mesh = parallel.mesh.build()
    state, losses = init_state(task, parallel, mesh=mesh), []
    step = make_train_step(task, parallel, TrainConfig(num_steps=2), mesh)
    for number in range(2):
        batches = task.make_batches("train", 0)
        batch = place_batch(batches, number, batch_sharding(Setup.of(task, parallel, mesh=mesh)))
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    audit(state)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(by_layer(state.params, Setup.of(task, parallel).partition), expected)


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
    assert main(["train", f"{FOLDER}/{name}", *options, *train]) == 0
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
    module = sys.modules[find_task(f"{FOLDER}/{FORECAST}").__module__]
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
    module = sys.modules[find_task(f"{FOLDER}/{TRANSLATE}").__module__]
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
    module = sys.modules[find_task(f"{FOLDER}/shares.py:Slowed").__module__]
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
    return find_task(f"{FOLDER}/distillation.py:Digits")(width=8, batch_size=16, **options)


@pytest.mark.more
@pytest.mark.parametrize(
    "parallel",
    [
        make_parallel((2, 2, 1), num_microbatches=2),
        more(make_parallel((1, 4, 1), num_microbatches=4)),
        more(make_parallel((2, 2, 2), shares=(1, 3))),
        more(make_parallel((8, 1, 1))),
    ],
    ids=label,
)
def test_a_pair_has_the_loss_and_the_gradients_of_one_device(parallel):
    tasks = of_distillation(num_layers=6), of_distillation(num_layers=4, told=3)
    module, plain = sys.modules[type(tasks[0]).__module__], [plain_program(task) for task in tasks]
    batches = [task.make_batches("train", 0).batch(0) for task in tasks]
    states = [init_state(task, parallel) for task in tasks]
    layouts = [Setup.of(task, parallel).partition for task in tasks]
    params = list(map(by_layer, (state.params for state in states), layouts))

    @jax.value_and_grad
    def loss(params):
        target = plain[0].model_of(jax.lax.stop_gradient(params[0]))
        carries = [own.initial_carry() for own in plain]
        said, _ = run_plainly(target, carries[0], batches[1], None, "predict")
        pairs = zip(plain, params, carries, (batches[0], {**batches[1], **said}), strict=True)
        return sum(own.loss(*rest, 0)[0] for own, *rest in pairs)

    expected, expected_grads = loss(params)
    (found, states), grads = module.make_pair_step(tasks, parallel)(states, batches)
    assert abs(float(found) - float(expected)) <= RELATIVE_ERROR * float(expected)
    for own, layout, wanted in zip(grads, layouts, expected_grads, strict=True):
        assert_close(by_layer(own, layout), wanted)
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
