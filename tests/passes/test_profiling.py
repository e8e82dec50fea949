"""Profiles: what ran, when, on which rank; what it costs; and that a simulation by these costs
comes out like it.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import fpipe
import sleeping_stages
from fpipe import Action, Costs, FpipeError
from fpipe.actions.action import Fused
from fpipe.collectives.group import Done
from fpipe.engine.execute import WATCH
from fpipe.errors import StageError
from fpipe.passes.profile.costing import (
    costs,
    delays,
    messages,
    shares,
    spans,
    timeline,
    varies,
)
from fpipe.passes.profile.profiling import split, whole
from fpipe.passes.profile.recording import Event, Run, differences, gathered


def did(kind: str, name: str, start: float, end: float, **more: Any) -> Event:
    action = Action(int(name[0]), name[1], int(name[2:])) if name else None
    return Event(kind, action, start, end, **more)


#: Two ranks, one microbatch: 0F0 sent over in 1 and 3 on the way, 1B0 sent back the same.
BY_HAND = (
    Run(
        0,
        (
            did("F", "0F0", 0, 10),
            did("SEND", "0F0", 10, 11, peer=1, number=0, nbytes=64),
            did("RECV", "", 11, 11.5),
            did("WAIT", "1B0", 12, 54, peer=1, number=0),
            did("B", "0B0", 54, 70),
        ),
        (Action(0, "F", 0), Action(0, "B", 0)),
    ),
    Run(
        1,
        (
            did("RECV", "", 0, 0.5),
            did("WAIT", "0F0", 1, 14, peer=0, number=0),
            did("F", "1F0", 14, 30),
            did("F", "1F0", 30, 31),
            did("B", "1B0", 31, 49),
            did("SEND", "1B0", 49, 50, peer=0, number=0, nbytes=64),
            did("ADD", "1B0", 50, 52),
        ),
        (Action(1, "F", 0), Action(1, "B", 0)),
    ),
)


def test_an_action_lasts_from_its_first_program_to_its_last_without_what_it_sends():
    found = {str(action): (start, end) for _, action, start, end in spans(BY_HAND)}
    assert found == {"0F0": (0, 10), "0B0": (54, 70), "1F0": (14, 31), "1B0": (31, 51)}


def test_what_ran_at_once_is_one_fused_action():
    run = Run(
        0,
        (
            did("F", "0F1", 0, 2),
            did("B", "1B0", 2, 4),
            did("F", "0F1", 4, 5),
            did("B", "1B0", 5, 7),
            did("F", "0F2", 7, 9),
        ),
        (),
    )
    together = Fused((Action(0, "F", 1), Action(1, "B", 0)))
    assert list(spans([run])) == [(0, together, 0, 7), (0, Action(0, "F", 2), 7, 9)]


def test_an_action_with_nothing_to_do_takes_no_time():
    """The first stage's input gradient is not needed: its I has no instruction, and its W cannot
    run without it.
    """
    run = Run(
        0, (did("F", "0F0", 0, 2), did("W", "0W0", 3, 5)), tuple(Action(0, op, 0) for op in "FIW")
    )  # type: ignore[arg-type]
    assert [(str(action), start, end) for _, action, start, end in spans([run])] == [
        ("0F0", 0, 2),
        ("0I0", 2, 2),
        ("0W0", 3, 5),
    ]
    assert timeline([run]).total == 5


def test_messages_are_matched_by_their_number():
    there, back = messages(BY_HAND)
    assert (there.src, there.dst, there.boundary, there.sent, there.asked, there.had) == (
        0,
        1,
        0,
        11,
        1,
        14,
    )
    assert (back.src, back.dst, back.boundary, back.sent, back.asked, back.had) == (
        1,
        0,
        0,
        50,
        12,
        54,
    )
    assert list(messages(BY_HAND[:1])) == []


def test_costs_of_actions_and_messages():
    price = costs([BY_HAND])
    assert (price.F, price.B, price.I, price.W) == ((10, 17), (16, 20), (8, 10), (8, 10))
    assert price.send == (1.0,) and price.boundary == (64.0,) and price.unit == "s"
    # no message arrived before its WAIT, so only 3 and 4 from send to arrival are known; half a
    # unit of RECV for each
    assert price.comm == (0.0,) and price.receive == (13.5,)


def test_receiving_is_distinguished_from_a_message_that_had_arrived():
    """Three waits of 5 for a message under way, and three of 2 for one that lay there."""
    sent = [
        did("SEND", f"0F{m}", 100 * m, 100 * m + 1, peer=1, number=m, nbytes=8) for m in range(6)
    ]
    asked = [*(100 * m - 50 for m in range(3)), *(100 * m + 50 for m in range(3, 6))]
    had = [*(100 * m + 6 for m in range(3)), *(100 * m + 52 for m in range(3, 6))]
    waits = [did("WAIT", f"0F{m}", asked[m], had[m], peer=0, number=m) for m in range(6)]
    ran = [did("F", f"{stage}F{m}", 100 * m - 1, 100 * m) for stage in (0, 1) for m in range(6)]
    runs = (Run(0, (*ran[:6], *sent), ()), Run(1, (*ran[6:], *waits), ()))
    price = costs([runs])
    assert (price.comm, price.send, price.receive, price.boundary) == (
        (3.0,),
        (1.0,),
        (2.0,),
        (8.0,),
    )


def test_a_simulation_by_these_costs_is_what_was_measured():
    """Sends keep the sender busy, receives the receiver; both are in the makespan."""
    price = Costs(F=10, B=16, comm=3, send=1, receive=2)
    line = fpipe.Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]").simulate(price)
    assert [(str(s.action), s.start, s.end) for s in line] == [
        ("0F0", 0, 10),
        ("0B0", 10 + 1 + 3 + 2 + 26 + 1 + 3 + 2, 64),
        ("1F0", 16, 26),
        ("1B0", 26, 42),
    ]
    busy = fpipe.Schedule.parse("[0F0, 0F1]\n[1F0, 1F1]").simulate(price)
    assert [span.start for span in busy] == [0, 10 + 1, 16, 26 + 2], (
        "sending and receiving take their rank's time"
    )
    one_rank = fpipe.Schedule.parse("[0F0, 1F0, 1B0, 0B0]").simulate(price)
    assert one_rank.total == 10 + 10 + 16 + 16, "nothing is sent within a rank"


def test_how_a_rank_spent_its_time():
    found = shares(BY_HAND[0])
    assert found == {"programs": 26, "sending": 1, "posting": 0.5, "waiting": 42, "between": 0.5}


def ran(rank: int, start: float, computes: float, pause: float = 0.0) -> Run:
    """A rank that computes, pauses, and waits until 10."""
    then = start + computes + pause
    did_so = did("F", f"{rank}F0", start, start + computes), did("WAIT", "", then, 10)
    return Run(rank, did_so, (Action(rank, "F", 0),))


def late(steps: list[tuple[Run, ...]]) -> dict[str, float]:
    """What keeps others waiting in steps of 10, of which 9 are simulated, and how much it saves."""
    every = {text: share for share, text in delays(steps, 9.0)}
    for text, share in every.items():
        assert text.endswith(
            f"the mean of the other ranks. That saves at most {share:.0%} of a step."
        )
    return {text.partition(" than")[0]: round(share, 2) for text, share in every.items() if share}


LATE = "Shorten what rank 1 does before a step: its first instruction is 2 s later"
SLOW = "Shorten what rank 0 does between its instructions: it takes 1000 ms longer"
DELAYS = [
    (((0, 4, 0), (0, 4, 0)), {}),
    (((0, 4, 0), (2, 4, 0)), {LATE: 0.1}),
    (((0, 4, 1), (0, 4, 0)), {SLOW: 0.1}),
]


@pytest.mark.parametrize(("times", "expected"), DELAYS)
def test_what_keeps_others_waiting_is_named(
    times: tuple[tuple[float, ...], ...], expected: dict[str, float]
):
    runs = tuple(ran(rank, *each) for rank, each in enumerate(times))
    assert late([runs] * 3) == expected
    usual = ran(0, 0, 4), ran(1, 0, 4)
    assert late([*[runs] * 4, usual]) == expected


def test_a_rank_that_is_late_in_some_steps_is_not_named():
    slow, even = (ran(0, 0, 4), ran(1, 2, 4)), (ran(0, 0, 4), ran(1, 0, 4))
    assert late([slow, slow, slow, even, even]) == {}


def test_what_a_rank_gathers_for_the_profile_is_no_delay():
    """The rank that left the gathering of a step last was to do less before the next one."""
    runs = ran(0, 0, 4)._replace(free=-2), ran(1, 2, 4)._replace(free=0)
    assert late([runs]) == {}


def test_times_that_vary_give_no_advice():
    """Three runs of one program on a busy machine gave three pieces of advice."""
    even = ran(0, 0, 4), ran(1, 0, 4)
    quick = ran(0, 6, 2), ran(1, 6, 2)
    vary = "times vary, as with other programs or too few cores. Measure again."
    assert (
        varies([even, even, quick], 10, 9)
        == f"A step took 4 s to 10 s, in the simulation 9 s: {vary}"
    )
    assert varies([even], 19, 9) == f"A step took 10 s, in the simulation 9 s: {vary}"
    assert varies([even], 18, 9) == ""
    assert varies([(ran(0, 0, 4), ran(1, 2, 4))], 19, 9) == "", "its delay is the difference"


# ---- a step on processes ----
@pytest.fixture(scope="module")
def on_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("naps")
    first, second = fpipe.launch(sleeping_stages.measured, 3, str(folder), ranks=2, timeout=100)
    assert first["same"] and second["same"]
    assert first["timeline"] == second["timeline"], "every rank has the whole picture"
    return first, folder


@pytest.mark.xdist_group("profiling")
def test_measured_on_processes_by_one_clock(on_processes: tuple[dict[str, Any], Path]):
    line = on_processes[0]["timeline"]
    assert [list(map(str, row)) for row in line.rows] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]
    end = {str(span.action): span.end for span in line}
    start = {str(span.action): span.start for span in line}
    for maker, user in (("0F0", "1F0"), ("0F1", "1F1"), ("0F2", "1F2")):
        assert end[maker] <= start[user], f"{user} started before {maker} was over"
    for maker, user in (
        ("1B0", "0B0"),
        ("1B2", "0B2"),
    ):  # a gradient is sent, and only then added up
        assert start[maker] + 4 * sleeping_stages.UNIT <= start[user], (
            f"{user} started before {maker} was over"
        )
    assert line.total > 0.9 * sleeping_stages.UNIT * (1 + 3 * (2 + 4) + 2), (
        "all naps of the critical path"
    )


@pytest.mark.xdist_group("profiling")
def test_simulated_comes_out_as_measured(on_processes: tuple[dict[str, Any], Path]):
    found = on_processes[0]
    assert found["simulated"].total == pytest.approx(found["timeline"].total, rel=0.15)
    for price, lines in (
        (found["costs"], [found["timeline"]]),
        (found["measured"], found["whole and split"]),
    ):
        for op, units in (("F", (1, 2)), ("B", (2, 4))):
            for stage, unit in enumerate(units):
                times = [
                    s.end - s.start
                    for line in lines
                    for s in line
                    if (s.action.op, s.action.stage) == (op, stage)
                ]
                assert getattr(price, op)[stage] == pytest.approx(median(times), rel=1e-3), (
                    op,
                    stage,
                )
                assert min(times) >= unit * sleeping_stages.UNIT, (op, stage)
    again = fpipe.make_schedule("1F1B", 2, 3).simulate(found["measured"]).total
    assert again == pytest.approx(found["whole and split"][0].total, rel=0.2)
    assert Costs.from_json(found["measured"].to_json()) == found["measured"]
    text = found["text"]
    assert max(map(len, text.splitlines())) <= 80
    first, named, *rest = (" ".join(part.split()) for part in text.split("\n\n"))
    figures = r"measured: [\d.]+ ms, bubble [\d.]+%.* simulated: [\d.]+ ms, bubble [\d.]+%, by"
    assert re.match(f".*profiled: one step {figures} median times of", first)
    assert any("waiting: for messages that have not arrived" in part for part in rest)
    words = (
        r"What to change first 1\. Split stage 1 of rank 1 \([\d.]+ times the mean work\), for "
        r"which the others wait, and move a part of it to rank 0 \(.* An even split saves at most "
        r"[\d.]+% of a step\. cuts = fpipe\.balance\(parts, 2, pipe\.schedule\(3\)\)\."
    )
    assert re.match(words, named)


@pytest.mark.xdist_group("profiling")
def test_pictures_show_one_over_the_other(on_processes: tuple[dict[str, Any], Path]):
    page = (on_processes[1] / "naps.html").read_text(encoding="utf-8")
    assert "naps, simulated" in page and "naps, measured" in page
    assert "Split stage 1 of rank 1" in page, "what to mend is in the file that is sent to others"
    trace = on_processes[1] / "naps.json"
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["naps, measured", "naps, simulated"]


# ---- in one process ----
def small(microbatches: int = 4, name: str = "ZBV") -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    pipe = fpipe.pipeline(
        [lambda p, x: torch.tanh(x @ p)] * 4,
        name,
        loss=lambda y: y.square().mean(),
        microbatches=microbatches,
        group=fpipe.local(2),
    )
    return pipe, [torch.eye(3)] * 4, torch.ones(microbatches, 3)


@pytest.mark.parametrize(
    ("in_turn", "drawn"),
    [
        (False, ["small, measured", "small, simulated"]),
        (True, ["small, simulated, ranks at once"]),
    ],
)
def test_a_profile_is_plotted_with_its_simulation_below(in_turn: bool, drawn: list[str]):
    """Ranks that ran in turn waited for the turns of others: only their simulation is drawn."""
    pipe, params, x = small()
    step = fpipe.profile(fpipe.value_and_grad(pipe), name="small")
    step(params, x)
    assert step.in_turn
    step.in_turn = in_turn
    axes = step.plot(Figure(figsize=(8, 6)).subplots(), "light")
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["rank 0", "rank 1"] * len(drawn)
    titles = [text.get_text() for text in axes.texts if text.get_weight() == "bold"]
    assert [title.partition(":")[0] for title in titles] == drawn


@pytest.mark.parametrize(("limit", "said"), [(1, True), (2, False)])
def test_a_profile_says_that_processes_share_cores(
    limit: int, said: bool, monkeypatch: pytest.MonkeyPatch
):
    """Actions that waited for a core looked like slow ones, and a rank that got a core late was to
    do less before a step.
    """
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("fpipe.passes.profile.profiling.cores", lambda: limit)
    pipe, params, x = small()
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    step(params, x)
    words = "\n2 processes share 1 core of this machine: measured times include waits for a core."
    assert (words in str(step).replace("\n  ", " ")) == said
    step.in_turn = False
    first, second = step.runs[0]
    later = [event._replace(start=event.start + 9, end=event.end + 9) for event in second.events]
    step.runs[0] = first, second._replace(events=tuple(later))
    assert ("rank 1 does before a step" in str(step)) != said


def test_ranks_in_turn_are_simulated_as_if_they_ran_at_once(monkeypatch: pytest.MonkeyPatch):
    """The time in which others run is no time of messages: a slow stage is no slow link."""
    monkeypatch.setattr(sleeping_stages, "UNIT", 0.01)
    pipe = fpipe.pipeline(
        [sleeping_stages.short] * 4,
        "GPipe",
        loss=sleeping_stages.loss,
        microbatches=4,
        group=fpipe.local(4),
        engine="eager",
    )
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    arguments = [torch.ones(())] * 4, torch.ones(4)
    for _ in range(3):  # the median step has no action that waited for a core
        step(*arguments)
    assert step.costs.comm == 0
    busy = sum(step.timeline.busy)
    at_once = fpipe.make_schedule("GPipe", 4, 4).simulate().total / 48  # of all work
    assert step.simulated.total == pytest.approx(at_once * busy, rel=0.25)
    took = (
        f"\nmeasured: {1e3 * step.timeline.total:.4g} ms, one rank after the other in this process"
    )
    assert took in str(step)
    assert fpipe.measure_costs(pipe, *arguments, steps=1).comm == 0


def test_advice_names_calls_of_this_pipeline():
    """Slices of sequences were counted as microbatches."""
    last = lambda p, x: sum(torch.tanh(x @ p) for _ in range(40))
    pipe = fpipe.pipeline(
        [lambda p, x: x * p.sum(), last],
        "Seq1F1B",
        loss=lambda y: y.square().mean(),
        microbatches=4,
        slices=2,
        group=fpipe.local(2),
        engine="eager",
    )
    arguments = [torch.eye(64)] * 2, torch.ones(4, 64, 64)
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    for _ in range(3):
        step(*arguments)
    (call,) = re.findall(r"fpipe\.balance\(.*\)\.cuts", str(step))
    assert call == "fpipe.balance(parts, 2, pipe.schedule(4)).cuts"
    assert eval(call, {"fpipe": fpipe, "pipe": pipe, "parts": [1, 2, 2]}) == (2,)


def test_of_one_rank_a_profile_has_no_advice():
    pipe = fpipe.pipeline([torch.mul], loss=lambda y: y.sum(), microbatches=2, group=fpipe.local(1))
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    step([torch.ones(())], torch.ones(4))
    assert "What to change" not in str(step) + step._repr_html_()


def test_times_to_compare_have_one_unit():
    """A step of 13.63 ms was simulated to take 375.6 us."""
    pipe, params, x = small()
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    step(params, x)
    step.in_turn = False
    first, second = step.runs[0]
    *events, last = first.events
    late = last._replace(start=last.start + 5, end=last.end + 5)
    step.runs[0] = first._replace(events=(*events, late)), second
    text = str(step)
    assert re.findall(r"\n\w*ed: [\d.]+ (\w*s)\b", text) == ["s", "s"]


def test_a_profiled_step_has_the_same_bits_and_leaves_nothing_behind():
    pipe, params, x = small()
    step = fpipe.value_and_grad(pipe)
    loss, grads = step(params, x)
    profiled = fpipe.profile(step)
    again, others = profiled(params, x)
    assert torch.equal(loss, again) and all(map(torch.equal, grads, others))
    assert WATCH.get() is None
    step(params, x)
    assert len(profiled.runs) == 1, "an unprofiled call is not recorded"
    assert {str(action) for row in profiled.timeline.rows for action in row} == {
        str(action) for row in pipe.schedule(4) for action in row
    }


def test_with_works_too_and_an_error_ends_the_recording():
    """After an error nothing is gathered: the other ranks may not reach the collective."""
    pipe, params, x = small()
    step = fpipe.value_and_grad(pipe)
    with fpipe.profile(name="two") as profiled:
        step(params, x)
        pipe(params, x)  # forward alone: another plan
    assert [len(profiled.runs), profiled.timeline.name] == [
        2,
        "two, measured",
    ]

    def then_fails() -> None:
        step(params, x)
        raise ValueError("after the step")

    with pytest.raises(ValueError, match="after the step"), profiled:
        then_fails()
    assert WATCH.get() is None and len(profiled.runs) == 2
    with pytest.raises(FpipeError, match="no step to call"):
        profiled(params, x)
    with pytest.raises(FpipeError, match="nothing was profiled"):
        _ = fpipe.profile(step).timeline


def test_both_phases_of_vjp_are_one_run():
    pipe = fpipe.pipeline([lambda p, x: x * p] * 2, "1F1B", microbatches=2, group=fpipe.local(2))
    with fpipe.profile() as profiled:
        y, pullback = fpipe.vjp(pipe, [torch.ones(())] * 2, torch.ones(2))
        pullback(torch.ones_like(y))
    assert len(profiled.runs) == 1
    assert [str(action) for action in profiled.timeline.rows[0]] == ["0F0", "0F1", "0B0", "0B1"]


def test_on_fake_ranks_each_has_the_whole_picture():
    def program(group: Any) -> tuple[float, list[float]]:
        pipe = fpipe.pipeline(
            [lambda p, x: x * p] * 3, loss=lambda y: y.sum(), microbatches=2, group=group
        )
        profiled = fpipe.profile(fpipe.value_and_grad(pipe))
        profiled(pipe.place([torch.ones(())] * 3), torch.ones(2))
        assert profiled.timeline.ranks == 3
        return profiled.timeline.total, differences(group)

    for order in ("buffered", "lockstep"):
        results = fpipe.testing.run(program, 3, order=order)
        assert len({total for total, _ in results}) == 1
        assert results[0][1] == [0.0, 0.0, 0.0], "threads of one process have one clock"


class Far:
    """A group of two whose other rank is on a machine whose clock is 5 s ahead."""

    size, here = 2, (0,)

    def __init__(self, theirs: list[Run]):
        self.theirs = theirs
        self.met = 0  # how often they waited for each other

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def send(self, *message: Any) -> Done:
        return Done()

    def recv(self, *message: Any) -> Done:
        return Done(
            (torch.tensor([time.perf_counter() + 5], dtype=torch.float64).view(torch.uint8),)
        )

    def barrier(self) -> None:
        self.met += 1

    def flush(self) -> None: ...

    def gather_objects(self, mine: Any) -> list[Any]:
        return [mine, ([0.0, 0.0], {1: self.theirs})]


def test_clocks_of_other_machines_are_set_right():
    moved = tuple(
        each._replace(start=each.start + 5, end=each.end + 5) for each in BY_HAND[1].events
    )
    far = Far([Run(1, moved, ())])
    ((mine, theirs),) = gathered(far, {0: [BY_HAND[0]]})  # type: ignore[arg-type]
    assert far.met == 2, "before and after: the next step begins at once on all ranks"
    assert mine == BY_HAND[0]
    assert [each.start for each in theirs.events] == pytest.approx(
        [each.start for each in BY_HAND[1].events], abs=0.01
    )
    assert [each.end for each in theirs.events] == pytest.approx(
        [each.end for each in BY_HAND[1].events], abs=0.01
    )


def test_ranks_that_ran_differently_are_reported():
    with pytest.raises(FpipeError, match=r"a different number of times .*rank 0: 1, rank 1: 2"):
        gathered(Far([BY_HAND[1]] * 2), {0: [BY_HAND[0]]})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", fpipe.schedule_names())
def test_costs_of_any_schedule(name: str):
    """Whole and split, every schedule stays one that can be checked, and its costs can be
    measured.
    """
    try:
        schedule = fpipe.make_schedule(name, 2, 4)
    except FpipeError:
        schedule = fpipe.make_schedule(name, 4, 4)
    whole(schedule).check()
    split(schedule).check()
    assert {a.op for row in whole(schedule) for a in row} == {"F", "B"}
    assert {a.op for row in split(schedule) for a in row} == {"F", "I", "W"}


def test_measure_costs():
    pipe, params, x = small()
    price = fpipe.measure_costs(pipe, params, x, steps=2)
    assert all(len(getattr(price, op)) == 4 for op in "FIWB") and min(price.F) > 0 < min(price.W)
    own = fpipe.trace(lambda p, x: torch.tanh(x @ p), params[0], x[:1])
    assert price.saved[1] == own.saved_bytes and price.kept[1] == own.kept_bytes  # type: ignore[index]
    with pytest.raises(StageError, match="no loss"):
        fpipe.measure_costs(fpipe.pipeline([lambda p, x: x], group=fpipe.local(1)), [()], x)


def test_a_pipeline_under_another_schedule():
    pipe, params, x = small()
    other = pipe.under(split(pipe.schedule(4)))
    assert torch.equal(other(params, x), pipe(params, x)) and other.cache is not pipe.cache
    with pytest.raises(StageError, match="on other ranks"):
        pipe.under(fpipe.make_schedule("Interleaved1F1B", 2, 4))


@pytest.mark.parametrize(("name", "kinds"), [("1F1B", "F B"), ("ZBH1", "F I W")])
def test_a_profile_lists_the_kinds_that_ran(name: str, kinds: str):
    pipe = fpipe.pipeline(
        [lambda p, x: x * p] * 2, name, loss=lambda y: y.sum(), microbatches=2, group=fpipe.local(2)
    )
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    assert repr(step) == "Profile(of no step yet)"
    step([torch.ones(())] * 2, torch.ones(4))
    head = next(line for line in str(step).splitlines() if line.startswith("stage "))
    assert head.split() == ["stage", *kinds.split()]
    assert ("\n-: none" in str(step)) == (name == "ZBH1"), "stage 0 has no I"
    assert repr(step).startswith(f"Profile({name}, profiled: one step; simulated, ranks at once: ")


def test_a_profile_shows_what_preparation_took():
    pipe = fpipe.pipeline(
        [lambda p, x: x * p] * 2, loss=lambda y: y.sum(), microbatches=2, group=fpipe.local(2)
    )
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    arguments = [torch.ones(())] * 2, torch.ones(4)
    step(*arguments)
    assert "Preparation, in this process: tracing" in str(step)
    assert step.prepared.traces == 3, "two stages and the loss"
    assert step.prepared.tracing > 0 < step.prepared.lowering
    before = step.prepared
    step(*arguments)
    assert step.prepared == before, "a warm step prepares nothing"


def test_what_an_action_sends_before_it_adds_gradients_is_not_its_own_time():
    """A backward had the time of the message that its rank sent between its program and its ADD."""
    backward = Action(1, "B", 0)
    run = Run(
        0,
        (
            Event("B", backward, 0.0, 2.0),
            Event("SEND", backward, 2.0, 10.0, peer=1, number=0),
            Event("ADD", backward, 10.0, 11.0),
        ),
        (backward,),
    )
    assert [*spans([run])] == [(0, backward, 0.0, 3.0)]
    assert shares(run)["programs"] == 3.0
