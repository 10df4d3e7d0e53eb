"""From named dims to shardings: one rule table maps each dim to the mesh axes that split it."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import (
    BATCH,
    DATA,
    EMBED,
    GATES,
    HEADS,
    HIDDEN,
    INPUT,
    LAYERS,
    MESH_AXES,
    STAGE,
    TENSOR,
    TIME,
    TOKENS,
    VOCAB,
)
from jaxpar.base.checks import nearest_multiples, require, see
from jaxpar.base.display import join_names

Axes = tuple[str, ...]

# In the name of a dim of one parameter alone, before that parameter's: "tokens@embedding". Where there is no
# rule for it, that for "tokens" counts.
OF = "@"

# Metadata of a variable: the shape of the parameter that it is, or whose name it has in an optimizer's state.
PARAM_SHAPE = "param_shape"

# Metadata of a variable of an adopted model: its `UserNames`.
USER_NAMES = "user_names"


# Metadata of an array in which several variables lie: `Held` of each.
HELD = "held"


class Held(NamedTuple):
    """A variable that lies in another: name, shape with all layers, dims, and the axes that split each."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    split: tuple[Axes, ...]


class UserNames(NamedTuple):
    """What users call a variable of an adopted model.

    Attributes:
      stored: its name in the form that jaxpar runs: "layers.block.own.up.kernel".
      names: in the user's model, one for each layer of a stack in their order: "blocks.0.up.kernel", ...; of
        layers that the user has stacked: "blocks.up.kernel@0", ...
    """

    stored: str
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Dim name -> mesh axes that split it, outermost first; none for a dim that stays whole.

    The table says which names there are: an array with another one is a mistake, not replicated.

    Attributes:
      table: the rules.
      over: an axis that splits one more dim of every array: the first that divides, so that what devices
        gather lies in few pieces; one that no other axis splits, where there is one.

    Raises:
      ValueError: two rules for one dim, or an axis twice in one rule.

    Example:
      rules = jaxpar.RULES.replace({"channels": "tensor"})  # a name of your own for a dim
    """

    table: tuple[tuple[str, Axes], ...]
    over: str | None = None

    def __post_init__(self):
        if not isinstance(self.table, tuple) or any(len(rule) != 2 for rule in self.table):
            raise ValueError(
                f"rules={self.table!r} is not a table of rules\n"
                'Fix: write it as Rules.make({"hidden": "tensor", "embed": None}).'
            )
        dims = [dim for dim, _ in self.table]
        for dim, axes in self.table:
            if dims.count(dim) > 1:
                raise ValueError(f"rules has {dims.count(dim)} rules for {dim!r}\nFix: keep one.")
            if len(set(axes)) < len(axes):
                raise ValueError(f"rule {dim!r} -> {axes} names an axis twice\nFix: name it once.")

    @classmethod
    def make(cls, table: Mapping[str, str | Axes | None]) -> "Rules":
        """Rules from a dict such as `{"layers": "stage", "vocab": ("stage", "tensor"), "embed": None}`."""
        return cls(tuple(zip(table, axes_of_spec(table.values()), strict=True)))

    def replace(self, table: Mapping[str, str | Axes | None]) -> "Rules":
        """These rules with some of them changed, and others added."""
        return dataclasses.replace(Rules.make({**dict(self.table), **table}), over=self.over)

    def check_axes(self, what: str, axes: Sequence[str]) -> None:
        """Raises a ValueError if a rule has an axis that is none of these; `what` they are."""
        for dim, own in self.table:
            for axis in own:
                require(
                    axis in axes,
                    f"rule {dim!r} -> {own}: unknown mesh axis {axis!r}; {what} are {', '.join(axes)}\n"
                    f"Fix: use one of these, or name it in the task: axes = ({axis!r},).",
                )

    def axes_of(self, dim: str) -> Axes:
        """The axes that split a dim.

        Raises:
          ValueError: there is no rule for it, and it is no axis of the mesh, which stands for itself.
        """
        table = dict(self.table)
        if dim not in table:
            if OF in dim:
                return self.axes_of(base_of(dim)) if base_of(dim) else ()
            if dim in MESH_AXES:
                return (dim,)
            raise ValueError(
                f"dim {dim!r} has no rule; there are rules for {', '.join(table)}\n"
                f"Fix: use one of these, or add a rule: RULES.replace({{{dim!r}: None}}) in Task.rules, or "
                f"rules={{{dim!r}: None}} of jaxpar.adopt; None keeps it whole."
            )
        return table[dim]

    def spec(
        self,
        dims: tuple[str | None, ...],
        shape: tuple[int, ...] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> P:
        """The partition spec of an array with these named dims (None: a dim without a name).

        Args:
          shape: of the array, to find the dim that `over` splits.
          sizes: of the mesh's axes, for that; None leaves it whole.
        Raises:
          ValueError: an unknown dim name, or two dims of the array map to the same axis.
        """
        split = self.split(dims)
        if sizes is not None and self.over is not None and self.over not in sum(split, ()):
            parts = [math.prod(sizes[axis] for axis in axes) for axes in split]
            for n in sorted(range(len(parts)), key=lambda n: parts[n] > 1):
                if dims[n] != LAYERS and shape[n] % (parts[n] * sizes[self.over]) == 0:
                    split[n] += (self.over,)
                    break
        return to_spec(split)

    def split(self, dims: tuple[str | None, ...]) -> list[Axes]:
        """The axes that split each dim of an array; as of `spec`."""
        axes = [self.axes_of(dim) if dim is not None else () for dim in dims]
        used = [axis for split in axes for axis in split]
        if repeated := {axis for axis in used if used.count(axis) > 1}:
            raise ValueError(
                f"rules split two dims of {dims} over the axis {min(repeated)!r}: {axes}\n"
                f"Fix: change one of the rules."
            )
        return axes


def to_spec(split: Iterable[Axes]) -> P:
    """The partition spec of an array whose dims these axes split."""
    return P(*(axes[0] if len(axes) == 1 else axes or None for axes in split))


def axes_of_spec(spec: Iterable[str | Axes | None], num_dims: int = 0) -> list[Axes]:
    """The axes that split each dim of an array; a spec may leave out the last of `num_dims`."""
    split = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    return split + [()] * (num_dims - len(split))


# A head's vocabulary is shared by all stages; `off_stages` keeps it on each stage, for the last one's use.
RULES = Rules.make(
    {
        BATCH: DATA,
        TIME: None,
        LAYERS: STAGE,
        HEADS: TENSOR,
        INPUT: None,
        GATES: None,
        HIDDEN: TENSOR,
        TOKENS: None,
        EMBED: TENSOR,
        VOCAB: (STAGE, TENSOR),
    }
)
"""The rules that a task has by default.

Example:
  rules = jaxpar.RULES.replace({"vocab": None})  # a head that is whole on every device
"""


def off_stages(rules: Rules) -> Rules:
    """The rules with nothing split over `stage` but the layers."""
    return rules.replace(
        {
            dim: tuple(axis for axis in axes if axis != STAGE)
            for dim, axes in rules.table
            if dim != LAYERS
        }
    )


def split_over_data(rules: Rules) -> Rules:
    """The rules with a dim of every array split over `data` as well: the first that is whole and divides.

    Where none is, a dim that other axes split is divided further.

    That is FSDP for parameters (arXiv:2304.11277) and ZeRO-1 for optimizer state (arXiv:1910.02054).
    """
    return dataclasses.replace(rules, over=DATA)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Rules on a mesh, for activations: `constraint(x, BATCH, UNITS)` lays x out by the names of its dims.

    The names say what is communicated, and the compiler finds how. A column-parallel layer takes x whole
    and a row-parallel one takes it split:

        y = constraint(up(constraint(x, BATCH, None)), BATCH, UNITS)  # stays split over its last dim
        constraint(y, BATCH, None)                            # gathers it
        constraint(down(y), BATCH, None)                      # uses it split, and adds up the results

    Lay out both what enters a split layer and what leaves it: where either is left open, the compiler may
    choose to gather the weights.
    """

    mesh: Mesh
    rules: Rules
    manual: Axes = ()

    def __call__(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """`x`, laid out by the names of its dims, inside or outside a traced function.

        Inside a `shard_map`, x is already a part along its `manual` axes, and is laid out over the others
        of several devices.

        Raises:
          ValueError: the number of names is not that of dims, or a dim does not divide by its axes.
        """
        check_dims(dims, x.shape)
        split = self.rules.split(dims)
        manual = by_hand(self.mesh, self.manual) if self.manual else ()
        spec = to_spec([tuple(a for a in axes if a not in manual) for axes in split])
        check_split(f"array of shape {x.shape}", dims, x.shape, spec, self.mesh.shape)
        if {*manual} == {*self.mesh.axis_names}:
            return x
        where = spec if self.manual else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(x, where)

    def of_variables(self, tree: Any) -> Any:
        """A tree of variables laid out by their own dims; of rows of stacked ones, by all but the first."""

        def of(variable):
            x, dims = variable.get_value(), variable.get_metadata("out_sharding")
            return variable.replace(self(x, *dims[len(dims) - x.ndim :]))

        return jax.tree.map(of, tree, is_leaf=is_variable)


def shardings(
    tree: Any, mesh: Mesh | AbstractMesh, rules: Rules, memory_kind: str | None = None
) -> Any:
    """`tree` with a `NamedSharding` for every array: annotated ones by the rules, others replicated.

    Args:
      memory_kind: such as "pinned_host"; None is the devices' own memory.
    """

    def of(leaf):
        if isinstance(leaf, nnx.Variable):
            spec = _spec(leaf, mesh, rules)
            return leaf.replace(NamedSharding(mesh, spec, memory_kind=memory_kind))
        return NamedSharding(mesh, P(), memory_kind=memory_kind)

    return jax.tree.map(of, tree, is_leaf=is_variable)


def by_hand(mesh: Mesh, axes: Iterable[str]) -> set[str]:
    """The axes of a `shard_map` over some axes: those of one device as well.

    JAX runs kernels, such as those of Pallas and cuDNN's attention, only where no axis is left to XLA.
    """
    return {*axes, *(axis for axis, size in mesh.shape.items() if size == 1)}


def constrain(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """`tree` with its arrays laid out by the rules, inside a traced function."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, rules))


def check_dims(dims: tuple[str | None, ...], shape: tuple[int, ...]) -> None:
    """Raises a ValueError if the number of names is not that of an array's dims."""
    require(
        len(dims) == len(shape),
        f"dims={dims} do not fit an array of shape {shape}\n"
        f"Fix: give a name or None for each of its {len(shape)} dims.",
    )


def check_sizes(tree: Any, mesh: Mesh, rules: Rules) -> None:
    """Raises before tracing if a named dim does not divide by the axes that split it.

    Raises:
      ValueError: naming parameter, dim, axes, both sizes, and the nearest sizes that work.
    """
    for name, variable in annotated(tree):
        dims = dims_of(variable)
        try:
            spec = _spec(variable, mesh, rules)
        except ValueError as error:
            error.args = (f"parameter {name}: {error}",)
            raise
        check_split(f"parameter {name}", dims, variable.shape, spec, mesh.shape)


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
    for dim, size, axes in zip(dims, shape, axes_of_spec(spec), strict=True):
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            head = ", head='last' (--pipeline.head last)" * (STAGE in axes and dim != LAYERS)
            raise ValueError(
                f"{what}: dim {dim!r} has size {size}, which does not split over {over}\n"
                f"Fix: use {nearest_multiples(size, parts)}{head}, or another mesh."
                f"{see('A dim does not split over an axis')}"
            )


def annotated(tree: Any) -> Iterator[tuple[str, nnx.Variable]]:
    """Name and variable of everything in `tree` that carries named dims."""
    for name, leaf in named_leaves(tree):
        if isinstance(leaf, nnx.Variable) and leaf.get_metadata("out_sharding", None):
            yield user_name(name, leaf), leaf


def user_names(leaf: Any) -> UserNames | None:
    """What users call a variable, where that is not the name that it is stored by."""
    return leaf.get_metadata(USER_NAMES, None) if is_variable(leaf) else None


def user_name(name: str, leaf: Any, separator: str = ".") -> str:
    """The name of a variable for users; layers of a stack share one: blocks.0-3.up.kernel.

    Args:
      name: that it is stored by, in a state or a part of it.
    """
    if (known := user_names(leaf)) is None:
        return name
    begin = name.removesuffix(known.stored.replace(".", separator))
    return begin + join_names(own.partition("@")[0] for own in known.names)


def named_leaves(tree: Any, separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Name and variable of everything in `tree`; name and array where it is in no variable."""
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_variable):
        yield jax.tree_util.keystr(path, simple=True, separator=separator), leaf


def dims_of(variable: Any) -> tuple[str | None, ...]:
    """The names of a variable's dims, None where there is none.

    An optimizer's state of another shape than its parameter (such as Adafactor's factors) has none.
    """
    shape = tuple(variable.shape)
    if not is_variable(variable) or variable.get_metadata(PARAM_SHAPE, shape) != shape:
        return (None,) * len(shape)
    dims = variable.get_metadata("out_sharding", None)
    return tuple(dims) if dims and len(dims) == len(shape) else (None,) * len(shape)


def base_of(dim: str | None) -> str:
    """A dim's name without that of the one parameter that it is of; "" for none."""
    return (dim or "").partition(OF)[0]


def _spec(variable: nnx.Variable, mesh: Mesh | AbstractMesh, rules: Rules) -> P:
    return rules.spec(dims_of(variable), tuple(variable.shape), mesh.shape)


def array_of(leaf: Any) -> Any:
    """The array of a variable, or the array itself."""
    return leaf.get_value() if is_variable(leaf) else leaf


def is_variable(leaf: Any) -> bool:
    """Where `jax.tree` is to stop: at a variable, which knows the names of its dims.

    One that an optimizer masks has no array, and counts as nothing.
    """
    is_one = isinstance(leaf, nnx.Variable)
    return is_one and not isinstance(leaf.get_value(), optax.MaskedNode)
