"""Windows of 8,192 and 65,536 steps: what a step keeps of them, and what it takes to keep less.

Prints temporary memory per device of the compiled training step, and its CPU time beside that of the step
that keeps everything; what is compared takes turns. On a GPU it is the time that passes, there are more rows,
and one way more: to keep inputs and carries in the host's memory.

    python -m benchmarks.long_windows.run
    JAX_PLATFORMS=cuda,cpu python -m benchmarks.long_windows.run
"""

import argparse
import dataclasses
import os
import time

import jax

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.data.batches import put_batch
from jaxpar.lm import LM
from jaxpar.step.setup import Setup
from jaxpar.step.state import abstract_state
from jaxpar.step.step import abstract_batch, batch_sharding

ON_GPU = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
TASK = LM(2, 64, 64, vocab_size=384, dropout=0.0, batch_size=1)
CHUNK = 64
KEPT = {
    "all residuals": {},
    "inputs, carries (device)": {"remat": True},
    "carries": {"remat": True, "remat_keeps": "carries"},
}
if ON_GPU:
    KEPT["inputs, carries (host)"] = {"remat": True, "remat_keeps": "host"}


def make_settings(
    num_steps: int, num_stages: int, num_rows: int = 1, **options
) -> tuple[LM, Parallel]:
    """A task with a window of so many steps in chunks of 64, and how devices share it."""
    task = dataclasses.replace(TASK, seq_len=num_steps, batch_size=num_rows)
    mesh = MeshConfig(stage=num_stages, devices=tuple(range(num_stages)))
    return task, Parallel(mesh, PipelineConfig(num_chunks=num_steps // CHUNK, **options))


def temporary_megabytes(num_steps: int, num_stages: int, **options) -> float:
    """MB per device that the compiled step needs besides arguments and results."""
    task, parallel = make_settings(num_steps, num_stages, **options)
    built = parallel.mesh.build()
    step = jaxpar.make_train_step(task, parallel, mesh=built)
    arguments = (
        abstract_state(Setup.of(task, parallel, mesh=built)),
        abstract_batch(Setup.of(task, parallel, mesh=built)),
    )
    return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 1e6


def make_run(num_steps: int, num_stages: int, num_rows: int, **options):
    """A function that takes a step and returns its seconds, on a CPU those of the processor."""
    task, parallel = make_settings(num_steps, num_stages, num_rows, **options)
    built = parallel.mesh.build()
    state = jaxpar.init_state(task, parallel, mesh=built)
    step = jaxpar.make_train_step(task, parallel, mesh=built)
    batch = put_batch(task.example_batch(), batch_sharding(Setup.of(task, parallel, mesh=built)))
    clock = time.perf_counter if ON_GPU else time.process_time

    def run() -> float:
        nonlocal state
        start = clock()
        state, _ = jax.block_until_ready(step(state, batch))
        return clock() - start

    run()
    return run


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if not ON_GPU:
        jaxpar.simulate_devices(2)
    print("| kept | stages | 8,192 steps | 65,536 steps |\n|---|---|---:|---:|")
    for stages in (1,) if ON_GPU else (1, 2):
        for name, options in KEPT.items():
            found = [temporary_megabytes(steps, stages, **options) for steps in (8_192, 65_536)]
            print(f"| {name} | {stages} | " + " | ".join(f"{mb:.1f} MB" for mb in found) + " |")
    print(
        "\n| 8,192 steps | stages | rows | time | beside all residuals |\n|---|---|---:|---:|---:|"
    )
    for stages, rows in ((1, 1), (1, 64)) if ON_GPU else ((1, 1), (1, 8), (2, 1), (2, 8)):
        runs = [make_run(8_192, stages, rows, **options) for options in KEPT.values()]
        turns = ([run() for run in runs] for _ in range(rounds))
        seconds = [min(column) for column in zip(*turns, strict=True)]
        for name, taken in zip(KEPT, seconds, strict=True):
            print(f"| {name} | {stages} | {rows} | {taken:.2f} s | {taken / seconds[0]:.2f} |")


if __name__ == "__main__":
    main()
