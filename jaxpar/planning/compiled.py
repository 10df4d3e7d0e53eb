"""What the compiler reports about a step, for any number of devices: compiled from shapes, nothing runs."""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

from jaxpar.analysis.program import ProgramReport, inspect_step
from jaxpar.config import Parallel, TrainConfig
from jaxpar.mesh import MeshConfig
from jaxpar.task import Task


def simulated_mesh(config: MeshConfig) -> Mesh:
    """A mesh of CPU devices to compile for, of any size.

    They are not among `jax.devices()`, whose number is fixed when JAX starts.

    Args:
      config: without -1.
    """
    size = config.num_devices
    devices = _devices(1 << (size - 1).bit_length())[:size]
    return Mesh(
        np.asarray(devices).reshape(tuple(config.sizes.values())),
        tuple(config.sizes),
        axis_types=(AxisType.Auto,) * len(config.sizes),
    )


@functools.lru_cache
def _devices(count: int) -> list[Any]:
    return xla_client.make_cpu_client(num_devices=count).devices()


# Without optimizing the code, compiling takes half the time, and the report is the same.
_QUICK = {"xla_backend_optimization_level": 0}


@functools.lru_cache
def quickest_options() -> dict[str, Any]:
    """Options, without fusion emitters too: a third of that time; memory differs in its last digits."""
    options = {**_QUICK, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except jax.errors.JaxRuntimeError:  # this version of XLA has no such option
        return _QUICK
    return options


@functools.lru_cache(maxsize=256)
def report_of(
    task: Task, parallel: Parallel, train: TrainConfig, *, memory: bool = True
) -> ProgramReport:
    """The report of a training step, compiled for simulated devices in a few seconds, whatever its size.

    Memory and collectives are those that XLA's CPU compiler decides on; the code is not optimized.

    Args:
      parallel: without -1 in its mesh.
      memory: whether the report's memory must be right to the byte; if not, compiling is quicker.
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    mesh, options = simulated_mesh(parallel.mesh), _QUICK if memory else quickest_options()
    return inspect_step(task, parallel, train, mesh, options=options)


@functools.lru_cache
def copies_in_branches() -> bool:
    """Whether in a loop each branch copies the arrays that another branch changes in place.

    XLA's CPU compiler did until JAX 0.11; it is asked with a small program.
    """

    def run(arrays, choices):
        def body(arrays, choice):
            branches = [lambda a, b: (a * 2 + 1, b), lambda a, b: (a, b * 2 + 1)]
            return lax.switch(choice, branches, *arrays), None

        return lax.scan(body, arrays, choices)[0]

    where = NamedSharding(simulated_mesh(MeshConfig()), P())
    array = jax.ShapeDtypeStruct((1 << 16,), np.float32, sharding=where)
    choices = jax.ShapeDtypeStruct((4,), np.int32, sharding=where)
    asked = jax.jit(run, donate_argnums=0).lower((array, array), choices)
    memory: Any = asked.compile().memory_analysis()
    return memory.temp_size_in_bytes >= array.size * array.dtype.itemsize
