"""Which parameters can be split over `tensor`: read from the traced products of a block, or of the head.

A kernel that is split by columns makes an output that is split. Operations that treat each element, head or
channel alone keep it so. A second kernel that is split by rows takes it up: its products are summed once over
the devices, and nothing else is sent. An MLP's up and down are such a pair, and so are an attention's query,
key and value with its out. The backward pass sends the mirror image: one sum for each input of the columns.

All dims that have to be split in the same way are one class. Each equation joins dims of its operands and of
its result into one class, or marks a class as mixed. A class is proposed if all of this is true:

- It is an output dim of one kernel and a contracted dim of another kernel.
- `size` divides all of its dims. A reshape keeps the first dim of those that it merges or divides: heads.
- No dim of it belongs to a float input of the block or to an output, and none is mixed.
- No array has two dims of it, such as the kernel of a recurrence.
- No array has a dim of another class that is proposed. The class with the larger parameters is chosen.

These mix a dim: a reduction, a norm, a cumulative sum or a sort along it, a slice, a concatenation, a product
that contracts it without a parameter, and any operation that is not known here. So do operations that send
something in the backward pass only: a value that depends on parameters and on inputs meets the dim whole
(multi-query keys, a gate for each token). Two cases are allowed: a float input without this dim (a mask or a
table of angles), and a parameter without it (the scale of a norm within a head). Their gradients are summed.

After the blocks, the columns of a wide head are split too. The loss reduces them: it takes the maximum and
the sum of each row of logits, and the one logit of the target. These are sums over the devices of one number
for each row. A head is wide if it has at least as many columns as rows. All else is as above.

Limits. These get no proposal, though a split may exist:

- Fused kernels whose parts are slices of one dim: `jnp.split` of query, key and value or of gate and up.
- Fewer heads of keys and values than `size`.
- A bias of positions with one value for each head that is an input of the block.
- Scatters, convolutions in groups of several channels, `cond`, and the loops `scan` and `while`: of
  recurrences, those by `lax.associative_scan` are followed.
- Targets with a value for each column of a head: those that are floats are an input.
- Selective state spaces whose inputs to the state depend on all channels.

The analysis reads the forward pass: the backward pass of a `custom_vjp` may mix dims. It doesn't weigh the
cost of a sum against the size of a product: a bottleneck of a few units is proposed as well.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.base.axes import TENSOR
from jaxpar.base.types import Atom
from jaxpar.trace.jaxprs import CHEAP, aval_of, is_float, programs_in

Dim: TypeAlias = int
"""The number of a dim of an array in the program; `_Program.find` gives its class."""


class Split(NamedTuple):
    """How a parameter should be split.

    Attributes:
      dims: "tensor" or None for each dim.
      role: "columns" (the kernel of the first product), "rows" (that of the second), or "along" (biases,
        scales and all else that has one value for each column).
      pair: names of the kernels that take up the columns; for rows, of those that make them. A head has none.
    """

    dims: tuple[str | None, ...]
    role: str
    pair: Sequence[str]


class _Array(NamedTuple):
    """An array of the program: its dims, and what it has a gradient to."""

    dims: tuple[Dim, ...]
    params: frozenset[str] = frozenset()
    of_input: bool = False


_Kernels: TypeAlias = dict[Dim, frozenset[str]]
"""The names of the parameters that kernels with some dim are computed from."""


def proposals(
    jaxpr: Jaxpr, params: Mapping[Var, str], size: int, *, of_loss: bool = False
) -> dict[str, Split]:
    """Column and row splits, in pairs, that need one sum after the rows and no other communication.

    Args:
      jaxpr: The program of a block, or what follows the blocks.
      params: The inputs of the program that are parameters, and their names.
      size: The number of devices along `tensor`.
      of_loss: Whether it is what follows the blocks. Columns of wide heads are split, and no pairs.

    Returns:
      The parameters that should be split. The module's docstring has the conditions and the limits.
    """
    program, inputs = _Program(), dict[Var, _Array]()
    for v in jaxpr.invars:
        own = frozenset([params[v]] if v in params else [])
        inputs[v] = _Array(program.new(v).dims, own, not own and is_float(v))
    outs = program.run(jaxpr, inputs.values())
    find, whole = program.find, [*outs, *(a for a in inputs.values() if a.of_input)]
    mixed = {*map(find, program.mixed), *(find(dim) for a in whole for dim in a.dims)}
    mixed |= {find(dim) for dim, n in enumerate(program.sizes) if n % size}
    rows, columns = (
        {find(dim): {n for d in of if find(d) == find(dim) for n in of[d]} for dim in of}
        for of in (program.rows, program.columns)
    )
    classes = {v: [*map(find, inputs[v].dims)] for v in params}
    sizes = {c: [aval_of(v).size for v in params if c in classes[v]] for c in columns}
    if of_loss:
        # A kernel of as many columns as rows has their square of elements.
        is_wide = {c: program.sizes[c] ** 2 >= max(own, default=0) for c, own in sizes.items()}
        possible = {c for c in columns if is_wide[c]} - rows.keys()
    else:
        possible = (columns.keys() & rows.keys()) - {*map(find, program.reduced)}
    elements = {c: sum(own) for c, own in sizes.items()}
    arrays = [[*map(find, dims)] for dims in program.arrays]
    splits, found = dict[str, Split](), set[Dim]()
    for each in sorted(possible - mixed, key=lambda c: (-elements[c], c)):
        if all(sum(c in {*found, each} for c in own) <= 1 for own in arrays):
            found.add(each)
            of_rows, of_columns = rows.get(each, set[str]()), columns[each]
            for v, name in params.items():
                if each in classes[v]:
                    dims = tuple(TENSOR if c == each else None for c in classes[v])
                    is_row, is_column = name in of_rows, name in of_columns
                    role = "rows" if is_row else "columns" if is_column else "along"
                    splits[name] = Split(dims, role, sorted(of_columns if is_row else of_rows))
    return splits


def by_pattern(splits: Mapping[str, Split], names: Iterable[str]) -> dict[str, Split]:
    """The splits of all blocks by patterns of names.

    The first number of a name becomes `*` if all parameters of that pattern are split alike.

    Args:
      names: All parameters of the model.
    """
    alike = {name: re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name, count=1) for name in names}
    found = collections.defaultdict[str, set[str]](set)
    for name, pattern in alike.items():
        found[pattern].add(str(splits[name].dims) if name in splits else "")
    rules = dict[str, Split]()
    for name, split in splits.items():
        pair = [*dict.fromkeys(alike[n].removesuffix(".kernel") for n in split.pair)]
        rules[alike[name] if len(found[alike[name]]) == 1 else name] = split._replace(pair=pair)
    return rules


def format_rules(rules: Mapping[str, Split]) -> str:
    """Splits by patterns as `rules={...}`, a line for each, with the reasons."""
    rows = []
    for name, (dims, role, pair) in rules.items():
        other = f"{'columns' if role == 'rows' else 'rows'} of {', '.join(pair)}"
        reason = f"  # {role}; {other if pair else 'the loss reduces them'}"
        rows.append((f'    "{name}": ', f"{dims},".replace("'", '"'), reason))
    first, second, _ = (max(map(len, own), default=0) for own in zip(*rows, strict=True))
    lines = [f"{key:{first}}{dims:{second}}{reason}" for key, dims, reason in rows]
    return "\n".join(["rules={", *lines, "}"])


class _Program:
    """The dims of a program, in classes."""

    def __init__(self):
        self.sizes, self.parent = list[int](), list[Dim]()
        self.arrays, self.mixed = list[tuple[Dim, ...]](), set[Dim]()
        # Dims along which values are summed, forward or backward, though not by a product with a kernel.
        self.reduced = set[Dim]()
        # Dims that are summed over, and output dims, each with the kernel that has it.
        self.rows, self.columns = _Kernels(), _Kernels()

    def new(self, v: Atom) -> _Array:
        """A variable or literal that has no gradient, with new dims."""
        start = len(self.sizes)
        self.sizes += aval_of(v).shape
        self.parent += range(start, len(self.sizes))
        return _Array(tuple(self.parent[start:]))

    def find(self, dim: Dim) -> Dim:
        """The class of a dim, named by one of its dims."""
        while self.parent[dim] != dim:
            self.parent[dim] = dim = self.parent[self.parent[dim]]
        return dim

    def run(self, jaxpr: Jaxpr, args: Iterable[_Array]) -> list[_Array]:
        """Joins the dims of a program; its outputs."""
        known = {v: self.new(v) for v in jaxpr.constvars} | dict(
            zip(jaxpr.invars, args, strict=True)
        )

        def read(v: Atom) -> _Array:
            return self.new(v) if isinstance(v, Literal) else known[v]

        for eqn in jaxpr.eqns:
            operands = [*map(read, eqn.invars)]
            if eqn.primitive.name in _CALLS:
                outs = self.run(programs_in(eqn)[0], operands)
            else:
                outs = [*map(self.new, eqn.outvars)]
                self.join(eqn, operands, outs)
            params = frozenset[str]().union(*(a.params for a in operands))
            of_input = any(a.of_input for a in operands)
            for v, a in zip(eqn.outvars, outs, strict=True):
                known[v] = _Array(a.dims, params, of_input) if is_float(v) else _Array(a.dims)
        self.arrays += [a.dims for a in known.values()]
        return [*map(read, jaxpr.outvars)]

    def join(self, eqn: JaxprEqn, operands: Sequence[_Array], outs: Sequence[_Array]) -> None:
        """Makes dims of an equation that have one label one class."""
        places = collections.defaultdict[int, dict[int, Dim]](dict)
        for n, (a, labels) in enumerate(
            zip((*operands, *outs), _labels(eqn, operands), strict=True)
        ):
            for dim, label in zip(a.dims, labels, strict=True):
                if label is None:
                    self.mixed.add(dim)
                elif self.sizes[dim] != 1:
                    places[label][n] = dim
        is_product = eqn.primitive.name in _PRODUCTS and any(a.of_input for a in operands)
        for dims in places.values():
            [dim, *_] = dims.values()
            for other in dims.values():
                self.parent[self.find(other)] = self.find(dim)
            is_kept = max(dims) >= len(operands)
            lacking = [a for n, a in enumerate(operands) if n not in dims]
            kernels = [a.params for n, a in enumerate(operands) if n in dims and not a.of_input]
            if is_product and any(kernels) and (lacking or not is_kept):
                (self.columns if is_kept else self.rows)[dim] = kernels[0]
            elif not is_kept or any(a.params and a.of_input for a in lacking):
                self.reduced.add(dim)


def _axes(eqn: JaxprEqn) -> set[int]:
    """The dims along which an operation works."""
    if eqn.primitive.name == "pad":
        return {n for n, each in enumerate(eqn.params["padding_config"]) if any(each)}
    found = [eqn.params.get(name) for name in ("axes", "axis", "dimension", "dimensions")]
    return {axis for each in found if each is not None for axis in np.ravel(each).tolist()}


def _labels(eqn: JaxprEqn, operands: Sequence[_Array]) -> Sequence[Sequence[int | None]]:
    """A label for each dim of the operands and the results.

    Dims with one label must be split alike, and those without a label are mixed. A label that only operands
    have is summed over.
    """
    name, params, axes = eqn.primitive.name, eqn.params, _axes(eqn)
    shapes = [aval_of(v).shape for v in (*eqn.invars, *eqn.outvars)]
    every = [range(len(shape)) for shape in shapes]
    match name:
        case "transpose":
            return [every[0], params["permutation"]]
        case "broadcast_in_dim":
            return [params["broadcast_dimensions"], every[1]]
        case "reshape":  # of dims that are merged or divided, the first keeps its blocks
            starts = [[math.prod(shape[:n]) for n in range(len(shape))] for shape in shapes]
            before, after = (
                {p for p, n in zip(*own, strict=True) if n != 1}
                for own in zip(starts, shapes, strict=True)
            )
            return [[p if p in before & after else None for p in own] for own in starts]
        case "dot_general":
            (summed, of_right), (batch, batch_of_right) = params["dimension_numbers"]
            same = dict(zip((*of_right, *batch_of_right), (*summed, *batch), strict=True))
            right = [same.get(n, len(shapes[0]) + n) for n in every[1]]
            free = [n for n in (*every[0], *right) if n not in (*summed, *batch)]
            return [every[0], right, [*batch, *free]]
        case "conv_general_dilated":
            (n, c, *_), (o, i, *_), (n_out, c_out, *_) = params["dimension_numbers"]
            groups = params["feature_group_count"]
            if groups == 1 or groups == shapes[0][c] == shapes[1][o]:
                named = {n: 0, c: 1 if groups == 1 else 2}, {i: 1, o: 2}, {n_out: 0, c_out: 2}
                return [[own.get(axis) for axis in every[0]] for own in named]
        case "gather":
            return _gathered(eqn, shapes)
        case _ if name in _REDUCING:
            return [every[0], [n for n in every[0] if n not in axes]]
        case _ if name in _ALIKE:
            sizes = [{*own, 1} for own in zip(*filter(None, shapes), strict=True)]
            axes |= {n for n, own in enumerate(sizes) if len(own) > 2}
            return [[None if n in axes else n for n in own] for own in every]
    # Whatever mixes all dims. A result without a gradient can be computed whole, and then be split.
    is_whole = any(a.params or a.of_input for a in operands)
    num = len(every) if is_whole else len(operands)
    return [[None if k < num else n for n in own] for k, own in enumerate(every)]


def _gathered(eqn: JaxprEqn, shapes: Sequence[tuple[int, ...]]) -> Sequence[Sequence[int | None]]:
    """Labels of a gather: dims that an index chooses from are reduced, and dims that are taken whole stay."""
    numbers, (operand, indices, out) = eqn.params["dimension_numbers"], shapes
    offsets = [n for n in range(len(out)) if n in numbers.offset_dims]
    batch = [n for n in range(len(out)) if n not in numbers.offset_dims]
    of_batch = dict(zip(range(len(indices) - 1), batch, strict=True))
    of_operand = {
        dim: of_batch[other]
        for dim, other in zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        )
    }
    chosen = {*numbers.collapsed_slice_dims, *of_operand}
    kept = [dim for dim in range(len(operand)) if dim not in chosen]
    of_operand |= {dim: n for dim, n in zip(kept, offsets, strict=True) if operand[dim] == out[n]}
    of_operand |= {dim: len(out) + dim for dim in numbers.collapsed_slice_dims}
    return [
        [of_operand.get(dim) for dim in range(len(operand))],
        [of_batch.get(dim) for dim in range(len(indices))],
        [n if n in {*of_operand.values(), *of_batch.values()} else None for n in range(len(out))],
    ]


_PRODUCTS = ("conv_general_dilated", "dot_general")
_CALLS = (
    "checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "outer_module", "pjit",
    "remat2",
)  # fmt: skip
# These leave out their `axes`.
_REDUCING = (
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "squeeze",
)  # fmt: skip
# These treat elements alone, except along the dims that `_axes` names.
_ALIKE = CHEAP | {
    "ceil", "clamp", "concatenate", "cos", "cummax", "cumprod", "cumsum", "div", "dynamic_slice", "erf",
    "exp", "exp2", "expm1", "floor", "is_finite", "log", "log1p", "logistic", "pad", "pow", "rem", "rev",
    "round", "rsqrt", "sin", "slice", "sort", "split", "sqrt", "tanh", "xor",
}  # fmt: skip
