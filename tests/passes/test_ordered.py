"""Stages on several ranks: gradients are added in the order of microbatches, bit for bit as in one
process that runs the unsplit model."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

import optree
import pytest
import torch

import fpipe
from fpipe import Schedule, make_schedule, testing
from fpipe.passes.sums import by_order
from models import MODELS, SEED, Model, one
from sample import covering, mostly

NAMES = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZB1P", "ZB2P")
COPIES = [c for n in (1, 2, 3, 4) for c in product((1, 2, 3, 4), repeat=n) if max(c) > 1]


def expected(model: Model, stages: int, microbatches: int) -> tuple[Any, list[list[torch.Tensor]]]:
    """Plain autograd on one microbatch after another, added in their order."""
    each = [one(model.name, stages, microbatches, k) for k in range(microbatches)]
    grads = [
        [reduce(torch.add, [k.grads[s][i] for k in each]) for i in range(len(each[0].grads[s]))]
        for s in range(stages)
    ]
    for group in model.tied(stages):
        members = [int(name.split(".")[0]) for name in group]
        total = reduce(torch.add, [grads[s][0] for s in members])
        for s in members:
            grads[s][0] = total
    return reduce(torch.add, [k.loss for k in each]), grads


def equal(got: Any, loss: Any, grads: list[list[torch.Tensor]], here: Any = None) -> None:
    value, found = got
    value = value[0] if isinstance(value, tuple) else value
    assert torch.equal(value, loss)
    for stage, want in enumerate(grads):
        if here is None or stage in here:
            for mine, other in zip(optree.tree_leaves(found[stage]), want, strict=True):
                assert mine.dtype == other.dtype
                assert torch.equal(mine, other), f"stage {stage}"


def run(model: Model, schedule: Schedule, group: Any, **options: Any) -> tuple[Any, Any]:
    stages, params, state = model.make(schedule.stages)
    x, t = model.batch(schedule.microbatches)
    pipe = fpipe.pipeline(
        stages,
        schedule,
        loss=model.loss,
        group=group,
        seed=SEED,
        tied=model.tied(schedule.stages),
        **options,
    )
    side = {} if state is None else {"state": state}
    step = fpipe.value_and_grad(pipe, has_aux=model.has_aux)
    return step(pipe.place(params), x, t, **side)


def check(name: str, copies: tuple[int, ...], microbatches: int, model: Model) -> None:
    schedule = make_schedule(name, sum(copies), microbatches, replicas=copies)
    got = run(model, schedule, fpipe.local(sum(copies)))
    equal(got, *expected(model, len(copies), microbatches))


@pytest.mark.parametrize("name", mostly(NAMES, lambda name: name not in ("1F1B", "ZBH2")))
def test_bits_are_those_of_one_process(name: str, long: bool) -> None:
    """1 to 4 copies of each of 1 to 4 stages."""
    models = ("mlp", "transformer", "tied", "moe")
    table = [(c, m, model) for c in COPIES for m in (4, 5, 7) for model in models]
    if not long:
        table = covering(table, lambda row: (len(row[0]), max(row[0]), row[1], row[2]))
    for copies, microbatches, model in table:
        check(name, copies, microbatches, MODELS[model])


def on_fakes(group: Any, name: str, copies: tuple[int, ...], model: str) -> Any:
    schedule = make_schedule(name, sum(copies), 5, replicas=copies)
    value, grads = run(MODELS[model], schedule, group)
    return value, grads, schedule.placement.stages_of(group.rank)


@pytest.mark.covering
@pytest.mark.parametrize("order", ["buffered", "lockstep"])
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks_that_only_exchange_messages(name: str, order: Any) -> None:
    """Every rank of a stage has the total; with messages that are late, and sends that block."""
    for seed, (copies, model) in enumerate([((3, 1), "mlp"), ((2, 3), "tied"), ((1, 2, 2), "moe")]):
        found = testing.run(
            lambda group, c=copies, m=model: on_fakes(group, name, c, m),
            sum(copies),
            order=order,
            seed=seed,
        )
        loss, grads = expected(MODELS[model], len(copies), 5)
        for value, mine, here in found:
            equal((value, mine), loss, grads, here)


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_sums_in_a_wider_dtype(engine: Any) -> None:
    """Three replicas of the first stage, with ``accumulate=``, against plain autograd."""
    model, schedule = MODELS["mlp"], make_schedule("ZB1P", 4, 7, replicas=(3, 1))
    got = run(model, schedule, fpipe.local(4), accumulate=torch.float64, engine=engine)
    each = [one("mlp", 2, 7, k) for k in range(7)]
    grads = [
        [reduce(torch.add, [k.grads[s][i].double() for k in each]) for i in range(3)]
        for s in range(2)
    ]
    equal(got, reduce(torch.add, [k.loss for k in each]), grads)


def test_a_leaf_that_some_microbatches_do_not_use() -> None:
    """Microbatches of two lengths; those of one length use only one of two leaves."""

    def first(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x * p["a"] * (p["b"] if len(x) == 2 else 1)

    params = [{"a": torch.tensor(1.5), "b": torch.tensor(0.3)}, torch.tensor(2.0)]
    for long_ones in ({0, 2, 3}, {4}, {1, 4}, set(range(5)), set()):
        parts = [torch.randn(2 if k in long_ones else 3) for k in range(5)]
        schedule = make_schedule("1F1B", 4, 5, replicas=(3, 1))
        pipe = fpipe.pipeline(
            [first, torch.mul], schedule, loss=torch.sum, group=fpipe.local(4), reduction="sum"
        )
        _, grads = fpipe.value_and_grad(pipe)(params, fpipe.Microbatches(parts))
        leaves = [t.clone().requires_grad_() for t in optree.tree_leaves(params)]
        total = [torch.zeros(()) for _ in leaves]
        for x in parts:
            y = torch.mul(leaves[2], first({"a": leaves[0], "b": leaves[1]}, x)).sum()
            found = torch.autograd.grad(y, leaves, allow_unused=True, materialize_grads=True)
            total = [t + g for t, g in zip(total, found, strict=True)]
        for mine, want in zip(optree.tree_leaves(grads), total, strict=True):
            assert torch.equal(mine, want)


def test_slices_of_microbatches() -> None:
    schedule = make_schedule("1F1B", 3, 4, replicas=(2, 1), slices=2)
    params, x = [torch.randn(3), torch.randn(3)], torch.randn(4, 6, 3)
    options: dict[str, Any] = {"loss": torch.sum, "reduction": "sum"}
    pipe = fpipe.pipeline([torch.mul] * 2, schedule, group=fpipe.local(3), **options)
    plain = make_schedule("1F1B", 1, 4, 2, slices=2)
    other = fpipe.pipeline([torch.mul] * 2, plain, group=fpipe.local(1), **options)
    got, want = fpipe.value_and_grad(pipe)(params, x), fpipe.value_and_grad(other)(params, x)
    equal(got, want[0], [[grad] for grad in want[1]])


def test_vjp() -> None:
    schedule = make_schedule("ZB2P", 5, 6, replicas=(2, 3))
    params, x = [torch.randn(3), torch.randn(3)], torch.randn(12, 3)
    pipe = fpipe.pipeline([torch.mul] * 2, schedule, group=fpipe.local(5))
    y, pullback = fpipe.vjp(pipe, params, x)
    grads, dx = pullback(torch.ones_like(y))
    plain = fpipe.pipeline([torch.mul] * 2, microbatches=6, group=fpipe.local(1), schedule="GPipe")
    other, back = fpipe.vjp(plain, params, x)
    want, dx_want = back(torch.ones_like(y))
    assert torch.equal(y, other)
    assert torch.equal(dx, dx_want)
    assert all(map(torch.equal, grads, want))


def test_a_gradient_is_kept_until_its_turn_and_counted() -> None:
    """The plan's peak counts the running sum and gradients that wait; sums are few messages."""
    params, x = [torch.randn(64, 64)] * 2, torch.randn(12, 64)
    schedule = make_schedule("1F1B", 4, 12, replicas=(3, 1))
    stages = [lambda p, x: torch.tanh(x @ p)] * 2
    pipe = fpipe.pipeline(stages, schedule, loss=torch.sum, group=fpipe.local(4))
    plans = pipe.plan(params, x)
    sums = [
        ins
        for rank in range(3)
        for ins in plans[rank].instructions
        if ins.kind == "SEND" and ins.op.peer < 3
    ]
    assert len(sums) == 11 + 2  # from each microbatch to the next, and the total
    assert max(plans.peak[rank] for rank in range(3)) < 4 * 64 * 64 * 4


def test_dual_pipe_keeps_a_sum_for_each_rank() -> None:
    for name in ("DualPipe", "Chimera"):
        assert by_order(make_schedule(name, 4, 8).placement) == frozenset()


def test_copies_of_the_pipeline_and_zero() -> None:
    """Two copies of a pipeline whose first stage has two replicas: whole and cut parameters."""
    for zero in (0, 1, 3):
        assert_copies(zero)


def assert_copies(zero: int) -> None:
    schedule = make_schedule("1F1B", 3, 4, replicas=(2, 1))
    params, x = [torch.randn(4), torch.randn(4)], torch.randn(16, 4)

    def work(group: Any) -> Any:
        pipe = fpipe.pipeline(
            [torch.mul] * 2,
            schedule,
            loss=torch.sum,
            group=fpipe.local(3),
            dp=fpipe.copies(group, zero=zero),
        )
        mine = x[8 * group.rank : 8 * group.rank + 8]
        value, grads = fpipe.value_and_grad(pipe)(pipe.shard(params), mine)
        return value, pipe.unshard(grads)

    for value, grads in testing.run(work, 2):
        parts = [
            fpipe.pipeline(
                [torch.mul] * 2, "GPipe", loss=torch.sum, microbatches=4, group=fpipe.local(1)
            )
            for _ in range(2)
        ]
        found = [
            fpipe.value_and_grad(pipe)(params, x[8 * k : 8 * k + 8]) for k, pipe in enumerate(parts)
        ]
        assert torch.equal(value, (found[0][0] + found[1][0]) / 2)
        for stage in range(2):
            assert torch.equal(grads[stage], (found[0][1][stage] + found[1][1][stage]) / 2)


def saved_and_streamed(group: Any, path: str) -> Any:
    """Parameters of two stages, of which the first is on three ranks."""
    schedule = make_schedule("1F1B", 4, 5, replicas=(3, 1))
    pipe = fpipe.pipeline([torch.mul] * 2, schedule, loss=torch.sum, group=group)
    params = pipe.place([torch.arange(3.0), torch.arange(4.0)])
    fpipe.save(path, pipe, params=params)
    streamed = {name: tensor.clone() for name, tensor in fpipe.stream(pipe, params)}
    return fpipe.load(path, pipe, "params"), pipe.here, streamed


def test_checkpoints_and_streams(tmp_path: Any) -> None:
    """What replicas save is there once, each of them loads it, and a pipeline without replicas."""
    path = str(tmp_path / "checkpoint")
    for loaded, here, streamed in testing.run(lambda group: saved_and_streamed(group, path), 4):
        loaded = loaded[0] if isinstance(loaded, tuple) else loaded
        for stage in here:
            assert torch.equal(loaded[stage], torch.arange(3.0 + stage))
        assert sorted(len(tensor) for tensor in streamed.values()) == [3, 4]
    plain = fpipe.pipeline([torch.mul] * 2, loss=torch.sum, group=fpipe.local(2))
    loaded = fpipe.load(path, plain, "params")
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    assert [len(p) for p in loaded] == [3, 4]
