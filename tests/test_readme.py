"""What the README shows is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

from jaxpar import make_schedule, show

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_python_blocks_run_in_their_order(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "runs/0001" in done.stdout
    assert "(None, 'tensor')" in done.stdout
    for shown in ("row split", "dim 0 layers/stage"):
        assert any(shown in block and block in done.stdout for block in blocks("text"))


def test_the_schedule_is_the_real_one():
    schedule = make_schedule("1f1b", 4, 2, 2)
    assert schedule.to_text() + "\n" in blocks("text")
    assert show(schedule).to_svg() == (ROOT / "docs/schedule.svg").read_text()


def test_the_page_of_model_parallelism_shows_what_its_command_prints():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.model_parallel.count"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "benchmarks/model_parallel/README.md").read_text()
    tables = done.stdout.strip().split("\n\n")
    assert len(tables) == 3
    for table in tables:
        assert table in page
