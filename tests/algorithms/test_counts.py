"""What a step computes, moves and keeps, counted in its traced program."""

import functools
import math

import jax
import numpy as np
import pytest
from lib.planned import task_of

from jaxpar.lm import LM
from jaxpar.planning.counts import counts_of
from jaxpar.trace.counts import amount

more = functools.partial(pytest.param, marks=pytest.mark.more)


@pytest.mark.more
@pytest.mark.parametrize("name", ["lm", "mixed", *map(more, ("gru", "transformer", "hybrid"))])
def test_numbers_of_a_unit_follow_from_four_that_were_traced(name):
    counts = counts_of(task_of(name), 100, "cpu")
    steps, rows = counts.facts.num_steps, counts.facts.batch_size
    t = steps and (steps // 4 if steps % 4 == 0 else 1)
    found, traced = counts.unit(t, rows // 8), counts._trace(t, rows // 8)
    np.testing.assert_allclose(*map(jax.tree.leaves, (found, traced)), rtol=1e-6)
    whole = counts.unit(steps, rows)
    assert whole.x > 0
    if whole.kinds:
        assert min(kind.kept for kind in whole.kinds) > 0


def test_flops_of_layers_are_those_of_their_matrices():
    counts = counts_of(task_of("lm"), 100, "cpu")
    [lstm] = counts.unit(4, 2).kinds
    product = 2 * 4 * 2 * 2 * 128 * 4 * 128  # multiply-adds of x and h: t b (I + H) 4 H
    assert [work.flops for work in lstm[:3]] == [product] * 3
    assert lstm.forward.turns == lstm.forward.product_turns == 4
    assert lstm.weights.turns == 0  # out of the loop over time


@pytest.mark.parametrize("unit", [(1024, 1024), (1024, 128), (64, 1024), (512, 16)])
def test_flops_of_a_head_in_chunks_are_those_of_its_matrix(unit):
    """128,256 words, and a thousand rows and steps: another number of chunks for each unit."""
    task = LM(1, 8, 8, vocab_size=128_256, batch_size=1024, seq_len=1024)
    found = counts_of(task, 1, "tpu").unit(*unit).last.flops
    assert found == pytest.approx(3 * 2 * math.prod(unit) * 8 * 128_256, rel=0.1)


def test_bytes_are_those_of_what_is_materialized():
    a = jax.ShapeDtypeStruct((64, 64), "float32")
    size, run = 64 * 64 * 4, jax.jit(lambda a: jax.numpy.tanh(a @ a) + 1)
    assert amount(run, a).bytes == 3 * size + 2 * size  # of the product; and once more, in one loop
    looped = amount(lambda a: jax.lax.scan(lambda c, _: (c @ a, None), a, None, length=5)[0], a)
    assert looped == (5 * 2 * 64**3, 5 * 3 * size, 5, 5)
