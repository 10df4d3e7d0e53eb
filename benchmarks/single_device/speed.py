"""The training step of one device against what its users would pick instead.

    python -m benchmarks.single_device.speed A --torch-python venv/bin/python [--cores 2]

With two cores jaxpar has three ways to use them: threads, two stages, two data-parallel groups.
"""

import argparse
import json

import jax

from benchmarks.sides import Side, measure, processor, table
from benchmarks.work import WORKS

# Microbatches and chunks of two stages: the best of `benchmarks.pipeline.speed`.
CUTS = {"A": (1, 8), "B": (1, 5), "C": (1, 5)}


def jaxpar_side(name: str, work: str, cores, mesh: dict[str, int], **pipeline: int) -> Side:
    """The training step of jaxpar on a mesh."""
    arguments = ("-m", "benchmarks.jaxpar_side", work, json.dumps(mesh), json.dumps(pipeline))
    return Side(name, arguments, cores)


def jax_side(name: str, work: str, cores, kind: str) -> Side:
    """JAX without jaxpar."""
    return Side(name, ("-m", "benchmarks.single_device.jax_side", work, kind), cores)


def sides_of(work: str, num_cores: int, torch_python: str | None) -> list[Side]:
    """All sides; the first is what the others are held against."""
    cores = (tuple(range(num_cores)),)
    sides = [
        jax_side("flax nnx.RNN(OptimizedLSTMCell)", work, cores, "flax"),
        jax_side("lax.scan and autodiff", work, cores, "scan"),
        jaxpar_side("jaxpar", work, cores, {}),
    ]
    if num_cores > 1:
        m, k = CUTS[work]
        sides += [
            jaxpar_side("jaxpar, data=2", work, cores, {"data": 2}),
            jaxpar_side(
                f"jaxpar, stage=2 (M={m}, K={k})", work, cores, {"stage": 2},
                num_microbatches=m, num_chunks=k,
            ),
        ]  # fmt: skip
    if torch_python:
        arguments = ("-m", "benchmarks.single_device.torch_side", work)
        sides.append(Side("torch.nn.LSTM", arguments, cores, torch_python))
    return [*sides, jax_side("the step's matmuls alone", work, cores, "matmuls")]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=CUTS)
    parser.add_argument("--torch-python", help="of an environment with torch and numpy")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(f"{processor()}, jax {jax.__version__}, work {args.work}: {WORKS[args.work]}\n")
    sides = sides_of(args.work, args.cores, args.torch_python)
    results = measure(sides, num_rounds=args.rounds, num_steps=2)
    print(table(results, WORKS[args.work].tokens), "\n")
    peaks = (f"{result.side.name} {result.about['peak_mib']:.0f}" for result in results)
    print(f"Peak memory of the process, MiB: {', '.join(peaks)}")


if __name__ == "__main__":
    main()
