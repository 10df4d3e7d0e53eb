"""A training step as sizes: what a device holds of each parameter, and how its work is cut.

Legend: t time steps of a chunk, b rows of a microbatch, H hidden, V vocabulary, E embedding.
"""

import functools
import math
from typing import NamedTuple

from jaxpar.axes import EMBED, GATES, HIDDEN, INPUT, LAYERS, STAGE, TENSOR, TOKENS, VOCAB
from jaxpar.optimizer import OptimizerConfig
from jaxpar.parallel import Parallel
from jaxpar.pipeline.placement import resolve_placement
from jaxpar.pipeline.schedule import Schedule
from jaxpar.planning.pieces import MAX_LOGITS, MAX_LOGITS_ON_CPU, MIN_ROWS, WORD
from jaxpar.sharding import Axes, Rules, check_split, off_stages, split_over_data
from jaxpar.step import step_schedule
from jaxpar.task import Task
from jaxpar.training.settings import Settings, TrainConfig


class LSTMSizes(NamedTuple):
    """What a task's `lstm_sizes()` tells of its model and batch: stacked LSTM layers below a softmax."""

    num_layers: int
    hidden_size: int
    embed_size: int
    vocab_size: int
    dropout: float
    tie_embedding: bool
    dtype: str
    batch_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.seq_len


def lstm_sizes(task: Task) -> LSTMSizes:
    """The sizes that the cost of a task's step is made of.

    Raises:
      ValueError: the task does not tell them.
    """
    check_known(task)
    return LSTMSizes(**task.lstm_sizes())  # pyright: ignore[reportAttributeAccessIssue]


def check_known(task: Task) -> None:
    """Raises a ValueError if a task does not know its cost; nothing is read or computed for it."""
    if not (hasattr(task, "lstm_sizes") and hasattr(task, "optimizer")):
        raise ValueError(
            f"task {task.name!r} does not know its cost: costs are predicted for stacks of LSTM layers, from "
            f"what a task's lstm_sizes() and optimizer tell; use inspect instead, which compiles the step"
        )


class Shard(NamedTuple):
    """What a device has of a parameter: the axes that split each dim, and its shape."""

    axes: tuple[Axes, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


class Parameter(NamedTuple):
    """A parameter of the model.

    Attributes:
      part: of a step that uses it: "first", "layers" or "last".
      computed, split: a device's part while a step computes; and with FSDP or ZeRO-1.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    computed: Shard
    split: Shard


@functools.lru_cache
def parameters(
    slots: int, H: int, E: int, V: int, rules: Rules, sizes: tuple[tuple[str, int], ...]
) -> tuple[Parameter, ...]:
    """Those of the model, on a mesh of these sizes.

    Raises:
      ValueError: a dim does not divide by the axes that split it.
    """
    on = dict(sizes)

    def parameter(name: str, part: str, **dims: int) -> Parameter:
        names, shape = tuple(dims), tuple(dims.values())

        def shard(rules: Rules) -> Shard:
            spec = rules.spec_on(names, shape, on)
            check_split(f"parameter {name}", names, shape, spec, on)
            axes = tuple((a,) if isinstance(a, str) else tuple(a or ()) for a in spec)
            parts = (math.prod(on[axis] for axis in each) for each in axes)
            return Shard(axes, tuple(n // k for n, k in zip(shape, parts, strict=True)))

        return Parameter(name, part, shape, shard(rules), shard(split_over_data(rules)))

    bias = {LAYERS: slots, GATES: 4, HIDDEN: H}
    kernel = {LAYERS: slots, INPUT: H, GATES: 4, HIDDEN: H}
    return (
        parameter("embedding.table", "first", **{TOKENS: V, EMBED: E}),
        parameter("layers.lstm.w_x", "layers", **kernel),
        parameter("layers.lstm.w_h", "layers", **kernel),
        parameter("layers.lstm.b", "layers", **bias),
        parameter("head.kernel", "last", **{INPUT: H, VOCAB: V}),
        parameter("head.bias", "last", **{VOCAB: V}),
    )


class StepShape:
    """The sizes of a step; nothing of it needs a device.

    Attributes:
      settings: task, `parallel` and `train` that the step is made from.
      model, optimizer: of the task.
      sizes: of the mesh's axes.
      params: of the model.
      placement: layers on each stage, and group.
      t, b, units: time steps and rows of a unit, and how many there are; without units, the whole is one.
      width: of activations between layers, on one device of `tensor`.
      slots: of layers that a unit goes through at once.
      shares_head: whether all stages have a part of the head.
      on_cpu: how many logits a step without units holds at once depends on it.
    """

    def __init__(
        self,
        task: Task,
        parallel: Parallel | str | None = None,
        train: TrainConfig | None = None,
        *,
        on_cpu: bool = True,
    ):
        """Looks at a task whose `vocab_size` is known, on a mesh without -1.

        Raises:
          ValueError: sizes do not fit each other, or the task does not tell its own.
        """
        self.model = model = lstm_sizes(task)
        self.parallel = parallel = Parallel.of(parallel, task.parallel)
        self.train, self.on_cpu = train or task.train, on_cpu
        self.optimizer: OptimizerConfig = task.optimizer  # pyright: ignore[reportAttributeAccessIssue]
        self.settings = Settings(task, parallel, self.train)
        parallel.check(model.batch_size, model.seq_len)
        if parallel.pipeline.remat_keeps != "device":
            raise ValueError(
                f"remat_keeps={parallel.pipeline.remat_keeps!r} is not in the cost model; predict with "
                f"remat_keeps='device', and use inspect for the compiled step"
            )
        self.sizes, pipeline = parallel.mesh.sizes, parallel.pipeline
        self.H, self.V, stages = model.hidden_size, model.vocab_size, self.sizes[STAGE]
        has_last = stages > 1 and pipeline.head == "last"
        self.shares_head = stages > 1 and not has_last
        self.placement = resolve_placement(
            pipeline.placement if stages > 1 else "balanced",
            model.num_layers,
            stages,
            parallel.num_groups,
            # Of the head, in layers: multiply-adds a token, H V against 8 H^2.
            self.V / (8 * self.H) if has_last else 0.0,
        )
        self.slots = max(self.placement)
        self.params = parameters(
            len(self.placement) * self.slots,
            self.H,
            model.embed_size,
            self.V,
            off_stages(task.rules) if has_last else task.rules,
            tuple(self.sizes.items()),
        )
        self.t = model.seq_len // parallel.num_chunks
        self.b = parallel.microbatch_rows(model.batch_size)
        self.units = pipeline.num_microbatches * parallel.num_chunks
        self.width = self.H // self.sizes[TENSOR]

    @property
    def schedule(self) -> Schedule:
        """That every data-parallel group runs; of a step that runs in units."""
        return step_schedule(self.parallel)

    @property
    def splits_update(self) -> bool:
        """Whether a device updates only a part of what it computes with."""
        return self.parallel.fsdp or self.parallel.update != "replicated"

    @property
    def widens_table(self) -> bool:
        """Whether a pipeline widens the embedding table before its loop; see `model.prepare`."""
        return self.parallel.runs_in_units and self.sizes[TENSOR] > 1

    @property
    def head_chunks(self) -> tuple[int, int]:
        """Time steps that the head takes at once, and how often; a shared one takes a unit at once."""
        if self.shares_head:
            return self.t, self.units
        max_logits = MAX_LOGITS_ON_CPU if self.on_cpu else MAX_LOGITS
        rows = max(max_logits // self.V, MIN_ROWS)
        runs = min(-(-self.t * self.b // rows), self.t)
        return -(-self.t // runs), runs * self.units

    @property
    def vocab(self) -> int:
        """Words whose logits a device computes."""
        return self.params[-1].computed.elements  # of the bias, [V]

    def param_bytes(self, *, split: bool = False) -> int:
        """Of all parameters on one device while a step computes; or where they are split over `data` too."""
        return WORD * sum((p.split if split else p.computed).elements for p in self.params)

    def gradient_elements(self, param: Parameter) -> int:
        """Of a parameter's gradient on one device, while a step computes."""
        is_widened = param.part == "first" and self.widens_table
        return self.V * self.width if is_widened else param.computed.elements

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients on one device."""
        return WORD * sum(map(self.gradient_elements, self.params))
