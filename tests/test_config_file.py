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
        ("[model]\nhiden_size = 3", r"no key model\.hiden_size; did you mean model\.hidden_size\?"),
        ("[modle]\nhidden_size = 3", r"no key modle; did you mean model\?"),
        ("[train]\nxyzzy = 3", r"no key train\.xyzzy; keys are num_steps, optimizer"),
        ('[model]\nhidden_size = "3"', r"model\.hidden_size='3' \(str\): use a whole number"),
        ("[model]\nhidden_size = 3.0", r"model\.hidden_size=3\.0 \(float\): use a whole number"),
        ("[model]\nhidden_size = true", r"hidden_size=True \(bool\): use a whole number"),
        ("[model]\ntie_embedding = 1", r"model\.tie_embedding=1 \(int\): use true or false"),
        ('[train]\noptimizer = "adm"', r"train\.optimizer='adm' .* 'adam', 'adamw', 'sgd'"),
        ("[pipeline]\nplacement = [1, 2.5]", r"placement=\(1, 2\.5\) .* a string or a list of int"),
        ("model = 3", r"model=3: write a table \[model\]"),
        ('mesh = "dp2xx2"', r"cannot read 'dp2xx2'"),
        ("[model]\ndropout = 1.5", r"model\.dropout=1\.5: must be at least 0"),
        ("[model\n", r"config\.toml is no TOML in UTF-8: .*line 1"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"cannot read the config .*none\.toml: No such file"
    ):
        read_config(tmp_path / "none.toml")
