"""What a step costs by arithmetic, against the compiler: bytes for each axis, memory from below."""

import dataclasses
import functools
import math
import random
import re

import jax
import pytest
from lib import api
from lib.planned import CPU, H100, sums_of, task_of

from jaxpar import MeshConfig, Parallel, PipelineConfig, TrainConfig
from jaxpar.analysis import inspect_step
from jaxpar.pipeline import make_schedule
from jaxpar.planning import estimate_step, find_machine

NAMES = ("lm", "gru", "transformer", "mixed", "hybrid")
# Of bytes that are sent over an axis: sums of the loss and of norms are left out.
BYTES_ERROR = 0.35

more = functools.partial(pytest.param, marks=pytest.mark.more)


def cost_of(parallel, task=None, machine=CPU):
    return estimate_step(task or task_of("lm"), parallel, machine=machine)


def with_memory(cost, memory_bytes):
    """The cost on a device with so much memory."""
    machine = dataclasses.replace(cost.machine, memory_bytes=memory_bytes)
    return dataclasses.replace(cost, machine=machine)


def random_settings(name, seed):
    """Any mesh of up to 8 devices, M, K, schedule, head, FSDP and update of a model."""
    rng, task = random.Random(seed), task_of(name)
    sizes = [(d, s) for d in (1, 2, 4) for s in (1, 2, 3, 4) if 1 < d * s <= 8]
    mesh = MeshConfig(*rng.choice(sizes))
    num_groups = 2 if mesh.stage == 2 and name != "transformer" and rng.random() < 0.3 else 1
    pipeline = PipelineConfig(
        schedule="interleaved" if num_groups > 1 else rng.choice(("1f1b", "gpipe")),
        num_microbatches=rng.choice((1, 2, 4)),
        num_chunks=1 if name == "transformer" else rng.choice((1, 2, 4)),
        num_groups=num_groups,
        head=rng.choice(("auto", "last")),
    )
    update = rng.choice(("replicated", "sharded", "host"))
    parallel = Parallel(mesh, pipeline, fsdp=rng.random() < 0.3, update=update)
    return task, parallel, TrainConfig(clip_norm=rng.choice((0.0, 1.0)))


# ---- against the compiler ----


def assert_near(estimated, compiled, axes):
    """Sums for each of some axes, however many collectives they are."""
    sums = [sums_of(parts, axes) for parts in (estimated, compiled)]
    for axis in axes:
        one, other = (sum(n for (_, own), n in each.items() if axis in own) for each in sums)
        assert one == pytest.approx(other, rel=BYTES_ERROR, abs=8000), (axis, *sums)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("lm", 0),
        *(more(name, seed) for name, seed in (("gru", 1), ("mixed", 2), ("transformer", 12))),
        *(more(name, seed) for name in NAMES[:4] for seed in (3,)),
    ],
)
def test_bytes_over_data_and_stage_and_memory_are_near_those_compiled(name, seed):
    settings = random_settings(name, seed)
    cost, report = estimate_step(*settings, CPU), inspect_step(*settings)
    assert_near(cost.sent, report.collectives, ("data", "stage"))
    assert with_memory(cost, report.memory.total).fits
    assert not with_memory(cost, 0.16 * report.memory.total).fits


@pytest.mark.parametrize(
    ("layer", "heads", "mesh"),
    [("lstm", 1, "tp2"), more("gru", 1, "dp2pp2tp2"), more("slstm", 4, "dp2pp2tp2")],
)
def test_bytes_over_tensor_of_a_recurrent_layer_are_near_those_of_the_compiled_step(
    layer, heads, mesh
):
    task = dataclasses.replace(task_of("lm"), layer=layer, num_heads=heads)
    parallel = Parallel(mesh, PipelineConfig(num_chunks=2 if "pp" in mesh else 1))
    sent = estimate_step(task, parallel, machine=CPU).sent
    assert_near(sent, inspect_step(task, parallel).collectives, ["tensor"])


def test_only_a_tpu_sums_bfloat16_as_it_is():
    task, found = dataclasses.replace(task_of("lm"), dtype="bfloat16"), []
    for machine in ("v5e:2x2", "h100:1x1x8", CPU):
        parallel = Parallel("pp2", PipelineConfig(head="sharded"))
        sent = estimate_step(task, parallel, machine=machine).sent
        sums = [each.bytes for each in sent if (each.op, each.axes) == ("all-reduce", ("stage",))]
        [permuted] = [each.bytes for each in sent if each.op == "collective-permute"]
        found.append([size / permuted for size in sums])
    assert found == [[1.0], [2.0], [2.0]]


def test_heads_spare_the_exchange_at_each_time_step():
    plain, heads = (cost_of("tp4", dataclasses.replace(task_of("lm"), num_heads=n)) for n in (1, 4))
    assert max(each.runs for each in plain.sent) >= 16 * 4 > max(each.runs for each in heads.sent)


def test_what_a_device_has_of_the_parameters_is_exact():
    parallel = Parallel("dp2pp2tp2", fsdp=True, update="sharded")
    state = api.abstract_state(task_of("lm"), parallel)
    found = api.estimated_param_bytes(task_of("lm"), parallel)
    assert found == api.device_bytes(state.params)


# ---- time ----


def test_a_step_on_one_device_takes_what_its_parts_take():
    machine = dataclasses.replace(CPU, memory_bytes_per_second=1e20, loop_seconds=0.0)
    cost = cost_of("dp1", machine=machine)
    layer, head = (128 + 128) * 4 * 128, 128 * 1920  # weights
    for name, weights in (("layers", 4 * layer), ("head", head)):
        flops = 3 * 2 * 16 * 32 * weights  # forward, and of inputs and weights backward
        expected = flops / machine.flops_per_second["float32"]
        assert cost.parts[name] == pytest.approx(expected)
    assert cost.parts["bubble"] == cost.parts["sending"] == cost.parts["ticks"] == 0
    assert cost.seconds == pytest.approx(sum(cost.parts.values()))


def test_stages_wait_as_the_table_of_ticks_says():
    """Of equal layers and no ends, with F, B and W of the same length."""
    machine = dataclasses.replace(CPU, memory_bytes_per_second=1e20, loop_seconds=0.0)
    task = dataclasses.replace(task_of("lm"), vocab_size=8, num_words=None)
    for M, K in ((2, 1), (2, 4)):
        parallel = Parallel("pp4", PipelineConfig(num_microbatches=M, num_chunks=K))
        parts = cost_of(parallel, task, machine).parts
        schedule = make_schedule("1f1b", 4, M, K, zero_bubble=True)
        busy = parts["layers"] + parts["head"]
        assert parts["bubble"] / (busy + parts["bubble"]) == pytest.approx(
            schedule.bubble, abs=0.02
        )


@pytest.mark.full
def test_a_machine_counts_by_its_numbers():
    slow = dataclasses.replace(
        H100, near=dataclasses.replace(H100.near, bytes_per_second=1e6, seconds=1e-2)
    )
    costs = [cost_of("dp8", machine=machine) for machine in (H100, slow)]
    assert costs[1].parts["sending"] > 100 * costs[0].parts["sending"]
    assert costs[1].parts["layers"] == costs[0].parts["layers"]
    narrow = dataclasses.replace(task_of("lm"), dtype="bfloat16", hidden_size=4096, embed_size=4096)
    wide = dataclasses.replace(narrow, dtype="float32")
    times = [cost_of("dp8", task, H100).parts["layers"] for task in (narrow, wide)]
    assert times[0] < times[1]
    host = cost_of(Parallel("dp8", update="host"), machine=H100)
    assert host.parts["update"] > costs[0].parts["update"]


def test_links_are_those_within_a_host_and_between_hosts():
    two_hosts = find_machine("h100:1x2x8")
    sizes = {"data": 2, "stage": 2, "tensor": 4}
    assert two_hosts.num_devices == 16
    assert two_hosts.link(("tensor",), sizes) == two_hosts.link(("stage",), sizes) == two_hosts.near
    assert two_hosts.link(("data",), sizes) == two_hosts.far
    pod = find_machine("v5e:16x16")
    assert pod.num_devices == 256
    assert pod.link(("data",), {"data": 256}) == pod.near


def test_unequal_shares_are_those_of_the_group_with_most():
    equal, uneven = (cost_of(Parallel("dp2", shares=shares)) for shares in ((2, 2), (3, 1)))
    assert uneven.parts["layers"] == pytest.approx(1.5 * equal.parts["layers"], rel=0.01)


@pytest.mark.more
@pytest.mark.parametrize(
    "change",
    [
        {"tie_embedding": True, "dtype": "bfloat16"}, {"packed": True},
        more({"num_buckets": 2, "bucket_multiple": 4}), more({"layer": "rglru"}), more({"layer": "gru"}),
        more({"layer": "slstm"}), more({"dropout": 0.0}), more({"layer": "gated_delta"}),
    ],
    ids=str,
)  # fmt: skip
def test_any_option_of_a_task_has_a_cost(change):
    task = dataclasses.replace(task_of("lm"), **change)
    for parallel in ("dp2", "pp2", "tp2"):
        cost = cost_of(parallel, task)
        assert min(cost.parts.values()) >= 0
        assert cost.seconds > 0


def test_remat_takes_time_and_gives_room():
    plain, again = (
        cost_of(Parallel("pp2", PipelineConfig(num_chunks=4, remat=remat)))
        for remat in (False, True)
    )
    assert again.parts["layers"] > 1.1 * plain.parts["layers"]
    assert again.estimated_bytes < plain.estimated_bytes


# ---- machines ----


def test_the_devices_that_are_there_are_a_machine():
    here = find_machine()
    assert (here.num_devices, here.platform, here.is_here) == (8, "cpu", True)
    assert here.name == f"8 x {jax.devices()[0].device_kind}"
    assert 1e8 < here.memory_bytes < 1e13
    assert find_machine(None, 5e9).memory_bytes == 5e9


@pytest.mark.parametrize(
    "name",
    [
        "gpu",
        "h100",
        "h100:8",
        "cpu:1x1x8",
        "v5e",
        "v5e:",
        "v5e:2x",
        "h100:1x1x8x2",
        "x100:1x2",
        "m.json",
    ],
)
def test_machines_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match=rf"machine '{name}': must be one of v5e"):
        find_machine(name)


@pytest.mark.parametrize(
    ("name", "pod"),
    [
        ("v5e:16x32", "v5e has 16x16"), ("v5e:2x2x128", "v5e has 16x16"), ("v6e:32x1", "v6e has 16x16"),
        ("v5p:32x2x2", "v5p has 16x20x28"), ("v5p:24x24x24", "v5p has 16x20x28"),
    ],
)  # fmt: skip
def test_a_slice_larger_than_a_pod_is_refused(name, pod):
    with pytest.raises(
        ValueError, match=f"machine '{name}': there is no such slice: .* {pod} chips"
    ):
        find_machine(name)


@pytest.mark.parametrize("name", ["v5e:16x16", "v6e:8x16", "v5p:12x24x24", "v5p:16x20x28"])
def test_slices_as_large_as_a_pod_can_be_described(name):
    sides = name.partition(":")[2].split("x")
    assert find_machine(name).num_devices == math.prod(map(int, sides))


@pytest.mark.parametrize("memory_bytes", [0, -1, float("inf"), float("nan")])
def test_no_machine_has_such_memory(memory_bytes):
    with pytest.raises(ValueError, match=f"memory_bytes={memory_bytes} is not positive and finite"):
        find_machine("h100:1x1x8", memory_bytes)


def test_what_does_not_fit_the_mesh_is_refused():
    with pytest.raises(ValueError, match="hidden_size=130 does not divide by tensor=4"):
        estimate_step(
            dataclasses.replace(task_of("lm"), hidden_size=130, embed_size=128), "tp4", machine=CPU
        )
    with pytest.raises(ValueError, match=r"batch_size=9|9 rows"):
        estimate_step(dataclasses.replace(task_of("lm"), batch_size=9), "dp2", machine=CPU)


@pytest.mark.full
def test_a_mesh_to_be_inferred_takes_all_devices_of_the_machine():
    cost = estimate_step(task_of("lm"), "dp-1tp2", machine="v5e:4x4")
    assert cost.parallel.mesh == MeshConfig(data=8, tensor=2)
    assert estimate_step(task_of("lm")).parallel.mesh == MeshConfig(data=8)


@pytest.mark.full
def test_a_stage_has_its_layers():
    """The busiest one has half of them, or a little more."""
    units = PipelineConfig(num_microbatches=2, num_chunks=2)
    one, two = (cost_of(Parallel(mesh, units), task_of("mixed")) for mesh in ("dp1", "pp2"))
    assert 0.5 <= two.parts["layers"] / one.parts["layers"] < 0.75


@pytest.mark.full
def test_the_command_prints_what_is_known_side_by_side(capsys):
    flags = "inspect lm --compare --num-layers 1 --hidden-size 16 --embed-size 16 --mesh dp2 --devices 0 1"
    assert api.command(*flags.split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("dp2\n")
    for row in (r"all-reduce", r"memory", r"step"):
        assert row in printed
    assert re.search(r"estimated step +layers [\d.]+ \w?s, output head", printed)
