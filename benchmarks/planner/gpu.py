"""A step on one GPU against what the planner says of it: by its data sheet, and by pieces measured on it.

    JAX_PLATFORMS=cuda,cpu python -m benchmarks.planner.gpu                   # all models
    JAX_PLATFORMS=cuda,cpu python -m benchmarks.planner.gpu --models lstm gru # some of them

Every model runs as one whole, and in units of a quarter of the batch.
"""

import argparse

import jax

from benchmarks.planner.measure import TRAIN, example, model
from jaxpar import Parallel, PipelineConfig
from jaxpar.planning import MACHINES, calibrate, measure_pieces, predict_step
from jaxpar.planning.planner import describe
from jaxpar.planning.shape import StepShape
from jaxpar.planning.shares import make_stepper
from jaxpar.timing import quickest

# Those of `benchmarks.single_device` that fill a GPU least and most, and three other kinds of layers.
MODELS = {
    "small lstm": model(4, 192, 192, 2688, 16, 32),
    "lstm": model(4, 2048, 2048, 9984, 128, 128),
    "gru": example("forecaster.py:Forecast", width=1024, batch_size=64),
    "transformer": example(
        "transformer.py:Characters", width=1024, num_heads=16, batch_size=64, seq_len=256
    ),
    "mixed": example("mixed.py:Digits", width=1024, batch_size=512),
}
NUM_MICROBATCHES = (1, 4)


def main() -> None:
    """Prints a row for each model and layout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sheet", default="h100", choices=list(MACHINES))
    options = parser.parse_args()
    here, sheet = calibrate(), MACHINES[options.sheet]
    print(here)
    print(f"| model | config | {sheet.name}'s sheet, ms | pieces, ms | measured, ms |")
    print("|---|---|---:|---:|---:|")
    for name in options.models:
        for M in NUM_MICROBATCHES:
            task = MODELS[name]
            parallel = Parallel("dp1", PipelineConfig(num_microbatches=M))
            settings = task, parallel, TRAIN
            run = make_stepper(*settings)
            before = quickest(run, 1.0)
            here = measure_pieces(here, [StepShape(*settings)])
            measured = (before + quickest(run, 1.0)) / 2
            costs = [predict_step(*settings, machine) for machine in (sheet, here)]
            said = [cost.seconds.total for cost in costs if cost.seconds is not None]
            row = " | ".join(f"{seconds * 1e3:.3g}" for seconds in (*said, measured))
            print(f"| {name} | {describe(parallel)} | {row} |", flush=True)
            print(*(cost.seconds for cost in costs), sep="\n", flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
