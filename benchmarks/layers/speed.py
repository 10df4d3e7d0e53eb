"""The training step of stacks of recurrent layers, side by side, and beside Flax's and PyTorch's.

python -m benchmarks.layers.speed --torch-python venv/bin/python [--width 1024 --steps 35 --rows 64]
"""

import argparse
import dataclasses

import jax

from benchmarks.layers.work import Work
from benchmarks.sides import Side, measure, processor, table

CORES = ((0,),)
OURS = {
    "jaxpar, nnx.GRUCell": "flax",
    "jaxpar, GRU": "gru",
    "jaxpar, LSTM": "lstm",
    "jaxpar, sLSTM": "slstm",
    "jaxpar, minGRU": "mingru",
    "jaxpar, RG-LRU": "rglru",
}


def sides_of(work: Work, torch_python: str | None) -> list[Side]:
    """All sides; the first is what the others are held against."""
    folder, sizes = "benchmarks.layers", work.to_argument()
    sides = [Side("flax, nnx.RNN(nnx.GRUCell)", ("-m", f"{folder}.flax_side", sizes), CORES)]
    sides += [
        Side(name, ("-m", f"{folder}.jaxpar_side", kind, sizes), CORES)
        for name, kind in OURS.items()
    ]
    if torch_python:
        sides += [
            Side(name, ("-m", f"{folder}.torch_side", kind, sizes), CORES, torch_python)
            for name, kind in (("torch.nn.GRU", "gru"), ("torch.nn.LSTM", "lstm"))
        ]
    return sides


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Work):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--torch-python", help="of an environment with torch and numpy")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    work = Work(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Work)})
    print(f"{processor()}, jax {jax.__version__}, {work}\n")
    results = measure(sides_of(work, args.torch_python), num_rounds=args.rounds, num_steps=2)
    print(table(results, work.rows * work.steps))
    ours, adapter = (
        next(result for result in results if result.side.name == f"jaxpar, {name}")
        for name in ("GRU", "nnx.GRUCell")
    )
    ratios = sorted(1 / ratio for ratio in adapter.ratios(ours))
    print(f"\nnnx.GRUCell takes {ratios[len(ratios) // 2]:.2f} times as long as GRU")


if __name__ == "__main__":
    main()
