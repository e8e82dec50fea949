# SPDX-License-Identifier: Apache-2.0
"""ZB-1p and ZB-2p: the passes of 1F1B, and W wherever a rank would wait.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241), section 3. ZB-2p on 4 ranks:

    rank 0   F F F F F F F I F I W F I W F I W F I W ...
    rank 1   . F F F F F I F I F I W F I W F I W ...
    rank 2   . . F F F I F I F I F I F I W F I W ...
    rank 3   . . . F I F I F I F I F I F I F I W ...

ZB-1p warms up as 1F1B does and holds p activations, ZB-2p as its eager form and holds 2p.

The forms with several chunks a rank place stage s on rank s % p, as Interleaved 1F1B does:
Narayanan et al., 2021 (arXiv:2104.04473). InterleavedZB2P on 3 ranks, two chunks each (small
letters are a rank's second chunk):

    rank 0   F F F f f f F F i F i w f i f I f I I w i w i W i I I I W W w w w
    rank 1   . F F F f f f i F i F i F I f I f I f i w i w i I I I w W W W w w
    rank 2   . . F F F f i f i f i F I F I F I f i f i f i I I I w w w W W W W

Their microbatches go in groups of p or more, and the warm-up is shorter by one to two forwards from
rank to rank. The settings that fit in memory are tried, and the shortest span wins.

At unit cost, if p divides m, a rank idles for p - 1 chunk passes with p activations
(InterleavedZB1P, the time of InterleavedZeroBubble), and for none with 2p (InterleavedZB2P, from 2p
microbatches on). ``fpipe.solve`` finds schedules for measured costs and any memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..actions.action import plain
from ..schedule import Schedule
from .greedy import split_backwards
from .interleaved import by_groups
from .one_f_one_b import one_forward_one_backward
from .patterns import keep, one_a_rank

#: Microbatches of a group, in multiples of p, and by how many forwards the warm-up of a rank
#: exceeds that of the next one.
_SETTINGS = ((1.125, 2.0), (1.0, 2.0), (1.25, 2.0), (1.5, 2.0), (1.0, 1.5), (1.0, 1.0))


def make_zb_1p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-1p: the memory of 1F1B.

    >>> make_zb_1p(4, 8, 4).simulate().span
    27.0
    """
    return _one_chunk("ZB1P", ranks, microbatches, stages, 1)


def make_zb_2p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-2p: twice that, and no idle time within a rank's span if there are enough microbatches.

    >>> make_zb_2p(4, 8, 4).simulate().span
    24.0
    """
    return _one_chunk("ZB2P", ranks, microbatches, stages, 2)


def make_interleaved_zb_1p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-1p with several chunks a rank: the memory of 1F1B.

    >>> make_interleaved_zb_1p(4, 8, 8).simulate().span
    51.0
    """
    return _several_chunks("InterleavedZB1P", ranks, microbatches, stages, stages, ranks - 1)


def make_interleaved_zb_2p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-2p with several chunks a rank: at most twice that, and no idle time within a rank's span.

    >>> make_interleaved_zb_2p(4, 8, 8).simulate().span
    48.0
    """
    return _several_chunks("InterleavedZB2P", ranks, microbatches, stages, 2 * stages, 0)


def _one_chunk(name: str, ranks: int, microbatches: int, stages: int, step: int) -> Schedule:
    """A warm-up that is shorter by ``step`` forwards from rank to rank, within ``step * ranks``."""
    patterns = [_pattern(microbatches, ranks - 1 - rank, step) for rank in range(ranks)]
    split = split_backwards(one_a_rank(name, patterns, microbatches, ranks), step * ranks)
    assert split is not None, "the warm-up fits in the memory"
    patterns = ["".join(action.op for action in plain(row)) for row in split[0]]
    return one_a_rank(name, patterns, microbatches, stages)


def _several_chunks(
    name: str, ranks: int, microbatches: int, stages: int, limit: int, idle: int
) -> Schedule:
    """The shortest of the schedules within ``limit``; one that idles no longer ends the search."""
    least = 3 * microbatches * (stages // ranks) + idle
    found: list[tuple[Schedule, int]] = []
    for order in _orders(name, ranks, microbatches, stages, limit):
        split = split_backwards(order, limit)
        if split is not None:
            found.append(split)
            if split[1] <= least:
                break
    return min(found, key=lambda one: one[1])[0]


def _orders(
    name: str, ranks: int, microbatches: int, stages: int, limit: int
) -> Iterator[Schedule]:
    """Interleaved 1F1B in several settings; then forms of less memory where p does not divide m."""
    chunks = stages // ranks

    def order(step: float, groups: int, count: int = microbatches) -> Schedule:
        return by_groups(
            name,
            lambda rank, total, ahead: _pattern(total, ranks - 1 - rank, step, ahead),
            ranks,
            count,
            stages,
            groups,
        )

    for size, step in _SETTINGS:
        group = max(ranks, min(round(size * ranks), microbatches))
        held = int(step * (ranks - 1)) + 1 + (chunks - 1) * group
        if min(held, microbatches * chunks) <= limit:
            yield order(step, max(1, microbatches // group))
    if limit == stages and microbatches % ranks:
        groups = -(-microbatches // ranks)
        yield order(1.0, groups)
        yield order(1.5, groups)
        drawn = groups * ranks
        whole = order(1.0, groups, drawn)
        rows = keep(whole.rows, drawn, range(microbatches))
        yield Schedule(rows, whole.placement, microbatches, name)


def _pattern(microbatches: int, later: int, step: float, ahead: int = 0) -> str:
    """The row of a rank with ``later`` ranks after it."""
    return one_forward_one_backward(microbatches, int(step * later) + 1 + ahead)
