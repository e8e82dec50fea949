# SPDX-License-Identifier: Apache-2.0
"""V-Min and V-Half: the V of ZBV with a third and a half of its memory.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv:2405.15362).

A microbatch has four passes on each rank: F of the first chunk, f of the second, then i and I. A
*building block* is the slots of these passes on every rank. They are placed so that the block can
be repeated every six slots without a clash. How long activations live in it decides the memory.
V-Min on 4 ranks:

    slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
    rank 0   F                           f   i                           I
    rank 1       F                   f           i                   I
    rank 2           F           f                   i           I
    rank 3               F   f                           i   I

The microbatch goes down the ranks, up, down again and up again, one slot for each rank. In V-Half
it takes two slots for each rank on its ways down.

The rows then run without the gaps: every rank runs its passes in the order of the repeated blocks,
each as soon as it can. If the pass whose turn it is cannot run yet, an I or an i comes early. An F
comes early where the block has slack, and never above the memory limit. W runs if nothing else can,
or if a forward must wait for its memory.

A rank holds k activations of a chunk: 2((p + 4) // 3) in V-Min, 2((p + 2) // 2) in V-Half. At unit
cost it is idle for 3p - 1 - 3k + max(3p, p - 1 + 2(1 + ceil(k/2))) passes of a chunk, from about p
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

from ..actions.action import Placement
from .patterns import Made, two_chunks

_PERIOD = 6  #: of slots: F, f, i, I and their two W


class Block(NamedTuple):
    """A building block.

    ``places`` are the slots of F, f, i and I of microbatch 0, for each rank. A rank may hold
    ``limit`` activations of a chunk. ``slack`` is the number of slots by which i and I come later
    than they could, so that passes do not clash.
    """

    places: Sequence[tuple[int, int, int, int]]
    limit: int
    slack: int


def block(p: int, down: int, limit: int) -> Block:
    """The building block of ``p`` ranks in which a microbatch takes ``down`` slots for each rank on
    its ways down, and one on its ways up.

    >>> block(4, 1, limit=4).places[0], block(4, 2, limit=6).places[0]
    ((0, 7, 8, 15), (0, 10, 14, 25))
    """
    turn = (down + 1) * p - down  # the slot of f on rank 0
    slack = (down + 1) * (1 - p) % _PERIOD
    places = [
        (down * r, turn - r, turn + 1 + slack + down * r, 2 * turn + down + slack - r)
        for r in range(p)
    ]
    return Block(places, limit, slack)


def make_v_min(ranks: int, microbatches: int, stages: int) -> Made:
    """A third of the memory of ZBV, more idle time.

    Zero bubble on a V within a third of the memory of 1F1B and two microbatches, at more idle
    time than VHalf.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("VMin", 1, 2, 2))
    [0F0, 1F0, 1I0, 0I0, 1W0, 0F1, 0W0, 1F1, 1I1, 0I1, 1W1, 0W1]
    """
    return _make(block(ranks, 1, 2 * ((ranks + 4) // 3)), microbatches, stages)


def make_v_half(ranks: int, microbatches: int, stages: int) -> Made:
    """Half of the memory of ZBV, more idle time.

    Zero bubble on a V within half of the memory of 1F1B and one microbatch.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("VHalf", 1, 2, 2))
    [0F0, 1F0, 1I0, 0I0, 1W0, 0F1, 0W0, 1F1, 1I1, 0I1, 1W1, 0W1]
    """
    return _make(block(ranks, 2, 2 * ((ranks + 2) // 2)), microbatches, stages)


def _make(block: Block, microbatches: int, stages: int) -> Made:
    letters = (_letters(passes, block) for passes in _passes(block, microbatches, stages))
    slots = zip_longest(*letters, fillvalue="")
    rows = two_chunks(list(map("".join, zip(*slots, strict=True))), microbatches)
    return rows, Placement.v(stages // 2)


@dataclass(slots=True, eq=False)
class _Pass:
    """One of the four passes of a rank, and its next microbatch.

    ``place`` is the slot of that microbatch in the repeated blocks. ``can`` is the slot from which
    each microbatch can run, ``done`` the slot after which it has run.
    """

    place: int
    letter: str
    can: list[float]
    done: list[float]
    microbatch: int = 0


def _passes(block: Block, microbatches: int, stages: int) -> list[list[_Pass]]:
    """F, f, i and I of every rank. The ``done`` of a pass is the ``can`` of the pass after it."""
    forward, backward = ([[inf] * microbatches for _ in range(stages)] for _ in "FI")
    at_once: list[float] = [0] * microbatches
    ranks = []
    for one, places in enumerate(block.places):
        two = stages - 1 - one
        inputs = forward[one - 1] if one else at_once
        cotangents = backward[two + 1] if one else forward[two]
        first = _Pass(places[0], "F", inputs, forward[one])
        second = _Pass(places[1], "f", forward[two - 1], forward[two])
        second_back = _Pass(places[2], "i", cotangents, backward[two])
        first_back = _Pass(places[3], "I", backward[one + 1], backward[one])
        ranks.append([first, second, second_back, first_back])
    return ranks


def _letters(passes: list[_Pass], block: Block) -> Iterator[str]:
    """What a rank runs in each slot: the pass whose turn it is, an early pass, the oldest W, or
    nothing ("").
    """
    first, _, second_back, first_back = passes
    early = (first_back, second_back, first) if block.slack else (first_back, second_back)
    left = list(passes)
    waiting = deque[str]()
    held = live = 0  # activations, until W and until I
    turn = first
    for slot in count():
        chosen: _Pass | None = turn
        if turn.can[turn.microbatch] > slot:
            ready = (
                one
                for one in early
                if one in left
                and one.can[one.microbatch] <= slot
                and (one is not first or _fits(one, left, held, live, block.limit))
            )
            chosen = next(ready, None)
        elif held == block.limit and turn.letter in "Ff":
            chosen = None
        if chosen is None:
            held -= bool(waiting)
            yield waiting.popleft() if waiting else ""
            continue
        microbatch = chosen.microbatch
        chosen.done[microbatch] = slot + 1
        chosen.microbatch = microbatch + 1
        chosen.place += _PERIOD
        if chosen.letter in "Ff":
            held += 1
            live += 1
        else:
            live -= 1
            waiting.append("w" if chosen is second_back else "W")
        if chosen.microbatch == len(chosen.done):
            left.remove(chosen)
        yield chosen.letter
        if not left:
            break
        if chosen is turn:
            turn = min(left, key=attrgetter("place"))
    yield from waiting


def _fits(forward: _Pass, passes: list[_Pass], held: int, live: int, limit: int) -> bool:
    """Whether a forward can come early and leave enough memory for the passes before its turn."""
    between = sorted(
        (place, one.letter)
        for one in passes
        if one is not forward
        for place in range(one.place, forward.place, _PERIOD)
    )
    steps = (1 if letter in "Ff" else -1 for _, letter in between)
    return held < limit and max(accumulate(steps, initial=live + 1)) <= limit
