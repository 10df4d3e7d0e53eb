"""Whether functions with their own backward pass give the same gradients on every mesh.

Such a function (`jax.custom_vjp`, `jax.custom_jvp`, `linear_call`) may do anything with the gradient that it
receives. A step gives each device and microbatch some of the rows, and each chunk some of the time steps. So
the gradients of a part of the model must be the sum of those of its rows, and of its chunks. They are if a
function changes each number by itself, as clipping does, and not if it divides by the norm of a whole array,
or changes the gradient of a parameter.

A step that runs in units begins each with the gradient of the mean loss, if the weight of `last` depends on
the batch alone. Otherwise it begins with that of the sum: then these functions must be linear.

Both are tried before a run, on few rows, with gradients of several sizes: for each function alone, and for
parts of the model as a whole where one of their functions can't be tried alone.

Functions that Python runs are not tried: JAX compiles them for no mesh on which these checks matter.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.base.jax_private import call_once
from jaxpar.base.trees import wide
from jaxpar.base.types import Arrays, Cotangents, Params, Shapes
from jaxpar.model.adopt.cut_model import CutModel, resized
from jaxpar.model.facts import ModelFacts
from jaxpar.step.parts import Parts
from jaxpar.step.rule_alone import Call, RuleAlone, agree, calls_in
from jaxpar.step.trial import Part, Tree, Trial, normal, quick_jit
from jaxpar.trace.bound import bound
from jaxpar.trace.described import Descriptions
from jaxpar.trace.jaxprs import equations_in, parts_of_program
from jaxpar.trace.own_derivatives import OWN_DERIVATIVES, files_of_rules
from jaxpar.trace.source_lines import source_line_of_equation

# By what gradients are multiplied: powers of two, which change no digits. Those of float16 have fewer.
SCALES, SCALES_OF_FLOAT16 = (2.0**-20, 2.0**-10, 1.0, 2.0**10, 2.0**20), (2.0**-5, 1.0, 2.0**5)

# How far gradients of a part may be from those that they must equal, in the Euclidean norm: where a function
# jumps, as a sign does, rounding may change a few numbers. The mistakes change most of them. In a residual
# branch they do so by little: so each function is tried alone, too (`rule_alone.py`).
TOLERANCE = 0.1

# What JAX runs as Python, by the names of the primitives and of the public functions.
_CALLBACKS = {"io_callback": "experimental.io_callback", "pure_callback": "pure_callback"}

_PACKAGE = f"{Path(__file__).parents[1]}/"
_PACKAGES_OF_JAX = tuple(f"{Path(str(module.__file__)).parent}/" for module in (jax, flax))


def check_custom_backward(parts: Parts) -> None:
    """Checks backward passes that are not JAX's, by running parts of the model forward and backward.

    Each part runs on one device, in its real size, on few rows; those without such functions don't run.

    Raises:
      ValueError: gradients of a part would depend on the mesh; it names the functions. Or the weight of
        `last` has a gradient, which a step that runs in units leaves out. Or a part calls Python.
    """
    facts, parallel = parts.facts, parts.partition.parallel
    own_sizes = {axis: parallel.mesh.sizes[axis] for axis in facts.task.axes}
    splits_rows = max(parallel.mesh.data, *own_sizes.values(), 1) > 1
    if not splits_rows and not parallel.runs_in_units:
        return
    begins_with_sum = parts.partition.runs_in_units and not facts.knows_weight
    done = "backward", begins_with_sum, parallel.num_chunks, *own_sizes.items()
    if done in facts.checked:
        return
    programs = _programs_of_parts(facts)
    _check_callbacks(programs)
    functions = _functions(programs)
    if functions or begins_with_sum:
        together = math.lcm(*facts.rows_together.values())
        trial = Trial(parts, min(2 * together, facts.batch_size), parallel.num_chunks)
        if begins_with_sum:
            _check_weight(trial)
        for name in functions:
            part = trial.makers[name]()
            if facts.traces.adds_sums:  # a layer may add to the weight
                has_weight = _check(trial, part, functions[name], is_linear=begins_with_sum)
                _check_alone(trial, name, part, is_linear=begins_with_sum or has_weight)
            elif not _check_alone(trial, name, part, is_linear=begins_with_sum):
                _check(trial, part, functions[name], is_linear=begins_with_sum)
    facts.checked.add(done)


def _check_callbacks(programs: dict[str, Jaxpr]) -> None:
    """Raises a ValueError if a part of the model calls Python; `jax.debug.print` may."""
    for what, program in programs.items():
        for eqn in equations_in(program):
            if eqn.primitive.name not in _CALLBACKS:
                continue
            name, line = _CALLBACKS[eqn.primitive.name], source_line_of_equation(eqn)
            place = f" ({line})" if line else ""
            raise ValueError(
                f"{what}{place} calls Python by jax.{name}, but the layout splits a batch.\n"
                f"JAX can't compile such a call with data parallelism, stages or microbatches.\n"
                f"Fix: compute it with jax.numpy, or use one device and no microbatches (dp1)."
            )


def _functions(programs: dict[str, Jaxpr]) -> dict[str, str]:
    """By the part of the model, the functions with a backward pass of their own, in words; not jaxpar's."""
    found = {}
    for what, program in programs.items():
        eqns = equations_in(program)
        names = dict.fromkeys(name for eqn in eqns if (name := _function_of(eqn)))
        if names:
            found[what] = ", ".join(names)
    return found


def _programs_of_parts(facts: ModelFacts) -> dict[str, Jaxpr]:
    """The programs of the user's code, by the parts of the model."""
    if facts.cut_model is not None:
        return _cut_parts(facts.cut_model, facts.cut_model.batch)
    programs = {}
    for what, (run, args) in facts.parts.items():
        trace = functools.partial(jax.make_jaxpr(run), *args)
        programs[what] = bound(facts.task.axes, trace).jaxpr
    return programs


def _cut_parts(model: CutModel, batch: Shapes) -> dict[str, Jaxpr]:
    """The programs of the parts of a Flax model as its user wrote them, for batches of such shapes.

    What runs on a mesh has functions of jaxpar in place of the user's (`trace/varying.py`).
    """
    program = model.program("loss", batch, trains=True)
    programs = {"`first`": program.part("first").closed.jaxpr}
    for name, number in zip(model.kind_names, model.first_of, strict=True):
        programs[f"layer {name}"] = program.part(number).closed.jaxpr
    programs["`last`"] = program.part("last").closed.jaxpr
    return programs


def _function_of(eqn: JaxprEqn) -> str:
    """The function that an equation calls, if it has a derivative of its own; "" if none of a user's."""
    kind = eqn.primitive.name
    if kind not in OWN_DERIVATIVES:
        return ""
    program, _ = parts_of_program(eqn.params[OWN_DERIVATIVES[kind].program])
    about, place = program.debug_info, source_line_of_equation(eqn)
    packages = (_PACKAGE, *_PACKAGES_OF_JAX) if kind == "custom_jvp_call" else (_PACKAGE,)
    if str(about.func_filename).startswith(packages):
        rules = files_of_rules(eqn)  # a user may give a function of JAX another derivative
        if all(file.startswith((_PACKAGE, *_PACKAGES_OF_JAX)) for file in rules):
            return ""
    return about.func_name + f" ({place})" * bool(place)


def _check_weight(trial: Trial) -> None:
    """Raises a ValueError if the weight of `last` has a gradient."""
    part = trial.makers["`last`"]()
    floats, whole = _floats(part, part.draw())

    def weight(own: Params) -> jax.Array:
        return part.piece(*whole(own), 0, 0, trial.key)["sums"].weight

    found = call_once(quick_jit(trial.parts, jax.grad(weight)), floats)
    if any(np.any(a) for a in jax.device_get(found)):
        raise ValueError(
            f"the weight of {part.what} has a gradient, which pipelines and microbatches leave out.\n"
            "Fix: return jax.lax.stop_gradient(weight), or compute it from the batch alone."
        )


def _check(trial: Trial, part: Part, functions: str, *, is_linear: bool) -> bool:
    """Compares gradients of a part with those of its pieces, and with those of larger gradients.

    Args:
      functions: of the part, in words.
      is_linear: whether they must be linear.
    Returns:
      whether the part adds to the weight.
    Raises:
      ValueError: they differ.
    """
    rows, chunks, inputs = trial.num_rows, trial.num_chunks, part.draw()
    at_once, has_weight = _gradients(trial, part, inputs, "row", rows)
    ways = {"two halves of the rows": ("row", rows // 2)} if rows % 2 == 0 else {}
    if chunks > 1:
        ways[f"{chunks} time chunks"] = "time", trial.sizes["time"] // chunks
    for way, pieces in ways.items():
        found, _ = _gradients(trial, part, inputs, *pieces)
        if any(map(_differ, found, at_once)):
            raise _combines(part, functions, way)
    if (is_linear or has_weight) and any(_differ(found, at_once[0]) for found in at_once):
        raise _is_not_linear(part, functions)
    return has_weight


def _combines(part: Part, functions: str, way: str) -> ValueError:
    return ValueError(
        f"{part.what}: the backward pass of {functions} gives other gradients for {way} than for all at "
        f"once.\nFix: change each number of an activation gradient independently, or clip in the optimizer."
    )


def _is_not_linear(part: Part, functions: str) -> ValueError:
    return ValueError(
        f"{part.what}: the backward pass of {functions} is not linear, but the weight of the loss is not "
        f"known from the batch.\nFix: compute the weight from the batch, or use no stages, microbatches or "
        f"chunks."
    )


# ---- each function alone ----


def _check_alone(trial: Trial, name: str, part: Part, *, is_linear: bool) -> bool:
    """Compares the gradients of each function of a part, by itself, with those of its pieces.

    Args:
      name: of the part, as in `Trial.makers`.
      is_linear: whether the functions must be linear.
    Returns:
      whether each of them could be tried.
    Raises:
      ValueError: they differ.
    """
    rows, chunks = trial.num_rows, max(trial.num_chunks, trial.time_parts)  # one of both is 1
    ways = [("row", 2, "two halves of the rows")] if rows % 2 == 0 else []
    if chunks > 1 and trial.sizes["time"]:
        ways.append(("time", chunks, f"{chunks} time chunks"))
    whole = _calls(trial, name, part, "row", 1)
    descriptions, seen, all_tried = Descriptions(), set[tuple[int, ...]](), bool(ways)
    for along, num_pieces, way in ways:
        pieces = _calls(trial, name, part, along, num_pieces)
        if [*map(_function_of_call, pieces)] != [*map(_function_of_call, whole)]:
            all_tried = False  # another program: the part as a whole is all that can be compared
            continue
        for call, piece in zip(whole, pieces, strict=True):
            rule = RuleAlone.of(trial, call.eqn, piece.eqn, num_pieces)
            # Where it is not cut, each piece may call it with other numbers, of the same sizes.
            if rule is None or (not rule.is_cut and (along == "time" or call.in_loop)):
                all_tried = False
                continue
            looks = tuple(
                descriptions.of_program(program, is_differentiated=False)
                for program in rule.programs
            )
            if looks in seen:
                continue
            seen.add(looks)
            function = _function_of(call.eqn)
            if not _check_rule(rule, part, function, way, is_linear=is_linear):
                all_tried = False
    return all_tried


def _check_rule(rule: RuleAlone, part: Part, function: str, way: str, *, is_linear: bool) -> bool:
    """Returns whether random numbers are all that it takes to try a function."""
    scales, tolerance = _scales(is_short=jnp.float16 in rule.types), rule.tolerance
    for are_positive in (False, True):  # some functions take roots or logarithms of them
        gradients = rule.gradients(scales, are_positive=are_positive)
        for gradient in gradients:
            if not agree(gradient.in_pieces, gradient.at_once, tolerance):
                raise _combines(part, function, way)
            if is_linear and not agree(gradient.at_once, gradients[0].at_once, tolerance):
                raise _is_not_linear(part, function)
        if all(gradient.says_something for gradient in gradients):
            return not rule.reads_other_types
    return False


def _calls(trial: Trial, name: str, part: Part, along: str, num_pieces: int) -> list[Call]:
    """Where a part calls functions of users with a derivative of their own, for one of so many pieces."""
    program = _program_of_piece(trial, name, part, along, num_pieces)
    return [call for call in calls_in(program) if _function_of(call.eqn)]


def _function_of_call(call: Call) -> str:
    return _function_of(call.eqn)


def _program_of_piece(trial: Trial, name: str, part: Part, along: str, num_pieces: int) -> Jaxpr:
    facts = trial.parts.facts
    if facts.cut_model is not None:
        cut_dim = ("row", "time").index(along)

        def of_piece(dim: int, size: int) -> int:
            return size // num_pieces if dim == cut_dim else size

        return _cut_parts(facts.cut_model, resized(trial.batch, of_piece))[name]
    sizes = dict.fromkeys(facts.task.axes, 1)
    if along == "time" and trial.time_parts > 1:  # what is gathered is whole again
        sizes |= {axis: trial.parts.partition.parallel.mesh.sizes[axis] for axis in facts.time_axes}
    inputs = part.take(along, 0, trial.sizes[along] // num_pieces, part.draw())
    args = part.variables, inputs, 0, 0, trial.key
    return bound(sizes, lambda: jax.make_jaxpr(part.piece)(*args)).jaxpr


def _gradients(
    trial: Trial, part: Part, inputs: Tree, along: str, size: int
) -> tuple[list[list[np.ndarray]], bool]:
    """Gradients of the floats that a part takes, over their scale, for each scale.

    Args:
      along, size: of the pieces that are run one after the other.
    Returns:
      them, and whether the part adds to the weight.
    """
    floats, whole = _floats(part, inputs)

    def run(own: Params) -> Arrays:
        variables, inputs = whole(own)
        piece = functools.partial(part.piece, variables)
        pieces = trial.run_in_pieces(piece, part, inputs, along, size, trial.key)
        joined = part.map(along, lambda dim, *of: jnp.concatenate(of, dim), *pieces)
        sums = [own["sums"] for own in pieces if "sums" in own]
        loss = sum((own.loss for own in sums), jnp.float32(0))
        weight = sum((own.weight for own in sums), jnp.float32(0))
        return (joined, loss), weight

    def gradients(own: Params, cotangents: Cotangents) -> Arrays:
        _, vjp, weight = jax.vjp(run, own, has_aux=True)
        return vjp(cotangents)[0], weight

    out, _ = jax.eval_shape(quick_jit(trial.parts, run), floats)
    rng = np.random.default_rng(0)
    g = jax.tree.map(functools.partial(normal, rng), out[0])
    g = g, np.float32(1)
    is_short = any(a.dtype == jnp.float16 for a in jax.tree.leaves((floats, g)))
    quick, found, weight = quick_jit(trial.parts, gradients), [], 0.0
    for scale in _scales(is_short):
        scaled = jax.tree.map(lambda a, scale=scale: (a * scale).astype(a.dtype), g)
        own, weight = jax.device_get(call_once(quick, floats, scaled))
        found.append([np.asarray(a, wide(a.dtype)) / scale for a in own])
    return found, bool(weight) and part.what != trial.parts.facts.ends[1]


def _scales(is_short: bool) -> tuple[float, ...]:
    return SCALES_OF_FLOAT16 if is_short else SCALES


def _floats(part: Part, inputs: Tree) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The floating-point arrays that a part takes, and a function of such: (variables, inputs)."""
    given = part.variables, {name: own for name, own in inputs.items() if name != "batch"}
    leaves, structure = jax.tree.flatten(given)
    is_float = [jnp.issubdtype(a.dtype, jnp.inexact) for a in leaves]

    def whole(floats: list[Any]) -> Arrays:
        own = iter(floats)
        pairs = zip(is_float, leaves, strict=True)
        merged = [next(own) if each else a for each, a in pairs]
        variables, given = jax.tree.unflatten(structure, merged)
        return variables, given | {"batch": inputs["batch"]}

    return [a for own, a in zip(is_float, leaves, strict=True) if own], whole


def _differ(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    """Whether any array is another one, by far more than by rounding."""
    norm = np.linalg.norm
    pairs = zip(found, expected, strict=True)
    return any(norm(a - b) > TOLERANCE * max(norm(a), norm(b)) for a, b in pairs)
