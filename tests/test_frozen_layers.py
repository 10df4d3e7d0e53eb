"""Layers of `jaxpar.nn`, alone and in each other, trained and frozen, are differentiated on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib.any_model import assert_same
from lib.laws import more, on_devices
from lib.models import SGD

import jaxpar
from jaxpar import Parallel, PipelineConfig, Stack, Sums, nn
from jaxpar.step.setup import Setup
from jaxpar.step.state import abstract_state
from jaxpar.step.step import abstract_batch, make_loss_and_grad

WIDTH, ROWS, STEPS = 8, 8, 4

RECURRENT = {
    "lstm": lambda rngs: nn.LSTM(WIDTH, dropout=0.2, rngs=rngs),
    "learned": lambda rngs: nn.LSTM(WIDTH, learn_initial=True, rngs=rngs),
    "heads": lambda rngs: nn.LSTM(WIDTH, num_heads=2, rngs=rngs),
    "gru": lambda rngs: nn.GRU(WIDTH, rngs=rngs),
    "slstm": lambda rngs: nn.SLSTM(WIDTH, num_heads=2, rngs=rngs),
    "mlstm": lambda rngs: nn.MLSTM(WIDTH, num_heads=2, rngs=rngs),
    "delta": lambda rngs: nn.GatedDeltaNet(WIDTH, num_heads=2, rngs=rngs),
    "mingru": lambda rngs: nn.MinGRU(WIDTH, rngs=rngs),
    "rglru": lambda rngs: nn.RGLRU(WIDTH, rngs=rngs),
}
OTHERS = {
    "cell": lambda rngs: nn.Recurrent(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)),
    "linear": lambda rngs: nn.Stateless(nn.Linear(WIDTH, WIDTH, dims=(None, "hidden"), rngs=rngs)),
    "conv": lambda rngs: nn.Stateless(
        nn.Conv(WIDTH, WIDTH, (3,), dims=(None, None, "hidden"), rngs=rngs)
    ),
}
MAKERS = {
    **RECURRENT,
    **OTHERS,
    **{
        f"{name} both ways": lambda rngs, make=make: nn.Bidirectional(make(rngs), make(rngs))
        for name, make in (RECURRENT | {"cell": OTHERS["cell"]}).items()
    },
    **{
        f"{name} in a block": lambda rngs, make=make: nn.GatedBlock(make(rngs), rngs=rngs)
        for name, make in RECURRENT.items()
    },
}


class Model(nnx.Module):
    def __init__(self, makers, rngs):
        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = Stack(makers, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        return Sums(jnp.sum(y**2 * batch["weight"][..., None]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Layers(jaxpar.Task):
    """
    Attributes:
      how: whether all layers are "trained" or "frozen", or "some" are, the first ones.
    """

    names: tuple[str, ...] = ("lstm", "lstm")
    how: str = "frozen"
    batch_size: int = ROWS
    optimizer = SGD

    @property
    def frozen(self):
        filters = {
            "frozen": nnx.PathContains("layers"),
            "some": nnx.PathContains("kind0"),
            "trained": nnx.Nothing(),
        }
        return filters[self.how]

    def make_model(self, rngs):
        def named(number, name):
            def make(rngs):
                layer = MAKERS[name](rngs)
                getattr(layer, "layer", layer).kind_name = f"kind{number}"  # a block has its name
                return layer

            return make

        return Model([named(*each) for each in enumerate(self.names)], rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).normal(size=(200, WIDTH)).astype(np.float32)
        resets = np.arange(200) % 7 == 0
        return jaxpar.SeriesBatches(
            {"x": x, "resets": resets.astype(np.int32)}, self.batch_size, STEPS, seed
        )


DP, PP, ALL = (2, 1, 1), (1, 2, 1), (2, 2, 2)
ALONE = (*RECURRENT, *OTHERS)
BOTH_WAYS, IN_BLOCKS = (
    tuple(name for name in MAKERS if name.endswith(how)) for how in ("both ways", "in a block")
)


@pytest.mark.parametrize(
    ("names", "mesh", "how"),
    [
        (("lstm", "slstm", "mlstm", "rglru", "linear", "lstm both ways"), DP, "frozen"),
        *(
            more(names, mesh, how)
            for names in (ALONE, BOTH_WAYS, IN_BLOCKS)
            for mesh in (DP, PP, ALL)
            for how in ("frozen", "trained")
        ),
    ],
)
def test_all_layers_are_differentiated(names, mesh, how):
    """What types their gradients have shows where they are traced."""
    setup = Setup.of(Layers(names + names[: len(names) % 2], how), Parallel(on_devices(mesh)))
    state = abstract_state(setup)
    _, grads = jax.eval_shape(make_loss_and_grad(setup), state, abstract_batch(setup))
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, state.params)
    assert (len(jax.tree.leaves(grads)) == 2) == (how == "frozen")


@pytest.mark.parametrize("mesh", [DP, more(PP), more(ALL)])
def test_layers_are_frozen_below_others(mesh):
    units = PipelineConfig(num_microbatches=2)
    assert_same(Layers(("lstm both ways", "gru"), "some"), Parallel(on_devices(mesh), units))
