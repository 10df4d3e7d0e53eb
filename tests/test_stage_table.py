"""What each part of a model costs, and which stage has it: counted in the model itself."""

import dataclasses
import re

import jax
import pytest
from flax import nnx
from lib.laws import MODEL, make_settings, slow
from lib.models import FEATURES, WIDTH, Regress, Regression

from jaxpar.base.console import make_console, rendered
from jaxpar.base.trees import whole_bytes
from jaxpar.config import Parallel, PipelineConfig
from jaxpar.facts import ModelFacts
from jaxpar.layout import Layout
from jaxpar.planning import estimate_step, plan
from jaxpar.planning.counts import counts_of
from jaxpar.planning.machine import find_machine
from jaxpar.training.stage_table import stage_rows, stage_table

STEPS = Regress().batch_size * Regress().seq_len
END = 2 * STEPS * FEATURES * WIDTH  # FLOPs of the product before the layers, and of that after them


def laid_out(task, mesh, units=(1, 1), **pipeline):
    settings = make_settings(mesh, units, task, **pipeline)
    return Layout(ModelFacts.of(task), settings.parallel)


def test_costs_are_those_of_each_part_and_pass():
    costs = ModelFacts.of(Regress()).costs
    # Nobody asks for the gradient of the inputs.
    assert (costs.first, costs.last) == ((END, END), (END, 2 * END))
    gru, dense = costs.layers[0], costs.layers[2]
    assert costs.layers[:2] == (gru, gru)
    assert gru[1] == 2 * gru[0] > dense[1] == 2 * dense[0] > 0


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("frozen", "part"), [("inputs", "first"), ("outputs", "last"), slow("gru", "layers")]
)
def test_what_is_frozen_costs_no_gradient_of_its_weights(frozen, part):
    costs, plain = (ModelFacts.of(Regress(freeze=freeze)).costs for freeze in (frozen, None))
    saved = {"first": END, "last": END, "layers": plain.layers[0][0]}[part]
    less, more = getattr(costs, part), getattr(plain, part)
    if part == "layers":
        less, more = less[0], more[0]
    assert less == (more[0], more[1] - saved)
    assert {costs._replace(**{part: None}), plain._replace(**{part: None})} == {
        plain._replace(**{part: None})
    }


class Stem(Regression):
    """With more before the layers than in them."""

    def __init__(self, kinds, *, rngs):
        super().__init__(kinds, rngs=rngs)
        self.up = nnx.Param(nnx.Linear(FEATURES, 64 * WIDTH, rngs=rngs).kernel[...])
        self.inputs = nnx.Linear(64 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def first(self, batch, at):
        return super().first({**batch, "x": jax.nn.relu(batch["x"] @ self.up[...])}, at)


@dataclasses.dataclass(frozen=True)
class Stemmed(Regress):
    kinds: tuple[str, ...] = ("gru",) * 6

    def make_model(self, rngs):
        return Stem(self.kinds, rngs=rngs)


def test_layers_give_way_to_what_is_before_them():
    layout = laid_out(Stemmed(), (1, 2, 1))
    assert sum(layout.costs.first) > sum(layout.costs.layers[0])
    assert layout.placement[0] < 3
    assert laid_out(Regress(kinds=("gru",) * 6), (1, 2, 1)).placement == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "expected"),
    [
        (
            (1, 2, 1),
            {"placement": (2, 2)},
            [(0, "first"), (0, "0-1"), (1, "2"), (1, "3"), (1, "last")],
        ),
        (
            (1, 4, 1),
            {"placement": "first | | 0-3 | last"},
            [(0, "first"), (1, ""), (2, "0-1"), (2, "2"), (2, "3"), (3, "last")],
        ),
        (
            (1, 2, 1),
            {"schedule": "v", "placement": (1, 1, 1, 1)},
            [(0, "first"), (0, "0"), (1, "1"), (1, "2"), (0, "3"), (0, "last")],
        ),
    ],
)
def test_rows_are_the_parts_in_the_order_of_the_data(mesh, options, expected):
    task = Regress()
    layout = laid_out(task, mesh, (2, 4), **options)
    rows = stage_rows(layout)
    assert [(row.stage, row.part) for row in rows] == expected
    facts, costs = layout.facts, layout.facts.costs
    parts = (costs.first, *costs.layers, costs.last)
    for number, name in enumerate(("forward", "backward")):
        whole = 8 * sum(row.number * getattr(row, name) for row in rows)
        assert whole == pytest.approx(sum(part[number] for part in parts))
    # The scale is used before the layers and after them.
    state = facts.split(facts.model)[1:]
    assert sum(row.number * row.weight_bytes for row in rows) == whole_bytes(state) + 4 * WIDTH
    # What is sent moves up, down, or stays on its stage.
    x_bytes = whole_bytes(facts.traces.x) / 8
    stages = [stage for stage, _ in expected]
    moves = [here != there for here, there in zip(stages, [*stages[1:], stages[-1]], strict=True)]
    assert [row.sent_bytes for row in rows] == [x_bytes * moved for moved in moves]
    # As the planner counts a unit by itself.
    unit = counts_of(task, 1, "cpu").unit(task.seq_len // 4, task.batch_size // 2)
    for row in rows:
        if row.part[:1].isdigit():
            kind = facts.kind_of[int(row.part[0])]
            assert row.kept_bytes == pytest.approx(row.number * unit.kinds[kind].kept)


def test_with_remat_a_place_keeps_what_comes_to_it():
    layout = laid_out(Regress(), (1, 2, 1), (2, 4), remat=True, placement=(2, 2))
    x_bytes = whole_bytes(layout.facts.traces.x) / 8
    assert [row.kept_bytes for row in stage_rows(layout)] == [x_bytes, 0, x_bytes, 0, 0]


def test_the_table_of_many_layers_is_short():
    task = dataclasses.replace(MODEL, num_layers=64)
    table, note = stage_table(laid_out(task, (1, 4, 2), (2, 4)))
    lines = rendered(table, make_console()).splitlines()
    assert len(lines) == 2 + 1 + 4 + 1
    assert [" ".join(line.split()[:5]) for line in lines[3:5]] == [
        "0 0-15 16 x 65.5",
        "1 16-31 16 x 65.5",
    ]
    assert lines[-1].split()[:2] == ["all", "last"]
    assert (
        note
        == "estimated for a unit of 8 rows x 2 steps, before tensor splits them: FLOPs of products, bytes "
        "kept and sent"
    )


@pytest.mark.slow
def test_a_plan_shows_the_stages_of_the_best():
    task = dataclasses.replace(MODEL, num_layers=8, batch_size=1, hidden_size=512, embed_size=512)
    machine = dataclasses.replace(find_machine("v5e:1x2"), memory_bytes=1e12)
    ranking = plan(task, Parallel(), None, machine, num_finalists=0)
    on_stages = [cost for cost in ranking.fitting if cost.parallel.mesh.stage == 2]
    ranking = dataclasses.replace(ranking, fitting=tuple(on_stages))
    printed = str(ranking)
    assert re.search(r"Its stages:\n\nstage +part .*\n─+\nall +first .*\n0 +0-3 +4 x ", printed)
    whole = estimate_step(task, Parallel("tp2", PipelineConfig()), None, machine)
    assert "Its stages:" not in str(dataclasses.replace(ranking, fitting=(whole,)))
