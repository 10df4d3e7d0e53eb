"""A task on devices is put together once: what it is, how it lies, and what is made of it."""

import dataclasses
import gc
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.models import FEATURES, WIDTH, Regress, Series

import jaxpar
from jaxpar import MeshConfig, TrainConfig
from jaxpar.lm import LM, load_corpus
from jaxpar.planning import estimate_step

pytestmark = pytest.mark.fresh

SMALL = Regress(kinds=("gru", "gru"), batch_size=8, seq_len=4)
RUNS = 20  # of one task in one process, after the first ones
NOISE = 60  # objects that Python and JAX keep of each: names of files, lines of logs


@dataclasses.dataclass(frozen=True)
class Counted(Regress):
    """Counts how often its model is made, or traced."""

    def make_model(self, rngs):
        MADE.append(1)
        return super().make_model(rngs)


MADE = []


def test_calls_that_take_a_setup_trace_its_model_once():
    task = Counted(kinds=("gru", "dense"), batch_size=8, seq_len=4)
    setup = jaxpar.fit(task, "pp2", TrainConfig(num_steps=1), quiet=True).setup
    before = len(MADE)
    state, step = jaxpar.init_state(setup, seed=1), jaxpar.make_train_step(setup)
    step(state, task.make_batches("train", 0).batch(0))
    assert len(MADE) == before > 0
    assert jaxpar.make_train_step(setup) is step


def test_calls_that_take_a_task_trace_its_model_each():
    task = Counted(kinds=("gru",), batch_size=8, seq_len=4)
    for call in (jaxpar.make_train_step, jaxpar.init_state, estimate_step, jaxpar.inspect_step):
        before = len(MADE)
        call(task)
        assert len(MADE) > before, call


@pytest.mark.full
def test_a_setup_is_taken_for_what_it_was_made_of():
    setup = jaxpar.fit(SMALL, "dp-1pp2", TrainConfig(num_steps=1), quiet=True).setup
    assert jaxpar.inspect_step(setup).totals == jaxpar.inspect_step(SMALL, "dp-1pp2").totals


def test_a_mesh_of_other_sizes_is_refused():
    mesh = MeshConfig(data=2, devices=(0, 1)).build()
    with pytest.raises(ValueError, match=r"mesh has the sizes .*'data': 2.* parallel has pp2"):
        jaxpar.init_state(SMALL, "pp2", mesh=mesh)


def test_a_text_that_has_changed_is_read_again(tmp_path):
    path = tmp_path / "text.txt"
    texts = ("a cat sat\n" * 60, "a dog sat on a cat\n" * 60)
    task = LM(1, 8, 8, batch_size=2, seq_len=4, corpus=str(path))
    for text in texts:
        path.write_text(text)
        words = task.resolve().read_text().vocabulary.words
        assert words == load_corpus(str(path)).vocabulary.words
    assert "dog" in words


@pytest.mark.full
def test_what_computes_reaches_the_layers():
    """A model is for the devices of its mesh, which need not be those that JAX has."""

    def turns(task, part, sheet):
        """How often loops turn in a part of a step."""
        machine = dataclasses.replace(api.machine_of(sheet), loop_seconds=1.0)
        return round(estimate_step(task, "dp1", machine=machine).parts[part])

    task = LM(1, 16, 16, 384, layer="rglru", batch_size=2, seq_len=8)
    assert turns(task, "layers", "cpu") >= 8
    assert turns(task, "layers", "v5e") == 0
    cells = 128 * 2**10  # rows x time steps whose logits do not fit a CPU's cache
    large = LM(1, 16, 16, 384, batch_size=cells // 64, seq_len=64)
    assert turns(large, "head", "cpu") > turns(large, "head", "h100")


MEMORY = """
import re
from pathlib import Path
import jax
from jaxpar.lm import LM
from jaxpar.planning import estimate_step

def peak():  # not ru_maxrss, which begins with that of the process that starts this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

jax.devices()
before = peak()
estimate_step(LM(2, 1024, 1024, vocab_size=1000, batch_size=512, seq_len=512), "dp1")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory of a process")
def test_tracing_makes_no_activations():
    """Of a whole batch they are 1 GB here."""
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 0.3e9


def adopted(x):
    arrays = {"x": x.reshape(-1, 4, WIDTH)}
    return jaxpar.adopt(Blocks, loss, "blocks", batches=arrays, batch_size=8)


def in_the_layer_form(x):
    class OfArray(Regress):
        def make_batches(self, split, seed=None):
            arrays = {"x": x[:-1, :FEATURES], "y": x[1:, :FEATURES], "resets": x[1:, -1] > 1}
            return Series(arrays, self.batch_size, self.seq_len, seed)

    return OfArray(kinds=("gru", "gru"), batch_size=8, seq_len=4)


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    error = jnp.square(model(batch["x"]) - batch["x"])
    return jaxpar.mean(error.sum((1, 2)), batch["weight"])


@pytest.mark.full
@pytest.mark.parametrize(("form", "mesh"), [(adopted, "dp2"), (in_the_layer_form, "pp2")])
def test_runs_one_after_the_other_leave_nothing_in_memory(form, mesh, tmp_path):
    data = []

    def run(numbers):
        for number in numbers:
            x = np.random.default_rng(0).normal(size=(800, WIDTH)).astype(np.float32)
            data.append(weakref.ref(x))
            train = jaxpar.TrainConfig(num_steps=2, out_dir=str(tmp_path / str(number)))
            jaxpar.fit(form(x), mesh, train, quiet=True)
            del x
        gc.collect()
        gc.collect()  # what the first one has freed can hold more
        return len(gc.get_objects()), len(jax.live_arrays())

    _, arrays_of_other_tests = run(())
    before, _ = run(range(2))  # what is made once
    after, arrays = run(range(2, 2 + RUNS))
    assert after - before < NOISE * RUNS
    assert arrays <= arrays_of_other_tests
    assert [array() for array in data] == [None] * len(data)
