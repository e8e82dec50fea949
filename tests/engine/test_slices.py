"""Slices of sequences with carries, beside plain autograd on the unsplit model."""

from __future__ import annotations

import random
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from common import same
from fpipe.errors import BatchError, ScheduleError, StageError
from sample import also, mostly
from schedule_table import TABLE, cases
from sliced_models import (
    MODELS,
    B,
    D,
    K,
    M,
    S,
    attention,
    batch,
    parameters,
    plain,
    random_stage,
    squared,
    stage,
)

ATTENTION = MODELS["attention"]


def pipe_of(
    stages: int, ranks: int, schedule: Any = "Seq1F1B", *, model: str = "attention", **options: Any
) -> Any:
    given = {"slices": K, "loss": squared, "microbatches": M, "group": fpipe.local(ranks)} | options
    return fpipe.pipeline([stage(model)] * stages, schedule, **given)


def check(
    pipe: Any,
    models: list[Any],
    microbatches: int = M,
    slices: int = K,
    tokens: int = S,
    seed: int = 0,
) -> None:
    """Loss, gradients and the gradient of x have the bits of plain autograd."""
    params, (x, t) = parameters(len(models), seed), batch(microbatches, tokens, seed)
    loss, (grads, dx) = fpipe.value_and_grad(pipe, argnums=(0, 1))(params, x, t)
    total, expected, dx_expected = plain(
        models, params, x, t, microbatches, slices, pipe.schedule(microbatches)
    )
    assert torch.equal(loss, total)
    assert torch.equal(dx, dx_expected)
    for got, wanted in zip(grads, expected, strict=True):
        for name in "qkvo":
            assert torch.equal(got[name], wanted.get(name, torch.zeros(D, D))), name


# ---- bits ----
@pytest.mark.parametrize("engine", ["trace", *also("eager")])
def test_the_gradient_of_the_input_alone_is_that_beside_parameters(engine: str):
    """But for last bits: docs/design/limits.md. Without slices they are the same bits."""
    params, (x, t) = parameters(1, 0), batch(M, S, 0)
    pipe = pipe_of(1, 1, engine=engine)
    loss, (_, both) = fpipe.value_and_grad(pipe, argnums=(0, 1))(params, x, t)
    alone, dx = fpipe.value_and_grad(pipe, argnums=1)(params, x, t)
    torch.testing.assert_close(dx, both, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(alone, loss, rtol=1e-5, atol=1e-7)
    assert dx.abs().max() > 1e-4


@pytest.mark.covering
@pytest.mark.parametrize(("name", "stages", "ranks"), [("SeqZBH1", 3, 1), ("Seq1F1B", 2, 2)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_bits_of_plain_autograd(
    model: str, engine: str, name: str, stages: int, ranks: int
) -> None:
    check(pipe_of(stages, ranks, name, model=model, engine=engine), [MODELS[model]] * stages)


def test_random_stages(long: bool) -> None:
    # 349: a carry was copied in the second trace of a slice alone, and had other strides than the
    # next slice expected
    for seed in range(400) if long else (349,):
        draw = random.Random(seed)
        stages, slices, microbatches = (
            draw.choice([1, 2, 2, 3]),
            draw.choice([2, 4]),
            draw.choice([1, 2, 3]),
        )
        models = [random_stage(draw) for _ in range(stages)]
        engines = [draw.choice(["trace", "eager"]) for _ in models]
        made = [
            fpipe.Stage(model.fn, carry=True, initial_carry=model.initial, engine=engine)
            for model, engine in zip(models, engines, strict=True)
        ]
        ranks = draw.choice([r for r in (1, 2, 3) if stages % r == 0])
        name = draw.choice(["Seq1F1B", "SeqZBH1", "GPipe", "ZBH1"])
        group = fpipe.local(ranks)
        pipe = fpipe.pipeline(
            made, name, slices=slices, loss=squared, microbatches=microbatches, group=group
        )
        check(pipe, models, microbatches, slices, seed=seed)


@pytest.mark.parametrize("ranks", [4, *also(1, 2)])
def test_any_number_of_ranks(ranks: int) -> None:
    check(pipe_of(4, ranks), [ATTENTION] * 4)


#: One of each kind.
SOME = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipe", "SeqZBH1")


@pytest.mark.parametrize(
    "family",
    mostly(TABLE, lambda family: family.name not in SOME),
    ids=lambda family: family.name,
)
def test_every_schedule_of_the_catalogue(family: Any, long: bool) -> None:
    ranks = (2, 4) if long else (4,) if family.replicas else (2,)
    for case in cases(ranks, (4,), name=family.name):
        for slices in (2, 4) if long else (2,):
            made = pipe_of(
                case.stages, case.ranks, case.name, model="summed", slices=slices, microbatches=4
            )
            assert made.schedule(4).slices == slices
            check(made, [MODELS["summed"]] * case.stages, 4, slices)


def test_a_growing_cache_is_attention_over_the_whole_sequence() -> None:
    params, (x, t) = parameters(2), batch()
    loss, grads = fpipe.value_and_grad(pipe_of(2, 2))(params, x, t)
    live = [{name: p.clone().requires_grad_() for name, p in each.items()} for each in params]
    y = x
    for p in live:
        y, _ = attention(p, None, y)
    whole = squared(y, t)
    whole.backward()
    assert torch.allclose(loss, whole, rtol=1e-5)
    for got, p in zip(grads, live, strict=True):
        assert all(torch.allclose(got[name], p[name].grad, rtol=1e-4, atol=1e-5) for name in "qkvo")  # type: ignore[arg-type]


def test_one_slice_is_a_whole_sequence() -> None:
    check(pipe_of(2, 2, slices=1), [ATTENTION] * 2, M, 1)


# ---- what goes in and out ----
def forwards_alone(params: list[Any], x: Tensor) -> Tensor:
    """The outputs of attention over slices, by torch alone and without gradients, for which it may
    choose another product.
    """
    rows = []
    for row in x.chunk(M):
        carries: list[Any] = [None] * len(params)
        parts = []
        for y in row.chunk(K, 1):
            for at, p in enumerate(params):
                y, carries[at] = attention(p, carries[at], y)
            parts.append(y)
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


@pytest.mark.long
def test_outputs_and_cotangents_are_joined_along_the_second_axis() -> None:
    params, (x, dy) = parameters(2), batch()
    outputs = pipe_of(2, 2, loss=None)
    y, pullback = fpipe.vjp(outputs, params, x)
    dparams, dx = pullback(dy)
    whole = pipe_of(2, 1, "GPipe", loss=None, slices=1)
    y1, pullback1 = fpipe.vjp(whole, params, x)
    dparams1, dx1 = pullback1(dy)
    close = lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert y.shape == x.shape and close(y, y1) and close(dx, dx1)
    assert torch.equal(outputs(params, x), forwards_alone(params, x))
    assert all(optree.tree_leaves(optree.tree_map(close, dparams, dparams1)))
    with pytest.raises(BatchError, match=r"where the output is \[4, 8, 4\]"):
        fpipe.vjp(outputs, params, x)[1](dy[:, :4])


def test_microbatches_that_differ_in_length() -> None:
    params, pipe = parameters(2), pipe_of(2, 2, microbatches=None)
    draw = [torch.randn(B, n, D) for n in (8, 4)]
    targets = [x + 1 for x in draw]
    loss, (_, dx) = fpipe.value_and_grad(pipe, argnums=(0, 1))(
        params, fpipe.Microbatches(draw), fpipe.Microbatches(targets)
    )
    alone = [
        fpipe.value_and_grad(pipe_of(2, 1, microbatches=1), argnums=(0, 1))(params, x, t)
        for x, t in zip(draw, targets, strict=True)
    ]
    assert torch.allclose(loss, sum(value for value, _ in alone) / 2)
    assert [part.shape for part in dx] == [x.shape for x in draw]
    assert all(
        torch.allclose(part * 2, grads[1], rtol=1e-4, atol=1e-6)
        for part, (_, grads) in zip(dx, alone, strict=True)
    )


def test_leaves_with_one_axis_go_to_every_slice_and_side_inputs_are_cut() -> None:
    seen: list[tuple[int, ...]] = []

    def gained(p: Tensor, carry: Tensor, x: Any, *, mask: Tensor, scale: float) -> Any:
        y = x["tokens"] * p * mask * scale + x["gain"][:, None] + carry
        return {"tokens": y, "gain": x["gain"]}, carry + y.sum()

    def loss(y: Any, label: Tensor) -> Tensor:
        seen.append((*y["tokens"].shape, *label.shape))
        return (y["tokens"].sum(1) * label).sum()

    def whole(p: Tensor, x: Any, label: Tensor, mask: Tensor) -> Tensor:
        total = torch.zeros(())
        for rows in range(0, 4, 2):
            carry = torch.zeros(())
            for at in range(0, 4, 2):
                cut = slice(rows, rows + 2), slice(at, at + 2)
                y = (
                    x["tokens"][cut] * p * mask[cut] * 2.0
                    + x["gain"][rows : rows + 2, None]
                    + carry
                )
                carry = carry + y.sum()
                total = total + (y.sum(1) * label[rows : rows + 2]).sum() / 4
        return total

    p, mask, label = torch.tensor(1.5), torch.rand(4, 4), torch.rand(4)
    x = {"tokens": torch.rand(4, 4), "gain": torch.rand(4)}
    pipe = fpipe.pipeline(
        [fpipe.Stage(gained, carry=True, initial_carry=torch.zeros(()))],
        "Seq1F1B",
        slices=2,
        microbatches=2,
        loss=loss,
        group=fpipe.local(1),
    )
    value, (grads, dx) = fpipe.value_and_grad(pipe, argnums=(0, 1))(
        [p], x, label, mask=mask, scale=2.0
    )
    live = [
        p.clone().requires_grad_(),
        x["tokens"].clone().requires_grad_(),
        x["gain"].clone().requires_grad_(),
    ]
    expected = whole(live[0], {"tokens": live[1], "gain": live[2]}, label, mask)
    expected.backward()
    assert set(seen) == {(2, 2, 2)}
    assert torch.allclose(value, expected) and torch.allclose(grads[0], live[0].grad)  # type: ignore[arg-type]
    assert torch.allclose(dx["tokens"], live[1].grad) and torch.allclose(dx["gain"], live[2].grad)  # type: ignore[arg-type]


def test_stages_without_carry_run_slice_by_slice() -> None:
    params, (x, t) = parameters(3), batch()
    dense = lambda p, x: torch.tanh(x @ p["q"])
    mixed = [dense, stage("attention"), dense]
    pipe = fpipe.pipeline(
        mixed, "Seq1F1B", slices=K, loss=squared, microbatches=M, group=fpipe.local(3)
    )
    one = fpipe.pipeline(
        mixed, "Seq1F1B", slices=1, loss=squared, microbatches=M, group=fpipe.local(1)
    )
    loss, grads = fpipe.value_and_grad(pipe)(params, x, t)
    expected, whole = fpipe.value_and_grad(one)(params, x, t)
    assert torch.allclose(loss, expected)
    assert all(
        torch.allclose(a[n], b[n], rtol=1e-4, atol=1e-6)
        for a, b in zip(grads, whole, strict=True)
        for n in "qkvo"
    )


# ---- options ----
def test_reductions_and_results_of_each_slice() -> None:
    params, (x, t) = parameters(2), batch()
    per_slice = lambda y, t: (squared(y, t), y.sum())
    mean = pipe_of(2, 2, loss=per_slice)
    (value, aux), _ = fpipe.value_and_grad(mean, has_aux=True)(params, x, t)
    y = pipe_of(2, 1, loss=None)(params, x)
    cut = [part for rows in y.chunk(M) for part in rows.chunk(K, 1)]
    wanted = [part for rows in t.chunk(M) for part in rows.chunk(K, 1)]
    assert len(aux) == M * K and all(
        torch.allclose(a, b.sum(), rtol=1e-4) for a, b in zip(aux, cut, strict=True)
    )
    losses = torch.stack([squared(a, b) for a, b in zip(cut, wanted, strict=True)])
    assert torch.allclose(value, losses.mean())
    assert torch.allclose(pipe_of(2, 2, reduction="sum")(params, x, t), losses.sum())
    counts = torch.arange(1.0, M * K + 1)
    weights = (
        torch.stack([c.expand(B, S // K) for c in counts]).reshape(M, K, B, S // K).transpose(1, 2)
    )
    weights = weights.reshape(M * B, S, 1).expand(-1, -1, D).contiguous()
    weighted = pipe_of(
        2, 2, loss=lambda y, t, w: squared(y, t), reduction=fpipe.weighted(lambda t, w: w.mean())
    )
    assert torch.allclose(weighted(params, x, t, weights), (losses * counts).sum() / counts.sum())
    numbers: list[str] = []
    step = fpipe.value_and_grad(
        pipe_of(2, 2), each=lambda n, y, loss: numbers.append(f"{n} {n:d}") or loss
    )
    (_, each), _ = step(params, x, t)
    assert numbers == [f"{m}.{s} {m * K + s}" for m in range(M) for s in range(K)]
    assert torch.allclose(torch.stack(each), losses)


def test_draws_depend_on_seed_stage_microbatch_and_slice_alone() -> None:
    def noisy(p: Any, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.dropout(x @ p["q"], 0.5) + carry
        return y, y.mean()

    params, (x, t) = parameters(2), batch()
    make = lambda ranks, schedule, **more: fpipe.pipeline(
        [fpipe.Stage(noisy, carry=True, initial_carry=torch.zeros(()))] * 2,
        schedule,
        slices=K,
        microbatches=M,
        seed=3,
        group=fpipe.local(ranks),
        **more,
    )
    first = fpipe.value_and_grad(make(2, "Seq1F1B", loss=squared))(params, x, t)
    for ranks, name in ((1, "GPipe"), (2, "ZBH1")):
        value, grads = fpipe.value_and_grad(make(ranks, name, loss=squared))(params, x, t)
        assert torch.equal(value, first[0])
        assert all(
            torch.allclose(g[n], f[n]) for g, f in zip(grads, first[1], strict=True) for n in "qkvo"
        )
    alone = fpipe.Stage(
        lambda p, c, x: (torch.nn.functional.dropout(x, 0.5), c), carry=True, initial_carry=None
    )
    options: dict[str, Any] = {"slices": K, "microbatches": M, "seed": 3}
    masks = fpipe.pipeline([alone], "GPipe", group=fpipe.local(1), **options)(
        [None], torch.ones(B * M, S, D)
    )
    parts = [part for rows in masks.chunk(M) for part in rows.chunk(K, 1)]
    assert not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


def test_state_goes_from_slice_to_slice_and_on_to_the_next_microbatch() -> None:
    def counting(p: Any, state: Tensor, carry: Tensor, x: Tensor) -> Any:
        return x @ p["q"] + carry, carry + 1, x.mean(), state + carry

    params, (x, t) = parameters(2), batch()
    made = fpipe.Stage(
        counting,
        carry=True,
        initial_carry=torch.zeros(()),
        state=True,
        initial_state=torch.zeros(()),
        aux_loss=True,
    )
    pipe = fpipe.pipeline(
        [made] * 2, "Seq1F1B", slices=K, loss=squared, microbatches=M, group=fpipe.local(2)
    )
    (loss, state), _ = fpipe.value_and_grad(pipe)(
        params, x, t, state=[torch.zeros(()), torch.ones(())]
    )
    assert [s.item() for s in state] == [M * sum(range(K)), M * sum(range(K)) + 1]
    plain_loss = fpipe.pipeline(
        [
            fpipe.Stage(
                lambda p, c, x: (x @ p["q"] + c, c + 1), carry=True, initial_carry=torch.zeros(())
            )
        ]
        * 2,
        "GPipe",
        slices=K,
        loss=squared,
        microbatches=M,
        group=fpipe.local(1),
    )(params, x, t)
    assert loss > plain_loss or loss < plain_loss  # the auxiliary losses join it


@pytest.mark.long
def test_remat_frozen_tied_and_accumulate() -> None:
    params, (x, t) = parameters(2), batch()
    params[1]["o"] = params[0]["o"].clone()
    options: dict[str, Any] = {"slices": K, "loss": squared, "microbatches": M}
    run = lambda stages, **more: fpipe.value_and_grad(
        fpipe.pipeline(stages, "Seq1F1B", group=fpipe.local(2), **options, **more)
    )(params, x, t)
    carrying = lambda fn, **more: [fpipe.Stage(fn, carry=True, initial_carry=None, **more)] * 2
    loss, grads = run(carrying(attention))
    for engine in ("trace", "eager"):
        again = run(carrying(fpipe.remat(attention), engine=engine))
        assert same(again, (loss, grads))
    _, frozen = run(carrying(attention), frozen=["0.*", "1.q"])
    assert frozen[0] == dict.fromkeys("qkvo") and frozen[1]["q"] is None
    # torch may choose other products where fewer parameters require a gradient
    _, on_autograd = run(carrying(attention, engine="eager"), frozen=["0.*", "1.q"])
    assert torch.equal(frozen[1]["k"], on_autograd[1]["k"])
    assert torch.allclose(frozen[1]["k"], grads[1]["k"], rtol=1e-4, atol=1e-6)
    _, tied = run(carrying(attention), tied=[("0.o", "1.o")])
    assert torch.equal(tied[0]["o"], tied[1]["o"]) and torch.allclose(
        tied[0]["o"], grads[0]["o"] + grads[1]["o"]
    )
    _, wide = run(carrying(attention), accumulate=torch.float64)
    assert wide[0]["q"].dtype == torch.float64 and torch.allclose(
        wide[0]["q"].float(), grads[0]["q"], rtol=1e-4
    )


@pytest.mark.long
def test_a_new_length_is_not_traced_again_and_again() -> None:
    times: list[int] = []

    def counted(p: Any, carry: Any, x: Tensor) -> Any:
        times.append(x.shape[1])
        return attention(p, carry, x)

    params = parameters(1)
    pipe = fpipe.pipeline(
        [fpipe.Stage(counted, carry=True, initial_carry=None)],
        "Seq1F1B",
        slices=4,
        loss=squared,
        microbatches=1,
        group=fpipe.local(1),
    )
    step = fpipe.value_and_grad(pipe)
    for tokens in (8, 12, 16):
        step(params, *batch(1, tokens))
    before = len(times)
    for tokens in (20, 24, 40):
        step(params, *batch(1, tokens))
    assert len(times) == before
    check(pipe, [ATTENTION], 1, 4, tokens=24)


def test_seq_1f1b_holds_less() -> None:
    params, (x, t) = parameters(2), batch(8, 16)

    def peak(name: str, slices: int) -> int:
        stages = [stage("recurrent", dynamic=False)] * 2
        pipe = fpipe.pipeline(
            stages, name, slices=slices, loss=squared, microbatches=8, group=fpipe.local(2)
        )
        return max(pipe.plan(params, x, t).peak.values())

    assert peak("Seq1F1B", 4) < 0.75 * peak("1F1B", 1)


def test_a_schedule_brings_its_slices(tmp_path: Any) -> None:
    schedule = fpipe.make_schedule("Seq1F1B", 2, M, slices=K)
    check(pipe_of(2, 2, schedule, slices=None), [ATTENTION] * 2)
    schedule.to_csv(tmp_path / "plan.csv")
    check(pipe_of(2, 2, str(tmp_path / "plan.csv"), slices=None), [ATTENTION] * 2)
    made = lambda ranks, microbatches: fpipe.make_schedule("SeqZBH1", ranks, microbatches, slices=K)
    check(pipe_of(2, 2, made, slices=K), [ATTENTION] * 2)


def test_inside_a_torch_func_transform() -> None:
    params, (x, t) = parameters(2), batch()
    pipe = pipe_of(2, 2)
    with pytest.raises(StageError, match="with slices or carries are not defined"):
        torch.func.grad(lambda p: pipe(p, x, t))(params)


def test_costs_are_those_of_whole_microbatches() -> None:
    params, (x, t) = parameters(2), batch()
    measured = fpipe.measure_costs(pipe_of(2, 2), params, x, t)
    whole, cut = (fpipe.make_schedule("Seq1F1B", 2, M, slices=k).simulate(measured) for k in (1, K))
    assert sum(cut.busy) == pytest.approx(sum(whole.busy))

    def of_measured() -> float:
        """The work of a step as it is simulated with its median times, as a share of its own."""
        with fpipe.profile() as profile:
            fpipe.value_and_grad(pipe_of(2, 2))(params, x, t)
        return sum(profile.simulated.busy) / sum(profile.timeline.busy)

    # a step that another program held up took longer than its medians say
    assert any(0.5 < of_measured() < 1.5 for _ in range(20))
    figures = pipe_of(2, 2).plan(params, x, t).figures
    assert set(figures["F"]) == {0, 1}


# ---- several processes ----
def on_a_rank(group: Any = None) -> Any:
    params, (x, t) = parameters(4), batch()
    pipe = fpipe.pipeline(
        [stage("attention")] * 4, "Seq1F1B", slices=K, loss=squared, microbatches=M, group=group
    )
    loss, grads = fpipe.value_and_grad(pipe)(pipe.place(params), x, t)
    return loss, [grads[s] for s in pipe.here]


@pytest.mark.parametrize("order", ["lockstep", "buffered"])
def test_on_fake_ranks(order: Any) -> None:
    _equal_to_one_process(fpipe.testing.run(on_a_rank, ranks=2, order=order, seed=0))


def test_stages_and_arguments_that_are_elsewhere() -> None:
    def rank(group: Any) -> Tensor:
        first, (x, t) = group.here[0] == 0, batch()
        there = fpipe.Stage.elsewhere()
        stages = [stage("attention"), there] if first else [there, stage("attention")]
        pipe = fpipe.pipeline(
            stages, "Seq1F1B", slices=K, loss=squared, microbatches=M, group=group
        )
        elsewhere = fpipe.elsewhere()
        return pipe(pipe.place(parameters(2)), x if first else elsewhere, elsewhere if first else t)

    expected = pipe_of(2, 1)(parameters(2), *batch())
    assert all(
        torch.equal(loss, expected)
        for loss in fpipe.testing.run(rank, ranks=2, order="buffered", seed=0)
    )


def test_a_carry_that_lacks_its_gradient_once_another_process_traced_again() -> None:
    """The next stage returns its input twice, so it is traced again, and only then is it known that
    nothing uses the gradient of the carry, which is the output.
    """
    unread = lambda p, carry, x: (x * p, x * p)
    twice = lambda p, x: {"a": x, "b": x}
    stages = [fpipe.Stage(unread, carry=True, initial_carry=torch.ones_like), twice]
    loss = lambda y, t: squared(y["a"], t) + squared(y["b"], t)

    def rank(group: Any) -> Any:
        pipe = fpipe.pipeline(stages, "GPipe", slices=2, loss=loss, microbatches=M, group=group)
        return fpipe.value_and_grad(pipe)(pipe.place([torch.ones(D), None]), *batch())

    (_, grads), _ = fpipe.testing.run(rank, ranks=2)
    assert same(grads, rank(fpipe.local(2))[1])


def test_ranks_that_disagree_about_slices() -> None:
    def rank(group: Any) -> Any:
        stages, slices = [stage("attention")] * 2, 2 + 2 * group.here[0]
        pipe = fpipe.pipeline(
            stages, "Seq1F1B", slices=slices, loss=squared, microbatches=M, group=group
        )
        return pipe(pipe.place(parameters(2)), *batch())

    with pytest.raises(
        fpipe.errors.MismatchError, match="disagree about slices: rank 0 has 2, rank 1 has 4"
    ):
        fpipe.testing.run(rank, ranks=2, order="buffered", seed=0)


def test_a_pullback_that_is_called_twice() -> None:
    params, (x, dy) = parameters(2), batch()
    _, pullback = fpipe.vjp(pipe_of(2, 2, loss=None), params, x)
    assert same(pullback(dy, retain=True), pullback(dy))


def test_copies_of_a_pipeline() -> None:
    params, (x, t) = parameters(2), batch()
    expected = fpipe.value_and_grad(pipe_of(2, 1))(params, x, t)

    def copy(group: Any) -> Any:
        pipe, rows = (
            pipe_of(
                2,
                2,
                microbatches=1,
                dp=fpipe.copies(group, zero=3),
            ),
            slice(B * group.here[0], B * (group.here[0] + 1)),
        )
        loss, grads = fpipe.value_and_grad(pipe)(pipe.shard(params), x[rows], t[rows])
        return loss, pipe.unshard(grads)

    for loss, grads in fpipe.testing.run(copy, ranks=M, order="buffered", seed=0):
        assert torch.allclose(loss, expected[0])
        assert all(
            torch.allclose(a[n], b[n], rtol=1e-4, atol=1e-6)
            for a, b in zip(grads, expected[1], strict=True)
            for n in "qkvo"
        )


def test_on_processes() -> None:
    _equal_to_one_process(fpipe.launch(on_a_rank, ranks=2, timeout=100))


def _equal_to_one_process(found: Any) -> None:
    loss, grads = on_a_rank(fpipe.local(1))
    assert all(torch.equal(value, loss) for value, _ in found)
    assert same([part for _, parts in found for part in parts], grads)


# ---- errors ----
def test_lengths_that_slices_do_not_divide() -> None:
    params, (x, t) = parameters(2), batch(tokens=6)
    with pytest.raises(
        BatchError,
        match=r"x is a tensor of shape \[4, 6, 4\], and 4 slices do not divide the 6 "
        r".* pad it to 8",
    ):
        pipe_of(2, 2)(params, x, t)
    with pytest.raises(BatchError, match=r"x\[1\] has the leaf 'a\.0'"):
        pipe_of(2, 2, microbatches=None)(
            params,
            fpipe.Microbatches([{"a": [x[:, :4]]}, {"a": [x]}]),
            fpipe.Microbatches([t[:, :4]] * 2),
        )


def test_x_without_a_sequence() -> None:
    with pytest.raises(BatchError, match="slices=4, but no tensor of x has a second axis"):
        pipe_of(1, 1)(parameters(1), torch.ones(4), torch.ones(4))


WRONG = [
    (
        lambda: pipe_of(2, 2, fpipe.make_schedule("1F1B", 2, M)),
        StageError,
        r"slices=4, but the schedule has 1 slice a",
    ),
    (
        lambda: pipe_of(2, 2, fpipe.make_schedule("Seq1F1B", 2, M, slices=2)),
        StageError,
        "give slices=2",
    ),
    (lambda: pipe_of(2, 2, slices=0), StageError, "slices=0; give a number of slices"),
    (lambda: pipe_of(2, 2, slices=True), StageError, "slices=True; give a number"),
    (lambda: pipe_of(2, 2, "auto"), StageError, 'slices=4 with schedule="auto"'),
    (
        lambda: fpipe.pipeline([fpipe.Stage(attention, carry=True)], group=fpipe.local(1)),
        StageError,
        r"stage 0 \(attention\) has carry=True without initial_carry=",
    ),
    (
        lambda: fpipe.pipeline([fpipe.Stage(attention, initial_carry=0)], group=fpipe.local(1)),
        StageError,
        "has initial_carry= without carry=True",
    ),
    (
        lambda: fpipe.pipeline(
            [fpipe.Stage(attention, carry=True, initial_carry=torch.ones(1, requires_grad=True))],
            group=fpipe.local(1),
        ),
        StageError,
        "requires a gradient",
    ),
    (
        lambda: pipe_of(1, 1, loss=fpipe.Stage(squared, carry=True, initial_carry=0)),
        StageError,
        "the loss has carry=",
    ),
    (
        lambda: fpipe.trace(stage("attention"), parameters(1)[0], batch()[0]),
        StageError,
        "stage attention has a carry",
    ),
    (
        lambda: fpipe.per_example(pipe_of(1, 1)),
        StageError,
        "a norm per example of a pipeline with slices",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), WRONG, ids=lambda each: each if isinstance(each, str) else ""
)
def test_mistakes(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().schedule(M)


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_a_function_that_returns_no_carry(engine: Any) -> None:
    for fn, what in ((lambda p, c, x: x, "a Tensor"), (lambda p, c, x: (x, c, c), "a tuple of 3")):
        pipe = fpipe.pipeline(
            [fpipe.Stage(fn, carry=True, initial_carry=None, name="a")],
            slices=K,
            microbatches=M,
            loss=squared,
            group=fpipe.local(1),
            engine=engine,
        )
        with pytest.raises(
            StageError,
            match=rf"stage 0: stage a has carry=True, so it must return \(y, carry\).*{what}",
        ):
            fpipe.grad(pipe)(parameters(1), *batch())


def test_a_schedule_that_runs_slices_in_another_order() -> None:
    wrong = fpipe.Schedule.parse("[0F0.1, 0F0.0, 0B0.1, 0B0.0]")
    with pytest.raises(ScheduleError, match=r"rank 0, position 0 \(0F0\.1\)"):
        pipe_of(1, 1, wrong, slices=None, microbatches=1).schedule(1)
