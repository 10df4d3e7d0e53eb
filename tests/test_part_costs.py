"""What each part of a model costs, and which stage has it: counted in the model itself."""

import dataclasses

import jax
import pytest
from flax import nnx
from lib import api
from lib.models import FEATURES, WIDTH, Regress, Regression

STEPS = Regress().batch_size * Regress().seq_len
END = 2 * STEPS * FEATURES * WIDTH  # FLOPs of the product before the layers, and of that after them


def test_costs_are_those_of_each_part_and_pass():
    costs = api.part_costs(Regress())
    # Nobody asks for the gradient of the inputs.
    assert (costs["first"], costs["last"]) == ([(END, END)], [(END, 2 * END)])
    gru, other_gru, dense, _ = costs["layers"]
    assert gru == other_gru
    assert gru[1] == 2 * gru[0] > dense[1] == 2 * dense[0] > 0


@pytest.mark.parametrize(
    ("frozen", "part"),
    [
        ("inputs", "first"),
        ("outputs", "last"),
        pytest.param("gru", "layers", marks=pytest.mark.more),
    ],
)
def test_what_is_frozen_costs_no_gradient_of_its_weights(frozen, part):
    costs, plain = (api.part_costs(Regress(freeze=freeze)) for freeze in (frozen, None))
    saved = {"first": END, "last": END, "layers": plain["layers"][0][0]}[part]
    forward, backward = plain[part][0]
    assert costs[part][0] == (forward, backward - saved)
    others = plain.keys() - {part}
    assert {name: costs[name] for name in others} == {name: plain[name] for name in others}


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
    costs = api.part_costs(Stemmed())
    assert sum(costs["first"][0]) > sum(costs["layers"][0])
    plain = Regress(kinds=("gru",) * 6)
    placed = [api.summary(task, "pp2")["layers"] for task in (Stemmed(), plain)]
    expected = ["6 (first | 0-5, last)", "6 (first, 0-2 | 3-5, last)"]
    assert [text.partition(";")[0] for text in placed] == expected
