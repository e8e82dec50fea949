# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they are about to run before the first message is sent.

Each sends a few named facts; where two ranks differ, all raise the same error, which names the fact, the ranks and both
values. A rank that fails while it prepares reports it, and the others raise at once instead of waiting for it. Knows
groups, and facts only as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..collectives.group import Group
from ..errors import MismatchError, PeerError

T = TypeVar("T")

#: What to do about a fact that differs.
_REMEDIES = {
    "versions": "install the same versions of fpipe and torch everywhere",
    "schedule": "give every rank the same schedule",
    "microbatches": "call with the same number of microbatches on every rank",
    "call": "make the same calls in the same order on every rank",
}


def alone(group: Group) -> bool:
    """Whether all ranks are in this process, so that no two can disagree."""
    return len(group.here) == group.size


def tag_of(facts: Mapping[str, str | None]) -> int:
    """A number that identifies what ranks agreed on: later steps compare it."""
    return int.from_bytes(hashlib.sha256(repr(sorted(facts.items())).encode()).digest()[:7], "little")


def agree(group: Group, facts: Mapping[str, str | None], details: Callable[[str], str] = lambda fact: "") -> None:
    """Raise MismatchError on every rank where facts differ between ranks; ``None`` is not compared.

    ``details`` returns a long form of a fact; it is called only where the fact differs.
    """
    if alone(group):
        return
    by_rank = group.gather_objects(dict(facts))
    for fact in facts:
        known = [(rank, text) for rank, theirs in enumerate(by_rank) if (text := theirs.get(fact)) is not None]
        odd = next(((rank, text) for rank, text in known if text != known[0][1]), None)
        if odd is None:
            continue
        first = known[0]
        where = _difference(group.gather_objects(details(fact)), first[0], odd[0])
        remedy = _REMEDIES.get(fact, "pass the same arguments, cut the same way, on every rank")
        raise MismatchError(
            f"ranks disagree about {fact}: rank {first[0]} has {first[1]}, rank {odd[0]} has {odd[1]}{where}; "
            f"{remedy}. Nothing was sent"
        )


def _difference(texts: list[str], one: int, other: int) -> str:
    """The first line and word in which two long forms differ."""
    for number, (a, b) in enumerate(zip(texts[one].splitlines(), texts[other].splitlines(), strict=False)):
        for place, (x, y) in enumerate(zip(a.split(", "), b.split(", "), strict=False)):
            if x != y:
                return f" (they part at rank {number}, position {place}: {x.strip('[]')} against {y.strip('[]')})"
        if a != b:
            return f" (they part in the length of rank {number})"
    return ""


def together(group: Group, work: Callable[[], T]) -> list[T]:
    """Do something on every rank and gather the results; one rank's failure is raised on all."""
    if alone(group):
        return [work()]
    report: tuple[str, Any]
    failure: Exception | None = None
    try:
        report = ("done", work())
    except Exception as error:  # reported to the others first, then raised here unchanged
        failure, report = error, ("failed", f"{type(error).__name__}: {error}")
    reports = group.gather_objects(report)
    if failure is not None:
        raise failure
    for rank, (what, value) in enumerate(reports):
        if what == "failed":
            kind = MismatchError if value.startswith(("StageError", "MismatchError", "TraceError")) else PeerError
            raise kind(f"rank {rank} could not prepare this step, so nothing was sent. It said: {value}")
    return [value for _, value in reports]
