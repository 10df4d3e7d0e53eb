"""FSDP without stages: each layer is gathered where it is used."""

import functools

import pytest
from lib.laws import on_devices

from jaxpar import Parallel, PipelineConfig
from jaxpar.analysis import inspect_step
from jaxpar.lm import LM
from jaxpar.planning import estimate_step


def fsdp(mesh, shares=None, **pipeline):
    return Parallel(on_devices(mesh), PipelineConfig(**pipeline), shares, fsdp=True)


WIDTH = 128
KERNEL = 4 * 4 * WIDTH * WIDTH  # bytes of one of the two of an LSTM


@functools.cache
def report_of(num_layers, parallel):
    return inspect_step(task_of(num_layers), parallel)


def task_of(num_layers):
    return LM(num_layers, WIDTH, WIDTH, vocab_size=64, batch_size=8, seq_len=4, dropout=0.0)


def test_a_layer_is_gathered_in_each_pass_and_its_gradient_scattered():
    parallel = fsdp((4, 1, 1))
    sent = [c for c in report_of(4, parallel).along("data") if c.bytes >= KERNEL / 2]
    assert {c.bytes for c in sent} == {KERNEL}
    found = sorted((c.op, c.phase, c.count) for c in sent)
    gathers = [("all-gather", phase, 4) for phase in ("backward", "forward")]
    assert found == sorted([*gathers, ("reduce-scatter", "backward", 4)] * 2)
    estimated = estimate_step(task_of(4), parallel).sent
    runs = {
        op: sum(s.runs for s in estimated if (s.op, s.bytes) == (op, KERNEL)) for op, *_ in found
    }
    assert runs == {"all-gather": 16, "reduce-scatter": 8}


def test_memory_grows_by_less_than_the_layers_that_are_added():
    few, more = (report_of(number, fsdp((4, 1, 1))).memory.temporary for number in (4, 8))
    # A quarter of the gradients, activations, and what the CPU compiler copies; whole it would be 2.5.
    assert 0.25 < (more - few) / (4 * 2 * KERNEL) < 0.6


@pytest.mark.more
@pytest.mark.parametrize("parallel", [fsdp((2, 2, 1), num_microbatches=2), fsdp((2, 1, 1), (3, 1))])
def test_stages_and_unequal_shares_gather_once_a_step(parallel):
    over_data = report_of(4, parallel).along("data")
    assert "all-gather" in {c.op for c in over_data}
    assert not [c for c in over_data if c.in_loop]
