"""Files that somebody has made to harm end in one line: no traceback, no hanging, no memory filled.

The messages below each other:

    pytest -n 0 -s tests/test_crafted.py
"""

import contextlib
import faulthandler
import gc
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorstore as ts
from lib import api

SECONDS = 3.0  # of this process that a message may take, without its imports
HANGS_AFTER_SECONDS = 60
PIPE = "it is a pipe, a socket or a device, not a file"
DEEP = "[" * 100_000
SIZES = [
    "--batch-size", "8", "--seq-len", "4", "--num-layers", "2", "--hidden-size", "16", "--embed-size", "16",
    "--optimizer.warmup-steps", "1", "--train.num-steps", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def world(text, tmp_path_factory, compile_once):
    """A folder with a text and a run of two steps."""
    world = tmp_path_factory.mktemp("world")
    shutil.copytree(text, world / "text")
    arguments = ["--corpus", str(world / "text"), "--train.out-dir", str(world / "run")]
    assert api.command("train", "lm", *SIZES, *arguments, "--devices", "0") == 0
    return world


def write(name, content):
    """Puts a file there instead of what there is."""

    def change():
        path = Path(name)
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def pipe(name):
    def change():
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name)

    return change


def listen(name):
    def change():
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)

    return change


def weights(tensors, size=0, **metadata):
    """A file of weights with this header, and so many bytes."""
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    return write("w", struct.pack("<Q", len(header)) + header + bytes(size))


def tensor(dtype, *shape, at=0, size=0):
    return {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}


def with_model(change):
    """The change, and a file of weights that has nothing wrong."""
    return lambda: (weights(MODEL, 40)(), change())


def config(text):
    return write("c.toml", text), ["train", "lm", "--config", "c.toml", "--corpus", "text"]


def in_run(pattern, replacement):
    """Changes what the settings of the run say."""

    def change():
        path = Path("run/config.toml")
        path.write_text(re.sub(pattern, replacement, path.read_text()))

    return change


def nothing():
    pass


TRAIN = ["train", "lm", "--devices", "0", "--corpus", "text"]
START = [*TRAIN, "--start", "w"]
RESUME = ["train", "--resume", "--train.out-dir", "run"]
EMBEDDING = {"embedding.weight": tensor("F32", 1, 1, size=4)}
MODEL = {
    "embedding.weight": tensor("F32", 2, 1, size=8),
    "lstm.weight_ih_l0": tensor("F32", 4, 1, at=8, size=16),
    "lstm.weight_hh_l0": tensor("F32", 4, 1, at=24, size=16),
}

# Name: what happens to the files, the arguments, and the message.
CRAFTED = {
    # Settings
    "TOML nested deeply": (*config(f"a = {DEEP}"), r"c\.toml is not TOML: maximum recursion"),
    "a key of some parts": (
        *config(f"hidden_size{'.a' * 90} = 1"), r"c\.toml: hidden_size=\{'a': \{'a': .*: must be a whole",
    ),
    "a width of 1e20": (*config("hidden_size = 1e20"), r"hidden_size=1e\+20 \(float\): must be a whole"),
    "a width of 67 bits": (*config(f"hidden_size = {10**20}"), r"size=1000\d+: must be below 2\*\*63"),
    "a rate of 1329 bits": (
        *config(f"[optimizer]\nlearning_rate = {10**400}"), r"learning_rate=a number of 1329 bits: must be b",
    ),
    "a rate of 20,000 bits": (
        *config(f"[optimizer]\nlearning_rate = 0x{'f' * 5000}"), "rate=a number of 20000 bits: must be below",
    ),
    "no rate at all": (*config("[optimizer]\nlearning_rate = nan"), "learning_rate=nan: must be a finite"),
    "a long text": (*config(f'layer = "{"x" * 200_000}"'), r"c\.toml: layer='x+\.\.\.x+': must be 'lstm' or"),
    "settings in a pipe": (pipe("c.toml"), config("")[1], rf"cannot read the config c\.toml: {PIPE} Fix"),
    "settings of a device": (
        nothing, [*TRAIN, "--config", "/dev/zero"], f"cannot read the config /dev/zero: {PIPE}",
    ),
    "a task in a pipe": (
        pipe("own.py"), ["train", "own.py:Own"], rf"the file of task 'own\.py:Own', own\.py: {PIPE}",
    ),
    # Options
    "a width without end": (nothing, [*TRAIN, "--hidden-size", str(10**20)], r"hidden_size=1.*2\*\*63"),
    "a width beyond arrays": (nothing, [*TRAIN, "--hidden-size", str(2**31)], "must be at most 1073741824"),
    "layers without end": (nothing, [*TRAIN, "--num-layers", str(10**9)], "num_layers=1.*at most 10000"),
    "steps without end": (nothing, [*TRAIN, "--seq-len", str(10**9)], "batch_size=16 x seq_len=1000000000"),
    "words without end": (nothing, [*TRAIN, "--vocab-size", str(2**31)], "vocab_size=2147483648: must be at"),
    # Texts
    "a text in a pipe": (pipe("text/train.txt"), TRAIN, rf"cannot read \S*/text/train\.txt: {PIPE} Fix"),
    "a pipe for a text": (pipe("p"), [*TRAIN[:-1], "p"], rf"cannot read \S*/p: {PIPE}"),
    "a socket for a text": (listen("s"), [*TRAIN[:-1], "s"], rf"cannot read \S*/s: {PIPE}"),
    "a device for a text": (nothing, [*TRAIN[:-1], "/dev/zero"], f"cannot read /dev/zero: {PIPE}"),
    "a word without end": (
        write("text/train.txt", "a cat " + "x" * 3_000_000), TRAIN, "the text has 1,048,576 characters witho",
    ),
    # Weights and vocabularies
    "weights in a pipe": (pipe("w"), START, f"cannot read the weights w: {PIPE} Fix: give a safet"),
    "weights of 8 bits": (
        weights({"embedding.weight": tensor("F8_E4M3", 4, 4, size=16)}, 16), START,
        r"w: embedding\.weight has the type F8_E4M3, which NumPy lacks\. Fix: convert it to F32 or BF16",
    ),
    "a shard of torch's": (
        weights(EMBEDDING, 4, DCP_SHARDING_INFO="{}"), START,
        r"w is one shard of a distributed checkpoint of torch.* Fix: .*enable_consolidation=True",
    ),
    "weights that are cut": (weights(EMBEDDING, 3), START, "w is not a whole safetensors file"),
    "a header without end": (
        write("w", struct.pack("<Q", 2**60) + b"{}"), START, "w is not a whole safetensors file",
    ),
    "weights of 1e20 rows": (
        weights({"embedding.weight": tensor("F32", 10**20, 4)}), START, "w is not a whole safet",
    ),
    "words nested deeply": (weights(EMBEDDING, 4, words=DEEP), START, "'words' in its metadata is not a"),
    # Machines
    # Runs
    "a model of 1.2 TB": (
        in_run("(?m)^(hidden_size|embed_size) = 16$", r"\1 = 80000"), ["evaluate", "run"],
        r"parameters alone need [\d.]+ .B on 1 device, but this machine has .*\s+Fix: use a",
    ),
    "a model of 1.2 TB, sampled": (
        in_run("(?m)^hidden_size = 16$", "hidden_size = 80000"), ["sample", "run"], "parameters alone need",
    ),
    "a model of 1.2 TB, exported": (
        in_run("(?m)^hidden_size = 16$", "hidden_size = 80000"), ["export", "run", "-o", "x"], "alone need",
    ),
    "data in a pipe": (pipe("run/data.json"), ["evaluate", "run"], rf"run/data\.json: {PIPE} Fix: rest"),
    "a run's words in a pipe": (pipe("run/vocabulary.json"), ["sample", "run"], rf"vocabulary\.json: {PIPE}"),
    "a report in a pipe": (pipe("run/metrics.jsonl"), RESUME, rf"run/metrics\.jsonl: {PIPE}"),
    "a run's words nested deeply": (
        write("run/vocabulary.json", DEEP), ["sample", "run"], r"run/vocabulary\.json",
    ),
}  # fmt: skip


def assert_one_line(argv, message, capsys):
    """The command ends in time with one message, and exit code 2."""

    def hangs(*_):
        pytest.fail(f"it hangs: {argv}")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_AFTER_SECONDS)
    # A library may hear no signal.
    faulthandler.dump_traceback_later(2 * HANGS_AFTER_SECONDS, exit=True, file=2)
    began = time.process_time()
    try:
        code = api.command(*argv)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    out, err = capsys.readouterr()
    print(err.strip())
    assert code == 2, out + err
    assert len(err) < 500
    assert err.count("\n") <= 3
    assert re.search(rf"^error: .*{message}", " ".join(err.splitlines())), err
    assert time.process_time() - began < SECONDS


@pytest.fixture
def here(world, tmp_path, monkeypatch):
    """A copy of the world, as the working directory."""
    here = tmp_path / "here"
    shutil.copytree(world, here)
    config_path = here / "run" / "config.toml"
    text = config_path.read_text().replace(str(world), str(here))
    config_path.write_text(text)
    monkeypatch.chdir(here)
    return here


@pytest.mark.more
@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_ends_in_one_line(name, here, capsys):
    change, argv, message = CRAFTED[name]
    change()
    assert_one_line(argv, message, capsys)


# ---- checkpoints, with checksums of what they hold ----

CHECKPOINT = Path("run/checkpoints/2")
DESCRIPTION, METADATA = CHECKPOINT / "checkpoint.json", "_CHECKPOINT_METADATA"


def described(**values):
    """What a checkpoint says of itself, with a hash of all that; None leaves a part out."""
    return lambda: api.describe_checkpoint(CHECKPOINT, values)


def state_file(pattern, content):
    """Puts something else into the place of one of Orbax's files; None is a pipe."""

    def change():
        path = str(max(CHECKPOINT.glob(pattern), key=lambda path: path.stat().st_size))
        (pipe(path) if content is None else write(path, content))()

    return change


def change_arrays(change):
    """Changes what the arrays of the checkpoint say: `change` takes a name and a zarr.json."""
    folder = f"file://{CHECKPOINT.absolute()}/state/"
    store = ts.KvStore.open({"driver": "ocdbt", "base": folder}).result()
    for key in store.list().result():
        name, _, file = key.decode().rpartition("/")
        if file == "zarr.json":
            zarr = json.loads(store.read(key).result().value)
            change(name, zarr)
            store.write(key, json.dumps(zarr).encode()).result()


def chunks_of_one_gigabyte():
    """A parameter of 25 kB in chunks of 1 GB, which zeros make a file of some kB."""

    def change(name, zarr):
        if name == "params.embedding.table":
            zarr["chunk_grid"]["configuration"]["chunk_shape"] = [2**24, 16]
            zarr["codecs"] = [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 3}},
            ]

    change_arrays(change)


def model_of_one_terabyte():
    """Settings, description and arrays that agree: 1.2 TB of parameters and optimizer state."""

    def change(name, zarr):
        zarr["shape"] = [80_000 if size == 16 else size for size in zarr["shape"]]

    in_run("(?m)^(hidden_size|embed_size) = 16$", r"\1 = 80000")()
    fields = json.loads(DESCRIPTION.read_text())["fields"]
    described(fields={**fields, "hidden_size": 80_000, "embed_size": 80_000})()
    change_arrays(change)


DAMAGED = "holds no complete checkpoint; 2"
UNKNOWN = rf"{DAMAGED}: checkpoint\.json is not what was written"
CHECKPOINTS = {
    "a task that is a number": (described(task=3), UNKNOWN),
    "no task": (described(task=None), UNKNOWN),
    "no fields": (described(fields=None), UNKNOWN),
    "a list of fields": (described(fields=[1]), UNKNOWN),
    "no optimizer": (described(optimizer=None), UNKNOWN),
    "losses that are a list": (described(losses=[1]), UNKNOWN),
    "a loss that is a number": (described(losses={"2": 1}), UNKNOWN),
    "metadata nested deeply": (state_file(METADATA, DEEP), "run/checkpoints/2 is damaged"),
    "metadata of another kind": (
        state_file(METADATA, '{"item_handlers": 3, "custom_metadata": {"task": "LM"}}'),
        "run/checkpoints/2 is damaged",
    ),
    "names of arrays nested deeply": (state_file("state/_METADATA", DEEP), "run/checkpoints/2"),
    "names of arrays that are numbers": (
        state_file("state/_METADATA", '{"tree_metadata": {"a": 3}}'), "run/checkpoints/2",
    ),
    "arrays that are no arrays": (state_file("state/ocdbt.process_0/d/*", "x"), "2 is damaged"),
    "an index of arrays that is none": (state_file("state/manifest.ocdbt", "{}"), "run/checkpoints/2"),
    "metadata in a pipe": (state_file(METADATA, None), rf"{DAMAGED}: .*{PIPE}"),
    "names of arrays in a pipe": (state_file("state/_METADATA", None), rf"{DAMAGED}: .*{PIPE}"),
    "arrays in a pipe": (state_file("state/ocdbt.process_0/d/*", None), rf"{DAMAGED}: .*{PIPE}"),
    "chunks that are larger than their array": (
        chunks_of_one_gigabyte,
        r"params/embedding/table \[384, 16\] is stored in chunks of \[16777216, 16\]",
    ),
}  # fmt: skip


# Where Orbax cannot read an array, it leaves those of others unfinished: each complains when it is collected.
# That is to be here, not in another test.
@pytest.mark.more
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <coroutine object _read_array:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_crafted_checkpoint_ends_in_one_line(name, here, capsys):
    change, message = CHECKPOINTS[name]
    change()
    api.reseal_checkpoint(CHECKPOINT)
    gc.disable()  # what it makes stays young, and is found without looking through all that there is
    try:
        assert_one_line(["evaluate", "run"], message, capsys)
    finally:
        gc.enable()
    gc.collect(1)


def data(**values):
    """What a run says of its data."""
    known = {"data": {}, "settings": "", "batches": {}, "run": "", **values}
    return write("run/data.json", json.dumps(known))


EVALUATE = ["evaluate", "run"]
FOLDERS = {
    "a description nested deeply": (write(DESCRIPTION, DEEP), EVALUATE, UNKNOWN),
    "a description that is a list": (write(DESCRIPTION, "[]"), EVALUATE, UNKNOWN),
    "a description in a pipe": (pipe(DESCRIPTION), EVALUATE, rf"{DAMAGED}: .*{PIPE}"),
    "no checksums": (described(checksums=None), EVALUATE, UNKNOWN),
    "a list of checksums": (described(checksums=["state/_METADATA"]), EVALUATE, UNKNOWN),
    "a checksum that is a number": (described(checksums={"state/_METADATA": 3}), EVALUATE, UNKNOWN),
    "a checksum of parts": (described(checksums={"state/_METADATA": [1, ""]}), EVALUATE, UNKNOWN),
    "a size that is a word": (
        described(checksums={"state/_METADATA": "a b"}), EVALUATE,
        rf"{DAMAGED}: state/_METADATA has \d+ of a bytes",
    ),
    "a file elsewhere": (
        described(checksums={"../../config.toml": "1 "}), EVALUATE, rf"{DAMAGED}: \S+toml is missing",
    ),
    "settings of the run in a pipe": (pipe("run/config.toml"), EVALUATE, rf"run/config\.toml: {PIPE}"),
    "settings of the run nested deeply": (
        write("run/config.toml", f"a = {DEEP}"), EVALUATE, r"run/config\.toml",
    ),
    "data nested deeply": (write("run/data.json", DEEP), EVALUATE, r"run/data\.json is damaged"),
    "data that are a list": (write("run/data.json", "[]"), EVALUATE, r"run/data\.json is damaged"),
    "data without a run": (
        write("run/data.json", '{"data": {}, "files": {}, "settings": "", "batches": {}}'), EVALUATE,
        r"run/data\.json is damaged",
    ),
    "no files": (data(), EVALUATE, r"run/data\.json is damaged"),
    "a list of files": (data(files=["vocabulary.json"]), EVALUATE, r"run/data\.json is damaged"),
    "a file that says nothing": (data(files={"vocabulary.json": 3}), EVALUATE, r"run/data\.json is damaged"),
    "a file outside of the folder": (
        data(files={"../text/train.txt": "0 "}), EVALUATE, r"run/data\.json is damaged",
    ),
}  # fmt: skip


@pytest.mark.rows(8)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_crafted_folder_ends_in_one_line(name, here, capsys):
    change, argv, message = FOLDERS[name]
    change()
    assert_one_line(argv, message, capsys)


# What SECURITY.md says.
RUNS_THE_FILE = {
    "train": ["train", "own.py:Own", "--help"],
    "train, by settings": ["train", "--config", "run/config.toml", "--mesh", "dp9"],
    "resume": [*RESUME, "--mesh", "dp9"],
    "resume or begin": ["train", "--resume-or-begin", "--train.out-dir", "run", "--mesh", "dp9"],
    "plan": ["plan", "own.py:Own", "--devices", "0"],
    "inspect": ["inspect", "own.py:Own", "--mesh", "dp9"],
    "plot": ["plot", "schedule", "own.py:Own", "--mesh", "dp9"],
    "evaluate": ["evaluate", "run", "--mesh", "dp9"],
    "sample": ["sample", "run", "--mesh", "dp9"],
    "export": ["export", "run", "-o", "x", "--mesh", "dp9"],
}
RUNS_NO_FILE = {
    "plot curves": ["plot", "curves", "run", "-o", "curves.svg"],
    "doctor": ["doctor", "--help"],
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", [*RUNS_THE_FILE, *RUNS_NO_FILE])
def test_who_runs_the_file_of_a_task(name, here):
    weights(MODEL, 40)()
    (here / "own.py").write_text(
        "import dataclasses, pathlib\nfrom jaxpar.lm import LM\n"
        f"pathlib.Path({str(here / 'ran')!r}).touch()\n"
        "@dataclasses.dataclass(frozen=True)\nclass Own(LM):\n    depth: int = 1\n"
    )
    in_run('(?m)^task = "lm"$', f'task = "{here}/own.py:Own"')()
    with contextlib.suppress(SystemExit):
        api.command(*(RUNS_THE_FILE | RUNS_NO_FILE)[name])
    assert (here / "ran").exists() == (name in RUNS_THE_FILE)


@pytest.mark.full
def test_a_run_of_a_huge_model_takes_no_memory(here):
    model_of_one_terabyte()
    api.reseal_checkpoint(CHECKPOINT)
    program = (
        f"import re, resource, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from lib import api\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))\n"
        "code = api.command('evaluate', 'run')\n"
        r"print(code, re.search(r'VmHWM:\s+(\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_AFTER_SECONDS
    )
    assert re.search(
        r"^error: parameters alone need 409\.\d GB on 1 device.*\n.*\n\Z", done.stderr
    ), done.stderr
    code, kibibytes = map(int, done.stdout.split())
    assert code == 2
    assert kibibytes < 1_000_000
