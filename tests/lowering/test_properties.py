"""Properties of all plans: for schedules of the table, drawn at random, the ranks' plans are run
with the names of values in place of tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from random import Random
from typing import Any

import pytest

from fpipe import make_schedule
from plans import Lowered, lower, lower_apart, lower_copy
from schedule_table import TABLE

#: An action of a stage: stage, letter and microbatch.
PROGRAM = re.compile(r"(\d+)([FBIW])([\d.]+)")
ORDERS = ("local", "buffered", "lockstep", "copy")


class World:
    """What all ranks share: messages on their way, by sender and receiver, each with its bytes."""

    def __init__(self) -> None:
        self.sent: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.posted: defaultdict[tuple[int, int], deque[tuple[int, ...]]] = defaultdict(deque)


class Rank:
    """Runs the plan of one rank, as far as it can at a time."""

    def __init__(self, rank: int, plan: Lowered, world: World, lockstep: bool):
        self.rank, self.plan, self.world, self.lockstep = rank, plan, world, lockstep
        self.place = 0
        self.full: dict[int, Any] = {slot: ("caller", slot) for slot in plan.feeds}
        self.waiting: defaultdict[int, deque[tuple[int, tuple[int, ...]]]] = defaultdict(deque)
        self.unsettled: defaultdict[int, int] = defaultdict(int)

    def run(self) -> bool:
        """Run lines until one has to wait; whether any ran."""
        before = self.place
        while self.place < len(self.plan.lines) and self.step():
            self.place += 1
        return self.place > before

    def step(self) -> bool:
        """Run one line; False: another rank must do something first."""
        line = self.plan.lines[self.place]
        text = f"rank {self.rank}, line {self.place}: {line.short}"
        values = []
        for slot in line.reads:
            assert slot in self.full, f"{text} reads slot {slot}, which is empty"
            values.append(self.full[slot])
        name = line.action if line.kind in "FBIW" else line.kind
        results: list[Any] = [(name, n) for n in range(len(line.writes))]
        if line.kind == "SEND":
            channel = self.rank, line.peer
            if self.lockstep and not self.world.posted[channel]:
                return False  # the send blocks
            if self.world.posted[channel]:
                assert self.world.posted[channel].popleft() == line.nbytes, text
            self.world.sent[channel].append((line.nbytes, values))
            self.unsettled[line.peer] += 1
        elif line.kind == "RECV":
            self.waiting[line.peer].append((line.number, line.nbytes))
            if self.lockstep:
                self.world.posted[line.peer, self.rank].append(line.nbytes)
        elif line.kind == "WAIT" and line.stage < 0:
            if not self.world.sent[line.peer, self.rank]:
                return False
            number, nbytes = self.waiting[line.peer].popleft()
            sent, results = self.world.sent[line.peer, self.rank].popleft()
            assert number == line.number, f"{text} is not the next receive, {number}"
            assert sent == nbytes == line.nbytes, f"{text} has other sizes than its message"
            assert len(results) == len(line.writes), text
        elif line.kind == "SETTLE":
            assert line.number <= self.unsettled[line.peer], f"{text} releases too much"
            self.unsettled[line.peer] -= line.number
        elif line.kind in "FBIW" and PROGRAM.fullmatch(line.action):
            check_reads(text, line.action, [name for name, _ in values])
        for slot, value in zip(line.writes, results, strict=True):
            free = slot not in self.full or line.kind in ("ADD", "SUM")
            assert free, f"{text} writes slot {slot}, which holds {self.full.get(slot)}"
            self.full[slot] = value
        for slot in line.frees:
            assert slot in self.full, f"{text} frees slot {slot}, which is empty"
            del self.full[slot]
        return True


def check_reads(text: str, action: str, names: list[str]) -> None:
    """Values that programs computed, and that a program reads, are of its microbatch; a forward
    reads what the stage before returned, and any other program reads values of its own stage.
    """
    stage, letter, microbatch = PROGRAM.fullmatch(action).groups()  # type: ignore[union-attr]
    computed = [found.groups() for name in names if (found := PROGRAM.fullmatch(name))]
    assert all(mb == microbatch for *_, mb in computed), f"{text} reads {names}"
    needed = (str(int(stage) - 1) if letter == "F" else stage, "F")
    segment = (stage, letter, microbatch) in computed  # a later one of a program that is woven
    if not segment and (letter in "BI" or (letter == "F" and stage != "0")):
        assert needed in [(s, op) for s, op, _ in computed], f"{text} reads {names}"


def run(plans: dict[int, Lowered], lockstep: bool) -> None:
    """Run the plans of all ranks to their ends."""
    world = World()
    ranks = [Rank(rank, plan, world, lockstep) for rank, plan in sorted(plans.items())]
    while any(rank.run() for rank in ranks):
        pass
    for rank in ranks:
        rest = rank.plan.short[rank.place :]
        assert not rest, f"rank {rank.rank} stops before {rest[0]}"
        assert {*rank.full} == {*rank.plan.feeds, *rank.plan.results}, "something was not freed"
        assert not any(rank.waiting.values()), "a receive was posted and not waited for"
    assert not any(world.sent.values()), "a message was not received"


def drawn(number: int) -> tuple[str, dict[int, Lowered], bool]:
    """A schedule of the table, a group and a mode, lowered."""
    draw = Random(number)
    family = TABLE[number % len(TABLE)]
    ranks = draw.choice([2, 4])
    per_rank = draw.choice(family.per_rank)
    number_of_microbatches = draw.choice([1, 2, 3, 4, 7])
    schedule = make_schedule(family.name, ranks, number_of_microbatches, ranks * per_rank)
    order = draw.choice(ORDERS)
    tied = [("0", str(schedule.stages - 1))] if draw.random() < 0.3 else []
    mode = draw.choice(["grad", "forward", "vjp"])
    more: dict[str, Any] = {"tied": tied, "call": {"mode": mode}}
    if mode == "vjp":
        more["loss"] = None
    if mode != "forward" and draw.random() < 0.3:
        more["call"]["wanted"] = (0, 1)
    text = f"{schedule!r} {family.name} {order} {mode} {tied}"
    if order == "copy":
        return text, lower_copy(schedule, draw.choice([0, 1, 2, 3]), **more), False
    if order == "local":
        return text, lower(schedule, **more), False
    return text, lower_apart(schedule, order, **more), order == "lockstep"  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(2 * len(TABLE)))
def test_the_plans_of_all_ranks_fit_together(number: int):
    text, plans, lockstep = drawn(number)
    try:
        run(plans, lockstep)
    except AssertionError as error:
        error.add_note(text)
        raise
