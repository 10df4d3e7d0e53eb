"""Every private use of JAX, with the reason, and what to do when it goes. No other module may have one."""

import collections
import hashlib
import weakref
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

# What `forget_traces` lets go. When one goes: leave it out there, if tests/test_setup.py still passes.
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.numpy.einsum import _einsum
from jax._src.pjit import _infer_params_cached
from jax.stages import Compiled


def num_programs(jitted: Any) -> int:
    """How many programs a function of `jax.jit` has compiled.

    When `_cache_size` goes: count the events of `jax.monitoring`.
    """
    return jitted._cache_size()


_KEPT = 64  # about five runs'
_executables = collections.OrderedDict[Any, Any]()


def compile_once(jitted: Any, *args: Any) -> Compiled:
    """Compiles a function of `jax.jit` for its next call; equal programs of a process are compiled once.

    They are compared after tracing: nothing that Python code reads can be out of date. A program that calls
    Python is compiled each time.

    When `_lowering` goes: return `jitted.lower(*args).compile()`, and each run compiles its own.
    """
    lowered = jitted.lower(*args)
    own = lowered._lowering  # which the call finds again
    rest, names = own.compile_args, ["global_in_avals", "global_out_avals", "in_shardings", "mut"]
    names += ["out_shardings", "in_layouts", "out_layouts", "kept_var_idx", "committed"]
    calls_python = rest["host_callbacks"] or rest["keepalive"] or rest["ordered_effects"]
    if own._executable is None and not calls_python:
        how = (tuple(value) if isinstance(value := rest[n], list | set) else value for n in names)
        how = *how, own._compiler_options_kvs, own._donated_invars, own._device_list
        key = hashlib.sha256(str(own.stablehlo()).encode()).digest(), *how
        own._executable = _executables.pop(key, None)
        _executables[key] = own.compile()
        if len(_executables) > _KEPT:
            _executables.popitem(last=False)
    return lowered.compile()


def call_once(jitted: Any, *args: Any) -> Any:
    """Calls a function of `jax.jit`, after `compile_once`."""
    compile_once(jitted, *args)
    return jitted(*args)


def forget_traces() -> None:
    """Frees what JAX keeps of finished traces, though nothing can use it again.

    Compiled programs stay, the user's and jaxpar's.

    - Each call of `jnp.einsum` makes a function of its own, which a table of JAX keeps.
    - Each derivative of `jax.shard_map` makes finalizers. One waits for the end of a tracer, and holds the
      trace that holds this tracer. Its only task is to free a part of that trace.
    """
    _infer_params_cached.evict_weakref(_einsum)
    for finalizer, call in [*weakref.finalize._registry.items()]:  # pyright: ignore[reportAttributeAccessIssue]
        if getattr(call.func, "__func__", None) is DynamicJaxprTrace.finalize_const:
            finalizer.detach()
