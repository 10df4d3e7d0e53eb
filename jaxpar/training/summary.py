"""What a run will do, before it begins: on which devices, with which parameters, how well balanced."""

import dataclasses
import math
from typing import Any

import jax
import rich.box
from jax.sharding import Mesh, NamedSharding
from rich.table import Table
from rich.text import Text

from jaxpar.config import Config, ImageConfig, RunConfig
from jaxpar.data.corpus import Corpus
from jaxpar.data.images import Images
from jaxpar.display import format_bytes, format_count, format_shape
from jaxpar.pipeline.placement import LAYER_COST, tick_cost
from jaxpar.sharding import is_variable, named_leaves
from jaxpar.state import TrainState

# A placement whose ticks take so much longer than those of the best one is worth a warning.
TOLERATED_IMBALANCE = 1.1


def describe_plan(config: RunConfig, mesh: Mesh, data: Corpus | Images) -> list[tuple[str, str]]:
    """Devices, mesh, layers, data, optimizer: (what, in words)."""
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
    units = [format_count(M, "microbatch", "es")] * (config.mesh.stage > 1 or M > 1)
    units += [f"{format_count(K, 'chunk')} of time"] * (config.mesh.stage > 1)
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
        array: Any = leaf.get_value() if is_variable(leaf) else leaf
        named = leaf.get_metadata("out_sharding", None) if is_variable(leaf) else None
        dims = named or [None] * array.ndim
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


def _shard(leaf: Any) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape)


def _bytes(leaf: Any) -> int:
    return math.prod(_shard(leaf)) * leaf.dtype.itemsize
