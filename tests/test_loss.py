"""Cross-entropy: what NumPy computes in float64, with logits of any size, whole or split."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.data.streams import IGNORE
from jaxpar.loss import cross_entropy, linear_cross_entropy
from jaxpar.mesh import MeshConfig
from jaxpar.nn.linear import matmul

# float32 rounding of a sum of 24 terms and of a logarithm.
RELATIVE_ERROR = 1e-6


def draw(scale, shift=0.0):
    rng = np.random.default_rng(0)
    logits = (scale * rng.normal(size=(5, 4, 24)) + shift).astype(np.float32)
    targets = rng.integers(0, 24, (5, 4), dtype=np.int32)
    targets[0], targets[3, 1] = IGNORE, 23
    return logits, targets


def in_float64(logits, targets):
    """(nll, number of targets, gradient of the nll)."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counts = targets != IGNORE
    picked = np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0]
    is_target = np.arange(24) == targets[..., None]
    return -(picked * counts).sum(), counts.sum(), (np.exp(log_p) - is_target) * counts[..., None]


def split_over_stages(logits, targets):
    mesh = MeshConfig(stage=4, devices=(0, 1, 2, 3)).build()
    return jax.shard_map(
        lambda logits, targets: cross_entropy(logits, targets, manual_axis="stage"),
        mesh=mesh,
        in_specs=(P(None, None, "stage"), P()),
        out_specs=P(),
    )(logits, targets)


@pytest.mark.parametrize("run", [cross_entropy, split_over_stages])
# exp(89) overflows float32, and exp(-104) is 0.
@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (300, 0), (1, 5e3), (1, -5e3)])
def test_loss_and_gradient_of_logits_of_any_size(run, scale, shift):
    logits, targets = draw(scale, shift)

    def both(logits):
        return run(logits, jnp.asarray(targets)), jax.grad(
            lambda logits: run(logits, jnp.asarray(targets)).nll
        )(logits)

    (nll, num_targets), grads = jax.jit(both)(jnp.asarray(logits))
    expected, expected_targets, expected_grads = in_float64(logits, targets)
    assert int(num_targets) == expected_targets
    np.testing.assert_allclose(nll, expected, rtol=RELATIVE_ERROR)
    np.testing.assert_allclose(grads, expected_grads, atol=RELATIVE_ERROR)


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    logits, targets = draw(1)
    targets[:] = IGNORE
    sums = cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    grads = jax.grad(lambda a: cross_entropy(a, jnp.asarray(targets)).nll)(jnp.asarray(logits))
    assert tuple(map(float, sums)) == (0.0, 0.0)
    np.testing.assert_array_equal(grads, 0.0)


def draw_head(T, B, H, V, dtype):
    rng = np.random.default_rng(T)
    y, kernel, bias = (rng.normal(size=shape) for shape in ((T, B, H), (H, V), (V,)))
    targets = rng.integers(0, V, (T, B), dtype=np.int32)
    targets[rng.random((T, B)) < 0.2] = IGNORE
    weights = jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32)
    return jnp.asarray(y, dtype), *weights, jnp.asarray(targets)


# 256 logits of 3 rows at most, or 128 rows: one chunk, several, and a length that they do not divide.
@pytest.mark.parametrize("shape", [(5, 4, 6, 24), (64, 8, 6, 24), (37, 20, 6, 24), (1, 300, 6, 24)])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_a_head_in_chunks_equals_one_at_once(shape, dtype, error):
    *arrays, targets = draw_head(*shape, dtype)

    def at_once(y, kernel, bias):
        return 0.5 * cross_entropy(matmul(y, kernel) + bias[None, None], targets).nll

    def in_chunks(y, kernel, bias):
        return 0.5 * linear_cross_entropy(y, kernel, bias, targets, max_logits=256).nll

    expected, actual = (
        jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*arrays) for run in (at_once, in_chunks)
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        assert np.abs(a - b).max() <= error * np.abs(b).max()
    without_gradient = linear_cross_entropy(*arrays, targets, max_logits=256)
    np.testing.assert_allclose(0.5 * without_gradient.nll, expected[0], rtol=1e-6)
    assert int(without_gradient.num_targets) == np.sum(np.asarray(targets) != IGNORE)


def test_logits_of_all_time_steps_are_never_held():
    *arrays, targets = draw_head(64, 8, 6, 1000, "float32")

    def loss(y, kernel, bias):
        return linear_cross_entropy(y, kernel, bias, targets, max_logits=1).nll

    text = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile().as_text()
    shapes = (map(int, found.split(",")) for found in re.findall(r"\[([0-9,]+)\]", text))
    assert max(map(np.prod, map(list, shapes))) == 128 * 1000
