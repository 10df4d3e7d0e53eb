"""What is read, removed and locked in a folder that anybody may have changed."""

import json
import os
import re

import pytest

from jaxpar.training import run_folder
from jaxpar.training.run_folder import FolderLock, RunFolder

DATA = {
    "run": "", "data": {}, "files": {}, "settings": "", "batches": {}, "num_batches": {}, "fields": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        '{"note":1}',
        "[]",
        "",
        "\ufffd",
        '{"step": 1, "split": "valid"}',
        "[" * 100_000,
        '{"step": 1e999, "split": "valid", "loss": 1}',
    ],
)
def test_a_line_of_metrics_that_no_run_writes_is_named_and_passed_over(tmp_path, line, caplog):
    written = [{"split": "train", "step": step, "loss": 1.0} for step in range(3)]
    lines = [json.dumps(each) for each in written]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([*lines[:2], line, *lines[2:], ""]), encoding="utf-8"
    )
    assert RunFolder(tmp_path).metrics() == written
    assert re.search(r"metrics\.jsonl: line 3 is not what a run writes", caplog.text)


@pytest.fixture
def run(tmp_path):
    """A folder with the files of a run, and the file of a task."""
    folder = tmp_path / "work" / "run"
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "config.toml").write_text('task = "lm"\n')
    (folder / "words.json").write_text("[]")
    (folder / "data.json").write_text(json.dumps({**DATA, "files": {"words.json": "0"}}))
    return folder


def test_all_files_of_a_run_are_removed(run):
    RunFolder(run).clear()
    assert not [*run.iterdir()]


@pytest.mark.parametrize(
    "name", ["..", "", ".", "../mine.txt", "folder", "checkpoints/../../mine.txt"]
)
def test_only_files_that_a_run_can_have_written_are_removed(run, name):
    mine = [run.parent / "mine.txt", run / "folder" / "mine.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("keep me")
    (run / "data.json").write_text(json.dumps({**DATA, "files": {name: "0"}}))
    RunFolder(run).clear()
    assert all(path.read_text() == "keep me" for path in mine)
    assert not (run / "data.json").exists()


def test_a_link_in_a_run_is_removed_and_what_it_leads_to_stays(run, tmp_path):
    mine = tmp_path / "mine"
    (run / "checkpoints").rename(mine)
    (mine / "file").write_text("keep me")
    (run / "checkpoints").symlink_to(mine)
    RunFolder(run).clear()
    assert (mine / "file").read_text() == "keep me"
    assert not (run / "checkpoints").is_symlink()


def test_a_process_that_does_not_see_the_lock_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_SEEN_SECONDS", 0.3)
    here, elsewhere = tmp_path / "here", tmp_path / "there"
    with FolderLock(here):
        holder = (here / ".lock").read_text()
        assert holder.startswith(f"process {os.getpid()} on ")
        monkeypatch.setattr("jax.process_index", lambda: 1)
        FolderLock(here)._wait_for(holder)
        told = (
            rf"^{elsewhere} on \S+ is not that of process 0\nFix: give all processes a folder that they "
            r"share, such as --train\.out-dir gs:"
        )
        with pytest.raises(FileNotFoundError, match=told):
            FolderLock(elsewhere)._wait_for(holder)
        assert not elsewhere.exists()
        with pytest.raises(FileNotFoundError, match="is not that of process 0"):
            FolderLock(here)._wait_for(holder + " ")
