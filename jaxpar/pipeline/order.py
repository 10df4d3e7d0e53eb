"""The order of work that a compiler may not change.

All devices must come to collectives in one order, and wait forever if they don't. XLA's CPU runtime keeps the
order of those that stand beside each other; one within a branch or a loop may come before or after what
follows it. XLA drops `optimization_barrier` there, too. So a branch with collectives counts its turns, and
what comes next needs that count:

    x, turns = lax.cond(runs, lambda: (work(x), turns + 1), lambda: (x, turns))
    y = after(turns, y)
"""

import jax
import jax.numpy as jnp

from jaxpar.base.axes import STAGE, TENSOR
from jaxpar.base.types import Arrays, Tree
from jaxpar.pipeline.spec import Spec


def after(turns: jax.Array, values: Tree) -> Arrays:
    """The values, but only after the branches that had so many turns.

    A compiler keeps this order: it can't know that a count is never below 0.
    """
    never = turns < 0
    return jax.tree.map(lambda a: jnp.where(never, jnp.zeros_like(a), a), values)


def after_collectives(spec: Spec, turns: jax.Array, values: Tree) -> Arrays:
    """The values, but only after branches with collectives, where the runtime does not keep their order.

    Elsewhere they are returned as they are.
    """
    sizes = spec.mesh.shape
    if spec.platform == "cpu" and sizes[STAGE] * sizes[TENSOR] > 1:
        return after(turns, values)
    return values
