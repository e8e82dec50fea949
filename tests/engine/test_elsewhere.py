"""Arguments and stages that only another process has: ``fpipe.elsewhere``,
``fpipe.Stage.elsewhere``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from common import layer, same, squared
from fpipe import testing

PARAMS = [torch.eye(4) * (s + 1) / 4 for s in range(4)]
X, T = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))


def on_ranks(fn: Callable[[Any], Any], ranks: int = 2, order: Any = "buffered") -> list[Any]:
    return testing.run(fn, ranks=ranks, order=order, seed=0)


def cut(stages: list[Any], placement: Any, group: Any) -> list[Any]:
    """The stages of this rank, and nothing of the others."""
    mine = [s for s in range(len(stages)) if set(group.here) & set(placement.ranks_of(s))]
    return [stage if s in mine else fpipe.Stage.elsewhere() for s, stage in enumerate(stages)]


def step_alone(schedule: str, group: Any, x: Any, t: Any, stages: Any = None, **more: Any) -> Any:
    """One step of a rank that has its own stages, parameters and arguments alone."""
    stages, ranks = stages or [layer] * 4, group.size
    placement = fpipe.make_schedule(schedule, ranks, 4, stages=4).placement
    pipe = fpipe.pipeline(
        cut(stages, placement, group),
        schedule,
        loss=more.pop("loss", squared),
        microbatches=4,
        group=group,
        **more,
    )
    params = [p if s in pipe.here else None for s, p in enumerate(PARAMS)]
    has = lambda stage: stage in pipe.here
    args = X if has(0) else x, T if has(3) else t
    step = fpipe.value_and_grad(pipe)
    return [step(params, *args) for _ in range(2)][-1], pipe


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV", "Interleaved1F1B", "DualPipeV", "DualPipe"])
@pytest.mark.parametrize("shaped", [True, False])
def test_ranks_have_what_is_theirs_alone(schedule: str, shaped: bool):
    ranks = 4 if schedule in ("1F1B", "DualPipe") else 2
    absent = fpipe.elsewhere((8, 4), torch.float32) if shaped else fpipe.elsewhere()
    pipe = fpipe.pipeline(
        [layer] * 4, schedule, loss=squared, microbatches=4, group=fpipe.local(ranks)
    )
    loss, grads = fpipe.value_and_grad(pipe)(PARAMS, X, T)
    for (value, parts), mine in on_ranks(
        lambda group: step_alone(schedule, group, absent, absent), ranks
    ):
        assert same(value, loss)
        for stage in range(4):
            assert same(parts[stage], grads[stage] if stage in mine.here else None)


def test_no_message_per_step():
    """What a step sends is what it sends where every rank has everything."""

    def counted(absent: bool) -> Any:
        def rank(group: Any) -> int:
            has = group.here[0]
            pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=group)
            x = X if has == 0 or not absent else fpipe.elsewhere()
            t = T if has == 1 or not absent else fpipe.elsewhere()
            step = fpipe.value_and_grad(pipe)
            step(pipe.place(PARAMS[:2]), x, t)
            before = rounds(group)
            step(pipe.place(PARAMS[:2]), x, t)
            return rounds(group) - before

        return on_ranks(rank)

    assert counted(True) == counted(False)
    assert min(counted(True)) > 0


def rounds(group: Any) -> int:
    """How many messages and collectives a fake rank has begun."""
    return group._world.ranks[group.rank].calls


def test_a_later_shape_where_each_call_says_it():
    """Calls of several sizes alternate. Where the shape of one rank differs, all ranks raise."""

    def rank(group: Any) -> Any:
        first, last = group.here == (0,), group.here == (1,)
        pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=group)
        step, params = fpipe.value_and_grad(pipe), pipe.place(PARAMS[:2])
        away = lambda rows: fpipe.elsewhere((rows, 4), torch.float32)
        losses = [
            float(step(params, X[:n] if first else away(n), T[:n] if last else away(n))[0])
            for n in (4, 8, 4)
        ]
        with pytest.raises(fpipe.errors.MismatchError, match="disagree about the shape of x"):
            step(params, X[:2] if first else away(6), T[:2] if last else away(6))
        return losses

    pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=fpipe.local(2))
    want = [float(pipe(PARAMS[:2], X[:n], T[:n])) for n in (4, 8, 4)]
    assert on_ranks(rank) == [want, want]


def test_a_later_shape_that_no_call_says():
    def rank(group: Any) -> str:
        pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=group)
        step, params = fpipe.value_and_grad(pipe), pipe.place(PARAMS[:2])
        x = lambda n: X[:n] if group.here == (0,) else fpipe.elsewhere()
        step(params, x(8), T)
        with pytest.raises(fpipe.errors.MismatchError) as caught:
            step(params, x(4), T[:4] if group.here == (0,) else T)
        return str(caught.value)

    first, second = on_ranks(rank)
    assert first == second
    assert "disagree" in first


@pytest.mark.parametrize("whole", [True, False])
def test_microbatches_of_several_lengths_elsewhere(whole: bool):
    def rank(group: Any) -> Any:
        pipe = fpipe.pipeline([layer] * 2, group=group, outputs="everywhere", microbatches=3)
        x: Any = fpipe.Microbatches([X[:3], X[3:4], X[4:]])
        if group.here != (0,):
            x = fpipe.elsewhere() if whole else fpipe.Microbatches([fpipe.elsewhere()] * 3)
        y = pipe(pipe.place(PARAMS[:2]), x)
        return y if isinstance(y, fpipe.Microbatches) else y.split([3, 1, 4])

    want = layer(PARAMS[1], layer(PARAMS[0], X))
    for y in on_ranks(rank):
        assert [len(part) for part in y] == [3, 1, 4]
        assert torch.allclose(torch.cat(list(y)), want)


def test_trees_side_inputs_and_weights():
    """A batch of several leaves, one passed on to the last stage; a mask of the loss; weights by
    targets.
    """
    stages = [lambda p, x: {"h": x["h"] @ p, "id": x["id"]}] * 2

    def loss(y: Any, t: Tensor, *, mask: Tensor) -> Tensor:
        return ((y["h"] - t).square().mean(-1) * mask * y["id"]).sum()

    batch = {"h": X.T.contiguous().T, "id": torch.arange(8.0)}  # x is not contiguous
    mask = torch.arange(8) % 2
    make = lambda group: fpipe.pipeline(
        stages,
        loss=loss,
        microbatches=2,
        group=group,
        reduction=fpipe.weighted(lambda t, *, mask: mask.sum()),
    )

    def rank(group: Any) -> Any:
        away = {
            "x": fpipe.elsewhere(),
            "t": fpipe.elsewhere((8, 4)),
            "mask": fpipe.elsewhere((8,), torch.int64),
        }
        have = {"x": batch} if group.here == (0,) else {"t": T, "mask": mask}
        args = away | have
        pipe = make(group)
        return fpipe.value_and_grad(pipe)(
            pipe.place(PARAMS[:2]), args["x"], args["t"], mask=args["mask"]
        )

    value, grads = fpipe.value_and_grad(make(fpipe.local(2)))(PARAMS[:2], batch, T, mask=mask)
    (first, one), (second, two) = on_ranks(rank)
    assert same(first, value)
    assert same(second, value)
    assert same([one[0], two[1]], list(grads))


def test_what_other_ranks_know_of_a_stage():
    """Ties, frozen leaves, state and side inputs of stages that this rank does not have."""

    def embed(p: Any, x: Tensor, *, scale: Tensor) -> Tensor:
        return x @ p["w"] * scale

    def counted(p: Any, n: Tensor, x: Tensor) -> Any:
        return x @ p["w"].T + p["b"], n + 1

    stages = [
        fpipe.Stage(embed, ties=(("w", "table"),)),
        fpipe.Stage(
            counted,
            state=True,
            initial_state=torch.tensor(0),
            frozen=("b",),
            ties=(("w", "table"),),
        ),
    ]
    params = [{"w": PARAMS[0]}, {"w": PARAMS[0], "b": torch.ones(4)}]
    make = lambda group, mine: fpipe.pipeline(mine, loss=squared, microbatches=2, group=group)
    whole = make(fpipe.local(2), stages)
    (value, _), grads = fpipe.value_and_grad(whole)(params, X, T, scale=torch.ones(8, 1))

    def rank(group: Any) -> Any:
        here = group.here[0]
        pipe = make(
            group,
            [stage if s == here else fpipe.Stage.elsewhere() for s, stage in enumerate(stages)],
        )
        assert pipe.tied == (("0.w", "1.w"),)
        assert pipe.config.frozen == ("1.b",)
        mine = [p if s == here else None for s, p in enumerate(params)]
        side = {"scale": torch.ones(8, 1)} if here == 0 else {}
        (loss, _), parts = fpipe.value_and_grad(pipe)(mine, X, T, **side)
        with pytest.raises(fpipe.errors.BatchError, match="did you mean 'scale'"):
            pipe(mine, X, T, scales=1)
        return loss, parts

    (first, one), (second, two) = on_ranks(rank)
    assert same(first, value)
    assert same(second, value)
    assert same([one[0], two[1]], list(grads))


@pytest.mark.parametrize(
    ("x", "t", "match"),
    [
        (
            fpipe.elsewhere(),
            fpipe.elsewhere(),
            "target 0 is elsewhere, but it is read with stage 1",
        ),
        ({"a": X, "b": fpipe.elsewhere((8, 4))}, T, "beside fpipe.elsewhere"),
        ({"a": fpipe.elsewhere(), "b": fpipe.elsewhere((8, 4))}, T, "stands for a whole argument"),
        (fpipe.elsewhere((7, 4)), T, "x has 7 rows, which 2 microbatches do not divide"),
    ],
)
def test_mistakes_on_one_rank_end_the_call_on_all(x: Any, t: Any, match: str):
    def rank(group: Any) -> str:
        pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=group)
        with pytest.raises(fpipe.FpipeError) as caught:
            pipe(pipe.place(PARAMS[:2]), *((X, T) if group.here == (0,) else (x, t)))
        return str(caught.value)

    assert all(match in text for text in on_ranks(rank))


def test_a_side_input_that_no_rank_has():
    """The loss is traced on every rank, so all need its shape."""

    def loss(y: Tensor, t: Tensor, *, mask: Tensor) -> Tensor:
        return ((y - t) * mask).sum()

    def rank(group: Any) -> str:
        pipe = fpipe.pipeline([layer] * 2, loss=loss, microbatches=2, group=group)
        with pytest.raises(fpipe.FpipeError) as caught:
            pipe(pipe.place(PARAMS[:2]), X, T, mask=fpipe.elsewhere())
        return str(caught.value)

    assert all("side input 'mask' is elsewhere" in text for text in on_ranks(rank))


def test_a_local_group_has_everything():
    with pytest.raises(fpipe.errors.StageError, match="all ranks are in this process"):
        fpipe.pipeline([layer, fpipe.Stage.elsewhere()], group=fpipe.local(2))
    pipe = fpipe.pipeline([layer] * 2, microbatches=2, group=fpipe.local(2))
    with pytest.raises(fpipe.errors.BatchError, match="pass it here"):
        pipe(PARAMS[:2], fpipe.elsewhere((8, 4)))


def test_a_dtype_that_is_text_is_refused():
    with pytest.raises(fpipe.errors.BatchError, match=r"dtype='int64'\); give a dtype"):
        fpipe.elsewhere((8, 4), "int64")  # type: ignore[arg-type]


def test_a_stage_that_its_rank_leaves_out():
    def rank(group: Any) -> str:
        stages = [layer, fpipe.Stage.elsewhere()]
        with pytest.raises(fpipe.errors.StageError) as caught:
            fpipe.pipeline(stages, microbatches=2, group=group)
        return str(caught.value)

    assert all("stage 1 is on this rank and cannot be elsewhere" in text for text in on_ranks(rank))


def test_one_rank_leaves_stages_out_and_another_calls():
    def rank(group: Any) -> str:
        if group.here == (0,):
            with pytest.raises(fpipe.errors.MismatchError) as caught:
                fpipe.pipeline([layer, fpipe.Stage.elsewhere()], microbatches=2, group=group)
        else:
            pipe = fpipe.pipeline([layer] * 2, microbatches=2, group=group)
            with pytest.raises(fpipe.errors.MismatchError) as caught:
                pipe(pipe.place(PARAMS[:2]), X)
        return str(caught.value)

    assert all("every rank builds the pipeline" in text for text in on_ranks(rank))


# ---- processes ----
def _clients() -> Any:
    """What a client has: a mesh, the modules of its own stages, inputs on one rank and targets on
    another.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    group = fpipe.adopt(mesh["pp"], device="cpu:0", timeout=30)
    out = []
    for adopted in (group, fpipe.adopt(dist.new_group(), timeout=30)):  # type: ignore[arg-type]
        (loss, grads), pipe = step_alone("ZBV", adopted, fpipe.elsewhere(), fpipe.elsewhere())
        out.append(
            (
                loss,
                [None if g is None else g.sum() for g in grads],
                adopted.here[0] == pipe.output_rank,
            )
        )
    turned = DeviceMesh("cpu", [1, 0])
    with pytest.raises(
        fpipe.errors.GroupError, match=r"has the ranks \[1, 0\] in this order.*\[0, 1\].*ascend"
    ):
        fpipe.adopt(turned, timeout=30)
    with pytest.raises(fpipe.errors.GroupError, match="one of them, as in mesh"):
        fpipe.adopt(mesh)
    with pytest.raises(fpipe.errors.GroupError, match="carries"):
        fpipe.adopt(mesh["pp"], device="meta")
    with pytest.raises(fpipe.errors.GroupError, match="timeout=0"):
        fpipe.adopt(mesh["pp"], timeout=0)
    return out


def test_on_process_groups_that_exist():
    pipe = fpipe.pipeline([layer] * 4, "ZBV", loss=squared, microbatches=4, group=fpipe.local(2))
    loss, grads = fpipe.value_and_grad(pipe)(PARAMS, X, T)
    assert fpipe.make_schedule("ZBV", 2, 4).output_rank == 0
    first, second = fpipe.launch(_clients, ranks=2, timeout=60)
    for (one, parts, is_output), (two, others, other_is) in zip(first, second, strict=True):
        assert same(one, loss)
        assert same(two, loss)
        assert (is_output, other_is) == (True, False)
        assert same([parts[0], others[1], others[2], parts[3]], [g.sum() for g in grads])
