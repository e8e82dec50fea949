"""What ``make test`` takes of a large table of cases; ``make test-long`` takes all of it.

pytest.mark.covering         # of a test with several parameters: each value of each parameter runs
pytest.mark.covering(pairs=True)                                # each pair of values of two
parameters runs pytest.mark.long             # of a test: with ``--long`` alone
["1F1B", *also("ZBV")]       # of parameters: "ZBV" with ``--long`` alone
covering(rows, pairs=True)   # the same for a loop inside of a test, with the fixture ``long``

The sample is always the same. A part of a table that is named by ``-k`` or by its id is a table
too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Any, TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")


def covering(
    rows: Iterable[T],
    values: Callable[[T], Sequence[Hashable]] | None = None,
    *,
    pairs: bool = False,
) -> list[T]:
    """Few of ``rows``, in their order, with each value of each column (``pairs``: each pair of
    values of two columns) that occurs in them. ``values`` gives the columns of a row, which has
    them itself otherwise.
    """
    table = list(rows)
    columns = [tuple(enumerate(row if values is None else values(row))) for row in table]  # type: ignore[arg-type]
    parts = [frozenset(combinations(each, min(1 + pairs, len(each)))) for each in columns]
    # The row with most parts that are new comes first, then an order in which neighbours differ in
    # all columns.
    left = [(-len(parts[at]), crc32(repr(each).encode()), at) for at, each in enumerate(columns)]
    heapify(left)
    seen: set[Any] = set()
    taken: list[int] = []
    while left:
        most, order, at = heappop(left)
        new = parts[at] - seen
        if len(new) < -most:  # some have been seen since
            heappush(left, (-len(new), order, at))
        elif new:
            seen |= new
            taken.append(at)
    return [table[at] for at in sorted(taken)]


def also(*values: Any) -> list[Any]:
    """Parameters of a test that run with ``--long`` alone; a tuple has those of one run."""
    rows = [value if type(value) is tuple else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]


def mostly(values: Iterable[T], is_long: Callable[[T], bool]) -> list[Any]:
    """Parameters of a test, of which those that ``is_long`` tells run with ``--long`` alone."""
    return [part for value in values for part in (also(value) if is_long(value) else [value])]


def taken(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The tests that run without ``--long``."""
    items = [item for item in items if item.get_closest_marker("long") is None]
    tables: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            tables[item.parent, item.originalname].append(item)
    found = {item for item in items if not item.get_closest_marker("covering")}
    for table in tables.values():
        mark = table[0].get_closest_marker("covering")
        assert mark is not None
        found.update(covering(table, _numbers(table).__getitem__, **mark.kwargs))
    return found


def _numbers(table: list[pytest.Function]) -> dict[pytest.Function, tuple[int, ...]]:
    """The values of a test's parameters, each as its place in the list of the parameter."""
    places: dict[str, dict[int, int]] = defaultdict(dict)
    return {
        item: tuple(
            places[name].setdefault(id(value), len(places[name]))
            for name, value in item.callspec.params.items()
        )
        for item in table
    }
