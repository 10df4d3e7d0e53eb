"""A task with its own `make_optimizer` does not go by an `OptimizerConfig` that it has as well."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lib import api
from lib.adopted import WithOptimizer, batch_of
from lib.flax_models import Text
from lib.optimizers import ALONE, READ_SHAPE_OR_PLACE, READ_SHAPE_OR_PLACE_LATER

from jaxpar import (
    OptimizerConfig,
    Parallel,
    TrainConfig,
    fit,
    init_state,
    lm,
    load_run,
    make_train_step,
)

SMALL: Any = {"num_layers": 1, "hidden_size": 8, "embed_size": 8, "batch_size": 4, "seq_len": 4}
# It would refuse any run of fewer steps.
UNUSED = OptimizerConfig("sgd", warmup_steps=30)


def rising(num_steps):
    return optax.linear_schedule(0.0, 1.0, 8)


class Own(lm.LM):
    def make_optimizer(self, num_steps):
        return optax.sgd(rising(num_steps))


class Tells(Own):
    def learning_rate(self, num_steps):
        return rising(num_steps)


def train(task, folder, num_steps=2, **options):
    config = TrainConfig(num_steps=num_steps, log_every=1, out_dir=str(folder))
    fit(task, "dp1", config, quiet=True, **options)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line.get("learning_rate") for line in lines if line["split"] == "train"]


@pytest.mark.more
@pytest.mark.parametrize(("kind", "told"), [(Own, [None, None]), (Tells, [0.0, 0.125])])
def test_an_unused_config_is_neither_reported_nor_refuses_a_run(kind, told, text, tmp_path):
    task = kind(corpus=str(text), optimizer=UNUSED, **SMALL)
    assert train(task, tmp_path) == told
    rows = api.summary(task, Parallel("dp1"), TrainConfig(num_steps=2))
    assert rows["optimizer"] == "your own (scale_by_schedule), 2 steps"
    assert rows["clipping"] == "gradients are not clipped before your optimizer"


@pytest.mark.full
def test_a_run_is_resumed_though_an_unused_config_has_changed(text, tmp_path):
    task = Own(corpus=str(text), optimizer=UNUSED, **SMALL)
    train(task, tmp_path, 1)
    changed = dataclasses.replace(task, optimizer=OptimizerConfig("adam"))
    assert len(train(changed, tmp_path, 2, resume=True)) == 2
    assert load_run(tmp_path).step == 2


@pytest.mark.full
def test_a_config_that_is_used_is_reported(text, tmp_path):
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, lr_schedule="constant")
    task = lm.LM(corpus=str(text), optimizer=config, **SMALL)
    assert train(task, tmp_path, 1) == [0.5]
    assert "adam, learning rate 0.5" in api.summary(task, Parallel("dp1"))["optimizer"]


def by_table(updates, params):
    """Multiplies the gradients of the embedding by numbers of a table."""

    def of(path, g):
        if "embed" not in jax.tree_util.keystr(path):
            return g
        return g * np.linspace(1, 2, g.size, dtype=np.float32).reshape(g.shape)

    return jax.tree.map_with_path(of, updates)


READS = READ_SHAPE_OR_PLACE_LATER | READ_SHAPE_OR_PLACE
READS["table"] = lambda: optax.chain(optax.stateless(by_table), optax.sgd(0.1))
del READS["root mean square"], READS["global norm"]  # these are refused in other words


@pytest.mark.rows(3, "full")
@pytest.mark.parametrize("name", READS)
def test_an_update_on_the_host_that_depends_on_shape_or_place_is_refused(name):
    task = WithOptimizer(Text, own=READS[name])
    on_host, message = Parallel("dp2", update="host"), "in another way than the whole array"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with pytest.raises(ValueError, match=message):
            init_state(task, on_host)
        init_state(task, Parallel("dp1", update="host"))
        restored = init_state(task, "dp2")  # as of a checkpoint
        with pytest.raises(ValueError, match=message):
            make_train_step(task, on_host)(restored, batch_of(task))


OF_EACH_NUMBER = {
    **ALONE,
    "adam": lambda: optax.adam(1e-3),
    "one cycle": lambda: optax.adam(optax.cosine_onecycle_schedule(10, 1e-3)),
    "table of rates": lambda: optax.sgd(lambda count: jnp.asarray([0.5, 0.2, 0.1])[count]),
    "schedule of pieces": lambda: optax.sgd(
        optax.piecewise_interpolate_schedule("linear", 1.0, {2: 0.5, 4: 0.1})
    ),
    "joined schedules": lambda: optax.lion(
        optax.join_schedules(
            [optax.constant_schedule(0.1), optax.cosine_decay_schedule(0.1, 9)], [5]
        )
    ),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
}


@pytest.mark.rows(3, "full")
@pytest.mark.parametrize("name", OF_EACH_NUMBER)
def test_an_update_of_each_number_alone_is_taken(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        init_state(WithOptimizer(Text, own=OF_EACH_NUMBER[name]), Parallel("dp2", update="host"))
