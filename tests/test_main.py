"""The command line: what it prints, and one message for each mistake."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib

import jax
import numpy as np
import pytest
from lib import api

from jaxpar.lm import LM
from jaxpar.planning import plan

END_SECONDS = 600  # which only a process that hangs takes


def flags(text, *more):
    """A tiny run."""
    return [
        "train", "lm", "--corpus", str(text), "--batch-size", "8", "--seq-len", "4",
        "--num-layers", "2", "--hidden-size", "8", "--embed-size", "8",
        "--optimizer.warmup-steps", "1", "--train.num-steps", "4", "--train.log-every", "2", *more,
    ]  # fmt: skip


def steps_of(out_dir):
    """The names of the checkpoints of a run."""
    return [path.name for path in (out_dir / "checkpoints").iterdir()]


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A finished run and what it printed."""
    out_dir, printed = tmp_path_factory.mktemp("runs") / "run", io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = api.command(
            *flags(text, "--simulate", "8", "--mesh", "dp2pp2tp2", "--train.out-dir", str(out_dir))
        )
    assert code == 0
    return out_dir, printed.getvalue()


@pytest.mark.full
def test_train_prints_what_will_happen_then_progress_then_perplexities(run):
    out_dir, printed = run
    expected = [
        r"devices +8 x cpu",
        r"mesh +data=2 x stage=2 x tensor=2",
        r"layers +2 \(0 \| 1\)",
        r"each stage +stores 1/2 of embedding, head",
        r"work +stage 0: ~50%, stage 1: ~50%",
        r"data +.*text\d+, words: 1,400 train, 70 valid, 70 test",
        r"vocabulary +11 \+ 373 padding",
        r"lstm\.w_h +2x8x4x8 +layers/stage, input, gates, hidden/tensor +1x8x4x4 +512 B",
        r"parameters, .*; per device: parameters .*, optimizer state .*, recurrent state ",
        r"training 4 steps into .*run; the first is being compiled",
        r"step 1/4  loss .* perplexity +\S+  compiled in ",
        r"step 4/4  loss .* tokens/s  ETA",
        r" +perplexity +unigram perplexity",
        r"valid +\d+\.\d+ +\d+\.\d+",
        r"test +\d+\.\d+ +\d+\.\d+",
        r"run holds checkpoints/, config\.toml, data\.json, metrics\.jsonl, vocabulary\.json",
    ]
    position = 0
    for pattern in expected:
        found = re.compile(pattern).search(printed.replace("\n/", "/"), position)
        assert found, f"{pattern} is not in, or too early in:\n{printed}"
        position = found.end()
    *rows, _ = printed.splitlines()  # the last names all files
    assert max(map(len, rows)) <= 100 + len(str(out_dir))
    config = tomllib.loads((out_dir / "config.toml").read_text())
    assert (config["task"], config["mesh"], config["num_words"]) == ("lm", "dp2pp2tp2", 11)
    assert [
        json.loads(line)["step"] for line in (out_dir / "metrics.jsonl").read_text().splitlines()
    ]


# How a run is asked for on 8 devices; what the table before it says of them, and the mesh that it keeps.
ON_DEVICES = {
    "nothing": (
        [], "8 x cpu (cpu)",
        "data=8 x stage=1 x tensor=1 (data parallelism on all devices; change it with --mesh)", "dp8",
    ),
    "rows for some": (
        ["--batch-size", "6"], "6 x cpu (cpu), the first of 8",
        "data=6 x stage=1 x tensor=1 (6 rows do not divide by more devices; change it with --mesh)", "dp6",
    ),
    "rows for one": (
        ["--batch-size", "11"], "1 x cpu (cpu), the first of 8",
        "data=1 x stage=1 x tensor=1 (11 rows do not divide by more devices; change it with --mesh)", "dp1",
    ),
    "microbatches": (
        ["--pipeline.num-microbatches", "2"], "4 x cpu (cpu), the first of 8",
        "data=4 x stage=1 x tensor=1 (8 rows do not divide by more devices; change it with --mesh)", "dp4",
    ),
    "one device": (["--mesh", "dp1"], "1 x cpu (cpu), the first of 8", "data=1 x stage=1 x tensor=1", "dp1"),
    "stages": (["--mesh", "pp2"], "2 x cpu (cpu), the first of 8", "data=1 x stage=2 x tensor=1", "pp2"),
    "all": (["--mesh", "dp8"], "8 x cpu (cpu)", "data=8 x stage=1 x tensor=1", "dp8"),
    "numbers": (
        ["--devices", "3", "1"], "2 x cpu (cpu)",
        "data=2 x stage=1 x tensor=1 (data parallelism on all devices; change it with --mesh)", None,
    ),
}  # fmt: skip


@pytest.mark.more
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.more)
        if name in ("rows for one", "microbatches", "one device")
        else name
        for name in ON_DEVICES
    ],
)
def test_the_table_says_which_devices_a_run_takes_and_why(name, text, tmp_path, capsys):
    asked, devices, mesh, kept = ON_DEVICES[name]
    out_dir = tmp_path / "run"
    arguments = flags(text, "--simulate", "8", *asked, "--train.num-steps", "2")
    assert api.command(*arguments, "--train.out-dir", str(out_dir)) == 0
    rows = dict(re.findall(r"^(\w+)  +((?:.|\n  )+)", capsys.readouterr().out, re.M))
    assert [" ".join(rows[name].split()) for name in ("devices", "mesh")] == [devices, mesh]
    config = tomllib.loads((out_dir / "config.toml").read_text())
    assert config["mesh"] == kept or (config["mesh"]["data"], config["mesh"]["devices"]) == (
        2,
        [3, 1],
    )


@pytest.mark.full
def test_a_run_without_a_mesh_goes_on_with_the_one_that_it_found(text, tmp_path):
    """As if that had been asked for: on fewer devices it is refused, and takes another one if told so."""
    run = ["--train.out-dir", str(tmp_path / "run")]
    assert api.command(*flags(text, *run)) == 0

    def resume(*more):
        command = [
            sys.executable,
            "-m",
            "jaxpar",
            "train",
            "--resume",
            "--simulate",
            "4",
            *run,
            *more,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=END_SECONDS)

    refused = resume("--train.num-steps", "6")
    assert refused.returncode == 2
    assert "mesh dp8 needs 8 devices, got 4\nFix: use sizes" in refused.stderr
    done = resume("--train.num-steps", "6", "--mesh", "dp-1")
    assert done.returncode == 0, done.stderr
    assert (
        "mesh        data=4 x stage=1 x tensor=1 (data parallelism on all devices;" in done.stdout
    )
    assert "resumed at step 4" in done.stdout


@pytest.mark.full
def test_evaluate_and_sample_need_the_folder_alone(run, capsys):
    out_dir, printed = run
    assert api.command("evaluate", str(out_dir)) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows if row.strip()][-2:] == ["valid", "test"]
    assert rows[-1] in printed.splitlines()
    assert api.command("sample", str(out_dir), "--prompt", "the cat", "--length", "5") == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    api.command("sample", str(out_dir), "--prompt", "the cat", "--length", "5")
    assert capsys.readouterr().out == first


@pytest.mark.full
def test_weights_go_out_and_come_in(run, text, tmp_path, capsys):
    out_dir, _ = run
    file, new = str(tmp_path / "model.safetensors"), str(tmp_path / "new")
    more = ["--devices", "0", "--num-layers", "2", "--hidden-size", "8", "--embed-size", "8"]
    more += ["--corpus", str(text), "--batch-size", "8", "--seq-len", "4", "--overwrite"]
    more += ["--optimizer.warmup-steps", "0", "--train.num-steps", "1", "--train.out-dir", new]
    told = []
    for torch in ((), ("--torch",)):
        assert api.command("export", str(out_dir), "-o", file, *torch) == 0
        [line] = capsys.readouterr().out.splitlines()
        assert line == f"wrote {file}: the weights of {out_dir} after step 4"
        assert api.command("train", "lm", "--start", file, *more) == 0
        printed = capsys.readouterr().out
        assert f"begins with the weights of {file}\n" in printed
        assert re.search(r"^taken +layers\.0-1\.w_h +8x4x8 *$", printed, re.MULTILINE)
        told.append(re.search(r"step 1/1  loss +\S+", printed)[0])
    assert api.command("train", "lm", "--start", str(out_dir), *more) == 0
    assert re.search(r"step 1/1  loss +\S+", capsys.readouterr().out)[0] == told[0] == told[1]


@pytest.mark.full
def test_resume_takes_the_settings_of_the_run(run, capsys):
    out_dir, _ = run
    assert (
        api.command("train", "--resume", "--train.out-dir", str(out_dir), "--train.num-steps", "6")
        == 0
    )
    printed = capsys.readouterr().out
    assert "mesh        data=2 x stage=2 x tensor=2" in printed
    assert "resumed at step 4" in printed
    assert "step 6/6" in printed


@pytest.mark.full
def test_a_run_that_has_taken_its_steps_says_so_and_how_it_goes_on(run, tmp_path, capsys):
    """And other sizes of batches, of which no step is taken, are no change of the data for who comes next."""
    out_dir = shutil.copytree(run[0], tmp_path / "run")
    resume = ["train", "--resume", "--train.out-dir", str(out_dir)]
    for options in ("--seq-len", "8"), ():
        assert api.command(*resume, *options) == 0
        printed = capsys.readouterr().out
        found = re.search(
            rf"the run in {out_dir} already finished its \d steps, so it is only evaluated; to train longer, "
            rf"resume it with (--train\.num-steps) (\d+)\n",
            printed,
        )
        assert found, printed
        assert "compiled" not in printed
    assert api.command(*resume, *found.groups()) == 0
    assert f"step {found[2]}/{found[2]}" in capsys.readouterr().out


@pytest.mark.full
def test_files_for_others_may_be_read_as_the_umask_says(run, tmp_path):
    before = os.umask(0o026)
    try:
        for argv in (
            ["export", str(run[0]), "-o", str(tmp_path / "model.safetensors")],
            ["predict", str(run[0]), "test", "--out", str(tmp_path / "scores")],
            ["plot", "schedule", "lm", "--mesh", "pp4", "-o", str(tmp_path / "a.svg")],
        ):
            assert api.command(*argv) == 0
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


@pytest.mark.full
@pytest.mark.usefixtures("compile_once")
def test_one_command_begins_a_run_and_goes_on_with_it(text, tmp_path, capsys):
    out_dir = tmp_path / "run"
    command = flags(text, "--resume-or-begin")
    folder = ["--train.out-dir", str(out_dir)]
    assert api.command(*command, "--mesh", "dp2", "--devices", "0", "1", *folder) == 0
    assert "resumed" not in capsys.readouterr().out
    # On another mesh, as after a requeue on other nodes; settings are those of the run, then the command's.
    assert (
        api.command(*command, "--mesh", "dp1", "--devices", "0", "--train.num-steps", "6", *folder)
        == 0
    )
    printed = capsys.readouterr().out
    assert "mesh        data=2 x" not in printed
    assert "resumed at step 4" in printed
    assert "6" in steps_of(out_dir)
    for more, message in (
        ([], r"--resume-or-begin needs a folder\nFix: add --train\.out-dir"),
        ([*folder, "--overwrite"], "--resume-or-begin and --overwrite exclude each other"),
    ):
        assert api.command(*command, *more) == 2
        assert re.search(message, capsys.readouterr().err)
    assert "6" in steps_of(out_dir)


@pytest.mark.full
def test_inspect_prints_a_table_or_json(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["inspect", *flags(text)[1:], "--simulate", "8"]
    assert api.command(*settings, "--mesh", "dp2pp2tp2", "--pipeline.num-chunks", "4") == 0
    printed = capsys.readouterr().out
    for pattern in (
        r"collective +axes +payload +bytes +runs +in loops +sent +pass +module",
        r"permute +stage +f32 1x4x4 +64 B +9 +9 +576 B +forward +exchange",
        r"all-gather +tensor +f32 4x8 +128 B +4 +4 if +256 B +forward ",
        r"data +2 +2 ",
        r"FLOPs per device +[\d,]+ \(each loop body counted once\)",
        r"memory per device +[\d.]+ kB: parameters ",
    ):
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"
    assert max(map(len, printed.splitlines())) <= 100
    assert api.command(*settings, "--mesh", "dp8", "--vocab-size", "96", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {tuple(c["axes"]) for c in report["collectives"]} == {("data",)}
    assert report["memory"]["arguments"] > 0
    assert not list(tmp_path.iterdir())


HELP = {
    (): ["train TASK", "evaluate", "TASK is lm (a language model)", "COMMAND --help"],
    ("train",): ["train TASK [-h]", "--mesh SHAPE", "--train.num-steps INT", "TASK is lm", "train lm --help"],
    ("train", "lm"): [
        "train lm [-h]", "--hidden-size INT Hidden size of each layer. (default: 192)", "--mesh SHAPE",
        "--optimizer.learning-rate FLOAT", "--pipeline.num-chunks INT", "--fsdp", "--devices",
    ],
    ("train", "--resume"): ["train TASK"],
    ("plan", "lm"): ["--machine {None}|STR", "--memory", "--hidden-size INT"],
    ("inspect", "lm"): ["--compare", "--machine {None}|STR", "--mesh SHAPE"],
    ("plot",): ["plot KIND TASK", '"schedule"'],
    ("plot", "schedule", "lm"): ["plot schedule lm", "--meshes"],
    ("plot", "curves"): ["plot curves [-h]", "[RUN_DIR ...]"],
    ("evaluate",): ["RUN_DIR", "--mesh SHAPE", "--best"],
    ("sample",): ["--temperature FLOAT"],
    ("export",): ["--torch", "--dtype {None,bfloat16}", "-o FILE"],
    ("launch",): ["train lm --mesh dp2pp2tp2", "--devices-per-process INT"],
    ("doctor",): ["--debug"],
}  # fmt: skip


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_tells_the_options(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        api.command(*command, "--help")
    printed, said = capsys.readouterr()
    assert said == ""
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", printed).split())
    for expected in HELP[command]:
        assert expected in words, printed


@pytest.mark.parametrize("words", ["train lm --help", "--version"])
def test_a_reader_who_has_seen_enough_is_no_error(words):
    # The reader has gone before the first letter comes.
    line = f"({sys.executable} -m jaxpar {words}; echo code $? >&2) | sleep 0"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stderr == "code 0\n"


def test_options_that_mean_nothing_are_not_there(capsys):
    """A mesh is given in one way; `plan` looks for its own."""
    printed = ""
    for command in (["train", "lm"], ["plan", "lm"]):
        with pytest.raises(SystemExit, match="0"):
            api.command(*command, "--help")
        printed += capsys.readouterr().out
    assert "--mesh." not in printed
    train, plan = re.split("usage: ", printed)[1:]
    assert "--mesh" in train
    for option in ("--mesh", "--pipeline", "--fsdp", "--train."):
        assert option not in plan


def test_debug_raises_the_error(text):
    with pytest.raises(ValueError, match="needs 9 devices"):
        api.command(*flags(text, "--mesh", "dp9", "--debug"))


def test_ctrl_c_is_one_word_and_a_traceback_for_debugging(monkeypatch, capsys):
    def press():
        raise KeyboardInterrupt

    monkeypatch.setattr(jax, "local_devices", press)
    assert api.command("doctor") == 130
    assert capsys.readouterr().err == "stopped\n"
    with pytest.raises(KeyboardInterrupt):
        api.command("doctor", "--debug")


DIVERGES = [
    "--optimizer.learning-rate", "1e38", "--optimizer.name", "sgd", "--train.clip-norm", "0",
    "--optimizer.warmup-steps", "0",
]  # fmt: skip


@pytest.mark.full
def test_numbers_that_are_not_finite_have_an_exit_code_of_their_own(text, tmp_path, capsys):
    out_dir = tmp_path / "run"
    assert (
        api.command(*flags(text, *DIVERGES, "--devices", "0", "--train.out-dir", str(out_dir))) == 3
    )
    captured = capsys.readouterr()
    found = re.fullmatch(
        r"error: the \w+ of step (\d) is not finite \(.*\); the first .* is in the .*\. The state before "
        rf"this step is saved\nFix: continue with --resume --train\.out-dir {out_dir} and a lower learning "
        r"rate, .*\n",
        captured.err,
    )
    assert found, captured.err
    assert steps_of(out_dir) == [str(int(found[1]) - 1)]
    task, parallel, _ = api.settings("train", "--resume", "--train.out-dir", str(out_dir))
    state = api.restored(out_dir / "checkpoints", task, parallel)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    more = ["--train.nonfinite", "skip", "--train.max-skipped", "1"]
    assert api.command("train", "--resume", "--train.out-dir", str(out_dir), *more) == 3
    captured = capsys.readouterr()
    assert f"step {found[1]} is not finite" in captured.out
    assert re.search(r"from 0\): skipped, 1 of 1 allowed\n", captured.out)
    assert "a larger --train.max-skipped (now 1)" in captured.err


@pytest.mark.full
def test_ctrl_c_saves_and_resume_goes_on(text, tmp_path):
    out_dir = tmp_path / "run"
    command = [sys.executable, "-m", "jaxpar"]
    more = ["--simulate", "2", "--mesh", "dp2", "--train.out-dir", str(out_dir)]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    process = subprocess.Popen(
        [*command, *flags(text, *more, "--train.num-steps", "1000000", "--train.log-every", "1")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | cache,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + END_SECONDS
        metrics = out_dir / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=END_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, err
    assert "Traceback" not in err
    stopped = re.search(r"stopped by SIGINT after step (\d+)/1000000; its state is saved", out)
    assert stopped, out
    step = int(stopped[1])
    assert steps_of(out_dir) == [str(step)]

    # The command that was told goes on, on as many simulated devices.
    hint = re.search(r"continue with python -m jaxpar (train --resume --train\.out-dir \S+)", out)
    assert hint, out
    resumed = subprocess.run(
        [*command, *hint[1].split(), "--train.num-steps", str(step + 2)],
        capture_output=True, text=True, timeout=END_SECONDS, env=os.environ | cache,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert "devices     2 x cpu" in resumed.stdout
    assert f"resumed at step {step}" in resumed.stdout
    assert f"step {step + 2}/{step + 2}" in resumed.stdout


@pytest.mark.full
def test_devices_that_jax_cannot_start_are_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "train", "lm", "--train.out-dir", str(tmp_path / "run")],
        env={**os.environ, "JAX_PLATFORMS": "abacus"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.match(
        r"error: JAX finds no devices: .*'abacus'.*\nFix: see python -m jaxpar doctor", done.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the cache is on from JAX 0.11")
def test_the_second_start_finds_its_programs_compiled(text, tmp_path):
    # All programs, for which ones take longer than JAX's limit depends on the clock.
    cache = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(number, *options):
        """The number of programs in the cache after a run."""
        done = subprocess.run(
            [
                sys.executable, "-m", "jaxpar", *flags(text, "--simulate", "2", "--mesh", "dp2"),
                "--train.out-dir", str(tmp_path / f"run{number}"), *options,
            ],
            env={**os.environ, **cache},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return len(list((tmp_path / "cache").rglob("*-cache")))

    assert start(0, "--no-compile-cache") == 0
    written = start(1)
    assert written >= 2  # of training and of evaluation
    assert start(2) == written


@pytest.mark.full
def test_plan_prints_the_command_of_its_choice(capsys):
    given = [
        "lm", "--vocab-size", "768", "--num-layers", "2", "--hidden-size", "96", "--embed-size", "96",
        "--forget-bias", "0.5", "--optimizer.learning-rate", "0.01",
    ]  # fmt: skip
    with api.plans_are_estimated():
        assert api.command("plan", *given, "--machine", "h100:1x1x4") == 0
    printed = capsys.readouterr().out
    command = printed.splitlines()[-1].removeprefix(
        "To train with the first layout: python -m jaxpar "
    )
    task, parallel, train = api.settings(*shlex.split(command))
    # The size of the vocabulary was a guess; the text tells it.
    optimizer = dataclasses.replace(LM.optimizer, learning_rate=0.01)
    assert task == LM(2, 96, 96, forget_bias=0.5, optimizer=optimizer)
    assert train == LM.train
    guessed = dataclasses.replace(task, vocab_size=768)
    ranking = plan(guessed, machine="h100:1x1x4", num_finalists=0, quiet=True)
    assert parallel == ranking.best.parallel


def test_letters_that_the_terminal_lacks_are_written_out(tmp_path, monkeypatch):
    said = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", said)
    assert api.command("evaluate", str(tmp_path / "l\u00e4ufe")) == 2
    said.flush()
    assert rb"l\xe4ufe holds no run" in said.buffer.getvalue()
