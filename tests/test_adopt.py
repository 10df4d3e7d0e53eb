"""Flax models as they stand: on every mesh, the plain model's loss, gradients and weights."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from lib import flax_models as models
from lib.adopted import MESHES, Adopted, assert_as_plain, batch_of, named, plain_model
from lib.laws import more

from jaxpar.base.keys import new_key
from jaxpar.step.independence import check_rows_alone
from jaxpar.step.setup import Setup

pytestmark = pytest.mark.law


@pytest.fixture(autouse=True)
def models_of_users_convert_and_broadcast():
    """As JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


RNNS, IMAGES = {"where": "rnns"}, {"loss_of": models.image_loss, "batch_of": models.image_batch}
POINTS = {"loss_of": models.point_loss, "batch_of": models.point_batch}
MLP = (("blocks.*.up.kernel", (None, "tensor")), ("blocks.*.up.bias", ("tensor",)))

# Each model, and the mesh of its row in the default run. None: what is new in it is in the default rows of
# test_law.py.
MODELS = {
    "gpt": (Adopted(models.GPT), "dp2pp2tp2"),
    "no mask": (Adopted(models.NoMask), None),
    "caching": (Adopted(models.Caching, loss_of=models.first_loss), "dp2pp2tp2"),
    "jitted": (Adopted(models.Jitted), "remat"),
    "remat inside": (Adopted(models.RematInside), None),
    "outside": (Adopted(models.Outside, by_path=MLP), None),
    "padded, tied": (Adopted(models.Padded, by_path=MLP), "dp8"),
    "u-net": (Adopted(models.UNet, by_path=MLP), "dp8"),
    "two kinds": (Adopted(models.TwoKinds, where=None), None),
    "numbered": (Adopted(models.Numbered, "layer_*"), "dp8"),
    "sequential": (Adopted(models.AsSequential, "net[1:5]"), None),
    "whole sequential": (Adopted(models.AsSequential, "net"), None),
    "part of a list": (Adopted(models.Text, "blocks[1:]"), None),
    "stacked": (Adopted(models.Stacked), "interleaved, zero-bubble"),
    "mapped": (Adopted(models.Mapped), "dp8"),
    "t5": (Adopted(models.T5), None),
    "nothing drawn": (Adopted(models.Norms), "dp8"),
    "shared kernel": (Adopted(models.SharedKernel), "dp8"),
    "pair": (Adopted(models.Pair), "zero-bubble"),
    "tuples": (Adopted(models.Tuples), None),
    "rope": (Adopted(models.Rope), "pp4"),
    "mixer": (Adopted(models.Mixer, "encoder.blocks", **IMAGES), "dp8"),
    "dit": (Adopted(models.DiT, **POINTS), None),
    "watched": (Adopted(models.Watched, loss_of=models.logits_loss), None),
    "frozen": (Adopted(models.NoMask, unused=("embed", "att")), None),
    "rnns": (Adopted(models.RNNs, **RNNS), "chunks"),
    "grus": (Adopted(models.GRUs, batch_of=models.series_batch, **RNNS), "dp8"),
    "residual rnns": (Adopted(models.ResidualRNNs, **RNNS), None),
    "remat rnns": (Adopted(models.RematRNNs, **RNNS), None),
    "bidirectional": (Adopted(models.Bidirectional, **RNNS), None),
    "backward": (Adopted(models.BackwardRNNs, **RNNS), "dp8"),
}
WITH_TIME = "rnns", "grus", "residual rnns"


def table(models, with_time):
    """Rows of models on meshes; all but one of each model are marked `more`."""
    return [
        (pytest.param if mesh == own else more)(task, mesh, id=f"{name} on {mesh}")
        for name, (task, own) in models.items()
        for mesh in MESHES
        if mesh != "chunks" or name in with_time
    ]


@pytest.fixture
def quick(request, monkeypatch):
    """Of one row of each model the check of rows is left to the others."""
    if "more" not in request.keywords:
        monkeypatch.setattr("jaxpar.step.step.check_rows_alone", lambda parts: None)


@pytest.mark.parametrize(("task", "mesh"), table(MODELS, WITH_TIME))
def test_a_flax_model_on_a_mesh_is_the_plain_model(task, mesh, quick):
    assert_as_plain(task, MESHES[mesh])


@pytest.mark.parametrize("name", ["u-net", "residual rnns"])
def test_rows_of_a_flax_model_are_found_to_be_alone(name):
    task, _ = MODELS[name]
    check_rows_alone(Setup.of(task, MESHES["dp8"]).parts)


class Predicting(Adopted):
    """Predicts what it is given."""

    def predict(self, model, batch):
        return model(batch["x"])


def test_outputs_of_blocks_that_the_loss_does_not_need_are_no_predictions():
    task = Adopted(models.Watched, loss_of=models.logits_loss)
    facts = Setup.of(task, MESHES["dp8"]).facts
    with pytest.raises(ValueError, match="needs less of the blocks than the model returns"):
        _ = facts.outputs
    own = Predicting(models.Watched, loss_of=models.logits_loss)
    match = r"predict of task Predicting uses float.*, float.* from the blocks, but the loss uses float32"
    with pytest.raises(ValueError, match=match):
        Setup.of(own, MESHES["dp8"])


def test_what_follows_a_block_ends_where_it_is_not_as_between_blocks():
    task, _ = MODELS["u-net"]
    facts = Setup.of(task, MESHES["dp8"]).facts
    program = facts.cut_model.program("loss", facts.batch, trains=True)
    of_last = program.part(models.DEPTH - 1).closed.jaxpr.eqns
    assert [eqn.primitive.name for eqn in of_last][1:] in ([], ["add"])


# ---- models that draw ----

DRAWING = {
    "in blocks": (Adopted(models.Dropped), "pp4"),
    "between blocks": (Adopted(models.DroppedBetween), None),
    "in stacked blocks": (Adopted(models.DroppedStacked), "zero-bubble"),
    "of whole features": (Adopted(models.DroppedWidths), None),
    "for all rows of a call": (Adopted(models.DroppedPlaces), "dp8"),
    "after an nnx.RNN": (Adopted(models.DroppedRNNs, **RNNS), "chunks"),
}


def key_of(owner, *places):
    """That of jaxpar for the first step, a block (DEPTH is none), a row and maybe a time step."""
    return functools.reduce(jax.random.fold_in, (owner, *places), jax.random.fold_in(new_key(0), 0))


def with_keys(state, row):
    """Streams as jaxpar begins them for a row."""
    flat, counts = {}, collections.Counter()
    for path, leaf in nnx.to_flat_state(state):
        number = next((n for n in path if isinstance(n, int)), models.DEPTH)
        owners = range(models.DEPTH) if leaf.ndim else [number]  # those of stacked blocks
        keys = jnp.stack([jax.random.fold_in(key_of(n, row), counts[n]) for n in owners])
        counts.update(owners)
        flat[path] = leaf.replace(keys if leaf.ndim else keys[0])
    return nnx.from_flat_state(flat)


class SteppedDropout(nnx.Dropout):
    """A dropout that draws each time step by itself."""

    def __call__(self, x):
        steps = []
        for time in range(x.shape[1]):
            key = jax.random.fold_in(key_of(self.owner, self.row, time), 0)
            of_step = nnx.RngStream(key, tag="dropout")
            steps.append(super().__call__(x[:, time : time + 1], rngs=of_step))
        return jnp.concatenate(steps, 1)


@functools.lru_cache(maxsize=2)
def row_by_row(task):
    """Loss and gradients of plain Flax, a row after the other, and the weights."""
    model = plain_model(task)
    kinds = nnx.Param, nnx.RngKey, nnx.RngCount
    graphdef, params, keys, counts, others = nnx.split(model, *kinds, ...)
    batch, counts = batch_of(task), jax.tree.map(jnp.zeros_like, counts)

    def of_row(params, one, row):
        one = jax.tree.map(lambda a: a[None], one)
        model = nnx.merge(graphdef, params, with_keys(keys, row), counts, others, copy=True)
        for number, block in enumerate(getattr(model, "rnns", ())):
            block.drop.__class__ = SteppedDropout
            vars(block.drop).update(owner=number, row=row)
        return task.loss_of(model, one)

    def mean(params):
        rows = jnp.arange(models.ROWS)
        loss, weight = jax.lax.map(lambda own: of_row(params, *own), (batch, rows))
        return jnp.sum(loss) / jnp.sum(weight)

    value, grads = jax.jit(jax.value_and_grad(mean))(params)
    return float(value), named(grads), named(params)


@pytest.mark.parametrize(("task", "mesh"), table(DRAWING, ["after an nnx.RNN"]))
def test_what_a_model_draws_is_that_of_plain_flax_row_by_row(task, mesh, quick):
    assert_as_plain(task, MESHES[mesh], row_by_row(task))


@pytest.mark.parametrize("name", DRAWING)
def test_evaluation_draws_nothing(name):
    task, _ = DRAWING[name]
    facts = Setup.of(task, MESHES["dp8"]).facts
    parts = "first", *range(len(facts.cut_model.kinds)), "last"
    keys = {
        trains: [
            facts.cut_model.program("loss", facts.batch, trains=trains).part(part).keys
            for part in parts
        ]
        for trains in (True, False)
    }
    assert any(keys[True])
    assert not any(keys[False])
