"""How much longer a checkpoint takes to save and to restore with checksums than without.

    python -m benchmarks.checkpoints.speed

The same state is saved and restored, with and without in turn; a save is waited for to its end, which a run
does not. All values are drawn, so that nothing is gained by compression. Ratios are medians (quartiles) of
the rounds, and that of the quickest. Then, what hashes cost.
"""

import argparse
import contextlib
import functools
import hashlib
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jaxpar import Parallel, init_state
from jaxpar.lm import LM
from jaxpar.mesh import MeshConfig
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.training import checkpoint
from jaxpar.training.checkpoint import Checkpoints

HIDDEN_SIZES = {"100 MB": 360, "1 GB": 1140}  # of 8 layers, with Adam
SIDES = ("without", "with")
PARALLEL = Parallel(MeshConfig(devices=(0,)))
HASHES: dict[str, Callable[[bytes], object]] = {
    "XXH3, 128 bits (xxhash)": lambda content: xxhash.xxh3_128(content).digest(),
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

    def sizes(folder: Path, names: list[str]) -> dict[str, str]:
        return {name: f"{(folder / name).stat().st_size} " for name in names}

    with mock.patch.object(checkpoint, "checksums", sizes):
        yield


def clocks() -> np.ndarray:
    """On the wall, and of the CPU time of this process with all its threads; in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def seconds(task: LM, state: TrainState, side: str) -> np.ndarray:
    """Of a save and of a restore, [2, clocks]."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if side == "without":
            stack.enter_context(without_checksums())
        checkpoints = stack.enter_context(Checkpoints(folder, Setup.of(task, PARALLEL)))
        start = clocks()
        checkpoints.save(state)
        checkpoints.close()
        saved = clocks()
        jax.block_until_ready(checkpoints.restore())
        return np.array([saved - start, clocks() - saved])


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    logging.getLogger("jaxpar").setLevel(logging.ERROR)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, medians of {args.rounds} rounds\n")
    print("| state | | without, s (CPU s) | with, s (CPU s) | of quickest | ratio | of CPU time |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, size in HIDDEN_SIZES.items():
        task = LM(8, size, size, vocab_size=384, num_words=384, batch_size=8)
        state = random_state(task)
        rounds = []
        for number in range(-1, args.rounds):  # the first is to warm up
            sides = SIDES[:: 1 if number % 2 else -1]
            times = {side: seconds(task, state, side) for side in sides}
            if number >= 0:
                rounds.append([times[side] for side in SIDES])
        for what, part in zip(
            ("save", "restore"), np.moveaxis(np.array(rounds), 2, 0), strict=True
        ):
            cells = ["{:.2f} ({:.2f})".format(*clock) for clock in np.median(part, axis=0)]
            quickest = np.min(part[..., 0], axis=0)
            cells.append(f"{quickest[1] / quickest[0]:.3f}")
            for low, middle, high in np.quantile(
                part[:, 1] / part[:, 0], (0.25, 0.5, 0.75), axis=0
            ).T:
                cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
            print("|", " | ".join([name, what, *cells]), "|", flush=True)
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
