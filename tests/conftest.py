"""What every test runs on: 8 simulated CPU devices, strict dtypes and ranks."""

import atexit
import collections
import gc
import hashlib
import itertools
import os
import shutil
import signal
import tempfile

import hypothesis
import jax
import pytest

pytest.register_assert_rewrite("lib")

# Also for the subprocesses that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile far more than they compute: LLVM is to hurry, and XLA to emit by hand, where it still can,
# what goes through MLIR. XLA's own passes run as ever. A GPU's code is as users have it.
flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
flags += ["--xla_cpu_parallel_codegen_split_count=1"]
flags += ["--xla_cpu_use_fusion_emitters=false"] * (jax.__version_info__ < (0, 11))
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
# Of each operation the line that it is from, not those that led there: a twentieth of tracing and compiling.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"
os.environ["JAXPAR_COMPILES"] = ""  # commands of tests compile in their own process
if "XDG_CACHE_HOME" not in os.environ:  # the user's stays as it is
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxpar-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# All of this before the backend starts.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_traceback_in_locations_limit", 1)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No limit of time: the first example compiles. `pytest --hypothesis-profile thorough` looks further.
patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile(
    "default", **patient, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.register_profile("thorough", **patient, max_examples=1000)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption(
        "--rows", type=int, metavar="N", help="run N rows of each table, which --seed draws"
    )
    parser.addoption(
        "--seed",
        help="run one of the rows of each table that are marked `more`, drawn by this text",
    )
    parser.addoption(
        "--record", metavar="FILE", help="add a line for each test: its outcome, seconds and name"
    )


def pytest_report_header(config):
    if seed := config.getoption("--seed"):
        return f"rows are drawn by --seed {seed}"
    return None


def tables_of(items):
    """Tests by their function: a table has a row for each set of its parameters."""
    tables = collections.defaultdict(list)
    for item in items:
        tables[item.nodeid.partition("[")[0]].append(item)
    return tables.values()


def spread(items, most):
    """So many rows of each table, from all over it."""
    return {rows[n * len(rows) // most] for rows in tables_of(items) for n in range(most)}


def drawn(items, most, seed):
    """So many rows of each table, drawn by a seed."""

    def number(item):
        return hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest()

    return {row for rows in tables_of(items) for row in sorted(rows, key=number)[:most]}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    tables = collections.defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("rows"):
            most, others = mark.args if len(mark.args) == 2 else (*mark.args, "more")
            if not any(map(item.get_closest_marker, {"more", others})):
                tables[most, others].append(item)
    for (most, others), own in tables.items():
        kept = spread(own, most)
        for item in own:
            if item not in kept:
                item.add_marker(others)
    yield  # -m and -k select
    seed = config.getoption("--seed")
    kept = set(items)
    if seed is not None:
        more = {item for item in items if item.get_closest_marker("more")}
        kept = kept - more | drawn(more, 1, seed)
    if most := config.getoption("--rows"):
        kept = drawn(kept, most, seed)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter, config):
    """With --durations: the minutes of each file, if its tests ran one after the other."""
    if file := config.getoption("--record"):
        with open(file, "a") as out:
            for outcome in ("passed", "failed", "error", "skipped"):
                for report in terminalreporter.stats.get(outcome, ()):
                    out.write(f"{outcome} {report.duration:.2f} {report.nodeid}\n")
    if config.getoption("durations") is None:
        return
    minutes = collections.Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            minutes[report.nodeid.partition("::")[0]] += report.duration / 60
    terminalreporter.section("minutes by file")
    for name, each in minutes.most_common():
        terminalreporter.write_line(f"{each:6.2f} {name}")


def pytest_collection_finish():
    """What is imported stays, and tracing makes much: the collector need not look there, nor often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def no_test_sees_the_folder_it_is_started_from(tmp_path_factory):
    """It may hold runs, or settings, of the user's: tests have a folder of their own."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def signals_reach_what_tests_start():
    """What nohup, or a shell for its background jobs, ignores is inherited; a handler is not."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def share_setups(request):
    """Within a module, setups of equal tasks share what is traced and compiled.

    Tests make the same setups again and again. Calls of users share nothing: `fresh` marks modules for that.
    """
    if request.node.get_closest_marker("fresh"):
        yield
        return
    from lib import api

    with api.setups_are_shared():
        yield


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory):
    """Runs of the same config share their compiled programs through JAX's cache on disk."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus of two lines, again and again, in its three splits."""
    folder = tmp_path_factory.mktemp("text")
    for split, times in (("train", 100), ("valid", 5), ("test", 5)):
        lines = "the cat sat on the mat\na dog ran to the cat\n"
        (folder / f"{split}.txt").write_text(lines * times)
    return folder
