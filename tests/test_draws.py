"""Random numbers of a model are a function of seed, step, layer, row and time step, on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.any_model import Calm, assert_same
from lib.awd import awd
from lib.law.check import ERRORS, assert_near
from lib.laws import assert_same_as_plain, make_settings, more, on_devices
from lib.models import MAKERS, WIDTH, Regress, Regression

from jaxpar import (
    RULES,
    ArrayBatches,
    LayerContext,
    MeshConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    nn,
)

ONE = Parallel(on_devices((1, 1, 1)))
HALVES = Parallel(on_devices((1, 2, 1)), PipelineConfig(num_chunks=2))


def is_kept(key, shape):
    return jax.random.bernoulli(key, 0.8, shape)


class Noisy(nnx.Module):
    """Of each draw another number; its state makes noise of one step count in all that follow."""

    def __init__(self, *, rngs):
        self.w = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH))

    def __call__(self, carry, x, at):
        if at.key is not None:
            x = x + 0.1 * at.draw(jax.random.normal, x.shape)
            x = x * at.draw(jax.random.uniform, (*x.shape[:2], 1), number=1)
            x = jnp.where(at.draw(is_kept, x.shape, number=2), x, jnp.zeros_like(x))
        y = carry[None] + jnp.cumsum(jnp.tanh(self.w(nn.dropout(x, 0.2, at))), 0)
        return y[-1], y


class Group(nnx.Module):
    """Several rows at a time, with noise for each."""

    rows_together = 4

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, carry, x, at):
        if at.key is not None:
            x = x + at.draw(jax.random.normal, x.shape)
        return carry, (x - x.mean(1, keepdims=True)) * self.scale[...][None, None]


OWN = MAKERS | {
    "noisy": lambda rngs: Noisy(rngs=rngs),
    "group": lambda rngs: Group(rngs=rngs),
    "noisy both ways": lambda rngs: nn.Bidirectional(Noisy(rngs=rngs), Noisy(rngs=rngs)),
}


class Drawn(Regression):
    def __init__(self, kinds, *, rngs):
        super().__init__((), rngs=rngs)
        self.layers = Stack([OWN[kind] for kind in kinds], rngs=rngs)

    def first(self, batch, at: LayerContext):
        x = super().first(batch, at)
        return x if at.key is None else x + 0.3 * at.draw(jax.random.normal, x.shape)

    def last(self, y, batch, at: LayerContext):
        if at.key is not None:
            y = y + 0.3 * at.draw(jax.random.gumbel, y.shape)
        return super().last(y, batch, at)


class Draws(Calm):
    def make_model(self, rngs):
        return Drawn(self.kinds, rngs=rngs)


class Images(nnx.Module):
    """Without time."""

    time_major = False

    def __init__(self, rngs):
        self.embed, self.out = nnx.Linear(3, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        make = lambda rngs: nn.Stateless(nnx.Linear(WIDTH, WIDTH, rngs=rngs))  # noqa: E731
        self.layers = Stack([make] * 2, rngs=rngs)

    def first(self, batch, at):
        x = self.embed(batch["x"])
        return x if at.key is None else x + at.draw(jax.random.normal, x.shape)

    def last(self, y, batch, at):
        return Sums(jnp.sum(self.out(y)[:, 0] ** 2 * batch["weight"]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Rows(Task):
    batch_size: int = 16

    def make_model(self, rngs):
        return Images(rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
        return ArrayBatches({"x": x}, self.batch_size, seed)


# A task, a mesh, and how a batch is cut there.
LAW = {
    "rows": (Draws(("noisy", "noisy")), (2, 1, 1), {}),
    "units": (Draws(("noisy", "noisy")), (1, 2, 1), {"num_microbatches": 2, "num_chunks": 2}),
    "both": more(Draws(("noisy", "noisy")), (2, 2, 1), {"num_microbatches": 2, "num_chunks": 4}),
    "both ways": (Draws(("noisy both ways",)), (1, 2, 1), {"num_microbatches": 2}),
    "groups": (Draws(("noisy", "group")), (1, 2, 1), {"num_microbatches": 2, "num_chunks": 2}),
    "groups, rows": more(Draws(("group", "group")), (2, 1, 1), {}),
    **{
        kind: more(Draws((kind, kind)), (2, 2, 1), {"num_microbatches": 2, "num_chunks": 2})
        for kind in ("own gru", "mingru", "rglru", "slstm")
    },
}  # fmt: skip


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("task", "mesh", "units"), LAW.values(), ids=LAW)
def test_what_is_drawn_is_the_same_on_any_mesh(task, mesh, units):
    assert_same(task, Parallel(on_devices(mesh), PipelineConfig(**units)))


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    "parallel", [Parallel("dp2"), Parallel("pp2", PipelineConfig(num_microbatches=4))]
)
def test_what_is_drawn_without_time_is_the_same_on_any_mesh(parallel):
    batch = Rows().make_batches("train", 0).batch(0)
    found, expected = (api.gradients(Rows(), own, batch) for own in (parallel, ONE))
    assert_near({"loss": found.loss}, {"loss": expected.loss}, ERRORS["float32"])
    assert_near(found.grads, expected.grads, ERRORS["float32"])


@pytest.mark.law
@pytest.mark.full
def test_masks_that_are_held_are_the_same_on_any_mesh():
    assert_same_as_plain(make_settings((2, 2, 1), (2, 2), awd(word_dropout=0.2, drop_connect=0.2)))


@pytest.mark.more
@pytest.mark.parametrize("time_major", [True, False])
def test_a_blocks_draw_is_part_of_the_wholes(time_major):
    key, shape, block = jax.random.key(5), (6, 8, 3), (slice(2, 5), slice(4, 8))
    whole = LayerContext(3, 0, 0, key, time_major=time_major).draw(jax.random.normal, shape)
    rows = 4 if time_major else 2
    part = LayerContext(3, 2, rows, key, time_major=time_major)
    block = block if time_major else (slice(2, 5),)
    found = part.draw(jax.random.normal, whole[block].shape)
    np.testing.assert_array_equal(found, whole[block])


def test_draws_differ_by_step_layer_row_time_and_number_and_from_dropout():
    at, shape = LayerContext(3, 0, 0, jax.random.key(5)), (2, 2, 512)
    first, second = (at.draw(jax.random.uniform, shape, number) for number in (0, 1))
    pairs = [
        (first, at._replace(key=jax.random.key(6)).draw(jax.random.uniform, shape)),
        (first, at._replace(layer=4).draw(jax.random.uniform, shape)),
        (first, at._replace(row=2).draw(jax.random.uniform, shape)),
        (first, at._replace(time=2).draw(jax.random.uniform, shape)),
        (first, first[::-1]),
        (first, first[:, ::-1]),
        (first, second),
        (first, nn.dropout(jnp.ones(shape), 0.5, at)),
        (second, nn.dropout(jnp.ones(shape), 0.5, at, number=1)),
    ]
    for one, other in pairs:  # the correlation of 2,048 numbers has a standard deviation of 0.022
        assert abs(np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]) < 0.1


NO_KEY, WITH_KEY = LayerContext(0, 0, 0), LayerContext(0, 0, 0, jax.random.key(0))


@pytest.mark.parametrize(
    ("at", "shape", "message"),
    [
        (NO_KEY, (2, 2), r"at\.draw needs at\.key, .*\nFix: draw only if at\.key is not None\.$"),
        (WITH_KEY, (2,), r"shape \[2\]: must be \[time, rows, \.\.\.\]\.\nFix"),
        (WITH_KEY._replace(time_major=False), (), r"must be \[rows, \.\.\.\]\.\nFix: draw"),
        (
            LayerContext(0, 0, 0, jax.random.key(0), {"x": jnp.zeros((2, 4, 3))}),
            (4, 3),
            r"shape \[4, 3\]: must be \[time, rows, \.\.\.\], with the 4 rows of the block\.\nFix: draw",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(at, shape, message):
    with pytest.raises(ValueError, match=message):
        at.draw(jax.random.normal, shape)


# ---- what the check before a run finds ----


def everywhere(x, at):
    """As any JAX code draws."""
    return jax.random.normal(at.key, x.shape)


def by_first_row(x, at):
    return jax.random.normal(jax.random.fold_in(at.key, at.row), x.shape)


def by_rows_alone(x, at):
    """A window of each row at once."""

    def draw(row):
        return jax.random.normal(jax.random.fold_in(at.key, row), (len(x), x.shape[2]))

    return jax.vmap(draw, out_axes=1)(at.row + jnp.arange(x.shape[1]))


def by_chunk(x, at):
    """Held within a chunk."""
    key = jax.random.fold_in(at.key, at.time)
    return jnp.broadcast_to(jax.random.normal(key, x.shape[2:]), x.shape)


def one_constant(x, at):
    return jax.random.normal(jax.random.key(0), x.shape)


def place_in_block(x, at):
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=x.dtype)[:, None], x.shape)


def right(x, at):
    return at.draw(jax.random.normal, x.shape)


def held(x, at):
    """As recipes/awd.py does: of a row for all steps, and for all rows."""

    def draw(row):
        return jax.random.normal(jax.random.fold_in(at.key, row), x.shape[2:])

    of_rows = jax.vmap(draw)(at.row + jnp.arange(x.shape[1]))
    return x * of_rows[None] + jax.random.normal(at.key, x.shape[2:])[None, None]


class Added(Regression):
    """Noise where a test wants it."""

    def __init__(self, place, noise, rngs):
        super().__init__((), rngs=rngs)
        self.place, self.noise = place, noise

        class Layer(Noisy):
            def __call__(self, carry, x, at):
                y = carry[None] + jnp.cumsum(self.w(x), 0)
                if place == "layer" and at.key is not None:
                    y = y + noise(y, at)
                return carry + jnp.sum(self.w(x), 0), y

        self.layers = Stack([lambda rngs: Layer(rngs=rngs)] * 2, rngs=rngs)

    def first(self, batch, at):
        x = super().first(batch, at)
        return x + self.noise(x, at) if self.place == "first" and at.key is not None else x

    def last(self, y, batch, at):
        y = y + self.noise(y, at) if self.place == "last" and at.key is not None else y
        return super().last(y, batch, at)


@dataclasses.dataclass(frozen=True)
class OfModel(Regress):
    place: str = "layer"
    noise: str = "everywhere"

    def make_model(self, rngs):
        return Added(self.place, globals()[self.noise], rngs)


DRAWS = (
    r"draws random numbers that depend on how a batch is split: .*\nFix: use at\.draw\(jax\.random"
)
PLACE = (
    r"gives a row other numbers at another place in its block: its output changes .*\n.*at\.row, or"
)
REFUSED = [
    ("first", "everywhere", ONE, f"^`first` {DRAWS}"),
    ("layer", "everywhere", ONE, f"^layer layer0 {DRAWS}"),
    ("last", "everywhere", ONE, f"^`last` {DRAWS}"),
    more("first", "by_first_row", ONE, f"^`first` {DRAWS}"),
    more("last", "by_first_row", ONE, f"^`last` {DRAWS}"),
    ("layer", "by_first_row", ONE, f"^layer layer0 {DRAWS}"),
    ("layer", "by_rows_alone", HALVES, f"^layer layer0 {DRAWS}"),
    more("first", "by_chunk", HALVES, f"^`first` {DRAWS}"),
    more("last", "by_chunk", HALVES, f"^`last` {DRAWS}"),
    ("first", "one_constant", ONE, f"^`first` {DRAWS}"),
    ("layer", "place_in_block", ONE, f"^layer layer0 {DRAWS}"),
]


@pytest.mark.rows(2)
@pytest.mark.parametrize(("place", "noise", "parallel", "message"), REFUSED)
def test_draws_that_depend_on_how_a_batch_is_cut_are_refused(place, noise, parallel, message):
    with pytest.raises(ValueError, match=message):
        api.check_before_run(OfModel(place=place, noise=noise), parallel)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("place", "noise", "parallel"),
    [
        *(more(place, "right", HALVES) for place in ("first", "last")),
        ("layer", "right", HALVES),
        ("first", "held", HALVES),
        ("layer", "by_rows_alone", ONE),
    ],
)
def test_draws_that_do_not_are_not(place, noise, parallel):
    api.check_before_run(OfModel(place=place, noise=noise), parallel)


class Exchanging(nnx.Module):
    """Reads all time steps, of which each device has a part, and adds noise."""

    def __init__(self, noise, *, rngs):
        self.w, self.noise = nnx.Linear(WIDTH, WIDTH, rngs=rngs), noise

    def __call__(self, carry, x, at):
        y = self.w(x) - jax.lax.pmean(x.mean(0), "context")[None]
        return carry, y if at.key is None else y + self.noise(y, at)


@dataclasses.dataclass(frozen=True)
class Split(OfModel):
    """Each device has a part of the time steps."""

    axes = ("context",)

    @property
    def rules(self):
        return RULES.replace({"time": "context"})

    def make_model(self, rngs):
        model, make = super().make_model(rngs), MAKERS["dense"]
        if self.place == "layer":
            make = functools.partial(Exchanging, globals()[self.noise])
        model.layers = Stack([lambda rngs: make(rngs=rngs)] * 2, rngs=rngs)
        return model


@pytest.mark.parametrize("place", [more("first"), "layer", more("last")])
def test_draws_of_a_whole_window_are_refused_where_an_axis_splits_time(place):
    parallel = Parallel(MeshConfig.parse("dp1context2"))
    api.check_before_run(Split(place=place, noise="right"), parallel)
    name = "layer exchanging" if place == "layer" else f"`{place}`"
    with pytest.raises(ValueError, match=f"^{name} {DRAWS}"):
        api.check_before_run(Split(place=place, noise="by_rows_alone"), parallel)
