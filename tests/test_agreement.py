"""Processes agree on a run, or all of them refuse: who has come, and who differs in what.

The disagreements of whole processes:

    pytest -n 0 -m "" -s tests/test_agreement.py
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest
from lib import api

END_SECONDS = 120  # which only a process that hangs takes


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# It joins the others before it looks for its run.
JOIN = ("-m", "jaxpar", "evaluate", "nowhere", "--mesh", "dp2")
JOINED = "nowhere holds no run"  # perhaps as the other one says it


def start_joining(*numbers, count, address=None, **variables):
    """Processes that join and leave, with these numbers."""
    environ = api.environments(count, 1)[0] | (
        {"JAX_COORDINATOR_ADDRESS": address} if address else {}
    )
    return [
        subprocess.Popen(
            [sys.executable, *JOIN], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environ | {"JAXPAR_PROCESS_ID": str(number)} | variables,
        )
        for number in numbers
    ]  # fmt: skip


def said_by(processes):
    try:
        return [process.communicate(timeout=END_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def connect(address):
    """A connection to process 0, as soon as it listens."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.full
def test_processes_that_have_come_say_that_not_all_have():
    began = time.monotonic()
    said = said_by(start_joining(0, 2, count=4, JAXPAR_START_SECONDS="1"))
    for number, each in zip((0, 2), said, strict=True):
        assert re.fullmatch(
            r"error: not all 4 processes came to 127\.0\.0\.1:\d+ in 1 s \(this is process "
            rf"{number}\)\nFix: give all of them .*\n",
            each,
        )
    assert time.monotonic() - began < 30


@pytest.mark.full
def test_who_has_another_secret_is_refused_by_all():
    address = f"127.0.0.1:{free_port()}"
    mine = start_joining(
        0, count=2, address=address, JAX_COORDINATOR_BIND_ADDRESS=address, JAXPAR_SECRET="a"
    )
    others = start_joining(1, count=2, address=address, JAXPAR_SECRET="b")
    for said in said_by([*mine, *others]):
        assert (
            "process 1: JAXPAR_SECRET differs\nFix: set the same value in all processes.\n" in said
        )


@pytest.mark.full
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="JAX 0.12 is the first with certificates"
)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_who_has_no_certificate_is_kept_out(tmp_path):
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 1 -subj /CN=ca",
        "req -newkey rsa:2048 -nodes -keyout own.key -out own.csr -subj /CN=own",
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out own.pem -days 1 -extfile names",
    ):
        (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    files = {"CERT": "own.pem", "KEY": "own.key", "CA": "ca.pem"}
    shown = {f"JAX_MTLS_{kind}_FILE": str(tmp_path / name) for kind, name in files.items()}
    assert all(JOINED in said for said in said_by(start_joining(0, 1, count=2, **shown)))
    address, seconds = f"127.0.0.1:{free_port()}", {"JAXPAR_START_SECONDS": "5"}
    bound = {"JAX_COORDINATOR_BIND_ADDRESS": address}
    both = start_joining(0, count=2, address=address, **shown, **seconds, **bound)
    both += start_joining(1, count=2, address=address, **seconds)
    assert all("not all 2 processes came" in said for said in said_by(both))


@pytest.mark.full
def test_strangers_at_the_door_keep_nobody_out():
    """Some talk nonsense, some a byte now and then, some nothing."""
    address = f"127.0.0.1:{free_port()}"
    [first] = start_joining(
        0, count=2, address=address, JAX_COORDINATOR_BIND_ADDRESS=address, JAXPAR_SECRET="a"
    )
    lines = [connect(address) for _ in range(5)]
    for line, said in zip(
        lines, (b"GET / HTTP/1.1\r\n\r\n", b"[" * 2**16, b"{", os.urandom(999)), strict=False
    ):
        line.sendall(said)
    second = start_joining(1, count=2, address=address, JAXPAR_SECRET="a")
    lines[2].sendall(b'"')
    assert all(JOINED in said for said in said_by([first, *second]))
    for line in lines:
        line.close()


@pytest.mark.rows(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_ends_at_once(number):
    """Process 0 has opened its port, and would wait a minute for the other."""
    address = f"127.0.0.1:{free_port()}"
    [first] = start_joining(0, count=2, address=address, JAX_COORDINATOR_BIND_ADDRESS=address)
    connect(address).close()
    began = time.monotonic()
    first.send_signal(number)
    first.communicate(timeout=END_SECONDS)
    assert first.returncode == {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}[number]
    assert time.monotonic() - began < 2


# ---- whole processes ----

PROGRAM = """
import runpy
{before}
runpy.run_module("jaxpar", run_name="__main__")
"""


def flags(text, out_dir, *more):
    return [
        "train", "lm", "--corpus", str(text), "--batch-size", "8", "--seq-len", "8", "--num-layers", "2",
        "--hidden-size", "16", "--embed-size", "16", "--optimizer.warmup-steps", "1", "--train.num-steps",
        "3", "--mesh", "dp2", "--train.out-dir", str(out_dir), *more,
    ]  # fmt: skip


def start_two(arguments, *, before="", count=2, folders=(None, None)):
    """Exit codes of two processes, and what they said to stderr.

    Args:
      before: what the second one runs before anything else.
      count: of processes, as the second one is told.
    """
    environ, counts, befores = api.environments(2, 1), (2, count), ("", before)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(before=befores[index]), *arguments[index]],
            env=environ[index] | {"JAXPAR_NUM_PROCESSES": str(counts[index])}, cwd=folders[index],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=END_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


def assert_refused(result, out_dir, *messages):
    """Both ended with 2, with these messages, and nothing was begun."""
    codes, said = result
    assert codes == [2, 2], said
    for each, message in zip(said, messages, strict=True):
        assert re.search(message, each, re.MULTILINE), each
    assert not out_dir.exists()


OTHER_DEVICES = """
import types, jax
jax.local_devices = lambda: [types.SimpleNamespace(device_kind="TPU v9")]
"""
OTHER_FLAGS = """
import os
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true"
"""
OTHER_JAX = """
import importlib.metadata as found
version, found.version = found.version, lambda name: "9.9" if name == "jax" else version(name)
"""
# What process 1 has beside the others' options, and what is said of it.
DISAGREEMENTS = {
    "several": (
        {"more": ["--train.seed", "7", "--optimizer.learning-rate", "0.5"]},
        r"optimizer\.learning_rate is 0\.005 in process 0, 0\.5 in process 1; train\.seed is 0 in process 0, "
        r"7 in process 1\nFix: start all of them with the same options, in a folder that they share\. ",
    ),
    "batch": ({"more": ["--batch-size", "16"]}, "batch_size is 8 in process 0, 16 in process 1"),
    "window": ({"more": ["--seq-len", "4"]}, "seq_len is 8 in process 0, 4 in process 1"),
    "layers": ({"more": ["--num-layers", "4"]}, "num_layers is 2 in process 0, 4 in process 1"),
    "width": ({"more": ["--hidden-size", "32"]}, "hidden_size is 16 in process 0, 32 in process 1"),
    "dropout": ({"more": ["--dropout", "0.5"]}, r"dropout is 0\.2 in process 0, 0\.5 in process 1"),
    "tied": ({"more": ["--tie-embedding"]}, "tie_embedding is False in process 0, True in process 1"),
    "optimizer": (
        {"more": ["--optimizer.name", "sgd"]}, "optimizer.name is 'adam' in process 0, 'sgd' in process 1"
    ),
    "steps": ({"more": ["--train.num-steps", "4"]}, "num_steps is 3 in process 0, 4 in process 1"),
    "clip": ({"more": ["--train.clip-norm", "0"]}, r"clip_norm is None in process 0, 0\.0 in process 1"),
    "logs": ({"more": ["--train.log-every", "1"]}, "train.log_every is 25 in process 0, 1 in process 1"),
    "mesh": ({"more": ["--mesh", "pp2"]}, "mesh.data is 2 in process 0, 1 in process 1; mesh.stage is 1"),
    "cuts": (
        {"more": ["--pipeline.num-microbatches", "2"]}, "num_microbatches is 1 in process 0, 2 in process 1"
    ),
    "fsdp": ({"more": ["--fsdp"]}, "fsdp is False in process 0, True in process 1"),
    "place": ({"more": ["--train.out-dir", "/nowhere"]}, "train.out_dir is '.*' in process 0, '/nowhere' in"),
    "anew": ({"more": ["--overwrite"]}, "overwrite is False in process 0, True in process 1"),
    "devices": ({"before": OTHER_DEVICES}, r"devices is \['cpu'\] in process 0, \['TPU v9'\] in process 1"),
    "jax": ({"before": OTHER_JAX}, r"jax is '0\.\S+' in process 0, '9\.9' in process 1\nFix: start all"),
    "jaxpar": (
        {"before": "import jaxpar; jaxpar.__version__ = '9.9'"},
        r"jaxpar is '0\.\S+ .*' in process 0, '9\.9 .*' in process 1",
    ),
    "flags": (
        {"before": OTHER_FLAGS},
        "XLA_FLAGS xla_cpu_enable_fast_math is not there in process 0, 'true' in process 1\nFix: start all",
    ),
    "prng": (
        {"before": 'import os; os.environ["JAX_DEFAULT_PRNG_IMPL"] = "rbg"'},
        "jax_default_prng_impl is 'threefry2x32' in process 0, 'rbg' in process 1\nFix: start all",
    ),
    "offset": (
        {"before": 'import os; os.environ["JAX_RANDOM_SEED_OFFSET"] = "5"'},
        "jax_random_seed_offset is '0' in process 0, '5' in process 1\nFix: start all",
    ),
    "count": ({"count": 3}, "the number of processes is 2 in process 0, 3 in process 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.more] * (each != "several")) for each in DISAGREEMENTS],
)
def test_processes_that_disagree_are_refused(name, text, tmp_path):
    differs, message = DISAGREEMENTS[name]
    out_dir, began = tmp_path / "run", time.monotonic()
    arguments = [flags(text, out_dir), flags(text, out_dir, *differs.get("more", ()))]
    others = {key: value for key, value in differs.items() if key != "more"}
    result = start_two(arguments, **others)
    assert_refused(result, out_dir, *[f"^error: the processes do not agree: .*{message}"] * 2)
    print(f"{name}: refused in {time.monotonic() - began:.1f} s")


@pytest.mark.full
def test_other_data_are_refused(text, tmp_path):
    out_dir, folders = tmp_path / "run", [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        shutil.copytree(text, folder / "text")
    with (folders[1] / "text" / "train.txt").open("a") as file:
        file.write("a cat\n")
    result = start_two([flags("text", out_dir)] * 2, folders=folders)
    message = (
        r"agree: data\.train\.array is 'int32\[1400\]' in process 0, 'int32\[1403\]' in process 1; data\.tr"
        r"ain\.checksum is .*\nFix: give all of them the same data, task, settings and devices\. See docs/"
    )
    assert_refused(result, out_dir, message, message)


@pytest.mark.full
def test_a_process_that_refuses_tells_the_others(text, tmp_path):
    out_dir = tmp_path / "run"
    result = start_two([flags(text, out_dir, "--hidden-size", "-1"), flags(text, out_dir)])
    assert_refused(
        result, out_dir,
        r"^error: hidden_size=-1: must be positive",
        r"^error: process 0 ended before the run began: hidden_size=-1: must be positive",
    )  # fmt: skip
