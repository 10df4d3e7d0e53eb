"""A JAX sharding framework for models too big or too slow for one device, deep recurrent networks first.

Its names are imported when they are used: this module costs nothing, and needs no JAX.
"""

from typing import TYPE_CHECKING

from jaxpar._lazy import lazily
from jaxpar._versions import check_jax_version

check_jax_version()  # before anything of JAX is imported

__version__ = "0.2.0"

# Where each name is; a module has a dot at its end.
_HOMES = {
    # What is learned, and by which model.
    "Task": "jaxpar.task",
    "Stack": "jaxpar.model",
    "At": "jaxpar.at",
    "Sums": "jaxpar.model",
    "ArrayBatches": "jaxpar.data.array",
    "SeriesBatches": "jaxpar.data.streams",
    "PackedBatches": "jaxpar.data.packed",
    "OptimizerConfig": "jaxpar.config",
    # On which devices, and for how long.
    "MeshConfig": "jaxpar.mesh",
    "PipelineConfig": "jaxpar.config",
    "Parallel": "jaxpar.config",
    "TrainConfig": "jaxpar.config",
    "Rules": "jaxpar.sharding",
    "RULES": "jaxpar.sharding",
    "simulate_devices": "jaxpar.mesh",
    # A run; or its parts.
    "fit": "jaxpar.training.fit",
    "load_run": "jaxpar.training.loaded",
    "init_state": "jaxpar.state",
    "make_train_step": "jaxpar.step",
    "make_eval_step": "jaxpar.step",
    # What a step does.
    "inspect_step": "jaxpar.analysis",
    "measure_step": "jaxpar.analysis",
    "show": "jaxpar.display",
    # The rest.
    "nn": "jaxpar.nn.",
    "pipeline": "jaxpar.pipeline.",
    "planning": "jaxpar.planning.",
    "analysis": "jaxpar.analysis.",
    "lm": "jaxpar.tasks.lm.",
    "images": "jaxpar.tasks.images.",
}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from jaxpar import analysis as analysis
    from jaxpar import nn as nn
    from jaxpar import pipeline as pipeline
    from jaxpar import planning as planning
    from jaxpar.analysis import inspect_step as inspect_step
    from jaxpar.analysis import measure_step as measure_step
    from jaxpar.at import At as At
    from jaxpar.config import OptimizerConfig as OptimizerConfig
    from jaxpar.config import Parallel as Parallel
    from jaxpar.config import PipelineConfig as PipelineConfig
    from jaxpar.config import TrainConfig as TrainConfig
    from jaxpar.data.array import ArrayBatches as ArrayBatches
    from jaxpar.data.packed import PackedBatches as PackedBatches
    from jaxpar.data.streams import SeriesBatches as SeriesBatches
    from jaxpar.display import show as show
    from jaxpar.mesh import MeshConfig as MeshConfig
    from jaxpar.mesh import simulate_devices as simulate_devices
    from jaxpar.model import Stack as Stack
    from jaxpar.model import Sums as Sums
    from jaxpar.sharding import RULES as RULES
    from jaxpar.sharding import Rules as Rules
    from jaxpar.state import init_state as init_state
    from jaxpar.step import make_eval_step as make_eval_step
    from jaxpar.step import make_train_step as make_train_step
    from jaxpar.task import Task as Task
    from jaxpar.tasks import images as images
    from jaxpar.tasks import lm as lm
    from jaxpar.training.fit import fit as fit
    from jaxpar.training.loaded import load_run as load_run
else:
    __getattr__, __dir__ = lazily(__name__, _HOMES)
