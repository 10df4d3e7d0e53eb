"""Configs refuse what cannot work, in the user's words."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import (
    VOCAB_MULTIPLE,
    Config,
    DataConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
    nearest_multiples,
)
from jaxpar.mesh import MeshConfig

# What the command line cannot say; what it can is in test_bad_input.
FIELDS = [
    (ModelConfig, {"hidden_size": 8.0}, r"hidden_size=8\.0 \(float\): use a whole number"),
    (ModelConfig, {"num_layers": True}, r"num_layers=True \(bool\): use a whole number"),
    (ModelConfig, {"vocab_size": "64"}, "vocab_size='64': use a whole number or None"),
    (ModelConfig, {"dropout": None}, "dropout=None: use a number"),
    (ModelConfig, {"dropout": 1.0}, r"dropout=1\.0: must be at least 0 and less than 1"),
    (ModelConfig, {"dtype": "float16"}, "dtype='float16': use 'float32' or 'bfloat16'"),
    (ModelConfig, {"dtype": np.float32}, r"dtype=<class .*>: use 'float32' or 'bfloat16'"),
    (ModelConfig, {"tie_embedding": 1}, r"tie_embedding=1 \(int\): use true or false"),
    (
        PipelineConfig,
        {"placement": 2},
        r"placement=2 \(int\): use a text or a list of whole numbers",
    ),
    (PipelineConfig, {"placement": (1, 2.0)}, r"placement=\(1, 2\.0\): use a text or a list of"),
    (PipelineConfig, {"schedule": "1f1c"}, "schedule='1f1c': use '1f1b' or 'gpipe' or"),
    (PipelineConfig, {"head": None}, "head=None: use 'last' or 'sharded'"),
    (DataConfig, {"shares": 3}, r"shares=3 \(int\): use a list of whole numbers or None"),
    (DataConfig, {"shares": ()}, r"shares=\(\): every data-parallel group needs"),
    (DataConfig, {"corpus": None}, "corpus=None: use a text"),
    (DataConfig, {"batch_size": np.int64(8)}, r"batch_size=np\.int64\(8\): use a whole number"),
    (TrainConfig, {"learning_rate": "1e-3"}, "learning_rate='1e-3': use a number"),
    (TrainConfig, {"learning_rate": float("inf")}, "learning_rate=inf: use a finite number"),
    (TrainConfig, {"nonfinite": None}, "nonfinite=None: use 'stop' or 'skip'"),
    (TrainConfig, {"update": "shard"}, "update='shard': use 'replicated' or 'sharded'"),
    (TrainConfig, {"out_dir": Path("runs")}, r"out_dir=.*: use a text or None"),
    (MeshConfig, {"devices": (0, "1")}, r"mesh devices=\(0, '1'\): use a list of whole numbers"),
    (Config, {"model": {}}, r"model=\{\}: use a ModelConfig"),
    (Config, {"mesh": "dp2"}, "mesh='dp2': use a MeshConfig"),
]


@pytest.mark.parametrize(("make", "fields", "message"), FIELDS)
def test_bad_fields_are_refused(make, fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_lists_are_tuples():
    config = Config(
        MeshConfig(data=2, devices=[0, 1]),
        pipeline=PipelineConfig(placement=[4]),
        data=DataConfig(shares=[3, 1]),
    )
    assert (config.mesh.devices, config.placement, config.shares) == ((0, 1), (4,), (3, 1))
    hash(config)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (ModelConfig, {"dropout": 0.0, "vocab_size": 1, "dtype": "bfloat16"}),
        (ModelConfig, {"tie_embedding": True}),
        (PipelineConfig, {"schedule": "interleaved", "num_groups": 2, "head": "last"}),
        (TrainConfig, {"optimizer": "adamw", "weight_decay": 0.1, "warmup_steps": 0, "seed": 0}),
        (TrainConfig, {"optimizer": "sgd", "momentum": 0.9, "clip_norm": 0.0}),
    ],
)
def test_the_ends_of_the_ranges_are_accepted(make, fields):
    config = make(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


SIZES = [
    (
        {"mesh": MeshConfig(tensor=3)},
        r"hidden_size=256 does not divide by tensor=3; use hidden_size 255 or 258",
    ),
    (
        {"mesh": MeshConfig(tensor=512)},
        r"hidden_size=256 does not divide by tensor=512; use hidden_size 512, or other sizes of tensor",
    ),
    (
        {"mesh": MeshConfig(data=4, stage=2), "pipeline": PipelineConfig(num_microbatches=3)},
        r"batch_size=32 does not divide by data=4 x num_microbatches=3 = 12; use batch_size 24 or 36, "
        r"or other sizes of data and num_microbatches",
    ),
    (
        {"mesh": MeshConfig(stage=2), "pipeline": PipelineConfig(num_chunks=5)},
        r"seq_len=32 does not divide by num_chunks=5; use seq_len 30 or 35",
    ),
    (
        {"mesh": MeshConfig(stage=3), "pipeline": PipelineConfig(placement="even")},
        r"num_layers=4 does not split evenly over stage=3; use 3 or 6 layers, stage=1, 2, 4, "
        r"or a placement such as \(2, 1, 1\)",
    ),
    (
        {"mesh": MeshConfig(data=3)},
        r"batch_size=32 does not divide by data=3; use batch_size 30 or 33",
    ),
    ({"mesh": MeshConfig(stage=5)}, r"stage=5 is more than num_layers=4; use stage=4 or fewer"),
    (
        {
            "mesh": MeshConfig(stage=4),
            "pipeline": PipelineConfig(schedule="interleaved", num_groups=2),
        },
        r"stage=4 x num_groups=2 = 8 is more than num_layers=4; use stage=2 or fewer, or 8 layers",
    ),
    (
        {"mesh": MeshConfig(stage=2), "pipeline": PipelineConfig(placement=(1, 2))},
        r"placement=\(1, 2\) is 2 numbers with the sum 3.*such as \(2, 2\)",
    ),
    (
        {"mesh": MeshConfig(stage=2), "pipeline": PipelineConfig(placement="fair")},
        "placement='fair'",
    ),
    ({"mesh": MeshConfig(data=-1)}, r"mesh data=-1,stage=1,tensor=1: a size is not inferred yet"),
]

CONFIG = Config(
    model=ModelConfig(4, hidden_size=256, embed_size=256),
    data=DataConfig(batch_size=32, seq_len=32),
)


@pytest.mark.parametrize(("parts", "message"), SIZES)
def test_sizes_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **parts).check()


def test_without_stages_chunks_and_groups_do_not_matter():
    config = dataclasses.replace(
        CONFIG,
        mesh=MeshConfig(data=2),
        pipeline=PipelineConfig(
            schedule="interleaved", num_microbatches=4, num_chunks=5, num_groups=3
        ),
    )
    assert config.check() is config
    assert (config.num_groups, config.num_chunks, config.microbatch_rows) == (1, 1, 4)
    assert config.layer_ids == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("placement", "num_groups", "layer_ids"),
    [
        ((2, 2), 1, (0, 1, 2, 3)),
        ((1, 3), 1, (0, -1, -1, 1, 2, 3)),
        ((1, 1, 1, 1), 2, (0, 2, 1, 3)),
    ],
)
def test_layers_stand_in_the_slots_of_their_stage(placement, num_groups, layer_ids):
    config = Config(
        mesh=MeshConfig(stage=2),
        model=ModelConfig(num_layers=4),
        pipeline=PipelineConfig(
            schedule="interleaved" if num_groups > 1 else "1f1b",
            num_groups=num_groups,
            placement=placement,
        ),
    )
    assert config.placement == placement
    assert config.layer_ids == layer_ids


@pytest.mark.parametrize(
    ("size", "divisor", "expected"), [(100, 32, "96 or 128"), (3, 8, "8"), (9, 8, "8 or 16")]
)
def test_nearest_multiples(size, divisor, expected):
    assert nearest_multiples(size, divisor) == expected


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_the_padded_vocabulary_splits_over_any_usual_mesh(num_devices):
    assert VOCAB_MULTIPLE % num_devices == 0


def test_configs_are_frozen_and_hashable():
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))
    with pytest.raises(dataclasses.FrozenInstanceError, match="num_layers"):
        CONFIG.model.num_layers = 5
