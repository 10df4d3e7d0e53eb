"""Settings that every task has: devices and how a step is split over them, the optimizer, and the run.

Plain data: nothing here, nor in what this imports, needs JAX.
"""

import dataclasses
from typing import Literal, Self

from jaxpar.base.axes import DATA, STAGE
from jaxpar.base.checks import (
    check_divides,
    check_fields,
    require,
    require_instance,
    require_int32,
    require_not_negative,
    require_positive,
    require_rate,
)
from jaxpar.base.files import check_path
from jaxpar.base.stage_names import NamedPlacement, read_placement
from jaxpar.mesh import DATA_PARALLEL, MeshConfig, short_name


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How a batch is split and moves through the pipeline stages.

    Without stages, only `num_microbatches` has an effect; with `remat`, `num_chunks` has one too.

    Attributes:
      schedule: Pipeline schedule. 1f1b is a good default; interleaved shrinks the bubble; v saves about
        half of the activation memory; gpipe runs all forward passes before the first backward pass.
      num_microbatches: Number M of microbatches: slices of the rows of a batch, processed one after another
        on each data-parallel group. Their gradients are added up; without stages this is gradient
        accumulation.
      num_chunks: Number K of time chunks: slices of the time steps of a window. The recurrent state stays on
        its stage between chunks.
      num_groups: Groups of layers on each stage. The schedule interleaved needs 2 or more; v always has 2,
        the others 1.
      zero_bubble: Compute weight gradients separately, in time that stages would spend waiting. Needs no
        extra memory. No effect with remat or the schedule gpipe.
      placement: Layers of each stage (and group). balanced minimizes the estimated step time, including
        the output head; even gives every stage equally many. Or give the numbers, such as 3 3 2, or name all
        parts, such as 'first, 0-2 | 3-5 | 6-7, last'. A stage may have no layer.
      head: Placement of the output head. last keeps it on the last stage; sharded splits it over all stages.
        The default auto follows the placement if it names the parts. Otherwise auto shards the head
        wherever the model supports it.
      unroll: Unroll the layers of a stage. Faster if time chunks are short, but takes more memory and
        compiles a larger program. Only for layers of one kind, without groups.
      remat: Recompute activations in the backward pass (activation recomputation, or gradient
        checkpointing) to save memory.
      remat_keeps: Where recomputation keeps the inputs of each unit: on the device, or in host memory (the
        same on CPUs). The third choice, carries, keeps the least: only the recurrent states before about
        sqrt(K) segments of the window. It runs each segment forward twice.

    Example:
      pipeline = jaxpar.PipelineConfig("interleaved", num_microbatches=4, num_groups=2)
      parallel = jaxpar.Parallel(jaxpar.MeshConfig(stage=2), pipeline)
    """

    schedule: Literal["1f1b", "gpipe", "interleaved", "v"] = "1f1b"
    num_microbatches: int = 1
    num_chunks: int = 1
    num_groups: int = 1
    zero_bubble: bool = True
    placement: str | tuple[int, ...] = "balanced"
    head: Literal["auto", "last", "sharded"] = "auto"
    unroll: bool = False
    remat: bool = False
    remat_keeps: Literal["device", "host", "carries"] = "device"

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "num_microbatches", "num_chunks", "num_groups")
        require(
            self.remat or self.remat_keeps == "device",
            f"remat_keeps={self.remat_keeps!r} needs remat\nFix: use remat, or remat_keeps='device'.",
        )
        require(
            self.remat_keeps != "carries" or num_segments(self.num_chunks) > 1,
            f"num_chunks={self.num_chunks} with remat_keeps='carries' cannot be split into segments\n"
            f"Fix: use num_chunks=4, 16, 64 or 256.",
        )
        require(
            (self.num_groups > 1) == (self.schedule == "interleaved")
            or (self.num_groups, self.schedule) == (2, "v"),
            f"num_groups={self.num_groups} with schedule={self.schedule!r}\n"
            f"Fix: leave it out, or use 2 or more with 'interleaved'.",
        )
        if named := self.named_placement:
            object.__setattr__(self, "placement", str(named))
            require(
                self.head in ("auto", "last" if named.has_last else "sharded"),
                f"head={self.head!r} contradicts placement={self.placement!r}, which places the head\n"
                f"Fix: use head='auto'.",
            )

    @property
    def named_placement(self) -> NamedPlacement | None:
        """The placement, if it is given in words."""
        if isinstance(self.placement, str) and self.placement not in ("balanced", "even"):
            return read_placement(self.placement)
        return None


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The layout of a run: device mesh, pipeline options and sharding options.

    Attributes:
      mesh: Device mesh, such as dp2pp2tp2 (2 data-parallel groups x 2 pipeline stages x 2 tensor shards).
        Without it, data parallelism on as many devices as the rows of a batch divide by.
      pipeline: Microbatches, time chunks and stages.
      shares: Rows of a batch per data-parallel group, relative to each other. For example, 3 1 gives the
        first group three times as many rows as the second. By default all groups get equally many.
      speeds: Speed of the devices of each stage, relative to each other. For example, 1 1 2 2 means that
        the last two stages are twice as fast, so they get more layers. By default all are equal.
      fsdp: Shard the stored parameters over data-parallel groups (FSDP, arXiv:2304.11277). Without stages,
        each layer is gathered just before use. With stages or unequal shares, all parameters are gathered
        once per step.
      update: Placement of optimizer state and update: replicated on every data-parallel group, sharded over
        the groups (ZeRO-1, arXiv:1910.02054), or sharded in host memory (ZeRO-Offload, arXiv:2101.06840).
        With host, devices store only parameters and gradients.

    Example:
      parallel = jaxpar.Parallel(jaxpar.MeshConfig(data=4), update="sharded", fsdp=True)
      result = jaxpar.fit(task, parallel, jaxpar.TrainConfig(num_steps=4))
    """

    mesh: MeshConfig = DATA_PARALLEL
    pipeline: PipelineConfig = PipelineConfig()
    shares: tuple[int, ...] | None = None
    speeds: tuple[float, ...] | None = None
    fsdp: bool = False
    update: Literal["replicated", "sharded", "host"] = "replicated"

    def __post_init__(self):
        if isinstance(self.mesh, str):
            object.__setattr__(self, "mesh", MeshConfig.parse(self.mesh))
        check_fields(self)
        for name, own in (("shares", self.shares), ("speeds", self.speeds)):
            require(
                own is None or (len(own) > 0 and min(own) > 0),
                f"{name}={own}: must be positive\nFix: leave idle devices out with devices=(...).",
            )

        fixed = self.pipeline.placement == "even" or self.pipeline.named_placement
        require(
            self.speeds is None or not fixed,
            f"speeds={self.speeds} has no effect with placement={self.pipeline.placement!r}\n"
            f"Fix: use placement='balanced', or leave out speeds.",
        )

    @classmethod
    def of(cls, parallel: "Parallel | MeshConfig | str | None", default: "Parallel") -> "Parallel":
        """The layout for a `Parallel`, a mesh, the text of a mesh, or None for the default.

        Raises:
          ValueError: it is something else.
        """
        if parallel is None:
            return default
        if isinstance(parallel, str):
            parallel = MeshConfig.parse(parallel)
        if isinstance(parallel, MeshConfig):
            return dataclasses.replace(default, mesh=parallel)
        require_instance(
            "parallel", parallel, Parallel, "a Parallel, a MeshConfig, or a text such as dp2"
        )
        return parallel

    @property
    def group_shares(self) -> tuple[int, ...]:
        """Parts of a batch that each data-parallel group takes."""
        return self.shares or (1,) * self.mesh.data

    @property
    def has_equal_shares(self) -> bool:
        """Whether all data-parallel groups take equally many rows."""
        return self.shares is None or len(set(self.shares)) == 1

    @property
    def splits_units(self) -> bool:
        """Whether work units are split over `tensor` while other devices do something else.

        This is so with pipeline stages, and with groups that take different numbers of rows.
        """
        return self.mesh.tensor > 1 and (self.mesh.stage > 1 or not self.has_equal_shares)

    @property
    def runs_in_units(self) -> bool:
        """Whether a step runs unit by unit on a schedule; if not, it runs as a whole."""
        return (
            self.mesh.stage > 1
            or self.pipeline.num_microbatches > 1
            or max(self.group_shares) > 1
            or self.num_chunks > 1
        )

    @property
    def num_chunks(self) -> int:
        """Number K of time chunks; 1 without stages and remat."""
        return self.pipeline.num_chunks if self.mesh.stage > 1 or self.pipeline.remat else 1

    @property
    def num_segments(self) -> int:
        """Number of segments of a window that run one after another; see `remat_keeps`."""
        return num_segments(self.num_chunks) if self.pipeline.remat_keeps == "carries" else 1

    @property
    def num_groups(self) -> int:
        """Groups of layers on each stage; 1 without stages."""
        if self.mesh.stage == 1:
            return 1
        return 2 if self.pipeline.schedule == "v" else self.pipeline.num_groups

    @property
    def zero_bubble(self) -> bool:
        """Whether weight gradients are computed separately: not without stages, and not with remat."""
        pipeline = self.pipeline
        is_able = self.mesh.stage > 1 and not pipeline.remat and pipeline.schedule != "gpipe"
        return pipeline.zero_bubble and is_able

    @property
    def num_units(self) -> int:
        """Number of work units of equal size that a batch is split into."""
        return sum(self.group_shares) * self.pipeline.num_microbatches * self.num_chunks

    def microbatch_rows(self, batch_size: int) -> int:
        """Rows of a microbatch, given those of a batch."""
        return batch_size // (sum(self.group_shares) * self.pipeline.num_microbatches)

    def resolve(self, num_available: int | None = None) -> Self:
        """With a -1 in the mesh inferred; see `MeshConfig.resolve`."""
        return dataclasses.replace(self, mesh=self.mesh.resolve(num_available))

    def on_mesh(self, mesh: MeshConfig) -> Self:
        """The same layout on another mesh, without options that fit only the old stages or groups."""
        pipeline, shares, speeds = self.pipeline, self.shares, self.speeds
        if mesh.stage != self.mesh.stage:
            pipeline, speeds = dataclasses.replace(pipeline, placement="balanced"), None
        if mesh.data != self.mesh.data:
            shares = None
        return dataclasses.replace(self, mesh=mesh, pipeline=pipeline, shares=shares, speeds=speeds)

    def check_splits(self) -> None:
        """Checks that `fsdp` and `update` have data-parallel groups to split over, for a new run.

        A resumed or inspected run may have another mesh than the one that it was made for.

        Raises:
          ValueError: a mesh of several devices has a `data` of 1.
        """
        asked = "fsdp=True" if self.fsdp else f"update={self.update!r}"
        is_asked = self.fsdp or self.update == "sharded"
        require(
            not is_asked or self.mesh.data != 1 or {*self.mesh.sizes.values()} == {1},
            f"{asked} shards over data-parallel groups, but mesh {short_name(self.mesh)} has data=1\n"
            f"Fix: use a mesh such as dp2, or leave it out.",
        )

    def check(self, batch_size: int, num_steps: int | None) -> None:
        """Checks that batches divide as the layout requires.

        Args:
          batch_size: rows of a batch.
          num_steps: its time steps; None if the model has no time.
        Raises:
          ValueError: a size does not divide; the message names both sizes and the nearest that work. Or
            the mesh still has a -1.
        """
        sizes = self.mesh.sizes
        require(
            -1 not in sizes.values(),
            f"mesh {self.mesh}: a size is not inferred yet\nFix: use resolve().",
        )
        known = ("shares", self.group_shares, DATA), ("speeds", self.speeds, STAGE)
        for name, own, axis in known:
            require(
                own is None or len(own) == sizes[axis],
                f"{name}={own}: expected {sizes[axis]} ({axis}), got {len(own or ())}\n"
                f"Fix: give one number for each along {axis}, or {name}=None (--{name} None).",
            )
        parts = {DATA: sizes[DATA]} if self.shares is None else {"sum of shares": sum(self.shares)}
        if self.pipeline.num_microbatches > 1:
            parts["num_microbatches"] = self.pipeline.num_microbatches
        check_divides("batch_size", batch_size, parts)
        if num_steps is not None:
            check_divides("seq_len", num_steps, {"num_chunks": self.num_chunks})


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of optax and its learning rate, as options of a task.

    It receives the conjugates of complex gradients, so that complex parameters follow the slope of the loss.

    Attributes:
      name: Optimizer, by its name in optax.
      learning_rate: Peak learning rate.
      lr_schedule: Learning rate after the warm-up. linear and cosine fall to zero at the last step;
        exponential decays in steps.
      warmup_steps: Steps of linear warm-up. By default 20, or a tenth of the run if that is less.
      hold_steps: Steps at the peak learning rate, between warm-up and decay.
      lr_decay: Factor of each decay, for the exponential schedule.
      lr_decay_every: Steps between decays, for the exponential schedule.
      weight_decay: Weight decay of adamw. For sgd it is added to the gradient (L2). Other optimizers have
        none.
      momentum: Momentum of sgd. Other optimizers have none.

    Example:
      optimizer = jaxpar.OptimizerConfig("adamw", learning_rate=3e-4, weight_decay=0.1)
      task = jaxpar.adopt(Net, loss, batches={"x": x, "y": y}, optimizer=optimizer)
    """

    name: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    learning_rate: float = 5e-3
    lr_schedule: Literal["constant", "linear", "cosine", "exponential"] = "cosine"
    warmup_steps: int | None = None
    hold_steps: int = 0
    lr_decay: float = 0.5
    lr_decay_every: int = 100
    weight_decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "learning_rate", "lr_decay_every")
        is_factor = 0 < self.lr_decay <= 1
        require(is_factor, f"lr_decay={self.lr_decay}\nFix: use a factor above 0, at most 1.")
        require_rate(self, "momentum")
        require_not_negative(self, "warmup_steps", "hold_steps", "weight_decay")
        require_int32(self, "warmup_steps", "hold_steps", "lr_decay_every")
        for name, optimizers in (("weight_decay", ("adamw", "sgd")), ("momentum", ("sgd",))):
            require(
                getattr(self, name) == 0 or self.name in optimizers,
                f"{name}={getattr(self, name)} has no effect with optimizer {self.name!r}\n"
                f"Fix: use {name}=0, or name={' or '.join(map(repr, optimizers))}.",
            )

    def __str__(self) -> str:
        facts = [self.name, f"learning rate {self.learning_rate:g} ({self.lr_schedule})"]
        if self.momentum:
            facts.append(f"momentum {self.momentum:g}")
        if self.weight_decay:
            facts.append(f"weight decay {self.weight_decay:g}")
        return ", ".join(facts)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of a run, logging, validation, checkpoints, and the response to NaN and infinity.

    Attributes:
      num_steps: Optimizer steps to train.
      clip_norm: Limit of the global gradient norm, for gradient clipping. 0 turns clipping off. By default 1
        for an OptimizerConfig, and no clipping for your own optimizer.
      nonfinite: Response to a loss or gradient norm that is NaN or infinite. stop saves the state before that
        step and ends the run. skip leaves out the update, resets the recurrent state and continues with the
        next batch. NaN or infinite parameters always end the run.
      max_skipped: Steps that nonfinite=skip may leave out in one run. One more ends the run.
      seed: Random seed for initialization, dropout and data order.
      log_every: Steps between progress lines.
      eval_every: Steps between validations. 0 validates only at the end.
      patience: Early stopping: end the run after this many validations in a row without a new lowest loss. 0
        turns it off.
      checkpoint_every: Steps between checkpoints. 0 saves only at the end.
      checkpoint_minutes: Also save a checkpoint, at the next progress line, if the last one is this many
        minutes old. 0 turns it off.
      keep_checkpoints: Number of newest checkpoints to keep.
      keep_best: Also keep the state with the lowest validation loss.
      track: Experiment trackers to log to, in addition to the run folder. wandb reads its own environment
        variables, such as WANDB_PROJECT.
      out_dir: Run folder, for metrics, settings and checkpoints. All processes must see it. It can be in a
        bucket, gs://BUCKET/FOLDER (needs the package gcsfs). By default the next free one of runs/0001,
        runs/0002, ...

    Example:
      train = jaxpar.TrainConfig(num_steps=4, log_every=2, checkpoint_every=4, out_dir="runs/small")
      result = jaxpar.fit(task, "dp2", train)
    """

    num_steps: int = 800
    clip_norm: float | None = None
    nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = 10
    seed: int = 0
    log_every: int = 25
    eval_every: int = 0
    patience: int = 0
    checkpoint_every: int = 100
    checkpoint_minutes: float = 0.0
    keep_checkpoints: int = 2
    keep_best: bool = True
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    out_dir: str | None = None

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "num_steps", "log_every", "keep_checkpoints", "max_skipped")
        require_not_negative(self, "clip_norm", "eval_every", "patience")
        require_not_negative(self, "checkpoint_every", "checkpoint_minutes")
        require(
            self.eval_every > 0 or self.patience == 0,
            f"patience={self.patience} needs validations during the run, but eval_every=0 has none\n"
            f"Fix: set eval_every.",
        )
        require(0 <= self.seed < 2**32, f"seed={self.seed}\nFix: use one from 0 to {2**32 - 1}.")
        require_int32(self, "num_steps", "max_skipped")
        if self.out_dir is not None:
            require(self.out_dir != "", "out_dir='' names no folder\nFix: leave it out.")
            check_path("out_dir", self.out_dir, of_run=True)

    @property
    def allowed_skips(self) -> int:
        """Number of steps that may be skipped."""
        return self.max_skipped if self.nonfinite == "skip" else 0


def num_segments(num_chunks: int) -> int:
    """The divisor of a number of chunks nearest to its square root, other than the number itself."""
    divisors = [n for n in range(1, num_chunks) if num_chunks % n == 0] or [1]
    return min(divisors, key=lambda n: abs(n - num_chunks**0.5))
