"""The balanced placement against every other one of the same model, on two stages and two cores, measured.

python -m benchmarks.planner.placements [layers] [hidden] [vocabulary] [last | sharded]
"""

import argparse
import dataclasses
import statistics

import jaxpar
from benchmarks.planner.measure import stepper
from jaxpar import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig

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
    config = Config(
        mesh=MeshConfig(stage=2),
        model=ModelConfig(options.layers, hidden, hidden, options.vocabulary, dropout=0.0),
        pipeline=PipelineConfig(num_chunks=4, head=options.head),
        data=DataConfig(batch_size=16, seq_len=32),
        train=TrainConfig(optimizer="sgd", clip_norm=0.0),
    )
    balanced = config.placement
    others = [(n, options.layers - n) for n in range(1, options.layers)]
    placements = [balanced, *(p for p in others if p != balanced)]
    runs = [
        stepper(
            dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, placement=p))
        )
        for p in placements
    ]
    rounds = [[run() for run in runs] for _ in range(ROUNDS)]
    print(
        f"{options.layers} layers of {hidden}, {options.vocabulary:,} words, head={options.head}: a head of "
        f"{config.last_cost:.2f} layers\n\n"
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
