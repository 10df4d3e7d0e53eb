"""A mistake in a call from Python is a ValueError or OSError, at once, that says what to give instead.

Those of the command line are in `test_bad_input`.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api

import jaxpar
from jaxpar import (
    ArrayBatches,
    MeshConfig,
    OptimizerConfig,
    Parallel,
    Rules,
    SeriesBatches,
    Stack,
    TrainConfig,
)
from jaxpar.nn import Stateless
from jaxpar.pipeline import make_schedule
from jaxpar.planning import plan

TASK = jaxpar.lm.LM(
    num_layers=2, hidden_size=8, embed_size=8, vocab_size=32, batch_size=8, seq_len=4
)
MESH = "dp2tp4"
SECONDS = 3.0  # of this process; most take none that can be measured


def batch(rows=8, steps=4, dtype=np.int32, token=0):
    tokens = np.full((rows, steps), token, dtype)
    return jaxpar.lm.Batch(tokens, tokens, starts=True)


class DataFrame:
    """What pandas and polars have in common."""

    def to_numpy(self, dtype):
        return np.zeros((3, 2), dtype)


class Made:
    """What the calls are about."""

    def __init__(self):
        self.state = jaxpar.init_state(TASK, MESH)
        self.other = jaxpar.init_state(TASK, "dp8")
        self.abstract = api.abstract_state(TASK, Parallel(MESH))
        self.step = jaxpar.make_train_step(TASK, MESH)
        self.eval = api.eval_step(TASK, MESH)
        self.grad = jaxpar.value_and_grad(TASK, MESH)
        self.rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(8, 8, rngs=self.rngs)


@pytest.fixture(scope="module")
def made():
    return Made()


A_TASK, A_LAYOUT = (
    "must be a task, such as jaxpar.lm.LM",
    "must be a Parallel, a MeshConfig, or a text such as dp2",
)
NOBODY = r"no user nobody-here has a home folder\nFix: write \./~nobody-here for a folder, or give"
A_STATE = "must be what init_state or a step returns"
CALLS = {
    "fit a dict": (lambda m: jaxpar.fit({}), rf"task=\{{\}} \(dict\): {A_TASK}"),
    "fit a name": (lambda m: jaxpar.fit("lm"), f"task='lm' .*{A_TASK}"),
    "fit nothing": (lambda m: jaxpar.fit(None), A_TASK),
    "fit a class": (lambda m: jaxpar.fit(jaxpar.lm.LM), r"task=LM is a class\nFix: give an object, LM\(\)"),
    "fit on a number": (lambda m: jaxpar.fit(TASK, 8), rf"parallel=8 \(int\): {A_LAYOUT}"),
    "fit on a dict": (lambda m: jaxpar.fit(TASK, {"data": 8}), A_LAYOUT),
    "fit on no mesh": (lambda m: jaxpar.fit(TASK, "8 devices"), "mesh '8 devices' is not made of axes"),
    "fit on too many devices": (lambda m: jaxpar.fit(TASK, "dp16"), "needs 16 devices, got 8"),
    "fit with a dict of settings": (lambda m: jaxpar.fit(TASK, "dp8", {}), "must be a TrainConfig"),
    "fit with a number of steps": (lambda m: jaxpar.fit(TASK, "dp8", 100), r"train=100 \(int\): must be"),
    "fit with a function for a report": (
        lambda m: jaxpar.fit(TASK, "dp8", report=print), "report=.*: must be a Report, such as ConsoleReport",
    ),
    "fit of too small a vocabulary": (
        lambda m: jaxpar.fit(TASK, "dp8"), "vocab_size=32 is less than the .* words of corpus",
    ),
    "resume what is not there": (
        lambda m: jaxpar.fit(TASK, "dp8", TrainConfig(out_dir="nowhere"), resume=True), "nowhere holds",
    ),
    "state of a dict": (lambda m: jaxpar.init_state({}, MESH), A_TASK),
    "state on a number": (lambda m: jaxpar.init_state(TASK, 3), A_LAYOUT),
    "state on too many devices": (lambda m: jaxpar.init_state(TASK, "dp9"), "needs 9 devices, got 8"),
    "state of rows that do not divide": (
        lambda m: jaxpar.init_state(TASK, "dp3"), "batch_size=8 does not divide by data=3",
    ),
    "state of no text": (
        lambda m: jaxpar.init_state(jaxpar.lm.LM(corpus="nowhere"), "dp8"), "no corpus 'nowhere'",
    ),
    "train step of a dict": (lambda m: jaxpar.make_train_step({}, MESH), A_TASK),
    "train step on a number": (lambda m: jaxpar.make_train_step(TASK, 3), A_LAYOUT),
    "train step with a number": (lambda m: jaxpar.make_train_step(TASK, MESH, 3), "must be a TrainConfig"),
    "gradients of a dict": (lambda m: jaxpar.value_and_grad({}, MESH), A_TASK),
    "gradients on a number": (lambda m: jaxpar.value_and_grad(TASK, 3), A_LAYOUT),
    "gradients with a number": (lambda m: jaxpar.value_and_grad(TASK, MESH, 3), "must be a TrainConfig"),
    "gradients on too many devices": (
        lambda m: jaxpar.value_and_grad(TASK, "dp16"), "needs 16 devices, got 8",
    ),
    "evaluation step of a dict": (lambda m: api.eval_step({}, MESH), A_TASK),
    "evaluation step on a list": (lambda m: api.eval_step(TASK, []), A_LAYOUT),
    "a look at a dict": (lambda m: jaxpar.inspect_step({}), A_TASK),
    "a look on a number": (lambda m: jaxpar.inspect_step(TASK, 3), A_LAYOUT),
    "a measurement of a dict": (lambda m: jaxpar.measure_step({}), A_TASK),
    "a measurement without stages": (lambda m: jaxpar.measure_step(TASK, MESH), "no pipeline to measure"),
    "too many rows": (
        lambda m: m.step(m.state, batch(16)), r"inputs_BT is int32\[16, 4\], in .* of task LM it is int32\[",
    ),
    "too few rows": (lambda m: m.step(m.state, batch(3)), r"int32\[3, 4\], in batches"),
    "too many steps": (lambda m: m.step(m.state, batch(8, 5)), "a batch of 5 time steps, those of .* have 4"),
    "tokens that are no integers": (
        lambda m: m.step(m.state, batch(dtype=np.float32)), "is float32.*it is int32|no ids; give integers",
    ),
    "tokens beyond the vocabulary": (
        lambda m: m.step(m.state, batch(token=99)), "token 99 .* vocabulary of 32",
    ),
    "a batch of another task": (
        lambda m: m.step(m.state, {"x": np.zeros((8, 4))}), "the batch is a dict of x, those of task LM",
    ),
    "no batch": (lambda m: m.step(m.state, None), "the batch is nothing, those"),
    "a state of another mesh": (
        lambda m: m.step(m.other, batch()), r"lies on a mesh of \{'data': 8, .* is for \{'data': 2,",
    ),
    "no state": (lambda m: m.step({}, batch()), A_STATE),
    "an abstract state": (lambda m: m.step(m.abstract, batch()), r"the state is abstract\.\nFix: make one"),
    "gradients of too many rows": (lambda m: m.grad(m.state, batch(16)), r"int32\[16, 4\]"),
    "gradients of tokens beyond the vocabulary": (
        lambda m: m.grad(m.state, batch(token=99)), "token 99 .* vocabulary of 32",
    ),
    "gradients of a state of another mesh": (lambda m: m.grad(m.other, batch()), "lies on a mesh of"),
    "gradients of parameters alone": (lambda m: m.grad(m.state.params, batch()), A_STATE),
    "evaluation of too many rows": (lambda m: m.eval(m.state, batch(16)), r"int32\[16, 4\]"),
    "evaluation of a state of another mesh": (lambda m: m.eval(m.other, batch()), "lies on a mesh of"),
    "evaluation of no state": (lambda m: m.eval(None, batch()), A_STATE),
    "an audit of no state": (lambda m: api.audit({}), A_STATE),
    "an audit of a state on the host": (
        lambda m: api.audit(jax.device_get(m.state)), r"not placed on a mesh\nFix: make it with init_state",
    ),
    "a mesh of a text": (lambda m: MeshConfig("dp8"), "data='dp8': must be a whole number"),
    "a mesh of a fraction": (lambda m: MeshConfig(2.0), r"data=2\.0 \(float\): must be a whole number"),
    "a mesh of nothing": (lambda m: MeshConfig(0), "mesh data=0\nFix: use 1 or more, or -1"),
    "a mesh read from a number": (lambda m: MeshConfig.parse(8), r"mesh=8 \(int\): must be the shape of one"),
    "a mesh read from an empty text": (lambda m: MeshConfig.parse(""), "mesh '' is not made of axes"),
    "a layout of a number": (lambda m: Parallel(8), r"mesh=8 \(int\): must be a MeshConfig"),
    "a pipeline of a dict": (lambda m: Parallel("pp8", {}), "pipeline=.*: must be a PipelineConfig"),
    "shares of a number": (lambda m: Parallel("dp8", shares=3), "shares=3 .*: must be a list"),
    "simulated devices by name": (lambda m: jaxpar.simulate_devices("8"), "num_devices='8'.*a whole number"),
    "half a device": (lambda m: jaxpar.simulate_devices(2.5), r"num_devices=2\.5 .*: must be a whole number"),
    "a stack of a number": (lambda m: Stack(3, rngs=m.rngs), "makers=3 .*: must be a list of functions"),
    "a stack of numbers": (lambda m: Stack([3], rngs=m.rngs), "a maker of a Stack=3 .*: must be a list"),
    "a stack without random numbers": (lambda m: Stack([nnx.Linear], rngs=0), r"rngs=0 .*: must be"),
    "a stack of one layer": (
        lambda m: Stack([lambda rngs: m.linear] * 2, rngs=m.rngs), "gives Linears that share bias, but each",
    ),
    "a stack of layers with one part": (
        lambda m: Stack([lambda rngs: Stateless(m.linear)] * 2, rngs=m.rngs), r"share module\.bias.*\nFix: m",
    ),
    "batches of a list": (lambda m: ArrayBatches([1, 2], 2), r"arrays=\[1, 2\] .*: must be a dict of arrays"),
    "batches of nothing": (lambda m: ArrayBatches({}, 2), "arrays of {} rows"),
    "batches of a number": (lambda m: ArrayBatches({"x": 3}, 2), r"arrays\['x'\]=3 has no rows"),
    "batches of unequal sequences": (
        lambda m: ArrayBatches({"x": [np.zeros(3), np.zeros(5)]}, 2),
        r"arrays\['x'\] has 2 rows of unequal lengths\.\n.*PackedBatches",
    ),
    "a series of unequal sequences": (
        lambda m: SeriesBatches({"x": [[1] * n for n in range(1, 9)]}, 2, 4),
        r"8 rows of unequal lengths\.\n.* np\.concatenate\(x\) and their len",
    ),
    "a series of unequal sequences as objects": (
        lambda m: SeriesBatches({"x": np.array([[1], [1, 2]], object)}, 2, 4), "2 rows of unequal len",
    ),
    "batches of unequal pictures": (
        lambda m: ArrayBatches({"x": [np.zeros((2, 3)), np.zeros((2, 4))]}, 2), "2 rows of unequal shapes",
    ),
    "batches of a data frame": (
        lambda m: ArrayBatches({"x": DataFrame()}, 2), r"\['x'\] is a DataFrame\.\n.* x\.to_numpy\(",
    ),
    "batches of different rows": (
        lambda m: ArrayBatches({"x": np.zeros(3), "y": np.zeros(4)}, 2), "'x': 3, 'y': 4",
    ),
    "a text for the rows of a batch": (
        lambda m: ArrayBatches({"x": np.zeros(3)}, "2"), r"batch_size='2' \(str\): must be a whole number",
    ),
    "a series too short": (lambda m: SeriesBatches({"x": np.zeros(3)}, 2, 4, 0), "3 steps are fewer"),
    "a series of warming up": (
        lambda m: SeriesBatches({"x": np.zeros(4)}, 2, 4, warmup=4), "4 steps are fewer than the 5 that",
    ),
    "warming up in training": (
        lambda m: SeriesBatches({"x": np.zeros(9)}, 1, 4, 3, warmup=2), "warmup=2 with seed=3",
    ),
    "less than no warming up": (
        lambda m: SeriesBatches({"x": np.zeros(9)}, 1, 4, warmup=-1), "warmup=-1 with seed=None",
    ),
    "a rate in words": (lambda m: OptimizerConfig(learning_rate="high"), "_rate='high': must be a number"),
    "no such optimizer": (lambda m: OptimizerConfig(name="adamm"), "name='adamm': must be 'adam' or"),
    "half a step": (lambda m: TrainConfig(num_steps=1.5), r"num_steps=1\.5 \(float\): must be a whole"),
    "steps backwards": (lambda m: TrainConfig(num_steps=-1), "num_steps=-1: must be positive"),
    "rules of a dict": (lambda m: Rules({"a": "tensor"}), r"rules=.* is not a table of rules"),
    "rules of a list": (lambda m: Rules([1]), r"rules=\[1\] is not a table of rules"),
    "parameters split over no data": (
        lambda m: jaxpar.fit(TASK, Parallel("tp8", fsdp=True)), "fsdp=True shards over data-parallel groups",
    ),
    "shares for another mesh": (
        lambda m: jaxpar.init_state(TASK, Parallel("dp4", shares=(3, 1))), r"or shares=None \(--shares",
    ),
    "a mesh of the planner's": (
        lambda m: jaxpar.fit(TASK, "auto"), "mesh 'auto' is not made of axes and sizes",
    ),
    "a picture of an array of NumPy": (
        lambda m: jaxpar.show(np.zeros(3)), r"no picture of type ndarray\nFix: give a mesh, a JAX array",
    ),
    "a picture of a number": (lambda m: jaxpar.show(3), "no picture of type int"),
    "no such schedule": (lambda m: make_schedule("1f1c", 2, 2), "'1f1c' is not a schedule"),
    "a schedule of no stage": (lambda m: make_schedule("1f1b", 0, 2), "num_stages=0 is not a count"),
    "stages in words": (lambda m: make_schedule("1f1b", "4", 2), "num_stages='4' is not a count"),
    "groups without interleaving": (lambda m: make_schedule("1f1b", 4, 2, 1, 2), r"cannot have num_groups=2"),
    "a plan for a name": (lambda m: plan("lm"), f"task='lm' .*{A_TASK}"),
    "a plan for a number": (lambda m: plan(TASK, machine=3), r"machine=3 \(int\): must be the name of one"),
    "fewer finalists than none": (lambda m: plan(TASK, num_finalists=-1), "finalists=-1 is too small"),
    "a plan for no such machine": (lambda m: plan(TASK, machine="gpu"), "machine 'gpu': must be one of v5e"),
    "a sample of no run": (lambda m: jaxpar.lm.sample("nowhere"), "nowhere holds no run"),
    "a start of a number": (
        lambda m: jaxpar.fit(TASK, start=3), r"start=3 \(int\): must be",
    ),
    "a start at an address": (lambda m: jaxpar.Start("s3://a/b"), "start='s3://a/b' must be a folder"),
    "a name for nothing": (lambda m: jaxpar.Start("a", rename=("b",)), r"rename=\('b',\): must be"),
    "half a pattern": (lambda m: jaxpar.Start("a", ignore=("(",)), "is not a valid pattern"),
    "a start and a resumed run": (
        lambda m: jaxpar.fit(TASK, start="a", resume=True), "start and resume exclude each other",
    ),
    "a corpus of no file": (lambda m: jaxpar.lm.load_corpus("nowhere"), "no corpus 'nowhere': it is neither"),
    "a corpus of a number": (lambda m: jaxpar.lm.load_corpus(3), r"corpus=3 \(int\): must be python-docs, "),
    "a run in nobody's home": (
        lambda m: jaxpar.fit(TASK, "dp8", TrainConfig(out_dir="~nobody-here/x")), NOBODY,
    ),
    "nobody's run": (lambda m: jaxpar.load_run("~nobody-here/x"), NOBODY),
    "a sample of nobody's run": (lambda m: jaxpar.lm.sample("~nobody-here/x"), NOBODY),
    "nobody's corpus": (lambda m: jaxpar.lm.load_corpus("~nobody-here/x"), NOBODY),
    "a task of nobody's corpus": (
        lambda m: jaxpar.init_state(jaxpar.lm.LM(corpus="~nobody-here/x"), "dp8"), NOBODY,
    ),
    "nobody's config": (lambda m: api.settings("train", "lm", "--config", "~nobody-here/x.toml"), NOBODY),
    "nobody's logs": (lambda m: jaxpar.TensorBoard("~nobody-here/x"), NOBODY),
    "layers in words": (lambda m: jaxpar.lm.LM("four"), "num_layers='four': must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_told_at_once_and_changes_no_file(name, made, tmp_path, monkeypatch):
    call, message = CALLS[name]
    monkeypatch.chdir(tmp_path)
    begin = time.process_time()
    with pytest.raises((ValueError, OSError), match=message) as raised:
        call(made)
    assert time.process_time() - begin < SECONDS
    assert str(raised.value).count("\n") <= 2
    assert not list(tmp_path.iterdir())


def test_what_the_remedies_name_is_taken(made):
    """A shape, a mesh, and nothing at all where a layout is wanted."""
    of_mesh = jaxpar.init_state(TASK, MeshConfig(data=2, tensor=4))
    for leaf, other in zip(jax.tree.leaves(of_mesh), jax.tree.leaves(made.other), strict=True):
        assert jnp.array_equal(leaf, other)
