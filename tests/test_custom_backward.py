"""Functions with a backward pass of their own receive the gradient of the mean loss on every mesh."""

import dataclasses
import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.laws import MODEL, RELATIVE_ERROR, assert_close, make_settings, more

import jaxpar
from jaxpar import (
    LayerContext,
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    init_state,
    value_and_grad,
)
from jaxpar.nn import GRU

WIDTH = 8
C = 1e-3  # of the size of the gradients


def with_backward(change):
    """The identity, whose gradient is changed."""

    def backward(_, g):
        return (change(g),)

    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), backward)
    return function


CHANGES = {
    "clip": lambda g: jnp.clip(g, -C, C),
    "sign": lambda g: C * jnp.sign(g),
    "limit": lambda g: g / jnp.maximum(1, abs(g) / C),
    "round": lambda g: C * jnp.round(4 * g / C) / 4,
}
FUNCTIONS = {name: with_backward(change) for name, change in CHANGES.items()}


def changed(x):
    """Each feature goes through one of the functions."""
    number = jnp.arange(x.shape[-1]) % len(FUNCTIONS)
    masks = [(number == n).astype(x.dtype)[None, None] for n in range(len(FUNCTIONS))]
    return sum(f(x * mask) for f, mask in zip(FUNCTIONS.values(), masks, strict=True))


class Changed(nnx.Module):
    carry_dims = ("batch", "hidden")

    def __init__(self, change, rngs):
        self.gru, self.change = GRU(WIDTH, rngs=rngs), change

    def initial_carry(self, rows):
        return self.gru.initial_carry(rows)

    def __call__(self, carry, x, at: LayerContext):
        carry, y = self.gru(carry, self.change(x), at)
        penalty = jnp.sum(y**2, -1) * at.batch["weight"]
        return carry, y, Sums(jnp.sum(penalty) / 100, 0)


class SmallBranch(nnx.Module):
    """Most of the gradient goes past its function."""

    def __init__(self, change, rngs):
        self.up, self.change = nnx.Linear(WIDTH, WIDTH, rngs=rngs), change

    def __call__(self, carry, x, at: LayerContext):
        return carry, x + 0.01 * jnp.tanh(self.up(self.change(x)))


class Net(nnx.Module):
    """Its loss does not depend on the batch's weights, of which there may be none."""

    def __init__(self, task, rngs):
        make = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.embed, self.out, self.task = make(1, WIDTH), make(WIDTH, 2), task
        self.layers = Stack([lambda rngs: task.layer(task.in_layers, rngs)] * 4, rngs=rngs)

    def first(self, batch, at):
        return self.task.in_first(self.embed(batch["x"]))

    def last(self, y, batch, at):
        error = self.out(self.task.in_last(y)) - batch["y"]
        return Sums(jnp.sum(error**2), self.task.weigh(y, batch))


def same(x):
    return x


def known(y, batch):
    return jnp.sum(batch["weight"])


@dataclasses.dataclass(frozen=True)
class Own(jaxpar.Task):
    in_first: object = same
    in_layers: object = same
    in_last: object = same
    weigh: object = known
    layer: type = Changed
    optimizer: OptimizerConfig = OptimizerConfig()

    def make_model(self, rngs):
        return Net(self, rngs)

    def make_batches(self, split, seed=None):
        wave = np.sin(np.arange(601) / 5)[:, None].astype(np.float32)
        arrays = {"x": wave[:-1], "y": np.concatenate([wave[1:], wave[:-1] ** 2], 1)}
        return SeriesBatches(arrays, batch_size=8, seq_len=8, seed=seed)


EVERYWHERE = Own(changed, changed, changed)


def gradients(parallel):
    """Of batches with weights that differ from row to row and from step to step; and with none."""
    batch = EVERYWHERE.example_batch()
    weight = np.random.default_rng(0).integers(0, 5, batch["weight"].shape).astype(np.float32)
    for own in (weight, 0 * weight):
        found = api.gradients(EVERYWHERE, parallel, {**batch, "weight": own})
        yield {"loss": np.asarray(found.loss), **found.grads}


@pytest.fixture(scope="module")
def on_one_device():
    return [*gradients(Parallel("dp1"))]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "options"),
    [
        ((1, 2, 1), (2, 2), {"zero_bubble": True, "head": "sharded"}),
        ((2, 2, 1), (2, 2), {"head": "last"}),
        more((1, 2, 1), (2, 2), {"zero_bubble": True, "schedule": "interleaved", "num_groups": 2}),
        more((1, 1, 1), (2, 1), {}),
        more((2, 1, 1), (1, 1), {}),
        more((2, 1, 1), (2, 1), {"layout": {"shares": (1, 3)}}),
        more((1, 2, 2), (2, 2), {}),
        more((1, 2, 1), (2, 2), {"remat": True}),
        more((1, 2, 1), (1, 4), {"remat": True, "remat_keeps": "carries"}),
        more((1, 4, 1), (2, 2), {"schedule": "v", "head": "last"}),
    ],
)
def test_the_gradient_is_that_of_the_mean_loss_on_every_mesh(on_one_device, mesh, units, options):
    parallel = make_settings(mesh, units, **options).parallel
    for found, expected in zip(gradients(parallel), on_one_device, strict=True):
        assert_close(found, expected)


def of_kept(y, batch):
    """What counts depends on y, without a gradient."""
    return jnp.sum(jnp.where(y[..., 0] > 0, batch["weight"], 0))


def learned(y, batch):
    return jnp.sum(batch["weight"] * jax.nn.sigmoid(y[..., 0]))


def in_a_scan(y, batch):
    """Counted in a loop, beside something else."""

    def step(totals, inputs):
        y, weight = inputs
        return (totals[0] + jnp.sum(y), totals[1] + jnp.sum(weight)), None

    start = jnp.sum(y) * 0, jnp.sum(batch["weight"]) * 0
    return jax.lax.scan(step, start, (y, batch["weight"]))[0][1]


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize(
    ("weigh", "is_known"),
    [
        (known, True),
        (in_a_scan, True),
        (jax.jit(in_a_scan), True),
        (of_kept, False),
        (learned, False),
    ],
)
def test_the_weight_is_known_where_it_depends_on_the_batch_alone(weigh, is_known):
    """Where it is not known before the backward pass, that must be linear."""
    task, parallel = Own(weigh=weigh, in_layers=changed), Parallel("pp2")
    if is_known:
        api.check_before_run(task, parallel)
        return
    with pytest.raises(
        ValueError, match=r"not linear, but the weight|weight of `last` has a gradient"
    ):
        api.check_before_run(task, parallel)


def by_norm_of(g):
    return g / jnp.maximum(1, jnp.sqrt(jnp.sum(g**2)) / C)


straight = with_backward(lambda g: 2 * g)
by_norm = with_backward(by_norm_of)


class OfParameter(Changed):
    """Changes the gradient of its bias, to which each device adds."""

    def __call__(self, carry, x, at: LayerContext):
        x = x * self.change(self.gru.b[...][0])[None, None]
        return self.gru(carry, x, at)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("options", "mesh", "units", "match"),
    [
        ({"weigh": of_kept, "in_first": changed}, (1, 1, 1), (2, 1), "`first`: .*lambda.* not linear, but"),
        ({"weigh": of_kept, "in_layers": changed}, (1, 2, 1), (1, 1), "layer changed: .* not linear"),
        ({"weigh": of_kept, "in_last": changed}, (1, 1, 1), (2, 1), "`last`: .* not linear, but the weight"),
        ({"weigh": learned}, (1, 1, 1), (2, 1), "weight of `last` has a gradient"),
        ({"in_layers": by_norm}, (2, 1, 1), (1, 1), "layer changed: .* other gradients for two halves"),
        ({"in_last": by_norm}, (1, 2, 1), (1, 2), "`last`: .* other gradients for (two halves|2 chunks)"),
        (
            {"layer": OfParameter, "in_layers": FUNCTIONS["clip"]}, (2, 1, 1), (1, 1),
            "layer ofparameter: .* other gradients for two halves",
        ),
        (
            {"weigh": of_kept, "in_layers": FUNCTIONS["clip"], "layer": SmallBranch}, (1, 2, 1), (1, 1),
            "layer smallbranch: .* not linear, but the weight",
        ),
    ],
)  # fmt: skip
def test_what_would_depend_on_the_mesh_is_refused_by_name(options, mesh, units, match):
    task, parallel, _ = make_settings(mesh, units, Own(**options))
    with pytest.raises(ValueError, match=match) as told:
        api.check_before_run(task, parallel)
    assert len(str(told.value).split()) <= 40
    api.check_before_run(task, Parallel("dp1"))  # has it all


class OverTime(Own):
    """Its windows are split by an axis of its own."""

    axes = ("context",)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"time": "context"})


ON_CONTEXT = MeshConfig(axes=(("context", 2),), devices=(0, 1))


def by_norm_over(dims):
    """A clip by the norm over some dims of [time, rows, width]."""
    return with_backward(
        lambda g: g / jnp.maximum(1, jnp.linalg.norm(g, axis=dims, keepdims=True) / C)
    )


by_step, by_row, by_time = (by_norm_over(dims) for dims in [2, (0, 2), 0])


@with_backward
def by_window(g):
    """A clip by the norm of a row's window, of which each device has some steps."""
    total = jax.lax.psum(jnp.sum(g**2, (0, 2), keepdims=True), "context")
    return g / jnp.maximum(1, jnp.sqrt(total) / C)


@pytest.mark.parametrize(
    ("task", "parallel", "match"),
    [
        (Own(in_layers=by_norm), Parallel("dp2"), "two halves of the rows"),
        (Own(in_layers=by_time), Parallel("pp2", PipelineConfig(num_chunks=2)), "2 time chunks"),
        (OverTime(in_layers=by_time), Parallel(ON_CONTEXT), "2 time chunks"),
    ],
)
def test_what_combines_rows_or_steps_in_a_small_branch_is_refused(task, parallel, match):
    task = dataclasses.replace(task, layer=SmallBranch)
    with pytest.raises(ValueError, match=f"layer smallbranch: .* other gradients for {match}"):
        api.check_before_run(task, parallel)


@jax.custom_vjp
def times_rows(x, of_rows):
    return x * jnp.diagonal(of_rows)[None, :, None]


times_rows.defvjp(
    lambda x, of_rows: (times_rows(x, of_rows), of_rows),
    lambda of_rows, g: (times_rows(jnp.clip(g, -C, C), of_rows), None),
)


def times_one(x):
    return times_rows(x, jnp.eye(x.shape[1]))


@pytest.mark.parametrize(
    ("task", "parallel"),
    [
        (Own(in_layers=times_one), Parallel("dp2")),
        (Own(in_layers=by_row), Parallel("dp2")),
        (Own(in_layers=by_step), Parallel("pp2", PipelineConfig(num_chunks=2))),
        (OverTime(in_layers=by_step), Parallel(ON_CONTEXT)),
        (OverTime(in_layers=by_window), Parallel(ON_CONTEXT)),
    ],
)
def test_what_combines_numbers_of_one_row_or_step_passes(task, parallel):
    task = dataclasses.replace(task, layer=SmallBranch)
    api.check_before_run(task, parallel)


def by_norm_beside(x, other):
    """A clip by the norm of all rows, with another operand, which has no gradient."""

    def backward(_, g):
        return by_norm_of(g), None

    function = jax.custom_vjp(lambda x, other: x)
    function.defvjp(lambda x, other: (x, None), backward)
    return function(x, other)


def of_several_rows(x):
    return by_norm(x) if x.shape[1] > 1 else x


def without_a_dim_of_one(x):
    return by_norm(x) if x.shape[1] > 1 else by_norm(x[:, 0])[:, None]


CANNOT_BE_TRIED_ALONE = {
    "a key": lambda x: by_norm_beside(x, jax.random.key(0)),
    "rows by rows": lambda x: by_norm_beside(x, jnp.eye(x.shape[1])),
    "called for several rows alone": of_several_rows,
    "fewer dims for one row": without_a_dim_of_one,
}


@pytest.mark.parametrize("name", CANNOT_BE_TRIED_ALONE)
def test_what_cannot_be_tried_alone_is_tried_in_its_part(name):
    task = Own(in_first=CANNOT_BE_TRIED_ALONE[name], layer=SmallBranch)
    with pytest.raises(ValueError, match=r"^`first`: .* other gradients for two halves of"):
        api.check_before_run(task, Parallel("dp2"))


def rule_of_tanh(args, d_args):
    return jnp.tanh(*args), d_args[0] - jnp.mean(d_args[0])


class Rules:
    def of_tanh(self, args, d_args):
        return rule_of_tanh(args, d_args)


def not_set_yet():
    """A rule around which a variable is not set."""

    def rule(args, d_args):
        return rule_of_tanh(args, d_args) if args else later

    if not WIDTH:
        later = None
    return rule


RULES_OF_TANH = {
    "a function": lambda: rule_of_tanh,
    "a method": lambda: Rules().of_tanh,
    "a partial": lambda: functools.partial(rule_of_tanh),
    "a function of a variable that is not set": not_set_yet,
}


@pytest.mark.parametrize("name", RULES_OF_TANH)
def test_a_function_of_jax_with_the_rule_of_a_user_is_one_of_the_users(name):
    function = jax.custom_jvp(jnp.tanh)
    function.defjvp(RULES_OF_TANH[name]())
    task = Own(in_layers=lambda x: jax.nn.relu(function(x)), layer=SmallBranch)
    said = r"the backward pass of tanh \(test_custom_backward\.py, line \d+\) gives other gradients"
    with pytest.raises(ValueError, match=said):
        api.check_before_run(task, Parallel("dp2"))


def test_backward_passes_of_jaxpar_need_no_trial():
    with api.tried_backward_passes() as tried:
        api.check_before_run(MODEL, Parallel("dp2"))
    assert tried == []


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    [
        {"weigh": of_kept, "in_layers": straight, "in_first": straight, "in_last": straight},
        {"in_layers": changed, "in_first": changed, "in_last": changed},
        {"in_layers": straight, "layer": OfParameter},
    ],
)
def test_what_does_not_passes(options):
    task, parallel, _ = make_settings((2, 2, 1), (2, 2), Own(**options))
    api.check_before_run(task, parallel)


def test_a_function_that_is_called_twice_is_tried_once():
    task = Own(in_layers=lambda x: by_row(by_row(x)), layer=SmallBranch)
    with api.tried_backward_passes() as tried:
        api.check_before_run(task, Parallel("dp2"))
    assert len(tried) == 1


class AnyLength(Own):
    variable_length = True


@pytest.mark.full
def test_a_shorter_batch_counts_what_it_has():
    found = []
    for mesh, units in [((1, 1, 1), (1, 1)), ((1, 2, 1), (2, 4))]:
        settings = make_settings(mesh, units, AnyLength(changed, changed, changed))
        batch = jax.tree.map(
            lambda a: a[:, :4] if np.ndim(a) > 1 else a, settings.task.example_batch()
        )
        gradients = api.gradients(settings.task, settings.parallel, batch)
        found.append({"loss": np.asarray(gradients.loss), **gradients.grads})
    assert_close(*found)


CALLBACKS = {
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x),
    "experimental.io_callback": lambda x: jax.experimental.io_callback(np.sin, x, x),
}


class CallsPython(nnx.Module):
    def __init__(self, call, rngs):
        self.call, self.blocks = call, nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x) + self.call(jax.lax.stop_gradient(x))
        return x


def calling_python(call):
    def loss(model, batch):
        return jaxpar.mean(jnp.square(model(batch["x"])).sum(-1), batch["weight"])

    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    make = functools.partial(CallsPython, call)
    return jaxpar.adopt(make, loss, "blocks", batches={"x": x}, batch_size=16)


def first_gradient(task, parallel):
    batch = task.make_batches("train", 0).batch(0)
    return value_and_grad(task, parallel)(init_state(task, parallel), batch)


@pytest.mark.rows(2, "full")
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize(
    "parallel", ["dp2", "pp2", jaxpar.Parallel("dp1", jaxpar.PipelineConfig(num_microbatches=2))]
)
def test_a_block_that_calls_python_is_refused_where_jax_cannot_compile_it(name, parallel):
    fact = rf"layer linear\d? \(test_custom_backward.py, line \d+\) calls Python by jax.{name}"
    with pytest.raises(ValueError, match=rf"^{fact}, but (.*\n)*Fix: "):
        first_gradient(calling_python(CALLBACKS[name]), parallel)


@pytest.mark.parametrize("mesh", ["dp1", "tp2"])
def test_a_block_that_calls_python_has_the_same_loss_elsewhere(mesh):
    task, plain = calling_python(CALLBACKS["pure_callback"]), calling_python(jnp.sin)
    (loss, _), _ = first_gradient(task, mesh)
    (expected, _), _ = first_gradient(plain, "dp1")
    np.testing.assert_allclose(loss, expected, rtol=RELATIVE_ERROR)
