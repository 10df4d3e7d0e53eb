"""Training and evaluation steps: the one place that knows both a model and the pipeline."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.axes import BATCH, DATA, DENSE_BATCH, STAGE, TENSOR, TIME
from jaxpar.config import Config, ImageConfig, RunConfig
from jaxpar.data.images import ImageBatch
from jaxpar.data.streams import IGNORE, Batch
from jaxpar.kernel import choose_kernel, with_kernel
from jaxpar.loss import (
    LOGITS_ELSEWHERE,
    LOGITS_ON_CPU,
    ImageSums,
    LossSums,
    cross_entropy,
    linear_cross_entropy,
)
from jaxpar.models import HybridConvNet, LSTMLanguageModel
from jaxpar.nn.dropout import Position, dropout
from jaxpar.nn.linear import matmul
from jaxpar.nn.lstm import extend
from jaxpar.nn.stack import vary_like
from jaxpar.optimizer import HostOptimizer, clip, make_optimizer, update
from jaxpar.pipeline.engine import Pipeline, PipelineParams
from jaxpar.pipeline.schedule import Schedule, make_schedule
from jaxpar.pipeline.ticks import Plan, largest, make_plan
from jaxpar.sharding import RULES, Layout, constrain, shardings
from jaxpar.state import (
    TrainState,
    abstract_state,
    batch_rules,
    compute_rules,
    make_model,
    state_shardings,
    unwrap_carry,
    wrap_carry,
)

AnyBatch = Batch | ImageBatch

_make_schedule = functools.lru_cache(maxsize=1024)(make_schedule)  # few, asked for very often


class Metrics(NamedTuple):
    """What a training step reports; scalars.

    Attributes:
      loss: mean negative log-likelihood of the batch's targets, in nats; float32.
      grad_norm: global norm of the gradients, before clipping; float32.
      skipped: of the state after the step.
    """

    loss: jax.Array
    grad_norm: jax.Array
    skipped: jax.Array


class CompiledStep:
    """A step as one compiled program for batches of every length up to `seq_len`.

    In a pipeline the length is data: shorter batches run fewer ticks of the same program. Without stages
    each length is compiled once.
    """

    def __init__(
        self, step: Callable[..., Any], config: RunConfig, *, backward: bool, **jit_options
    ):
        self._jitted, self._config, self._backward = jax.jit(step, **jit_options), config, backward

    def __call__(self, state: Any, batch: AnyBatch) -> Any:
        """Runs the step.

        Raises:
          ValueError: the batch is longer than `seq_len`, or not made of whole chunks.
        """
        return self._jitted(state, *self._planned(batch))

    def lower(self, state: Any, batch: AnyBatch) -> Any:
        """`jax.jit(...).lower` of the program, for arrays or their shapes."""
        return self._jitted.lower(state, *self._planned(batch))

    @property
    def full_plan(self) -> Plan | None:
        """The schedules of a batch of the full length; None if a step is one whole."""
        return _full_plan(self._config, backward=self._backward)

    @property
    def num_programs(self) -> int:
        """How many programs have been compiled."""
        return self._jitted._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def _planned(self, batch: AnyBatch) -> tuple[AnyBatch, Plan | None]:
        if isinstance(batch, ImageBatch) or isinstance(self._config, ImageConfig):
            return batch, None
        if self._config.mesh.stage == 1:
            return batch, self.full_plan
        seq_len, K = self._config.data.seq_len, self._config.pipeline.num_chunks
        length, chunk_len = batch.inputs_BT.shape[1], seq_len // K
        if length > seq_len or length % chunk_len:
            raise ValueError(
                f"a batch of {length} time steps is not made of 1 to {K} chunks of {chunk_len}; pad it with "
                f"targets of {IGNORE}, or change seq_len={seq_len} or num_chunks={K}"
            )
        if length < seq_len:
            pad = functools.partial(jnp.pad, pad_width=((0, 0), (0, seq_len - length)))
            batch = Batch(
                pad(batch.inputs_BT), pad(batch.targets_BT, constant_values=IGNORE), batch.starts
            )
        return batch, _plan(self._config, length // chunk_len, self._backward)


class _HostStep(CompiledStep):
    """A compiled program up to the gradients; after it the optimizer, on the host."""

    def __init__(self, gradients, config: RunConfig, optimizer, layout: TrainState, out_shardings):
        super().__init__(gradients, config, backward=True, out_shardings=out_shardings)
        self._host = HostOptimizer(optimizer)
        self._gather = jax.jit(  # into the memory of the old parameters
            lambda old, new: new, out_shardings=layout.params, donate_argnums=0, keep_unused=True
        )

    def __call__(self, state: TrainState, batch: AnyBatch) -> tuple[TrainState, Metrics]:
        split, grads, applies, metrics = super().__call__(_without_optimizer(state), batch)
        params, opt_state = self._host.update(split.params, grads, state.opt_state, applies)
        params = self._gather(state.params, params)
        return dataclasses.replace(split, params=params, opt_state=opt_state), metrics

    def lower(self, state: TrainState, batch: AnyBatch) -> Any:
        return super().lower(_without_optimizer(state), batch)


def _without_optimizer(state: TrainState) -> TrainState:
    return dataclasses.replace(state, opt_state=())


def make_train_step(config: RunConfig, mesh: Mesh) -> CompiledStep:
    """One optimizer step on a global batch, compiled for the mesh; the state passed in is consumed.

    Any mesh, schedule and microbatching give the loss and the gradients of one device, to float32 rounding.

    A loss or gradient that is not finite changes no parameter: the step is skipped, or, where the config
    does not allow that, the state is halted. No later step changes it then, so that one may look at the
    metrics from time to time; `state.release` lets it go on.

    Args:
      config: as given to `init_state`.
    Returns:
      (state, batch) -> (state, metrics); the batch lies on `batch_sharding(mesh, config)`.
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    optimizer = make_optimizer(config.train)
    value_and_grad = make_loss_and_grad(config, mesh)

    def gradients(state: TrainState, batch: AnyBatch, plan: Plan | None):
        (loss, carry), grads = value_and_grad(state.params, state.carry, batch, state.step, plan)
        # The update runs where the optimizer state lies: what is split is updated in parts.
        with jax.named_scope("update"):
            grads = constrain(grads, mesh, state.opt_rules)
            params = constrain(state.params, mesh, state.opt_rules)
            norm = optax.tree.norm(grads)
            is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            state, applies = _count(state, carry, is_finite, config.train.allowed_skips)
            state = dataclasses.replace(state, params=params)
            metrics = Metrics(loss, norm, state.skipped)
            return state, clip(grads, config.train), applies, metrics

    def step(state: TrainState, batch: AnyBatch, plan: Plan | None) -> tuple[TrainState, Metrics]:
        state, grads, applies, metrics = gradients(state, batch, plan)
        with jax.named_scope("update"):
            params, opt_state = update(optimizer, state.params, grads, state.opt_state, applies)
            params = constrain(params, mesh, state.param_rules)
        return dataclasses.replace(state, params=params, opt_state=opt_state), metrics

    target = abstract_state(config, mesh)
    layout, replicated = state_shardings(target, mesh), NamedSharding(mesh, P())
    if config.train.update == "host":
        split = shardings(target.params, mesh, target.opt_rules)
        state = dataclasses.replace(layout, params=split, opt_state=())
        out = (state, split, replicated, replicated)
        return _HostStep(gradients, config, optimizer, layout, out)
    return CompiledStep(
        step, config, backward=True, donate_argnums=0, out_shardings=(layout, replicated)
    )


def _count(
    state: TrainState, carry: nnx.State, is_finite: jax.Array, max_skipped: int
) -> tuple[TrainState, jax.Array]:
    """Step, skipped and carry after a step, and whether its update applies.

        skipped before       finite    step   skipped   carry   applies
        up to max_skipped    yes       + 1              new     yes
        below max_skipped    no        + 1    + 1       zeros   no        skips
        max_skipped          no               + 1               no        halts
        above max_skipped    any                                no        is halted

    A carry that is not finite has gradients that are not either: c is a factor in those of the output gate.
    """
    runs = state.skipped <= max_skipped
    applies = runs & is_finite
    skipped = jnp.where(runs & ~is_finite, state.skipped + 1, state.skipped)
    goes_on = skipped <= max_skipped

    def select(new, old):
        return jnp.where(applies, new, jnp.where(goes_on, jnp.zeros_like(old), old))

    step = jnp.where(goes_on, state.step + 1, state.step)
    carry = jax.tree.map(select, carry, state.carry)
    return dataclasses.replace(state, step=step, skipped=skipped, carry=carry), applies


def make_loss_and_grad(config: RunConfig, mesh: Mesh) -> Callable[..., Any]:
    """(params, carry, batch, step, plan=None) -> ((mean loss, carry), gradients); not compiled.

    `step` numbers the dropout masks; without a plan the batch has the full length.

    Raises:
      ValueError: sizes do not fit the mesh.
    """
    config.check()
    unroll = _make_unroll(config, mesh)

    def loss(params, carry, batch, step, plan=None):
        key = jax.random.fold_in(jax.random.key(config.train.seed), step)
        carry, sums = unroll(params, carry, batch, key, plan or _full_plan(config, backward=True))
        return sums.nll / jnp.maximum(sums.num_targets, 1.0), carry

    return jax.value_and_grad(loss, has_aux=True)


def make_eval_step(config: RunConfig, mesh: Mesh) -> CompiledStep:
    """The loss without dropout, compiled for the mesh.

    Returns:
      ((params, carry), batch) -> (carry, sums).
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    config.check()
    unroll = _make_unroll(config, mesh)

    def step(params_and_carry, batch: AnyBatch, plan: Plan | None):
        return unroll(*params_and_carry, batch, None, plan)

    return CompiledStep(step, config, backward=False)


def batch_sharding(mesh: Mesh, config: RunConfig | None = None) -> NamedSharding:
    """How the arrays of a batch lie on the mesh: [batch, time], or with images [batch, ...].

    Args:
      config: needed for unequal shares and for images only.
    """
    if isinstance(config, ImageConfig):
        return NamedSharding(mesh, batch_rules(config).spec((BATCH,)))
    rules = RULES if config is None else batch_rules(config)
    return NamedSharding(mesh, rules.spec((BATCH, TIME)))


def step_schedule(
    config: Config, share: int = 1, num_chunks: int | None = None, *, backward: bool = True
) -> Schedule:
    """The schedule that a step follows.

    Args:
      share: of the data-parallel group; it has so many times `num_microbatches`.
      num_chunks: of the batch; None if it has the full length.
      backward: False in an evaluation.
    """
    return _make_schedule(
        config.pipeline.schedule if config.mesh.stage > 1 else "1f1b",
        config.mesh.stage,
        share * config.pipeline.num_microbatches,
        config.num_chunks if num_chunks is None else num_chunks,
        config.num_groups,
        backward=backward,
    )


def abstract_batch(config: RunConfig, mesh: Mesh) -> AnyBatch:
    """A batch without its values, as a step takes it: shapes, dtypes and shardings."""

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh, config))

    rows = config.data.batch_size
    if isinstance(config, ImageConfig):
        images = array((rows, *config.model.image_shape), jnp.float32)
        return ImageBatch(images, array((rows,), jnp.int32))
    tokens = array((rows, config.data.seq_len), jnp.int32)
    return Batch(tokens, tokens, starts=True)


def _make_unroll(
    config: RunConfig, mesh: Mesh
) -> Callable[..., tuple[nnx.State, LossSums | ImageSums]]:
    """(params, carry, batch, dropout key, plan) -> (carry, sums) over one window."""
    if isinstance(config, ImageConfig):
        return _make_classify(config, mesh)
    config = with_kernel(config, choose_kernel(config, mesh))
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config)))
    run = functools.partial(_run_in_units if config.runs_in_units else _run_plainly, config, mesh)

    def unroll(params, carry, batch, dropout_key, plan):
        # Parameters stored split over `data` are gathered here, and their gradients scattered.
        params = constrain(params, mesh, compute_rules(config))
        carry = jax.tree.map(lambda a: jnp.where(batch.starts, jnp.zeros_like(a), a), carry)
        model: LSTMLanguageModel = nnx.merge(graphdef, params)
        after, sums = run(model, unwrap_carry(carry), batch, dropout_key, plan)
        return wrap_carry(after), sums

    return unroll


def _make_classify(config: ImageConfig, mesh: Mesh):
    """As `_make_unroll`, for images: there is no carry and no plan."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config)))
    layout = Layout(mesh, compute_rules(config))

    def classify(params, carry, batch: ImageBatch, dropout_key, plan):
        model: HybridConvNet = nnx.merge(graphdef, params)
        logits_BV = model(jnp.asarray(batch.images_BHWC), layout, dropout_key=dropout_key)
        labels_B = layout(jnp.asarray(batch.labels_B), DENSE_BATCH)
        sums = cross_entropy(logits_BV[None], labels_B[None])
        is_right_B = jnp.argmax(logits_BV, axis=-1).astype(labels_B.dtype) == labels_B
        return carry, ImageSums(*sums, jnp.sum(is_right_B, dtype=jnp.float32))

    return classify


def _run_plainly(config: Config, mesh: Mesh, model: LSTMLanguageModel, carry, batch, key, plan):
    max_logits = LOGITS_ON_CPU if mesh.devices.flat[0].platform == "cpu" else LOGITS_ELSEWHERE

    def run(model, carry, inputs_BT, targets_BT, key, first_row=0):
        carry, y_TBH = model.outputs(inputs_BT, carry, dropout_key=key, first_row=first_row)
        with jax.named_scope("head"):
            kernel_HV, bias_V = model.head_params
            targets_TB = targets_BT.T
            return carry, linear_cross_entropy(
                y_TBH, kernel_HV, bias_V, targets_TB, max_logits=max_logits
            )

    rows = (batch.inputs_BT, batch.targets_BT)
    if mesh.shape[DATA] == 1:
        return run(model, carry, *rows, key)

    # Left to itself, the compiler would sum gradients over `data` in the loop over the layers. Here they
    # are summed where the parameters came in, all at once.
    def run_shard(params, carry, inputs_BT, targets_BT, key):
        group = lax.axis_index(DATA)
        with jax.named_scope("gradients"):
            params = vary_like(params, group)
        first_row = group * inputs_BT.shape[0]
        model = nnx.merge(graphdef, params)
        carry, sums = run(model, carry, inputs_BT, targets_BT, key, first_row)
        with jax.named_scope("loss"):
            return carry, lax.psum(sums, DATA)

    graphdef, params = nnx.split(model)
    return jax.shard_map(
        run_shard,
        mesh=mesh,
        axis_names={DATA},
        in_specs=(P(), P(None, DATA), P(DATA), P(DATA), P()),
        out_specs=(P(None, DATA), P()),
    )(params, carry, *rows, key)


def _run_in_units(config: Config, mesh: Mesh, model: LSTMLanguageModel, carry, batch, key, plan):
    """The model's three parts, handed to the pipeline engine."""
    sharded = config.pipeline.head == "sharded" and mesh.shape[STAGE] > 1
    table, hidden_size = model.embedding.table[...], config.model.hidden_size
    dtype = jnp.dtype(config.model.dtype)

    def first(table, tokens_tb, position):
        return extend(table[tokens_tb].astype(dtype), hidden_size)

    def add_first_gradient(total, table, tokens_tb, position, dx_tbH):
        return total.at[tokens_tb].add(dx_tbH[..., : table.shape[1]].astype(total.dtype))

    def last(params, y_tbH, targets_tb, position: Position):
        position = position._replace(layer=config.model.num_layers)
        y_tbH = dropout(y_tbH, config.model.dropout, key, position)
        kernel, bias = params
        kernel_HV = kernel.T if config.model.tie_embedding else kernel
        logits_tbV = matmul(y_tbH, kernel_HV, dtype) + bias[None, None]
        return cross_entropy(logits_tbV, targets_tb, manual_axis=STAGE if sharded else None).nll

    if config.model.tie_embedding:
        head, head_specs = (table, model.head_bias[...]), (P(STAGE), P(STAGE))
    else:
        head = (model.head.kernel[...], model.head.bias[...])
        head_specs = (P(None, STAGE), P(STAGE))
    pipeline = Pipeline(
        layer=model.lstm.layer(key),
        first=first,
        last=last,
        mesh=mesh,
        layer_ids=model.lstm.layer_ids,
        chunk_len=batch.inputs_BT.shape[1] // config.num_chunks,
        microbatch_rows=config.microbatch_rows,
        head="sharded" if sharded else "last",
        last_specs=head_specs,
        remat=config.pipeline.remat,
        first_gradient=add_first_gradient,
        first_rows=tuple(
            np.cumsum((0, *config.shares[:-1])) * (config.data.batch_size // sum(config.shares))
        ),
    )
    # A table that is a split head as well is gathered once and before the loop. So is one that has to be
    # widened and is split over `tensor`: its parts move between devices, which must not be in a branch.
    if mesh.shape[TENSOR] > 1:
        table = extend(table, hidden_size)
    params = PipelineParams(table, model.lstm.params, head)
    deal, gather = _deal(config, mesh)
    rows = (deal(batch.inputs_BT, 0).T, deal(batch.targets_BT, 0).T)
    carry = jax.tree.map(lambda a: deal(a, 1), carry)
    nll, carry, _ = pipeline.loss(params, carry, *rows, plan)
    carry = jax.tree.map(lambda a: gather(a, 1), carry)
    return carry, LossSums(nll, jnp.sum(batch.targets_BT != IGNORE, dtype=jnp.float32))


def _deal(config: Config, mesh: Mesh):
    """Two functions of (array, its dim of the batch): to the groups' own rows, and back to the user's order.

    Every group has room for the largest share; what a smaller one leaves empty is not computed.
    """
    if config.has_equal_shares:
        return (lambda a, dim: a), (lambda a, dim: a)
    part = config.data.batch_size // sum(config.shares)
    room, ends = part * max(config.shares), np.cumsum(config.shares) * part
    dealt = np.zeros((len(config.shares), room), np.int32)
    for group, (share, end) in enumerate(zip(config.shares, ends, strict=True)):
        dealt[group, : share * part] = np.arange(end - share * part, end)
    places = np.concatenate([g * room + np.arange(s * part) for g, s in enumerate(config.shares)])

    def deal(a, dim: int):
        spec = P(*[None] * dim, DATA) if dim == 0 else P(STAGE, DATA)
        return lax.with_sharding_constraint(
            jnp.take(a, dealt.ravel(), axis=dim), NamedSharding(mesh, spec)
        )

    return deal, lambda a, dim: jnp.take(a, places, axis=dim)


def _full_plan(config: RunConfig, *, backward: bool) -> Plan | None:
    if isinstance(config, ImageConfig) or not config.runs_in_units:
        return None
    return _plan(config, config.num_chunks, backward)


@functools.lru_cache
def _plan(config: Config, num_chunks: int, backward: bool) -> Plan:
    """The schedules of a batch of so many chunks, in a program that holds `config.num_chunks`."""

    def schedule(share: int, K: int) -> Schedule:
        return step_schedule(config, share, K, backward=backward)

    any_length = range(1, config.num_chunks + 1)
    capacity = largest([schedule(share, K) for share in {*config.shares} for K in any_length])
    return make_plan([schedule(share, num_chunks) for share in config.shares], capacity)
