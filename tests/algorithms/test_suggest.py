"""Splits that are proposed for a block: exactly these, with one sum for each kernel split by rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api

import jaxpar
from jaxpar import MeshConfig
from jaxpar.analysis import inspect_function
from jaxpar.lm import LM
from jaxpar.model.adopt.suggest import by_pattern, format_rules, proposals

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5
SIZE, ROWS, TIME, WIDTH, HEADS, HEAD = 4, 2, 6, 16, 4, 8
MLP = {"up.kernel": 1, "up.bias": 0, "down.kernel": 0}


class Block(nnx.Module):
    """Parts by name, and a function of the block and its inputs."""

    def __init__(self, call, **parts):
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *inputs):
        return self.call(self, *inputs)


def linear(*sizes, **options):
    return nnx.Linear(*sizes, rngs=nnx.Rngs(0), **options)


def general(ins, outs, **options):
    axis = range(-len(ins), 0) if isinstance(ins, tuple) else -1
    return nnx.LinearGeneral(ins, outs, axis=axis, rngs=nnx.Rngs(0), **options)


def param(*shape):
    return nnx.Param(jnp.zeros(shape))


def mlp(between=nnx.gelu, hidden=32, **parts):
    """Between the products: a function of the hidden units, or of the block, its input and these."""

    def call(own, x, *others):
        h = own.up(x)
        return x + own.down(between(own, x, h, *others) if parts or others else between(h))

    return Block(call, up=linear(WIDTH, hidden), down=linear(hidden, WIDTH), **parts)


def gated():
    parts = {name: linear(WIDTH, 32, use_bias=False) for name in ("gate", "up")}
    down = linear(32, WIDTH, use_bias=False)
    return Block(lambda own, x: x + own.down(nnx.silu(own.gate(x)) * own.up(x)), **parts, down=down)


def gated_by_split():
    def call(own, x):
        gate, up = jnp.split(own.up(x), 2, axis=-1)
        return own.down(nnx.silu(gate) * up)

    return Block(call, up=linear(WIDTH, 64), down=linear(32, WIDTH))


def first_half():
    """The second kernel takes a part of the hidden units."""
    call = lambda own, x: own.down(own.up(x)[..., :16])  # noqa: E731
    return Block(call, up=linear(WIDTH, 32), down=linear(16, WIDTH))


def inner_dim():
    """A kernel whose last dim is divided in two; only the second could be split."""

    def call(own, x):
        return own.down(jnp.einsum("btd,dhe->bthe", x, own.up[...].reshape(WIDTH, 6, 8)))

    return Block(call, up=param(WIDTH, 48), down=general((6, 8), WIDTH))


def gated_by_index():
    def call(own, x):
        both = own.up(x)
        return own.down(nnx.silu(both[..., 0, :]) * both[..., 1, :])

    return Block(call, up=general(WIDTH, (2, 32)), down=linear(32, WIDTH))


def self_attention():
    options = {"normalize_qk": True, "decode": False, "rngs": nnx.Rngs(0)}
    mask = nnx.make_causal_mask(jnp.zeros((ROWS, TIME)))
    call = lambda own, x: x + own.att(own.norm(x), mask=mask)  # noqa: E731
    norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
    return Block(call, norm=norm, att=nnx.MultiHeadAttention(HEADS, WIDTH, **options))


def attend(q, k, v, bias):
    logits = jnp.einsum("bthd,bshd->bhts", q, k)
    weights = jax.nn.softmax(logits + jnp.broadcast_to(bias, logits.shape))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def attention_by_names():
    """Separate kernels [width, heads, head]; the bias of positions is an input."""

    def call(own, x, bias):
        return x + own.out(attend(own.query(x), own.key(x), own.value(x), bias))

    # A bias of keys would have a gradient of zero.
    parts = {
        n: general(WIDTH, (HEADS, HEAD), use_bias=n != "key") for n in ("query", "key", "value")
    }
    return Block(call, **parts, out=general((HEADS, HEAD), WIDTH))


def fused(divide, *shape):
    """One kernel for query, key and value."""

    def call(own, x):
        y = attend(*divide(own.qkv(x)), jnp.zeros((1, 1, TIME, TIME)))
        return x + own.down(nnx.relu(own.up(x + own.out(y.reshape(*x.shape[:2], -1)))))

    mlp = {"up": linear(WIDTH, 32), "down": linear(32, WIDTH)}
    return Block(call, qkv=general(WIDTH, shape), out=linear(HEADS * HEAD, WIDTH), **mlp)


def by_split(y):
    return [a.reshape(*y.shape[:2], HEADS, HEAD) for a in jnp.split(y, 3, axis=-1)]


def rotate(x, positions):
    angles = jnp.einsum("bt,d->btd", positions.astype(x.dtype), 0.1 ** jnp.arange(HEAD // 2.0))
    angles = jnp.broadcast_to(angles[:, :, None], (*x.shape[:3], HEAD // 2))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def llama(heads_of_keys, heads=8):
    """Norms within heads, angles, fewer heads of keys than of queries, a gated MLP."""

    def call(own, x, positions):
        def heads_of(name, number):
            return getattr(own, name)(y).reshape(*y.shape[:2], number, HEAD)

        y = own.norm(x)
        q = rotate(own.q_norm(heads_of("q", heads)), positions)
        k, v = rotate(heads_of("k", heads_of_keys), positions), heads_of("v", heads_of_keys)
        k, v = (jnp.repeat(a, heads // heads_of_keys, axis=2) for a in (k, v))
        mask = positions[:, None, :, None] >= positions[:, None, None, :]
        x += own.o(attend(q, k, v, jnp.where(mask, 0.0, -1e9)).reshape(*x.shape[:2], heads * HEAD))
        y = own.mlp_norm(x)
        return x + own.down(nnx.silu(own.gate(y)) * own.up(y))

    plain = functools.partial(linear, use_bias=False)
    norms = {
        name: nnx.RMSNorm(n, rngs=nnx.Rngs(0))
        for name, n in (("norm", WIDTH), ("q_norm", HEAD), ("mlp_norm", WIDTH))
    }
    keys = {name: plain(WIDTH, heads_of_keys * HEAD) for name in ("k", "v")}
    ends = {"q": plain(WIDTH, heads * HEAD), "o": plain(heads * HEAD, WIDTH)}
    mlp = {"gate": plain(WIDTH, 32), "up": plain(WIDTH, 32), "down": plain(32, WIDTH)}
    return Block(call, **norms, **keys, **ends, **mlp)


def convolutions():
    """Wider, each channel alone, a norm of groups of channels, narrower."""

    def call(own, x):
        return x + own.down(nnx.relu(own.norm(own.each(own.up(x)))))

    conv = functools.partial(nnx.Conv, rngs=nnx.Rngs(0))
    each = conv(32, 32, (3,), feature_group_count=32)
    norm = nnx.GroupNorm(32, 8, rngs=nnx.Rngs(0))
    return Block(call, up=conv(WIDTH, 32, (3,)), each=each, norm=norm, down=conv(32, WIDTH, (1,)))


def recurrence():
    """Gates of the input; each channel alone."""

    def after(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    def call(own, x):
        a, b = nnx.sigmoid(own.gate(x)), own.up(x)
        return own.down(jax.lax.associative_scan(after, (a, (1 - a) * b), axis=1)[1])

    parts = {"gate": linear(WIDTH, 32), "up": linear(WIDTH, 32), "down": linear(32, WIDTH)}
    return Block(call, **parts)


def rnn():
    return Block(lambda own, x: own.rnn(x), rnn=nnx.RNN(cell(), rngs=nnx.Rngs(0)))


def cell():
    return nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))


def chain():
    call = lambda own, x: own.c(nnx.relu(own.b(nnx.relu(own.a(x)))))  # noqa: E731
    return Block(call, a=linear(WIDTH, 32), b=linear(32, 64), c=linear(64, WIDTH))


def mixer():
    """An MLP over time."""
    call = lambda own, x: jnp.swapaxes(own.down(nnx.relu(own.up(jnp.swapaxes(x, 1, 2)))), 1, 2)  # noqa: E731
    return Block(call, up=linear(TIME, 32), down=linear(32, TIME))


def tied():
    return Block(lambda own, x: nnx.relu(x @ own.w[...]) @ own.w[...].T, w=param(WIDTH, 32))


def low_rank():
    """A change of low rank next to a kernel."""

    def call(own, x):
        return own.down(nnx.relu(own.up(x) + x @ own.a[...] @ own.b[...]))

    parts = {"up": linear(WIDTH, 32), "down": linear(32, WIDTH)}
    return Block(call, **parts, a=param(WIDTH, 8), b=param(8, 32))


def by_head():
    """A kernel for each head."""

    def call(own, x):
        return own.down(jnp.einsum("bthd,hde->bthe", own.up(x), own.each[...]))

    up, down = general(WIDTH, (HEADS, HEAD)), general((HEADS, HEAD), WIDTH)
    return Block(call, up=up, each=param(HEADS, HEAD, HEAD), down=down)


def scaled(own, x, h):
    return h * jnp.broadcast_to(own.scale[...], h.shape)


def gate_of_token(own, x, h):
    return h * jnp.broadcast_to(nnx.sigmoid(own.gate(x)), h.shape)


def hard_gate(own, x, h):
    return jnp.where(jnp.broadcast_to(own.gate(x) > 0, h.shape), h, jnp.zeros_like(h))


def in_a_branch(h):
    return jax.lax.cond(True, nnx.relu, nnx.gelu, h)


def with_hidden(own, x):
    return own.inner.down(h := own.inner.up(x)), h


def with_sum(own, x):
    h = own.inner.up(x)
    return own.inner.down(h) + jnp.broadcast_to(h.sum(-1, keepdims=True), x.shape)


@jax.custom_vjp
def doubled(h):
    return 2 * h


doubled.defvjp(lambda h: (2 * h, None), lambda _, d: (2 * d,))


def again(build):
    block = build()
    return Block(nnx.remat(lambda own, x: nnx.jit(lambda m, x: m(x))(own.inner, x)), inner=block)


def two():
    """Two MLPs whose activation is one jitted function."""
    call = lambda own, x: own.b(own.a(x))  # noqa: E731
    return Block(call, a=mlp(nnx.silu), b=mlp(nnx.silu))


def inside(path, rules):
    return {f"{path}.{name}": dim for name, dim in rules.items()}


NORMAL = jax.random.normal(jax.random.key(0), (ROWS, TIME, WIDTH))
POSITIONS = np.broadcast_to(np.arange(TIME), (ROWS, TIME))
BY_HEADS = {
    f"{n}.{p}": d for n in ("query", "key", "value") for p, d in (("kernel", 1), ("bias", 0))
}
BY_HEADS |= {"out.kernel": 0}
WITHOUT_BIAS = {name: dim for name, dim in BY_HEADS.items() if name != "key.bias"}
GATED = {"gate.kernel": 1, "up.kernel": 1, "down.kernel": 0}
HEADS_OF_LLAMA = {"q.kernel": 1, "k.kernel": 1, "v.kernel": 1, "o.kernel": 0}
WHOLE_HEADS = {"qkv.kernel": 1, "qkv.bias": 0, "out.kernel": 0}
DIVIDED = {"each.kernel": 2, "each.bias": 0, "norm.scale": 0, "norm.bias": 0}

# A block, its inputs, and the dim of each parameter that is split.
SPLIT = {
    "mlp": (mlp, (NORMAL,), MLP),
    "mlp of four dims": (mlp, (jnp.zeros((ROWS, HEADS, TIME, WIDTH)),), MLP),
    "dropout between": (
        lambda: mlp(lambda own, x, h: own.drop(h), drop=nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
        (NORMAL,), MLP,
    ),
    "own derivative between": (lambda: mlp(doubled), (NORMAL,), MLP),
    "scale between": (lambda: mlp(scaled, scale=param(32)), (NORMAL,), MLP | {"scale": 0}),
    "one scale between": (lambda: mlp(scaled, scale=param(1)), (NORMAL,), MLP),
    "hard gate of a token": (lambda: mlp(hard_gate, gate=linear(WIDTH, 1)), (NORMAL,), MLP),
    "gated": (gated, (NORMAL,), GATED),
    "gated by index": (gated_by_index, (NORMAL,), {"up.kernel": 2, "up.bias": 1, "down.kernel": 0}),
    "remat and jit": (lambda: again(mlp), (NORMAL,), inside("inner", MLP)),
    "two": (two, (NORMAL,), inside("a", MLP) | inside("b", MLP)),
    "chain": (chain, (NORMAL,), {"b.kernel": 1, "b.bias": 0, "c.kernel": 0}),
    "over time": (mixer, (NORMAL,), MLP),
    "tied": (tied, (NORMAL,), {"w": 1}),
    "low rank": (low_rank, (NORMAL,), MLP | {"b": 1}),
    "attention": (self_attention, (NORMAL,), inside("att", BY_HEADS)),
    "mask as input": (attention_by_names, (NORMAL, jnp.zeros((1, 1, TIME, TIME))), WITHOUT_BIAS),
    "fused, whole heads": (
        lambda: fused(lambda y: jnp.split(y, 3, axis=-1), HEADS, 3 * HEAD),
        (NORMAL,), WHOLE_HEADS | MLP,
    ),
    "fused, by split": (lambda: fused(by_split, 3 * HEADS * HEAD), (NORMAL,), MLP),
    "llama": (lambda: llama(4), (NORMAL, POSITIONS), HEADS_OF_LLAMA | GATED),
    "llama, few keys": (lambda: llama(2), (NORMAL, POSITIONS), GATED),
    "convolutions": (convolutions, (NORMAL,), {**MLP, "up.kernel": 2, "down.kernel": 1} | DIVIDED),
    "recurrence": (recurrence, (NORMAL,), MLP | {"gate.kernel": 1, "gate.bias": 0}),
    "by head": (by_head, (NORMAL,), MLP | {"each": 0}),
}  # fmt: skip

# Blocks without a split, and their inputs.
WHOLE = {
    "not divisible": (lambda: mlp(hidden=30), (NORMAL,)),
    "softmax between": (lambda: mlp(nnx.softmax), (NORMAL,)),
    "norm between": (lambda: mlp(nnx.LayerNorm(32, rngs=nnx.Rngs(0))), (NORMAL,)),
    "sum of hidden units": (lambda: Block(with_sum, inner=mlp()), (NORMAL,)),
    "part of hidden units": (first_half, (NORMAL,)),
    "inner dim of a kernel": (inner_dim, (NORMAL,)),
    "order between": (lambda: mlp(lambda h: jnp.cumsum(h, -1)), (NORMAL,)),
    "shift between": (lambda: mlp(lambda h: jnp.roll(h, 1, -1)), (NORMAL,)),
    "shift by padding": (
        lambda: mlp(lambda h: jax.lax.pad(h, 0.0, [(0,) * 3] * 2 + [(1, -1, 0)])),
        (NORMAL,),
    ),
    "branch between": (lambda: mlp(in_a_branch), (NORMAL,)),
    "gate of a token": (lambda: mlp(gate_of_token, gate=linear(WIDTH, 1)), (NORMAL,)),
    "hidden input": (lambda: mlp(lambda own, x, h, y: h * y), (NORMAL, jnp.ones((ROWS, TIME, 32)))),
    "hidden output": (lambda: Block(with_hidden, inner=mlp()), (NORMAL,)),
    "gated by split": (gated_by_split, (NORMAL,)),
    "bias as input": (attention_by_names, (NORMAL, jnp.zeros((1, HEADS, TIME, TIME)))),
    "one key": (lambda: Block(one_key, **parts_of_one_key()), (NORMAL,)),
    "lstm cell": (cell, ((NORMAL[:, 0], NORMAL[:, 1]), NORMAL[:, 2])),
    "rnn": (rnn, (NORMAL,)),
}


def one_key(own, x):
    """Each query meets the same keys."""
    q = own.query(x)
    logits = jnp.einsum("bthd,bsd->bhts", q, own.key(x))
    return own.out(jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(logits), own.value(x)))


def parts_of_one_key():
    keys = {name: linear(WIDTH, HEAD) for name in ("key", "value")}
    return {"query": general(WIDTH, (HEADS, HEAD)), **keys, "out": general((HEADS, HEAD), WIDTH)}


def traced(build, inputs, **options):
    """A function of parameters by name and other arguments, these, and what is proposed."""
    graph, state, others = nnx.split(build(), nnx.Param, ...)
    leaves, tree = jax.tree.flatten(state)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    keys = jax.random.split(jax.random.key(1), len(leaves))
    values = [jax.random.normal(k, a.shape) * 0.3 for k, a in zip(keys, leaves, strict=True)]

    def run(params, inputs, others):
        own = jax.tree.unflatten(tree, [params[name] for name in names])
        return nnx.merge(graph, own, jax.tree.map(jnp.copy, others))(*inputs)

    args = dict(zip(names, values, strict=True)), inputs, others
    jaxpr = jax.make_jaxpr(run)(*args).jaxpr
    params = dict(zip(jaxpr.invars, sorted(names), strict=False))  # as a dict is traced
    return run, args, proposals(jaxpr, params, SIZE, **options)


def table_of_positions():
    """A bias of positions with one value for each head, looked up in a table of the block."""

    def call(own, x):
        steps = jnp.arange(x.shape[1])
        bias = own.table[...][jnp.abs(jnp.subtract.outer(steps, steps))].transpose(2, 0, 1)
        return x + own.out(attend(own.query(x), own.key(x), own.value(x), bias))

    parts = {name: general(WIDTH, (HEADS, HEAD), use_bias=False) for name in ("query", "key")}
    value, out = general(WIDTH, (HEADS, HEAD)), general((HEADS, HEAD), WIDTH)
    return Block(call, table=param(TIME, HEADS), value=value, out=out, **parts)


SPLIT["table of positions"] = (
    table_of_positions,
    (NORMAL,),
    {"query.kernel": 1, "key.kernel": 1, "value.kernel": 1, "value.bias": 0, "table": 1, "out.kernel": 0},
)  # fmt: skip

WORDS = 24
TARGETS = jax.random.randint(jax.random.key(2), (ROWS, TIME), 0, WORDS)


def head(loss, size=WORDS, **parts):
    """What follows the blocks: a norm, logits, and a loss of them."""
    norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
    call = lambda own, x, y: jnp.mean(loss(own.head(own.norm(x)), y))  # noqa: E731
    return Block(call, norm=norm, head=linear(WIDTH, size), **parts)


def by_one_hot(logits, y):
    return -jnp.sum(nnx.log_softmax(logits) * jax.nn.one_hot(y, WORDS), -1)


def by_index(logits, y):
    rows, steps = jnp.indices(y.shape)
    return -nnx.log_softmax(logits)[rows, steps, y]


def tied():
    """The table of the embedding gives the logits."""

    def call(own, x, y):
        return jnp.mean(cross_entropy(jnp.einsum("btd,vd->btv", x, own.table[...]), y))

    return Block(call, table=param(WORDS, WIDTH))


cross_entropy = optax.softmax_cross_entropy_with_integer_labels
HEAD_SPLIT = {"head.kernel": 1, "head.bias": 0}
HEADS_SPLIT = {
    "optax": (lambda: head(cross_entropy), HEAD_SPLIT),
    "one hot": (lambda: head(by_one_hot), HEAD_SPLIT),
    "index": (lambda: head(by_index), HEAD_SPLIT),
    "soft cap": (lambda: head(lambda z, y: cross_entropy(9 * jnp.tanh(z / 9), y)), HEAD_SPLIT),
    "smoothed": (lambda: head(lambda z, y: cross_entropy(z, y) - nnx.log_softmax(z).mean(-1)), HEAD_SPLIT),
    "as wide as its input": (lambda: head(lambda z, y: z.sum(-1), WIDTH), HEAD_SPLIT),
    "tied": (tied, {"table": 0}),
}  # fmt: skip
HEADS_WHOLE = {
    "narrow": lambda: head(lambda z, y: z.sum(-1), WIDTH - SIZE),
    "not divisible": lambda: head(lambda z, y: z.sum(-1), WORDS + 2),
    "half of the words": lambda: head(lambda z, y: cross_entropy(z[..., : WORDS // 2], y)),
    "sorted words": lambda: head(lambda z, y: jnp.sort(z, -1)[..., -1]),
    "norm of logits": lambda: head(lambda z, y: jnp.cumsum(z, -1)[..., -1]),
    "logits as output": lambda: Block(lambda own, x, y: own.head(x), head=linear(WIDTH, WORDS)),
}


@pytest.mark.parametrize("name", HEADS_SPLIT)
def test_a_wide_head_is_split_by_columns(name):
    build, expected = HEADS_SPLIT[name]
    run, (params, *others), splits = traced(build, (NORMAL, TARGETS), of_loss=True)
    assert {n: split.dims.index("tensor") for n, split in splits.items()} == expected
    placed, specs, whole, mesh = place(params, others, splits)

    def step(params, inputs, others):
        x, y = inputs
        return jax.value_and_grad(lambda p, x: run(p, (x, y), others), (0, 1))(params, x)

    split_step = jax.jit(step, out_shardings=(whole, (specs, whole)))
    sent = inspect_function(split_step, *placed, mesh=mesh).collectives
    assert {each.op for each in sent} == {"all-reduce"}
    # Of rows and steps there is one number in each array, but in the gradient of the input.
    assert sum(each.bytes for each in sent) <= (WIDTH + 6) * NORMAL[..., 0].nbytes
    assert_equal(split_step(*placed), jax.jit(step)(params, *others))


@pytest.mark.parametrize("name", HEADS_WHOLE)
def test_a_head_stays_whole_where_more_would_be_sent(name):
    assert traced(HEADS_WHOLE[name], (NORMAL, TARGETS), of_loss=True)[2] == {}


@pytest.mark.parametrize("name", SPLIT)
def test_pairs_are_proposed(name):
    build, inputs, expected = SPLIT[name]
    _, (params, *_), splits = traced(build, inputs)
    assert {n: split.dims.index("tensor") for n, split in splits.items()} == expected
    for n, split in splits.items():
        assert (len(split.dims), split.dims.count("tensor")) == (params[n].ndim, 1)


def place(params, others, splits):
    """Arguments on a mesh; shardings of the parameters and of what is whole, and the mesh."""
    mesh = MeshConfig(tensor=SIZE, devices=tuple(range(SIZE))).build()
    specs = {n: NamedSharding(mesh, P(*splits[n].dims) if n in splits else P()) for n in params}
    whole = NamedSharding(mesh, P())
    return (jax.device_put(params, specs), *jax.device_put(others, whole)), specs, whole, mesh


def assert_equal(found, expected):
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        error, scale = np.abs(own - other).max(), np.abs(other).max()
        assert error <= RELATIVE_ERROR * scale


def test_a_kernel_for_each_head_is_split_along():
    _, _, splits = traced(*SPLIT["by head"][:2])
    roles = {"up.kernel": "columns", "up.bias": "along", "each": "along", "down.kernel": "rows"}
    assert {name: split.role for name, split in splits.items()} == roles


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_is_proposed_where_more_would_be_sent(name):
    assert traced(*WHOLE[name])[2] == {}


@pytest.mark.rows(8)
@pytest.mark.parametrize("name", SPLIT)
def test_rows_are_summed_once_and_nothing_else_is_sent(name):
    build, inputs, _ = SPLIT[name]
    run, (params, *others), splits = traced(build, inputs)
    placed, specs, whole, mesh = place(params, others, splits)
    forward = inspect_function(jax.jit(run, out_shardings=whole), *placed, mesh=mesh)
    assert {each.op for each in forward.collectives} == {"all-reduce"}
    num_rows = [split.role for split in splits.values()].count("rows")
    assert sum(each.count for each in forward.collectives) <= num_rows

    def loss(params, x, inputs, others):
        return jnp.mean(jnp.square(run(params, (x, *inputs), others)))

    def step(params, inputs, others):
        x, *inputs = inputs
        return jax.value_and_grad(loss, (0, 1))(params, x, inputs, others)

    split_step = jax.jit(step, out_shardings=(whole, (specs, whole)))
    both = inspect_function(split_step, *placed, mesh=mesh)
    assert {each.op for each in both.collectives} == {"all-reduce"}
    assert_equal(split_step(*placed), jax.jit(step)(params, *others))


def in_blocks(splits, number):
    """The proposals for block `number`."""
    return {
        f"blocks.{number}.{name}": split._replace(pair=[f"blocks.{number}.{n}" for n in split.pair])
        for name, split in splits.items()
    }


TABLE = """\
rules={
    "blocks.*.a.down.kernel": ("tensor", None),  # rows; columns of blocks.*.a.up
    "blocks.*.a.up.bias":     ("tensor",),       # along; rows of blocks.*.a.down
    "blocks.*.a.up.kernel":   (None, "tensor"),  # columns; rows of blocks.*.a.down
}"""


def test_the_table_can_be_pasted():
    _, (params, *_), splits = traced(lambda: Block(lambda own, x: own.a(x), a=mlp()), (NORMAL,))
    names = [f"blocks.{n}.{name}" for n in (0, 1) for name in params]
    both = in_blocks(splits, 0) | in_blocks(splits, 1)
    assert format_rules(by_pattern(both, names)) == TABLE
    rules = eval(f"dict({TABLE})")["rules"]
    assert rules == {name.replace(".0.", ".*."): both[name].dims for name in both if ".0." in name}


def test_a_pattern_of_the_table_holds_for_all_blocks():
    _, (params, *_), splits = traced(*SPLIT["mlp"][:2])
    names = [f"blocks.{n}.{name}" for n in (0, 1) for name in params]
    lines = format_rules(by_pattern(in_blocks(splits, 1), [*names, "blocks.0.more"])).splitlines()[
        1:-1
    ]
    assert [line.split('"')[1] for line in lines] == [*in_blocks(splits, 1)]


class MLP(nnx.Module):
    """A perceptron with a residual connection."""

    def __init__(self, rngs):
        self.up, self.down = (
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    """Perceptrons in a list, or in one module with stacked parameters."""

    def __init__(self, rngs, *, is_stacked):
        def make(rngs):
            return MLP(rngs)

        self.is_stacked, self.out = is_stacked, nnx.Linear(WIDTH, 2, rngs=rngs)
        if is_stacked:
            self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(make))(rngs)
        else:
            self.blocks = nnx.List([make(rngs) for _ in range(3)])

    def __call__(self, x):
        if not self.is_stacked:
            for block in self.blocks:
                x = block(x)
            return self.out(x)
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.out(run(x, self.blocks))


@pytest.mark.parametrize("is_stacked", [False, True])
def test_rules_of_a_task_are_taken_by_adopt(is_stacked):
    x = np.ones((40, WIDTH), np.float32)

    def task(**rules):
        return jaxpar.adopt(
            lambda rngs: Model(rngs, is_stacked=is_stacked),
            lambda model, batch: jaxpar.mean(model(batch["x"]) ** 2, batch["weight"]),
            "blocks",
            batches={"x": x},
            batch_size=4,
            **rules,
        )

    rules = jaxpar.suggest_rules(task(), "tp2")
    first = "blocks." if is_stacked else "blocks.*."
    stack = (None,) if is_stacked else ()
    assert rules == {
        f"{first}up.kernel": (*stack, None, "tensor"),
        f"{first}up.bias": (*stack, "tensor"),
        f"{first}down.kernel": (*stack, "tensor", None),
    }
    assert f'"{first}up.kernel":' in str(rules)
    assert "# columns; rows of" in str(rules)
    state = jaxpar.init_state(task(rules=rules), "tp2")
    api.audit(state)
    shards = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state.params)}
    assert (3, WIDTH, 2 * WIDTH) in shards  # half of the columns
    assert (3, 2 * WIDTH, WIDTH) in shards


def test_suggest_rules_says_what_it_needs():
    with pytest.raises(ValueError, match="has no loss"):
        jaxpar.suggest_rules(LM(), "tp2")
