"""Two meshes side by side: rounding that training makes larger is told from a model that depends on them."""

import dataclasses
import math

import jax
import pytest
from lib import api
from lib.models import SGD, Regress, Regression

from jaxpar import TrainConfig, compare_meshes, fit


class Shaped(Regression):
    """Its numbers depend on how many rows it sees at once."""

    def first(self, batch, at):
        return super().first(batch, at) * (1 + 0.01 * batch["x"].shape[1])


class DependsOnMesh(Regress):
    def make_model(self, rngs):
        return Shaped(self.kinds, rngs=rngs)


def test_runs_that_part_by_rounding_are_told_so(tmp_path):
    chaotic = dataclasses.replace(SGD, learning_rate=0.5)
    train = TrainConfig(25, out_dir=str(tmp_path / "run"), checkpoint_every=0)
    task = Regress(("cell", "dense"), optimizer=chaotic)
    found = compare_meshes(task, "dp1", "dp2pp2", 25, train)
    assert max(found.of_step) < 1e-5
    assert max(found.apart[15:]) > 100 * found.apart[0]
    assert max(found.apart[15:]) > 1e-4
    assert "this is rounding" in str(found)
    assert fit(task, "dp1", train, quiet=True).losses[:5] == pytest.approx(found.losses[0][:5])


class NotFinite(Regression):
    """NaN where it sees so many rows at once."""

    def __init__(self, rows, kinds, *, rngs):
        super().__init__(kinds, rngs=rngs)
        self.rows = rows

    def first(self, batch, at):
        x = super().first(batch, at)
        return x * (float("nan") if x.shape[1] in self.rows else 1)


@dataclasses.dataclass(frozen=True)
class NotFiniteOnMesh(Regress):
    rows: tuple[int, ...] = ()

    def make_model(self, rngs):
        return NotFinite(self.rows, self.kinds, rngs=rngs)


@pytest.mark.parametrize(
    ("rows", "apart"), [((16,), math.inf), ((8,), math.inf), ((8, 16), 0.0)], ids=str
)
def test_losses_that_are_not_finite_are_apart_from_those_that_are(rows, apart):
    found = compare_meshes(NotFiniteOnMesh(("dense",), rows=rows), "dp1", "dp2", 1)
    assert found.apart == found.of_step == [apart]


def test_accelerators_round_products_more():
    task = Regress(("dense",))
    assert api.precision(task, "cpu") == 2.0**-23
    assert api.precision(task, "cuda") == 2.0**-8
    with jax.default_matmul_precision("highest"):
        assert api.precision(task, "cuda") == 2.0**-23


def test_a_model_that_depends_on_the_mesh_is_told_so():
    found = compare_meshes(DependsOnMesh(("dense",)), "dp1", "dp2", 2)
    assert min(found.of_step) > 1e-3
    assert not found.is_rounding
    assert "Step 1 differs from the same state: more than rounding (3e-04)" in str(found)
