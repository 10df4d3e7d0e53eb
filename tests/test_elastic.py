"""A run goes on when processes are lost, and when there are more: on which mesh, and with which losses."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest
from lib import api
from lib.models import Regress
from lib.runs import children_of, flags, read_until, train_losses

from jaxpar import MeshConfig, Parallel, TrainConfig
from jaxpar.lm import LM
from jaxpar.planning import fit_devices

RELATIVE_TOLERANCE = 1e-5  # sums in another order, in float32
END_SECONDS = 600  # which only a process that hangs takes
RESTART_SECONDS = 60
TEXT = LM(
    num_layers=2,
    hidden_size=16,
    embed_size=16,
    vocab_size=128,
    num_words=100,
    batch_size=8,
    seq_len=8,
)


@pytest.mark.parametrize("asked", ["dp8", "dp2pp2tp2", "dp-1pp2"])
def test_a_mesh_that_fits_is_kept(asked):
    layout, reason = fit_devices(TEXT, Parallel.of(asked, LM.parallel), TrainConfig())
    assert reason == ""
    assert layout == Parallel.of(asked, LM.parallel).resolve()


@pytest.mark.rows(1)
@pytest.mark.parametrize("task", [TEXT, Regress(("gru", "cell"))], ids=["lm", "own"])
def test_arithmetic_chooses(task):
    layout, reason = fit_devices(task, Parallel.of("dp2pp2", task.parallel), TrainConfig())
    assert layout.mesh.num_devices == 8
    assert re.fullmatch(
        r"dp2pp2 does not fit 8 devices; \S.* is the fastest by estimates for cpu",
        reason,
    )
    assert layout.mesh.tensor == 1  # as was asked for


def test_where_nothing_fits_it_is_what_needs_the_least():
    asked = Parallel.of("dp2pp2", Parallel())
    with api.cpus_have_memory(1e3):
        layout, reason = fit_devices(Regress(("cell", "cell")), asked, TrainConfig())
    assert layout.mesh.num_devices == 8
    assert reason.endswith(" needs the least memory by estimates for cpu")


@pytest.mark.full
def test_a_mesh_that_the_batch_does_not_fit_is_passed_over():
    """Twelve rows are not for eight groups."""
    asked = Parallel.of("dp1pp6", Parallel())
    layout, _ = fit_devices(Regress(("cell", "cell"), batch_size=12), asked, TrainConfig())
    assert layout.mesh.num_devices == 8
    assert layout.mesh.data in (1, 2, 4)


def test_no_mesh_at_all_is_an_error():
    with pytest.raises(ValueError, match=r"no mesh of 8 devices fits: 4 layers and .* of 9 rows"):
        fit_devices(Regress(batch_size=9), Parallel(), TrainConfig())
    named = Parallel(MeshConfig(data=2, devices=(0, 1)))
    with pytest.raises(
        ValueError, match=r"--elastic uses all devices, but devices=\(0, 1\) names some"
    ):
        fit_devices(Regress(), named, TrainConfig())


# ---- the launcher ----


def start(processes, arguments):
    return subprocess.Popen(
        [
            sys.executable, "-m", "jaxpar", "launch", "--elastic", "--processes", str(processes), "--",
            *arguments,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.law
@pytest.mark.full
def test_fewer_processes_and_then_more_have_the_losses_of_one_device(text, tmp_path):
    out_dir = tmp_path / "run"
    process = start(2, flags(text, out_dir, 1_000_000, "--mesh", "dp2"))
    watchdog = threading.Timer(END_SECONDS, process.kill)
    watchdog.start()
    read_until(process, r"step +12/")  # a checkpoint of step 5 or 10 is there
    began = time.monotonic()
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    said = "".join(read_until(process, r"resumed at step (5|10|15);"))
    assert "error: process 1 of 2 was killed by SIGKILL; the others were ended\n" in said
    assert (
        "continuing with 1 of 2 processes\n[0] mesh        dp2 does not fit 1 devices; dp1 is the"
        in said
    )
    read_until(process, r"step +20/")
    assert time.monotonic() - began < RESTART_SECONDS
    process.terminate()
    read_until(process, r"stopped by SIGTERM")
    process.communicate(timeout=END_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    watchdog.cancel()

    num_steps = len(train_losses(out_dir)) + 10
    process = start(3, flags(text, out_dir, num_steps, "--mesh", "dp2"))
    said = process.communicate(timeout=END_SECONDS)[0]
    assert process.returncode == 0, said
    assert "dp2 does not fit 3 devices; dp3 is the fastest" in said
    assert api.command(*flags(text, tmp_path / "one", num_steps, "--devices", "0")) == 0
    expected = train_losses(tmp_path / "one")
    assert len(expected) == num_steps >= 30
    assert train_losses(out_dir) == pytest.approx(expected, rel=RELATIVE_TOLERANCE)


def test_there_are_eight_devices():
    assert jax.device_count() == 8
