"""What comes before and after the layers, in parts: no stage holds all of it, and nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lib import checkpoints, predictions
from lib.any_model import assert_same
from lib.checkpoints import (
    RELATIVE_ERROR,
    TASK,
    assert_bit_equal,
    canonical,
    make_setup,
    next_losses,
    restore,
)
from lib.laws import MODEL, assert_same_as_plain, make_settings, more, on_devices
from lib.layers import Ends
from lib.models import Regress

from jaxpar import Parallel, PipelineConfig, SeriesBatches, Stack, Sums, Task, init_state, nn
from jaxpar.analysis import inspect_step
from jaxpar.base.axes import STAGE
from jaxpar.data.batches import place_batch
from jaxpar.lm import LM
from jaxpar.model.outer import outer_modules, part_call, uses
from jaxpar.partition.by_layer import abstract_by_layer, by_layer, from_layers
from jaxpar.sharding import named_leaves
from jaxpar.step.setup import Setup
from jaxpar.step.state import abstract_state, audit
from jaxpar.step.step import batch_sharding
from jaxpar.training.summary import describe_outer_modules

run = checkpoints.run  # a fixture


@dataclasses.dataclass(frozen=True)
class Words(Regress):
    """Its batches are those of `Regress`."""

    how: tuple[str, ...] = ()

    def make_model(self, rngs):
        return Ends(self.how, rngs=rngs)


def parts_of(task, parallel):
    """The names of the variables that no stage has whole, layers left out; and a stage's shape of each."""
    state = abstract_state(Setup.of(task, parallel))
    return {
        name: variable.get_value().sharding.shard_shape(variable.shape)
        for name, variable in named_leaves({**state.params, **state.frozen})
        if not name.startswith(("layers.", "@pool"))
        and STAGE in str(variable.get_value().sharding.spec)
    }


@pytest.fixture
def large(monkeypatch):
    """All ends count as large, and what is with them as nothing: costs would choose otherwise here."""
    monkeypatch.setattr("jaxpar.partition.partition.LITTLE", 1e-9)
    monkeypatch.setattr("jaxpar.partition.partition.FEW", 0)
    monkeypatch.setattr("jaxpar.model.facts.ModelFacts.layer_flops", np.inf)


# ---- the law ----

LANGUAGE = [
    ((1, 2, 1), {}, {"head": "last"}, {}),
    ((1, 4, 1), {"tie_embedding": True}, {"remat": True}, {"update": "sharded"}),
    ((2, 2, 2), {"embed_size": 8}, {"zero_bubble": False}, {"fsdp": True}),
    more((1, 8, 1), {}, {}, {}),
    more((1, 8, 1), {"tie_embedding": True}, {}, {}),
    more((1, 2, 4), {"embed_size": 8}, {}, {"fsdp": True}),
    more((1, 2, 4), {"tie_embedding": True}, {}, {}),
    more((1, 2, 1), {}, {"schedule": "interleaved", "num_groups": 2}, {}),
    more((1, 2, 1), {"tie_embedding": True}, {"schedule": "v"}, {}),
    more((2, 2, 2), {"tie_embedding": True}, {"schedule": "gpipe"}, {"fsdp": True}),
    more((1, 4, 1), {}, {"remat": True, "remat_keeps": "carries"}, {}),
]


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "sizes", "pipeline", "layout"), LANGUAGE)
def test_a_language_model_whose_table_is_in_rows_equals_plain(large, mesh, sizes, pipeline, layout):
    task = dataclasses.replace(MODEL, **sizes)
    settings = make_settings(mesh, (2, 4), task, layout=layout, **pipeline)
    parts = parts_of(*settings[:2])
    assert parts["embedding.table"][0] * mesh[1] <= 96
    assert_same_as_plain(settings)


OWN = [
    ((1, 2, 1), ("deep", "twice"), {"head": "sharded"}, None),
    ((2, 2, 2), ("loop",), {}, "words"),
]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "how", "pipeline", "frozen"), OWN)
def test_any_model_with_ends_in_parts_equals_its_definition(large, mesh, how, pipeline, frozen):
    task = Words(how=how, freeze=frozen)
    units = PipelineConfig(num_microbatches=2, num_chunks=4, **pipeline)
    parallel = Parallel(on_devices(mesh), units)
    found = {name.rpartition(".")[0] for name in parts_of(task, parallel)}
    expected = {"words", "marks.0", *({"up", "down"} if "deep" in how else {})}
    if "array" in how or "loop" in how:  # read as an array, or called in a loop
        expected.remove("marks.0")
    if pipeline.get("head") == "sharded":
        expected.add("out")
    assert found == expected
    assert_same(task, parallel)


CALLED = {
    "as it is": (lambda call, ids: call(ids), False),
    "checkpoint": (lambda call, ids: jax.checkpoint(call)(ids), False),
    "jit": (lambda call, ids: jax.jit(call)(ids), False),
    "map": (jax.lax.map, True),
    "branch": (
        lambda call, ids: jax.lax.cond(ids[0] > 0, call, lambda ids: 2 * call(ids), ids),
        True,
    ),
    "map in jit": (lambda call, ids: jax.jit(lambda ids: jax.lax.map(call, ids))(ids), True),
}


@pytest.mark.parametrize("how", CALLED)
def test_a_module_that_a_loop_calls_stays_whole(how):
    model = nnx.eval_shape(lambda: Reader(tied=False, rngs=nnx.Rngs(0)))
    ids, (run, stays_whole) = jnp.arange(3), CALLED[how]
    before = uses(model, lambda model: run(model.embed, ids))
    assert {*before.called} == {"embed"}
    after = uses(model, lambda model: model.out(jnp.ones((3, WIDTH))))
    assert {*outer_modules(model, (before, after))} == (
        {"out"} if stays_whole else {"out", "embed"}
    )


def test_a_module_that_shares_or_splits_a_parameter_otherwise_stays_whole():
    def make():
        model = Reader(tied=False, rngs=nnx.Rngs(0))
        model.shares, model.named = (nnx.Linear(WIDTH, WORDS, rngs=nnx.Rngs(0)) for _ in range(2))
        model.out.kernel = model.shares.kernel
        for name, dims in {"kernel": (None, "a"), "bias": ("b",)}.items():
            getattr(model.named, name).set_metadata(out_sharding=dims, eager_sharding=False)
        return model

    def last(model):
        y = jnp.ones((3, WIDTH))
        return model.out(y) + model.shares(y) + model.named(y)

    model = nnx.eval_shape(make)
    before = uses(model, lambda model: model.embed(jnp.arange(3)))
    assert {*outer_modules(model, (before, uses(model, last)))} == {"embed"}


WORDS, WIDTH = 96, 8


class Reader(nnx.Module):
    """With ends of Flax, a table that is the head as well or not."""

    def __init__(self, *, tied, rngs):
        self.tied, self.embed = tied, nnx.Embed(WORDS, WIDTH, rngs=rngs)
        if not tied:
            self.out = nnx.Linear(WIDTH, WORDS, rngs=rngs)
        self.layers = Stack([lambda rngs: nn.GRU(WIDTH, rngs=rngs)] * 4, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        logits = self.embed.attend(y) if self.tied else self.out(y)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return Sums(jnp.sum(loss * batch["weight"]), jnp.sum(batch["weight"]))


def parts_of_model(params):
    """Another optimizer for each end, and a third one for the layers."""
    return jax.tree.map_with_path(lambda path, _: getattr(path[0], "key", None), params)


def only_matrices(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "by part": optax.multi_transform(
        {"embed": optax.adam(1e-2), "layers": optax.sgd(0.1), "out": optax.lamb(1e-2)},
        parts_of_model,
    ),
    "ends alone": optax.multi_transform(
        {"embed": optax.adam(1e-2), "layers": optax.sgd(0.1), "out": optax.adam(1e-2)},
        parts_of_model,
    ),
    "masked": optax.adamw(1e-2, weight_decay=0.1, mask=only_matrices),
    "matrices": optax.chain(optax.masked(optax.scale_by_adam(), only_matrices), optax.sgd(0.1)),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "lars": optax.lars(0.1, momentum=0.9),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "bfloat16": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)),
}


@dataclasses.dataclass(frozen=True)
class Reads(Task):
    """With an optimizer of its own, by name."""

    name_of_optimizer: str = "adam"
    tied: bool = False
    batch_size: int = 8

    def make_model(self, rngs):
        return Reader(tied=self.tied, rngs=rngs)

    def make_batches(self, split, seed=None):
        words = np.random.default_rng(0).integers(0, WORDS, 401).astype(np.int32)
        series = {"x": words[:-1], "y": words[1:]}
        return SeriesBatches(series, batch_size=self.batch_size, seq_len=4, seed=seed)

    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.name_of_optimizer]


def trained(setup, state=None, first=0):
    """The state after three steps, by the names of its arrays, and the last loss."""
    state, step = init_state(setup) if state is None else state, setup.train_step()
    for number in range(first, first + 3):
        batch = place_batch(setup.task.make_batches("train", 0), number, batch_sharding(setup))
        state, metrics = step(state, batch)
    found = by_layer((state.params, state.opt_state), setup.storage)
    return state, {name: np.asarray(a, np.float32) for name, a in found.items()}, metrics.loss


@functools.cache
def trained_on_one(task):
    return trained(Setup.of(task, "dp1"))


PLACED = "first, 0 | 1 | 2 | 3, last"
ON_MESHES = [((1, 4, 1), PLACED), more((2, 2, 1), "first, 0-1 | 2-3, last")]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "placement"), ON_MESHES)
@pytest.mark.parametrize(
    ("name", "tied"), [*((name, False) for name in OPTIMIZERS), ("adam", True), ("lars", True)]
)
def test_own_optimizers_update_placed_ends_as_on_one_device(large, mesh, placement, name, tied):
    task = Reads(name, tied)
    units = PipelineConfig(num_microbatches=2, num_chunks=2, placement=placement)
    setup = Setup.of(task, Parallel(on_devices(mesh), units))
    _, expected, expected_loss = trained_on_one(task)
    state, found, loss = trained(setup)
    audit(state)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    tolerance = 1e-2 if name == "bfloat16" else 1e-4  # of a moment, which may be small
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in expected.items()}
    for n, array in expected.items():
        np.testing.assert_allclose(found[n], array, 0, tolerance * np.abs(array).max(), err_msg=n)
    # What is stored is what another mesh reads.
    again = from_layers(abstract_state(setup), setup.storage, by_layer(state, setup.storage))
    arrays = (by_layer(own.opt_state, setup.storage) for own in (state, again))
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_arrays_are_read_as_they_are_stored(large):
    """The optimizer's numbers of the ends are in stacks with a row for each stage."""
    units = PipelineConfig(num_microbatches=2, num_chunks=2, placement=PLACED)
    setup = Setup.of(Reads("ends alone"), Parallel(on_devices((1, 4, 1)), units))
    stored = by_layer(init_state(setup), setup.storage)
    read = abstract_by_layer(abstract_state(setup), setup.storage)
    assert read.keys() == stored.keys()
    for key, array in stored.items():
        assert (read[key].shape, read[key].dtype) == (array.shape, array.dtype), key
        assert read[key].sharding.is_equivalent_to(array.sharding, array.ndim), key


@pytest.mark.more
@pytest.mark.parametrize(
    "pipeline",
    [
        {"zero_bubble": False},
        {"remat": True},
        {"head": "sharded"},
        {"placement": "0-1 | 2-3"},
    ],
)
def test_a_table_tied_to_the_head_is_on_the_last_stage_or_in_parts(large, pipeline):
    task, units = Reads(tied=True), PipelineConfig(num_microbatches=2, num_chunks=2, **pipeline)
    setup = Setup.of(task, Parallel(on_devices((2, 2, 1)), units))
    in_parts = not {"head", "placement"}.isdisjoint(pipeline)
    [row] = describe_outer_modules(setup.storage)
    whole, parts = ("stage 1", "stores embed"), ("each stage", "stores 1/2 of embed")
    assert row == (parts if in_parts else whole)
    _, found, loss = trained(setup)
    _, expected, expected_loss = trained_on_one(task)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    table = "0/embed/embedding"
    np.testing.assert_allclose(found[table], expected[table], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tied", "placement"), [(False, PLACED), (True, "balanced")])
def test_no_table_of_an_own_model_is_sent_over_stages(large, tied, placement):
    units = PipelineConfig(num_chunks=2, placement=placement)
    parallel = Parallel(on_devices((1, 4, 1)), units)
    report = inspect_step(Reads(tied=tied), parallel)
    sent = [c.bytes for c in report.collectives if STAGE in c.axes]
    assert 0 < max(sent) < WORDS * WIDTH * 4 / 2
    rows = dict(describe_outer_modules(Setup.of(Reads(tied=tied), parallel).storage))
    expected = {"stage 0": "stores embed", "stage 3": "stores out"}
    assert rows == ({"stage 3": "stores embed"} if tied else expected)


UNTIED = dataclasses.replace(TASK, vocab_size=128, num_layers=4)  # tasks of this file alone
TIED = dataclasses.replace(UNTIED, tie_embedding=True)


@pytest.mark.more
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (make_setup((1, 4, 1), task=UNTIED), make_setup((2, 2, 2), task=UNTIED, update="host")),
        more(make_setup((2, 2, 2), task=TIED, update="host"), make_setup((1, 1, 1), task=TIED)),
        more(make_setup((1, 1, 1), task=UNTIED), make_setup((1, 2, 4), task=UNTIED, fsdp=True)),
    ],
)
def test_a_run_goes_on_where_parts_are_others(large, run, before, after):
    assert any("embedding.table" in parts_of(*setup) for setup in (before, after))
    folder, expected, losses = run(before)
    state = restore(folder, after)
    audit(state)
    assert_bit_equal(canonical(state, *after), expected)
    np.testing.assert_allclose(next_losses(after, state), losses, rtol=RELATIVE_ERROR)


@pytest.mark.more
@pytest.mark.parametrize("tied", [False, more(True)])
def test_predictions_of_a_table_in_rows_equal_plain(large, tied):
    task = dataclasses.replace(predictions.TASK, hidden_size=8, embed_size=8, tie_embedding=tied)
    parallel = Parallel("pp2", PipelineConfig(num_chunks=2))
    assert "embedding.table" in parts_of(task, parallel)
    found, text = predictions.predicted(task, parallel), predictions.text_of()
    expected = predictions.plain(task, text)
    np.testing.assert_allclose(found["log_likelihood"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", ["jaxpar", "flax"])
def test_ids_that_no_word_has_are_what_they_are_to_a_whole_table(layer):
    ids = jnp.asarray([[0, 7, -1, -8], [8, 100, -9, 3]])
    rngs = nnx.Rngs(0)
    table = nn.Embedding(8, 4, rngs=rngs) if layer == "jaxpar" else nnx.Embed(8, 4, rngs=rngs)
    graphdef, state = nnx.split(table)
    mesh = jax.make_mesh((4,), (STAGE,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def part(state, ids):
        module = nnx.merge(graphdef, state)
        return part_call(module, 8)(functools.partial(type(module).__call__, module), ids)

    run = jax.shard_map(part, mesh=mesh, in_specs=(P(STAGE), P()), out_specs=P())
    np.testing.assert_array_equal(jax.jit(run)(state, ids), table(ids))


# ---- the choice ----


@pytest.mark.full
def test_what_costs_less_is_chosen_and_said():
    def said(task, parallel):
        [(what, text)] = describe_outer_modules(Setup.of(task, parallel).storage)
        assert what == "each stage"
        return text

    task = LM(2, 8, 8, vocab_size=4096, batch_size=8, seq_len=8)
    assert said(task, "pp2") == "stores 1/2 of embedding, head"  # 32,768 numbers for 64 x 8 twice
    many = dataclasses.replace(task, batch_size=8 * 4096)
    assert (
        said(many, "pp2")
        == "stores 1/2 of head; all of embedding (splitting it would send more data)"
    )
    wide = dataclasses.replace(many, hidden_size=128, embed_size=128)
    assert said(wide, "pp2") == "stores 1/2 of embedding, head"  # for the room
    text = said(Words(how=("array",), batch_size=8, seq_len=2), "pp4")
    assert text.startswith("stores 1/4 of words; all of down; all of marks/0; ")
    assert "; all of out (splitting it would send more data); all of scale; all of up" in text
    odd = dataclasses.replace(MODEL, vocab_size=99, num_layers=2)
    pipeline = PipelineConfig(head="last")
    assert "99 rows do not divide by 2" in said(odd, Parallel("pp2", pipeline))


# ---- the compiled program ----


@functools.cache
def report_of(tied, head):
    task = dataclasses.replace(MODEL, tie_embedding=tied, vocab_size=960, dropout=0.0)
    settings = make_settings((1, 4, 1), (2, 2), task, head=head)
    return inspect_step(*settings)


@pytest.mark.more
@pytest.mark.parametrize(("tied", "head"), [(False, "last"), (True, "auto")])
def test_no_table_is_sent_over_stages(tied, head):
    report = report_of(tied, head)
    whole = 960 * 16 * 4
    largest = max(c.bytes for c in report.collectives if STAGE in c.axes and not c.in_loop)
    if head == "last":  # the head alone: kernel and bias
        assert whole <= largest < whole + 960 * 4 + 1000
    else:
        assert largest < whole / 8
