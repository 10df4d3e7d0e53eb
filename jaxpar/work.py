"""What a function computes and keeps alive, from which inputs, by which operations: read from its jaxpr."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxpar.jaxprs import CHEAP, HAND_ON, programs_in, reads_of

# How the names of factorizations begin, LAPACK's included; see `reductions`.
FACTORIZATIONS = ("cholesky", "qr", "householder", "lu", "svd", "eig", "triangular_solve")
_REDUCING = (
    "reduce", "dot_general", "conv_general", "cum", "arg", "sort", "top_k", "fft", *FACTORIZATIONS,
)  # fmt: skip

_COLLECTIVES = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter", "ppermute": "collective-permute",
}  # fmt: skip

# Of what the compiler fuses into an operation that reads it, so that it is not materialized: what is computed
# once, however many operations read it.
_EXPENSIVE = {
    "cos", "div", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "random_bits", "rem",
    "rsqrt", "sin", "sqrt", "tanh", "threefry2x32",
}  # fmt: skip
# All of it; the others are computed for each operation that reads them.
_FUSED = CHEAP | _EXPENSIVE | {
    "ceil", "clamp", "floor", "iota", "is_finite", "random_unwrap", "random_wrap", "real", "round",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "slice", "split", "transpose", "xor",
}  # fmt: skip
# Operations whose results are their operands, as far as memory goes.
_SAME = {"optimization_barrier", "pcast", "pvary", "sharding_constraint", "stop_gradient"}
# Operations that write their result where the first operand lay.
_IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}
_CALLS = HAND_ON | {"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "shard_map"}


class Amount(NamedTuple):
    """What a function does and holds, by its shapes alone.

    Attributes:
      flops: as in `count_flops`.
      bytes: the least that is moved between device and memory: what matrix products and convolutions read and
        write, and whatever else is materialized. Loops count by their length.
      turns: loop iterations that run one after the other.
      live: bytes of what is alive besides arguments, at every operation.
    """

    flops: float
    bytes: float
    turns: float
    live: tuple[float, ...]


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of the matrix products and convolutions of a function.

    A multiply-add counts as two; loops count by their length, a conditional by its largest branch. A loop
    whose length depends on data counts once.

    Args:
      args: arrays or their shapes.
    """
    return _flops(_Program(jax.make_jaxpr(function)(*args).jaxpr))


def amount(function: Callable[..., Any], *args: Any) -> Amount:
    """What a function does and holds.

    Args:
      args: arrays or their shapes.
    """
    program = _Program(jax.make_jaxpr(function)(*args).jaxpr)
    return Amount(
        _flops(program), _moved(program), _turns(program), tuple(_live(program)) or (0.0,)
    )


def collectives_of(function: Callable[..., Any], *args: Any) -> Iterator[tuple[str, float]]:
    """What a function with a `shard_map` exchanges: operation and bytes, as in `analysis.Collective`."""
    for equation, times in _equations(jax.make_jaxpr(function)(*args).jaxpr):
        if (op := _COLLECTIVES.get(equation.primitive.name)) is not None:
            whole = equation.outvars if op == "all-gather" else equation.invars
            yield op, times * sum(map(_bytes, whole))


def used_inputs(function: Callable[..., Any], *args: Any) -> list[bool]:
    """For each array among the arguments of a function, whether anything is computed from it."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    used = reads_of(jaxpr.eqns, jaxpr.outvars)
    return [v in used for v in jaxpr.invars]


def reductions(function: Callable[..., Any], *args: Any) -> set[str]:
    """The names of operations that combine elements of an array: sums, matrix products, sorts."""
    return {
        name
        for equation, _ in _equations(jax.make_jaxpr(function)(*args).jaxpr)
        if (name := equation.primitive.name).startswith(_REDUCING)
        and name != "reduce_precision"
        and any(v.aval.shape for v in equation.invars)
    }


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All of a program, those of its loops, branches and calls too; and how often each runs, at most."""
    for equation in jaxpr.eqns:
        yield equation, times
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in programs_in(equation):
            yield from _equations(part, times * length)


class _Operation(NamedTuple):
    """An equation: the numbers of what it reads (None: a constant) and makes, and its loop or branches."""

    equation: Any
    reads: list[int | None]
    makes: list[int]
    parts: list["_Program"]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def turns(self) -> int:
        """Iterations of its loop; one if they depend on data."""
        return self.equation.params["length"] if self.name == "scan" else 1

    @property
    def stacked(self) -> list[int]:
        """Those of its results that a loop stacks; the others are its carry."""
        if self.name != "scan":
            return []
        [body], wholes = programs_in(self.equation), self.equation.outvars
        return [
            n
            for n, v, one in zip(self.makes, wholes, body.outvars, strict=True)
            if _has_more(v, one)
        ]

    @property
    def initial(self) -> list[int | None]:
        """Those of its operands that are the initial carry of a loop."""
        count = len(self.makes) - len(self.stacked)
        if self.name == "while":
            return self.reads[len(self.reads) - count :]
        [body], wholes = programs_in(self.equation), self.equation.invars
        pairs = zip(self.reads, wholes, body.invars, strict=True)
        whole = [n for n, v, one in pairs if not _has_more(v, one)]  # constants, and the carry
        return whole[len(whole) - count :]

    def of_parts(self, count: Callable[["_Program"], float]) -> float:
        """A count of what is inside: the sum over a loop's condition and body, or the most of any branch."""
        counts = [count(part) for part in self.parts]
        return max(counts, default=0.0) if self.name == "cond" else sum(counts)


class _Program:
    """A jaxpr with its calls inlined, as a compiler that fuses operations runs it.

    Attributes:
      sizes: bytes of each array.
      given: the numbers of the arguments.
      operations: in their order.
      results: the numbers of the results (None: a constant).
      written: arrays that are materialized.
      sources: for each array, those that are read to obtain it: itself, or what it is computed from.
      last: the number of the last operation that reads an array; for results, the number of operations.
    """

    def __init__(self, jaxpr: Any):
        self.sizes, self.operations = list[float](), list[_Operation]()
        self._held = set[int]()  # what anything but a fused operation reads
        arguments = (*jaxpr.constvars, *jaxpr.invars)
        numbers = [*map(self._number, arguments)]
        self.given = {*numbers}
        self.results = self._add(jaxpr, dict(zip(arguments, numbers, strict=True)))
        results = {n for n in self.results if n is not None}
        self.written = self._find_written(results)
        self.sources = [{n} for n in range(len(self.sizes))]
        self.last = dict[int, int]()
        for number, operation in enumerate(self.operations):
            sources = self.read_by(operation)
            if not self.written.isdisjoint(operation.makes):
                self.last |= dict.fromkeys(sources, number)
            for n in {*operation.makes} - self.written:
                self.sources[n] = sources
        for result in results:
            self.last |= dict.fromkeys(self.sources[result], len(self.operations))

    def _number(self, v: Any) -> int:
        self.sizes.append(_bytes(v))
        return len(self.sizes) - 1

    def _add(self, jaxpr: Any, numbers: dict[Any, int | None]) -> list[int | None]:
        """Adds what a jaxpr does with arrays of these numbers; returns the numbers of its results."""

        def numbers_of(variables):
            return [numbers.get(v) if isinstance(v, core.Var) else None for v in variables]

        for equation in jaxpr.eqns:
            name, reads = equation.primitive.name, numbers_of(equation.invars)
            if name in _CALLS:
                called = programs_in(equation)[0]
                makes = self._add(called, dict(zip(called.invars, reads, strict=True)))
            elif name in _SAME:
                self._held |= {n for n in reads if n is not None}
                makes = reads
            else:
                makes = [*map(self._number, equation.outvars)]
                parts = programs_in(equation) if name in ("scan", "while", "cond") else []
                self.operations.append(_Operation(equation, reads, makes, [*map(_Program, parts)]))
            numbers.update(zip(equation.outvars, makes, strict=True))
        return numbers_of(jaxpr.outvars)

    def _find_written(self, results: set[int]) -> set[int]:
        held, readers = self._held | results, Counter[int]()
        for operation in self.operations:
            reads = {n for n in operation.reads if n is not None}
            readers.update(reads)
            if operation.name not in _FUSED and not operation.name.startswith("reduce_"):
                held |= reads
        return {
            n
            for operation in self.operations
            for n in operation.makes
            if n in held
            or operation.name not in _FUSED
            or (operation.name in _EXPENSIVE and readers[n] > 1)
        }

    def read_by(self, operation: _Operation) -> set[int]:
        """The materialized arrays that it reads, itself or through what is fused into it."""
        return set[int]().union(*(self.sources[n] for n in operation.reads if n is not None))


def _flops(program: _Program) -> float:
    return sum(map(_flops_of, program.operations))


def _flops_of(operation: _Operation) -> float:
    equation, params = operation.equation, operation.equation.params
    shapes = [v.aval.shape for v in equation.invars]
    if operation.name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        return (
            2.0
            * math.prod(equation.outvars[0].aval.shape)
            * math.prod(shapes[0][dim] for dim in contracted)
        )
    if operation.name == "conv_general_dilated":
        kernel = shapes[1]
        out = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / max(out, 1)
    return operation.turns * operation.of_parts(_flops)


def _moved(program: _Program) -> float:
    return sum(_moved_by(operation, program) for operation in program.operations)


def _moved_by(operation: _Operation, program: _Program) -> float:
    name, operands = operation.name, operation.equation.invars
    made = sum(program.sizes[n] for n in operation.makes if n in program.written)
    if operation.parts:
        return operation.turns * operation.of_parts(_moved)
    if name in ("dot_general", "conv_general_dilated"):
        return made + sum(map(_bytes, operands))
    if name in _IN_PLACE:
        return 2.0 * _bytes(operands[1 if name == "dynamic_update_slice" else 2])
    return 2.0 * made


def _turns(program: _Program) -> float:
    return sum(_turns_of(operation) for operation in program.operations)


def _turns_of(operation: _Operation) -> float:
    inner = operation.of_parts(_turns)
    return operation.turns * max(inner, 1.0) if operation.name == "scan" else inner


def _live(program: _Program) -> Iterator[float]:
    """Bytes alive at every operation, without the arguments."""
    sizes, last = program.sizes, program.last
    # The memory for what loops stack is zeroed before anything else.
    stacked = {n for operation in program.operations for n in operation.stacked}
    alive = sum(sizes[n] for n in stacked)
    for number, operation in enumerate(program.operations):
        made = {*operation.makes} & program.written - stacked
        ends = {n for n in program.read_by(operation) - program.given if last.get(n) == number}
        new, lent = (
            sum(sizes[n] for n in each) for each in (made, _lent(program, operation) & ends)
        )
        yield alive + new - min(new, lent) + _within(operation, new)
        unread = {n for n in made if n not in last}
        alive += new - sum(sizes[n] for n in ends | unread)


def _lent(program: _Program, operation: _Operation) -> set[int]:
    """The arrays whose memory an operation can reuse for its result, if nothing reads them afterwards."""
    name = operation.name
    if name in _FUSED or name == "cond":
        return program.read_by(operation)
    if name in ("scan", "while"):
        lent = operation.initial
    else:
        lent = operation.reads[:1] if name in _IN_PLACE else []
    return {n for n in lent if n is not None}


def _within(operation: _Operation, made: float) -> float:
    """What an operation needs while it runs, besides its operands and results."""
    inner = max((max(_live(part), default=0.0) for part in operation.parts), default=0.0)
    if operation.name == "cond":  # its results are made inside
        return max(inner - made, 0.0)
    if operation.name == "select_and_scatter_add":
        # XLA finds the positions of the maxima as indices along each dim, and writes there.
        windows, whole = (math.prod(v.aval.shape) for v in operation.equation.invars[:2])
        dims = len(operation.equation.invars[1].aval.shape)
        return 4.0 * (dims * whole + (dims + 1) * windows)
    return inner


def _has_more(whole: Any, one: Any) -> bool:
    """Whether the first of two arrays has more dims than the second."""
    return len(whole.aval.shape) > len(one.aval.shape)


def _bytes(v: Any) -> float:
    try:
        return float(math.prod(v.aval.shape) * v.aval.dtype.itemsize)
    except (AttributeError, TypeError):  # a random key, or nothing
        return 0.0
