"""The law: a bit that changes in a checkpoint, weights or words is told, or changes nothing.

What people may have changed (settings, numbers) is taken as it is.
"""

import collections
import random
import re
import shutil

import jax
import numpy as np
import pytest
from lib import api

from jaxpar import MeshConfig, OptimizerConfig, Parallel, TrainConfig, fit, load_run

# What Python and its libraries say of bytes that mean nothing to them.
RAW = r"codec|Expecting|Extra data|delimiter|KeyError|control char|Traceback|'utf-8'|DATA_LOSS|_NOT_|INVALID"

NUM_FLIPS = 200
ONE = Parallel(MeshConfig(devices=(0,)))


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """The folder of a run of a task of one's own, with two checkpoints and its weights."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    file = folder.parent / "own.py"
    file.write_text(
        "import dataclasses\nfrom jaxpar.lm import LM\n"
        "@dataclasses.dataclass(frozen=True)\nclass Own(LM):\n    depth: int = 1\n"
    )
    rate = OptimizerConfig(learning_rate=0.1, warmup_steps=0)
    task = api.task_class(f"{file}:Own")(
        num_layers=2, hidden_size=8, embed_size=8, corpus=str(text), batch_size=8, seq_len=4, optimizer=rate
    )  # fmt: skip
    train = TrainConfig(
        num_steps=4, log_every=1, eval_every=2, checkpoint_every=2, out_dir=str(folder)
    )
    fit(task, ONE, train)
    load_run(folder).export(folder / "model.safetensors")
    return folder


def arrays(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def whole_state(path, **which):
    return arrays(api.run_state(path, **which))


def settings(path):
    setup = load_run(path).setup
    return repr((vars(setup.task), setup.parallel, vars(setup.train) | {"out_dir": None}))


# Files that people may change.
PLAIN = {"settings": r"config\.toml", "metrics": r"metrics\.jsonl"}


# All that is read of a run.
READERS = {
    "settings": settings,
    "state": whole_state,
    "earlier state": lambda path: whole_state(path, step=2),
    "best": lambda path: whole_state(path, best=True),
    "metrics": lambda path: load_run(path).metrics(),
    "vocabulary": lambda path: load_run(path).vocabulary,
}


def same(one, other):
    try:
        np.testing.assert_equal(one, other)
    except AssertionError:
        return False
    return True


@pytest.mark.full
def test_a_bit_that_changes_is_found(run, tmp_path, caplog):
    expected = {name: read(run) for name, read in READERS.items()}
    assert not same(expected["earlier state"], expected["state"])
    assert same(expected["best"], expected["state"])
    chosen, outcomes = random.Random(0), collections.Counter()
    files = sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())
    kinds = sorted({path.parts[0] for path in files} - {"checkpoints"})
    for number in range(NUM_FLIPS):
        folder = tmp_path / "run"
        shutil.copytree(run, folder)
        kind = kinds[number // 2 % len(kinds)] if number % 2 else "checkpoints"
        # Checkpoints by turns: their files have other names each time.
        own = (kind, str(4 - number % 4)) if kind == "checkpoints" else (kind,)
        path = folder / chosen.choice([each for each in files if each.parts[: len(own)] == own])
        content = bytearray(path.read_bytes())
        bit = chosen.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        what, found = f"bit {bit} of {path.relative_to(folder)}", []
        for name, read in READERS.items():
            caplog.clear()
            result, message = None, None
            try:
                result = read(folder)
            except (ValueError, OSError) as error:
                message = str(error)
            if message is not None:
                assert str(folder) in message, f"{what}: {message}"
                assert not re.search(RAW, message), f"{what}: {message}"
                found.append(f"{name} refused")
            elif name in PLAIN and re.fullmatch(PLAIN[name], kind):  # whatever its bit means
                found.append(f"{name} taken")
            elif not same(result, expected[name]):
                assert name in ("state", "best"), f"{what}: {name} is another"
                assert same(result, expected["earlier state"]), f"{what}: another state"
                told = r"skipped the damaged checkpoint .*/checkpoints/4: \S+ (is|has)"
                assert re.search(told, caplog.messages[-1])
                found.append("fell back")
        outcomes.update(found or ["changed nothing"])
        print(f"{number + 1}: {what}: {', '.join(found) or 'changes nothing'}", flush=True)
        shutil.rmtree(folder)
    print(dict(outcomes))
    assert outcomes["fell back"]
    assert outcomes["settings taken"] + outcomes["settings refused"]
