"""One side: the training step of jaxpar with layers of a kind.

python -m benchmarks.layers.jaxpar_side gru '{"width": 256}'
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.layers.work import LEARNING_RATE, Work
from benchmarks.sides import serve
from jaxpar import (
    LayerContext,
    OptimizerConfig,
    Parallel,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    TrainConfig,
    nn,
)
from jaxpar.step.functions import init_state, make_train_step

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "slstm": nn.SLSTM,
    "rglru": nn.RGLRU,
    "mingru": nn.MinGRU,
    "flax": lambda width, rngs: nn.Recurrent(nnx.GRUCell(width, width, rngs=rngs)),
}


class Model(nnx.Module):
    """A stack, and nothing around it."""

    def __init__(self, kind: str, work: Work, rngs: nnx.Rngs):
        make = KINDS[kind]
        self.layers = Stack([lambda rngs: make(work.width, rngs=rngs)] * work.layers, rngs=rngs)

    def first(self, batch: Any, at: LayerContext) -> jax.Array:
        """The inputs."""
        return batch["x"]

    def last(self, y: jax.Array, batch: Any, at: LayerContext) -> Sums:
        """Squared errors."""
        error = jnp.sum(jnp.square(y - batch["y"]))
        return Sums(loss=error, weight=jnp.float32(y.size))


@dataclasses.dataclass(frozen=True)
class Learn(Task):
    """The work."""

    kind: str
    work: Work
    optimizer: OptimizerConfig = OptimizerConfig(
        "sgd", LEARNING_RATE, lr_schedule="constant", warmup_steps=0
    )

    def make_model(self, rngs: nnx.Rngs) -> Model:
        """The stack."""
        return Model(self.kind, self.work, rngs)

    def make_batches(self, split: str, seed: int | None = None) -> SeriesBatches:
        """One batch."""
        x, y = (np.concatenate([*a, a[0][:1]]) for a in self.work.batch())
        return SeriesBatches({"x": x, "y": y}, self.work.rows, self.work.steps, seed)


def with_weights(params: Any, kind: str, work: Work) -> Any:
    """The parameters of a stack of GRUs with the kernels of the work; of others as they are."""
    if kind not in ("gru", "flax"):
        return params
    w_x, w_h = (np.stack(kernels) for kernels in zip(*work.gru(), strict=True))
    if kind == "flax":
        flat = [a.reshape(work.layers, work.width, 3 * work.width) for a in (w_x, w_h)]
        found = {("dense_i", "kernel"): flat[0], ("dense_h", "kernel"): flat[1]}
    else:
        found = {("w_x",): w_x, ("w_h",): w_h}

    def fill(path, variable):
        names = tuple(str(getattr(key, "key", "")) for key in path)
        new = [value for end, value in found.items() if names[-len(end) :] == end]
        return variable.replace(jnp.asarray(new[0])) if new else variable

    return jax.tree_util.tree_map_with_path(
        fill, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )


def main() -> None:
    """Serves steps."""
    kind, work = sys.argv[1], Work.from_arguments()
    task, parallel = Learn(kind, work), Parallel("dp1")
    state = init_state(task, parallel)
    state = dataclasses.replace(state, params=with_weights(state.params, kind, work))
    step = make_train_step(task, parallel, TrainConfig(clip_norm=0.0))
    x, y = work.batch()
    like = task.example_batch()
    batch = jax.tree.map(jnp.asarray, {**like, "x": x, "y": y})

    def run():
        nonlocal state
        state, metrics = step.run(state, batch)
        return metrics.loss

    serve(run)


if __name__ == "__main__":
    main()
