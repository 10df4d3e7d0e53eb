"""Where the time of jaxpar's training step goes, and how far each part is from what the machine can do.

    python -m benchmarks.single_device.where A

Times are those that XLA's profiler saw on one core, less what it saw inside of them. The ceilings are
measured in the same process: the product of two large matrices, and a copy of more than any cache holds.
"""

import argparse
import collections
import os
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

import jaxpar
from benchmarks.jaxpar_side import TRAIN, initial_state, make_batch, make_task
from benchmarks.work import WORKS, Work
from jaxpar import Parallel
from jaxpar.analysis.hlo import Module, Visit
from jaxpar.step import make_train_step
from jaxpar.timing import take_turns
from jaxpar.training.profiler import Operation, read_trace, trace

PARTS = (
    "recurrent matmuls",
    "other matmuls of the layers",
    "gates",
    "residuals, transposes, other copies",
    "matmuls of the head",
    "softmax and loss",
    "embedding",
    "update",
    "between the operations",
)


def counted(work: Work, num_params: int) -> dict[str, tuple[float, float]]:
    """(FLOPs, bytes to and from memory) of each part that has a count of its own.

    A layer's input, the gradients of its input and of its two kernels are four products of [T B, H] and
    [H, 4 H] in all, and the loops over time have two more. The gates read z and write i, f, g, o, h and
    the two residuals forward; they read i, f, g, o, c and dy and write dz backward. The update reads
    parameters and gradients, those once more for their norm, and writes parameters.
    """
    L, H, N = work.num_layers, work.hidden_size, work.tokens
    product = 2 * N * H * 4 * H * L
    return {
        "recurrent matmuls": (2 * product, 0),
        "other matmuls of the layers": (4 * product, 0),
        "gates": (0, (11 + 10) * 4 * N * H * L),
        "matmuls of the head": (3 * 2 * N * H * work.vocab_size, 0),
        "update": (0, 16 * num_params),
    }


def part_of(visit: Visit, module: Module, num_steps: int) -> str:
    """The part of the step that an instruction belongs to; loops over time have `num_steps` turns."""
    inside = [visit.instruction, *module.fused(visit.instruction)]
    names = " ".join(each.op_name for each in inside)
    multiplies = any(each.opcode == "dot" for each in inside)
    if "head" in names or "loss" in names:
        return "matmuls of the head" if multiplies else "softmax and loss"
    if "embedding" in names:
        return "embedding"
    if "update" in names:
        return "update"
    over_time = num_steps in visit.trip_counts
    if multiplies:
        return "recurrent matmuls" if over_time else "other matmuls of the layers"
    return "gates" if over_time else "residuals, transposes, other copies"


def own_milliseconds(operations: list[Operation]) -> collections.Counter[str]:
    """Of every operation on a device, without those inside of it."""
    totals: collections.Counter[str] = collections.Counter()
    threads = collections.defaultdict[int, list[Operation]](list)
    for operation in operations:
        threads[operation.thread].append(operation)
    for thread in threads.values():
        around: list[Operation] = []  # that are going on
        for operation in sorted(thread, key=lambda each: (each.start, -each.end)):
            while around and around[-1].end <= operation.start:
                around.pop()
            milliseconds = 1e3 * (operation.end - operation.start)
            if around:
                totals[around[-1].name] -= milliseconds
            totals[operation.name] += milliseconds
            around.append(operation)
    return totals


def ceilings() -> tuple[float, float]:
    """FLOP/s of a product of [2048, 2048], and bytes/s, read and written, of a copy of 512 MiB."""
    a = jnp.ones((2048, 2048))
    big = jnp.ones(2**27)
    multiply, copy = jax.jit(lambda a: a @ a), jax.jit(lambda a: a + 1)

    seconds = take_turns([lambda: multiply(a), lambda: copy(big)], 6)
    of_product, of_copy = (statistics.median(times[1:]) for times in seconds)
    return 2 * 2048**3 / of_product, 2 * big.nbytes / of_copy


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    work = WORKS[args.work]
    jaxpar.simulate_devices(1)
    task, parallel = make_task(work), Parallel()
    mesh = parallel.mesh.build()
    state = initial_state(work, task, parallel, mesh)
    step = make_train_step(task, parallel, TRAIN, mesh)
    batch = make_batch(work, task, parallel, mesh)
    module = Module(step.lower(state, batch).compile().as_text())
    parts = {
        visit.instruction.name: part_of(visit, module, work.seq_len) for visit in module.visits()
    }

    for _ in range(2):
        state, _ = step.run(state, batch)
        jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with trace(folder):
            start = time.perf_counter()
            for _ in range(args.steps):
                state, _ = step.run(state, batch)
                jax.block_until_ready(state)
            total = (time.perf_counter() - start) * 1e3 / args.steps
        milliseconds = own_milliseconds(read_trace(folder))
    times = collections.Counter[str]()
    for name, value in milliseconds.items():
        if name in parts:
            times[parts[name]] += value / args.steps
    times["between the operations"] = total - times.total()
    flop_rate, byte_rate = ceilings()
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    counts = counted(work, num_params)

    print(f"jax {jax.__version__}, one core, work {args.work}: {work}")
    print(f"ceilings: {flop_rate / 1e9:.0f} GFLOP/s, {byte_rate / 1e9:.1f} GB/s\n")
    print("| part | ms a step | share | GFLOP | MB | at the ceiling, ms | of the ceiling |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for part in PARTS:
        row = f"| {part} | {times[part]:.1f} | {times[part] / total:.1%} |"
        if part in counts:
            flops, size = counts[part]
            least = 1e3 * (flops / flop_rate + size / byte_rate)
            row += (
                f" {flops / 1e9:.1f} | {size / 1e6:.1f} | {least:.1f} | {least / times[part]:.0%} |"
            )
        else:
            row += " | | | |"
        print(row)
    print(f"| all | {total:.1f} | 100.0% | | | | |")


if __name__ == "__main__":
    main()
