"""An optimizer trains stacked layers as it would train each layer's own arrays, or it is refused."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib.laws import on_devices, slow
from optax import contrib

from jaxpar import Parallel, SeriesBatches, Stack, Sums, Task, TrainConfig, fit, nn, value_and_grad
from jaxpar.step.functions import init_state, make_train_step
from jaxpar.step.setup import Setup
from jaxpar.step.stacking import TRIALS, check_stacking, difference, draws
from jaxpar.step.state import abstract_state


class Second(nn.GRU):
    kind_name = "second"


class Third(nn.GRU):
    kind_name = "third"


KINDS = {"gru": nn.GRU, "second": Second, "third": Third}


class Net(nnx.Module):
    def __init__(self, kinds, rngs):
        self.embed, self.out = nnx.Linear(1, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.layers = Stack(
            [lambda rngs, kind=kind: KINDS[kind](8, rngs=rngs) for kind in kinds], rngs=rngs
        )

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        error = (self.out(y) - batch["y"])[..., 0] * batch["weight"]
        return Sums(jnp.sum(error**2), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Plain(Task):
    """Without an optimizer."""

    kinds: tuple[str, ...] = ("gru", "gru")
    note: str = ""

    def make_model(self, rngs):
        return Net(self.kinds, rngs)

    def make_batches(self, split, seed=None):
        wave = np.sin(np.arange(161) / 5)[:, None].astype(np.float32)
        return SeriesBatches({"x": wave[:-1], "y": wave[1:]}, batch_size=4, seq_len=4, seed=seed)


class Own(Plain):
    """With the optimizer of a name."""

    made: ClassVar[dict] = {}

    def make_optimizer(self, num_steps):
        return self.made[self.note]


def where(test):
    """A mask of the parameters whose path passes a test."""
    return lambda params: jax.tree.map_with_path(lambda path, _: test(path), params)


def text(path):
    return jax.tree_util.keystr(path)


def of_variables(test):
    is_one = {"is_leaf": lambda node: isinstance(node, nnx.Variable)}
    return lambda params: jax.tree.map(test, params, **is_one)


def labels(params):
    return where(lambda path: "layers" if path[0].key == "layers" else "ends")(params)


def then(*optimizers):
    return optax.chain(*optimizers, optax.sgd(0.1))


def quiet_print(grads, params):
    jax.debug.print("a step")
    return grads


PASS = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop(1e-2),
    "lion": optax.lion(1e-3),
    "adagrad": optax.adagrad(0.1),
    "adadelta": optax.adadelta(1.0),
    "nadam": optax.nadam(1e-2),
    "adan": optax.adan(1e-2),
    "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "every fourth": optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation(),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "clipped signs": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
    "each clipped": then(optax.clip(0.1)),
    "normalized": then(optax.normalize_by_update_norm()),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "prodigy": contrib.prodigy(),
    "schedule free": contrib.schedule_free_adamw(1e-2),
    "mean": then(optax.ema(0.9)),
    "by text": optax.adamw(1e-2, mask=where(lambda path: "w_x" in text(path))),
    "by key": optax.adamw(1e-2, mask=where(lambda path: path[-2].key == "w_x")),
    "by kind": optax.adamw(1e-2, mask=where(lambda path: [k.key for k in path[:2]] == ["layers", "gru"])),
    "by variable": optax.adamw(1e-2, mask=of_variables(lambda v: v.get_metadata("kind", "") == "gru")),
    "by type": optax.adamw(1e-2, mask=of_variables(lambda v: type(v) is nnx.Param and v.ndim > 0)),
    "in groups": optax.multi_transform({"layers": optax.adam(1e-2), "ends": optax.sgd(0.1)}, labels),
    "ends alone": optax.multi_transform({"layers": optax.adam(1e-2), "ends": optax.lamb(0.1)}, labels),
    "prints": then(optax.stateless(quiet_print)),
}  # fmt: skip
# And whether one kind for each layer helps. Biases are [gates, hidden]: a usual mask is for more than 2 dims.
REFUSE = {
    "adafactor": (optax.adafactor(1e-2), True),
    "lamb": (optax.lamb(1e-2), True),
    "lars": (optax.lars(0.1), True),
    "novograd": (optax.novograd(1e-2), True),
    "fromage": (optax.fromage(1e-2), True),
    "clip_by_block_rms": (then(optax.clip_by_block_rms(0.01)), True),
    "block rms": (then(optax.scale_by_param_block_rms()), True),
    "block norm": (then(optax.scale_by_param_block_norm()), True),
    "every 32nd lamb": (optax.MultiSteps(optax.lamb(1e-2), 32).gradient_transformation(), True),
    "muon": (contrib.muon(1e-2), False),
    "agc": (then(optax.adaptive_grad_clip(0.01)), False),
    "centralize": (then(optax.centralize()), False),
    "by dims": (optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda a: a.ndim > 2, p)), False),
    "of variables": (optax.adamw(1e-2, mask=of_variables(lambda v: v.ndim > 2)), False),
    "rows": (then(optax.stateless(lambda g, p: jax.tree.map(lambda a: a - a[:1], g))), False),
    "noise": (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.lamb(1e-2)), True),
}  # fmt: skip
GRUS = {
    "two": (("gru",) * 2, (1, 1, 1)),
    "two on stages": (("gru",) * 2, (1, 2, 1)),
    "three on two stages": (("gru",) * 3, (1, 2, 1)),
    "single": (("gru", "second"), (1, 1, 1)),
}
Own.made = {**PASS, **{name: optimizer for name, (optimizer, _) in REFUSE.items()}}


def setup_of(task, mesh=(1, 1, 1), **layout):
    return Setup.of(task, Parallel(on_devices(mesh), **layout))


def check(name, layers):
    kinds, mesh = GRUS[layers]
    layout = setup_of(Own(kinds), mesh).layout
    check_stacking(layout, Own.made[name])


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "layers", ["two", "three on two stages", slow("two on stages"), slow("single")]
)
@pytest.mark.parametrize("name", PASS)
def test_an_optimizer_that_does_not_see_stacks_passes(name, layers, capfd):
    check(name, layers)
    assert not capfd.readouterr().out


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", [slow(name) if name == "noise" else name for name in REFUSE])
def test_an_optimizer_that_sees_stacks_is_refused(name):
    helps = REFUSE[name][1]
    message = r"optimizer of task Own updates layers\.gru\.\w+ \[2, .*each layer's own array\.\nFix: use an e"
    with pytest.raises(ValueError, match=message):
        check(name, "two")
    if helps:
        check(name, "single")
        return
    with pytest.raises(ValueError, match=r"updates layers\.gru\.\w+ \[1, "):
        check(name, "single")


def mean_squares(params):
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(params)) / sum(
        a.size for a in jax.tree.leaves(params)
    )


def decay_by_mean(updates, params):
    return jax.tree.map(lambda u, p: u + mean_squares(params) * p, updates, params)


HEEDS_EMPTY_ROWS = {
    "a mean over all parameters": then(optax.stateless(decay_by_mean)),
    "no zeros from zeros": optax.yogi(1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEEDS_EMPTY_ROWS)
def test_empty_rows_change_nothing_and_stay_zeros(name):
    optimizer = HEEDS_EMPTY_ROWS[name]
    for layers in ("two", "two on stages"):
        check_stacking(setup_of(Own(*GRUS[layers][:1]), GRUS[layers][1]).layout, optimizer)
    uneven = setup_of(Own(("gru",) * 3), (1, 2, 1)).layout
    with pytest.raises(
        ValueError, match=r"empty rows that placement=\(2, 1\) leaves in \S+ \[.*\nFix: use as"
    ):
        check_stacking(uneven, optimizer)


def test_the_trial_stacks_layers_beside_arrays_of_their_own():
    seen = []

    def init(params):
        seen.append({text(path): a.shape for path, a in jax.tree.leaves_with_path(params)})
        return ()

    optimizer = optax.GradientTransformation(
        init, lambda updates, state, params=None: (updates, state)
    )
    params, name = (
        setup_of(Own(("gru",) * 3), (1, 2, 1)).layout.params,
        "['layers']['gru']['w_x'].value",
    )
    assert difference(optimizer, params, {"gru": (0, -1, 1)}, TRIALS[0]) == ""
    (stacked, single), own = seen[:2], params["layers"]["gru"]["w_x"].shape[1:]
    small = tuple(min(size, 4) for size in own)
    assert stacked[name] == (3, *small)
    assert single[f"{name}.value"] == small
    assert stacked["['embed']['kernel'].value"] == single["['embed']['kernel'].value"] == (1, 4)


def losses(name, kinds, mesh, num_steps=10):
    setup = setup_of(Own(kinds, name), mesh)
    state, step = init_state(setup), make_train_step(setup)
    batches, found = setup.task.make_batches("train", 0), []
    for number in range(num_steps):
        state, metrics = step(state, batches.batch(number))
        found.append(float(metrics.loss))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds", "mesh"),
    [
        ("by text", ("gru", "gru", "gru"), (1, 2, 1)),
        slow("by text", ("gru", "gru", "gru"), (1, 1, 1)),
        slow("clipped", ("gru", "gru", "gru"), (1, 2, 1)),
        slow("clipped", ("gru", "gru"), (1, 2, 1)),
        slow("clipped", ("gru", "gru"), (1, 1, 1)),
        slow("in groups", ("gru", "gru", "gru"), (1, 2, 1)),
        slow("in groups", ("gru", "gru"), (1, 2, 1)),
        slow("lars", ("gru", "second", "third"), (1, 2, 1)),
    ],
)
def test_what_passes_trains_one_kind_as_one_kind_for_each_layer(name, kinds, mesh):
    single = ("gru", "second", "third")[: len(kinds)]
    np.testing.assert_allclose(
        losses(name, kinds, mesh), losses(name, single, (1, 1, 1)), rtol=1e-5
    )


@pytest.mark.slow
def test_a_run_is_refused_before_it_begins_and_a_loop_of_ones_own_is_not(tmp_path):
    task, message = Own(note="lamb"), "updates layers.gru.* each layer's own array"
    for begin in (init_state, make_train_step):
        with pytest.raises(ValueError, match=message):
            begin(task, "dp1")
    train = TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=message):
        fit(task, "dp1", train, quiet=True)
    assert not (tmp_path / "run").exists()
    abstract_state(setup_of(task))  # to load a run from before
    value_and_grad(Plain(), "dp1")


@pytest.mark.slow
def test_a_run_is_not_resumed_with_an_optimizer_that_sees_stacks(tmp_path):
    task, train = Own(note="changed"), TrainConfig(num_steps=1, out_dir=str(tmp_path))
    Own.made["changed"] = optax.sgd(0.1)
    fit(task, "dp1", train, quiet=True)
    Own.made["changed"] = optax.fromage(1e-2)
    with pytest.raises(ValueError, match=r"updates layers\.gru.* each layer's own array"):
        fit(task, "dp1", dataclasses.replace(train, num_steps=2), quiet=True, resume=True)


FACTORED = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.scale(-1e-2))


@pytest.mark.slow
def test_an_optimizer_that_looks_at_large_arrays_only_is_tried_on_some():
    """It factors matrices: those of a layer, and with as many layers as hidden units, stacks of vectors."""
    check_stacking(setup_of(Own()).layout, FACTORED)
    with pytest.raises(ValueError, match=r"updates layers\.gru\.b \[8, 4, 8\]"):
        check_stacking(setup_of(Own(("gru",) * 8)).layout, FACTORED)


NOISE = Own.made["noisy"] = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2))


@pytest.mark.slow
def test_noise_is_refused_where_it_would_depend_on_the_mesh():
    layouts = {
        mesh: setup_of(Own(("gru",) * number), mesh).layout
        for number, mesh in ((2, (1, 1, 1)), (4, (1, 2, 1)))
    }
    for layout in layouts.values():
        assert draws(NOISE, layout.params)
        check_stacking(layout, NOISE)
    with pytest.raises(
        ValueError, match=r"draws random .* placement=\(2, 1\) has layers in rows \[0, 1, 2, -1\]"
    ):
        check_stacking(setup_of(Own(("gru",) * 3), (1, 2, 1)).layout, NOISE)
    with pytest.raises(
        ValueError, match=r"update='host': .*task Own draws random numbers\nFix: use update="
    ):
        abstract_state(setup_of(Own(note="noisy"), (2, 1, 1), update="host"))


@pytest.mark.slow
def test_noise_that_is_not_refused_does_not_depend_on_the_mesh():
    found = [losses("noisy", ("gru",) * 2, mesh, 4) for mesh in ((1, 1, 1), (1, 2, 1), (2, 1, 1))]
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-5)


def test_an_optimizer_that_holds_arrays_of_the_model_must_be_elementwise():
    setup = setup_of(Own())
    before = jax.tree.map(lambda a: jnp.ones(a.shape), setup.storage.params)

    def towards(updates, params):
        return jax.tree.map(lambda u, p, old: u + 0.1 * (p - old), updates, params, before)

    check_stacking(setup.layout, then(optax.stateless(towards)))
    with pytest.raises(
        ValueError, match=r"combines numbers .*reduce_sum.* tried on small arrays: [\s\S]*Fix: use"
    ):
        check_stacking(setup.layout, then(optax.stateless(towards), optax.scale_by_trust_ratio()))


def test_an_optimizer_that_needs_the_loss_says_so_itself():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'value'"):
        check_stacking(setup_of(Own()).layout, optax.contrib.reduce_on_plateau(patience=2))
