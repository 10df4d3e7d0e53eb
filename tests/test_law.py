"""The law: any mesh, schedule and options give the losses, gradients, updates and predictions of one device.

The cases are drawn (`lib.law`). A failure prints a program that shows its case alone.
"""

import hashlib
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
from lib import api
from lib.law import draw
from lib.law.check import check, script
from lib.law.options import MESHES, OPTIONS, SCHEDULES, build, plain_case

pytestmark = pytest.mark.law
NUM_DRAWN = 60  # by the seed, in each run


def pytest_generate_tests(metafunc):
    if "number_of_draw" in metafunc.fixturenames:
        is_drawn = metafunc.config.getoption("seed") is not None
        metafunc.parametrize("number_of_draw", range(NUM_DRAWN * is_drawn))


def run(case):
    print(script(case))
    check(case)


@pytest.mark.parametrize("number", range(len(MESHES) * len(SCHEDULES)))
def test_every_mesh_and_schedule_give_what_one_device_gives(number):
    run(draw.default_cases()[number])


@pytest.mark.full
def test_drawn_cases_give_what_one_device_gives(number_of_draw, pytestconfig):
    run(draw.draw(NUM_DRAWN, pytestconfig.getoption("seed"))[number_of_draw])


# ---- what is drawn ----


def test_by_default_each_value_of_each_option_occurs_and_each_mesh_meets_each_schedule():
    cases = draw.default_cases()
    assert draw.every_choice() <= set().union(*map(draw.choices_of, cases))
    met = {(case["mesh"], case["schedule"]) for case in cases}
    assert met == {*itertools.product(MESHES, SCHEDULES)}


@pytest.mark.full
def test_ten_runs_have_most_pairs_of_choices():
    numbers, found = random.Random(0), set()
    possible = set().union(*(draw.pairs_of(draw.random_case(numbers)) for _ in range(20_000)))
    for number in range(10):
        seed = hashlib.sha1(b"%d" % number).hexdigest()  # as of a commit
        for case in draw.draw(NUM_DRAWN, seed):
            found |= draw.pairs_of(case)
    missing = possible - found
    assert len(possible) > 10_000
    assert len(missing) < 0.02 * len(possible), sorted(map(str, missing))[:20]


def test_cases_depend_on_the_seed_alone():
    assert draw.draw(3, "a") == draw.draw(3, "a") != draw.draw(3, "b")


# ---- what a failure says ----


def test_a_script_is_short():
    lines = [
        len(script(case).splitlines()) for case in [*draw.default_cases(), *draw.draw(20, "lines")]
    ]
    assert max(lines) <= 30


@pytest.mark.full
def test_a_script_shows_its_case_alone(tmp_path):
    case = plain_case() | {"mesh": "dp2pp2", "microbatches": "2", "layer": "gru"}
    (tmp_path / "case.py").write_text(script(case))
    tests = Path(__file__).parent
    paths = {"PYTHONPATH": f"{tests}:{tests.parent}", "PATH": "", "HOME": str(tmp_path)}
    program = [sys.executable, tmp_path / "case.py"]
    done = subprocess.run(program, env=paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = script(case).replace("'gru'", "'no such layer'")
    (tmp_path / "case.py").write_text(wrong)
    assert subprocess.run(program, env=paths, capture_output=True).returncode == 1


@pytest.mark.parametrize("result", ["updates", "gradients"])
@pytest.mark.parametrize("form", ["layers", "flax"])
def test_a_wrong_number_is_noticed(result, form, monkeypatch):
    layer = {"layers": "gru", "flax": "mlp"}[form]
    case = plain_case() | {"form": form, "layer": layer, "result": result, "pattern": "a"}
    check(case)
    field = {"updates": "trained", "gradients": "grads"}[result]
    right = getattr(api, result)

    def wrong(*args):
        found = right(*args)
        arrays = getattr(found, field)
        name = next(name for name in arrays if "scale" in name or "norm" in name)
        return found._replace(**{field: {**arrays, name: arrays[name] * (1 + 1e-4)}})

    monkeypatch.setattr(api, result, wrong)
    with pytest.raises(AssertionError, match="error"):
        check(case)


def test_every_value_of_an_option_changes_what_is_built():
    numbers = random.Random(0)

    def changes(name, value):
        case = draw.random_case(numbers, **{name: value})
        others = [case | {name: other} for other in OPTIONS[name].values if other != value]
        built = [build(other) for other in others if draw.fits(other)]
        return case[name] == value and any(other != build(case) for other in built)

    # Another form has other layers, and what is compared is not built.
    for name in [name for name in OPTIONS if name not in ("form", "result")]:
        for value in OPTIONS[name].values:
            assert any(changes(name, value) for _ in range(10_000)), (name, value)
