# SPDX-License-Identifier: Apache-2.0
"""V-Min and V-Half: the V of ZBV with a third and a half of its memory.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv:2405.15362). A microbatch is
a building block: the slots of its four passes (F of a rank's first chunk, f of its second, i, I) on
every rank, placed so that the block can be repeated every six slots without a clash. How long
activations live in it decides the memory. V-Min on 4 ranks:

    slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
    rank 0   F                           f   i                           I       down, up, down
    again and up again, rank 1       F                   f           i                   I
    a slot a rank; V-Half takes two slots rank 2           F           f                   i
    I               a rank on its ways down rank 3               F   f                           i
    I

Then all is squeezed: every rank runs its passes in the order of the repeated blocks, each as soon
as it can. While the pass whose turn it is cannot run yet, an I, an i or (where the block has slack,
and never above the memory limit) an F comes early. W runs where there is nothing else to do, or
where a forward must wait for its memory.

With k chunk activations held, 2((p + 4) // 3) in V-Min and 2((p + 2) // 2) in V-Half, a rank idles
at unit cost for 3p - 1 - 3k + max(3p, p - 1 + 2(1 + ceil(k/2))) chunk passes, from about p
microbatches on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, zip_longest
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ..actions.action import Action, Placement
from ..actions.action_kinds import Op
from ..schedule import Schedule

_PERIOD = 6  #: of slots: F, f, i, I and their two W


class Block(NamedTuple):
    """Where the passes F, f, i, I of microbatch 0 stand, for each rank; and what a rank may hold,
    in chunks.
    """

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
    places = [
        (2 * r, 3 * p - 2 - r, 3 * p - 1 + slack + 2 * r, 6 * p - 2 + slack - r) for r in range(p)
    ]
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
    slots = zip_longest(*(_row(passes, block) for passes in _passes(block, microbatches, stages)))
    rows = tuple(tuple(filter(None, row)) for row in zip(*slots, strict=True))
    return Schedule(rows, Placement.v(stages // 2), microbatches, name)


@dataclass(slots=True, eq=False)
class _Pass:
    """One of a rank's four passes: its next microbatch, and the slot from which each microbatch can
    run.
    """

    place: int  #: of the next microbatch in the repeated blocks
    stage: int
    op: Op
    can: list[float]
    done: list[float]
    microbatch: int = 0


def _passes(block: Block, microbatches: int, stages: int) -> list[list[_Pass]]:
    """F, f, i and I of every rank; ``done`` of one is ``can`` of another."""
    forward, backward = ([[inf] * microbatches for _ in range(stages)] for _ in "FI")
    at_once: list[float] = [0] * microbatches
    ranks = []
    for rank, places in enumerate(block.places):
        one = rank
        two = stages - 1 - rank
        first = _Pass(places[0], one, "F", forward[one - 1] if rank else at_once, forward[one])
        second = _Pass(places[1], two, "F", forward[two - 1], forward[two])
        second_back = _Pass(
            places[2], two, "I", backward[two + 1] if rank else forward[two], backward[two]
        )
        first_back = _Pass(places[3], one, "I", backward[one + 1], backward[one])
        ranks.append([first, second, second_back, first_back])
    return ranks


def _row(passes: list[_Pass], block: Block) -> Iterator[Action | None]:
    """What a rank runs in each slot: the pass whose turn it is, an early one, the oldest W, or
    nothing.
    """
    first, _, second_back, first_back = passes
    if block.slack:
        early = (first_back, second_back, first)
    else:
        early = (first_back, second_back)
    left = list(passes)
    waiting = deque[Action]()
    held = live = 0  # activations, until W and until I
    turn = first
    for slot in count():
        chosen: _Pass | None = turn
        if turn.can[turn.microbatch] > slot:
            ready = (one for one in early if one in left and one.can[one.microbatch] <= slot)
            chosen = next(
                (
                    one
                    for one in ready
                    if one.op != "F" or _fits(one, left, held, live, block.limit)
                ),
                None,
            )
        elif turn.op == "F" and held == block.limit:
            chosen = None
        if chosen is None:
            held -= bool(waiting)
            yield waiting.popleft() if waiting else None
            continue
        microbatch = chosen.microbatch
        chosen.done[microbatch] = slot + 1
        chosen.microbatch = microbatch + 1
        chosen.place += _PERIOD
        if chosen.op == "F":
            held = held + 1
            live = live + 1
        else:
            live -= 1
            waiting.append(Action(chosen.stage, "W", microbatch))
        if chosen.microbatch == len(chosen.done):
            left.remove(chosen)
        yield Action(chosen.stage, chosen.op, microbatch)
        if not left:
            break
        if chosen is turn:
            turn = min(left, key=attrgetter("place"))
    yield from waiting


def _fits(forward: _Pass, passes: list[_Pass], held: int, live: int, limit: int) -> bool:
    """Whether this forward can come now and leave enough memory for every pass between now and its
    turn.
    """
    between = sorted(
        (place, one.op)
        for one in passes
        if one is not forward
        for place in range(one.place, forward.place, _PERIOD)
    )
    steps = (1 if op == "F" else -1 for _, op in between)
    return held < limit and max(accumulate(steps, initial=live + 1)) <= limit
