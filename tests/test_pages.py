"""The pages of the documentation: how they read, where their links lead, and which questions they answer."""

import re

import pytest
from lib import pages, prose
from lib.pages import GUIDES, MEASURED, OTHERS, PAGES, ROOT, section, text_of

MOST_LINES = 180


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_easy_to_read(page):
    found = prose.measure(text_of(page))
    assert found.mean <= 16
    assert found.long <= 6
    assert found.paragraph <= 100
    if section(page) in GUIDES:
        assert found.you >= 0.8


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page):
    assert len(text_of(page).splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two words. A sentence of five words: no end here.", (5.0, 0.0, 10, 0.0)),
        ("# A title\n\n| a | table |\n\n```sh\nls\n```\n\nYou see your page.", (4.0, 0.0, 4, 50.0)),
        ("- One item here.\n- Another item is here.", (3.5, 0.0, 4, 0.0)),
        ("> [!NOTE]\n> A note of\n> two lines.", (5.0, 0.0, 5, 0.0)),
        ("word " * 31 + "end.", (32.0, 100.0, 32, 0.0)),
    ],
)
def test_prose_is_measured(text, expected):
    assert prose.measure(text) == expected


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *MEASURED])
def test_links_lead_somewhere(page):
    for path, anchor in pages.links(page):
        assert (ROOT / path).exists(), path
        if anchor and path.endswith(".md"):
            assert anchor in pages.anchors(path), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES[1:])
def test_notes_are_of_a_kind_that_the_site_knows(page):
    kinds = re.findall(r"^\s*> \[!(.*?)\]", text_of(page), re.M)
    assert {*kinds} <= {"NOTE", "TIP", "WARNING"}


# A question of a reader, the page that answers it, and a heading there.
QUESTIONS = {
    "my model doesn't fit": ("docs/train/memory.md", "My model doesn't fit"),
    "which mesh for 8 GPUs": ("docs/concepts/parallelism.md", r"Which mesh for 8 GPUs\?"),
    "what is a time chunk": ("docs/concepts/glossary.md", "Time chunk"),
    "my loss is NaN": ("docs/help/troubleshooting.md", "The loss is NaN"),
    "how do I resume on fewer GPUs": ("docs/train/checkpoints.md", "Resume on fewer GPUs"),
    "batch norm is refused": (
        "docs/help/troubleshooting.md",
        ".*(?i:mixes the rows|batch ?norm).*",
    ),
    "my own optimizer": ("docs/build/optimizers.md", "Use your own optimizer"),
    "can I use my Flax model": ("docs/build/flax-models.md", "Your Flax model as it stands"),
    "how do I run on Slurm": ("docs/scale/clusters.md", "Slurm"),
    "how fast is it against cuDNN": ("benchmarks/README.md", "Against cuDNN"),
    "my weights into PyTorch": ("docs/use/export.md", "Weights into PyTorch"),
    "how do I cite it": ("README.md", "Cite"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_are_answered_two_clicks_from_the_readme(question):
    page, heading = QUESTIONS[question]
    first = pages.clicks("README.md")
    assert page in first.union({"README.md"}, *map(pages.clicks, first))
    assert any(re.fullmatch(heading, own) for own in pages.headings(page))


def test_every_page_is_linked_from_another():
    """Also on GitHub, where there is no navigation."""
    linked = set().union(*map(pages.clicks, (*PAGES, *OTHERS, *MEASURED)))
    assert {*PAGES[1:]} - linked == set()
