"""Checks that a model gives the same numbers however a batch is split, by runs on a few rows.

A step gives each device, and each microbatch, some of the rows, and each chunk of time some of the steps.
Some models would give another loss on every mesh then, and no error: those that mix rows, as a norm by the
statistics of a batch or a mean over the places that count, or that draw the same random numbers for every
block. They are found before a run. `first`, each kind of layer, and `last` or `predict` are run by
themselves, in three ways:

- Inputs are replaced or moved, and what must not depend on that is compared. Where a row is replaced, the
  others must give the same bits. Where all rows move to other places, and `at.row` with them, they must give
  the same numbers. A layer that says how many rows it mixes is left out.
- Inputs are cut along a dim. The pieces, one after the other, must give what the whole gives, and their sums
  must add up: halves of the rows, and where a run has them its chunks of time.
- Padding is replaced, where a batch says what is padding (`lengths`). Real steps must give the same numbers.

Each is done with a key, as in training. Where something is wrong and without a key it is not, random numbers
are to blame, and the error says so. Those that depend on how time is cut are looked for only in runs with
chunks of time, or with an axis that splits it, along which the part exchanges nothing.

A layer whose state goes on where the batch says that another sequence begins (`resets`) is warned of.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.checks import see
from jaxpar.base.parts import LENGTHS, PARTS, RESETS, part_of, with_part
from jaxpar.base.types import Arrays, Module
from jaxpar.model.facts import ModelFacts
from jaxpar.step.parts import Parts
from jaxpar.step.trial import NOWHERE, Part, Tree, Trial, name_of
from jaxpar.trace.jaxprs import equations_in

_log = logging.getLogger(__name__)

ROWS = 4  # two in each half

# How far two halves of a sum may be from the whole, relative to their sizes: a million float32 numbers in
# another order are off by a tenth of it. Sums in fewer digits may be off by a few units in the last.
TOLERANCE, UNITS = 1e-5, 4
# Random inputs on which pieces must be wrong. Once in thousands, two scores tie: then rounding decides
# which is the largest, and whether a prediction counts as right.
TRIES = 3

# How far a window may be from its chunks, relative to the largest number: a state of float32 is rounded
# in another order, and a loop over time adds to that.
OVER_TIME = 1e-3

FAR = 10.0  # the size of numbers in place of padding: a mean over many steps must change by them

_DRAW = "at.draw(jax.random.normal, x.shape)"

# What to do where rows mix: in what a part gives, or in the gradient of the loss.
_ALONE = (
    "compute each row independently, as nnx.LayerNorm does, or set how many rows a layer mixes "
    "(rows_together = 8)",
    "return sums over rows, not means over rows or time steps",
)
_ROWS_FIRST = (
    "; blocks are [time, rows, ...], so swap these dims around a module that wants rows first"
)


def check_rows_alone(parts: Parts, *, predicts: bool = False) -> None:
    """Checks that no row of a batch depends on another, by running parts of the model on random numbers.

    Each part is drawn and run by itself on one device, in its real size, on few rows; once for these facts.
    Parts of jaxpar's own modules alone are left out: its tests check them.

    Args:
      predicts: whether the model's `predict` is looked at, instead of its `last`.
    Raises:
      ValueError: `first`, a layer, `last` or `predict` mixes rows, its random numbers depend on how a batch
        is cut, or its sums do not add up. It reads padding. Or, where the layout cuts windows into chunks of
        time, it gives something else for these.
    """
    num_rows = min(ROWS, parts.facts.batch_size) // 2 * 2
    chunks, sizes = parts.partition.parallel.num_chunks, parts.partition.parallel.mesh.sizes
    key = "rows", predicts, chunks, *(sizes[axis] for axis in parts.facts.time_axes)
    if num_rows and key not in parts.facts.checked:
        known = _known_parts(parts.facts)
        if known is None:
            return
        trial = IndependenceCheck(parts, num_rows, chunks, predicts=predicts)
        for part in (make() for name, make in trial.makers.items() if name not in known):
            try:
                trial.check(part)
            except (TypeError, ValueError) as error:  # of the user's code, in other sizes
                if "Fix: " in str(error):
                    raise
                said = str(error).partition("\n")[0]
                raise ValueError(
                    f"{part.what} fails for fewer rows or time steps than a batch has: {said}\n"
                    f"Fix: take sizes from its arguments, such as y.shape, and steps from at.time."
                ).with_traceback(error.__traceback__) from None
        parts.facts.checked.add(key)


def _known_parts(facts: ModelFacts) -> Collection[str] | None:
    """Names of the parts that are of jaxpar's own modules alone; None if all are."""
    if facts.cut_model is not None:
        return ()
    if _is_own(facts.model):
        return None
    layers = zip(facts.kinds, facts.first_layers, strict=True)
    return {f"layer {name}" for name, layer in layers if _is_own(layer)}


def _is_own(module: Module) -> bool:
    """Whether all code of a module is jaxpar's: its class, and the modules and functions in it."""
    nodes = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]
    code = {of for node in nodes for of in type(node).__mro__} - {*nnx.Module.__mro__}
    held = [value for node in nodes for value in vars(node).values() if callable(value)]
    functions = [value for value in held if not isinstance(value, nnx.Pytree | nnx.Variable)]
    return all(str(of.__module__).startswith("jaxpar.") for of in [*code, *functions])


class IndependenceCheck(Trial):
    """The experiments on each part of a model."""

    def check(self, part: Part) -> None:
        """Does all of them.

        Raises:
          ValueError: the part gives something else than it must.
        """
        carry = part.draw().get("carry", ())
        # What `first` gives may have steps of its own, of which lengths say nothing.
        has_steps = any(dim != NOWHERE for dim in jax.tree.leaves(self.dims["time"]["x"]))
        steps = self.parts.facts.num_steps if has_steps else None
        if not part.mixes:
            self.check_sums(part)
            self.check_rows(part)
        lengths_B = part_of(self.batch, LENGTHS)
        if steps and lengths_B is not None and (lengths_B < steps).any():
            self.check_padding(part, np.arange(steps) < np.asarray(lengths_B)[:, None])
        pieces = max(self.num_chunks, self.time_parts)  # one of both is 1
        if steps and pieces > 1 and not self.exchanges(part):
            self.check_chunks(part, steps // pieces)
        if self.time_parts > 1 and self.key is not None:
            # What reads other steps changes in any case: only what is drawn can be judged.
            moved = functools.partial(self.moved, part, part.draw(), "time")
            same = _near if moved(None, _same) else _same  # where rounding depends on the place
            find = functools.partial(moved, same=same)
            if find(self.key) and not find(None):
                self.refuse(part, find, "")
        if jax.tree.leaves(carry) and part_of(self.batch, RESETS) is not None:
            self.look_at_resets(part)

    def check_rows(self, part: Part) -> None:
        """Replaces a row of the inputs, by another one or NaN, and looks at the others; then moves all rows.

        Raises:
          ValueError: they change.
        """
        inputs, last = part.draw(), self.num_rows - 1
        whole = self.run(part, inputs, self.key)
        again = self.run(part, inputs, self.key)
        if name := _unlike(whole, again, _near):
            raise ValueError(
                f"{part.what} gives other numbers each time it is called with the same inputs: its {name} "
                f"differs.\nFix: draw random numbers with {_DRAW}"
            )
        same = _near if _unlike(whole, again, _same) else _same
        for row, by_nan in itertools.product((0, last), (False, True)):
            others = functools.partial(
                part.map, "row", lambda dim, a, row=row: np.delete(a, row, dim)
            )
            own = part.map("row", functools.partial(_replace, row=row, by_nan=by_nan), inputs)
            found = self.run(part, self.with_special(own, row) if by_nan else own, self.key)
            if name := _unlike(others(whole), others(found), same):
                is_of_loss = name == "gradient"
                hint = "" if is_of_loss or not self.parts.facts.time_major else _ROWS_FIRST
                raise ValueError(
                    f"{part.what} mixes the rows of a batch: a change in row {row} of its input changes its "
                    f"{name} in other rows.\nFix: {_ALONE[is_of_loss]}{hint}."
                    f"{see('A layer mixes the rows of a batch')}"
                )

        moved = functools.partial(self.moved, part, inputs, "row")
        if moved(self.key, _same):
            same = _near if moved(None, _same) else _same  # where rounding depends on the place
            self.refuse(
                part,
                functools.partial(moved, same=same),
                "{what} gives a row other numbers at another place in its block: {wrong}.\nFix: count rows "
                f"from at.row, or draw random numbers with {_DRAW}",
            )

    def moved(
        self, part: Part, inputs: Tree, along: str, key: Any, same: Callable[..., bool]
    ) -> str | None:
        """What changes where the first half of the rows, or time steps, follows the second, in words."""
        half = self.sizes[along] // 2
        own = part.map(along, lambda dim, a: np.roll(a, -half, dim), inputs)
        found = self.run(part, own, key, **{along: half})
        pair = (
            part.take(along, half, 2 * half, self.run(part, inputs, key)),
            part.take(along, 0, half, found),
        )
        name = _unlike(*pair, same)
        return name and f"its {name} changes where its block begins with {along} {half}"

    def check_sums(self, part: Part) -> None:
        """Compares sums of some rows with those of two halves of them; also where whole numbers are special.

        Raises:
          ValueError: the halves' do not add up to the whole's.
        """
        half, words = self.num_rows // 2, ("some rows", "the two halves of them")

        def halves(key: Any, rows: Sequence[int] = ()) -> str | None:
            inputs = functools.reduce(self.with_special, rows, part.draw())
            whole = self.run(part, inputs, key)
            if "sums" not in whole:
                return None
            pieces = self.pieces(part, inputs, "row", half, key)
            return _not_added(whole, *pieces, of=words)

        message = (
            "the sums of {what} do not add up: {wrong}.\nFix: return sums over rows, not means, and multiply "
            f"a penalty on parameters by the weight.{see('The sums do not add up')}"
        )
        self.refuse(part, halves, message)
        if any(special.size for special in jax.tree.leaves(self.special)):
            self.refuse(part, functools.partial(halves, rows=range(half)), message)

    def check_padding(self, part: Part, is_real_BT: np.ndarray) -> None:
        """Replaces padding: of the batch before the layers, of their inputs after it; looks at real steps.

        In a batch, labels or a mask may say what is padding to those that come later.

        Raises:
          ValueError: these change.
        """

        def padded(tree: Tree, name: str, other: Callable[[Arrays], Arrays]) -> Arrays:
            def of(path: Any, a: Any, row: int, time: int) -> Arrays:
                has_meaning = name == "batch" and (name_of(path) in PARTS or a.dtype == bool)
                if NOWHERE in (row, time) or has_meaning:
                    return a
                is_real = is_real_BT if row < time else is_real_BT.T
                return np.where(np.expand_dims(is_real, (*range(2, np.ndim(a)),)), a, other(a))

            dims = (part.dims[along][name] for along in ("row", "time"))
            return jax.tree.map_with_path(of, tree[name], *dims)

        def other(a: Any) -> Arrays:
            if jnp.issubdtype(a.dtype, jnp.inexact):
                return (FAR * self.random(a)).astype(a.dtype)
            return self.rng.choice(np.ravel(a), np.shape(a))

        def finds(key: Any) -> str | None:
            inputs, name = part.draw(), "x" if "x" in part.draw() else "batch"
            own = inputs | {name: padded(inputs, name, other)}
            both = [self.run(part, each, key) for each in (inputs, own)]
            names = both[0].keys() - {"carry", "sums"}
            one, two = ({n: padded(each, n, np.zeros_like) for n in names} for each in both)
            if name := _unlike(one, two, _near):
                return f"its {name} changes"
            return _not_added(*both, of=("one padding", "another")) if "sums" in both[0] else None

        self.refuse(
            part,
            finds,
            "{what} gives real steps other numbers when padding changes: {wrong}.\nFix: mask steps "
            "from at.lengths on, with jaxpar.nn.mask_padding(x, at) or a weight of 0",
        )

    def exchanges(self, part: Part) -> bool:
        """Whether a part has a collective along an axis of the task's own."""
        if not (axes := {*self.parts.facts.task.axes}):
            return False
        jitted: Any = self.jitted(part.run)
        program = jitted.trace(part.variables, part.draw(), 0, 0, self.key).jaxpr.jaxpr
        return any(
            axes & {*np.ravel(eqn.params.get("axes", eqn.params.get("axis_name", ())))}
            for eqn in equations_in(program)
        )

    def check_chunks(self, part: Part, length: int) -> None:
        """Compares what a part gives for a window with what it gives for its chunks.

        Raises:
          ValueError: they are not the same.
        """

        def chunks(key: Any) -> str | None:
            inputs = part.draw()
            whole = self.run(part, inputs, key)
            pieces = self.pieces(part, inputs, "time", length, key)
            joined = part.map("time", lambda dim, *of: np.concatenate(of, dim), *pieces)
            if name := _unlike(joined, whole, _near):
                return f"its {name} differs"
            if "sums" not in whole:
                return None
            return _not_added(whole, *pieces, of=("the window", "its chunks"))

        model, line = self.parts.facts.cut_model, ""
        pieces = self.sizes["time"] // length
        use = (
            "keep state in a layer's carry and count steps from at.time; or use num_chunks=1, and set "
            "whole_window = True in the layer"
        )
        if self.time_parts > 1:
            use = "gather the window along the axis that splits time, or remove the rule that splits it"
        if model is not None:
            kind = part.what.removeprefix("layer ")
            kind = kind if kind in model.kind_names else None
            line = model.line_across_time(kind, pieces)
            use = "treat each time step independently outside of nnx.RNN, or use num_chunks=1"
        self.refuse(
            part,
            chunks,
            f"{{what}}{line} gives other numbers when its window is split into {pieces} time chunks: "
            f"{{wrong}}.\nFix: {use}.",
        )

    def look_at_resets(self, part: Part) -> None:
        """Warns of a layer whose state goes on where the batch says that another sequence begins."""
        resets = np.array(part_of(self.batch, RESETS))
        resets[:, 0] = 1
        inputs = part.draw() | {"batch": with_part(self.batch, RESETS, resets)}
        other = inputs | {"carry": jax.tree.map(lambda a: a + 1, inputs["carry"])}
        one, two = ({"y": self.run(part, own, self.key)["output"]} for own in (inputs, other))
        if _unlike(one, two, _near) and jax.process_index() == 0:
            _log.warning(
                "%s ignores %r of the batch, so its state continues from one sequence to the next. Fix: "
                "start from the initial state where at.resets is true, or leave %r out of the batch",
                *(part.what, RESETS, RESETS),
            )

    def refuse(self, part: Part, find: Callable[[Any], str | None], message: str) -> None:
        """Does an experiment with random numbers, and says what it has found.

        Args:
          find: key -> what is wrong, or None.
          message: of an error, but for {what} and {wrong}.
        Raises:
          ValueError: something is wrong, each time that it is tried.
        """
        wrong = None
        for _ in range(TRIES):
            if (wrong := find(self.key)) is None:
                return
        if self.key is not None and find(None) is None:
            message = (
                "{what} draws random numbers that depend on how a batch is split: {wrong}.\nFix: "
                f"use {_DRAW} instead of jax.random.normal(at.key, x.shape)"
            )
        raise ValueError(message.format(what=part.what, wrong=wrong))

    def with_special(self, inputs: Tree, row: int) -> Tree:
        """Inputs with special whole numbers in a row of the batch, in another row with another one first."""

        def fill(array: Any, special: np.ndarray) -> Arrays:
            if not special.size:
                return array
            filled = np.array(array)
            filled[row] = np.resize(np.roll(special, -row), filled[row].shape)
            return filled

        return inputs | {"batch": jax.tree.map(fill, inputs["batch"], self.special)}


def _replace(dim: int, array: Any, row: int, by_nan: bool) -> Arrays:
    """With another row in place of one; or NaN if it is of floating-point numbers."""
    rows = np.moveaxis(np.array(array), dim, 0)
    is_nan = by_nan and jnp.issubdtype(rows.dtype, jnp.inexact)
    rows[row] = np.nan if is_nan else rows[len(rows) - 1 - row]
    return np.moveaxis(rows, 0, dim)


def _not_added(whole: Tree, *pieces: Tree, of: tuple[str, str]) -> str | None:
    """The first of a whole's sums that is not the sum of those of its pieces, in words; None if all are.

    Args:
      of: the words for the whole and for its pieces.
    """
    for name, number in whole["sums"].by_name.items():
        parts = [float(piece["sums"].by_name[name]) for piece in pieces]
        tolerance = max(TOLERANCE, UNITS * _rounding(float(number), *parts))
        if abs(float(number) - sum(parts)) > tolerance * sum(map(abs, parts)):
            each = " and ".join(f"{part:.6g}" for part in parts)
            return f"its {name} is {float(number):.6g} for {of[0]}, and {each} for {of[1]}"
    return None


def _rounding(*numbers: float) -> float:
    """The last digit, relative to its number, of the type of fewest digits that has all of these."""
    if all(n.is_integer() and abs(n) <= 256 for n in numbers):  # every type has these
        return 0.0
    types = jnp.bfloat16, jnp.float16, jnp.float32
    fits = (t for t in types if all(float(np.asarray(n).astype(t)) == n for n in numbers))
    with np.errstate(over="ignore"):  # what is too large for a type is none of its numbers
        return float(jnp.finfo(next(fits, jnp.float32)).eps)


def _unlike(outputs: Tree, others: Tree, same: Callable[[Any, Any], bool]) -> str | None:
    """The name of the first output, but sums, that is not the same in both; None if all are."""
    for name in outputs:
        both = jax.tree.leaves(outputs[name]), jax.tree.leaves(others[name])
        if name != "sums" and not all(itertools.starmap(same, zip(*both, strict=True))):
            return name
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether all bits are the same."""
    return a.tobytes() == b.tobytes()


def _near(a: Any, b: Any) -> bool:
    """Whether arrays are the same up to rounding over time."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return _same(a, b)
    tolerance = max(OVER_TIME, UNITS * float(jnp.finfo(a.dtype).eps))
    dtype = np.complex64 if np.iscomplexobj(a) else np.float32
    a, b = np.asarray(a, dtype), np.asarray(b, dtype)
    return np.allclose(a, b, 0, tolerance * np.nanmax(abs(a), initial=0), True)
