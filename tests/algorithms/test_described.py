"""Programs and functions are described alike if they do the same, and not otherwise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from jax.experimental import io_callback
from lib.layers import times_in_backward

from jaxpar.trace.described import Descriptions, exact

X = jnp.ones((3, 3, 3))


def times_in_jvp(factor):
    function = jax.custom_jvp(lambda x: x)
    function.defjvp(lambda x, dx: (x[0], factor * dx[0]))
    return function


def times_by_an_argument(factor):
    """The rule is an argument that is not differentiated."""
    function = jax.custom_vjp(lambda change, x: x, nondiff_argnums=(0,))
    function.defvjp(lambda change, x: (x, None), lambda change, _, dx: (change(dx),))
    return functools.partial(function, lambda dx: factor * dx)


def times_in_forward(factor):
    """The backward pass reads the factor from what the forward pass keeps."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, factor), lambda kept, dx: (kept * dx,))
    return function


def times_a_list(factor):
    kept = {"factors": [factor]}
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, dx: (kept["factors"][0] * dx,))
    return function


def times_in_loop(factor):
    function = times_in_backward(factor)
    return lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, length=2)[0]


def times_in_branch(factor):
    function = times_in_backward(factor)
    return lambda x: jax.lax.cond(x[0, 0, 0] > 0, function, lambda x: x, x)


# The identity, whose gradient is multiplied by a factor.
WITH_GRADIENT = {
    "custom_vjp": times_in_backward,
    "custom_vjp of an argument": times_by_an_argument,
    "custom_vjp, by what is kept": times_in_forward,
    "custom_vjp, by a list": times_a_list,
    "custom_vjp in jit": lambda factor: jax.jit(jax.jit(times_in_backward(factor))),
    "custom_vjp in remat": lambda factor: jax.checkpoint(times_in_backward(factor)),
    "custom_vjp in vmap": lambda factor: jax.vmap(times_in_backward(factor)),
    "custom_vjp in a loop": times_in_loop,
    "custom_vjp in a branch": times_in_branch,
    "custom_jvp": times_in_jvp,
    "custom_gradient": lambda factor: jax.custom_gradient(lambda x: (x, lambda dx: factor * dx)),
    "linear_call": lambda factor: (
        lambda x: linear_call(lambda _, x: x, lambda _, dx: factor * dx, (), x)
    ),
}


def pure(factor):
    return lambda x: jax.pure_callback(lambda a: np.asarray(a) * factor, x, x)


def pure_by_table(factor):
    table = np.full((3, 3, 3), factor, np.float32)
    return lambda x: jax.pure_callback(lambda a: np.asarray(a) * table, x, x)


def pure_by_options(factor):
    options = {"factors": [factor]}
    return lambda x: jax.pure_callback(lambda a: np.asarray(a) * options["factors"][0], x, x)


def pure_by_default(factor):
    return lambda x: jax.pure_callback(lambda a, factor=factor: np.asarray(a) * factor, x, x)


def pure_by_partial(factor):
    call = functools.partial(np.multiply, factor)
    return lambda x: jax.pure_callback(call, x, x)


def pure_on_one_line(factor):
    two, three = lambda a: np.asarray(a) * 2.0, lambda a: np.asarray(a) * 3.0
    return lambda x: jax.pure_callback(two if factor == 2 else three, x, x)


def pure_by_method_in_c(factor):
    table = np.full((3, 3, 3), factor, np.float32)
    return lambda x: jax.pure_callback(table.__add__, x, x)


def pure_by_set(factor):
    factors = {factor}
    return lambda x: jax.pure_callback(lambda a: np.asarray(a) * max(factors), x, x)


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float

    def __call__(self, a):
        return np.asarray(a) * self.factor

    def call(self, a):
        return np.asarray(a) * self.factor


def recursive(factor):
    def call(a, times=2):
        return call(a * factor, times - 1) if times else np.asarray(a)

    return lambda x: jax.pure_callback(call, x, x)


def with_effect(factor):
    return lambda x: io_callback(lambda a: np.asarray(a) * factor, x, x)


def printed(factor):
    def run(x):
        jax.debug.print(f"{factor} " + "{}", x[0, 0, 0])
        return x

    return run


def closed_over(factor):
    table = jnp.arange(2000.0) * factor
    return lambda x: x + table[None, None, 7:10]


def key_closed_over(factor):
    key = jax.random.key(int(factor))
    return lambda x: x + jax.random.normal(key, x.shape)


def variable_not_set(factor):
    """The function that is called for a later step is not made yet."""

    def call(a):
        return np.asarray(a) * factor if factor < 10 else later(a)

    if factor > 10:
        later = np.sin
    return lambda x: jax.pure_callback(call, x, x)


def closed_over_in_jit(factor):
    table = jnp.arange(2000.0).at[1000].set(factor)
    return jax.jit(lambda x: x + table[None, None, 999:1002])


def rule_of_rule(factor):
    """A custom_jvp whose rule calls the function itself, and another one with a rule."""
    inner = times_in_jvp(factor)

    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    function.defjvp(lambda x, dx: (function(*x), inner(dx[0]) * factor))
    return function


def transpose_of_rule(factor):
    """The transpose of a function that a rule calls."""
    inner = WITH_GRADIENT["linear_call"](factor)

    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    function.defjvp(lambda x, dx: (function(*x), inner(dx[0])))
    return function


def where_zero(factor):
    """The rule differs only where one of two gradients is zero."""

    @jax.custom_vjp
    def product(x, y):
        return x * y

    def forward(x, y):
        both = x.perturbed and y.perturbed
        return x.value * y.value, (x.value, y.value if both else y.value * factor)

    product.defvjp(forward, lambda kept, g: (g * kept[1], g * kept[0]), symbolic_zeros=True)
    return lambda x: product(x, x)


def without_gradient(factor):
    def refuse(_, g):
        raise NotImplementedError(factor)

    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), refuse)
    return function


def without_gradient_of_an_argument(factor):
    """JAX wraps the argument, which is not differentiated."""

    def refuse(factor, _, g):
        raise NotImplementedError

    function = jax.custom_vjp(lambda factor, x: x, nondiff_argnums=(0,))
    function.defvjp(lambda factor, x: (x, None), refuse)
    return functools.partial(function, factor)


def rule_of_vmap(factor):
    function = jax.custom_batching.custom_vmap(lambda x: x)
    function.def_vmap(lambda size, batched, x: (x * factor, batched[0]))
    return function


def while_loop(factor):
    return lambda x: jax.lax.while_loop(lambda x: x[0, 0, 0] < factor, lambda x: x + 1, x)


def literal(factor):
    return lambda x: x * factor


MAKERS = {
    **WITH_GRADIENT,
    "pure_callback of an object": lambda factor: lambda x: jax.pure_callback(Scale(factor), x, x),
    "pure_callback of a method": lambda factor: (
        lambda x: jax.pure_callback(Scale(factor).call, x, x)
    ),
    **{
        make.__name__: make
        for make in (
            *(pure, pure_by_table, pure_by_options, pure_by_default, pure_by_partial, recursive),
            *(pure_on_one_line, pure_by_method_in_c, pure_by_set, while_loop),
            *(with_effect, printed, closed_over, closed_over_in_jit, rule_of_rule),
            *(transpose_of_rule, where_zero, without_gradient, rule_of_vmap, literal),
            *(without_gradient_of_an_argument, key_closed_over, variable_not_set),
        )
    },
}


def program(function):
    return jax.make_jaxpr(lambda x: function(x))(X)


@pytest.mark.parametrize("name", MAKERS)
def test_functions_are_alike_if_they_do_the_same(name):
    make, descriptions = MAKERS[name], Descriptions()
    first, same, other = (
        descriptions.of_program(program(make(factor))) for factor in (2.0, 2.0, 3.0)
    )
    assert first == same
    assert first != other


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_without_a_gradient_its_rule_is_of_no_account(name):
    descriptions = Descriptions()
    programs = [program(WITH_GRADIENT[name](factor)) for factor in (2.0, 3.0)]
    found = {descriptions.of_program(own, is_differentiated=False) for own in programs}
    assert len(found) == 1
    assert len({descriptions.of_program(own) for own in programs}) == 2  # nor is what was said then


def test_a_policy_of_remat_is_compared_by_what_it_saves():
    descriptions = Descriptions()

    def of(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return descriptions.of_program(program(jax.checkpoint(jnp.sin, policy=policy)))

    assert of("a", "b") == of("b", "a")
    assert of("a") != of("b")


def test_names_of_jitted_functions_are_of_no_account():
    descriptions = Descriptions()

    def one(x):
        return x + 1

    def other(x):
        return x + 1

    assert len({descriptions.of_program(program(jax.jit(own))) for own in (one, other)}) == 1


def test_a_function_with_an_effect_has_its_own_lists():
    def logged():
        seen = []

        def run(x):
            jax.debug.callback(lambda a: seen.append(a), x)
            return x

        return run

    descriptions, one = Descriptions(), logged()
    first, same, other = (descriptions.of_program(program(own)) for own in (one, one, logged()))
    assert first == same
    assert first != other


def test_an_unknown_object_is_only_like_itself():
    class Unknown:
        def __init__(self, factor):
            self.factor = factor

    def by(scale):
        return lambda x: jax.pure_callback(lambda a: np.asarray(a) * scale.factor, x, x)

    scale, descriptions = Unknown(2), Descriptions()
    first, same, other = (
        descriptions.of_program(program(by(each))) for each in (scale, scale, Unknown(2))
    )
    assert first == same
    assert first != other


def test_a_rule_that_holds_a_traced_array_is_only_like_itself():
    def refuses(factor):
        def run(x):
            y = factor * x

            def refuse(_, g):
                raise NotImplementedError(y)

            function = jax.custom_vjp(lambda x: x)
            function.defvjp(lambda x: (x, None), refuse)
            return function(x)

        return run

    descriptions, programs = Descriptions(), [program(refuses(n)) for n in (2, 2, 3)]
    assert len({descriptions.of_program(own) for own in programs}) == 3
    assert len({descriptions.of_program(programs[0]) for _ in range(2)}) == 1


@pytest.mark.parametrize("values", [(1, 1.0, True, np.float32(1), "1"), (0.0, -0.0, np.nan)])
def test_equal_numbers_of_other_types_are_told_apart(values):
    descriptions = Descriptions()
    assert len({exact(value) for value in values}) == len(values)
    assert len({descriptions.of_value((value,)) for value in values}) == len(values)


class Table(dict):
    """A dict that also has a factor."""


class Alike(list):
    """All are equal, whatever they hold."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor


@dataclasses.dataclass
class Holder:
    name: str = "holder"


def table(factor):
    held = Table(a=1)
    held.factor = factor
    return held


def holder(factor):
    held = Holder()
    held.factor = factor
    return held


HIDES = {
    "masked array": lambda factor: np.ma.array([1.0, 2.0], mask=[factor > 2, False]),
    "dict with an attribute": table,
    "list with an attribute": Alike,
    "dataclass with another attribute": holder,
}


@pytest.mark.parametrize("name", HIDES)
def test_what_a_function_holds_is_compared_with_all_that_is_in_it(name):
    descriptions = Descriptions()

    def of(factor):
        held = HIDES[name](factor)
        return descriptions.of_program(
            program(lambda x: jax.pure_callback(lambda x: x * len(str(held)), x, x))
        )

    assert of(2.0) != of(3.0)
