"""Whether the backward pass of one function gives in pieces what it gives for all rows, tried on it alone.

In the gradients of a whole part a mistake may be small: most of the gradient goes past a function in a
residual branch. So the function itself gets random operands and gradients, once whole and once in pieces.
Both have the same numbers: half of the digits of the results must be equal.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxpar.base.jax_private import call_once
from jaxpar.base.types import Atom
from jaxpar.step.trial import NOWHERE, Trial, normal, quick_jit
from jaxpar.trace.jaxprs import aval_of, is_float, programs_in
from jaxpar.trace.own_derivatives import (
    OWN_DERIVATIVES,
    gradient_of,
    operands_with_gradient,
    results_with_gradient,
)

# Where a function jumps, as a sign does, rounding may change a number by far. Mistakes change most numbers.
FEW = 1 / 100

Arrays = list[np.ndarray]  # in order


@dataclasses.dataclass(frozen=True)
class Call:
    """Where a program calls a function with a derivative of its own.

    Attributes:
      eqn: with its operands in their sizes.
      in_loop: whether it is called once for each turn of a loop.
    """

    eqn: JaxprEqn
    in_loop: bool = False


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Of the operands of a function, over the scale of the gradients that it was given.

    Attributes:
      at_once, in_pieces: one after the other, and for all rows.
    """

    at_once: Arrays
    in_pieces: Arrays

    @property
    def says_something(self) -> bool:
        """Whether they are neither all 0 nor, but for few, infinite or NaN."""
        for gradient in self.at_once:
            if np.mean(~np.isfinite(gradient)) > FEW:
                return False
        return any(np.any(gradient) for gradient in self.at_once)


def calls_in(program: Jaxpr, *, in_loop: bool = False) -> Iterator[Call]:
    """All such calls, but for those within another one: their derivatives are not used."""
    for eqn in program.eqns:
        if eqn.primitive.name in OWN_DERIVATIVES:
            yield Call(eqn, in_loop)
            continue
        is_loop = eqn.primitive.name in ("scan", "while")
        for part in programs_in(eqn):
            yield from calls_in(part, in_loop=in_loop or is_loop)


@dataclasses.dataclass(frozen=True)
class RuleAlone:
    """The backward pass of a function, by itself.

    Attributes:
      whole, piece: its equation in the program of all rows, or time steps, and in that of a piece of them.
      operands, results: the dim of each that is cut, or NOWHERE.
      programs: of its gradient, for the whole and for a piece.
    """

    trial: Trial
    whole: JaxprEqn
    piece: JaxprEqn
    num_pieces: int
    operands: list[int]
    results: list[int]
    programs: tuple[ClosedJaxpr, ClosedJaxpr]

    @classmethod
    def of(cls, trial: Trial, whole: JaxprEqn, piece: JaxprEqn, num_pieces: int) -> Self | None:
        """None if shapes do not say how it is cut, or if it has no gradient outside of a mesh."""
        has_key = any(jnp.issubdtype(aval_of(v).dtype, jax.dtypes.prng_key) for v in whole.invars)
        if has_key or not operands_with_gradient(whole) or not results_with_gradient(whole):
            return None
        operands = _cut_dims(whole.invars, piece.invars, num_pieces)
        results = _cut_dims(whole.outvars, piece.outvars, num_pieces)
        if operands is None or results is None:
            return None
        try:
            programs = gradient_of(whole), gradient_of(piece)
        except Exception:  # whatever a user's rule raises
            return None
        return cls(trial, whole, piece, num_pieces, operands, results, programs)

    @property
    def types(self) -> list[np.dtype[Any]]:
        """Of its floating-point operands and results."""
        arrays = (*self.whole.invars, *self.whole.outvars)
        return [aval_of(v).dtype for v in arrays if is_float(v)]

    @property
    def tolerance(self) -> float:
        """Half of the digits of the least precise array."""
        return max(float(jnp.finfo(dtype).eps) for dtype in self.types) ** 0.5

    @property
    def reads_other_types(self) -> bool:
        """Whether it also takes booleans or integers, of which real ones may be of another kind."""
        return not all(map(is_float, self.whole.invars))

    @property
    def is_cut(self) -> bool:
        """Whether each piece computes with other numbers."""
        return any(dim != NOWHERE for dim in self.operands)

    def gradients(self, scales: Sequence[float], *, are_positive: bool = False) -> list[Gradients]:
        """For each scale of the gradients that it is given.

        Args:
          are_positive: whether all operands are.
        """
        rng = np.random.default_rng(0)
        pairs = zip(self.whole.invars, self.operands, strict=True)
        operands = [_uneven(_random(rng, v), dim) for v, dim in pairs]
        if are_positive:
            operands = [np.abs(a) if jnp.isrealobj(a) else a for a in operands]
        operands_of_piece = self._pieces(operands, self.operands)
        dims = [self.results[n] for n in results_with_gradient(self.whole)]
        variables = [self.whole.outvars[n] for n in results_with_gradient(self.whole)]
        if self.is_cut:
            pairs = zip(variables, dims, strict=True)
            d_results = [_uneven(_random(rng, v), dim) for v, dim in pairs]
            d_results_of_piece = self._pieces(d_results, dims)
        else:  # each piece computes the same, and the gradient of all is the sum of theirs
            d_results_of_piece = [
                [_random(rng, v) for v in variables] for _ in range(self.num_pieces)
            ]
            d_results = [_sum(parts) for parts in zip(*d_results_of_piece, strict=True)]
        run_whole, run_piece = (
            quick_jit(self.trial.parts, jaxpr_as_fun(program)) for program in self.programs
        )
        found = []
        for scale in scales:
            at_once = self._run(run_whole, operands, d_results, scale)
            pieces = [
                self._run(run_piece, own, d_own, scale)
                for own, d_own in zip(operands_of_piece, d_results_of_piece, strict=True)
            ]
            found.append(Gradients(at_once, self._joined(pieces)))
        return found

    def _pieces(self, arrays: Arrays, dims: list[int]) -> list[Arrays]:
        """For each piece the arrays that it has."""
        of_arrays = []
        for array, dim in zip(arrays, dims, strict=True):
            is_whole = dim == NOWHERE
            of_arrays.append(
                [array] * self.num_pieces if is_whole else np.split(array, self.num_pieces, dim)
            )
        return [[parts[number] for parts in of_arrays] for number in range(self.num_pieces)]

    def _joined(self, pieces: list[Arrays]) -> Arrays:
        """Of gradients: an operand that is not cut has the sum of those of the pieces."""
        dims = [self.operands[n] for n in operands_with_gradient(self.whole)]
        joined = []
        for dim, *parts in zip(dims, *pieces, strict=True):
            joined.append(_sum(parts) if dim == NOWHERE else np.concatenate(parts, dim))
        return joined

    def _run(self, jitted: Any, operands: Arrays, d_results: Arrays, scale: float) -> Arrays:
        scaled = [(d * scale).astype(d.dtype) for d in d_results]
        outs = jax.device_get(call_once(jitted, *operands, *scaled))
        gradients = outs[len(self.whole.outvars) :]
        return [_wide(gradient) / scale for gradient in gradients]


def agree(found: Arrays, expected: Arrays, tolerance: float) -> bool:
    """Whether all but few numbers are equal, relative to the largest of their array."""
    for a, b in zip(found, expected, strict=True):
        is_finite = np.isfinite(b)
        largest = np.max(np.abs(b), where=is_finite, initial=0)
        is_equal = (np.abs(a - b) <= tolerance * largest) | ~(is_finite | np.isfinite(a))
        if np.sum(~is_equal) > FEW * is_equal.size:
            return False
    return True


def _cut_dims(whole: Sequence[Atom], piece: Sequence[Atom], num_pieces: int) -> list[int] | None:
    """The dim of each variable that is shorter in a piece, or NOWHERE; None if one is cut in another way."""
    dims = []
    for v, w in zip(whole, piece, strict=True):
        sizes, sizes_of_piece = aval_of(v).shape, aval_of(w).shape
        if len(sizes) != len(sizes_of_piece):
            return None
        cut = [dim for dim, size in enumerate(sizes) if size != sizes_of_piece[dim]]
        if len(cut) > 1 or any(sizes[dim] != sizes_of_piece[dim] * num_pieces for dim in cut):
            return None
        dims.append(cut[0] if cut else NOWHERE)
    return dims


def _random(rng: np.random.Generator, v: Atom) -> np.ndarray:
    """Normal numbers; booleans, and small integers."""
    shape, dtype = aval_of(v).shape, aval_of(v).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return rng.integers(0, 2 if dtype == np.dtype(np.bool_) else 4, shape).astype(dtype)
    return normal(rng, aval_of(v))


def _uneven(array: np.ndarray, dim: int) -> np.ndarray:
    """Numbers of another mean and size in each row: what combines rows is then another in each piece."""
    if dim == NOWHERE or not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    shape = [1] * array.ndim
    shape[dim] = -1
    place = np.linspace(-1, 1, array.shape[dim]).reshape(shape)
    return (array * 8.0**place + place).astype(array.dtype)


def _sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(functools.reduce(np.add, arrays))


def _wide(array: np.ndarray) -> np.ndarray:
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array.astype(np.complex128 if is_complex else np.float64)
