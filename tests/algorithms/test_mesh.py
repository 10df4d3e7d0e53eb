"""Memory of simulated devices."""

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere freed memory is not kept")
def test_freed_memory_is_kept_until_it_is_released():
    program = """
import numpy as np
from jaxpar.mesh import release_freed_memory, simulate_devices

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20

simulate_devices(1)
blocks = [np.ones(2**20) for _ in range(32)]  # 8 MiB each
before, kept = resident(), blocks.pop()
del blocks
freed = resident()
release_freed_memory()
print(before - freed, before - resident())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    kept, released = map(int, done.stdout.split())
    assert kept < 16
    assert released > 200
