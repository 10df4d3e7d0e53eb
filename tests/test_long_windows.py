"""Long windows: what is kept of them is little, wherever it lies, and the gradients are exact."""

import functools

import pytest
from test_equivalence import assert_same_as_plain, full, make_settings

import jaxpar.step
from jaxpar.pipeline.engine import Pipeline

KEPT = [
    ((1, 1, 1), (1, 4), {"remat_keeps": "carries"}),
    ((1, 1, 1), (2, 4), {"remat_keeps": "host"}),
    ((2, 2, 1), (2, 4), {"remat_keeps": "carries", "head": "sharded"}),
    ((2, 2, 1), (2, 4), {"remat_keeps": "host", "head": "last"}),
    full((1, 1, 1), (1, 4), {}),
    full((2, 1, 2), (2, 8), {"remat_keeps": "carries"}),
    full((1, 4, 2), (2, 4), {"remat_keeps": "carries", "head": "last"}),
    full((1, 2, 1), (1, 4), {"remat_keeps": "carries", "head": "last", "unroll": True}),
    full((2, 2, 1), (2, 4), {"remat_keeps": "carries", "schedule": "gpipe", "head": "last"}),
    full((1, 2, 2), (2, 4), {"remat_keeps": "carries", "schedule": "interleaved", "num_groups": 2}),
    full((1, 2, 2), (2, 4), {"remat_keeps": "host", "schedule": "interleaved", "num_groups": 2}),
]


@pytest.mark.law
@pytest.mark.parametrize(("mesh", "units", "options"), KEPT)
def test_what_is_kept_and_where_changes_no_number(mesh, units, options, monkeypatch):
    poisoned = functools.partial(Pipeline, buffer_fill=float("nan"))
    monkeypatch.setattr(jaxpar.step, "Pipeline", poisoned)
    assert_same_as_plain(make_settings(mesh, units, remat=True, **options))
