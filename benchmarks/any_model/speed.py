"""What jaxpar costs a model of one's own on one device: its training step beside a plain `jit` of it.

    taskset -c 0 python -m benchmarks.any_model.speed [--width 256] [--layers 4]

The model is the GRU forecaster of `examples/forecaster.py` on random numbers. The other side is what one
would write without jaxpar: layers in a Python loop, `jax.value_and_grad`, Adam, clipping; one `jax.jit`.
Both begin with the same weights, and take turns.
"""

import argparse
import dataclasses
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.turns import take_turns
from examples.forecaster import Forecast
from jaxpar import LayerContext, OptimizerConfig, Parallel, SeriesBatches, TrainConfig
from jaxpar.step.functions import init_state, make_train_step
from jaxpar.step.setup import Setup

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, lr_schedule="constant", warmup_steps=0)


@dataclasses.dataclass(frozen=True)
class Random(Forecast):
    """The forecaster on random numbers."""

    def make_batches(self, split: str, seed: int | None = None) -> SeriesBatches:
        """As many as a few windows need."""
        rng, steps = np.random.default_rng(0), 4 * self.batch_size * self.seq_len
        arrays = {"seen": rng.normal(size=(steps, 3)), "next": rng.normal(size=steps)}
        arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
        known = np.ones(steps, np.float32)
        return SeriesBatches({**arrays, "known": known}, self.batch_size, self.seq_len, seed)


def make_plain(task: Random, batch: Any):
    """A function that takes a step without jaxpar; its loss."""
    graphdef, params = jax.jit(lambda: nnx.split(Setup.of(task, Parallel("dp1")).storage.make(0)))()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    layers = [graphdef_of(graphdef, params, n) for n in range(task.num_layers)]
    structure, stack = layers[0][0], [state for _, state in layers]
    outer = nnx.State({name: part for name, part in params.items() if name != "layers"})
    params = (outer, stack)
    opt_state = optimizer.init(params)
    carry = [jnp.zeros((task.batch_size, task.width)) for _ in stack]

    def loss(params, carry, batch):
        outer, stack = params
        block = jax.tree.map(lambda a: a.swapaxes(0, 1) if jnp.ndim(a) > 1 else a, batch)
        at = LayerContext(0, 0, 0, batch=block)
        embed, out = outer["embed"], outer["out"]
        x = block["seen"] @ embed["kernel"][...] + embed["bias"][...]
        after = []
        for state, h in zip(stack, carry, strict=True):
            h, x = nnx.merge(structure, state)(h, x, at)
            after.append(h)
        mean, log_var = jnp.moveaxis(x @ out["kernel"][...] + out["bias"][...], -1, 0)
        error, weight = block["next"] - mean, block["weight"] * block["known"]
        nll = 0.5 * (jnp.log(2 * jnp.pi) + log_var + error**2 * jnp.exp(-log_var))
        return jnp.sum(weight * nll) / jnp.sum(weight), after

    def step(params, opt_state, carry, batch):
        (value, carry), grads = jax.value_and_grad(loss, has_aux=True)(params, carry, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, carry, value

    step = jax.jit(step, donate_argnums=(0, 1, 2))

    def run():
        nonlocal params, opt_state, carry
        params, opt_state, carry, value = step(params, opt_state, carry, batch)
        return value

    return run


def graphdef_of(graphdef: Any, params: Any, number: int):
    """Structure and values of one layer."""
    return nnx.split(nnx.merge(graphdef, params).layers.layer(number))


def make_ours(task: Random, batch: Any):
    """A function that takes a step of jaxpar; its loss."""
    parallel, train = Parallel("dp1"), TrainConfig()
    state = init_state(task, parallel)
    step = make_train_step(task, parallel, train)

    def run():
        nonlocal state
        state, metrics = step.run(state, batch)
        return metrics.loss

    return run


def main() -> None:
    """Prints median steps and the ratio of neighbouring turns, with its quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    task = Random(args.layers, args.width, args.rows, args.seq_len, OPTIMIZER)
    batch = jax.tree.map(jnp.asarray, task.make_batches("train", 0).batch(1))
    sides = {"jax.jit": make_plain(task, batch), "jaxpar": make_ours(task, batch)}
    losses = {name: [float(run()) for _ in range(3)] for name, run in sides.items()}
    np.testing.assert_allclose(*losses.values(), rtol=1e-4)
    seconds = dict(zip(sides, take_turns([*sides.values()], args.rounds), strict=True))
    ratios = [ours / plain for plain, ours in zip(*seconds.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    for name, values in seconds.items():
        print(f"{name:8} {1e3 * statistics.median(values):8.2f} ms a step")
    print(f"jaxpar takes {middle:.3f} times as long (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
