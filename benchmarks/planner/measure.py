"""The planner's first choice against every config that two devices allow, measured.

    python -m benchmarks.planner.measure                    # nine models, an hour on two quiet cores
    python -m benchmarks.planner.measure small gru          # some of them
    python -m benchmarks.planner.measure small --log a.json # goes on where it was stopped
    python -m benchmarks.planner.measure mixed --all        # hopeless configs as well
    python -m benchmarks.planner.measure --times small gru  # predicted against measured, for dp1, dp2, pp2

Every config runs a few steps, one config after the other, but for those that are predicted to take more than
twice as long as the choice. The planner's choice and the quickest of the others then take turns, so that
whatever slows the machine for a while slows all of them. With --times all that a prediction is made of is
measured anew between two measurements of the step, three times; see `predicted_and_measured`.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
from pathlib import Path

import jax

import jaxpar
from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, TrainConfig
from jaxpar.planning import Cost, calibrate, measure_pieces, plan_here, predict_step
from jaxpar.planning.planner import Ranking, describe
from jaxpar.planning.shape import StepShape
from jaxpar.planning.shares import make_stepper
from jaxpar.task import Task, find_task
from jaxpar.tasks.images import Images
from jaxpar.tasks.lm import LM
from jaxpar.timing import quickest, take_turns

EXAMPLES = Path(__file__).parents[2] / "examples"

SGD = OptimizerConfig("sgd", warmup_steps=0)
TRAIN = TrainConfig(clip_norm=0.0)


def model(layers: int, hidden: int, embed: int, vocab: int, rows: int, steps: int) -> Task:
    """A language model and its batch."""
    return LM(
        layers, hidden, embed, vocab, dropout=0.0, batch_size=rows, seq_len=steps, optimizer=SGD
    )


def example(spec: str, **sizes: int) -> Task:
    """A task of an example."""
    return find_task(f"{EXAMPLES}/{spec}")(**sizes, optimizer=SGD)


# Deep and narrow, shallow and wide, a large vocabulary, a small batch, long sentences.
MODELS = {
    "small": model(4, 192, 192, 2688, 16, 32),
    "deep": model(8, 256, 256, 1152, 16, 32),
    "wide": model(2, 640, 640, 2688, 8, 16),
    "vocabulary": model(2, 256, 128, 9984, 16, 16),
    "long": model(4, 128, 128, 384, 8, 128),
    "gru": example("forecaster.py:Forecast", width=192),
    "transformer": example("transformer.py:Characters", width=128),
    "mixed": example("mixed.py:Digits", width=192),
    "images": Images(batch_size=192, dropout=0.0, optimizer=SGD),
}
FINALISTS, ROUNDS, STEPS = 5, 15, 4
HOPELESS = 2.0  # times as long as the choice, as predicted
TIMES, STEADY, ROUNDS_AT_MOST = 3, 0.1, 6
TIMED = (("dp1", 1, 1), ("dp2", 1, 1), ("pp2", 4, 1))  # mesh, M, K
UPDATES = ("replicated", "sharded", "host")


def measure_all(
    name: str, ranking: Ranking, log: Path, hopeless: float = HOPELESS
) -> dict[Cost, float]:
    """Seconds of a step of every config that is not hopeless, the least of a few.

    Args:
      log: of a line for each; what is in it is not measured again.
      hopeless: is one that is predicted to take more than this many times as long as the choice.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {line["config"]: line["measured"] for line in lines if line["model"] == name}
    measured = {}
    for cost in ranking.costs:
        config = describe(cost.parallel)
        assert cost.seconds
        assert ranking.best.seconds
        if len(measured) > 1 and cost.seconds.total > hopeless * ranking.best.seconds.total:
            continue
        if config not in known:
            [seconds] = take_turns([make_stepper(*cost.settings)], 2 * STEPS)
            known[config] = min(seconds)
            line = {"model": name, "config": config, "measured": known[config]}
            with log.open("a") as file:
                print(json.dumps({**line, "predicted": cost.seconds.total}), file=file, flush=True)
        measured[cost] = known[config]
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


def predicted_and_measured(task: Task, parallel: Parallel) -> tuple[float, float, list[float]]:
    """Seconds of a step, predicted and measured, and how many times as long the prediction is, in each round.

    A round measures the step, then all that the prediction is made of, then the step again, and sets the
    prediction against the mean of the two. A machine whose speed changes within a round by more than `STEADY`
    is not the one that was asked about: such a round is done again, up to `ROUNDS_AT_MOST` in all; the
    steadiest count.
    """
    settings = task, parallel, TRAIN
    run, rounds = make_stepper(*settings), list[tuple[float, float, float]]()
    before = quickest(run, 1.0, at_least=STEPS)
    while sum(uneven <= STEADY for uneven, *_ in rounds) < TIMES and len(rounds) < ROUNDS_AT_MOST:
        known = measure_pieces(calibrate(), [StepShape(*settings)])
        after = quickest(run, 1.0, at_least=STEPS)
        cost = predict_step(*settings, known)
        assert cost.seconds is not None
        rounds.append((abs(after / before - 1), cost.seconds.total, (before + after) / 2))
        before = after
    _, predicted, measured = zip(*sorted(rounds)[:TIMES], strict=True)
    ratios = [said / took for said, took in zip(predicted, measured, strict=True)]
    return statistics.median(predicted), statistics.median(measured), ratios


def times(names: list[str], only: list[str]) -> None:
    """Prints what is predicted beside what is measured.

    Args:
      only: configs; all, if there are none.
    """
    print(
        "| model | config | predicted, ms | measured, ms | difference (of rounds) |\n"
        "|---|---|---:|---:|---:|"
    )
    for name in names:
        for shape, M, K in TIMED:
            mesh = MeshConfig.parse(shape)
            mesh = dataclasses.replace(mesh, devices=tuple(range(mesh.num_devices)))
            for update in UPDATES if mesh.data > 1 else UPDATES[:1]:
                pipeline = PipelineConfig(num_microbatches=M, num_chunks=K)
                parallel = Parallel(mesh, pipeline, update=update)
                if only and describe(parallel) not in only:
                    continue
                said, took, ratios = predicted_and_measured(MODELS[name], parallel)
                print(
                    f"| {name} | {describe(parallel)} | {said * 1e3:.1f} | {took * 1e3:.1f} "
                    f"| {statistics.median(ratios) - 1:+.0%} "
                    f"({min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%}) |",
                    flush=True,
                )
                jax.clear_caches()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--times", action="store_true", help="predicted against measured")
    parser.add_argument("--only", nargs="*", default=[], help="with --times: configs, such as dp2")
    parser.add_argument("--all", action="store_true", help="measure hopeless configs as well")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of every config")
    options = parser.parse_args()
    names = options.models
    jaxpar.simulate_devices(2)
    if options.times:
        times(names, options.only)
        return
    rows = []
    for name in names:
        ranking = plan_here(MODELS[name], train=TRAIN)
        print(f"{name}\n{ranking}\n", flush=True)
        hopeless = math.inf if options.all else HOPELESS
        rows.append(compete(name, ranking, measure_all(name, ranking, options.log, hopeless)))
    print(
        "| model | configs | planner's choice | ms | the quickest other | ms | times as long (quartiles) "
        "| predicted: median error |\n|---|---:|---|---:|---|---:|---:|---:|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
