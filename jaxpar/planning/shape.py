"""A training step as sizes: what a device holds of each parameter, and how its work is cut.

Legend: t time steps of a chunk, b rows of a microbatch, H hidden, V vocabulary, E embedding.
"""

import dataclasses
import functools
import math

from jaxpar.axes import EMBED, GATES, HIDDEN, INPUT, LAYERS, STAGE, TENSOR, TOKENS, VOCAB
from jaxpar.config import Config
from jaxpar.loss import LOGITS_ELSEWHERE, LOGITS_ON_CPU, MIN_ROWS
from jaxpar.pipeline.schedule import Schedule
from jaxpar.planning.pieces import WORD
from jaxpar.sharding import Rules, check_split, split_over_data
from jaxpar.state import compute_rules
from jaxpar.step import step_schedule


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model: its whole shape, its named dims, and the part of a step that uses it."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    part: str

    def shard(self, rules: Rules, sizes: dict[str, int]) -> tuple[int, ...]:
        """What one device of a mesh of these sizes has of it."""
        return tuple(
            size // math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(self.shape, self.split(rules), strict=True)
        )

    def bytes(self, rules: Rules, sizes: dict[str, int]) -> int:
        """Of the shard."""
        return WORD * math.prod(self.shard(rules, sizes))

    def split(self, rules: Rules) -> list[tuple[str, ...]]:
        """The axes that split each dim."""
        return _split(rules, self.dims)


@functools.cache
def _split(rules: Rules, dims: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in rules.spec(dims)]


def parameters(config: Config) -> tuple[Parameter, ...]:
    """Those of the model, in slots as the placement gives them.

    Raises:
      ValueError: `config.model.vocab_size` is None.
    """
    model, slots = config.model, len(config.layer_ids)
    H, E, V = model.hidden_size, model.embed_size, model.vocab_size
    if V is None:
        raise ValueError("vocab_size=None: set it, or let `fit` take it from the corpus")
    stacked = (LAYERS, INPUT, GATES, HIDDEN)
    return (
        Parameter("embedding.table", (V, E), (TOKENS, EMBED), "first"),
        Parameter("lstm.w_x", (slots, H, 4, H), stacked, "layers"),
        Parameter("lstm.w_h", (slots, H, 4, H), stacked, "layers"),
        Parameter("lstm.b", (slots, 4, H), (LAYERS, GATES, HIDDEN), "layers"),
        Parameter("head.kernel", (H, V), (INPUT, VOCAB), "last"),
        Parameter("head.bias", (V,), (VOCAB,), "last"),
    )


class StepShape:
    """The sizes of a config's step; nothing of it needs a device.

    Attributes:
      sizes: of the mesh's axes.
      params: of the model.
      compute, stored, updated: how parameters lie while a step computes, between steps, and in the optimizer.
      t, b, units: time steps and rows of a unit, and how many there are; without units, the whole is one.
      width: of activations between layers, on one device of `tensor`.
      slots: of layers that a unit goes through at once.
      shares_head: whether all stages have a part of the head.
      on_cpu: how many logits a step without units holds at once depends on it.
    """

    def __init__(self, config: Config, *, on_cpu: bool = True):
        """Looks at a config, with `model.vocab_size` and a mesh without -1.

        Raises:
          ValueError: sizes do not fit each other.
        """
        config.check()
        self.config, self.on_cpu, self.sizes = config, on_cpu, config.mesh.sizes
        self.params = parameters(config)
        self.compute = compute_rules(config)
        self.stored = split_over_data(self.compute) if config.train.fsdp else self.compute
        split = config.train.fsdp or config.train.update != "replicated"
        self.updated = split_over_data(self.compute) if split else self.compute
        self.t, self.b = config.data.seq_len // config.num_chunks, config.microbatch_rows
        self.units = config.pipeline.num_microbatches * config.num_chunks
        self.H, self.V = config.model.hidden_size, config.model.vocab_size or 0
        self.width, self.slots = self.H // self.sizes[TENSOR], max(config.placement)
        for rules in {self.stored, self.updated}:
            for param in self.params:
                what, spec = f"parameter {param.name}", param.split(rules)
                check_split(what, param.dims, param.shape, spec, self.sizes)
        self.shares_head = self.sizes[STAGE] > 1 and config.pipeline.head == "sharded"

    @property
    def schedule(self) -> Schedule:
        """That every data-parallel group runs; of a step that runs in units."""
        return step_schedule(self.config)

    @property
    def widens_table(self) -> bool:
        """Whether a pipeline widens the embedding table before its loop; see `step._run_in_units`."""
        return self.config.runs_in_units and self.sizes[TENSOR] > 1

    @property
    def head_chunks(self) -> tuple[int, int]:
        """Time steps that the head takes at once, and how often; see `loss.linear_cross_entropy`."""
        if self.config.runs_in_units:
            return self.t, self.units
        max_logits = LOGITS_ON_CPU if self.on_cpu else LOGITS_ELSEWHERE
        rows = max(max_logits // self.V, MIN_ROWS)
        runs = min(-(-self.t * self.b // rows), self.t)
        return -(-self.t // runs), runs

    def param_bytes(self, rules: Rules) -> int:
        """Of all parameters, laid out by the rules, on one device."""
        return sum(param.bytes(rules, self.sizes) for param in self.params)

    def gradient_shard(self, param: Parameter) -> tuple[int, ...]:
        """Of a parameter's gradient while a step computes."""
        if param.part == "first" and self.widens_table:
            return (self.V, self.width)
        return param.shard(self.compute, self.sizes)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients on one device."""
        return sum(WORD * math.prod(self.gradient_shard(param)) for param in self.params)
