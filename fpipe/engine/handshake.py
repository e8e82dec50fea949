# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they are about to run before the first message is sent.

Each sends a few named facts; where two ranks differ, all raise the same error, which names the
fact, the ranks and both values. A rank that fails while it prepares reports it, and the others
raise at once instead of waiting for it. Knows groups, and facts only as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from ..collectives.agreement import Difference
from ..collectives.codec import decode, encode
from ..collectives.group import Facts, Group
from ..errors import MismatchError, PeerError
from ..programs.cache import timed
from .interfaces import as_data, from_data

T = TypeVar("T")
#: In the errors of ranks that could prepare a step where another one could not.
UNPREPARED = "could not prepare this step"
#: The remedy where ranks do not build a pipeline together.
TOGETHER = (
    "where one rank leaves stages out, every rank builds the pipeline, and leaves one out at least"
)


def tag_of(facts: Facts) -> int:
    """A number that identifies what ranks agreed on: later steps compare it."""
    return int.from_bytes(
        hashlib.sha256(repr(sorted(facts.items())).encode()).digest()[:7], "little"
    )


def agree(group: Group, facts: Facts, schedule: object = "", more: Any = None) -> list[Any]:
    """Raise MismatchError on every rank where facts differ between ranks; ``None`` is not compared.

    Returns ``more`` of every rank. The facts themselves are sent only where their digests differ,
    and the text of the ``schedule`` only where the fact of that name differs.
    """
    if len(group.here) == group.size:
        return [more]
    with timed("handshakes"):
        answers = group.gather_objects(("facts", tag_of(facts), more))
    for rank, (what, *_) in enumerate(answers):
        if what != "facts":
            raise MismatchError(
                f"rank {group.global_rank(rank)} builds a pipeline while others call one; "
                f"{TOGETHER}"
            )
    found = None
    if len({digest for _, digest, _ in answers}) > 1:
        found = Difference.of(dict(enumerate(group.gather_objects(dict(facts)))))
    if found is not None:
        where = ""
        if found.fact == "schedule":
            where = _difference(group.gather_objects(str(schedule)), *found.ranks)
        names = [group.global_rank(rank) for rank in range(group.size)]
        raise MismatchError(f"{found.text(names, where)}. Nothing was sent")
    return [each for *_, each in answers]


def _difference(texts: list[str], one: int, other: int) -> str:
    """The first line and word in which the texts of two schedules differ."""
    lines = zip(texts[one].splitlines(), texts[other].splitlines(), strict=False)
    for number, (a, b) in enumerate(lines):
        for place, (x, y) in enumerate(zip(a.split(", "), b.split(", "), strict=False)):
            if x != y:
                return (
                    f" (they part at rank {number}, position {place}: {x.strip('[]')} against "
                    f"{y.strip('[]')})"
                )
        if a != b:
            return f" (they part in the length of rank {number})"
    return ""


def on_all_ranks(group: Group, work: Callable[[], T]) -> list[T]:
    """Do something on every process and gather the results, as data, by rank; one rank's failure
    is raised on all.
    """
    report: tuple[str, Any]
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
        report = ("done", encode(as_data(result)))
    except Exception as error:  # reported to the others first, then raised here unchanged
        failure = error
        report = ("failed", f"{type(error).__name__}: {error}")
    with timed("handshakes"):
        reports = group.gather_objects(report)
    if failure is not None:
        raise failure
    for rank, (what, value) in enumerate(reports):
        if what == "failed":
            by_user = value.startswith(("StageError", "MismatchError", "TraceError"))
            raise (MismatchError if by_user else PeerError)(
                f"rank {group.global_rank(rank)} {UNPREPARED}, so nothing was sent. It said: "
                f"{value}"
            )
    here: Any = result
    return [
        here if rank in group.here else from_data(decode(value))
        for rank, (_, value) in enumerate(reports)
    ]
