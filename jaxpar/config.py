"""Settings that every task shares: devices and how they share a step, the optimizer, how a run proceeds.

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
    """How a batch is cut and moves through the stages.

    Without stages only `num_microbatches` matters, and with remat `num_chunks`.

    Attributes:
      schedule: what runs when; see `schedules.make_schedule`.
      num_microbatches: M, slices of the batch dim (of each of its `Parallel.shares`), which run one after
        the other on every data-parallel group, with their gradients added up: gradient accumulation,
        where there are no stages.
      num_chunks: K, slices of the time dim; the state of layers stays on their stage between chunks.
      num_groups: groups of layers on each stage, for "interleaved"; "v" has 2, the others 1.
      zero_bubble: take the gradients of weights (W) out of backward units, to fill idle time with them, in no
        more memory. With remat they stay, since W needs more than remat keeps; and with "gpipe".
      placement: which layers are on each stage (and group): "balanced" by `placement.balance`, so that
        ticks are the shortest, the head included; "even"; their numbers, such as (3, 3, 2); or all
        parts by name, such as "first, 0-2 | 3-5 | 6-7, last". A stage may have none.
      head: "last" keeps what follows the layers on the last stage, "sharded" splits it over all stages
        (the model must have a method `last_part`, or call linear layers whose outputs divide); "auto" is as
        the placement names it, or "sharded" where the model has the method, or less is sent so.
      unroll: unroll the layers of a stage, with their weights laid out for it once a step: faster where
        chunks are short, at the price of more memory and a larger program. Only for layers of one kind,
        without groups.
      remat: keep inputs instead of residuals, and rerun each forward before its backward.
      remat_keeps: where these inputs (and the carries before each chunk) are kept: on the "device"; in the
        memory of the "host" (on CPUs it is the same); or not at all. "carries" cuts the window into about
        sqrt(K) segments of chunks and keeps the carries before each: the segments run forward once for these
        carries, and then again one by one, the last first, forward and backward, with the residuals of one
        segment at a time.

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
            f"num_chunks={self.num_chunks} with remat_keeps='carries' has no segments of two chunks\n"
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
                f"head={self.head!r} with placement={self.placement!r}, which decides it\n"
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
    """Devices, and how they share a step.

    Attributes:
      mesh: its shape, such as dp2pp2tp2; without it all devices share the
        batch.
      pipeline: how a batch moves through the stages.
      shares: parts of every batch that each data-parallel group takes, such as (3, 1) for a first one that
        is three times as fast as the second; None gives all of them the same.
      speeds: how fast the devices of each stage are, beside each other, such as (1, 1, 2, 2) for two last
        stages that are twice as fast; layers are placed by it. None takes all of them for equal.
      fsdp: store parameters split over `data` as well (arXiv:2304.11277). Without stages each layer is
        gathered for each of its passes, and its gradient scattered; with stages, or unequal shares, all are
        gathered once a step.
      update: where optimizer state lies and the update runs. "replicated": on every data-parallel group;
        "sharded": split over `data` (ZeRO-1, arXiv:1910.02054); "host": split likewise, in host memory,
        so that devices hold parameters and gradients alone (ZeRO-Offload, arXiv:2101.06840).

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
            f"speeds={self.speeds} with placement={self.pipeline.placement!r}, which does not go by them\n"
            f"Fix: use placement='balanced', or leave out speeds.",
        )

    @classmethod
    def of(cls, parallel: "Parallel | MeshConfig | str | None", default: "Parallel") -> "Parallel":
        """The layout that was given as a mesh, as the shape of one, or as None for the default.

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
        """Whether all data-parallel groups take the same."""
        return self.shares is None or len(set(self.shares)) == 1

    @property
    def splits_units(self) -> bool:
        """Whether devices of `tensor` share a unit's work, in which others do not take part.

        Stages, and groups that take fewer rows, are not all in it at the same time.
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
        """K, chunks of time; 1 without stages and remat."""
        return self.pipeline.num_chunks if self.mesh.stage > 1 or self.pipeline.remat else 1

    @property
    def num_segments(self) -> int:
        """Parts of a window, of as many chunks each, that run one after the other; see `remat_keeps`."""
        return num_segments(self.num_chunks) if self.pipeline.remat_keeps == "carries" else 1

    @property
    def num_groups(self) -> int:
        """Groups of layers on each stage; 1 without stages."""
        if self.mesh.stage == 1:
            return 1
        return 2 if self.pipeline.schedule == "v" else self.pipeline.num_groups

    @property
    def zero_bubble(self) -> bool:
        """Whether the weight gradients are apart: not without stages, and not with remat."""
        pipeline = self.pipeline
        is_able = self.mesh.stage > 1 and not pipeline.remat and pipeline.schedule != "gpipe"
        return pipeline.zero_bubble and is_able

    @property
    def num_units(self) -> int:
        """Of equal size, into which a batch is cut."""
        return sum(self.group_shares) * self.pipeline.num_microbatches * self.num_chunks

    def microbatch_rows(self, batch_size: int) -> int:
        """Rows of a microbatch, given those of a batch."""
        return batch_size // (sum(self.group_shares) * self.pipeline.num_microbatches)

    def resolve(self, num_available: int | None = None) -> Self:
        """With a -1 in the mesh inferred; see `MeshConfig.resolve`."""
        return dataclasses.replace(self, mesh=self.mesh.resolve(num_available))

    def on_mesh(self, mesh: MeshConfig) -> Self:
        """The same on another mesh, without what was chosen for the old number of stages or groups."""
        pipeline, shares, speeds = self.pipeline, self.shares, self.speeds
        if mesh.stage != self.mesh.stage:
            pipeline, speeds = dataclasses.replace(pipeline, placement="balanced"), None
        if mesh.data != self.mesh.data:
            shares = None
        return dataclasses.replace(self, mesh=mesh, pipeline=pipeline, shares=shares, speeds=speeds)

    def check_splits(self) -> None:
        """Checks that there is something to split over where that is asked for; for a run that begins.

        One that goes on, or is looked at, may have another mesh than it was made for.

        Raises:
          ValueError: a mesh of several devices has a `data` of 1.
        """
        asked = "fsdp=True" if self.fsdp else f"update={self.update!r}"
        is_asked = self.fsdp or self.update == "sharded"
        require(
            not is_asked or self.mesh.data != 1 or {*self.mesh.sizes.values()} == {1},
            f"{asked} splits over data, and mesh {short_name(self.mesh)} has data=1\n"
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
        if sizes[STAGE] == 1 and self.num_chunks == 1:
            return
        if num_steps is not None:
            check_divides("seq_len", num_steps, {"num_chunks": self.num_chunks})
        elif self.num_chunks > 1:
            raise ValueError(
                f"num_chunks={self.num_chunks}: the model has no time dim (time_major = False)\n"
                f"Fix: use num_chunks=1."
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of optax and its learning rate, as options of a task.

    Attributes:
      name: as in optax.
      learning_rate: its peak.
      lr_schedule: its course after the warm-up. "linear" and "cosine" fall to zero at the last step;
        "exponential" multiplies the rate by `lr_decay` every `lr_decay_every` steps, all at once.
      warmup_steps: steps of linear warm-up, from learning_rate / warmup_steps; None is 20, or a tenth of
        a run of fewer steps.
      hold_steps: steps at the peak after the warm-up, before the rate falls.
      lr_decay: factor of "exponential".
      lr_decay_every: steps between two decays of "exponential".
      weight_decay: of adamw; of sgd it is added to the gradient (L2). 0 with others.
      momentum: of sgd; 0 with others.

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
        return f"{self.name}, learning rate {self.learning_rate:g} ({self.lr_schedule})"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The steps of a run, what happens to bad ones, and what is printed and kept.

    Attributes:
      num_steps: optimizer steps.
      clip_norm: bound on the global norm of the gradients; 0 for none.
      nonfinite: what happens when the loss or gradient norm of a step is not finite. "stop": the run ends,
        and the state before the step is saved. "skip": parameters and optimizer state stay as they are, the
        carried state is reset, and the next batch is taken. Parameters that are not finite end the run.
      max_skipped: how many steps of a run "skip" may skip; one more stops it.
      seed: of initial values, dropout and the order of the data.
      log_every: steps between lines of progress.
      eval_every: steps between validations; 0 for the end only.
      patience: validations in a row without a lower loss than the lowest before, after which the run ends; 0
        for none.
      checkpoint_every: steps between checkpoints; 0 for the end only.
      checkpoint_minutes: minutes after a checkpoint, or the beginning, until the next line of progress brings
        another one; 0 for none.
      keep_checkpoints: the newest ones kept.
      keep_best: also save and keep the state with the lowest validation loss.
      track: log to these as well; wandb by its variables, such as WANDB_PROJECT.
      out_dir: where metrics, settings and checkpoints are written: a folder, which all processes share, or
        gs://BUCKET/FOLDER (with the package gcsfs); None takes the next free folder of runs/0001,
        runs/0002, ...

    Example:
      train = jaxpar.TrainConfig(num_steps=4, log_every=2, checkpoint_every=4, out_dir="runs/small")
      result = jaxpar.fit(task, "dp2", train)
    """

    num_steps: int = 800
    clip_norm: float = 1.0
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
            f"patience={self.patience} needs validations during the run, and eval_every=0 has none\n"
            f"Fix: set eval_every.",
        )
        require(0 <= self.seed < 2**32, f"seed={self.seed}\nFix: use one from 0 to {2**32 - 1}.")
        require_int32(self, "num_steps", "max_skipped")
        if self.out_dir is not None:
            require(self.out_dir != "", "out_dir='' names no folder\nFix: leave it out.")
            check_path("out_dir", self.out_dir, of_run=True)

    @property
    def allowed_skips(self) -> int:
        """Steps that may be skipped."""
        return self.max_skipped if self.nonfinite == "skip" else 0


def num_segments(num_chunks: int) -> int:
    """The divisor of a number of chunks nearest to its square root, other than the number itself."""
    divisors = [n for n in range(1, num_chunks) if num_chunks % n == 0] or [1]
    return min(divisors, key=lambda n: abs(n - num_chunks**0.5))
