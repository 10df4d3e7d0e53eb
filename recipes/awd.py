"""AWD-LSTM (Merity et al. 2017, arXiv:1708.02182): what the paper adds to a language model.

python -m jaxpar train recipes/awd.py:AWD --corpus ptb
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import lm

# ---- options ----


@dataclasses.dataclass(frozen=True)
class AWD(lm.LM):
    """The language model, its regularization, and averaged SGD.

    Attributes:
      average_after: n: when a validation loss is above the lowest of all but the last n before it, parameters
        begin to be averaged over the steps that follow, and their mean is what is evaluated (NT-ASGD).
    """

    average_after: int = dataclasses.field(default=5, metadata={"free": True})

    def __post_init__(self):
        super().__post_init__()
        if self.average_after < 1:
            raise ValueError(
                f"average_after={self.average_after}: must be 1 or more; a large number never averages"
            )

    def make_optimizer(self, num_steps: int) -> optax.GradientTransformation:
        """With room for the mean of the parameters."""
        return averaging(super().make_optimizer(num_steps))

    def after_validation(self, opt_state: "Averaged", losses: Mapping[int, float]) -> "Averaged":
        """The mean begins here, if it has not begun and validation has become worse."""
        if int(opt_state.steps) >= 0 or not is_worse(losses, self.average_after):
            return opt_state
        return begin_average(opt_state)

    def evaluated_params(self, params: Any, opt_state: "Averaged") -> Any:
        """The mean, if it has begun."""
        return mean_with(params, opt_state)


# ---- averaged SGD with its trigger ----


class Averaged(NamedTuple):
    """The state of an optimizer, and the mean of the parameters after its steps but for the last one.

    Attributes:
      steps: since the mean has begun; -1: it has not. int32.
      mean: as the parameters.
      inner: the optimizer's own.
    """

    steps: jax.Array
    mean: Any
    inner: optax.OptState


def averaging(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with a mean of the parameters in its state.

    An optimizer sees the parameters before a step, which are those after the last one: the newest are
    missing, and `mean_with` adds them where the mean is used.
    """

    def init(params: Any) -> Averaged:
        return Averaged(jnp.int32(-1), jax.tree.map(jnp.copy, params), optimizer.init(params))

    def update(updates: Any, state: Averaged, params: Any = None) -> tuple[Any, Averaged]:
        updates, inner = optimizer.update(updates, state.inner, params)
        steps = jnp.where(state.steps < 0, -1, state.steps + 1)
        return updates, Averaged(steps, mean_with(params, state), inner)

    return optimizer._replace(init=init, update=update)


def begin_average(state: Averaged) -> Averaged:
    """The state, its mean now one of the parameters after the steps to come."""
    return state._replace(steps=jax.device_put(np.int32(0), state.steps.sharding))


def mean_with(params: Any, state: Averaged) -> Any:
    """The mean of the parameters after all steps since it began; until then the parameters themselves."""

    def mean_of(mean, new):
        count = state.steps.astype(mean.dtype)
        return jnp.where(state.steps <= 1, new, mean + (new - mean) / count)

    return jax.tree.map(mean_of, state.mean, params)


def is_worse(losses: Mapping[int, float], patience: int) -> bool:
    """Whether the last of some losses is above the lowest of all but the `patience` before it.

    Args:
      losses: by step.
    """
    *before, last = (losses[step] for step in sorted(losses))
    return any(last > loss for loss in before[: max(len(before) - patience, 0)])
