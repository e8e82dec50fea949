"""Schedules whose stages are on several ranks."""

from __future__ import annotations

from itertools import product
from math import ceil

import pytest

from fpipe import Costs, Schedule, make_schedule
from fpipe.errors import ScheduleError
from sample import covering

NAMES = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZB1P", "ZB2P")
OTHERS = ("Overlapped1F1B", "Seq1F1B", "ZBV", "DualPipe", "Interleaved1F1B")


def equal_load(copies: tuple[int, ...]) -> Costs:
    return Costs(F=copies, I=copies, W=copies)


def bound(copies: tuple[int, ...], microbatches: int) -> int:
    """A rank of stage s waits for the forwards before it, and the backwards follow its last one;
    an F, an I and a W of a stage take as long as it has copies."""
    return max(3 * sum(copies[:s]) + 3 * k * ceil(microbatches / k) for s, k in enumerate(copies))


@pytest.mark.parametrize("name", NAMES)
def test_all_counts_are_valid_and_read_back(name: str, tmp_path, long: bool) -> None:
    every = [*product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (4, 7, 12))]
    for *copies, microbatches in every if long else covering(every, pairs=True):
        s = make_schedule(name, sum(copies), microbatches, replicas=tuple(copies)).check()
        assert (s.ranks, s.stages, s.name) == (sum(copies), 3, name)
        assert Schedule.parse(str(s)) == s
        for stage, k in enumerate(copies):
            first = sum(copies[:stage])
            for m in range(microbatches):
                assert s.placement.rank_of(stage, m) == first + m % k
    s.to_csv(tmp_path / "s.csv")
    assert Schedule.from_csv(tmp_path / "s.csv") == s


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_adds_in_ascending_order(name: str) -> None:
    s = make_schedule(name, 8, 13, replicas=(3, 1, 4))
    for row in s:
        added = [action.microbatch for action in row if action.op in "BW"]
        assert added == sorted(added)


@pytest.mark.parametrize(
    ("name", "most", "mean"),
    [("1F1B", 1.25, 1.07), ("Eager1F1B", 1.09, 1.03), ("ZB1P", 1.07, 0.95), ("ZB2P", 1.02, 0.92)],
)
def test_spans_are_close_to_the_bound(name: str, most: float, mean: float) -> None:
    """The bound is that of schedules which do not split B; one that does may be below it."""
    shares = []
    for copies in (c for n in (2, 3) for c in product((1, 2, 3, 4), repeat=n)):
        t = make_schedule(name, sum(copies), 24, replicas=copies).simulate(equal_load(copies))
        shares.append(t.total / bound(copies, 24))
    assert max(shares) <= most
    assert sum(shares) / len(shares) <= mean


def test_the_case_of_the_docs() -> None:
    """Stage 0 takes three times as long as stage 1."""
    costs = equal_load((3, 1))
    for microbatches, span, without in ((6, 27, 54), (12, 45, 108)):
        s = make_schedule("1F1B", ranks=4, microbatches=microbatches, replicas=(3, 1))
        t = s.simulate(costs)
        assert t.span == span == bound((3, 1), microbatches)
        assert t.peak == (2, 2, 2, 1)
        assert make_schedule("1F1B", 2, microbatches).simulate(costs).span == without


@pytest.mark.parametrize(
    ("factor", "name"), [(1, "1F1B"), (1, "ZBH1"), (2, "Eager1F1B"), (2, "ZB2P")]
)
def test_memory_is_that_of_noam(factor: int, name: str) -> None:
    for copies in product((1, 2, 3, 4), repeat=3):
        peak = make_schedule(name, sum(copies), 12, replicas=copies).simulate().peak
        ranks = [(s, k) for s, k in enumerate(copies) for _ in range(k)]
        for held, (stage, k) in zip(peak, ranks, strict=True):
            first = stage if "1F1B" in name else 0
            assert held <= ceil(factor * sum(copies[first:]) / k)


def test_one_copy_of_each_is_the_plain_schedule() -> None:
    for name in (*NAMES, "Overlapped1F1B"):
        assert make_schedule(name, 3, 5, replicas=(1, 1, 1)) == make_schedule(name, 3, 5)


def test_slices() -> None:
    s = make_schedule("1F1B", 3, 4, slices=2, replicas=(2, 1)).check()
    assert str(s[0][:4]) == "(0F0.0, 0F0.1, 0F2.0, 0F2.1)"


@pytest.mark.parametrize("suffix", ["svg", "html", "json"])
def test_pictures(suffix: str, tmp_path) -> None:
    t = make_schedule("1F1B", 4, 12, replicas=(3, 1)).simulate()
    assert len(t.draw().splitlines()) >= 4
    t.save(tmp_path / f"picture.{suffix}")
    assert (tmp_path / f"picture.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("name", OTHERS)
def test_other_schedules_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"no form with replicas=.*take one of GPipe, 1F1B"):
        make_schedule(name, 4, 8, replicas=(3, 1))


@pytest.mark.parametrize(
    ("replicas", "error"),
    [
        (3, "give the number of ranks of each stage"),
        ((), "give the number of ranks of each stage"),
        ((4, 0), "give the number of ranks of each stage"),
        ((2.0, 2.0), "give the number of ranks of each stage"),
        ((3, 2), r"are 5 ranks, not 4; give ranks=5"),
        ((2, 1, 1), "has 3 numbers for 2 stages"),
    ],
)
def test_wrong_replicas(replicas: object, error: str) -> None:
    with pytest.raises(ScheduleError, match=error):
        make_schedule("1F1B", 4, 8, 2, replicas=replicas)  # type: ignore[arg-type]


def test_each_replica_needs_a_microbatch() -> None:
    with pytest.raises(ScheduleError, match=r"3 replicas for 2 microbatches.*microbatches=3"):
        make_schedule("1F1B", 4, 2, replicas=(3, 1))
