"""Every private use of JAX, with the reason, and what to do when it goes. No other module may have one."""

from typing import Any

# `ClusterEnv.auto_detect_unset_distributed_params`: the address and numbers that JAX reads from Slurm, Open MPI or
# Kubernetes. jaxpar needs them before `jax.distributed.initialize`, to look at the port and to name who is missing.
# When it goes: read the launchers' variables in hosts/group.py, or ask users to set `JAXPAR_PROCESS_ID` and the like.
from jax._src.clusters import ClusterEnv as ClusterEnv

# The client of the coordinator's key-value store, in which processes compare their options and data before they compile.
# When it goes: exchange the same texts by `jax.experimental.multihost_utils`, which compiles a program for it.
from jax._src.distributed import global_state as global_state


def num_programs(jitted: Any) -> int:
    """How many programs a function of `jax.jit` has compiled, which tests and reports count.

    When `_cache_size` goes: count the events of `jax.monitoring`, or the calls of the traced function.
    """
    return jitted._cache_size()
