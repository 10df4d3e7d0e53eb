"""Groups of devices as XLA writes them."""

import pytest

from jaxpar.analysis.hlo import Module, groups

pytestmark = pytest.mark.law


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,2},{1,3}}", [(0, 2), (1, 3)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("mesh['a'=2,'b'=4] {'a'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=1,'b'=8] {'b':(1)2,'b':(4)2}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_every_notation_of_groups_is_read(text, expected):
    line = f"  %a = f32[] all-to-all(%x), replica_groups={text}, dimensions={{0}}"
    module = Module(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{line}\n}}\n")
    [instruction] = module.computations["main"]
    assert [tuple(group) for group in groups(instruction, 8)] == expected
