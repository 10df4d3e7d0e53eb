"""Generates text from a language model, on any mesh, one token of all prompts at a time.

A step is one time step of one window: the token that was drawn before goes in, the state of the layers is
carried. Parameters and that state lie where they do in training.

Legend of the dim suffixes: T time, B rows.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.compiler import compiler_options
from jaxpar.base.stage_names import NamedPlacement
from jaxpar.config import Parallel, PipelineConfig
from jaxpar.data.order import check_at_least
from jaxpar.nn.lstm import has_kernels
from jaxpar.partition.by_layer import by_layer, from_layers
from jaxpar.partition.partition import Partition
from jaxpar.step.forward import full_table, make_forward
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, abstract_state, zero_carry
from jaxpar.step.step import check_program
from jaxpar.tasks.lm.drawing import NOWHERE, TOKEN, Draw
from jaxpar.tasks.lm.streams import Batch
from jaxpar.tasks.lm.task import LM
from jaxpar.tasks.lm.vocabulary import check_tokens

TO_DRAW = -1  # an input that is what was drawn before it


class _Samples:
    """A task whose batches say how tokens are drawn."""

    def example_batch(self) -> Batch:
        return super().example_batch()._replace(draw=Draw.of())  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _sampling(cls: type) -> type:
    return type(f"Sampling{cls.__name__}", (_Samples, cls), {})


def sample_tokens(
    setup: Setup, state: TrainState, prompts: Sequence[np.ndarray], draw: Draw, length: int
) -> np.ndarray:
    """The tokens that follow each prompt, int32 [prompts, length], on the mesh of the setup.

    Args:
      setup, state: of a trained model.
      prompts: token ids [tokens], at least one each.
    Raises:
      ValueError: a token is outside the vocabulary, a prompt is empty, or the model's layers need the whole
        text at once.
    """
    task = setup.task
    assert isinstance(task, LM)
    check_at_least(1, length=length, num_prompts=len(prompts))
    for prompt in prompts:
        check_at_least(1, num_tokens=len(prompt))
        check_tokens(prompt, task.num_words or task.known_vocab_size)
    if setup.facts.whole_window:
        raise ValueError(
            f"layer {setup.facts.whole_window[0]} reads the whole window at once, but text is generated "
            f"token by token.\nFix: use layers that carry state from step to step."
        )
    data = setup.parallel.mesh.data
    rows, num_steps = -(-len(prompts) // data) * data, max(map(len, prompts)) + length - 1
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    fields |= {"batch_size": rows, "seq_len": 1, "num_buckets": 0, "bucket_multiple": 1}
    sampling = _sampling(type(task))(**fields | {"packed": int(draw.separator) != NOWHERE})
    sampler = setup.cached(_setup_of, sampling, _parallel_of(setup.partition))
    given_TB = np.full((num_steps, rows), TO_DRAW, np.int32)
    for row in range(rows):
        prompt = prompts[min(row, len(prompts) - 1)]
        given_TB[: len(prompt), row] = prompt
    target = abstract_state(sampler)
    layers = {"params": state.params, "frozen": state.frozen}
    wanted = {"params": target.params, "frozen": target.frozen}
    placed = from_layers(wanted, sampler.storage, by_layer(layers, setup.storage))
    placed = jax.device_put(placed, jax.tree.map(lambda a: a.sharding, wanted))
    sample = sampler.cached(_make_sampler, num_steps)
    drawn_TB = sample(placed["params"], placed["frozen"], zero_carry(sampler), given_TB, draw)
    found_TB = np.asarray(drawn_TB.addressable_data(0))
    rows = enumerate(prompts)
    return np.stack([found_TB[len(prompt) - 1 :, row][:length] for row, prompt in rows])


def _setup_of(setup: Setup, task: LM, parallel: Parallel) -> Setup:
    return Setup.of(task, parallel, setup.train, setup.mesh)


def _parallel_of(partition: Partition) -> Parallel:
    """How devices share the work: each part of the model stays where training has it.

    Of several groups of layers on a stage, the sampler makes one.
    """
    parallel, placement = partition.parallel, "balanced"
    if parallel.mesh.stage > 1 and parallel.num_groups == 1:
        ends = not partition.shares_first, partition.head == "last"
        placement = str(NamedPlacement(partition.placement, *ends))
    return dataclasses.replace(
        parallel, pipeline=PipelineConfig(placement=placement), shares=None, speeds=None
    )


def _make_sampler(setup: Setup, num_steps: int) -> jax.stages.Compiled:
    """(params, frozen, carry, given tokens [T, B], draw) -> those that are drawn, [T, B], on every device."""
    forward = make_forward(setup.parts, setup.mesh, predicts=True)
    table, task = full_table(setup.partition, backward=False), setup.task
    assert isinstance(task, LM)

    def run(params, frozen, carry, given_TB, draw):
        def step(carried, inputs):
            carry, drawn_B = carried
            place, given_B = inputs
            inputs_B1 = jnp.where(given_B == TO_DRAW, drawn_B, given_B)[:, None]
            parts = {"starts": place == 0, "draw": draw._replace(place=place)}
            if task.packed:
                parts["resets"] = inputs_B1 == draw.separator
                parts["lengths"] = jnp.ones_like(drawn_B)
            batch = Batch(inputs_B1, jnp.zeros_like(inputs_B1), **parts)
            carry, outputs = forward(params, frozen, carry, batch, None, table)
            return (carry, outputs[TOKEN][0]), outputs[TOKEN][0]

        places = jnp.arange(num_steps, dtype=jnp.int32)
        return lax.scan(step, (carry, given_TB[0]), (places, given_TB))[1]

    kernels = has_kernels(setup.facts.model, setup.mesh)
    options = compiler_options(setup.mesh, has_kernels=kernels)
    everywhere, state = NamedSharding(setup.mesh, P()), abstract_state(setup)
    given_TB = jax.ShapeDtypeStruct((num_steps, setup.facts.batch_size), jnp.int32)
    jitted = jax.jit(run, compiler_options=options, out_shardings=everywhere)
    program = jitted.lower(state.params, state.frozen, state.carry, given_TB, Draw.of()).compile()
    if setup.parallel.splits_units:
        check_program(program)
    return program
