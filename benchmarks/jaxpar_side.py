"""One side of a comparison: the training step of jaxpar.

python -m benchmarks.jaxpar_side A '{"stage": 2}' '{"num_microbatches": 2, "num_chunks": 4}'
JAX_PLATFORMS=cuda python -m benchmarks.jaxpar_side C '{"devices": [0]}' '{}' '{"kernel": "cudnn"}'

Without JAX_PLATFORMS it runs on simulated devices of the CPU.
"""

import json
import os
import sys
from typing import Any

import jax
import numpy as np

import jaxpar
from benchmarks.sides import serve
from benchmarks.work import LEARNING_RATE, WORKS, Work
from jaxpar import Batch, Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig


def make_config(work: Work, mesh: MeshConfig, pipeline: PipelineConfig, **model: Any) -> Config:
    """The work as a config; `model` is what else its `ModelConfig` has."""
    return Config(
        mesh=mesh,
        model=ModelConfig(
            work.num_layers,
            work.hidden_size,
            work.embed_size,
            work.vocab_size,
            dropout=0.0,
            **model,
        ),
        data=DataConfig(batch_size=work.batch_size, seq_len=work.seq_len),
        pipeline=pipeline,
        train=TrainConfig(
            optimizer="sgd",
            learning_rate=LEARNING_RATE,
            lr_schedule="constant",
            warmup_steps=0,
            clip_norm=0.0,
        ),
    )


def initial_state(work: Work, config: Config, mesh: jax.sharding.Mesh) -> jaxpar.TrainState:
    """The state with the weights of the work."""
    state, weights = jaxpar.init_state(config, mesh), work.weights()
    H = work.hidden_size

    def stacked(name: str) -> np.ndarray:
        parts = [weights[f"{name}_{max(layer, 0)}"] for layer in config.layer_ids]
        if name == "w_x":  # an input narrower than H is zero-extended
            parts = [np.pad(part, [(0, H - len(part)), (0, 0), (0, 0)]) for part in parts]
        return np.stack(parts)

    def put(variable, value: np.ndarray) -> None:
        array = variable.get_value()
        assert array.shape == value.shape
        variable.set_value(jax.device_put(value, array.sharding))

    put(state.params["embedding"]["table"], weights["table"])
    for name in ("w_x", "w_h", "b"):
        put(state.params["lstm"][name], stacked(name))
    for name in ("kernel", "bias"):
        put(state.params["head"][name], weights[name])
    return state


def main() -> None:
    """Serves steps."""
    work = WORKS[sys.argv[1]]
    mesh_sizes, pipeline, model = (json.loads(text) for text in (*sys.argv[2:], "{}")[:3])
    mesh_config = MeshConfig(**mesh_sizes)
    on_cpu = os.environ.get("JAX_PLATFORMS", "cpu") == "cpu"
    if on_cpu:
        jaxpar.simulate_devices(mesh_config.num_devices)
    config = make_config(work, mesh_config, PipelineConfig(**pipeline), **model)
    mesh = config.mesh.build()
    state, train_step = initial_state(work, config, mesh), jaxpar.make_train_step(config, mesh)
    batch = Batch(*(jax.device_put(a, jaxpar.batch_sharding(mesh)) for a in work.text()), True)

    def step() -> jax.Array:
        nonlocal state
        state, metrics = train_step(state, batch)
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
