"""Machines that lack something, and what the doctor says of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jaxpar.cli.doctor import Examined, diagnose, examine
from jaxpar.hosts.distributed import PACKAGES

ROOT = Path(__file__).parents[1]
ADDRESSES = {"localhost": ["127.0.0.1"], "n1": ["127.0.1.1"], "far": ["10.0.0.5"], "::1": ["::1"]}
SEVERAL = {"JAXPAR_NUM_PROCESSES": "2", "JAXPAR_PROCESS_ID": "0"}
FAR = SEVERAL | {"JAX_COORDINATOR_ADDRESS": "far:8476"}
ON_TWO_NODES = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2"}
VERSIONS = dict.fromkeys(PACKAGES, "0.11.1")
REQUIREMENTS = (Requirement("jax!=0.10.2,>=0.10.1"), Requirement("optax>=0.2.8"))


def resolve(host):
    if host not in ADDRESSES:
        raise OSError("Name or service not known")
    return ADDRESSES[host]


def machine(**changes):
    """A sound machine, but for the changes."""
    sound = {
        "environ": {}, "python": (3, 12, 1), "requirements": REQUIREMENTS, "versions": VERSIONS,
        "num_cores": 4,
        "memory_bytes": (12 * 10**9, 16 * 10**9), "devices": (("cpu", "cpu", None),) * 4,
        "has_nvidia_driver": False, "clusters": (), "resolve": resolve,
    }  # fmt: skip
    return Examined(**(sound | changes))


def environ(**variables):
    return {"environ": variables}


# What is changed; level, subject, words of the fact, and words of the remedy.
FINDINGS = {
    "versions": ({}, "ok", "versions", "python 3.12.1, jax 0.11.1, jaxlib 0.11.1", ""),
    "excluded package": (
        {"versions": VERSIONS | {"jax": "0.10.2"}},
        "error", "versions", "jax 0.10.2; jaxpar needs jax!=0.10.2,>=0.10.1",
        "pip install 'jax!=0.10.2,>=0.10.1'",
    ),
    "old package": (
        {"versions": VERSIONS | {"optax": "0.2.7"}},
        "error", "versions", "optax 0.2.7; jaxpar needs optax>=0.2.8", "pip install 'optax>=0.2.8'",
    ),
    "missing package": (
        {"versions": VERSIONS | {"optax": None}},
        "error", "versions", "optax is not installed; jaxpar needs", "pip install 'optax>=0.2.8'",
    ),
    "not installed": (
        {"requirements": ()},
        "warning", "versions", "jaxpar itself is not installed", "pip install -e .",
    ),
    "devices": ({}, "ok", "devices", "4 x cpu (cpu)", ""),
    "no devices": (
        {"devices": "Unable to initialize backend 'cuda'"},
        "error", "devices", "none: Unable to initialize backend 'cuda'", "JAX_PLATFORMS=cpu",
    ),
    "unused GPUs": (
        {"has_nvidia_driver": True}, "warning", "devices", "JAX does not use them", "jax[cuda",
    ),
    "GPUs left alone on request": (
        {"has_nvidia_driver": True, **environ(JAX_PLATFORMS="cpu")}, "ok", "devices", "4 x cpu", "",
    ),
    "GPUs": (
        {"has_nvidia_driver": True, "devices": (("gpu", "H100", 80 * 10**9),) * 2},
        "ok", "devices", "2 x H100 (gpu)", "",
    ),
    "more devices than cores": (
        {"devices": (("cpu", "cpu", None),) * 5},
        "warning", "devices", "5 x cpu (cpu), simulated on 4 cores: results", "at most 4 devices",
    ),
    "memory": ({}, "ok", "memory", "12.0 GB of 16.0 GB free", ""),
    "memory of devices": (
        {"devices": (("gpu", "H100", 80 * 10**9),)}, "ok", "memory", "80.0 GB on each device", "",
    ),
    "little memory": (
        {"memory_bytes": (10**9, 16 * 10**9)}, "warning", "memory", "1.0 GB of", "end other",
    ),
    "one process": ({}, "ok", "processes", "one; no cluster detected", ""),
    "two by hand": (
        {"environ": FAR}, "ok", "processes", "2, started by hand, this is number 0", "",
    ),
    "two by Slurm": (
        {"environ": ON_TWO_NODES, "clusters": ("SlurmCluster",)},
        "ok", "processes", "2, started by Slurm, this is number 1; JAX detects SlurmCluster", "",
    ),
    "allocation without srun": (
        environ(SLURM_JOB_ID="7", SLURM_NTASKS="8"),
        "warning", "processes", "one, in a Slurm allocation for 8", "srun --ntasks=8",
    ),
    "incomplete": (
        {"environ": SEVERAL}, "error", "processes", "JAX_COORDINATOR_ADDRESS not", "set all three",
    ),
    "coordinator": ({"environ": FAR}, "ok", "coordinator", "far:8476 is 10.0.0.5", ""),
    "coordinator on loopback": (
        {"environ": SEVERAL | {"JAX_COORDINATOR_ADDRESS": "localhost:1"}},
        "warning", "coordinator", "localhost:1 is 127.0.0.1", "in the network of the others",
    ),
    "coordinator on loopback, IPv6": (
        {"environ": SEVERAL | {"JAX_COORDINATOR_ADDRESS": "[::1]:1"}},
        "warning", "coordinator", "[::1]:1 is ::1", "in the network of the others",
    ),
    "unknown coordinator": (
        {"environ": SEVERAL | {"JAX_COORDINATOR_ADDRESS": "nowhere:1"}},
        "error", "coordinator", "'nowhere' of nowhere:1 is unknown here", "use a name",
    ),
    "proxy, one process": (
        environ(http_proxy="http://proxy:3128"), "ok", "proxies", "a single process", "",
    ),
    "proxy": (
        {"environ": FAR | {"HTTPS_PROXY": "http://proxy:3128"}},
        "warning", "proxies", "https_proxy set", "export no_proxy=far",
    ),
    "proxy, but not for it": (
        {"environ": FAR | {"http_proxy": "http://proxy:3128", "no_proxy": "localhost, far"}},
        "ok", "proxies", "but not for far", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_finding(name):
    changes, level, subject, fact, remedy = FINDINGS[name]
    found = [f for f in diagnose(machine(**changes)) if f.subject == subject and fact in f.fact]
    assert [finding.level for finding in found] == [level], diagnose(machine(**changes))
    assert remedy in found[0].remedy
    assert bool(found[0].remedy) == (level != "ok")


def test_a_sound_machine_has_no_complaints():
    assert {finding.level for finding in diagnose(machine())} == {"ok"}


def test_this_machine_is_examined():
    here = examine()
    assert here.versions["jax"]
    needed = [str(requirement) for requirement in here.requirements]
    assert "flax>=0.12.8" in needed
    assert not any("ipykernel" in requirement for requirement in needed)
    assert len(here.devices) == 8
    assert here.num_cores >= 1


def doctor(**variables):
    return subprocess.run(
        [sys.executable, "-m", "jaxpar", "doctor"],
        env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_errors_give_exit_code_1_and_a_remedy():
    done = doctor(JAXPAR_PROCESS_ID="1")
    assert done.returncode == 1, done.stderr
    assert "-> set all three in every process" in done.stdout
    assert done.stderr == ""


def test_sound_settings_give_exit_code_0():
    done = doctor()
    assert done.returncode == 0, done.stdout
    levels = {line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")}
    assert "ok" in levels
    assert levels <= {"ok", "warning"}


def test_excluded_jax_is_named(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise SystemExit('jax was imported')\n")
    info = tmp_path / "jax-0.10.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.10.2\n")
    done = doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert "jax 0.10.2 computes wrong results on CPU" in said
    assert "pip install" in said
