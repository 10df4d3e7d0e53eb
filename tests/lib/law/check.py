"""A case on its mesh, and plainly."""

import contextlib
import pprint

import jax
import numpy as np

from jaxpar import TrainConfig
from lib import api
from lib.law import plain
from lib.law.blocks import FlaxTask
from lib.law.options import Case, build, names_of, plain_case

# Sums in another order differ by float32 rounding, 6e-8 a term; 1e-5 is the project's promise. bfloat16 has 8
# bits, and the roundings of some tens of operations add up.
ERRORS = {"float32": 1e-5, "bfloat16": 3e-2}
# Matrix memories divide by what may be a small difference.
FAR_APART = 1e-4
# What is zero but for rounding is compared with the largest.
LEAST = 1e-4


def check(case: Case) -> None:
    """Raises an AssertionError if the mesh does not give what one device gives, plainly computed."""
    built, error = build(case), ERRORS[case["dtype"]]
    if any(name.startswith(("mlstm", "gated")) for name in names_of(case)):
        error = max(error, FAR_APART)
    stream = built.task.make_batches("train", 0)
    batches = [stream.batch(number) for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        if case["form"] == "flax":  # as people write it
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        if built.is_large:
            stack.enter_context(api.all_is_large())
        run = {"updates": _check_updates, "gradients": _check_gradients}[case["result"]]
        run(built, batches, error)
        if built.predicts:
            _check_predictions(built, batches, error)


def _check_gradients(built, batches, error):
    found = api.gradients(built.task, built.parallel, batches[0])
    _check_initial(built.task, found.weights, error)
    loss, metrics, grads, carry = plain.gradients(built.task, found.weights, batches[0])
    assert_near({"loss": found.loss}, {"loss": loss}, error)
    assert_near(found.metrics, metrics, error)
    assert_near({name: found.grads[name] for name in grads}, grads, error)
    assert_near(found.carry, carry, error)


def _check_updates(built, batches, error):
    train = TrainConfig(num_steps=len(batches), clip_norm=built.clip_norm)
    found = api.updates(built.task, built.parallel, train, batches, built.then)
    _check_initial(built.task, found.weights, error)
    losses, trained, apart = plain.updates(
        built.task, found.weights, batches, built.clip_norm, error
    )
    assert_near(dict(enumerate(found.losses)), dict(enumerate(losses)), error)
    assert_near(found.trained, trained, error, apart)


def _check_initial(task, weights, error):
    if isinstance(task, FlaxTask):
        expected = plain.initial_weights(task)
        assert_near({name: weights[name] for name in expected}, expected, error)


def _check_predictions(built, batches, error):
    outputs, weights = api.predictions(built.task, built.parallel, batches[0])
    assert_near(outputs, plain.predictions(built.task, weights, batches[0]), error)


def assert_near(found, expected, error, apart=None):
    """Arrays by name, by their norms.

    Args:
      apart: how much further apart they may be, by name.
    """
    assert found.keys() == expected.keys()
    largest = max((np.linalg.norm(a) for a in expected.values()), default=0)
    for name, value in expected.items():
        value = np.asarray(value)
        actual = np.asarray(found[name])
        assert actual.shape == value.shape, f"{name}: {actual.shape}, not {value.shape}"
        scale = max(np.linalg.norm(value), LEAST * largest)
        distance = np.linalg.norm(actual.astype(value.dtype) - value)
        allowed = error * scale + (apart[name] if apart else 0.0)
        assert distance <= allowed, f"{name}: error {distance:.1e} of {scale:.1e}"


def script(case: Case) -> str:
    """A program that shows the case alone."""
    plainly = plain_case()
    changed = {name: value for name, value in case.items() if value != plainly[name]}
    lines = pprint.pformat(changed, width=90, compact=True, sort_dicts=False)
    return (
        "# PYTHONPATH=tests:. python this_file.py\n"
        "import conftest  # 8 devices\n"
        "from lib.law.check import check\n"
        "from lib.law.options import plain_case\n\n"
        f"check(plain_case() | {lines})"
    )
