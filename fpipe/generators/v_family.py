"""V-Min and V-Half: the V of ZBV with a third and a half of its memory.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv:2405.15362). A microbatch is a building block:
the slots of its four passes (F of a rank's first chunk, f of its second, i, I) on every rank, placed so that the block
can be repeated every six slots without a clash. How long activations live in it decides the memory. V-Min on 4 ranks:

    slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
    rank 0   F                           f   i                           I       down, up, down again and up again,
    rank 1       F                   f           i                   I           a slot a rank; V-Half takes two slots
    rank 2           F           f                   i           I               a rank on its ways down
    rank 3               F   f                           i   I

Then all is squeezed: every rank runs its passes in the order of the repeated blocks, each as soon as it can. While the
pass whose turn it is cannot run yet, an I, an i or (where the block has slack, and never above the memory limit) an F
comes early. W runs where there is nothing else to do, or where a forward must wait for its memory.

With k chunk activations held, 2((p + 4) // 3) in V-Min and 2((p + 2) // 2) in V-Half, a rank idles at unit cost for
3p - 1 - 3k + max(3p, p - 1 + 2(1 + ceil(k/2))) chunk passes, from about p microbatches on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ..schedule import Schedule
from ..schedules.actions import Action, Op
from ..schedules.placement import Placement

_PERIOD = 6  #: of slots: F, f, i, I and their two W


class Block(NamedTuple):
    """Where the passes F, f, i, I of microbatch 0 stand, for each rank; and what a rank may hold, in chunks."""

    places: Sequence[tuple[int, int, int, int]]
    limit: int
    slack: int  #: slots by which i and I come later than they could, so that passes do not clash


def v_min(p: int) -> Block:
    """The building block of V-Min.

    >>> v_min(4).places[0], v_min(4).limit
    ((0, 7, 8, 15), 4)
    """
    slack = (2 - 2 * p) % _PERIOD
    places = [(r, 2 * p - 1 - r, 2 * p + slack + r, 4 * p - 1 + slack - r) for r in range(p)]
    return Block(places, 2 * ((p + 4) // 3), slack)


def v_half(p: int) -> Block:
    """The building block of V-Half.

    >>> v_half(4).places[0], v_half(4).limit
    ((0, 10, 14, 25), 6)
    """
    slack = (3 - 3 * p) % _PERIOD
    places = [(2 * r, 3 * p - 2 - r, 3 * p - 1 + slack + 2 * r, 6 * p - 2 + slack - r) for r in range(p)]
    return Block(places, 2 * ((p + 2) // 2), slack)


def make_v_min(ranks: int, microbatches: int, stages: int) -> Schedule:
    """V-Min; two stages a rank.

    >>> print(make_v_min(1, 2, 2))
    [0F0, 1F0, 1I0, 0I0, 1W0, 0F1, 0W0, 1F1, 1I1, 0I1, 1W1, 0W1]
    """
    return _make("VMin", v_min(ranks), microbatches, stages)


def make_v_half(ranks: int, microbatches: int, stages: int) -> Schedule:
    """V-Half; two stages a rank.

    >>> print(make_v_half(1, 2, 2))
    [0F0, 1F0, 1I0, 0I0, 1W0, 0F1, 0W0, 1F1, 1I1, 0I1, 1W1, 0W1]
    """
    return _make("VHalf", v_half(ranks), microbatches, stages)


def _make(name: str, block: Block, microbatches: int, stages: int) -> Schedule:
    lanes = _lanes(block, microbatches, stages)
    slot, left = 0, list(lanes)
    while left:
        for lane in left:
            lane.run(slot)
        left = [lane for lane in left if lane.passes]
        slot += 1
    rows = tuple((*lane.row, *lane.waiting) for lane in lanes)
    return Schedule(rows, Placement.v(stages // 2), microbatches, name)


@dataclass(slots=True)
class _Pass:
    """One of a rank's four passes: its next microbatch, and from which slot on each microbatch can run."""

    place: int  #: of the next microbatch in the repeated blocks
    stage: int
    op: Op
    can: list[float]
    done: list[float]
    microbatch: int = 0


@dataclass(slots=True)
class _Lane:
    """A rank while its row grows, slot by slot."""

    limit: int
    passes: list[_Pass]
    early: tuple[_Pass, ...]  #: those that may come before their turn
    turn: _Pass
    held: int = 0  #: activations, until W
    live: int = 0  #: activations, until I
    waiting: deque[Action] = field(default_factory=deque)
    row: list[Action] = field(default_factory=list)

    def run(self, slot: int) -> None:
        """Run one pass, or a W, or nothing."""
        chosen = self.turn
        if chosen.can[chosen.microbatch] > slot:
            chosen = self._early(slot)
        elif chosen.op == "F" and self.held == self.limit:
            chosen = None
        if chosen is not None:
            self._do(chosen, slot)
        elif self.waiting:
            self.row.append(self.waiting.popleft())
            self.held -= 1

    def _do(self, one: _Pass, slot: int) -> None:
        microbatch = one.microbatch
        self.row.append(Action(one.stage, one.op, microbatch))
        one.done[microbatch] = slot + 1
        one.microbatch = microbatch + 1
        one.place += _PERIOD
        if one.op == "F":
            self.held += 1
            self.live += 1
        else:
            self.waiting.append(Action(one.stage, "W", microbatch))
            self.live -= 1
        if one.microbatch == len(one.done):
            self.passes.remove(one)
            self.early = tuple(other for other in self.early if other is not one)
        if one is self.turn and self.passes:
            self.turn = min(self.passes, key=_by_place)

    def _early(self, slot: int) -> _Pass | None:
        """A pass that can run before its turn."""
        for one in self.early:
            if one.can[one.microbatch] <= slot and (one.op != "F" or self._has_room(one)):
                return one
        return None

    def _has_room(self, forward: _Pass) -> bool:
        """Whether this forward can come now and nothing between now and its turn will lack the memory for it."""
        between = sorted(
            (place, one.op)
            for one in self.passes
            if one is not forward
            for place in range(one.place, forward.place, _PERIOD)
        )
        if self.held == self.limit:
            return False
        live = self.live + 1
        for _, op in between:
            live += 1 if op == "F" else -1
            if live > self.limit:
                return False
        return True


_by_place = attrgetter("place")


def _lanes(block: Block, microbatches: int, stages: int) -> list[_Lane]:
    forward, backward = ([[inf] * microbatches for _ in range(stages)] for _ in "FI")
    at_once: list[float] = [0] * microbatches
    lanes = []
    for rank, places in enumerate(block.places):
        one, two = rank, stages - 1 - rank
        first = _Pass(places[0], one, "F", forward[one - 1] if rank else at_once, forward[one])
        second = _Pass(places[1], two, "F", forward[two - 1], forward[two])
        second_back = _Pass(places[2], two, "I", backward[two + 1] if rank else forward[two], backward[two])
        first_back = _Pass(places[3], one, "I", backward[one + 1], backward[one])
        early = (first_back, second_back, first) if block.slack else (first_back, second_back)
        lanes.append(_Lane(block.limit, [first, second, second_back, first_back], early, turn=first))
    return lanes
