# Tasks, models, and data.
from jaxpar.model.task import Task as Task
from jaxpar.model.adopt.short import adopt as adopt
from jaxpar.model.model import mean as mean
from jaxpar.model.model import Model as Model
from jaxpar.model.model import Layer as Layer
from jaxpar.model.stack import Stack as Stack
from jaxpar.base.at import LayerContext as LayerContext
from jaxpar.model.model import Sums as Sums
from jaxpar.data.array import ArrayBatches as ArrayBatches
from jaxpar.data.streams import SeriesBatches as SeriesBatches
from jaxpar.data.iterator import IteratorBatches as IteratorBatches
from jaxpar.config import OptimizerConfig as OptimizerConfig

# Layouts and options.
from jaxpar.mesh import MeshConfig as MeshConfig
from jaxpar.config import PipelineConfig as PipelineConfig
from jaxpar.config import Parallel as Parallel
from jaxpar.config import TrainConfig as TrainConfig
from jaxpar.sharding import RULES as RULES
from jaxpar.sharding import Rules as Rules
from jaxpar.nn.param import named as named
from jaxpar.mesh import simulate_devices as simulate_devices

# Runs, callbacks, and steps.
from jaxpar.training.fit import fit as fit
from jaxpar.training.weights import Start as Start
from jaxpar.training.loaded import load_run as load_run
from jaxpar.training.callbacks import Report as Report
from jaxpar.training.fit import FitResult as FitResult
from jaxpar.training.callbacks import ConsoleReport as ConsoleReport
from jaxpar.training.callbacks import Tracker as Tracker
from jaxpar.training.callbacks import TensorBoard as TensorBoard
from jaxpar.training.callbacks import WandB as WandB
from jaxpar.training.callbacks import Trackio as Trackio
from jaxpar.step.functions import init_state as init_state
from jaxpar.step.functions import make_train_step as make_train_step
from jaxpar.step.functions import value_and_grad as value_and_grad
from jaxpar.step.functions import make_predict_step as make_predict_step

# Inspection.
from jaxpar.training.comparison import compare_meshes as compare_meshes
from jaxpar.analysis.program import inspect_step as inspect_step
from jaxpar.analysis.measured import measure_step as measure_step
from jaxpar.base.display import show as show
from jaxpar.planning.suggested import suggest_rules as suggest_rules

# Modules.
from jaxpar import nn as nn
from jaxpar import pipeline as pipeline
from jaxpar import planning as planning
from jaxpar import analysis as analysis
from jaxpar import lm as lm

__version__: str
__all__: list[str]
