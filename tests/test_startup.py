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
import time
start = time.process_time()
import jax, flax.nnx
between = time.process_time()
import jaxpar
end = time.process_time()
print(jaxpar.__file__, (end - between) / (between - start))
"""


def test_the_import_adds_less_than_that_of_jax_and_flax(tmp_path):
    """CPU time, which other processes hardly add to, beside that of JAX and Flax in one process."""
    package = tmp_path / "jaxpar"
    shutil.copytree(Path(jaxpar.__file__).parent, package)
    compileall.compile_dir(package, quiet=1)  # as pip leaves it
    ratios = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        file, ratio = done.stdout.split()
        assert Path(file) == package / "__init__.py"
        ratios.append(float(ratio))
    # The best of a few is 0.33 (Python 3.11, JAX 0.10) to 0.39 (3.13, 0.12), busy cores or not: room
    # for half as much again, and none for matplotlib (0.7), scipy.stats (1.0) or sklearn (1.6).
    assert min(ratios) < 0.6


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
