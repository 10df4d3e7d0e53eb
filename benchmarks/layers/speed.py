"""The training step of stacks of recurrent layers, side by side, and beside Flax's and PyTorch's.

python -m benchmarks.layers.speed --torch-python venv/bin/python [--width 1024 --steps 35 --rows 64]
"""

import argparse
import dataclasses

import jax

from benchmarks.layers.work import Work
from benchmarks.sides import Side, measure, processor, table

CORES = ((0,),)
BASELINE, ADAPTER, GRU = "flax, nnx.RNN(nnx.GRUCell)", "jaxpar, nnx.GRUCell", "jaxpar, GRU"
JAXPAR = {
    ADAPTER: "flax",
    GRU: "gru",
    "jaxpar, LSTM": "lstm",
    "jaxpar, sLSTM": "slstm",
    "jaxpar, minGRU": "mingru",
    "jaxpar, RG-LRU": "rglru",
}
TORCH = {"torch.nn.GRU": "gru", "torch.nn.LSTM": "lstm"}
# What `jaxpar.simulate_devices` sets, for every side: memory that a step frees is there for the next.
KEEPS_MEMORY = (
    ("MALLOC_MMAP_MAX_", "0"),
    ("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1)),
    ("MALLOC_ARENA_MAX", "1"),
)


def sides_of(work: Work, torch_python: str | None, env: tuple[tuple[str, str], ...]) -> list[Side]:
    """All sides; the first is what the others are held against."""
    folder, sizes = "benchmarks.layers", work.to_argument()

    def side(name: str, module: str, *kind: str, **options: str) -> Side:
        return Side(name, ("-m", f"{folder}.{module}", *kind, sizes), CORES, env=env, **options)

    sides = [side(BASELINE, "flax_side")]
    sides += [side(name, "jaxpar_side", kind) for name, kind in JAXPAR.items()]
    if torch_python:
        sides += [
            side(name, "torch_side", kind, python=torch_python) for name, kind in TORCH.items()
        ]
    return sides


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Work):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--torch-python", help="of an environment with torch and numpy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sides", nargs="+", help="parts of the names of sides; else all")
    parser.add_argument(
        "--returns-memory", action="store_true", help="with glibc's own settings, on every side"
    )
    args = parser.parse_args()
    work = Work(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Work)})
    sides = sides_of(work, args.torch_python, () if args.returns_memory else KEEPS_MEMORY)
    chosen = [s for s in sides[1:] if not args.sides or any(part in s.name for part in args.sides)]
    print(f"{processor()}, jax {jax.__version__}, {work}\n")
    results = measure([sides[0], *chosen], num_rounds=args.rounds, num_steps=2)
    print(table(results, work.rows * work.steps))
    of = {result.side.name: result for result in results}
    if ADAPTER in of and GRU in of:
        ratios = sorted(1 / ratio for ratio in of[ADAPTER].ratios(of[GRU]))
        print(f"\nnnx.GRUCell takes {ratios[len(ratios) // 2]:.2f} times as long as GRU")


if __name__ == "__main__":
    main()
