"""From gradients to new parameters: by optax, on the devices or on the host.

With `update="host"` devices hold parameters and gradients alone (ZeRO-Offload, arXiv:2101.06840):

    gradients, parameters (device, split over `data`)  -->  update on the CPU  -->  parameters (device)
                                                             |           ^
                                                             +-- state --+  (in `pinned_host` memory)

Every host updates the shards of its own devices. Arrays move between memories outside of compiled
programs: inside of one, JAX 0.10.1 cannot place them in host memory on CPU.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxpar.base.trees import in_float32
from jaxpar.base.types import Arrays, Cotangents, Function, OptState, Params, Tree

HOST_MEMORY = "pinned_host"


def global_norm(grads: Cotangents) -> jax.Array:
    """The norm of all numbers of a tree of arrays, summed in float32 at least."""
    return optax.tree.norm(in_float32(grads))


def clip_scale(norm: jax.Array, clip_norm: jax.Array | float | None) -> jax.Array | None:
    """What gradients of a global norm are multiplied by for it to be `clip_norm` at most; None for None.

    The update multiplies them where it reads them: clipped gradients as arrays would be a second copy.
    """
    if clip_norm is None:
        return None
    return jnp.where(norm < clip_norm, jnp.ones_like(norm), clip_norm / norm)


def given_loss(optimizer: optax.GradientTransformation, what: str) -> optax.GradientTransformation:
    """An optimizer whose `update` takes the loss as one more argument, for those that want it.

    Optax names the loss `value` and the gradient `grad`. Each is given to an optimizer that takes it.

    Args:
      what: it is, in messages.
    Raises:
      ValueError: by `update`, if the optimizer needs other arguments.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Params) -> OptState:  # JAX would keep the trace of the user's own function
        return inner.init(params)

    def update(
        updates: Params, state: OptState, params: Params = None, value: Any = None
    ) -> tuple[Params, OptState]:
        given = {"value": value, "grad": updates}
        while True:
            try:
                return inner.update(updates, state, params, **given)
            except (TypeError, ValueError) as error:
                not_taken = _NOT_TAKEN.search(str(error))
                if not_taken and not_taken[1] in given:  # as of contrib.sam, also within a chain
                    del given[not_taken[1]]
                    continue
                needed = _NEEDED.search(str(error))
                if needed is None:
                    raise
                raise _needs(what, needed[1] or needed[2]) from error

    return optax.GradientTransformation(init, update)


# In errors of functions that are called with other arguments than they take.
_NOT_TAKEN = re.compile(r"got an unexpected keyword argument '(\w+)'")
_NEEDED = re.compile(r"missing \d+ required keyword-only arguments?: (.*)|^(\w+) must be provided")


def _needs(what: str, name: str) -> ValueError:
    """The error for an optimizer that needs an argument which it cannot have."""
    fact = f"{what} needs {name}, but a step has only the loss (value) and its gradient (grad)."
    if name in ("'value'", "'grad'"):  # left out, for another part
        fact = f"{what} has a part that needs {name}, and one that does not take it."
    remedy = "use another optimizer, or write your own loop with value_and_grad"
    return ValueError(f"{fact}\nFix: {remedy}.")


def update(
    optimize: Function,
    params: Params,
    grads: Cotangents,
    opt_state: optax.OptState,
    applies: jax.Array,
    scale: jax.Array | None = None,
    rate: jax.Array | None = None,
    loss: jax.Array | None = None,
) -> tuple[Any, optax.OptState]:
    """Parameters and state after a step; as they were if `applies`, a truth value, is false.

    Args:
      optimize: `update` of an optimizer, as of `given_loss`.
      scale: as `clip_scale` gives it.
      rate: what the learning rate is multiplied by; None is 1.
    """

    def times(tree: Tree, factor: jax.Array | None) -> Arrays:
        if factor is None:
            return tree
        return jax.tree.map(lambda a: (a * factor).astype(a.dtype), tree)

    def run(
        params: Params, grads: Cotangents, opt_state: OptState, scale: Any, rate: Any, loss: Any
    ) -> tuple[Arrays, Arrays]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
            updates, opt_state = optimize(times(grads, scale), opt_state, params, loss)
            return optax.apply_updates(params, times(updates, rate)), opt_state

    def keep(params: Params, _: Any, opt_state: OptState, *others: Tree) -> tuple[Arrays, Arrays]:
        return params, opt_state

    # A choice between old and new arrays would hold both of them.
    return lax.cond(applies, run, keep, params, grads, opt_state, scale, rate, loss)


class HostOptimizer:
    """An optimizer whose state lies, and whose updates run, in host memory.

    Args:
      optimizer: treats each number by itself, as those of `OptimizerConfig` do.
    Raises:
      ValueError: JAX was told to use no CPU.
    """

    def __init__(self, optimizer: optax.GradientTransformation):
        try:
            self._cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:  # not reached: needs a GPU, and JAX_PLATFORMS without cpu
            raise ValueError(
                f"update='host' runs on the CPU, but JAX has no CPU device: {error}.\n"
                f"Fix: set JAX_PLATFORMS=cuda,cpu, or use update='sharded'."
            ) from error
        # JAX keeps what it traces by the function: one of the user's may read something that has changed.
        self._init = jax.jit(lambda params: optimizer.init(params))
        self._update = jax.jit(functools.partial(update, optimizer.update), donate_argnums=(0, 2))

    def init(self, params: Params, target: optax.OptState) -> optax.OptState:
        """The state before the first step.

        Args:
          params: arrays on devices, laid out as the state is to be.
          target: the state's shapes and shardings.
        """
        return self._run(self._init, (params,), target)

    def update(
        self, params: Params, grads: Cotangents, opt_state: OptState, *how: Any
    ) -> tuple[Arrays, Arrays]:
        """Parameters, on devices, and state, on the host, after a step; those passed in are consumed.

        Args:
          params, grads: arrays on devices, laid out as the state is.
          how: `applies`, `scale`, `rate` and `loss` as of the function, on every device.
        """
        return self._run(self._update, (params, grads, opt_state, *how), (params, opt_state))

    def _run(self, function: Function, trees: Tree, targets: Any) -> Arrays:
        """Applies a function, on the CPU, to what each device has of the trees.

        Args:
          targets: arrays, or their shapes, that say where results go.
        """
        leaves, structure = jax.tree.flatten(trees)
        wanted, of_results = jax.tree.flatten(targets)
        shards = [
            {shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves
        ]
        results = []
        for device in shards[0]:
            own = jax.device_put([on[device] for on in shards], self._cpu, may_alias=False)
            done = jax.tree.leaves(function(*jax.tree.unflatten(structure, own)))
            kinds = (leaf.sharding.memory_kind for leaf in wanted)
            places = [SingleDeviceSharding(device, memory_kind=kind) for kind in kinds]
            results.append(jax.device_put(done, places))
        arrays = [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [*parts])
            for leaf, *parts in zip(wanted, *results, strict=True)
        ]
        return jax.tree.unflatten(of_results, arrays)
