"""What comes before and after the layers, in parts: no stage holds all of it, and nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api, layers
from lib.laws import MODEL, more, on_devices
from lib.models import OfNoText, Regress

from jaxpar import (
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    init_state,
    make_train_step,
    nn,
)
from jaxpar.analysis import inspect_step


@dataclasses.dataclass(frozen=True)
class Words(Regress):
    """Its batches are those of `Regress`."""

    how: tuple[str, ...] = ()

    def make_model(self, rngs):
        return layers.Ends(self.how, rngs=rngs)


@pytest.fixture
def large():
    """All ends count as large: costs would choose otherwise here."""
    with api.all_is_large():
        yield


def stored_on_each_stage(task, parallel):
    return api.summary(task, parallel).get("each stage", "")


# ---- which parts of a model are in parts ----


@pytest.mark.parametrize(
    ("how", "head", "modules"),
    [
        (("deep", "twice"), "sharded", "words, marks/0, up, down, out"),
        (("array",), "auto", "words"),  # marks/0 is read as an array
        (("loop",), "auto", "words"),  # and called in a loop here
    ],
)
def test_modules_that_are_called_on_whole_blocks_are_in_parts(large, how, head, modules):
    parallel = Parallel("pp2", PipelineConfig(num_microbatches=2, head=head))
    [stored, *_] = stored_on_each_stage(Words(how=how), parallel).split("; ")
    assert {*stored.removeprefix("stores 1/2 of ").split(", ")} == {*modules.split(", ")}


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
def test_a_module_that_a_loop_calls_stays_whole(large, how):
    run, stays_whole = CALLED[how]

    class Calls(Reader):
        def first(self, batch, at):
            return jnp.stack([run(self.embed, ids) for ids in batch["x"]])

    summary = api.summary(Reads(model=Calls), "pp2")
    assert ("1/2 of embed" in summary.get("each stage", "")) == (not stays_whole)
    assert (summary.get("stage 0") == "stores embed") == stays_whole


def test_a_module_that_shares_or_splits_a_parameter_otherwise_stays_whole(large):
    class Shares(Reader):
        def __init__(self, **options):
            super().__init__(**options)
            self.shares, self.named = (nnx.Linear(WIDTH, WORDS, rngs=nnx.Rngs(0)) for _ in range(2))
            self.out.kernel = self.shares.kernel
            for name, dims in {"kernel": (None, "hidden"), "bias": ("input",)}.items():
                getattr(self.named, name).set_metadata(out_sharding=dims, eager_sharding=False)

        def last(self, y, batch, at):
            return (
                super()
                .last(y, batch, at)
                ._replace(metrics={"other": jnp.sum(self.shares(y) + self.named(y))})
            )

    parallel = Parallel("pp2", PipelineConfig(head="sharded"))
    assert stored_on_each_stage(Reads(), parallel) == "stores 1/2 of embed, out"
    with pytest.raises(ValueError, match="`last` calls no linear layer whose outputs divide"):
        api.summary(Reads(model=Shares), parallel)


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
    model: type = Reader
    batch_size: int = 8

    def make_model(self, rngs):
        return self.model(tied=self.tied, rngs=rngs)

    def make_batches(self, split, seed=None):
        words = np.random.default_rng(0).integers(0, WORDS, 401).astype(np.int32)
        series = {"x": words[:-1], "y": words[1:]}
        return SeriesBatches(series, batch_size=self.batch_size, seq_len=4, seed=seed)

    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.name_of_optimizer]


def trained(task, parallel):
    """The state after three steps, by the names of its arrays, and the last loss."""
    state, step = init_state(task, parallel), make_train_step(task, parallel)
    for number in range(3):
        state, metrics = step(state, task.make_batches("train", 0).batch(number))
    api.audit(state)
    arrays = api.stored(task, parallel, state).items()
    arrays = {
        name: np.asarray(array, np.float32)
        for name, array in arrays
        if name.startswith(("params/", "opt_state/"))
    }
    return state, arrays, metrics.loss


@functools.cache
def trained_on_one(task):
    return trained(task, "dp1")


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
    parallel = Parallel(on_devices(mesh), units)
    _, expected, expected_loss = trained_on_one(task)
    state, found, loss = trained(task, parallel)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    tolerance = 1e-2 if name == "bfloat16" else 1e-4  # of a moment, which may be small
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in expected.items()}
    for n, array in expected.items():
        np.testing.assert_allclose(found[n], array, 0, tolerance * np.abs(array).max(), err_msg=n)
    # What is stored is what another mesh reads.
    before = api.stored(task, parallel, state)
    again = api.with_arrays(task, parallel, state, {})
    jax.tree.map(np.testing.assert_array_equal, api.stored(task, parallel, again), before)


def test_arrays_are_read_as_they_are_stored(large, tmp_path):
    """The optimizer's numbers of the ends are in stacks with a row for each stage."""
    units = PipelineConfig(num_microbatches=2, num_chunks=2, placement=PLACED)
    task, parallel = Reads("ends alone"), Parallel(on_devices((1, 4, 1)), units)
    state, _, _ = trained(task, parallel)
    api.save(tmp_path, task, parallel, state)
    restored = api.restored(tmp_path, task, parallel)
    api.audit(restored)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, state.opt_state)
    of_one = api.restored(tmp_path, task, Parallel(on_devices((1, 1, 1))))
    stored, expected = api.stored(task, "dp1", of_one), api.stored(task, parallel, state)
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        assert stored[name].dtype == array.dtype
        np.testing.assert_array_equal(stored[name], array, err_msg=name)


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
    parallel = Parallel(on_devices((2, 2, 1)), units)
    in_parts = not {"head", "placement"}.isdisjoint(pipeline)
    summary = api.summary(task, parallel)
    if in_parts:
        assert summary["each stage"] == "stores 1/2 of embed"
    else:
        assert summary["stage 1"] == "stores embed"
    _, found, loss = trained(task, parallel)
    _, expected, expected_loss = trained_on_one(task)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    table = "params/embed/embedding"
    np.testing.assert_allclose(found[table], expected[table], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tied", "placement"), [(False, PLACED), (True, "balanced")])
def test_no_table_of_an_own_model_is_sent_over_stages(large, tied, placement):
    units = PipelineConfig(num_chunks=2, placement=placement)
    parallel = Parallel(on_devices((1, 4, 1)), units)
    report = inspect_step(Reads(tied=tied), parallel)
    sent = [c.bytes for c in report.collectives if "stage" in c.axes]
    assert 0 < max(sent) < WORDS * WIDTH * 4 / 2
    summary = api.summary(Reads(tied=tied), parallel)
    rows = {name: text for name, text in summary.items() if text.startswith("stores")}
    expected = {"stage 0": "stores embed", "stage 3": "stores out"}
    assert rows == ({"stage 3": "stores embed"} if tied else expected)


class Unknown(Reader):
    """Some of its ids are of no word."""

    def __init__(self, *, of_flax, rngs):
        super().__init__(tied=False, rngs=rngs)
        self.embed = (nnx.Embed if of_flax else nn.Embedding)(WORDS, WIDTH, rngs=rngs)
        self.layers = Stack([lambda rngs: Same(rngs=rngs)] * 2, rngs=rngs)

    def predict(self, y, batch, at):
        return {"y": y}


class Same(nnx.Module):
    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, carry, x, at):
        return carry, x


@dataclasses.dataclass(frozen=True)
class ReadsUnknown(Reads):
    of_flax: bool = True

    def make_model(self, rngs):
        return Unknown(of_flax=self.of_flax, rngs=rngs)


@pytest.mark.parametrize("of_flax", [False, True])
def test_ids_that_no_word_has_are_what_they_are_to_a_whole_table(large, of_flax):
    task, parallel = ReadsUnknown(of_flax=of_flax), Parallel("pp4")
    batch = task.make_batches("train", 0).batch(0)
    batch["x"][:2] = [[0, 7, -1, -WORDS], [WORDS, 100, -WORDS - 1, 3]]
    assert "1/4 of embed" in stored_on_each_stage(task, parallel)
    (found, _), (expected, _) = (api.predictions(task, m, batch) for m in (parallel, "dp1"))
    assert np.isnan(expected["y"]).any() == of_flax
    np.testing.assert_array_equal(found["y"], expected["y"])


# ---- the choice ----


@pytest.mark.full
def test_what_costs_less_is_chosen_and_said():
    def said(task, parallel):
        summary = api.summary(task, parallel)
        assert "stage 0" not in summary
        return summary["each stage"]

    task = OfNoText(2, 8, 8, vocab_size=4096, batch_size=8, seq_len=8)
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
    odd = OfNoText(**vars(MODEL) | {"vocab_size": 99, "num_layers": 2})
    pipeline = PipelineConfig(head="last")
    assert "99 rows do not divide by 2" in said(odd, Parallel("pp2", pipeline))


# ---- the compiled program ----


@functools.cache
def report_of(tied, head):
    task = dataclasses.replace(MODEL, tie_embedding=tied, vocab_size=960, dropout=0.0)
    units = PipelineConfig(num_microbatches=2, num_chunks=2, head=head)
    return inspect_step(task, Parallel(on_devices((1, 4, 1)), units))


@pytest.mark.more
@pytest.mark.parametrize(("tied", "head"), [(False, "last"), (True, "auto")])
def test_no_table_is_sent_over_stages(tied, head):
    report = report_of(tied, head)
    whole = 960 * 16 * 4
    largest = max(c.bytes for c in report.collectives if "stage" in c.axes and not c.in_loop)
    if head == "last":  # the head alone: kernel and bias
        assert whole <= largest < whole + 960 * 4 + 1000
    else:
        assert largest < whole / 8
