"""What each part of a model costs, and which stage has it: counted in the model itself."""

import dataclasses

import jax
import pytest
from flax import nnx
from lib.laws import make_settings, more
from lib.models import FEATURES, WIDTH, Regress, Regression

from jaxpar.model.facts import ModelFacts
from jaxpar.partition.partition import Partition

STEPS = Regress().batch_size * Regress().seq_len
END = 2 * STEPS * FEATURES * WIDTH  # FLOPs of the product before the layers, and of that after them


def laid_out(task, mesh, units=(1, 1), **pipeline):
    settings = make_settings(mesh, units, task, **pipeline)
    return Partition(ModelFacts.of(task), settings.parallel)


def test_costs_are_those_of_each_part_and_pass():
    costs = ModelFacts.of(Regress()).costs
    # Nobody asks for the gradient of the inputs.
    assert (costs.first, costs.last) == ((END, END), (END, 2 * END))
    gru, dense = costs.layers[0], costs.layers[2]
    assert costs.layers[:2] == (gru, gru)
    assert gru[1] == 2 * gru[0] > dense[1] == 2 * dense[0] > 0


@pytest.mark.parametrize(
    ("frozen", "part"), [("inputs", "first"), ("outputs", "last"), more("gru", "layers")]
)
def test_what_is_frozen_costs_no_gradient_of_its_weights(frozen, part):
    costs, plain = (ModelFacts.of(Regress(freeze=freeze)).costs for freeze in (frozen, None))
    saved = {"first": END, "last": END, "layers": plain.layers[0][0]}[part]
    less, more = getattr(costs, part), getattr(plain, part)
    if part == "layers":
        less, more = less[0], more[0]
    assert less == (more[0], more[1] - saved)
    assert {costs._replace(**{part: None}), plain._replace(**{part: None})} == {
        plain._replace(**{part: None})
    }


class Stem(Regression):
    """With more before the layers than in them."""

    def __init__(self, kinds, *, rngs):
        super().__init__(kinds, rngs=rngs)
        self.up = nnx.Param(nnx.Linear(FEATURES, 64 * WIDTH, rngs=rngs).kernel[...])
        self.inputs = nnx.Linear(64 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def first(self, batch, at):
        return super().first({**batch, "x": jax.nn.relu(batch["x"] @ self.up[...])}, at)


@dataclasses.dataclass(frozen=True)
class Stemmed(Regress):
    kinds: tuple[str, ...] = ("gru",) * 6

    def make_model(self, rngs):
        return Stem(self.kinds, rngs=rngs)


def test_layers_give_way_to_what_is_before_them():
    layout = laid_out(Stemmed(), (1, 2, 1))
    assert sum(layout.costs.first) > sum(layout.costs.layers[0])
    assert layout.placement[0] < 3
    assert laid_out(Regress(kinds=("gru",) * 6), (1, 2, 1)).placement == (3, 3)
