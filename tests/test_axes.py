"""Axes of one's own: collectives within layers, rows and time that they split, and what is refused."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from lib import api
from lib.any_model import assert_same
from lib.law.check import assert_near
from lib.laws import more
from lib.layers import Attention, Experts
from lib.models import FEATURES, MAKERS, SGD, WIDTH, Regress

import jaxpar
from jaxpar import (
    LayerContext,
    MeshConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    TrainConfig,
    init_state,
    nn,
)
from jaxpar.planning import describe, estimate_step, plan

EXAMPLES = Path(__file__).parent.parent / "examples"


class Poisoned(nnx.Module):
    """Gives no number in row 5 at time step 6."""

    def __call__(self, carry, x, at: LayerContext):
        times, rows = at.time + jnp.arange(x.shape[0]), at.row + jnp.arange(x.shape[1])
        is_bad = (times == 6)[:, None] & (rows == 5)[None]
        return carry, jnp.where(is_bad[..., None], jnp.nan, x)


LAYERS = {
    **MAKERS,
    "poisoned": lambda rngs: Poisoned(),
    "attention": lambda rngs: Attention(rngs=rngs),
    "experts": lambda rngs: Experts(rngs=rngs),
}


class Parted(nnx.Module):
    def __init__(self, kinds, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, use_bias=False, rngs=rngs)
        self.layers = Stack([LAYERS[kind] for kind in kinds], rngs=rngs)

    def first(self, batch, at: LayerContext):
        return jnp.tanh(self.inputs(batch["x"]))

    def last(self, y, batch, at: LayerContext):
        error = self.outputs(nn.dropout(y, 0.1, at)) - batch["y"]
        weight = batch["weight"]
        return Sums(jnp.sum(jnp.square(error) * weight[..., None]), jnp.sum(weight), {})

    def predict(self, y, batch, at: LayerContext):
        return {"next": self.outputs(y)}


@dataclasses.dataclass(frozen=True)
class Context(Regress):
    kinds: tuple[str, ...] = ("attention", "dense", "attention", "dense")
    axes = ("context",)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"time": "context"})

    def make_model(self, rngs):
        return Parted(self.kinds, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Mixture(Context):
    kinds: tuple[str, ...] = ("gru", "experts", "dense", "experts")
    optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig(
        "sgd", 0.05, "constant", warmup_steps=0
    )
    axes = ("expert",)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"batch": ("data", "expert"), "experts": "expert"})


def laid_out(mesh, **pipeline):
    config = MeshConfig.parse(mesh)
    config = dataclasses.replace(config, devices=tuple(range(config.num_devices)))
    return Parallel(config, PipelineConfig(**pipeline))


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("task", "mesh", "name", "layer"),
    [
        (Mixture(), "pp2expert2", "gru/w_h", "0 (gru)"),
        (Context(), "dp2context2", "attention/qkv/kernel", "0 (attention)"),
    ],
)
def test_a_number_that_is_not_finite_is_found_in_layers_with_axes_of_their_own(
    task, mesh, name, layer
):
    parallel = laid_out(mesh)
    state, batch = init_state(task, parallel), task.make_batches("train", 0).batch(0)
    assert api.origin(task, parallel, state, batch)[0].startswith("the norm of all gradients")
    name = f"params/layers/{name}"
    bad = np.full_like(api.stored(task, parallel, state)[name], np.nan)
    state = api.with_arrays(task, parallel, state, {name: bad})
    place, rows, time = api.origin(task, parallel, state, batch)
    assert (place, rows[0], time) == (f"the output of layer {layer}", 0, 0)


@pytest.mark.parametrize(
    "task", [Context(kinds=("dense", "poisoned")), more(Mixture(kinds=("dense", "poisoned")))]
)
def test_a_number_that_is_not_finite_is_found_at_its_place_in_the_batch(task):
    parallel = laid_out(f"{task.axes[0]}2")
    state, batch = init_state(task, parallel), task.make_batches("train", 0).batch(0)
    found = api.origin(task, parallel, state, batch)
    assert found == ("the output of layer 1 (poisoned)", (5,), 6)


@pytest.mark.full
@pytest.mark.law
def test_rows_that_only_data_splits_take_unequal_shares():
    assert_same(Mixture(), dataclasses.replace(laid_out("dp2pp2"), shares=(3, 1)))


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("name", "options", "mesh", "pipeline"),
    [
        ("experts.py:Experts", {"num_experts": 4}, "dp2pp2expert2", {"num_microbatches": 2}),
        more("experts.py:Experts", {"num_experts": 4, "split": "tensor"}, "pp2tp2", {}),
        ("long_context.py:LongContext", {"num_heads": 2}, "pp2context2", {"num_microbatches": 2}),
        more("long_context.py:LongContext", {"exchange": "all_to_all"}, "dp2pp2context2", {}),
    ],
)
def test_examples_equal_the_plain_model(name, options, mesh, pipeline):
    task = api.task_class(f"{EXAMPLES}/{name}")
    sizes = {"width": 16, "batch_size": 8, "seq_len": 16, "optimizer": SGD}
    assert_same(task(**sizes, **options), laid_out(mesh, **pipeline))


class ByNames(nnx.Module):
    """Attention of split heads, between what is split along the sequence: the compiler exchanges."""

    whole_window = True

    def __init__(self, *, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, carry, x, at: LayerContext):
        x = at.layout(x, "sequence", None, None)
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, 4, -1)
        q, k, v = (at.layout(a, None, None, "heads", None) for a in jnp.moveaxis(qkv, 2, 0))
        weights = jax.nn.softmax(jnp.einsum("tbnd,sbnd->nbts", q, k))
        mixed = jnp.einsum("nbts,sbnd->tbnd", weights, v).reshape(x.shape)
        return carry, x + at.layout(mixed, "sequence", None, None)


@dataclasses.dataclass(frozen=True)
class Named(Regress):
    @property
    def rules(self):
        return jaxpar.RULES.replace({"sequence": "tensor", "heads": "tensor"})

    def make_model(self, rngs):
        model = Parted((), rngs=rngs)
        model.layers = Stack([lambda rngs: ByNames(rngs=rngs)] * 2, rngs=rngs)
        return model


@pytest.mark.full
@pytest.mark.law
@pytest.mark.parametrize("mesh", ["pp2tp2", more("dp2tp4")])
def test_the_compiler_exchanges_sequences_for_heads_by_their_names(mesh):
    assert_same(Named(), laid_out(mesh))
    report = jaxpar.inspect_step(Named(), laid_out("tp4"))
    assert "all-to-all" in {each.op for each in report.along("tensor")}


@pytest.mark.full
def test_predictions_and_evaluations_on_an_axis_equal_those_of_one_device():
    for task, mesh in ((Context(), "pp2context2"), (Mixture(), "dp2pp2expert2")):
        batch, found = task.make_batches("test").batch(0), []
        for parallel in (laid_out(mesh), laid_out("dp1")):
            outputs, _ = api.predictions(task, parallel, batch)
            sums, _ = api.evaluation(task, parallel, init_state(task, parallel), batch)
            found.append(outputs | sums)
        assert_near(*found, 1e-5)


@pytest.mark.full
def test_a_run_goes_on_with_another_size_of_its_axis(tmp_path):
    def fit(out_dir, mesh, num_steps, **how):
        train = TrainConfig(num_steps, out_dir=str(tmp_path / out_dir), log_every=1)
        return jaxpar.fit(Mixture(), laid_out(mesh), train, quiet=True, **how)

    whole = fit("whole", "dp1", 4)
    fit("parts", "expert4", 2)
    parts = fit("parts", "dp2pp2expert2", 4, resume=True)
    np.testing.assert_allclose(parts.losses, whole.losses[-2:], rtol=1e-4)
    run = jaxpar.load_run(tmp_path / "parts")
    found = run.evaluate("test").metrics["loss"]
    np.testing.assert_allclose(found, parts.evaluations["test"].metrics["loss"], rtol=1e-5)


@pytest.mark.full
def test_a_device_has_its_experts_and_its_part_of_the_gradients_sums():
    kernel = init_state(Mixture(), laid_out("pp2expert2")).params["layers"]["experts"]["kernel"]
    assert kernel.sharding.spec[:2] == ("stage", "expert")
    assert kernel.sharding.shard_shape(kernel.shape)[1:] == (2, WIDTH, WIDTH)
    cost = estimate_step(Mixture(), laid_out("pp2expert2"), machine="v5e:2x2")
    over_experts = [each for each in cost.sent if each.axes == ("expert",)]
    assert [(each.op, each.runs) for each in over_experts] == [("all-reduce", 1)]


def test_a_plan_keeps_the_axis():
    given = Parallel(MeshConfig(axes=(("expert", 2),)))
    ranking = plan(Mixture(), given, machine="v5e:2x4", num_finalists=0)
    meshes = {cost.parallel.mesh for cost in (*ranking.fitting, *ranking.refused)}
    assert {mesh.sizes["expert"] for mesh in meshes} == {2}
    assert {(mesh.data, mesh.stage) for mesh in meshes} >= {(4, 1), (2, 2), (1, 4)}


class Timeless(Parted):
    time_major = False


@dataclasses.dataclass(frozen=True)
class Whole(Context):
    kinds: tuple[str, ...] = ("dense",)

    def make_model(self, rngs):
        return Timeless(self.kinds, rngs=rngs)


def test_time_that_a_model_does_not_have_is_not_split():
    message = r"split time over context, but the model has no time dim \(time_major = False\)\.\nFix: don't"
    with pytest.raises(ValueError, match=message):
        init_state(Whole(), laid_out("context2"))


class Ring(Attention):
    def __call__(self, carry, x_TBW, at: LayerContext):
        @jax.checkpoint
        def moved(x):
            return jax.jit(lambda x: lax.ppermute(x, "context", [(0, 0)]))(x)

        return carry, moved(x_TBW)


@dataclasses.dataclass(frozen=True)
class Ringed(Context):
    def make_model(self, rngs):
        model = super().make_model(rngs)
        model.layers = Stack([lambda rngs: Ring(rngs=rngs)], rngs=rngs)
        return model


@dataclasses.dataclass(frozen=True)
class Unnamed(Context):
    axes = ()

    @property
    def rules(self):
        return jaxpar.RULES


@dataclasses.dataclass(frozen=True)
class Mistyped(Context):
    @property
    def rules(self):
        return jaxpar.RULES.replace({"time": "contxt"})


@pytest.mark.rows(6)
@pytest.mark.parametrize(
    ("task", "mesh", "message"),
    [
        (Ringed(), "dp1", r"layer ring \(test_axes\.py, line \d+\) uses ppermute, which would exchange with"),
        (Unnamed(), "dp1", r"attention \(.*\) .* along 'context', .*\n.*axes = \(\"context\",\)"),
        (Mistyped(), "dp1", r"rule 'time' -> \('contxt',\): unknown mesh axis 'contxt'; axes of task Mis"),
        (Context(), "contxt2", "unknown axis 'contxt' of task Context\nFix: use .*context"),
        (Context(kinds=("gru",)), "context2", "layer gru carries state from step to step"),
        (Context(seq_len=9), "context2", "seq_len=9 does not divide by context=2"),
        (Mixture(batch_size=6), "dp2expert2", "batch_size=6 does not divide by data=2 x .*expert=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_the_run(task, mesh, message):
    with pytest.raises(ValueError, match=message):
        init_state(task, laid_out(mesh))


class Cumulative(nnx.Module):
    def __call__(self, carry, x, at: LayerContext):
        return carry, jnp.cumsum(x, 0)


class Over(Parted):
    """A part of it runs over all time steps that it is given."""

    def __init__(self, place, *, rngs):
        super().__init__(("dense",), rngs=rngs)
        self.place = place
        if place == "layer":
            self.layers = Stack([lambda rngs: Cumulative()], rngs=rngs)

    def first(self, batch, at: LayerContext):
        x = super().first(batch, at)
        return jnp.cumsum(x, 0) if self.place == "first" else x

    def last(self, y, batch, at: LayerContext):
        if self.place != "last":
            return super().last(y, batch, at)
        y, labels = y.swapaxes(0, 1), jnp.ones((y.shape[1], 2), jnp.int32)
        losses = optax.ctc_loss(y, jnp.zeros(y.shape[:2]), labels, jnp.zeros(labels.shape))
        return Sums(jnp.sum(losses), jnp.float32(len(losses)))


@dataclasses.dataclass(frozen=True)
class OverTime(Context):
    place: str = "last"

    def make_model(self, rngs):
        return Over(self.place, rngs=rngs)


@pytest.mark.parametrize(
    ("place", "what"), [("last", "`last`"), more("first", "`first`"), ("layer", "layer cumulative")]
)
def test_what_runs_over_time_is_refused_where_an_axis_splits_it(place, what):
    task, parallel = OverTime(place=place), laid_out("context2")
    step, state = jaxpar.value_and_grad(task, parallel), init_state(task, parallel)
    with pytest.raises(ValueError, match=rf"^{what} gives .* 2 time chunks: .*\nFix: gather the"):
        step(state, task.make_batches("train", 0).batch(0))


def test_chunks_of_time_and_unequal_shares_are_refused():
    with pytest.raises(ValueError, match="num_chunks=2"):
        init_state(Context(), laid_out("pp2context2", num_chunks=2))
    shares = dataclasses.replace(laid_out("dp2expert2"), shares=(3, 1))
    with pytest.raises(ValueError, match=r"shares=\(3, 1\): the rules split rows over expert"):
        init_state(Mixture(), shares)


@pytest.mark.parametrize(
    ("text", "axes", "written"),
    [
        ("dp2pp2context2", (("context", 2),), "dp2pp2context2"),
        ("expert4", (("expert", 4),), "expert4"),
    ],
)
def test_a_mesh_is_read_with_its_axes(text, axes, written):
    mesh = MeshConfig.parse(text)
    assert (mesh.axes, describe(Parallel(mesh)).split()[0]) == (axes, written)
    assert list(mesh.sizes)[-1] == "tensor"


@pytest.mark.parametrize("name", ["data", "dp", "Context", "two words", ""])
def test_names_that_cannot_be_axes_are_refused(name):
    with pytest.raises(ValueError, match="cannot be the name of an axis"):
        MeshConfig(axes=((name, 2),))


@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", ["dp1", "expert2"])
@pytest.mark.parametrize("devices", [None, (0, 1)])
def test_settings_are_read_as_they_are_written(mesh, devices, tmp_path):
    config = MeshConfig.parse(mesh)
    if devices is not None:
        config = dataclasses.replace(config, devices=devices[: config.num_devices])
    spec, out_dir = f"{EXAMPLES}/experts.py:Experts", tmp_path / "run"
    task = api.task_class(spec)(width=16, batch_size=8, seq_len=16)
    train = TrainConfig(num_steps=1, out_dir=str(out_dir))
    jaxpar.fit(task, Parallel(config), train, quiet=True)
    _, parallel, _ = api.settings("train", spec, "--config", str(out_dir / "config.toml"))
    assert parallel.mesh == config
