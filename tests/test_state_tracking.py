"""`benchmarks/state_tracking`: its labels are right, its command goes on, its page is true."""

import collections
import json
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from lib import api

import jaxpar
from benchmarks.state_tracking import __main__ as command
from benchmarks.state_tracking import cell
from benchmarks.state_tracking.cell import BIN, MIXERS, TESTED, TRAINED, Tracking, Until
from benchmarks.state_tracking.words import NOTHING, OPERATORS, PERMUTATIONS, PROBLEMS, SWAPS
from jaxpar import LayerContext


def parity(letters):
    return sum(letters) % 2


def arithmetic(letters):
    if letters[-1] >= 5:
        return NOTHING
    return eval("".join(OPERATORS[n - 5] if n >= 5 else str(n) for n in letters)) % 5


def s5(letters):
    things = [*range(5)]
    for a, b in (SWAPS[n - 1] for n in letters if n):
        things[a], things[b] = things[b], things[a]
    return PERMUTATIONS.index(tuple(things))


@pytest.mark.parametrize("defined", [parity, arithmetic, s5], ids=lambda defined: defined.__name__)
def test_labels_are_those_of_the_definition(defined):
    problem = PROBLEMS[defined.__name__]
    letters_BT, labels_BT = problem.draw(np.random.default_rng(0), 50, 31)
    for letters, labels in zip(letters_BT.tolist(), labels_BT.tolist(), strict=True):
        assert [defined(letters[: n + 1]) for n in range(31)] == labels
    assert {*letters_BT.flat} == {*range(problem.num_letters)}
    assert {*labels_BT.flat} - {NOTHING} == {*range(problem.num_labels)}


def test_batches_depend_on_split_seed_and_step_and_rows_on_nothing_else():
    def letters(split="train", seed=0, step=3, rows=slice(None)):
        return Tracking("s5").make_batches(split, seed).batch(step, rows)["letters"]

    np.testing.assert_array_equal(letters()[8:16], letters(rows=slice(8, 16)))
    others = letters("valid"), letters("test"), letters(seed=1), letters(step=4)
    assert all((letters() != other).any() for other in others)


@pytest.mark.full
def test_what_a_transformer_says_of_a_word_holds_for_its_beginnings():
    """So that one pass over long words has the answers at all lengths."""
    rngs, at = nnx.Rngs(0), LayerContext(layer=0, time=0, row=0)
    model = cell.Reader("transformer", PROBLEMS["s5"], 16, 1, rngs=rngs)
    block = cell.Block(cell.Attention, 16, rngs=rngs)
    letters_TB = Tracking("s5").make_batches("test").batch(0)["letters"].T

    @jax.jit
    def read(letters):
        return block((), model.first({"letters": letters}, at), at)[1]

    whole, start = read(letters_TB), read(letters_TB[:12])
    np.testing.assert_allclose(whole[:12], start, atol=1e-5)
    other = read(np.concatenate([letters_TB[1:2], letters_TB[:1], letters_TB[2:]]))
    assert np.max(abs(other[20] - whole[20])) > 1e-3  # places count


def test_accuracy_is_that_of_answers_that_are_asked_for(monkeypatch):
    def make_predict_step(task, parallel):
        assert task.seq_len == TESTED

        def step(state, batch):
            labels = np.maximum(batch["labels"], 0)
            labels[:, TRAINED:] += 1
            return None, {"label": labels}

        return step

    monkeypatch.setattr(cell, "jaxpar", SimpleNamespace(make_predict_step=make_predict_step))
    by_length = cell.accuracy_by_length(Tracking("arithmetic"), None)
    assert by_length.tolist() == [1.0] * 5 + [0.0] * 27


def test_a_cell_ends_at_its_budget_or_when_it_makes_no_mistake(monkeypatch):
    until = Until(seconds=5)
    for accuracy in [1.0] * 9 + [0.999] + [1.0] * 9:
        until.evaluation(1, api.result_of("valid", 0.1, accuracy=accuracy))
        assert until.stop_reason is None
    until.evaluation(1, api.result_of("valid", 0.1, accuracy=1.0))
    assert until.stop_reason == "full accuracy"

    until, seconds = Until(seconds=5), iter((4, 6))
    monkeypatch.setattr(cell, "clock", lambda: next(seconds))
    until.progress(None, 10)
    assert until.stop_reason is None
    until.progress(None, 10)
    assert until.stop_reason == "budget"


def test_a_cell_that_a_signal_ends_is_no_result(monkeypatch):
    class Ended:
        evaluations = {}  # noqa: RUF012

    offered = {name: getattr(jaxpar, name) for name in jaxpar.__all__}
    offered["fit"] = lambda *_, **__: Ended()
    monkeypatch.setattr(cell, "jaxpar", SimpleNamespace(**offered))
    with pytest.raises(InterruptedError, match="parity lstm 0"):
        cell.train("parity", "lstm", 0, 1.0)


def found(of, accuracy=1.0):
    problem, layer, seed = of
    by_length = [accuracy] * (TESTED // BIN)
    facts = {"ended_by": "budget", "steps": 7, "seconds": 240.0, "accuracy": by_length}
    return {"problem": problem, "layer": layer, "seed": seed, **facts}


def test_the_command_goes_on_where_it_stopped(tmp_path):
    path, cells = tmp_path / "results.jsonl", [("parity", "lstm", seed) for seed in range(8)]
    path.write_text("")
    busy, stopped = collections.Counter(), threading.Event()

    def run(of, place):
        busy[place] += 1
        assert busy[place] == 1
        busy[place] -= 1
        if of[2] == 3 and not stopped.is_set():
            raise RuntimeError("killed")
        return found(of)

    with pytest.raises(RuntimeError, match="killed"):
        command.run_cells(cells, run, (0, 1), lambda f: command.append(path, f), stopped.set)
    assert stopped.is_set()
    done = command.read(path)
    assert ("parity", "lstm", 3) not in done

    with path.open("a") as file:
        file.write(json.dumps(found(cells[3]))[:20])  # a kill in the middle of a line
    assert command.read(path) == done
    left = [of for of in cells if of not in done]
    command.run_cells(left, run, (0, 1), lambda f: command.append(path, f), stopped.set)
    assert command.read(path) == {of: found(of) for of in cells}
    assert len(path.read_text().splitlines()) == len(cells)


def test_the_default_fits_into_its_time_on_two_cores():
    cells = [*command.DEFAULT.cells()]
    assert len(cells) == len({*cells}) == 38
    assert len(cells) / 2 * command.DEFAULT.seconds <= 80 * 60  # ten minutes for tests and starts
    assert {*command.ROWS} == {*MIXERS}


def test_the_table_scales_accuracies_by_chance(tmp_path):
    results = {
        of: found(of, accuracy)
        for of, accuracy in {
            ("parity", "lstm", 0): 1.0,
            ("parity", "lstm", 1): 0.75,
            ("arithmetic", "gru", 0): 0.2,
        }.items()
    }
    lines = command.table(results, command.DEFAULT).splitlines()
    [lstm, lstm_ends] = [line for line in lines if line.startswith("| LSTM")]
    [gru, _] = [line for line in lines if line.startswith("| GRU")]
    assert lstm == "| LSTM | 1.000, 0.500 | 1.000, 0.500 |  |  |  |  |  |  |"
    assert lstm_ends == "| LSTM | 240 s, 7; 240 s, 7 |  |  |"
    assert gru == "| GRU |  |  | 0.000 | 0.000 |  |  |  |  |"

    (tmp_path / "README.md").write_text(f"a\n{command.MARK}old\n{command.MARK}b\n")
    command.write_page(results, command.DEFAULT, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page.startswith(f"a\n{command.MARK}| layer |")
    assert page.endswith(f"{command.MARK}b\n")
    assert "old" not in page
    assert "<svg" in (tmp_path / "results.svg").read_text()


def test_the_page_shows_its_results():
    results = command.read(command.FOLDER / "results.jsonl")
    page = (command.FOLDER / "README.md").read_text()
    assert command.table(results, command.DEFAULT) in page
    assert {*results} <= {*command.DEFAULT.cells()}
