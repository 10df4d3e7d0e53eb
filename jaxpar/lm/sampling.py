"""Generates text from a language model, on any mesh, one token of all prompts at a time.

A step is one time step of one window: the token that was drawn before goes in, the state of the layers is
carried. Parameters and that state lie where they do in training.

Legend of the dim suffixes: T time, B rows.
"""

import dataclasses
import functools
import signal
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.checks import require
from jaxpar.base.compiler import compiler_options
from jaxpar.base.stage_names import NamedPlacement
from jaxpar.base.types import Arrays
from jaxpar.config import Parallel, PipelineConfig
from jaxpar.data.order import check_at_least
from jaxpar.hosts.stopping import Interrupted, Stop
from jaxpar.lm.drawing import NOWHERE, TOKEN, Draw
from jaxpar.lm.streams import Batch
from jaxpar.lm.task import LM
from jaxpar.lm.vocabulary import check_tokens
from jaxpar.nn.lstm import has_kernels
from jaxpar.partition.by_layer import by_layer, from_layers
from jaxpar.partition.partition import Partition
from jaxpar.step.forward import full_table, make_forward
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, abstract_state, zero_carry
from jaxpar.step.step import check_program

TO_DRAW = -1  # an input that is what was drawn before it
CALL_STEPS = 32  # of a call of the program, which cannot be stopped while it runs


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens that were drawn.

    Attributes:
      tokens: int32 [length] for each prompt; fewer if a signal came.
      signal: SIGINT or SIGTERM, which ended the sample before its last token; None if nothing did.
    """

    tokens: list[np.ndarray]
    signal: signal.Signals | None


class StoppedSample(Interrupted):
    """A signal has ended a sample.

    Attributes:
      texts: those so far, one for each prompt.
    """

    def __init__(self, told: str, signal: signal.Signals, texts: list[str]):
        super().__init__(told, signal)
        self.texts = texts


class _Samples:
    """A task whose batches say how tokens are drawn."""

    def example_batch(self) -> Batch:
        return super().example_batch()._replace(draw=Draw.of())  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _sampling(cls: type) -> type:
    return type(f"Sampling{cls.__name__}", (_Samples, cls), {})


def sample_tokens(
    setup: Setup, state: TrainState, prompts: Sequence[np.ndarray], draw: Draw, length: int
) -> Sampled:
    """Draws the tokens that follow each prompt, on the mesh of the setup.

    The first SIGINT or SIGTERM stops it; what was drawn before is returned.

    Args:
      setup, state: of a trained model.
      prompts: token ids [tokens], at least one each.
    Raises:
      ValueError: a token is outside the vocabulary, a prompt is empty, or the model's layers need the whole
        text at once; or `length` is out of range.
    """
    task = setup.task
    assert isinstance(task, LM)
    check_at_least(1, length=length, num_prompts=len(prompts))
    for prompt in prompts:
        check_at_least(1, num_tokens=len(prompt))
        check_tokens(prompt, task.num_words or task.known_vocab_size)
    longest = max(map(len, prompts))
    most = 2**31 - 1 - longest  # places of tokens are int32
    require(length <= most, f"length={length} is too large.\nFix: use {most} or less.")
    if setup.facts.whole_window:
        raise ValueError(
            f"layer {setup.facts.whole_window[0]} reads the whole window at once, but text is generated "
            f"token by token.\nFix: use layers that carry state from step to step."
        )
    data = setup.parallel.mesh.data
    rows = -(-len(prompts) // data) * data
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    fields |= {"batch_size": rows, "seq_len": 1, "num_buckets": 0, "bucket_multiple": 1}
    sampling = _sampling(type(task))(**fields | {"packed": int(draw.separator) != NOWHERE})
    sampler = setup.cached(_setup_of, sampling, _parallel_of(setup.partition))
    given_TB = np.full((longest, rows), TO_DRAW, np.int32)
    for row in range(rows):
        prompt = prompts[min(row, len(prompts) - 1)]
        given_TB[: len(prompt), row] = prompt
    target = abstract_state(sampler)
    layers = {"params": state.params, "frozen": state.frozen}
    wanted = {"params": target.params, "frozen": target.frozen}
    placed = from_layers(wanted, sampler.storage, by_layer(layers, setup.storage))
    placed = jax.device_put(placed, jax.tree.map(lambda a: a.sharding, wanted))
    take_steps = sampler.cached(_make_sampler)
    take_steps = functools.partial(take_steps, placed["params"], placed["frozen"])
    num_steps = longest + length - 1
    drawn_TB, stopped_by = _draw(take_steps, zero_carry(sampler), given_TB, draw, num_steps)
    tokens = []
    for row, prompt in enumerate(prompts):
        start = len(prompt) - 1  # before, the prompt is read
        tokens.append(drawn_TB[start : start + length, row])
    return Sampled(tokens, stopped_by)


def _draw(
    take_steps: Callable[..., tuple[Arrays, jax.Array]],
    carry: Arrays,
    given_TB: np.ndarray,
    draw: Draw,
    num_steps: int,
) -> tuple[np.ndarray, signal.Signals | None]:
    """What is drawn in each step, int32 [T, B], and the signal that ended it before the last one.

    Args:
      take_steps: as of `_make_sampler`, with parameters.
      given_TB: the tokens of the prompts; nothing is given after them.
    """
    num_given, rows = given_TB.shape
    last_B = np.zeros(rows, np.int32)
    drawn = [np.zeros((0, rows), np.int32)]
    with Stop() as stop:
        for start in range(0, num_steps, CALL_STEPS):
            if stop.now():
                assert isinstance(stop.reason, signal.Signals)
                return np.concatenate(drawn), stop.reason
            stop_at = min(start + CALL_STEPS, num_steps)
            inputs_TB = np.full((CALL_STEPS, rows), TO_DRAW, np.int32)
            if start < num_given:
                prompts_TB = given_TB[start:stop_at]
                inputs_TB[: len(prompts_TB)] = prompts_TB
            place, count = np.int32(start), np.int32(stop_at - start)
            carry, drawn_TB = take_steps(carry, last_B, inputs_TB, place, count, draw)
            drawn.append(np.asarray(drawn_TB.addressable_data(0))[:count])
            last_B = drawn[-1][-1]
    return np.concatenate(drawn), None


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


def _make_sampler(setup: Setup) -> jax.stages.Compiled:
    """A program that takes up to `CALL_STEPS` steps.

    (params, frozen, carry, token before [B], given tokens [T, B], place of the first, number of steps, draw)
    -> (carry, tokens that are drawn [T, B], on every device).
    """
    forward = make_forward(setup.parts, setup.mesh, predicts=True)
    table, task = full_table(setup.partition, backward=False), setup.task
    assert isinstance(task, LM)

    def run(params, frozen, carry, last_B, given_TB, first_place, num_steps, draw):
        def step(number, carried):
            carry, drawn_B, drawn_TB = carried
            place = first_place + number
            given_B = lax.dynamic_index_in_dim(given_TB, number, keepdims=False)
            inputs_B1 = jnp.where(given_B == TO_DRAW, drawn_B, given_B)[:, None]
            parts = {"starts": place == 0, "draw": draw._replace(place=place)}
            if task.packed:
                parts["resets"] = inputs_B1 == draw.separator
                parts["lengths"] = jnp.ones_like(drawn_B)
            batch = Batch(inputs_B1, jnp.zeros_like(inputs_B1), **parts)
            carry, outputs = forward(params, frozen, carry, batch, None, table)
            drawn_B = outputs[TOKEN][0]
            drawn_TB = lax.dynamic_update_index_in_dim(drawn_TB, drawn_B, number, 0)
            return carry, drawn_B, drawn_TB

        start = carry, last_B, jnp.zeros_like(given_TB)
        carry, _, drawn_TB = lax.fori_loop(0, num_steps, step, start)
        return carry, drawn_TB

    kernels = has_kernels(setup.facts.model, setup.mesh)
    options = compiler_options(setup.mesh, has_kernels=kernels)
    everywhere, state = NamedSharding(setup.mesh, P()), abstract_state(setup)
    carry_sharding = jax.tree.map(lambda leaf: leaf.sharding, state.carry)
    shardings = carry_sharding, everywhere
    jitted = jax.jit(run, compiler_options=options, out_shardings=shardings)
    rows = setup.facts.batch_size
    last_B = jax.ShapeDtypeStruct((rows,), jnp.int32)
    given_TB = jax.ShapeDtypeStruct((CALL_STEPS, rows), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jitted.lower(
        state.params, state.frozen, state.carry, last_B, given_TB, number, number, Draw.of()
    )
    program = lowered.compile()
    if setup.parallel.splits_units:
        check_program(program)
    return program
