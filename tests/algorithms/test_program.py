"""What is read of a compiled program: its memory in parts, and when its stages are busy."""

import numpy as np
import pytest

from jaxpar.analysis.program import _memory, busy_of
from jaxpar.pipeline import make_schedule, make_table

_NAMES = ("argument", "output", "alias", "temp", "generated_code")
# Bytes as compilers tell them, by the names above; their total; and what the parts come to.
STATS = {
    "libtpu 0.0.50.1": ((10_557_952, 10_515_456, 10_512_384, 5_490_688, 3_982_336), 13_536_768),
    "all of it on the chip": ((1000, 100, 0, 5000, 70), 1100),
    "arguments elsewhere": ((1000, 100, 0, 0, 70), 600),
    "CPU, JAX 0.12": ((2_097_152, 1_048_596, 1_048_576, 1_048_576, 0), 3_145_748),
    "CPU, JAX 0.10": ((2_097_152, 1_048_596, 1_048_576, 1_048_640, 0), None),
    "a total that is not known": ((500, 450, 400, 1000, 30), 0),
}


@pytest.mark.parametrize("name", STATS)
def test_the_parts_of_memory_are_not_negative_and_add_up(name):
    sizes, total = STATS[name]
    stats = type(
        "Stats", (), {f"{n}_size_in_bytes": size for n, size in zip(_NAMES, sizes, strict=True)}
    )
    if total is not None:
        stats.total_allocation_bytes = total
    memory = _memory(stats)
    assert min(memory.parts.values()) >= 0
    assert sum(memory.parts.values()) == memory.total
    arguments, outputs, aliased, temporary, code = sizes
    least = arguments + outputs - aliased + code
    # The compiler's total is of buffers; the program comes on top.
    assert memory.total == (max(least, total + code) if total else least + temporary)
    assert " -" not in str(memory)


@pytest.mark.law
def test_each_unit_is_work_once_in_each_part_of_a_tick():
    schedule = make_schedule("1f1b", 2, 3, 2, zero_bubble=True)
    busy = busy_of(make_table([schedule]))
    weights = sum(busy[name] for name in busy if name not in ("forward", "head", "backward"))
    for own in (busy["forward"], busy["backward"], weights):
        np.testing.assert_array_equal(own.sum(1), [[3 * 2] * 2])
    assert busy["head"].sum() == 3 * 2
