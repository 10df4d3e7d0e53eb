"""What a person sees of a run: what will happen, how it goes on, how it ended."""

import dataclasses
import datetime
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import rich.box
import rich.progress
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.buckets import BucketedSentences
from jaxpar.config import Config, ImageConfig, RunConfig
from jaxpar.corpus import Corpus
from jaxpar.images import Images
from jaxpar.kernel import KernelChoice
from jaxpar.placement import LAYER_COST, tick_cost
from jaxpar.sharding import named_leaves
from jaxpar.state import TrainState

WIDTH = 100  # of what goes into a file or pipe


@dataclasses.dataclass(frozen=True)
class Progress:
    """One line of training progress.

    Attributes:
      step: optimizer steps taken.
      loss: of the batch of this step, in nats.
      grad_norm: before clipping.
      learning_rate: of this step.
      seconds: since this process began.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float

    def to_text(self) -> str:
        """What a person wants to know of it."""
        return f"loss {self.loss:6.3f}"


@dataclasses.dataclass(frozen=True)
class TextProgress(Progress):
    """Progress on a text: perplexity of the batch of this step, speed since the line before."""

    perplexity: float
    tokens_per_second: float

    def to_text(self) -> str:
        """Loss, perplexity, tokens/s."""
        speed = f"{self.tokens_per_second:9,.0f} tokens/s"
        return f"{super().to_text()}  perplexity {self.perplexity:8.1f}  {speed}"


@dataclasses.dataclass(frozen=True)
class ImageProgress(Progress):
    """Progress on images: speed since the line before."""

    images_per_second: float

    def to_text(self) -> str:
        """Loss, images/s."""
        return f"{super().to_text()}  {self.images_per_second:9,.0f} images/s"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that changed no parameter, because its loss or gradient was not finite.

    Attributes:
      step: as in `Progress`.
      nonfinite: which of them.
      epoch, window: the place of its batch in the data, counted from 0.
      num_windows: batches of an epoch.
      skipped: such steps up to this one.
    """

    step: int
    nonfinite: Literal["loss", "gradient"]
    epoch: int
    window: int
    num_windows: int
    skipped: int

    def to_text(self) -> str:
        """What is wrong, and where."""
        return (
            f"the {self.nonfinite} of step {self.step} is not finite (batch {self.window} of "
            f"{self.num_windows} in epoch {self.epoch}, from 0)"
        )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss (nats) on a split."""

    split: str
    loss: float

    def to_text(self) -> str:
        """What a person wants to know of it."""
        return f"{self.split} " + "  ".join(f"{k} {v}" for k, v in self.to_columns().items())

    def to_columns(self) -> dict[str, str]:
        """The same for a table, by its headings."""
        return {"loss": f"{self.loss:.4f}"}


@dataclasses.dataclass(frozen=True)
class TextEvaluation(Evaluation):
    """Perplexity on a split, and that which word frequencies reach."""

    perplexity: float
    unigram_perplexity: float

    def to_text(self) -> str:
        """Both in a line."""
        known = self.unigram_perplexity
        return f"{self.split} perplexity {self.perplexity:.1f}  (unigram {known:.1f})"

    def to_columns(self) -> dict[str, str]:
        """Both, and their ratio."""
        return {
            "perplexity": f"{self.perplexity:.1f}",
            "unigram perplexity": f"{self.unigram_perplexity:.1f}",
            "ratio": f"{self.perplexity / self.unigram_perplexity:.2f}",
        }


@dataclasses.dataclass(frozen=True)
class ImageEvaluation(Evaluation):
    """Share of the images of a split that are told right."""

    accuracy: float

    def to_columns(self) -> dict[str, str]:
        """Accuracy in percent, loss."""
        return {"accuracy": f"{100 * self.accuracy:.1f} %", **super().to_columns()}


class Report:
    """Is told what a run does, and says nothing. Derive from it to say something."""

    def plan(self, config: RunConfig, mesh: Mesh, data: Corpus | Images, state: TrainState) -> None:
        """Before anything is compiled; `state` is abstract."""

    def buckets(self, batches: BucketedSentences) -> None:
        """After the plan, if the lines of the text are read in buckets."""

    def kernel(self, choice: KernelChoice) -> None:
        """After the plan, if the config left the kernel of the layers open."""

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Before the first step taken here; `step` were taken before."""

    def progress(self, progress: Progress, num_steps: int) -> None:
        """After the first step and every `log_every`."""

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """After a step that was skipped, when the host looks; up to `allowed` of them in a run."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """After each evaluation of a split."""

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | None) -> None:
        """After the last step taken here."""

    def profile(self, path: Path) -> None:
        """After `end`, if steps were traced; `path` is for Perfetto."""

    def finish(self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: float) -> None:
        """When everything is written; `evaluations` is empty if the run was stopped."""


class ConsoleReport(Report):
    """Prints tables and progress with rich: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None):
        self.console = console or make_console()
        self._live: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._out_dir = Path()

    def plan(self, config: RunConfig, mesh: Mesh, data: Corpus | Images, state: TrainState) -> None:
        """Devices, mesh, placement, parameters, data."""
        facts = _facts()
        for name, value in _describe_plan(config, mesh, data):
            facts.add_row(name, value)
        self.console.print(facts, "")
        self.console.print(parameter_table(state.params))
        self._print("\n" + describe_bytes(state))

    def buckets(self, batches: BucketedSentences) -> None:
        """Lengths, sentences, padding."""
        self._print("\n" + batches.to_text() + "\n")

    def kernel(self, choice: KernelChoice) -> None:
        """Which, and why."""
        self._print(f"kernel of the layers: {choice.name}; {choice.reason}\n")

    def begin(self, step: int, num_steps: int, out_dir: Path) -> None:
        """Where it goes; a live line on a terminal."""
        self._out_dir = out_dir
        done = f", resumed at step {step}" if step else ""
        self._print(f"training {num_steps} steps into {out_dir}{done}; the first is being compiled")
        if self.console.is_terminal:
            columns = rich.progress
            live = columns.Progress(
                columns.TextColumn("step {task.completed}/{task.total}"),
                columns.BarColumn(bar_width=20),
                columns.TextColumn("{task.description}"),
                console=self.console,
            )
            self._task = live.add_task("", total=num_steps, completed=step)
            live.start()
            self._live = live

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Loss, speed, ETA."""
        line = f"{progress.to_text()}  ETA {self._eta(progress, num_steps - progress.step)}"
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=progress.step, description=line)
        else:
            width = len(str(num_steps))
            self._print(f"step {progress.step:{width}}/{num_steps}  {line}")

    def skipped(self, skipped: Skipped, allowed: int) -> None:
        """A line."""
        self._print(f"{skipped.to_text()}: skipped, {skipped.skipped} of {allowed} allowed")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """A line."""
        self._print(f"step {step}  {evaluation.to_text()}")

    def end(self, step: int, num_steps: int, stopped_by: signal.Signals | None) -> None:
        """Says so if the run was stopped."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if stopped_by is not None:
            self._print(
                f"stopped by {stopped_by.name} after step {step}/{num_steps}; its state is saved, "
                f"go on with --resume --train.out-dir {self._out_dir}"
            )

    def profile(self, path: Path) -> None:
        """How to look at it."""
        self._print(f"trace of a few steps: {path}; open it on ui.perfetto.dev")

    def finish(self, evaluations: dict[str, Evaluation], out_dir: Path, seconds: float) -> None:
        """Evaluations, and where everything is."""
        if evaluations:
            self.console.print("", evaluation_table(list(evaluations.values())), "")
        files = ", ".join(sorted(p.name + "/" * p.is_dir() for p in out_dir.glob("[!.]*")))
        self._print(f"{_duration(seconds)} in all; {out_dir} holds {files}")

    def _eta(self, progress: Progress, steps_left: int) -> str:
        """From the speed since the line before."""
        now = time.perf_counter()
        mark, self._mark = getattr(self, "_mark", None), (now, progress.step)
        if mark is None or progress.step == mark[1]:
            return "-:--"
        return _duration((now - mark[0]) / (progress.step - mark[1]) * steps_left)

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or `WIDTH` columns in a file or pipe."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=WIDTH)


def parameter_table(params: Any) -> Table:
    """Every parameter with its shape, dims, the axes that split it, and its bytes on one device.

    Args:
      params: Flax variables or arrays, with shardings if they are abstract.
    Raises:
      ValueError: an abstract one has no sharding.
    """
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name, justify in (
        ("parameter", "left"),
        ("shape", "left"),
        ("dims / axes that split them", "left"),
        ("shard", "left"),
        ("bytes/device", "right"),
    ):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for name, leaf in named_leaves(params):
        is_variable = isinstance(leaf, nnx.Variable)
        array: Any = leaf.get_value() if is_variable else leaf
        dims = (is_variable and leaf.get_metadata("out_sharding", None)) or [None] * array.ndim
        layout = array.sharding
        if layout is None:
            raise ValueError(
                f"parameter {name} of shape {array.shape} is abstract and has no sharding; give "
                f"the params of abstract_state(config, mesh), or real ones"
            )
        sizes = layout.mesh.shape if isinstance(layout, NamedSharding) else {}
        spec = (*layout.spec, *[None] * array.ndim)[: array.ndim] if sizes else [None] * array.ndim
        text = Text()
        for dim, axes in zip(dims, spec, strict=True):
            names = [axes] if isinstance(axes, str) else list(axes or ())
            text.append(f"{dim or '-'}")
            text.append("".join(f"/{axis}" for axis in names if sizes[axis] > 1), style="bold cyan")
            text.append(", ")
        if layout.num_devices > 1 and layout.is_fully_replicated:
            text.append("replicated  ", style="bold yellow")
        text.right_crop(2)
        table.add_row(
            name,
            format_shape(array.shape),
            text,
            format_shape(_shard(array)),
            format_bytes(_bytes(array)),
        )
    return table


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """A row for each split, of at least one."""
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("", *evaluations[0].to_columns()):
        table.add_column(name, justify="right" if name else "left")
    for part in evaluations:
        table.add_row(part.split, *part.to_columns().values())
    return table


def _describe_plan(config: RunConfig, mesh: Mesh, data: Corpus | Images) -> list[tuple[str, str]]:
    device = mesh.devices.flat[0]
    if isinstance(config, ImageConfig):
        assert isinstance(data, Images)
        of_model = _describe_images(config, data)
    else:
        assert isinstance(data, Corpus)
        of_model = _describe_text(config, data)
    return [
        ("devices", f"{mesh.size} x {device.device_kind} ({device.platform})"),
        ("mesh", " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())),
        *of_model,
        (
            "optimizer",
            f"{config.train.optimizer}, {config.train.num_steps} steps, "
            f"learning rate {config.train.learning_rate:g} ({config.train.lr_schedule})",
        ),
    ]


def _describe_images(config: ImageConfig, images: Images) -> list[tuple[str, str]]:
    model = config.model
    sizes = (", ".join(map(str, sizes)) for sizes in (model.channels, model.hidden_sizes))
    convolutions, dense = sizes
    splits = (images.train, images.valid, images.test)
    train, valid, test = (f"{len(split.labels_B):,}" for split in splits)
    return [
        (
            "layers",
            f"convolutions of {convolutions}; dense of {dense or 'no'}, {model.num_classes}",
        ),
        ("strategy", model.strategy),
        ("images", f"{images.name}: {train} train, {valid} valid, {test} test"),
        ("batch", f"{config.data.batch_size} images"),
    ]


def _describe_text(config: Config, corpus: Corpus) -> list[tuple[str, str]]:
    M, K = config.pipeline.num_microbatches, config.num_chunks
    placement = config.placement
    model, data = config.model, config.data
    assert model.vocab_size is not None
    on_stages = ", ".join(f"stage {stage}: {n}" for stage, n in enumerate(placement))
    units = [_count(M, "microbatch", "es")] * (config.mesh.stage > 1 or M > 1)
    units += [f"{_count(K, 'chunk', 's')} of time"] * (config.mesh.stage > 1)
    shares = f", in shares of {' : '.join(map(str, config.shares))}" * (not config.has_equal_shares)
    padding = model.vocab_size - len(corpus.vocabulary)
    return [
        ("layers", f"{model.num_layers} ({on_stages}); {' x '.join(units)}".removesuffix("; ")),
        *describe_balance(config),
        (
            "corpus",
            f"{corpus.name}, {corpus.level}s: {len(corpus.train):,} train, "
            f"{len(corpus.valid):,} valid, {len(corpus.test):,} test",
        ),
        ("vocabulary", f"{len(corpus.vocabulary):,}" + f" + {padding} padding" * bool(padding)),
        (
            "batch",
            f"{data.batch_size} rows x {data.seq_len} steps = "
            f"{data.batch_size * data.seq_len:,} tokens{shares}"
            if not data.num_buckets
            else f"{data.batch_size} rows x {data.seq_len} steps or less, in buckets{shares}",
        ),
    ]


# A placement whose ticks take so much longer than those of the best one is worth a warning.
TOLERATED_IMBALANCE = 1.1


def describe_balance(config: Config) -> list[tuple[str, str]]:
    """The share of the work that each stage has, and what a better placement would gain."""
    stages, head = config.mesh.stage, config.last_cost
    if stages == 1:
        return []

    def work(placement: tuple[int, ...]) -> list[float]:
        """Of every place, in layers."""
        return [*placement[:-1], placement[-1] + head]

    own = work(config.placement)
    on_stage = [sum(own[stage::stages]) / sum(own) for stage in range(stages)]
    line = ", ".join(f"stage {stage}: {share:.0%}" for stage, share in enumerate(on_stage))
    lines = [("work", line + f"; the head is that of {head:.1f} layers" * (head > 0))]
    pipeline = dataclasses.replace(config.pipeline, placement="balanced")
    best = dataclasses.replace(config, pipeline=pipeline).placement
    takes, least = (tick_cost(p, head_cost=LAYER_COST * head) for p in (config.placement, best))
    if takes > TOLERATED_IMBALANCE * least:
        lines.append(
            (
                "warning",
                f"stages wait for each other: a tick of placement={config.placement} takes as long as "
                f"{takes / LAYER_COST:.1f} layers, of placement={best} as {least / LAYER_COST:.1f}; a step "
                f"would be up to {takes / least:.2f} times as fast",
            )
        )
    return lines


def describe_bytes(state: TrainState) -> str:
    """Parameters in all, and what a device holds of the state."""
    params, opt_state, carry = (
        jax.tree.leaves(tree) for tree in (state.params, state.opt_state, state.carry)
    )
    count = sum(math.prod(leaf.shape) for leaf in params)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in params)
    where = "" if state.opt_memory is None else " in host memory"
    parts = [
        f"{name} {format_bytes(sum(map(_bytes, leaves)))}"
        for name, leaves in (
            ("parameters", params),
            (f"optimizer state{where}", opt_state),
            ("carried state", carry),
        )
        if leaves
    ]
    return f"{count:,} parameters, {format_bytes(whole)}; per device: {', '.join(parts)}\n"


def _count(number: int, noun: str, ending: str) -> str:
    return f"{number} {noun}{ending * (number != 1)}"


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    return table


def _shard(leaf: Any) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape)


def _bytes(leaf: Any) -> int:
    return math.prod(_shard(leaf)) * leaf.dtype.itemsize


def format_shape(shape: tuple[int, ...]) -> str:
    """4x4x192; a scalar's is "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


def format_seconds(seconds: float) -> str:
    """With three digits: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def format_bytes(num_bytes: float) -> str:
    """In powers of 1000: 516.1 kB."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _duration(seconds: float) -> str:
    text = str(datetime.timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")
