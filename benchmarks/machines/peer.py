"""A Flax transformer, as a task of jaxpar's and as a step by jax.jit and NamedSharding alone."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Task
from jaxpar.mesh import described_devices

UNITS_OF_A_HEAD = 128
DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batches.

    Attributes:
      layers, width, words: of the model.
      rows, steps: of a batch.
      attention: "xla", "cudnn", or "pallas".
    """

    layers: int
    width: int
    words: int
    rows: int
    steps: int
    attention: str = "xla"


def attend(q: jax.Array, k: jax.Array, v: jax.Array, how: str) -> jax.Array:
    """Causal attention of [rows, time, heads, units]."""
    if how != "pallas":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    by_head = (a.swapaxes(1, 2) for a in (q, k, v))
    return flash_attention(*by_head, causal=True, sm_scale=q.shape[-1] ** -0.5).swapaxes(1, 2)


class Block(nnx.Module):
    """Causal attention and a perceptron, each added to what it is given."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        width, heads = sizes.width, (sizes.width // UNITS_OF_A_HEAD, UNITS_OF_A_HEAD)
        options: Any = {"rngs": rngs, "dtype": DTYPE}
        self.norms = nnx.List([nnx.LayerNorm(width, **options) for _ in range(2)])
        self.query, self.key, self.value = (
            nnx.LinearGeneral(width, heads, use_bias=False, **options) for _ in range(3)
        )
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), use_bias=False, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)
        self.how = sizes.attention

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next x."""
        y = self.norms[0](x)
        x = x + self.out(attend(self.query(y), self.key(y), self.value(y), self.how))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """Words and their places in, blocks, logits out."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        options: Any = {"rngs": rngs, "dtype": DTYPE}
        # In float32, so that the gradients of a frequent word add up.
        self.embed = nnx.Embed(sizes.words, sizes.width, rngs=rngs)
        self.places = nnx.Embed(sizes.steps, sizes.width, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(sizes.width, **options)
        self.head = nnx.Linear(sizes.width, sizes.words, use_bias=False, **options)

    def __call__(self, words: jax.Array) -> jax.Array:
        """Logits of the next word."""
        x = (self.embed(words) + self.places(jnp.arange(words.shape[1]))[None]).astype(DTYPE)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def losses(model: GPT, given: jax.Array, wanted: jax.Array) -> jax.Array:
    """Of each word."""
    logits = model(given).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted)


def task_of(sizes: Sizes, rules: Mapping[str, Any] | None = None) -> Task:
    """The transformer as jaxpar trains it."""
    words = np.zeros((20 * sizes.rows, sizes.steps), np.int32)

    def loss(model: GPT, batch: Any) -> Any:
        return jaxpar.mean(losses(model, batch["x"], batch["y"]), batch["weight"])

    return jaxpar.adopt(
        functools.partial(GPT, sizes), loss, "blocks", batches={"x": words, "y": words},
        batch_size=sizes.rows, rules=rules or {}, optimizer=jaxpar.OptimizerConfig("adam", 1e-3),
    )  # fmt: skip


def lower(sizes: Sizes, machine: str) -> tuple[jax.stages.Lowered, Mesh]:
    """A step of plain JAX with fully sharded parameters, and its mesh.

    Each array of parameters and of the optimizer is split along its first dim that the devices divide.
    The batch is split by rows. What is gathered when, and what is kept, is up to XLA.
    """
    devices = described_devices(machine)
    mesh = Mesh(np.asarray(devices), ("data",))
    optimizer = optax.adam(1e-3)
    graph, params, others = nnx.split(
        nnx.eval_shape(lambda: GPT(sizes, nnx.Rngs(0))), nnx.Param, ...
    )

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dims = [n for n, size in enumerate(leaf.shape) if size % mesh.size == 0]
        spec = P(*[None] * dims[0], "data") if dims else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def step(params: Any, state: Any, words: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return losses(nnx.merge(graph, params, others), words, words).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state = (
        jax.tree.map(place, a) for a in (params, jax.eval_shape(optimizer.init, params))
    )
    words = jax.ShapeDtypeStruct(
        (sizes.rows, sizes.steps), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    where = jax.tree.map(lambda a: a.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*where, NamedSharding(mesh, P())))
    return jitted.lower(params, state, words), mesh
