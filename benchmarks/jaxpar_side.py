"""One side of a comparison: the training step of jaxpar.

python -m benchmarks.jaxpar_side A '{"stage": 2}' '{"num_microbatches": 2, "num_chunks": 4}'
JAX_PLATFORMS=cuda python -m benchmarks.jaxpar_side C '{"devices": [0]}' '{}' '{"dtype": "bfloat16"}'

Without JAX_PLATFORMS it runs on simulated devices of the CPU.
"""

import dataclasses
import json
import os
import sys
from typing import Any

import jax
import numpy as np

import jaxpar
from benchmarks.sides import serve
from benchmarks.work import LEARNING_RATE, WORKS, Work
from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, TrainConfig
from jaxpar.data.batches import put_batch
from jaxpar.lm import LM, Batch
from jaxpar.partition.by_layer import abstract_by_layer, from_layers
from jaxpar.step.functions import init_state, make_train_step
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.step.step import batch_sharding

TRAIN = TrainConfig(clip_norm=0.0)


def make_task(work: Work, **options: Any) -> LM:
    """The work as a task, with other options besides."""
    return LM(
        work.num_layers,
        work.hidden_size,
        work.embed_size,
        work.vocab_size,
        dropout=0.0,
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        optimizer=OptimizerConfig("sgd", LEARNING_RATE, lr_schedule="constant", warmup_steps=0),
        **options,
    )


def initial_state(work: Work, setup: Setup) -> TrainState:
    """The state with the weights of the work."""
    weights, H = work.weights(), work.hidden_size

    def stacked(name: str) -> np.ndarray:
        parts = [weights[f"{name}_{layer}"] for layer in range(work.num_layers)]
        if name == "w_x":  # an input narrower than H is zero-extended
            parts = [np.pad(part, [(0, H - len(part)), (0, 0), (0, 0)]) for part in parts]
        return np.stack(parts)

    arrays = {
        "embedding/table": weights["table"],
        **{f"layers/lstm/{name}": stacked(name) for name in ("w_x", "w_h", "b")},
        **{f"head/{name}": weights[name] for name in ("kernel", "bias")},
    }
    state = init_state(setup)
    placed = {
        name: jax.device_put(arrays[name], wanted.sharding)
        for name, wanted in abstract_by_layer(state.params, setup.storage).items()
    }
    return dataclasses.replace(state, params=from_layers(state.params, setup.storage, placed))


def make_batch(work: Work, setup: Setup) -> Batch:
    """The text of the work on the mesh."""
    return put_batch(Batch(*work.text(), starts=True), batch_sharding(setup))


def main() -> None:
    """Serves steps."""
    work = WORKS[sys.argv[1]]
    mesh_sizes, pipeline, options = (json.loads(text) for text in (*sys.argv[2:], "{}")[:3])
    parallel = Parallel(MeshConfig(**mesh_sizes), PipelineConfig(**pipeline))
    on_cpu = os.environ.get("JAX_PLATFORMS", "cpu") == "cpu"
    if on_cpu:
        jaxpar.simulate_devices(parallel.mesh.num_devices)
    setup = Setup.of(make_task(work, **options), parallel, TRAIN)
    state, train_step = initial_state(work, setup), make_train_step(setup)
    batch = make_batch(work, setup)

    def step() -> jax.Array:
        nonlocal state
        state, metrics = train_step.run(state, batch)
        if on_cpu:
            jax.block_until_ready(state)
        return metrics.loss

    if on_cpu:
        serve(step)
    else:
        serve(step, peak_mib_of_device)


def peak_mib_of_device() -> float:
    """The most memory that JAX's arrays have taken on its first device, MiB."""
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"] / 2**20


if __name__ == "__main__":
    main()
