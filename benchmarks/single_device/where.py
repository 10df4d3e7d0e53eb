"""Where the time of jaxpar's training step goes, and how far each part is from what the machine can do.

    python -m benchmarks.single_device.where A [--copies]

Times are those that XLA's profiler saw on one core, less what it saw inside of them: of every operation the
quickest of all steps, which a busy machine disturbs least. The ceilings are measured in the same process: the
product of two large matrices, and a copy of more than any cache holds.
"""

import argparse
import collections
import math
import os
import tempfile
import time

import jax
import jax.numpy as jnp

import jaxpar
from benchmarks.jaxpar_side import TRAIN, initial_state, make_batch, make_task
from benchmarks.sides import processor
from benchmarks.turns import take_turns
from benchmarks.work import WORKS, Work
from jaxpar.analysis.hlo import Instruction, Module, Visit, arrays, bits
from jaxpar.step.functions import make_train_step
from jaxpar.step.setup import Setup
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
    if "/update/" in names:
        return "update"
    over_time = num_steps in visit.trip_counts
    if multiplies:
        return "recurrent matmuls" if over_time else "other matmuls of the layers"
    return "gates" if over_time else "residuals, transposes, other copies"


def own_milliseconds(operations: list[Operation]) -> list[dict[str, list[float]]]:
    """Step by step, of every operation each time it ran, without those inside of it."""
    threads = collections.defaultdict[tuple[int, int], list[Operation]](list)
    for operation in operations:
        threads[operation.run, operation.thread].append(operation)
    steps = collections.defaultdict[int, dict[str, list[float]]](dict)
    for (run, _), thread in threads.items():
        around: list[tuple[Operation, int]] = []  # that are going on
        for operation in sorted(thread, key=lambda each: (each.start, -each.end)):
            while around and around[-1][0].end <= operation.start:
                around.pop()
            own = steps[run].setdefault(operation.name, [])
            milliseconds = 1e3 * (operation.end - operation.start)
            if around:
                outer, place = around[-1]
                steps[run][outer.name][place] -= milliseconds
            around.append((operation, len(own)))
            own.append(milliseconds)
    return [steps[run] for run in sorted(steps)]


# They move numbers and make none.
_MOVES = {
    "bitcast", "broadcast", "concatenate", "copy", "dynamic-slice", "dynamic-update-slice", "pad",
    "reshape", "slice", "transpose",
}  # fmt: skip
_MB = 1e6


def moved_bytes(instruction: Instruction, module: Module) -> int:
    """Bytes of what an instruction copies, transposes, repeats or cuts; 0 if it does anything else."""
    inside = module.fused(instruction) or [instruction]
    makes_numbers = {
        each.opcode
        for each in inside
        if any(math.prod(dims) > 1 for _, dims in arrays(each.shape))  # others compute places
    } - {*_MOVES, "parameter"}
    if makes_numbers or inside[-1].opcode == "parameter":
        return 0
    [(dtype, dims), *_] = arrays(instruction.shape)
    size = math.prod(dims) * bits(dtype) // 8
    writes_a_row = any(each.opcode == "dynamic-update-slice" for each in inside)
    return size // dims[0] if writes_a_row else size


def ceilings() -> tuple[float, float]:
    """FLOP/s of a product of [2048, 2048], and bytes/s, read and written, of a copy of 512 MiB."""
    a = jnp.ones((2048, 2048))
    big = jnp.ones(2**27)
    multiply, copy = jax.jit(lambda a: a @ a), jax.jit(lambda a: a + 1)

    seconds = take_turns([lambda: multiply(a), lambda: copy(big)], 6)
    of_product, of_copy = map(min, seconds)
    return 2 * 2048**3 / of_product, 2 * big.nbytes / of_copy


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--copies", action="store_true", help="list those of more than 1 MB")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    work = WORKS[args.work]
    jaxpar.simulate_devices(1)
    setup = Setup.of(make_task(work), "dp1", TRAIN)
    state = initial_state(work, setup)
    step = make_train_step(setup)
    batch = make_batch(work, setup)
    text = step.lower(state, batch).compile().as_text()
    assert text is not None
    module = Module(text)
    visits = {visit.instruction.name: visit for visit in module.visits()}

    for _ in range(2):
        state, _ = step.run(state, batch)
        jax.block_until_ready(state)
    totals = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        with trace(folder):
            for _ in range(args.steps):
                start = time.perf_counter()
                state, _ = step.run(state, batch)
                jax.block_until_ready(state)
                totals.append((time.perf_counter() - start) * 1e3)
        steps = [
            {name: own for name, own in each.items() if name in visits}
            for each in own_milliseconds(read_trace(folder))
        ]
    milliseconds = {
        name: sum(map(min, zip(*(each[name] for each in steps), strict=True))) for name in steps[0]
    }
    times = collections.defaultdict[str, float](float)
    for name, value in milliseconds.items():
        times[part_of(visits[name], module, work.seq_len)] += value
    times["between the operations"] = min(
        total - sum(map(sum, each.values())) for total, each in zip(totals, steps, strict=True)
    )
    total = sum(times.values())
    flop_rate, byte_rate = ceilings()
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    counts = counted(work, num_params)

    print(f"{processor()}, one core, jax {jax.__version__}, work {args.work}: {work}")
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
    if args.copies:
        print("\n| copy | from | times a step | MB each | ms a step |")
        print("|---|---|---:|---:|---:|")
        for name, visit in sorted(visits.items(), key=lambda each: -milliseconds.get(each[0], 0)):
            size = moved_bytes(visit.instruction, module)
            if size > _MB and name in milliseconds:
                times_a_step = math.prod(trips or 1 for trips in visit.trip_counts)
                print(
                    f"| {name} {visit.instruction.shape} | {module.source(visit.instruction)} | "
                    f"{times_a_step} | {size / _MB:.1f} | {milliseconds[name]:.2f} |"
                )


if __name__ == "__main__":
    main()
