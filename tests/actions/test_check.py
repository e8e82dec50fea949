"""The checker: each rule with its place and remedy, and never another answer than a brute-force
executor's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from fpipe import Action, Fused, Placement, Schedule, make_schedule
from fpipe.actions.action import Rows
from fpipe.actions.check import check_rows, inspect_rows
from fpipe.actions.dependencies import Facts, walk
from fpipe.actions.rule import Fact
from fpipe.errors import ScheduleError
from schedule_table import TABLE, cases

GOOD = "[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1]"
LOOP = Placement.loop(2)


def refusal(
    text: str, placement: Placement = LOOP, microbatches: int = 2, **kwargs
) -> ScheduleError:
    schedule = Schedule(Schedule.parse(text).rows, placement, microbatches)
    with pytest.raises(ScheduleError) as caught:
        schedule.check(**kwargs)
    return caught.value


# ---- each rule ----
@pytest.mark.parametrize(
    ("text", "rule", "rank", "position", "says"),
    [
        (
            "[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1, 2F0]",
            "range",
            1,
            4,
            "no stage 2; the schedule has 2 stages",
        ),
        (
            "[0F0, 0F1, 0F2, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1]",
            "range",
            0,
            2,
            "no microbatch 2; the schedule has 2 micro",
        ),
        ("[0F0, 1F1, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1B1]", "placement", 0, 1, "move 1F1 there"),
        (
            "[0F0, 0F1, 0B0, 0F0, 0B1]\n[1F0, 1B0, 1F1, 1B1]",
            "count",
            0,
            3,
            "0F0 stands already on rank 0, position 0",
        ),
        ("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1I1, 1B1]", "count", 1, 4, "either B, or I and W"),
        ("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1, 1W1]", "count", 1, 4, "either B, or I and W"),
        ("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1W1, 1B1]", "count", 1, 4, "either B, or I and W"),
        ("[0F0, 0F1, 0B0]\n[1F0, 1B0, 1F1, 1B1]", "count", 0, 1, "0B1 (or 0I1 and 0W1) is missing"),
        ("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1I1]", "count", 1, 2, "1W1 is missing"),
        ("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1W1]", "count", 1, 2, "1I1 is missing"),
        ("[0F0, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1]", "count", 0, 2, "0F1 is missing"),
        ("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, (1F1;1B1)OVERLAP_F_B]", "fused", 1, 2, "1B1 needs 1F1"),
        ("[0F0, 0B0, 0F1, 0B1]\n[1F0, 1B0, 1B1, 1F1]", "order", 1, 2, "move 1F1 before it"),
        ("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1W1, 1I1]", "order", 1, 3, "move 1I1 before it"),
        (
            "[0F0, 0B0, 0F1, 0B1]\n[1F0, 1F1, 1B0, 1B1]",
            "deadlock",
            0,
            1,
            "ranks 0, 1 wait for each other",
        ),
    ],
)
def test_rule_place_and_remedy(text: str, rule: str, rank: int, position: int, says: str) -> None:
    error = refusal(text)
    assert (error.rule, error.rank, error.position) == (rule, rank, position)
    message = str(error)
    assert message.startswith(f"rank {rank}, position {position} (")
    assert says in message
    cell = str(Schedule.parse(text)[rank][position])
    lines = message.split("\n")
    window = next(i for i, line in enumerate(lines) if line.startswith(f"    rank {rank} | "))
    start = lines[window + 1].index("^")
    assert lines[window][start:].startswith(
        cell
    )  # the mark is under the action that the message names
    assert lines[window + 1][start : start + len(cell)] == "^" * len(cell)


def test_a_circle_is_reported_rank_by_rank() -> None:
    assert str(refusal("[0F0, 0B0, 0F1, 0B1]\n[1F0, 1F1, 1B0, 1B1]")) == (
        "rank 0, position 1 (0B0): ranks 0, 1 wait for each other in a circle; on one of them, "
        "move what is waited for "
        "before what waits\n"
        "    rank 0 stands at 0B0 (position 1) and waits for the input gradient of 1B0 (rank 1, "
        "position 2)\n"
        "    rank 1 stands at 1F1 (position 1) and waits for the output of 0F1 (rank 0, position "
        "2)\n"
        "    rank 0 | 0F0 0B0 0F1 0B1\n"
        "                 ^^^\n"
        "    rank 1 | 1F0 1F1 1B0 1B1\n"
        "                 ~~~"
    )


def test_a_circle_of_many_ranks_is_reported_in_part() -> None:
    """Every rank runs its second chunk before its first, and so waits for the rank before it."""
    rows = [
        [Action(s, op, 0) for s, op in ((64 + r, "F"), (r, "F"), (64 + r, "B"), (r, "B"))]
        for r in range(64)
    ]
    with pytest.raises(
        ScheduleError, match=r"ranks 0, 63, 62, 61, 60, 59, \.\.\. wait for each other"
    ) as caught:
        check_rows(inspect_rows(Rows(rows, Placement.loop(64, 2), 1)))  # type: ignore[arg-type]
    assert "through 58 more ranks" in str(caught.value)
    assert str(caught.value).count("\n") == 19


def test_the_window_shows_a_few_actions_around_each_place() -> None:
    rows = [[Action(0, op, mb) for mb in range(40) for op in "FB"]]
    rows[0][40] = Action(0, "F", 3)
    with pytest.raises(ScheduleError) as caught:
        Schedule(rows).check()  # type: ignore[arg-type]
    assert str(caught.value).split("\n")[1:] == [
        "    rank 0 | ... 0B17 0F18 0B18 0F19 0B19 0F3 0B20 0F21 0B21 0F22 0B22 ...",
        "                                          ^^^",
        "    rank 0 | ... 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0F4 0B4 0F5 0B5 ...",
        "                                     ~~~",
    ]
    near = "    rank 0 | 0F0 0B0 0F1 0B0\n                 ~~~     ^^^"
    assert str(refusal("[0F0, 0B0, 0F1, 0B0]\n[1F0]")).endswith(near)


def test_a_rank_without_any_of_its_work_is_named() -> None:
    error = refusal("[0F0, 0F1, 0B0, 0B1]\n[]")
    assert (error.rule, error.rank, error.position) == ("count", 1, None)
    assert str(error).endswith("put it on rank 1\n    rank 1 |\n             ^")


def test_other_ranks_than_the_placement_has() -> None:
    error = refusal(GOOD, Placement.loop(3))
    assert error.rule == "placement"
    assert "2 rows, but its placement has 3 ranks" in str(error)


def test_far_too_few_actions_are_no_reason_to_make_tables() -> None:
    assert refusal("[0F0]\n[1F0]", microbatches=10**15).rule == "count"
    with pytest.raises(ScheduleError):
        Schedule.parse("[0F0]\n[1F999999]").check()


def test_forwards_alone() -> None:
    forwards = Schedule.parse(GOOD).only("F")
    assert forwards.check(training=False) is forwards
    assert refusal(str(forwards)).rule == "count"
    error = refusal(GOOD, training=False)
    assert (error.rule, error.rank, error.position) == ("count", 0, 2)
    assert refusal("[0F0]\n[1F0, 1F1]", training=False).position is None


STRANGE = [
    ("0F0", "is not an action"),
    (None, "is not an action"),
    ((0, "F", 0), "is not an action"),
    (Action(0, "X", 0), "is not an op"),  # type: ignore[arg-type]
    (Action(0, [], 0), "is not an op"),  # type: ignore[arg-type]
    (Action("a", "F", 0), "must be integers"),  # type: ignore[arg-type]
    (Action(0, "F", 0.0), "must be integers"),  # type: ignore[arg-type]
    (Action(0, "F", None), "must be integers"),  # type: ignore[arg-type]
    (Action(-1, "F", 0), "no stage -1"),
    (Action(0, "F", -1), "no microbatch -1"),
    (Fused(()), "two or more parts"),
    (Fused((Action(0, "F", 0),)), "two or more parts"),
    (Fused(7), "two or more parts"),  # type: ignore[arg-type]
    (Fused(("0F0", "0B0")), "is not an action"),  # type: ignore[arg-type]
    (Fused((Action(0, "F", 0), Action(0, "F", 0))), "stands already"),
]


@pytest.mark.parametrize(("cell", "says"), STRANGE, ids=[str(i) for i in range(len(STRANGE))])
def test_cells_that_are_no_actions(cell, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check_rows(inspect_rows(Rows([(cell,), (Action(1, "F", 0), Action(1, "B", 0))], LOOP, 1)))
    with pytest.raises(ScheduleError):  # a Schedule may find it before
        Schedule(((cell,),)).check()
    with pytest.raises(ScheduleError):
        Schedule(((cell,),), Placement.loop(1), 1).check()


# ---- the oracle: run it ----
def needs_of(part: Action, last: int) -> list[tuple[str, int]]:
    """What a part needs, stated independently of ``KINDS``, by op names."""
    if part.op == "F":
        return [("F", part.stage - 1)] if part.stage > 0 else []
    if part.op == "W":
        return [("I", part.stage)]
    return [("F", part.stage)] + ([("I|B", part.stage + 1)] if part.stage < last else [])


def runs(rows: Sequence[Sequence], placement: Placement, microbatches: int) -> bool:
    """Every rank, one action at a time, until nothing moves; then: did exactly the right work get
    done?
    """
    done: set[Action] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            parts = row[at[rank]].parts
            for part in parts:
                if not (0 <= part.stage < placement.stages and 0 <= part.microbatch < microbatches):
                    return False
                if placement.rank_of(part.stage, part.microbatch) != rank:
                    return False
            wanted = [
                (ops, s, p.microbatch)
                for p in parts
                for ops, s in needs_of(p, placement.stages - 1)
            ]
            if all(any(Action(s, op, m) in done for op in ops.split("|")) for ops, s, m in wanted):  # type: ignore[arg-type]
                for part in parts:
                    if part in done:
                        return False
                    done.add(part)
                at[rank] += 1
                moved = True
    if any(at[rank] < len(row) for rank, row in enumerate(rows)):
        return False
    for stage in range(placement.stages):
        for m in range(microbatches):
            ops = {op for op in "FBIW" if Action(stage, op, m) in done}  # type: ignore[arg-type]
            if ops not in ({"F", "B"}, {"F", "I", "W"}):
                return False
    return True


def passes(rows: Sequence[Sequence], placement: Placement, microbatches: int) -> bool:
    error = None
    try:
        check_rows(inspect_rows(Rows(rows, placement, microbatches)))
    except ScheduleError as raised:
        error = raised
    if error is None:
        return True
    assert error.rule in ("range", "placement", "count", "fused", "order", "deadlock")
    assert error.rank is not None
    assert error.position is None or 0 <= error.position < len(rows[error.rank])
    return False


def mutate(rows: list[list], draw: random.Random) -> None:
    """Drop, duplicate, swap, move to another rank, change a number, change an op, fuse or
    unfuse.
    """
    rank = draw.choice([rank for rank, row in enumerate(rows) if row])
    row = rows[rank]
    i, j = draw.randrange(len(row)), draw.randrange(len(row))
    match draw.randrange(9):
        case 0:
            del row[i]
        case 1:
            row.insert(j, row[i])
        case 2:
            row[i], row[j] = row[j], row[i]
        case 3 if i + 1 < len(row):
            row[i], row[i + 1] = row[i + 1], row[i]
        case 4:
            other = draw.choice(rows)
            other.insert(draw.randrange(len(other) + 1), row.pop(i))
        case 5:
            part = row[i].parts[0]
            by = draw.choice([-1, 1, 2])
            row[i] = part._replace(
                **{draw.choice(["stage", "microbatch"]): by + draw.choice(part[::2])}
            )
        case 6:
            row[i] = row[i].parts[0]._replace(op=draw.choice("FBIW"))
        case 7 if i + 1 < len(row):
            row[i : i + 2] = [Fused((*row[i].parts, *row[i + 1].parts))]
        case _:
            row[i : i + 1] = draw.sample(row[i].parts, len(row[i].parts))


SMALL = [
    case.make()
    for case in (
        *cases(ranks=(1, 2, 3), microbatches=(1, 2, 3)),
        *cases(ranks=(2, 4), microbatches=(4,)),
    )
]


def test_checker_and_oracle_agree_on_every_mutation(long: bool) -> None:
    draw = random.Random(2024)
    answers = {True: 0, False: 0}
    for schedule in SMALL:
        assert passes(schedule.rows, schedule.placement, schedule.microbatches)
        assert runs(schedule.rows, schedule.placement, schedule.microbatches)
    mutations = 20_000 if long else 5_000
    for _ in range(mutations):
        schedule = draw.choice(SMALL)
        rows = [list(row) for row in schedule]
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            if any(rows):
                mutate(rows, draw)
        truth = runs(rows, schedule.placement, schedule.microbatches)
        assert passes(rows, schedule.placement, schedule.microbatches) == truth, Schedule.__str__(
            schedule
        )
        answers[truth] += 1
    assert min(answers.values()) > mutations // 20, answers  # both answers come up


@st.composite
def shuffled(draw):
    """Every action of a small model once, in any order on its rank: mostly deadlocks."""
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    placement = draw(
        st.sampled_from([Placement.loop(ranks), Placement.v(ranks), Placement.loop(ranks, 2)])
    )
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for stage in range(placement.stages):
        for m in range(microbatches):
            ops = draw(st.sampled_from(["FB", "FIW"]))
            rows[placement.rank_of(stage)] += [Action(stage, op, m) for op in ops]  # type: ignore[arg-type]
    return [draw(st.permutations(row)) for row in rows], placement, microbatches


@given(shuffled())
def test_checker_and_oracle_agree_on_any_order(drawn) -> None:
    assert passes(*drawn) == runs(*drawn)


# ---- no circle is enough, also where a send blocks until it is received ----
def programs(schedule: Schedule) -> list[list[tuple]]:
    """Lower by the walk's order: behind each action, as one event, every message that it makes for
    another rank.
    """
    result = walk(schedule.rows, schedule.stages, schedule.microbatches)
    lowered: list[list[tuple]] = [[] for _ in range(schedule.ranks)]
    for rank, position in result.order:
        action = schedule[rank][position]
        lowered[rank].append(("run", action))
        for part in action.parts:
            to = part.stage + (part.op == "F") - (part.op in "BI")
            if to == part.stage or not 0 <= to < schedule.stages:
                continue
            home = schedule.placement.rank_of(to, part.microbatch)
            if home != rank:
                message = (part.stage, to, part.microbatch)
                lowered[rank].append(("send", home, message))
                lowered[home].append(("receive", rank, message))
    return lowered


def meets(lowered: list[list[tuple]], draw: random.Random) -> bool:
    """Run with rendezvous in a random order: a send and its receive happen together or not at
    all.
    """
    at = [0] * len(lowered)
    while True:
        able = []
        for rank, program in enumerate(lowered):
            if at[rank] == len(program):
                continue
            kind, *rest = program[at[rank]]
            if kind == "run":
                able.append((rank,))
            elif kind == "send":
                other, message = rest
                if at[other] < len(lowered[other]) and lowered[other][at[other]] == (
                    "receive",
                    rank,
                    message,
                ):
                    able.append((rank, other))
        if not able:
            return all(at[rank] == len(program) for rank, program in enumerate(lowered))
        for rank in draw.choice(able):
            at[rank] += 1


@given(shuffled(), st.randoms(use_true_random=False))
def test_what_has_no_circle_runs_with_blocking_sends(drawn, draw: random.Random) -> None:
    rows, placement, microbatches = drawn
    if passes(*drawn):
        assert meets(programs(Schedule(rows, placement, microbatches)), draw)


@pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{s.ranks}x{s.microbatches}")
def test_every_schedule_runs_with_blocking_sends(schedule: Schedule) -> None:
    assert meets(programs(schedule), random.Random(1))


def test_the_rendezvous_executor_can_find_a_deadlock() -> None:
    """Two ranks that both send first: what a lowering must not do."""
    crossed = [[("send", 1, "a"), ("receive", 1, "b")], [("send", 0, "b"), ("receive", 0, "a")]]
    assert not meets(crossed, random.Random(0))


# ---- the walk ----
@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.name)
def test_the_walk_visits_every_action_once_and_after_what_it_needs(family) -> None:
    schedule = make_schedule(family.name, 4, 6)
    done: set[Action] = set()
    order = list(walk(schedule.rows, schedule.stages, schedule.microbatches).order)
    assert sorted(order) == [(r, i) for r, row in enumerate(schedule) for i in range(len(row))]
    for rank, position in order:
        parts = schedule[rank][position].parts
        for part in parts:
            for ops, stage in needs_of(part, schedule.stages - 1):
                assert any(Action(stage, op, part.microbatch) in done for op in ops.split("|"))  # type: ignore[arg-type]
        done.update(parts)


def test_a_stage_that_waits_for_itself_blocks() -> None:
    rows = [(Action(0, "B", 0), Action(0, "F", 0))]
    assert inspect_rows(Rows(rows, Placement.loop(1), 1)).walk.blocked == ((0, 0, Fact("F", 0, 0)),)


def test_every_fact_has_its_own_number() -> None:
    facts = Facts(stages=3, microbatches=4)
    named = [facts.fact(index) for index in range(facts.size)]
    assert len(set(named)) == facts.size == len(facts.initial())
    assert all(
        there == (not 0 <= fact.stage < 3)
        for there, fact in zip(facts.initial(), named, strict=True)
    )
