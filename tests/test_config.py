"""Configs refuse what cannot work, in the user's words."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lib import api
from lib.planned import H100

from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, Start, Task, TrainConfig
from jaxpar.lm import LM
from jaxpar.planning import estimate_step

# What the command line cannot say; what it can is in test_bad_input.
FIELDS = [
    (LM, {"hidden_size": 8.0}, r"hidden_size=8\.0 \(float\): must be a whole number"),
    (LM, {"num_layers": True}, r"num_layers=True \(bool\): must be a whole number"),
    (LM, {"vocab_size": "64"}, "vocab_size='64': must be a whole number or None"),
    (LM, {"dropout": None}, "dropout=None: must be a number"),
    (LM, {"dropout": 1.0}, r"dropout=1\.0: must be at least 0 and less than 1"),
    (LM, {"dtype": "float16"}, "dtype='float16': must be 'float32' or 'bfloat16'"),
    (LM, {"dtype": np.float32}, r"dtype=<class .*>: must be 'float32' or 'bfloat16'"),
    (LM, {"tie_embedding": 1}, r"tie_embedding=1 \(int\): must be true or false"),
    (LM, {"corpus": None}, "corpus=None: must be a string"),
    (LM, {"batch_size": np.int64(8)}, r"batch_size=np\.int64\(8\): must be a whole number"),
    (LM, {"hidden_size": 10**20}, r"hidden_size=100000000000000000000: must be below 2\*\*63"),
    (LM, {"hidden_size": 10**5000}, r"hidden_size=a number of 16610 bits: must be below 2\*\*63"),
    (LM, {"hidden_size": 2**30 + 1}, "hidden_size=1073741825: must be at most 1073741824"),
    (LM, {"vocab_size": 2**31}, "vocab_size=2147483648: must be at most 1073741824"),
    (LM, {"num_layers": 10_001}, "num_layers=10001 must be at most 10000"),
    (
        LM,
        {"batch_size": 2**20, "seq_len": 2**9},
        "batch_size=1048576 x seq_len=512 are more than",
    ),
    (LM, {"dropout": 10**400}, r"dropout=a number of 1329 bits: must be below 2\*\*63"),
    (LM, {"dtype": "x" * 10**6}, r"dtype='x{20,30}\.\.\.x{20,30}': must be 'float32'"),
    (Parallel, {"shares": (10**20, 1)}, r"shares=100000000000000000000: must be below 2\*\*63"),
    (OptimizerConfig, {"hold_steps": 2**31}, "hold_steps=2147483648: must be below 2147483648"),
    (TrainConfig, {"max_skipped": 2**31}, "max_skipped=2147483648: must be below 2147483648"),
    (LM, {"optimizer": "adam"}, "optimizer='adam': must be an OptimizerConfig"),
    (
        PipelineConfig,
        {"placement": 2},
        r"placement=2 \(int\): must be a string or a list of whole numbers",
    ),
    (
        PipelineConfig,
        {"placement": (1, 2.0)},
        r"placement=\(1, 2\.0\): must be a string or a list of",
    ),
    (PipelineConfig, {"schedule": "1f1c"}, "schedule='1f1c': must be '1f1b' or 'gpipe' or"),
    (PipelineConfig, {"head": None}, "head=None: must be 'auto' or 'last' or 'sharded'"),
    (Parallel, {"shares": 3}, r"shares=3 \(int\): must be a list of whole numbers or None"),
    (Parallel, {"shares": ()}, r"shares=\(\): must be positive"),
    (Parallel, {"update": "shard"}, "update='shard': must be 'replicated' or 'sharded'"),
    (Parallel, {"pipeline": {}}, r"pipeline=\{\}: must be a PipelineConfig"),
    (Parallel, {"mesh": (2, 1, 1)}, r"mesh=\(2, 1, 1\): must be a MeshConfig"),
    (OptimizerConfig, {"learning_rate": "1e-3"}, "learning_rate='1e-3': must be a number"),
    (
        OptimizerConfig,
        {"learning_rate": float("inf")},
        "learning_rate=inf: must be a finite number",
    ),
    (TrainConfig, {"patience": 3}, "patience=3 needs validations during .*eval_every=0 has none"),
    (TrainConfig, {"nonfinite": None}, "nonfinite=None: must be 'stop' or 'skip'"),
    (TrainConfig, {"out_dir": 3}, r"out_dir=.*: must be a string or None"),
    (
        MeshConfig,
        {"devices": (0, "1")},
        r"devices=\(0, '1'\): must be a list of whole numbers",
    ),
]


@pytest.mark.parametrize(("make", "fields", "message"), FIELDS)
def test_bad_fields_are_refused(make, fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_lists_are_tuples():
    parallel = Parallel(
        MeshConfig(data=2, devices=[0, 1]), PipelineConfig(placement=[4]), shares=[3, 1]
    )
    found = (parallel.mesh.devices, parallel.pipeline.placement, parallel.group_shares)
    assert found == ((0, 1), (4,), (3, 1))
    hash(parallel)


@dataclasses.dataclass(frozen=True)
class Own(Task):
    """Types that a task of one's own may have."""

    pair: tuple[int, str] = (1, "a")
    pairs: tuple[tuple[int, int], ...] = ((1, 2),)
    widths: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    mixed: tuple[int | str, ...] = (1, "2")
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    anything: Any = True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pair": (1, 2)}, r"pair=\(1, 2\): must be a list of 2: a whole number, a string"),
        ({"pair": (1, "a", "b")}, r"pair=\(1, 'a', 'b'\): must be a list of 2"),
        ({"pairs": ((1, 2, 3),)}, r"pairs=\(\(1, 2, 3\),\): must be a list of"),
        ({"widths": ["wide"]}, r"widths=\('wide',\): must be a list of whole numbers"),
        ({"mixed": (1.5,)}, r"mixed=\(1\.5,\): must be a list of"),
        ({"names": [1]}, r"names=\(1,\): must be a dict"),
    ],
)
def test_types_of_a_task_of_ones_own_are_checked(fields, message):
    assert Own().widths == (1, 2)
    with pytest.raises(ValueError, match=message):
        Own(**fields)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (LM, {"dropout": 0.0, "vocab_size": 1, "dtype": "bfloat16"}),
        (LM, {"tie_embedding": True}),
        (PipelineConfig, {"schedule": "interleaved", "num_groups": 2, "head": "last"}),
        (OptimizerConfig, {"name": "adamw", "weight_decay": 0.1, "warmup_steps": 0}),
        (OptimizerConfig, {"name": "sgd", "momentum": 0.9}),
        (TrainConfig, {"seed": 0, "clip_norm": 0.0}),
    ],
)
def test_the_ends_of_the_ranges_are_accepted(make, fields):
    config = make(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


TASK = LM(4, hidden_size=256, embed_size=256, batch_size=32, seq_len=32)
CHUNKS = PipelineConfig(num_chunks=4)

SIZES = [
    (
        Parallel("tp3"),
        r"hidden_size=256 does not divide by tensor=3\nFix: use hidden_size=255 or 258",
    ),
    (
        Parallel("tp512"),
        r"hidden_size=256 does not divide by tensor=512\nFix: use hidden_size=512, or other sizes of tensor",
    ),
    (
        Parallel("dp4pp2", PipelineConfig(num_microbatches=3)),
        r"batch_size=32 does not divide by data=4 x num_microbatches=3 = 12\nFix: use batch_size=24 or 36, "
        r"or other sizes of data and num_microbatches",
    ),
    (
        Parallel("pp2", PipelineConfig(num_chunks=5)),
        r"seq_len=32 does not divide by num_chunks=5\nFix: use seq_len=30 or 35",
    ),
    (
        Parallel("pp3", PipelineConfig(num_chunks=4, placement="even")),
        r"num_layers=4 does not split evenly over stage=3\.\nFix: use 3 or 6 layers, "
        r"or a placement such as \(2, 1, 1\)",
    ),
    (
        Parallel("dp3"),
        r"batch_size=32 does not divide by data=3\nFix: use batch_size=30 or 33",
    ),
    (
        Parallel("pp2", PipelineConfig(placement=(1, 2))),
        r"placement=\(1, 2\) has 3 layers in 2 places[\s\S]*such as \(2, 2\)",
    ),
    (
        Parallel("pp2", PipelineConfig(placement="first, 0-3 | 4, last")),
        r"placement=\(4, 1\) has 5 layers[\s\S]*such as \(2, 2\)",
    ),
    (
        Parallel("dp2", shares=(1, 2, 1)),
        r"shares=\(1, 2, 1\): expected 2 \(data\), got 3",
    ),
]


@pytest.mark.parametrize(("parallel", "message"), SIZES)
def test_sizes_that_do_not_fit_are_refused(parallel, message):
    with pytest.raises(ValueError, match=message):
        estimate_step(TASK, parallel, machine=H100)


def test_without_stages_chunks_and_groups_do_not_matter():
    parallel = Parallel(
        "dp2",
        PipelineConfig(schedule="interleaved", num_microbatches=4, num_chunks=5, num_groups=3),
    )
    found = (parallel.num_groups, parallel.num_chunks, parallel.microbatch_rows(32))
    assert found == (1, 1, 4)
    assert api.summary(TASK, parallel)["layers"] == "4; 4 microbatches"


@pytest.mark.parametrize(
    ("placement", "num_groups", "layers"),
    [
        ((2, 2), 1, "4 (0-1 | 2-3)"),
        ((1, 3), 1, "4 (0 | 1-3)"),
        ((1, 1, 1, 1), 2, "4 (0 | 1 | 2 | 3)"),
    ],
)
def test_a_placement_says_how_many_layers_each_place_has(placement, num_groups, layers):
    schedule = "interleaved" if num_groups > 1 else "1f1b"
    pipeline = PipelineConfig(schedule, num_groups=num_groups, placement=placement)
    found = api.summary(TASK, Parallel("pp2", pipeline))["layers"]
    assert found == f"{layers}; 1 microbatch x 1 time chunk"


@pytest.mark.parametrize(
    ("steps", "config"),
    [(3, OptimizerConfig(warmup_steps=50)), (0, OptimizerConfig(warmup_steps=1))],
)
def test_a_warm_up_longer_than_the_run_is_refused(steps, config):
    message = f"warmup_steps={config.warmup_steps} is more than num_steps={steps}.\\nFix: use warmup_steps=0"
    task = LM(optimizer=config)
    for make in (task.make_optimizer, task.learning_rate):
        with pytest.raises(ValueError, match=message):
            make(steps)


def test_a_run_of_any_number_of_steps_has_a_warm_up_that_fits():
    for steps, warm in ((1, 0), (19, 1), (20, 20), (800, 20)):
        told = LM(optimizer=OptimizerConfig(warmup_steps=warm))
        assert LM().learning_rate(steps)(0) == told.learning_rate(steps)(0)


def test_groups_of_a_v_may_be_said():
    assert PipelineConfig("v", num_groups=2) != PipelineConfig("v")
    layouts = [Parallel("pp2", PipelineConfig("v", num_groups=n)) for n in (1, 2)]
    assert [layout.num_groups for layout in layouts] == [2, 2]
    with pytest.raises(ValueError, match="num_groups=3 with schedule='v'"):
        PipelineConfig("v", num_groups=3)


def test_paths_are_taken_where_their_text_is_meant():
    path = Path("folder") / "run"
    assert TrainConfig(out_dir=path) == TrainConfig(out_dir=str(path))
    assert Start(path) == Start(str(path)) == Start.of(path)


def test_the_padded_vocabulary_splits_over_any_usual_mesh(text):
    vocab_size = LM(corpus=str(text)).resolve().vocab_size
    for num_devices in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128):
        assert vocab_size % num_devices == 0


@pytest.mark.parametrize("shape", ["dp2pp2tp2", "dp2", "dp1", "dp2tp-1"])
def test_a_mesh_may_be_given_in_words(shape):
    assert Parallel(shape) == Parallel(MeshConfig.parse(shape))
    assert Parallel.of(shape, Parallel(fsdp=True)) == Parallel(shape, fsdp=True)


def test_configs_are_frozen_and_hashable():
    assert hash(TASK) == hash(dataclasses.replace(TASK))
    with pytest.raises(dataclasses.FrozenInstanceError, match="num_layers"):
        TASK.num_layers = 5
