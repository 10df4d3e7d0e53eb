"""A Flax model as people write one, and its task: for tests of what adopts it, also from the command line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import ArrayBatches, OptimizerConfig, Task

VOCAB, WIDTH, TIME, ROWS, DEPTH = 16, 8, 4, 8, 4
RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, VOCAB, (5 * ROWS, TIME + 1)).astype(np.int32)
ARRAYS = {"x": WORDS[:, :-1], "y": WORDS[:, 1:]}
PLACES = {
    "train": slice(0, 3 * ROWS),
    "valid": slice(3 * ROWS, 4 * ROWS),
    "test": slice(4 * ROWS, None),
}


class Block(nnx.Module):
    def __init__(self, rngs, rate):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.List([nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)])
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.mlp[1](nnx.gelu(self.mlp[0](self.norm(x)))))


class GPT(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.scale = jnp.full((WIDTH,), 0.5)  # no parameter
        self.make_blocks(rngs, rate)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def make_blocks(self, rngs, rate):
        self.blocks = nnx.List([Block(rngs, rate) for _ in range(DEPTH)])

    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens):
        return self.head(self.run_blocks(self.embed(tokens) * self.scale))


class Stacked(GPT):
    """One module has the parameters of all blocks."""

    def make_blocks(self, rngs, rate):
        make = nnx.vmap(lambda rngs: Block(rngs, rate), in_axes=0)
        self.blocks = nnx.split_rngs(splits=DEPTH)(make)(rngs)

    def run_blocks(self, x):
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.blocks
        )


MODELS = {"list": GPT, "stacked": Stacked}


def is_of(begin):
    """A filter of parameters by how their paths begin."""
    return lambda path, _: ".".join(map(str, path)).startswith(begin)


@dataclasses.dataclass(frozen=True)
class Words(Task):
    """Says the next word.

    Attributes:
      model: "list" or "stacked".
      rate: of dropout.
      freeze: the beginning of the paths of parameters that are not trained, such as "blocks.1."; none if "".
    """

    model: str = "list"
    rate: float = 0.0
    freeze: str = ""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=0.01, warmup_steps=0)
    layers = "blocks"
    unit = "words"

    @property
    def frozen(self):
        return is_of(self.freeze) if self.freeze else False

    def make_model(self, rngs):
        return MODELS[self.model](rngs, self.rate)

    def loss(self, model, batch):
        nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return jaxpar.mean(nll, jnp.broadcast_to(batch["weight"][:, None], nll.shape))

    def make_batches(self, split, seed=None):
        return ArrayBatches({name: a[PLACES[split]] for name, a in ARRAYS.items()}, ROWS, seed)


@dataclasses.dataclass(frozen=True)
class InGroups(Words):
    """Parameters are trained by their paths."""

    def make_optimizer(self, num_steps):
        return in_groups()


def in_groups():
    def labels(params):
        def label(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return "slow" if name.startswith(("embed", "blocks.1.", "blocks.2.norm")) else "fast"

        return jax.tree.map_with_path(label, params)

    slow = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3))
    return optax.multi_transform({"slow": slow, "fast": optax.sgd(0.1, momentum=0.9)}, labels)


def plain(name="list", seed=0, rate=0.0):
    """The model as Flax makes it."""
    return MODELS[name](nnx.Rngs(seed), rate)


def arrays_of(model):
    """Its parameters by their names."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}
