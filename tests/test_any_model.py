"""Models that are none of jaxpar's: what they may do, and what is refused with the name of the layer."""

import dataclasses
import functools
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from lib import api
from lib.any_model import Calm, assert_same
from lib.law.check import assert_near
from lib.laws import more, on_devices
from lib.models import MAKERS, WIDTH, Dense, Regress, Regression, draw

import jaxpar
from jaxpar import (
    RULES,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    TrainConfig,
    init_state,
    make_predict_step,
    make_train_step,
    nn,
    value_and_grad,
)
from jaxpar.nn import named_param
from jaxpar.planning import compare, estimate_step

pytestmark = pytest.mark.law


def test_orthogonal_kernels_are_drawn_one_by_one():
    """Batches of LAPACK's wait for the threads that they run on: eight devices hung there."""

    def make(rngs):
        return nn.Recurrent(nnx.GRUCell(8, 8, rngs=rngs))

    def draw():
        return nnx.state(Stack([make] * 3, rngs=nnx.Rngs(0)))

    assert "qr[" in str(program := jax.make_jaxpr(draw)())
    assert re.findall(r"f32\[([\d,]+)\] = qr\[", str(program)) == ["8,8"]
    kernels = np.asarray(draw()["recurrent"]["cell"]["dense_h"]["kernel"][...])
    for kernel in kernels:
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(8), atol=1e-6)
    assert len({kernel.tobytes() for kernel in kernels}) == 3


class Halved(Regression):
    """What a step in units needs once, it makes once, as one more parameter."""

    made = nnx.Param

    def prepare(self, sizes):
        model = nnx.clone(self)
        model.half = self.made(self.scale[...] / 2)
        return model

    def first(self, batch, at):
        half = self.half[...] if hasattr(self, "half") else self.scale[...] / 2
        return super().first(batch, at) * half[None, None]


class HalvedForGood(Halved):
    made = nnx.Variable


@dataclasses.dataclass(frozen=True)
class Halves(Regress):
    model: type = Halved

    def make_model(self, rngs):
        return self.model(self.kinds, rngs=rngs)


@pytest.mark.law
def test_a_model_that_is_prepared_for_units_equals_its_definition():
    units = PipelineConfig(num_microbatches=2)
    assert_same(Halves(("dense", "dense")), Parallel(on_devices((1, 2, 1)), units))


def test_a_model_that_is_prepared_with_what_has_no_gradient_is_refused():
    task = Halves(("dense",), model=HalvedForGood)
    parallel = Parallel(on_devices((1, 1, 1)), PipelineConfig(num_microbatches=2))
    state, step = init_state(task, parallel), make_train_step(task, parallel)
    message = (
        r"`prepare` of HalvedForGood makes a variable that is not trained of scale, whose grad"
    )
    with pytest.raises(ValueError, match=message):
        step(state, task.make_batches("train", 0).batch(0))


def test_structures_of_equal_stacks_are_equal_and_so_are_their_hashes():
    """So that `jax.jit` can take them as static arguments."""
    one, other = (nnx.graphdef(Stack([MAKERS["dense"]] * 2, rngs=nnx.Rngs(n))) for n in (0, 1))
    assert one == other
    assert hash(one) == hash(other)


def test_a_layer_that_needs_the_whole_window_refuses_chunks():
    units = PipelineConfig(num_microbatches=2, num_chunks=4)
    with pytest.raises(
        ValueError,
        match=r"layer bidirectional reads the whole window at once, but num_chunks=4 splits",
    ):
        init_state(Calm(("both ways", "cell")), Parallel(on_devices((1, 2, 1)), units))


def by_name(params):
    """What comes after the layers is one group, all else another."""

    def group(path, _):
        return "end" if "outputs" in jax.tree_util.keystr(path) else "rest"

    return jax.tree.map_with_path(group, params)


def the_rest(params):
    return jax.tree.map(lambda group: group == "rest", by_name(params))


OPTIMIZERS = {
    "groups": optax.multi_transform({"end": optax.sgd(0.1), "rest": optax.adam(1e-2)}, by_name),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), the_rest), optax.adam(1e-2)),
    "frozen": optax.multi_transform({"end": optax.set_to_zero(), "rest": optax.sgd(0.1)}, by_name),
    "muon": optax.contrib.muon(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
}


class Grouped(Calm):
    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.freeze]  # its name, in the place of another option

    frozen = nnx.Nothing()


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "kinds", "layout"),
    [
        ("groups", ("gru", "dense", "cell"), {"update": "sharded"}),
        more("groups", ("gru", "dense", "cell"), {"fsdp": True}),
        more("groups", ("gru", "dense", "cell"), {"update": "host"}),
        more("masked", ("gru", "gru", "dense"), {}),
        more("frozen", ("gru", "gru", "dense"), {}),
        ("muon", ("gru",) * 4, {}),
        more("clipped", ("gru", "gru", "gru"), {}),
    ],
)
def test_optimizers_of_groups_leave_the_same_parameters(name, kinds, layout):
    def train(mesh, **layout):
        task = Grouped(kinds, freeze=name)
        units = PipelineConfig(num_microbatches=2, num_chunks=2)
        parallel = Parallel(on_devices(mesh), units, **layout)
        state, step = init_state(task, parallel), make_train_step(task, parallel)
        batches = task.make_batches("train", 0)
        for number in range(2):
            state, _ = step(state, batches.batch(number))
        api.audit(state)
        stored = api.stored(task, parallel, state)
        return {name: array for name, array in stored.items() if name.startswith("params/")}

    assert_near(train((2, 2, 1), **layout), train((1, 1, 1)), 1e-5)


# ---- mistakes inside a user's layer are told with its name ----


def layer_that(call, carry=None):
    """A kind of layer that does something wrong."""

    class Wrong(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jnp.ones(16))

        def __call__(self, carry, x, at):
            return call(carry, x, at)

    if carry is not None:
        Wrong.initial_carry = lambda self, rows: carry(rows)
    return lambda rngs: Wrong(rngs=rngs)


def zeros(rows):
    return jnp.zeros((rows, 2))


def over_tensor():
    mesh = jaxpar.MeshConfig(data=2, stage=2, tensor=2).build()
    return jax.NamedSharding(mesh, P(None, None, "tensor"))


def by_shard_map(x):
    mesh, specs = over_tensor().mesh, P(None, None, "tensor")
    return jax.shard_map(abs, mesh=mesh, in_specs=specs, out_specs=specs)(x)


HERE = r"test_any_model\.py, line \d+"
MISTAKES = {
    "shape": (
        layer_that(lambda c, x, at: (c, x[..., :8])),
        r"the input of layer 1 \(wrong\) is float32\[8, 16, 8\], that of layer 0 float32\[8, 16, 16\]",
    ),
    "dtype": (
        layer_that(lambda c, x, at: (c, x.astype(jnp.bfloat16))),
        r"the input of layer 1 \(wrong\) is bfloat16\[8, 16, 16\], that of layer 0 float32",
    ),
    "structure": (
        layer_that(lambda c, x, at: (c, {"x": x})),
        r"the input of layer 1 \(wrong\) has the structure .*'x'.*, that of layer 0 ",
    ),
    "carry": (
        layer_that(lambda c, x, at: (c[:, :1], x), zeros),
        r"layer wrong: the carry that it returns is float32\[16, 1\], the one it takes",
    ),
    "carry of integers": (
        layer_that(lambda c, x, at: (c, x), lambda rows: jnp.zeros(rows, jnp.int32)),
        r"layer wrong: its initial_carry is int32\[16\]\nFix: make it floating-point numbers",
    ),
    "carry without rows": (
        layer_that(lambda c, x, at: (c, x), lambda rows: jnp.zeros((3, 3))),
        r"layer wrong: its initial_carry\(32\) has the shape \[3, 3\]\.\nFix: give \[rows, \.\.\.\]",
    ),
    "a collective over stages": (
        layer_that(lambda c, x, at: (c, jax.lax.psum(x, "stage"))),
        rf"layer wrong \({HERE}\) uses a collective along 'stage', which only jaxpar .*\n.* your own",
    ),
    "a collective over rows": (
        layer_that(lambda c, x, at: (c, x - jax.lax.pmean(x, ("data", "tensor")))),
        rf"layer wrong \({HERE}\) uses a collective along 'data', which only jaxpar may use",
    ),
    "a collective over tensor": (
        layer_that(lambda c, x, at: (c, jax.lax.all_gather(x, "tensor", axis=2, tiled=True))),
        rf"layer wrong \({HERE}\) uses a collective along 'tensor', which only jaxpar .*\n.* at.layout\(x, ",
    ),
    "a collective over an unknown axis": (
        layer_that(lambda c, x, at: (c, x * jax.lax.axis_index("heads"))),
        rf"layer wrong \({HERE}\) uses a collective along 'heads', .*\n.* write axes = \(\"heads\",\)",
    ),
    "what its calls change": (
        lambda rngs: nn.Stateless(nnx.BatchNorm(WIDTH, rngs=rngs)),
        r"layer Stateless has module\.mean, a BatchStat, which calls would change\.\nFix: use jaxpar\.nn",
    ),
    "a shard_map": (
        layer_that(lambda c, x, at: (c, jax.jit(jax.checkpoint(by_shard_map))(x))),
        rf"layer wrong \({HERE}\) asks for a mesh of its own \(shard_map over 'tensor'\).*\n.* at.layout\(x",
    ),
    "a shard_map of no mesh": (
        layer_that(lambda c, x, at: (c, jax.shard_map(abs, in_specs=P(), out_specs=P())(x))),
        rf"layer wrong \({HERE}\) asks for a mesh of its own \(by shard_map.*\n.*custom-axes\.md",
    ),
    "a sharding": (
        layer_that(lambda c, x, at: (c, jax.lax.with_sharding_constraint(x, over_tensor()))),
        rf"layer wrong \({HERE}\) asks for a mesh of its own \(sharding_constraint over 'tensor'\)",
    ),
    "a sharding of no mesh": (
        layer_that(lambda c, x, at: (c, jax.lax.with_sharding_constraint(x, P("tensor")))),
        rf"layer wrong \({HERE}\) asks for a mesh of its own",
    ),
    "a branch in Python": (
        layer_that(lambda c, x, at: (c, x if x.sum() > 0 else -x)),
        rf"layer wrong \({HERE}\) uses an array in a Python condition .*\nFix: use jnp.where or jax.lax.cond",
    ),
    "a branch by the layer's number": (
        layer_that(lambda c, x, at: (c, x if at.layer else -x)),
        rf"layer wrong \({HERE}\) uses an array in a Python condition .* traced arrays have no values",
    ),
    "a branch in a loop": (
        layer_that(
            lambda c, x, at: jax.lax.scan(lambda c, x: (c, x if x[0, 0] > 0 else -x), c, x), zeros
        ),
        rf"layer wrong \({HERE}\) uses an array in a Python condition",
    ),
    "a branch by many numbers": (
        layer_that(lambda c, x, at: (c, x if x > 0 else -x)),
        rf"layer wrong \({HERE}\) uses an array in a Python condition",
    ),
    "many numbers of Python": (
        layer_that(lambda c, x, at: (c, float(x) + x)),
        rf"layer wrong \({HERE}\) converts an array to a Python number",
    ),
    "a number of Python": (
        layer_that(lambda c, x, at: (c, x / float(x.max()))),
        rf"layer wrong \({HERE}\) converts an array to a Python number.*\nFix: use the array itself",
    ),
    "an item": (
        layer_that(lambda c, x, at: (c, x / x.max().item())),
        rf"layer wrong \({HERE}\) converts an array to a Python number",
    ),
    "a loop of Python": (
        layer_that(lambda c, x, at: (c, sum(x for _ in range(at.time)))),
        rf"layer wrong \({HERE}\) uses an array as a Python integer.*\nFix: use jax.lax.fori_loop",
    ),
    "a slice": (
        layer_that(lambda c, x, at: (c, x.at[: at.row].set(0))),
        rf"layer wrong \({HERE}\) slices an array at the value of another.*\nFix: use jax.lax.dynamic_slice",
    ),
    "NumPy": (
        layer_that(lambda c, x, at: (c, x + np.asarray(x))),
        rf"layer wrong \({HERE}\) passes an array to NumPy, .*\nFix: use the function of jax.numpy",
    ),
    "a mask": (
        layer_that(lambda c, x, at: (c, x + x[x > 0].sum())),
        rf"layer wrong \({HERE}\) selects elements by a mask.*\nFix: use jnp.where\(mask, x, 0\)",
    ),
    "a key that evaluation has not": (
        layer_that(lambda c, x, at: (c, x + jax.random.normal(at.key, x.shape))),
        rf"layer wrong \({HERE}\) needs at.key, which is None in evaluation .*\nFix: use jaxpar.nn.dropout",
    ),
    "a key made of that": (
        layer_that(lambda c, x, at: (c, x + jax.random.normal(jax.random.fold_in(at.key, 1)))),
        rf"layer wrong \({HERE}\) needs at.key, .*\n.* or at.draw.* only if at.key is not None",
    ),
    "another mistake where nothing is drawn": (
        layer_that(lambda c, x, at: (c, nn.dropout(x, 0.1, at)) if at.key is not None else x),
        "(?s)layer wrong returns an array of shape .* return \\(carry, y\\)",
    ),
}


def test_what_draws_may_ask_for_its_key_and_predictions_have_none():
    """`first` that asks runs in evaluation; `predict` that does not ask is refused."""

    class Draws(Regression):
        def first(self, batch, at):
            x = super().first(batch, at)
            return x if at.key is None else x + jax.random.normal(at.key, x.shape)

        def predict(self, y, batch, at):
            return {"y": y + jax.random.normal(at.key, y.shape)}

    class Task(Regress):
        def make_model(self, rngs):
            return Draws(self.kinds, rngs=rngs)

    batch = Task().make_batches("train", 0).batch(0)
    sums, _ = api.evaluation(Task(), "dp1", init_state(Task(), "dp1"), batch)
    assert np.isfinite(sums["loss"])
    with pytest.raises(ValueError, match=rf"predict \({HERE}\) needs at.key"):
        make_predict_step(Task(), "dp1")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_layer_is_told_with_its_name(mistake):
    make, message = MISTAKES[mistake]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = Stack([make] * 2, rngs=rngs)

        def first(self, batch, at):
            return jnp.ones((*batch["x"].shape[:2], 16))

        def last(self, y, batch, at):
            return Sums(jnp.sum(y), jnp.float32(y.size))

    class Task(Regress):
        def make_model(self, rngs):
            return Model(rngs)

    with pytest.raises(ValueError, match=message):
        init_state(Task(), Parallel(on_devices((1, 1, 1))))


def test_shapes_that_do_not_fit_are_told_with_the_layer_and_its_line():
    make = layer_that(lambda c, x, at: (c, x @ jnp.ones((WIDTH + 1, WIDTH))))

    class Task(Regress):
        def make_model(self, rngs):
            model = super().make_model(rngs)
            model.layers = Stack([make] * 2, rngs=rngs)
            return model

    message = (
        rf"layer wrong does not take its input, .*: dot_general requires .* \({HERE}\)\nFix: let "
    )
    with pytest.raises(ValueError, match=message):
        init_state(Task(), Parallel(on_devices((1, 1, 1))))


class BasedDense(Dense, jaxpar.Layer):
    """With the defaults of a layer: no state, no names, any chunk of time."""


class Based(Regression, jaxpar.Model):
    """With the defaults of a model."""

    def __init__(self, *, rngs):
        super().__init__(("gru",), rngs=rngs)
        makers = [MAKERS["gru"], lambda rngs: BasedDense(rngs=rngs)]
        self.layers = Stack(makers, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class WithBases(Regress):
    def make_model(self, rngs):
        return Based(rngs=rngs)


@pytest.mark.full
def test_bases_say_by_default_what_a_plain_module_does_not_say():
    assert_same(WithBases(), Parallel(on_devices((1, 2, 1)), PipelineConfig(num_chunks=2)))
    with pytest.raises(ValueError, match="model Based has no method predict"):
        make_predict_step(WithBases(), "dp1")
    bases = (jaxpar.Model, jaxpar.Layer)
    told = "".join(pydoc.plain(pydoc.render_doc(base)) for base in bases)
    for name in (
        "time_major",
        "predict",
        "draw",
        "prepare",
        "last_part",
        "initial_carry",
        "kind_name",
    ):
        assert name in told

    class Empty(jaxpar.Model):
        def __init__(self, rngs):
            self.layers = Stack([MAKERS["dense"]], rngs=rngs)

    class Task(Regress):
        def make_model(self, rngs):
            return Empty(rngs)

    with pytest.raises(
        ValueError, match=r"a Empty, has no method first\.\nFix: write first\(batch"
    ):
        init_state(Task(), "dp1")


class Counts(nnx.Module):
    """Its `count` is changed by calls, in a way that a test chooses."""

    def __init__(self, change, *, rngs):
        self.change, self.count = change, nnx.Variable(jnp.zeros(()))
        self.w = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, carry, x, at):
        if self.change == "a variable":
            self.count[...] += 1
        elif self.change == "a parameter of another module":
            self.w.kernel[...] *= 0.9
        elif self.change == "in a function that is compiled by itself":
            nnx.jit(lambda layer: layer.count.set_value(layer.count + 1))(self)
        elif self.change == "a new one":
            self.seen = nnx.Variable(x)
        elif self.change == "what it was":
            self.count[...] = self.count[...]
            self.seen_before = "a name"
            return carry, nnx.remat(lambda w, x: w(x))(
                self.w, nnx.jit(lambda w, x: w(x))(self.w, x)
            )
        return carry, self.w(x)


class Outside(nnx.Module):
    """A model that calls `Counts` in its layers, before or after them."""

    def __init__(self, part, change, rngs):
        self.part, self.mine = part, Counts(change, rngs=rngs)
        changes = change if part == "layer counts" else "nothing"
        self.layers = Stack([lambda rngs: Counts(changes, rngs=rngs)] * 2, rngs=rngs)

    def first(self, batch, at):
        x = batch["x"][..., :1] * jnp.ones(WIDTH)[None, None]
        return self.mine((), x, at)[1] if self.part == "first" else x

    def last(self, y, batch, at):
        y = self.mine((), y, at)[1] if self.part == "last" else y
        return Sums(jnp.sum(y * batch["weight"][..., None]), jnp.sum(batch["weight"]))


CHANGES = {
    "a variable": "count",
    "a parameter of another module": r"w\.kernel",
    "in a function that is compiled by itself": "count",
    "a new one": "seen",
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("part", ["layer counts", "first", "last"])
def test_a_variable_that_a_call_changes_is_refused_and_no_other(part):
    class Task(Regress):
        def make_model(self, rngs):
            return Outside(part, self.kinds[0], rngs)

    for change, name in CHANGES.items():
        name = name if part == "layer counts" else rf"mine\.{name}"
        with pytest.raises(ValueError, match=f"(?s)^{part} changes its variable {name}.*carry"):
            init_state(Task((change,)), "dp1")
    init_state(Task(("what it was",)), "dp1")


@pytest.mark.full
def test_a_dim_without_a_rule_and_a_batch_of_other_sizes_are_refused():
    parallel = Parallel(on_devices((1, 1, 1)))

    class NoRules(Regress):
        rules = RULES

    with pytest.raises(ValueError, match=r"layers\.block\..*: dim '.*' has no rule"):
        init_state(NoRules(("block",)), parallel)
    task = Regress()
    state, step = init_state(task, parallel), make_train_step(task, parallel)
    batch = task.make_batches("train", 0).batch(0)
    for change, message in (
        (lambda a: a[:, :4], r"a batch of 4 time steps, those of task Regress have 8"),
        (lambda a: a[:8], r"\['level'\] is float32\[8, 1\], in batches of task Regress it is"),
    ):
        wrong = {k: change(v) if np.ndim(v) > 1 else v for k, v in batch.items()}
        with pytest.raises(ValueError, match=message):
            step(state, wrong)
    with pytest.raises(
        ValueError,
        match=r"the batch is a dict of x, those of task Reg.* are a dict of lengths, level, ",
    ):
        step(state, {"x": batch["x"]})


class Centred(nnx.Module):
    def __call__(self, carry, x, at):
        heads = x.reshape(*x.shape[:-1], 2, -1)
        run = jax.vmap(lambda a: a - jax.lax.pmean(a, "heads"), -2, -2, axis_name="heads")
        return carry, run(heads).reshape(x.shape)


class Asserting(nnx.Module):
    """Fails on a mesh alone."""

    def __call__(self, carry, x, at):
        assert not jax.typeof(x).manual_axis_type.varying
        return carry, x


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (Centred, ValueError, r"layer centred.* over an axis of jax\.vmap"),
        (Asserting, AssertionError, "^(?!.*jax.vmap)"),
    ],
)
def test_a_collective_over_an_axis_of_vmap_is_told(layer, error, message, monkeypatch):
    monkeypatch.setitem(MAKERS, layer.__name__.lower(), lambda rngs: layer())
    task, parallel = Regress((layer.__name__.lower(), "dense")), Parallel(on_devices((1, 2, 1)))
    state, batch = init_state(task, parallel), task.make_batches("train", 0).batch(0)
    with pytest.raises(error, match=message):
        value_and_grad(task, parallel)(state, batch)


@pytest.mark.full
@pytest.mark.law
def test_a_cell_of_flax_follows_layers_that_are_split():
    """It cuts its gates from one array, which the units of the layers before it must not be dealt over."""
    units = PipelineConfig(num_microbatches=2, num_chunks=2, zero_bubble=True)
    assert_same(Regress(("gru", "flax gru", "gru", "gru")), Parallel(on_devices((1, 2, 2)), units))


@pytest.mark.more
@pytest.mark.parametrize(("mesh", "shares"), [((1, 2, 2), None), ((2, 1, 2), (3, 1))])
def test_an_exchange_within_a_unit_is_refused_before_it_would_hang(mesh, shares):
    class Gates(nnx.Module):
        def __init__(self, whole, *, rngs):
            self.whole, self.w = whole, named_param(draw(rngs, 16, 32), ("input", "hidden"))

        def __call__(self, carry, x, at):
            z = x @ self.w[...]
            z = at.layout(z, None, "batch", None) if self.whole else z
            a, b = jnp.split(z, 2, axis=-1)  # each is on one half of the devices, unless z is whole
            return carry, jnp.tanh(a) * nnx.sigmoid(b)

    class Model(nnx.Module):
        def __init__(self, whole, rngs):
            self.layers = Stack([lambda rngs: Gates(whole, rngs=rngs)] * 2, rngs=rngs)

        def first(self, batch, at):
            return jnp.ones((*batch["x"].shape[:2], 16))

        def last(self, y, batch, at):
            return Sums(jnp.sum(y), jnp.float32(y.size))

    @dataclasses.dataclass(frozen=True)
    class Task(Regress):
        whole: bool = False

        def make_model(self, rngs):
            return Model(self.whole, rngs)

    task, parallel = Task(), Parallel(on_devices(mesh), shares=shares)
    state, batch = init_state(task, parallel), task.make_batches("train", 0).batch(0)
    refused = functools.partial(
        pytest.raises,
        ValueError,
        match=rf"split \({HERE}\) cuts, joins or reshapes a dim that 'tensor' splits",
    )
    for make_step in (make_train_step, value_and_grad):
        with refused():
            make_step(task, parallel)(state, batch)
    # A plan goes on with others.
    assert "cuts, joins or reshapes" in compare(estimate_step(task, parallel)).refusal
    assert_same(Task(whole=True), parallel)  # as the message says


class Summed(Regression):
    def last(self, y, batch, at):
        total = jnp.sum(batch["id"].astype(jnp.float32))
        return super().last(y, batch, at)._replace(metrics={"total": total})


@dataclasses.dataclass(frozen=True)
class Numbered(Regress):
    """With a whole number and one of floating point of 64 bits for each step."""

    largest: int = 0
    split: str = "train"
    dtype: str = "int64"

    def make_model(self, rngs):
        return Summed(self.kinds, rngs=rngs)

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        largest = self.largest if split == self.split else 5
        batches.arrays["id"] = np.full(batches.length, largest, self.dtype)
        batches.arrays["wide"] = np.ones(batches.length)
        return batches


@pytest.mark.full
def test_whole_numbers_that_devices_cannot_hold_are_refused(tmp_path):
    whole = (
        r"batch\['id'\] has 2147483648, which does not fit .*\nFix: use ids .* or JAX_ENABLE_X64=1"
    )
    with pytest.raises(ValueError, match=whole):
        init_state(Numbered(largest=2**31))
    train = TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=f"split 'test': {whole}"):
        jaxpar.fit(Numbered(largest=2**31, split="test"), "dp1", train, quiet=True)
    assert not (tmp_path / "run").exists()

    task = Numbered(largest=2**31 - 1)
    batch = task.make_batches("train", 0).batch(0)
    state, step = init_state(task, "dp1"), make_train_step(task, "dp1")
    with pytest.raises(ValueError, match=r"batch\['id'\] has -2147483649"):
        step(state, {**batch, "id": -batch["id"] - 2})

    def mean_in_a_step(task):
        batch = task.make_batches("train", 0).batch(0)
        _, metrics = make_train_step(task, "dp1")(init_state(task, "dp1"), batch)
        return float(metrics.sums.metrics["total"]) / batch["id"].size

    assert mean_in_a_step(task) == 2**31  # as float32
    assert mean_in_a_step(Numbered(largest=2, dtype="uint64")) == 2
    large = Numbered(("dense",), largest=2**62, dtype="uint64")
    with pytest.raises(ValueError, match=r"has 4611686018427387904, which does not fit in uint32"):
        init_state(large)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert mean_in_a_step(large) == 2**62


def test_stages_need_layers_and_a_sharded_head_needs_a_method():
    with pytest.raises(
        ValueError, match="head='sharded': model Regression has no method last_part"
    ):
        init_state(Regress(), Parallel("pp2", PipelineConfig(head="sharded")))
    named = PipelineConfig(placement="first, 0-1 | 2-3")
    with pytest.raises(
        ValueError, match=r"placement='first, 0-1 \| 2-3' leaves out last: model Regr"
    ):
        init_state(Regress(), Parallel("pp2", named))
    named = PipelineConfig(placement="0 | 1-2 | 3, last")
    with pytest.raises(
        ValueError, match=r"last' leaves out first, but the input part of model Regression is whole"
    ):
        init_state(Regress(), Parallel("pp3", named))
    with pytest.raises(
        ValueError, match=r"stage=2: the model of task Regress has no layers in its stack\.\nFix"
    ):
        init_state(Regress(()), "pp2")
    print(api.summary(Regress(), Parallel("pp8")))
    with pytest.raises(ValueError, match="batch_size=16 does not divide by data=3"):
        init_state(Regress(), Parallel(on_devices((3, 1, 1))))
