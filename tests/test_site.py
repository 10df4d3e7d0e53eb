"""The documentation site: its pages as MkDocs builds them, and the hooks that it uses."""

import importlib
import json
import os
import re
import subprocess
import sys

import mkdocs.config
import pytest
from lib import api
from lib.browser import BROWSER
from lib.pages import ROOT

import jaxpar

CUT = """<script>addEventListener("load", () => {
  console.error("LOOKED at", innerWidth);
  for (const code of document.querySelectorAll("pre > code"))
    if (code.scrollWidth > code.clientWidth + 1) console.error("CUT", code.textContent.slice(0, 60));
  if (document.documentElement.scrollWidth > innerWidth) console.error("WIDE", innerWidth);
})</script>"""


def said_by(page, script, tmp_path, width=1300):
    """What a page of so many pixels writes to the console, with a script in it."""
    page.write_text(page.read_text() + script)
    if width < 500:  # no window is narrower
        frame = (
            f'<iframe src="{page.name}" width="{width}" height="900" style="border: 0"></iframe>'
        )
        page = page.with_name("framed.html")
        page.write_text(frame)
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--no-proxy-server", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'user'}", f"--window-size={width},900",
            "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def hooks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        return importlib.import_module("site_hooks")


# Moves a slider to its end, picks another schedule, and writes what is shown then to the console.
MOVES = """<script>addEventListener("load", () => {
  const home = document.getElementById("schedule-explorer");
  const look = () => console.error("SHOWN " + JSON.stringify([
    ...[...home.querySelectorAll("output")].map(own => own.value).filter(Boolean),
    ...[...home.querySelectorAll("b")].map(own => own.textContent),
    home.querySelectorAll("svg g").length]) + " END");
  const change = (input, value) => {
    input.value = value;
    input.dispatchEvent(new Event("input"));
    look();
  };
  look();
  const [stages, microbatches, chunks] = home.querySelectorAll("input[type=range]");
  change(stages, stages.max);
  change(home.querySelector("select"), "v");
  change(chunks, chunks.max);
  change(microbatches, microbatches.max);
})</script>"""


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_the_explorer_shows_what_jaxpar_computes(site, tmp_path):
    """Moving a slider changes the picture; the numbers are those of the schedule of these sizes."""
    page = site / "concepts/pipeline/moves.html"
    page.write_text((site / "concepts/pipeline/index.html").read_text())
    assert (site / "schedules.js").stat().st_size < 1e6
    said = said_by(page, MOVES, tmp_path)
    found = [json.loads(own) for own in re.findall(r"SHOWN (.*?) END", said)]
    kinds = ["1f1b", "1f1b", "v", "v", "v"]
    assert len(found) == len(kinds)
    assert len({own[-1] for own in found}) == len(found)
    for kind, (*sizes, bubble, kept, sent, drawn) in zip(kinds, found, strict=True):
        schedule = jaxpar.pipeline.make_schedule(kind, *map(int, sizes), zero_bubble=True)
        assert bubble == f"{100 * schedule.bubble:.1f}%"
        assert kept.split() == [*map(str, schedule.live_units)]
        ways = schedule.num_groups * schedule.num_stages - 1
        assert (
            int(sent) == 2 * (ways - (kind == "v")) * schedule.num_units
        )  # v stays on its last stage once
        assert drawn == sum(int(work.busy_TS.sum()) for work in schedule.lanes)


@pytest.mark.full
def test_the_site_is_built_without_a_warning(site):
    """Of all pages, without links that are left as they were, or anything from another host."""
    for path in site.rglob("*.html"):
        text = path.read_text()
        shown = re.sub(r"(?s)<(pre|code|script)\b.*?</\1>", "", text)
        assert "](" not in shown, path
        assert "[!" not in shown, path
        assert not re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="https?:', text), path
    text = (site / "help/from-mxnet/index.html").read_text()
    assert {"md-footer__link--prev", "md-footer__link--next"} <= {
        *re.findall(r"md-footer__link--\w+", text)
    }
    assert "md-tabs__link" in text


@pytest.mark.full
def test_the_reference_has_every_public_name_and_little_else(site, hooks):
    for page in hooks.reference():
        folder = site / hooks.API / ("" if page == "index" else page)
        text = (folder / "index.html").read_text()
        assert len(re.findall(r"<h[1-6]", text)) <= 80, page
        if page != "index":  # rows of arguments and attributes
            row = r'<tr class="doc-section-item">\s*<td>(.*?)</td>'
            names = [re.sub("<[^>]*>", "", name).strip() for name in re.findall(row, text, re.S)]
            assert names
            assert [name for name in names if re.match(r"\W*\w+,", name)] == []
    for module in hooks.MODULES:
        for name in hooks.names_of(module):
            index = (site / f"{hooks.API}/index.html").read_text()
            [link] = re.findall(rf'href="([^"]*)#{re.escape(f"{module}.{name}")}"', index)
            page = (site / hooks.API / link / "index.html").read_text()
            assert f'id="{module}.{name}"' in page, name


def test_what_is_internal_in_the_reference_exists(hooks):
    names = {name: module for module in hooks.MODULES for name in hooks.names_of(module)}
    for name, own in hooks.INTERNAL.items():
        found = getattr(importlib.import_module(hooks._home(names[name])), name)
        for member in own.split():
            assert hasattr(found, member) or member in found.__annotations__, (name, member)


def test_the_page_of_commands_has_every_option(hooks):
    """Of the parser, which is what reads them."""
    text = hooks.command_line()
    for name in api.command_names():
        assert f"\n## {name}\n" in f"\n{text}"
        for action in hooks.parser_of([name])._actions:
            for option in action.option_strings:
                assert f"`{option}`" in text or option in ("-h", "--help"), (name, option)
    [row] = re.findall(r"^\| `--optimizer\.learning-rate` `FLOAT` \| (.*)", text, re.M)
    assert row.endswith("| `0.005` |")


ALERT = """\
> [!NOTE]
> One line,
> another.
>
> ```sh
> ls
> ```

- item
  > [!WARNING]
  > In a list.
"""


def test_notes_become_admonitions(hooks):
    assert hooks.with_notes(ALERT) == (
        "!!! note\n\n    One line,\n    another.\n\n    ```sh\n    ls\n    ```\n\n\n"
        "- item\n  !!! warning\n\n      In a list.\n\n"
    )


def test_public_names_are_linked_once(hooks):
    seen = set()
    text = (
        "# `jaxpar.fit`\n`jaxpar.fit(task,\n'dp2')` and `jaxpar.fit`, [`jaxpar.show`](a.md), "
        "`jaxpar.Task.loss`, `jaxpar.nn.LSTM`, `jaxpar.nonsense`, `jaxpar`"
    )
    assert hooks.with_names(text, seen) == (
        "# `jaxpar.fit`\n[`jaxpar.fit(task,\n'dp2')`][jaxpar.fit] and `jaxpar.fit`, "
        "[`jaxpar.show`](a.md), [`jaxpar.Task.loss`][jaxpar.Task], "
        "[`jaxpar.nn.LSTM`][jaxpar.nn.LSTM], `jaxpar.nonsense`, `jaxpar`"
    )
    assert seen == {"jaxpar.fit", "jaxpar.Task", "jaxpar.nn.LSTM"}


def test_links_lead_to_pages_of_the_site(hooks):
    link = lambda text, **more: hooks.with_links(  # noqa: E731
        text, "docs/reference/versions.md", "reference/versions.md", **more
    )
    assert link("[a](../../CHANGELOG.md#b)") == "[a](../project/changelog.md#b)"
    assert link("[a](../../examples)") == "[a](../examples/index.md)"
    assert link("[a](../../jaxpar/nn/__init__.py)") == "[a](api/nn.md)"
    assert link("[a](../slurm.sh)") == "[a](../slurm.sh)"
    assert link("[`LICENSE`](../../LICENSE)") == "`LICENSE`"
    assert link("[the licence](../../LICENSE)") == "the licence (`LICENSE`)"
    assert (
        link("[a](../../LICENSE)", repo_url="https://a.b/c")
        == "[a](https://a.b/c/blob/main/LICENSE)"
    )
    with pytest.raises(ValueError, match=r"the link to \.\./\.\./gone leads nowhere"):
        link("[a](../../gone)")


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
@pytest.mark.parametrize("name", ["index", "build/layers/index", "reference/command-line/index"])
def test_no_page_is_wider_than_its_window_and_no_code_is_cut_on_a_desktop(name, site, tmp_path):
    for width in (400, 1300):
        page = (site / f"{name}.html").with_name(f"looked-at-{width}.html")
        page.write_text((site / f"{name}.html").read_text())
        said = said_by(page, CUT, tmp_path, width)
        assert f'"LOOKED at {width}"' in said, said
        assert "WIDE" not in said
    assert re.findall(r'"CUT (.*?)"', said) == []


@pytest.mark.full
def test_notebooks_show_their_pictures(site):
    for path in ROOT.glob("notebooks/*.ipynb"):
        page = (site / f"notebooks/{path.stem}/index.html").read_text()
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", ()):
                for shown in output.get("data", {}).get("image/svg+xml", ()):
                    assert shown.strip() in page


def test_addresses_of_the_site_stand_in_one_place(hooks, tmp_path, monkeypatch):
    """There are none yet; made-up ones are those of the site, whose pages name no others."""
    config = hooks.on_config(mkdocs.config.load_config(str(ROOT / "mkdocs.yml")))
    assert (config.site_url, config.repo_url) == (None, None)
    project = (ROOT / "pyproject.toml").read_text()
    urls = (
        "Repository = 'https://example.org/some/one'\nDocumentation = 'https://one.example.org'\n"
    )
    (tmp_path / "pyproject.toml").write_text(f"{project}\n[project.urls]\n{urls}")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    config = hooks.on_config(config)
    assert config.site_url == "https://one.example.org/"
    assert config.repo_url == "https://example.org/some/one"
    assert config.repo_name == "some/one"
