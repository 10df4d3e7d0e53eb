"""Schedules are checked by playing them: messages, slots and buffers move as in an executor."""

import dataclasses
import io
import itertools
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxpar.pipeline import Schedule, make_schedule
from jaxpar.pipeline.schedules import NAMES, gpipe

Message = tuple[str, int, int, int]  # what it is, virtual stage, microbatch, chunk
Cells = list[Message | None]

STAGES = st.integers(1, 6)
MICROBATCHES = st.integers(1, 9)
CHUNKS = st.integers(1, 5)


@st.composite
def schedules(draw, kinds=NAMES, zero_bubble=(False, True)):
    kind = draw(st.sampled_from(kinds))
    groups = draw(st.integers(2, 4)) if kind == "interleaved" else None
    apart = draw(st.sampled_from(zero_bubble)) and kind != "gpipe"
    sizes = draw(STAGES), draw(MICROBATCHES), draw(CHUNKS), groups
    return make_schedule(kind, *sizes, zero_bubble=apart)


def text_of(schedule: Schedule) -> str:
    """Its first 48 ticks, in lines as long as they need be."""
    console = Console(file=io.StringIO(), width=10_000)
    console.print(schedule, highlight=False)
    return console.file.getvalue().rstrip("\n")


def virtual_stages(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(stage, group) -> which one it is on the way of a unit."""
    S, V = schedule.num_stages, schedule.num_groups
    if schedule.name == "v":
        up = {(stage, 0): stage for stage in range(S)}
        return up | {(stage, 1): 2 * S - 1 - stage for stage in range(S)}
    return {(stage, group): group * S + stage for stage in range(S) for group in range(V)}


def runs(schedule: Schedule, lane) -> dict[tuple[int, int, int], int]:
    """Tick of every (virtual stage, microbatch, chunk) that the lane runs; none may run twice."""
    tick_of, places = {}, virtual_stages(schedule)
    for tick, stage in np.argwhere(lane.unit >= 0).tolist():
        unit, group = int(lane.unit[tick, stage]), int(lane.group[tick, stage])
        key = (places[stage, group], *divmod(unit, schedule.num_chunks))
        assert key not in tick_of, f"{key} runs twice"
        tick_of[key] = tick
    return tick_of


def all_keys(schedule: Schedule) -> set[tuple[int, int, int]]:
    return {
        (p, m, k)
        for p in range(schedule.num_groups * schedule.num_stages)
        for m in range(schedule.num_microbatches)
        for k in range(schedule.num_chunks)
    }


def play(schedule: Schedule) -> None:
    """Moves labelled messages as the executor moves arrays; any wrong or clobbered read fails."""
    S, V = schedule.num_stages, schedule.num_groups
    last, places = V * S - 1, virtual_stages(schedule)
    stages = {p: stage for (stage, _), p in places.items()}
    trains = schedule.num_slots > 0
    slots: list[Cells] = [[None] * schedule.num_slots for _ in range(S)]
    activations: list[Cells] = [[None] * schedule.num_forward_buffers for _ in range(S)]
    cotangents: list[Cells] = [[None] * schedule.num_backward_buffers for _ in range(S)]
    # The (microbatch, chunk) that a group's carried state saw last: there is one state per group.
    carried, carried_back = {}, {}

    def take(buffers: list[Cells], stage: int, source: int, expected: Message):
        assert 0 <= source < len(buffers[stage])
        assert buffers[stage][source] == expected
        buffers[stage][source] = None

    def arrive(buffers: list[Cells], stage: int, arrival: int, message: Message | None):
        assert (message is None) == (arrival < 0), "a message without a place, or the reverse"
        if message is None:
            return
        assert buffers[stage][arrival] is None, "a message that still waits is overwritten"
        buffers[stage][arrival] = message

    def weights(lanes, tick: int) -> None:
        for lane in lanes:
            for stage in range(S):
                unit, group, slot, source = (int(a[tick, stage]) for a in lane[:4])
                assert source == -1
                assert not lane.arrival
                if unit < 0:
                    assert (group, slot) == (0, -1)
                else:
                    place = places[stage, group], *divmod(unit, schedule.num_chunks)
                    take(slots, stage, slot, ("for W", *place))

    for tick in range(schedule.num_ticks):
        sent: Cells = [None] * S
        sent_back: Cells = [None] * S
        for stage in range(S):  # 1. forward
            unit, group, slot, source = (int(a[tick, stage]) for a in schedule.forward[:4])
            if unit < 0:
                assert (group, slot, source) == (0, -1, -1)
                continue
            p, (m, k) = places[stage, group], divmod(unit, schedule.num_chunks)
            if p == 0:
                assert source == -1
            else:
                take(activations, stage, source, ("output", p - 1, m, k))
            assert k == 0 or carried[p] == (m, k - 1)
            carried[p] = (m, k)
            if trains:
                assert slots[stage][slot] is None, "a slot that is still live is overwritten"
                slots[stage][slot] = ("residual", p, m, k)
            else:
                assert slot == -1
            sent[stage] = ("output", p, m, k) if p < last else None
        weights(schedule.weights[:1], tick)
        for stage in range(S):  # 2. backward
            unit, group, slot, source = (int(a[tick, stage]) for a in schedule.backward[:4])
            if unit < 0:
                assert (group, slot, source) == (0, -1, -1)
                continue
            p, (m, k) = places[stage, group], divmod(unit, schedule.num_chunks)
            if p == last:
                assert source == -1
            else:
                take(cotangents, stage, source, ("cotangent", p + 1, m, k))
            assert k == schedule.num_chunks - 1 or carried_back[p] == (m, k + 1)
            carried_back[p] = (m, k)
            take(slots, stage, slot, ("residual", p, m, k))
            if schedule.weights:
                slots[stage][slot] = ("for W", p, m, k)
            sent_back[stage] = ("cotangent", p, m, k) if p > 0 else None
        weights(schedule.weights[1:], tick)
        for buffers, messages, lane, way in (  # 3. exchange
            (activations, sent, schedule.forward, 1),
            (cotangents, sent_back, schedule.backward, -1),
        ):
            delivered = 0
            for stage, step in itertools.product(range(S), lane.arrival):
                message = messages[(stage - step) % S]
                goes_here = message is not None and stages[message[1] + way] == stage
                # On two stages up and down lead to the same one.
                if goes_here and S == 2 and len(lane.arrival) > 1:
                    goes_here = step == stage - stages[message[1]]
                delivered += goes_here
                arrive(
                    buffers, stage, lane.arrival[step][tick, stage], message if goes_here else None
                )
            assert delivered == sum(message is not None for message in messages)
    everything = [*slots, *activations, *cotangents]
    assert all(cell is None for cells in everything for cell in cells), "something is left over"


@given(schedules())
def test_every_unit_runs_once_each_way_after_what_it_needs(schedule):
    forward, backward = runs(schedule, schedule.forward), runs(schedule, schedule.backward)
    assert forward.keys() == backward.keys() == all_keys(schedule)
    last, last_chunk = schedule.num_groups * schedule.num_stages - 1, schedule.num_chunks - 1
    for p, m, k in all_keys(schedule):
        if p > 0:
            assert forward[p, m, k] > forward[p - 1, m, k]
        if k > 0:
            assert forward[p, m, k] > forward[p, m, k - 1]
        if p < last:
            assert backward[p, m, k] > backward[p + 1, m, k]
        if k < last_chunk:
            assert backward[p, m, k] > backward[p, m, k + 1]
        assert backward[p, m, k] >= forward[p, m, k]


@given(schedules())
def test_messages_slots_and_buffers_never_collide(schedule):
    play(schedule)


@given(st.sampled_from(NAMES), STAGES, MICROBATCHES, CHUNKS, st.integers(2, 4))
def test_without_backward_only_the_forwards_remain(kind, S, M, K, V):
    V = V if kind == "interleaved" else 2 if kind == "v" else 1
    schedule = make_schedule(kind, S, M, K, V, backward=False)
    play(schedule)
    assert runs(schedule, schedule.forward).keys() == all_keys(schedule)
    assert not runs(schedule, schedule.backward)
    assert schedule.num_slots == schedule.num_backward_buffers == 0
    assert schedule.live_units == (0,) * S
    if kind == "v":
        assert schedule.num_ticks == 2 * (M * K - 1) + 2 * S
    elif M * K >= S or V == 1:
        assert schedule.num_ticks == V * M * K + S - 1
        assert schedule.bubble == pytest.approx((S - 1) / (V * M * K + S - 1))
    full = make_schedule(kind, S, M, K, V)
    np.testing.assert_array_equal(schedule.forward.unit, full.forward.unit[: schedule.num_ticks])


@given(STAGES, MICROBATCHES, CHUNKS)
def test_1f1b_meets_its_closed_forms(S, M, K):
    schedule = make_schedule("1f1b", S, M, K)
    forward, backward = runs(schedule, schedule.forward), runs(schedule, schedule.backward)
    for s, m, k in all_keys(schedule):
        assert forward[s, m, k] == m * K + k + s
        assert backward[s, m, k] == m * K + (K - 1 - k) + (K - 1) + 2 * (S - 1) - s
    assert schedule.num_ticks == M * K + K - 1 + 2 * (S - 1)
    assert schedule.live_units == tuple(min(M * K, K + 2 * (S - 1 - s)) for s in range(S))


@given(STAGES, MICROBATCHES)
def test_the_short_gpipe_is_the_general_one(S, M):
    schedule = make_schedule("gpipe", S, M)
    lanes = schedule.forward.unit, schedule.backward.unit

    def running(unit_S):
        return {stage: unit for stage, unit in enumerate(unit_S.tolist()) if unit >= 0}

    assert gpipe(S, M) == [tuple(map(running, ticks)) for ticks in zip(*lanes, strict=True)]


def test_the_table_of_gpipe_shows_it():
    def cell(stage, *running):
        return "".join(f"{w}{r[stage]}" for w, r in zip("FB", running, strict=True) if stage in r)

    ticks = gpipe(3, 4)
    for stage in range(3):
        row = [f"stage {stage}  ", *(f"{cell(stage, *tick) or '.':<4}" for tick in ticks)]
        assert " ".join(row).rstrip() in gpipe.__doc__


@given(STAGES, MICROBATCHES, CHUNKS)
def test_gpipe_meets_its_closed_forms(S, M, K):
    schedule = make_schedule("gpipe", S, M, K)
    forward, backward = runs(schedule, schedule.forward), runs(schedule, schedule.backward)
    last = M * K - 1
    for s, m, k in all_keys(schedule):
        unit = m * K + k
        assert forward[s, m, k] == unit + s
        assert backward[s, m, k] == (last - unit) + last + 2 * (S - 1) - s
    assert schedule.live_units == (M * K,) * S


@given(st.integers(1, 8), st.integers(2, 9), CHUNKS)
def test_v_meets_its_closed_forms(S, M, K):
    schedule = make_schedule("v", S, M, K)
    forward, backward = runs(schedule, schedule.forward), runs(schedule, schedule.backward)
    for p, m, k in all_keys(schedule):
        assert forward[p, m, k] == 2 * (m * K + k) + p
        start = 2 * (m * K + K - 1 - k) + 2 * (K - 1)
        assert backward[p, m, k] == start + 2 * (2 * S - 1) - p
    assert schedule.route.stages[0] == schedule.route.stages[-1] == 0
    most = min(2 * M * K, 2 * (K + S - 1))
    assert max(schedule.live_units) == most
    if M * K >= 2 * (K + S):
        assert schedule.live_units == (most,) * S
    assert schedule.bubble == (S - 1) / (M * K + S - 1)
    assert schedule.num_forward_buffers == schedule.num_backward_buffers == 1


@given(schedules(kinds=("1f1b", "gpipe"), zero_bubble=(False,)))
def test_1f1b_and_gpipe_have_the_bubble_of_the_closed_form_and_one_buffer_each_way(schedule):
    S, units = schedule.num_stages, schedule.num_units
    assert schedule.bubble == (S - 1) / (units + S - 1)
    assert schedule.bubble_at(1.0, 1.0) == (S - 1) / (units + S - 1)
    for lane in (schedule.forward, schedule.backward):
        assert (lane.unit >= 0).any(axis=1).sum() == units + S - 1
    buffers = 0 if S == 1 else 1
    assert schedule.num_forward_buffers == schedule.num_backward_buffers == buffers


@given(st.integers(2, 6), MICROBATCHES, CHUNKS, st.integers(2, 4))
def test_interleaved_bubble_is_below_1f1b_at_equal_layers(S, M, K, V):
    interleaved, plain = make_schedule("interleaved", S, M, K, V), make_schedule("1f1b", S, M, K)
    if M * K == 1:  # a single unit has nobody to interleave with
        assert interleaved.bubble == plain.bubble
    else:
        assert interleaved.bubble < plain.bubble
    if M * K >= S:
        assert interleaved.bubble == (S - 1) / (V * M * K + S - 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_with_whole_rounds_waits_nowhere_and_holds_its_closed_form(S, rounds, V):
    M = rounds * S
    schedule = make_schedule("interleaved", S, M, num_groups=V)
    assert schedule.num_forward_buffers == schedule.num_backward_buffers == 1
    expected = tuple(min(V * M, V * S + S - 1 - 2 * s) for s in range(S))
    assert schedule.live_units == expected


@given(schedules())
def test_live_units_and_slots_are_the_largest_overlap(schedule):
    forward, freed = runs(schedule, schedule.forward), runs(schedule, schedule.backward)
    S, stages = schedule.num_stages, {p: s for (s, _), p in virtual_stages(schedule).items()}
    for lane in schedule.weights:
        for (p, m, k), tick in runs(schedule, lane).items():
            freed[p, m, k] = tick
    live = [
        max(
            sum(forward[key] <= t <= freed[key] for key in forward if stages[key[0]] == stage)
            for t in range(schedule.num_ticks)
        )
        for stage in range(S)
    ]
    assert schedule.live_units == tuple(live)
    assert schedule.num_slots == max(live)


# ---- zero-bubble: the gradients of weights in the place of idle time ----


@given(schedules(kinds=("1f1b", "interleaved", "v"), zero_bubble=(True,)))
def test_every_w_runs_once_after_its_b_and_nothing_else_changes(schedule):
    sizes = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks, schedule.num_groups
    plain = make_schedule(schedule.name, *sizes)
    for lane, same in ((schedule.forward, plain.forward), (schedule.backward, plain.backward)):
        for name in ("unit", "group", "source"):
            np.testing.assert_array_equal(getattr(lane, name), getattr(same, name))
        assert lane.arrival.keys() == same.arrival.keys()
        for step, buffers in lane.arrival.items():
            np.testing.assert_array_equal(buffers, same.arrival[step])
    beside, *after = (runs(schedule, lane) for lane in schedule.weights)
    backward = runs(schedule, schedule.backward)
    units = {*beside}.union(*after)
    assert len(beside) + sum(map(len, after)) == len(units)
    assert units == backward.keys()
    assert schedule.num_slots == plain.num_slots
    stages = {p: stage for (stage, _), p in virtual_stages(schedule).items()}
    for (
        key,
        tick,
    ) in beside.items():  # before the backward of its tick, and where there is no forward
        assert tick > backward[key]
        assert schedule.forward.unit[tick, stages[key[0]]] < 0
    for lane in after:
        assert all(tick >= backward[key] for key, tick in lane.items())
    assert schedule.bubble <= plain.bubble + 1e-12


@pytest.mark.parametrize(
    ("sizes", "percents", "slots"),
    [
        ((4, 8, 1), (27.3, 11.1, 15.8, 5.9, 27.3, 14.3), (7, 7, 11, 11, 8, 8)),
        ((4, 8, 4), (8.6, 3.0, 4.5, 1.5, 8.6, 4.0), (10, 10, 14, 14, 14, 14)),
        ((4, 8, 8), (4.5, 1.5, 2.3, 0.8, 4.5, 2.0), (14, 14, 22, 22, 22, 22)),
        ((8, 8, 4), (17.9, 6.8, 9.9, 3.5, 17.9, 8.6), (18, 18, 26, 26, 22, 22)),
        ((8, 8, 8), (9.9, 3.5, 5.2, 1.8, 9.9, 4.5), (22, 22, 30, 30, 30, 30)),
    ],
)
def test_bubbles_and_slots_with_w_apart(sizes, percents, slots):
    made = [
        make_schedule(kind, *sizes, zero_bubble=apart)
        for kind in ("1f1b", "interleaved", "v")
        for apart in (False, True)
    ]
    assert tuple(round(100 * schedule.bubble, 1) for schedule in made) == percents
    assert tuple(schedule.num_slots for schedule in made) == slots


@given(STAGES, MICROBATCHES, CHUNKS, st.integers(1, 3))
def test_one_group_with_enough_units_waits_for_its_first_forwards_alone(S, M, K, V):
    schedule = make_schedule("interleaved" if V > 1 else "1f1b", S, M, K, V, zero_bubble=True)
    if V == 1 and (M - 1) * K >= 2 * (S - 1):
        assert schedule.bubble == pytest.approx((S - 1) / (3 * M * K + S - 1))
    assert len(schedule.weights) <= 3  # never more than two after a backward


def fewest_longer_ticks(plain) -> int:
    """By how many W's the ticks of a schedule must be longer, found by trying all ways."""
    T, S = plain.forward.unit.shape
    f, b = (np.asarray(lane.unit >= 0, int) for lane in (plain.forward, plain.backward))

    def fits(longer) -> bool:
        for s in range(S):
            waiting = begun = ended = 0
            for t in range(T):
                begun += f[t, s]
                if begun - ended > plain.num_slots:
                    return False
                beside = min(waiting, f[t].max() - f[t, s])
                after = min(waiting - beside + b[t, s], b[t].max() - b[t, s] + longer[t])
                waiting += b[t, s] - beside - after
                ended += beside + after
            if waiting:
                return False
        return True

    for total in itertools.count():
        for chosen in itertools.combinations_with_replacement(range(T), total):
            if fits(np.bincount(chosen, minlength=T)):
                return total
    raise AssertionError


@pytest.mark.parametrize(
    "sizes",
    [(1, 3, 2), (2, 1, 3), (2, 3, 1), (2, 2, 2), (3, 2, 1), (3, 1, 2), (3, 3, 1), (2, 2, 1, 2), (2, 3, 1, 2)],
)  # fmt: skip
def test_no_placement_of_w_is_shorter_by_brute_force(sizes):
    kind = "interleaved" if len(sizes) > 3 else "1f1b"
    plain, schedule = (make_schedule(kind, *sizes, zero_bubble=apart) for apart in (False, True))

    def elapsed(made):
        return made.work_at(1.0, 1.0, 1.0).max(axis=2).sum()

    assert elapsed(schedule) - elapsed(plain) == fewest_longer_ticks(plain)


@pytest.mark.parametrize(
    ("num_chunks", "percent", "live_microbatches"), [(1, 27.3, 7.0), (8, 4.5, 1.75)]
)
def test_chunks_of_time_shrink_bubble_and_memory_at_once(num_chunks, percent, live_microbatches):
    schedule = make_schedule("1f1b", num_stages=4, num_microbatches=8, num_chunks=num_chunks)
    assert round(100 * schedule.bubble, 1) == percent
    assert max(schedule.live_units) / num_chunks == live_microbatches


def test_one_microbatch_is_a_wavefront_over_time():
    schedule = make_schedule("1f1b", num_stages=3, num_microbatches=1, num_chunks=4)
    wavefront = [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1], [-1, 3, 2], [-1, -1, 3]]
    np.testing.assert_array_equal(schedule.forward.unit[:6], wavefront)
    assert schedule.live_units == (4, 4, 4)


def test_bubble_weighs_parts_by_their_cost():
    # One unit on two groups of two stages: 4 forward and 4 backward parts, each busy on one stage.
    schedule = make_schedule("interleaved", 2, 1, num_groups=2)
    assert schedule.bubble_at(3.0, 5.0) == 0.5
    # The shares of the lanes are equal in every schedule, so costs do not matter.
    schedule = make_schedule("1f1b", 4, 4)
    assert schedule.bubble_at(1.0, 7.0) == schedule.bubble == 3 / 7


def test_arrays_are_int32_of_one_shape_and_read_only():
    schedule = make_schedule("interleaved", 3, 4, 2, 2)
    lanes = schedule.forward, schedule.backward
    for array in itertools.chain(*((*lane[:4], *lane.arrival.values()) for lane in lanes)):
        assert array.dtype == np.int32
        assert array.shape == (schedule.num_ticks, schedule.num_stages)
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 7
    with pytest.raises(dataclasses.FrozenInstanceError, match="num_slots"):
        schedule.num_slots = 1  # pyright: ignore[reportAttributeAccessIssue]


@given(schedules(), st.integers(0, 5))
def test_padding_changes_nothing_but_the_shape(schedule, extra):
    padded = schedule.padded(schedule.num_ticks + extra)
    shape = (schedule.num_ticks + extra, schedule.num_stages)
    arrays = [(*lane[:4], *lane.arrival.values()) for _, _, lane in padded.lanes]
    assert {a.shape for a in itertools.chain(*arrays)} == {shape}
    assert padded.num_ticks == schedule.num_ticks
    assert padded.bubble == schedule.bubble
    assert padded.live_units == schedule.live_units
    assert text_of(padded) == text_of(schedule)
    play(padded)


def test_text_draws_ticks_as_wide_as_they_are_long():
    text = """\
        tick   |0   |1   |2        |3        |4        |5   |6
        stage 0|F0.0|F0.1|F1.0 .   |F1.1 B0.1|.    B0.0|B1.1|B1.0
        stage 1|.   |F0.0|F0.1 B0.1|F1.0 B0.0|F1.1 B1.1|B1.0|.
        1f1b: 7 ticks, bubble 20.0%, live units 4 2  (F forward, B backward of microbatch.chunk)"""
    assert text_of(make_schedule("1f1b", 2, 2, 2)) == textwrap.dedent(text)
    text = """\
        tick   |0   |1   |2   |3        |4        |5   |6   |7
        stage 0|F0/0|F1/0|F0/1|F1/1 .   |.    B0/1|B1/1|B0/0|B1/0
        stage 1|.   |F0/0|F1/0|F0/1 B0/1|F1/1 B1/1|B0/0|B1/0|.
        interleaved: 8 ticks, bubble 20.0%, live units 4 3  (F forward, B backward of """
    text = textwrap.dedent(text) + "microbatch/group)"
    assert text_of(make_schedule("interleaved", 2, 2, 1, 2)) == text
    text = """\
        tick   |0 |1 |2
        stage 0|F0|F1|.
        stage 1|. |F0|F1
        gpipe: 3 ticks, bubble 33.3%, live units 0 0  (F forward, B backward of microbatch)"""
    assert text_of(make_schedule("gpipe", 2, 2, backward=False)) == textwrap.dedent(text)


def test_text_of_the_readme_case_fits_a_page():
    lines = text_of(make_schedule("1f1b", 4, 4, 2)).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 120


@given(schedules().filter(lambda schedule: schedule.num_ticks <= 48))
def test_text_shows_the_bubble_as_its_share_of_dots(schedule):
    cells = [
        cell
        for row in text_of(schedule).splitlines()[1:-1]
        for cell in row.split("|", 1)[1].replace("|", " ").split()
    ]
    assert cells.count(".") / len(cells) == pytest.approx(schedule.bubble_at(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 2, 2), r"name='1f1'.*\nFix: use one of gpipe, 1f1b, interleaved, v"),
        (("GPipe", 2, 2), r"name='GPipe' is not a schedule"),
        ((None, 2, 2), r"name=None"),
        (("1f1b", 0, 2), r"num_stages=0 .*\n.*1 or more"),
        (("1f1b", 2, -3), r"num_microbatches=-3 .*\n.*1 or more"),
        (("1f1b", 2, 2, 0), r"num_chunks=0 .*\n.*1 or more"),
        (("1f1b", 2, 2, 1, 0), r"num_groups=0 .*\n.*1 or more"),
        (("1f1b", 2.0, 2), r"num_stages=2\.0 .*\n.*integer"),
        (("1f1b", True, 2), r"num_stages=True .*\n.*integer"),
        (
            ("interleaved", 2, 2, 1, 1),
            r"name='interleaved' cannot have num_groups=1 .*\n.*num_groups=2 or more",
        ),
        (("1f1b", 2, 2, 1, 3), r"name='1f1b' cannot have num_groups=3"),
        (("gpipe", 2, 2, 1, 2), r"name='gpipe' cannot have num_groups=2"),
        (("v", 2, 2, 1, 3), r"name='v' cannot have num_groups=3.*\n.* 2 with 'v'"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


def test_impossible_places_of_w_are_refused():
    with pytest.raises(ValueError, match=r"name='gpipe' cannot have zero_bubble"):
        make_schedule("gpipe", 2, 2, zero_bubble=True)


@pytest.mark.parametrize("kind", NAMES)
def test_large_schedules_are_one_array_operation_per_stage(kind):
    # About a million entries; a loop over units in Python would be felt here.
    schedule = make_schedule(kind, 64, 256, 16, zero_bubble=kind != "gpipe")
    assert (schedule.forward.unit >= 0).sum() == 64 * 256 * 16 * schedule.num_groups
