"""Stores the programs of training steps, and compares those of changed code with them.

    python -m benchmarks.programs store FOLDER [--only PART_OF_NAMES]
    python -m benchmarks.programs compare FOLDER [--only PART_OF_NAMES]

Code that only moves leaves every program as it is. Programs are lowered, not compiled, for rows of tables of
the tests: their meshes, schedules, storage, layers and models. What a program is given of its schedule comes
after its text. Places in files and names of functions are left out. With update="host", a program ends with
the gradients.
"""

import argparse
import contextlib
import difflib
import functools
import gzip
import hashlib
import itertools
import json
import pkgutil
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax

import jaxpar

jaxpar.simulate_devices(8)
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

# Where things are, and what is set where: change this when they move.
NAMES = {
    "Facts": "jaxpar.model.facts.ModelFacts", "Setup": "jaxpar.step.setup.Setup",
    "state": "jaxpar.step.state.abstract_state", "batch": "jaxpar.step.step.abstract_batch",
    "step": "jaxpar.step.functions.make_train_step", "LAYERS": "jaxpar.tasks.lm.task.LAYERS",
    "MODEL": "lib.laws.MODEL", "settings": "lib.laws.make_settings", "on": "lib.laws.on_devices",
    "Regress": "lib.models.Regress", "Tokens": "lib.models.Tokens", "awd": "lib.awd.awd",
    "Silent": "test_layer_sums.MIXED",
}  # fmt: skip
POOLS = {"jaxpar.partition.partition.FEW": 0, "jaxpar.pipeline.pool.COLUMNS": 8}
ENDS = {"jaxpar.partition.partition.FEW": 0, "jaxpar.partition.partition.LITTLE": 1e-9}
ENDS["jaxpar.model.facts.ModelFacts.layer_flops"] = float("inf")
CHANGES = {"pools": POOLS, "planes": POOLS, "ends": ENDS, "own ends": ENDS}

at = argparse.Namespace(**{name: pkgutil.resolve_name(where) for name, where in NAMES.items()})
on, lm = at.settings, functools.partial(replace, at.MODEL)
optimizer_of = functools.partial(jaxpar.OptimizerConfig, warmup_steps=0)


def laid(mesh, options, **layout):
    """On the first devices."""
    return jaxpar.Parallel(at.on(mesh), jaxpar.PipelineConfig(**options), **layout)


def pool(t, mesh, layout, options, **task):
    """As the tests of pools have it."""
    return t.Unequal(**task, batch_size=8), t.parallel_of(mesh, layout, **options), t.TRAIN


# name: (the table of a test, or rows; how many of them at most; what is made of the test's module and a row).
TWO = [{"mesh": (1, 1, 1)}, {"mesh": (2, 2, 2)}]
SOURCES = {
    "mesh": ("test_equivalence:test_loss_and_gradients_equal_plain", 99, lambda t, mesh, units: on(mesh, units)),
    "placement": ("test_equivalence:test_uneven_placement_equals_plain", 9, lambda t, placement:
        on((2, 3, 1), (2, 2), lm(num_layers=7), placement=placement)),
    "variant": ("test_equivalence:test_model_variants_equal_plain", 9, lambda t, sizes:
        on((2, 2, 2), (2, 2), lm(**sizes))),
    "storage": ("test_equivalence:test_parameters_agree_after_two_steps", 9, lambda t, optimizer, mesh_sizes, storage:
        on(mesh_sizes, (2, 2), lm(optimizer=optimizer_of(optimizer)), layout=storage)),
    "pools": ("test_pools:test_layers_in_pools_equal_their_definition", 99, lambda t, mesh, kinds, pipeline, layout, frozen:
        pool(t, mesh, layout, pipeline, kinds=kinds, freeze=frozen)),
    "planes": ("test_pools:test_updates_of_whole_planes_equal_those_of_single_arrays", 9, lambda t, mesh, optimizer, layout:
        pool(t, mesh, layout, {}, optimizer=optimizer_of(**optimizer))),
    "schedule": ("test_pipeline:test_every_schedule_and_option_equals_plain", 16, lambda t, options, tied:
        on((1, 4, 2), (2, 2), lm(tie_embedding=tied), **options)),
    "uneven": ("test_pipeline:test_uneven_placements_equal_plain", 4, lambda t, stages, options:
        on((2, stages, 1), (2, 4), lm(num_layers=7), **options)),
    "empty": ("test_pipeline:test_stages_without_layers_equal_plain", 4, lambda t, stages, options:
        on((1, stages, 1), (2, 2), lm(num_layers=3), **options)),
    "remat": ([{"keeps": keeps} for keeps in ("device", "host", "carries")], 9, lambda t, keeps:
        on((2, 2, 1), (2, 4), lm(num_layers=4), remat=True, remat_keeps=keeps)),
    "shares": ("test_shares:test_any_shares_give_the_gradients_of_one_device", 4, lambda t, mesh, units, shares, options:
        t.make_settings(mesh, units, shares=shares, **options)),
    "lm": ([{"layer": layer} for layer in at.LAYERS], 9, lambda t, layer:
        on((2, 2, 2), (2, 2), lm(layer=layer, num_layers=4))),
    "text": ([{"packed": True}, {"num_buckets": 2}, {"dtype": "bfloat16"}], 9, lambda t, **sizes:
        on((2, 2, 1), (2, 4), lm(num_layers=2, bucket_multiple=2, **sizes))),
    "awd": ("test_regularization:test_the_masks_are_the_same_on_every_mesh", 3, lambda t, mesh, units, options:
        on(mesh, units, at.awd(at.MODEL, **t.ALL), **options)),
    "block": (TWO, 9, lambda t, mesh: on(mesh, (2, 1), at.Regress(("block",) * 4))),
    "tokens": (TWO, 9, lambda t, mesh: on(mesh, (2, 2), at.Tokens())),
    "sums": (TWO, 9, lambda t, mesh: on(mesh, (2, 2), at.Silent)),
    "layers": ("test_any_model:test_jaxpars_layers_in_a_pipeline_equal_their_definition", 9, lambda t, kinds, mesh, units:
        (t.Calm(kinds), laid(mesh, units))),
    "groups": ("test_any_model:test_optimizers_of_groups_leave_the_same_parameters", 3, lambda t, name, kinds, layout:
        on((2, 2, 1), (2, 2), t.Grouped(kinds, freeze=name), layout=layout)),
    "memories": ("test_matrix_memories:test_they_are_the_same_on_every_mesh_and_schedule", 2, lambda t, kinds, mesh, units:
        (t.Memories(kinds), laid(mesh, units))),
    "ends": ("test_ends:test_a_language_model_whose_table_is_in_rows_equals_plain", 4, lambda t, mesh, sizes, pipeline, layout:
        on(mesh, (2, 4), lm(**sizes), layout=layout, **pipeline)),
    "own ends": ("test_ends:test_any_model_with_ends_in_parts_equals_its_definition", 4, lambda t, mesh, how, pipeline, frozen:
        on(mesh, (2, 4), t.Words(how=how, freeze=frozen), **pipeline)),
    "context": ("test_axes:test_time_in_parts_equals_the_plain_model", 3, lambda t, mesh, pipeline:
        (t.Context(), t.laid_out(mesh, **pipeline))),
    "experts": ("test_axes:test_experts_over_an_axis_equal_the_plain_model", 3, lambda t, mesh, pipeline:
        (t.Mixture(), t.laid_out(mesh, **pipeline))),
    "mixed rows": ("test_rows_together:test_layers_mix_as_many_rows_on_any_mesh", 3, lambda t, mesh, pipeline, layout:
        (t.Mixed(), laid(mesh, pipeline, **layout))),
    "timeless": ("test_rows_together:test_a_model_without_time_mixes_rows_too", 1, lambda t, mesh:
        on(mesh, (2, 1), t.Timeless())),
    "taper": ("test_widths:test_layers_of_any_width_equal_the_plain_model", 4, lambda t, sizes, pipeline:
        (t.Tapered(), laid(sizes, pipeline))),
    "pyramid": ("test_widths:test_a_pyramid_of_convolutions_equals_the_plain_model", 2, lambda t, sizes, pipeline:
        (t.Pyramid(), laid(sizes, pipeline))),
    "low": ("test_low_precision:test_models_of_few_digits_train_on_every_mesh", 3, lambda t, dtype, mesh, units, options:
        on(mesh, units, t.Low(dtype), **options)),
}  # fmt: skip


def rows_of(test):
    """The rows of a test's table, slow ones too, from names to values."""
    tables = []
    for mark in test.pytestmark:
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            rows = [r.values if hasattr(r, "marks") else [r] if isinstance(names, str) else r for r in rows]  # fmt: skip
            names = [names] if isinstance(names, str) else names
            tables.append([dict(zip(names, row, strict=True)) for row in rows])
    return [functools.reduce(dict.__or__, rows) for rows in itertools.product(*tables)]


facts_of = functools.lru_cache(4)(lambda task, source: at.Facts.of(task))


def lower(source, task, layout, *train):
    """The text of a step, without what may change when code moves, and the tables that it is given."""
    setup = at.Setup.of(task, layout, *train, facts=facts_of(task, source))
    step = at.step(setup)
    text = step.lower(at.state(setup), at.batch(setup)).as_text()
    text = re.sub(r"^#loc.*\n| loc\((?:[^()]|\([^()]*\))*\)", "", text, flags=re.MULTILINE)
    private = re.findall(r"func\.func private @([\w.$-]+)", text)
    numbers = {f"@{name}": f"@f{number}" for number, name in enumerate(private)}
    text = re.sub(r"@[\w.$-]+", lambda found: numbers.get(found[0], found[0]), text)
    text = re.sub(r"^module @\S+", "module", text)
    tables = (f"// {leaf.dtype} {leaf.tolist()}\n" for leaf in jax.tree.leaves(step.full_table))
    return text + "".join(tables)


def programs(part):
    """The name of each program that has this part in it, and what gives its text."""
    for source, (table, most, make) in SOURCES.items():
        t, rows = None, table
        if isinstance(table, str):
            t, test = map(pkgutil.resolve_name, (table.split(":")[0], table))
            rows = rows_of(test)
        most = min(most, len(rows))
        for row in (rows[n * len(rows) // most] for n in range(most)):
            values = ",".join(f"{name} {value}" for name, value in row.items())
            if part in (name := re.sub(r"[^\w.]+", "_", f"{source} {values}").strip("_")):
                yield name, lambda s=source, t=t, make=make, row=row: lower(s, *make(t, **row))


def text_of(name, make):
    """The text of a program, or why there is none."""
    changes = next((own for s, own in CHANGES.items() if name.startswith(s.replace(" ", "_"))), {})
    with contextlib.ExitStack() as stack:
        for where, value in changes.items():
            stack.enter_context(mock.patch(where, value))
        try:
            return make()
        except Exception as error:  # noqa: BLE001: the others are compared all the same
            return f"failed: {type(error).__name__}: {error}\n"


def show(name, before, after, most=12):
    """Prints where two texts begin to differ."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "stored", "now", "", "", 1
    )
    print(f"differs  {name}")
    for line in itertools.islice(lines, most):
        print(f"    {line[:200]}")


def main():
    """Stores, or compares and exits with 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["store", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of programs")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file, begin, bad = options.folder / "index.json", time.monotonic(), 0
    index = json.loads(file.read_text()) if file.exists() else {}
    found = {}
    for name, make in programs(options.only):
        assert name not in found, name
        text, path = text_of(name, make), options.folder / f"{name}.txt.gz"
        found[name] = hashlib.sha256(text.encode()).hexdigest()
        if options.what == "store":
            path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
            bad += text.startswith("failed")
            print(f"{'FAILED' if text.startswith('failed') else 'stored'}   {name}", flush=True)
        elif index.get(name) == found[name]:
            print(f"same     {name}", flush=True)
        else:
            bad += 1
            show(name, gzip.decompress(path.read_bytes()).decode() if path.exists() else "", text)
    gone = [name for name in index if options.only in name and name not in found]
    if options.what == "store":
        kept = {name: own for name, own in index.items() if name not in gone}
        file.write_text(json.dumps({**kept, **found}, indent=1, sort_keys=True))
    else:
        bad += len(gone)
        print("".join(f"gone     {name}\n" for name in gone), end="")
    print(f"{len(found)} programs, {bad} bad, in {time.monotonic() - begin:.0f} s")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
