"""Numbers that are printed: counts are of the model alone; estimates say so, and are near compiled ones."""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api
from lib.models import Regress, Tokens

from jaxpar import (
    ArrayBatches,
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    inspect_step,
    show,
)
from jaxpar.analysis import inspect_function
from jaxpar.lm import LM
from jaxpar.nn import GRU, LSTM
from jaxpar.planning import estimate_step, plan

EXAMPLES = Path(__file__).parent.parent / "examples"


# ---- how many parameters ----


class Kinds(nnx.Module):
    """Two kinds of layers, so a stage has empty rows of one of them."""

    def __init__(self, rngs):
        layers = [lambda rngs: GRU(8, rngs=rngs)] * 2 + [lambda rngs: LSTM(8, rngs=rngs)] * 2
        self.layers = Stack(layers, rngs=rngs)
        self.scale = nnx.Variable(jnp.ones(8))

    def first(self, batch, at):
        return batch["x"] * self.scale[...][None, None]

    def last(self, y, batch, at):
        return Sums(jnp.sum(y**2 * batch["weight"][None, :, None]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class OfKinds(Task):
    optimizer: OptimizerConfig = OptimizerConfig(warmup_steps=0)

    def make_model(self, rngs):
        return Kinds(rngs)

    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": np.ones((64, 4, 8), np.float32)}, 8, seed)


COUNTED = {
    "two kinds": (OfKinds(), 1920 + 8),
    "frozen": (Regress(freeze="inputs"), None),
    "tied": (Tokens(), 1000 * 16 + 4 * (2 * 16 * 64 + 64)),
    "ends in parts": (LM(4, 16, 16, vocab_size=384, batch_size=8, seq_len=4), None),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", COUNTED)
def test_a_model_has_as_many_parameters_on_every_mesh(name):
    task, number = COUNTED[name]
    variables = nnx.state(nnx.eval_shape(lambda: task.make_model(nnx.Rngs(0))), nnx.Variable)
    drawn = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert number in (None, drawn)
    for mesh in ("dp1", "dp2", "pp2", "pp4", "dp2pp2", "tp2"):
        parallel = Parallel(mesh, fsdp=mesh == "dp2pp2")
        *_, line = str(show(api.abstract_state(task, parallel))).split("\n\n")
        assert line.startswith(f"{drawn:,} parameters, "), (mesh, line)


# ---- what the CPU's compiler does by itself ----


def split(shape, dtype=jnp.float32):
    mesh = MeshConfig(tensor=4, devices=(0, 1, 2, 3)).build()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(None, "tensor")))


def whole_again(x):
    """Its sum over the split dim, on every device."""
    return jnp.sum(x * x, axis=1)


@pytest.mark.parametrize(
    ("function", "dtype", "told"),
    [
        (whole_again, jnp.float32, []),
        (whole_again, jnp.bfloat16, ["bfloat16"]),
    ],
    ids=["sum", "sum of bfloat16"],
)
def test_what_the_compiler_of_cpus_sends_besides_is_told(function, dtype, told):
    report = inspect_function(function, split((8, 64), dtype))
    assert len(report.notes) == len(told)
    for words, note in zip(told, report.notes, strict=True):
        assert words in note
        assert note.strip() in str(report).replace("\n", " ")


@pytest.mark.full
def test_a_step_in_bfloat16_on_cpus_says_that_it_sends_float32():
    task = LM(1, 16, 16, vocab_size=384, batch_size=8, seq_len=4, dtype="bfloat16")
    told = " ".join(str(inspect_step(task, "dp1tp2")).split())
    assert "on CPUs, XLA sends bfloat16 and float16 as float32; TPUs and GPUs send half" in told
    assert "on CPUs, XLA" not in str(
        inspect_step(dataclasses.replace(task, dtype="float32"), "dp1tp2")
    )


# ---- estimates ----

# Bytes over data and stage; more where the compiler splits a sum over `tensor`, which is idle then.
BYTES_ERROR = 2.1
LEFT_OUT = 20_000  # bytes of sums of the loss, and of ends that are small
FLOPS_ERROR = 1.5  # estimates are of matrix products


@functools.cache
def model(name):
    """The language model, a transformer, and two models that are none of jaxpar's."""
    transformer = api.task_class(f"{EXAMPLES}/transformer.py:Characters")
    return {
        "lm": LM(4, 64, 64, vocab_size=384, batch_size=16, seq_len=16),
        "transformer": transformer(width=64, num_layers=4, batch_size=16, seq_len=16),
        "tied": Tokens(),
        "regress": Regress(("gru",) * 4),
    }[name]


def parallel_of(name, mesh):
    cut = {"num_microbatches": 4} if name == "transformer" else {"num_chunks": 4}
    return Parallel(mesh, PipelineConfig(**cut) if "pp" in mesh else PipelineConfig())


QUICK = ("tied", "tp4"), ("transformer", "dp4"), ("lm", "pp4"), ("regress", "dp4")


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(*row, marks=[pytest.mark.more] * (row not in QUICK))
        for row in itertools.product(
            ("lm", "transformer", "tied", "regress"), ("dp4", "tp4", "pp4", "dp2pp2tp2")
        )
    ],
)
def test_estimates_are_near_what_is_compiled(name, mesh):
    task, parallel = model(name), parallel_of(name, mesh)
    cost, report = estimate_step(task, parallel), inspect_step(task, parallel)
    estimated, compiled = Counter(), Counter()
    for sums, parts in ((estimated, cost.sent), (compiled, report.collectives)):
        for part in parts:
            if "tensor" not in part.axes:
                runs = part.runs if hasattr(part, "runs") else part.count
                sums[part.axes] += runs * part.bytes
    for axes in {*estimated, *compiled}:
        more, fewer = sorted((estimated[axes], compiled[axes]), reverse=True)
        assert more <= BYTES_ERROR * fewer + LEFT_OUT, (axes, estimated, compiled)


@pytest.mark.more
@pytest.mark.parametrize("name", ["lm", "transformer", "block", "dense"])
def test_flops_are_near_those_of_the_compiled_step(name):
    """XLA counts the body of a loop once: there is one layer here, and one time step of a recurrent one."""
    task = {
        "lm": LM(1, 64, 64, vocab_size=384, batch_size=16, seq_len=1),
        "transformer": dataclasses.replace(model("transformer"), num_layers=1),
    }.get(name) or Regress((name,))
    parallel = Parallel(MeshConfig(devices=(0,)))
    estimated = sum(sum(passes) for part in api.part_costs(task).values() for passes in part)
    assert 1 <= inspect_step(task, parallel).flops / estimated <= FLOPS_ERROR


@pytest.mark.full
def test_what_is_printed_of_estimates_says_so():
    """And over `tensor`, where the compiler decides, none is printed."""
    task = model("tied")
    cost = estimate_step(task, "dp2tp2")
    for printed in (str(cost), str(cost.known(inspect_step(task, "dp2tp2")))):
        assert re.search(r"^ +axes +estimated +compiled +measured$", printed, re.MULTILINE)
        assert re.search("estimated step +layers", printed)
        assert "arithmetic" not in printed
    compiled = str(cost.known(inspect_step(task, "dp2tp2")))
    for line in re.findall(r"^(?:all|collective)-\S+ .*$", compiled, re.MULTILINE):
        columns = re.findall(r"[\d.]+ \w?B", line)
        assert len(columns) == (1 if "tensor" in line else 2), line
    ranking = plan(task, "dp2", num_finalists=0)
    text = " ".join(str(ranking).split())
    assert "status" in text
    assert "estimated" in text
