"""The order of work that a compiler may not change.

All devices must come to collectives in one order, and wait forever if they don't. XLA's CPU runtime keeps the
order of those that stand beside each other; one within a branch or a loop may come before or after what
follows it. XLA drops `optimization_barrier` there, too. So a branch with collectives counts its turns, and
what comes next needs that count:

    x, turns = lax.cond(runs, lambda: (work(x), turns + 1), lambda: (x, turns))
    y = after(turns, y)

So do the loops within a layer, such as the two of one that reads in both directions (`trace/loops.py`).
"""

import jax
from jax.extend.core import Jaxpr

from jaxpar.base.axes import DATA, STAGE, TENSOR
from jaxpar.base.types import Arrays, Tree
from jaxpar.pipeline.spec import Spec
from jaxpar.trace.loops import after, has_several_loops


def after_collectives(spec: Spec, turns: jax.Array, values: Tree) -> Arrays:
    """The values, but only after branches with collectives, where the runtime does not keep their order.

    Elsewhere they are returned as they are.
    """
    sizes = spec.mesh.shape
    if spec.platform == "cpu" and sizes[STAGE] * sizes[TENSOR] > 1:
        return after(turns, values)
    return values


def needs_loops_in_order(spec: Spec, program: Jaxpr) -> bool:
    """Whether loops of a layer may have collectives, and the runtime does not keep the order of several.

    Collectives are those over `tensor`, or over axes of one's own.
    """
    sizes = spec.mesh.shape
    is_split = spec.mesh.size > sizes[DATA] * sizes[STAGE]
    return spec.platform == "cpu" and is_split and has_several_loops(program)
