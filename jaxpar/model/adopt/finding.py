"""Finds the blocks of a user's model, and refuses models that cannot be split."""

import re
from collections.abc import Iterator, Sequence

import jax
from flax import nnx

from jaxpar.base.checks import see
from jaxpar.base.types import Module

Path = tuple[str | int, ...]
Blocks = list[tuple[Path, Module]]

_USE = (
    "the path of an nnx.List, nnx.Sequential or nnx.Dict of blocks ('decoder.blocks'), a part of one "
    "('net[2:10]'), numbered attributes ('block_*'), or a module with stacked parameters, as of nnx.vmap"
)


def find_blocks(model: Module, where: str) -> Blocks:
    """The blocks of a model, and their paths.

    Args:
      where: see `Task.layers`.
    Raises:
      ValueError: there are none.
    """
    node, path = model, Path()
    steps, _, part = where.partition("[")
    for name in steps.split("."):
        if found := _numbered(node, name):
            return [((*path, own), getattr(node, own)) for own in found]
        if name not in (inner := getattr(node, "__dict__", {})):
            has = ", ".join(own for own in inner if not own.startswith("_")) or "no attributes"
            what = ".".join(map(str, path)) or "the model"
            raise ValueError(
                f"layers={where!r}: {what} has no {name!r}; it has {has}.\nFix: use {_USE}."
            )
        node, path = getattr(node, name), (*path, name)
        if isinstance(node, nnx.Sequential):
            node, path = node.layers, (*path, "layers")
    blocks = _items(node, path)
    if part:
        bounds = re.fullmatch(r"(\d*):(\d*)\]", part)
        blocks = blocks[slice(*(int(n) if n else None for n in bounds.groups()))] if bounds else []
    elif isinstance(node, nnx.Module) and not blocks:
        sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(nnx.state(node, nnx.Param))}
        blocks = [(path, node)] * sizes.pop()[0] if len(sizes) == 1 and () not in sizes else []
    if blocks and all(isinstance(block, nnx.Module) for _, block in blocks):
        return blocks
    raise ValueError(
        f"layers={where!r}: a {type(node).__name__} has no such blocks.\nFix: use {_USE}."
    )


def possible_layers(model: Module) -> Iterator[str]:
    """The paths of all lists of two and more modules, the outermost first."""
    todo: list[tuple[Path, Module]] = [((), model)]
    while todo:
        path, node = todo.pop(0)
        items = _items(node, path)
        if len(items) > 1 and all(isinstance(block, nnx.Module) for _, block in items):
            yield ".".join(map(str, path))
        elif isinstance(node, nnx.Pytree):
            todo += [((*path, name), own) for name, own in vars(node).items() if name[:1] != "_"]


def _items(node: Module, path: Path) -> Blocks:
    """What is in a list or dict of modules."""
    if isinstance(node, nnx.Dict):
        items = sorted((name, own) for name, own in vars(node).items() if name[:1] != "_")
    else:
        items = enumerate(node) if isinstance(node, nnx.List | list | tuple) else ()
    return [((*path, key), block) for key, block in items]


def _numbered(node: Module, name: str) -> list[str]:
    """The attributes of such a name, with a number in place of the star, in the order of the numbers."""
    if "*" not in name:
        return []
    pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)") + "$")
    found = [(int(m[1]), own) for own in vars(node) if (m := pattern.match(own))]
    return [own for _, own in sorted(found)]


def check_sharing(model: Module, blocks: Sequence[Module]) -> None:
    """Raises a ValueError if two blocks, or a block and the rest of the model, share a parameter."""
    owners: dict[int, tuple[int, str]] = {}
    for number, block in enumerate(blocks):
        for path, node in nnx.iter_graph(block):
            name = ".".join(map(str, path))
            if (
                isinstance(node, nnx.Param)
                and owners.setdefault(id(node), (number, name))[0] != number
            ):
                raise ValueError(
                    f"blocks {owners[id(node)][0]} and {number} share {name}, but each may run on another "
                    f"device.\nFix: give each block its own parameters."
                )
    todo, seen = [model], {id(block) for block in blocks}
    while todo:  # what is found without looking into blocks is of the rest
        node = todo.pop()
        if id(node) in owners:
            number, name = owners[id(node)]
            raise ValueError(
                f"{name} of block {number} is also used outside the block, maybe on another device.\n"
                f"Fix: give each its own parameters."
            )
        if id(node) not in seen and isinstance(node, nnx.Pytree | list | tuple | dict):
            seen.add(id(node))
            inner = vars(node) if isinstance(node, nnx.Pytree) else node
            todo += inner.values() if isinstance(inner, dict) else inner


def check_state(model: Module) -> None:
    """Raises a ValueError for variables that a call changes for all rows, such as those of nnx.BatchNorm."""
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        if isinstance(leaf, nnx.BatchStat):
            raise ValueError(
                f"the model has {name}, a BatchStat: it needs all rows of a batch, but each device has only "
                f"some.\nFix: use nnx.LayerNorm, nnx.RMSNorm or nnx.GroupNorm."
                f"{see('Batch norm: the model has a BatchStat')}"
            )
        if isinstance(leaf, nnx.Cache):
            raise ValueError(
                f"the model has {name}, a Cache, which changes when the model is called.\n"
                f"Fix: make the model without decoding, such as decode=False."
            )
