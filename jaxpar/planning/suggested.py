"""Proposes rules that shard a Flax model over `tensor`."""

from jaxpar.base.checks import require
from jaxpar.base.types import Dims
from jaxpar.mesh import MeshConfig
from jaxpar.model.adopt.marks import is_block
from jaxpar.model.adopt.suggest import Split, by_pattern, format_rules, proposals
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Task, check_task
from jaxpar.trace.jaxprs import inlined, is_call


class SuggestedRules(dict[str, Dims]):
    """Dims of parameters by patterns of their paths, as `adopt(rules=...)` takes them; printed as a table."""

    def __init__(self, splits: dict[str, Split]):
        super().__init__({name: split.dims for name, split in splits.items()})
        self._splits = splits

    def __repr__(self) -> str:
        return (
            format_rules(self._splits) if self._splits else "rules={}  # nothing to split in pairs"
        )


def suggest_rules(task: Task, mesh: MeshConfig | str) -> SuggestedRules:
    """Proposes how `tensor` splits a Flax model: its blocks in pairs of columns and rows, and a wide head.

    It reads the traced products of each block, and of what follows them. A pair needs one sum after its rows.
    The columns of a head need small sums in the loss, and one for the gradient of its input. Nothing else is
    sent. Print the result, and paste it into `adopt(rules=...)` or `Task.dims`. For the limits see
    `model.adopt.suggest`.

    Args:
      task: with a `loss`, of a model as it stands.
      mesh: such as "tp4".
    Raises:
      ValueError: the task is another, or the mesh has no `tensor`.

    Example:
      print(jaxpar.suggest_rules(task, "tp2"))
    """
    check_task(task)
    require(
        task.adopts,
        f"task {task.name} has no loss, so its model is in the layer form.\n"
        f"Fix: name the dims of its parameters, by jaxpar.named.",
    )
    size = (mesh if isinstance(mesh, MeshConfig) else MeshConfig.parse(mesh)).tensor
    require(
        size > 1,
        f"mesh {mesh} has tensor={size}, so nothing is split.\nFix: use one such as 'tp4'.",
    )
    model = ModelFacts.of(task.resolve()).cut_model
    assert model is not None
    program, found = model.program("loss", model.batch, trains=True), dict[str, Split]()
    names = [name.partition("@")[0] for name in model.variables.names]
    for number in range(len(model.kinds)):
        closed = inlined(program.part(number).closed, lambda eqn: is_block(eqn) or is_call(eqn))
        own = model.variables.names_of(number)
        params = dict(zip(closed.jaxpr.invars, own, strict=False))
        for name, split in proposals(closed.jaxpr, params, size).items():
            name, is_row, _ = name.partition("@")
            pair = [other.partition("@")[0] for other in split.pair]
            dims = (None, *split.dims) if is_row else split.dims
            found[name] = split._replace(dims=dims, pair=pair)
    jaxpr, own = program.part("last").closed.jaxpr, model.variables.names_of(-1)
    params = dict(zip(jaxpr.invars, own, strict=False))
    found |= proposals(jaxpr, params, size, of_loss=True)
    return SuggestedRules(by_pattern(found, names))
