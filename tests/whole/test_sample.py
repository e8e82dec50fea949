"""The sample that ``make test`` takes of a table has each value, or each pair, and is always the
same.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest

from sample import covering

TABLE = list(product("abcdef", range(4), (True, False)))


@pytest.mark.parametrize(("pairs", "rows"), [(False, 6), (True, 24)])
def test_each_value_or_each_pair_is_in_the_sample(pairs: bool, rows: int):
    parts = lambda table: {
        part for row in table for part in combinations(enumerate(row), 1 + pairs)
    }
    found = covering(TABLE, pairs=pairs)
    assert parts(found) == parts(TABLE)
    assert len(found) == rows, "no more than the two largest columns ask for"
    assert found == sorted(found, key=TABLE.index) == covering(iter(TABLE), pairs=pairs)


def test_a_table_with_one_column_is_taken_whole():
    assert covering([("a",), ("b",)], pairs=True) == [("a",), ("b",)]
    assert covering("ab", lambda letter: (letter, letter == "a")) == ["a", "b"]


RAN: list[tuple[str, int]] = []


@pytest.mark.xdist_group("sample")
@pytest.mark.covering
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("letter", "abc")
def test_of_a_marked_table_a_part_runs(letter: str, number: int):
    RAN.append((letter, number))


@pytest.mark.xdist_group("sample")
@pytest.mark.long
def test_a_test_for_the_long_run_runs_in_it_alone(long: bool):
    assert long


@pytest.mark.xdist_group("sample")
def test_the_whole_table_runs_with_long(long: bool):
    assert len(RAN) == (9 if long else 3)
