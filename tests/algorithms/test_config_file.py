"""Config files: what is written is read back, and what is wrong is named."""

import dataclasses
import tomllib

import pytest
from lib import api

from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, Task, TrainConfig
from jaxpar.lm import LM
from jaxpar.training.config_file import default_settings, option_words, read_config, to_toml

PLAIN = default_settings(LM)
SETTINGS = PLAIN._replace(
    task=LM(
        num_layers=5,
        vocab_size=256,
        dropout=0.25,
        corpus='a "quoted"\\\x7f\n\u00e9\U0001f600 path',
        optimizer=OptimizerConfig("sgd", learning_rate=1e-5),
    ),
    parallel=Parallel(
        MeshConfig(2, -1, 2, devices=(0, 3, 1)),
        PipelineConfig(num_chunks=4, placement=(2, 3)),
        shares=(3, 1),
        speeds=(1, 2.5),
        fsdp=True,
    ),
    train=TrainConfig(out_dir="runs/x"),
)
OWN = """
import dataclasses
import jaxpar

@dataclasses.dataclass(frozen=True)
class Own(jaxpar.Task):
    widths: tuple[int, ...] = (1, 2)
    pairs: tuple[tuple[int, int], ...] = ((1, 2),)
    limit: float | None = 1.0
    optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig(learning_rate=1e-2)
    train = jaxpar.TrainConfig(num_steps=7)
    parallel = jaxpar.Parallel(fsdp=True)
"""


@pytest.fixture
def own(tmp_path):
    """The spec of a user's own task."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return f"{path}:Own"


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        PLAIN,
    ],
)
def test_written_settings_are_read_back(tmp_path, settings):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(settings))
    assert read_config(path) == settings
    assert read_config(path, SETTINGS) == settings or type(settings.task) is LM


def test_settings_of_a_task_of_ones_own_are_read_back(tmp_path, own):
    task = api.task_class(own)(widths=(3,), pairs=((4, 5), (6, 7)), limit=0.5)
    settings = default_settings(type(task))._replace(
        task=task, train=dataclasses.replace(task.train, seed=1)
    )
    (tmp_path / "config.toml").write_text(to_toml(settings))
    assert read_config(tmp_path / "config.toml") == settings
    tables = tomllib.loads((tmp_path / "config.toml").read_text())
    assert tables["task"] == own
    assert tables["train"]["num_steps"] == 7


def test_keys_are_the_options_of_the_command_line(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(SETTINGS))
    tables = tomllib.loads((tmp_path / "config.toml").read_text())
    assert next(iter(tables)) == "task"
    assert tables["mesh"] == {"data": 2, "stage": -1, "tensor": 2, "devices": [0, 3, 1], "axes": []}
    assert (tables["hidden_size"], tables["fsdp"], tables["shares"]) == (192, True, [3, 1])
    assert tables["speeds"] == [1, 2.5]
    assert tables["optimizer"]["learning_rate"] == 1e-5
    assert tables["pipeline"]["placement"] == [2, 3]
    named = Parallel("pp2tp4", PipelineConfig(placement="first,0|1 , last"))
    (tmp_path / "config.toml").write_text(to_toml(PLAIN._replace(parallel=named)))
    tables = tomllib.loads((tmp_path / "config.toml").read_text())
    assert tables["mesh"] == "pp2tp4"
    assert tables["pipeline"]["placement"] == "first, 0 | 1, last"


def test_what_a_file_leaves_out_is_as_in_the_base(tmp_path):
    path = write(tmp_path, 'mesh = "dp2tp4"\n[optimizer]\nlearning_rate = 1\n')
    base = PLAIN._replace(task=LM(num_layers=7))
    settings = read_config(path, base)
    optimizer = OptimizerConfig(learning_rate=1.0)
    assert settings.task == LM(num_layers=7, optimizer=optimizer)
    assert settings.parallel == dataclasses.replace(base.parallel, mesh=MeshConfig(2, 1, 4))
    assert settings.train == base.train
    assert isinstance(settings.task.optimizer.learning_rate, float)


def test_another_task_than_the_base_has_its_own_defaults(tmp_path, own):
    path = write(tmp_path, f'task = "{own}"\nwidths = [5]\n[optimizer]\nwarmup_steps = 3\n')
    task, parallel, train = read_config(path, SETTINGS)
    assert (task.widths, task.optimizer) == ((5,), OptimizerConfig("adam", 1e-2, warmup_steps=3))
    assert (parallel, train) == (Parallel(fsdp=True), TrainConfig(num_steps=7))


def test_every_value_is_written_unless_none(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(PLAIN))
    tables = tomllib.loads((tmp_path / "config.toml").read_text())
    task, parallel, train = map(dataclasses.asdict, PLAIN)
    expected = {"task": "lm", **task, **parallel, "mesh": "dp1", "train": train}
    expected = {key: value for key, value in expected.items() if value is not None}
    assert tables.keys() == expected.keys()
    for name in ("optimizer", "pipeline", "train"):
        written = {key for key, value in expected[name].items() if value is not None}
        assert tables[name].keys() == written


def test_none_that_would_not_be_read_back_is_refused(tmp_path, own):
    settings = default_settings(api.task_class(own))
    settings = settings._replace(task=dataclasses.replace(settings.task, limit=None))
    message = r"limit=None would be read back from TOML, which has no null, as 1\.0"
    with pytest.raises(ValueError, match=message):
        to_toml(settings)


def test_what_toml_does_not_have_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(f"{OWN}    phase: complex = 1j\n")
    settings = default_settings(api.task_class(f"{tmp_path}/own.py:Own"))
    with pytest.raises(
        ValueError, match=r":Own cannot be written as TOML: .*\nFix: use numbers and"
    ):
        to_toml(settings)


def test_settings_are_words_of_a_command_line():
    pipeline = PipelineConfig(num_chunks=4, placement=(2, 3), remat=True)
    parallel = Parallel(PLAIN.parallel.mesh, pipeline, speeds=(1, 2.5), fsdp=True)
    settings = PLAIN._replace(parallel=parallel)
    words = option_words(settings, PLAIN)
    assert {"--fsdp", "--pipeline.remat"} <= {*words}
    assert api.settings("train", "lm", *words) == settings
    back = option_words(PLAIN._replace(parallel=Parallel(PLAIN.parallel.mesh)), settings)
    assert {"--no-fsdp", "--pipeline.no-remat"} <= {*back}


def test_a_task_is_as_its_file_is_now(tmp_path, own):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(default_settings(api.task_class(own))))
    assert read_config(path).task.widths == (1, 2)
    (tmp_path / "own.py").write_text(f"{OWN}    unit = 'metres'\n")
    assert read_config(path).task.unit == "metres"
    (tmp_path / "own.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"cannot read the file of task .*own\.py: No such"):
        read_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\nxyzzy = 3",
            r"no key train\.xyzzy\nFix: use one of train\.num_steps, train\.clip_norm",
        ),
        ("num_step = 3", r"no key num_step\nFix: use train\.num_steps\."),
        ("[model]\nhidden_size = 3", r"no key model\.hidden_size\nFix: use hidden_size\."),
        ("[optimiser]\nmomentum = 3", r"no key optimiser\.momentum\nFix: use optimizer\.mom"),
        ("[train]\nlearning_rate = 3", r"no key train\.learning_rate\nFix: use optimizer\.lea"),
        ('"train.num_steps" = 3', r"no key train\.num_steps"),
        ("pipeline = 3", r"pipeline=3 is not a table\nFix: write \[pipeline\]"),
        ("train = 3", r"train=3 is not a table\nFix: write \[train\]"),
        ('mesh = "dp2 tp2"', r"mesh 'dp2 tp2' is not made of axes"),
        ("[mesh]\ndata = 0", r"mesh data=0"),
        ("dropout = 1.5", r"config\.toml: dropout=1\.5: must be at least 0"),
        ("[optimizer]\nlearning_rate = 0", r"optimizer\.learning_rate=0\.0: must be positive"),
        (
            'simulate = "x"',
            r"config\.toml: simulate='x' is not a number of devices\nFix: use 1 or more",
        ),
        ("simulate = 0", r"simulate=0 is not a number of devices"),
        ("task = 3", r'task=3: must name a task\nFix: add task = "lm"'),
        ('task = "lmm"', r"there is no task 'lmm'; did you mean 'lm'\?"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, text), PLAIN)


def test_a_file_without_a_task_needs_a_base(tmp_path):
    with pytest.raises(ValueError, match=r"config\.toml: task=None: must name a task"):
        read_config(write(tmp_path, "[train]\nnum_steps = 3\n"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("mesh", str, "dp2")], "field 'mesh' of Own has the name of a setting"),
        ([("width", int)], r"field 'width' of Own has no default\nFix: give it one"),
    ],
)
def test_fields_that_cannot_be_settings_are_refused(fields, message):
    task = dataclasses.make_dataclass("Own", fields, bases=(Task,), frozen=True)
    with pytest.raises(ValueError, match=message):
        default_settings(task)


def test_a_limit_that_is_left_open_stays_open(tmp_path):
    for given in (None, 0.0, 0.25):
        settings = PLAIN._replace(train=TrainConfig(clip_norm=given))
        assert read_config(write(tmp_path, to_toml(settings))).train.clip_norm == given
        words = [] if given is None else ["--train.clip-norm", str(given)]
        assert option_words(settings, PLAIN) == words
