"""A JAX sharding framework for models too big or too slow for one device, deep recurrent networks first."""

import gc

from jaxpar._interrupt import command_line, end_quietly_on_interrupt
from jaxpar._mistyped import end_if_mistyped
from jaxpar._versions import check_jax_version

_arguments = command_line()
if _arguments is not None:
    end_quietly_on_interrupt()
    end_if_mistyped(_arguments)
check_jax_version()

# What is imported stays, and the collector would look through all of it again and again: a tenth of the time.
_collects = gc.isenabled()
gc.disable()

# Nothing of JAX is imported before its version is known to be sound.
from jaxpar import analysis, nn, pipeline, planning  # noqa: E402
from jaxpar.analysis import inspect_step, measure_step  # noqa: E402
from jaxpar.at import At  # noqa: E402
from jaxpar.config import (  # noqa: E402
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
)
from jaxpar.data.array import ArrayBatches  # noqa: E402
from jaxpar.data.packed import PackedBatches  # noqa: E402
from jaxpar.data.streams import SeriesBatches  # noqa: E402
from jaxpar.display import show  # noqa: E402
from jaxpar.mesh import MeshConfig, simulate_devices  # noqa: E402
from jaxpar.model import Stack, Sums  # noqa: E402
from jaxpar.sharding import RULES, Rules  # noqa: E402
from jaxpar.state import init_state  # noqa: E402
from jaxpar.step import make_eval_step, make_train_step  # noqa: E402
from jaxpar.task import Task  # noqa: E402
from jaxpar.tasks import images, lm  # noqa: E402
from jaxpar.training.fit import fit  # noqa: E402
from jaxpar.training.loaded import load_run  # noqa: E402

if _collects:
    gc.enable()

__version__ = "0.2.0"

__all__ = [
    # What is learned, and by which model.
    "Task",
    "Stack",
    "At",
    "Sums",
    "ArrayBatches",
    "SeriesBatches",
    "PackedBatches",
    "OptimizerConfig",
    # On which devices, and for how long.
    "MeshConfig",
    "PipelineConfig",
    "Parallel",
    "TrainConfig",
    "Rules",
    "RULES",
    "simulate_devices",
    # A run; or its parts.
    "fit",
    "load_run",
    "init_state",
    "make_train_step",
    "make_eval_step",
    # What a step does.
    "inspect_step",
    "measure_step",
    "show",
    # The rest.
    "nn",
    "pipeline",
    "planning",
    "analysis",
    "lm",
    "images",
]
