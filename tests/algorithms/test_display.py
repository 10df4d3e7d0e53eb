"""Names of arrays in printed tables."""

from jaxpar.base.display import join_names


def test_names_that_differ_in_a_step_become_one():
    assert join_names(["blocks.0.up", "blocks.2.up", "blocks.1.up"]) == "blocks.0-2.up"
    assert join_names(["a.block_3.b", "a.block_1.b"]) == "a.block_1,3.b"
    assert join_names(["a.x.b", "a.y.b"]) == "a.x,y.b"
