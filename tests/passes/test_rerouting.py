"""``pipe.rerouted``: a pipeline goes on without ranks whose stages have copies elsewhere."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fpipe
from common import layer, same, squared
from fpipe import Schedule, make_schedule, testing
from fpipe.actions.action import unfused
from fpipe.errors import FpipeError, GroupError, StageError
from fpipe.passes.rerouting import without
from sample import also

NAMES = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZB1P", "ZB2P")
LOSS: dict[str, Any] = {"loss": squared}


def arguments(stages: int, microbatches: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    params = [torch.randn(4, 4) for _ in range(stages)]
    return params, torch.randn(2 * microbatches, 4)


def of_one_process(stages: int, microbatches: int, params: Any = None) -> tuple[Any, Any]:
    """Plain autograd, microbatch after microbatch."""
    given, x = arguments(stages, microbatches)
    leaves = [p.clone().requires_grad_() for p in params or given]
    total, grads = torch.zeros(()), [torch.zeros(4, 4) for _ in leaves]
    for number, part in enumerate(x.chunk(microbatches)):
        y = part
        for p in leaves:
            y = layer(p, y)
        loss = squared(y, part) * (1 / microbatches)
        found = torch.autograd.grad(loss, leaves)
        total = loss.detach() if number == 0 else total + loss.detach()
        grads = [g if number == 0 else old + g for old, g in zip(grads, found, strict=True)]
    return total, grads


def lost_sets(schedule: Schedule) -> list[tuple[int, ...]]:
    """All sets of lost ranks after which each stage has a rank."""
    ranks = range(schedule.ranks)
    held = [set(schedule.placement.ranks_of(s)) for s in range(schedule.stages)]
    every = [c for n in range(1, schedule.ranks) for c in combinations(ranks, n)]
    return [lost for lost in every if all(ranks - set(lost) for ranks in held)]


@pytest.mark.parametrize("name", NAMES)
def test_schedules_without_ranks(name: str) -> None:
    """Every set of ranks without which each stage has a copy; ascending as before."""
    for copies in ((2, 1), (3, 2), (2, 2, 2), (1, 3, 2)):
        schedule = make_schedule(name, sum(copies), 7, replicas=copies)
        for lost in lost_sets(schedule):
            s = without(schedule, frozenset(lost)).check()
            assert s.ranks == schedule.ranks - len(lost)
            assert Schedule.parse(str(s)) == s
            for row in s:
                for op in "FBIW":
                    units = [a.microbatch for a in unfused(row) if a.op == op]
                    assert units == sorted(units)


@pytest.mark.parametrize("name", ["DualPipe", "Chimera"])
def test_schedules_in_two_directions(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    for lost in lost_sets(schedule):
        assert without(schedule, frozenset(lost)).check().ranks == 4 - len(lost)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_without_ranks(name: str) -> None:
    """Bits of one process, before and after a loss, with the same parameters."""
    params, x = arguments(2, 6)
    schedule = make_schedule(name, 4, 6, replicas=(3, 1))
    pipe = fpipe.pipeline([layer] * 2, schedule, group=fpipe.local(4), **LOSS)
    want = of_one_process(2, 6)
    assert same(fpipe.value_and_grad(pipe)(params, x, x), want)
    for lost in ([2], [0], [0, 1]):
        rest = pipe.rerouted(without=lost)
        assert rest.group.size == 4 - len(lost)
        assert same(fpipe.value_and_grad(rest)(params, x, x), want)
    again = pipe.rerouted([2]).rerouted([0])
    assert same(fpipe.value_and_grad(again)(params, x, x), want)


def test_a_pipeline_in_two_directions_goes_on() -> None:
    params, x = arguments(4, 8)
    pipe = fpipe.pipeline([layer] * 4, "DualPipe", microbatches=8, group=fpipe.local(4), **LOSS)
    value, grads = fpipe.value_and_grad(pipe.rerouted(without=[1]))(params, x, x)
    loss, want = of_one_process(4, 8)
    assert torch.equal(value, loss)
    for mine, other in zip(grads, want, strict=True):
        torch.testing.assert_close(mine, other)  # the order of sums differs


def test_any_number_of_microbatches() -> None:
    """A schedule that is a function makes one for each number."""

    def of(ranks: int, microbatches: int) -> Schedule:
        return make_schedule("1F1B", ranks, microbatches, replicas=(3, 1))

    pipe = fpipe.pipeline([layer] * 2, of, group=fpipe.local(4), **LOSS).rerouted([1])
    for microbatches in (3, 5):
        params, x = arguments(2, microbatches)
        parts = fpipe.Microbatches(list(x.chunk(microbatches)))
        got = fpipe.value_and_grad(pipe)(params, parts, parts)
        assert same(got, of_one_process(2, microbatches))


def steps(group: Any, stages: Any, count: int) -> tuple[list[float], Any, Any]:
    """Steps of gradient descent; where one fails, the others go on without rank 2."""
    params, x = arguments(2, 6)
    schedule = make_schedule("1F1B", 4, 6, replicas=(3, 1))
    pipe = fpipe.pipeline(stages, schedule, group=group, **LOSS)
    placed = pipe.place(params)
    values = []
    for _ in range(count):
        try:
            value, grads = fpipe.value_and_grad(pipe)(placed, x, x)
        except FpipeError:
            pipe = pipe.rerouted(without=[2])
            value, grads = fpipe.value_and_grad(pipe)(placed, x, x)
        values.append(float(value))
        placed = [None if g is None else p - 0.1 * g for p, g in zip(placed, grads, strict=True)]
    return values, placed, pipe.here


def trained(count: int) -> tuple[list[float], list[torch.Tensor]]:
    """The same steps in one process, with plain autograd."""
    params, _ = arguments(2, 6)
    values = []
    for _ in range(count):
        value, grads = of_one_process(2, 6, params)
        values.append(float(value))
        params = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
    return values, params


@pytest.mark.parametrize("order", ["buffered", *also("lockstep")])
def test_a_fake_rank_is_killed(order: Any) -> None:
    """Anywhere in three steps: the others train on with the bits of one process, or all of them
    learn that one of them is a step ahead."""
    values, params = trained(3)
    went_on = 0
    for number in range(4, 48, 5):
        ends = testing.outcomes(
            lambda group: steps(group, [layer] * 2, 3),
            4,
            order=order,
            seed=number,
            faults=[testing.Kill(2, number)],
        )
        rest = [end for end in ends if end.rank != 2]
        if any(end.error for end in rest):
            assert all("had ended the call in which others failed" in str(e.error) for e in rest)
            continue
        went_on += 1
        for end in rest:
            mine, placed, (stage,) = end.value
            assert mine == values
            assert torch.equal(placed[stage], params[stage])
    assert went_on >= 6


def leaves() -> Any:
    """On four processes; rank 2 raises within the second step, and its process goes on."""
    group = fpipe.init(timeout=300)
    rank = dist.get_rank()
    calls = [0]

    def first(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 4 and rank == 2:
            raise ArithmeticError("this rank ends")
        return layer(p, x)

    try:
        return steps(group, [fpipe.Stage(first, engine="eager"), layer], 4)
    except Exception:
        return None


@pytest.mark.parametrize("shared", ["1", *also("0")])
def test_processes_go_on_without_one(shared: str) -> None:
    """All of them learn of it long before ``timeout=``, over gloo too."""
    values, params = trained(4)
    env = {"FPIPE_SHARED_MEMORY": shared}
    found = fpipe.launch(leaves, ranks=4, timeout=100, env=env)
    assert found.pop(2) is None
    for mine, placed, (stage,) in found:
        assert mine == values
        assert torch.equal(placed[stage], params[stage])


# ---- mistakes ----
@pytest.mark.parametrize("lost", [[3], [0, 1, 2]])
def test_a_stage_without_a_copy(lost: list[int]) -> None:
    schedule = make_schedule("1F1B", 4, 6, replicas=(3, 1))
    pipe = fpipe.pipeline([layer] * 2, schedule, group=fpipe.local(4), **LOSS)
    with pytest.raises(StageError, match=r"is on no rank but [0-3, ]+; load a checkpoint"):
        pipe.rerouted(without=lost)


@pytest.mark.parametrize("lost", [[], [4], [-1], 2, ["2"], [True]])
def test_wrong_ranks(lost: Any) -> None:
    schedule = make_schedule("1F1B", 4, 6, replicas=(3, 1))
    pipe = fpipe.pipeline([layer] * 2, schedule, group=fpipe.local(4), **LOSS)
    with pytest.raises(StageError, match=r"give ranks between 0 and 3, as in without=\[2\]"):
        pipe.rerouted(without=lost)


def test_a_lost_rank_that_goes_on() -> None:
    schedule = make_schedule("1F1B", 4, 6, replicas=(3, 1))

    def program(group: Any) -> Any:
        return fpipe.pipeline([layer] * 2, schedule, group=group, **LOSS).rerouted(without=[2]).here

    lost = testing.outcomes(program, 4)[2]
    assert isinstance(lost.error, GroupError)
    assert "rank 2 is not one of the ranks [0, 1, 3]; only they make a group" in str(lost.error)


def test_copies_of_the_pipeline() -> None:
    schedule = make_schedule("1F1B", 4, 6, replicas=(3, 1))
    group = fpipe.local(4)
    pipe = fpipe.pipeline([layer] * 2, schedule, group=group, dp=group.dp, **LOSS)
    with pytest.raises(StageError, match=r"rerouted\(\) of a pipeline with dp="):
        pipe.rerouted(without=[2])
