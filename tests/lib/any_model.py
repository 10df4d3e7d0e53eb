"""A step of any model in the layer form, on a mesh and plainly."""

import dataclasses

from flax import nnx

from jaxpar import init_state, value_and_grad
from lib import api
from lib.exchanges import pairs_without_order
from lib.law import plain
from lib.law.check import assert_near
from lib.models import Regress


def batch_of(task):
    return task.make_batches("train", 0).batch(1)


class Ends:
    """What a model has around its layers.

    Attributes:
      trained: the names of what is trained.
    """

    def __init__(self, task):
        self.model = task.make_model(nnx.Rngs(0))
        names = plain.trained_of(self.model, task.frozen)
        self.trained = {name for name in names if not name.startswith("layers.")}

    def layers(self):
        """(layer, whether it reads the whole window) of each."""
        stack = self.model.layers
        return [(stack.layer(number), True) for number in range(len(stack))]

    def first(self, arrays, batch, at):
        """What goes into the first layer."""
        return plain.with_arrays(self.model, arrays).first(batch, at)

    def last(self, arrays, y, batch, at):
        """Sums of the loss."""
        return plain.with_arrays(self.model, arrays).last(y, batch, at)


def assert_same(task, parallel, error=1e-5):
    """Of a step: loss, metrics, gradients, and what layers carry on."""
    batch = batch_of(task)
    found = api.gradients(task, parallel, batch)
    model = plain.LayerForm(task, Ends(task))
    (loss, (metrics, carry)), grads = model.run(
        *model.split(found.weights), batch, model.start(), plain.step_key(0)
    )
    assert_near({"loss": found.loss}, {"loss": loss}, error)
    assert_near(found.metrics, metrics, error)
    assert_near({name: found.grads[name] for name in grads}, grads, error)
    assert_near(found.carry, plain.carry_by_layer(carry), error)
    if parallel.mesh.stage > 1 or not parallel.has_equal_shares:
        step = value_and_grad(task, parallel)
        program = step.lower(init_state(task, parallel), batch).compile()
        assert pairs_without_order(program.as_text()) == []


@dataclasses.dataclass(frozen=True)
class Calm(Regress):
    """Its inputs saturate no gate: the slope of one that is would be a difference of rounded numbers."""

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        batches.arrays |= {"x": batches.arrays["x"] / 10}
        return batches
