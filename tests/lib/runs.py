"""Runs in this process and in processes of their own."""

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax

from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Report,
    TrainConfig,
)
from jaxpar.lm import LM

NEVER = str(10**6)


class Run(NamedTuple):
    """What `fit` takes."""

    task: LM
    parallel: Parallel
    train: TrainConfig


def start_by_hand(arguments, num_processes=2, program=("-m", "jaxpar")):
    """Processes that know of each other by variables alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    group = {
        "JAX_COORDINATOR_ADDRESS": address, "JAXPAR_NUM_PROCESSES": str(num_processes),
        "JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, *program, *arguments], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
            env=os.environ | group | {"JAXPAR_PROCESS_ID": str(index)},
        )
        for index in range(num_processes)
    ]  # fmt: skip


def make_layout(mesh=(1, 1, 1), units=(1, 1)):
    num_devices = math.prod(mesh)
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    pipeline = PipelineConfig(num_microbatches=units[0], num_chunks=units[1])
    return Parallel(MeshConfig(*mesh, devices=devices), pipeline)


def make_train(out_dir, **train):
    return TrainConfig(**{"num_steps": 20, "log_every": 5, "out_dir": str(out_dir), **train})


def make_run(text, out_dir, mesh=(1, 1, 1), units=(1, 1), optimizer=None, **train):
    rate = {"learning_rate": 0.1, "warmup_steps": 2, **(optimizer or {})}
    task = LM(
        num_layers=2, hidden_size=8, embed_size=8, dropout=0.2, corpus=str(text), batch_size=8, seq_len=4,
        optimizer=OptimizerConfig(**rate),
    )  # fmt: skip
    if train.get("num_steps", 20) < 2:
        task = dataclasses.replace(
            task, optimizer=dataclasses.replace(task.optimizer, warmup_steps=0)
        )
    return Run(task, make_layout(mesh, units), make_train(out_dir, **train))


def flip_a_bit(checkpoint):
    """In the largest of a checkpoint's files, whose name is returned."""
    path = max(filter(Path.is_file, checkpoint.rglob("*")), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return str(path.relative_to(checkpoint))


def children_of(parent):
    """The processes of a run, not who watches over them."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True
    )
    rows = [row.split(maxsplit=2) for row in listed.stdout.splitlines()]
    return sorted(int(pid) for pid, its, name in rows if int(its) == parent and name != "sh")


def flags(text, out_dir, num_steps, *more):
    return [
        "train", "lm", "--corpus", str(text), "--batch-size", "12", "--seq-len", "8", "--num-layers", "2",
        "--hidden-size", "16", "--embed-size", "16", "--optimizer.lr-schedule", "constant",
        "--optimizer.warmup-steps", "2", "--train.log-every", "1", "--train.checkpoint-every", "5",
        "--train.num-steps", str(num_steps), "--train.out-dir", str(out_dir), *more,
    ]  # fmt: skip


def read_until(process, pattern):
    """The lines until one matches."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError("".join(lines))


def metrics_of(out_dir):
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def train_losses(out_dir):
    return [line["loss"] for line in metrics_of(out_dir) if line["split"] == "train"]


def whole_checkpoints(out_dir):
    """The steps of those that are written: one that is being written has another name."""
    folders = (out_dir / "checkpoints").iterdir()
    return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


def validation_losses(checkpoint):
    """Of all validations before a checkpoint, which its folder tells."""
    losses = json.loads((checkpoint / "checkpoint.json").read_text())["losses"]
    return {int(step): float(loss) for step, loss in losses.items()}


class Act(Report):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def progress(self, progress, num_steps):
        if progress.step == self.step:
            self.action()
