"""The lines of the user's that things come from."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpar.trace.source_lines import CALLERS, source_line_of_instruction


def test_what_calls_the_functions_of_users_is_there():
    """A line further out, such as that of a test, is none of theirs."""
    assert [path for path in CALLERS if not Path(path).is_file()] == []


@pytest.mark.law
def test_the_line_of_an_operation_of_flax_is_the_users():
    linear, limit = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    try:
        run = jax.jit(lambda x: linear(x))  # the user's
        text = run.lower(jnp.ones((2, 4))).compile().as_text()
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    frame = int(re.search(r"dot_general.* stack_frame_id=(\d+)", text)[1])
    number = 1 + Path(__file__).read_text().splitlines().index(
        "        run = jax.jit(lambda x: linear(x))  # the user's"
    )
    assert source_line_of_instruction(text, frame) == f"test_source_lines.py, line {number}"
