"""Data that change are never another number in silence: between reads, processes, and runs of one folder."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest
from lib import api

import jaxpar
from jaxpar import ArrayBatches, Parallel, TrainConfig, fit

pytestmark = pytest.mark.usefixtures("compile_once")

SOURCE = '''
import dataclasses
import itertools
import os

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar import ArrayBatches, OptimizerConfig, Stack, Sums, Task
from jaxpar.nn import Stateless


class Line(nnx.Module):
    """y = wx + b, and layers that change little."""

    time_major = False

    def __init__(self, rngs):
        make = lambda rngs: Stateless(nnx.Linear(4, 4, rngs=rngs))
        self.layers = Stack([make] * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        error = jnp.sum((y - batch["y"]) ** 2, axis=-1) * batch["weight"]
        return Sums(jnp.sum(error), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Fit(Task):
    """Fits lines to the arrays of a file, which says nothing of its data."""

    path: str = os.environ.get("DATA", "data.npy")
    batch_size: int = 8
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, warmup_steps=0)

    def make_model(self, rngs):
        return Line(rngs)

    def make_batches(self, split, seed=None):
        rows = np.load(self.path)
        if split != "train":
            rows = rows[:16]
        kind = Later if "LATER" in os.environ else ArrayBatches
        return kind({"x": rows, "y": 2 * rows}, self.batch_size, seed)


class Later(ArrayBatches):
    """The rows of the batch after the run are others."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        if step == 8 and self.seed is not None:
            batch["x"] = batch["x"] + 1
        return batch
'''


def rows(num_rows=64):
    return np.random.default_rng(0).normal(size=(num_rows, 4)).astype(np.float32)


@pytest.fixture
def own(tmp_path):
    """A task of one's own, by its file of data."""
    (tmp_path / "own.py").write_text(SOURCE)
    np.save(tmp_path / "data.npy", rows())
    found = api.task_class(f"{tmp_path / 'own.py'}:Fit")
    return found(path=str(tmp_path / "data.npy"))


def on(shape):
    """A mesh of the first devices."""
    mesh = jaxpar.MeshConfig.parse(shape)
    return dataclasses.replace(mesh, devices=tuple(range(mesh.num_devices)))


def make_train(tmp_path, **train):
    return TrainConfig(
        **{"num_steps": 4, "log_every": 1, "out_dir": str(tmp_path / "run"), **train}
    )


# ---- checksums ----


def test_checksums_are_the_same_on_every_mesh(own):
    meshes = ("dp1", "dp2", "dp4tp2", "pp2", "dp2pp2")
    first, *others = [api.identity_of_batch(own, Parallel(on(mesh)), 6) for mesh in meshes]
    assert [*first] == ["6"]
    assert others == [first] * 4
    assert api.identity_of_batch(own, Parallel(on("dp1")), 5)["5"] != first["6"]


# ---- what is no function of step and rows ----


class Drawing:
    """Batches by an iterator."""

    batch_size, num_windows = 8, 4

    def __init__(self):
        self.source = iter(range(10**6))

    def batch(self, step, rows=slice(None)):
        n = next(self.source)
        x = np.full((8, 4), n, np.float32)[rows]
        return {"x": x, "y": x, "weight": np.ones(len(x), np.float32)}


class Whole(ArrayBatches):
    """Batches that do not look at the rows that are asked for."""

    def batch(self, step, rows=slice(None)):
        return super().batch(step)


class NoRows(ArrayBatches):
    """Batches that cannot be asked for rows."""

    def batch(self, step):
        return super().batch(step)


ARRAYS = {"x": rows(), "y": rows()}
WRONG = {
    "an iterator": (
        Drawing,
        r"split 'train': batch\(0\) has other rows when it is read again, .*\nFix: .*jaxpar\.ArrayBatches, "
        r"or jaxpar\.IteratorBatches",
    ),
    "whole batches": (
        lambda: Whole(ARRAYS, 8, 0),
        r"split 'train': batch\(0, slice\(0, 4\)\) has \[8\] rows\.\nFix: return only these 4 rows",
    ),
    "no rows": (
        lambda: NoRows(ARRAYS, 8, 0), r"(?s)split 'train'.*rows.*write batch\(self, step, rows=slice",
    ),
}  # fmt: skip


@pytest.mark.rows(1)
@pytest.mark.parametrize("wrong", WRONG)
def test_batches_that_are_no_function_of_step_and_rows_are_refused(own, tmp_path, wrong):
    make, message = WRONG[wrong]

    class Wrong(type(own)):
        def make_batches(self, split, seed=None):
            return make() if split == "train" else super().make_batches(split, seed)

    with pytest.raises(ValueError, match=message):
        fit(Wrong(path=own.path), on("dp2"), make_train(tmp_path))
    assert not (tmp_path / "run").exists()


# ---- a run that is resumed ----


@pytest.mark.full
def test_other_data_of_a_task_that_does_not_describe_them_are_refused(own, tmp_path):
    fit(own, on("dp2"), make_train(tmp_path))
    fit(own, on("dp4"), make_train(tmp_path, num_steps=5), resume=True)  # the same, on another mesh
    np.save(tmp_path / "data.npy", rows() + 1)
    message = r"the data of the run in .* have changed: batches\.train was [0-9a-f]{16}, is [0-9a-f]{16}; "
    with pytest.raises(ValueError, match=message):
        fit(own, on("dp2"), make_train(tmp_path, num_steps=6), resume=True)
    with pytest.raises(ValueError, match=message):
        jaxpar.load_run(tmp_path / "run").evaluate()


def test_a_row_that_changes_in_a_later_batch_is_found(own, tmp_path):
    """Batch 0 of each split is what it was; the next one after the checkpoint is not."""
    fit(own, on("dp2"), make_train(tmp_path))
    batches, data = own.make_batches("train", 0), rows()
    ids = np.random.default_rng([0, 0]).permutation(64)[4 * 8 : 5 * 8]  # of batch 4
    data[max(ids[ids >= 16])] += 1
    np.save(tmp_path / "data.npy", data)
    assert batches.num_windows == 8
    jaxpar.load_run(tmp_path / "run").evaluate()  # its data are taken for the same
    with pytest.raises(
        ValueError, match="batch 4 is not the one that the checkpoint of step 4 continues with: the"
    ):
        fit(own, on("dp4"), make_train(tmp_path, num_steps=6), resume=True)


@pytest.mark.full
def test_batches_that_are_cut_otherwise_are_not_compared(own, tmp_path):
    """Their settings say so: other rows are what was asked for."""
    free = dataclasses.make_dataclass(
        "Free",
        [("batch_size", int, dataclasses.field(default=8, metadata={"free": True}))],
        bases=(type(own),),
        frozen=True,
    )
    fit(free(path=own.path), on("dp2"), make_train(tmp_path))
    result = fit(
        free(path=own.path, batch_size=16),
        on("dp2"),
        make_train(tmp_path, num_steps=6),
        resume=True,
    )
    assert result.first_step == 4


# ---- processes ----


def start_two(own, tmp_path, data, mesh, **of_second):
    command = ["train", str(tmp_path / "own.py:Fit"), "--mesh", mesh, "--train.num-steps", "8"]
    command += ["--train.out-dir", str(tmp_path / "run")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxpar", *command],
            env=environ | {"DATA": str(data[index])} | (of_second if index else {}),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index, environ in enumerate(api.environments(2, 1))
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


def _command_line(source):
    """The path of the data is the same for all, so it is no option here."""
    return source.replace('    path: str = os.environ.get("DATA", "data.npy")\n', "").replace(
        "np.load(self.path)", 'np.load(os.environ["DATA"])'
    )


@pytest.mark.more
@pytest.mark.parametrize("mesh", ["tp2", pytest.param("pp2", marks=pytest.mark.more)])
def test_processes_with_other_data_are_refused(own, tmp_path, mesh):
    (tmp_path / "own.py").write_text(_command_line(SOURCE))
    np.save(tmp_path / "other.npy", rows() + 1)
    data = tmp_path / "data.npy", tmp_path / "other.npy"
    codes, said = start_two(own, tmp_path, data, mesh)
    assert codes == [2, 2], said
    for each in said:
        assert re.search(
            r"error: the processes do not agree: batches\.train is '[0-9a-f]{16}' in process 0, ",
            each,
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.more
@pytest.mark.parametrize("mesh", ["tp2", pytest.param("pp2", marks=pytest.mark.more)])
def test_processes_that_read_other_rows_later_are_found_at_the_next_checkpoint(own, tmp_path, mesh):
    (tmp_path / "own.py").write_text(_command_line(SOURCE))
    data = (tmp_path / "data.npy",) * 2
    codes, said = start_two(own, tmp_path, data, mesh, LATER="1")
    assert codes == [2, 2], said
    for each in said:
        assert re.search(
            "error: the processes do not agree: batch 8 is [0-9a-f]{16} in process 0, ", each
        )
    assert (tmp_path / "run/config.toml").exists()
