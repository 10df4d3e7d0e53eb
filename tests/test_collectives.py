"""The report of collectives, on programs whose collectives are known by construction, and on our steps."""

import dataclasses
import functools
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api
from lib.measured import Own

from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.analysis import (
    ProgramReport,
    find_collectives,
    inspect_compiled,
    inspect_function,
    inspect_step,
)
from jaxpar.lm import LM
from jaxpar.pipeline import make_schedule

pytestmark = pytest.mark.law

AXES = ("data", "stage", "tensor")


@functools.cache
def cube():
    return MeshConfig(2, 2, 2).build()


def compiled_local(local, mesh=None):
    """A function of one device's block, float32 [2, 8, 4] = 256 bytes, compiled for all of the 8."""
    mesh, whole = mesh or cube(), P(AXES)
    run = jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    x = jax.ShapeDtypeStruct((16, 8, 4), jnp.float32, sharding=NamedSharding(mesh, whole))
    return jax.jit(run).lower(x).compile()


def inspect_local(local, mesh=None):
    return inspect_compiled(compiled_local(local, mesh))


KINDS = {
    "sum over one axis": (
        lambda x: lax.psum(x, "data"), "all-reduce", ("data",), 2, 256, 256,
    ),
    "sum over two axes": (
        lambda x: lax.psum(x, ("data", "tensor")), "all-reduce", ("data", "tensor"), 4, 256, 384,
    ),
    "sum over all": (lambda x: lax.psum(x, AXES), "all-reduce", AXES, 8, 256, 448),
    "maximum": (lambda x: lax.pmax(x, "stage"), "all-reduce", ("stage",), 2, 256, 256),
    "gather": (
        lambda x: lax.all_gather(x, "stage", axis=1, tiled=True),
        "all-gather", ("stage",), 2, 512, 256,
    ),
    "gather over two axes": (
        lambda x: lax.all_gather(x, ("stage", "tensor"), tiled=True),
        "all-gather", ("stage", "tensor"), 4, 1024, 768,
    ),
    "scatter": (
        lambda x: lax.psum_scatter(x, ("data", "stage"), scatter_dimension=1, tiled=True),
        "reduce-scatter", ("data", "stage"), 4, 256, 192,
    ),
    "all to all": (
        lambda x: lax.all_to_all(x, "tensor", 1, 0, tiled=True),
        "all-to-all", ("tensor",), 2, 256, 128,
    ),
    "all to all of four": (
        lambda x: lax.all_to_all(x, ("data", "tensor"), 1, 0, tiled=True),
        "all-to-all", ("data", "tensor"), 4, 256, 192,
    ),
    "permute": (
        lambda x: lax.ppermute(x, "stage", [(0, 1)]), "collective-permute", ("stage",), 2, 256, 256,
    ),
    "permute round two axes": (
        lambda x: lax.ppermute(x, ("data", "tensor"), [(k, (k + 1) % 4) for k in range(4)]),
        "collective-permute", ("data", "tensor"), 2, 256, 256,
    ),
    "permute of integers": (
        lambda x: lax.ppermute(x[0].astype(jnp.int8), "data", [(0, 1)]),
        "collective-permute", ("data",), 2, 32, 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_axes_and_bytes(kind):
    local, op, axes, size, num_bytes, sent_bytes = KINDS[kind]
    [found] = inspect_local(local).collectives
    assert (found.op, found.axes, found.group_size) == (op, axes, size)
    assert (found.bytes, found.sent_bytes) == (num_bytes, sent_bytes)
    assert found.elements == num_bytes // (1 if found.dtypes[0] == "s8" else 4)
    assert found.elements == sum(map(math.prod, found.shapes))
    assert (found.count, found.in_loop, found.conditional) == (1, False, False)
    assert found.phase == "forward"
    assert found.source.startswith("test_collectives.py:")


def test_combined_collectives_are_one_with_several_arrays():
    def local(x):
        a, b = lax.psum((x, x[0] * 2), "data")
        return a + b[None]

    report = inspect_local(local)
    [found] = report.collectives
    assert found.shapes == ((2, 8, 4), (8, 4))
    assert found.dtypes == ("f32", "f32")
    assert (found.elements, found.bytes) == (96, 384)


def scan(length, body):
    return lambda x: lax.scan(lambda x, _: (body(x), None), x, None, length=length)[0]


def test_runs_are_multiplied_through_nested_loops():
    def local(x):
        x = lax.psum(x, "stage")
        x = scan(7, lambda x: jnp.sin(lax.psum(x, "data")))(x)
        inner = scan(5, lambda x: jnp.sin(lax.psum(x, "tensor")))
        return scan(3, lambda x: inner(jnp.sin(lax.psum(x, ("data", "tensor")))))(x)

    report = inspect_local(local)
    loops = {c.axes: c.trip_counts for c in report.collectives}
    assert loops == {
        ("stage",): (), ("data",): (7,), ("data", "tensor"): (3,), ("tensor",): (3, 5),
    }  # fmt: skip
    totals = {t.axes: (t.collectives, t.count, t.bytes, t.sent_bytes) for t in report.totals}
    assert totals == {
        ("stage",): (1, 1, 256, 256),
        ("data",): (1, 7, 7 * 256, 7 * 256),
        ("data", "tensor"): (1, 3, 3 * 256, 3 * 384),
        ("tensor",): (1, 15, 15 * 256, 15 * 256),
    }
    assert [t.axes for t in report.totals] == [
        ("tensor",),
        ("data",),
        ("data", "tensor"),
        ("stage",),
    ]


def test_a_length_that_is_data_is_not_guessed():
    def local(x):
        x = scan(2, lambda x: jnp.sin(lax.psum(x, "stage")))(x)
        return lax.while_loop(
            lambda x: jnp.sum(x) < 100,
            scan(3, lambda x: lax.psum(x, "data") + 1),
            x,
        )

    report = inspect_local(local)
    found = {c.axes: c for c in report.collectives}
    assert (found["stage",].trip_counts, found["stage",].count) == ((2,), 2)
    assert (found["data",].trip_counts, found["data",].count) == ((None, 3), None)
    assert found["data",].in_loop
    [total] = [t for t in report.totals if t.axes == ("data",)]
    assert (total.count, total.bytes, total.unknown) == (0, 0, 1)
    assert "0 + 1 x ?" in str(report)


def test_the_condition_of_a_loop_is_asked_once_more():
    def local(x):
        def goes_on(state):
            return (state[0] < 4) & (lax.psum(state[1][0, 0, 0], "data") < 9)

        return lax.while_loop(goes_on, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1]

    text = compiled_local(local).as_text()
    [found] = find_collectives(text, cube())
    assert (found.axes, found.trip_counts) == (("data",), (None,))
    [loop] = [line for line in text.splitlines() if " while(" in line]
    known = text.replace(loop, loop + ', backend_config={"known_trip_count":{"n":"4"}}')
    [found] = find_collectives(known, cube())
    assert found.trip_counts == (5,)


def test_branches_are_marked():
    def local(x):
        x = lax.psum(x, "stage")
        return lax.cond(
            x[0, 0, 0] > 0,
            scan(3, lambda x: jnp.sin(lax.psum(x, "data"))),
            lambda x: lax.psum(x, "tensor"),
            x,
        )

    found = {c.axes: (c.conditional, c.count) for c in inspect_local(local).collectives}
    assert found == {("stage",): (False, 1), ("data",): (True, 3), ("tensor",): (True, 1)}


def test_groups_of_one_move_nothing():
    mesh = jax.make_mesh((8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    assert inspect_local(lambda x: lax.psum(x, "tensor"), mesh).collectives == ()
    [found] = inspect_local(lambda x: lax.psum(x, ("data", "tensor")), mesh).collectives
    assert (found.axes, found.group_size) == (("data",), 8)


def test_axes_are_those_of_the_given_mesh_whatever_its_order():
    def spec(mesh):
        return jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh, P(AXES)))

    turned = Mesh(cube().devices.transpose(2, 1, 0), AXES, axis_types=(AxisType.Auto,) * 3)
    specs = {"in_specs": P(AXES), "out_specs": P(("stage", "tensor"))}
    run = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=turned, **specs)
    compiled = jax.jit(run).lower(spec(turned)).compile()
    assert [c.axes for c in inspect_compiled(compiled).collectives] == [("data",)]
    assert [c.axes for c in inspect_compiled(compiled, cube()).collectives] == [("tensor",)]
    half, other = (MeshConfig(4, devices=ids).build() for ids in ((0, 1, 2, 3), (0, 1, 2, 7)))
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(half, P("data")))
    with pytest.raises(ValueError, match=r"mesh has the devices .*=7.*was compiled for .*=3"):
        inspect_compiled(jax.jit(jnp.sum).lower(x).compile(), other)


def test_what_the_compiler_adds_to_a_plain_function_is_found_with_its_module():
    mesh = cube()

    def place(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def loss(w, x):
        with jax.named_scope("rows"):
            y = jnp.tanh(x @ w)
        return jnp.sum(y * y)

    args = place((64, 32), "tensor", None), place((128, 64), "data", "tensor")
    report = inspect_function(jax.jit(jax.value_and_grad(loss)), *args)
    of_rows = {(c.phase, c.axes): c for c in report.collectives if c.module == "rows"}
    # Row-parallel: results are added, [128/2, 32]; the gradient is summed over data, [64/2, 32].
    forward, backward = of_rows["forward", ("tensor",)], of_rows["backward", ("data",)]
    assert (forward.op, forward.shapes) == ("all-reduce", ((64, 32),))
    assert (backward.op, backward.shapes[0]) == ("all-reduce", (32, 32))
    assert forward.source.startswith("test_collectives.py:")
    # Two matmuls of 2 x 64 x 32 x 32 on each device, and a little.
    assert 2 <= report.flops / (2 * 64 * 32 * 32) < 2.2


def test_memory_is_that_of_one_device():
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=NamedSharding(cube(), P("data")))
    report = inspect_function(jax.jit(lambda x: x + 1), x)
    assert (report.memory.arguments, report.memory.outputs) == (512, 512)
    assert (report.memory.aliased, report.collectives) == (0, ())
    donated = inspect_function(jax.jit(lambda x: x + 1, donate_argnums=0), x).memory
    assert (donated.aliased, donated.total) == (512, 512 + donated.temporary)


def test_a_scope_within_itself_is_named_once():
    def run(x):
        with jax.named_scope("rows"), jax.named_scope("rows"):
            return lax.psum(x, "data")

    [collective] = inspect_local(run).collectives
    assert collective.module == "rows"


def test_flops_count_the_body_of_a_loop_once():
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    one = inspect_function(lambda w: w @ w, w).flops
    assert one == 2 * 64**3
    for length in (2, 9):
        looped = inspect_function(scan(length, lambda w: w @ w), w).flops
        assert one <= looped < 1.01 * one


def test_a_report_is_data_and_text():
    report = inspect_local(scan(3, lambda x: jnp.sin(lax.psum(x, ("data", "tensor")))))
    data = json.loads(json.dumps(report.to_dict()))
    [collective] = data["collectives"]
    assert (collective["op"], collective["axes"]) == ("all-reduce", ["data", "tensor"])
    assert (collective["count"], collective["in_loop"], collective["bytes"]) == (3, True, 256)
    assert (data["totals"][0]["sent_bytes"], data["memory"]["arguments"]) == (3 * 384, 256)
    assert data["flops"] == report.flops
    assert collective["waits"]
    text = str(report)
    assert "all-reduce  data tensor  f32 2x8x4  256 B     3  3" in text
    assert max(map(len, text.splitlines())) <= 100


# As XLA prints for devices that send while they compute; its own parser has read it.
ASYNC = """\
HloModule fixture, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,4], n: s32[2]) -> f32[8,4] {
  %x = f32[8,4]{1,0:T(8,128)} parameter(0)
  %gather = (f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
  %gathered = f32[16,4]{1,0} all-gather-done(%gather)
  %n = s32[2]{0} parameter(1)
  %reduce = (f32[8,4]{1,0:T(8,128)}, s32[2]{0}) all-reduce-start(%x, %n), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=%add
  %reduced = (f32[8,4]{1,0}, s32[2]{0}) all-reduce-done(%reduce)
  %start = ((f32[8,4]{1,0}), f32[2,4]{1,0}, u32[]) reduce-scatter-start(%x), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
  %done = f32[2,4]{1,0} reduce-scatter-done(%start)
  %permute = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=4, source_target_pairs={{0,2},{1,3},{4,6},{5,7}}
  %permuted = f32[8,4]{1,0} collective-permute-done(%permute)
  %broadcast = f32[8,4]{1,0} collective-broadcast(%x), channel_id=5, replica_groups={{0,4},{1,5},{2,6},{3,7}}
  %ragged = f32[8,4]{1,0} ragged-all-to-all(%x, %x, %n, %n, %n, /*index=5*/%n), channel_id=6, replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %tok = token[] after-all()
  %send = (f32[8,4]{1,0}, u32[], token[]) send(%x, %tok), channel_id=7, frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}
  %sent = token[] send-done(%send), channel_id=7
  %alone = f32[8,4]{1,0} all-reduce(%x), channel_id=8, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, use_global_device_ids=true, to_apply=%add
  ROOT %all = f32[8,4]{1,0} all-reduce(%x), channel_id=9, replica_groups={}, to_apply=%add
}
"""  # noqa: E501


def test_collectives_that_have_a_start_and_a_done_count_once():
    found = find_collectives(ASYNC, cube())
    assert [(c.op, c.axes, c.shapes, c.bytes, c.sent_bytes) for c in found] == [
        ("all-gather", ("tensor",), ((16, 4),), 256, 128),
        ("all-reduce", ("data",), ((8, 4), (2,)), 136, 136),
        ("reduce-scatter", ("stage", "tensor"), ((8, 4),), 128, 96),
        ("collective-permute", ("stage",), ((8, 4),), 128, 128),
        ("collective-broadcast", ("data",), ((8, 4),), 128, 128),
        ("ragged-all-to-all", ("tensor",), ((8, 4),), 128, 64),
        ("collective-permute", ("tensor",), ((8, 4),), 128, 128),
        ("all-reduce", AXES, ((8, 4),), 128, 224),
    ]


# As JAX 0.12 compiles for GPUs: an all-reduce that starts has its operands in its shape too.
GPU = """\
HloModule fixture, is_scheduled=true, num_partitions=8

%multiply (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %squared = f32[8,4]{1,0} multiply(%p, %p)
}

%pick (q: s32[9]) -> s32[] {
  %q = s32[9]{0} parameter(0)
  %first = s32[1]{0} slice(%q), slice={[0:1]}
  ROOT %picked = s32[] bitcast(%first)
}

ENTRY %main (x: f32[8,4], t: s32[9]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %t = s32[9]{0} parameter(1)
  %reduce = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%x), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}
  %permute = ((f32[8,4]{1,0}), f32[8,4]{1,0}) collective-permute-start(%x), channel_id=2, source_target_pairs={{0,2},{1,3}}
  %own = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%multiply, metadata={op_name="jit(step)/jvp(lstm)/mul"}
  %tick = s32[] fusion(%t), kind=kLoop, calls=%pick, metadata={op_name="jit(step)/tick/slice"}
  %permuted = f32[8,4]{1,0} collective-permute-done(%permute)
  %product = f32[8,4]{1,0} custom-call(%own, %permuted), custom_call_target="__cublas$gemm"
  %reduced = f32[8,4]{1,0} all-reduce-done(%reduce)
  %pair = ((f32[8,4]{1,0}, f32[8,4]{1,0}), (f32[16,4]{1,0}, f32[16,4]{1,0})) all-gather-start(%x, %own), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
  %gathered = (f32[16,4]{1,0}, f32[16,4]{1,0}) all-gather-done(%pair)
  ROOT %last = f32[8,4]{1,0} collective-permute(%reduced), channel_id=1, source_target_pairs={{0,4}}
}
"""  # noqa: E501


def test_programs_for_gpus_count_results_and_say_what_computes_beside_a_transfer():
    found = find_collectives(GPU, cube())
    assert [(c.op, c.axes, c.bytes, c.beside, c.waits) for c in found] == [
        ("all-reduce", ("tensor",), 128, ("lstm", "custom-call"), False),
        ("collective-permute", ("stage",), 128, ("lstm",), False),
        ("all-gather", ("tensor",), 512, (), True),
        ("collective-permute", ("data",), 128, None, True),
    ]


# From the training step of an LSTM for eight TPU v5e, shortened. A gather is fused with the matmuls beside
# it: `chain_id` joins its start, its turns and its end. An all-reduce that is sliced is a reduce-scatter.
TPU = """\
HloModule fixture, is_scheduled=true, num_partitions=8

%fused_computation.1 (param_0: bf16[16,512]) -> (bf16[16,512], bf16[16,1024], u32[]) {
  %param_0 = bf16[16,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.64 = bf16[16,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=15, replica_groups=[4,2]<=[8], dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, metadata={op_name="jit(step)/transpose(jvp(lstm))/optimization_barrier"}
  ROOT %custom-call.20 = (bf16[16,512]{1,0:T(8,128)(2,1)S(1)}, bf16[16,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%all-gather.64), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion (param_1: bf16[16,512], param_2: bf16[16,1024], param_3: u32[], param_4: f32[1024,256]) -> (f32[16,256], bf16[16,512], bf16[16,1024], u32[]) {
  %param_1 = bf16[16,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_2 = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %param_3 = u32[]{:S(2)} parameter(2)
  %param_4 = f32[1024,256]{1,0:T(8,128)} parameter(3)
  %convolution.40 = f32[16,256]{1,0:T(8,128)} convolution(%param_2, %param_4), dim_labels=bf_io->bf
  %all-gather.66 = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_1), channel_id=15, replica_groups=[4,2]<=[8], dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}
  ROOT %tuple.582 = (f32[16,256]{1,0:T(8,128)}, bf16[16,512]{1,0:T(8,128)(2,1)S(1)}, bf16[16,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) tuple(%convolution.40, %param_1, %all-gather.66, %param_3)
}

%fused_computation.2 (param_5: bf16[16,512], param_6: bf16[16,1024], param_7: u32[]) -> bf16[16,1024] {
  %param_5 = bf16[16,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_6 = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.70 = bf16[16,1024]{1,0:T(8,128)(2,1)} all-gather(%param_5), channel_id=15, replica_groups=[4,2]<=[8], dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}
  %param_7 = u32[]{:S(2)} parameter(2)
  ROOT %custom-call.22 = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%param_5, %param_6, %all-gather.70, %param_7), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2 (input.2: f32[16,1024]) -> f32[16,512] {
  %input.2 = f32[16,1024]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.21 = f32[16,1024]{1,0:T(8,128)} all-reduce(%input.2), channel_id=13, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%add.3
  %constant.6217 = u32[] constant(0)
  ROOT %dynamic-slice.5286 = f32[16,512]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.21, %constant.6217, %constant.6217), dynamic_slice_sizes={16,512}
}

%async_computation (y: f32[16,1024]) -> f32[16,1024] {
  %y = f32[16,1024]{1,0:T(8,128)} parameter(0)
  ROOT %all-reduce.3 = f32[16,1024]{1,0:T(8,128)} all-reduce(%y), channel_id=1, replica_groups=mesh['data'=2,'stage'=2,'tensor'=2] {'data'}, use_global_device_ids=true, to_apply=%add.3
}

ENTRY %main (x: bf16[16,512], w: f32[1024,256], z: f32[16,1024]) -> f32[16,512] {
  %x = bf16[16,512]{1,0:T(8,128)(2,1)} parameter(0)
  %w = f32[1024,256]{1,0:T(8,128)} parameter(1)
  %z = f32[16,1024]{1,0:T(8,128)} parameter(2)
  %async-collective-start = (bf16[16,512]{1,0:T(8,128)(2,1)S(1)}, bf16[16,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%x), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.1
  %get-tuple-element.1 = bf16[16,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%async-collective-start), index=0
  %get-tuple-element.2 = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%async-collective-start), index=1
  %get-tuple-element.3 = u32[]{:S(2)} get-tuple-element(%async-collective-start), index=2
  %fusion.189 = (f32[16,256]{1,0:T(8,128)}, bf16[16,512]{1,0:T(8,128)(2,1)S(1)}, bf16[16,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%get-tuple-element.1, %get-tuple-element.2, %get-tuple-element.3, %w), kind=kOutput, calls=%async_collective_fusion, metadata={op_name="jit(step)/jvp(head)/dot_general"}
  %get-tuple-element.4 = bf16[16,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%fusion.189), index=1
  %get-tuple-element.5 = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%fusion.189), index=2
  %get-tuple-element.6 = u32[]{:S(2)} get-tuple-element(%fusion.189), index=3
  %room = f32[16,1024]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %async-collective-done = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%get-tuple-element.4, %get-tuple-element.5, %get-tuple-element.6), kind=kCustom, calls=%fused_computation.2
  %async-start = ((f32[16,1024]{1,0:T(8,128)}), f32[16,1024]{1,0:T(8,128)}, u32[]{:S(2)}) async-start(%z), calls=%async_computation
  %big = f32[16,1024]{1,0:T(8,128)} copy(%z)
  %async-done = f32[16,1024]{1,0:T(8,128)} async-done(%async-start)
  ROOT %fusion.2 = f32[16,512]{1,0:T(8,128)S(1)} fusion(%async-done), kind=kCustom, calls=%all-reduce-scatter.2, metadata={op_name="jit(step)/transpose(jvp(head))/dot_general"}
}
"""  # noqa: E501


def test_programs_for_tpus_count_a_fused_chain_once_and_know_a_sliced_all_reduce():
    found = find_collectives(TPU, cube())
    assert [(c.op, c.axes, c.dtypes, c.shapes, c.sent_bytes, c.beside) for c in found] == [
        ("all-gather", ("tensor",), ("bf16",), ((16, 1024),), 2 * 16 * 512, ("head",)),
        ("all-reduce", ("data",), ("f32",), ((16, 1024),), 4 * 16 * 1024, ("copy",)),
        ("reduce-scatter", ("tensor",), ("f32",), ((16, 1024),), 4 * 16 * 512, None),
    ]
    assert [c.module for c in found] == ["lstm", "", "head"]


def test_the_table_says_what_is_beside_transfers_where_there_are_asynchronous_ones():
    lines = str(ProgramReport(find_collectives(TPU, cube()), None, None)).splitlines()
    assert [line.split()[-1] for line in lines[2:5]] == ["copy", "waits", "head"]
    assert lines[0].split()[-1] == "overlaps"
    assert "overlaps" not in str(inspect_local(lambda x: lax.psum(x, "data")))


# As XLA writes loops for TPUs, without `known_trip_count`.
LOOP = """\
HloModule fixture, num_partitions=8

%add (n: s32[]) -> s32[] {{
  %n = s32[] parameter(0)
  %step = s32[] constant({step})
  ROOT %sum = s32[] add(%n, %step)
}}

%wide.body (state: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %state = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %copied = s32[]{{:S(6)}} copy(%counter)
  %x = f32[4]{{0}} get-tuple-element(%state), index=1
  %limit = s32[] get-tuple-element(%state), index=2
  %next = s32[] fusion(%copied), kind=kLoop, calls=%add
  %y = f32[4]{{0}} all-reduce(%x), replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%sum
  ROOT %states = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %y, %limit)
}}

%compare (m: s32[], l: s32[]) -> pred[] {{
  %m = s32[] parameter(0)
  %l = s32[] parameter(1)
  %end = s32[] constant({end})
  ROOT %less = pred[] compare(%m, {compared}), direction={direction}
}}

%wide.condition (state.1: (s32[], f32[4], s32[])) -> pred[] {{
  %state.1 = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %counter.1 = s32[] get-tuple-element(%state.1), index=0
  %limit.1 = s32[] get-tuple-element(%state.1), index=2
  ROOT %goes_on = pred[] fusion(%counter.1, %limit.1), kind=kLoop, calls=%compare
}}

ENTRY %main (z: f32[4], k: s32[]) -> f32[4] {{
  %z = f32[4]{{0}} parameter(0)
  %k = s32[] parameter(1)
  %start = s32[] constant({start})
  %first = s32[] copy(%start)
  %states.1 = (s32[], f32[4]{{0}}, s32[]) tuple({first}, %z, %k)
  %loop = (s32[], f32[4]{{0}}, s32[]) while(%states.1), condition=%wide.condition, body=%wide.body
  ROOT %result = f32[4]{{0}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4),
        ({"start": 2}, 2),
        ({"start": 1, "end": 8, "step": 3}, 3),
        ({"direction": "LE"}, 5),
        ({"start": 4, "end": 0, "step": -1, "direction": "GT"}, 4),
        ({"start": 4, "end": 0, "step": -1, "direction": "GE"}, 5),
        ({"start": 9}, 0),
        ({"compared": "%l"}, None),  # up to a number that is in the loop's state
        ({"first": "%k"}, None),  # from a number that the program is given
        ({"step": -1}, None),
        ({"direction": "NE"}, None),
    ],
)
def test_the_length_of_a_loop_is_read_from_its_condition_and_body(changes, expected):
    words = {"start": 0, "end": 4, "step": 1, "direction": "LT"}
    text = LOOP.format(**{**words, "compared": "%end", "first": "%first", **changes})
    [found] = find_collectives(text, cube())
    assert found.trip_counts == (expected,)


def test_a_program_is_read_the_same_where_trip_counts_are_not_written_down():
    def local(x):
        inner = scan(5, lambda x: jnp.sin(lax.psum(x, "tensor")))
        x = scan(3, lambda x: inner(jnp.sin(lax.psum(x, "data"))))(x)
        return lax.fori_loop(2, 8, lambda i, x: jnp.cos(lax.psum(x, "stage")) * i, x)

    text = compiled_local(local).as_text()
    assert "known_trip_count" in text
    unknown = re.sub(r'"known_trip_count":\{[^}]*\},?', "", text)
    found = find_collectives(unknown, cube())
    assert found == find_collectives(text, cube())
    assert {c.trip_counts for c in found} == {(3,), (3, 5), (6,)}


class Ahead:
    """A program as if it were compiled for a machine that is not there."""

    def __init__(self, compiled, **stats):
        self.compiled, self.stats = compiled, stats

    def __getattr__(self, name):
        return getattr(self.compiled, name)

    def runtime_executable(self):
        return object()

    def memory_analysis(self):
        return types.SimpleNamespace(**self.stats)


def test_a_program_for_a_machine_that_is_not_there_is_read_in_the_order_of_the_mesh():
    compiled = compiled_local(lambda x: lax.psum(x, ("data", "tensor")))
    # As libtpu reports them: the program is not in the total, and what is on the chip counts as temporary.
    stats = {
        "argument_size_in_bytes": 500, "output_size_in_bytes": 450, "alias_size_in_bytes": 400,
        "temp_size_in_bytes": 1000, "generated_code_size_in_bytes": 30,
    }  # fmt: skip
    report = inspect_compiled(Ahead(compiled, **stats, total_allocation_bytes=900))
    assert report.collectives == inspect_compiled(compiled).collectives
    memory = report.memory
    assert (memory.total, memory.temporary, memory.code) == (930, 350, 30)
    assert str(memory) == (
        "930 B: arguments 500 B, new outputs 50 B, temporary 350 B, program code 30 B"
    )
    for unknown in ({}, {"total_allocation_bytes": 0}):
        memory = inspect_compiled(Ahead(compiled, **stats, **unknown), cube()).memory
        assert (memory.total, memory.temporary) == (1580, 1000)


def test_what_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match=r"text='func\.func.* is not an HLO module of one replica"):
        find_collectives("func.func @main()", cube())
    with pytest.raises(ValueError, match=r"mesh=.*'data': 2.*: the program runs on 8 devices"):
        find_collectives(ASYNC, MeshConfig(2, devices=(0, 1)).build())


# ---- the training step ----

# Every size is another, so that shapes tell arrays apart: T 6, b 16, H 32, V 96 (and 24, 48 of it).
TASK = LM(num_layers=3, hidden_size=32, embed_size=32, vocab_size=96, batch_size=16, seq_len=12)


@functools.cache
def step_report(mesh, units=(1, 2), **others):
    parallel = Parallel(
        MeshConfig(*mesh, devices=tuple(range(math.prod(mesh)))),
        PipelineConfig(num_microbatches=units[0], num_chunks=units[1]),
        **others,
    )
    return parallel, inspect_step(TASK, parallel)


@pytest.mark.full
def test_data_parallelism_sums_the_gradients_once_after_the_loops():
    parallel, report = step_report((2, 1, 1))
    params = jax.tree.leaves(api.abstract_state(TASK, parallel).params)
    num_bytes = sum(4 * math.prod(param.shape) for param in params)
    assert {c.op for c in report.collectives} == {"all-reduce"}
    assert not any(c.in_loop or c.conditional for c in report.collectives)
    assert {c.axes for c in report.collectives} == {("data",)}
    [gradients] = [c for c in report.collectives if c.phase == "backward"]
    scalars = gradients.bytes - num_bytes  # the loss may be in it
    assert 0 <= scalars <= 8
    assert gradients.module in ("gradients", "gradients, loss")
    assert sum(c.bytes for c in report.collectives) <= num_bytes + 8


MESHES = [(2, 1, 1), (8, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2)]


@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", MESHES[2:])
def test_tensor_split_parameters_are_never_gathered(mesh):
    parallel, report = step_report(mesh)
    for collective in report.along("tensor"):
        if collective.op in ("all-gather", "all-to-all", "collective-permute"):
            # Activations: of a step [b, H], or of a chunk of steps [t, b, H].
            b, t = parallel.microbatch_rows(16), 12 // parallel.num_chunks
            [shape] = collective.shapes
            assert shape in ((b, 32), (t, b, 32)), collective
    for param in jax.tree.leaves(api.abstract_state(TASK, parallel).params):
        assert math.prod(param.sharding.shard_shape(param.shape)) < math.prod(param.shape)


@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 1, 8), (2, 1, 2), (1, 2, 2)])
def test_an_lstm_step_gathers_h_once_and_reduces_dh_once(mesh):
    parallel, report = step_report(mesh)
    b, t = parallel.microbatch_rows(16), 12 // parallel.num_chunks
    layers = -(-TASK.num_layers // parallel.mesh.stage)
    depth = 2 if parallel.mesh.stage == 1 else 3  # ticks, layers, time steps
    in_time = [c for c in report.collectives if len(c.trip_counts) == depth]
    assert {c.trip_counts[-2:] for c in in_time} == {(layers, t)}
    found = [(c.phase, c.op, c.axes, c.shapes) for c in in_time]
    assert found == [
        ("forward", "all-gather", ("tensor",), ((b, 32),)),
        ("backward", "all-reduce", ("tensor",), ((b, 32),)),
    ]
    num_units = parallel.pipeline.num_microbatches * parallel.num_chunks
    assert {c.count for c in in_time} == {num_units * layers * t}


@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_no_loop_sends_anything_over_data(mesh):
    _, report = step_report(mesh)
    assert not [c for c in report.along("data") if c.in_loop]
    assert bool(report.along("data")) == (mesh[0] > 1)


def test_the_loop_over_ticks_counts_ticks_and_units():
    _, report = step_report((2, 2, 2), (2, 2))
    assert None not in {c.count for c in report.collectives}
    permutes = [c for c in report.collectives if c.op == "collective-permute"]
    num_units, num_ticks = 2 * 2, make_schedule("1f1b", 2, 2, 2).num_ticks
    assert [(c.phase, c.module) for c in permutes] == [
        ("forward", "forward/exchange"), ("backward", "backward/exchange"),
    ]  # fmt: skip
    assert {c.count for c in permutes} == {num_ticks}
    assert num_ticks > num_units
    of_head = {c.count for c in report.along("tensor") if c.module.startswith("head")}
    assert of_head == {num_units}


def test_the_memory_of_a_step_is_told_by_what_it_is_for():
    parallel, report = step_report((2, 2, 2), (2, 2))
    memory, state = report.memory, api.abstract_state(TASK, parallel)
    of_batch = memory.purposes["batch and schedule"]
    assert dict(memory.purposes) == {
        "parameters": api.device_bytes(state.params),
        "frozen parameters": 0,
        "optimizer state": api.device_bytes(state.opt_state),
        "recurrent state": api.device_bytes(state.carry),
        "batch and schedule": of_batch,
    }
    # Also its counters of steps, and what pads arguments.
    assert 0 < of_batch - api.device_bytes(api.abstract_batch(TASK, parallel)) < 4096
    assert sum(memory.purposes.values()) == memory.arguments
    assert sum(memory.parts.values()) == memory.total
    text = " ".join(str(report).split())
    assert f"memory per device {memory.total / 1000:.1f} kB: parameters" in text
    assert "frozen" not in text


@pytest.mark.full
def test_a_task_of_ones_own_is_inspected_on_its_own_layout():
    report = inspect_step(Own())  # 3 stages, 2 microbatches: 4 ticks
    assert {c.axes for c in report.collectives} == {("stage",)}
    permutes = [c for c in report.collectives if c.op == "collective-permute"]
    assert {c.count for c in permutes} == {make_schedule("1f1b", 3, 2).num_ticks}
    on_two = dataclasses.replace(Own.parallel, mesh=MeshConfig(2, 3, devices=tuple(range(6))))
    along_data = inspect_step(Own(), on_two).along("data")
    [gradients] = [c for c in along_data if c.module == "backward/gradients"]
    # Of the stage's dense layer, and not of what is frozen.
    assert sorted(gradients.shapes) == [(1, 4), (1, 4, 4)]
    assert not any(c.in_loop for c in along_data)
