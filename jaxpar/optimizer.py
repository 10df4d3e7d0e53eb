"""From gradients to new parameters: by optax, on the devices or on the host.

With `update="host"` devices hold parameters and gradients alone (ZeRO-Offload, arXiv:2101.06840):

    gradients, parameters (device, split over `data`)  -->  update on the CPU  -->  parameters (device)
                                                             |           ^
                                                             +-- state --+  (in `pinned_host` memory)

Every host updates the shards of its own devices. Arrays move between memories outside of compiled
programs: inside of one, JAX 0.10.1 cannot place them in host memory on CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxpar.config import TrainConfig

HOST_MEMORY = "pinned_host"


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer of the config with its learning-rate schedule; gradients are clipped before it."""
    rate = learning_rate(config)
    return {
        "adam": lambda: optax.adam(rate),
        "adamw": lambda: optax.adamw(rate, weight_decay=config.weight_decay),
        "sgd": lambda: optax.sgd(rate, momentum=config.momentum or None),
        "rmsprop": lambda: optax.rmsprop(rate),
    }[config.optimizer]()


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Step -> learning rate."""
    peak, falls_at = config.learning_rate, config.warmup_steps + config.hold_steps
    steps = max(config.num_steps - falls_at, 1)
    falling = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, steps),
        "cosine": optax.cosine_decay_schedule(peak, steps),
        "exponential": optax.exponential_decay(
            peak, config.lr_decay_every, config.lr_decay, staircase=True
        ),
    }[config.lr_schedule]
    warmup = optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, config.warmup_steps)
    held = optax.constant_schedule(peak)
    return optax.join_schedules([warmup, held, falling], [config.warmup_steps, falls_at])


def clip(grads: Any, config: TrainConfig) -> Any:
    """Gradients whose global norm is `clip_norm` at most."""
    if config.clip_norm == 0:
        return grads
    return optax.clip_by_global_norm(config.clip_norm).update(grads, optax.EmptyState())[0]


def update(
    optimizer: optax.GradientTransformation,
    params: Any,
    grads: Any,
    opt_state: optax.OptState,
    applies: jax.Array,
) -> tuple[Any, optax.OptState]:
    """Parameters and state after a step; as they were if `applies`, a truth value, is false."""

    def run(params, grads, opt_state):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def keep(params, grads, opt_state):
        return params, opt_state

    # A choice between old and new arrays would hold both of them.
    return lax.cond(applies, run, keep, params, grads, opt_state)


class HostOptimizer:
    """An optimizer whose state lies, and whose updates run, in host memory.

    Args:
      optimizer: treats each number by itself, as all of `make_optimizer` do.
    Raises:
      ValueError: JAX was told to use no CPU.
    """

    def __init__(self, optimizer: optax.GradientTransformation):
        try:
            self._cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise ValueError(
                f"update='host' runs on the CPU, of which JAX has none ({error}); add it, such as "
                f"JAX_PLATFORMS=cuda,cpu, or use update='sharded'"
            ) from error
        self._init = jax.jit(optimizer.init)
        self._update = jax.jit(
            lambda *trees: update(optimizer, *trees),
            donate_argnums=(0, 2),
        )

    def init(self, params: Any, target: optax.OptState) -> optax.OptState:
        """The state before the first step.

        Args:
          params: arrays on devices, laid out as the state is to be.
          target: the state's shapes and shardings.
        """
        return self._run(self._init, (params,), target)

    def update(
        self, params: Any, grads: Any, opt_state: optax.OptState, applies: jax.Array
    ) -> tuple[Any, optax.OptState]:
        """Parameters, on devices, and state, on the host, after a step; those passed in are consumed.

        Args:
          params, grads: arrays on devices, laid out as the state is.
          applies: on every device; if false, nothing changes.
        """
        return self._run(self._update, (params, grads, opt_state, applies), (params, opt_state))

    def _run(self, function: Callable[..., Any], trees: Any, targets: Any) -> Any:
        """Applies a function to what each device has of the trees; targets say where results go."""
        leaves, structure = jax.tree.flatten(trees)
        wanted, structure_of_results = jax.tree.flatten(targets)
        shards = [
            {shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves
        ]
        results: list[list[jax.Array]] = [[] for _ in wanted]
        for device in shards[0]:
            own = jax.device_put([on[device] for on in shards], self._cpu, may_alias=False)
            done = jax.tree.leaves(function(*jax.tree.unflatten(structure, own)))
            places = [
                SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind)
                for leaf in wanted
            ]
            for parts, part in zip(results, jax.device_put(done, places), strict=True):
                parts.append(part)
        arrays = [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
            for leaf, parts in zip(wanted, results, strict=True)
        ]
        return jax.tree.unflatten(structure_of_results, arrays)
