# SPDX-License-Identifier: Apache-2.0
"""The search for the rank that stopped the others.

A rank that waits is stopped by those that it waits for, which often wait themselves. Each rank
publishes its state in the journal. The search goes from rank to rank along these waits, the nearest
first. The cause is a rank that raised, else one whose connection broke without a report, else one
that does not write its journal any more, else one that waits for no rank. All ranks are global.
This module must not know groups.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .journal import BEAT, Entry, Journal

#: How likely a rank is the cause: the smallest is.
_RAISED, _GONE, _SILENT, _IDLE, _WAITS = range(5)
_SOON = 0.5  #: seconds to wait for the report of a rank whose connection broke


class Trail(NamedTuple):
    """A chain of ranks, each stopped by the next, as text; the last one, and whether it reported
    its failure.

    ``host``: the process that hosts the store and is no rank, if that may be the cause. ``read``:
    entries of the journal led to it.
    """

    text: str
    suspect: int | None
    raised: bool = False
    host: str = ""
    read: bool = False


class _Visit(NamedTuple):
    """A rank on the way: how likely it is the cause, and the text that leads to it."""

    kind: int
    rank: int
    text: str
    read: bool = False


def search(journal: Journal, me: int, peers: Sequence[int], lost: bool) -> Trail:
    """From the ranks that this one waits for, of which one broke its connection if ``lost``."""
    best, seen = _walk(journal, me, peers, lost, frozenset())
    if best is not None and best.kind > _GONE and not journal.lost:
        best, _ = _walk(journal, me, peers, lost, _silent(journal, seen - {me}))
    return (
        Trail("", None)
        if best is None
        else Trail(best.text, best.rank, best.kind == _RAISED, read=best.read)
    )


def _walk(
    journal: Journal, me: int, peers: Sequence[int], lost: bool, silent: frozenset[int]
) -> tuple[_Visit | None, set[int]]:
    """The most likely cause, and the ranks that were visited."""
    queue = deque((rank, lost and len(peers) == 1, "") for rank in peers)
    seen, best = {me}, None
    while queue:
        rank, gone, way = queue.popleft()
        if rank in seen:
            continue
        seen.add(rank)
        failure, last = _report(journal, rank, gone), journal.last(rank)
        visit = _visit(rank, failure, last, gone, rank in silent, way, not journal.lost)
        visit = visit._replace(read=bool(failure or last or way))
        if best is None or visit.kind < best.kind or visit.kind == best.kind == _WAITS:
            best = visit  # of ranks that wait in a circle, the last one
        if visit.kind <= _GONE:
            return visit, seen
        entry = failure or last
        if visit.kind == _WAITS and entry is not None:
            broke = failure is not None and failure.lost
            verb = "lost" if broke else "waits for"
            for other in entry.peers:
                queue.append(
                    (
                        other,
                        broke and len(entry.peers) == 1,
                        f"{way}rank {rank}{at(entry.note)} {verb} rank {other}; ",
                    )
                )
    return best, seen


def _visit(
    rank: int,
    failure: Entry | None,
    last: Entry | None,
    gone: bool,
    silent: bool,
    way: str,
    readable: bool,
) -> _Visit:
    if failure is not None and not failure.peers:
        return _Visit(_RAISED, rank, f"{way}rank {rank}{at(failure.note)} raised {failure.failure}")
    if failure is None and gone:
        no_entry = ", and left no journal entry" if readable else ""
        return _Visit(
            _GONE, rank, f"{way}rank {rank} is gone{no_entry if last is None else _last(last)}"
        )
    if failure is None and silent:
        what = "has no journal entry" if last is None else f"does not answer{_last(last)}"
        return _Visit(_SILENT, rank, f"{way}rank {rank} {what}")
    if failure is None and last is None:
        return _Visit(
            _WAITS,
            rank,
            f"{way}rank {rank} has no journal entry" if readable else way.removesuffix("; "),
        )
    if failure is None and last is not None and not last.peers:
        return _Visit(_IDLE, rank, f"{way}rank {rank} waits for no rank{_last(last)}")
    entry = failure or last
    assert entry is not None
    whom = (
        f"rank {entry.peers[0]}"
        if len(entry.peers) == 1
        else f"ranks {', '.join(map(str, entry.peers))}"
    )
    return _Visit(_WAITS, rank, f"{way}rank {rank} waits for {whom}{_last(entry)}")


def _last(entry: Entry) -> str:
    return f", and its last known action was {entry.note or '(none)'}, {entry.ago}"


def _report(journal: Journal, rank: int, gone: bool) -> Entry | None:
    """How a rank failed. Its connection may break before it has reported; then this waits for the
    report.
    """
    end = time.monotonic() + _SOON
    while (
        (failure := journal.failure(rank)) is None
        and gone
        and time.monotonic() < end
        and not journal.lost
    ):
        time.sleep(0.05)
    return failure


def _silent(journal: Journal, ranks: Iterable[int]) -> frozenset[int]:
    """Ranks that reported no failure and do not respond: stopped, or gone with a connection still
    open.
    """
    before = {rank: journal.last(rank) for rank in ranks}
    time.sleep(1.6 * BEAT)
    same = (rank for rank, last in before.items() if journal.last(rank) == last)
    found = frozenset(rank for rank in same if journal.failure(rank) is None)
    return frozenset() if journal.lost else found


def at(note: str) -> str:
    """An action in parentheses, if there is one."""
    return f" ({note})" if note else ""
