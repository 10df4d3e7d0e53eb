"""A JAX sharding framework for models too big or too slow for one device, LSTM networks first."""

from jaxpar._versions import check_jax_version

check_jax_version()

# Nothing of JAX is imported before its version is known to be sound.
from jaxpar import models, nn  # noqa: E402
from jaxpar.analysis import (  # noqa: E402
    MeasuredStep,
    ProgramReport,
    inspect_function,
    inspect_step,
    measure_step,
    strategy_for,
)
from jaxpar.config import (  # noqa: E402
    Config,
    ConvNetConfig,
    DataConfig,
    ImageConfig,
    ImageDataConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
)
from jaxpar.data.buckets import BucketedSentences, Sentences, choose_edges  # noqa: E402
from jaxpar.data.images import ImageBatch, ImageBatches, load_images  # noqa: E402
from jaxpar.data.streams import IGNORE, Batch, TokenStreams  # noqa: E402
from jaxpar.display import show  # noqa: E402
from jaxpar.kernel import KernelChoice, choose_kernel  # noqa: E402
from jaxpar.mesh import MeshConfig, simulate_devices  # noqa: E402
from jaxpar.pipeline.engine import Pipeline, PipelineParams  # noqa: E402
from jaxpar.pipeline.gpipe import run_pipeline  # noqa: E402
from jaxpar.pipeline.placement import balance  # noqa: E402
from jaxpar.pipeline.schedule import Schedule, make_schedule  # noqa: E402
from jaxpar.pipeline.ticks import make_plan  # noqa: E402
from jaxpar.planning import (  # noqa: E402
    Cost,
    Hardware,
    Ranking,
    calibrate,
    check_fits,
    find_machine,
    measure_groups,
    place,
    plan,
    plan_here,
    predict_step,
    propose_shares,
)
from jaxpar.sharding import RULES, Layout, Rules, shardings  # noqa: E402
from jaxpar.state import TrainState, audit, init_state  # noqa: E402
from jaxpar.step import (  # noqa: E402
    batch_sharding,
    make_eval_step,
    make_loss_and_grad,
    make_train_step,
)
from jaxpar.training.fit import FitResult, fit  # noqa: E402
from jaxpar.training.weights import export_weights, import_weights  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    # What a run is made from.
    "MeshConfig",
    "ModelConfig",
    "PipelineConfig",
    "DataConfig",
    "TrainConfig",
    "Config",
    "ConvNetConfig",
    "ImageDataConfig",
    "ImageConfig",
    "simulate_devices",
    # From names to shardings.
    "Rules",
    "RULES",
    "Layout",
    "shardings",
    "audit",
    # Models and their layers.
    "models",
    "nn",
    # Data.
    "Batch",
    "TokenStreams",
    "Sentences",
    "BucketedSentences",
    "choose_edges",
    "ImageBatch",
    "ImageBatches",
    "load_images",
    "IGNORE",
    "batch_sharding",
    # Training.
    "TrainState",
    "init_state",
    "make_train_step",
    "make_eval_step",
    "make_loss_and_grad",
    "fit",
    "FitResult",
    "measure_groups",
    "propose_shares",
    "choose_kernel",
    "KernelChoice",
    # What a step will cost, and what the compiled one does.
    "predict_step",
    "Cost",
    "check_fits",
    "Hardware",
    "find_machine",
    "calibrate",
    "plan",
    "plan_here",
    "Ranking",
    "place",
    "inspect_step",
    "inspect_function",
    "measure_step",
    "strategy_for",
    "ProgramReport",
    "MeasuredStep",
    "show",
    # Weights from and to PyTorch.
    "export_weights",
    "import_weights",
    # The pipeline, piece by piece.
    "balance",
    "Schedule",
    "make_schedule",
    "make_plan",
    "Pipeline",
    "PipelineParams",
    "run_pipeline",
]
