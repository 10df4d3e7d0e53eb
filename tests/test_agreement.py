"""Processes agree on a run, or all of them refuse: who has come, and who differs in what.

The disagreements of whole processes:

    pytest -n 0 -m slow -s tests/test_agreement.py
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxpar.hosts.agree import describe_processes, differences
from jaxpar.hosts.launch import _environ, _free_port
from jaxpar.hosts.rendezvous import meet, program_facts

END_SECONDS = 120  # which only a process that hangs takes


def test_differences_name_the_field_and_every_value():
    facts = {n: {"train.seed": "0", "data": "a"} for n in range(4)}
    assert differences(facts) == ""
    facts[1]["train.seed"] = "7"
    del facts[3]["data"]
    assert differences(facts) == (
        "train.seed is 0 in processes 0, 2, 3, 7 in process 1; "
        "data is a in processes 0 to 2, not there in process 3"
    )


def test_many_differences_are_counted():
    facts = {n: {f"field {i}": str(n) for i in range(8)} for n in range(2)}
    assert differences(facts).endswith("field 4 is 0 in process 0, 1 in process 1; 3 more")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "process 3"), ([0, 1], "processes 0, 1"), ([0, 1, 2, 5], "processes 0 to 2, 5")],
)
def test_processes_are_named_in_words(numbers, text):
    assert describe_processes(numbers) == text


def meet_all(*processes, seconds=20.0):
    """What each process, of a number and its facts, is told at a meeting; and how long it took."""
    address, told = f"127.0.0.1:{_free_port()}", [None] * len(processes)

    def take_part(place, number, count, facts):
        try:
            meet(address, number, count, facts, seconds, address)
            told[place] = ""
        except ValueError as error:
            told[place] = str(error)

    threads = [
        threading.Thread(target=take_part, args=(place, *each))
        for place, each in enumerate(processes)
    ]
    began = time.monotonic()
    for thread in reversed(threads):  # process 0 comes last: the others look for it
        thread.start()
    for thread in threads:
        thread.join()
    return told, time.monotonic() - began


def test_processes_that_have_all_come_go_on():
    told, seconds = meet_all((0, 3, {"jax": "1"}), (1, 3, {"jax": "1"}), (2, 3, {"jax": "1"}))
    assert told == ["", "", ""]
    assert seconds < 5


def test_all_that_have_come_are_told_who_is_missing():
    told, _ = meet_all((0, 4, {}), (2, 4, {}), seconds=1.0)
    message = (
        "2 of 4 processes have come, processes 1, 3 not yet after 1 s; start all of them, or give all the "
        "number of those that there are"
    )
    assert told == [message, message]


def test_other_versions_are_refused_by_all():
    told, _ = meet_all(
        (0, 3, {"jax": "0.10.1"}), (1, 3, {"jax": "0.12.0"}), (2, 3, {"jax": "0.10.1"})
    )
    message = (
        "the processes do not agree: jax is 0.10.1 in processes 0, 2, 0.12.0 in process 1; start all of them "
        "in the same way"
    )
    assert told == [message] * 3


def test_a_number_that_two_processes_have_is_refused(monkeypatch):
    monkeypatch.setattr("jaxpar.hosts.rendezvous._AFTER_A_CONFLICT_SECONDS", 0.5)
    told, _ = meet_all((0, 3, {}), (1, 3, {}), (1, 3, {}))
    assert told == [
        "the processes do not agree: two processes have the number 1; start all of them in the same way"
    ] * 3  # fmt: skip


def test_a_stranger_at_the_door_is_no_process():
    address = f"127.0.0.1:{_free_port()}"
    host = threading.Thread(target=meet, args=(address, 0, 2, {}, 20.0, address))
    host.start()
    for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"process": [1], "facts": 3}\n', b"[" * 2**16, b""):
        while True:
            try:
                with socket.create_connection(
                    ("127.0.0.1", int(address.rpartition(":")[2]))
                ) as line:
                    line.sendall(said)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    meet(address, 1, 2, {}, 20.0)
    host.join()


def test_a_process_says_that_nobody_listens():
    with pytest.raises(
        ValueError, match=r"process 1 has not found process 0 at 127\.0\.0\.1:\d+ in 1 s "
    ):
        meet(f"127.0.0.1:{_free_port()}", 1, 2, {}, 1.0)


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for bind_address in (address, None):
            with pytest.raises(OSError, match=rf"port {address[10:]} is in use on this machine"):
                meet(address, 0, 2, {}, 1.0, bind_address)
    with pytest.raises(
        OSError, match=r"cannot listen at 192\.0\.2\.1:1234: .*; give all processes an add"
    ):
        meet("192.0.2.1:1234", 0, 2, {}, 1.0, "192.0.2.1:1234")


def test_the_program_is_its_sources_and_packages():
    facts = program_facts(2)
    assert facts["the number of processes"] == "2"
    assert re.fullmatch(r"\d+\.\d+\.\d+ \(sources [0-9a-f]{12}\)", facts["jaxpar"])
    assert {"jax", "jaxlib", "flax", "orbax-checkpoint", "jax_enable_x64"} <= facts.keys()
    assert program_facts(3) == facts | {"the number of processes": "3"}


@pytest.mark.parametrize(
    ("flags", "other", "message"),
    [
        (
            "--xla_cpu_enable_fast_math=true --xla_a=1",
            "  --xla_a=1\n --xla_cpu_enable_fast_math ",
            "",
        ),
        ("--xla_dump_to=/a --xla_gpu_dump_llvmir --xla_gpu_cuda_data_dir=/b", "", ""),
        (
            "--xla_force_host_platform_device_count=4",
            "--xla_force_host_platform_device_count=2",
            "",
        ),
        ("--xla_a=1 --xla_a=2", "--xla_a=2", ""),
        ("", "--xla_a=1", "{} xla_a is not there in process 0, 1 in process 1"),
        ("--xla_a=2", "--xla_a=1 --xla_dump_to=/a", "{} xla_a is 2 in process 0, 1 in process 1"),
        ("{file}", "--xla_a=1 --xla_b=2", ""),
        ("{file}", "--xla_a=1", "{} xla_b is 2 in process 0, not there in process 1"),
    ],
)
@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_the_compiler_are_compared_where_they_change_a_program(
    variable, flags, other, message, monkeypatch, tmp_path
):
    (tmp_path / "flags").write_text("--xla_b=2\n--xla_a=1\n")
    facts = {}
    for number, text in enumerate((flags, other)):
        monkeypatch.setenv(variable, text.format(file=tmp_path / "flags"))
        facts[number] = program_facts(2)
    assert differences(facts) == message.format(variable)


# ---- whole processes ----

PROGRAM = """
import sys
from jaxpar.cli.main import main
{before}
sys.exit(main(sys.argv[1:]))
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
    address, counts, befores = f"127.0.0.1:{_free_port()}", (2, count), ("", before)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(before=befores[index]), *arguments[index]],
            env=_environ(os.environ, address, counts[index], index, 1), cwd=folders[index],
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
    """Both ended with 2, with these messages in their last lines, and nothing was begun."""
    codes, said = result
    assert codes == [2, 2], said
    for each, message in zip(said, messages, strict=True):
        assert re.search(message, each.splitlines()[-1]), each
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
        r"7 in process 1; start all of them with the same options, in a folder that they share$",
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
    "clip": ({"more": ["--train.clip-norm", "0"]}, r"clip_norm is 1\.0 in process 0, 0\.0 in process 1"),
    "logs": ({"more": ["--train.log-every", "1"]}, "train.log_every is 25 in process 0, 1 in process 1"),
    "mesh": ({"more": ["--mesh", "pp2"]}, "mesh.data is 2 in process 0, 1 in process 1; mesh.stage is 1"),
    "cuts": (
        {"more": ["--pipeline.num-microbatches", "2"]}, "num_microbatches is 1 in process 0, 2 in process 1"
    ),
    "fsdp": ({"more": ["--fsdp"]}, "fsdp is False in process 0, True in process 1"),
    "place": ({"more": ["--train.out-dir", "/nowhere"]}, "train.out_dir is '.*' in process 0, '/nowhere' in"),
    "anew": ({"more": ["--overwrite"]}, "overwrite is False in process 0, True in process 1"),
    "devices": ({"before": OTHER_DEVICES}, r"devices is \['cpu'\] in process 0, \['TPU v9'\] in process 1"),
    "jax": ({"before": OTHER_JAX}, r"jax is 0\.\S+ in process 0, 9\.9 in process 1; start all of them"),
    "jaxpar": (
        {"before": "import jaxpar; jaxpar.__version__ = '9.9'"}, r"jaxpar is 0\.\S+ .* 9\.9 .* in process 1"
    ),
    "flags": (
        {"before": OTHER_FLAGS},
        "XLA_FLAGS xla_cpu_enable_fast_math is not there in process 0, true in process 1; start all",
    ),
    "count": ({"count": 3}, "the number of processes is 2 in process 0, 3 in process 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each != "several")) for each in DISAGREEMENTS],
)
def test_processes_that_disagree_are_refused(name, text, tmp_path):
    differs, message = DISAGREEMENTS[name]
    out_dir, began = tmp_path / "run", time.monotonic()
    arguments = [flags(text, out_dir), flags(text, out_dir, *differs.get("more", ()))]
    others = {key: value for key, value in differs.items() if key != "more"}
    result = start_two(arguments, **others)
    assert_refused(result, out_dir, *[f"^error: the processes do not agree: .*{message}"] * 2)
    print(f"{name}: refused in {time.monotonic() - began:.1f} s")


def test_other_data_are_refused(text, tmp_path):
    out_dir, folders = tmp_path / "run", [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        shutil.copytree(text, folder / "text")
    with (folders[1] / "text" / "train.txt").open("a") as file:
        file.write("a cat\n")
    result = start_two([flags("text", out_dir)] * 2, folders=folders)
    message = (
        r"agree: data\.train\.array is 'int32\[1400\]' in process 0, 'int32\[1403\]' in process 1; data\.tr"
        r"ain\.checksum is .*; give all of them the same data, task and devices$"
    )
    assert_refused(result, out_dir, message, message)


TOGETHER = """
import jax
from jaxpar.hosts.agree import SharedError, in_process_0, together
from jaxpar.hosts.distributed import start_processes

start_processes()
index = jax.process_index()
print(in_process_0(lambda: ["found", index]))
try:
    together(lambda: 1 / index)
except SharedError as error:
    print(error, type(error.__cause__).__name__)
print(together(lambda: index))
"""


def test_what_one_process_finds_and_what_fails_in_it_is_so_in_all():
    address = f"127.0.0.1:{_free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER], env=_environ(os.environ, address, 2, index, 1),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=END_SECONDS)[0].splitlines() for process in processes]
    for index, cause in enumerate(("ZeroDivisionError", "NoneType")):
        assert said[index] == ["['found', 0]", f"process 0: division by zero {cause}", str(index)]


def test_a_process_that_refuses_tells_the_others(text, tmp_path):
    out_dir = tmp_path / "run"
    result = start_two([flags(text, out_dir, "--hidden-size", "-1"), flags(text, out_dir)])
    assert_refused(
        result, out_dir,
        r"^error: hidden_size=-1: must be positive$",
        r"^error: process 0 ended before the run began: hidden_size=-1: must be positive$",
    )  # fmt: skip
