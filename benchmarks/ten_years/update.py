"""Where the update runs, as MXNet's kvstore chose it: bytes of two devices, and times.

    python -m benchmarks.ten_years.update

Bytes are those of the compiled step. Steps take turns, in one process.
"""

import statistics

import jaxpar
from jaxpar import Parallel
from jaxpar.analysis import inspect_step
from jaxpar.planning.running import time_steps
from jaxpar.step.setup import Setup

MXNET = {"replicated": "device", "sharded": "dist_sync", "host": "local"}
ROUNDS = 7


def main() -> None:
    """Prints the table."""
    jaxpar.simulate_devices(2)
    setups = [Setup.of(jaxpar.lm.LM(), Parallel("dp2", update=update)) for update in MXNET]
    seconds = time_steps(setups, ROUNDS)
    for (update, kvstore), setup, own in zip(MXNET.items(), setups, seconds, strict=True):
        report = inspect_step(setup)
        assert report.memory is not None
        held = report.memory.purposes
        sent = {"gradients": 0, "parameters": 0}
        for each in report.collectives:
            sent["parameters" if each.op == "all-gather" else "gradients"] += each.sent_bytes
        ratios = statistics.quantiles(a / b for a, b in zip(own, seconds[0], strict=True))
        print(
            kvstore, f"--update {update}",
            *(f"{name} {held.get(name, 0) / 1e6:.1f} MB" for name in ("parameters", "optimizer state")),
            *(f"sent, {name} {size / 1e6:.1f} MB" for name, size in sent.items()),
            f"{statistics.median(own) * 1e3:.0f} ms",
            "{1:.2f} ({0:.2f} to {2:.2f}) of the first".format(*ratios),
            sep="  ",
        )  # fmt: skip


if __name__ == "__main__":
    main()
