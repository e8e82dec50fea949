"""Schedules by name: typos, counts that do not fit, and registered schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fpipe import Schedule, make_schedule, register_schedule, schedule_names
from fpipe.errors import ScheduleError
from fpipe.generators.catalogue import ENTRIES, key, schedule_from


def test_case_and_dashes_in_names_do_not_matter() -> None:
    assert (
        make_schedule("zbv", 2, 3)
        == make_schedule("ZBVZeroBubble", 2, 3)
        == make_schedule("zbv-zero_bubble", 2, 3)
    )
    assert make_schedule("gpipe", 2, 3).name == "GPipe"


@pytest.mark.parametrize(
    ("typo", "meant"), [("1f1", "1F1B"), ("ZVB", "ZBV"), ("dualpipe v2", "DualPipeV")]
)
def test_a_typo_gets_the_nearest_names(typo: str, meant: str) -> None:
    with pytest.raises(ScheduleError, match=f"did you mean .*{meant}"):
        make_schedule(typo, 2, 2)


@pytest.mark.parametrize("name", ["", "@#", None, 3])
def test_a_name_like_no_other_gets_all_names(name) -> None:
    with pytest.raises(ScheduleError, match="there are GPipe, 1F1B"):
        make_schedule(name, 2, 2)


@pytest.mark.parametrize("bad", [0, -1, 2.5, "4", None, True])
@pytest.mark.parametrize("what", ["ranks", "microbatches", "stages"])
def test_counts_that_are_no_counts(what: str, bad) -> None:
    if what == "stages" and bad is None:
        pytest.skip("that asks for the default")
    counts = {"ranks": 2, "microbatches": 2, "stages": 2} | {what: bad}
    with pytest.raises(ScheduleError, match=f"{what}=.*1 or more") as caught:
        make_schedule("1F1B", **counts)
    assert caught.value.rule == what


@pytest.mark.parametrize(
    ("name", "stages", "remedy"),
    [
        ("1F1B", 6, "stages=4 or 8"),
        ("Interleaved1F1B", 3, "stages=4"),
        ("ZBV", 4, "stages=8"),
        ("DualPipeV", 16, "stages=8"),
        ("DualPipe", 8, "stages=4"),
        ("Hanayo", 12, "stages=8 or 16"),
    ],
)
def test_stages_that_do_not_fit(name: str, stages: int, remedy: str) -> None:
    with pytest.raises(ScheduleError, match=remedy):
        make_schedule(name, 4, 8, stages=stages)


@pytest.fixture
def mine() -> Iterator[str]:
    name = "Mine-For-A-Test"
    yield name
    del ENTRIES[key(name)]


@pytest.mark.parametrize("counts", [(4, 10**7), (10**9, 1), (10**5, 10**5)])
@pytest.mark.parametrize("name", schedule_names())
def test_what_no_memory_holds_is_refused_at_once(name: str, counts: tuple[int, int]) -> None:
    with pytest.raises(
        ScheduleError,
        match=r"forwards and backwards; at most 16,777,216.*fewer ranks or microbatches",
    ):
        make_schedule(name, *counts)


def test_register_as_a_call_and_as_a_decorator(mine: str) -> None:
    def reversed_gpipe(ranks: int, microbatches: int) -> Schedule:
        return make_schedule("LoopedBFS", ranks, microbatches, stages=ranks)

    assert register_schedule(mine, reversed_gpipe) is reversed_gpipe
    assert make_schedule("mine-for-a-test", 2, 3) == reversed_gpipe(2, 3)
    assert schedule_names()[-1] == mine

    @register_schedule(mine)
    def other(ranks: int, microbatches: int, stages: int | None = None) -> Schedule:
        return make_schedule("1F1B", ranks, microbatches, stages)

    assert schedule_names().count(mine) == 1
    assert make_schedule(mine, 2, 3, stages=4).stages == 4
    assert make_schedule(mine, 2, 3).stages == 2


def test_a_built_in_name_is_not_replaced() -> None:
    for name in ("1f1b", "zbv"):
        with pytest.raises(ScheduleError, match="is built in"):
            register_schedule(
                name, lambda ranks, microbatches: make_schedule("GPipe", ranks, microbatches)
            )


def test_a_registered_function_that_does_not_keep_its_word(mine: str) -> None:
    register_schedule(mine, lambda ranks, microbatches: "no schedule")  # type: ignore[arg-type, return-value]
    with pytest.raises(ScheduleError, match="returned a str"):
        make_schedule(mine, 2, 2)
    register_schedule(mine, lambda ranks, microbatches: make_schedule("GPipe", ranks, 7))
    with pytest.raises(ScheduleError, match=r"microbatches=2 .* with 7"):
        make_schedule(mine, 2, 2)
    register_schedule(mine, lambda ranks, microbatches: make_schedule("GPipe", ranks, microbatches))
    with pytest.raises(ScheduleError, match=r"stages=4 .* with 2"):
        make_schedule(mine, 2, 2, stages=4)


@pytest.mark.parametrize(
    ("name", "fn"), [("", lambda p, m: None), (3, lambda p, m: None), ("new", 3)]
)
def test_what_cannot_be_registered(name, fn) -> None:
    with pytest.raises(ScheduleError):
        register_schedule(name, fn)


@pytest.mark.parametrize("fn", [lambda: None, lambda ranks: None, lambda a, b, c: None])
def test_a_schedule_function_with_other_arguments_is_refused(fn):
    with pytest.raises(ScheduleError, match=r"cannot be called with \(ranks, microbatches\)"):
        schedule_from(fn, 2, 3)
