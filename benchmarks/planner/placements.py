"""The balanced placement against every other one of the same model, on two stages and two cores, measured.

python -m benchmarks.planner.placements [layers] [hidden] [vocabulary] [last | sharded]
"""

import argparse
import dataclasses
import statistics

import jaxpar
from benchmarks.planner.measure import SGD, STEPS, TRAIN
from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.lm import LM
from jaxpar.planning import time_steps
from jaxpar.step.setup import Setup

ROUNDS = 25


def main() -> None:
    """Prints the table, the balanced placement first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="?", type=int, default=6)
    parser.add_argument("hidden", nargs="?", type=int, default=192)
    parser.add_argument("vocabulary", nargs="?", type=int, default=2688)
    parser.add_argument("head", nargs="?", default="last", choices=["last", "sharded"])
    options = parser.parse_args()
    jaxpar.simulate_devices(2)
    hidden = options.hidden
    task = LM(
        options.layers, hidden, hidden, options.vocabulary, dropout=0.0, batch_size=16, seq_len=32,
        optimizer=SGD,
    )  # fmt: skip
    parallel = Parallel(MeshConfig(stage=2), PipelineConfig(num_chunks=4, head=options.head))
    partition = Setup.of(task, parallel).partition
    balanced = partition.placement
    others = [(n, options.layers - n) for n in range(1, options.layers)]
    placements = [balanced, *(p for p in others if p != balanced)]
    pipelines = [dataclasses.replace(parallel.pipeline, placement=p) for p in placements]
    setups = [
        Setup.of(task, dataclasses.replace(parallel, pipeline=pipeline), TRAIN)
        for pipeline in pipelines
    ]
    rounds = list(zip(*time_steps(setups, ROUNDS, STEPS), strict=True))
    print(
        f"{options.layers} layers of {hidden}, {options.vocabulary:,} words, head={options.head}: a head of "
        f"{sum(partition.costs.last) / sum(partition.costs.layers[0]):.2f} layers\n\n"
        "| placement | ms a step | times as long as balanced (quartiles) |\n|---|---:|---:|"
    )
    for number, placement in enumerate(placements):
        ratios = [row[number] / row[0] for row in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        median = statistics.median(row[number] for row in rounds)
        note = " (balanced)" * (placement == balanced)
        print(
            f"| {placement}{note} | {median * 1e3:.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"
        )


if __name__ == "__main__":
    main()
