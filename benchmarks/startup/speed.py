"""How long a training command takes to its first step, at its first start and at its second.

    python -m benchmarks.startup.speed

The second finds its programs in the compile cache of the first, which the command line uses from JAX 0.11 on.
Every round has a cache of its own, and ends a command when it prints its first step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax

COMMANDS = {
    "one device": ("--simulate", "1"),
    "2 groups x 2 stages x 2 parts": ("--simulate", "8", "--mesh", "dp2pp2tp2"),
}


def seconds_to_first_step(options: tuple[str, ...], folder: str) -> tuple[float, float]:
    """Seconds on the clock and of CPU time, from the start of the process on.

    Raises:
      RuntimeError: it ends before its first step.
    """
    run_dir = tempfile.mkdtemp(dir=folder)
    command = ["train", "lm", *options, "--train.out-dir", f"{run_dir}/run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpar", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": folder, "PYTHONUNBUFFERED": "1"},
    )
    start = time.perf_counter()
    assert process.stdout is not None
    has_stepped = any(line.startswith("step ") for line in process.stdout)
    seconds = time.perf_counter() - start
    process.kill()
    _, code, usage = os.wait4(process.pid, 0)
    if not has_stepped:
        raise RuntimeError(
            f"train lm {' '.join(options)} ended with code {code} before its first step"
        )
    return seconds, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if jax.__version_info__ < (0, 11):
        parser.error(f"jax {jax.__version__}: the command line has its compile cache from 0.11 on")
    print(f"jax {jax.__version__}, medians of {args.rounds} rounds, wall (CPU) seconds\n")
    print("| mesh | first start | second start | ratio (lowest to highest) |\n|---|---:|---:|---:|")
    for name, options in COMMANDS.items():
        rounds = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append([seconds_to_first_step(options, folder) for _ in range(2)])
        first, second = (
            "{:.1f} ({:.1f})".format(*map(statistics.median, zip(*starts, strict=True)))
            for starts in zip(*rounds, strict=True)
        )
        ratios = sorted(second[0] / first[0] for first, second in rounds)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"| {name} | {first} | {second} | {statistics.median(ratios):.2f} ({spread}) |")


if __name__ == "__main__":
    main()
