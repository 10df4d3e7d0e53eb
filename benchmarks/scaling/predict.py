"""Strong and weak scaling by arithmetic: the best config of every number of H100s, up to 1,024.

python -m benchmarks.scaling.predict [--picture scaling.png]
taskset -c 0 python -m benchmarks.scaling.predict --clock  # how long one core takes for the most devices
"""

import argparse
import importlib.util
import time
from collections.abc import Sequence

from jaxpar.planning import Ranking, StepCost, describe, plan
from jaxpar.tasks.lm import LM

DEVICES = [2**n for n in range(11)]
ROWS_STRONG, ROWS_A_DEVICE, STEPS = 2048, 16, 256


def curve(rows: Sequence[int]) -> list[StepCost | None]:
    """The best for every number of devices, with so many rows in the batch; None if nothing fits."""
    rankings = [ranking_of(n, batch_size) for n, batch_size in zip(DEVICES, rows, strict=True)]
    return [ranking.best if ranking.fitting else None for ranking in rankings]


def ranking_of(num_devices: int, rows: int) -> Ranking:
    """Of hosts of eight."""
    machine = f"h100:1x{max(num_devices // 8, 1)}x{min(num_devices, 8)}"
    return plan(model(rows), machine=machine, num_finalists=0)


def model(rows: int) -> LM:
    """With so many rows in the batch."""
    return LM(16, 4096, 4096, vocab_size=384 * 84, dropout=0.0, batch_size=rows, seq_len=STEPS)


def clock() -> str:
    """Seconds of a core that the most devices take: the first time, and again."""
    spent, number = [], 0
    for _ in range(2):
        start = time.process_time()
        ranking = ranking_of(DEVICES[-1], ROWS_STRONG)
        spent.append(time.process_time() - start)
        number = len(ranking.fitting) + len(ranking.refused)
    return (
        f"{DEVICES[-1]:,} devices: {number:,} configs ranked in {spent[0]:.1f} s of CPU time, "
        f"{spent[1]:.1f} s once the model is known"
    )


def table(costs: Sequence[StepCost | None]) -> str:
    """Markdown; a star marks where the best mesh uses other axes than with half the devices."""
    lines = [
        "| devices | best | step | tokens/s | a device, of its best | matmuls | bubble | sending | memory |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rates = [
        _tokens_per_second(cost) / n if cost else 0.0
        for n, cost in zip(DEVICES, costs, strict=True)
    ]
    before: set[str] = set()
    for num_devices, cost, rate in zip(DEVICES, costs, rates, strict=True):
        if cost is None:
            lines.append(f"| {num_devices:,} | nothing fits | | | | | | | |")
            continue
        parts, axes = cost.parts, {a for a, size in cost.parallel.mesh.sizes.items() if size > 1}
        star, before = " *" if before and axes != before else "", axes
        lines.append(
            f"| {num_devices:,} | {describe(cost.parallel)}{star} | {cost.seconds * 1e3:,.0f} ms "
            f"| {_tokens_per_second(cost):,.0f} | {rate / max(rates):.0%} "
            f"| {(parts['layers'] + parts['head']) / cost.seconds:.0%} "
            f"| {parts['bubble'] / cost.seconds:.0%} | {parts['sending'] / cost.seconds:.0%} "
            f"| {cost.memory_bytes / 1e9:.1f} GB |"
        )
    return "\n".join(lines)


def draw(curves: dict[str, Sequence[StepCost | None]], path: str) -> None:
    """Tokens a second over devices, both axes logarithmic, beside a straight line."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4))).subplots()
    for name, costs in curves.items():
        points = [(n, _tokens_per_second(c)) for n, c in zip(DEVICES, costs, strict=True) if c]
        axes.loglog(*zip(*points, strict=True), marker="o", label=name)
        first, rate = points[0]
        axes.loglog(DEVICES, [rate * n / first for n in DEVICES], color="grey", lw=0.7)
    axes.set(xlabel="devices", ylabel="tokens a second (predicted)")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def _tokens_per_second(cost: StepCost) -> float:
    return cost.settings.task.batch_size * STEPS / cost.seconds


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture")
    parser.add_argument("--clock", action="store_true", help="how long the planner takes")
    options = parser.parse_args()
    if options.clock:
        print(clock())
        return
    curves = {
        f"strong: {ROWS_STRONG:,} rows in all": [ROWS_STRONG] * len(DEVICES),
        f"weak: {ROWS_A_DEVICE} rows a device": [ROWS_A_DEVICE * n for n in DEVICES],
    }
    costs = {name: curve(rows) for name, rows in curves.items()}
    for name, found in costs.items():
        print(f"{name}\n\n{table(found)}\n")
    if options.picture and importlib.util.find_spec("matplotlib"):
        draw(costs, options.picture)


if __name__ == "__main__":
    main()
