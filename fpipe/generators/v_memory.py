# SPDX-License-Identifier: Apache-2.0
"""V: the V of ZBV with any memory between that of V-Min and that of ZBV, and the least idle time at
unit cost.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv:2405.15362), has the
frontier of time and memory. 4 ranks that hold 6 of ZBV's 8 chunks (small letters are a rank's
second chunk):

    rank 0   F F F F F . . f i w f i w f i I w F W f i I w F W f i I w F W f
    rank 1   . F F F F . f . f i w f i w I i W w f F I i W w f F I i W w f F
    rank 2   . . F F F f . f . f i w F I i W w f i I F w W f i I F w W f i I
    rank 3   . . . F f F f F f . . i I w F W f i I w W F f i I w W F f i I w

The orders of passes are made of lines. A pass that goes down the ranks without a wait is a line: it
runs on rank r at slot 2x + r. One that goes up runs at slot 2x + 2p - 1 - r. Lines whose x differ
never share a slot, and neither do a line down and a line up. So the schedule is two words, of the
lines down and of those up, where x counts letters. The last rank runs a letter down and one up in
turn. With 4 chunks:

    down   F F . . i W F i W F i I ...
    up     f f . . I W f I W f ...

    rank 0   F . F . . . . f i f w . F . i I w W F f i I w W F f
    rank 3   . . . F f F f . . . . i I w W F f i I w W F f i I w W F f ...

The backward of a microbatch comes p letters after its forward, or later. A rank's memory holds as
many chunks as the letters F less the letters W that have passed it. So the words begin with F as
often as the memory allows, half of it each, and wait until the first backward can come, after p
letters. Then I, W and F take turns, so that no memory is empty, until the last forward; the last
backward comes p letters later. An odd chunk belongs to the word down, and the last forward of the
word up then runs without waiting for a W: every rank runs one W between two letters, and all that
follows is a slot later.

That leaves the last rank no wait that its memory does not force on it. The first ranks have slots
without a letter, so they run F and i before their lines, from rank 0 on: an F only if all that
comes until its line still fits in memory. To save memory they run f later, as long as i needs it no
earlier. At last every W runs where there is nothing else to do, or where a forward must wait for
its memory.

A rank idles for 3p - 1 - 3k + max(3p, p - 1 + 2(1 + ceil(k/2))) slots with k chunks, from 2p
microbatches on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..actions.action import Action, Op, Row
from ..actions.placement import Placement
from ..errors import ScheduleError
from ..schedule import Schedule
from .greedy import split_backwards
from .zbv import make_zbv

#: What a rank runs: F of its first chunk, f of its second, i, I, and a W; or what does not fit in
#: memory.
_FIRST, _SECOND, _SECOND_BACK, _FIRST_BACK, _W, _BLOCKED = range(6)


class _Slots(NamedTuple):
    """When F, f, i and I of each microbatch run on a rank; or which letters they are in their
    words.
    """

    first: list[int]
    second: list[int]
    second_back: list[int]
    first_back: list[int]


def make_v(ranks: int, microbatches: int, stages: int, memory: float = 1.0) -> Schedule:
    """Any memory between V-Min and ZBV, as a share of that of 1F1B; two stages a rank.

    >>> for share in (0.5, 0.75, 1.0):
    ...     t = make_v(4, 8, 8, share).simulate()
    ...     print(max(t.peak), t.span)
    4 59.0
    6 53.0
    8 48.0
    """
    chunks, least = int(memory * stages + 1e-9), 2 * ((ranks + 4) // 3)
    if chunks < min(least, stages):
        what = f"memory={memory} of {ranks} microbatches is less than V-Min holds"
        raise ScheduleError(f"{what}; give at least {least / stages:.3g}", rule="memory")
    if chunks >= stages:
        rows, placement = make_zbv(ranks, microbatches, stages).rows, Placement.v(ranks)
        return Schedule(rows, placement, microbatches, "V")
    whole = Schedule(_rows(ranks, microbatches, chunks), Placement.v(ranks), microbatches, "V")
    split = split_backwards(whole, chunks)
    assert split is not None, "lines fit in the memory"
    return split[0]


def _rows(ranks: int, microbatches: int, chunks: int) -> tuple[Row, ...]:
    """The rows with whole backwards, within a memory of so many chunks."""
    chunks = min(chunks, 2 * microbatches)
    words, last = _words(ranks, microbatches, chunks)
    rows, before = [], None
    for down in range(ranks):
        up = 2 * ranks - 1 - down
        lines = _lines(words, down, up, last if chunks % 2 else None)
        before = _Rank(lines, chunks, before).run(down)
        passes: Sequence[tuple[int, Op]] = ((down, "F"), (up, "F"), (up, "B"), (down, "B"))
        actions = [
            (slot, Action(stage, op, k))
            for (stage, op), slots in zip(passes, before, strict=True)
            for k, slot in enumerate(slots)
        ]
        rows.append(tuple(action for _, action in sorted(actions)))
    return tuple(rows)


def _words(ranks: int, microbatches: int, chunks: int) -> tuple[_Slots, int]:
    """The letters of all microbatches, and the last one of a forward."""
    above, below = min(microbatches, chunks // 2), min(microbatches, (chunks + 1) // 2)
    last = ranks + 3 * (microbatches - below) - (chunks % 2 == 0)
    words = _Slots([], [], [], [])
    second_back = first_back = -1
    for k in range(microbatches):
        second, turn = k if k < above else min(last, ranks + 2 + 3 * (k - above)), ranks + 3 * k
        second_back = max(second + ranks, second_back + 1, turn if turn <= last else last + 1)
        first_back = max(second_back, first_back + 1, turn if turn < last else last + 1)
        words.first.append(k if k < below else ranks + 2 + 3 * (k - below))
        words.second.append(second)
        words.second_back.append(second_back)
        words.first_back.append(first_back)
    return words, last


def _lines(words: _Slots, down: int, up: int, last: int | None) -> _Slots:
    """The slots of these letters on a rank; a slot later after the letter down that is ``last``."""
    end = 2 * last + down if last is not None else None

    def when(letters, at):
        return [slot + (end is not None and slot > end) for slot in (2 * x + at for x in letters)]

    return _Slots(
        when(words.first, down),
        when(words.second, up),
        when(words.second_back, down),
        when(words.first_back, up),
    )


class _State(NamedTuple):
    """How many of F, f, i and I have run, what is held, and how many W wait."""

    counts: tuple[int, ...] = (0, 0, 0, 0)
    held: int = 0
    waiting: int = 0

    def after(self, what: int | None) -> _State:
        """The state after an action, or after an idle slot."""
        if what is None:
            return self
        if what == _W:
            return _State(self.counts, self.held - 1, self.waiting - 1)
        counts, forward = list(self.counts), what in (_FIRST, _SECOND)
        counts[what] += 1
        return _State(tuple(counts), self.held + forward, self.waiting + (not forward))


class _Rank:
    """A rank: its lines, its memory, and when the rank before it runs."""

    def __init__(self, lines: _Slots, limit: int, before: _Slots | None):
        self.lines, self.limit, self.before = lines, limit, before
        self.turns = {
            slot: (what, k)
            for what in (_FIRST, _SECOND_BACK, _FIRST_BACK)
            for k, slot in enumerate(lines[what])
        }

    def run(self, slot: int) -> _Slots:
        """From this slot on, what runs when."""
        slots, state = _Slots([], [], [], []), _State()
        while len(slots.first_back) < len(self.lines.first_back):
            what = self._turn(slot, state)
            if what is None and self._arrived(_FIRST, slot, state) and self._fits(slot, state):
                what = _FIRST
            assert what != _BLOCKED, "lines alone fit"
            if what is not None and what != _W:
                slots[what].append(slot)
            state, slot = state.after(what), slot + 1
        return slots

    def _turn(self, slot: int, state: _State) -> int | None:
        """What runs in a slot: the line, an f whose line has passed, a W, or an i before its
        line.
        """
        what, k = self.turns.get(slot, (_W, -1))
        if k >= 0 and k >= state.counts[what]:
            return _BLOCKED if what == _FIRST and state.held >= self.limit else what
        if state.held < self.limit and self._next(self.lines.second, state.counts[_SECOND]) <= slot:
            return _SECOND
        if state.waiting:
            return _W
        return _SECOND_BACK if self._arrived(_SECOND_BACK, slot, state) else None

    def _arrived(self, what: int, slot: int, state: _State) -> bool:
        """Whether there is a next F or i that the rank before has run; rank 0 may run any F, and i
        after its f.
        """
        k = state.counts[what]
        if k == len(self.lines.first) or (what == _SECOND_BACK and k >= state.counts[_SECOND]):
            return False
        return self.before is None or self.before[what][k] < slot

    def _fits(self, slot: int, state: _State) -> bool:
        """Whether all until the line of the next F fits in memory and comes in time, if that F runs
        now.
        """
        if state.held >= self.limit:
            return False
        stop, state = self.lines.first[state.counts[_FIRST]], state.after(_FIRST)
        for later in range(slot + 1, stop + 1):
            if self._late(later, state) or (what := self._turn(later, state)) == _BLOCKED:
                return False
            state = state.after(what)
        return not self._late(stop + 1, state)

    def _late(self, slot: int, state: _State) -> bool:
        """Whether an f should have run before this slot: on the rank before it, or i on rank 0,
        needs it.
        """
        needs = self.lines.second_back if self.before is None else self.before.second
        return self._next(needs, state.counts[_SECOND]) <= slot

    def _next(self, slots: Sequence[int], k: int) -> float:
        return slots[k] if k < len(slots) else float("inf")
