"""Every private use of JAX, with the reason, and what to do when it goes. No other module may have one."""

from typing import Any

# The address and the numbers that JAX reads from Slurm, Open MPI and Kubernetes. jaxpar needs them before
# `jax.distributed.initialize`, to look at the port and to name who is missing.
# When it goes: read the launchers' variables in hosts/group.py.
from jax._src.clusters import ClusterEnv as ClusterEnv

# What the equation of a collective has among its effects, though it has none: it names an axis.
# When it goes: collectives have no effect then, or one with another name.
from jax._src.core import NamedAxisEffect as NamedAxisEffect

# The client of the coordinator's key-value store, in which processes compare options and data.
# When it goes: exchange the texts by `jax.experimental.multihost_utils`, which compiles a program for that.
from jax._src.distributed import global_state as global_state


def num_programs(jitted: Any) -> int:
    """How many programs a function of `jax.jit` has compiled.

    When `_cache_size` goes: count the events of `jax.monitoring`.
    """
    return jitted._cache_size()
