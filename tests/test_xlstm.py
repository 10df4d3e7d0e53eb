"""The example of xLSTM's blocks: what its authors' code computes, on every mesh, and text."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.drawn import FAR_APART, Draw, assert_drawn_by_definition, larger
from lib.laws import SGD, loss_and_grads, make_settings, more, plain, train_two_steps
from lib.references import FOLDER, RELATIVE_ERROR, assert_close

import jaxpar
from jaxpar import LayerContext, OptimizerConfig, TrainConfig, init_state
from jaxpar.analysis import inspect_step

XLSTM = api.task_class(f"{FOLDER}/xlstm.py:XLSTM")
MODEL = XLSTM(
    num_layers=8, hidden_size=16, embed_size=16, vocab_size=96, num_heads=2, dropout=0.3, batch_size=8,
    seq_len=8, optimizer=SGD,
)  # fmt: skip


# ---- the blocks ----


def theirs(arrays, what):
    """Arrays of the authors' stack, one block of each kind, as the example has them."""
    found = {}
    for name, number in (("mlstmblock", 0), ("slstmblock", 1)):
        own = {
            key.removeprefix(f"{what}/blocks.{number}."): arrays[key]
            for key in arrays
            if key.startswith(f"{what}/blocks.{number}.")
        }
        is_weight = what == "weights"  # their scales are of what is added to 1
        N, W = 2, len(own["xlstm_norm.weight"])
        conv = own["xlstm.conv1d.conv.weight"][:, 0].T
        of = {
            "conv/kernel": conv.reshape(4, N, -1),
            "conv/bias": own["xlstm.conv1d.conv.bias"].reshape(N, -1),
        }
        norm = own["xlstm_norm.weight"] + is_weight
        if number == 0:
            up, down = own["xlstm.proj_up.weight"], own["xlstm.proj_down.weight"]
            qkv = np.stack([own[f"xlstm.{x}_proj.weight"].swapaxes(1, 2) for x in "qkv"])
            gates = [own[f"xlstm.mlstm_cell.{x}gate.weight"] for x in "if"]
            of |= {
                "norm/scale": norm,
                "head_norm/scale": own["xlstm.mlstm_cell.outnorm.weight"].reshape(N, -1)
                + is_weight,
                "up": up.T.reshape(W, 2, N, -1),
                "w": qkv.reshape(3, N, -1, 4, 4),
                "w_g": np.stack(gates).transpose(2, 0, 1).reshape(3, N, -1, 2, N),
                "b_g": np.stack([own[f"xlstm.mlstm_cell.{x}gate.bias"] for x in "if"]),
                "skip": own["xlstm.learnable_skip"].reshape(N, -1),
                "down": down.T.reshape(N, -1, W),
            }
        else:
            # What they call f comes first, where the cell has i.
            w_x = np.stack([own[f"xlstm.{x}gate.weight"].swapaxes(1, 2) for x in "fizo"])
            w_h = own["xlstm.slstm_cell._recurrent_kernel_"].reshape(N, 4, W // N, W // N)
            of |= {
                "norms/0/scale": norm,
                "norms/1/scale": own["ffn_norm.weight"] + is_weight,
                "head_norm/scale": own["xlstm.group_norm.weight"].reshape(N, -1) + is_weight,
                "w_x": w_x,
                "w_h": w_h.transpose(0, 3, 1, 2),
                "b": own["xlstm.slstm_cell._bias_"].reshape(4, N, -1),
                "up": own["ffn.proj_up.weight"].T.reshape(W, 2, -1),
                "down": own["ffn.proj_down.weight"].T,
            }
        found |= {f"{name}/{key}": value for key, value in of.items()}
    scale = arrays[f"{what}/post_blocks_norm.weight"] + is_weight
    return found | {"stateless/module/scale": scale}


def named(state):
    """Arrays by their names."""
    leaves = jax.tree.leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): leaf
        for path, leaf in leaves
    }


@pytest.fixture(scope="module")
def blocks():
    """An mLSTM block, an sLSTM block and the norm after them, with the authors' weights; and their arrays."""
    with np.load(Path(__file__).with_name("torch_xlstm.npz")) as file:
        arrays = dict(file)
    weights = theirs(arrays, "weights")
    sizes = {"num_layers": 4, "hidden_size": 8, "embed_size": 8, "dropout": 0.0}
    stack = dataclasses.replace(MODEL, **sizes).make_model(nnx.Rngs(0)).layers
    layers = {stack.kinds[stack.kind_of[number]]: stack.layer(number) for number in (2, 3, 4)}
    own = named(nnx.state(layers, nnx.Param))
    assert {name: a.shape for name, a in own.items()} == {n: a.shape for n, a in weights.items()}
    params = nnx.state(layers, nnx.Param)
    leaves, structure = jax.tree.flatten_with_path(params)
    filled = [jnp.asarray(weights[name]) for name in named(params)]
    assert len(leaves) == len(filled)
    return nnx.graphdef(layers), jax.tree.unflatten(structure, filled), arrays


def initial(graphdef, params, rows):
    layers = nnx.merge(graphdef, params)
    return [
        layer.initial_carry(rows) if name != "stateless" else () for name, layer in layers.items()
    ]


@jax.jit(static_argnums=0)
def run(graphdef, params, carry, x_TBW, resets_TB=None):
    """The carry of each block, and the outputs of the last one."""
    batch = None if resets_TB is None else {"resets": resets_TB}
    after = []
    for number, layer in enumerate(nnx.merge(graphdef, params).values()):
        new, x_TBW = layer(carry[number], x_TBW, LayerContext(number, 0, 0, batch=batch))
        after.append(new)
    return after, x_TBW


@pytest.mark.full
def test_blocks_are_those_of_their_authors(blocks):
    """By `torch_xlstm.npz`, which `torch_xlstm.py` wrote with their code."""
    graphdef, params, arrays = blocks
    x, y, dy, dx = (jnp.asarray(arrays[name]).swapaxes(0, 1) for name in ("x", "y", "dy", "dx"))
    carry = initial(graphdef, params, x.shape[1])
    found, vjp = jax.vjp(lambda params, x: run(graphdef, params, carry, x)[1], params, x)
    d_params, d_x = vjp(dy)
    assert_close({"y": found, "dx": d_x}, {"y": y, "dx": dx})
    assert_close(named(d_params), theirs(arrays, "gradients"))


@pytest.mark.full
def test_windows_and_single_steps_are_the_whole(blocks):
    graphdef, params, arrays = blocks
    x = jnp.asarray(arrays["x"]).swapaxes(0, 1)
    begin = initial(graphdef, params, x.shape[1])
    whole = run(graphdef, params, begin, x)
    for cuts in ([2, 4], range(1, len(x))):
        carry, found = begin, []
        for part in jnp.split(x, jnp.asarray(cuts)):
            carry, y = run(graphdef, params, carry, part)
            found.append(y)
        assert_close(named((carry, jnp.concatenate(found))), named(whole))


@pytest.mark.full
def test_a_sequence_begins_with_nothing_of_the_one_before(blocks):
    graphdef, params, arrays = blocks
    x = jnp.asarray(arrays["x"]).swapaxes(0, 1)
    begin = initial(graphdef, params, 1)
    for row, starts in enumerate(([2, 5], [6])):
        own = x[:, row : row + 1]
        carry, _ = run(graphdef, params, begin, own[::-1])  # of a window before
        resets = np.zeros((len(x), 1), bool)
        resets[starts] = True
        found = run(graphdef, params, carry, own, resets)
        parts = []
        for part in np.split(own, starts):
            carry, y = run(graphdef, params, carry, part)
            parts.append(y)
            last, carry = carry, begin
        assert_close(named(found), named((last, jnp.concatenate(parts))))


# ---- on meshes ----

LAW = [
    more((1, 2, 1), (2, 2), MODEL, {}),
    ((2, 2, 2), (2, 4), MODEL, {"zero_bubble": True}),
    more((1, 1, 2), (1, 1), MODEL, {}),
    more((1, 4, 2), (2, 2), MODEL, {"schedule": "gpipe", "remat": True}),
    more((2, 2, 2), (2, 2), dataclasses.replace(MODEL, packed=True), {}),
    more((2, 2, 2), (2, 2), dataclasses.replace(MODEL, tie_embedding=True), {"schedule": "v"}),
    more((8, 1, 1), (1, 1), MODEL, {}),
]


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "units", "task", "options"), LAW)
def test_loss_gradients_and_carry_equal_plain(mesh, units, task, options):
    loss, *found = loss_and_grads(make_settings(mesh, units, task, **options))
    expected_loss, *expected = plain(task)
    assert abs(loss - expected_loss) <= RELATIVE_ERROR * expected_loss
    for own, wanted in zip(found, expected, strict=True):
        assert own.keys() == wanted.keys()
        for name, value in wanted.items():
            error, scale = np.linalg.norm(own[name] - value), np.linalg.norm(value)
            assert error <= FAR_APART * scale, f"{name}: error {error:.1e} of {scale:.1e}"


@pytest.mark.law
@pytest.mark.more
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 2, 1), (1, 1, 2)])
def test_parameters_agree_after_two_windows(mesh):
    expected_losses, expected = train_two_steps(make_settings(task=MODEL))
    losses, params = train_two_steps(make_settings(mesh, (2, 2), MODEL))
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(params, expected)
    began_as_zeros = [name for name in params if name.endswith(("w_h", "w_g"))]
    assert len(began_as_zeros) == MODEL.num_layers
    assert all(np.any(params[name]) for name in began_as_zeros)


@pytest.mark.more
@pytest.mark.parametrize("mesh", [(1, 1, 2), more((1, 2, 2))])
def test_no_time_step_waits_for_another_device(mesh):
    """The sLSTM's loop over time has the 7 steps of a chunk."""
    task = dataclasses.replace(MODEL, num_layers=4, seq_len=7 * mesh[1])
    report = inspect_step(*make_settings(mesh, (1, mesh[1]), task))
    over_tensor = report.along("tensor")
    assert over_tensor
    assert not [c for c in over_tensor if 7 in c.trip_counts]


# ---- text ----


@pytest.mark.more
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("pp2", {}), ("dp2pp2tp2", {}), ("pp4", {"packed": True}), ("dp1", {"tie_embedding": True})],
)
def test_tokens_are_those_of_the_whole_text_so_far(mesh, options, text):
    sizes = {"vocab_size": None, "num_layers": 4, "corpus": str(text)}
    task = dataclasses.replace(MODEL, **sizes, **options)
    state = larger(init_state(task, mesh, seed=1), 3)
    draw = Draw(seed=5, separator=4 if options.get("packed") else None)
    assert_drawn_by_definition(task, mesh, state, draw, (1, 4, 2))


@pytest.mark.full
def test_it_learns_and_writes_text(text, tmp_path):
    task = dataclasses.replace(
        MODEL,
        vocab_size=None,
        corpus=str(text),
        dropout=0.0,
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    train = TrainConfig(num_steps=60, out_dir=str(tmp_path / "run"))
    result = jaxpar.fit(task, "dp2pp2tp2", train, quiet=True)
    assert result.evaluations["test"].metrics["perplexity"] < 2.5  # unigrams: 9.5
    run = jaxpar.load_run(result.out_dir, "pp2")
    assert run.sample("a dog", length=4, temperature=0) == "a dog ran to the cat"


def test_heads_that_have_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match=r"hidden_size=24 does not divide by num_heads=8 x"):
        XLSTM(hidden_size=24, embed_size=24, num_heads=8)
