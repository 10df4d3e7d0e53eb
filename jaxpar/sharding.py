"""From named dims to shardings: one rule table maps each dim to the mesh axes that split it."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.axes import (
    BATCH,
    CHANNELS,
    DATA,
    DENSE_BATCH,
    DIMS,
    EMBED,
    FEATURES,
    HIDDEN,
    LAYERS,
    MESH_AXES,
    STAGE,
    TENSOR,
    TOKENS,
    UNITS,
    VOCAB,
)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Dim name -> mesh axes that split it, outermost first. Dims without a rule stay whole.

    Raises:
      ValueError: an unknown dim or axis name, two rules for one dim, or an axis twice in one rule.
    """

    table: tuple[tuple[str, tuple[str, ...]], ...]

    def __post_init__(self):
        dims = [dim for dim, _ in self.table]
        for dim, axes in self.table:
            if dims.count(dim) > 1:
                raise ValueError(f"there are {dims.count(dim)} rules for {dim!r}; keep one")
            if dim not in DIMS:
                raise ValueError(f"unknown dim name {dim!r} in a rule; names are {DIMS}")
            for axis in axes:
                if axis not in MESH_AXES:
                    raise ValueError(
                        f"rule {dim!r} -> {axes}: unknown mesh axis {axis!r}; axes are {MESH_AXES}"
                    )
            if len(set(axes)) < len(axes):
                raise ValueError(f"rule {dim!r} -> {axes} names an axis twice; name it once")

    @classmethod
    def make(cls, table: Mapping[str, str | tuple[str, ...] | None]) -> "Rules":
        """Rules from a dict such as `{"layers": "stage", "vocab": ("stage", "tensor"), "embed": None}`."""
        return cls(
            tuple((d, (a,) if isinstance(a, str) else tuple(a or ())) for d, a in table.items())
        )

    def replace(self, table: Mapping[str, str | tuple[str, ...] | None]) -> "Rules":
        """These rules with some of them changed."""
        return Rules.make({**dict(self.table), **table})

    def spec(self, dims: tuple[str | None, ...]) -> P:
        """The partition spec of an array with these named dims (None: a dim without a name).

        Raises:
          ValueError: an unknown dim name, or two dims of the array map to the same axis.
        """
        for dim in dims:
            if dim is not None and dim not in DIMS:
                raise ValueError(
                    f"unknown dim name {dim!r} in {dims}; names are {DIMS}, or None for a dim that stays "
                    f"whole"
                )
        table = dict(self.table)
        axes = [table.get(dim, ()) if dim is not None else () for dim in dims]
        used = [axis for split in axes for axis in split]
        if repeated := {axis for axis in used if used.count(axis) > 1}:
            raise ValueError(
                f"the rules split two dims of one array {dims} over the axis {min(repeated)!r}: {axes}; "
                f"change one of the rules"
            )
        return P(*(split[0] if len(split) == 1 else split or None for split in axes))


# A head's vocabulary is shared by all stages; `RULES_LAST` keeps it on each stage, for the last one's use.
RULES = Rules.make(
    {BATCH: DATA, LAYERS: STAGE, HIDDEN: TENSOR, EMBED: TENSOR, VOCAB: (STAGE, TENSOR)}
)
RULES_LAST = RULES.replace({VOCAB: TENSOR})

# What all devices of a mesh split of a network with convolutions below and dense layers above. The hybrid
# ("one weird trick", arXiv:1404.5997) splits the images of the convolutions, which have many activations,
# and the weights of the dense layers, which have many parameters. Between them activations change their
# layout: by an all-to-all if the first dense layer is row-parallel, by an all-gather if it is
# column-parallel.
ALL_DEVICES = (DATA, TENSOR)
STRATEGIES = {
    "hybrid": Rules.make({BATCH: ALL_DEVICES, FEATURES: ALL_DEVICES}),
    "hybrid-gather": Rules.make({BATCH: ALL_DEVICES, UNITS: ALL_DEVICES}),
    "data": Rules.make({BATCH: ALL_DEVICES, DENSE_BATCH: ALL_DEVICES}),
    "model": Rules.make({CHANNELS: ALL_DEVICES, FEATURES: ALL_DEVICES}),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rules on a mesh, for activations: `layout(x, BATCH, UNITS)` lays x out by the names of its dims.

    The names say what is communicated, and the compiler finds how. A column-parallel layer takes x whole
    and a row-parallel one takes it split:

        y = layout(up(layout(x, BATCH, None)), BATCH, UNITS)  # stays split over its last dim
        layout(y, BATCH, None)                                # is gathered
        layout(down(y), BATCH, None)                          # goes on, and the results are added

    Lay out both what enters a split layer and what leaves it: where either is left open, the compiler may
    choose to gather the weights.
    """

    mesh: Mesh
    rules: Rules

    def __call__(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """`x`, laid out by the names of its dims, inside or outside a traced function.

        Raises:
          ValueError: as many names as dims are not given, or a dim does not divide by its axes.
        """
        if len(dims) != x.ndim:
            raise ValueError(f"dims={dims} names {len(dims)} dims, the array has shape {x.shape}")
        spec = self.rules.spec(dims)
        check_split(f"array of shape {x.shape}", dims, x.shape, spec, self.mesh.shape)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def split_over_data(rules: Rules) -> Rules:
    """The rules with one dim of every parameter split over `data` as well.

    That is FSDP for parameters (arXiv:2304.11277) and ZeRO-1 for optimizer state (arXiv:1910.02054).
    """
    table = dict(rules.table)
    return rules.replace(
        {HIDDEN: (*table[HIDDEN], DATA), VOCAB: (*table[VOCAB], DATA), TOKENS: DATA}
    )


def shardings(tree: Any, mesh: Mesh, rules: Rules, memory_kind: str | None = None) -> Any:
    """`tree` with a `NamedSharding` for every array: annotated ones by the rules, others replicated.

    Args:
      memory_kind: such as "pinned_host"; None is the devices' own memory.
    """

    def of(leaf):
        if isinstance(leaf, nnx.Variable):
            return leaf.replace(NamedSharding(mesh, _spec(leaf, rules), memory_kind=memory_kind))
        return NamedSharding(mesh, P(), memory_kind=memory_kind)

    return jax.tree.map(of, tree, is_leaf=is_variable)


def constrain(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """`tree` with its arrays laid out by the rules, inside a traced function."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, rules))


def check_sizes(tree: Any, mesh: Mesh, rules: Rules) -> None:
    """Raises before tracing if a named dim does not divide by the axes that split it.

    Raises:
      ValueError: naming parameter, dim, axes, both sizes, and the nearest sizes that work.
    """
    for name, variable in annotated(tree):
        spec = _spec(variable, rules)
        check_split(f"parameter {name}", variable.out_sharding, variable.shape, spec, mesh.shape)


def check_split(
    what: str,
    dims: tuple[str | None, ...],
    shape: tuple[int, ...],
    spec: Iterable[str | tuple[str, ...] | None],
    sizes: Mapping[str, int],
) -> None:
    """Raises if a dim does not divide by the axes that split it.

    Args:
      spec: the axes that split each dim, as in a partition spec.
      sizes: of the mesh's axes.
    Raises:
      ValueError: as of `check_sizes`.
    """
    for dim, size, axes in zip(dims, shape, spec, strict=True):
        if axes is None:
            continue
        axes = (axes,) if isinstance(axes, str) else axes
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            below = size // parts * parts
            nearest = f"{below} or {below + parts}" if below else f"{parts}"
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ValueError(
                f"{what}: dim {dim!r} has size {size}, which does not split over {over}"
                + (f" = {parts}" if len(axes) > 1 else "")
                + f"; use {nearest}, or another mesh"
            )


def misplaced(
    tree: Any, mesh: Mesh | None, rules: Rules, memory_kind: str | None = None
) -> list[str]:
    """One line for every annotated array whose real sharding is not the one that its names ask for.

    Args:
      mesh: where the arrays should lie; None if no array lies on any.
      memory_kind: as `shardings`.
    """
    lines = []
    for name, variable in annotated(tree):
        array = variable.get_value()
        spec = _spec(variable, rules)
        actual = array.sharding
        if mesh is None or not isinstance(actual, NamedSharding) or actual.mesh != mesh:
            lines.append(f"{name} {array.shape}: declared {spec}, but lies on {actual}")
            continue
        declared = NamedSharding(mesh, spec, memory_kind=memory_kind)
        at_its_place = NamedSharding(mesh, spec, memory_kind=actual.memory_kind)
        if not actual.is_equivalent_to(at_its_place, array.ndim):
            shard = actual.shard_shape(array.shape)
            lines.append(
                f"{name} {array.shape}: declared {spec}, but is sharded {actual.spec} (shards {shard})"
            )
        elif actual.memory_kind != declared.memory_kind:
            lines.append(
                f"{name} {array.shape}: declared in {declared.memory_kind} memory, but lies in "
                f"{actual.memory_kind} memory"
            )
    return lines


def annotated(tree: Any) -> Iterator[tuple[str, nnx.Variable]]:
    """Name and variable of everything in `tree` that carries named dims."""
    for name, leaf in named_leaves(tree):
        if isinstance(leaf, nnx.Variable) and leaf.get_metadata("out_sharding", None):
            yield name, leaf


def named_leaves(tree: Any, separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Name and variable of everything in `tree`; name and array where it is in no variable."""
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_variable):
        yield jax.tree_util.keystr(path, simple=True, separator=separator), leaf


def _spec(variable: nnx.Variable, rules: Rules) -> P:
    dims = variable.get_metadata("out_sharding", None)
    if not dims:
        return P()
    if len(dims) != len(variable.shape):
        raise ValueError(
            f"a variable of shape {variable.shape} carries the names {dims}; an optimizer that keeps "
            f"state of another shape than its parameter cannot be sharded by the parameter's names"
        )
    return rules.spec(dims)


def is_variable(leaf: Any) -> bool:
    """Where `jax.tree` is to stop: at a variable, which knows the names of its dims."""
    return isinstance(leaf, nnx.Variable)
