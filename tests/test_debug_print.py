"""What `jax.debug.print` in a model says, on any mesh."""

import dataclasses
import re

import jax
import pytest
from lib.laws import more, on_devices
from lib.models import Regress, Regression

from jaxpar import Parallel, init_state, value_and_grad


class Talks(Regression):
    def first(self, batch, at):
        jax.debug.print("sum {} of row {}", batch["x"].sum(), at.row)
        return super().first(batch, at)


@dataclasses.dataclass(frozen=True)
class Talking(Regress):
    kinds: tuple[str, ...] = ("dense",) * 2

    def make_model(self, rngs):
        return Talks(self.kinds, rngs=rngs)


@pytest.mark.parametrize("mesh", [(2, 1, 1), more((2, 1, 2)), more((2, 2, 2))])
def test_each_group_prints_what_its_rows_are(mesh, capfd):
    task, parallel = Talking(), Parallel(on_devices(mesh))
    batch = task.make_batches("train", 0).batch(0)
    state, run = init_state(task, parallel), value_and_grad(task, parallel)
    for _ in range(2):  # before the first call, jaxpar tries the model
        capfd.readouterr()
        jax.block_until_ready(run(state, batch))
        jax.effects_barrier()
    said = dict(re.findall(r"sum (\S+) of row (\d+)", capfd.readouterr().out))
    found = {int(row): float(total) for total, row in said.items()}
    assert found == pytest.approx(
        {row: batch["x"][row : row + 8].sum() for row in (0, 8)}, rel=1e-5
    )
