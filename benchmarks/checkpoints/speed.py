"""How much longer a checkpoint takes to save and to restore with checksums than without.

    python -m benchmarks.checkpoints.speed

The same state is saved and restored, with and without in turn; a save is waited for to its end, which a run
does not. All values are drawn, so that nothing is gained by compression. Then, what hashes cost.
"""

import argparse
import contextlib
import functools
import hashlib
import logging
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from jaxpar import Parallel, init_state
from jaxpar.mesh import MeshConfig
from jaxpar.state import TrainState
from jaxpar.tasks.lm import LM
from jaxpar.training import checkpoint
from jaxpar.training.checkpoint import Checkpoints

HIDDEN_SIZES = {"100 MB": 360, "1 GB": 1140}  # of 8 layers, with Adam
SIDES = ("without", "with")
PARALLEL = Parallel(MeshConfig(devices=(0,)))
HASHES: dict[str, Callable[[bytes], object]] = {
    "CRC-32 (zlib)": zlib.crc32,
    "SHA-256 (OpenSSL)": hashlib.sha256,
    "BLAKE2b": hashlib.blake2b,
    "MD5 (OpenSSL)": hashlib.md5,
}
HASHED_BYTES = 1 << 28


def random_state(task: LM) -> TrainState:
    """A state whose every float is drawn."""
    key = jax.random.key(0)

    def draw(leaf: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.random.normal(key, leaf.shape, leaf.dtype) if is_float else leaf

    return jax.jit(functools.partial(jax.tree.map, draw))(init_state(task, PARALLEL))


@contextlib.contextmanager
def without_checksums():
    """Checkpoints are written and read as if there were none: their files have sizes alone."""

    def sizes(folder: Path, names: list[str]) -> dict[str, tuple[int, str]]:
        return {name: ((folder / name).stat().st_size, "") for name in names}

    with mock.patch.object(checkpoint, "checksums", sizes):
        yield


def seconds(task: LM, state: TrainState, side: str) -> tuple[float, float]:
    """Of a save and of a restore."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if side == "without":
            stack.enter_context(without_checksums())
        checkpoints = stack.enter_context(Checkpoints(folder, task, PARALLEL, keep=1, files={}))
        start = time.perf_counter()
        checkpoints.save(state)
        checkpoints.latest_step()
        saved = time.perf_counter()
        jax.block_until_ready(checkpoints.restore(PARALLEL.mesh.build()))
        return saved - start, time.perf_counter() - saved


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    logging.getLogger("jaxpar").setLevel(logging.ERROR)  # of checkpoints without checksums
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, medians of {args.rounds} rounds\n")
    print("| state | | without, s | with, s | ratio (quartiles) |\n|---|---|---:|---:|---:|")
    for name, size in HIDDEN_SIZES.items():
        task = LM(8, size, size, vocab_size=384, num_words=384, batch_size=8)
        state = random_state(task)
        rounds = []
        for number in range(-1, args.rounds):  # the first is to warm up
            sides = SIDES[:: 1 if number % 2 else -1]
            times = {side: seconds(task, state, side) for side in sides}
            if number >= 0:
                rounds.append(times)
        for part, what in enumerate(("save", "restore")):
            without, with_ = (
                statistics.median(times[side][part] for times in rounds) for side in SIDES
            )
            ratios = [times["with"][part] / times["without"][part] for times in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            spread = f"{middle:.3f} ({low:.3f} to {high:.3f})"
            print(f"| {name} | {what} | {without:.3f} | {with_:.3f} | {spread} |", flush=True)
    print("\n| one core | GB/s |\n|---|---:|")
    content = os.urandom(HASHED_BYTES)
    for name, function in HASHES.items():
        times = []
        for _ in range(3):
            start = time.perf_counter()
            function(content)
            times.append(time.perf_counter() - start)
        print(f"| {name} | {HASHED_BYTES / min(times) / 1e9:.2f} |")


if __name__ == "__main__":
    main()
