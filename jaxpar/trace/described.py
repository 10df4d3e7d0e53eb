"""What traced programs and Python functions do, as numbers: equal for those that do the same.

The text of a program does not show all of it. A `jax.custom_vjp` has a function for its backward pass, and a
`jax.pure_callback` one of NumPy. A program within another may hold arrays. So programs are compared by
their equations, and arrays by their values. A function with a derivative of its own is compared by what its
gradient traces to. A function that can't be traced is compared by its code, and by what it closes over.
"""

import dataclasses
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.linear_util import WrappedFun

from jaxpar.base.types import ArrayLike, Atom, Value
from jaxpar.trace.jaxprs import aval_of, has_effect, parts_of_program
from jaxpar.trace.own_derivatives import OWN_DERIVATIVES, gradient_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype, enum.Enum)
_METHODS_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)
# Parameters that are names for people: the primitive computes the same whatever they say.
_NAMES = {
    ("jit", "name"),
    ("pjit", "name"),
    ("name", "name"),
    ("block", "number"),
    ("outer_module", "name"),
}
# Classes of JAX's whose objects hold what a trace has done so far.
_STATE = {"Trace", "Store", "EqualStore", "InitialResultPaths"}
_PACKAGES = {"flax", "jax", "jaxlib", "jaxpar", "ml_dtypes", "numpy", "optax"}
# JAX's wrappers of arguments that are not traced.
_WRAPPERS = {"Hashable", "Unhashable", "WrapHashably"}


class _Holder(NamedTuple):
    """Who holds a value, which says how it can be compared.

    Attributes:
      writes: a function with an effect, such as that of an `io_callback`, may change what it holds. So two
        equal lists are two lists to it. Others only read them.
      is_jax: functions of JAX hold the state of a trace, which doesn't count, next to functions of users.
    """

    writes: bool = False
    is_jax: bool = False


class Descriptions:
    """Numbers for programs, functions and values, which are equal if these do the same."""

    def __init__(self):
        """Has described nothing yet."""
        self._numbers = dict[Hashable, int]()
        self._programs = dict[tuple[int, bool], tuple[ClosedJaxpr | Jaxpr, int]]()
        self._calls = list[int]()  # functions that are being described, by their ids
        self._kept = list[Value]()  # so that no other object gets their ids

    def of_program(self, program: ClosedJaxpr | Jaxpr, *, is_differentiated: bool = True) -> int:
        """Equal for programs that compute the same; and whose gradients do, if these are taken."""
        key = id(program), is_differentiated
        if key not in self._programs:
            number = self._number("program", *self._lines(program, is_differentiated))
            self._programs[key] = program, number
        return self._programs[key][1]

    def of_value(self, value: Value) -> int:
        """Equal for equal numbers, texts, arrays, containers, programs, and functions that do the same."""
        return self._of(value, _Holder())

    def _derivative(self, eqn: JaxprEqn) -> int:
        """Equal for equations with the same derivative, of primitives in `OWN_DERIVATIVES`."""
        found = list[Hashable]()
        functions = tuple(eqn.params[name] for name in OWN_DERIVATIVES[eqn.primitive.name].rules)
        try:
            found.append(self.of_program(gradient_of(eqn), is_differentiated=False))
        except Exception:  # of the user's function: maybe it has no gradient, and says so
            found.append(self.of_value(functions))
        if eqn.params.get("symbolic_zeros"):  # it may do something else where a gradient is zero
            found.append(self.of_value(functions))
        return self._number("derivative", *found)

    def _number(self, *parts: Hashable) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))

    # ---- programs ----

    def _lines(self, program: ClosedJaxpr | Jaxpr, is_differentiated: bool) -> list[Hashable]:
        """All that a program computes; its variables are numbered in their order."""
        jaxpr, consts = parts_of_program(program)
        names = dict[Var, int]()

        def named(variables: Sequence[Var]) -> Hashable:
            for v in variables:
                names[v] = len(names)
            return tuple(aval_of(v).str_short() for v in variables)

        def read(atom: Atom) -> Hashable:
            if isinstance(atom, Literal):
                return aval_of(atom).str_short(), self._array(np.asarray(atom.val))
            return names[atom]

        lines: list[Hashable] = [named(jaxpr.constvars), *map(self.of_value, consts)]
        lines.append(named(jaxpr.invars))
        for eqn in jaxpr.eqns:
            reads = tuple(map(read, eqn.invars))
            params = self._params(eqn, is_differentiated)
            lines.append((eqn.primitive, reads, params, named(eqn.outvars)))
        lines.append(tuple(map(read, jaxpr.outvars)))
        return lines

    def _params(self, eqn: JaxprEqn, is_differentiated: bool) -> Hashable:
        primitive = eqn.primitive.name
        own = OWN_DERIVATIVES.get(primitive)
        holder = _Holder(writes=has_effect(eqn))
        found = list[Hashable]()
        for name, value in sorted(eqn.params.items()):
            if (primitive, name) in _NAMES:
                continue
            if own is None:
                found.append((name, self._of(value, holder, is_differentiated)))
            elif name == own.program:  # which is run, and not differentiated
                found.append((name, self.of_program(value, is_differentiated=False)))
            elif name not in own.rules:
                found.append((name, self.of_value(value)))
        if own is not None and is_differentiated:
            found.append(self._derivative(eqn))
        return tuple(found)

    # ---- values ----

    def _of(self, value: Value, holder: _Holder, is_differentiated: bool = True) -> int:
        if isinstance(value, _PLAIN):
            return self._number("plain", exact(value))
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self.of_program(value, is_differentiated=is_differentiated)
        if _is_of_another_class(value):
            return self._whole(value)
        if isinstance(value, tuple):
            parts = [self._of(part, holder, is_differentiated) for part in value]
            return self._number("tuple", type(value), *parts)
        is_function = callable(value) and not isinstance(value, type)
        if is_function or isinstance(value, WrappedFun):
            return self._function(value, holder)
        if holder.is_jax and _is_state(value):
            return self._number("state of a trace", type(value))
        if _is_of_jax(type(value)) and type(value).__name__ in _WRAPPERS:
            return self._of(getattr(value, "val"), holder)  # noqa: B009 - of no public class
        if isinstance(value, Tracer):
            return self._whole(value)
        if not holder.writes:
            if isinstance(value, np.ndarray | jax.Array):
                return self._array(value)
            if isinstance(value, list):
                parts = [self._of(part, holder, is_differentiated) for part in value]
                return self._number("list", type(value), *parts)
            if isinstance(value, set | frozenset):
                parts = [self._of(part, holder) for part in value]
                return self._number("set", type(value), *sorted(parts))
            if isinstance(value, Mapping):
                return self._number("mapping", type(value), self._of((*value.items(),), holder))
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                return self._fields(value, holder)
        if _has_equality(value):
            return self._number("equal", type(value), value)
        return self._whole(value)

    def _whole(self, value: Value) -> int:
        """Of an object that nothing is known of: it is only like itself."""
        self._kept.append(value)
        return self._number("whole", id(value))

    def _array(self, array: ArrayLike) -> int:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        values = np.asarray(array)
        digest = hashlib.sha256(values.tobytes()).digest()
        return self._number("array", values.shape, values.dtype, digest)

    def _fields(self, value: Value, holder: _Holder) -> int:
        names = [field.name for field in dataclasses.fields(value)]
        parts = [self._of(getattr(value, name, None), holder) for name in names]
        others = {
            name: v for name, v in getattr(value, "__dict__", {}).items() if name not in names
        }
        return self._number("fields", type(value), *parts, self._of((*others.items(),), holder))

    # ---- functions ----

    def _function(self, function: Value, holder: _Holder) -> int:
        """Of what can be called: by its code and what it holds, if these can be seen."""
        if id(function) in self._calls:  # it calls itself
            return self._number("again", self._calls[::-1].index(id(function)))
        self._calls.append(id(function))
        try:
            return self._code(function, holder)
        finally:
            self._calls.pop()

    def _code(self, function: Value, holder: _Holder) -> int:
        of_jax = holder._replace(is_jax=True)
        if isinstance(function, functools.partial):
            parts = function.func, function.args, (*function.keywords.items(),)
            return self._number("partial", self._of(parts, holder))
        if isinstance(function, types.MethodType):
            return self._number("method", self._of((function.__func__, function.__self__), holder))
        if isinstance(function, _METHODS_IN_C):
            parts = function.__name__, function.__self__
            return self._number("method in C", self._of(parts, holder))
        if isinstance(function, WrappedFun):
            parts = function.f, function.transforms, function.params
            return self._number("wrapped", self._of(parts, of_jax))
        if isinstance(function, types.FunctionType):
            if _is_of_jax(function):
                return self._number("function", function.__code__, *self._held(function, of_jax))
            holder = holder._replace(is_jax=False)
            # Functions of one code can be of two modules, and have attributes.
            others = id(function.__globals__), self._of((*vars(function).items(),), holder)
            return self._number(
                "function", function.__code__, *others, *self._held(function, holder)
            )
        if dataclasses.is_dataclass(function):
            return self._fields(function, holder)
        if _is_of_jax(type(function)) and hasattr(function, "__dict__"):
            attributes = (*vars(function).items(),)
            return self._number("object", type(function), self._of(attributes, of_jax))
        return self._whole(function)

    def _held(self, function: types.FunctionType, holder: _Holder) -> list[Hashable]:
        """Of its default arguments, and of the variables of functions around it."""
        keywords = function.__kwdefaults__ or {}
        held: list[Hashable] = [self._of(function.__defaults__, holder)]
        held.append(self._of((*keywords.items(),), holder))
        for cell in function.__closure__ or ():
            try:
                held.append(self._of(cell.cell_contents, holder))
            except ValueError:
                held.append("not set yet")
        return held


def exact(value: Value) -> Hashable:
    """What tells a plain value from equal ones of other types: 1 from 1.0, True and float32(1)."""
    if isinstance(value, tuple):
        return tuple(map(exact, value))
    return (type(value), repr(value)) if isinstance(value, _PLAIN) else None


def _package_of(thing: Value) -> str:
    """The package that defines a function or a class."""
    return str(thing.__module__).partition(".")[0]


def _is_of_jax(thing: Value) -> bool:
    return _package_of(thing) == "jax"


def _is_state(value: Value) -> bool:
    """Whether it is what a trace has done so far; such as what it remembers, by its arguments."""
    if isinstance(value, dict):
        return all(isinstance(key, tuple) for key in value)
    return type(value) is object or any(c.__name__ in _STATE for c in type(value).__mro__)


def _is_of_another_class(value: Value) -> bool:
    """Whether it is of a user's class of containers or arrays, which may hold more than one can see."""
    if not isinstance(value, tuple | list | set | frozenset | Mapping | np.ndarray):
        return False
    if isinstance(value, np.ndarray):  # one of np.ma has a mask as well
        return type(value) is not np.ndarray and not _is_of_jax(type(value))
    return bool(getattr(value, "__dict__", None)) and not _is_known(type(value))


def _is_known(cls: type) -> bool:
    """Whether a class is of Python, JAX or a package of this framework, whose objects hide nothing."""
    package = _package_of(cls)
    return package in sys.stdlib_module_names or package in _PACKAGES


def _has_equality(value: Value) -> bool:
    """Whether objects of its class say when they are equal, and can be trusted."""
    if not _is_known(type(value)):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return type(value).__eq__ is not object.__eq__
