"""The planner's first choice against every config that two devices allow, measured.

    python -m benchmarks.planner.measure            # five models, half an hour on two quiet cores
    python -m benchmarks.planner.measure small      # one of them

Every config that fits runs a few steps, one config after the other. The planner's choice and the quickest
of the others then take turns, so that whatever slows the machine for a while slows all of them.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable

import jaxpar
from jaxpar import Config, DataConfig, ModelConfig, TrainConfig
from jaxpar.planning import Cost
from jaxpar.planning.planner import Ranking, describe
from jaxpar.planning.shares import make_stepper, step_seconds

# Deep and narrow, shallow and wide, a large vocabulary, a small batch, long sentences.
MODELS = {
    "small": Config(
        model=ModelConfig(4, 192, 192, 2688, dropout=0.0),
        data=DataConfig(batch_size=16, seq_len=32),
    ),
    "deep": Config(
        model=ModelConfig(8, 256, 256, 1152, dropout=0.0),
        data=DataConfig(batch_size=16, seq_len=32),
    ),
    "wide": Config(
        model=ModelConfig(2, 640, 640, 2688, dropout=0.0), data=DataConfig(batch_size=8, seq_len=16)
    ),
    "vocabulary": Config(
        model=ModelConfig(2, 256, 128, 9984, dropout=0.0),
        data=DataConfig(batch_size=16, seq_len=16),
    ),
    "long": Config(
        model=ModelConfig(4, 128, 128, 384, dropout=0.0), data=DataConfig(batch_size=8, seq_len=128)
    ),
}
FINALISTS, ROUNDS, STEPS = 5, 15, 4


def stepper(config: Config) -> Callable[[], float]:
    """Takes `STEPS` training steps; the mean of their seconds."""
    step = make_stepper(config, config.mesh.build())
    step()  # compiles
    return lambda: statistics.fmean(step() for _ in range(STEPS))


def measure_all(name: str, ranking: Ranking) -> dict[Cost, float]:
    """Seconds of a step of every config that fits, the least of a few."""
    measured = {}
    for cost in ranking.costs:
        mesh = cost.config.mesh.build()
        measured[cost] = min(step_seconds(cost.config, mesh, 2 * STEPS))
        assert cost.seconds is not None
        line = {"model": name, "config": describe(cost.config), "measured": measured[cost]}
        print(json.dumps({**line, "predicted": cost.seconds.total}), flush=True)
    return measured


def compete(name: str, ranking: Ranking, measured: dict[Cost, float]) -> str:
    """A row of the table: the planner's choice against the quickest of all others, taking turns."""
    choice = ranking.best
    others = sorted((cost for cost in measured if cost != choice), key=measured.__getitem__)
    finalists = [choice, *others[:FINALISTS]]
    runs = [stepper(cost.config) for cost in finalists]
    rounds = [[run() for run in runs] for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    best = medians.index(min(medians[1:]), 1)
    ratios = [row[0] / row[best] for row in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    errors = [abs(cost.seconds.total / measured[cost] - 1) for cost in measured if cost.seconds]
    return (
        f"| {name} | {len(measured)} | {describe(choice.config)} | {medians[0] * 1e3:.1f} "
        f"| {describe(finalists[best].config)} | {medians[best] * 1e3:.1f} "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {statistics.median(errors):.0%} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    names = parser.parse_args().models
    jaxpar.simulate_devices(2)
    train = TrainConfig(optimizer="sgd", clip_norm=0.0)
    rows = []
    for name in names:
        ranking = jaxpar.plan_here(dataclasses.replace(MODELS[name], train=train))
        print(f"{name}\n{ranking}\n", flush=True)
        rows.append(compete(name, ranking, measure_all(name, ranking)))
    print(
        "| model | configs | planner's choice | ms | the quickest other | ms | times as long (quartiles) "
        "| predicted: median error |\n|---|---:|---|---:|---|---:|---:|---:|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
