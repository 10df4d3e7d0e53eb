import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jaxpar.base.versions import excluded_reason

ROOT = Path(__file__).parents[2]
PYTHON_311, PYTHON_312, PYTHON_313 = (3, 11), (3, 12), (3, 13)


@pytest.mark.parametrize(
    ("jax_version", "python_version", "reason", "remedy"),
    [
        ("0.10.2", PYTHON_311, "wrong results on CPU", "pip install 'jax==0.10.1'"),
        ("0.10.2", PYTHON_312, "jax#39103", "pip install -U 'jax>=0.11.1'"),
        ("0.10.2.dev20260601", PYTHON_311, "jax#39103", "pip install 'jax==0.10.1'"),
        ("0.11.0", PYTHON_312, "crashes on CPU", "pip install -U 'jax>=0.11.1'"),
        ("0.11.0rc1", PYTHON_313, "jax#39257", "pip install -U 'jax>=0.11.1'"),
        ("0.10.0", PYTHON_311, "too old: 0.10.1 or later", "pip install 'jax==0.10.1'"),
        ("0.9.2", PYTHON_313, "too old: 0.10.1 or later", "pip install -U 'jax>=0.11.1'"),
        ("0.4.38", PYTHON_311, "too old: 0.10.1 or later", "pip install 'jax==0.10.1'"),
    ],
)
def test_excluded_jax_names_reason_and_remedy(jax_version, python_version, reason, remedy):
    said = excluded_reason(jax_version, python_version)
    assert said is not None
    assert said[0].startswith(f"jax {jax_version} ")
    assert reason in said[0]
    assert said[1] == remedy


@pytest.mark.parametrize(
    "jax_version",
    ["0.10.1", "0.10.2.1", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1", "0.20.0", "1.0", "1.11.0"],
)
@pytest.mark.parametrize("python_version", [PYTHON_311, PYTHON_312, PYTHON_313])
def test_other_jax_is_not_excluded(jax_version, python_version):
    assert excluded_reason(jax_version, python_version) is None


@pytest.mark.parametrize(
    "jax_version", ["0.10.0", "0.10.1", "0.10.2", "0.11.0", "0.11.1", "0.12.0.1"]
)
def test_what_is_excluded_is_what_pip_excludes(jax_version):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "jax")
    assert jax.specifier.contains(jax_version) == (excluded_reason(jax_version, PYTHON_312) is None)


def test_import_under_excluded_jax_stops_before_jax_is_imported(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise SystemExit('jax was imported')\n")
    info = tmp_path / "jax-0.10.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.10.2\n")

    done = subprocess.run(
        [sys.executable, "-c", "import jaxpar"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    fact, remedy = done.stderr.splitlines()[-2:]
    assert fact.startswith("ImportError: jaxpar does not run on this JAX: jax 0.10.2 ")
    assert "wrong results on CPU" in fact
    assert remedy == "Fix: pip install 'jax==0.10.1'"
