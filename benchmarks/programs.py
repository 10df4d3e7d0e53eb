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
    "step": "jaxpar.step.functions.make_train_step", "LAYERS": "jaxpar.tasks.lm.options.LAYERS",
    "MODEL": "lib.laws.MODEL", "settings": "lib.laws.make_settings", "on": "lib.laws.on_devices",
    "Regress": "lib.models.Regress", "Tokens": "lib.models.Tokens", "awd": "lib.awd.awd",
    "Silent": "test_layer_sums.MIXED",
}  # fmt: skip
POOLS = {"jaxpar.partition.partition.FEW": 0, "jaxpar.partition.pool.COLUMNS": 8}
ENDS = {"jaxpar.partition.partition.FEW": 0, "jaxpar.partition.partition.LITTLE": 1e-9}
ENDS["jaxpar.model.facts.ModelFacts.layer_flops"] = float("inf")
CHANGES = {"pools": POOLS, "planes": POOLS, "ends": ENDS, "own_ends": ENDS}

at = argparse.Namespace(**{name: pkgutil.resolve_name(where) for name, where in NAMES.items()})
on, lm = at.settings, functools.partial(replace, at.MODEL)
optimizer_of = functools.partial(jaxpar.OptimizerConfig, warmup_steps=0)


def laid(mesh, options, **layout):
    """On the first devices."""
    return jaxpar.Parallel(at.on(mesh), jaxpar.PipelineConfig(**options), **layout)


def pool(t, mesh, options, layout, **task):
    """As the tests of pools have it."""
    return t.Unequal(**task, batch_size=8), t.parallel_of(mesh, layout, **options), t.TRAIN


# name: the table of a test, or rows; how many of them at most; what is made of the test's module and a row.
TWO, MAKE = [(1, 1, 1), (2, 2, 2)], (at.Regress(("block",) * 4), at.Tokens(), at.Silent)
SOURCES = {
    "mesh": ("equivalence:loss_and_gradients_equal_plain", 99, lambda t, **row: on(**row)),
    "placement": ("equivalence:uneven_placement_equals_plain", 9, lambda t, **row:
        on((2, 3, 1), (2, 2), lm(num_layers=7), **row)),
    "variant": ("equivalence:model_variants_equal_plain", 9, lambda t, sizes:
        on((2, 2, 2), (2, 2), lm(**sizes))),
    "storage": ("equivalence:parameters_agree_after_two_steps", 9, lambda t, optimizer, mesh_sizes, storage:
        on(mesh_sizes, (2, 2), lm(optimizer=optimizer_of(optimizer)), layout=storage)),
    "pools": ("pools:layers_in_pools_equal_their_definition", 99, lambda t, pipeline, frozen, **row:
        pool(t, options=pipeline, freeze=frozen, **row)),
    "planes": ("pools:updates_of_whole_planes_equal_those_of_single_arrays", 9, lambda t, optimizer, **row:
        pool(t, options={}, optimizer=optimizer_of(**optimizer), **row)),
    "schedule": ("pipeline:every_schedule_and_option_equals_plain", 16, lambda t, options, tied:
        on((1, 4, 2), (2, 2), lm(tie_embedding=tied), **options)),
    "uneven": ("pipeline:uneven_placements_equal_plain", 4, lambda t, stages, options:
        on((2, stages, 1), (2, 4), lm(num_layers=7), **options)),
    "empty": ("pipeline:stages_without_layers_equal_plain", 4, lambda t, stages, options:
        on((1, stages, 1), (2, 2), lm(num_layers=3), **options)),
    "remat": ([{"remat_keeps": keeps} for keeps in ("device", "host", "carries")], 9, lambda t, **row:
        on((2, 2, 1), (2, 4), lm(num_layers=4), remat=True, **row)),
    "shares": ("shares:any_shares_give_the_gradients_of_one_device", 4,
        lambda t, mesh, units, shares, options: on(mesh, units, layout={"shares": shares}, **options)),
    "lm": ([{"layer": layer} for layer in at.LAYERS], 9, lambda t, **row:
        on((2, 2, 2), (2, 2), lm(num_layers=4, **row))),
    "text": ([{"packed": True}, {"num_buckets": 2}, {"dtype": "bfloat16"}], 9, lambda t, **row:
        on((2, 2, 1), (2, 4), lm(num_layers=2, bucket_multiple=2, **row))),
    "awd": ("regularization:the_masks_are_the_same_on_every_mesh", 3, lambda t, mesh, units, options:
        on(mesh, units, at.awd(at.MODEL, **t.ALL), **options)),
    "any": ([{"mesh": mesh, "model": n} for mesh in TWO for n in range(3)], 9, lambda t, mesh, model:
        on(mesh, (2, 1), MAKE[model])),
    "layers": ("any_model:jaxpars_layers_in_a_pipeline_equal_their_definition", 9,
        lambda t, kinds, mesh, units: (t.Calm(kinds), laid(mesh, units))),
    "groups": ("any_model:optimizers_of_groups_leave_the_same_parameters", 3, lambda t, name, kinds, layout:
        on((2, 2, 1), (2, 2), t.Grouped(kinds, freeze=name), layout=layout)),
    "memories": ("matrix_memories:they_are_the_same_on_every_mesh_and_schedule", 2,
        lambda t, kinds, mesh, units: (t.Memories(kinds), laid(mesh, units))),
    "ends": ("ends:a_language_model_whose_table_is_in_rows_equals_plain", 4,
        lambda t, mesh, sizes, pipeline, layout: on(mesh, (2, 4), lm(**sizes), layout=layout, **pipeline)),
    "own_ends": ("ends:any_model_with_ends_in_parts_equals_its_definition", 4,
        lambda t, mesh, how, pipeline, frozen: on(mesh, (2, 4), t.Words(how=how, freeze=frozen), **pipeline)),
    "context": ("axes:time_in_parts_equals_the_plain_model", 3, lambda t, mesh, pipeline:
        (t.Context(), t.laid_out(mesh, **pipeline))),
    "experts": ("axes:experts_over_an_axis_equal_the_plain_model", 3, lambda t, mesh, pipeline:
        (t.Mixture(), t.laid_out(mesh, **pipeline))),
    "mixed_rows": ("rows_together:layers_mix_as_many_rows_on_any_mesh", 3, lambda t, mesh, pipeline, layout:
        (t.Mixed(), laid(mesh, pipeline, **layout))),
    "timeless": ("rows_together:a_model_without_time_mixes_rows_too", 1, lambda t, mesh:
        on(mesh, (2, 1), t.Timeless())),
    "taper": ("widths:layers_of_any_width_equal_the_plain_model", 4, lambda t, sizes, pipeline:
        (t.Tapered(), laid(sizes, pipeline))),
    "pyramid": ("widths:a_pyramid_of_convolutions_equals_the_plain_model", 2, lambda t, sizes, pipeline:
        (t.Pyramid(), laid(sizes, pipeline))),
    "low": ("low_precision:models_of_few_digits_train_on_every_mesh", 3,
        lambda t, dtype, mesh, units, options: on(mesh, units, t.Low(dtype), **options)),
}  # fmt: skip


def rows_of(test):
    """The rows of a test's table, slow ones too, from names to values."""
    tables = []
    for names, rows, *_ in (mark.args for mark in test.pytestmark if mark.name == "parametrize"):
        is_one, names = isinstance(names, str), [names] if isinstance(names, str) else names
        rows = [r.values if hasattr(r, "marks") else [r] if is_one else r for r in rows]
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
    """Name and text of each program with this part in its name; the text may be why there is none."""
    for source, (table, most, make) in SOURCES.items():
        t, rows = None, table
        if isinstance(table, str):
            module, test = (f"test_{name}" for name in table.split(":"))
            t, rows = (
                pkgutil.resolve_name(module),
                rows_of(pkgutil.resolve_name(f"{module}:{test}")),
            )
        most = min(most, len(rows))
        for row in (rows[n * len(rows) // most] for n in range(most)):
            values = ",".join(f"{name} {value}" for name, value in row.items())
            if part not in (name := re.sub(r"[^\w.]+", "_", f"{source} {values}").strip("_")):
                continue
            with contextlib.ExitStack() as stack:
                for where, value in CHANGES.get(source, {}).items():
                    stack.enter_context(mock.patch(where, value))
                try:
                    yield name, lower(source, *make(t, **row))
                except Exception as error:  # the others are compared all the same
                    yield name, f"failed: {type(error).__name__}: {error}\n"


def main():
    """Stores, or compares and exits with 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["store", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of programs")
    what, folder, only = vars(parser.parse_args()).values()
    folder.mkdir(parents=True, exist_ok=True)
    file, begin, found, bad = folder / "index.json", time.monotonic(), {}, 0
    index = json.loads(file.read_text()) if file.exists() else {}
    for name, text in programs(only):
        assert name not in found, name
        path, found[name] = folder / f"{name}.txt.gz", hashlib.sha256(text.encode()).hexdigest()
        is_bad = text.startswith("failed") if what == "store" else index.get(name) != found[name]
        word = ("differs" if is_bad else "same") if what == "compare" else "stored"
        print(f"{word:8} {name}", text if text.startswith("failed") else "", flush=True)
        bad += is_bad
        if what == "store":
            path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
        elif is_bad:
            before = gzip.decompress(path.read_bytes()).decode() if name in index else ""
            both = (re.sub(r"%[\w#:]+", "%", t).splitlines() for t in (before, text))  # not numbers
            lines = difflib.unified_diff(*both, "stored", "now", n=1, lineterm="")
            print("".join(f"    {line[:200]}\n" for line in itertools.islice(lines, 12)), end="")
    gone = {name for name in index if only in name} - found.keys()
    if what == "store":
        kept = {name: own for name, own in index.items() if name not in gone}
        file.write_text(json.dumps(kept | found, indent=1, sort_keys=True))
    else:
        bad += len(gone)
        print("".join(f"gone     {name}\n" for name in sorted(gone)), end="")
    print(f"{len(found)} programs, {bad} bad, in {time.monotonic() - begin:.0f} s")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
