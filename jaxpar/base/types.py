"""Names for the trees of arrays that parts of jaxpar give each other.

JAX has no type for a pytree: to a type checker most of these are anything. The name tells a reader what is in
the tree.
"""

from typing import Any, TypeAlias

import jax

Tree: TypeAlias = Any
"""Any pytree."""
Arrays: TypeAlias = Any
"""A pytree of arrays."""
Shapes: TypeAlias = Any
"""A pytree of `jax.ShapeDtypeStruct`."""
Specs: TypeAlias = Any
"""A pytree of `jax.sharding.PartitionSpec`, or of shardings."""
Batch: TypeAlias = Any
"""Arrays of a batch, or of a block of one: [rows, time, ...] for users, [time, rows, ...] for models."""
Carry: TypeAlias = Any
"""The state of a layer along time, or that of all layers; arrays [rows, ...]."""
Params: TypeAlias = Any
"""Variables of a layer or a model that are trained, or others."""
Activations: TypeAlias = Any
"""What goes from layer to layer: arrays [time, rows, ...], or [rows, ...] without time."""
Cotangents: TypeAlias = Any
"""Gradients of the loss with respect to a tree, of its structure."""
Outputs: TypeAlias = Any
"""What `last` or `predict` of a model gives for a block: sums, or arrays by name."""
OptState: TypeAlias = Any
"""The state of an optimizer, as optax has it."""
Module: TypeAlias = Any
"""A Flax module, which need not be of a class of jaxpar's."""
Jaxpr: TypeAlias = Any
"""A traced program, or an equation, variable or literal of one."""
Index: TypeAlias = int | jax.Array
"""A whole number, which may be traced."""
Json: TypeAlias = dict[str, Any]
"""A table by names, as JSON has it."""
