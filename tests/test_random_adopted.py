"""Flax models, optimizers and layouts drawn at random: every mesh and schedule trains as the plain model.

A draw has a number, which its row is asked for by; it prints what it drew.
"""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from lib.adopted import Adopted, WithOptimizer, assert_as_plain, assert_trains_as_plain
from lib.flax_models import VOCAB, WIDTH, OneHead
from lib.laws import full, more
from lib.layers import clipped_in_backward, times_in_backward
from lib.optimizers import OPTIMIZERS, refusals

from jaxpar import Parallel, PipelineConfig

pytestmark = pytest.mark.law


@dataclasses.dataclass(frozen=True)
class How:
    """How a model is written.

    Attributes:
      kinds: of its blocks.
      given: what blocks are given besides x.
      returns: "x", "first" of a tuple, or a "pair" that goes into the next block.
      holds: the blocks, in a "list", "dict", "sequential", or "numbered" attributes.
      calls: how blocks are called: "remat", "jit", "remat inside", or plainly, "".
      is_outside: whether the residual connection is outside of the blocks.
      backward: what blocks do to the gradient of their output: nothing, "", a factor "by depth", or "clipped"
        by the norm of the whole of it.
    """

    kinds: tuple[str, ...]
    given: tuple[str, ...]
    returns: str
    holds: str
    calls: str
    is_outside: bool
    is_tied: bool
    backward: str


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Complex(nnx.Module):
    """Mixes units by a complex matrix."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(dtype=jnp.complex64)
        self.kernel = nnx.Param(init(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        y = x.astype(jnp.complex64) @ self.kernel[...]
        return jnp.tanh(y.real) + y.imag


BODIES = {
    "mlp": MLP,
    "complex": Complex,
    "attention": lambda rngs: OneHead(WIDTH, rngs),
    "conv": lambda rngs: nnx.Conv(WIDTH, WIDTH, (3,), padding="CAUSAL", rngs=rngs),
    "dense": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "lstm": lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)),
    "gru": lambda rngs: nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)),
}
USES = {
    "mask": lambda x, own: x * own,
    "positions": lambda x, own: x + own,
    "table": lambda x, own: x + own,
    "condition": lambda x, own: x * (1 + own),
}


class Block(nnx.Module):
    def __init__(self, how, number, rngs):
        self.how, self.norm = how, nnx.RMSNorm(WIDTH, rngs=rngs)
        self.body = BODIES[how.kinds[number]](rngs)
        self.backward = {
            "": lambda y: y,
            "by depth": times_in_backward(1 / (1 + number)),
            "clipped": clipped_in_backward,
        }[how.backward]

    def __call__(self, x, *given, deterministic=True):
        x, *total = x if self.how.returns == "pair" else [x]
        y = self.norm(x)
        for name, own in zip(self.how.given, given, strict=True):
            y = USES[name](y, own)
        y = self.backward(self.body(y))
        y = y if self.how.is_outside else x + y
        mean = y.mean(-1, keepdims=True)
        return {"x": y, "first": (y, mean), "pair": (y, *(own + mean for own in total))}[
            self.how.returns
        ]


class RematBlock(Block):
    @nnx.remat
    def __call__(self, x, *given):
        return super().__call__(x, *given)


class Model(nnx.Module):
    def __init__(self, how, rngs):
        self.how = how
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.condition = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.table = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (1, WIDTH)))
        kind_of_block = RematBlock if how.calls == "remat inside" else Block
        blocks = [kind_of_block(how, number, rngs) for number in range(len(how.kinds))]
        if how.holds == "list":
            self.blocks = nnx.List(blocks)
        elif how.holds == "dict":
            self.parts = nnx.Dict(blocks=nnx.Dict({f"b{n}": own for n, own in enumerate(blocks)}))
        elif how.holds == "sequential":
            self.net = nnx.Sequential(*blocks, nnx.LayerNorm(WIDTH, rngs=rngs))
        for number, block in enumerate(blocks if how.holds == "numbered" else ()):
            setattr(self, f"block_{number}", block)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def blocks_in_order(self):
        how = self.how
        if how.holds == "list":
            return self.blocks
        if how.holds == "dict":
            return self.parts["blocks"].values()
        return [getattr(self, f"block_{number}") for number in range(len(how.kinds))]

    def arguments(self, x, tokens):
        made = {
            "mask": lambda: (tokens > 0)[..., None].astype(x.dtype),
            "positions": lambda: jnp.cos(jnp.arange(tokens.shape[1]))[:, None],
            "table": lambda: self.table[...],
            "condition": lambda: self.condition(x.mean(1, keepdims=True)),
        }
        return [made[name]() for name in self.how.given]

    def __call__(self, tokens):
        how, x = self.how, self.embed(tokens)
        if how.holds == "sequential":
            return self.head(self.net(x))
        given = self.arguments(x, tokens)
        options = {} if how.calls else {"deterministic": True}

        def plain(block, x, *given):
            return block(x, *given, **options)

        run = {"remat": nnx.remat, "jit": nnx.jit}.get(how.calls, lambda f: f)(plain)
        pair = x, x.mean(-1, keepdims=True)
        for block in self.blocks_in_order():
            y = run(block, pair if how.returns == "pair" else x, *given)
            pair = y if how.returns == "pair" else pair
            y = y if how.returns == "x" else y[0]
            x = x + 0.5 * y if how.is_outside else y
        x = self.norm(x + pair[1] if how.returns == "pair" else x)
        return self.embed.attend(x) if how.is_tied else self.head(x)


WHERE = {
    "list": "blocks",
    "dict": "parts.blocks",
    "sequential": "net[0:{}]",
    "numbered": "block_*",
}


def draw(pick):
    """A task and a layout.

    Args:
      pick: returns one of its arguments.
    """
    is_recurrent = pick(True, False, False)
    some = ["lstm", "gru"] if is_recurrent else [pick(*BODIES) for _ in range(2)]
    depth = pick(2, 2, 3, 4)
    kinds = [pick(*some)] * depth if pick(True, False) else [pick(*some) for _ in range(depth)]
    holds = pick(*WHERE)
    may_be_given = ["mask", "table"] if is_recurrent else [*USES]
    given = tuple(name for name in may_be_given if holds != "sequential" and pick(True, False))
    returns = pick("x", "first", "pair") if holds != "sequential" else "x"
    how = How(
        tuple(kinds),
        given,
        returns,
        holds,
        pick("", "", "remat", "jit", "remat inside") if holds != "sequential" else "",
        is_outside=returns != "pair" and holds != "sequential" and pick(True, False),
        is_tied=pick(True, False),
        backward=pick("", "", "by depth", "clipped"),
    )
    stages = pick(*(n for n in (1, 2, 2, 4) if n <= depth))
    tensor = 2 if "mlp" in kinds and pick(True, False) else 1
    data = pick(1, 2, 8 // stages // tensor)
    schedule = "interleaved" if stages == 2 and depth == 4 and pick(True, False) else "1f1b"
    pipeline = PipelineConfig(
        schedule=schedule,
        num_groups=2 if schedule == "interleaved" else 1,
        num_microbatches=pick(1, 2),
        num_chunks=pick(1, 2, 4) if is_recurrent and "table" not in given else 1,
        zero_bubble=stages > 1 and pick(True, False),
        remat=pick(True, False, False),
    )
    optimizer = pick(None, pick(*OPTIMIZERS))
    make_task = Adopted
    if optimizer:
        make_task = functools.partial(WithOptimizer, own=OPTIMIZERS[optimizer])
    task = make_task(
        functools.partial(Model, how),
        WHERE[holds].format(depth),
        by_path=(("*.body.up.kernel", (None, "tensor")),) if tensor > 1 else (),
        unused=pick((), (), (), ("embed",), ("body",)),
    )
    update = pick("replicated", "sharded", "host") if optimizer else "replicated"
    fsdp = data > 1 and pick(True, False, False)
    parallel = Parallel(f"dp{data}pp{stages}tp{tensor}", pipeline, fsdp=fsdp, update=update)
    return task, parallel, optimizer


DRAWS = [*range(10), *map(full, range(10, 40)), *map(more, range(40, 200))]


@pytest.mark.parametrize("number", DRAWS)
def test_random_flax_models_on_random_layouts_are_the_plain_models(number, monkeypatch):
    numbers = random.Random(number)
    task, parallel, optimizer = draw(lambda *options: numbers.choice(options))
    how = task.make.args[0]
    print(f"drawn: {how}, frozen {task.unused}, {optimizer}, {parallel}")
    if number % 5:  # a fifth of what a row takes
        monkeypatch.setattr("jaxpar.step.step.check_rows_alone", lambda parts: None)
    run = assert_trains_as_plain if optimizer else assert_as_plain
    pipeline = parallel.pipeline
    splits_a_batch = max(parallel.mesh.data, pipeline.num_microbatches, pipeline.num_chunks) > 1
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        is_clipped = how.backward == "clipped"
        allowed = refusals(parallel, optimizer, is_clipped=is_clipped)
        if is_clipped and splits_a_batch:
            words = "|".join(["the backward pass of clipped_in_backward", *allowed])
            with pytest.raises(ValueError, match=words):
                run(task, parallel)
            return
        try:
            run(task, parallel)
        except ValueError as error:
            if not any(text in str(error) for text in allowed):
                raise
            print(f"refused: {error}")
