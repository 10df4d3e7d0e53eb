"""The training steps that `benchmarks.programs` lowers, in tables.

The name of a program is made of its table's name and its row, so that it says all that the program is of.
A mesh is (data, stage, tensor), or a text such as "dp2pp2"; units are (microbatches, chunks of time).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import program_flax_models as flax_models
from benchmarks import program_models as models
from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, Task, TrainConfig, lm
from recipes.awd import AWD

LANGUAGE_MODEL = lm.LM(
    num_layers=8,
    hidden_size=16,
    embed_size=16,
    vocab_size=96,
    dropout=0.3,
    batch_size=16,
    seq_len=8,
    optimizer=OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0),
)
TRAIN = TrainConfig()
CLIPPED = TrainConfig(num_steps=9, clip_norm=0.5)

# What counts as small or short in jaxpar, by its place: else the models here would be too small for pools.
POOLS = {"jaxpar.partition.partition.FEW": 0, "jaxpar.partition.pool.COLUMNS": 8}
# Ends count as large, and what is with them as little: else all stages would have them whole.
LARGE_ENDS = {
    "jaxpar.partition.partition.FEW": 0,
    "jaxpar.partition.partition.LITTLE": 1e-9,
    "jaxpar.model.facts.ModelFacts.layer_flops": float("inf"),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """What a program trains, and how."""

    task: Task
    parallel: Parallel
    train: TrainConfig


@dataclasses.dataclass(frozen=True)
class Table:
    """Trainings of one sort.

    Attributes:
      name: the first word of its programs' names.
      make: the training of a row, whose fields are its arguments.
      rows: of fields and their values.
      constants: values that constants of jaxpar have meanwhile, by their places.
    """

    name: str
    make: Callable[..., Training]
    rows: Sequence[Mapping[str, Any]]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# ---- from a row to a training ----


def first_devices(mesh: str | tuple[int, ...]) -> MeshConfig:
    """A mesh of the first devices, as many as it needs."""
    config = MeshConfig.parse(mesh) if isinstance(mesh, str) else MeshConfig(*mesh)
    return replace(config, devices=tuple(range(config.num_devices)))


def on_mesh(task, mesh, pipeline, layout=None, train=TRAIN) -> Training:
    """A task on a mesh; `pipeline` and `layout` are fields of `PipelineConfig` and `Parallel`."""
    parallel = Parallel(first_devices(mesh), PipelineConfig(**pipeline), **(layout or {}))
    return Training(task, parallel, train)


def in_units(units, options=None) -> dict[str, Any]:
    """The fields of a `PipelineConfig` with these units."""
    return {"num_microbatches": units[0], "num_chunks": units[1], **(options or {})}


def optimizer_of(**fields) -> OptimizerConfig:
    return OptimizerConfig(warmup_steps=0, **fields)


def language_model(mesh, units) -> Training:
    return on_mesh(LANGUAGE_MODEL, mesh, in_units(units))


def uneven_placement(placement) -> Training:
    task = replace(LANGUAGE_MODEL, num_layers=7)
    return on_mesh(task, (2, 3, 1), in_units((2, 2), {"placement": placement}))


def variant(sizes) -> Training:
    return on_mesh(replace(LANGUAGE_MODEL, **sizes), (2, 2, 2), in_units((2, 2)))


def storage_of_state(mesh_sizes, storage, optimizer) -> Training:
    task = replace(LANGUAGE_MODEL, optimizer=optimizer_of(name=optimizer))
    return on_mesh(task, mesh_sizes, in_units((2, 2)), storage)


def schedule(options, tied) -> Training:
    task = replace(LANGUAGE_MODEL, tie_embedding=tied)
    return on_mesh(task, (1, 4, 2), in_units((2, 2), options))


def seven_layers(stages, options) -> Training:
    task = replace(LANGUAGE_MODEL, num_layers=7)
    return on_mesh(task, (2, stages, 1), in_units((2, 4), options))


def three_layers(stages, options) -> Training:
    task = replace(LANGUAGE_MODEL, num_layers=3)
    return on_mesh(task, (1, stages, 1), in_units((2, 2), options))


def rematerialization(remat_keeps) -> Training:
    options = {"remat": True, "remat_keeps": remat_keeps}
    return on_mesh(replace(LANGUAGE_MODEL, num_layers=4), (2, 2, 1), in_units((2, 4), options))


def unequal_shares(mesh, units, shares, options) -> Training:
    return on_mesh(LANGUAGE_MODEL, mesh, in_units(units, options), {"shares": shares})


def layer_of_language_model(layer) -> Training:
    task = replace(LANGUAGE_MODEL, num_layers=4, layer=layer)
    return on_mesh(task, (2, 2, 2), in_units((2, 2)))


def batches_of_text(**options) -> Training:
    task = replace(LANGUAGE_MODEL, num_layers=2, bucket_multiple=2, **options)
    return on_mesh(task, (2, 2, 1), in_units((2, 4)))


def awd_recipe(mesh, units, options) -> Training:
    sizes = vars(LANGUAGE_MODEL)
    rates = {"input_dropout": 0.4, "output_dropout": 0.1, "word_dropout": 0.2, "drop_connect": 0.5}
    task = AWD(**sizes, **rates, ar=2.0, tar=1.0, window_mean=0)
    return on_mesh(task, mesh, in_units(units, options))


def table_in_rows(mesh, sizes, pipeline, layout) -> Training:
    task = replace(LANGUAGE_MODEL, **sizes)
    return on_mesh(task, mesh, in_units((2, 4), pipeline), layout)


def any_model(mesh, model) -> Training:
    tasks = {
        0: models.RandomWalk(("block",) * 4),
        1: models.TiedTable(),
        2: models.RandomWalk(("penalized", "silent", "silent", "penalized")),
    }
    return on_mesh(tasks[model], mesh, in_units((2, 1)))


def layers_of_any_kinds(kinds, mesh, units) -> Training:
    return on_mesh(models.RandomWalk(kinds), mesh, units)


def optimizer_of_groups(name, kinds, layout) -> Training:
    task = models.WithOwnOptimizer(kinds, own_optimizer=name)
    return on_mesh(task, (2, 2, 1), in_units((2, 2)), layout)


def own_optimizer(optimizer, mesh, layout) -> Training:
    task = models.WithOwnOptimizer(("gru", "dense", "gru", "cell"), own_optimizer=optimizer)
    return on_mesh(task, mesh, in_units((2, 2)), layout)


def layers_in_pools(mesh, kinds, pipeline, layout, frozen) -> Training:
    task = models.UnequalLayers(kinds, freeze=frozen)
    return on_mesh(task, mesh, in_units((2, 2)) | pipeline, layout, CLIPPED)


def update_of_pools(mesh, optimizer, layout) -> Training:
    task = models.UnequalLayers(optimizer=optimizer_of(learning_rate=0.01, **optimizer))
    return on_mesh(task, mesh, in_units((2, 2)), layout, CLIPPED)


def own_optimizer_of_pools(optimizer, mesh, layout) -> Training:
    task = models.UnequalWithOwnOptimizer(own_optimizer=optimizer)
    return on_mesh(task, mesh, in_units((2, 2)), layout, CLIPPED)


def large_ends(mesh, how, pipeline, frozen) -> Training:
    task = models.LargeEnds(how=how, freeze=frozen)
    return on_mesh(task, mesh, in_units((2, 4), pipeline))


def time_in_parts(mesh, pipeline) -> Training:
    return on_mesh(models.TimeInParts(), mesh, pipeline)


def mixture_of_experts(mesh, pipeline) -> Training:
    return on_mesh(models.MixtureOfExperts(), mesh, pipeline)


def mixed_rows(mesh, pipeline, layout) -> Training:
    task = models.RandomWalk(("gru", "norm", "balanced", "dense"))
    return on_mesh(task, mesh, pipeline, layout)


def timeless(mesh) -> Training:
    return on_mesh(models.Timeless(), mesh, in_units((2, 1)))


def tapered(sizes, pipeline) -> Training:
    return on_mesh(models.Tapered(), sizes, pipeline)


def pyramid(sizes, pipeline) -> Training:
    return on_mesh(models.Pyramid(), sizes, pipeline)


def few_digits(dtype, mesh, units, options) -> Training:
    pipeline = {name: value for name, value in options.items() if name != "layout"}
    return on_mesh(models.FewDigits(dtype), mesh, in_units(units, pipeline), options.get("layout"))


def adopted(model, mesh, pipeline, layout) -> Training:
    return on_mesh(flax_models.adopted(model), mesh, pipeline, layout)


def adopted_with_optimizer(optimizer, mesh, layout) -> Training:
    task = flax_models.adopt_text(flax_models.GPT, models.OPTIMIZERS[optimizer]())
    return on_mesh(task, mesh, {"num_microbatches": 4}, layout)


# ---- the tables ----

UNEQUAL = ("gru", "wide 60", "wide 20", "gru")
ALIKE = ("gru",) * 4
OWN_KINDS = ("own gru", "slstm", "wide 60", "mlstm", "rglru")
SMALL_UNITS = {"num_microbatches": 2, "num_chunks": 4}
ZERO_BUBBLE = {**SMALL_UNITS, "zero_bubble": True}
INTERLEAVED = {"schedule": "interleaved", "num_groups": 2}
FOUR = {"num_microbatches": 4}

TABLES = [
    # Language models of jaxpar.
    Table(
        "mesh",
        language_model,
        [
            {"mesh": (1, 1, 1), "units": (2, 4)},
            {"mesh": (8, 1, 1), "units": (2, 4)},
            {"mesh": (1, 8, 1), "units": (2, 4)},
            {"mesh": (1, 1, 8), "units": (2, 4)},
            {"mesh": (2, 2, 2), "units": (2, 4)},
            {"mesh": (1, 4, 2), "units": (2, 4)},
            {"mesh": (4, 2, 1), "units": (2, 4)},
            {"mesh": (2, 1, 4), "units": (2, 4)},
            {"mesh": (2, 2, 2), "units": (1, 1)},
            {"mesh": (2, 2, 2), "units": (2, 1)},
            {"mesh": (2, 2, 2), "units": (1, 4)},
            {"mesh": (1, 8, 1), "units": (1, 1)},
            {"mesh": (1, 8, 1), "units": (2, 1)},
            {"mesh": (1, 8, 1), "units": (1, 4)},
            {"mesh": (1, 4, 2), "units": (1, 1)},
            {"mesh": (1, 4, 2), "units": (2, 1)},
            {"mesh": (1, 4, 2), "units": (1, 4)},
            {"mesh": (4, 2, 1), "units": (1, 1)},
            {"mesh": (4, 2, 1), "units": (2, 1)},
            {"mesh": (4, 2, 1), "units": (1, 4)},
        ],
    ),
    Table(
        "placement",
        uneven_placement,
        [
            {"placement": (2, 3, 2)},
            {"placement": (1, 5, 1)},
            {"placement": "balanced"},
        ],
    ),
    Table(
        "variant",
        variant,
        [
            {"sizes": {"embed_size": 8}},
            {"sizes": {"tie_embedding": True}},
        ],
    ),
    Table(
        "storage",
        storage_of_state,
        [
            {"mesh_sizes": (2, 2, 2), "storage": {}, "optimizer": "adam"},
            {"mesh_sizes": (2, 2, 2), "storage": {}, "optimizer": "sgd"},
            {"mesh_sizes": (8, 1, 1), "storage": {}, "optimizer": "adam"},
            {"mesh_sizes": (8, 1, 1), "storage": {}, "optimizer": "sgd"},
            {"mesh_sizes": (2, 2, 2), "storage": {"fsdp": True}, "optimizer": "adam"},
            {"mesh_sizes": (2, 2, 2), "storage": {"fsdp": True}, "optimizer": "sgd"},
            {"mesh_sizes": (4, 2, 1), "storage": {"update": "sharded"}, "optimizer": "adam"},
            {"mesh_sizes": (4, 2, 1), "storage": {"update": "sharded"}, "optimizer": "sgd"},
        ],
    ),
    Table(
        "schedule",
        schedule,
        [
            {"options": {"schedule": "gpipe", "head": "last"}, "tied": False},
            {"options": {"schedule": "gpipe", "head": "last"}, "tied": True},
            {"options": {"schedule": "gpipe", "head": "sharded", "remat": True}, "tied": False},
            {"options": {"schedule": "1f1b", "head": "last"}, "tied": False},
            {"options": {"schedule": "1f1b", "head": "last", "remat": True}, "tied": False},
            {"options": {"schedule": "1f1b", "head": "last", "remat": True}, "tied": True},
            {"options": {**INTERLEAVED, "head": "last"}, "tied": False},
            {"options": {**INTERLEAVED, "head": "last"}, "tied": True},
            {"options": {**INTERLEAVED, "head": "sharded", "remat": True}, "tied": False},
            {"options": {**INTERLEAVED, "head": "sharded", "remat": True}, "tied": True},
            {"options": {"zero_bubble": True, "head": "last", "unroll": True}, "tied": False},
            {"options": {"zero_bubble": True, "head": "last", "unroll": True}, "tied": True},
            {"options": {"zero_bubble": True, **INTERLEAVED, "head": "last"}, "tied": True},
            {"options": {"zero_bubble": True, "schedule": "v"}, "tied": False},
            {"options": {"zero_bubble": True, "schedule": "v"}, "tied": True},
            {"options": {"schedule": "v", "head": "last", "remat": True}, "tied": False},
        ],
    ),
    Table(
        "uneven",
        seven_layers,
        [
            {"stages": 4, "options": {"placement": (1, 4, 1, 1)}},
            {"stages": 4, "options": {"placement": "balanced", "head": "last"}},
            {"stages": 4, "options": {"placement": (1, 4, 1, 1), "zero_bubble": True}},
            {
                "stages": 4,
                "options": {
                    "placement": (4, 3, 0, 0),
                    "head": "last",
                    "zero_bubble": True,
                    "unroll": True,
                },
            },
        ],
    ),
    Table(
        "empty",
        three_layers,
        [
            {"stages": 4, "options": {}},
            {"stages": 4, "options": {"placement": "first | | 0-2 |", "remat": True}},
            {"stages": 2, "options": {"placement": "first | 0-1 | | 2, last", **INTERLEAVED}},
            {"stages": 2, "options": {"placement": "first | 0-2 | | last", "schedule": "v"}},
        ],
    ),
    Table(
        "remat",
        rematerialization,
        [
            {"remat_keeps": "device"},
            {"remat_keeps": "host"},
            {"remat_keeps": "carries"},
        ],
    ),
    Table(
        "shares",
        unequal_shares,
        [
            {"mesh": (2, 1, 1), "units": (1, 1), "shares": (3, 1), "options": {}},
            {"mesh": (2, 2, 2), "units": (1, 2), "shares": (3, 1), "options": {}},
            {"mesh": (2, 2, 1), "units": (1, 4), "shares": (3, 1), "options": INTERLEAVED},
            {
                "mesh": (3, 2, 1),
                "units": (2, 2),
                "shares": (5, 2, 1),
                "options": {"schedule": "gpipe"},
            },
        ],
    ),
    Table(
        "lm",
        layer_of_language_model,
        [
            {"layer": "lstm"},
            {"layer": "gru"},
            {"layer": "rglru"},
            {"layer": "mingru"},
            {"layer": "slstm"},
            {"layer": "mlstm"},
            {"layer": "gated_delta"},
        ],
    ),
    Table(
        "text",
        batches_of_text,
        [
            {"packed": True},
            {"num_buckets": 2},
            {"dtype": "bfloat16"},
        ],
    ),
    Table(
        "awd",
        awd_recipe,
        [
            {"mesh": (2, 2, 2), "units": (2, 4), "options": {}},
            {"mesh": (8, 1, 1), "units": (1, 1), "options": {}},
            {"mesh": (1, 4, 2), "units": (1, 2), "options": {"head": "last", "remat": True}},
        ],
    ),
    Table(
        "ends",
        table_in_rows,
        [
            {"mesh": (1, 2, 1), "sizes": {}, "pipeline": {"head": "last"}, "layout": {}},
            {
                "mesh": (2, 2, 2),
                "sizes": {"embed_size": 8},
                "pipeline": {"zero_bubble": False},
                "layout": {"fsdp": True},
            },
            {
                "mesh": (1, 2, 4),
                "sizes": {"embed_size": 8},
                "pipeline": {},
                "layout": {"fsdp": True},
            },
            {
                "mesh": (1, 2, 1),
                "sizes": {"tie_embedding": True},
                "pipeline": {"schedule": "v"},
                "layout": {},
            },
        ],
        LARGE_ENDS,
    ),
    # Models with jaxpar's interface: layers of any kinds.
    Table(
        "any",
        any_model,
        [
            {"mesh": (1, 1, 1), "model": 0},
            {"mesh": (1, 1, 1), "model": 1},
            {"mesh": (1, 1, 1), "model": 2},
            {"mesh": (2, 2, 2), "model": 0},
            {"mesh": (2, 2, 2), "model": 1},
            {"mesh": (2, 2, 2), "model": 2},
        ],
    ),
    Table(
        "layers",
        layers_of_any_kinds,
        [
            {"kinds": ("own gru", "own gru"), "mesh": (1, 2, 2), "units": ZERO_BUBBLE},
            {
                "kinds": ("slstm", "rglru", "slstm", "rglru"),
                "mesh": (2, 2, 2),
                "units": {**ZERO_BUBBLE, "schedule": "v"},
            },
            {
                "kinds": ("both ways", "flax gru"),
                "mesh": (2, 2, 1),
                "units": {"num_microbatches": 2},
            },
            {
                "kinds": ("own gru", "slstm", "rglru", "flax gru", "mingru"),
                "mesh": (2, 4, 1),
                "units": ZERO_BUBBLE,
            },
            {
                "kinds": ("own gru", "mingru", "slstm", "rglru"),
                "mesh": (2, 2, 2),
                "units": {**ZERO_BUBBLE, "remat": True},
            },
        ],
    ),
    Table(
        "memories",
        layers_of_any_kinds,
        [
            {"kinds": ("mlstm", "gated_delta"), "mesh": (2, 2, 2), "units": SMALL_UNITS},
            {
                "kinds": ("mlstm", "mlstm", "mlstm"),
                "mesh": (1, 2, 1),
                "units": {**SMALL_UNITS, "remat": True, "remat_keeps": "carries"},
            },
        ],
    ),
    Table(
        "own_ends",
        large_ends,
        [
            {
                "mesh": (1, 2, 1),
                "how": ("deep", "twice"),
                "pipeline": {"head": "sharded"},
                "frozen": None,
            },
            {"mesh": (2, 2, 2), "how": ("loop",), "pipeline": {}, "frozen": "words"},
            {
                "mesh": (1, 2, 4),
                "how": ("twice",),
                "pipeline": {"zero_bubble": False},
                "frozen": None,
            },
            {"mesh": (1, 2, 1), "how": ("deep",), "pipeline": INTERLEAVED, "frozen": "up"},
        ],
        LARGE_ENDS,
    ),
    Table(
        "context",
        time_in_parts,
        [
            {"mesh": "dp1", "pipeline": {}},
            {"mesh": "pp2context2", "pipeline": {"num_microbatches": 2}},
            {"mesh": "pp2context2tp2", "pipeline": INTERLEAVED},
        ],
    ),
    Table(
        "experts",
        mixture_of_experts,
        [
            {"mesh": "dp1", "pipeline": {}},
            {"mesh": "dp2pp2expert2", "pipeline": {"num_microbatches": 2, "num_chunks": 2}},
            {"mesh": "pp2expert2tp2", "pipeline": {"num_chunks": 2, "schedule": "v"}},
        ],
    ),
    Table(
        "mixed_rows",
        mixed_rows,
        [
            {"mesh": (1, 1, 1), "pipeline": {}, "layout": {}},
            {"mesh": (2, 1, 1), "pipeline": {}, "layout": {"fsdp": True}},
            {"mesh": (2, 1, 2), "pipeline": {}, "layout": {}},
        ],
    ),
    Table("timeless", timeless, [{"mesh": (2, 2, 1)}]),
    Table(
        "taper",
        tapered,
        [
            {"sizes": (1, 1, 1), "pipeline": {}},
            {"sizes": (1, 2, 1), "pipeline": {"num_microbatches": 2, "num_chunks": 2}},
            {"sizes": (1, 2, 1), "pipeline": {"num_chunks": 4, "remat": True}},
            {
                "sizes": (2, 2, 2),
                "pipeline": {"num_microbatches": 2, "num_chunks": 2, "schedule": "v"},
            },
        ],
    ),
    Table(
        "pyramid",
        pyramid,
        [
            {"sizes": (1, 4, 1), "pipeline": {"num_microbatches": 4}},
            {"sizes": (2, 2, 1), "pipeline": {}},
        ],
    ),
    Table(
        "low",
        few_digits,
        [
            {"dtype": "bfloat16", "mesh": (2, 1, 1), "units": (1, 1), "options": {}},
            {
                "dtype": "bfloat16",
                "mesh": (2, 1, 1),
                "units": (1, 1),
                "options": {"layout": {"update": "sharded"}},
            },
            {
                "dtype": "float16",
                "mesh": (1, 2, 1),
                "units": (2, 2),
                "options": {"head": "sharded"},
            },
        ],
    ),
    # Optimizers of optax.
    Table(
        "groups",
        optimizer_of_groups,
        [
            {
                "name": "groups",
                "kinds": ("gru", "dense", "cell"),
                "layout": {"update": "sharded"},
            },
            {"name": "groups", "kinds": ("gru", "dense", "cell"), "layout": {"update": "host"}},
            {"name": "frozen", "kinds": ("gru", "gru", "dense"), "layout": {}},
        ],
    ),
    Table(
        "own",
        own_optimizer,
        [
            {"optimizer": "adamw", "mesh": (2, 2, 2), "layout": {"fsdp": True}},
            {"optimizer": "masked", "mesh": (4, 1, 1), "layout": {"update": "sharded"}},
            {"optimizer": "muon", "mesh": (2, 2, 1), "layout": {}},
            {"optimizer": "factored", "mesh": (2, 2, 1), "layout": {}},
            {"optimizer": "lars", "mesh": (2, 1, 2), "layout": {}},
            {"optimizer": "noise", "mesh": (2, 2, 1), "layout": {}},
            {"optimizer": "schedule", "mesh": (2, 2, 1), "layout": {"shares": (3, 1)}},
        ],
    ),
    # Layers in pools.
    Table(
        "pools",
        layers_in_pools,
        [
            {
                "mesh": (1, 2, 1),
                "kinds": UNEQUAL,
                "pipeline": {},
                "layout": {},
                "frozen": None,
            },
            {
                "mesh": (2, 2, 2),
                "kinds": ("gru", "wide 60", "wide 20"),
                "pipeline": {"zero_bubble": False},
                "layout": {"fsdp": True},
                "frozen": "up",
            },
            {
                "mesh": (1, 4, 1),
                "kinds": (*UNEQUAL, "wide 50"),
                "pipeline": {"remat": True},
                "layout": {},
                "frozen": None,
            },
            {
                "mesh": (1, 4, 1),
                "kinds": UNEQUAL,
                "pipeline": {"schedule": "gpipe"},
                "layout": {},
                "frozen": "gru",
            },
            {
                "mesh": (1, 2, 2),
                "kinds": UNEQUAL,
                "pipeline": {"schedule": "v", "zero_bubble": True},
                "layout": {},
                "frozen": None,
            },
            {
                "mesh": (2, 2, 1),
                "kinds": UNEQUAL,
                "pipeline": INTERLEAVED,
                "layout": {"shares": (3, 1)},
                "frozen": None,
            },
            {
                "mesh": (1, 2, 4),
                "kinds": ("wide 60", "wide 20", "gru"),
                "pipeline": {"remat": True, "remat_keeps": "carries", "num_chunks": 4},
                "layout": {},
                "frozen": None,
            },
            # Layers of one kind are in a stack; only the ends are in pools.
            {
                "mesh": (2, 2, 1),
                "kinds": ALIKE,
                "pipeline": {"zero_bubble": True},
                "layout": {"fsdp": True},
                "frozen": None,
            },
            {
                "mesh": (1, 2, 2),
                "kinds": ALIKE,
                "pipeline": {"unroll": True},
                "layout": {},
                "frozen": "mix",
            },
            {
                "mesh": (1, 2, 2),
                "kinds": ALIKE,
                "pipeline": {"schedule": "v", "remat": True},
                "layout": {},
                "frozen": "inputs",
            },
            {
                "mesh": (1, 4, 1),
                "kinds": ALIKE,
                "pipeline": {"zero_bubble": False, "placement": "first | 0-1 | 2-3 | last"},
                "layout": {},
                "frozen": None,
            },
            # Layers of jaxpar beside others.
            {
                "mesh": (1, 4, 1),
                "kinds": OWN_KINDS,
                "pipeline": {},
                "layout": {},
                "frozen": None,
            },
            {
                "mesh": (2, 2, 2),
                "kinds": OWN_KINDS,
                "pipeline": {"schedule": "v", "remat": True},
                "layout": {"fsdp": True},
                "frozen": "slstm",
            },
        ],
        POOLS,
    ),
    Table(
        "planes",
        update_of_pools,
        [
            {
                "mesh": (1, 2, 1),
                "optimizer": {"name": "adamw", "weight_decay": 0.1},
                "layout": {},
            },
            {"mesh": (2, 2, 1), "optimizer": {"name": "rmsprop"}, "layout": {"update": "host"}},
            {
                "mesh": (1, 4, 1),
                "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1},
                "layout": {},
            },
            {"mesh": (2, 2, 2), "optimizer": {"name": "adam"}, "layout": {"update": "sharded"}},
        ],
        POOLS,
    ),
    Table(
        "planes_own",
        own_optimizer_of_pools,
        [
            {"optimizer": "muon", "mesh": (1, 2, 1), "layout": {}},
            {"optimizer": "lamb", "mesh": (2, 2, 2), "layout": {"fsdp": True}},
            {"optimizer": "groups", "mesh": (1, 4, 1), "layout": {}},
        ],
        POOLS,
    ),
    # Flax models as they stand.
    Table(
        "adopted",
        adopted,
        [
            {"model": "gpt", "mesh": "dp1", "pipeline": {}, "layout": {}},
            {"model": "gpt", "mesh": "dp2pp2tp2", "pipeline": FOUR, "layout": {}},
            {"model": "gpt", "mesh": "dp2pp2", "pipeline": FOUR, "layout": {"fsdp": True}},
            {"model": "two kinds", "mesh": "dp2pp2", "pipeline": FOUR, "layout": {}},
            {"model": "tied head", "mesh": "pp4", "pipeline": FOUR, "layout": {}},
            {"model": "u-net", "mesh": "pp4", "pipeline": FOUR, "layout": {}},
            {
                "model": "stacked",
                "mesh": "dp2pp2",
                "pipeline": {**FOUR, **INTERLEAVED, "zero_bubble": True},
                "layout": {},
            },
            {
                "model": "remat",
                "mesh": "dp2pp2",
                "pipeline": {**FOUR, "remat": True},
                "layout": {},
            },
            {"model": "dropped", "mesh": "dp2pp2", "pipeline": FOUR, "layout": {}},
            {"model": "fourier", "mesh": "dp2pp2", "pipeline": FOUR, "layout": {}},
            {"model": "recurrent", "mesh": "dp2pp2", "pipeline": SMALL_UNITS, "layout": {}},
            {
                "model": "sequential",
                "mesh": "pp2",
                "pipeline": FOUR,
                "layout": {"update": "sharded"},
            },
            {"model": "mixer", "mesh": "dp2pp2", "pipeline": FOUR, "layout": {}},
        ],
    ),
    Table(
        "adopted_pools",
        adopted,
        [
            {"model": "two kinds", "mesh": "pp4", "pipeline": FOUR, "layout": {}},
            {
                "model": "two kinds",
                "mesh": "dp2pp2tp2",
                "pipeline": {**FOUR, "schedule": "v"},
                "layout": {"fsdp": True},
            },
        ],
        POOLS,
    ),
    Table(
        "adopted_own",
        adopted_with_optimizer,
        [
            {"optimizer": "muon", "mesh": "dp2pp2", "layout": {}},
            {"optimizer": "factored", "mesh": "dp4", "layout": {"fsdp": True}},
        ],
    ),
]
