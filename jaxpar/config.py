"""The configuration of a run: frozen dataclasses that check themselves before anything is traced."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from jaxpar.axes import DATA, STAGE, TENSOR
from jaxpar.fields import check_fields
from jaxpar.mesh import MeshConfig
from jaxpar.pipeline.placement import resolve_placement, slots

# The vocabulary is padded to a multiple of this, so that it splits over any usual mesh and every mesh
# trains the same model (Megatron-LM does likewise, arXiv:1909.08053).
VOCAB_MULTIPLE = 384


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, f"{name}={value}: must be positive")


def _require_rate(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0 <= value < 1, f"{name}={value}: must be at least 0 and less than 1")


def nearest_multiples(size: int, divisor: int) -> str:
    """The nearest positive sizes that `divisor` divides: "96 or 128" for 100 and 32."""
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A deep LSTM language model.

    Attributes:
      num_layers: LSTM layers.
      hidden_size: units of each layer.
      embed_size: width of the token embedding; at most hidden_size.
      vocab_size: tokens; None takes what the corpus needs.
      dropout: rate on the embedding, between layers and before the head.
      forget_bias: initial bias of the forget gates.
      tie_embedding: the head uses the embedding table (then embed_size must equal hidden_size).
      dtype: of activations and matmul inputs; parameters, accumulation and c stay float32.
      kernel: what runs the layers in training: "scan" is our own and runs anywhere; "cudnn" is NVIDIA's, for
        float32 without `tensor`; "auto" is the faster one by measurement, see `kernel.choose_kernel`.
      name: how a config file tells this model from the others.
    """

    num_layers: int = 4
    hidden_size: int = 192
    embed_size: int = 192
    vocab_size: int | None = None
    dropout: float = 0.2
    forget_bias: float = 1.0
    tie_embedding: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    kernel: Literal["scan", "cudnn", "auto"] = "scan"
    name: Literal["lstm"] = "lstm"

    def __post_init__(self):
        check_fields(self)
        _require_positive(self, "num_layers", "hidden_size", "embed_size")
        _require_rate(self, "dropout")
        if self.vocab_size is not None:
            _require_positive(self, "vocab_size")
        _require(
            self.embed_size <= self.hidden_size,
            f"embed_size={self.embed_size} is larger than hidden_size={self.hidden_size}; "
            f"use embed_size={self.hidden_size} or less",
        )
        _require(
            not self.tie_embedding or self.embed_size == self.hidden_size,
            f"tie_embedding needs embed_size={self.embed_size} equal to hidden_size={self.hidden_size}; "
            f"set embed_size={self.hidden_size}, or tie_embedding off",
        )


@dataclasses.dataclass(frozen=True)
class ConvNetConfig:
    """Convolutions, then dense layers, for images.

    Attributes:
      channels: of each 3x3 convolution; a 2x2 max pooling follows every second one.
      hidden_sizes: widths of the dense layers before the last.
      dropout: rate on the input of every dense layer.
      strategy: what all devices of the mesh split: "data" the batch, "model" the weights, "hybrid" the
        batch of the convolutions and the weights of the dense layers, with an all-to-all between them.
        "hybrid-gather" has an all-gather there. See `sharding.STRATEGIES`.
      image_shape: height, width and colours of an image.
      num_classes: what an image may be.
      name: how a config file tells this model from the others.
    """

    channels: tuple[int, ...] = (32, 64)
    hidden_sizes: tuple[int, ...] = (512,)
    dropout: float = 0.2
    strategy: Literal["hybrid", "hybrid-gather", "data", "model"] = "hybrid"
    image_shape: tuple[int, ...] = (8, 8, 1)
    num_classes: int = 10
    name: Literal["hybrid"] = "hybrid"

    def __post_init__(self):
        check_fields(self)
        _require_positive(self, "num_classes")
        _require_rate(self, "dropout")
        for name in ("channels", "hidden_sizes", "image_shape"):
            sizes = getattr(self, name)
            _require(min(sizes, default=1) > 0, f"{name}={sizes}: all must be positive")
        _require(len(self.channels) > 0, f"channels={self.channels}: give one convolution or more")
        _require(
            len(self.image_shape) == 3,
            f"image_shape={self.image_shape}: give height, width and colours",
        )
        _require(
            min(self.image_shape[:2]) >> len(self.channels) // 2 > 0,
            f"image_shape={self.image_shape} is too small for the {len(self.channels) // 2} poolings of "
            f"{len(self.channels)} convolutions; use fewer channels",
        )

    @property
    def num_features(self) -> int:
        """What the convolutions hand to the dense layers for each image."""
        height, width, _ = self.image_shape
        num_poolings = len(self.channels) // 2
        return (height >> num_poolings) * (width >> num_poolings) * self.channels[-1]


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How a batch is cut and moves through the stages; without stages, only `num_microbatches` matters.

    Attributes:
      schedule: what runs when; see `schedule.make_schedule`.
      num_microbatches: M, slices of the batch dim (of each of its `DataConfig.shares`). One after the
        other on every data-parallel group, their gradients added up: without stages, gradient
        accumulation.
      num_chunks: K, slices of the time dim; (h, c) stay on their stage between chunks.
      num_groups: groups of layers on each stage, for "interleaved".
      placement: layers on each stage (and group): "balanced" by `placement.balance_ticks`, so that
        ticks are the shortest, the head included; "even"; or the numbers themselves.
      head: "last" keeps the head on the last stage, "sharded" splits its vocabulary over all stages.
      remat: keep inputs instead of residuals, and run each forward again before its backward.
    """

    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    num_microbatches: int = 1
    num_chunks: int = 4
    num_groups: int = 1
    placement: str | tuple[int, ...] = "balanced"
    head: Literal["last", "sharded"] = "sharded"
    remat: bool = False

    def __post_init__(self):
        check_fields(self)
        _require_positive(self, "num_microbatches", "num_chunks", "num_groups")
        _require(
            (self.num_groups > 1) == (self.schedule == "interleaved"),
            f"num_groups={self.num_groups} with schedule={self.schedule!r}; use 2 or more groups with "
            f'"interleaved", and 1 with the others',
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """A text, and how it is cut into batches.

    Attributes:
      corpus: "python-docs" (words), "python-source" (characters), or a file or folder of your own.
      level: what a token is; "auto" takes the corpus's own.
      max_vocab: the most frequent tokens kept; others become <unk>.
      batch_size: rows of a global batch.
      seq_len: time steps of a window; gradients flow through one window, the state through all.
      num_buckets: 0 reads the text as one long stream. More reads its lines, each from the zero state, in at
        most so many buckets of like lengths up to seq_len; see `buckets.BucketedSentences`.
      shares: parts of every batch that each data-parallel group takes, e.g. (3, 1) for a first that is
        three times as fast as the second; None gives all the same.
    """

    corpus: str = "python-docs"
    level: Literal["auto", "word", "char"] = "auto"
    max_vocab: int = 10_000
    batch_size: int = 16
    seq_len: int = 32
    num_buckets: int = 0
    shares: tuple[int, ...] | None = None

    def __post_init__(self):
        check_fields(self)
        if self.shares is not None:
            _require(
                len(self.shares) > 0 and min(self.shares) > 0,
                f"shares={self.shares}: every data-parallel group needs at least one part; leave a "
                f"device without work out of the mesh (devices=...)",
            )
        _require_positive(self, "max_vocab", "batch_size", "seq_len")
        _require(self.corpus != "", "corpus='' names no text; use python-docs, or a file or folder")
        _require(self.num_buckets >= 0, f"num_buckets={self.num_buckets}: must not be negative")


@dataclasses.dataclass(frozen=True)
class ImageDataConfig:
    """Images with labels, and how many are in a batch.

    Attributes:
      dataset: "digits", the 1,797 of 8x8 points that come with scikit-learn (the extra `images`).
      batch_size: images of a global batch.
    """

    dataset: Literal["digits"] = "digits"
    batch_size: int = 128

    def __post_init__(self):
        check_fields(self)
        _require_positive(self, "batch_size")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimization, and what is printed and kept.

    Attributes:
      num_steps: optimizer steps.
      optimizer: by its name in optax.
      learning_rate: its peak.
      lr_schedule: by its name in optax. "linear" and "cosine" fall to zero at the last step, "exponential"
        takes the rate times `lr_decay` every `lr_decay_every` steps, all at once.
      warmup_steps: steps of linear warm-up, from learning_rate / warmup_steps.
      hold_steps: steps at the peak after the warm-up, before the rate falls.
      lr_decay, lr_decay_every: of "exponential".
      weight_decay: of adamw; 0 with others.
      momentum: of sgd; 0 with others.
      clip_norm: bound on the global norm of the gradients; 0 for none.
      nonfinite: what becomes of a step whose loss or gradient norm is not finite. "stop": the run ends, and
        the state before the step is saved. "skip": parameters and optimizer state stay as they are, the
        carried state begins anew from zero, and the next batch is taken.
      max_skipped: steps of a run that "skip" passes over; one more stops it.
      seed: of initial values, dropout and the order of the text.
      fsdp: parameters stored split over `data` as well, gathered once a step.
      update: where optimizer state lies and the update runs. "replicated": on every data-parallel group;
        "sharded": split over `data` (ZeRO-1, arXiv:1910.02054); "host": split likewise, in host memory,
        so that devices hold parameters and gradients alone (ZeRO-Offload, arXiv:2101.06840).
      log_every: steps between lines of progress.
      eval_every: steps between validations; 0 for the end only.
      checkpoint_every: steps between checkpoints; 0 for the end only.
      keep_checkpoints: the newest ones kept.
      keep_best: the state with the lowest validation loss is saved and kept as well.
      fallback_dir: the state is saved in a folder in here when out_dir cannot be written any more: a disk
        is full, or read-only.
      out_dir: where metrics, vocabulary, config and checkpoints are written; None takes the next free
        folder of runs/0001, runs/0002, ...
    """

    num_steps: int = 800
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    learning_rate: float = 5e-3
    lr_schedule: Literal["constant", "linear", "cosine", "exponential"] = "cosine"
    warmup_steps: int = 20
    hold_steps: int = 0
    lr_decay: float = 0.5
    lr_decay_every: int = 100
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip_norm: float = 1.0
    nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = 10
    seed: int = 0
    fsdp: bool = False
    update: Literal["replicated", "sharded", "host"] = "replicated"
    log_every: int = 25
    eval_every: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    keep_best: bool = True
    fallback_dir: str | None = None
    out_dir: str | None = None

    def __post_init__(self):
        check_fields(self)
        _require_positive(
            self, "num_steps", "learning_rate", "lr_decay_every", "log_every", "keep_checkpoints",
            "max_skipped",
        )  # fmt: skip
        _require(
            0 < self.lr_decay <= 1, f"lr_decay={self.lr_decay}: must be above 0, and 1 at most"
        )
        _require_rate(self, "momentum")
        for name in (
            "warmup_steps", "hold_steps", "weight_decay", "clip_norm", "eval_every", "checkpoint_every"
        ):  # fmt: skip
            value = getattr(self, name)
            _require(value >= 0, f"{name}={value}: must not be negative")
        _require(0 <= self.seed < 2**32, f"seed={self.seed}: must be from 0 to {2**32 - 1}")
        _require(self.num_steps < 2**31, f"num_steps={self.num_steps}: must be below {2**31}")
        for name in ("out_dir", "fallback_dir"):
            _require(getattr(self, name) != "", f"{name}='' names no folder; leave it away")
        for name, optimizer in (("weight_decay", "adamw"), ("momentum", "sgd")):
            _require(
                getattr(self, name) == 0 or self.optimizer == optimizer,
                f"{name}={getattr(self, name)} has no effect with optimizer={self.optimizer!r}; "
                f"use {name}=0 or optimizer={optimizer!r}",
            )

    @property
    def allowed_skips(self) -> int:
        """Steps that may be passed over."""
        return self.max_skipped if self.nonfinite == "skip" else 0


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run on text is made from."""

    mesh: MeshConfig = MeshConfig()
    model: ModelConfig = ModelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self):
        check_fields(self)

    @property
    def shares(self) -> tuple[int, ...]:
        """Parts of a batch that each data-parallel group takes."""
        return self.data.shares or (1,) * self.mesh.data

    @property
    def has_equal_shares(self) -> bool:
        """Whether all data-parallel groups take the same."""
        return len(set(self.shares)) == 1

    @property
    def microbatch_rows(self) -> int:
        """Rows of a microbatch."""
        return self.data.batch_size // (sum(self.shares) * self.pipeline.num_microbatches)

    @property
    def runs_in_units(self) -> bool:
        """Whether a step runs unit by unit on a schedule; else it is one whole."""
        return self.mesh.stage > 1 or self.pipeline.num_microbatches > 1 or max(self.shares) > 1

    @property
    def num_chunks(self) -> int:
        """K, chunks of time; 1 without stages."""
        return self.pipeline.num_chunks if self.mesh.stage > 1 else 1

    @property
    def num_groups(self) -> int:
        """Groups of layers on each stage; 1 without stages."""
        return self.pipeline.num_groups if self.mesh.stage > 1 else 1

    @property
    def placement(self) -> tuple[int, ...]:
        """Layers on each stage; with several groups a stage, layers of each group, in the layers' order.

        Raises:
          ValueError: they do not fit.
        """
        return resolve_placement(
            self.pipeline.placement,
            self.model.num_layers,
            self.mesh.stage,
            self.num_groups,
            self.last_cost,
        )

    @property
    def last_cost(self) -> float:
        """Work that only the last stage has, in layers: the head's, unless all stages share it.

        In multiply-adds a token, H V of the head against 8 H^2 of a layer. An embedding has none.
        """
        on_last = self.mesh.stage > 1 and self.pipeline.head == "last"
        return (self.model.vocab_size or 0) / (8 * self.model.hidden_size) * on_last

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layer in each slot of the stacked parameters, -1 in empty ones."""
        return slots(self.placement, self.num_groups)

    def check(self) -> Self:
        """This config, if its parts fit each other.

        Raises:
          ValueError: a size does not divide; the message names both sizes and the nearest that work. Or
            the mesh still has a -1.
        """
        sizes = self.mesh.sizes
        _require(
            -1 not in sizes.values(),
            f"mesh {self.mesh}: a size is not inferred yet; use config.mesh.resolve()",
        )
        _check_divides("hidden_size", self.model.hidden_size, {TENSOR: sizes[TENSOR]})
        _require(
            len(self.shares) == sizes[DATA],
            f"shares={self.shares} are {len(self.shares)} parts for data={sizes[DATA]}; give one to every "
            f"data-parallel group",
        )
        parts = (
            {DATA: sizes[DATA]} if self.data.shares is None else {"sum of shares": sum(self.shares)}
        )
        if self.pipeline.num_microbatches > 1:
            parts["num_microbatches"] = self.pipeline.num_microbatches
        _check_divides("batch_size", self.data.batch_size, parts)
        if sizes[STAGE] > 1:
            _check_divides("seq_len", self.data.seq_len, {"num_chunks": self.num_chunks})
        _ = self.placement
        return self


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Everything that a run on images is made from."""

    mesh: MeshConfig = MeshConfig(data=-1)
    model: ConvNetConfig = ConvNetConfig()
    data: ImageDataConfig = ImageDataConfig()
    train: TrainConfig = TrainConfig(num_steps=300, learning_rate=2e-3)

    def __post_init__(self):
        check_fields(self)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """None: no layers are stacked."""
        return ()

    def check(self) -> Self:
        """This config, if its parts fit each other.

        Raises:
          ValueError: a size does not divide, or something is asked for that this model does not have. Or
            the mesh still has a -1.
        """
        sizes = self.mesh.sizes
        _require(
            -1 not in sizes.values(),
            f"mesh {self.mesh}: a size is not inferred yet; use config.mesh.resolve()",
        )
        _require(
            sizes[STAGE] == 1,
            f"mesh {self.mesh}: model {self.model.name!r} has no pipeline; use stage=1, and data and tensor "
            f"for all devices",
        )
        for name, plain in (("fsdp", False), ("update", "replicated")):
            value = getattr(self.train, name)
            _require(
                value == plain,
                f"{name}={value!r} is not for model {self.model.name!r}, whose strategy says what is split; "
                f"use {name}={plain!r}",
            )
        if self.model.strategy != "model":
            parts = {axis: sizes[axis] for axis in (DATA, TENSOR) if sizes[axis] > 1}
            _check_divides("batch_size", self.data.batch_size, parts)
        return self


# Runs by the name of their model, each with the settings it has by default.
RunConfig = Config | ImageConfig
AnyConfig = TypeVar("AnyConfig", bound=RunConfig)
CONFIGS: Mapping[str, RunConfig] = {
    config.model.name: config for config in (Config(), ImageConfig())
}


def replace_train(config: AnyConfig, **changes: object) -> AnyConfig:
    """The config with other settings of training."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def _check_divides(name: str, size: int, divisors: Mapping[str, int]) -> None:
    divisor = 1
    for value in divisors.values():
        divisor *= value
    parts = " x ".join(f"{part}={value}" for part, value in divisors.items())
    _require(
        size % divisor == 0,
        f"{name}={size} does not divide by {parts}"
        + (f" = {divisor}" if len(divisors) > 1 else "")
        + f"; use {name} {nearest_multiples(size, divisor)}, or other sizes of "
        + " and ".join(divisors),
    )
