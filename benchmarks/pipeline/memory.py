"""Compiled memory and compile time of the pipeline: they do not grow with microbatches or layers.

Prints, for 4 stages and a fixed microbatch size, the temporary memory per device of the compiled loss and
gradients: scheduled (1F1B) against autodiff through the forward executor (GPipe). Nothing is run.
"""

import argparse
import time

import jax
import jax.numpy as jnp
from flax import nnx

import jaxpar
from jaxpar import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxpar.loss import cross_entropy
from jaxpar.models import LSTMLanguageModel
from jaxpar.nn.lstm import LSTMCarry
from jaxpar.pipeline.gpipe import run_pipeline
from jaxpar.state import abstract_state, make_model
from jaxpar.step import make_loss_and_grad


def make_config(num_microbatches: int, num_chunks: int, num_layers: int, remat: bool) -> Config:
    """4 stages, 8 rows a microbatch, 64 steps of time."""
    return Config(
        mesh=MeshConfig(stage=4),
        model=ModelConfig(num_layers, hidden_size=256, embed_size=256, vocab_size=384),
        pipeline=PipelineConfig(
            num_microbatches=num_microbatches, num_chunks=num_chunks, remat=remat
        ),
        data=DataConfig(batch_size=8 * num_microbatches, seq_len=64),
        train=TrainConfig(),
    )


def arguments(config: Config, mesh: jax.sharding.Mesh):
    """Shapes and shardings of (params, carry, batch)."""
    state = abstract_state(config, mesh)
    tokens = jax.ShapeDtypeStruct(
        (config.data.batch_size, config.data.seq_len),
        jnp.int32,
        sharding=jaxpar.batch_sharding(mesh),
    )
    return state.params, state.carry, jaxpar.Batch(tokens, tokens, True)


def compile_scheduled(config: Config):
    """The engine's loss and gradients."""
    mesh = config.mesh.build()
    run = jax.jit(make_loss_and_grad(config, mesh))
    return run.lower(*arguments(config, mesh), jax.ShapeDtypeStruct((), jnp.int32))


def compile_autodiff(config: Config):
    """The same by autodiff through `run_pipeline`."""
    mesh = config.mesh.build()
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config)))

    def loss(params, carry, batch):
        model: LSTMLanguageModel = nnx.merge(graphdef, params)

        def run_layers(lstm, carry, x_TBE, key, first_row):
            return run_pipeline(
                lstm.layer(key),
                lstm.params,
                carry,
                x_TBE,
                mesh=mesh,
                layer_ids=lstm.layer_ids,
                num_microbatches=config.pipeline.num_microbatches,
                num_chunks=config.pipeline.num_chunks,
            )

        carry = LSTMCarry(*jax.tree.leaves((carry["h"], carry["c"])))
        _, logits_TBV = model.unroll(batch.inputs_BT, carry, run_layers=run_layers)
        return cross_entropy(logits_TBV, batch.targets_BT.T).nll

    return jax.jit(jax.value_and_grad(loss)).lower(*arguments(config, mesh))


def temporary_mib(lowered) -> float:
    """MiB per device that the compiled program needs besides arguments and results."""
    return lowered.compile().memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    """Prints both tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    jaxpar.simulate_devices(4)
    print("temporary memory per device, MiB: 8 layers of 256, T=64, K=4, 8 rows a microbatch")
    print(f"{'M':>4} {'1f1b':>8} {'1f1b remat':>11} {'autodiff':>9} {'1f1b/autodiff':>14}")
    for num_microbatches in (4, 8, 16, 32):
        config, remat = (make_config(num_microbatches, 4, 8, remat) for remat in (False, True))
        ours, lean = (
            temporary_mib(compile_scheduled(config)),
            temporary_mib(compile_scheduled(remat)),
        )
        autodiff = temporary_mib(compile_autodiff(config))
        print(
            f"{num_microbatches:4} {ours:8.1f} {lean:11.1f} {autodiff:9.1f} {ours / autodiff:14.2f}"
        )
    print("\ntime to lower and compile, seconds (median of 3)")
    for num_layers, num_microbatches, num_chunks in ((8, 4, 4), (64, 32, 16)):
        config = make_config(num_microbatches, num_chunks, num_layers, False)
        seconds = []
        for _ in range(3):
            jax.clear_caches()
            start = time.perf_counter()
            compile_scheduled(config).compile()
            seconds.append(time.perf_counter() - start)
        print(
            f"{num_layers} layers, M={num_microbatches}, K={num_chunks}: {sorted(seconds)[1]:.2f}"
        )


if __name__ == "__main__":
    main()
