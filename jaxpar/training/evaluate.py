"""Evaluation, exact on any mesh: every token of a text but the first, and every image, counts once."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxpar.axes import DATA
from jaxpar.config import Config, ImageConfig
from jaxpar.data.batches import make_batches
from jaxpar.data.images import ImageBatch, ImageBatches
from jaxpar.loss import ImageSums, LossSums
from jaxpar.state import abstract_state
from jaxpar.step import CompiledStep, batch_sharding, make_eval_step


class Evaluator:
    """Evaluates texts on a mesh; compiled once for all texts that fill the config's batch.

    Args:
      config: as given to `init_state`.
      separator: the token that ends a line; not needed without buckets.
    """

    def __init__(self, config: Config, mesh: Mesh, separator: int | None = None):
        self.config, self.mesh, self.separator = config, mesh, separator
        self._steps: dict[int, tuple[CompiledStep, nnx.State]] = {}

    def loss(self, params: nnx.State, tokens: np.ndarray) -> float:
        """Mean negative log-likelihood, in nats, of all tokens but the first.

        The text is read in as many streams as a batch has rows, each from the zero state. A text
        with fewer tokens than rows is read in fewer streams. With buckets it is read line by line,
        each from the zero state.

        Raises:
          ValueError: the text is too short for the mesh.
        """
        config = self._fit_batch(len(tokens) - 1)
        batch_size = config.data.batch_size
        batches = make_batches(config, tokens, self.separator)
        if batch_size not in self._steps:
            self._steps[batch_size] = (
                make_eval_step(config, self.mesh),
                _zero_carry(config, self.mesh),
            )
        step, carry = self._steps[batch_size]
        sums: list[LossSums] = []
        for window in range(batches.num_windows):
            batch = batches.batch_on(window, batch_sharding(self.mesh))
            carry, window_sums = step((params, carry), batch)
            sums.append(window_sums)  # stays on the device
            do_not_run_ahead(self.mesh, window_sums)
        fetched = jax.device_get(sums)
        num_targets = sum(float(part.num_targets) for part in fetched)
        assert num_targets == batches.num_targets, (num_targets, batches.num_targets)
        return math.fsum(float(part.nll) for part in fetched) / num_targets

    def _fit_batch(self, num_targets: int) -> Config:
        """The config with equal shares, its batch no larger than the text."""
        data, pipeline = self.config.data, self.config.pipeline
        num_groups = self.mesh.shape[DATA]
        num_targets = min(num_targets, data.batch_size)
        M = (
            pipeline.num_microbatches
            if num_groups * pipeline.num_microbatches <= num_targets
            else 1
        )
        rows = max(num_targets // (num_groups * M), 1) * num_groups * M
        return dataclasses.replace(
            self.config,
            data=dataclasses.replace(data, batch_size=rows, shares=None),
            pipeline=dataclasses.replace(pipeline, num_microbatches=M),
        )


class ImageEvaluator:
    """Evaluates sets of images on a mesh, in batches of the config's size; compiled once.

    Args:
      config: as given to `init_state`.
    """

    def __init__(self, config: ImageConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self._step = make_eval_step(config, mesh)

    def evaluate(self, params: nnx.State, images: ImageBatch) -> tuple[float, float]:
        """Mean negative log-likelihood of the labels, in nats, and the share of images told right."""
        batches = ImageBatches(images, self.config.data.batch_size)
        sums: list[ImageSums] = []
        for window in range(batches.num_windows):
            batch = batches.batch_on(window, batch_sharding(self.mesh, self.config))
            _, batch_sums = self._step((params, nnx.State({})), batch)
            sums.append(batch_sums)  # stays on the device
            do_not_run_ahead(self.mesh, batch_sums)
        nll, num_targets, num_right = (
            math.fsum(map(float, parts)) for parts in zip(*jax.device_get(sums), strict=True)
        )
        assert num_targets == batches.num_targets, (num_targets, batches.num_targets)
        return nll / num_targets, num_right / num_targets


def do_not_run_ahead(mesh: Mesh, outputs: Any) -> None:
    """Waits for a step on simulated devices; elsewhere the host goes on and queues the next one.

    The CPU devices of a process share a pool of threads. With several steps in their queues, XLA can
    give its threads to devices that wait in a collective for one that then gets none, and abort.
    """
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(outputs)


def _zero_carry(config: Config, mesh: Mesh) -> nnx.State:
    abstract = abstract_state(config, mesh).carry
    return jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )()
