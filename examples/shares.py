"""One device three times as slow as another: even shares of a batch against (3, 1).

Where all devices take as many rows, the slow one sets the pace. With shares a batch is cut into microbatches
of one size, of which a fast device takes more; losses are those of one device either way. Devices here are
simulated and alike, so this model makes one slow: it has three times the work with that device's rows. On
devices that differ, `jaxpar.planning.time_steps` finds the seconds of each.

    python examples/shares.py
"""

import dataclasses
import statistics
import time

import jax.numpy as jnp
from forecaster import Forecast, Forecaster
from jax import lax

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.planning import propose_shares

TIMES = 1, 3  # as long as the first device, each needs for a microbatch
WORK = 2_000_000  # turns of a loop on one number: about 0.05 s on one core, and nothing else to wait for


class Working(Forecaster):
    """A forecaster; the rows of a batch from `slow_row` on are those of the slow device."""

    slow_row = 0

    def first(self, batch, at):
        """What goes into the first layer, after a while; the compiler does not know that it adds 0."""
        x = super().first(batch, at)
        turns = WORK * jnp.where(at.row >= self.slow_row, *TIMES[::-1])
        end = lax.fori_loop(0, turns, lambda _, a: jnp.tanh(a), jnp.float32(at.row))
        return x + 0 * end


@dataclasses.dataclass(frozen=True)
class Slowed(Forecast):
    """Forecasts, where the slow device has the rows from `slow_row` on."""

    slow_row: int = 0

    def make_model(self, rngs):
        """The network, with its initial values."""
        model = Working(3, self.width, self.num_layers, rngs=rngs)
        model.slow_row = self.slow_row
        return model


def main(num_steps=10):
    """Trains with both shares, and prints a row of each."""
    for shares, num_microbatches in ((1, 1), 2), (propose_shares(TIMES), 1):
        rows = [32 * share // sum(shares) for share in shares]
        task = Slowed(batch_size=32, slow_row=rows[0])
        pipeline = PipelineConfig(num_microbatches=num_microbatches)
        parallel = Parallel(MeshConfig(data=2, devices=(0, 1)), pipeline, shares)
        state, step = jaxpar.init_state(task, parallel), jaxpar.make_train_step(task, parallel)
        batches, seconds = task.make_batches("train", seed=0), []
        for number in range(num_steps):
            begin = time.perf_counter()
            state, metrics = step(state, batches.batch(number))
            loss = float(metrics.loss)
            seconds.append(time.perf_counter() - begin)
        took = statistics.median(seconds)
        print(f"shares {shares}  rows {rows}  {took:.2f} s a step  loss {loss:.6f}")


if __name__ == "__main__":
    jaxpar.simulate_devices(2)
    main()
