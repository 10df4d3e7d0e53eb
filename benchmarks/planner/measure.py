"""The planner's choice against every other config that two devices allow, measured.

    python -m benchmarks.planner.measure                    # five models, an hour on two quiet cores
    python -m benchmarks.planner.measure lstm gru           # some of them
    python -m benchmarks.planner.measure lstm --log a.json  # goes on where it was stopped

The planner chooses as users have it: by arithmetic, then by running its finalists. Then every config that
fits runs a few steps, one config after the other, and the quickest six of them, with the choice, take turns,
so that whatever slows the machine for a while slows all of them.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

import jax

import jaxpar
from jaxpar import OptimizerConfig, TrainConfig
from jaxpar.lm import LM
from jaxpar.model.task import Task, find_task
from jaxpar.planning import describe, plan
from jaxpar.planning.running import time_steps
from jaxpar.step.setup import Setup

EXAMPLES = Path(__file__).parents[2] / "examples"
SGD = OptimizerConfig("sgd", warmup_steps=0)
TRAIN = TrainConfig(clip_norm=0.0)


def model(layers: int, hidden: int, rows: int, steps: int) -> Task:
    """A language model and its batch."""
    return LM(
        layers, hidden, hidden, dropout=0.0, batch_size=rows, seq_len=steps, optimizer=SGD
    ).resolve()


def example(spec: str, **sizes: int) -> Task:
    """A task of an example."""
    return find_task(f"{EXAMPLES}/{spec}")(**sizes, optimizer=SGD)


MODELS = {
    "lstm": lambda: model(4, 192, 16, 32),
    "gru": lambda: example("forecaster.py:Forecast", width=192),
    "transformer": lambda: example("transformer.py:Characters", width=128),
    "mixed": lambda: example("mixed.py:Digits", width=192),
    "images": lambda: example("hybrid.py:Digits", batch_size=192),
}
QUICKEST, ROUNDS, STEPS = 6, 15, 4


def row_of(name: str, log: Path) -> str:
    """A row of the table."""
    task = MODELS[name]()
    choice = plan(task, train=TRAIN).best
    ranked = [cost for cost in plan(task, train=TRAIN, num_finalists=0).fitting if cost.fits]
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {line["config"]: line["measured"] for line in lines if line["model"] == name}
    for cost in ranked:
        config = describe(cost.parallel)
        if config not in known:
            [seconds] = time_steps([Setup.of(*cost.settings)], 1, 2 * STEPS)
            known[config] = seconds[0]
            line = {"model": name, "config": config, "measured": known[config]}
            with log.open("a") as file:
                print(json.dumps({**line, "estimated": cost.seconds}), file=file, flush=True)
            jax.clear_caches()
    by_time = sorted(ranked, key=lambda cost: known[describe(cost.parallel)])
    others = [cost for cost in by_time if cost.parallel != choice.parallel][: QUICKEST - 1]
    setups = [Setup.of(*cost.settings) for cost in (choice, *others)]
    columns = time_steps(setups, ROUNDS, STEPS)
    medians = [statistics.median(column) for column in columns]
    best = medians.index(min(medians))
    rounds = [mine / theirs for mine, theirs in zip(columns[0], columns[best or 1], strict=True)]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    quickest = (choice, *others)[best]
    place = [cost.parallel for cost in ranked].index(quickest.parallel) + 1
    errors = [known[describe(cost.parallel)] / cost.seconds for cost in ranked]
    return (
        f"| {name} | {len(ranked)} | {describe(choice.parallel)} | {medians[0] * 1e3:.1f} "
        f"| {describe((choice, *others)[best or 1].parallel)} | {medians[best or 1] * 1e3:.1f} "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {place} of {len(ranked)} "
        f"| {min(errors):.1f} to {max(errors):.1f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of every config")
    options = parser.parse_args()
    jaxpar.simulate_devices(2)
    print(
        "| model | configs | planner's choice | ms | the quickest other | ms | times as long (quartiles) "
        "| the quickest, by arithmetic | measured / estimated |\n|---|---:|---|---:|---|---:|---:|---:|---:|"
    )
    for name in options.models:
        print(row_of(name, options.log), flush=True)


if __name__ == "__main__":
    main()
