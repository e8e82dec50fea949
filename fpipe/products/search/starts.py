# SPDX-License-Identifier: Apache-2.0
"""Rows from which a search starts: those of named schedules, those that warm up as long as a
microbatch is away, and those of repeated blocks.

Repeated blocks become rows by list scheduling: ranks run, in the order of time, the pass that is
first in the block. A block gives each pass of a microbatch its place in time; the next microbatch
has the same places a period later. A rank runs the passes in the order of these places, each I with
its W. While the one whose turn it is has not arrived, a later one may come early: an F only if the
memory suffices for all passes between now and its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, islice, pairwise, product, zip_longest
from math import ceil, floor, inf

from ... import make_schedule, schedule_names
from ...errors import ScheduleError
from .fill import Filled, fill
from .problem import ALMOST, Problem, Rows, rows_of


def dispatch(p: Problem, places: Sequence[float]) -> Rows:
    """The Fs and Is of this block in order; some are missing where memory does not suffice.

    ``places`` are by pass, for microbatch 0. The period is the work of the busiest rank.

    >>> from fpipe import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (2.0, 1.0))
    >>> dispatch(p, [0, 1, 3, 2])
    [[0, 1, 4, 5], [2, 6, 3, 7]]
    """
    stages = p.stages
    count = p.microbatches
    period = max(p.work) / count or 1.0
    passes = [[*held, *(stages + s for s in held)] for held in p.of_rank]
    following = dict(pairwise([*range(stages), *range(2 * stages - 1, stages - 1, -1)]))
    done = [0] * 2 * stages
    arrived = [count, *done[1:]]
    clock = [0.0] * p.ranks
    held = [0.0] * p.ranks
    weights: list[deque[int]] = [deque() for _ in range(p.ranks)]
    rows: Rows = [[] for _ in range(p.ranks)]
    events = [(0.0, True, rank) for rank in range(p.ranks)]  # time, whether a rank may go on
    while events:
        time, decides, at = heappop(events)
        if not decides:
            arrived[at] += 1
            heappush(events, (time, True, p.path[at % stages]))
            continue
        if clock[at] > time:
            continue
        turns = {one: places[one] + done[one] * period for one in passes[at] if done[one] < count}
        for one in sorted(turns, key=turns.__getitem__):
            ready = done[one] < arrived[one]
            if ready and (one >= stages or _fits(p, one, turns, period, done, held[at])):
                action = one * count + done[one]
                break
        else:
            if not weights[at]:
                continue
            one = -1
            action = weights[at].popleft()
        clock[at] = time + p.length[action]
        held[at] += p.adds[action]
        heappush(events, (clock[at], True, at))
        if one >= 0:
            rows[at].append(action)
            done[one] += 1
        if one >= stages:
            weights[at].append(action + stages * count)
        if one in following:
            then = following[one]
            heappush(events, (clock[at] + p.travel[then * count], False, then))
    return rows


def _fits(
    p: Problem,
    early: int,
    turns: Mapping[int, float],
    period: float,
    done: Sequence[int],
    held: float,
) -> bool:
    """Whether an F can run before its turn, and leave enough memory for all passes before that.

    ``turns`` are those of the next microbatches of all passes of a rank, which holds ``held``.
    """
    changes: list[tuple[float, float]] = []
    for one, turn in turns.items():
        before = min(ceil((turns[early] - turn) / period), p.microbatches - done[one])
        changed = p.saved[one] if one < p.stages else -p.saved[one - p.stages]
        changes += [
            (turn + later * period, changed * p.size[done[one] + later]) for later in range(before)
        ]
    first = held + p.saved[early] * p.size[done[early]]
    memory = accumulate((change for _, change in sorted(changes)), initial=first)
    return max(memory) <= p.limit[p.path[early]] * ALMOST


def block(p: Problem, forward: float, backward: float) -> list[float]:
    """Places of a microbatch that takes so many times as long from pass to pass.

    >>> from fpipe import Costs
    >>> block(Problem.of(Costs(), (0, 1), 2, 2, (2.0, 1.0)), 1.0, 2.0)
    [0.0, 1.0, 4.0, 2.0]
    """
    last = p.stages - 1
    ways = [
        *((f + link) * forward for f, link in zip(p.F, (*p.link, 0.0), strict=True)),
        *((i + link) * backward for i, link in zip(p.I[:0:-1], p.link[::-1], strict=True)),
    ]
    places = list(accumulate(ways, initial=0.0))
    return [*places[: last + 1], *places[:last:-1]]


#: How many times as long a microbatch of a repeated block takes from pass to pass, forwards and
#: backwards.
_STEPS = ((1.5, 3), (1, 0.75), (3, 3), (1, 1.25), (1, 2), (2.5, 3), (3, 1), (2, 2))
#: Names that are tried first, since time may not suffice for all in large problems.
_FIRST_NAMES = ("ZBVZeroBubble", "ZBH1", "InterleavedZeroBubble")
#: Microbatches of a group, in multiples of the ranks.
_GROUPS = (1.0, 1.125)


def starts(problem: Problem, bound: float, late: Callable[[], bool]) -> Iterator[Filled]:
    """Solutions of a problem, those first that are often the best and take the least time.

    ``late`` ends those of many actions. Where none fits, it is one microbatch after another.
    """
    fits = False
    for rows in _rows(problem):
        filled = fill(problem, rows, bound)
        if filled is not None:
            fits = True
            yield filled
        if problem.large and late():
            break
    if not fits and (filled := fill(problem, one_by_one(problem), bound)):
        yield filled


def _rows(p: Problem) -> Iterator[Rows]:
    """In turn those of each kind, since time may suffice for a few and each is best somewhere."""
    kinds = [named(p), (dispatch(p, block(p, *steps)) for steps in _STEPS)]
    if p.path == tuple(s % p.ranks for s in range(p.stages)):
        kinds = [_warm_ups(p), *kinds]
    elif list(p.path) == sorted(p.path):
        kinds = [(_parted(p, rows) for rows in _rows(_joined(p))), *kinds]
    for row in zip_longest(*kinds):
        yield from filter(None, row)


def one_by_one(problem: Problem) -> Rows:
    """One microbatch after another: what needs the least memory.

    >>> from fpipe import Costs
    >>> one_by_one(Problem.of(Costs(), (0, 1), 2, 1, (1, 1)))
    [[0, 2], [1, 3]]
    """
    count = problem.microbatches
    rows = []
    for held in problem.of_rank:
        passes = [*held, *(problem.stages + s for s in held[::-1])]
        rows.append([one * count + k for k in range(count) for one in passes])
    return rows


def _warm_ups(problem: Problem) -> Iterator[Rows]:
    """1F1B, plain or interleaved, whose ranks warm up with the forwards that fit in the time until
    a microbatch is back, and in the memory.

    Forwards and backwards take turns then, so that zero bubble results where memory suffices. The
    first ranks also run their forwards a backward later, from some time on: then they hold Ws in
    place of an activation, and have work at the end, when backwards come less often than they can
    run them.
    """
    total = problem.microbatches
    for size, share in product(_GROUPS, (1.0, 0.75, 0.5)):
        group = min(total, round(size * problem.ranks))
        groups = [range(start, min(start + group, total)) for start in range(0, total, group)]
        counts = _warm_up_counts(problem, group, share)
        for late in (0, max(1, problem.ranks // 4)):
            rows: Rows = []
            for rank, held in enumerate(problem.of_rank):
                pause = problem.ranks // 3 if rank < late else None
                forwards = iter([s * total + k for part in groups for s in held for k in part])
                ways = [problem.stages + s for s in held[::-1]]
                backwards = [way * total + k for part in groups for way in ways for k in part]
                row = list(islice(forwards, counts[rank]))
                for at, backward in enumerate(backwards):  # no forward follows that at the pause
                    row += [backward, *islice(forwards, int(at != pause))]
                rows.append(row)
            yield rows


def _warm_up_counts(p: Problem, group: int, share: float) -> list[int]:
    """By rank, the forwards of its warm-up: those that fit in this share of the time until a
    microbatch is back, and in the memory.
    """
    chunks = p.stages // p.ranks
    counts = []
    most = inf
    for rank, held in enumerate(p.of_rank):
        saved = max(p.saved[s] for s in held) * max(p.size)
        room = p.limit[rank] * ALMOST / saved if saved else inf
        last = held[-1]
        way = sum(p.F[last:]) + sum(p.I[last + 1 :]) + 2 * sum(p.link[last:])
        away = floor(share * way / p.F[last]) if p.F[last] else p.microbatches
        most = min(most - 1, room, max(1, away) + (chunks - 1) * group)
        counts.append(int(max(1, min(most, chunks * p.microbatches))))
    return counts


def named(problem: Problem) -> Iterator[Rows]:
    """Those of the named schedules that place stages as the problem does."""
    for name in dict.fromkeys((*_FIRST_NAMES, *schedule_names())):
        with suppress(ScheduleError):  # it needs other counts
            schedule = make_schedule(name, problem.ranks, problem.microbatches, problem.stages)
            if schedule.placement.paths == (problem.path,):
                rows = rows_of(schedule)
                yield rows
                if problem.stages > problem.ranks:
                    yield _relieved(problem, rows)


def _joined(p: Problem) -> Problem:
    """The problem in which the stages of each rank, which follow each other, are one."""
    sums = {
        name: tuple(sum(getattr(p, name)[s] for s in held) for held in p.of_rank)
        for name in ("F", "I", "W", "saved", "kept")
    }
    link = tuple(p.link[held[-1]] for held in p.of_rank[:-1])
    return replace(p, path=tuple(range(p.ranks)), link=link, **sums)


def _parted(p: Problem, rows: Rows) -> Rows:
    """Rows of the joined problem as rows of the problem."""
    parted: Rows = [[] for _ in rows]
    for rank, row in enumerate(rows):
        for action in row:
            one, k = divmod(action, p.microbatches)
            op = one // p.ranks
            order = p.of_rank[rank][:: -1 if op else 1]
            parted[rank] += [(op * p.stages + s) * p.microbatches + k for s in order]
    return parted


def _relieved(problem: Problem, rows: Rows) -> Rows:
    """The first ranks run the W that holds up the last I of their last stage behind it.

    That I is on the way of the last microbatch, for which all earlier stages wait.
    """
    count = problem.microbatches
    first_weight = 2 * problem.stages * count
    relieved = list(rows)
    for rank in range(problem.ranks * 7 // 8):
        row = list(rows[rank])
        inward = problem.stages + problem.of_rank[rank][-1]
        last = max(at for at, action in enumerate(row) if action // count == inward)
        weights = [at for at in range(last) if row[at] >= first_weight]
        if weights:
            row.insert(last, row.pop(weights[-1]))
        relieved[rank] = row
    return relieved
