"""Config files: what is written is read back, and what is wrong is named."""

import dataclasses
import tomllib

import pytest

from jaxpar.config import Config, DataConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxpar.config_file import read_config, write_config
from jaxpar.mesh import MeshConfig


def test_a_written_config_is_read_back(tmp_path):
    config = Config(
        mesh=MeshConfig(2, -1, 2, devices=(0, 3, 1)),
        model=ModelConfig(num_layers=5, vocab_size=256, dropout=0.25, tie_embedding=True),
        pipeline=PipelineConfig(num_chunks=4, placement=(2, 3)),
        data=DataConfig(corpus='a "quoted"\\\x7f\n\u00e9\U0001f600 path'),
        train=TrainConfig(learning_rate=1e-5, optimizer="sgd", out_dir="runs/x"),
    )
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]  # nothing half-written


def test_what_a_file_leaves_out_is_as_in_the_base(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('mesh = "dp2tp4"\n[train]\nlearning_rate = 1\n')
    base = Config(model=ModelConfig(num_layers=7))
    config = read_config(path, base)
    assert config == Config(
        mesh=MeshConfig(2, 1, 4), model=base.model, train=TrainConfig(learning_rate=1.0)
    )
    assert isinstance(config.train.learning_rate, float)


def test_every_value_is_written_unless_none(tmp_path):
    write_config(Config(), tmp_path / "config.toml")
    tables = tomllib.loads((tmp_path / "config.toml").read_text())
    for section, values in dataclasses.asdict(Config()).items():
        assert tables[section].keys() == {key for key, v in values.items() if v is not None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nxyzzy = 3", r"no key train\.xyzzy; keys are num_steps, optimizer"),
        ("model = 3", r"model=3: write a table \[model\]"),
        ('mesh = "dp2xx2"', r"cannot read 'dp2xx2'"),
        ("[model]\ndropout = 1.5", r"model\.dropout=1\.5: must be at least 0"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(path)
