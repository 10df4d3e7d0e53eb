"""What arithmetic says of a step on one GPU, what its compiler says, and what the GPU does.

JAX_PLATFORMS=cuda,cpu python -m benchmarks.planner.gpu
"""

import argparse

import jax

from benchmarks.planner.measure import TRAIN, example, model
from jaxpar import Parallel, PipelineConfig
from jaxpar.planning import compare, describe, estimate_step

# Those of `benchmarks.single_device` that fill a GPU least and most, and three other kinds of layers.
MODELS = {
    "small lstm": lambda: model(4, 192, 16, 32),
    "lstm": lambda: model(4, 2048, 128, 128),
    "gru": lambda: example("forecaster.py:Forecast", width=1024, batch_size=64),
    "transformer": lambda: example(
        "transformer.py:Characters", width=1024, num_heads=16, batch_size=64, seq_len=256
    ),
    "mixed": lambda: example("mixed.py:Digits", width=1024, batch_size=512),
}
NUM_MICROBATCHES = (1, 4)


def main() -> None:
    """Prints a row for each model and layout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    print("| model | config | by arithmetic, ms | measured | memory, compiled |")
    print("|---|---|---:|---:|---:|")
    for name in options.models:
        for M in NUM_MICROBATCHES:
            parallel = Parallel("dp1", PipelineConfig(num_microbatches=M))
            cost = compare(estimate_step(MODELS[name](), parallel, TRAIN))
            print(
                f"| {name} | {describe(parallel)} | {cost.estimated_seconds * 1e3:.3g} "
                f"| {cost.seconds * 1e3:.3g} | {cost.memory_text} |",
                flush=True,
            )
            jax.clear_caches()


if __name__ == "__main__":
    main()
