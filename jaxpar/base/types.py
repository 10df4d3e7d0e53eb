"""Type names for the trees of arrays that parts of jaxpar exchange.

JAX has no type for a pytree: to a type checker most of these are anything. The name tells a reader what is in
the tree.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jax.typing import DTypeLike

from jaxpar.base.files import Json as Json

Tree: TypeAlias = Any
"""Any pytree."""
Arrays: TypeAlias = Any
"""A pytree of arrays."""
Leaves: TypeAlias = list[jax.Array]
"""The arrays of a tree, in order."""
Shapes: TypeAlias = Any
"""A pytree of `jax.ShapeDtypeStruct`."""
Specs: TypeAlias = Any
"""A pytree of `jax.sharding.PartitionSpec`, or of shardings."""
Dims: TypeAlias = Any
"""Names of the dims of an array, such as ("batch", "hidden"), or a tree of them."""
Batch: TypeAlias = Any
"""Arrays of a batch, or of a block of one: [rows, time, ...] for users, [time, rows, ...] for models."""
Carry: TypeAlias = Any
"""The state of a layer along time, or that of all layers; arrays [rows, ...]."""
Params: TypeAlias = Any
"""Variables of a layer or a model that are trained, or others."""
Activations: TypeAlias = Any
"""What goes from layer to layer: arrays [time, rows, ...], or [rows, ...] without time."""
LayerOutput: TypeAlias = tuple[Carry, Activations]
"""What a layer gives: its state after the last step, and its outputs."""
Cotangents: TypeAlias = Any
"""Gradients of the loss with respect to a tree, of its structure."""
Outputs: TypeAlias = Any
"""What `last` or `predict` of a model gives for a block: sums, or arrays by name."""
OptState: TypeAlias = Any
"""The state of an optimizer, as optax has it."""
Module: TypeAlias = Any
"""A Flax module, which need not be of a class of jaxpar's."""
Atom: TypeAlias = Var | Literal
"""What an equation of a traced program reads."""
Index: TypeAlias = int | np.ndarray | jax.Array
"""A whole number, or several, which may be traced."""
Value: TypeAlias = Any
"""A value of any type: of a field, an argument, a parameter of an equation."""
Number: TypeAlias = Any
"""A number of Python or NumPy, or an array of JAX without dims."""
Function: TypeAlias = Callable[..., Tree]
"""A function of trees of arrays that gives a tree of arrays."""
ArrayLike: TypeAlias = jax.Array | np.ndarray
"""An array of JAX or of NumPy."""
DType: TypeAlias = DTypeLike | None
"""What JAX takes as a dtype: `jnp.float32`, `"float32"`, or a dtype."""
Precision: TypeAlias = lax.PrecisionLike
"""The precision of a matrix product, as `lax.dot_general` takes it."""
JsonValue: TypeAlias = Any
"""A value that JSON can hold."""
