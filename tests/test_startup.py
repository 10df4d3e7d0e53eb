"""What an import costs, and what the benchmarks say where they cannot run."""

import compileall
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar
from jaxpar.__main__ import main
from jaxpar._mistyped import find_mistake

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
        (("E",), "argument work: invalid choice: 'E'"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train lm --model.hiden-size 3",
            "no option --model.hiden-size; did you mean --hidden-size?",
        ),
        ("plna", "no command 'plna'; did you mean plan?"),
    ],
)
def test_what_is_mistyped_is_told_before_jax_is_imported(arguments, message):
    """1.4 s of CPU time went into imports before; now 0.1."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxpar", *arguments.split()],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    imported = {line.split()[-1] for line in done.stderr.splitlines() if "import time:" in line}
    assert "jaxpar._mistyped" in imported
    assert not imported & {"jax", "flax", "optax", "orbax", "numpy", "tyro", "rich"}
    assert f"error: there is {message}" in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    "command",
    [
        "train lm",
        "plot schedule images",
        pytest.param("train images", marks=pytest.mark.full),
        pytest.param("plan lm", marks=pytest.mark.full),
        pytest.param("inspect lm", marks=pytest.mark.full),
        "plot curves",
        "evaluate",
        "sample",
        "export",
        "import",
        "launch",
        "doctor",
    ],
)
def test_the_options_that_the_source_tells_are_those_of_the_help(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    told = {
        option for line in lines if line.startswith("-")
        for option in re.findall(r"--[a-z][a-z.-]+", line.partition("  ")[0])
    } - {"--help"}  # fmt: skip
    assert "--debug" in told
    for option in told:
        assert find_mistake([*command.split(), f"{option}=1"]) is None
        wrong = f"{option}x"
        message = find_mistake([*command.split(), wrong, "1"])
        assert f"there is no option {wrong}; did you mean --" in (message or "")
