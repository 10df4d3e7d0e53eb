"""What an import costs, and what the benchmarks say where they cannot run."""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

ROOT = Path(__file__).parents[1]
IMPORT = """
import time, jax, flax
before = time.process_time()
import jaxpar
print(jaxpar.__file__, time.process_time() - before)
"""


def test_the_import_adds_less_than_half_a_second(tmp_path):
    """CPU time, which other processes on the machine do not add to; the best of a few."""
    package = tmp_path / "jaxpar"
    shutil.copytree(Path(jaxpar.__file__).parent, package)
    compileall.compile_dir(package, quiet=1)  # as pip leaves it
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        file, taken = done.stdout.split()
        assert Path(file) == package / "__init__.py"
        seconds.append(float(taken))
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A",), "argument work: invalid choice: 'A'"),
        (("C", "--numbers", "float16"), "argument --numbers: invalid choice: 'float16'"),
        (("C", "--rounds", "1"), "--rounds 1 --steps 10: use 2 or more"),
        (("D",), f"JAX of {sys.executable} finds no GPU"),
    ],
)
def test_the_gpu_benchmark_says_what_it_lacks(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.single_device.gpu", *arguments],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr
    assert done.stdout == ""
