"""Every mistake on the command line gets one message, exit code 2, and changes no file.

The messages below each other:

    pytest -n 0 -s tests/test_bad_input.py
"""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from lib import api

LOWERS = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # what JAX says before it compiles
HYBRID = f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits"
LINES = "the cat sat on the mat\na dog ran to the cat\n"
WORDS = ["<eos>", "<unk>", "the", "cat", "sat", "on", "mat", "a", "dog", "ran", "to"]
SIZES = [
    "--batch-size", "8", "--seq-len", "4", "--num-layers", "2", "--hidden-size", "8", "--embed-size", "8",
    "--optimizer.warmup-steps", "1", "--train.num-steps", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory, compile_once):
    """A folder as a user may have it: texts, weights, configs, and a run of two steps."""
    world = tmp_path_factory.mktemp("world")
    for folder in ("text", "no_valid", "nothing"):
        (world / folder).mkdir()
    for split, times in (("train", 100), ("valid", 5), ("test", 5)):
        (world / "text" / f"{split}.txt").write_text(LINES * times)
    (world / "no_valid" / "train.txt").write_text(LINES)
    (world / "no_valid" / "test.txt").write_text(LINES)
    (world / "empty.txt").write_text(" \n\n")
    (world / "two_lines.txt").write_text(LINES)
    (world / "latin1.txt").write_bytes("caf\u00e9\n".encode("latin1") * 20)
    (world / "utf16.txt").write_text(LINES, encoding="utf-16")
    (world / "broken.toml").write_text("[train\n")
    (world / "latin1.toml").write_bytes('corpus = "caf\u00e9"\n'.encode("latin1"))
    (world / "no.safetensors").write_text("weights")
    rng = np.random.default_rng(0)
    shapes = {"embedding.weight": (12, 4), "head.weight": (12, 4), "head.bias": (12,)}
    for name in ("ih", "hh"):
        shapes |= {f"lstm.weight_{name}_l0": (16, 4), f"lstm.bias_{name}_l0": (16,)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, world / "model.safetensors")
    arguments = ["--corpus", str(world / "text"), "--train.out-dir", str(world / "run")]
    assert api.command("train", "lm", *SIZES, *arguments, "--devices", "0") == 0
    return world


def train(*more):
    mesh = () if {"--mesh", "--devices"} & {*more} else ("--mesh", "dp8")
    corpus = () if "--corpus" in more else ("--corpus", "text")
    return ["train", "lm", *SIZES, *corpus, *mesh, *more]


def config(text):
    """Trains with a config file of this text."""

    def change(world):
        (world / "config.toml").write_text(text)

    return change, train("--config", "config.toml")


def resume(*more):
    return ["train", "--resume", "--train.out-dir", "run", *more]


def damage(name, content="{"):
    """Writes something else into a file of the run."""

    def change(world):
        (world / "run" / name).write_text(content)

    return change


def truncate_checkpoint(world):
    for path in (world / "run" / "checkpoints" / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])


def without_losses(world):
    """The checkpoint knows of no validation."""
    api.describe_checkpoint(world / "run/checkpoints/2", {"losses": {}})


def other_vocabulary(world):
    """Two words change places in the vocabulary and in the text: all of it fits but the weights."""
    for path in [*(world / "text").iterdir(), world / "run" / "vocabulary.json"]:
        text = path.read_text()
        path.write_text(re.sub(r"\b(cat|the)\b", lambda m: {"cat": "the"}.get(m[0], "cat"), text))


# Name: the arguments, or what happens to the files before and the arguments; and the message.
FLAGS = {
    "no layers": (train("--num-layers", "0"), "num_layers=0: must be positive"),
    "negative width": (train("--hidden-size", "-4"), "hidden_size=-4: must be positive"),
    "width no number": (
        train("--hidden-size", "wide"),
        "parsing --hidden-size: .*int.*: 'wide' .* --hidden-size INT .* python -m jaxpar train lm --help$",
    ),
    "no width": (train("--hidden-size"), "value for argument '--hidden-size'. Expected 1"),
    "devices by name": (train("--devices", "gpu"), r"parsing --devices: .*\['gpu'\].*INT"),
    "a start without its file": (
        train("--start-ignore", "a"), "--start-rename and --start-ignore lack weights",
    ),
    "a name without its pattern": (
        train("--start", "run", "--start-rename", "a"), r"--start-rename a has no =",
    ),
    "a start of a resumed run": (
        resume("--start", "run"), "start and resume exclude each other",
    ),
    "weights of 3 bits": (
        ["export", "run", "-o", "m", "--dtype", "int3"], "invalid choice 'int3' for argument '--dtype'",
    ),
    "a word too many": (["evaluate", "run", "valid"], "Unrecognized options: valid "),
    "no file to export to": (["export", "run"], "Missing from .* export: -o FILE, --output FILE"),
    "nothing to export": (["export"], "Missing from .*: RUN_DIR .* --output FILE"),
    "width beyond all memory": (
        train("--hidden-size", "10000000"), r"state alone need [\d.]+ TB on 8 devices, but this machine has",
    ),
    "devices beyond all threads": (train("--simulate", "9999"), r"simulate_devices\(9999\): must be from 1"),
    "hardly any memory": (
        train("--memory", "1kB"), r"needs about [\d.]+ kB per device, but .* has 1\.0 kB\s+Fix: use",
    ),
    "no embedding": (train("--embed-size", "0"), "embed_size=0: must be positive"),
    "embedding too wide": (
        train("--embed-size", "16"), "embed_size=16 is larger than hidden_size=8",
    ),
    "no vocabulary": (train("--vocab-size", "0"), "vocab_size=0: must be positive"),
    "vocabulary too small": (
        train("--vocab-size", "5"), "vocab_size=5 is less than the 11 words",
    ),
    "a vocabulary of no words": (
        train("--vocab-size", "96"), "(?s)vocab_size=96 has more rows than words: .* 11.* num_words=11",
    ),
    "more words than rows": (
        train("--vocab-size", "5", "--num-words", "6"), "num_words=6 is more than vocab_size=5",
    ),
    "dropout of more": (
        train("--dropout", "1.5"), r"dropout=1\.5: must be at least 0 and less than 1",
    ),
    "dropout nan": (train("--dropout", "nan"), "dropout=nan: must be a finite number"),
    "forget bias inf": (train("--forget-bias", "inf"), "forget_bias=inf: must be a finite"),
    "tied and narrow": (
        train("--tie-embedding", "--embed-size", "4"),
        "tie_embedding needs embed_size=4 equal to hidden_size=8",
    ),
    "unknown dtype": (train("--dtype", "float16"), "dtype.*float32.*bfloat16"),
    "hidden by tensor": (
        train("--mesh", "tp8", "--hidden-size", "12"),
        "hidden_size=12 does not divide by tensor=8 Fix: use hidden_size=8 or 16",
    ),
    "hidden by heads": (
        train("--num-heads", "3"),
        "hidden_size=8 does not divide by num_heads=3 Fix: use hidden_size=6 or 9",
    ),
    "heads by tensor": (
        train("--mesh", "tp4", "--num-heads", "2"),
        "num_heads=2 does not divide by tensor=4 Fix: use num_heads=4",
    ),
    "heads of no recurrent matrix": (
        train("--layer", "mingru", "--num-heads", "2"),
        "(?s)num_heads=2: layer='mingru' has no recurrent matrix .*use layer='lstm'",
    ),
    "unknown schedule": (train("--pipeline.schedule", "1f1c"), "schedule.*1f1b.*gpipe"),
    "no microbatch": (train("--pipeline.num-microbatches", "0"), "num_microbatches=0: must be"),
    "batch by data and microbatches": (
        train("--mesh", "dp4pp2", "--pipeline.num-microbatches", "4"),
        "batch_size=8 does not divide by data=4 x num_microbatches=4 = 16 Fix: use batch_size=16",
    ),
    "no chunk": (train("--pipeline.num-chunks", "0"), "num_chunks=0: must be positive"),
    "time by chunks": (
        train("--mesh", "dp4pp2", "--pipeline.num-chunks", "3"),
        "seq_len=4 does not divide by num_chunks=3 Fix: use seq_len=3 or 6",
    ),
    "groups without interleaving": (
        train("--pipeline.num-groups", "2"), r"num_groups=2",
    ),
    "interleaving without groups": (
        train("--pipeline.schedule", "interleaved"), "num_groups=1 with schedule='interleaved'",
    ),
    "unknown placement": (
        train("--mesh", "dp4pp2", "--pipeline.placement", "fair"), "placement='fair'",
    ),
    "placement of another sum": (
        train("--mesh", "dp4pp2", "--pipeline.placement", "1", "2"),
        r"placement=\(1, 2\) has 3 layers in 2 places",
    ),
    "placement that leaves out a layer": (
        train("--mesh", "dp4pp2", "--pipeline.placement", "first | 1, last"),
        "placement='first | 1, last': layer 0 is missing; name every part",
    ),
    "placement for other stages": (
        train("--mesh", "dp4pp2", "--pipeline.placement", "first, 0 | 1 | last"),
        r"has 2 layers in 3 places, num_layers=2 on stage=2 needs 2 in 2\.\s.* \(1, 1\)",
    ),
    "layers by stages": (
        train("--mesh", "dp4pp2", "--num-layers", "3", "--pipeline.placement", "even"),
        r"num_layers=3 does not split evenly over stage=2\. Fix: use 2 or 4 layers.*\(2, 1\)",
    ),
    "unknown head": (train("--pipeline.head", "first"), "head.*last.*sharded"),
    "level": (train("--level", "byte"), "level.*auto.*word.*char"),
    "room for no word": (train("--max-vocab", "2"), "max_vocab=2 leaves no room for words"),
    "no rows": (train("--batch-size", "0"), "batch_size=0: must be positive"),
    "rows by data": (
        train("--batch-size", "12"), "batch_size=12 does not divide by data=8",
    ),
    "no time": (train("--seq-len", "-1"), "seq_len=-1: must be positive"),
    "text too short for the batch": (
        train("--batch-size", "800"), "1400 tokens are fewer than the .* batch_size=800",
    ),
    "negative buckets": (train("--num-buckets", "-1"), "num_buckets=-1: must not be neg"),
    "a share of nothing": (
        train("--mesh", "dp2tp4", "--shares", "0", "1"), r"shares=\(0, 1\): must be positive",
    ),
    "shares for other groups": (
        train("--mesh", "dp2tp4", "--shares", "1", "2", "1"),
        r"shares=\(1, 2, 1\): expected 2 \(data\), got 3",
    ),
    "no steps": (train("--train.num-steps", "0"), "num_steps=0: must be positive"),
    "too many steps": (train("--train.num-steps", "2147483648"), "num_steps=2147483648: must"),
    "unknown optimizer": (train("--optimizer.name", "lion"), "optimizer.name.*adam.*sgd"),
    "no rate": (train("--optimizer.learning-rate", "0"), r"learning_rate=0\.0: must be positive"),
    "rate nan": (train("--optimizer.learning-rate", "nan"), "learning_rate=nan: must be a finite"),
    "unknown schedule of rates": (train("--optimizer.lr-schedule", "cos"), "lr-schedule.*cosine"),
    "negative warm-up": (train("--optimizer.warmup-steps", "-1"), "warmup_steps=-1: must not be"),
    "more warm-up than steps": (
        train("--optimizer.warmup-steps", "50"), r"warmup_steps=50 is more than num_steps=2\.",
    ),
    "negative hold": (train("--optimizer.hold-steps", "-1"), "hold_steps=-1: must not be negative"),
    "decay of more": (train("--optimizer.lr-decay", "1.5"), r"lr_decay=1\.5\s+Fix: use a factor"),
    "decay at no time": (train("--optimizer.lr-decay-every", "0"), "lr_decay_every=0: must be pos"),
    "weight decay of adam": (
        train("--optimizer.weight-decay", "0.1"),
        r"weight_decay=0\.1 has no effect with optimizer 'adam' Fix: use .* name='adamw'",
    ),
    "negative weight decay": (train("--optimizer.weight-decay", "-1"), r"weight_decay=-1\.0: must"),
    "momentum of adam": (train("--optimizer.momentum", "0.9"), r"momentum=0\.9 has no effect with"),
    "momentum of more": (
        train("--optimizer.momentum", "1.5", "--optimizer.name", "sgd"), r"momentum=1\.5: must be",
    ),
    "negative clipping": (train("--train.clip-norm", "-1"), r"clip_norm=-1\.0: must not be"),
    "unknown policy": (train("--train.nonfinite", "ignore"), "nonfinite.*stop.*skip"),
    "none skipped": (train("--train.max-skipped", "0"), "max_skipped=0: must be positive"),
    "negative seed": (train("--train.seed", "-1"), r"seed=-1\s+Fix: use one from 0 to"),
    "seed too large": (train("--train.seed", str(2**70)), "seed=1180591620717411303424: must"),
    "unknown update": (train("--update", "shard"), "update.*replicated.*sharded"),
    "never logged": (train("--train.log-every", "0"), "log_every=0: must be positive"),
    "negative evaluation": (train("--train.eval-every", "-1"), "eval_every=-1: must not be"),
    "negative checkpoints": (
        train("--train.checkpoint-every", "-1"), "checkpoint_every=-1: must not be negative",
    ),
    "nothing kept": (train("--train.keep-checkpoints", "0"), "keep_checkpoints=0: must be pos"),
    "no folder": (train("--train.out-dir", ""), "out_dir='' names no folder"),
    "folder where none can be": (
        train("--train.out-dir", "/proc/run"), r"cannot make the folder /proc/run: .* Fix: use another",
    ),
    "folder with too long a name": (
        train("--train.out-dir", "a" * 300), r"cannot make the folder a+: File name too long Fix: use",
    ),
    "no folder for what is planned": (
        train("--mesh", "auto", "--train.out-dir", "empty.txt/run"), r"cannot make the folder empty\.txt/ru",
    ),
    "folder in a file": (
        train("--train.out-dir", "empty.txt/run", "--corpus", "none"),  # before that is looked for
        r"cannot make the folder empty\.txt/run: Not a directory Fix: use another folder",
    ),
    "unknown flag": (
        train("--hiden-size", "8"),
        "Unrecognized options: --hiden-size, 8 Perhaps you meant: --hidden-size INT .* train lm --help$",
    ),
    "an unknown flag with underscores": (
        train("--batch_sizes", "8"), "options: --batch-sizes, 8 Perhaps you meant: --batch-size INT",
    ),
    "a rate by another name": (
        train("--lr", "0.1"), r"options: --lr, 0\.1 ",
    ),
    "epochs": (train("--epochs", "3"), r"options: --epochs, 3 "),
    "steps": (train("--steps", "3"), r"options: --steps, 3 Perhaps you meant: .* --train\.num-steps INT"),
    "devices by another name": (train("--gpus", "2"), "options: --gpus, 2 "),
    "a table for an option": (
        train("--pipeline", "num-chunks=4"), r"--pipeline, num-chunks=4 .* --pipeline\.num-chunks INT",
    ),
    "like no option": (train("--quickly"), "options: --quickly .* train lm --help$"),
    "a truth after a switch": (train("--fsdp", "yes"), "Unrecognized options: yes "),
    "a comma for a point": (
        train("--optimizer.learning-rate", "0,01"), r"parsing --optimizer\.learning-rate: .*float: '0,01'",
    ),
    "a whole number as a power": (train("--hidden-size", "1e3"), "parsing --hidden-size: .*int.*: '1e3'"),
    "a task as a module": (["train", "own:Task"], r"no task 'own:Task'\. Fix: use lm, or .*py:Name\.$"),
    "a run for a task": (
        ["inspect", "run"],
        r"no task 'run'\. Fix: use lm",
    ),
    "unknown command": (["trian", "lm"], "no command 'trian' Fix: use train"),
    "no command like it": (["go"], "no command 'go' Fix: use train, plan, evaluate"),
    "no task": (
        ["train", "--mesh", "dp8"], r"train needs a task Fix: use train lm, or train path/to/file\.py:Name",
    ),
    "no task to plan": (["plan", "--devices", "8"], r"plan needs a task Fix: use plan lm"),
    "no task to plot": (["plot", "schedule"], r"plot schedule needs a task Fix: use plot schedule lm"),
    "unknown task": (["train", "lmm"], "there is no task 'lmm'; did you mean 'lm'"),
    "no such picture": (["plot", "lm"], "no picture 'lm' Fix: write plot KIND TASK, with a KIND of sched"),
    "no picture at all": (["plot", "--mesh", "pp4"], "no picture '' Fix: write plot KIND TASK"),
}  # fmt: skip

DEVICES = {
    "too many devices": (train("--mesh", "dp16"), "needs 16 devices, got 8 Fix: use .*simulate 16"),
    "no such device": (
        train("--devices", "9"), r"mesh devices=\(9,\): there is no device 9",
    ),
    "a device twice": (
        train("--devices", "0", "0"), r"devices=\(0, 0\)\s+Fix: name one or more",
    ),
    "mesh of no size": (train("--mesh", "tp0"), "mesh tensor=0"),
    "a mesh in two ways": (
        train("--mesh", "dp2", "--mesh.data", "4"), r"options: --mesh\.data, 4 .* train lm --help$",
    ),
    "a mesh for the planner": (
        ["plan", "lm", "--mesh", "dp2"], "options: --mesh, dp2 .* plan lm --help$",
    ),
    "a pipeline for the planner": (
        ["plan", "lm", "--pipeline.num-chunks=2"], r"options: --pipeline\.num-chunks=2 .* plan lm",
    ),
    "a plan for no devices": (
        ["plan", "lm", "--vocab-size", "96", "--machine", "h100:1x1x0"],
        "machine 'h100:1x1x0': must be one of",
    ),
    "a mesh of the planner's elsewhere": (
        ["inspect", "lm", "--mesh", "auto"], "mesh 'auto' is not made of axes and sizes",
    ),
    "a mesh of the planner's for a finished run": (
        ["evaluate", "run", "--mesh", "auto"], "is not made of axes and sizes",
    ),
    "a plan that nothing fits in": (
        ["plan", "lm", *SIZES[:10], "--corpus", "text", "--memory", "1kB"],
        r"no layout fits in 1\.0 kB per device on 8 x cpu \([\d,]+ tried\): .*\s+Fix: use more devices",
    ),
    "the planner's mesh on some devices": (
        train("--mesh", "auto", "--devices", "0"), "--mesh auto takes all devices Fix: leave out --devices",
    ),
    "no size of memory": (
        train("--memory", "much"), "--memory much is not a size",
    ),
    "nothing to split parameters over": (
        train("--mesh", "tp2", "--fsdp"), r"fsdp=True shards over .* tp2 has data=1 Fix: use",
    ),
    "nothing to split an update over": (
        train("--mesh", "pp2", "--update", "sharded"), "update='sharded' shards over data-parallel",
    ),
    "no unit of memory": (train("--memory", "16"), "--memory 16 is not a size"),
    "two sizes to infer": (
        train("--mesh", "dp-1pp-1"), "-1 for data and stage",
    ),
    "a mesh in three words": (train("--mesh", "dp2", "pp2", "tp2"), "Unrecognized options: pp2, tp2 "),
    "a mesh of sizes alone": (train("--mesh", "2x2x2"), "mesh '2x2x2' is not made of axes"),
    "an axis that nobody knows": (
        train("--mesh", "dp4xx2"), r"unknown axis 'xx' of task LM Fix: use data, stage, tensor\.$",
    ),
    "an axis with a slip": (train("--mesh", "dp4tensr2"), r"unknown axis 'tensr' "),
    "fewer devices than are named": (
        train("--mesh", "dp1", "--devices", "2", "3"),
        r"needs 1 device, got 2 Fix: use sizes that multiply to 2, name 1 with devices",
    ),
    "rows that the named devices cannot share": (
        train("--batch-size", "6", "--devices", *"01234567"), "batch_size=6 does not divide by data=8",
    ),
    "shares as a ratio": (train("--mesh", "dp2tp4", "--shares", "3:1"), r"--shares: .*INT.*\['3:1'\]"),
    "a range of devices": (train("--devices", "0-3"), r"parsing --devices: .*INT.*\['0-3'\]"),
    "unknown axis": (
        train("--mesh", "dp2tensr4"), "unknown axis 'tensr' of task LM",
    ),
    "no mesh": (train("--mesh", "big"), "mesh 'big' is not made of axes"),
    "simulated too late": (train("--simulate", "3"), r"simulate_devices\(3\): JAX has already started"),
    "nothing simulated": (train("--simulate", "0"), r"simulate_devices\(0\): must be from 1 to 1024"),
    "evaluation on no such mesh": (
        ["evaluate", "run", "--mesh", "tp9"], "needs 9 devices, got 8",
    ),
}  # fmt: skip

FILES = {
    "no config file": (
        train("--config", "none.toml"), r"cannot read the config none\.toml: No such file",
    ),
    "a folder for a config": (
        train("--config", "text"), "cannot read the config text: Is a directory",
    ),
    "no TOML": (train("--config", "broken.toml"), r"broken\.toml is not TOML: .*line 1"),
    "TOML in latin1": (train("--config", "latin1.toml"), r"latin1\.toml is not UTF-8 text: byte 0xe9"),
    "half a file of settings": (
        (lambda world: (world / "c.toml").write_text("[train]\nnum_steps"), train("--config", "c.toml")),
        r"c\.toml is not TOML: .*at end of document",
    ),
    "a text that is bytes": (
        (lambda world: (world / "a.zip").write_bytes(b"PK\x03\x04\x14\xff"), train("--corpus", "a.zip")),
        r"a\.zip is not UTF-8 text: byte 0xff at offset 5",
    ),
    "a text of the web": (
        train("--corpus", "https://example.com/a.txt"), "no corpus 'https://example.com/a.txt': it is nei",
    ),
    "unknown key": (
        config("[optimizer]\nlerning_rate = 3\n"),
        r"no key optimizer\.lerning_rate Fix: use optimizer\.learning_rate\.",
    ),
    "unknown table": (config("[optimiser]\n"), r"no key optimiser Fix: use optimizer\."),
    "settings of another task": (
        config(f'task = "{HYBRID}"\n'),
        r"settings of config\.toml: expected task lm, got .*hybrid\.py:Digits Fix: leave the",
    ),
    "settings of no task": (
        (lambda world: (world / "c.toml").write_text("fsdp = true\n"), ["train", "--config", "c.toml"]),
        r"c\.toml: task=None: must name a task Fix: add task = \"lm\"",
    ),
    "a text for a number": (
        config('hidden_size = "3"\n'), r"hidden_size='3': must be a whole number",
    ),
    "a truth for a number": (
        config("seq_len = true\n"), r"seq_len=True \(bool\): must be a whole number",
    ),
    "a fraction for a number": (
        config("[train]\nnum_steps = 1.5\n"), r"train\.num_steps=1\.5 \(float\): must be a whole number",
    ),
    "a number for a truth": (
        config("fsdp = 1\n"), r"fsdp=1 \(int\): must be true or false",
    ),
    "a number for a text": (config("corpus = 1\n"), r"corpus=1 \(int\): must be a string"),
    "no such option": (
        config('[optimizer]\nname = "adm"\n'), r"optimizer\.name='adm': must be 'adam' or 'adamw' or",
    ),
    "fractions of layers": (
        config("[pipeline]\nplacement = [1, 2.5]\n"),
        r"placement=\(1, 2\.5\): must be a string or a list of whole numbers",
    ),
    "a number for a table": (config("train = 3\n"), r"train=3 is not a table\s+Fix: write \[train\]"),
    "infinite": (config("[train]\nclip_norm = inf\n"), r"train\.clip_norm=inf: must be a finite number"),
    "no such corpus": (
        train("--corpus", "python-dogs"), "(?s)no corpus 'python-dogs'.*did you mean 'python-docs'",
    ),
    "no name of a corpus": (train("--corpus", ""), "corpus='' is empty"),
    "an empty text": (train("--corpus", "empty.txt"), r"empty\.txt is empty: 3 characters"),
    "a text of two lines": (
        train("--corpus", "two_lines.txt"), r"two_lines\.txt is too short: 2 lines do not split",
    ),
    "a text in latin1": (
        train("--corpus", "latin1.txt"), r"latin1\.txt is not UTF-8 text: byte 0xe9 at offset 3",
    ),
    "a text in UTF-16": (train("--corpus", "utf16.txt"), r"utf16\.txt is not UTF-8 text: it begins as "),
    "a folder without texts": (
        train("--corpus", "nothing"), "nothing is not a corpus: none of its files is known",
    ),
    "a text without its validation": (
        train("--corpus", "no_valid"), r"no_valid is not a corpus: it lacks valid\.txt",
    ),
    "metrics that cannot be written": (
        (
            lambda world: (world / "new" / "metrics.jsonl").mkdir(parents=True),
            train("--train.out-dir", "new"),
        ),
        r"new/metrics\.jsonl is a folder, but a run keeps a file there Fix: use another folder",
    ),
    "checkpoints that cannot be written": (
        (
            lambda world: ((world / "old").mkdir(), (world / "old" / "checkpoints").write_text("")),
            train("--train.out-dir", "old"),
        ),
        r"old/checkpoints is a file, but a run keeps a folder there Fix: use another folder",
    ),
    "weights that are not there": (
        train("--start", "none.safetensors"), r"cannot read the weights none\.safetensors: No such file",
    ),
    "no weights": (train("--start", "no.safetensors"), r"no\.safetensors is not a whole safetensors file"),
    "no weights in a folder": (
        train("--start", "text"), r"text holds no run and none of model\.safetensors and model\.safe",
    ),
    "weights without words": (
        train("--start", "model.safetensors"), r"does not name the words of its rows\. Fix: save it with",
    ),
    "weights of other sizes": (
        train("--start", "run", "--hidden-size", "16"),
        r"run after step 2 has other sizes than the model: head\.kernel is 8x384 there and 16x384 here",
    ),
    "weights of more layers": (
        train("--start", "run", "--num-layers", "1"),
        r"run after step 2 has layers\.1\.b, layers\.1\.w_h, layers\.1\.w_x, which the model lacks",
    ),
    "weights that nobody takes": (
        train("--start", "run", "--start-ignore", ".*"), r"no weights of run after step 2 are used\. Fix",
    ),
    "a pattern that fits nothing": (
        train("--start", "run", "--start-ignore", "encoder"),
        r"start: 'encoder' matches no tensor of run after step 2\. Fix: match some of embedding\.table",
    ),
    "no pattern": (
        train("--start", "run", "--start-ignore", "lay("),
        r"start: 'lay\(' as '' is not a valid pattern: missing",
    ),
    "a group that is not there": (
        train("--start", "run", "--start-rename", r"head\.bias=\1"), r"start: 'head.*' as '\\\\1' is not",
    ),
    "two names for one": (
        train("--start", "run", "--start-rename", r"head\..*=head.bias"),
        r"start: head\.bias and head\.kernel of run after step 2 would both be head\.bias\. Fix: rename one",
    ),
    "an export into a file": (
        ["export", "run", "-o", "empty.txt/model"],
        r"cannot write empty\.txt/model: Not a directory",
    ),
    "an export into a folder": (
        ["export", "no run", "-o", "text"], "cannot write text: Is a directory Fix: give a pl",
    ),
    "an export where none can be": (
        ["export", "no run", "-o", "/proc/model"], r"cannot write /proc/model: .* Fix: give a pl",
    ),
    "predictions in a file": (
        ["predict", "no run", "test", "-o", "empty.txt/p"],
        r"cannot make the folder empty\.txt/p: Not a directory.*Fix: use another folder",
    ),
    "a picture in a folder": (
        (lambda world: (world / "a.svg").mkdir(), ["plot", "schedule", "lm", "--mesh", "pp4", "-o", "a.svg"]),
        r"cannot write a\.svg: Is a directory Fix: give a place",
    ),
    "an export into no folder": (
        ["export", "run", "-o", "no/model"], "cannot write no/model: No such file or directory Fix: ",
    ),
}  # fmt: skip

RUNS = {
    "nothing to resume": (train("--resume"), "runs holds no run to resume Fix: name its folder"),
    "no run to resume": (
        ["train", "--resume", "--train.out-dir", "text"], r"text holds no run: .* config\.toml",
    ),
    "resume and overwrite": (
        resume("--overwrite"), "resume and overwrite exclude each other Fix: leave out one",
    ),
    "a run there already": (
        train("--train.out-dir", "run"), r"run' holds a run already Fix: continue it \(--resume\), use",
    ),
    "a run of another task": (
        ["train", HYBRID, "--resume", "--train.out-dir", "run"],
        r"settings of run: expected task .*hybrid\.py:Digits, got lm Fix: leave the task out",
    ),
    "no run to evaluate": (["evaluate", "text"], "text holds no run: there is no config"),
    "no run to sample": (["sample", "none"], "none holds no run: there is no config"),
    "all runs for one": (
        (lambda world: shutil.copytree(world / "run", world / "runs/0001"), ["evaluate", "runs"]),
        r"runs holds no run: .* Fix: give the folder that `train` wrote, such as runs/0001$",
    ),
    "a file of a run for the run": (["evaluate", "run/config.toml"], r"run/config\.toml holds no run"),
    "curves of a file": (["plot", "curves", "run/metrics.jsonl", "-o", "a.svg"], "jsonl holds no run"),
    "an export of a damaged checkpoint": (
        (truncate_checkpoint, ["export", "run", "-o", "m"]), "checkpoints holds no complete checkpoint; 2: ",
    ),
    "an export of another task": (
        (damage("config.toml", f'task = "{HYBRID}"\n'), ["export", "run", "-o", "m"]),
        r"run/checkpoints/2 must be of the task Digits, got LM",
    ),
    "a prompt in several words": (
        ["sample", "run", "--prompt", "the", "cat"], "Unrecognized options: cat ",
    ),
    "a damaged config": (
        (damage("config.toml"), ["evaluate", "run"]), r"run/config\.toml is damaged: .*line 1",
    ),
    "a damaged vocabulary": (
        (damage("vocabulary.json"), ["sample", "run"]), r"run/vocabulary\.json is damaged",
    ),
    "no vocabulary in the run": (
        (lambda world: (world / "run/vocabulary.json").unlink(), ["sample", "run"]),
        r"cannot read .*run/vocabulary\.json: No such file",
    ),
    "damaged data.json": (
        (damage("data.json"), ["evaluate", "run"]), r"run/data\.json is damaged",
    ),
    "no checkpoint": (
        (lambda world: shutil.rmtree(world / "run/checkpoints"), ["evaluate", "run"]),
        r"run/checkpoints holds no complete checkpoint Fix: name",
    ),
    "a truncated checkpoint": (
        (truncate_checkpoint, ["evaluate", "run"]),
        r"checkpoints holds no complete checkpoint; 2: .* Fix: name a run that has saved one",
    ),
    "nothing but a truncated checkpoint": ((truncate_checkpoint, resume()), "no complete checkpoint; 2: "),
    "another text": (
        (lambda world: (world / "text/train.txt").write_text(LINES * 90), resume()),
        r"the data of the run in run have changed.*: data\.train\.array was int32\[1400\], is int32\[1260\];",
    ),
    "checkpoint of other widths": (
        resume("--hidden-size", "16"), "hidden_size was 8, is 16; .* Fix: set hidden_size as before",
    ),
    "checkpoint of other layers": (
        resume("--num-layers", "3"), "num_layers was 2, is 3; .* Fix: set num_layers as before",
    ),
    "checkpoint of another optimizer": (
        resume("--optimizer.name", "sgd"), "of another optimizer: expected name='sgd', got name='adam'",
    ),
    "checkpoint of other rows": (
        resume("--batch-size", "16"), r"carry/\S+ must be .*, got .* batch_size was 8, is 16 Fix: set ",
    ),
    "checkpoint of another size of vocabulary": (
        resume("--vocab-size", "768"), "vocab_size was 384, is 768; .* Fix: set vocab_size as before",
    ),
    "checkpoint of another vocabulary": (
        (other_vocabulary, ["sample", "run"]),
        r"run/vocabulary\.json is damaged Fix: restore it",
    ),
    "no best state": (
        (without_losses, ["evaluate", "run", "--best"]),
        "run/checkpoints holds no complete checkpoint of a validated step Fix: ",
    ),
    "an unknown word": (
        ["sample", "run", "--prompt", "the cst"],
        "(?s)'cst' is not among the 11 words.*use 'sat', 'cat'",
    ),
    "no length": (["sample", "run", "--length", "0"], "length=0 is too small"),
    "no temperature": (["sample", "run", "--temperature", "nan"], "temperature=nan"),
    "a sample of another task": (
        (damage("config.toml", f'task = "{HYBRID}"\n'), ["sample", "run"]), r"run in run is .*Digits",
    ),
    "negative temperature": (
        ["sample", "run", "--temperature", "-1"], r"temperature=-1\.0 must be 0, or from",
    ),
    "negative seed of a sample": (["sample", "run", "--seed", "-1"], "seed=-1 is too small"),
}  # fmt: skip

# Every path of the command line, in the home of a user that does not exist.
NOBODY = "~nobody-here/x"
PATHS = {
    "train": train("--train.out-dir", NOBODY),
    "train again": ["train", "--resume", "--train.out-dir", NOBODY],
    "train if it is new": train("--resume-or-begin", "--train.out-dir", NOBODY),
    "train over": train("--overwrite", "--train.out-dir", NOBODY),
    "train on": train("--corpus", NOBODY),
    "train from": train("--start", NOBODY),
    "train as": train("--config", f"{NOBODY}.toml"),
    "train a task": ["train", f"{NOBODY}.py:Digits"],
    "train on a mesh of the planner's": train("--mesh", "auto", "--train.out-dir", NOBODY),
    "plan": ["plan", "lm", "--corpus", NOBODY],
    "inspect": ["inspect", "lm", "--corpus", NOBODY],
    "evaluate": ["evaluate", NOBODY],
    "sample": ["sample", NOBODY],
    "sample after": ["sample", "run", "--prompts", NOBODY],
    "export": ["export", NOBODY, "-o", "m"],
    "export into": ["export", "run", "-o", NOBODY],
    "predict with": ["predict", NOBODY, "test", "-o", "p"],
    "predict": ["predict", "run", NOBODY, "-o", "p"],
    "predict into": ["predict", "run", "test", "-o", NOBODY],
    "plot": ["plot", "schedule", "lm", "--mesh", "pp4", "-o", f"{NOBODY}.svg"],
    "plot curves of": ["plot", "curves", NOBODY, "-o", "a.svg"],
    "plot curves into": ["plot", "curves", "run", "-o", f"{NOBODY}.svg"],
}
HOMES = {
    f"{name} nobody's": (
        argv,
        r"no user nobody-here has a home folder.* Fix: write \./~nobody-here",
    )
    for name, argv in PATHS.items()
}

# What a plan says before.
RANKING = "estimating every mesh and pipeline ..."

MISTAKES = FLAGS | DEVICES | FILES | RUNS | HOMES


# With frames where what is printed to may have them.
BOX = re.compile(r"(╭─)? [\w ]+ ( +|─+╮)\n(│? .*\n)+(╰─+╯\n)?")


def one_message(said):
    """What is said in up to three lines, or in a box that ends with a remedy and is one line here."""
    if said.startswith("error: "):
        assert said.count("\n") <= 3
        return " ".join(said.splitlines())
    assert BOX.fullmatch(said), said
    words = " ".join(re.sub("[│╭╮╰╯─]|---+", " ", said).split())
    assert re.search(r"For full helptext, (see|run:?) python -m jaxpar \w+ .*--help", words)
    return words


def files(folder):
    """Every file and its content, every folder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.name != ".lock")
    return {path: path.is_file() and path.read_bytes() for path in paths}


@pytest.mark.rows(30)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_message_exit_code_2_and_no_file_changed(
    mistake, world, tmp_path, monkeypatch, capsys, caplog
):
    what, message = MISTAKES[mistake]
    here = tmp_path / "here"
    shutil.copytree(world, here)
    change, argv = what if isinstance(what, tuple) else (None, what)
    config_path = here / "run" / "config.toml"
    text = config_path.read_text().replace(str(world), str(here))
    config_path.write_text(text)  # changed by hand
    if change is not None:
        change(here)
    monkeypatch.chdir(here)
    before = files(here)
    lowered = []

    def note(event, seconds, fun_name="", **rest):
        if event == LOWERS:
            lowered.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        code = api.command(*argv)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    # The model is tried on a few rows; it waits for no step, which of a large model takes minutes.
    assert "jit(step)" not in lowered
    out, err = capsys.readouterr()
    print(f"{mistake}:\n    {err.strip()}")
    assert code == 2, out + err
    assert "Traceback" not in out + err
    said = err.removeprefix(f"{RANKING}\n")
    assert "loss" not in out  # nothing was trained before it was said
    assert re.search(message, one_message(said)), err
    assert files(here) == before
