"""The law: nothing lost. A run that stops goes on where it was, on the same or another mesh."""

import dataclasses
import errno
import functools
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import Config, DataConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxpar.data.corpus import Vocabulary
from jaxpar.data.streams import Batch
from jaxpar.mesh import MeshConfig
from jaxpar.sharding import is_variable
from jaxpar.state import audit, init_state
from jaxpar.step import batch_sharding, make_train_step
from jaxpar.training.by_layer import by_layer
from jaxpar.training.checkpoint import Checkpoints, best_of

# Another mesh sums in another order: float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

MODEL = ModelConfig(num_layers=8, hidden_size=16, embed_size=16, vocab_size=64, dropout=0.1)
DATA = DataConfig(batch_size=8, seq_len=4)
TRAIN = TrainConfig(learning_rate=0.01, warmup_steps=2, num_steps=30)


def make_config(
    mesh=(1, 1, 1), placement="even", train=TRAIN, model=MODEL, data=DATA, num_groups=1
):
    num_devices = int(np.prod(mesh))
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    schedule = "1f1b" if num_groups == 1 else "interleaved"
    pipeline = PipelineConfig(schedule=schedule, num_groups=num_groups, placement=placement)
    return Config(MeshConfig(*mesh, devices=devices), model, pipeline, data, train)


def batch_of(step, config, mesh):
    shape = (2, config.data.batch_size, config.data.seq_len)
    tokens = np.random.default_rng(step).integers(0, config.model.vocab_size, shape, np.int32)
    return Batch(*jax.device_put(tuple(tokens), batch_sharding(mesh)), starts=step == 0)


def variables(state):
    for path, leaf in jax.tree.leaves_with_path(state, is_leaf=is_variable):
        value = np.array(leaf.get_value() if is_variable(leaf) else leaf)
        dims = leaf.get_metadata("out_sharding") if is_variable(leaf) else ()
        yield jax.tree_util.keystr(path), value, dims


def canonical(state, config):
    """Host copies; stacked layers in the order of the layers."""
    order = [config.layer_ids.index(layer) for layer in range(config.model.num_layers)]
    return {
        name: value[order] if "layers" in dims else value for name, value, dims in variables(state)
    }


def assert_bit_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@functools.cache
def setup_of(config):
    mesh = config.mesh.build()
    return mesh, make_train_step(config, mesh)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """config -> (folder, the state after two steps, the losses of the next ones): each run once."""
    runs = {}

    def run_once(config):
        if config not in runs:
            folder = tmp_path_factory.mktemp("run") / "checkpoints"
            mesh, step = setup_of(config)
            state = init_state(config, mesh)
            for number in range(2):
                state, _ = step(state, batch_of(number, config, mesh))
            arrays = canonical(state, config)
            with Checkpoints(folder, keep=1) as checkpoints:
                checkpoints.save(state, config)
                # The state is donated to the third step while it is being written.
                losses = next_losses(config, state)
            runs[config] = folder, arrays, losses
        return runs[config]

    return run_once


def next_losses(config, state):
    """Of the 20 steps after the second."""
    mesh, step = setup_of(config)
    losses = []
    for number in range(2, 22):
        state, metrics = step(state, batch_of(number, config, mesh))
        losses.append(float(metrics.loss))
    return losses


@pytest.fixture
def small():
    """A state that costs nothing, and its config."""
    config = make_config(model=dataclasses.replace(MODEL, num_layers=2))
    return init_state(config), config


def at_step(state, step):
    return dataclasses.replace(state, step=jax.device_put(jnp.int32(step), state.step.sharding))


ONE = make_config()
DATA_ONLY = make_config((8, 1, 1))
STAGES_ONLY = make_config((1, 8, 1))
ALL_AXES = make_config((2, 2, 2))
ALL_FSDP = make_config((2, 2, 2), train=dataclasses.replace(TRAIN, fsdp=True))
ALL_SHARDED = make_config((2, 2, 2), train=dataclasses.replace(TRAIN, update="sharded"))
UNEVEN = make_config((1, 4, 1), (3, 2, 2, 1))
UNEVEN_HOST = make_config((2, 2, 2), (3, 5), train=dataclasses.replace(TRAIN, update="host"))
INTERLEAVED = make_config((2, 2, 2), (3, 2, 2, 1), num_groups=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ALL_AXES, ONE),
        (ALL_AXES, DATA_ONLY),
        (ALL_AXES, STAGES_ONLY),
        (ALL_AXES, UNEVEN),
        (ALL_AXES, ALL_SHARDED),
        (ONE, ALL_AXES),
        (DATA_ONLY, ALL_AXES),
        (STAGES_ONLY, ALL_AXES),
        (ONE, ALL_FSDP),
        (UNEVEN, ONE),
        (UNEVEN, INTERLEAVED),
        (INTERLEAVED, UNEVEN),
        (ALL_SHARDED, UNEVEN),
        (ALL_FSDP, ONE),
        (ALL_SHARDED, UNEVEN_HOST),
        (UNEVEN_HOST, ONE),
    ],
)
def test_goes_on_on_another_mesh(run, before, after):
    folder, expected, expected_losses = run(before)
    mesh, _ = setup_of(after)
    state = Checkpoints(folder, keep=1).restore(after, mesh)
    audit(state)
    assert_bit_equal(canonical(state, after), expected)
    np.testing.assert_allclose(next_losses(after, state), expected_losses, rtol=RELATIVE_ERROR)


@pytest.mark.parametrize("config", [ONE, ALL_FSDP, ALL_SHARDED, UNEVEN, UNEVEN_HOST, INTERLEAVED])
def test_goes_on_bit_for_bit_on_the_same_mesh(run, config):
    folder, expected, expected_losses = run(config)
    mesh, _ = setup_of(config)
    state = Checkpoints(folder, keep=1).restore(config, mesh)
    audit(state)
    assert_bit_equal(canonical(state, config), expected)
    assert next_losses(config, state) == expected_losses


def test_empty_slots_are_zero_after_a_restore(run):
    folder, _, _ = run(ALL_AXES)
    state = Checkpoints(folder, keep=1).restore(UNEVEN, UNEVEN.mesh.build())
    empty = np.array([0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1], bool)
    stacked = [value for _, value, dims in variables(state) if "layers" in dims]
    assert len(stacked) == 3 * 3 + 2
    for value in stacked:
        assert not value[empty].any()
        assert value[~empty].any(axis=tuple(range(1, value.ndim))).all()


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9, "clip_norm": 0.0},
        {"optimizer": "rmsprop"},
    ],
)
def test_every_optimizer_comes_back(tmp_path, optimizer):
    model = dataclasses.replace(MODEL, num_layers=2)
    config = make_config(train=TrainConfig(**optimizer), model=model)
    state = jax.tree.map(lambda a: a + jnp.ones_like(a), init_state(config))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, config)
        restored = checkpoints.restore(config, config.mesh.build())
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_bit_equal(canonical(restored, config), canonical(state, config))


def test_stored_arrays_have_readable_names_and_no_empty_slots():
    shapes = {name: array.shape for name, array in by_layer(init_state(UNEVEN), UNEVEN).items()}
    assert shapes["params/lstm/w_x"] == (8, 16, 4, 16)
    assert shapes["opt_state/0/mu/lstm/w_x"] == (8, 16, 4, 16)
    assert shapes["carry/h"] == (8, 8, 16)
    assert shapes["step"] == ()


@pytest.mark.parametrize("num_layers", [8, 7])
@pytest.mark.parametrize("mesh", [(1, 4, 1), (1, 4, 2), (2, 4, 1)])
def test_no_device_holds_more_for_a_checkpoint_than_for_a_step(mesh, num_layers):
    placement = (num_layers - 5, 2, 2, 1)
    model = dataclasses.replace(MODEL, num_layers=num_layers)
    config = make_config(mesh, placement, model=model)
    state = init_state(config)
    stored = by_layer(state, config)
    arrays = [
        leaf.get_value() if is_variable(leaf) else leaf
        for leaf in jax.tree.leaves(state, is_leaf=is_variable)
    ]
    for (name, now), before in zip(stored.items(), arrays, strict=True):
        assert shard_size(now) <= shard_size(before), name


def shard_size(array):
    return np.prod(array.sharding.shard_shape(array.shape))


def test_config_is_stored_as_text(tmp_path, small):
    state, config = small
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(at_step(state, 3), config)
    text = (tmp_path / "3" / "_CHECKPOINT_METADATA").read_text()
    stored = json.loads(text)["custom_metadata"]["config"]
    assert stored == json.loads(json.dumps(dataclasses.asdict(config)))


def test_the_newest_are_kept(tmp_path, small):
    state, config = small
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 4, 6, 10):
            checkpoints.save(at_step(state, step), config)
        assert checkpoints.latest_step() == 10
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(state, 11), config)
    assert {each.name for each in tmp_path.iterdir()} == {"10", "11"}
    assert (
        int(Checkpoints(tmp_path, keep=2).restore(config, config.mesh.build(), step=10).step) == 10
    )


def test_half_written_checkpoints_do_not_count(tmp_path, small):
    state, config = small
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(state, 3), config)
    killed = tmp_path / "4.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "3", killed)

    reader = Checkpoints(tmp_path, keep=2)
    assert reader.latest_step() == 3
    assert int(reader.restore(config, config.mesh.build()).step) == 3
    assert killed.exists()  # it may be another process's, still at work
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(state, 5), config)
        assert checkpoints.latest_step() == 5
    assert not killed.exists()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGES = {
    "half of the data": (lambda folder: cut(largest(folder)), r"d/\w+ has \d+ of \d+ bytes"),
    "no data": (lambda folder: largest(folder).unlink(), r"d/\w+: No such file"),
    "half of the manifest": (
        lambda folder: cut(folder / "state/manifest.ocdbt"), r"manifest\.ocdbt has \d+ of \d+ bytes",
    ),
    "half of the sizes": (lambda folder: cut(folder / "sizes.json"), "not what was written"),
    "no sizes": (lambda folder: (folder / "sizes.json").unlink(), r"sizes\.json: No such file"),
    "half of the metadata": (
        lambda folder: cut(folder / "_CHECKPOINT_METADATA"), "not what was written",
    ),
    "the state alone": (
        lambda folder: [p.unlink() for p in folder.iterdir() if p.is_file()],
        r"_CHECKPOINT_METADATA: No such file",
    ),
    "nothing": (shutil.rmtree, None),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, small, damage, caplog):
    state, config = small
    mesh = config.mesh.build()
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (3, 8):
            checkpoints.save(at_step(state, step), config)
    change, message = DAMAGES[damage]
    change(tmp_path / "8")

    reader = Checkpoints(tmp_path, keep=3)
    assert (reader.latest_step(), reader.steps()) == (3, [3])
    assert int(reader.restore(config, mesh).step) == 3
    if message is not None:
        assert re.search(
            rf"^skipped {tmp_path}/8, which is damaged: .*{message}", caplog.messages[-1]
        )
        with pytest.raises(
            FileNotFoundError, match=rf"/8 is damaged: .*{message}.*use one of \[3\]"
        ):
            reader.restore(config, mesh, step=8)
    # The run comes to this step again.
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (7, 8):
            checkpoints.save(at_step(state, step), config)
    assert reader.steps() == [3, 7, 8]
    aside = [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()]
    assert aside == ([] if message is None else ["8.damaged-1"])


def test_nothing_but_damage_is_an_error(tmp_path, small):
    state, config = small
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(at_step(state, 3), config)
    cut(tmp_path / "3" / "sizes.json")
    with pytest.raises(
        FileNotFoundError, match=r"no whole checkpoint in .*: 3 is damaged, .*; bring"
    ):
        Checkpoints(tmp_path, keep=1).restore(config, config.mesh.build())


def test_the_best_is_kept_beside_the_newest(tmp_path, small):
    state, config = small
    losses = {2: 3.0, 4: 1.0, 6: 1.0, 8: 2.0}
    for steps in ((2, 4), (6, 7, 8, 9)):  # in two processes, the second told of the losses before
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.losses |= {step: loss for step, loss in losses.items() if step < steps[0]}
            for step in steps:
                if step in losses:
                    checkpoints.losses[step] = losses[step]
                checkpoints.save(at_step(state, step), config)
    steps = Checkpoints(tmp_path, keep=1).steps()
    assert steps == [6, 9]
    assert best_of(steps, losses) == 6
    assert best_of([1, 3], losses) is None


def test_a_failed_save_is_reported_and_takes_nothing_away(tmp_path, small, monkeypatch):
    state, config = small
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(state, 3), config)
        checkpoints.latest_step()
        with monkeypatch.context() as patch:
            patch.setattr("os.rename", fail)
            patch.setattr("os.replace", fail)
            patch.setattr("shutil.move", fail)
            checkpoints.save(at_step(state, 4), config)
            with pytest.raises(
                OSError, match=r"step 4 could not be written in .*No space left.*newest .* step 3"
            ):
                checkpoints.latest_step()
        assert checkpoints.latest_step() == 3


def fail(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_reader_leaves_no_trace(tmp_path):
    folder = tmp_path / "nothing"
    with Checkpoints(folder, keep=1) as checkpoints:
        assert checkpoints.latest_step() is None
    assert not folder.exists()


def test_nothing_is_printed(tmp_path, small, capfd):
    state, config = small
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(3):
            checkpoints.save(at_step(state, step), config)
        checkpoints.restore(config, config.mesh.build())
    assert capfd.readouterr() == ("", "")


def restore_with(folder, step=None, train=None, **model):
    config = make_config(
        model=dataclasses.replace(MODEL, **{"num_layers": 2, **model}), train=train or TRAIN
    )
    return Checkpoints(folder, keep=1).restore(config, config.mesh.build(), step)


def test_missing_checkpoints_are_errors(tmp_path, small):
    state, config = small
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"no checkpoint in {folder}; .* out_dir"):
            restore_with(folder)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(state, 3), config)
        checkpoints.save(at_step(state, 5), config)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4 .* use one of \[3, 5\]"):
        restore_with(tmp_path, step=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "num_layers=2, the config has num_layers=3; set num_layers=2"),
        ({"hidden_size": 32}, "hidden_size=16, the config has hidden_size=32"),
        ({"embed_size": 8}, "embed_size=16, the config has embed_size=8"),
        ({"vocab_size": 128}, "vocab_size=64, the config has vocab_size=128"),
        ({"tie_embedding": True}, "tie_embedding=False, the config has tie_embedding=True"),
        (
            {"train": TrainConfig(optimizer="adamw")},
            r"another optimizer: optimizer='adam', .* has optimizer='adamw'",
        ),
        (
            {"train": TrainConfig(optimizer="sgd", momentum=0.5)},
            r"another optimizer: .* momentum=0.0; the config has .* momentum=0.5; set them",
        ),
    ],
)
def test_another_model_or_optimizer_is_an_error(tmp_path, small, change, message):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(*small)
    with pytest.raises(ValueError, match=message):
        restore_with(tmp_path, **change)


def test_another_batch_size_is_an_error(tmp_path, small):
    state, config = small
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, config)
        other = dataclasses.replace(config, data=DataConfig(batch_size=4, seq_len=4))
        message = "batch_size=8 rows, the config has batch_size=4; set batch_size=8"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(other, other.mesh.build())


def test_what_makes_no_other_arrays_may_differ(tmp_path, small):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(*small)
    train = dataclasses.replace(TRAIN, learning_rate=0.5, clip_norm=0.0, seed=3)
    restore_with(tmp_path, train=train, dropout=0.5, dtype="bfloat16")


def test_saving_over_a_later_checkpoint_is_an_error(tmp_path, small):
    state, config = small
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(state, 5), config)
        for step in (5, 3):
            with pytest.raises(ValueError, match=f"cannot save step {step}: .* has step 5 already"):
                checkpoints.save(at_step(state, step), config)


def test_saving_with_another_config_is_an_error(tmp_path):
    state = init_state(UNEVEN)
    with (
        Checkpoints(tmp_path, keep=2) as checkpoints,
        pytest.raises(ValueError, match=r"has 12 slots for layers, .*layer_ids=.* needs 8"),
    ):
        checkpoints.save(state, make_config((1, 4, 1)))


def test_a_foreign_checkpoint_is_an_error(tmp_path, small):
    _, config = small
    from orbax.checkpoint import v1 as orbax

    mesh = config.mesh.build()
    array = jax.device_put(jnp.zeros(3), NamedSharding(mesh, P()))
    orbax.save(str(tmp_path / "1"), {"weights": array})
    with pytest.raises(
        FileNotFoundError, match="1 is damaged, it has no config, so jaxpar did not"
    ):
        restore_with(tmp_path)


def test_a_checkpoint_of_another_vocabulary_is_an_error(tmp_path, small):
    state, config = small
    words = ("<unk>", "<eos>", "the")
    with Checkpoints(tmp_path, keep=1, vocabulary=Vocabulary(words)) as checkpoints:
        checkpoints.save(state, config)
        checkpoints.restore(config, config.mesh.build())
    for other in (Vocabulary((*words, "cat")), Vocabulary(words[::-1]), Vocabulary(words, "marks")):
        with pytest.raises(
            ValueError, match=r"another vocabulary: 3 words \(spaces\) then, .* now"
        ):
            Checkpoints(tmp_path, keep=1, vocabulary=other).restore(config, config.mesh.build())


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0: keep at least 1"):
        Checkpoints(tmp_path, keep=0)
