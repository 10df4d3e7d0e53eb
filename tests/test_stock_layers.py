"""Every layer that `lm` has by name learns with the settings that a user gets, the same on two meshes."""

import functools
import math

import numpy as np
import pytest
from lib import api

import jaxpar
from jaxpar import TrainConfig

OF_UNIFORM = 0.05  # how far a first loss may be from that of guessing
ENOUGH = 200.0  # perplexity; 233.7 is that of guessing by frequency
BETWEEN_MESHES = 1e-4  # of losses: sums in another order, over 50 steps

fit = functools.partial(jaxpar.fit, quiet=True)


@pytest.mark.more
@pytest.mark.trains
@pytest.mark.parametrize("layer", api.language_layers())
def test_every_layer_learns_with_stock_settings(layer, tmp_path):
    task = jaxpar.lm.LM(layer=layer).resolve()
    result = fit(task, "dp1", TrainConfig(num_steps=300, out_dir=str(tmp_path / "run")))
    assert task.num_words is not None
    assert result.losses[0] == pytest.approx(math.log(task.num_words), rel=OF_UNIFORM)
    assert result.evaluations["test"].metrics["perplexity"] < ENOUGH


@pytest.mark.more
@pytest.mark.trains
@pytest.mark.law
@pytest.mark.parametrize("layer", api.language_layers())
def test_fifty_steps_are_the_same_on_two_meshes(layer, tmp_path):
    """A smaller model with the other settings as they are."""
    task = jaxpar.lm.LM(2, 32, 32, layer=layer, max_vocab=380, batch_size=8, seq_len=16)
    one, many = (
        fit(task, mesh, TrainConfig(num_steps=50, out_dir=str(tmp_path / mesh))).losses
        for mesh in ("dp1", "dp2pp2")
    )
    assert len(one) == 50
    np.testing.assert_allclose(many, one, rtol=BETWEEN_MESHES)
