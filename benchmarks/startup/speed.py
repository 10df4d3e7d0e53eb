"""How long a training command takes to its first step, at its first start and at its second; and a sweep.

    python -m benchmarks.startup.speed
    python -m benchmarks.startup.speed --sweep 20 --other ../older

The second start finds its programs in the compile cache of the first, which is used from JAX 0.11 on. Every
round has a cache of its own, and ends a command when it prints its first step.

A sweep is so many runs of 30 steps in one process, each with another learning rate. `--other` is the folder
of another checkout, whose CPU seconds are measured in turn with those of this one.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

COMMANDS = {
    "one device": ("--simulate", "1"),
    "2 groups x 2 stages x 2 parts": ("--simulate", "8", "--mesh", "dp2pp2tp2"),
}


SWEEP = """
import dataclasses, sys
import jaxpar
from jaxpar import OptimizerConfig, TrainConfig

task = jaxpar.lm.LM(num_layers=2, hidden_size=32, embed_size=32, seq_len=8, max_vocab=200)
for number in range(int(sys.argv[1])):
    optimizer = OptimizerConfig(learning_rate=1e-3 * (number + 1))
    task = dataclasses.replace(task, optimizer=optimizer)
    jaxpar.fit(task, "dp1", TrainConfig(num_steps=30), quiet=True)
"""


def cpu_seconds_of_sweep(checkout: Path, num_runs: int) -> float:
    """CPU seconds of a process that trains so many times, with a compile cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"XDG_CACHE_HOME": folder, "PYTHONPATH": str(checkout)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", SWEEP, str(num_runs)]
        subprocess.run(command, cwd=folder, env=env, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare_sweeps(num_runs: int, num_rounds: int, other: Path | None) -> None:
    """Prints the CPU seconds of a sweep, here and in another checkout."""
    checkouts = [Path(__file__).parents[2], *([other.resolve()] if other else [])]
    for _ in range(num_rounds):
        seconds = [cpu_seconds_of_sweep(checkout, num_runs) for checkout in checkouts]
        print(f"{num_runs} runs:", " and ".join(f"{each:.1f}" for each in seconds), "CPU s", end="")
        print(f", ratio {seconds[0] / seconds[-1]:.2f}" * (other is not None), flush=True)


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
    parser.add_argument("--sweep", type=int, metavar="RUNS", help="measure a sweep instead")
    parser.add_argument(
        "--other", type=Path, metavar="FOLDER", help="another checkout to compare with"
    )
    args = parser.parse_args()
    if args.sweep:
        compare_sweeps(args.sweep, args.rounds, args.other)
        return
    if jax.__version_info__ < (0, 11):
        parser.error(f"jax {jax.__version__}: the compile cache is used from 0.11 on")
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
