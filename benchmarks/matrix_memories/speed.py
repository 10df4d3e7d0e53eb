"""Matrix memories in chunks of steps, and step by step: time and memory of their gradients over a window.

python -m benchmarks.matrix_memories.speed [--kind gated_delta] [--rounds 9]
"""

import argparse

import jax

from benchmarks.layers.speed import KEEPS_MEMORY
from benchmarks.matrix_memories.side import SEGMENT, B, D, N, T
from benchmarks.sides import Side, measure, processor, table

WAYS = {
    f"step by step, of {SEGMENT} steps one state kept": "segments",
    "step by step, all states kept": "steps",
    **{f"chunks of {chunk} steps": str(chunk) for chunk in (16, 32, 64, 128, 256)},
}


def main() -> None:
    """Prints a table for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("mlstm", "gated_delta"), help="else both")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{processor()}, jax {jax.__version__}: {T} steps, {B} rows, {N} heads of {D} units")
    for kind in [args.kind] if args.kind else ("mlstm", "gated_delta"):
        sides = [
            Side(
                name,
                ("-m", "benchmarks.matrix_memories.side", kind, way),
                ((0,),),
                env=KEEPS_MEMORY,
            )
            for name, way in WAYS.items()
        ]
        results = measure(sides, num_rounds=args.rounds, num_steps=1)
        print(f"\n{kind}\n\n{table(results, T * B)}\n")
        for result in results:
            print(f"{result.side.name}: at most {result.about['peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
