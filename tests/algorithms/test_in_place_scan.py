"""A loop that writes its outputs over its inputs is a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.internal.in_place_scan import scan_in_place

T, B, W = 64, 3, 8


@pytest.mark.parametrize(("reverse", "unroll"), [(False, 1), (True, 1), (True, 6)])
def test_a_loop_writes_over_what_it_has_read(reverse, unroll):
    """Two of four outputs where one input was, one where another was: memory that is not asked for."""

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
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected[:2]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    more, less = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert more - less >= seeds[0].nbytes
