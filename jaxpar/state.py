"""The state of a training run, born sharded: abstract first, then initialised where it will live."""

import collections
import dataclasses
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpar.axes import BATCH, HIDDEN, LAYERS
from jaxpar.config import Config, ImageConfig, RunConfig
from jaxpar.display import Shown
from jaxpar.models import HybridConvNet, LSTMLanguageModel
from jaxpar.nn.lstm import LSTMCarry
from jaxpar.optimizer import HOST_MEMORY, HostOptimizer, make_optimizer
from jaxpar.sharding import (
    RULES,
    RULES_LAST,
    STRATEGIES,
    Rules,
    check_sizes,
    misplaced,
    shardings,
    split_over_data,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState(Shown):
    """Everything that a training step reads and writes.

    Attributes:
      step: int32 scalar, steps taken.
      skipped: int32 scalar, how many of them were passed over, because their loss or gradient was not finite.
        One more than the config allows halts the state: it stays as it was before that step.
      params: `nnx.State` of the model; every variable carries its named dims.
      opt_state: of optax; what mirrors a parameter carries its named dims too.
      carry: the recurrent state between windows, annotated likewise; empty in a model that has none.
      param_rules, opt_rules, carry_rules: what parameters, optimizer state and carry are laid out by.
      opt_memory: kind of memory that holds the optimizer state; None for the devices' own.
    """

    step: jax.Array
    skipped: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    carry: nnx.State
    param_rules: Rules = dataclasses.field(metadata={"static": True})
    opt_rules: Rules = dataclasses.field(metadata={"static": True})
    carry_rules: Rules = dataclasses.field(metadata={"static": True})
    opt_memory: str | None = dataclasses.field(metadata={"static": True})


@overload
def make_model(config: Config) -> LSTMLanguageModel: ...
@overload
def make_model(config: ImageConfig) -> HybridConvNet: ...
def make_model(config: RunConfig) -> LSTMLanguageModel | HybridConvNet:
    """The model of a config, its layers in the slots that the placement gives them. Call under `jit`."""
    rngs = nnx.Rngs(config.train.seed)
    if isinstance(config, ImageConfig):
        return HybridConvNet(config.model, rngs=rngs)
    return LSTMLanguageModel(config.model, rngs=rngs, layer_ids=config.layer_ids)


def compute_rules(config: RunConfig) -> Rules:
    """How parameters lie while a step computes; stored parameters may be split further."""
    if isinstance(config, ImageConfig):
        return STRATEGIES[config.model.strategy]
    return RULES_LAST if config.mesh.stage > 1 and config.pipeline.head == "last" else RULES


def batch_rules(config: RunConfig) -> Rules:
    """How what has a dim of the batch lies between steps: its rows in the user's order.

    Unequal shares do not split evenly: then every data-parallel group has all rows and takes its own.
    """
    if isinstance(config, ImageConfig):
        return compute_rules(config)
    return RULES if config.has_equal_shares else RULES.replace({BATCH: None})


def abstract_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """The state without its values: shapes, dtypes and the shardings that it will have.

    Raises:
      ValueError: a size does not split over its axes (see `sharding.check_sizes`), or the mesh is not of
        the config's sizes.
    """
    if dict(mesh.shape) != config.mesh.sizes:
        raise ValueError(
            f"the mesh has the sizes {dict(mesh.shape)}, the config says {config.mesh}; use "
            f"config.mesh.build(), or change the config"
        )
    state = jax.eval_shape(lambda: _initial_state(config))
    check_sizes(state.params, mesh, state.param_rules)
    check_sizes(state.carry, mesh, state.carry_rules)
    check_sizes(state.opt_state, mesh, state.opt_rules)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        state_shardings(state, mesh),
    )


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """The declared sharding of every array of the state."""
    return dataclasses.replace(
        shardings(state, mesh, state.carry_rules),
        params=shardings(state.params, mesh, state.param_rules),
        opt_state=shardings(state.opt_state, mesh, state.opt_rules, state.opt_memory),
    )


def init_state(config: RunConfig, mesh: Mesh | None = None) -> TrainState:
    """The state before the first step; every array is made on its devices, shard by shard.

    The values depend on `config.train.seed` and the model's sizes, not on the mesh.

    Args:
      config: with `model.vocab_size` set.
      mesh: None builds `config.mesh`.
    Raises:
      ValueError: sizes do not fit the mesh, before anything is traced for it.
    """
    mesh = config.mesh.build() if mesh is None else mesh
    config.check()
    target = abstract_state(config, mesh)
    if config.train.update != "host":
        out_shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        return jax.jit(lambda: _initial_state(config), out_shardings=out_shardings)()
    on_devices = dataclasses.replace(target, opt_state=())
    state = jax.jit(
        lambda: dataclasses.replace(_initial_state(config), opt_state=()),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, on_devices),
    )()
    split = jax.device_put(state.params, shardings(state.params, mesh, state.opt_rules))
    host = HostOptimizer(make_optimizer(config.train))
    return dataclasses.replace(state, opt_state=host.init(split, target.opt_state))


def release(state: TrainState, config: RunConfig) -> TrainState:
    """The state, no longer halted: what the config does not allow to be skipped is not counted."""
    skipped = min(int(state.skipped), config.train.allowed_skips)
    skipped = jax.device_put(np.int32(skipped), state.skipped.sharding)
    return dataclasses.replace(state, skipped=skipped)


def audit(state: TrainState) -> None:
    """Compares the declared and the real sharding of parameters, optimizer state and carry.

    All are to lie on one mesh, the one that most arrays of the state lie on.

    Raises:
      ValueError: naming each array that is annotated but not so sharded.
    """
    layouts = [leaf.sharding for leaf in jax.tree.leaves(state)]
    meshes = collections.Counter(
        layout.mesh
        for layout in layouts
        if isinstance(layout, NamedSharding) and isinstance(layout.mesh, Mesh)
    )
    mesh = max(meshes, key=meshes.__getitem__, default=None)
    lines = misplaced({"params": state.params}, mesh, state.param_rules)
    lines += misplaced({"opt_state": state.opt_state}, mesh, state.opt_rules, state.opt_memory)
    lines += misplaced({"carry": state.carry}, mesh, state.carry_rules)
    if lines:
        raise ValueError(
            f"{len(lines)} arrays are annotated but not so sharded; place them with `init_state`, or "
            f"`jax.device_put` and `state_shardings`:\n  " + "\n  ".join(lines)
        )


def unwrap_carry(carry: nnx.State) -> LSTMCarry:
    """The carry as plain arrays."""
    h, c = jax.tree.leaves((carry["h"], carry["c"]))
    return LSTMCarry(h, c)


def wrap_carry(carry: LSTMCarry) -> nnx.State:
    """The carry with its named dims."""
    dims = (LAYERS, BATCH, HIDDEN)
    return nnx.State(
        {
            "h": nnx.Variable(carry.h_BH, out_sharding=dims, eager_sharding=False),
            "c": nnx.Variable(carry.c_BH, out_sharding=dims, eager_sharding=False),
        }
    )


def _initial_state(config: RunConfig) -> TrainState:
    model = make_model(config)
    params: Any = nnx.state(model, nnx.Param)
    carry = (
        wrap_carry(model.initial_carry(config.data.batch_size))
        if isinstance(model, LSTMLanguageModel)
        else nnx.State({})
    )
    rules = compute_rules(config)
    split_update = config.train.fsdp or config.train.update != "replicated"
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(config.train).init(params),
        carry=carry,
        param_rules=split_over_data(rules) if config.train.fsdp else rules,
        opt_rules=split_over_data(rules) if split_update else rules,
        carry_rules=batch_rules(config),
        opt_memory=HOST_MEMORY if config.train.update == "host" else None,
    )
