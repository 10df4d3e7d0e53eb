"""Programs of a process that are equal are compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
from lib.programs import compiled

from jaxpar.base.jax_private import call_once


def test_only_equal_programs_are_one():
    x = np.arange(3, dtype=np.float32)

    def run(factor, **options):
        return call_once(jax.jit(lambda x: x * jnp.arange(3) * factor, **options), x)

    with jax.numpy_dtype_promotion("standard"), compiled() as programs:
        found = [run(2.0), run(2.0)]
        assert len(programs) == 1
        found += [run(3.0)]
        assert len(programs) == 2
        other = jax.local_devices()[1]
        moved = run(3.0, out_shardings=jax.sharding.SingleDeviceSharding(other))
    np.testing.assert_array_equal(found, [[0, 2, 8], [0, 2, 8], [0, 3, 12]])
    assert moved.devices() == {other}


def test_a_program_that_calls_python_is_its_own():
    def run(number):
        shape = jax.ShapeDtypeStruct((), np.float32)
        called = lambda: jax.pure_callback(lambda: np.float32(number), shape)  # noqa: E731
        return float(call_once(jax.jit(called)))

    assert [run(1), run(2)] == [1, 2]
