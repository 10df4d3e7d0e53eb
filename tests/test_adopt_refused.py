"""Flax models that can't be adopted: each gets one message before the run, with the line and what helps."""

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import pallas_call
from lib import api
from lib import flax_models as models
from lib.adopted import Adopted, batch_of
from lib.flax_models import DEPTH, TIME, WIDTH, MLPBlock, Text

from jaxpar import ArrayBatches, Parallel, init_state, value_and_grad


@pytest.fixture(autouse=True)
def models_of_users_convert_and_broadcast():
    """As JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Normed(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.bn = nnx.BatchNorm(WIDTH, rngs=rngs)

    def run(self, x, tokens):
        return super().run(self.bn(x), tokens)


class Decoding(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.att = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
        self.att.init_cache((2, TIME, WIDTH))


class Twice(Text):
    def run(self, x, tokens):
        for block in (*self.blocks, *self.blocks):
            x = block(x)  # called twice
        return x


class Looped(Text):
    def run(self, x, tokens):
        def body(_, x):
            return Text.run(self, x, tokens)

        return jax.lax.fori_loop(0, 2, body, x)  # in a loop


class Scanned(Text):
    def run(self, x, tokens):
        def body(x, _):
            return Text.run(self, x, tokens), None

        return jax.lax.scan(body, x, None, 2)[0]  # in a scan


class NNXScanned(Text):
    def run(self, x, tokens):
        @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
        def body(model, x, _):
            return Text.run(model, x, tokens)

        return body(self, x, jnp.arange(2))  # in an nnx.scan


class Branched(Text):
    def run(self, x, tokens):
        for block in self.blocks:
            x = jax.lax.cond(tokens[0, 0] > 0, lambda x, b=block: b(x), lambda x: x, x)  # a branch
        return x


class NNXBranched(Text):
    def run(self, x, tokens):
        def run(block, x):
            return block(x)

        for block in self.blocks:
            x = nnx.cond(tokens[0, 0] > 0, run, lambda block, x: x, block, x)  # an nnx.cond
        return x


class Derived(Text):
    def run(self, x, tokens):
        def total(x):
            for block in self.blocks:
                x = block(x)  # a derivative
            return jnp.sum(x)

        return jax.grad(total)(x)


class SharedBetween(Text):
    def make_blocks(self, rngs):
        blocks = super().make_blocks(rngs)
        blocks[2].up.kernel = blocks[1].up.kernel
        return blocks


class SharedOutside(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm.scale = self.blocks[3].norm.scale


class SameBlock(Text):
    def make_blocks(self, rngs):
        return nnx.List([MLPBlock(WIDTH, rngs)] * DEPTH)


class ReadOutside(Text):
    def run(self, x, tokens):
        x = super().run(x, tokens)
        return x + self.blocks[0].up.bias[...]  # read outside


class CountingBlock(MLPBlock):
    def __call__(self, x, number):
        y = super().__call__(x)
        return y, number + jnp.int32(y.shape[0]) * (y[0, 0, 0] > 0)  # an integer


class Counting(Text):
    block = CountingBlock

    def run(self, x, tokens):
        number = jnp.int32(0)
        for block in self.blocks:
            x, number = block(x, number)
        return x * number


class RoutedBlock(MLPBlock):
    def __call__(self, x, best):
        return super().__call__(x) + jax.nn.one_hot(best, WIDTH)


class Routed(Text):
    block = RoutedBlock

    def run(self, x, tokens):
        best = x.argmax(-1)  # integers of parameters
        for block in self.blocks:
            x = block(x, best)
        return x


class RandomBlock(MLPBlock):
    def __call__(self, x, rngs):
        return x + super().__call__(x) * jax.random.bernoulli(rngs.dropout(), 0.5)


class GivenRngs(Text):
    block = RandomBlock

    def __init__(self, rngs):
        super().__init__(rngs)
        self.rngs = rngs.fork()

    def run(self, x, tokens):
        for block in self.blocks:
            x = block(x, self.rngs)  # given rngs
        return x


class Uncalled(Text):
    def run(self, x, tokens):
        for block in self.blocks[:3]:
            x = block(x)
        return x


class Reversed(Text):
    def run(self, x, tokens):
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Unused(Text):
    def run(self, x, tokens):
        y = super().run(x, tokens)
        return x + 0 * y.shape[0]


class HalfUsed(Text):
    def run(self, x, tokens):
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = y if number != 1 else x
        return x


class Remembered(nnx.Variable):
    pass


class RememberingBlock(MLPBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.seen = Remembered(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] += x.mean()  # changed in a block
        return super().__call__(x)


class Remembering(Text):
    block = RememberingBlock


class Counted(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = Remembered(jnp.zeros(()))

    def run(self, x, tokens):
        self.calls[...] += 1  # changed in the model
        return super().run(x, tokens)


class OtherWeights(Text):
    def make_blocks(self, rngs):
        blocks = super().make_blocks(rngs)
        kernel = blocks[1].up.kernel
        kernel.set_value(kernel[...] * np.float32(np.random.default_rng().uniform()))
        return blocks


class OtherNoise(Text):
    def run(self, x, tokens):
        return super().run(x, tokens) * np.float32(np.random.default_rng().uniform())


class DrawnConstant(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.basis = nnx.Variable(jax.random.normal(rngs.params(), (WIDTH,)))

    def run(self, x, tokens):
        return super().run(x * self.basis[...], tokens)


class DrawnArray(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.basis = jax.random.normal(rngs.params(), (WIDTH,))

    def run(self, x, tokens):
        return super().run(x * self.basis, tokens)


class NoisyBlock(MLPBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.rngs = rngs.fork()

    def __call__(self, x):
        return super().__call__(x) + jax.random.normal(self.rngs.noise(), x.shape)


class Noisy(Text):
    block = NoisyBlock


class NoList(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(models.VOCAB, WIDTH, rngs=rngs)
        self.block = MLPBlock(WIDTH, rngs)
        self.head = nnx.Linear(WIDTH, models.VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.block(self.embed(tokens)))


class TwoLists(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.others = super().make_blocks(rngs)

    def run(self, x, tokens):
        for block in (*self.blocks, *self.others):
            x = block(x)
        return x


class CalledBack(TwoLists):
    """The second list is called from its end."""

    def run(self, x, tokens):
        for block in (*self.blocks, *reversed(self.others)):
            x = block(x)
        return x


class Lengths(models.RNNs):
    """A block is told how many steps each row has."""

    def __call__(self, tokens):
        x, lengths = self.embed(tokens), (tokens > 0).sum(1)
        for rnn in self.rnns:
            x = rnn(x, seq_lengths=lengths)
        return self.head(x)


class StackedLoop(models.Stacked):
    def run(self, x, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)
        def run(block, x, factor):
            return block(x, factor)

        return run(self.blocks, x, jnp.ones(DEPTH) * x.sum())  # other arrays


class StackedOutputs(models.Stacked):
    def run(self, x, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
        def run(block, x):
            y = block(x, 1.0)
            return y, y

        return run(self.blocks, x)[1].sum(0)  # outputs of each


class StackedUnused(models.Stacked):
    def run(self, x, tokens):
        return x


class SownBlock(MLPBlock):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "activations", y)
        return y


class Sown(Text):
    block = SownBlock


def mean_over_mask(model, batch):
    losses = models.cross_entropy(model(batch["x"]), batch["y"])
    mask = batch["y"] > 0
    return jnp.sum(losses * mask) / jnp.sum(mask), jnp.float32(1)


def mean_and_number(model, batch):
    losses = models.cross_entropy(model(batch["x"]), batch["y"])
    mask = batch["y"] > 0
    return jnp.sum(losses * mask) / jnp.sum(mask), jnp.sum(mask)


def mean(model, batch):
    return models.cross_entropy(model(batch["x"]), batch["y"]).mean()


def with_metrics(model, batch):
    return mean(model, batch), {"accuracy": jnp.float32(1)}


def each(model, batch):
    return models.cross_entropy(model(batch["x"]), batch["y"]), jnp.float32(1)


class WithoutWeight(ArrayBatches):
    def batch(self, *args):
        return {name: own for name, own in super().batch(*args).items() if name != "weight"}


class Unweighted(Adopted):
    def make_batches(self, split, seed=None):
        return WithoutWeight(models.text_batch(np.random.default_rng(0)), models.ROWS)


def of_tokens(model, batch):
    return models.text_loss(model, batch | {"weight": jnp.ones(len(batch["x"]))})


def by_norm_of_batch(model, batch):
    """Sums, but of a model whose rows depend on each other."""
    y = model(batch["x"])
    return models.text_loss(lambda _: y - y.mean(0), batch)


ONCE = "call each block once, one after the other, in plain Python"
# The task, what the message says, and what helps.
REFUSED = {
    "batch norm": (Adopted(Normed), "the model has bn.mean, a BatchStat", "use nnx.LayerNorm"),
    "cache": (Adopted(Decoding), "the model has att.cache_index, a Cache", "decode=False"),
    "twice": (Adopted(Twice), "block 0 is called 2 times ({called twice})", ONCE),
    "loop": (Adopted(Looped), "a block is called within scan ({in a loop})", ONCE),
    "scan": (Adopted(Scanned), "a block is called within scan ({in a scan})", ONCE),
    "nnx.scan": (Adopted(NNXScanned), "a block is called within scan ({in an nnx.scan})", ONCE),
    "branch": (Adopted(Branched), "a block is called within cond ({a branch})", ONCE),
    "nnx.cond": (Adopted(NNXBranched), "a block is called within cond ({an nnx.cond})", ONCE),
    "grad": (
        Adopted(Derived),
        "the loss takes a derivative of the model ({a derivative})",
        "leave jax.grad",
    ),
    "shared": (Adopted(SharedBetween), "blocks 1 and 2 share up.kernel", "its own"),
    "shared outside": (
        Adopted(SharedOutside),
        "norm.scale of block 3 is also used outside the block",
        "its own",
    ),
    "one block": (Adopted(SameBlock), "blocks 0 and 1 share", "its own"),
    "read outside": (
        Adopted(ReadOutside),
        "blocks.0.up.bias is read outside of its block ({read outside})",
        "in a method of the block",
    ),
    "integers of a block": (
        Adopted(Counting),
        "goes to block 1",
        "compute it in the block that needs it",
    ),
    "integers of parameters": (
        Adopted(Routed),
        "goes to block 0 ({integers of parameters})",
        "compute it in the block that needs it",
    ),
    "given rngs": (
        Adopted(GivenRngs),
        "block 0 receives an Rngs ({given rngs})",
        "nnx.Dropout(rate, rngs=rngs)",
    ),
    "not called": (Adopted(Uncalled), "block 3 of 4 is never called", ONCE),
    "order": (Adopted(Reversed), "blocks are called in the order [3, 2, 1, 0]", ONCE),
    "not used": (Adopted(Unused), "the loss does not depend on blocks [0, 1, 2, 3]", ONCE),
    "one not used": (Adopted(HalfUsed), "the loss does not depend on blocks [1]", ONCE),
    "path": (
        Adopted(Text, "layers"),
        "layers='layers': the model has no 'layers'; it has blocks, embed, head, norm, pos",
        "use the path of",
    ),
    "path within": (
        Adopted(models.Mixer, "encoder.layers"),
        "encoder has no 'layers'; it has blocks",
        "use the path of",
    ),
    "path to a layer": (
        Adopted(Text, "norm"),
        "no nnx.scan runs over the 8 stacked blocks",
        "name a list of blocks in layers",
    ),
    "path to an array": (Adopted(Text, "pos"), "a Param has no such blocks", "use the path of"),
    "path into an array": (Adopted(Text, "pos.x"), "pos has no 'x'", "use the path of"),
    "part of a list": (Adopted(Text, "blocks[a:b]"), "has no such blocks", "use the path of"),
    "nothing of a list": (Adopted(Text, "blocks[4:]"), "has no such blocks", "use the path of"),
    "list with others": (
        Unweighted(models.AsSequential, "net", loss_of=of_tokens),
        "block 0 receives only the batch",
        "layers='net[1:]'",
    ),
    "changed in a block": (
        Adopted(Remembering),
        "block 0 changes its variable seen",
        "compute it in the loss",
    ),
    "changed in the model": (
        Adopted(Counted),
        "the model Counted changes its variable calls",
        "compute it in the loss",
    ),
    "NumPy's weights": (Adopted(OtherWeights), "has other initial values", "draw it from rngs"),
    "NumPy's noise": (Adopted(OtherNoise), "computes with other numbers", "a random stream"),
    "drawn constant": (Adopted(DrawnConstant), "basis is random", "write nnx.Param(...)"),
    "drawn array": (Adopted(DrawnArray), "basis is random", "write nnx.Param(...)"),
    "draws in evaluation": (
        Adopted(Noisy),
        "block 0 of the model Noisy draws random numbers in evaluation",
        "draw only in training",
    ),
    "dims": (
        Adopted(Text, by_path=(("blocks.*.down.kernel", (None, "tensor")),)),
        "dims of blocks.*.down.kernel match no parameter",
        "use names of its parameters",
    ),
    "too many dims": (
        Adopted(Text, by_path=(("blocks.*.up.bias", (None, "tensor")),)),
        "dims of blocks.*.up.bias are (None, 'tensor'), but blocks.0.up.bias has shape [8]",
        "for each dim",
    ),
    "unknown axis": (
        Adopted(Text, by_path=(("blocks.*.up.bias", ("sensor",)),)),
        "sensor",
        "Fix:",
    ),
    "no list": (
        Adopted(NoList, None),
        "the model NoList has no list of modules",
        "keep the blocks in an nnx.List",
    ),
    "two lists": (
        Adopted(TwoLists, None),
        "Not one list alone in the model TwoLists is called as a chain, but blocks, others",
        "layers='blocks'",
    ),
    "loop over others": (
        Adopted(StackedLoop),
        "the loop over stacked blocks ({other arrays}) also goes over other arrays",
        "as attributes of the blocks",
    ),
    "outputs of a loop": (
        Adopted(StackedOutputs),
        "the loop over stacked blocks ({outputs of each}) returns an output of each block",
        "return only what the next block receives",
    ),
    "no loop": (
        Adopted(StackedUnused),
        "no nnx.scan runs over the 4 stacked blocks",
        "by nnx.scan",
    ),
    "mean": (
        Adopted(Text, loss_of=mean),
        "the loss returns a single number",
        "return jaxpar.mean(losses, mask)",
    ),
    "metrics": (Adopted(Text, loss_of=with_metrics), "the loss returns", "return jaxpar.mean("),
    "not summed": (Adopted(Text, loss_of=each), "loss", "Fix:"),
    "mean over a mask": (Adopted(Text, loss_of=mean_over_mask), "the loss", "sums over rows"),
    "mean and number": (Adopted(Text, loss_of=mean_and_number), "the loss", "sums over rows"),
    "lengths": (
        Adopted(Lengths, "rnns"),
        "an nnx.RNN in a block is called with seq_lengths",
        "leave them out",
    ),
    "rows": (
        Adopted(Text, loss_of=by_norm_of_batch),
        "the sums of the loss do not add up",
        "sums over rows",
    ),
}
LINES = Path(__file__).read_text().splitlines()


def line_of(mark):
    numbers = [n for n, line in enumerate(LINES, 1) if line.endswith(f"# {mark}")]
    return f"test_adopt_refused.py, line {numbers[0]}"


def run(task, parallel):
    return value_and_grad(task, parallel)(init_state(task, parallel), batch_of(task))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adopted_gets_one_message(name):
    task, fact, use = REFUSED[name]
    fact = re.sub(r"\{(.*?)\}", lambda found: line_of(found[1]), fact)
    with pytest.raises(ValueError, match=re.escape(fact)) as found:
        run(task, Parallel("dp2tp2"))
    what, fix = str(found.value).split("\nFix: ")
    print(found.value)
    assert "\n" not in what
    assert use in f"Fix: {fix}"


class KernelBlock(MLPBlock):
    """With a kernel of Pallas, such as JAX's own attention for TPUs."""

    def __call__(self, x):
        copied = pallas_call(copy, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
        return super().__call__(copied)


class WithKernel(Text):
    block = KernelBlock


def copy(given, made):
    made[...] = given[...]


def test_a_kernel_must_say_where_its_outputs_differ():
    fact = r"calls a Pallas kernel that does not say over which axes of the mesh its outputs differ"
    fix = r"\nFix: .*manual_axis_type=jax.typeof\(x\).manual_axis_type"
    with pytest.raises(ValueError, match=fact + fix):
        run(Adopted(WithKernel), Parallel("dp2"))


def test_of_two_lists_the_one_that_is_a_chain_has_the_blocks():
    summary = api.summary(Adopted(CalledBack, None), Parallel("dp1"))
    assert summary["blocks"] == f"CalledBack.blocks: {DEPTH} mlpblock"


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_sown_intermediates_are_dropped_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        run(Adopted(Sown), Parallel("dp2"))
    found = [r.getMessage() for r in caplog.records if "sows" in r.getMessage()]
    assert len(found) == 1
    assert "sows activations" in found[0]
