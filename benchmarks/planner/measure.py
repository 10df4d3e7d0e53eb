"""The planner's first choice against every config that two devices allow, measured.

    python -m benchmarks.planner.measure            # five models, half an hour on two quiet cores
    python -m benchmarks.planner.measure small      # one of them

Every config that fits runs a few steps, one config after the other. The planner's choice and the quickest
of the others then take turns, so that whatever slows the machine for a while slows all of them.
"""

import argparse
import json
import statistics

import jaxpar
from jaxpar import OptimizerConfig, TrainConfig
from jaxpar.planning import Cost, plan_here
from jaxpar.planning.planner import Ranking, describe
from jaxpar.planning.shares import make_stepper
from jaxpar.tasks.lm import LM
from jaxpar.timing import take_turns

SGD = OptimizerConfig("sgd", warmup_steps=0)
TRAIN = TrainConfig(clip_norm=0.0)


def model(layers: int, hidden: int, embed: int, vocab: int, rows: int, steps: int) -> LM:
    """A language model and its batch."""
    return LM(
        layers, hidden, embed, vocab, dropout=0.0, batch_size=rows, seq_len=steps, optimizer=SGD
    )


# Deep and narrow, shallow and wide, a large vocabulary, a small batch, long sentences.
MODELS = {
    "small": model(4, 192, 192, 2688, 16, 32),
    "deep": model(8, 256, 256, 1152, 16, 32),
    "wide": model(2, 640, 640, 2688, 8, 16),
    "vocabulary": model(2, 256, 128, 9984, 16, 16),
    "long": model(4, 128, 128, 384, 8, 128),
}
FINALISTS, ROUNDS, STEPS = 5, 15, 4


def measure_all(name: str, ranking: Ranking) -> dict[Cost, float]:
    """Seconds of a step of every config that fits, the least of a few."""
    measured = {}
    for cost in ranking.costs:
        [seconds] = take_turns([make_stepper(*cost.settings)], 2 * STEPS)
        measured[cost] = min(seconds)
        assert cost.seconds is not None
        line = {"model": name, "config": describe(cost.parallel), "measured": measured[cost]}
        print(json.dumps({**line, "predicted": cost.seconds.total}), flush=True)
    return measured


def compete(name: str, ranking: Ranking, measured: dict[Cost, float]) -> str:
    """A row of the table: the planner's choice against the quickest of all others, taking turns."""
    choice = ranking.best
    others = sorted((cost for cost in measured if cost != choice), key=measured.__getitem__)
    finalists = [choice, *others[:FINALISTS]]
    runs = [make_stepper(*cost.settings) for cost in finalists]
    columns = take_turns(runs, ROUNDS, times=STEPS)
    medians = [statistics.median(column) for column in columns]
    best = medians.index(min(medians[1:]), 1)
    ratios = [mine / theirs for mine, theirs in zip(columns[0], columns[best], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    errors = [abs(cost.seconds.total / measured[cost] - 1) for cost in measured if cost.seconds]
    return (
        f"| {name} | {len(measured)} | {describe(choice.parallel)} | {medians[0] * 1e3:.1f} "
        f"| {describe(finalists[best].parallel)} | {medians[best] * 1e3:.1f} "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {statistics.median(errors):.0%} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    names = parser.parse_args().models
    jaxpar.simulate_devices(2)
    rows = []
    for name in names:
        ranking = plan_here(MODELS[name], train=TRAIN)
        print(f"{name}\n{ranking}\n", flush=True)
        rows.append(compete(name, ranking, measure_all(name, ranking)))
    print(
        "| model | configs | planner's choice | ms | the quickest other | ms | times as long (quartiles) "
        "| predicted: median error |\n|---|---:|---|---:|---|---:|---:|---:|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
