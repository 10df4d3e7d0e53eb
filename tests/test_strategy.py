"""The advice counts what compiled programs exchange."""

import functools

import pytest
from flax import nnx

from benchmarks.model_parallel.count import inspect_split
from jaxpar import nn
from jaxpar.analysis.strategy import strategy_for
from jaxpar.mesh import MeshConfig

DENSE = functools.partial(nn.Linear, 32, 16, dims=(None, None))
CONV = functools.partial(nn.Conv, 8, 16, (3, 3), dims=(None,) * 4)
LAYERS = {"dense": (DENSE, (64, 32)), "convolution": (CONV, (8, 6, 6, 8))}


def make_mesh(num_devices):
    sizes = {"data": 2, "tensor": num_devices // 2, "devices": tuple(range(num_devices))}
    return MeshConfig(**sizes).build()


@pytest.mark.law
@pytest.mark.parametrize(
    ("num_devices", "is_first"), [(2, False), (4, False), (8, False), (4, True)]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_bytes_are_those_of_the_compiled_layer(layer, num_devices, is_first):
    make, shape = LAYERS[layer]
    abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    advice = strategy_for(abstract, shape, num_devices, is_first=is_first)
    mesh = make_mesh(num_devices)
    for cost in advice.costs:
        report = inspect_split(abstract, shape, mesh, cost.split, is_first=is_first)
        sent = {
            phase: sum(part.sent_bytes for part in report.collectives if part.phase == phase)
            for phase in ("forward", "backward", "neither")
        }
        expected = {"forward": cost.forward_bytes, "backward": cost.backward_bytes, "neither": 0}
        assert sent == expected, cost.split
    assert advice.best == min(advice.costs, key=lambda cost: cost.total_bytes).split


@pytest.mark.law
@pytest.mark.parametrize(("num_devices", "factor"), [(2, 1), (4, 1.5)])
def test_the_compiled_programs_of_the_known_example(num_devices, factor):
    # A blog post's counts for 2 devices (Dettmers 2014, see benchmarks/model_parallel); a ring of n devices
    # sends 2 (n-1)/n and (n-1)/n of an array, so 4 devices send 1.5 times as much.
    layer = nnx.eval_shape(lambda: nnx.Linear(1000, 500, use_bias=False, rngs=nnx.Rngs(0)))
    exchanges = {
        "data": [("backward", "all-reduce", 1000 * 500, 500_000)],
        "row": [
            ("forward", "all-reduce", 128 * 500, 128 * 500),
            ("backward", "all-gather", 128 * 1000, 128 * 500),
        ],
        "column": [
            ("forward", "all-gather", 128 * 500, 128 * 250),
            ("backward", "all-reduce", 128 * 1000, 128 * 1000),
        ],
    }
    for split, expected in exchanges.items():
        report = inspect_split(layer, (128, 1000), make_mesh(num_devices), split)
        assert [(c.phase, c.op, c.elements, c.sent_bytes) for c in report.collectives] == [
            (phase, op, elements, sent * 4 * factor) for phase, op, elements, sent in expected
        ]


def dense(in_size, out_size):
    return nnx.eval_shape(lambda: nnx.Linear(in_size, out_size, rngs=nnx.Rngs(0)))


def test_the_known_example():
    # 128 rows, weights 1000 x 500, 2 devices: of everything a device sends half, twice if it is added.
    advice = strategy_for(dense(1000, 500), 128, 2)
    assert [cost.total_bytes / 4 for cost in advice.costs] == [
        1000 * 500 + 500,
        128 * 500 / 2 + 128 * 1000,
        128 * 500 + 128 * 1000 / 2,
    ]
    assert advice.best == "row"
    assert advice.flip_batch == 501


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_the_answer_flips_where_it_says(num_devices):
    flip = strategy_for(dense(64, 32), 8, num_devices).flip_batch
    below = (flip - 1) // num_devices * num_devices
    assert strategy_for(dense(64, 32), below, num_devices).best == "row"
    assert strategy_for(dense(64, 32), below + num_devices, num_devices).best == "data"
    assert strategy_for(dense(32, 64), 8, num_devices).best == "column"


def test_alexnet_splits_the_batch_of_convolutions_and_the_weights_of_dense_layers():
    # Krizhevsky et al. 2012: the third convolution and the first dense layer.
    conv = nnx.eval_shape(lambda: nnx.Conv(256, 384, (3, 3), rngs=nnx.Rngs(0)))
    advice = strategy_for(conv, (128, 13, 13, 256), 8)
    assert (advice.best, advice.flip_batch) == ("data", 12)
    advice = strategy_for(dense(9216, 4096), 128, 8)
    assert (advice.best, advice.flip_batch) == ("row", 4338)


def test_it_prints_the_numbers():
    assert str(strategy_for(dense(1000, 504), 128, 8)).splitlines() == [
        "Linear 1000x504, batch 128, 8 devices: row split",
        "  data        3,531,528 bytes/device  gradients added",
        "  column      1,121,792 bytes/device  outputs stacked, gradients of inputs added",
        "  row           899,584 bytes/device  outputs added, gradients of inputs stacked",
        "  below batch 503 split the weights, from there on the batch",
    ]


def test_a_split_that_sizes_do_not_allow_is_not_advised():
    advice = strategy_for(dense(1000, 500), 128, 16)
    assert [cost.obstacle for cost in advice.costs] == [
        "",
        "out=500 does not divide by 16",
        "in=1000 does not divide by 16",
    ]
    assert (advice.best, advice.flip_batch) == ("data", 1)
    assert str(advice).endswith("\n  split the batch, whatever its size")
    with pytest.raises(ValueError, match="no split: batch=3 does not divide by 2, out=5 does not"):
        strategy_for(dense(7, 5), 3, 2)


def test_what_is_no_layer_or_no_batch_of_it_is_refused():
    conv = nnx.eval_shape(lambda: nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match=r"batch=\(8, 2\) does not fit .*\n.*\(rows, ..., height, width, 2\)"
    ):
        strategy_for(conv, 8, 2)
    with pytest.raises(ValueError, match=r"batch=\(8, 3\) does not fit the kernel \(2, 4\)"):
        strategy_for(dense(2, 4), (8, 3), 2)
    with pytest.raises(ValueError, match="Dropout has no kernel"):
        strategy_for(nnx.Dropout(0.5), 8, 2)
    with pytest.raises(ValueError, match="num_devices=1 is too small"):
        strategy_for(dense(2, 4), 8, 1)
