"""The parameters of an adopted model as its user's optimizer sees them: nested as the user's model is.

    stored      layers.block.own.up.kernel (blocks 0, 1)               outer.embed.embedding
    shown       blocks.0.up.kernel    blocks.1.up.kernel               embed.embedding

So masks and labels look at the user's paths. Blocks that the user has stacked stay one node of their arrays.
"""

import collections
from typing import Any

import jax
import optax
from flax import nnx

from jaxpar.base.types import OptState, Params, Tree
from jaxpar.sharding import user_names
from jaxpar.step.per_layer import Own

Path = tuple[Any, ...]


def in_user_tree(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer of stored parameters, with each layer's own arrays, that shows them to the given one."""

    def init(params: Params) -> OptState:
        tree = _UserTree(params)
        return tree.stored(optimizer.init(tree.shown(params)))

    def update(
        updates: Params, state: OptState, params: Params = None, *loss: Any
    ) -> tuple[Params, OptState]:
        tree = _UserTree(updates)
        return tree.stored(optimizer.update(*map(tree.shown, (updates, state, params)), *loss))

    return optax.GradientTransformation(init, update)


class _UserTree:
    """Which parameter is where."""

    def __init__(self, params: Params):
        """Looks at the stored parameters."""
        self._names = dict[Path, tuple[str, str]]()  # of each stack
        self._whole = dict[Path, Path]()  # the stored path of a parameter that is of no layer
        self._rows = collections.defaultdict[Path, dict[int, tuple[Path, int]]](dict)
        self._is_stacked = set[Path]()
        for path, leaf in _flat(params).items():
            known = user_names(leaf[0] if isinstance(leaf, Own) else leaf)
            assert known is not None
            if not isinstance(leaf, Own):
                self._whole[_path_of(known.names[0])] = path
                continue
            self._names[path] = leaf.names
            for place, name in enumerate(known.names):
                shown, is_row, number = name.partition("@")
                self._rows[_path_of(shown)][int(number or 0)] = path, place
                self._is_stacked |= {_path_of(shown)} if is_row else set()

    def shown(self, tree: Tree) -> Tree:
        """A tree with parameters as the user's model has them, wherever it has stored ones."""
        paths = {*self._names, *self._whole.values()}

        def of(node: Tree) -> Tree:
            if not isinstance(node, nnx.State) or (flat := _flat(node)).keys() != paths:
                return node
            found = {shown: flat[path] for shown, path in self._whole.items()}
            for shown, rows in self._rows.items():
                own = [flat[path][place] for _, (path, place) in sorted(rows.items())]
                names = self._names[rows[0][0]]
                found[shown] = Own.of(names, own) if shown in self._is_stacked else own[0]
            return nnx.from_flat_state(found)

        return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, nnx.State))

    def stored(self, tree: Tree) -> Tree:
        """The reverse."""
        paths = {*self._rows, *self._whole}

        def of(node: Tree) -> Tree:
            if not isinstance(node, nnx.State) or (flat := _flat(node)).keys() != paths:
                return node
            found = {path: flat[shown] for shown, path in self._whole.items()}
            stacks = collections.defaultdict[Path, dict[int, Tree]](dict)
            for shown, rows in self._rows.items():
                own = flat[shown] if shown in self._is_stacked else [flat[shown]]
                for (_, (path, place)), leaf in zip(sorted(rows.items()), own, strict=True):
                    stacks[path][place] = leaf
            for path, rows in stacks.items():
                found[path] = Own.of(self._names[path], [rows[n] for n in range(len(rows))])
            return nnx.from_flat_state(found)

        return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, nnx.State))


def _path_of(name: str) -> Path:
    """A path as `nnx.state` has it."""
    return tuple(int(step) if step.isdigit() else step for step in name.split("."))


def _flat(tree: nnx.State) -> dict[Path, Any]:
    """What a tree has at its paths: variables, or what an optimizer has put in their places."""
    inner = nnx.State, dict
    pairs = jax.tree.leaves_with_path(tree, is_leaf=lambda node: not isinstance(node, inner))
    return {tuple(step.key for step in path): leaf for path, leaf in pairs}
