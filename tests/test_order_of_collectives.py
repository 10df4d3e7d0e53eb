"""Collectives come in one order on all devices; else they would wait for each other forever."""

import dataclasses

import pytest
from lib import api
from lib.any_model import assert_same
from lib.exchanges import pairs_without_order
from lib.laws import full
from lib.models import WIDTH, Regress, Regression

from jaxpar import Parallel, PipelineConfig, Stack, nn
from jaxpar.lm import LM

TASK = LM(4, 8, 8, vocab_size=32, batch_size=16, seq_len=4)
# With stages, a head on all of them, W of its own, and tensor parallelism within all.
PIPELINE = PipelineConfig(num_microbatches=2, num_chunks=2, zero_bubble=True, head="sharded")
OTHERS = (
    {},
    {"zero_bubble": False},
    {"head": "last"},
    {"remat": True},
    {"schedule": "gpipe"},
    {"schedule": "v"},
    {"schedule": "interleaved", "num_groups": 2},
    {"unroll": True},
)

# As XLA prints one: a sum in one branch, and an exchange after it.
PROGRAM = """
%no_sum (x.1: f32[2]) -> f32[2] {{
  ROOT %x.1 = f32[2]{{0}} parameter(0)
}}

%with_sum (x.2: f32[2]) -> f32[2] {{
  %x.2 = f32[2]{{0}} parameter(0)
  ROOT %sum = f32[2]{{0}} all-reduce(%x.2), replica_groups={{{{0,1}}}}, to_apply=%add
}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

ENTRY %main (is_on: pred[], x: f32[2]) -> (f32[2], f32[2]) {{
  %is_on = pred[] parameter(0)
  %x = f32[2]{{0}} parameter(1)
  %branch = f32[2]{{0}} conditional(%is_on, %x, %x), branch_computations={{%no_sum, %with_sum}}
  %sent = f32[2]{{0}} collective-permute(%{sent}), source_target_pairs={{{{0,1}}}}
  ROOT %all = (f32[2]{{0}}, f32[2]{{0}}) tuple(%branch, %sent)
}}
"""


def text_of(program):
    return program.compile().as_text()


@pytest.mark.rows(2, "full")
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_collectives_of_a_step_keep_their_order(other):
    parallel = Parallel("dp2pp2tp2", dataclasses.replace(PIPELINE, **other), shares=(3, 1))
    assert pairs_without_order(text_of(api.lowered_step(TASK, parallel))) == []


@pytest.mark.parametrize("head", ["sharded", "last"])
def test_collectives_of_an_evaluation_keep_their_order(head):
    parallel = Parallel("dp2pp2tp2", dataclasses.replace(PIPELINE, head=head))
    assert pairs_without_order(text_of(api.lowered_evaluation(TASK, parallel))) == []


@pytest.mark.parametrize(("sent", "pairs"), [("branch", []), ("x", [("branch", "sent")])])
def test_a_collective_after_a_branch_has_to_wait_for_it(sent, pairs):
    assert pairs_without_order(PROGRAM.format(sent=sent)) == pairs


def both_ways(rngs):
    return nn.Bidirectional(nn.GRU(WIDTH, rngs=rngs), nn.GRU(WIDTH, rngs=rngs))


class BothWays(Regression):
    """Each of its layers has two loops that need nothing of each other."""

    def __init__(self, *, rngs):
        super().__init__((), rngs=rngs)
        self.layers = Stack([both_ways] * 2, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class ReadBothWays(Regress):
    def make_model(self, rngs):
        return BothWays(rngs=rngs)


@pytest.mark.full
@pytest.mark.law
@pytest.mark.parametrize("other", [{}, *map(full, ({"remat": True}, {"head": "last"}))], ids=str)
def test_loops_beside_each_other_in_a_layer_keep_their_order(other):
    parallel = Parallel("dp2pp2tp2", PipelineConfig(num_microbatches=2, **other))
    assert_same(ReadBothWays(), parallel)  # which looks at the order
