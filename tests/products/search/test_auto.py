"""``schedule="auto"``: chosen once for costs and memory, the same on all ranks, with the bits of
any other schedule.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import fpipe
from fpipe import Costs
from fpipe.errors import ScheduleError, StageError
from fpipe.products.search import auto


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SECONDS", 0.05)


def layer(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p)


def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y - t).square().mean()


def model(stages: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(stages)], torch.randn(
        8, 4, generator=generator
    )


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_the_bits_of_a_named_schedule(stages: int) -> None:
    params, x = model(stages)
    results = []
    for schedule in ("auto", "1F1B" if stages == 2 else "Interleaved1F1B"):
        pipe = fpipe.pipeline(
            [layer] * stages, schedule, loss=loss, microbatches=4, group=fpipe.local(2)
        )
        results.append(fpipe.value_and_grad(pipe)(params, x, x))
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(fpipe_leaves(result) for result in results), strict=True)
    )


def fpipe_leaves(result: tuple[torch.Tensor, list[torch.Tensor]]) -> list[torch.Tensor]:
    return [result[0], *result[1]]


@pytest.mark.parametrize("said", [None, 4])
def test_calls_may_have_other_numbers_of_microbatches(said: int | None) -> None:
    params, x = model(2)
    pipes = [
        fpipe.pipeline([layer] * 2, name, loss=loss, microbatches=said, group=fpipe.local(2))
        for name in ("auto", "1F1B")
    ]
    for number in (2, 8, 4):
        given = fpipe.Microbatches(x.chunk(number))
        one, other = (fpipe.value_and_grad(pipe)(params, given, given) for pipe in pipes)
        assert torch.equal(one[0], other[0])
    sixteen = fpipe.make_schedule("1F1B", 2, 16)
    assert pipes[1].under(sixteen).schedule(16) is not None


def test_why_says_what_was_chosen() -> None:
    params, x = model(4)
    pipe = fpipe.pipeline(
        [layer] * 4, fpipe.auto(memory="1GB"), loss=loss, microbatches=4, group=fpipe.local(2)
    )
    assert "the first call" in pipe.why
    fpipe.value_and_grad(pipe)(params, x, x)
    assert pipe.why.startswith("4 microbatches\n") and "no schedule has one below" in pipe.why
    assert "ZBVZeroBubble" in pipe.why
    other = fpipe.pipeline([layer] * 4, "ZBV", loss=loss, microbatches=4, group=fpipe.local(2))
    assert "was given" in other.why


def test_given_costs_choose_the_placement_when_it_is_built() -> None:
    costs = Costs(F=[1, 1, 1, 1], I=1, W=1)
    pipe = fpipe.pipeline(
        [layer] * 4,
        fpipe.auto(memory=4, costs=costs),
        loss=loss,
        microbatches=4,
        group=fpipe.local(2),
    )
    assert pipe.schedule(4).simulate(costs).bubble == 0 and "bubble 0.00%" in pipe.why
    params, x = model(4)
    fpipe.value_and_grad(pipe)(params, x, x)
    assert pipe.schedule(2).placement == pipe.placement


def test_less_memory_gives_a_schedule_that_holds_less() -> None:
    params, x = model(4)
    named = fpipe.pipeline(
        [layer] * 4, "LoopedBFS", loss=loss, microbatches=8, group=fpipe.local(2)
    )
    most = max(named.plan(params, x, x).peak.values())
    for share in (0.5, 0.8):
        pipe = fpipe.pipeline(
            [layer] * 4,
            fpipe.auto(memory=share * most),
            loss=loss,
            microbatches=8,
            group=fpipe.local(2),
        )
        fpipe.value_and_grad(pipe)(params, x, x)
        assert max(pipe.plan(params, x, x).peak.values()) <= share * most


def test_a_choice_whose_plans_hold_more_than_was_expected_is_made_again() -> None:
    run, figures = (
        fpipe.make_schedule("ZBV", 2, 6),
        {name: dict.fromkeys(range(4), 1.0) for name in "FIWB"},
    )
    figures |= {"saved": dict.fromkeys(range(4), 2.0), "kept": dict.fromkeys(range(4), 1.0)}
    costs, tried = auto.costs_of(figures, 4, 0.0), []

    def plans_of(schedule: fpipe.Schedule) -> SimpleNamespace:
        held = schedule.simulate(costs).peak_bytes
        tried.append(max(held))
        return SimpleNamespace(
            figures=figures,
            peak=dict(enumerate(held if schedule is run else (h + 3 for h in held))),
        )

    chosen = auto.Auto(fpipe.local(2), 4, 9.0).estimated(6, plans_of, run, 1.0)
    assert max(chosen.simulate(costs).peak_bytes) + 3 <= 9
    assert len(tried) > 2, "the first choice was taken"
    with pytest.raises(ScheduleError, match="memory"):
        auto.Auto(fpipe.local(2), 4, 4.0).estimated(6, plans_of, run, 1.0)


@pytest.mark.parametrize("share", [0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.9])
def test_plans_keep_to_the_memory_or_the_choice_is_refused(share: float) -> None:
    """What a plan holds beside activations depends on its schedule."""
    params, x = model(6)
    named = fpipe.pipeline(
        [layer] * 6, "LoopedBFS", loss=loss, microbatches=6, group=fpipe.local(2)
    )
    x = torch.cat([x, x[:4]])
    memory = share * max(named.plan(params, x, x).peak.values())
    pipe = fpipe.pipeline(
        [layer] * 6, fpipe.auto(memory=memory), loss=loss, microbatches=6, group=fpipe.local(2)
    )
    with contextlib.suppress(ScheduleError):
        fpipe.value_and_grad(pipe)(params, x, x)
        assert max(pipe.plan(params, x, x).peak.values()) <= memory


def test_too_little_memory_and_options_that_do_not_fit_are_errors() -> None:
    params, x = model(2)
    pipe = fpipe.pipeline(
        [layer] * 2, fpipe.auto(memory=100), loss=loss, microbatches=4, group=fpipe.local(2)
    )
    with pytest.raises(ScheduleError, match="memory"):
        fpipe.value_and_grad(pipe)(params, x, x)
    with pytest.raises(StageError, match="3 stages cannot be placed evenly on 2 ranks"):
        fpipe.pipeline([layer] * 3, "auto", loss=loss, microbatches=4, group=fpipe.local(2))


def _on_rank() -> tuple[str, str, float]:
    group = fpipe.init()
    params, x = model(4)
    pipe = fpipe.pipeline(
        [layer] * 4, fpipe.auto(memory="1GB"), loss=loss, microbatches=4, group=group
    )
    value, _ = fpipe.value_and_grad(pipe)(pipe.place(params), x, x)
    return pipe.schedule(4).digest, pipe.why, float(value)


def test_all_processes_run_what_rank_0_chose() -> None:
    results = fpipe.launch(_on_rank, ranks=2)
    assert results[0] == results[1]
