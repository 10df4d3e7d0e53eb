"""What is another program, or another model, each time that it is traced or made is refused."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib.models import WIDTH, Regress, Regression

from jaxpar import Stack, init_state

COUNT = itertools.count(1)


class Layer(nnx.Module):
    def __init__(self, *, rngs, depth=0, scale=1.0, init=None):
        self.depth, self.act = depth, lambda x: jnp.tanh(x)
        self.w = nnx.Param(scale * (init or jax.random.normal)(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, carry, x, at):
        return carry, x + self.act(x @ self.w[...])


def by_numpy(key, shape):
    return np.random.normal(size=shape).astype(np.float32)  # noqa: NPY002


def local_count(**options):
    """A counter that begins anew with each model: two models are the same."""
    count = itertools.count()
    return [lambda rngs: Layer(rngs=rngs, **{key: next(count) for key in options})] * 3


def local_class():
    class Own(Layer):
        pass

    return [lambda rngs: Own(rngs=rngs)] * 2


# Makers of layers, and what is said of them.
MAKERS = {
    "the same": (lambda: [lambda rngs: Layer(rngs=rngs)] * 3, None),
    "their own": (lambda: [lambda rngs, d=d: Layer(rngs=rngs, depth=d) for d in (0, 1)], None),
    "a class of their own": (local_class, None),
    "NumPy": (
        lambda: [lambda rngs: Layer(rngs=rngs, init=by_numpy)] * 3,
        r"^layer Layer( \(test_again\.py, line \d+\))?: w has other initial .*\nFix: draw it from",
    ),
    "a counter": (
        lambda: [lambda rngs: Layer(rngs=rngs, depth=next(COUNT))] * 3,
        r"(?s)^layer Layer has depth=\d+, but \d+ when the same .*Fix: make it only from rngs",
    ),
    "a counter for each model": (lambda: local_count(depth=0), "^layer Layer has depth=0, but 1 when"),
    "a counter of initial values": (lambda: local_count(scale=0), "^layer Layer.*: w has other initial"),
    "a counter in each": (
        lambda: [lambda rngs: Layer(rngs=rngs, depth=next(COUNT)) for _ in range(2)],
        "^layer Layer has depth=",
    ),
    "widths": (
        lambda: [lambda rngs: Layer(rngs=rngs, init=lambda *_: jnp.ones((WIDTH, next(COUNT))))],
        r"^layer Layer has w=\(16, \d+\), but \(16, \d+\) when",
    ),
}  # fmt: skip


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", MAKERS)
def test_a_function_that_makes_other_layers_each_time_is_refused(name):
    make, message = MAKERS[name]
    if message is None:
        Stack(make(), rngs=nnx.Rngs(0))
        return
    with pytest.raises(ValueError, match=message):
        Stack(make(), rngs=nnx.Rngs(0))


class Tanh(Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.act = jnp.tanh


def test_layers_with_equal_numbers_of_other_types_are_of_other_kinds():
    makers = [lambda rngs, d=d: Tanh(rngs=rngs, depth=d) for d in (1, 1.0, True, 1)]
    assert Stack(makers, rngs=nnx.Rngs(0)).kind_of == (0, 1, 2, 0)


class Carried(Layer):
    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH)) + jnp.asarray(by_numpy(None, (WIDTH,)))[None]


class Noisy(Layer):
    def __call__(self, carry, x, at):
        return carry, x + by_numpy(None, x.shape)


class Model(Regression):
    """With noise of NumPy where a test wants it."""

    def __init__(self, place, rngs):
        super().__init__((), rngs=rngs)
        layer = {"layer": Noisy, "initial_carry": Carried}.get(place, Layer)
        self.layers = Stack([lambda rngs: layer(rngs=rngs)] * 2, rngs=rngs)
        self.place, self.more = place, nnx.Param(jnp.zeros(WIDTH))
        if place == "parameter":
            self.more = nnx.Param(by_numpy(None, (WIDTH,)))
        if place == "field":
            self.made = next(COUNT)

    def noise(self, place):
        return by_numpy(None, (WIDTH,)) if self.place == place else np.zeros(WIDTH, np.float32)

    def first(self, batch, at):
        return super().first(batch, at) + self.noise("first")[None, None]

    def last(self, y, batch, at):
        sums = super().last(y + self.noise("last")[None, None], batch, at)
        return sums._replace(loss=sums.loss + jnp.sum(self.more[...]))

    def draw(self, key):
        model = nnx.clone(self)
        model.more[...] = model.more[...] + self.noise("draw")
        return model


@dataclasses.dataclass(frozen=True)
class Own(Regress):
    place: str = ""

    def make_model(self, rngs):
        return Model(self.place, rngs)


PLACES = {
    "parameter": r"^the model of task Own, a Model.*: more has other initial values each time it is made",
    "field": r"^the model of task Own, a Model has made=\d+, but \d+ when the same function makes it again",
    "first": r"^first \(test_again\.py, line \d+\) computes with other numbers .*\nFix: use at\.draw\(",
    "layer": r"^layer noisy \(test_again\.py, line \d+\) computes with other numbers each time it is traced",
    "last": r"^last \(test_again\.py, line \d+\) computes with",
    "initial_carry": r"^layer carried \(test_again\.py, line \d+\) computes with",
    "draw": r"^draw \(test_again\.py, line \d+\) computes with",
}


@pytest.mark.parametrize("place", PLACES)
def test_numpys_random_numbers_in_a_model_are_refused_by_name(place):
    with pytest.raises(ValueError, match=PLACES[place]):
        init_state(Own(place=place))


def test_a_model_without_them_is_traced():
    assert init_state(Own()).params
