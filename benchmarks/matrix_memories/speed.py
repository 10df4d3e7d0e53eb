"""The gradients of matrix memories in chunks of time, step by step, and in PyTorch, side by side.

python -m benchmarks.matrix_memories.speed --torch-python venv/bin/python
"""

import argparse
import json

import jax

from benchmarks.layers.speed import KEEPS_MEMORY
from benchmarks.sides import Side, measure, processor, table

CORES = ((0,),)
FOLDER = "benchmarks.matrix_memories"
OTHERS = {"mlstm": "mlstm-kernels, chunkwise native", "gated_delta": "fla, naive chunks"}


def main() -> None:
    """Prints a table for each of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", help="of an environment with the two packages")
    parser.add_argument("--rounds", type=int, default=7)
    for name, size in (("steps", 2048), ("rows", 8), ("heads", 4), ("head-size", 64)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    sizes = json.dumps([args.steps, args.rows, args.heads, args.head_size])
    print(f"{processor()}, jax {jax.__version__}, steps, rows, heads, their units: {sizes}\n")
    for memory, other in OTHERS.items():
        sides = [
            Side(
                f"{memory}, {how}",
                ("-m", f"{FOLDER}.jaxpar_side", memory, how, sizes),
                CORES,
                env=KEEPS_MEMORY,
            )
            for how in ("steps", "segments", "chunks")
        ]
        if args.torch_python:
            arguments = "-m", f"{FOLDER}.torch_side", memory, sizes
            side = Side(other, arguments, CORES, python=args.torch_python, env=KEEPS_MEMORY)
            sides.append(side)
        results = measure(sides, num_rounds=args.rounds, num_steps=1)
        print(table(results, args.rows * args.steps) + "\n")
        for result in results:
            print(f"{result.side.name}: at most {result.about['peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
