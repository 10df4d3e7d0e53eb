"""Flax models as they stand: on every mesh, the plain model's loss, gradients and weights."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from lib import api
from lib import flax_models as models
from lib.adopted import MESHES, Adopted, assert_as_plain, batch_of, named
from lib.laws import more

from jaxpar import Parallel, init_state, make_predict_step

pytestmark = pytest.mark.law


@pytest.fixture(autouse=True)
def models_of_users_convert_and_broadcast():
    """As JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


RNNS, IMAGES = {"where": "rnns"}, {"loss_of": models.image_loss, "batch_of": models.image_batch}
MLP = (("blocks.*.up.kernel", (None, "tensor")), ("blocks.*.up.bias", ("tensor",)))

# What models of `lib.law.blocks` don't have, after one example of what they have; and the mesh of the default
# row, where there is one.
MODELS = {
    "gpt": (Adopted(models.GPT), "dp2pp2tp2"),
    "caching": (Adopted(models.Caching, loss_of=models.first_loss), "dp2pp2tp2"),
    "jitted": (Adopted(models.Jitted), "remat"),
    "padded, tied": (Adopted(models.Padded, by_path=MLP), "dp8"),
    "u-net": (Adopted(models.UNet, by_path=MLP), "dp8"),
    "numbered": (Adopted(models.Numbered, "layer_*"), "dp8"),
    "whole sequential": (Adopted(models.AsSequential, "net"), None),
    "part of a list": (Adopted(models.Text, "blocks[1:]"), None),
    "stacked": (Adopted(models.Stacked), "interleaved, zero-bubble"),
    "mapped": (Adopted(models.Mapped), "dp8"),
    "nothing drawn": (Adopted(models.Norms), "dp8"),
    "shared kernel": (Adopted(models.SharedKernel), "dp8"),
    "pair": (Adopted(models.Pair), "zero-bubble"),
    "rope": (Adopted(models.Rope), "pp4"),
    "mixer": (Adopted(models.Mixer, "encoder.blocks", **IMAGES), "dp8"),
    "watched": (Adopted(models.Watched, loss_of=models.logits_loss), None),
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


@pytest.mark.rows(4, "full")
@pytest.mark.parametrize(("task", "mesh"), table(MODELS, WITH_TIME))
def test_a_flax_model_on_a_mesh_is_the_plain_model(task, mesh):
    assert_as_plain(task, MESHES[mesh])


@pytest.mark.parametrize("name", ["u-net", "residual rnns"])
def test_rows_of_a_flax_model_are_found_to_be_alone(name):
    task, _ = MODELS[name]
    api.check_before_run(task, MESHES["dp8"])


class Predicting(Adopted):
    """Predicts what it is given."""

    def predict(self, model, batch):
        return model(batch["x"])


def test_outputs_of_blocks_that_the_loss_does_not_need_are_no_predictions():
    task = Adopted(models.Watched, loss_of=models.logits_loss)
    with pytest.raises(ValueError, match="needs less of the blocks than the model returns"):
        make_predict_step(task, MESHES["dp8"])
    own = Predicting(models.Watched, loss_of=models.logits_loss)
    match = r"predict of task Predicting uses float.*, float.* from the blocks, but the loss uses float32"
    with pytest.raises(ValueError, match=match):
        init_state(own, MESHES["dp8"])


def test_what_follows_the_last_block_is_cut_where_it_is_not_as_between_blocks():
    """With the norm and the head, it would be of a kind of its own."""
    summary = api.summary(Adopted(models.Padded), Parallel("dp1"))
    assert summary["blocks"] == "Padded.blocks: 4 mlpblock"


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
    return functools.reduce(
        jax.random.fold_in, (owner, *places), jax.random.fold_in(jax.random.key(0), 0)
    )


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
    model = task.make_model(nnx.Rngs(0))
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
        sums = jax.lax.map(lambda own: of_row(params, *own), (batch, rows))
        return jnp.sum(sums.loss) / jnp.sum(sums.weight)

    value, grads = jax.jit(jax.value_and_grad(mean))(params)
    return float(value), named(grads), named(params)


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize(("task", "mesh"), table(DRAWING, ["after an nnx.RNN"]))
def test_what_a_model_draws_is_that_of_plain_flax_row_by_row(task, mesh):
    assert_as_plain(task, MESHES[mesh], row_by_row(task))


@pytest.mark.rows(2, "full")
@pytest.mark.parametrize("name", DRAWING)
def test_evaluation_draws_nothing(name):
    task, _ = DRAWING[name]
    state, batch = init_state(task, Parallel("dp8")), batch_of(task)
    model = task.make_model(nnx.Rngs(0))
    in_training = task.loss(model, batch).loss
    model.eval()
    loss, weight, _ = task.loss(model, batch)
    sums, _ = api.evaluation(task, Parallel("dp8"), state, batch)
    assert sums["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert sums["weight"] == weight
    assert in_training != pytest.approx(float(loss), rel=1e-3)
