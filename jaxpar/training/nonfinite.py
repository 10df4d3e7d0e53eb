"""Where a loss or gradient that is not finite comes from: its step, repeated from the state before it.

    forward    embedding -> layer 0 -> layer 1 -> head -> loss    the first whose output is not finite
    backward   embedding <- layer 0 <- layer 1 <- head            else the first whose gradient is not

Batch and dropout are functions of the step, so it is the same step again. A run whose numbers are finite
pays nothing for this. Dims: S slots of stacked layers, B batch, T time, E embedding, H hidden.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.axes import LAYERS
from jaxpar.config import RunConfig
from jaxpar.data.streams import Batch
from jaxpar.pipeline.ticks import Plan
from jaxpar.sharding import annotated
from jaxpar.state import TrainState, unwrap_carry
from jaxpar.step import AnyBatch, CompiledStep, make_loss_and_grad

# What models are made of, in the order of the forward pass.
_PARTS = ("embedding", "convs", "lstm", "dense", "head")
_ROWS_NAMED = 8


class Origin(NamedTuple):
    """The first place in a step with a number that is not finite.

    Attributes:
      place: such as "the output of lstm layer 2".
      rows: of the batch that have such numbers there; none if they cannot be told apart.
    """

    place: str
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.rows:
            return self.place
        more = len(self.rows) - _ROWS_NAMED
        rows = ", ".join(map(str, self.rows[:_ROWS_NAMED])) + f" and {more} more" * (more > 0)
        return f"{self.place}, in row{'s' * (len(self.rows) > 1)} {rows}"


def find_origin(config: RunConfig, mesh: Mesh, state: TrainState, batch: AnyBatch) -> Origin:
    """Where the first number is that is not finite, in the order of computing.

    In networks for images outputs are not looked at, but parameters. The first call compiles a program;
    with several processes, all of them call it.

    Args:
      config: as given to `init_state`.
      state: before the step, as a halted state is; not consumed.
      batch: of the step.
    """
    look = _make_look(config, mesh)
    loss, *found = jax.device_get(look(dataclasses.replace(state, opt_state=()), batch))
    rows, params, grads = (_by_module(config, bad) for bad in found)
    for module, bad_B in rows.items():
        if bad_B.any():
            return Origin(f"the output of {module}", tuple(np.flatnonzero(bad_B).tolist()))
    if not np.isfinite(loss):
        if rows:
            return Origin("the output of head")
        for module, is_bad in params.items():
            if is_bad:
                return Origin(f"the parameters of {module}")
    for module, is_bad in reversed(grads.items()):
        if is_bad:
            return Origin(f"the gradient of {module}")
    return Origin("the norm of all gradients, each of which is finite")


@functools.lru_cache(maxsize=1)
def _make_look(config: RunConfig, mesh: Mesh) -> CompiledStep:
    """(state, batch) -> the loss, and what is not finite of outputs, parameters and gradients."""
    value_and_grad = make_loss_and_grad(config, mesh)

    def look(state: TrainState, batch: AnyBatch, plan: Plan | None):
        (loss, carry), grads = value_and_grad(state.params, state.carry, batch, state.step, plan)
        rows = {}
        if isinstance(batch, Batch):
            table: Any = state.params["embedding"]["table"]
            embedded_BTE = table[...][jnp.asarray(batch.inputs_BT)]
            c_SBH = unwrap_carry(
                carry
            ).c_BH  # once not finite, c stays so until the end of the window
            rows = {
                "embedding": ~jnp.isfinite(embedded_BTE).all((1, 2)),
                "lstm": ~jnp.isfinite(c_SBH).all(2),
            }
        # As in the norm that the step goes by, a square may overflow.
        squares = jax.tree.map(jnp.square, grads)
        return loss, rows, _bad_arrays(state.params), _bad_arrays(squares)

    return CompiledStep(look, config, backward=True, out_shardings=NamedSharding(mesh, P()))


def _bad_arrays(tree: Any) -> dict[str, jax.Array]:
    """By the name of each array whether its sum is not finite: [], or [S] of stacked layers."""
    sums = {}
    for name, variable in annotated(tree):
        array = variable[...]
        dims = tuple(range(LAYERS in variable.out_sharding, array.ndim))
        sums[name] = ~jnp.isfinite(array.sum(dims))
    return sums


def _by_module(config: RunConfig, bad: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same by the name of each module, in the order of the forward pass."""
    modules: dict[str, np.ndarray] = {}
    for name in sorted(bad, key=lambda name: _PARTS.index(re.findall("[a-z]+", name)[0])):
        value = bad[name]
        if name.startswith("lstm"):
            ids = config.layer_ids
            parts = {f"lstm layer {i}": value[ids.index(i)] for i in range(max(ids) + 1)}
        else:
            parts = {re.sub(r"[._][a-z]+$", "", name): value}
        modules |= {module: modules.get(module, False) | part for module, part in parts.items()}
    return modules
