"""One side of a comparison: the training step of jaxpar.

python -m benchmarks.jaxpar_side A '{"stage": 2}' '{"num_microbatches": 2, "num_chunks": 4}'
"""

import json
import sys

import jax
import numpy as np

import jaxpar
from benchmarks.sides import serve
from benchmarks.work import LEARNING_RATE, WORKS, Work
from jaxpar import Batch, Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig


def make_config(work: Work, mesh: MeshConfig, pipeline: PipelineConfig) -> Config:
    """The work as a config."""
    return Config(
        mesh=mesh,
        model=ModelConfig(
            work.num_layers, work.hidden_size, work.embed_size, work.vocab_size, dropout=0.0
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
    name, mesh_sizes, pipeline = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    work, mesh_config = WORKS[name], MeshConfig(**mesh_sizes)
    jaxpar.simulate_devices(mesh_config.num_devices)
    config = make_config(work, mesh_config, PipelineConfig(**pipeline))
    mesh = config.mesh.build()
    state, train_step = initial_state(work, config, mesh), jaxpar.make_train_step(config, mesh)
    batch = Batch(*(jax.device_put(a, jaxpar.batch_sharding(mesh)) for a in work.text()), True)

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready(state)
        return float(metrics.loss)

    serve(step)


if __name__ == "__main__":
    main()
