"""Placements as users write them, and what a run says of them."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib import api
from lib.laws import MODEL, on_devices

from jaxpar import Parallel, PipelineConfig

# ---- in words ----

PLACES = st.lists(st.integers(0, 5), min_size=1, max_size=18).filter(any)


@given(places=PLACES, has_first=st.booleans(), has_last=st.booleans())
def test_names_are_read_as_they_are_written(places, has_first, has_last):
    # With odd spaces, and every layer by itself.
    layer = itertools.count()
    texts = [" , ".join(str(next(layer)) for _ in range(number)) for number in places]
    texts[0] = ",".join(filter(None, ("first" * has_first, texts[0])))
    texts[-1] = ",".join(filter(None, (texts[-1], "last" * has_last)))
    config = PipelineConfig(placement="|".join(texts))
    named = config.named_placement
    assert named.layers == tuple(places)
    assert (named.has_first, named.has_last) == (has_first, has_last)
    assert PipelineConfig(placement=config.placement) == config


@pytest.mark.parametrize(
    ("text", "placement", "shown"),
    [
        ("first, 0-2 | 3-5 | 6-7, last", (3, 3, 2), "first, 0-2 | 3-5 | 6-7, last"),
        ("first,0-1,2|3", (3, 1), "first, 0-2 | 3"),
        ("first | | 0-3 | last", (0, 0, 4, 0), "first | | 0-3 | last"),
        ("first|0||", (0, 1, 0, 0), "first | 0 | |"),
        ("|0-1|2, last", (0, 2, 1), "| 0-1 | 2, last"),
    ],
)
def test_names_by_example(text, placement, shown):
    config = PipelineConfig(placement=text)
    assert config.placement == shown
    assert config.named_placement.layers == placement
    assert config == PipelineConfig(placement=shown)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fair", "placement='fair': 'fair' is not a part of a model"),
        ("first, embed | last", "'embed' is not a part of a model"),
        ("first,, 0", "'' is not a part"),
        ("first, -1", "'-1' is not a part"),
        ("", "placement='': must name first, all layers from 0 and last in order, each once"),
        ("1 | 2, last", "must name first, all layers"),
        ("first | last", "must name first, all layers"),
        ("first, 0-1 | 3", "must name first, all layers"),
        ("first, 0-1 | 1-2", "must name first, all layers"),
        ("first, 0 | last, last", "must name first, all layers"),
        ("first, 2 | 0-1", "must name first, all layers"),
        ("first, 0, last | 1", "must name first, all layers"),
        ("0, first | 1", "must name first, all layers"),
        ("first, 3-1", "must name first, all layers"),
        (" | first, 0, last", "a stage before first or after last would have no work"),
        ("first, 0, last | ", "a stage before first or after last would have no work"),
    ],
)
def test_names_that_are_no_placement_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PipelineConfig(placement=text)


@pytest.mark.parametrize(
    ("text", "head"), [("first, 0-3 | 4-7", "last"), ("first, 0-3 | 4-7, last", "sharded")]
)
def test_names_may_not_contradict_the_head(text, head):
    message = f"head='{head}' contradicts placement='{re.escape(text)}', which places the head"
    with pytest.raises(ValueError, match=message):
        PipelineConfig(placement=text, head=head)


# ---- what a run says ----


@pytest.fixture
def said(text):
    """Of a language model on a mesh: the rows of the summary."""

    def rows_of(mesh, num_layers=8, words=32 * 16, **pipeline):
        task = dataclasses.replace(
            MODEL, num_layers=num_layers, vocab_size=words, num_words=11, corpus=str(text)
        )
        return api.summary(task, Parallel(on_devices(mesh), PipelineConfig(**pipeline)))

    return rows_of


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"placement": "first, 0-3 | 4-7, last"}, "first, 0-3 | 4-7, last"),
        ({"placement": "first, 0-3 | 4-7"}, "first, 0-3 | 4-7"),
        ({"placement": "first, 0-3 | 4-7", "head": "sharded"}, "first, 0-3 | 4-7"),
    ],
)
def test_names_say_where_the_head_is(options, places, said):
    assert said((1, 2, 1), words=96, **options)["layers"].startswith(f"8 ({places});")


def test_costs_are_those_of_the_model(said):
    # V = 14 H: a head is 14 H^2 multiply-adds, a layer 8 H^2.
    sizes = {"mesh": (1, 4, 1), "num_layers": 16, "words": 14 * 16}
    last = said(**sizes, head="last")
    assert last["layers"].startswith("16 (first, 0-4 | 5-9 | 10-14 | 15, last);")
    # Of 16 layers and 1.75 that are the head.
    work = "stage 0: ~28%, stage 1: ~28%, stage 2: ~28%, stage 3: ~15%"
    assert last["work"] == f"{work}; the output head counts as ~1.8 layers"
    sharded = said(**sizes, head="sharded")
    assert sharded["layers"].startswith("16 (first, 0-3 | 4-7 | 8-11 | 12-15);")
    assert sharded["work"] == "stage 0: ~25%, stage 1: ~25%, stage 2: ~25%, stage 3: ~25%"


def test_a_run_says_how_work_is_balanced(said):
    head = "; the output head counts as ~4.0 layers"
    rows = said((1, 2, 1), head="last")
    assert rows["work"] == f"stage 0: ~33%, stage 1: ~67%{head}"
    assert "warning" not in rows
    rows = said((1, 2, 1), head="last", placement=(2, 6))
    assert rows["work"] == f"stage 0: ~17%, stage 1: ~83%{head}"
    assert rows["warning"] == (
        "placement=(2, 6): stages have unequal work and wait for each other; steps are "
        "up to ~1.25 times as fast with placement=(4, 4)"
    )
    # A stage has the work of all its groups, in the order of the schedule.
    groups = {"placement": (1, 2, 3, 2)}
    rows = said((1, 2, 1), schedule="interleaved", num_groups=2, **groups)
    assert rows["work"] == "stage 0: ~50%, stage 1: ~50%"
    assert "wait for each other" in rows["warning"]
    assert said((1, 2, 1), schedule="v", **groups)["work"] == "stage 0: ~38%, stage 1: ~62%"
    assert not {"work", "warning"} & said((2, 1, 4), head="last").keys()


def test_a_run_says_which_stages_have_no_work(said):
    rows = said((1, 4, 1), num_layers=2, head="sharded")
    assert rows["warning"] == "2 layers for 4 stages: 2 of them have no work; use fewer stages"
    # An end that was given a stage of its own may have no products.
    rows = said((1, 4, 1), num_layers=2, placement="first | 0 | 1 | last")
    assert "no work" not in rows.get("warning", "")
