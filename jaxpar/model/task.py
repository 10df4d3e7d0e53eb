"""The base class of tasks, and how a task is found by its name or file.

Plain data: what needs JAX is imported where it is used.
"""

import collections
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from jaxpar.base.checks import check_fields, require, require_instance
from jaxpar.base.files import read_file
from jaxpar.base.loading import LOADED
from jaxpar.base.paths import local_path
from jaxpar.config import Parallel, TrainConfig

if TYPE_CHECKING:
    import optax
    from flax import nnx

    from jaxpar.data.batches import Batches
    from jaxpar.model.weights import Weights
    from jaxpar.sharding import Rules

# Those that come with jaxpar, by the name that a command line gives them: module and class.
TASKS = {"lm": ("jaxpar.lm.task", "LM")}
# Modules with commands of theirs, each in a table COMMANDS.
COMMANDS_OF_TASKS = ("jaxpar.lm.commands",)

CLIP_NORM = 1.0  # for an `OptimizerConfig`, if the settings leave it open

FILE_OF_TASK = "jaxpar_task_"  # how the name of the module of a user's file begins


@dataclasses.dataclass(frozen=True)
class Task:
    """Base class of tasks: derive a frozen dataclass that makes a model, its data and its optimizer.

    Its fields are options of the command line. A task must have `make_model` and `make_batches`, and either
    `make_optimizer` or a field `optimizer: OptimizerConfig`, unless your own loop updates its parameters
    (`value_and_grad`). The rest has defaults. A run can be resumed with other values of fields that change
    neither arrays nor batches. A field with `metadata={"free": True}` may change batches as well.

    Attributes:
      unit: Unit that `Sums.weight` counts, in the plural: "tokens".
      frozen: NNX filter of parameters that are not trained; none by default. Frozen parameters have no
        gradient, no buffer and no optimizer state.
      layers: Place of the blocks, for a task whose model is any Flax module (see `loss`): the path of an
        `nnx.List`, `nnx.Sequential` or `nnx.Dict` ("decoder.blocks"), a part of one ("net[2:10]"), numbered
        attributes ("block_*"), or one module with stacked parameters, made by `nnx.vmap` and called by
        `nnx.scan`. None takes the only list of modules in the model.
      dims: Dims of parameters by their paths, for such a task, as names or as axes of the mesh:
        {"blocks.*.up.kernel": (None, "tensor")}. A * stands for anything. They replace those of the model.
      axes: Names of your own axes, over which rules may split dims and layers may use collectives. A mesh
        without such an axis has it with size 1.
      train, parallel: Default settings and default layout of its runs.
      run_class: Class of its loaded runs, by module and name; it derives from `LoadedRun`.

    Example:
      @dataclasses.dataclass(frozen=True)
      class Regression(jaxpar.Task):
        batch_size: int = 16
        optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig()

        def make_model(self, rngs):
          return Net(rngs)

        def loss(self, model, batch):
          return jaxpar.mean((model(batch["x"]) - batch["y"]) ** 2, batch["weight"])

        def make_batches(self, split, seed=None):
          return jaxpar.ArrayBatches({"x": x, "y": y}, self.batch_size, seed)
    """

    unit: ClassVar[str] = "rows"
    frozen: ClassVar[Any] = False
    # Without an annotation: tasks may have fields of these names, in an order of their own.
    layers = cast("str | None", None)
    dims = cast("Mapping[str, tuple[str | None, ...]]", MappingProxyType({}))
    axes: ClassVar[tuple[str, ...]] = ()
    train: ClassVar[TrainConfig] = TrainConfig()
    parallel: ClassVar[Parallel] = Parallel()
    run_class: ClassVar[str] = "jaxpar.training.loaded:LoadedRun"

    def __post_init__(self):
        check_fields(self)

    @property
    def name(self) -> str:
        """Name of the task: the name of its class."""
        return type(self).__name__

    @property
    def rules(self) -> "Rules":
        """Rules that map the names of dims to axes of the mesh."""
        from jaxpar.sharding import RULES

        return RULES

    @property
    def variable_length(self) -> bool:
        """Whether batches may have fewer time steps than `example_batch`."""
        return False

    @property
    def has_optimizer(self) -> bool:
        """Whether it has an optimizer, which `fit` and `make_train_step` need."""
        return hasattr(self, "optimizer") or self.has_own_optimizer

    @property
    def has_own_optimizer(self) -> bool:
        """Whether it has its own `make_optimizer`, which need not use a field `optimizer`."""
        return type(self).make_optimizer is not Task.make_optimizer

    @property
    def config_of_optimizer(self) -> Any:
        """The `OptimizerConfig` that makes its optimizer; None if there is none, or a `make_optimizer`."""
        return None if self.has_own_optimizer else getattr(self, "optimizer", None)

    @property
    def evaluates_others(self) -> bool:
        """Whether it evaluates parameters other than those it trains; see `evaluated_params`."""
        return type(self).evaluated_params is not Task.evaluated_params

    @property
    def adopts(self) -> bool:
        """Whether its model is any Flax module: it has a method `loss`; a field may have that name too."""
        return callable(type(self).loss) and type(self).loss is not Task.loss

    def make_model(self, rngs: "nnx.Rngs") -> Any:
        """The model; see `model.Model`. With a `loss`, it is any Flax module with blocks in a list."""
        raise ValueError(f"task {self.name} has no make_model(self, rngs).\nFix: write one.")

    def loss(self, model: Any, batch: Any) -> Any:
        """Optional: the loss of a model that is any Flax module, which this method calls.

        Args:
          model: as `make_model` returns it.
          batch: arrays [rows, ...].
        Returns:
          sums over the rows: a `Sums`, such as `jaxpar.mean(losses, mask)`, or (sum of the losses, number of
          items).
        """
        raise NotImplementedError

    def predict(self, model: Any, batch: Any) -> Any:
        """Optional, with a `loss`: what is predicted for each row; by default what the model's call returns.

        Returns:
          arrays [rows, ...] by name, or one array.
        """
        raise NotImplementedError

    def make_batches(self, split: str, seed: int | None = None) -> "Batches":
        """The batches of a split.

        Args:
          split: "train", "valid" or "test".
          seed: of their order; None for evaluation, where every row counts once.
        """
        raise ValueError(
            f"task {self.name} has no make_batches(self, split, seed=None).\nFix: write one."
        )

    def make_optimizer(self, num_steps: int) -> "optax.GradientTransformation":
        """The optimizer of a run of that many steps.

        Before an optimizer of your own, gradients are clipped only if `train.clip_norm` is given.
        """
        from jaxpar.model import optimizer

        require(
            hasattr(self, "optimizer"),
            f"task {self.name} has no optimizer.\n"
            f"Fix: write make_optimizer(self, num_steps), or a field optimizer: OptimizerConfig.",
        )
        config = getattr(self, "optimizer")  # noqa: B009 - a field of the user's
        return optimizer.make_optimizer(config, num_steps)

    def learning_rate(self, num_steps: int) -> "optax.Schedule | None":
        """Step -> learning rate, as it is reported; None if there is no single number.

        A task with its own `make_optimizer` gives None, unless it overrides this method too. For None, the
        rate that `optax.inject_hyperparams` keeps is reported, if there is one.
        """
        from jaxpar.model import optimizer

        config = self.config_of_optimizer
        return None if config is None else optimizer.learning_rate(config, num_steps)

    def after_validation(self, opt_state: Any, losses: Mapping[int, float]) -> Any:
        """The optimizer's state to go on with after a validation; by default as it is.

        A run that is resumed at a validation may ask once more, also with a state that was changed for it:
        what is done for a loss must not be done twice. A task with this method needs validations
        (`train.eval_every`).

        Args:
          opt_state: of the optimizer that `make_optimizer` makes, arrays where they lie; a new one must lie
            as the old one does.
          losses: of all validations so far, by the steps after which they were.
        """
        return opt_state

    def evaluated_params(self, params: "nnx.State", opt_state: Any) -> "nnx.State":
        """What is evaluated, sampled and exported: a tree as `params`, which it is by default.

        It is traced, and asked for whenever a trained state is to be used; for an optimizer that keeps a mean
        of the parameters, such as a moving average.
        """
        return params

    def example_batch(self) -> Any:
        """A batch of training on the host; others have its shapes, or fewer steps (`variable_length`)."""
        from jaxpar.base.parts import check_batches

        batches = self.make_batches("train", 0)
        check_batches(batches, self.name)
        return batches.batch(getattr(batches, "longest", 0))

    def resolve(self) -> "Task":
        """The task with the sizes that its data tell filled in."""
        return self

    def check(self, parallel: Parallel) -> None:
        """Raises a ValueError if the task cannot run so; `parallel` has no -1 left."""

    def check_batch(self, batch: Any) -> None:
        """Raises a ValueError for values that would silently give a wrong number."""

    def metrics(self, loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """What is reported, by name: "loss", if it is there, is the loss, and no other number of a run's own.

        Args:
          loss: the mean.
          means: the sums of `Sums.metrics` divided by that of the weight.
        """
        return {"loss": loss, **means} | {"loss": loss}

    def baseline(self, split: str) -> dict[str, float]:
        """What to compare an evaluation with, by name."""
        return {}

    def describe(self) -> list[tuple[str, str]]:
        """Lines for the table before a run: (what, in words).

        Lines `data` and `batch` replace those that jaxpar would write.
        """
        return []

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, as JSON has it: a resumed run must have the same."""
        return {}

    def files(self) -> dict[str, str]:
        """Texts that belong to the model, such as a vocabulary, by the name of their file."""
        return {}

    def take_weights(self, weights: "Weights") -> "Weights":
        """The weights of a start, as this task's model takes them; by default as they are.

        For a task whose model has rows for what its data have, such as words, or that knows the names of
        another program.

        Args:
          weights: by the names that they have, or get by `Start.rename`; nothing is read yet.
        Raises:
          ValueError: they are not for this task.
        """
        return weights


class Settings(NamedTuple):
    """All that a run is made from: what is learned, on which devices, and how it proceeds."""

    task: Task
    parallel: Parallel
    train: TrainConfig

    @property
    def clip_norm(self) -> float | None:
        """The limit of the global gradient norm; None if gradients are not clipped.

        If `train` leaves it open, it depends on the optimizer. The numbers of an `OptimizerConfig` are chosen
        for clipped gradients. A user's own optimizer gets gradients as they are.
        """
        limit = self.train.clip_norm
        if limit is None and self.task.config_of_optimizer is not None:
            limit = CLIP_NORM
        return None if limit == 0 else limit


def check_task(task: Any) -> None:
    """Raises a ValueError for what is not a task."""
    use = "a task, such as jaxpar.lm.LM(), or an object of your own class that derives from jaxpar.Task"
    require_instance("task", task, Task, use)


def find_task(spec: str) -> type[Task]:
    """The class of a task: "lm", or one of yours as "path/to/file.py:Name".

    Raises:
      OSError: there is no such file.
      ValueError: the file has no such task, or fails when it is run.
    """
    if spec in TASKS:
        module, name = TASKS[spec]
        return getattr(importlib.import_module(module), name)
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        near = difflib.get_close_matches(spec, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"there is no task {spec!r}{hint}\nFix: use {', '.join(TASKS)}, or yours as path/to/file.py:Name."
        )
    path = local_path(file)
    source = read_file(path, f"the file of task {spec!r},", "give a file of Python")
    # The program itself is not run once more: it may train, or load what it has trained.
    main, resolved = sys.modules["__main__"], path.resolve()
    main_path = getattr(main, "__file__", None)
    is_program = main_path is not None and Path(main_path).resolve() == resolved
    module = main if is_program else _load(resolved, source)
    tasks = {
        key: value if isinstance(value, type) else type(value)  # `task = jaxpar.adopt(...)`
        for key, value in vars(module).items()
        if isinstance(value, Task) or (isinstance(value, type) and issubclass(value, Task))
    }
    tasks.pop(Task.__name__, None)
    require(
        name in tasks,
        f"{path} has no task {name!r}; it has {', '.join(tasks) or 'none'}.\n"
        f"Fix: name one that it has, derive a dataclass from jaxpar.Task, or write task = jaxpar.adopt(...).",
    )
    task_class = tasks[name]
    hints = inspect.get_annotations(task_class)
    own = {key for key, kind in hints.items() if "ClassVar" not in str(kind)}
    require(
        own <= {field.name for field in dataclasses.fields(task_class)},
        f"{path}: {name} has fields and is no dataclass.\n"
        f"Fix: write @dataclasses.dataclass(frozen=True) above it.",
    )
    return task_class


def spec_of(task: Task) -> str:
    """The spec of a task's class, as `find_task` takes it."""
    for spec, (module, name) in TASKS.items():
        if (type(task).__module__, type(task).__name__) == (module, name):
            return spec
    module = sys.modules.get(type(task).__module__)
    file = getattr(module, "__file__", None)
    if not (file and Path(file).is_file()):
        return task.name
    named = [key for key, value in vars(module).items() if type(value) is type(task)]
    return f"{file}:{next(iter(named), type(task).__name__)}"


# The text of each module of a user's folder as it was loaded: tasks, and what they import from beside them.
_LOADED = collections.defaultdict[Path, dict[str, bytes | None]](dict)


def _file_of(name: str) -> Path:
    """The file of a module; "." if it has none."""
    return Path(getattr(sys.modules.get(name), "__file__", None) or "")


def _text_of(name: str) -> bytes | None:
    """The text of a module's file as it is now; None if there is none."""
    file = _file_of(name)
    return file.read_bytes() if file.is_file() else None


def _load(path: Path, source: bytes) -> Any:
    """The module of a file; the same one as long as nothing changes that was loaded from its folder."""
    folder, known = path.parent, _LOADED[path.parent]
    if any(_text_of(name) != text for name, text in known.items()):
        for name in known:
            if not name.startswith(FILE_OF_TASK):
                sys.modules.pop(name, None)
        known.clear()
    name = f"{FILE_OF_TASK}{path.stem}_{hashlib.sha256(bytes(path) + source).hexdigest()[:8]}"
    if name in known:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    others = {*sys.modules} - {name}
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(folder))
    before = LOADED.set(path)
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[name]
        raise ValueError(
            f"{path} ends the program when it is run: it calls sys.exit({error.code!r})\n"
            f'Fix: call it under if __name__ == "__main__":, for jaxpar runs the file to find its task.'
        ) from error
    except Exception as error:
        del sys.modules[name]
        cause, _, fix = str(error).partition("\nFix: ")
        missing = "give the whole path of that file, or run the command in its folder."
        fix = fix or (missing if isinstance(error, FileNotFoundError) else "correct it.")
        raise ValueError(
            f"{path} fails when it is run: {type(error).__name__}: {cause}\nFix: {fix}"
        ) from error
    finally:
        LOADED.reset(before)
        sys.path.remove(str(folder))
    for new in {*sys.modules} - others:
        file = _file_of(new)
        if folder in file.parents and "site-packages" not in file.parts:
            known[new] = _text_of(new)
    return module
