"""What the doctor says of this machine, and of machines that lack something."""

import importlib.metadata
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
from lib import api

ROOT = Path(__file__).parents[1]
GPU = types.SimpleNamespace(
    platform="gpu", device_kind="H100", memory_stats=lambda: {"bytes_limit": 80 * 10**9}
)


def said(capsys):
    """The exit code, and what is printed, in one line."""
    code = api.command("doctor")
    return code, " ".join(capsys.readouterr().out.split())


def test_this_machine_lacks_nothing(capsys):
    code, text = said(capsys)
    assert code == 0, text
    assert f"jax {jax.__version__}" in text
    assert "devices 8 x cpu (cpu)" in text
    assert "GB free" in text
    assert "missing" not in text


@pytest.mark.parametrize("version", [None, "0.0.1"])
def test_packages_that_are_missing_or_old_are_named(version, capsys, monkeypatch):
    found = importlib.metadata.version

    def changed(name):
        if name != "optax":
            return found(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", changed)
    code, text = said(capsys)
    assert code == 1
    got = version or "no version"
    assert f"missing optax: expected optax>=0.2.8, got {got} Fix: pip install 'optax" in text
    assert "ipykernel" not in text  # of an extra


def test_jaxpar_itself_may_be_missing(capsys, monkeypatch):
    def none(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", none)
    code, text = said(capsys)
    assert (code, "missing jaxpar: not installed as a package Fix: pip install -e ." in text) == (
        1,
        True,
    )


def test_gpus_that_jax_does_not_use_are_missed(capsys, monkeypatch):
    with api.nvidia_driver_is_installed():
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        assert said(capsys)[0] == 0
        monkeypatch.setenv("JAX_PLATFORMS", "")
        code, text = said(capsys)
        assert code == 1
        fact = "missing NVIDIA GPUs: this machine has some, but JAX does not use them Fix: pip"
        assert fact in text
        monkeypatch.setattr(jax, "local_devices", lambda: [GPU, GPU])
        code, text = said(capsys)
    assert code == 0
    assert "devices 2 x H100 (gpu)" in text
    assert "80.0 GB on each device" in text


def test_no_devices_are_an_error(capsys, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "local_devices", fail)
    code, text = said(capsys)
    assert code == 1
    assert "devices none" in text
    assert "missing devices: Unable to initialize backend 'cuda' Fix: fix" in text


def test_excluded_jax_is_named(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise SystemExit('jax was imported')\n")
    info = tmp_path / "jax-0.10.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.10.2\n")
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "doctor"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    text = " ".join((done.stdout + done.stderr).split())
    assert "jax 0.10.2 computes wrong results on CPU" in text
    assert "pip install" in text
