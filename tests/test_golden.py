"""Losses of every layer of the language model, as they were when they were stored.

A change that is meant to leave the numbers alone leaves these alone. Where one is meant to change them, store
them anew and say so in CHANGELOG.md:

    python -m tests.test_golden > tests/golden.json
"""

import json
from pathlib import Path

import numpy as np
import pytest
from lib import api

from jaxpar import OptimizerConfig, Parallel, PipelineConfig, init_state, make_train_step
from jaxpar.lm import LM

STORED = Path(__file__).parent / "golden.json"
MESHES = {
    "dp1": Parallel("dp1"),
    "pp2": Parallel("pp2", PipelineConfig(num_microbatches=2, num_chunks=2)),
    "dp2pp2tp2": Parallel("dp2pp2tp2", PipelineConfig(num_chunks=2)),
}
STEPS = 20
# Another processor, version of XLA or mesh adds in another order.
ROUNDING = 2e-5


def losses(layer, mesh):
    """Of the first steps, with dropout and carried state."""
    sizes = {"vocab_size": 96, "batch_size": 8, "seq_len": 16, "dropout": 0.2}
    task = LM(2, 16, 16, layer=layer, optimizer=OptimizerConfig(warmup_steps=0), **sizes)
    state, step = init_state(task, MESHES[mesh]), make_train_step(task, MESHES[mesh])
    words = np.cumsum(np.random.default_rng(0).integers(0, 3, 4000, np.int32)) % 96
    batches, found = task.batches_of(words, 0, seed=0), []
    for number in range(STEPS):
        state, metrics = step(state, batches.batch(number))
        found.append(float(metrics.loss))
    return found


# Of each layer one device and all axes by default; stages alone go the same ways.
ROWS = [
    pytest.param(layer, mesh, marks=[pytest.mark.more] * (mesh == "pp2" and layer != "lstm"))
    for layer in api.language_layers()
    for mesh in MESHES
]


@pytest.mark.rows(4)
@pytest.mark.parametrize(("layer", "mesh"), ROWS)
def test_losses_are_as_they_were_stored(layer, mesh):
    stored = json.loads(STORED.read_text())[layer]
    np.testing.assert_allclose(losses(layer, mesh), stored, ROUNDING)


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - eight devices

    found = {layer: losses(layer, "dp1") for layer in api.language_layers()}
    lines = (
        f'  "{layer}": {json.dumps([round(x, 6) for x in own])}' for layer, own in found.items()
    )
    print("{", ",\n".join(lines), "}", sep="\n")
