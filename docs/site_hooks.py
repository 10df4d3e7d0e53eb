"""Hooks of MkDocs: pages of the site that don't lie in docs/, the generated reference, and links.

The README is the site's first page. The pages of examples, recipes and benchmarks are pages too, as are
notebooks with their outputs. The reference has a page for each part of the Python API, and one for the
command line, read from the program's own parser. GitHub's alerts become admonitions, and public names in code
font lead to the reference. Links to files that are no pages, such as source, become their paths, or addresses
in the repository. Addresses are those of `[project.urls]` in pyproject.toml.
"""

import functools
import importlib
import inspect
import itertools
import json
import posixpath
import re
import tomllib
import warnings
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

import griffe
import tyro
from mkdocs.structure.files import File

from jaxpar.cli import options
from jaxpar.cli.parse import all_commands, read_command
from jaxpar.pipeline import make_schedule
from jaxpar.pipeline.lanes import Lane
from jaxpar.pipeline.placement import STAYS

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "examples/index.md",
    "recipes/README.md": "recipes/index.md",
    "benchmarks/README.md": "benchmarks/index.md",
}
PAGES |= {
    f"benchmarks/{path.parent.name}/README.md": f"benchmarks/{path.parent.name}.md"
    for path in sorted(ROOT.glob("benchmarks/*/README.md"))
}
NOTEBOOKS = {
    f"notebooks/{path.name}": f"notebooks/{path.stem}.md"
    for path in sorted(ROOT.glob("notebooks/*.ipynb"))
}
PICTURES = {
    str(path.relative_to(ROOT))
    for place in ("benchmarks/*", "examples/pictures")
    for path in ROOT.glob(f"{place}/*.svg")
}
PAGES |= NOTEBOOKS | {path: path for path in PICTURES}

# A public module -> the file that lists its names.
MODULES = {
    "jaxpar": "jaxpar/__init__.pyi",
    "jaxpar.nn": "jaxpar/nn/__init__.py",
    "jaxpar.pipeline": "jaxpar/pipeline/__init__.py",
    "jaxpar.planning": "jaxpar/planning/__init__.pyi",
    "jaxpar.analysis": "jaxpar/analysis/__init__.pyi",
    "jaxpar.lm": "jaxpar/lm/__init__.pyi",
}
API = "reference/api"
# Links to these files lead to the reference.
LISTS = {path: f"{API}/{name.removeprefix('jaxpar.')}.md" for name, path in MODULES.items()}
LISTS["jaxpar/__init__.pyi"] = f"{API}/index.md"
# Methods and properties that jaxpar itself calls: the reference leaves them out.
INTERNAL = {
    "Task": "adopts check_batch config_of_optimizer evaluates_others files has_optimizer has_own_optimizer",
    "Stack": "draw_kind maker place",
    "LayerContext": "on_cpu on_gpu",
    "Sums": "by_name with_names",
    "IteratorBatches": "batch keep_from position restart seek",
    "ArrayBatches": "draw window",
    "SeriesBatches": "draw window",
    "MeshConfig": "of_task sizes",
    "PipelineConfig": "named_placement",
    "Parallel": "check check_splits group_shares has_equal_shares microbatch_rows num_chunks num_groups "
    "num_segments num_units on_mesh resolve runs_in_units splits_units zero_bubble",
    "TrainConfig": "allowed_skips",
    "Rules": "axes_of check_axes spec",
    "Start": "from_json new_name to_json",
    "FitResult": "curves",
    "TensorBoard": "log",
    "WandB": "log",
    "Trackio": "log",
    "Linear": "",
    "LSTM": "begins_with over_time",
    "GatedBlock": "kind_name",
    "Pipeline": "nothing_frozen",
    "Schedule": "backward blocks forward half_times head label lanes num_backward_buffers "
    "num_forward_buffers num_slots padded route title unit_costs weights work_at",
    "StepCost": "known memory_text seconds_of seconds_text waiting",
    "Ranking": "of",
    "Machine": "link seconds",
    "MeasuredStep": "seconds_of",
    "ProgramReport": "along",
    "LM": "batches_of read_text reads_lines",
    "LanguageModel": "unroll",
    "TokenStreams": "window",
    "Vocabulary": "from_json to_json",
}
# What the examples of the reference use.
PREAMBLE = """\
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from flax import nnx

import jaxpar

jaxpar.simulate_devices(8)
rngs = nnx.Rngs(0)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jax.nn.gelu(block(x))
        return self.head(x)[:, 0]


def loss(model, batch):
    return jaxpar.mean((model(batch["x"]) - batch["y"]) ** 2, batch["weight"])


x = np.random.default_rng(0).normal(size=(640, 8)).astype(np.float32)
y = x.sum(axis=1)
task = jaxpar.adopt(Net, loss, batches={"x": x, "y": y}, batch_size=16)
"""
# What the explorer of schedules offers (docs/explorer.js); no more units, M x K, than that.
SIZES = {
    "stages": [2, 3, 4, 5, 6, 8],
    "microbatches": [1, 2, 3, 4, 6, 8, 12, 16],
    "chunks": [1, 2, 3, 4, 8],
}
KINDS = {
    "gpipe": {"groups": 1, "zb": False},
    "1f1b": {"groups": 1, "zb": True},
    "interleaved": {"groups": 2, "zb": True},
    "v": {"groups": 2, "zb": True},
}
MOST_UNITS = 32
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
_ROW = re.compile(r"^  (\w+(?:, \w+)+)(:.*(?:\n    .*)*)", re.MULTILINE)
_ALERT = re.compile(r"^( *)> \[!(NOTE|TIP|WARNING)\] *\n((?:\1>.*(?:\n|\Z))*)", re.MULTILINE)
# What holds no names to link: a heading, a line of HTML, a link; or a span of code.
_SPAN = re.compile(
    r"^#.*$|^ *<.*$|!?\[(?:`[^`\n]*`|[^\[\]`])*\](?:\([^)]*\)|\[[^\]]*\])|(`+)((?:[^`\n]|\n(?!\s*\n))+?)\1",
    re.MULTILINE,
)
_NAME = re.compile(r"(?s)(jaxpar(?:\.\w+)*)(?:\(.*\))?")
_NOT_SHOWN = ("", "None", "False")  # defaults
_FENCED = re.compile(r"(?ms)(^( *)```.*?^\2```)")


class Rows(griffe.Extension):
    """Arguments that a docstring tells of in one line have a row each; an example is code."""

    def on_object(self, *, obj, **kwargs):
        """Repeats what is said of several names for each of them, and fences the example."""
        if obj.docstring is None:
            return
        text, head, example = obj.docstring.value.partition("\nExample:\n")
        text = _ROW.sub(
            lambda row: "\n".join(f"  {name}{row[2]}" for name in row[1].split(", ")), text
        )
        if head:
            code = inspect.cleandoc(example)
            text = f"{text.rstrip()}\n\n**Example:**\n\n```python\n{code}\n```\n"
        obj.docstring.value = text


def on_config(config):
    """The addresses of the site and of its source, if there are any, and the notebooks, in their order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    urls = project.get("urls", {})
    if "Repository" in urls:
        config.repo_url = urls["Repository"].rstrip("/")
        config.repo_name = urlsplit(urls["Repository"]).path.strip("/")
    if "Documentation" in urls:
        config.site_url = urls["Documentation"].rstrip("/") + "/"
    [examples] = [part["Examples"] for part in config.nav if "Examples" in part]
    next(part for part in examples if "Notebooks" in part)["Notebooks"] = [*NOTEBOOKS.values()]
    return config


def on_files(files, config):
    """Adds the pages that lie elsewhere, and those of the reference."""
    for source, page in PAGES.items():
        if source in PICTURES:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
            continue
        content = (ROOT / source).read_text("utf-8")
        if source in NOTEBOOKS:
            content = "\n\n".join(_cells(json.loads(content)))
        files.append(File.generated(config, page, content=content))
    for page, content in reference().items():
        files.append(File.generated(config, f"{API}/{page}.md", content=content))
    content = json.dumps(schedules(), separators=(",", ":"))
    files.append(File.generated(config, "schedules.js", content=f"window.SCHEDULES={content}\n"))
    return files


# ---- the explorer of schedules ----


def schedules():
    """The tables of the explorer of schedules, as docs/explorer.js reads them."""
    table = {}
    for kind, *sizes in itertools.product(KINDS, *SIZES.values()):
        groups, splits = KINDS[kind].values()
        for zero_bubble in (False, True)[: 1 + splits]:
            if sizes[1] * sizes[2] > MOST_UNITS:
                continue
            found = make_schedule(kind, *sizes, groups, zero_bubble=zero_bubble)
            lanes = [work.letter + _rows(work.lane, groups) for work in found.lanes]
            numbers = [round(found.bubble, 6), found.live_units, _num_sent(found)]
            key = " ".join(map(str, (kind, *sizes))) + " zb" * zero_bubble
            table[key] = numbers + lanes
    return {"sizes": SIZES, "kinds": KINDS, "table": table}


def _rows(lane: Lane, groups: int) -> str:
    """A lane as text: a row for each stage, a letter for each unit, and its group if there are several."""
    rows = []
    for units, own in zip(lane.unit.T.tolist(), lane.group.T.tolist(), strict=True):
        cells = (
            "." if unit < 0 else _LETTERS[unit] + str(group) * (groups > 1)
            for unit, group in zip(units, own, strict=True)
        )
        rows.append("".join(cells).rstrip("."))
    return "|".join(rows)


def _num_sent(schedule):
    """How many activations and cotangents go from one stage to another in a step."""
    lanes = (schedule.forward, schedule.backward)
    arrivals = (lane.arrival.items() for lane in lanes)
    return sum(int((own >= 0).sum()) for step, own in itertools.chain(*arrivals) if step != STAYS)


# ---- pages ----


def on_page_markdown(markdown, page, config, files):
    """A page as the site has it: its notes, and where its links and names lead."""
    uri = page.file.src_uri
    source = next((source for source, name in PAGES.items() if name == uri), f"docs/{uri}")
    if config.repo_url and (ROOT / source).exists():
        page.edit_url = f"{config.repo_url}/edit/main/{source}"
    if uri == "reference/command-line.md":
        markdown = markdown.partition("<!-- commands -->")[0] + command_line()
    if uri.startswith(API):
        return markdown
    markdown = with_details(with_notes(markdown))
    seen, parts = set(), _FENCED.split(markdown)
    del parts[2::3]  # indents
    for n in range(0, len(parts), 2):  # not in code
        parts[n] = with_links(parts[n], source, uri, config.repo_url)
        parts[n] = with_names(parts[n], seen)
    return "".join(parts)


def with_notes(markdown):
    """GitHub's alerts, `> [!NOTE]`, as admonitions."""

    def changed(match):
        indent, kind, lines = match.groups()
        lines = [re.sub(r"^ *> ?", "", line) for line in lines.splitlines()]
        body = "".join(f"{indent}    {line}".rstrip() + "\n" for line in lines)
        return f"{indent}!!! {kind.lower()}\n\n{body}\n"

    return _ALERT.sub(changed, markdown)


def with_details(markdown):
    """What is collapsed is Markdown too."""
    return re.sub(r"^<details( open)?>", r'<details markdown="1"\1>', markdown, flags=re.MULTILINE)


def with_links(markdown, source, uri, repo_url=None):
    """Links lead to pages of the site; one to another file becomes its address, or its path.

    Args:
      markdown: without code blocks.
      source: path of the page in the repository.
      uri: path of the page in the site.
      repo_url: address of the repository, if it has one.
    """

    def changed(match):
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
            path = f"{path}/README.md"
        name = {**PAGES, **LISTS}.get(path)
        if name is None and path.startswith("docs/") and not (ROOT / path).is_dir():
            name = path.removeprefix("docs/")
        if name is not None:
            there = posixpath.relpath(name, posixpath.dirname(uri) or ".")
            return f"{mark}[{text}]({there}{anchor})"
        if not (ROOT / path).exists():
            raise ValueError(f"{source}: the link to {target} leads nowhere")
        if repo_url:
            return f"{mark}[{text}]({repo_url}/blob/main/{path}{anchor})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(changed, markdown)


def with_names(markdown, seen):
    """Public names in code font lead to the reference where a page has them first.

    Args:
      markdown: without code blocks.
      seen: names that have a link already; those found are added.
    """
    known = _public()

    def changed(match):
        if match[1] is None or (name := _NAME.fullmatch(match[2])) is None:
            return match[0]
        words = name[1].split(".")
        found = {".".join(words[:n]) for n in range(1, len(words) + 1)} & (known | {*MODULES})
        target = max(found - {"jaxpar"}, key=len, default="")
        if not target or target in seen:
            return match[0]
        seen.add(target)
        return f"[{match[0]}][{target}]"

    return _SPAN.sub(changed, markdown)


@functools.cache
def _public():
    return {f"{module}.{name}" for module in MODULES for name in names_of(module)}


# ---- notebooks ----


def _cells(notebook):
    """What a notebook says, its code, and what that has shown, as pieces of Markdown."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
            drawn = data.get("text/html") or data.get("image/svg+xml")
            if drawn:  # a blank line would end it
                yield "<div>" + re.sub(r"\n\s*\n", "\n", drawn) + "</div>"
            else:
                text = "".join(output.get("text", ())) or data["text/plain"]
                yield "```text\n" + re.sub(r"\x1b\[[\d;]*m", "", text).rstrip() + "\n```"


# ---- the Python API ----


def names_of(module):
    """The names that a public module offers, without modules."""
    return [name for group in _groups(module).values() for name in group]


def _groups(module):
    """Heading -> names, as the module's list of names has them; "" without headings."""
    found, heading = {}, ""
    for line in (ROOT / MODULES[module]).read_text("utf-8").splitlines():
        if line.startswith("# "):
            heading = line.strip("# .")
        name = re.match(r"from \S+ import (\w+) as", line)
        if name and f"{module}.{name[1]}" not in MODULES:
            found.setdefault(heading, []).append(name[1])
    return found


def reference():
    """Page -> its Markdown: one for each part of `jaxpar` and for each of its modules, and a list of all."""
    pages, parts = {}, []
    for module in MODULES:
        for heading, names in _groups(module).items():
            title = heading or module
            page = re.match(r"\w+", heading)[0].lower() if heading else module.split(".")[1]
            told = (
                "" if heading else inspect.cleandoc(importlib.import_module(_home(module)).__doc__)
            )
            own = [_entry(module, name) for name in names]
            anchor = "" if heading else f"[](){{#{module}}}\n\n"
            pages[page] = "\n\n".join([f"# {title}", anchor + told, *own]) + "\n"
            rows = "\n".join(
                f"| [`{module}.{name}`][{module}.{name}] | {_summary(module, name)} |"
                for name in names
            )
            parts += [f"## [{title}]({page}.md)", f"| name | summary |\n|---|---|\n{rows}"]
    told = (
        "These are the public names of jaxpar. All others are internal, and can change at any time."
    )
    use = "The examples on these pages use a small model and task, and eight simulated devices:"
    code = f"## Examples\n\n{use}\n\n```python\n{PREAMBLE}```"
    pages["index"] = "\n\n".join(["# Python API", told, *parts, code]) + "\n"
    return pages


def _home(module):
    """The module as Python imports it."""
    return MODULES[module].rpartition("/")[0].replace("/", ".")


def docstring_of(module, name):
    """The docstring of a public name; of a constant, the text below its assignment."""
    found = getattr(importlib.import_module(_home(module)), name)
    if callable(found):
        return inspect.cleandoc(found.__doc__ or "")
    listed = (ROOT / MODULES[module]).read_text("utf-8")
    [home] = re.findall(rf"^from (\S+) import {name} as", listed, re.MULTILINE)
    source = (ROOT / f"{home.replace('.', '/')}.py").read_text("utf-8")
    [text] = re.findall(rf'(?ms)^{name} = .*?\n"""(.*?)"""', source)
    return inspect.cleandoc(text)


def _summary(module, name):
    """The first line of a docstring."""
    return docstring_of(module, name).partition("\n")[0].replace("|", r"\|")


def _entry(module, name):
    """A public name for mkdocstrings, without what jaxpar alone calls."""
    home = _home(module)
    found = getattr(importlib.import_module(home), name)
    path = f"{home}.{name}"
    if (ROOT / f"{home.replace('.', '/')}/{name}.py").exists():  # the module has the same name
        path = f"{path}.{name}"
    public = f"{module}.{name}"
    anchor = f"[](){{#{public}}}\n\n" if public != path else ""
    hidden = {*INTERNAL.get(name, "").split(), "__init__"}
    if inspect.isclass(found):
        hidden |= {own for own in vars(found) if _is_inherited(found, own)}
    filters = json.dumps(["!^_(?!_call__$)", *(f"!^{own}$" for own in sorted(hidden))])
    return f"{anchor}::: {path}\n    options:\n      filters: {filters}"


def _is_inherited(owner, name):
    """Whether a class has a method or property as one of its bases, which tells of it."""
    return any(
        name in vars(base) for base in owner.__mro__[1:] if base.__module__.startswith("jaxpar")
    )


# ---- the command line ----


def command_line():
    """All commands with their options, as the program's own parser has them."""
    lines, shown = [], {}
    for name, command in all_commands().items():
        for words in _variants(name, command):
            lines += _command(words, shown)
    return "\n\n".join(lines) + "\n"


def _variants(name, command):
    """The words that --help of a command may follow: for the task lm as well."""
    if name == "plot":
        return [["plot"], ["plot", "curves"]]
    return [[name], [name, "lm"]] if name == "train" else [[name]]


def parser_of(words):
    """The argparse parser that reads a command's options."""
    found = []

    def keep(command, *, args, **settings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found.append(tyro.extras.get_parser(command, **settings))
        raise SystemExit(0)

    with mock.patch.object(options.tyro, "cli", keep):
        try:
            read_command([*words, "--help"])
        except SystemExit:
            return found[0]


def _command(words, shown):
    """A command's part of the page.

    Args:
      words: the command, and its task.
      shown: rows of the page so far -> the heading above them; those found are added.
    """
    parser, title = parser_of(words), " ".join(words)
    yield f"## {title}"
    yield f"```text\n{parser.prog} [OPTIONS]{_positional(parser)}\n```"
    yield _told(parser.description)
    again = {}
    for group in parser._action_groups:
        rows = {}
        for action in group._group_actions:
            if "--help" not in action.option_strings:
                row = _option(action)
                if row in shown:
                    again[shown[row]] = None
                else:
                    rows[row] = shown[row] = title
        if rows:
            yield f"### {title}: {group.title}"
            if group.description:
                yield _told(group.description)
            yield "| option | description | default |\n|---|---|---|\n" + "\n".join(rows)
    if again:
        links = ", ".join(f"[{own}](#{own.replace(' ', '-')})" for own in again)
        yield f"Further options are the same as those of {links}."


def _positional(parser):
    return "".join(f" {own.metavar or own.dest}" for own in parser._positionals._group_actions)


def _told(text):
    """A description, in one line for each paragraph."""
    parts = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(_sentence(" ".join(part.split())) for part in parts)


def _option(action):
    """A row of a table."""
    told, _, default = " ".join((action.help or "").split()).rpartition(" (default: ")
    if not told:
        told, default = default, ""
    default = default.removesuffix(")")
    names = ", ".join(f"`{own}`" for own in action.option_strings)
    value = action.metavar if isinstance(action.metavar, str) else ""
    value = re.sub(r"\{None\}\|", "", value)
    names = f"{names} `{value}`".strip() if value else names
    cells = (names, _sentence(told), f"`{default}`" if default not in _NOT_SHOWN else "")
    return "| " + " | ".join(own.replace("|", r"\|") for own in cells) + " |"


def _sentence(text):
    """With a capital letter, its options in code font, and safe in Markdown outside of code."""
    parts = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][\w.-]*\w)", text[:1].upper() + text[1:])
    parts[::2] = [re.sub(r"([\\*_<\[\]])", r"\\\1", own) for own in parts[::2]]
    parts[1::2] = [own if own.startswith("`") else f"`{own}`" for own in parts[1::2]]
    return "".join(parts)
