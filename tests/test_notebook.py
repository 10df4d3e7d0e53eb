"""A run in a notebook is one display: a browser is shown it as it grows, and it is stored as it ended."""

import html
import re

import nbclient
import nbformat
import pytest
from rich.text import Text

from jaxpar.training.notebook import NotebookConsole

CELLS = (
    "import jaxpar\njaxpar.simulate_devices(8)",
    """
task = jaxpar.lm.LM(
    num_layers=1, hidden_size=8, embed_size=8, corpus=TEXT, batch_size=8, seq_len=4,
    optimizer=jaxpar.OptimizerConfig(warmup_steps=1),
)
train = jaxpar.TrainConfig(num_steps=30, log_every=1, eval_every=10, out_dir="run")
jaxpar.fit(task, train=train)
""",
    "jaxpar.fit(task, train=train, resume=True, quiet=True).losses",
)


def page_of(data):
    """The text that a browser shows, but for that of curves."""
    return html.unescape(re.sub("<svg.*?</svg>|<[^>]*>", "", data["text/html"]))


@pytest.mark.slow
def test_a_run_is_one_small_display(text, tmp_path):
    cells = [nbformat.v4.new_code_cell(cell.replace("TEXT", repr(str(text)))) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    sent = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, index):
            sent.append((index, message["msg_type"]))
            return super().process_message(message, cell, index)

    where = {"metadata": {"path": str(tmp_path)}}
    Client(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    _, ran, quiet = (cell.outputs for cell in notebook.cells)
    assert [output.output_type for output in ran] == ["display_data", "execute_result"]
    assert {kind for index, kind in sent if index == 1} >= {"display_data", "update_display_data"}
    assert [output.output_type for output in quiet] == ["execute_result"]
    assert quiet[0].data == {"text/plain": "[]"}
    assert "<svg" in ran[1].data["text/html"]
    page, plain = page_of(ran[0].data), ran[0].data["text/plain"]
    assert page == plain
    assert len(ran[0].data["text/html"]) < 7_000
    assert ran[0].data["text/html"].endswith("</svg>")  # loss and validation loss
    assert "validation loss" in ran[0].data["text/html"]
    lines = plain.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].startswith(
        "mesh        data=8 x stage=1 x tensor=1 (all devices share the batch;"
    )
    # The line that changed is there as it was last; validations stay.
    steps = [line for line in lines if line.startswith("step ")]
    assert [step.split()[1] for step in steps] == ["10", "20", "30/30", "30", "30"]
    assert steps[2].endswith(" ETA 0:00")
    assert ran[1].data["text/plain"].startswith("FitResult(LM on dp8: 30 of 30 steps; loss ")
    assert len(ran[1].data["text/plain"]) < 200


@pytest.fixture
def shown(monkeypatch):
    """What is shown: of each display, one after the other."""
    pages = []

    class Handle:
        def update(self, data, raw):
            pages[-1].append(data)

    def display(data, raw, display_id):
        assert raw
        assert display_id
        pages.append([data])
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    return pages


def test_what_is_printed_stays_and_the_line_below_changes(shown, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = NotebookConsole()
    console.print(Text("a < b", "bold"))
    for seconds, line in ((0.05, "too soon"), (0.2, "step 1"), (0.4, "step 2")):
        now[0] = seconds
        console.show_below(line)
    console.print("x" * 120, soft_wrap=True)
    assert [data["text/plain"] for [*all_] in shown for data in all_] == [
        "a < b\n", "a < b\nstep 1\n", "a < b\nstep 2\n", f"a < b\n{'x' * 100}\n{'x' * 20}\n",
    ]  # fmt: skip
    assert [page_of(data) for data in shown[0]] == [data["text/plain"] for data in shown[0]]
    assert '<span style="font-weight: bold">a &lt; b</span>' in shown[0][-1]["text/html"]
