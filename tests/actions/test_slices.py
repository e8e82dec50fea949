"""Schedules over slices of sequences: every row of the table in slices, the orders of Seq1F1B,
check, text, costs.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

import pytest

from fpipe import Action, Costs, Fused, Schedule, Slice, make_schedule
from fpipe.actions.action import unfused
from fpipe.actions.routes import placement_of
from fpipe.errors import ScheduleError
from fpipe.products.command.cli import main
from fpipe.products.search.comparison import compare
from schedule_table import Case, cases


def sliced(case: Case, slices: int) -> Schedule:
    return make_schedule(case.name, case.ranks, case.microbatches, case.stages, slices=slices)


def states(schedule: Schedule) -> Iterator[str]:
    """Broken rules of slices, by a list of what each rank has done, written without the code under
    test.
    """
    for row in schedule:
        done: set[tuple[int, str, int, int]] = set()
        for cell in row:
            for part in cell.parts:
                m, s = map(int, str(part.microbatch).split("."))
                kind = "F" if part.op == "F" else "I"
                before = (part.stage, kind, m, s - 1 if kind == "F" else s + 1)
                if part.op != "W" and 0 <= before[3] < schedule.slices and before not in done:
                    yield f"{part} before {before}"
            done |= {
                (p.stage, "F" if p.op == "F" else "I", *map(int, str(p.microbatch).split(".")))
                for p in cell.parts
                if p.op != "W"
            }


@pytest.mark.parametrize("case", list(cases(ranks=(1, 2, 4), microbatches=(1, 5))), ids=str)
@pytest.mark.parametrize("slices", [3])
def test_every_schedule_in_slices(case: Case, slices: int, tmp_path) -> None:
    schedule = sliced(case, slices)
    assert (schedule.slices, schedule.microbatches) == (slices, case.microbatches)
    assert schedule.check() is schedule and not list(states(schedule))
    assert Schedule.parse(str(schedule)) == schedule
    schedule.to_csv(tmp_path / "plan.csv")
    assert Schedule.from_csv(tmp_path / "plan.csv") == schedule
    whole = make_schedule(case.name, case.ranks, case.microbatches, case.stages).simulate()
    t = schedule.simulate()
    assert sum(t.busy) == pytest.approx(sum(whole.busy))
    assert t.total <= whole.total + 1e-9
    if case.name.startswith("Seq"):
        assert max(t.peak_bytes) <= max(whole.peak_bytes) + 1e-9


@pytest.mark.parametrize(("p", "m", "k"), [(4, 8, 2), (4, 8, 4), (8, 24, 4), (2, 1, 3)])
def test_seq_1f1b_has_a_kth_of_the_bubble_and_of_the_memory(p: int, m: int, k: int) -> None:
    t = make_schedule("Seq1F1B", p, m, slices=k).simulate()
    assert t.total == pytest.approx(3 * m + 3 * (p - 1) / k)
    assert max(t.peak_bytes) == pytest.approx(min(p + k - 1, m * k) / k)
    zero = make_schedule("SeqZBH1", p, max(m, p), slices=k).simulate()
    assert zero.total == pytest.approx(3 * max(m, p) + (p - 1) / k)


def test_seq_1f1b_by_hand() -> None:
    assert str(make_schedule("Seq1F1B", 2, 2, slices=2)) == (
        "[0F0.0, 0F0.1, 0F1.0, 0B0.1, 0F1.1, 0B0.0, 0B1.1, 0B1.0]\n"
        "[1F0.0, 1F0.1, 1B0.1, 1F1.0, 1B0.0, 1F1.1, 1B1.1, 1B1.0]"
    )
    assert str(make_schedule("Seq1F1B", 2, 2)) == str(make_schedule("1F1B", 2, 2))


def test_an_action_of_a_slice_is_a_small_value() -> None:
    action = Action(2, "F", Slice(3, 1, of=4))
    assert (str(action), f"{action}", action.whole, action.slice) == ("2F3.1", "2F3.1", 3, 1)
    assert tuple(action) == (2, "F", 13) and pickle.loads(pickle.dumps(action)).microbatch.of == 4
    assert (Action(2, "F", 3).whole, Action(2, "F", 3).slice) == (3, 0)
    with pytest.raises(ScheduleError, match="there is no slice 4 of 4"):
        Slice(3, 4, of=4)


def test_fused_actions_are_cut_in_both_directions() -> None:
    schedule = Schedule.parse("[0F0, (0F1;0B0)OVERLAP_F_B, 0B1]").sliced(2)
    assert (
        str(schedule)
        == "[0F0.0, 0F0.1, (0F1.0;0B0.1)OVERLAP_F_B, (0F1.1;0B0.0)OVERLAP_F_B, 0B1.1, 0B1.0]"
    )


BROKEN = [
    (
        "[0F0.1, 0F0.0, 0B0.1, 0B0.0]",
        "order",
        r"rank 0, position 0 \(0F0\.1\).*in the order of slices",
    ),
    (
        "[0F0.0, 0F0.1, 0B0.0, 0B0.1]",
        "order",
        r"rank 0, position 2 \(0B0\.0\).*from the last slice: move 0B0\.1",
    ),
    ("[0F0.0, 0F0.1, 0I0.0, 0I0.1, 0W0.0, 0W0.1]", "order", r"position 2 \(0I0\.0\).*of 0I0\.1"),
    ("[(0F0.0;0F0.1)OVERLAP_F_B, 0B0.1, 0B0.0]", "fused", r"0F0\.1 needs 0F0\.0"),
    ("[0F0.0, 0F0.1, 0B0.1]", "count", r"0B0\.0 .*is missing.*every slice"),
    ("[0F0.0, 0F0.1, 0F1, 0B0.1, 0B0.0, 0B1]", "slices", r"0F1 has no slice, where others have 2"),
    ("[0F0, 0B0, 0F1.0, 0F1.1, 0B1.1, 0B1.0]", "slices", r"0F1\.0 has 2 slices"),
    ("[0F0.0, 0B0.0, 1F0.0, 1B0.0]\n[0F0.1, 0B0.1, 1F0.1, 1B0.1]", "slices", "several ranks"),
    ("[0F0.0, 0F0.1, 0F0.1, 0B0.1, 0B0.0]", "count", r"0F0\.1 stands already"),
]


@pytest.mark.parametrize(("text", "rule", "message"), BROKEN)
def test_check_refuses(text: str, rule: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"(?s){message}") as error:
        Schedule.parse(text).check()
    assert error.value.rule == rule


def test_actions_with_other_numbers_of_slices() -> None:
    row = [Action(0, op, Slice(m, 0, of=m + 1)) for m in (0, 1) for op in "FB"]  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"0F1\.0 has 2 slices, where others have 1"):
        Schedule([row]).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["[0F0.]", "[0F0.01]", "[0F.1]", "[0F0.1.1]", "[0F0.-1]", "[0F0.1234567]"]
)
def test_text_that_is_no_slice(text: str) -> None:
    with pytest.raises(ScheduleError, match="expected") as error:
        Schedule.parse(text)
    assert error.value.rule == "text"


def test_sliced_refuses() -> None:
    schedule = make_schedule("1F1B", 2, 2)
    assert schedule.sliced(1) is schedule
    with pytest.raises(ScheduleError, match="slices=0; give a number of slices"):
        schedule.sliced(0)
    with pytest.raises(ScheduleError, match="has 2 slices already"):
        schedule.sliced(2).sliced(2)
    for wrong in (-1, "two", 1.0):
        with pytest.raises(ScheduleError, match="must be a count of 1 or more"):
            Schedule(schedule.rows, slices=wrong)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="slices=0, but"):
        make_schedule("Seq1F1B", 2, 2, slices=0)


def test_later_slices_may_cost_more() -> None:
    schedule = make_schedule("Seq1F1B", 1, 2, slices=2)
    even = schedule.simulate(Costs(F=2))
    assert even.total == 2 * (2 + 2)
    by_slice = schedule.simulate(Costs(F=2, load=[0.5, 1.5] * 2))
    assert [span.end - span.start for span in by_slice][:2] == [
        0.5,
        1.5,
    ] and by_slice.total == even.total
    assert schedule.simulate(Costs(F=2, load=[1, 3])).total == 4 + 3 * 4
    with pytest.raises(ScheduleError, match="load has 3 numbers"):
        schedule.simulate(Costs(load=[1, 2, 3]))


def test_messages_of_slices_are_smaller() -> None:
    costs = Costs(boundary=100, bandwidth=100, comm=1)
    whole, cut = (make_schedule("GPipe", 2, 1, slices=k).simulate(costs) for k in (1, 4))
    assert (whole.messages, cut.messages, whole.volume, cut.volume) == (2, 8, 200.0, 200.0)
    assert whole.total == 6 + 2 * 2 and cut.starts[1][0] == 0.25 + 1 + 0.25


def test_pictures_label_slices(tmp_path) -> None:
    t = make_schedule("Seq1F1B", 2, 2, slices=2).simulate()
    text = t.draw(width=120, color=False)
    assert "2 microbatches of 2 slices" in text and "1F0.1" in text
    for name in ("a.svg", "a.html", "a.json"):
        t.save(tmp_path / name)
    assert "1F0.1" in (tmp_path / "a.svg").read_text()
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert names == [str(action) for action in unfused(t.rows[0])]


def test_replicas_keep_a_microbatch_on_one_path() -> None:
    schedule = make_schedule("DualPipe", 4, 8, slices=2).check()
    assert placement_of(schedule.rows) == schedule.placement
    assert any(isinstance(cell, Fused) for row in schedule for cell in row)


def test_commands_take_slices(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    make_schedule("Seq1F1B", 2, 2, slices=2).to_csv(tmp_path / "plan.csv")
    assert main(["check", str(tmp_path / "plan.csv")]) == 0
    assert (
        "good: 2 ranks, 2 stages, 2 microbatches, 2 slices, 16 actions" in capsys.readouterr().out
    )
    assert (
        main(
            [
                "draw",
                "Seq1F1B",
                "-p",
                "2",
                "-m",
                "2",
                "--slices",
                "2",
                "--width",
                "120",
                "--no-color",
            ]
        )
        == 0
    )
    assert "1B0.1" in capsys.readouterr().out
    assert main(["compare", "-p", "4", "-m", "8", "--slices", "4", "--json"]) == 0
    assert "Seq1F1B" in capsys.readouterr().out
    (entry,) = (entry for entry in compare(4, 8, slices=4)[0] if entry.name == "Seq1F1B")
    assert (entry.total, entry.memory) == (24 + 9 / 4, 7 / 4)
