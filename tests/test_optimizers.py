"""An optimizer of a task sees each layer's own arrays, with the same updates on every mesh."""

import collections
import contextlib
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.laws import more, on_devices
from optax import contrib

from jaxpar import (
    ArrayBatches,
    Parallel,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    TrainConfig,
    adopt,
    init_state,
    make_train_step,
    mean,
    nn,
)
from jaxpar.nn import named_param


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, carry, x, at):
        return carry, jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, kinds, rngs):
        self.embed, self.out = nnx.Linear(1, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        made = {"gru": lambda rngs: nn.GRU(8, rngs=rngs), "dense": Dense}
        self.layers = Stack([made[kind] for kind in kinds], rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        error = (self.out(y) - batch["y"])[..., 0] * batch["weight"]
        return Sums(jnp.sum(error**2), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Own(Task):
    """With the optimizer of a name."""

    made: ClassVar[dict] = {}
    kinds: tuple[str, ...] = ("gru", "gru")
    name: str = "adam"

    def make_model(self, rngs):
        return Net(self.kinds, rngs)

    def make_batches(self, split, seed=None):
        wave = np.sin(np.arange(161) / 5)[:, None].astype(np.float32)
        return SeriesBatches({"x": wave[:-1], "y": wave[1:]}, batch_size=4, seq_len=4, seed=seed)

    def make_optimizer(self, num_steps):
        return self.made[self.name]


def then(*optimizers):
    return optax.chain(*optimizers, optax.sgd(0.1))


def is_variable(node):
    return isinstance(node, nnx.Variable)


def keys(path):
    return [key.key for key in path if isinstance(getattr(key, "key", None), str)]


def of_path(test):
    """A tree of what a test gives for each path."""
    return lambda params: jax.tree.map_with_path(lambda path, _: test(keys(path)), params)


def decay_by_mean(updates, params):
    """The number of all arrays' elements is a constant of the program."""
    leaves = jax.tree.leaves(params)
    mean = sum(jnp.sum(a**2) for a in leaves) / sum(a.size for a in leaves)
    return jax.tree.map(lambda u, p: u + mean * p, updates, params)


def by_number(updates, params):
    """Another rate for each array."""
    leaves, structure = jax.tree.flatten(updates)
    return structure.unflatten([(n + 1) * a for n, a in enumerate(leaves)])


def normalize(updates, params):
    """Divides by the square root of a loop's sum over the rows of an array."""

    def total(a):
        return jax.lax.scan(lambda t, row: (t + jnp.sum(row**2), None), 0.0, a.reshape(-1, 1))[0]

    return jax.tree.map(lambda a: a / jnp.sqrt(1 + total(a)), updates)


def momentum():
    """Its state has arrays in the place of variables."""

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape), params, is_leaf=is_variable)

    def update(updates, state, params=None):
        sums = [a + b for a, b in zip(*map(jax.tree.leaves, (updates, state)), strict=True)]
        return [jax.tree.structure(tree).unflatten(sums) for tree in (updates, state)]

    return optax.GradientTransformation(init, update)


def print_step(updates, params):
    jax.debug.print("a step")
    return updates


def numbers_of_layers(leaves):
    """For each parameter the numbers of its leaves, in the order of layers."""
    numbers = collections.defaultdict(list)
    for number, (path, _) in enumerate(leaves):
        numbers[*keys(path)].append(number)
    return numbers.values()


def of_next_layer(updates, params):
    """Each layer has the update of the next one, the last that of the first."""
    leaves, structure = jax.tree.flatten_with_path(updates)
    moved = [a for _, a in leaves]
    for numbers in numbers_of_layers(leaves):
        for number, other in zip(numbers, np.roll(numbers, -1), strict=True):
            moved[number] = leaves[other][1]
    return structure.unflatten(moved)


def by_first_layers(updates, params):
    """Divides by a norm of the first two of several layers."""
    leaves, _ = jax.tree.flatten_with_path(updates)
    first = [n for numbers in numbers_of_layers(leaves) if numbers[2:] for n in numbers[:2]]
    norm = jnp.sqrt(sum(jnp.sum(leaves[n][1] ** 2) for n in first))
    return jax.tree.map(lambda a: a / norm, updates)


GROUPS = {"a": optax.adam(1e-2), "b": optax.lamb(1e-2)}
# One program for all layers of a kind.
MAPPED = {
    "adam": optax.adam(1e-2),
    "muon": contrib.muon(1e-2),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lars": optax.lars(0.1),
    "agc": then(optax.adaptive_grad_clip(0.01)),
    "novograd": optax.novograd(1e-2),
    "fromage": optax.fromage(1e-2),
    "block rms": then(optax.clip_by_block_rms(0.01)),
    "param rms": then(optax.scale_by_param_block_rms()),
    "centralize": then(optax.centralize()),
    "by dims": optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda a: a.ndim > 1, params)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "clipped lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2)),
    "groups": optax.multi_transform(GROUPS, of_path(lambda path: "b" if "w_x" in path else "a")),
    "every second": optax.MultiSteps(optax.lamb(1e-2), 2).gradient_transformation(),
    "yogi": optax.yogi(1e-2),
    "mean": then(optax.stateless(decay_by_mean)),
    "loops": then(optax.stateless(normalize)),
    "prodigy": contrib.prodigy(),
    "momentum": then(momentum()),
    "prints": then(optax.stateless(print_step)),
    # The loss scales their updates.
    "plateau": optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(0.5, patience=1)),
    "polyak": optax.polyak_sgd(0.1),
    "momo": contrib.momo(1e-2),
}
# One program for each layer.
SEPARATE = {
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)),
    "flat": optax.flatten(optax.adam(1e-2)),
    "if finite": optax.apply_if_finite(optax.lamb(1e-2), 3),
    "by number": then(optax.stateless(by_number)),
    "of the next layer": then(optax.stateless(of_next_layer)),
    "of the next layer, every second": then(
        optax.conditionally_transform(optax.stateless(of_next_layer), lambda step: step % 2 == 0)
    ),
    "by the first layers": then(optax.stateless(by_first_layers)),
}
Own.made = MAPPED | SEPARATE
LAYOUTS = {
    "two kinds": (("gru", "dense", "dense", "gru", "dense"), (1, 2, 1)),
    "dp1": (("gru",) * 3, (1, 1, 1)),
    "empty row": (("gru", "gru", "gru"), (1, 2, 1)),
    "dp2pp2tp2": (("gru", "dense", "gru", "gru"), (2, 2, 2)),
}


def on(layout, name, **options):
    """A task with an optimizer, and its layout."""
    kinds, mesh = LAYOUTS[layout]
    return Own(kinds, name), Parallel(on_devices(mesh), **options)


def is_stacked(name):
    return name.startswith("params/layers/")


def drawn(shapes, seed):
    """Random parameters; each layer has other scales."""
    rng, scale = np.random.default_rng(seed), 3.0**seed

    def draw(shape):
        return (rng.uniform(0.1, scale) * rng.standard_normal(shape)).astype(np.float32)

    return {
        name: np.stack([draw(shape[1:]) for _ in range(shape[0])])
        if is_stacked(name)
        else draw(shape)
        for name, shape in shapes.items()
    }


def as_tree(arrays):
    """As an optimizer sees parameters; each layer has an array in a list."""
    tree = {}
    for name, array in arrays.items():
        _, *modules, last = name.split("/")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[last] = list(array) if is_stacked(name) else array
    return tree


# Of two steps. Momo subtracts little from them: a difference of numbers that are near has few digits.
LOSSES = np.float32([30, 37.5])


def run_plainly(optimizer, params, all_grads):
    """The updates of some steps by optax alone."""
    inner, found = optax.with_extra_args_support(optimizer), []
    with jax.numpy_dtype_promotion("standard"):
        state = inner.init(params)
        for grads, loss in zip(all_grads, LOSSES, strict=True):
            updates, state = jax.jit(inner.update)(grads, state, params, value=loss)
            params = optax.apply_updates(params, updates)
            found.append(updates)
    return found


def assert_same_as_optax(name, layout):
    task, parallel = on(layout, name)
    stored = api.stored(task, parallel, init_state(task, parallel))
    shapes = {name: a.shape for name, a in stored.items() if name.startswith("params/")}
    params, *grads = (drawn(shapes, n) for n in range(3))
    found, state = api.optimizer_updates(task, parallel, params, grads, LOSSES)
    expected = run_plainly(Own.made[name], as_tree(params), [as_tree(own) for own in grads])
    tolerance = 1e-3 if name == "muon" else 1e-5
    for updates, wanted in zip(found, expected, strict=True):
        pairs = zip(*map(jax.tree.leaves, (as_tree(updates), wanted)), strict=True)
        for a, b in pairs:
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, 0, tolerance * np.abs(b).max())
    floats = [a for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert all(np.isfinite(a).all() for a in floats)


@pytest.mark.rows(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", Own.made)
def test_updates_are_those_of_separate_modules(name, layout):
    assert_same_as_optax(name, layout)


def shapes_of(tree):
    return jax.tree.structure(tree), [a.shape for a in jax.tree.leaves(tree)]


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", Own.made)
def test_layers_of_a_kind_have_one_program_where_they_are_alike(name):
    task, parallel = on("two kinds", name)
    with api.updates_of_single_layers() as found:
        params, opt_state = api.lowered_update(task, parallel).out_info
    assert bool(found) == (name in SEPARATE)
    target = api.abstract_state(task, parallel)
    assert shapes_of(params) == shapes_of(target.params)
    assert shapes_of(opt_state) == shapes_of(target.opt_state)


@pytest.mark.parametrize("name", ["factored", more("momentum"), more("novograd"), more("muon")])
def test_state_of_layers_is_split_over_stages(name):
    """It is also where it has other shapes than the parameters."""
    state = api.abstract_state(*on("two kinds", name)).opt_state
    leaves = jax.tree.leaves_with_path(state)
    stacks = [leaf for path, leaf in leaves if "layers" in keys(path) and leaf.ndim]
    assert len(stacks) >= 5
    assert {leaf.sharding.spec[0] for leaf in stacks} == {"stage"}


def test_an_elementwise_optimizer_costs_and_sends_no_more_than_on_stacks():
    task, parallel = Own(("gru", "gru"), "adam"), Parallel(on_devices((2, 2, 2)))
    state = api.abstract_state(task, parallel)
    places = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    on_stacks = jax.jit(Own.made["adam"].update, out_shardings=places)
    with jax.numpy_dtype_promotion("standard"):
        plain = on_stacks.lower(state.params, state.opt_state, state.params).compile()
        program = api.lowered_update(task, parallel).compile()
    assert program.cost_analysis()["flops"] == plain.cost_analysis()["flops"]
    assert [word for word in COLLECTIVES if word in program.as_text()] == []


COLLECTIVES = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"


def test_masks_see_the_names_types_and_shapes_of_one_layer():
    seen = []

    def init(params):
        seen.clear()
        for path, leaf in jax.tree.leaves_with_path(params):
            seen.append((jax.tree_util.keystr(path), path[-2].key, leaf.shape))
        for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_variable):
            seen.append((keys(path)[:3], type(leaf), leaf.ndim))
        assert params["layers"]["gru"]["w_x"].ndim == params["layers"]["gru"]["w_x"][0].ndim
        return ()

    Own.made["seen"] = optax.GradientTransformation(
        init, lambda updates, state, _: (updates, state)
    )
    init_state(*on("empty row", "seen"))
    shape = nn.GRU(8, rngs=nnx.Rngs(0)).w_x.shape
    assert seen.count(("['layers']['gru']['w_x'].value", "w_x", shape)) == 3
    assert seen.count((["layers", "gru", "w_x"], nnx.Param, len(shape))) == 3
    assert seen.count(("['embed']['kernel'].value", "kernel", (1, 8))) == 1


@pytest.mark.full
def test_a_step_is_printed_once(capfd):
    task, parallel = on("empty row", "prints")
    losses(task, parallel, num_steps=1)
    jax.effects_barrier()
    assert capfd.readouterr().out == "a step\n"


def losses(task, parallel, num_steps=6):
    state, step = init_state(task, parallel), make_train_step(task, parallel)
    batches, found = task.make_batches("train", 0), []
    for number in range(num_steps):
        state, metrics = step(state, batches.batch(number))
        found.append(float(metrics.loss))
    return found, state


@pytest.mark.more
@pytest.mark.parametrize("name", ["muon", "factored", "clipped lamb", "noise", "flat", "mean"])
def test_a_run_has_the_same_losses_on_every_mesh(name):
    kinds = LAYOUTS["two kinds"][0]
    meshes = [(1, 1, 1), (1, 2, 1), (2, 2, 2)]
    found = [losses(Own(kinds, name), Parallel(on_devices(m)))[0] for m in meshes]
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-5)


@pytest.mark.full
def test_empty_rows_stay_zeros_where_the_host_updates_parts_of_stacks():
    """Yogi makes an update of a gradient that is zero."""
    found = [losses(*on("empty row", "yogi", update=how)) for how in ("host", "replicated")]
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    for _, state in found:
        stack = np.asarray(state.params["layers"]["gru"]["w_x"].get_value())
        assert [bool(np.any(row)) for row in stack] == [True, True, True, False]


@pytest.mark.parametrize(
    ("name", "why"), [("noise", "draws random numbers"), more("lamb", r"looks at more than one .*")]
)
def test_the_host_refuses_what_parts_of_arrays_do_not_tell(name, why):
    message = (
        rf"update='host' updates parts .* optimizer of task {name} {why}\nFix: use update='sharded'"
    )
    with pytest.raises(ValueError, match=message):
        api.abstract_state(*on("empty row", name, update="host"))


class Kernels(Net):
    """Some are split over other dims than others."""

    def __init__(self, kinds, rngs):
        super().__init__(kinds, rngs=rngs)
        self.one, self.same, self.other = (
            named_param(rngs.normal((8, 8)), dims)
            for dims in (("input", "hidden"), ("input", "hidden"), ("hidden", "input"))
        )

    def first(self, batch, at):
        x = super().first(batch, at)
        for kernel in (self.one, self.same, self.other):
            x = jnp.tanh(x @ kernel[...])
        return x


@dataclasses.dataclass(frozen=True)
class Tying(Own):
    """An optimizer gives two arrays the mean of their gradients."""

    tied: tuple[str, str] = ("one", "same")

    def make_model(self, rngs):
        return Kernels(self.kinds, rngs=rngs)

    def make_optimizer(self, num_steps):
        def tie(updates, _):
            leaves = dict(jax.tree.leaves_with_path(updates))
            own = [path for path in leaves if {*self.tied} & {*keys(path)}]
            mean = sum(leaves[path] for path in own) / 2
            return jax.tree.map_with_path(lambda path, a: mean if path in own else a, updates)

        return then(optax.stateless(tie))


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2)])
@pytest.mark.parametrize(("tied", "is_taken"), [(("one", "same"), True), (("one", "other"), False)])
def test_the_host_takes_what_combines_arrays_that_are_split_alike(tied, is_taken, mesh):
    parallel = Parallel(on_devices(mesh), update="host")
    refused = pytest.raises(ValueError, match="may update a part in another way than the whole")
    with contextlib.nullcontext() if is_taken else refused:
        api.abstract_state(Tying(tied=tied), parallel)


@pytest.mark.parametrize("update", ["host", more("sharded")])
def test_a_step_hands_its_loss_on(update):
    """A plateau is reached at once: the next step's rate is half as high."""
    Own.made["reached"] = optax.chain(
        optax.sgd(0.1), contrib.reduce_on_plateau(0.5, patience=1, atol=1e9, rtol=0)
    )
    found, state = losses(
        Own(("dense",), "reached"), Parallel(on_devices((2, 1, 1)), update=update)
    )
    plateau = state.opt_state[1]
    assert float(plateau.scale) == 0.5 ** (len(found) - 1)
    assert float(plateau.best_value) in found


# ---- optimizers whose update takes other arguments ----


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


def square(model, batch):
    errors = jnp.square(model(batch["x"]) - batch["y"]).sum(-1)
    return mean(errors, batch["weight"])


def adopted(optimizer):
    x, y = np.random.default_rng(0).normal(size=(2, 64, 8)).astype(np.float32)
    return adopt(
        Blocks, square, "blocks", optimizer=optimizer,
        batches=lambda split, seed=None: ArrayBatches({"x": x, "y": y}, 16, seed),
    )  # fmt: skip


def losses_on(mesh, optimizer, num_steps=4):
    task, train = adopted(optimizer), TrainConfig(clip_norm=0.0)
    state, step = init_state(task, mesh, train), make_train_step(task, mesh, train)
    batches, found = task.make_batches("train", 0), []
    for number in range(num_steps):
        state, metrics = step(state, batches.batch(number))
        found.append(float(metrics.loss))
    return found


def losses_of_optax(optimizer, takes, num_steps=4):
    """Of a plain loop, whose optimizer is given these arguments."""
    with nnx.use_eager_sharding(False):
        graphdef, params = nnx.split(Blocks(nnx.Rngs(0)))

    @jax.jit
    def value_and_grad(params, batch):
        def loss(params):
            total, weight = square(nnx.merge(graphdef, params), batch)[:2]
            return total / weight

        return jax.value_and_grad(loss)(params)

    batches, found = adopted(optimizer).make_batches("train", 0), []
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        for number in range(num_steps):
            value, grad = value_and_grad(params, batches.batch(number))
            given = {"value": value, "grad": grad}
            extra = {name: given[name] for name in takes}
            updates, state = optimizer.update(grad, state, params, **extra)
            params = optax.apply_updates(params, updates)
            found.append(float(value))
    return found


def sam(**options):
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(0.05), adversary, **options)


def of_matrices(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "vector", params)


# Each with the arguments that it is given in a plain loop.
TAKING = {
    "sam": (sam(), ()),
    "sam, every third": (sam(sync_period=3, reset_state=False), ()),
    "sam in a chain": (optax.chain(optax.clip(1.0), sam()), ()),
    "sam of some": (optax.masked(sam(), of_matrices), ()),
    "sam in a group": (optax.partition({"matrix": sam(), "vector": optax.sgd(0.1)}, labels), ()),
    "polyak": (optax.polyak_sgd(0.1), ("value",)),
    "plateau": (
        optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(0.5, patience=1)), ("value",),
    ),
}  # fmt: skip
OF_LOSS = optax.GradientTransformationExtraArgs(
    lambda params: (), lambda updates, state, params, *, value: (updates, state)
)


@pytest.mark.rows(3, "full")
@pytest.mark.parametrize(
    ("name", "mesh"), [*((name, "dp1") for name in TAKING), ("sam", "dp2pp2"), ("polyak", "dp2pp2")]
)
def test_an_optimizer_is_given_what_it_takes(name, mesh):
    optimizer, takes = TAKING[name]
    expected = losses_of_optax(optimizer, takes)
    np.testing.assert_allclose(losses_on(mesh, optimizer), expected, rtol=1e-5)


def test_a_loss_alone_is_taken():
    assert len(losses_on("dp1", optax.chain(OF_LOSS, optax.sgd(0.1)), 2)) == 2


NEEDS = r"needs '?{}'?, but a step has only the loss \(value\) .*\nFix: .* your own loop"
REFUSED = {
    "lbfgs": (optax.lbfgs(), NEEDS.format("value_fn")),
    "backtracking": (
        optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)), NEEDS.format("value_fn"),
    ),
    "sam of a function": (sam(opaque_mode=True), NEEDS.format("grad_fn")),
    "sophia": (contrib.sophia(0.1), NEEDS.format("obj_fn")),
    "an argument of its own": (
        optax.GradientTransformationExtraArgs(
            lambda params: (), lambda updates, state, params, *, accuracy: (updates, state)
        ),
        NEEDS.format("accuracy"),
    ),
    "one part needs what another doesn't take": (
        optax.chain(sam(), contrib.momo()), "has a part that needs 'value', and one that does not take it",
    ),
}  # fmt: skip


def test_an_error_of_the_optimizer_itself_is_told():
    def update(updates, state, params):
        raise ValueError("rates must fall")

    optimizer = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ValueError, match="rates must fall"):
        api.abstract_state(adopted(optimizer), Parallel("dp1"))


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_run_is_refused(name):
    optimizer, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"optimizer of task adopted {message}") as raised:
        api.abstract_state(adopted(optimizer), Parallel("dp1"))
    assert str(raised.value).count("\n") == 1
