"""The simulator: published numbers, a second telling of the clock, memory, causes, and costs as
text.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from effort import lines
from fpipe import Action, Costs, Placement, Schedule, Timeline, make_schedule
from fpipe.actions.rule import needs
from fpipe.errors import ScheduleError
from schedule_table import cases

TWO = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1]")


# ---- published numbers ----
#: Zero-bubble paper, tables 5 and 6: p, m, costs with the latency of a link, bubble rates
PAPER = [
    (
        8,
        24,
        Costs(18.522, 18.086, 9.337, comm=0.601),
        {"1F1B": 0.2431, "ZBH1": 0.1585, "ZBH2": 0.1083},
    ),
    (
        8,
        32,
        Costs(18.513, 18.086, 9.331, comm=0.626),
        {"1F1B": 0.1985, "ZBH1": 0.1242, "ZBH2": 0.0837},
    ),
    (
        8,
        64,
        Costs(18.546, 18.097, 9.321, comm=0.762),
        {"1F1B": 0.1240, "ZBH1": 0.0674, "ZBH2": 0.0444},
    ),
    (
        8,
        24,
        Costs(29.718, 29.444, 19.927, comm=0.527),
        {"1F1B": 0.2347, "ZBH1": 0.1323, "ZBH2": 0.0698},
    ),
    (
        16,
        48,
        Costs(11.347, 11.248, 8.132, comm=0.377),
        {"1F1B": 0.2552, "ZBH1": 0.1397, "ZBH2": 0.0672},
    ),
    (
        32,
        96,
        Costs(10.419, 10.207, 7.715, comm=0.408),
        {"1F1B": 0.2646, "ZBH1": 0.1421, "ZBH2": 0.0641},
    ),
]


@pytest.mark.parametrize(("ranks", "microbatches", "costs", "rates"), PAPER)
def test_the_rates_of_the_paper(
    ranks: int, microbatches: int, costs: Costs, rates: dict[str, float]
) -> None:
    for name, rate in rates.items():
        assert round(make_schedule(name, ranks, microbatches).simulate(costs).bubble, 4) == rate, (
            name
        )


#: p = 8, m = 24, a rank's share costs F = I = W = 1: chunks a rank, total, span, peak in
#: microbatches of a rank
UNIT = {
    "GPipe": (1, 93, 93, 24),
    "1F1B": (1, 93, 93, 8),
    "Interleaved1F1B": (2, 82.5, 82.5, 11.5),
    "LoopedBFS": (2, 82.5, 82.5, 24),
    "ZBH1": (1, 79, 79, 8),
    "ZBH2": (1, 79, 72, 15),
    "InterleavedZeroBubble": (2, 75.5, 75.5, 8),
    "ZBVZeroBubble": (2, 75.5, 72, 8),
    "DualPipe": (1, 78, 78, 9),
    "DualPipeV": (2, 79, 79, 8.5),
}


@pytest.mark.parametrize("name", UNIT)
def test_the_numbers_at_unit_cost(name: str) -> None:
    chunks, total, span, peak = UNIT[name]
    timeline = make_schedule(name, 8, 24).simulate(Costs(1 / chunks, 1 / chunks, 1 / chunks))
    assert (timeline.total, timeline.span, max(timeline.peak) / chunks) == (total, span, peak)
    assert timeline.bubble == pytest.approx(1 - 24 * 3 / span)
    assert max(timeline.windows) - min(timeline.busy) == pytest.approx(span - 24 * 3)


def test_the_peaks_of_one_f_one_b_fall_by_one_a_rank() -> None:
    assert make_schedule("1F1B", 8, 24).simulate().peak == (8, 7, 6, 5, 4, 3, 2, 1)


# ---- a second telling ----
def clock(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """Start and end of every action, by the definition: round after round until nothing changes."""
    times, links, path = (
        costs.times(schedule.stages),
        costs.links(schedule.stages),
        schedule.placement.rank_of,
    )
    spans = [[(0.0, 0.0)] * len(row) for row in schedule]
    while True:
        made = {
            (p.stage, p.op, p.microbatch): end
            for row, lane in zip(schedule, spans, strict=True)
            for action, (_, end) in zip(row, lane, strict=True)
            for p in action.parts
        }
        before = [list(lane) for lane in spans]
        for rank, row in enumerate(schedule):
            free = 0.0
            for position, action in enumerate(row):
                start = free
                for part in action.parts:
                    for kind, stage, mb in needs(part, schedule.stages):
                        end = made.get((stage, kind, mb), made.get((stage, "B", mb), 0.0))
                        far = path(stage, mb) != rank
                        start = max(start, end + (links[min(stage, part.stage)] if far else 0.0))
                lengths = [times[p.op][p.stage] for p in action.parts]
                together = len(lengths) > 1 and "overlap" in times
                free = start + (
                    times["overlap"][action.parts[0].stage] if together else sum(lengths)
                )
                spans[rank][position] = (start, free)
        if spans == before:
            return spans


@pytest.mark.parametrize("case", list(cases(ranks=(1, 2, 4), microbatches=(1, 5, 8))), ids=str)
def test_equal_to_a_second_simulator(case) -> None:
    schedule, draw = case.make(), random.Random(str(case))

    def some(count: int) -> list[float]:
        return [draw.randrange(16) / 4 for _ in range(count)]

    stages = schedule.stages
    costs = Costs(
        *(some(stages) for _ in "FIWB"),
        overlap=draw.choice([None, some(stages)]),
        comm=draw.choice([0, 0.5, some(stages - 1)]),
        boundary=some(stages - 1),
        bandwidth=2,
    )
    timeline = schedule.simulate(costs)
    spans = [
        list(zip(s, e, strict=True)) for s, e in zip(timeline.starts, timeline.ends, strict=True)
    ]
    assert spans == clock(schedule, costs)
    check_causes(timeline, costs)


def check_causes(timeline: Timeline, costs: Costs) -> None:
    """Every wait is explained by what ended it, and the critical path is a chain without gaps from
    start to end.
    """
    links = costs.links(timeline.placement.stages)
    for rank, position, action, start, _ in timeline:
        free = timeline.ends[rank][position - 1] if position else timeline.start
        wait = timeline.waited_for(rank, position)
        assert (wait is not None) == (start > free)
        if wait:
            assert wait.time == start - free
            end = timeline.ends[wait.rank][wait.position]
            assert end <= start
            assert start - end in {0.0, *links}
            theirs = {p.microbatch for p in timeline.rows[wait.rank][wait.position].parts}
            assert theirs & {p.microbatch for p in action.parts}
    path = timeline.critical_path
    assert path[0].start == timeline.start
    assert path[-1].end == timeline.total
    for one, after in pairwise(path):
        wait = timeline.waited_for(after.rank, after.position)
        assert (one.rank, one.position) == (
            (wait.rank, wait.position) if wait else (after.rank, after.position - 1)
        )


# ---- by hand ----
def test_a_message_takes_latency_and_bytes_over_bandwidth() -> None:
    plain, far = TWO.simulate(), TWO.simulate(Costs(comm=0.25, boundary=100, bandwidth=400))
    assert [span.start for span in plain.of_rank(1)] == [1, 2, 4, 5]
    assert [span.start for span in far.of_rank(1)] == [1.5, 2.5, 4.5, 5.5]
    assert [span.start for span in far.of_rank(0)] == [0, 1, 5, 8]
    assert (far.messages, far.volume) == (4, 400)
    assert (plain.messages, plain.volume) == (4, 0)


def test_on_one_rank_nothing_travels() -> None:
    zbv = make_schedule("ZBV", 2, 4)
    timeline = zbv.simulate(Costs(comm=[5, 0, 5], boundary=[1, 10, 100]))
    free = zbv.simulate(Costs(comm=[5, 1000, 5]))
    assert timeline.total == free.total > zbv.simulate().total
    assert timeline.messages == 4 * 2 * 2
    assert timeline.volume == 4 * 2 * 101


def test_each_microbatch_travels_its_own_path() -> None:
    """Stage 1 is on rank 1 for microbatch 0 and on rank 0 for microbatch 1."""
    schedule = Schedule.parse("[0F0, 0F1, 1F1, 1B1, 0B1, 0B0]\n[1F0, 1B0]")
    costs = Costs(comm=10)
    timeline = schedule.simulate(costs)
    assert [span.start for span in timeline.of_rank(0)] == [0, 1, 2, 3, 5, 24]
    assert [span.start for span in timeline.of_rank(1)] == [11, 12]
    assert [
        list(zip(s, e, strict=True)) for s, e in zip(timeline.starts, timeline.ends, strict=True)
    ] == clock(schedule, costs)
    assert timeline.messages == 2


def test_costs_differ_by_stage() -> None:
    timeline = TWO.simulate(Costs(F=[1, 2], B={0: 3, 1: 4}))
    assert [(s.start, s.end) for s in timeline.of_rank(0)] == [(0, 1), (1, 2), (7, 10), (13, 16)]
    assert (timeline.total, timeline.span, timeline.busy) == (16, 16, (8, 12))
    assert timeline.bubble == 1 - 20 / 32


def test_a_fused_action_has_its_own_time() -> None:
    schedule = make_schedule("DualPipeV", 2, 6)
    fused = [len(action.parts) > 1 for row in schedule for action in row]
    assert any(fused)
    for costs, length in (
        (Costs(), 3),
        (Costs(overlap=2.5), 2.5),
        (Costs(overlap=[2, 2, 2, 2]), 2),
    ):
        lengths = {
            span.end - span.start for span in schedule.simulate(costs) if len(span.action.parts) > 1
        }
        assert lengths == {length}


def test_memory_is_held_from_f_to_i_and_from_i_to_w() -> None:
    timeline = Schedule.parse("[0F0, 0F1, 0I0, 0I1, 0W0, 0W1]").simulate(Costs(saved=10, kept=4))
    assert timeline.curve(0) == ((0, 10), (1, 20), (3, 14), (4, 8), (5, 4), (6, 0))
    assert (timeline.peak, timeline.peak_bytes) == ((2,), (20,))
    more = Schedule.parse("[0F0, 0I0, 0W0]").simulate(Costs(saved=10, kept=15))
    assert more.peak_bytes == (15,)


def test_what_a_fused_action_frees_is_held_while_it_runs() -> None:
    timeline = Schedule.parse("[0F0, (0F1;0B0)OVERLAP_F_B, 0B1]").simulate()
    assert timeline.peak == (2,)
    assert timeline.curve(0) == ((0, 1), (1, 2), (4, 1), (6, 0))


@pytest.mark.parametrize("case", list(cases(ranks=(2, 4), microbatches=(3, 8))), ids=str)
def test_all_that_is_held_is_freed_and_bytes_follow_activations(case) -> None:
    schedule = case.make()
    timeline, split = schedule.simulate(), schedule.simulate(Costs(saved=8, kept=2))
    assert timeline.peak_bytes == timeline.peak
    for rank in range(timeline.ranks):
        assert timeline.curve(rank)[-1][1] == split.curve(rank)[-1][1] == 0
        times = [time for time, _ in timeline.curve(rank)]
        assert times == sorted(times)
    assert all(
        bytes_ <= 8 * count for bytes_, count in zip(split.peak_bytes, timeline.peak, strict=True)
    )


def test_what_waited_for_what() -> None:
    timeline = TWO.simulate(Costs(comm=0.5))
    assert timeline.waited_for(0, 0) is timeline.waited_for(1, 1) is None
    assert timeline.waited_for(1, 0) == (0, 0, 1.5)
    assert timeline.waited_for(0, 2) == (1, 1, 2.0 + 0.5 * 2)
    path = [str(span.action) for span in timeline.critical_path]
    assert path == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


# ---- what can and cannot be simulated ----
def test_half_a_schedule_can_be_simulated() -> None:
    assert TWO.only("F").simulate().total == 3
    idle = Schedule(((Action(0, "F", 0),), ()), Placement(((0,),), 2), 1).simulate()
    assert (idle.total, idle.windows, idle.peak, idle.bubble) == (1, (1, 0), (1, 0), 0.5)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[0B0]\n[1F0]", "count"),
        ("[0F0, 0F0]\n[1F0]", "count"),
        ("[0F0, 1F1]\n[1F0]", "placement"),
        ("[0F0, 2F1]\n[1F0]", "range"),
        ("[0B0, 0F0]\n[1F0, 1B0]", "order"),
        ("[(0F0;0B0)OVERLAP_F_B]\n[1F0, 1B0]", "fused"),
        ("[0F0, 0B0, 0F1, 0B1]\n[1F0, 1F1, 1B0, 1B1]", "deadlock"),
    ],
)
def test_what_cannot_run_is_refused(text: str, rule: str) -> None:
    schedule = Schedule(Schedule.parse(text).rows, Placement.loop(2), 2)
    with pytest.raises(ScheduleError) as caught:
        schedule.simulate()
    assert caught.value.rule == rule


# ---- costs ----
POSITIVE = st.floats(0.001, 1e9)
NUMBERS = st.one_of(POSITIVE, st.lists(POSITIVE, min_size=2, max_size=4))
NAMES = ("F", "I", "W", "B", "overlap", "comm", "boundary", "bandwidth", "saved", "kept")


@given(st.dictionaries(st.sampled_from(NAMES), NUMBERS))
def test_costs_come_back_from_text_and_json(given_costs) -> None:
    costs = Costs(**given_costs)
    text = {
        name: ":".join(map(repr, value if isinstance(value, list) else [value]))
        for name, value in given_costs.items()
    }
    assert Costs.parse(", ".join(f"{name} = {value}" for name, value in text.items())) == costs
    assert Costs.from_json(costs.to_json()) == costs
    assert hash(costs) == hash(Costs(**given_costs))


@pytest.mark.parametrize("costs", [3, {"F": 1}])
def test_costs_of_another_kind(costs) -> None:
    with pytest.raises(ScheduleError, match=r"costs=.*give fpipe.Costs"):
        Schedule.parse("[0F0, 0B0]").simulate(costs)


def test_arrays_are_numbers_too() -> None:
    numpy = pytest.importorskip("numpy")
    assert Costs(F=numpy.array([1.0, 2.0]), I=numpy.float32(0.5)) == Costs(F=[1, 2], I=0.5)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"F": -1}, "F: '-1' must be a number from 0 up"),
        ({"I": math.nan}, "must be a number from 0 up"),
        ({"W": math.inf}, "must be a number from 0 up"),
        ({"W": None}, "must be a number from 0 up"),
        ({"B": "2"}, "must be a number from 0 up"),
        ({"B": [1, "x"]}, "must be a number from 0 up"),
        ({"bandwidth": 0}, "must be a number above 0"),
        ({"comm": {0: 1, 2: 1}}, r"comm has \[0, 2\], and must name every stage from 0 on"),
        ({"F": 10**400}, "must be a number from 0 up"),
    ],
)
def test_costs_that_are_none(kwargs, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        Costs(**kwargs)


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (Costs(F=[1, 2, 3]), "F has 3 numbers, but there are 2 stages"),
        (Costs(comm=[1, 2]), "comm has 2 numbers, but there are 1 boundaries"),
        (Costs(overlap=[1]), "overlap has 1 numbers"),
        (Costs(kept=[1]), "kept has 1 numbers"),
    ],
)
def test_costs_for_other_stages(costs: Costs, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        TWO.simulate(costs)


@pytest.mark.parametrize(
    "text",
    ["F", "F=", "F=x", "F=1;I=2", "G=1", "F=1,F=2", "F=1:x", "F=-1", "=1", "unit=1", "F=1 2"],
)
def test_costs_in_text_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Costs.parse(text)
    assert caught.value.rule == "costs"


@pytest.mark.parametrize("value", [1e308, 1e-320, 1e101])
def test_costs_whose_sums_are_not_finite(value: float) -> None:
    """A time of infinity, and pictures that failed."""
    with pytest.raises(ScheduleError, match="must be a number of at least 1e-100 and at most"):
        Costs(F=value)
    assert Costs(F=0.0, I=1e-100, W=1e100, bandwidth=float("inf")).F == 0


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"G": 1}', '{"F": "1"}', '{"F": null}', "[" * 100_000, '{"F": {"0": 1}}'],
)
def test_costs_in_json_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ScheduleError):
        Costs.from_json(text)


# ---- timelines ----
def test_a_measured_timeline_explains_itself_like_a_simulated_one() -> None:
    simulated = make_schedule("ZBV", 2, 4).simulate()
    spans = [(s.rank, s.action, s.start + 100, s.end + 100) for s in simulated]
    random.Random(0).shuffle(spans)
    measured = Timeline.measured(spans, name="seen", unit="ms")
    assert (measured.rows, measured.microbatches) == (simulated.rows, simulated.microbatches)
    for figure in ("total", "span", "busy", "bubble", "peak", "windows", "messages"):
        assert getattr(measured, figure) == getattr(simulated, figure), figure
    assert measured.start == 100
    assert [s.action for s in measured.critical_path] == [s.action for s in simulated.critical_path]
    for rank, position, *_ in simulated:
        assert measured.waited_for(rank, position) == simulated.waited_for(rank, position)
    assert repr(measured) == "Timeline(seen, 2 ranks, 48 actions, total 25 ms, bubble 0.0%)"


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(-1, Action(0, "F", 0), 0.0, 1.0)],
        [(0, Action(0, "F", 0), 0.0, math.nan)],
        [(0, Action(0, "F", 0), -math.inf, math.inf)],
    ],
)
def test_nothing_measured_is_no_timeline(spans) -> None:
    with pytest.raises(ScheduleError):
        Timeline.measured(spans)


def test_a_timeline_is_a_value(tmp_path) -> None:
    timeline = TWO.simulate()
    assert timeline == TWO.simulate() == pickle.loads(pickle.dumps(timeline))
    assert timeline != TWO.simulate(Costs(F=2))
    assert len(timeline) == len(timeline.spans) == 8
    assert timeline.spans == tuple(timeline)
    assert "rank 1" in timeline.draw(width=60, color=False)
    timeline.save(tmp_path / "two.svg")
    assert (tmp_path / "two.svg").read_text().startswith("<svg")


# ---- speed ----
@pytest.mark.parametrize(("name", "limit"), [("1F1B", 80), ("InterleavedZeroBubble", 160)])
def test_the_effort_for_an_action_does_not_grow_with_the_schedule(name: str, limit: int) -> None:
    """A hundred thousand actions take a fraction of a second; ``make bench`` measures it."""

    def effort(ranks: int) -> float:
        schedule = make_schedule(name, ranks, 8 * ranks)
        return lines(lambda: Schedule(schedule.rows).check().simulate()) / sum(map(len, schedule))

    assert effort(16) < min(limit, 1.1 * effort(4))


# ---- microbatches that differ ----
def test_the_load_of_a_microbatch_multiplies_its_times() -> None:
    costs = Costs(F=1, I=1, W=1, load=[3, 1])
    spans = [(str(span.action), span.start, span.end) for span in TWO.simulate(costs)]
    assert spans == [
        ("0F0", 0, 3),
        ("0F1", 3, 4),
        ("0B0", 12, 18),
        ("0B1", 18, 20),
        ("1F0", 3, 6),
        ("1B0", 6, 12),
        ("1F1", 12, 13),
        ("1B1", 13, 15),
    ]


def test_the_size_of_a_microbatch_multiplies_its_bytes_and_its_message() -> None:
    even = Costs(F=1, I=1, W=1, saved=10, comm=1, boundary=4, bandwidth=2)
    t = TWO.simulate(dataclasses.replace(even, size=[1, 3]))
    assert t.peak_bytes == (40, 30) and t.volume == 2 * 4 + 2 * 12
    assert [span.start for span in t.of_rank(1)] == [
        4,
        5,
        9,
        10,
    ]  # 1F0 after 1 + 1 + 2, 1F1 after 2 + 1 + 6
    assert TWO.simulate(dataclasses.replace(even, size=[1, 1])) == TWO.simulate(even)


def test_costs_of_microbatches_are_one_number_for_each() -> None:
    with pytest.raises(ScheduleError, match="load has 3 numbers, but there are 2 microbatches"):
        TWO.simulate(Costs(load=[1, 1, 2]))
    costs = Costs(F=2, load=[1, 2], size=[3, 4])
    assert Costs.from_json(costs.to_json()) == costs == Costs.parse("F=2,load=1:2,size=3:4")
