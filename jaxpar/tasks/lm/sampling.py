"""Text from a language model, on any mesh: what is drawn for a token is what the next one is drawn after.

A unit of the pipeline is one token of one group of prompts, token by token:

    stage 0   a0  b0  a1  b1  a2  b2            two groups of prompts, a and b, on two stages: while a token
    stage 1       a0  b0  a1  b1  a2  b2        of one is drawn, the other's begins, and no stage waits

What the last stage draws in a tick the first one begins with in the next, so as many groups as stages leave
no stage waiting but at the start and the end, and more would do no better. With fewer some wait. Parameters
and the state of layers lie where they do in training.

Legend of the dim suffixes: T time, B rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.compiler import compiler_options
from jaxpar.base.display import format_count
from jaxpar.base.stage_names import NamedPlacement
from jaxpar.config import Parallel, PipelineConfig
from jaxpar.data.order import check_at_least
from jaxpar.forward import feeding_table, make_forward
from jaxpar.layout import Layout
from jaxpar.setup import Setup
from jaxpar.state import TrainState, abstract_state, zero_carry
from jaxpar.step import check_program
from jaxpar.tasks.lm.drawing import NOWHERE, TOKEN, Draw
from jaxpar.tasks.lm.streams import Batch
from jaxpar.tasks.lm.task import LM
from jaxpar.tasks.lm.vocabulary import check_tokens
from jaxpar.training.by_layer import by_layer, from_layers

TO_DRAW = -1  # an input that is what was drawn before it


def feed(batch: Batch, outputs: dict[str, jax.Array]) -> Batch:
    """A block with what was drawn before it, [T, B]."""
    assert batch.draw is not None
    inputs_TB = jnp.asarray(batch.inputs_BT)
    inputs_TB = jnp.where(inputs_TB == TO_DRAW, outputs[TOKEN], inputs_TB)
    resets_TB = None if batch.resets is None else inputs_TB == batch.draw.separator
    return batch._replace(inputs_BT=inputs_TB, resets=resets_TB)


class _Samples:
    """A task whose batches say how tokens are drawn."""

    def example_batch(self) -> Batch:
        return super().example_batch()._replace(draw=Draw.of())  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _sampling(cls: type) -> type:
    return type(f"Sampling{cls.__name__}", (_Samples, cls), {})


def sample_tokens(
    setup: Setup,
    state: TrainState,
    prompts: Sequence[np.ndarray],
    draw: Draw,
    length: int,
    tell: Callable[[list[tuple[str, str]]], None] = lambda facts: None,
) -> np.ndarray:
    """The tokens that follow each prompt, int32 [prompts, length], on the mesh of the setup.

    Args:
      setup, state: of a trained model.
      prompts: token ids [tokens], at least one each.
      tell: is given what `describe_groups` says before anything is compiled.
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
    num_steps = max(map(len, prompts)) + length - 1
    parallel, rows = in_groups(setup.layout, len(prompts), num_steps)
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    fields |= {"batch_size": rows, "seq_len": num_steps, "num_buckets": 0, "bucket_multiple": 1}
    sampling = _sampling(type(task))(**fields | {"packed": int(draw.separator) != NOWHERE})
    sampler = setup.keep(_setup_of, sampling, parallel)
    tell(describe_groups(sampler.parallel, len(prompts), rows))
    inputs_BT = np.full((rows, num_steps), TO_DRAW, np.int32)
    for row in range(rows):
        prompt = prompts[min(row, len(prompts) - 1)]
        inputs_BT[row, : len(prompt)] = prompt
    resets_BT = np.zeros(inputs_BT.shape, bool) if sampling.packed else None
    lengths_B = np.full(rows, num_steps, np.int32) if sampling.packed else None
    parts = {"resets": resets_BT, "draw": draw, "lengths": lengths_B}
    batch = Batch(inputs_BT, np.zeros_like(inputs_BT), starts=True, **parts)
    target = abstract_state(sampler)
    layers = {"params": state.params, "frozen": state.frozen}
    wanted = {"params": target.params, "frozen": target.frozen}
    placed = from_layers(wanted, sampler.layout, by_layer(layers, setup.layout))
    placed = jax.device_put(placed, jax.tree.map(lambda a: a.sharding, wanted))
    variables, table = (placed["params"], placed["frozen"]), feeding_table(sampler.parallel)
    drawn_TB = sampler.keep(_make_sampler)(*variables, zero_carry(sampler), batch, table)
    found_TB = np.asarray(drawn_TB.addressable_data(0))
    return np.stack(
        [found_TB[len(prompt) - 1 :, row][:length] for row, prompt in enumerate(prompts)]
    )


def _setup_of(setup: Setup, task: LM, parallel: Parallel) -> Setup:
    return Setup.of(task, parallel, setup.train, setup.mesh)


def in_groups(layout: Layout, num_prompts: int, num_steps: int) -> tuple[Parallel, int]:
    """How devices share prompts: in as many groups as stages, if there are so many; and the rows of all.

    Args:
      layout: of training; all parts of the model stay where it has them, if it has them in one group a stage.
    """
    parallel, data = layout.parallel, layout.parallel.mesh.data
    groups = min(parallel.mesh.stage, -(-num_prompts // data))
    rows = data * groups * -(-num_prompts // (data * groups))
    placement = "balanced"
    if parallel.mesh.stage > 1 and parallel.num_groups == 1:
        ends = not layout.shares_first, layout.head == "last"
        placement = str(NamedPlacement(layout.placement, *ends))
    # With remat a window is cut without stages, too.
    pipeline = PipelineConfig(
        num_microbatches=groups, num_chunks=num_steps, placement=placement, remat=True
    )
    return dataclasses.replace(parallel, pipeline=pipeline, shares=None), rows


def describe_groups(parallel: Parallel, num_prompts: int, rows: int) -> list[tuple[str, str]]:
    """Mesh, groups of prompts, and how long stages wait for each other: (what, in words); [] without stages.

    Args:
      parallel, rows: as `in_groups` gives them.
    """
    data, stages = parallel.mesh.data, parallel.mesh.stage
    groups = parallel.pipeline.num_microbatches
    if stages == 1:
        return []
    padding = f" + {rows - num_prompts} padding" * (rows > num_prompts)
    dealt = f"{format_count(groups, 'group')} of {format_count(rows // (data * groups), 'row')}"
    waits, ticks = _waits(parallel)
    line = f"each waits in {waits:,} of {ticks:,} ticks ({waits / ticks:.0%})"
    if groups < stages:
        most = dataclasses.replace(parallel.pipeline, num_microbatches=stages)
        waits, ticks = _waits(dataclasses.replace(parallel, pipeline=most))
        line += f"; with {stages} groups, of {data * (stages - 1) + 1} prompts or more, in "
        line += f"{waits:,} of {ticks:,}"
    return [
        ("mesh", " x ".join(f"{axis}={size}" for axis, size in parallel.mesh.sizes.items())),
        ("prompts", f"{num_prompts:,}{padding}; {dealt}" + f" on each of data={data}" * (data > 1)),
        ("stages", line),
    ]


def _waits(parallel: Parallel) -> tuple[int, int]:
    """In how many ticks of its schedule a stage has no unit, and how many there are."""
    unit_TS = np.asarray(feeding_table(parallel).forward.unit)[0]
    return int((unit_TS < 0).sum(axis=0).max()), len(unit_TS)


def _make_sampler(setup: Setup) -> jax.stages.Compiled:
    """(params, frozen, carry, batch, table) -> the tokens that are drawn, [T, B], on every device."""
    forward = make_forward(setup.layout, setup.mesh, predicts=True, feed=feed)

    def run(params, frozen, carry, batch, table):
        return forward(params, frozen, carry, batch, None, table)[1][TOKEN]

    options = compiler_options(setup.layout.facts.platform, setup.parallel.mesh.stage)
    everywhere = NamedSharding(setup.mesh, P())
    state, batch = abstract_state(setup), setup.task.example_batch()
    program = (
        jax.jit(run, compiler_options=options, out_shardings=everywhere)
        .lower(state.params, state.frozen, state.carry, batch, feeding_table(setup.parallel))
        .compile()
    )
    if setup.parallel.mesh.tensor > 1 and setup.parallel.mesh.stage > 1:
        check_program(program)
    return program
