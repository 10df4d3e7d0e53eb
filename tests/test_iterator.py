"""The law: a stream trains as the same batches in arrays do, also in parts and in several processes."""

import dataclasses
import itertools
import json
import re
import sys

import numpy as np
import pytest
from lib.models import Regress
from lib.runs import start_by_hand

from jaxpar import IteratorBatches, MeshConfig, Parallel, Report, TrainConfig, fit, load_run

pytestmark = pytest.mark.usefixtures("compile_once")

TWO = Parallel(MeshConfig(2, devices=(0, 1)))
READ = []  # numbers of the batches of training that a source was asked for
MADE = {}
LOOKED_AT = 4  # so many batches, before a run
CHANGED, ADDED = [], np.float32(1)  # numbers of batches that are not as they were


def numbers(split, first=0):
    """Of the batches of a stream: as many as are read, for training."""
    return itertools.count(first) if split == "train" else range(first, 5)


def generated(split, batch):
    return map(batch, numbers(split))


class Seekable:
    """As an iterator of Grain."""

    def __init__(self, split, batch):
        self.split, self.batch, self.number = split, batch, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.split != "train" and self.number == 5:
            raise StopIteration
        self.number += 1
        return self.batch(self.number - 1)

    def get_state(self):
        return {"number": self.number, "split": self.split}

    def set_state(self, state):
        assert state["split"] == self.split
        self.number = int(state["number"])


class Stateful:
    """As a dataset of Hugging Face, or a StatefulDataLoader."""

    off = 0

    def __init__(self, split, batch):
        self.split, self.batch, self.number = split, batch, 0

    def __iter__(self):
        for number in numbers(self.split, self.number):
            self.number = number + 1
            yield self.batch(number)

    def state_dict(self):
        return {"numbers": [(self.number,)]}

    def load_state_dict(self, state):
        self.number = state["numbers"][0][0] + self.off


class Forgetful(Stateful):
    """As one whose shuffle buffer is not part of its state."""

    off = 3


class Renamed(Stateful):
    """As one that another version of its package has written."""

    def load_state_dict(self, state):
        raise KeyError("position")


class Unwritten(Stateful):
    """As one whose state JSON cannot hold."""

    def state_dict(self):
        return {"numbers": {self.number}}


def once(split, batch):
    """The same iterator each time."""
    return MADE.setdefault(split, generated(split, batch))


def short(split, batch):
    """The same iterator each time, which ends with the batch that is looked at."""
    return MADE.setdefault(split, map(batch, range(LOOKED_AT + 2)))


def shuffled(split, batch):
    """Without a seed."""
    MADE[split] = MADE.get(split, 0) + 1
    return map(batch, numbers(split, MADE[split]))


@dataclasses.dataclass(frozen=True)
class Streamed(Regress):
    kinds: tuple[str, ...] = ("dense",)
    source: str = "generated"

    def make_batches(self, split, seed=None):
        whole = super().make_batches(split, seed)

        def batch(number):
            if split == "train":
                READ.append(number)
            found = whole.batch(number)
            return {**found, "x": found["x"] + ADDED} if number in CHANGED else found

        return IteratorBatches(lambda: globals()[self.source](split, batch), whole.batch_size)


class Stop(Report):
    """After a step."""

    def __init__(self, step):
        self.step = step

    def progress(self, progress, num_steps):
        if progress.step == self.step:
            self.stop()


def train(folder, num_steps=10, **options):
    options = {"log_every": 1, **options}
    return TrainConfig(num_steps, out_dir=str(folder), **options)


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("jaxpar")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By arrays in memory."""
    config = train(tmp_path_factory.mktemp("runs") / "whole", eval_every=4)
    return fit(Regress(("dense",)), TWO, config, quiet=True)


@pytest.mark.law
def test_a_stream_trains_as_the_same_arrays(whole, tmp_path, caplog):
    READ.clear()
    result = fit(Streamed(), TWO, train(tmp_path / "run", eval_every=4), quiet=True)
    assert (result.losses, result.evaluations) == (whole.losses, whole.evaluations)
    looked_at = range(1, LOOKED_AT)  # their rows, before the run
    assert [number for number in READ if number] == [
        *looked_at,
        *range(1, 11),
    ]  # once each, and the next
    assert said(caplog) == []
    run = load_run(result.out_dir)
    assert run.evaluate("test").loss == pytest.approx(result.evaluations["test"].loss, rel=1e-5)
    with pytest.raises(ValueError, match="IteratorBatches does not say how many batches it has"):
        run.predict("test", quiet=True)


READS = r"read {} batches of a stream in \d+\.\d s to reach batch {}, counted from 0"
BACK = (
    r"the stream was read from its beginning, because its source does not return to a saved position "
    r"\({}\)\. The batches are the same, so the run continues .*"
)


@pytest.mark.more
@pytest.mark.parametrize(
    ("source", "read", "expected"),
    [
        ("generated", [*range(1, 11)], [READS.format(7, 7)]),
        ("Seekable", [*range(7, 11)], []),
        ("Stateful", [*range(7, 11)], []),
        (
            "Forgetful",
            [10, *range(1, 11)],
            [READS.format(7, 7), BACK.format("other batches follow")],
        ),
        ("Renamed", [*range(1, 11)], [READS.format(7, 7), BACK.format("KeyError: 'position'")]),
        ("Unwritten", [*range(1, 11)], [READS.format(7, 7)]),
    ],
)
def test_a_resumed_run_goes_on_in_the_stream(whole, tmp_path, caplog, source, read, expected):
    task, config = Streamed(source=source), train(tmp_path / "run")
    stopped = fit(task, TWO, config, report=Stop(7))
    READ.clear()
    caplog.clear()
    resumed = fit(task, TWO, config, quiet=True, resume=True)
    assert stopped.losses + resumed.losses == whole.losses
    assert [number for number in READ if number] == read
    assert len(said(caplog)) == len(expected)
    for text, pattern in zip(said(caplog), expected, strict=True):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("source", ["generated", "Stateful"])
def test_a_stream_that_has_changed_is_refused(tmp_path, monkeypatch, source):
    config = train(tmp_path / "run")
    fit(Streamed(source=source), TWO, config, report=Stop(5), overwrite=True)
    monkeypatch.setattr(sys.modules[__name__], "CHANGED", [5])
    with pytest.raises(ValueError, match=r"batch 5 is not the one that the checkpoint of step 5"):
        fit(Streamed(source=source), TWO, config, quiet=True, resume=True)


def test_a_stream_that_ends_ends_training_with_its_state_saved(whole, tmp_path, monkeypatch):
    config = train(tmp_path / "run", log_every=4)
    monkeypatch.setattr(sys.modules[__name__], "numbers", lambda split, first=0: range(first, 6))
    ended = (
        r"the stream has ended after 6 batches\. The state of step 6 is saved\.\n"
        r"Fix: .* --resume --train.out-dir"
    )
    with pytest.raises(ValueError, match=ended):
        fit(Streamed(), TWO, config, quiet=True)
    monkeypatch.undo()
    resumed = fit(Streamed(), TWO, config, quiet=True, resume=True)
    assert resumed.losses == whole.losses[6:]


def test_a_batch_that_is_not_finite_is_found_again(tmp_path, monkeypatch, caplog):
    """It is kept: the source has been read farther meanwhile."""
    READ.clear()
    monkeypatch.setattr(sys.modules[__name__], "CHANGED", [4])
    monkeypatch.setattr(sys.modules[__name__], "ADDED", np.float32("nan"))
    with pytest.raises(
        FloatingPointError, match=r"step 5 is not finite \(batch 4 of the stream, from 0"
    ):
        fit(Streamed(), TWO, train(tmp_path / "run", log_every=9), quiet=True)
    assert [number for number in READ if number] == [*range(1, 9)]
    assert said(caplog) == []


# ---- batches by themselves ----


def rows(size, dtype=np.float32, **more):
    return {"x": np.ones((size, 2), dtype), **more}


def test_the_last_batch_is_padded_with_rows_of_weight_0():
    last = {"x": [[1.0, 2.0], [3.0, 4.0]], "label": [1, 2], "level": 3.0}
    stream = IteratorBatches(lambda: [{**last, "x": [[5.0, 6.0]] * 3, "label": [1, 2, 3]}, last], 3)
    first, padded = stream.batch(0), stream.batch(1)
    with pytest.raises(ValueError, match="the stream has ended after 2 batches"):
        stream.batch(2)
    assert first["weight"].tolist() == [1, 1, 1]
    assert padded["weight"].tolist() == [1, 1, 0]
    assert padded["x"].tolist() == [[1, 2], [3, 4], [1, 2]]
    assert padded["label"].tolist() == [1, 2, 1]
    assert padded["level"] == 3
    assert stream.batch(1, slice(1, 3))["label"].tolist() == [2, 1]
    own = IteratorBatches(lambda: [rows(1, weight=np.full((1, 4), 2.0))], 2)
    assert own.batch(0)["weight"].tolist() == [[2.0] * 4, [0.0] * 4]


WRONG = {
    "a generator": (lambda: IteratorBatches(iter([rows(8)]), 8), r"can be read only once\.\nFix: give"),
    "no rows": (lambda: IteratorBatches(list, 0), "batch_size=0 is too small"),
    "no iterable": ([], r"make gives a int, which is not iterable\.\nFix: give a"),
    "pairs": ([(1, 2)], r"batch 0 of the stream is a tuple\.\nFix: give a dict of arrays"),
    "texts": ([rows(8, text=["a"] * 8)], r"batch\['text'\] of the stream has the type <U1\.\nFix: leave out"),
    "larger": ([rows(9)], r"batch 0 of the stream has \[9\] rows, but batch_size=8"),
    "unequal": ([rows(8, y=np.ones(7))], r"batch 0 of the stream has \[7, 8\] rows, but batch_size=8"),
    "empty": ([rows(0)], r"batch 0 of the stream has \[0\] rows"),
    "smaller": ([rows(8), rows(5), rows(8)], "batch 1 .* 5 rows, .* is not the last"),
    "a type": ([rows(8), rows(8, np.int32)], r"batch 1 .* rows of {'x': 'int32\[2\]', .* 'float32\[2\]'"),
    "a name": ([rows(8), rows(8, y=np.ones(8))], r"batch 1 .*\nFix: give all batches the same arrays"),
    "an end": ([rows(8)], r"has ended after 1 batches\.\nFix: make the stream repeat"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_stream_of_equal_batches_is_refused(wrong):
    make, message = WRONG[wrong]
    source = 3 if wrong == "no iterable" else make
    with pytest.raises(ValueError, match=message):
        (make() if callable(make) else IteratorBatches(lambda: source, 8)).batch(1)


@pytest.mark.rows(1)
@pytest.mark.parametrize("source", ["once", "short", "shuffled"])
def test_a_stream_that_begins_otherwise_each_time_is_refused(source, tmp_path):
    MADE.clear()
    task = Streamed(source=source)
    with pytest.raises(ValueError, match=r"split 'train': batch\(0\) has other rows when it is"):
        fit(task, TWO, train(tmp_path / "run"), quiet=True)


STREAMS = """
import sys
import jax

sys.path.insert(0, sys.argv[2])
from lib import api

api.start_processes()
import test_iterator
from jaxpar import fit

config = test_iterator.train(sys.argv[1])
print(fit(test_iterator.Streamed(), "dp2", config, quiet=True).losses)
test_iterator.CHANGED += [8, 9, 10] * jax.process_index()
try:
    fit(test_iterator.Streamed(), "dp2", config, quiet=True, overwrite=True)
except ValueError as error:
    print(error)
"""


@pytest.mark.full
def test_processes_read_one_stream_and_tell_if_they_do_not(whole, tmp_path):
    script = tmp_path / "streams.py"
    script.write_text(STREAMS)
    tests = __file__.rpartition("/")[0]
    processes = start_by_hand([str(tmp_path / "run"), tests], program=[str(script)])
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for printed, _ in ends:
        assert len(printed.splitlines()) == 3, ends
        losses, error, _ = printed.splitlines()
        assert json.loads(losses) == pytest.approx(whole.losses, rel=1e-5)
        assert re.match("the processes do not agree: batch 10 is [0-9a-f]{16} in process 0,", error)


# ---- real packages ----


class Examples:
    """Rows by their numbers, as Grain and PyTorch take them."""

    def __init__(self, split):
        rng = np.random.default_rng(["train", "valid", "test"].index(split))
        walk = rng.normal(size=(44, 9, 3)).cumsum(1).astype(np.float32)
        self.columns = {"x": walk[:, :-1], "y": walk[:, 1:], "level": walk[:, :1, 0] ** 2}
        self.columns["weight"] = np.ones((44, 8), np.float32)

    def __repr__(self):
        return "examples"  # Grain compares it

    def __len__(self):
        return 44

    def __getitem__(self, number):
        return {name: column[number] for name, column in self.columns.items()}


def open_grain(split):
    grain = pytest.importorskip("grain", reason="grain is not installed")
    data = grain.MapDataset.source(Examples(split))
    if split == "train":
        data = data.seed(3).shuffle().repeat()
    return data.to_iter_dataset().batch(8)


def open_grain_loader(split):
    grain = pytest.importorskip("grain", reason="grain is not installed")
    is_train = split == "train"
    order = grain.samplers.IndexSampler(
        44, shuffle=is_train, seed=1, num_epochs=None if is_train else 1
    )
    batches = [grain.transforms.Batch(8)]
    return grain.DataLoader(data_source=Examples(split), sampler=order, operations=batches)


def open_datasets(split):
    """The recipe of the page: another order in each epoch, and no buffer of rows."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    columns = {name: column.tolist() for name, column in Examples(split).columns.items()}
    data = datasets.Dataset.from_dict(columns)
    epochs = [data.shuffle(seed=n) for n in range(3)] if split == "train" else [data]
    streams = [each.to_iterable_dataset() for each in epochs]
    return (
        datasets.concatenate_datasets(streams)
        .map(float32)
        .batch(8, drop_last_batch=split == "train")
    )


def open_datasets_with_a_buffer(split):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    columns = {name: column.tolist() for name, column in Examples(split).columns.items()}
    data = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)
    if split == "train":
        data = data.shuffle(seed=5, buffer_size=4).repeat(None)
    return data.map(float32).batch(8)


def float32(example):
    return {name: np.float32(value) for name, value in example.items()}


def open_torch(split, kind="torchdata.stateful_dataloader", name="StatefulDataLoader"):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    loader = getattr(pytest.importorskip(kind, reason=f"{kind} is not installed"), name)
    options = {}
    if split == "train":
        order = torch.Generator().manual_seed(0)
        sampler = torch.utils.data.RandomSampler(range(44), num_samples=440, generator=order)
        options = {"sampler": sampler}
    return loader(Examples(split), batch_size=8, **options)


def open_plain_torch(split):
    return open_torch(split, "torch.utils.data", "DataLoader")


@dataclasses.dataclass(frozen=True)
class Opened(Regress):
    kinds: tuple[str, ...] = ("dense",)
    batch_size: int = 8
    source: str = ""

    def make_batches(self, split, seed=None):
        return IteratorBatches(lambda: globals()[f"open_{self.source}"](split), self.batch_size)


@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("grain", []),
        ("grain_loader", ["read 7"]),
        ("datasets", []),
        ("datasets_with_a_buffer", ["read 7", BACK.format("other batches follow")]),
        ("torch", []),  # with a sampler its position is a number; with shuffle=True it has a tensor
        ("plain_torch", ["read 7"]),
    ],
)
def test_pipelines_of_other_packages_are_resumed(source, expected, tmp_path, caplog):
    task, ends = Opened(source=source), (train(tmp_path / "whole"), train(tmp_path / "run"))
    whole = fit(task, TWO, ends[0], quiet=True)
    assert np.isfinite([each.loss for each in whole.evaluations.values()]).all()
    stopped = fit(task, TWO, ends[1], report=Stop(7))
    assert said(caplog) == []
    resumed = fit(task, TWO, ends[1], quiet=True, resume=True)
    assert stopped.losses + resumed.losses == whole.losses
    assert len(said(caplog)) == len(expected)
    assert all(
        re.match(pattern, text) for pattern, text in zip(expected, said(caplog), strict=True)
    )
