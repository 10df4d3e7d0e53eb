"""`hoisted_scan` is `lax.scan`, its weight gradients taken out of the loop: for cells of any kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from lib.laws import on_devices

from jaxpar import RULES, LayerContext, nn
from jaxpar.analysis import inspect_function
from jaxpar.base.at import Processor
from jaxpar.internal.in_place_scan import scan_in_place
from jaxpar.internal.split import SplitLayer
from jaxpar.internal.step_program import read_step
from jaxpar.nn import Recurrent, hoisted_scan
from jaxpar.nn.linear_recurrence import _scan
from jaxpar.sharding import shardings

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5
T, B, W = 6, 3, 8  # no weight has a dim of B


def assert_close(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(actual - expected) <= RELATIVE_ERROR * np.linalg.norm(expected)


def of_flax(make):
    def cell(rngs):
        return make(W, W, rngs=rngs)

    return cell


class Own(nnx.Module):
    """A cell of one's own; its carry begins with a parameter."""

    in_features = W

    def __init__(self, rngs, **shapes):
        for name, shape in shapes.items():
            value = jax.random.normal(rngs.params(), shape) / W**0.5
            setattr(self, name, nnx.Param(value))
        self.start = nnx.Param(jax.random.normal(rngs.params(), (W,)))

    def initialize_carry(self, input_shape, rngs):
        return jnp.broadcast_to(self.start[...], input_shape)


class Transposed(Own):
    """Weights as PyTorch has them, an input projection of two layers, factors and a mask of constants."""

    def __init__(self, rngs):
        super().__init__(rngs, up=(W, 16), down=(W, 16), w_h=(W, W), scale=(W,), peep=(W,))

    def __call__(self, h, x):
        x = nnx.gelu(x @ self.up[...]) @ self.down[...].T
        odd = jnp.arange(W) % 2 == 1
        mixed = jnp.where(odd[None], h @ self.w_h[...].T, self.peep[...][None] * h)
        h = jnp.tanh(x + mixed) * jnp.exp(self.scale[...])[None]
        return h, h


class Joined(Own):
    """One product of inputs and state; a norm; a product from the left."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(2 * W, W), left=(5, W), right=(5, W))
        self.norm = nnx.LayerNorm(W, rngs=rngs)

    def __call__(self, h, x):
        h = self.norm(jnp.concatenate([x, h], -1) @ self.w[...])
        rest = jnp.einsum("kw,bw->kb", self.left[...], h)
        return jnp.tanh(h), jnp.tanh(h) + jnp.sin(rest).T @ self.right[...]


class Heads(Own):
    """Blocks of a recurrent matrix."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(2, W // 2, W // 2))

    def __call__(self, h, x):
        split = jnp.einsum("bhi,hij->bhj", h.reshape(-1, 2, W // 2), self.w[...])
        h = jnp.tanh(x + split.reshape(h.shape))
        return h, x


SCALES = np.linspace(0.5, 1.5, B * W, dtype=np.float32).reshape(B, W)
scaled = jax.jit(lambda a: a * SCALES)


class Called(Own):
    """A compiled function that knows an array, called twice."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(W, W))

    def __call__(self, h, x):
        h = jnp.tanh(scaled(x) + scaled(h) @ self.w[...])
        return h, h


class Stays(Own):
    """What is inside of a loop, and a function with a backward pass of its own, stay where they are."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(W, W))
        self.linear = nn.Linear(W, W, dims=(None, None), rngs=rngs)

    def __call__(self, h, x):
        w = self.w[...]
        h = lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w + x), h + x @ w)
        return self.linear(h), h


CELLS = {
    "GRUCell": of_flax(nnx.GRUCell),
    "LSTMCell": of_flax(nnx.LSTMCell),
    "OptimizedLSTMCell": of_flax(nnx.OptimizedLSTMCell),
    "SimpleCell": of_flax(nnx.SimpleCell),
    "transposed": Transposed,
    "joined": Joined,
    "heads": Heads,
    "called": Called,
    "stays": Stays,
}
# Those that go the same ways as others.
ROWS = [
    pytest.param(name, marks=pytest.mark.more) if name in ("LSTMCell", "SimpleCell") else name
    for name in CELLS
]


def layer_of(name):
    with nnx.use_eager_sharding(False), jax.numpy_rank_promotion("allow"):
        return Recurrent(CELLS[name](nnx.Rngs(0)))


def slow(self, carry, x_TBW, at):
    """What `Recurrent` is equal to."""
    initial = self.initial_carry(x_TBW.shape[1])

    def step(carry, inputs):
        x_BW, is_new_B = inputs
        if is_new_B is not None:
            carry = jax.tree.map(lambda a, b: jnp.where(is_new_B[:, None], a, b), initial, carry)
        return self.cell(carry, x_BW)

    return lax.scan(step, carry, (x_TBW, at.resets))


def inputs_of(with_resets):
    rng = np.random.default_rng(0)
    resets = {"resets": jnp.asarray(rng.random((T, B)) < 0.3)} if with_resets else {}
    return jnp.asarray(rng.normal(size=(T, B, W)), jnp.float32), LayerContext(0, 0, 0, batch=resets)


def gradients(call, layer, with_resets=True):
    """A function of parameters and inputs: outputs and gradients."""
    graphdef, params = nnx.split(layer)
    x, at = inputs_of(with_resets)

    def run(params, x):
        def loss(params, x):
            layer = nnx.merge(graphdef, params)
            after, y = call(layer, layer.initial_carry(B), x, at)
            leaves = jax.tree.leaves((after, y))
            weights = [jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in leaves]
            total = sum(jnp.sum(a * w) for a, w in zip(leaves, weights, strict=True))
            return total, leaves

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    return run, (params, x)


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("name", ROWS)
def test_recurrent_equals_a_scan(name):
    layer = layer_of(name)
    with jax.numpy_rank_promotion("allow"):  # Flax adds its bias so
        run, arguments = gradients(Recurrent.__call__, layer)
        expected = jax.jit(gradients(slow, layer)[0])(*arguments)
        jax.tree.map(assert_close, jax.jit(run)(*arguments), expected)


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_weights_are_taken_after_the_loop(name):
    """No array of a weight's shape, which has no dim of rows, is carried by the backward loop."""
    layer = layer_of(name)
    x, at = inputs_of(with_resets=True)
    graphdef, params = nnx.split(layer)

    def run(params, frozen, carry, x, at):
        return nnx.merge(graphdef, params)(carry, x, at)

    with jax.numpy_rank_promotion("allow"):
        split = SplitLayer(run, params, {}, layer.initial_carry(B), x, at, splits=True)
    assert split.has_weights == (name != "stays")
    first_dims = {leaf.shape[0] for leaf in split.saved}
    assert first_dims <= {T, B}, "what is saved is no weight"


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(
    "length", [16, 11]
)  # two turns of 8 steps; no turn of several, or one and three steps
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.SLSTM, "cell"])
def test_turns_of_several_steps_equal_single_steps(make, length):
    """As GPUs have them: outputs, the last state and all gradients, with sequences that begin within."""
    draw = np.random.default_rng(0)
    layer = layer_of("GRUCell") if make == "cell" else make(W, num_heads=2, rngs=nnx.Rngs(0))
    x = jnp.asarray(draw.normal(size=(length, B, W)), jnp.float32)
    resets = {"resets": jnp.asarray(draw.random((length, B)) < 0.3)}
    graphdef, params = nnx.split(layer)

    def run(platform):
        def loss(params, x):
            layer = nnx.merge(graphdef, params)
            after, y = layer(
                layer.initial_carry(B),
                x,
                LayerContext(0, 0, 0, batch=resets, processor=Processor(platform)),
            )
            return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves((after, y))), (after, y)

        program = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(params, x)
        return program.as_text(), program.compile()(params, x)

    with jax.numpy_rank_promotion("allow"):
        (text, found), (single, expected) = run("gpu"), run("cpu")
    assert (text != single) == (length == 16 or make is nn.LSTM)
    jax.tree.map(assert_close, found, expected)


@pytest.mark.parametrize(("reverse", "unroll"), [(False, 1), (True, 1), (True, 6)])
def test_a_loop_writes_over_what_it_has_read(reverse, unroll):
    """Two of four outputs where one input was, one where another was: memory that is not asked for."""
    T = 64

    def step(h, xs):
        h = jnp.tanh(h + xs[0][:, 0] * xs[0][:, 1] - xs[1])
        late = h @ jnp.eye(W) + xs[0][:, 1]  # what was read is read once more, after a product
        return late, [jnp.sin(h), h * xs[1], h[:, :4], xs[1] - h]

    def run(donated, *seeds):
        xs = [jnp.sin(a) for a in seeds]
        scan = functools.partial(scan_in_place, divisible={0, 1}, reverse=reverse, unroll=unroll)
        return scan(step, jnp.zeros((B, W)), xs, donated=donated)

    rng = np.random.default_rng(0)
    seeds = [
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((T, B, 2, W), (T, B, W))
    ]
    programs = [jax.jit(run, static_argnums=0).lower(n, *seeds).compile() for n in ((), (0, 1))]
    (after, ys, parts), expected = programs[1](*seeds), programs[0](*seeds)
    assert parts == {0: 0, 1: 1}
    assert ys[0].shape == (T, B, 2, W)
    found = after, [ys[0][:, :, 0], ys[1][:, :, 1], *ys[2:]]
    jax.tree.map(assert_close, found, expected[:2])
    more, less = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert more - less >= seeds[0].nbytes


def test_products_of_blocks_are_products():
    """From either side, of inputs before the loop and of the state in it."""
    heads = ((2,), (1,)), ((1,), (0,))  # [B, N, D] [N, D, D] -> [N, B, D]

    def step(params, h, x):
        early = lax.dot_general(x.reshape(B, 2, -1), params["x"], heads)
        late = lax.dot_general(params["h"], h.reshape(B, 2, -1), (heads[0][::-1], heads[1][::-1]))
        h = jnp.tanh(early.swapaxes(0, 1) + late.transpose(2, 0, 1)).reshape(h.shape)
        return h, h

    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=(2, W // 2, W // 2)), jnp.float32) for name in "xh"}
    xs, h = jnp.asarray(draw(size=(T, B, W)), jnp.float32), jnp.ones((B, W))
    program, _, _ = read_step(step, params, h, xs[0])
    assert [p.num_blocks for p in program.products.values()] == [1, 1]
    assert [e.primitive.name for e in program.early].count("dot_general") == 1

    def loss(scan):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(scan(*args)[1])), (0, 1, 2)))

    expected = loss(lambda params, h, xs: lax.scan(functools.partial(step, params), h, xs))
    found = loss(functools.partial(hoisted_scan, step))(params, h, xs)
    jax.tree.map(assert_close, found, expected(params, h, xs))


def named_gru(rngs):
    metadata = {"out_sharding": ("input", "hidden"), "eager_sharding": False}
    bias = {"out_sharding": ("hidden",), "eager_sharding": False}
    return nnx.GRUCell(
        W, W, kernel_metadata=metadata, recurrent_kernel_metadata=metadata, bias_metadata=bias,
        rngs=rngs,
    )  # fmt: skip


def products_that_communicate(call):
    """Collectives of matrix products inside the backward time loop: kinds and shapes."""
    mesh = on_devices((1, 1, 2)).build()
    layer = Recurrent(named_gru(nnx.Rngs(0)))
    with jax.numpy_rank_promotion("allow"):
        run, (params, x) = gradients(call, layer, with_resets=False)
        params = jax.device_put(params, shardings(params, mesh, RULES))
        found = inspect_function(jax.jit(run), params, x).collectives
    return [
        (c.op, c.shapes)
        for c in found
        if c.trip_counts and c.phase == "backward" and c.op_name.endswith("dot_general")
    ]


def test_no_weight_gradient_is_communicated_in_the_loop():
    """Autodiff of a scan gathers a factor of every step's product."""
    of_state = [("all-reduce", ((B, W),))]
    assert products_that_communicate(Recurrent.__call__) == of_state
    assert products_that_communicate(slow) != of_state


def test_what_a_step_prints_is_printed(capsys):
    def step(w, h, x):
        jax.debug.print("largest {}", jnp.max(x))
        return h * w + x, h

    xs = jnp.arange(3.0)[:, None]
    jax.jit(jax.grad(lambda w: hoisted_scan(step, w, jnp.ones(1), xs)[0].sum()))(jnp.float32(0.5))
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.split()[1::2]) == ["0.0", "1.0", "2.0"]


def test_a_carry_that_changes_its_kind_is_refused():
    with pytest.raises(ValueError, match=r"a step returns is bfloat16\[3, 8\], .* float32\[3, 8\]"):
        hoisted_scan(
            lambda _, h, x: (h.astype(jnp.bfloat16), x), (), jnp.zeros((B, W)), jnp.ones((T, B, W))
        )
    with pytest.raises(ValueError, match=r"output of a step is int32\[3\]\nFix: make it floating"):
        hoisted_scan(
            lambda _, h, x: (h, jnp.zeros(3, jnp.int32)), (), jnp.zeros((B, W)), jnp.ones((T, B, W))
        )


def test_linear_recurrences_in_parallel_equal_those_step_by_step():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.random((13, B, W)), jnp.float32) for _ in range(2))
    for reverse in (False, True):
        assert_close(_scan(a, b, False, reverse), _scan(a, b, True, reverse))
