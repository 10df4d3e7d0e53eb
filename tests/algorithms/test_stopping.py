"""Which processes of a group are lost."""

import jax
import pytest

from jaxpar.hosts import stopping


@pytest.mark.parametrize(("answers", "lost"), [((1, 2), []), ((2,), [1])])
def test_processes_whose_threads_do_not_answer_are_lost(answers, lost, monkeypatch):
    """Process 0 asks on the board of three; who answers is there, whatever its step does."""
    looks = []

    class Board:
        def put(self, name, text):
            assert (name, text) == ("lost/0", "")

        def texts(self):
            looks.append(1)
            return {"lost/0": "", **{f"alive/{number}": "" for number in answers}}

    group = object.__new__(stopping._Group)
    group._board = Board()
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert group.find_lost() == lost
    assert len(looks) == (stopping._ANSWER_POLLS if lost else 1)
