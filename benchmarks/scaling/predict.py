"""Strong and weak scaling by the cost model: the best config of every number of devices, up to 1,024.

python -m benchmarks.scaling.predict [machine] [--picture scaling.png]
"""

import argparse
import importlib.util
from collections.abc import Sequence

from jaxpar.planning import Cost, find_machine, plan
from jaxpar.planning.planner import describe
from jaxpar.planning.shape import shapes_of
from jaxpar.tasks.lm import LM

DEVICES = [2**n for n in range(11)]
ROWS_STRONG, ROWS_A_DEVICE, STEPS = 2048, 16, 256


def curve(machine: str, rows: Sequence[int]) -> list[Cost | None]:
    """The best for every number of devices, with so many rows in the batch; None if nothing fits."""
    hardware, best = find_machine(machine), []
    for num_devices, batch_size in zip(DEVICES, rows, strict=True):
        task = LM(
            16, 4096, 4096, vocab_size=384 * 84, dropout=0.0, batch_size=batch_size, seq_len=STEPS
        )
        ranking = plan(task, num_devices=num_devices, hardware=hardware)
        best.append(ranking.best if ranking.costs else None)
    return best


def table(costs: Sequence[Cost | None]) -> str:
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
        if cost is None or cost.seconds is None:
            lines.append(f"| {num_devices:,} | nothing fits | | | | | | | |")
            continue
        s, axes = cost.seconds, {a for a, size in cost.parallel.mesh.sizes.items() if size > 1}
        star, before = " *" if before and axes != before else "", axes
        lines.append(
            f"| {num_devices:,} | {describe(cost.parallel)}{star} | {s.total * 1e3:,.0f} ms "
            f"| {_tokens_per_second(cost):,.0f} | {rate / max(rates):.0%} "
            f"| {(s.layers + s.head) / s.total:.0%} | {s.bubble / s.total:.0%} "
            f"| {s.sending / s.total:.0%} | {cost.memory.total / 1e9:.1f} GB |"
        )
    return "\n".join(lines)


def draw(curves: dict[str, Sequence[Cost | None]], path: str) -> None:
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


def _tokens_per_second(cost: Cost) -> float:
    assert cost.seconds is not None
    return shapes_of(cost.settings.task).counted / cost.seconds.total


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine", nargs="?", default="h100")
    parser.add_argument("--picture")
    options = parser.parse_args()
    curves = {
        f"strong: {ROWS_STRONG:,} rows in all": [ROWS_STRONG] * len(DEVICES),
        f"weak: {ROWS_A_DEVICE} rows a device": [ROWS_A_DEVICE * n for n in DEVICES],
    }
    costs = {name: curve(options.machine, rows) for name, rows in curves.items()}
    for name, found in costs.items():
        print(f"{name}\n\n{table(found)}\n")
    if options.picture and importlib.util.find_spec("matplotlib"):
        draw(costs, options.picture)


if __name__ == "__main__":
    main()
