"""Layers and models with which the laws differ most: axes of their own, rows together, widths that change."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar import LayerContext, Stack, Sums, nn
from jaxpar.nn import dropout, named_param
from lib.models import FEATURES, MAKERS, WIDTH, draw


class Attention(nnx.Module):
    """Causal attention of each device's part of time to all keys and values."""

    whole_window = True

    def __init__(self, *, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, carry, x_TBW, at: LayerContext):
        q, *kv = jnp.split(self.qkv(nn.dropout(x_TBW, 0.2, at)), 3, -1)
        k, v = (lax.all_gather(a, "context", tiled=True) for a in kv)
        seen = at.time + jnp.arange(len(q))[:, None] >= jnp.arange(len(k))[None]
        scores = jnp.einsum("tbw,sbw->tsb", q, k) * WIDTH**-0.5
        weights = jax.nn.softmax(jnp.where(seen[..., None], scores, -1e9), 1)
        return carry, x_TBW + jnp.einsum("tsb,sbw->tbw", weights, v)


class Experts(nnx.Module):
    """Each step of a row goes to one of four experts by all_to_all, and comes back; scores have a penalty.

    Its place says to which, for the largest of some scores may be another one after a rounding.
    """

    num_experts = 4

    def __init__(self, *, rngs):
        self.router = nnx.Linear(WIDTH, self.num_experts, use_bias=False, rngs=rngs)
        kernel = jax.random.normal(rngs.params(), (self.num_experts, WIDTH, WIDTH)) / 4
        self.kernel = nn.named_param(kernel, ("experts", None, None))

    def __call__(self, carry, x_TBW, at: LayerContext):
        scores_TBE = jax.nn.softmax(self.router(x_TBW))
        times, rows = (jnp.arange(size) for size in x_TBW.shape[:2])
        places_TB = (at.time + times)[:, None] + (at.row + rows)[None]
        chosen_TBE = jax.nn.one_hot(places_TB % self.num_experts, self.num_experts)
        sent_ETBW = jnp.einsum("tbe,tbw->etbw", chosen_TBE, x_TBW)
        # From [all experts, own rows] to [own experts, all rows].
        here = lax.all_to_all(sent_ETBW, "expert", 0, 2, tiled=True)
        made = jnp.tanh(jnp.einsum("etbw,ewv->etbv", here, self.kernel[...]))
        back_ETBW = lax.all_to_all(made, "expert", 2, 0, tiled=True)
        y = x_TBW + jnp.einsum("etbw,tbe->tbw", back_ETBW, chosen_TBE * scores_TBE)
        penalty = 0.1 * jnp.sum(jnp.square(scores_TBE) * at.batch["weight"][..., None])
        return carry, y, Sums(penalty, jnp.float32(0), {"penalty": penalty})


WORDS = 64


class Around(nnx.Module):
    """What is before and after the layers: words and numbers go in; `how` says which part is what."""

    def __init__(self, how, *, rngs):
        self.how = how
        self.words = nn.Embedding(WORDS, WIDTH, rngs=rngs)
        self.marks = nnx.List([nnx.Embed(WORDS, WIDTH, rngs=rngs)])
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dims=("input", None), rngs=rngs)
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.out = nnx.Linear(WIDTH, 8 * FEATURES, rngs=rngs)

    def first(self, batch, at: LayerContext):
        ids = [(jnp.abs(batch["x"][..., n]) * 100).astype(jnp.int32) % WORDS for n in (0, 1)]
        x = dropout(self.words(ids[0]), 0.2, at, number=7) + self.marks[0](ids[1])
        if "twice" in self.how:  # the same table once more
            x = x + self.words(ids[1] - WORDS)
        if "array" in self.how:
            x = x + self.marks[0].embedding[...][ids[0]]
        if "loop" in self.how:
            x = x + jax.lax.map(self.marks[0], ids[0])
        x = x * self.scale[...][None, None] * batch["level"][:, :, None]
        return x + self.down(jnp.tanh(self.up(x))) if "deep" in self.how else x

    def foretold(self, y):
        """The features of the next step."""
        found = self.out(y * self.scale[...][None, None])
        return found.reshape(*y.shape[:2], FEATURES, -1).mean(-1)

    def last(self, y, batch, at: LayerContext):
        error = self.foretold(y) - batch["y"]
        loss = jnp.sum(jnp.square(error) * batch["weight"][..., None]) + 0.1 * jnp.sum(
            jnp.square(y)
        )
        return Sums(loss, jnp.sum(batch["weight"]), {"most": jnp.sum(jnp.abs(error))})


class Ends(Around):
    """With some layers."""

    def __init__(self, how, *, rngs):
        super().__init__(how, rngs=rngs)
        self.layers = Stack([MAKERS[kind] for kind in ("gru", "gru", "dense", "cell")], rngs=rngs)


PENALTY = 0.3


class Penalized(nnx.Module):
    """A GRU of Flax that adds a penalty on its outputs, and counts how many are above 0."""

    def __init__(self, *, rngs):
        self.cell = nnx.GRUCell(16, 16, rngs=rngs)

    def initial_carry(self, rows):
        return jnp.zeros((rows, 16))

    def __call__(self, carry, x_TBW, at: LayerContext):
        with jax.numpy_rank_promotion("allow"):
            carry, y_TBW = jax.lax.scan(self.cell, carry, x_TBW)
        weight_TB1 = at.batch["weight"][..., None]
        loss = PENALTY * jnp.sum(jnp.square(y_TBW) * weight_TB1)
        above = jnp.sum((y_TBW > 0) & (weight_TB1 > 0))
        return carry, y_TBW, Sums(loss, 0, {"penalty": loss, "above": above})


GROUP = 4


class Norm(nnx.Module):
    """By the statistics of the rows of each time step; dropped and weighted as rows are."""

    rows_together = GROUP

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))

    def __call__(self, carry, x_TBW, at):
        weight_TB1 = at.batch["weight"][..., None] + 0.1
        share_TB1 = weight_TB1 / weight_TB1.sum(1, keepdims=True)
        mean_T1W = jnp.sum(x_TBW * share_TB1, 1, keepdims=True)
        variance_T1W = jnp.sum((x_TBW - mean_T1W) ** 2 * share_TB1, 1, keepdims=True)
        y_TBW = (x_TBW - mean_T1W) * (variance_T1W + 1) ** -0.5 * self.scale[...][None, None]
        return carry, x_TBW + dropout(y_TBW, 0.2, at)


class Balanced(nnx.Module):
    """A mixture whose loss asks that its rows use both experts alike; what it carries mixes rows, too."""

    rows_together = 2 * GROUP
    carry_dims = ("batch", "hidden")

    def __init__(self, *, rngs):
        self.router = nnx.Linear(WIDTH, 2, rngs=rngs)
        self.experts = named_param(draw(rngs, WIDTH, 2, WIDTH), ("input", None, "hidden"))

    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH))

    def __call__(self, carry_BW, x_TBW, at):
        def step(carry_BW, x_BW):
            past_BE = carry_BW.mean(1, keepdims=True) * jnp.array([[1.0, -1.0]])
            chance_BE = jax.nn.softmax(x_BW @ self.router.kernel[...] + past_BE)
            made_BEW = jnp.tanh(jnp.einsum("bi,iew->bew", x_BW, self.experts[...]))
            y_BW = x_BW + jnp.einsum("be,bew->bw", chance_BE, made_BEW)
            unbalanced = jnp.sum(jnp.square(chance_BE.mean(0) - 0.5))
            return 0.5 * carry_BW + 0.1 * y_BW + y_BW.mean(0, keepdims=True), (y_BW, unbalanced)

        carry_BW, (y_TBW, unbalanced_T) = jax.lax.scan(step, carry_BW, x_TBW)
        unbalanced = jnp.sum(unbalanced_T) * self.rows_together
        return carry_BW, y_TBW, Sums(0.3 * unbalanced, 0.0, {"unbalanced": unbalanced})


class Map(nnx.Module):
    """A linear map and squares that stay small, in a dict: x of more than one array."""

    def __init__(self, inputs, width, *, rngs):
        self.map = nnx.Linear(inputs, width, use_bias=False, rngs=rngs)

    def __call__(self, carry, x, at: LayerContext):
        y = self.map(x)
        return carry, {"y": y, "square": jnp.square(jnp.tanh(y[..., :2]))}


class Join(nnx.Module):
    """Back to one array, with dropout."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, 2))

    def __call__(self, carry, x, at: LayerContext):
        both = jnp.concatenate([x["y"], x["square"] * self.scale[...][None, None]], -1)
        return carry, nn.dropout(both, 0.2, at)


def draw_complex(rngs, *shape):
    return lax.complex(draw(rngs, *shape), draw(rngs, *shape))


class LRU(nnx.Module):
    """A linear recurrence with a complex diagonal (arXiv:2303.06349); its state is complex as well."""

    carry_dims = ("batch", "hidden")

    def __init__(self, *, rngs):
        radius, phase = jnp.linspace(0.4, 0.9, WIDTH), jnp.linspace(0.1, 2, WIDTH)
        decay = lax.complex(radius * jnp.cos(phase), radius * jnp.sin(phase))
        self.decay = named_param(decay, ("hidden",))
        self.into = named_param(draw_complex(rngs, WIDTH, WIDTH), ("input", "hidden"))
        self.out = named_param(draw_complex(rngs, WIDTH, WIDTH), ("hidden", None))

    def initial_carry(self, rows):
        return jnp.full((rows, WIDTH), 0.1 + 0.2j, jnp.complex64)

    def __call__(self, carry, x_TBW, at: LayerContext):
        entering_TBW = dropout(x_TBW, 0.2, at).astype(jnp.complex64) @ self.into[...]

        def step(state_BW, entering_BW):
            state_BW = self.decay[...][None] * state_BW + entering_BW
            return state_BW, state_BW

        carry, state_TBW = lax.scan(step, carry, entering_TBW)
        return carry, x_TBW + 0.3 * jnp.tanh((state_TBW @ self.out[...]).real)


class Turn(nnx.Module):
    """Complex activations in and out."""

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(draw_complex(rngs, WIDTH, WIDTH))

    def __call__(self, carry, z_TBW, at: LayerContext):
        turned_TBW = dropout(z_TBW, 0.2, at) @ self.kernel[...]
        shrink_TBW = 1 / (1 + jnp.abs(turned_TBW))  # below 1 in size
        return carry, 0.5 * z_TBW + turned_TBW * shrink_TBW.astype(z_TBW.dtype)


class ToComplex(nnx.Module):
    """Real activations in, complex and real ones out, in a dict."""

    def __init__(self, *, rngs):
        self.angle = nnx.Param(jnp.linspace(0.0, 3.0, WIDTH))

    def __call__(self, carry, x_TBW, at: LayerContext):
        angle = self.angle[...][None, None]
        turned = lax.complex(x_TBW * jnp.cos(angle), x_TBW * jnp.sin(angle))
        return carry, {"turned": turned, "mean": x_TBW.mean(-1, keepdims=True)}


class FromComplex(nnx.Module):
    """Back to real activations."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(draw_complex(rngs, WIDTH))

    def __call__(self, carry, x, at: LayerContext):
        z_TBW = x["turned"] * self.scale[...][None, None]
        return carry, z_TBW.real + 0.5 * z_TBW.imag + x["mean"]


def times_in_backward(factor):
    """A function that returns its argument, and multiplies the gradient by a factor."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, dx: (factor * dx,))
    return identity


class ByDepth(nnx.Module):
    """Its backward pass has a factor that only a closure knows."""

    def __init__(self, factor, *, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scaled = times_in_backward(factor)

    def __call__(self, carry, x_TBW, at: LayerContext):
        return carry, x_TBW + jnp.tanh(self.up(self.scaled(x_TBW)))


@jax.custom_vjp
def clipped_in_backward(x):
    return x


def _clip_all(_, dx):
    return (dx * jnp.minimum(1.0, 1e-3 / jnp.linalg.norm(dx)),)


clipped_in_backward.defvjp(lambda x: (x, None), _clip_all)
