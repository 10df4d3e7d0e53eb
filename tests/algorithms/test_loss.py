"""Cross-entropy: what NumPy computes in float64, with logits of any size, whole or split."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from lib import api
from lib.programs import equations_in, flops_of

from jaxpar import MeshConfig
from jaxpar.lm import IGNORE, LM, Batch
from jaxpar.lm.loss import (
    LOGITS_ELSEWHERE,
    cross_entropy,
    linear_cross_entropy,
    without_padding,
)

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
            lambda logits: run(logits, jnp.asarray(targets)).loss
        )(logits)

    (nll, num_targets, _), grads = jax.jit(both)(jnp.asarray(logits))
    expected, expected_targets, expected_grads = in_float64(logits, targets)
    assert int(num_targets) == expected_targets
    np.testing.assert_allclose(nll, expected, rtol=RELATIVE_ERROR)
    np.testing.assert_allclose(grads, expected_grads, atol=RELATIVE_ERROR)


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    logits, targets = draw(1)
    targets[:] = IGNORE
    sums = cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    grads = jax.grad(lambda a: cross_entropy(a, jnp.asarray(targets)).loss)(jnp.asarray(logits))
    assert tuple(map(float, sums[:2])) == (0.0, 0.0)
    np.testing.assert_array_equal(grads, 0.0)


def draw_head(T, B, H, V, dtype):
    rng = np.random.default_rng(T)
    y, kernel, bias = (rng.normal(size=shape) for shape in ((T, B, H), (H, V), (V,)))
    targets = rng.integers(0, V, (T, B), dtype=np.int32)
    targets[rng.random((T, B)) < 0.2] = IGNORE
    weights = jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32)
    return jnp.asarray(y, dtype), *weights, jnp.asarray(targets)


def matmul(y, kernel):
    """Of the digits of `y`, added up in float32."""
    return jnp.matmul(y, kernel.astype(y.dtype), preferred_element_type=jnp.float32)


def split_head(y, kernel, bias, targets):
    def part(y, kernel, bias, targets):
        bias = without_padding(bias, 22, manual_axis="stage")
        return cross_entropy(matmul(y, kernel) + bias[None, None], targets, manual_axis="stage")

    mesh = MeshConfig(stage=4, devices=(0, 1, 2, 3)).build()
    return jax.shard_map(
        part, mesh=mesh, in_specs=(P(), P(None, "stage"), P("stage"), P()), out_specs=P()
    )(y, kernel, bias, targets)


def whole_head(y, kernel, bias, targets):
    return linear_cross_entropy(y, kernel, without_padding(bias, 22), targets, max_logits=256)


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("run", [whole_head, split_head])
@pytest.mark.parametrize("num_rows", [3, 60])
def test_what_is_no_word_has_no_probability_and_no_gradient(run, num_rows):
    """As if the head had never had these columns: with 96 logits, and part of them all padding."""
    y, kernel, bias, targets = draw_head(5, num_rows, 6, 96, "float32")
    targets = jnp.minimum(targets, 21)

    def expected(y, kernel, bias):
        return cross_entropy(matmul(y, kernel) + bias[None, None], targets).loss

    loss, grads = jax.jit(jax.value_and_grad(lambda *a: run(*a, targets).loss, (0, 1, 2)))(
        y, kernel, bias
    )
    wanted, wanted_grads = jax.value_and_grad(expected, (0, 1, 2))(y, kernel[:, :22], bias[:22])
    np.testing.assert_allclose(loss, wanted, rtol=RELATIVE_ERROR)
    (dy, d_kernel, d_bias), (wanted_dy, wanted_kernel, wanted_bias) = grads, wanted_grads
    for actual, reference in (
        (dy, wanted_dy), (d_kernel[:, :22], wanted_kernel), (d_bias[:22], wanted_bias),
    ):  # fmt: skip
        assert np.abs(actual - reference).max() <= RELATIVE_ERROR * np.abs(reference).max()
    np.testing.assert_array_equal(d_kernel[:, 22:], 0.0)
    np.testing.assert_array_equal(d_bias[22:], 0.0)


# 256 logits of 3 rows at most, or 128 rows: one chunk, several, and a length that they do not divide.
@pytest.mark.rows(2)
@pytest.mark.parametrize("shape", [(5, 4, 6, 24), (64, 8, 6, 24), (37, 20, 6, 24), (1, 300, 6, 24)])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_a_head_in_chunks_equals_one_at_once(shape, dtype, error):
    *arrays, targets = draw_head(*shape, dtype)

    def at_once(y, kernel, bias):
        return 0.5 * cross_entropy(matmul(y, kernel) + bias[None, None], targets).loss

    def in_chunks(y, kernel, bias):
        return 0.5 * linear_cross_entropy(y, kernel, bias, targets, max_logits=256).loss

    expected, actual = (
        jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*arrays) for run in (at_once, in_chunks)
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        assert np.abs(a - b).max() <= error * np.abs(b).max()
    without_gradient = linear_cross_entropy(*arrays, targets, max_logits=256)
    np.testing.assert_allclose(0.5 * without_gradient.loss, expected[0], rtol=1e-6)
    assert int(without_gradient.weight) == np.sum(np.asarray(targets) != IGNORE)


@pytest.mark.parametrize(
    ("steps", "rows", "words"),
    [
        (1024, 1024, 128_256),
        (1024, 512, 50_304),
        (1000, 96, 50_257),
        (256, 256, 10_240),
        (37, 100, 10**6),
    ],
)
def test_chunks_compute_hardly_more_than_they_must(steps, rows, words):
    def loss(y, kernel, bias, targets):
        return linear_cross_entropy(y, kernel, bias, targets, max_logits=LOGITS_ELSEWHERE).loss

    shapes = (steps, rows, 8), (8, words), (words,), (steps, rows)
    types = "float32", "float32", "float32", "int32"
    arguments = map(jax.ShapeDtypeStruct, shapes, types)
    found = flops_of(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arguments).jaxpr)
    assert 1 <= found / (3 * 2 * steps * rows * 8 * words) <= 1.05


def test_logits_of_all_time_steps_are_never_held():
    *arrays, targets = draw_head(64, 8, 6, 1000, "float32")

    def loss(y, kernel, bias):
        return linear_cross_entropy(y, kernel, bias, targets, max_logits=1).loss

    text = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile().as_text()
    shapes = (map(int, found.split(",")) for found in re.findall(r"\[([0-9,]+)\]", text))
    assert max(map(np.prod, map(list, shapes))) == 128 * 1000


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("float32", 0)])
def test_a_head_of_few_bits_multiplies_its_gradients_in_them_where_asked(dtype, error):
    rng = np.random.default_rng(0)
    y_TBH, kernel_HV = rng.normal(size=(6, 4, 16)), rng.normal(size=(16, 24)).astype(np.float32)
    y_TBH, bias_V, targets_TB = jnp.asarray(y_TBH, dtype), np.zeros(24, np.float32), draw(1)[1]
    targets_TB = np.concatenate([targets_TB, targets_TB[:1]])

    def gradients(**how):
        def run(*args):
            return linear_cross_entropy(*args, targets_TB, max_logits=2**20, **how).loss

        return jax.jit(jax.grad(run, (0, 1, 2)))(y_TBH, kernel_HV, bias_V)

    for rounded, whole in zip(gradients(rounds_gradient=True), gradients(), strict=True):
        far = np.linalg.norm(np.float32(rounded) - np.float32(whole))
        assert rounded.dtype == whole.dtype
        assert far <= error * np.linalg.norm(np.float32(whole))


@pytest.mark.parametrize(("platform", "narrow"), [("gpu", 3), ("cpu", 1), ("tpu", 1)])
def test_only_gpus_round_the_gradient_of_logits(platform, narrow):
    """Of a head's three products, so many are of two arrays of bfloat16."""
    task = LM(1, 16, 16, vocab_size=96, batch_size=2, seq_len=4, dtype="bfloat16", dropout=0.0)
    model, tokens_TB = task.make_model(nnx.Rngs(0)), jnp.zeros((4, 2), jnp.int32)
    batch = Batch(tokens_TB, tokens_TB, starts=False)
    at = api.context_on(platform, batch=batch)

    def last(y_TBH):
        return model.last(y_TBH, batch, at).loss

    program = jax.make_jaxpr(jax.grad(last))(jnp.zeros((4, 2, 16), jnp.bfloat16)).jaxpr
    products = [eqn for eqn in equations_in(program) if eqn.primitive.name == "dot_general"]
    types = [{each.aval.dtype for each in eqn.invars} for eqn in products]
    assert sum(own == {jnp.dtype("bfloat16")} for own in types) == narrow
    assert len(types) == 3
