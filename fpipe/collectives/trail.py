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
RAISED, GONE, _SILENT, _IDLE, _WAITS = range(5)
#: seconds to wait for the report, or a sign of life, of a rank whose connection broke
_SOON = 1.3 * BEAT


class Trail(NamedTuple):
    """A chain of ranks, each stopped by the next, as text; the last one, and how likely it is the
    cause.

    ``read``: entries of the journal led to it. ``host``: the process that hosts the store and is no
    rank, if that may be the cause.
    """

    text: str = ""
    suspect: int | None = None
    kind: int = _WAITS
    read: bool = False
    host: str = ""


def search(
    journal: Journal,
    me: int,
    peers: Sequence[int],
    lost: bool,
    others: Sequence[int],
) -> Trail:
    """From the ranks that this one waits for, of which one broke its connection if ``lost``.

    A rank that waits for none may wait in another library: then one of the ``others`` that does not
    answer is the cause.
    """
    best, seen = _walk(journal, me, peers, lost, frozenset())
    if best.kind > GONE and seen and not journal.lost:
        silent = _silent(journal, seen.union(others if best.kind == _IDLE else ()))
        best, _ = _walk(journal, me, peers, lost, silent)
        if best.kind == _IDLE and silent:
            best, _ = _walk(journal, me, sorted(silent), False, silent)
    return best


def _walk(
    journal: Journal,
    me: int,
    peers: Sequence[int],
    lost: bool,
    silent: frozenset[int],
) -> tuple[Trail, set[int]]:
    """The most likely cause, and the ranks that were visited."""
    queue = deque((rank, lost and len(peers) == 1, "") for rank in peers)
    seen = set[int]()
    best = Trail()
    while queue:
        rank, gone, way = queue.popleft()
        if rank in seen or rank == me:
            continue
        seen.add(rank)
        entry, gone = _last(journal, rank, gone)
        kind, text = _state(rank, entry, gone, rank in silent, not journal.lost)
        # of ranks that wait in a circle, the last one
        if kind < best.kind or kind == best.kind == _WAITS:
            best = Trail(
                (way + text).removesuffix("; "), rank, kind, entry is not None or way != ""
            )
        if kind <= GONE:
            break
        if kind == _WAITS and entry is not None:
            verb = "lost" if entry.lost else "waits for"
            alone = len(entry.peers) == 1
            for other in entry.peers:
                step = f"{way}rank {rank}{at(entry.note)} {verb} rank {other}; "
                queue.append((other, entry.lost and alone, step))
    return best, seen


def _state(
    rank: int,
    entry: Entry | None,
    gone: bool,
    silent: bool,
    readable: bool,
) -> tuple[int, str]:
    """How likely a rank is the cause, and why."""
    if entry is None:
        if gone:
            nothing = ", and left no journal entry" if readable else ""
            return GONE, f"rank {rank} is gone{nothing}"
        no_entry = f"rank {rank} has no journal entry"
        return (_SILENT, no_entry) if silent else (_WAITS, no_entry if readable else "")
    action = f", and its last known action was {entry.note or '(none)'}, for {entry.age:.1f} s"
    if entry.failure is None:
        if gone:
            return GONE, f"rank {rank} is gone{action}"
        if silent:
            return _SILENT, f"rank {rank} does not answer{action}"
    elif not entry.peers:
        return RAISED, f"rank {rank}{at(entry.note)} raised {entry.failure}"
    if not entry.peers:
        return _IDLE, f"rank {rank} waits for no rank{action}"
    ranks = f"rank{'s' if len(entry.peers) > 1 else ''} {', '.join(map(str, entry.peers))}"
    return _WAITS, f"rank {rank} waits for {ranks}{action}"


def _last(journal: Journal, rank: int, gone: bool) -> tuple[Entry | None, bool]:
    """The last entry of a rank, and whether it is gone. Its connection may break before its report
    comes: on a busy machine long before.
    """
    end = time.monotonic() + _SOON
    entry = before = journal.last(rank)
    while gone and not journal.lost and time.monotonic() < end:
        if entry is not None and entry.failure is not None:
            break
        time.sleep(0.05)
        entry = journal.last(rank)
    return entry, gone and (journal.lost or entry == before)


def _silent(journal: Journal, ranks: Iterable[int]) -> frozenset[int]:
    """Ranks that reported no failure and do not respond: stopped, or gone with a connection still
    open.
    """
    before = {rank: journal.last(rank) for rank in ranks}
    time.sleep(1.6 * BEAT)
    silent = frozenset(
        rank
        for rank, last in before.items()
        if journal.last(rank) == last and (last is None or last.failure is None)
    )
    return frozenset() if journal.lost else silent


def at(note: str) -> str:
    """An action in parentheses, if there is one."""
    return f" ({note})" if note else ""
