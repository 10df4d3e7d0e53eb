"""Configs refuse what cannot work, in the user's words."""

import dataclasses

import pytest

from jaxpar.config import Config, DataConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxpar.mesh import MeshConfig

FIELDS = [
    (ModelConfig, {"num_layers": 0}, "num_layers=0: must be positive"),
    (ModelConfig, {"hidden_size": -4}, "hidden_size=-4"),
    (ModelConfig, {"embed_size": 512}, "embed_size=512 is larger than hidden_size=192"),
    (ModelConfig, {"vocab_size": 0}, "vocab_size=0"),
    (ModelConfig, {"dropout": 1.0}, "dropout=1.0: must be at least 0 and less than 1"),
    (
        ModelConfig,
        {"tie_embedding": True, "embed_size": 128},
        "tie_embedding needs embed_size=128 equal to hidden_size=192",
    ),
    (PipelineConfig, {"num_microbatches": 0}, "num_microbatches=0"),
    (PipelineConfig, {"num_chunks": 0}, "num_chunks=0"),
    (PipelineConfig, {"num_groups": 2}, "num_groups=2 with schedule='1f1b'"),
    (PipelineConfig, {"schedule": "interleaved"}, "num_groups=1 with schedule='interleaved'"),
    (DataConfig, {"batch_size": 0}, "batch_size=0"),
    (DataConfig, {"seq_len": 0}, "seq_len=0"),
    (TrainConfig, {"num_steps": 0}, "num_steps=0"),
    (TrainConfig, {"learning_rate": 0.0}, "learning_rate=0.0"),
    (TrainConfig, {"momentum": 1.5}, "momentum=1.5"),
    (TrainConfig, {"clip_norm": -1.0}, "clip_norm=-1.0: must not be negative"),
    (TrainConfig, {"seed": -1}, "seed=-1"),
]


@pytest.mark.parametrize(("make", "fields", "message"), FIELDS)
def test_bad_fields_are_refused(make, fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


SIZES = [
    (
        {"mesh": MeshConfig(tensor=3)},
        r"hidden_size=256 does not divide by tensor=3; use hidden_size 255 or 258",
    ),
    (
        {"mesh": MeshConfig(data=4, stage=2), "pipeline": PipelineConfig(num_microbatches=3)},
        r"batch_size=32 does not divide by data=4 x num_microbatches=3 = 12; use batch_size 24 or 36",
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
        {"mesh": MeshConfig(stage=2), "pipeline": PipelineConfig(placement=(1, 2))},
        r"placement=\(1, 2\) places 3 layers on 2 stages.*such as \(2, 2\)",
    ),
    (
        {"mesh": MeshConfig(stage=2), "pipeline": PipelineConfig(placement="fair")},
        "placement='fair'",
    ),
]


@pytest.mark.parametrize(("parts", "message"), SIZES)
def test_sizes_that_do_not_fit_are_refused(parts, message):
    config = dataclasses.replace(
        Config(
            model=ModelConfig(4, hidden_size=256, embed_size=256),
            data=DataConfig(batch_size=32, seq_len=32),
        ),
        **parts,
    )
    with pytest.raises(ValueError, match=message):
        config.check()


@pytest.mark.parametrize(
    ("placement", "num_groups", "layer_ids"),
    [
        ((2, 2), 1, (0, 1, 2, 3)),
        ((1, 3), 1, (0, -1, -1, 1, 2, 3)),
        ((1, 1, 1, 1), 2, (0, 2, 1, 3)),
        ((2, 1, 1, 0), 2, None),
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
    if layer_ids is None:
        with pytest.raises(ValueError, match=r"placement=\(2, 1, 1, 0\)"):
            _ = config.layer_ids
    else:
        assert config.layer_ids == layer_ids
