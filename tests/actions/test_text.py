"""The language: exact round trips, strict and helpful refusals, and torch's own files both ways."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, strategies as st

from effort import lines
from fpipe import Action, Fused, Schedule, make_schedule
from fpipe.actions.text import format_csv, format_rows, parse_csv, parse_rows
from fpipe.errors import ScheduleError
from schedule_table import Case, cases

NUMBER = st.integers(0, 999_999)
ACTION = st.builds(Action, NUMBER, st.sampled_from("FBIW"), NUMBER)
FUSED = st.builds(Fused, st.lists(ACTION, min_size=2, max_size=4).map(tuple))
ROWS = st.lists(st.lists(st.one_of(ACTION, FUSED), max_size=6).map(tuple), max_size=5).map(tuple)


# ---- round trips ----
@given(ROWS)
def test_text_is_exact_both_ways(rows) -> None:
    assert parse_rows(format_rows(rows)) == rows
    assert parse_csv(format_csv(rows)) == rows


@pytest.mark.parametrize("case", list(cases(ranks=(1, 2, 4), microbatches=(1, 4, 9))), ids=str)
def test_every_schedule_comes_back_equal(case, tmp_path) -> None:
    schedule = case.make()
    assert Schedule.parse(str(schedule)) == schedule
    schedule.to_csv(tmp_path / "plan.csv")
    back = Schedule.from_csv(tmp_path / "plan.csv")
    assert (back, back.placement, back.name) == (schedule, schedule.placement, "plan")
    assert str(back) == str(schedule)


def test_what_people_write_is_read() -> None:
    wanted = ((Action(0, "F", 0), Fused((Action(0, "F", 1), Action(0, "B", 0)))), ())
    assert parse_rows("\n  [ 0F0 ,\t( 0F1 ; 0B0 )OVERLAP_F_B ]\r\n\n[ ]\n\n") == wanted
    assert parse_csv("\ufeff 0F0, (0F1;0B0)OVERLAP_F_B ,,\r\n\r\n") == wanted
    assert parse_rows("") == parse_csv("") == ()


# ---- refusals ----
@pytest.mark.parametrize(
    ("text", "line", "column", "expected"),
    [
        ("[2F0junk]", 1, 5, "',' or the end after 2F0"),
        ("[0F0, 2F0xyz, 1F0]", 1, 10, "',' or the end after 2F0"),
        ("[0F0]\n[0F1, 0F]", 2, 7, "an action such as 2F0"),
        ("[0F0, ]", 1, 7, "an action such as 2F0"),
        ("[0F0,, 0F1]", 1, 6, "an action such as 2F0"),
        ("[F0]", 1, 2, "an action such as 2F0"),
        ("[0X0]", 1, 2, "an action such as 2F0"),
        ("[0f0]", 1, 2, "an action such as 2F0"),
        ("[-1F0]", 1, 2, "an action such as 2F0"),
        ("[0F 0]", 1, 2, "an action such as 2F0"),
        ("[0F\u0663]", 1, 2, "an action such as 2F0"),  # an Arabic digit three: int() would take it
        ("[1\u0663F0]", 1, 2, "an action such as 2F0"),
        ("[0F1\u0663]", 1, 2, "an action such as 2F0"),
        ("[\uff10F0]", 1, 2, "an action such as 2F0"),  # a full-width zero
        ("[0F0\x00]", 1, 5, "',' or the end after 0F0"),
        ("[00F0]", 1, 2, "without leading zeros"),
        ("[0F01]", 1, 2, "without leading zeros"),
        ("[0F99999999999999999999]", 1, 2, "at most 6 digits"),
        ("[0F0", 1, 5, "a ']' that closes"),
        ("[", 1, 2, "a ']' that closes"),
        ("0F0]", 1, 1, "a '[' that opens"),
        ("  nonsense", 1, 3, "a '[' that opens"),
        ("[0F0]]", 1, 5, "',' or the end after 0F0"),
        ("[0SEND_F0]", 1, 2, "only compute here"),
        ("[(0F1;0B0)]", 1, 10, "')OVERLAP_F_B' to end"),
        ("[(0F1;0B0)OVERLAP_F_Bx]", 1, 10, "')OVERLAP_F_B' to end"),
        ("[(0F1;0B0]", 1, 9, "')OVERLAP_F_B' to end"),
        ("[(0F1)OVERLAP_F_B]", 1, 2, "two or more actions"),
        ("[()OVERLAP_F_B]", 1, 3, "an action such as 2F0"),
        ("[(0F1; 0Bx)OVERLAP_F_B]", 1, 8, "an action such as 2F0"),
        ("[((0F1;0B0)OVERLAP_F_B;1F0)OVERLAP_F_B]", 1, 11, "')OVERLAP_F_B' to end"),
    ],
)
def test_where_and_what_was_expected(text: str, line: int, column: int, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_rows(text)
    first, shown, mark = str(caught.value).split("\n")
    assert first.startswith(f"line {line}, column {column}: expected ")
    assert expected in first
    assert caught.value.rule == "text"
    assert caught.value.rank == line - 1
    if column <= 30:  # the mark is under the column that the message names
        assert mark.index("^") - 4 == column - 1 == len(shown[: mark.index("^")]) - 4


@pytest.mark.parametrize(
    "cell",
    [
        "0SEND_F",
        "SEND_F0",
        "0SEND_F0x",
        "0UNSHARDx",
        "0SEND_X0",
        "(0SEND_F1;0B0)OVERLAP_F_B",
        "None",
        "[0F0]",
    ],
)
def test_csv_drops_nothing_that_it_does_not_know(cell: str) -> None:
    with pytest.raises(ScheduleError, match=r"line 2, column [56]:"):
        parse_csv(f"0F0\n0F1,{cell}\n")


@pytest.mark.parametrize("text", [None, 3, b"[0F0]"])
def test_what_is_no_text_is_refused(text) -> None:
    with pytest.raises(ScheduleError, match=f"from text, not from a {type(text).__name__}"):
        Schedule.parse(text)


def test_a_long_line_is_shown_in_part() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_rows("[" + "0F0, " * 1000 + "0F0?" + ", 0F0" * 1000 + "]")
    message = str(caught.value)
    assert "column 5005" in message
    assert max(map(len, message.split("\n"))) < 120
    _, shown, mark = message.split("\n")
    assert shown[mark.index("^")] == "?"


# ---- noise ----
ALPHABET = st.sampled_from(
    "0123456789FBIW()[];,\n \t\r\x00\"'-+.eESENDRCV_OVERLAPUNHTG\u0663\u2028\u00b2\ud800\U0001f600"
)
CELLS = st.sampled_from(
    ["0F0", "1B2", "(0F1;1B0)OVERLAP_F_B", "0SEND_F0", "[", "]", ",", "\n", "", "9" * 5000]
)


@given(st.one_of(st.text(), st.text(ALPHABET), st.lists(st.one_of(CELLS, ALPHABET)).map("".join)))
@example("[" + "(" * 100_000)
@example("[" + "9" * 100_000 + "F0]")
@example("[999999F999999]")
@example("[0F0]\n[0F999999]")
def test_noise_is_refused_and_nothing_else_happens(text: str) -> None:
    for read in (
        Schedule.parse,
        parse_rows,
        parse_csv,
        lambda text: Schedule(parse_csv(text)).check().simulate(),
    ):
        message = ""
        try:
            read(text)
        except ScheduleError as error:
            message = str(error)
        assert len(message) < 5000


@given(st.binary())
def test_noise_in_files(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.csv"
    path.write_bytes(data)
    with contextlib.suppress(ScheduleError):
        Schedule.from_csv(path)


@pytest.mark.parametrize(
    "unit", [b"\xff\x00", b"noise ", b"\n", b",", b"0F0", b"(((", b"9", b"a,b\n", b"0F0;"], ids=repr
)
def test_ten_megabytes_of_noise_are_refused_at_once(tmp_path, unit: bytes) -> None:
    path = tmp_path / "noise.csv"
    path.write_bytes(unit * (10_000_000 // len(unit)))

    def read() -> None:
        with pytest.raises(ScheduleError):
            Schedule.from_csv(path)

    assert lines(read) < 5_000


@pytest.mark.parametrize("path", ["nowhere.csv", ".", "a\0b"])
def test_paths_that_cannot_be_read(tmp_path, path: str) -> None:
    with pytest.raises(ScheduleError, match="cannot read"):
        Schedule.from_csv(tmp_path / path)


# ---- torch.distributed.pipelining ----
def known_there(*ranks: int) -> list[Case]:
    """Every schedule but those whose stages have replicas, which torch does not support."""
    return [
        case
        for case in cases(ranks=ranks, microbatches=(8,))
        if not case.make().placement.replicated
    ]


def runtime(schedule: Schedule, *, cls: str = "_PipelineScheduleRuntime"):
    """torch's runtime for this schedule's counts, without a process group."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    from torch.distributed.pipelining import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages = 0, schedule.ranks, schedule.stages
    stage.submod, stage.has_backward = None, True
    per_rank = schedule.stages // schedule.ranks
    return getattr(schedules, cls)(
        [stage] * per_rank, n_microbatches=schedule.microbatches, loss_fn=mock.Mock()
    )


@pytest.mark.parametrize("case", known_there(1, 2, 4), ids=str)
def test_ours_load_there(case, tmp_path) -> None:
    schedule = case.make()
    schedule.to_csv(tmp_path / "plan.csv")
    there = runtime(schedule)
    there._load_csv(tmp_path / "plan.csv", "compute_only")
    assert [[str(a) for a in there.pipeline_order[r]] for r in range(schedule.ranks)] == [
        [str(a) for a in row] for row in schedule
    ]
    assert there.stage_index_to_group_rank == dict(enumerate(schedule.placement.paths[0]))


@pytest.mark.covering
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("case", known_there(2, 4), ids=str)
def test_theirs_load_here(case, form: str, tmp_path) -> None:
    schedule = case.make()
    schedule.to_csv(tmp_path / "ours.csv")
    there = runtime(schedule)
    there._load_csv(tmp_path / "ours.csv", "compute_only")
    there._dump_csv(tmp_path / "theirs.csv", form)
    written = (tmp_path / "theirs.csv").read_text()
    assert ("SEND_F" in written, "UNSHARD" in written) == (form == "compute_comms",) * 2
    back = Schedule.from_csv(tmp_path / "theirs.csv")
    assert back == schedule


def test_their_empty_cells_load_here(tmp_path) -> None:
    """Their generators pad rows with None, and their files have empty cells there."""
    ours = make_schedule("Interleaved1F1B", 4, 8)
    there = runtime(ours, cls="ScheduleInterleaved1F1B")
    there._dump_csv(tmp_path / "theirs.csv", "compute_only")
    assert ",," in (tmp_path / "theirs.csv").read_text()
    assert Schedule.from_csv(tmp_path / "theirs.csv") == ours


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_without_a_writer_is_empty(tmp_path: Path):
    """It was waited for without an end. A writer is waited for."""
    pipe = tmp_path / "s.csv"
    os.mkfifo(pipe)
    with pytest.raises(ScheduleError, match="a schedule needs at least one rank"):
        Schedule.from_csv(pipe)
    ours, theirs = os.pipe()
    writer = threading.Timer(0.05, lambda: (os.write(theirs, b"0F0,0B0"), os.close(theirs)))
    writer.start()
    assert str(Schedule.from_csv(f"/dev/fd/{ours}")) == "[0F0, 0B0]"
    writer.join()
    os.close(ours)
