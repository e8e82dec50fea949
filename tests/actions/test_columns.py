"""Large schedules as columns of integers, against the loops over actions that small ones take."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fpipe import Action, Costs, Schedule, Slice, make_schedule
from fpipe.actions import check
from fpipe.actions.action import Fused, Placement, Rows
from fpipe.actions.columns import Columns, inspect
from fpipe.actions.costs import Beside
from fpipe.actions.dependencies import walk
from fpipe.actions.simulation import simulate_rows
from fpipe.actions.timeline import Timeline
from fpipe.errors import ScheduleError
from fpipe.generators import patterns
from sample import covering
from schedule_table import TABLE, Case, cases

PLAIN = [family.name for family in TABLE if not family.fused]
#: No two sums of these are equal by chance, and their last bits depend on the order of additions.
UNEVEN = Costs(
    F=0.37,
    I=0.71,
    W=0.13,
    comm=0.011,
    send=0.003,
    receive=0.007,
    saved=0.3,
    kept=0.1,
    boundary=3,
    bandwidth=17,
)


def priced(case: Case) -> list[Costs]:
    """Costs of every kind: at unit, uneven, by stage, by boundary and by microbatch."""
    draw = random.Random(case.stages)
    by_stage = [draw.random() for _ in range(case.stages)]
    by_boundary = [draw.random() for _ in range(case.stages - 1)]
    by_microbatch = [draw.random() for _ in range(case.microbatches)]
    return [
        Costs(),
        replace(UNEVEN, F=by_stage, B=by_stage, send=by_boundary, comm=by_boundary),
        replace(UNEVEN, load=by_microbatch, size=by_microbatch, kept=None),
    ]


def figures(timeline: Timeline) -> list[object]:
    numbers = [*timeline.starts, *timeline.ends, *timeline.causes]
    return [
        [one.tolist() for one in numbers],
        timeline.total,
        timeline.span,
        timeline.bubble,
        timeline.peak,
        timeline.peak_bytes,
        timeline.messages,
        timeline.volume,
        timeline.busy,
        timeline.critical_path,
        timeline.slices,
        list(timeline),
        len(timeline),
    ]


@pytest.fixture
def every_schedule_is_large(monkeypatch):
    """Without this, tests of this file would take minutes."""
    for module in (check, patterns):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(check, "_WIDE", 1)


@pytest.mark.parametrize("name", PLAIN)
def test_the_same_rows_and_times_as_the_loops(
    every_schedule_is_large, monkeypatch, name, long: bool
) -> None:
    every = cases((1, 2, 3, 4, 6), (1, 2, 5, 13), per_rank=(1, 2, 4), name=name)
    for case in every if long else covering(every, lambda case: (*case[1:3], case.stages)):
        large = case.make()
        inspected = large.check()._inspection
        assert inspected.waves, case
        with monkeypatch.context() as small:
            for module in (check, patterns):
                small.setattr(module, "LARGE", 1 << 30)
            one = case.make()
            assert (large, large.digest, list(large)) == (one, one.digest, list(one.rows)), case
            assert one.check()._inspection.waves is None
            expected = [figures(one.simulate(costs)) for costs in priced(case)]
        assert [figures(large.simulate(costs)) for costs in priced(case)] == expected, case


def test_an_order_of_all_actions(every_schedule_is_large) -> None:
    """Each step has actions of different ranks, and each action comes after all that it needs."""
    schedule = make_schedule("ZBV", 4, 9).check()
    waves = schedule._inspection.waves
    rank_of = {
        int(cell): rank
        for rank, row in enumerate(schedule)
        for cell, _ in zip(
            range(int(waves.rows.gaps[rank]) + 1, int(waves.rows.gaps[rank + 1])), row, strict=True
        )
    }
    position: dict[int, int] = {0: -1}
    for number, step in enumerate(waves.steps):
        assert len({rank_of[cell] for cell in step.tolist()}) == len(step)
        position |= dict.fromkeys(step.tolist(), number)
    assert sorted(position) == sorted([0, *rank_of])
    for cell in rank_of:
        assert position[int(waves.needs[cell])] < position[cell]
        assert position.get(cell - 1, -1) < position[cell]
    assert len(waves.steps) == schedule.simulate(Costs(B=1)).total


# ---- faults ----
def broken(schedule: Schedule, draw: random.Random) -> Schedule:
    """The schedule with a random fault, or another valid order."""
    rows = [list(row) for row in schedule]
    rank = draw.randrange(len(rows))
    row = rows[rank]
    one, other = draw.randrange(len(row)), draw.randrange(len(row))
    kind = draw.randrange(8)
    if kind < 3:
        row[one], row[other] = row[other], row[one]
    elif kind == 3:
        del row[one]
    elif kind == 4:
        row.insert(one, row[other])
    elif kind == 5:
        rows[draw.randrange(len(rows))].append(row.pop(one))
    elif kind == 6:
        row[one] = row[one]._replace(
            **{draw.choice(["stage", "microbatch"]): draw.randrange(-1, 9)}
        )
    else:
        row[one] = row[one]._replace(op=draw.choice("FBIW"))
    return Schedule(rows, schedule.placement, schedule.microbatches)


def outcome(schedule: Schedule, *, training: bool = True) -> str:
    found = []
    for work in (
        lambda: schedule.check(training=training),
        lambda: figures(schedule.simulate(UNEVEN)),
    ):
        try:
            found.append(repr(work()))
        except ScheduleError as error:
            found.append(f"{error} {error.rank} {error.position} {error.rule}")
    return "\n".join(found)


def test_faults_are_found_and_named_as_by_the_loops(every_schedule_is_large, monkeypatch) -> None:
    draw = random.Random(20)
    refused = 0
    for number in range(400):
        made = make_schedule(draw.choice(["1F1B", "ZBV", "Chimera", "VMin", "Hanayo"]), 4, 6)
        schedule = broken(made, draw)
        found = outcome(schedule, training=number % 5 > 0)
        with monkeypatch.context() as small:
            small.setattr(check, "LARGE", 1 << 30)
            again = Schedule(tuple(schedule), schedule.placement, schedule.microbatches)
            assert found == outcome(again, training=number % 5 > 0), schedule
        refused += not found.startswith("Schedule(")
    assert 200 < refused < 400


@pytest.mark.parametrize(
    "cell",
    [
        Fused((Action(0, "F", 1), Action(0, "B", 0))),
        Action(0, "F", 1.0),  # type: ignore[arg-type]
        Action(0, "F", True),
        Action(0, "F", 10**30),
        Action(-1, "F", 1),
        Action(0, "FB", 1),  # type: ignore[arg-type]
        Action(0, "", 1),  # type: ignore[arg-type]
        Action(0, ["F"], 1),  # type: ignore[arg-type]
        Action(0, "F", Slice(0, 1, of=2)),
        (0, "F", 1),
        None,
    ],
    ids=str,
)
def test_other_cells_are_left_to_the_loops(cell) -> None:
    rows = ((Action(0, "F", 0), cell, Action(0, "B", 0), Action(0, "B", 1)),)
    assert inspect(Rows(rows, Placement.loop(1), 2)) is None
    whole = ((Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)),)
    assert inspect(Rows(whole, Placement.loop(1), 2))


def test_one_action_after_another_is_left_to_the_loop() -> None:
    """A step of NumPy takes as long as several actions, so it must have several."""

    def found(microbatches: int) -> object:
        rows = tuple(
            tuple(Action(stage, op, mb) for mb in range(microbatches) for op in ("F", "B"))
            for stage in range(16)
        )
        check.check_rows(check.inspect_rows(Rows(rows, Placement.loop(16), microbatches)))
        return inspect(Rows(rows, Placement.loop(16), microbatches))

    assert found(20)
    assert found(200) is None


# ---- as a tuple ----
def test_rows_are_as_a_tuple(every_schedule_is_large) -> None:
    schedule = make_schedule("1F1B", 3, 4)
    rows = schedule.rows
    expected = tuple(Schedule.parse(str(schedule)).rows)
    assert isinstance(rows, Columns)
    assert type(schedule[0]) is tuple and type(schedule[0][0]) is Action
    assert schedule[0] is schedule[0]
    assert (rows == expected) and (expected == rows) and rows != expected[:2]
    assert rows == Columns.of(expected) and hash(rows) == hash(expected)
    assert (rows[-1], rows[1:], len(rows)) == (expected[-1], expected[1:], 3)
    with pytest.raises(IndexError):
        rows[3]
    assert [type(field) for field in schedule[2][1]] == [int, str, int]
    assert pickle.loads(pickle.dumps(schedule)) == schedule == Schedule(expected)
    assert str(schedule.sliced(2)) == str(Schedule(expected).sliced(2))
    assert schedule.only("F") == Schedule(expected).only("F")


def test_a_predicted_cost_of_each_action(every_schedule_is_large) -> None:
    """A function sees actions, so the loop runs."""
    costs = Costs(overlap=lambda action: Beside(1.0 + action.microbatch, ((0.0, 0.5, "x"),)))
    schedule = make_schedule("1F1B", 4, 6)
    expected = simulate_rows(
        check.Inspection(
            Rows(tuple(schedule), schedule.placement, 6), bytearray(), walk(tuple(schedule), 4, 6)
        ),
        costs,
    )
    timeline = schedule.simulate(costs)
    assert figures(timeline) == figures(expected)
    assert timeline.carried == expected.carried and timeline.carried[0]


# ---- what large schedules cost ----
# The peak of getrusage would be the parent's where that was larger before the fork.
SCRIPT = """
import re
from pathlib import Path
from fpipe import make_schedule
schedule = make_schedule({name!r}, {ranks}, {microbatches})
total = schedule.check().simulate().total
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(total, int(peak[1]) / 2**20)
assert schedule._inspection.waves
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read in /proc")
@pytest.mark.parametrize(("name", "total"), [("1F1B", 6909.0), ("ZBVZeroBubble", 12543.0)])
def test_a_million_actions(name: str, total: float) -> None:
    """They are checked and simulated as columns, in less than half a GiB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name, ranks=256, microbatches=2048)],
        capture_output=True,
        text=True,
        check=True,
    )
    found, gigabytes = map(float, done.stdout.split())
    assert found == total
    assert gigabytes < 0.5


def test_small_schedules_load_no_numpy() -> None:
    script = (
        "import sys, fpipe; fpipe.make_schedule('ZBV', 16, 64).check().simulate().peak;"
        "assert 'numpy' not in sys.modules;"
        "fpipe.make_schedule('1F1B', 64, 512); assert 'numpy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
