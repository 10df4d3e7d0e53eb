"""Strong and weak scaling by the cost model: the best config of every number of devices, up to 1,024.

python -m benchmarks.scaling.predict [machine] [--picture scaling.png]
taskset -c 0 python -m benchmarks.scaling.predict [machine] --clock  # how long one core takes for the largest
"""

import argparse
import importlib.util
import time
from collections.abc import Sequence

from jaxpar.planning import Cost, find_machine, plan
from jaxpar.planning.planner import NUM_COMPILED, describe
from jaxpar.planning.shape import shapes_of
from jaxpar.tasks.lm import LM

DEVICES = [2**n for n in range(11)]
ROWS_STRONG, ROWS_A_DEVICE, STEPS = 2048, 16, 256


def curve(machine: str, rows: Sequence[int]) -> list[Cost | None]:
    """The best for every number of devices, with so many rows in the batch; None if nothing fits."""
    hardware, best = find_machine(machine), []
    for num_devices, batch_size in zip(DEVICES, rows, strict=True):
        ranking = plan(model(batch_size), num_devices=num_devices, hardware=hardware)
        best.append(ranking.best if ranking.costs else None)
    return best


def model(rows: int) -> LM:
    """With so many rows in the batch."""
    return LM(16, 4096, 4096, vocab_size=384 * 84, dropout=0.0, batch_size=rows, seq_len=STEPS)


def clock(machine: str) -> str:
    """Seconds of a core that the most devices take: the first time, again, and for the shortlist."""
    hardware, spent, ranking = find_machine(machine), [], None
    for num_compiled in (0, 0, None):
        start = time.process_time()
        ranking = plan(
            model(ROWS_STRONG), None, None, DEVICES[-1], hardware, num_compiled=num_compiled
        )
        spent.append(time.process_time() - start)
    first, again, whole = spent
    assert ranking is not None
    return (
        f"{DEVICES[-1]:,} devices: {ranking.num_configs:,} configs ranked in {first:.1f} s of CPU time, "
        f"{again:.1f} s once the model is known; the best of {NUM_COMPILED} meshes compiled in "
        f"{whole - again:.1f} s"
    )


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
            f"| {s.sending / s.total:.0%} | {cost.memory_bytes / 1e9:.1f} GB |"
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("machine", nargs="?", default="h100")
    parser.add_argument("--picture")
    parser.add_argument("--clock", action="store_true", help="how long the planner takes")
    options = parser.parse_args()
    if options.clock:
        print(clock(options.machine))
        return
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
