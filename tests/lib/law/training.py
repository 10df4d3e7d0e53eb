"""How tasks of the law are trained: an optimizer by its name, and the same in optax."""

import dataclasses
import functools

import optax
from flax import nnx

from jaxpar import OptimizerConfig, Task
from lib.optimizers import OPTIMIZERS

# Names of configs of jaxpar; what they mean stands in PLAIN_OPTIMIZERS.
CONFIGS = {
    "sgd of a config": OptimizerConfig("sgd", 0.05, warmup_steps=0, lr_schedule="constant"),
    "momentum of a config": OptimizerConfig(
        "sgd", 0.05, warmup_steps=0, lr_schedule="constant", momentum=0.9, weight_decay=0.1
    ),
}
# Those that differ in what they read of an array.
OWN = (
    "decay", "schedule", "fan-in", "mask by size", "iota", "flip", "first number",
    "root mean square", "global norm",
)  # fmt: skip


def smaller(name):
    """A tenth of the steps: after large ones, the second step would magnify roundings of the first."""
    return optax.chain(OPTIMIZERS[name](), optax.scale(0.1))


PLAIN_OPTIMIZERS = {
    "sgd of a config": lambda: optax.sgd(0.05),
    "momentum of a config": lambda: optax.chain(
        optax.add_decayed_weights(0.1), optax.sgd(0.05, momentum=0.9)
    ),
    **{name: functools.partial(smaller, name) for name in OWN},
}


def config_of(name):
    """What a task has as its `optimizer`, which is read where it is one of jaxpar."""
    return CONFIGS.get(name, CONFIGS["sgd of a config"])


class ByName:
    """A task with the name of its optimizer, and of what is frozen."""

    @property
    def frozen(self):
        return nnx.PathContains(self.frozen_name) if self.frozen_name else nnx.Nothing()

    def make_optimizer(self, num_steps):
        if self.optimizer_name in CONFIGS:
            return super().make_optimizer(num_steps)
        return PLAIN_OPTIMIZERS[self.optimizer_name]()


@dataclasses.dataclass(frozen=True)
class Trained(ByName, Task):
    """What tasks of the layer form and of Flax have.

    Attributes:
      optimizer_name: of `PLAIN_OPTIMIZERS`.
      frozen_name: of what is not trained; "" trains all.
    """

    optimizer_name: str = "sgd of a config"
    frozen_name: str = ""

    @property
    def optimizer(self):
        return config_of(self.optimizer_name)
