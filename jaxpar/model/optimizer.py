"""The optimizer that a task's `OptimizerConfig` describes, and its learning rate, as optax has them."""

import jax
import jax.numpy as jnp
import optax

from jaxpar.base.checks import require
from jaxpar.base.trees import in_float32
from jaxpar.base.types import OptState, Params
from jaxpar.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """The optimizer for a run of `num_steps` steps. Its state is float32.

    So it is for parameters of fewer digits as well. Complex parameters follow the slope of the loss.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    rate = learning_rate(config, num_steps)
    made = {
        "adam": lambda: optax.adam(rate),
        "adamw": lambda: optax.adamw(rate, weight_decay=config.weight_decay),
        "sgd": lambda: optax.sgd(rate, momentum=config.momentum or None),
        "rmsprop": lambda: optax.rmsprop(rate),
    }[config.name]()
    if config.name == "sgd" and config.weight_decay:
        made = optax.chain(optax.add_decayed_weights(config.weight_decay), made)
    return _precise(made)


def _precise(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with float32 state and updates at least: in bfloat16 a mean stops far from its value.

    It receives the conjugates of complex gradients. JAX's own are the slope along the real axis, and minus
    the slope along the imaginary axis.
    """

    def init(params: Params) -> optax.OptState:
        return optimizer.init(in_float32(params))

    def update(updates: Params, state: OptState, params: Params = None) -> tuple[Params, OptState]:
        updates = jax.tree.map(_along_slope, in_float32(updates))
        return optimizer.update(updates, state, in_float32(params))

    return optax.GradientTransformation(init, update)


def _along_slope(grad: jax.Array) -> jax.Array:
    return jnp.conj(grad) if jnp.iscomplexobj(grad) else grad


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Step -> learning rate, in a run of `num_steps` steps.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    peak, warm = config.learning_rate, config.warmup_steps
    if warm is None:
        warm = 20 if num_steps >= 20 else num_steps // 10
    falls_at = warm + config.hold_steps
    require(
        warm <= num_steps,
        f"warmup_steps={warm} is more than num_steps={num_steps}.\n"
        f"Fix: use warmup_steps={num_steps // 10}, or more steps.",
    )
    steps = max(num_steps - falls_at, 1)
    falling = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, steps),
        "cosine": optax.cosine_decay_schedule(peak, steps),
        "exponential": optax.exponential_decay(
            peak, config.lr_decay_every, config.lr_decay, staircase=True
        ),
    }[config.lr_schedule]
    warmup = optax.linear_schedule(peak / max(warm, 1), peak, warm)
    held = optax.constant_schedule(peak)
    return optax.join_schedules([warmup, held, falling], [warm, falls_at])
