"""All that is known of a task's model from shapes, on any devices; no array is made.

How devices share it is a `partition.Partition`, which is arithmetic on these facts.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.axes import BATCH, DATA, STAGE, TIME
from jaxpar.base.checks import require
from jaxpar.base.parts import LENGTHS, WEIGHT, part_of
from jaxpar.base.trees import zeros
from jaxpar.base.types import Arrays, Batch, Function, Module, Params, Tree
from jaxpar.model.model import Sums, overrides
from jaxpar.model.outer import STACK, OuterModule, Uses, modules, outer_modules, split_params, uses
from jaxpar.model.traced import TracedModel, own_axes
from jaxpar.pipeline.placement import PartCosts, Passes
from jaxpar.sharding import dims_of
from jaxpar.trace.bound import in_bound
from jaxpar.trace.counts import amount, moving_inputs, used_inputs
from jaxpar.trace.jaxprs import pruned


class ModelFacts(TracedModel):
    """A task's model, on any devices: what its parts use, compute and depend on."""

    @functools.cached_property
    def split_dims(self) -> dict[str, str]:
        """The modules before and after the layers that can be in parts, and the name of the dim of each."""
        of_rules = {}
        for name, module in modules(self.model):
            key, dim = next(iter(split_params(module).items()))
            of_rules[name] = dims_of(getattr(module, key))[dim] or ""
        own = {name: end.dim for name, end in self.outer_modules.items()}
        return {name: dim for name, dim in {**of_rules, **own}.items() if dim}

    @functools.cached_property
    def part_names(self) -> list[str]:
        """What users call the parts: what comes before the layers, each layer, and what follows the last."""
        if self.cut_model is None:
            layers = (f"layer {n} ({self.kinds[kind]})" for n, kind in enumerate(self.kind_of))
            return ["first", *layers, "last"]
        before, after = self.ends
        return [before, *self.cut_model.variables.block_names, after]

    @functools.cached_property
    def layer_numbers(self) -> int:
        """How many numbers are trained in the layers."""
        of_layers = self.params.get(STACK, {})
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(of_layers))

    @functools.cached_property
    def reads(self) -> tuple[frozenset[str], frozenset[str]]:
        """The variables that `first` reads, and those that `last` or `predict` does."""
        first, last = (own.read for own in self.uses)
        if overrides(self.model, "predict"):
            last |= uses(self.model, self._on_zeros("predict")).read
        names = (frozenset(path.removesuffix("/value") for path in own) for own in (first, last))
        return next(names), next(names)

    @property
    def divides_by_hand(self) -> bool:
        """Whether the batch is split over `data`, and axes of one's own, so that a step can cut it itself."""
        first, *others = self.task.rules.axes_of(BATCH) or (None,)
        return first == DATA and set(others) <= {*self.task.axes}

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes of one's own that split rows."""
        return self.task.rules.axes_of(BATCH)[1:] if self.divides_by_hand else ()

    @property
    def time_axes(self) -> tuple[str, ...]:
        """The axes of one's own that split time."""
        axes = dict(self.task.rules.table).get(TIME, ())
        return tuple(axis for axis in axes if axis in self.task.axes)

    @property
    def layer_flops(self) -> float:
        """FLOPs of the forward pass of a mean layer over a whole batch."""
        return float(np.mean(self.costs.layers, axis=0)[0]) if self.kind_of else 0.0

    @property
    def step_flops(self) -> float:
        """FLOPs of a full batch, forward and backward, but for what is computed again (arXiv:2204.02311, B).

        A product has at most two of its size in its backward pass: a layer with more computes some again.
        """
        parts = (self.costs.first, *self.costs.layers, self.costs.last)
        return sum(forward + min(backward, 2 * forward) for forward, backward in parts)

    @functools.cached_property
    @in_bound(own_axes)
    def costs(self) -> PartCosts:
        """FLOPs of each part over a whole batch; layers without any have 1 forward and 2 backward."""
        (_, params, frozen), y, block = self.split(self.model), self.traces.y, self.block

        def last(params, y, frozen, block):
            return self.last(params, frozen, y, block)

        by_kind = [_passes(*each) for each in self.layer_totals]
        layers = tuple(by_kind[kind] for kind in self.kind_of)
        return PartCosts(
            layers=layers if np.any(layers) else ((1.0, 2.0),) * len(layers),
            first=_passes(_total(self.first), ((params,), frozen, block)),
            last=_passes(_total(last), ((params, y), frozen, block)),
        )

    @property
    def layer_totals(self) -> list[tuple[Function, Arrays]]:
        """Of each kind, what a layer gives of a whole batch added up, and shapes of the arguments.

        The gradient in the first argument is what a backward pass computes.
        """
        params, totals = self.params, []
        kinds = zip(self.traces.layers, self.kinds, strict=True)
        for (run, (state, carry, x, block)), name in kinds:
            own, others = nnx.split_state(state, _in(params.get(STACK, {}).get(name, {})), ...)

            def layer(own, carry, x, others, block, run=run):
                return run(nnx.merge_state(own, others), carry, x, block)

            totals.append((_total(layer), ((own, carry, x), others, block)))
        return totals

    @in_bound(own_axes)
    def check_gradient(self) -> None:
        """Checks that the loss depends on something that is trained; the last part is looked at first.

        Raises:
          ValueError: its derivative is zero, whatever the numbers are.
        """
        _, params, frozen = self.split(self.model)

        def last(inputs, frozen, block):
            params, y = inputs
            return self.last(params, frozen, y, block).loss

        found = moving_inputs(last, (params, self.traces.y), frozen, self.block)
        num_own = len(jax.tree.leaves(params))
        depends, passes = any(found[:num_own]), any(found[num_own:])
        for kind in reversed(self.kind_of):
            if depends or not (passes or self.traces.adds_sums):
                break
            layer, ((own, carry, x), *others) = self.layer_totals[kind]
            found = moving_inputs(layer, (own, carry, x), *others)
            num_own, num_carried = len(jax.tree.leaves(own)), len(jax.tree.leaves(carry))
            num_own += num_carried * self.starts_with_variables
            depends, passes = any(found[:num_own]), any(found[num_own:])
        if passes and not depends:
            depends = any(moving_inputs(_total(self.first), (params,), frozen, self.block))
        require(
            depends,
            f"the loss of model {type(self.model).__name__} does not depend on any trained parameter.\n"
            f"Fix: compute it without stop_gradient, argmax or rounding, or change Task.frozen.",
        )

    @functools.cached_property
    @in_bound(own_axes)
    def knows_weight(self) -> bool:
        """Whether the weight of `last` depends on the batch alone: it is known before a backward pass."""
        return not any(self._read_for(lambda sums: sums.weight)[0])

    @functools.cached_property
    @in_bound(own_axes)
    def counts_padding(self) -> bool:
        """Whether places that only fill a batch count: the loss reads neither its weights nor lengths."""
        if part_of(self.block, WEIGHT) is None or self.traces.adds_sums:
            return False
        read = self._read_for(lambda sums: sums.loss)[1]
        return not any(part_of(read, name, default=False) for name in (WEIGHT, LENGTHS))

    def _read_for(self, number: Callable[[Sums], jax.Array]) -> tuple[list[bool], Batch]:
        """Which variables and y, and which parts of the batch, a number of `last` is computed from."""

        def run(own, block):
            params, frozen, y = own
            return number(self.last(params, frozen, y, block))

        args = (*self.split(self.model)[1:], self.traces.y), self.block
        used = used_inputs(pruned(run, *args), *jax.tree.leaves(args))
        num_own = len(jax.tree.leaves(args[0]))
        return used[:num_own], jax.tree.unflatten(jax.tree.structure(self.block), used[num_own:])

    @functools.cached_property
    @in_bound(own_axes)
    def uses(self) -> tuple[Uses, Uses]:
        """How `first` and `last` use the modules of the model."""
        return self.uses_of(self.model)

    def uses_of(self, model: Module, *, predicts: bool = False) -> tuple[Uses, Uses]:
        """How `first` and `last`, or `predict`, use the modules of a model."""
        last = "predict" if predicts else "last"
        of_last = uses(model, self._on_zeros(last))
        return uses(model, self._on_zeros("first")), of_last

    def _on_zeros(self, method: str) -> Function:
        """A method of a model for zeros. They are made in its trace: a whole batch would take much memory."""

        def run(own: Module) -> Tree:
            batch = zeros(self.block)
            y = () if method == "first" else (zeros(self.traces.y),)
            return getattr(own, method)(*y, batch, self.at(batch))

        return run

    @functools.cached_property
    def outer_modules(self) -> dict[str, OuterModule]:
        """What comes before and after the layers and can be in parts, by name.

        Where the model has `last_part`, what it uses is its own affair.
        """
        found = outer_modules(self.model, self.uses)
        return {
            name: end
            for name, end in found.items()
            if STAGE not in self.task.rules.axes_of(end.dim)
            and not (self.has_last_part and name in self.uses[1].modules)
        }


def _in(state: Params) -> Callable[..., bool]:
    """A filter for the variables that have the path of one in a state."""
    paths = {path for path, _ in nnx.to_flat_state(nnx.State(state))}
    return lambda path, _: tuple(path) in paths


def _total(function: Function) -> Function:
    """(inputs, *others) -> a real sum of all floats that a function of these gives."""

    def total(inputs, *others):
        out = map(jnp.asarray, jax.tree.leaves(function(*inputs, *others)))
        floats = [leaf for leaf in out if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        sums = [jnp.sum(jnp.real(leaf).astype(jnp.float32)) for leaf in floats]
        sums += [jnp.sum(jnp.imag(leaf)) for leaf in floats if jnp.iscomplexobj(leaf)]
        return sum(sums)

    return total


def _passes(total: Function, args: Arrays) -> Passes:
    """FLOPs forward and backward, with the gradient in the first argument."""
    forward = amount(total, *args).flops
    return forward, amount(jax.grad(total), *args).flops - forward
