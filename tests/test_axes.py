"""Axes of one's own: collectives within layers, rows and time that they split, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from models import FEATURES, MAKERS, WIDTH, Regress
from test_any_model import assert_same
from test_equivalence import full

import jaxpar
from jaxpar import At, MeshConfig, Parallel, PipelineConfig, Stack, Sums, nn


class Attention(nnx.Module):
    """Causal attention of each device's part of time to all keys and values."""

    whole_window = True

    def __init__(self, *, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, carry, x_TBW, at: At):
        q, *kv = jnp.split(self.qkv(nn.dropout(x_TBW, 0.2, at)), 3, -1)
        k, v = (lax.all_gather(a, "context", tiled=True) for a in kv)
        seen = at.time + jnp.arange(len(q))[:, None] >= jnp.arange(len(k))[None]
        scores = jnp.einsum("tbw,sbw->tsb", q, k) * WIDTH**-0.5
        weights = jax.nn.softmax(jnp.where(seen[..., None], scores, -1e9), 1)
        return carry, x_TBW + jnp.einsum("tsb,sbw->tbw", weights, v)


class Experts(nnx.Module):
    """Each row goes to one of four experts by all_to_all, and comes back; the balance of use is a loss."""

    num_experts = 4

    def __init__(self, *, rngs):
        self.router = nnx.Linear(WIDTH, self.num_experts, use_bias=False, rngs=rngs)
        kernel = jax.random.normal(rngs.params(), (self.num_experts, WIDTH, WIDTH)) / 4
        self.kernel = nn.named_param(kernel, ("experts", None, None))

    def __call__(self, carry, x_TBW, at: At):
        scores_TBE = jax.nn.softmax(self.router(x_TBW))
        chosen_TBE = jax.nn.one_hot(scores_TBE.argmax(-1), self.num_experts)
        sent_ETBW = jnp.einsum("tbe,tbw->etbw", chosen_TBE, x_TBW)
        # From [all experts, own rows] to [own experts, all rows].
        here = lax.all_to_all(sent_ETBW, "expert", 0, 2, tiled=True)
        made = jnp.tanh(jnp.einsum("etbw,ewv->etbv", here, self.kernel[...]))
        back_ETBW = lax.all_to_all(made, "expert", 2, 0, tiled=True)
        y = x_TBW + jnp.einsum("etbw,tbe->tbw", back_ETBW, chosen_TBE * scores_TBE)
        penalty = 0.1 * jnp.sum(jnp.square(scores_TBE))
        return carry, y, Sums(penalty, jnp.float32(0), {"penalty": penalty})


LAYERS = {
    **MAKERS,
    "attention": lambda rngs: Attention(rngs=rngs),
    "experts": lambda rngs: Experts(rngs=rngs),
}


class Parted(nnx.Module):
    def __init__(self, kinds, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, use_bias=False, rngs=rngs)
        self.layers = Stack([LAYERS[kind] for kind in kinds], rngs=rngs)

    def first(self, batch, at: At):
        return jnp.tanh(self.inputs(batch["x"]))

    def last(self, y, batch, at: At):
        error = self.outputs(nn.dropout(y, 0.1, at)) - batch["y"]
        weight = batch["weight"]
        return Sums(jnp.sum(jnp.square(error) * weight[..., None]), jnp.sum(weight), {})

    def predict(self, y, batch, at: At):
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
    axes = ("expert",)

    @property
    def rules(self):
        return jaxpar.RULES.replace({"batch": ("data", "expert"), "experts": "expert"})


def laid_out(mesh, **pipeline):
    config = MeshConfig.parse(mesh)
    config = dataclasses.replace(config, devices=tuple(range(config.num_devices)))
    return Parallel(config, PipelineConfig(**pipeline))


@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ("dp1", {}),
        ("dp2context2", {}),
        ("pp2context2", {"num_microbatches": 2}),
        full("dp2pp2context2", {"num_microbatches": 2, "remat": True}),
        full("pp2context2tp2", {"schedule": "interleaved", "num_groups": 2}),
        full("context8", {"num_microbatches": 2}),
    ],
)
def test_time_in_parts_equals_the_plain_model(mesh, pipeline):
    assert_same(Context(), laid_out(mesh, **pipeline))


@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        full("dp1", {}),
        ("expert4", {}),
        ("dp2pp2expert2", {"num_microbatches": 2, "num_chunks": 2}),
        full("pp4expert2", {"num_microbatches": 2, "num_chunks": 4, "schedule": "gpipe"}),
        full("pp2expert2tp2", {"num_chunks": 2, "schedule": "v"}),
        full("dp2expert2", {"num_microbatches": 2}),
    ],
)
def test_experts_over_an_axis_equal_the_plain_model(mesh, pipeline):
    assert_same(Mixture(), laid_out(mesh, **pipeline))
