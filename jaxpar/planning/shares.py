"""Shares of a batch for devices that differ: measured on the user's own step."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.data.streams import Batch
from jaxpar.state import init_state
from jaxpar.step import batch_sharding, make_train_step


def propose_shares(seconds: Sequence[float], max_parts: int = 8) -> tuple[int, ...]:
    """The whole numbers, none above `max_parts`, that let all groups end as nearly together as can be.

    Args:
      seconds: that each data-parallel group needs for the same work.
    Raises:
      ValueError: a time is not positive, or there is none.
    """
    if not seconds or min(seconds) <= 0:
        raise ValueError(f"seconds={tuple(seconds)}: give a time above 0 for every group")
    speeds = np.reciprocal(np.asarray(seconds, np.float64))

    def wasted(shares: np.ndarray) -> float:
        """Share of the groups' time that the slowest makes them wait."""
        ends = shares / speeds
        return 1 - float(ends.mean() / ends.max())

    candidates = [
        np.maximum(np.rint(speeds / speeds.max() * most), 1).astype(int)
        for most in range(1, max_parts + 1)
    ]
    return tuple(min(candidates, key=lambda shares: round(wasted(shares), 3)).tolist())


def measure_groups(config: Config, mesh: Mesh, *, num_steps: int = 3) -> list[float]:
    """Seconds of a training step of each data-parallel group by itself, all on as many rows.

    Every group is measured with its own devices only, with random tokens and a state of its own, one
    group after the other.

    Args:
      num_steps: measured after one to warm up; the median counts.
    Raises:
      ValueError: the config does not fit the mesh.
    """
    config.check()
    rows = config.data.batch_size // sum(config.shares)
    data = dataclasses.replace(config.data, batch_size=rows, shares=None)
    seconds = []
    for devices in mesh.devices.reshape(config.mesh.data, -1):
        ids = tuple(jax.devices().index(device) for device in devices)
        alone = dataclasses.replace(
            config, data=data, mesh=dataclasses.replace(config.mesh, data=1, devices=ids)
        )
        own_mesh = alone.mesh.build()
        seconds.append(statistics.median(step_seconds(alone, own_mesh, num_steps)))
    return seconds


def step_seconds(config: Config, mesh: Mesh, num_steps: int) -> list[float]:
    """Of training steps on random tokens with a state of their own, after one that compiles.

    Args:
      config: with `model.vocab_size` set.
    Raises:
      ValueError: the config does not fit the mesh.
    """
    step = make_stepper(config, mesh)
    return [step() for _ in range(num_steps + 1)][1:]


def make_stepper(config: Config, mesh: Mesh) -> Callable[[], float]:
    """A function that takes a training step on random tokens, with a state of its own; its seconds.

    Args:
      config: with `model.vocab_size` set.
    Raises:
      ValueError: the config does not fit the mesh.
    """
    state, train_step = init_state(config, mesh), make_train_step(config, mesh)
    shape = (config.data.batch_size, config.data.seq_len)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size or 1, shape, np.int32)
    tokens = jax.device_put(tokens, batch_sharding(mesh, config))

    def step() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = train_step(state, Batch(tokens, tokens, True))
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    return step
