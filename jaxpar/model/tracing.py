"""The parts of a model, traced once each, so that a mistake is reported with the name of its part."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from flax import nnx
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr

from jaxpar.base.checks import see
from jaxpar.base.keys import new_key
from jaxpar.base.types import Arrays, Function, Leaves, Module, Shapes, Tree
from jaxpar.sharding import named_leaves
from jaxpar.trace.again import difference, same_value
from jaxpar.trace.described import exact
from jaxpar.trace.jaxprs import equations_in, inlined, is_call
from jaxpar.trace.mistakes import check_equations, check_no_refs, has_ref, why_refused
from jaxpar.trace.source_lines import source_line_of_error
from jaxpar.trace.surprises import tell_of_model

Maker = Callable[[nnx.Rngs], Module]


def made(make: Maker, seed: int | jax.Array) -> Module:
    """The module that a function makes, of a seed or a key; nothing is placed yet."""
    with nnx.use_eager_sharding(False):
        return make(nnx.Rngs(new_key(seed) if isinstance(seed, int) else seed))


def module_of(what: str, make: Callable[[jax.Array], Module]) -> tuple[Module, ClosedJaxpr]:
    """The module that a function makes of a key, of shapes, and the program that gives its variables.

    Args:
      what: the module is, in messages.
    Raises:
      ValueError: the function makes something else when it is called again.
    """

    def trace() -> tuple[Module, Shapes, ClosedJaxpr]:
        graphdef: Any = None

        def draw(key: jax.Array) -> Any:
            nonlocal graphdef
            module = make(key)
            graphdef, state = nnx.split(module)
            for path, leaf in jax.tree.leaves_with_path(state):
                if not isinstance(jax.typeof(leaf), ShapedArray):
                    name = jax.tree_util.keystr(path, simple=True, separator=".")
                    owner = f"{what} {type(module).__name__}"
                    raise ValueError(has_ref(owner, f"{name.removesuffix('.value')}, a Ref"))
            return state

        program, state = jax.make_jaxpr(draw, return_shape=True)(new_key(0))
        shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(state)}
        return nnx.merge(graphdef, state), shapes, program

    (module, shapes, program), (again, other_shapes, other_program) = trace(), trace()
    what = f"{what} {type(module).__name__}"
    one, two = _attributes(module) | shapes, _attributes(again) | other_shapes
    for name in {**one, **two}:
        values = one.get(name), two.get(name)
        if not same_value(*values):
            raise ValueError(
                f"{what} has {name}={values[0]!r:.40}, but {values[1]!r:.40} when the same function makes it "
                f"again.\nFix: make it only from rngs and fixed numbers, or use one function per layer."
            )
    if found := difference(program, other_program):
        place = f" ({found.source_line})" if found.source_line else ""
        raise ValueError(
            f"{what}{place}: {[*shapes][found.outputs[0]]} has other initial values each time it is made.\n"
            f"Fix: draw it from rngs, such as jax.random.normal(rngs.params(), shape)."
        )
    tell_of_model(what, program.jaxpr)
    return module, program


def _attributes(module: Module) -> dict[str, Any]:
    """All that a module and those within it have, by name."""
    return {
        ".".join(map(str, (*path, name))): value
        for path, own in nnx.iter_modules(module)
        for name, value in vars(own).items()
        if not name.startswith("_pytree")
    }


def types_in(graphdef: Any) -> Hashable:
    """The types of a module's plain attributes: graphdefs with 1, 1.0 and True are equal."""
    return exact(tuple(getattr(own, "value", None) for _, own in graphdef.attributes))


def shapes_of(what: str, call: Function, module: Module, *args: Arrays) -> Shapes:
    """The shapes that `call(module, *args)` gives; what draws is traced with draws=False as well.

    Raises:
      ValueError: as of `shapes_and_program`; or it fails where nothing is drawn, as in evaluation.
    """
    out, program = shapes_and_program(what, call, module, *args)
    names = {eqn.primitive.name for eqn in equations_in(program.jaxpr)}
    if any(name.startswith("random_") for name in names - {"random_seed"}):
        shapes_and_program(what, functools.partial(call, draws=False), module, *args, has_key=False)
    return out


def shapes_and_program(
    what: str, call: Function, module: Module, *args: Arrays, has_key: bool = True
) -> tuple[ClosedJaxpr, Shapes]:
    """The shapes that `call(module, *args)` gives, of shapes, and its program.

    Args:
      has_key: whether the call has an `at.key`.
    Raises:
      ValueError: the call changes a variable of the module, or adds one, or it does what no part can do.
    """
    graphdef, state = nnx.split(module)

    def run(state, *args):
        own = nnx.merge(graphdef, state)
        return call(own, *args), nnx.state(own)

    program, (out, after) = program_of(what, run, state, *args, has_key=has_key)
    check_equations(what, equations_in(program.jaxpr))
    check_no_refs(what, program.jaxpr)
    tell_of_model(what, program.jaxpr)
    jaxpr = inlined(program, is_call).jaxpr
    names, names_after = (flatten(tree)[0] for tree in (state, after))
    before = dict(zip(names, jaxpr.invars[: len(names)], strict=True))
    given = jaxpr.outvars[len(jaxpr.outvars) - len(names_after) :]
    left = dict(zip(names_after, given, strict=True))
    changed = [name for name in [*before, *left] if before.get(name) is not left.get(name)]
    if changed:
        name = changed[0].removesuffix("/value").replace("/", ".")
        raise ValueError(
            f"{what} changes its variable {name} when it is called, but the change would be lost.\n"
            f"Fix: keep state in the carry of a layer, and return what you log in the metrics of `last`."
            f"{see('A layer changes its variable when it is called')}"
        )
    return out, program


def program_of(
    what: str, run: Function, *args: Arrays, has_key: bool = True
) -> tuple[ClosedJaxpr, Shapes]:
    """The program of a function, and the shapes that it gives.

    Raises:
      ValueError: as of `naming_errors`; or it is another program when it is traced again.
    """

    def trace() -> tuple[ClosedJaxpr, Shapes]:  # of another function each time, or JAX remembers
        traced = jax.make_jaxpr(lambda *own: run(*own), return_shape=True)
        return naming_errors(what, lambda: traced(*args), has_key=has_key)

    program, out = trace()
    if has_key and (found := difference(program, trace()[0])):
        place = f" ({found.source_line})" if found.source_line else ""
        raise ValueError(
            f"{what}{place} computes with other numbers each time it is traced, such as NumPy's random "
            f"ones.\nFix: use at.draw(jax.random.normal, x.shape), and keep counts in a layer's carry."
            f"{see('A layer computes with other numbers each time it is traced')}"
        )
    return program, out


def naming_errors(what: str, trace: Callable[[], Tree], *, has_key: bool = True) -> Tree:
    """What a trace gives; its errors name the part of the model and its line, and where they can the remedy.

    Args:
      has_key: False if the same went well with an `at.key`.
    """
    try:
        return trace()
    except Exception as error:
        if (why := why_refused(what, error, has_key=has_key)) is not None:
            raise ValueError(why).with_traceback(error.__traceback__) from None
        place = source_line_of_error(error)
        error.add_note(f"in {what} of the model, traced by itself" + f" ({place})" * bool(place))
        raise


def flatten(state: nnx.State) -> tuple[list[str], Leaves, Any]:
    """The names of a state's variables, their arrays, and what makes the state of these again."""
    pairs, structure = jax.tree.flatten_with_path(state)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    return paths, [leaf for _, leaf in pairs], structure
