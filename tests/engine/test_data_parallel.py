"""Copies of a pipeline: reduced gradients, ZeRO on parts, and what a plan shows of it, against one
pipeline alone.

Most of it runs on two fake processes, each with a local pipeline of two ranks; one job of four gloo
processes runs every schedule at every level.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from common import same, squared
from fpipe import testing, tree
from fpipe.collectives.group import Done
from fpipe.collectives.local import LocalGroup
from fpipe.engine.execute import WATCH
from fpipe.lowering.plan import Plan
from fpipe.passes.copies.sharding import Layout
from fpipe.testing.fake import FakeGroup, Network
from fpipe.testing.world import World
from schedule_table import TABLE

WIDTH, MICROBATCHES, ROWS = 8, 4, 2  # of the first, microbatches a copy, rows of each
NAMES = [family.name for family in TABLE]
TIED = [("0.w1", "2.w1")]


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w1"] + p["b"]) @ p["w2"]


def dropped(p: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(block(p, x), 0.5)


def network(stages: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1": (WIDTH, 5), "b": (5,), "w2": (5, WIDTH)}
    params = [
        {k: torch.randn(s, generator=draw) / 3 for k, s in shapes.items()} for _ in range(stages)
    ]
    if stages > 2:  # tied
        params[2]["w1"] = params[0]["w1"].clone()
    return params


def batch(copies: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, copies * MICROBATCHES * ROWS, WIDTH, generator=draw)
    return x, y


#: Options of ``fpipe.copies``; ``dp_reduction`` is its ``reduction``.
OF_COPIES = ("zero", "reduce_dtype", "bucket_bytes", "unsharded", "own", "dp_reduction")


def pipe_of(
    name: str, copies: Any = None, group: Any = None, fn: Any = block, **keywords: Any
) -> Any:
    """A pipeline on two ranks: one copy of several, or one alone with the microbatches of all."""
    number = keywords.pop("microbatches", MICROBATCHES * (1 if copies is not None else 2))
    schedule = fpipe.make_schedule(name, 2, number)
    keywords = {"loss": squared, "tied": TIED if schedule.stages > 2 else []} | keywords
    dp = {name: keywords.pop(name) for name in OF_COPIES if name in keywords}
    dp = {"reduction" if name == "dp_reduction" else name: value for name, value in dp.items()}
    return fpipe.pipeline(
        [fn] * schedule.stages,
        schedule,
        group=group or fpipe.local(2),
        dp=fpipe.copies(copies, **dp) if dp and copies is not None else copies,
        **keywords,
    )


def step(pipe: Any, copies: Any = None) -> tuple[Tensor, list[Any]]:
    """Loss and whole gradients of one step on this copy's part of the batch."""
    x, y = (t if copies is None else t.chunk(copies.size)[copies.here[0]] for t in batch())
    value, grads = fpipe.value_and_grad(pipe)(pipe.shard(network(pipe.stages)), x, y)
    return value, pipe.unshard(grads)


def on_copies(fn: Callable[[Any], Any], copies: int = 2, order: str = "buffered") -> list[Any]:
    """Call ``fn`` with the group of the copies on each of them."""
    return testing.run(fn, ranks=copies, order=order, seed=0)  # type: ignore[arg-type]


def near(a: Any, b: Any, tolerance: float = 1e-6) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all((x - y).abs().max() <= tolerance for x, y in pairs)


# ---- every schedule, every level ----
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_one_pipeline(name: str, long: bool):
    """All levels of ZeRO with ``--long``, else 0 and another one."""
    alone = step(pipe_of(name))
    levels = range(4) if long else (0, 1 + NAMES.index(name) % 3)
    results = [on_copies(lambda dp, z=zero: step(pipe_of(name, dp, zero=z), dp)) for zero in levels]
    for both in results:
        assert same(*both), "copies must have one gradient"
        assert same(both[0], results[0][0]), "ZeRO must have the bits of plain copies"
    assert near(results[0][0], alone)


def on_gloo(name: str) -> tuple[int, ...]:
    """The levels to try on real processes: the outer ones, and for three schedules all; the fakes
    had every one.
    """
    return (0, 1, 2, 3) if name in ("1F1B", "ZBVZeroBubble", "DualPipe") else (0, 3)


def gloo(names: list[str]) -> dict[tuple[str, int], Any]:
    """One of four processes: loss and gradients by schedule and level."""
    group = fpipe.init(pp=2, dp=2, timeout=60)
    tried = [(name, zero) for name in names for zero in on_gloo(name)]
    return {
        (name, zero): step(pipe_of(name, group.dp, group, zero=zero), group.dp)
        for name, zero in tried
    }


def test_four_processes(long: bool):
    names = (
        NAMES
        if long
        else ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "DualPipe"]
    )
    results = fpipe.launch(gloo, names, ranks=4, timeout=110)
    for name in names:
        value, grads = step(pipe_of(name))
        for rank in range(4):
            plain = results[rank][name, 0]
            assert near(plain[0], value)
            held = [(a, b) for a, b in zip(plain[1], grads, strict=True) if a is not None]
            assert held and all(near(a, b) for a, b in held), name
            for zero in on_gloo(name):
                assert same(results[rank][name, zero], plain), (name, zero)


# ---- training ----
def train(copies: Any, zero: int, exact: bool = False, **keywords: Any) -> list[Any]:
    pipe = pipe_of("ZBV", copies, zero=zero, **keywords)
    clip = fpipe.clip_by_global_norm(0.1, over=pipe, exact=exact)
    tx = fpipe.chain(fpipe.skip_nonfinite(over=pipe), clip, fpipe.adamw(0.01, weight_decay=0.1))
    params = pipe.shard(network(pipe.stages))
    state = tx.init(params)
    for number in range(3):
        x, y = (t if copies is None else t.chunk(copies.size)[copies.here[0]] for t in batch())
        grads = fpipe.grad(pipe)(params, x * (number + 1), y)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
    assert state[1].norm > 0.1
    assert state[0].skipped == 0
    return [pipe.unshard(params), state[1].norm]


def test_transforms_work_on_parts():
    plain = on_copies(lambda dp: train(dp, 0))
    for zero in (1, 2, 3):
        cut = on_copies(lambda dp, z=zero: train(dp, z))
        assert same(*cut)
        assert near(cut[0], plain[0]), "the norm is added up in another order, the rest is the same"
    assert near(plain[0], train(None, 0), 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_exact_norm_has_the_bits_of_whole_leaves(zero: int):
    """Clipped and trained with it, parts make the same parameters to the bit; where some cannot be
    gathered, nearly.
    """
    plain = on_copies(lambda dp: train(dp, 0, exact=True))
    assert same(on_copies(lambda dp: train(dp, zero, exact=True)), plain)
    assert same(on_copies(lambda dp: train(dp, zero, exact=True, bucket_bytes=100)), plain)
    own = [
        on_copies(lambda dp, z=z: train(dp, z, exact=True, own=["*.b"], tied=[])) for z in (0, zero)
    ]
    assert own[1][0][1] == own[1][1][1] and near(own[1][0][0][0]["w1"], own[1][1][0][0]["w1"], 0)


@pytest.mark.parametrize("exact", [False, True])
def test_copies_clip_and_skip_alike_where_each_has_leaves_of_its_own(exact: bool):
    """A norm counts what copies share once and what they have apart all; else what they share would
    drift apart.
    """

    def run(dp: Any, zero: int, bad: bool = False) -> tuple[Any, Any]:
        pipe = pipe_of("1F1B", dp, zero=zero, own=["b"])
        tx = fpipe.chain(
            fpipe.skip_nonfinite(over=pipe), fpipe.clip_by_global_norm(0.1, over=pipe, exact=exact)
        )
        params = pipe.shard(network(2))
        grads = fpipe.grad(pipe)(params, *(t.chunk(2)[dp.here[0]] for t in batch()))
        if bad and dp.here[0]:
            grads[1]["b"][0] = torch.inf
        after, state = tx.update(grads, tx.init(params), params)
        return None if after is None else pipe.unshard(after), (pipe.unshard(grads), state)

    found = [on_copies(lambda dp, z=zero: run(dp, z)) for zero in (0, 2)]
    (mine, (grads, state)), (others, (theirs, _)) = found[0]
    assert same([p["w1"] for p in mine], [p["w1"] for p in others]) and not same(grads, theirs)
    counted = optree.tree_leaves(
        [[p["w1"], p["w2"], p["b"], q["b"]] for p, q in zip(grads, theirs, strict=True)]
    )
    assert state[1].norm.item() == pytest.approx(
        torch.cat([g.flatten() for g in counted]).norm().item(), rel=1e-5
    )
    assert found[1][0][1][1][1].norm.item() == pytest.approx(state[1].norm.item(), rel=1e-6)
    assert [after for after, _ in on_copies(lambda dp: run(dp, 0, bad=True))] == [None, None]


def test_moments_have_the_bits_of_whole_ones():
    def run(dp: Any, zero: int) -> Any:
        pipe = pipe_of("1F1B", dp, zero=zero)
        tx = fpipe.adamw(0.01)
        params = pipe.shard(network(2))
        state = tx.init(params)
        for _ in range(2):
            grads = fpipe.grad(pipe)(params, *(t.chunk(2)[dp.here[0]] for t in batch()))
            updates, state = tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates, donate=True)
        return [pipe.unshard(tree) for tree in (params, state.m, state.v)]

    whole = on_copies(lambda dp: run(dp, 0))
    assert all(same(on_copies(lambda dp, z=zero: run(dp, z)), whole) for zero in (1, 2, 3))


def test_a_gradient_that_is_not_finite_in_one_part_is_skipped_by_all():
    def run(dp: Any) -> int:
        pipe = pipe_of("1F1B", dp, zero=2)
        tx = fpipe.skip_nonfinite(over=pipe)
        params = pipe.shard(network(2))
        if dp.here[0] == 1:
            next(leaf for leaf in optree.tree_leaves(params) if leaf.numel())[0] = torch.nan
        return int(tx.update(params, tx.init(params), params)[1].skipped)

    assert on_copies(run) == [1, 1]


def test_noise_is_another_in_each_part():
    def run(dp: Any) -> tuple[Tensor, Tensor]:
        pipe = pipe_of("1F1B", dp, zero=2)
        zeros = optree.tree_map(torch.zeros_like, pipe.shard(network(2)))
        both = (
            fpipe.transforms.add_noise(1.0, seed=2, over=pipe),
            fpipe.transforms.add_noise(1.0, seed=2),
        )
        drawn = [optree.tree_leaves(tx.update(zeros, tx.init(zeros))[0][0]) for tx in both]
        return tuple(torch.cat(leaves)[:16] for leaves in drawn)  # type: ignore[return-value]

    (noise, plain), (other, others) = on_copies(run)
    assert torch.equal(plain, others), "otherwise the collective would be omitted"
    assert (noise - other).abs().min() > 0


# ---- options of the reduction ----
def test_more_copies_than_elements():
    results = on_copies(
        lambda dp: [step(pipe_of("1F1B", dp, zero=zero), dp) for zero in range(4)], copies=4
    )
    for copy in results:
        for level in copy:
            assert same(level, results[0][0])


def test_weights_count_over_all_copies():
    """Copies with other numbers of tokens: the gradient is that of the whole batch, not the mean of
    two means.
    """
    tokens = fpipe.weighted(lambda t: (t[:, 0] > 0).sum())

    def masked(y: Tensor, t: Tensor) -> Tensor:
        kept = t[:, 0] > 0
        return (y - t)[kept].square().sum() / (kept.sum().clamp(min=1) * WIDTH)

    def run(dp: Any) -> Any:
        return step(
            pipe_of("1F1B", dp, loss=fpipe.Stage(masked, engine="eager"), reduction=tokens), dp
        )

    (value, grads), other = on_copies(run)
    assert same(other, (value, grads))
    alone = step(pipe_of("1F1B", loss=fpipe.Stage(masked, engine="eager"), reduction=tokens))
    assert near((value, grads), alone)
    counts = [(t[:, 0] > 0).sum() for t in batch()[1].chunk(2)]
    assert counts[0] != counts[1], "else a mean of means would do"


@pytest.mark.parametrize("zero", [0, 2])
def test_sums(zero: int):
    (value, grads), _ = on_copies(
        lambda dp: step(pipe_of("1F1B", dp, reduction="sum", zero=zero), dp)
    )
    assert near((value, grads), step(pipe_of("1F1B", reduction="sum")), 1e-5)


def test_a_dtype_to_reduce_in():
    def run(dp: Any) -> Any:
        return [
            step(pipe_of("1F1B", dp, reduce_dtype=torch.bfloat16, zero=zero), dp)
            for zero in range(4)
        ]

    results = on_copies(run)[0]
    _, whole = step(pipe_of("1F1B"))
    for _, grads in results:
        assert same(grads, results[0][1])
        assert not near(grads, whole)
        assert near(grads, whole, 1e-2)
        assert all(leaf.dtype == torch.float32 for leaf in optree.tree_leaves(grads))


def test_a_dtype_to_accumulate_in():
    results = on_copies(
        lambda dp: [
            step(pipe_of("1F1B", dp, accumulate=torch.float64, zero=z), dp) for z in range(4)
        ]
    )
    assert all(same(level, results[0][0]) for level in results[0])
    assert all(leaf.dtype == torch.float64 for leaf in optree.tree_leaves(results[0][3][1]))


def test_dropout_is_that_of_one_pipeline_with_all_microbatches():
    results = on_copies(lambda dp: step(pipe_of("1F1B", dp, fn=dropped, seed=3, zero=3), dp))
    assert near(results[0], step(pipe_of("1F1B", fn=dropped, seed=3)))


@pytest.mark.parametrize("zero", [0, 3])
def test_buckets_and_frozen_leaves(zero: int):
    def run(dp: Any) -> Any:
        pipe = pipe_of("1F1B", dp, zero=zero, bucket_bytes=100, frozen=["*.w1"])
        return step(pipe, dp)

    value, grads = on_copies(run)[0]
    alone = step(pipe_of("1F1B", frozen=["*.w1"]))
    assert near((value, grads), alone)
    assert all(grad["w1"] is None for grad in grads)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_leaves_that_each_copy_has_for_itself(zero: int):
    """Their gradients meet no other copy's; they are those of the mean of the copies' losses."""

    def run(dp: Any) -> Any:
        return step(pipe_of("1F1B", dp, zero=zero, own=["*.b"]), dp)

    results = on_copies(run)
    both = [
        step(
            fpipe.pipeline(
                [block] * 2, "1F1B", loss=squared, microbatches=MICROBATCHES, group=fpipe.local(2)
            ),
            g,
        )
        for g in on_copies(lambda dp: dp)
    ]
    for (_, mine), (_, alone) in zip(results, both, strict=True):
        for stage in range(2):
            assert torch.equal(mine[stage]["b"], alone[stage]["b"] / 2)
            assert same(mine[stage]["w1"], results[0][1][stage]["w1"])
    assert not same(results[0][1][0]["b"], results[1][1][0]["b"])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_forward_alone_and_pullbacks(zero: int):
    def run(dp: Any) -> Any:
        x, y = (t.chunk(2)[dp.here[0]] for t in batch())
        pipe = pipe_of("Interleaved1F1B", dp, zero=zero)
        params = pipe.shard(network(4))
        value = pipe(params, x, y)
        outputs = pipe_of("Interleaved1F1B", dp, zero=zero, loss=None)
        outputs.shard(optree.tree_map(lambda leaf: leaf.to("meta"), network(4)))
        out, pullback = fpipe.vjp(outputs, params, x)
        first, _ = pullback(2 * (out - y) / y.numel(), retain=True)
        grads, dx = pullback(2 * (out - y) / y.numel())
        assert same(first, grads)
        return value, pipe.unshard(grads), dx

    results = on_copies(run)
    pipe = pipe_of("Interleaved1F1B")
    value, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))(network(4), *batch())
    assert near(results[0][:2], (value, grads))
    assert near(torch.cat([results[0][2], results[1][2]]), dx)


# ---- plans and bytes ----
def plans(name: str, **keywords: Any) -> dict[int, Plan]:
    def run(dp: Any) -> Any:
        pipe = pipe_of(name, dp, **keywords)
        x, y = (t.chunk(2)[dp.here[0]] for t in batch())
        return pipe.plan(pipe.shard(network(pipe.stages)), x, y).by_rank

    return on_copies(run)[0]


def kinds(plan: Plan) -> list[tuple[str, int]]:
    """The instructions of copies, and the stages of programs, in order."""
    out = []
    for ins in plan.instructions:
        if getattr(ins.op, "share", None) is not None:
            out.append((ins.kind, getattr(ins.op, "share", None).stage))
        elif ins.program is not None and ins.action is not None and ins.kind in "FBIW":
            out.append((ins.kind, ins.action.stage))
    return out


def test_gradients_leave_while_others_are_made():
    seen = kinds(plans("Interleaved1F1B", tied=[])[0])
    reduced = [place for place, (kind, _) in enumerate(seen) if kind == "REDUCE"]
    last = {stage: place for place, (kind, stage) in enumerate(seen) if kind in "BW"}
    for place in reduced:
        assert place == last[seen[place][1]] + 1, "as soon as the stage's last gradient exists"
    assert any(place < max(last.values()) for place in reduced)
    waits = [place for place, (kind, _) in enumerate(seen) if kind == "WAIT"]
    assert min(waits) > max(last.values()), "waited for at the end"


@pytest.mark.parametrize("name", ["ZBV", "DualPipe"])
def test_every_stage_is_reduced_once(name: str):
    """After its copies on other ranks, and what it is tied to, were added."""
    for plan in plans(name).values():
        seen = [ins.kind for ins in plan.instructions]
        stages = [
            getattr(ins.op, "share", None).stage
            for ins in plan.instructions
            if ins.kind == "REDUCE" and getattr(ins.op, "share", None) is not None
        ]
        assert len(stages) == len(set(stages)) == 2
        shared = [place for place, kind in enumerate(seen) if kind == "SUM"]
        assert max(place for place, kind in enumerate(seen) if kind == "REDUCE") > max(
            shared, default=0
        )


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_stages_whole_at_once(bound: int):
    """Never more than allowed; gathered one action ahead of their use where the bound permits."""

    def run(dp: Any) -> Any:
        schedule = fpipe.make_schedule("Interleaved1F1B", 2, 4, 8)
        pipe = fpipe.pipeline(
            [block] * 8,
            schedule,
            loss=squared,
            group=fpipe.local(2),
            dp=fpipe.copies(dp, zero=3, unsharded=bound),
        )
        x, y = (t.chunk(2)[dp.here[0]] for t in batch())
        return pipe.plan(pipe.shard(network(8)), x, y).by_rank

    for plan in on_copies(run)[0].values():
        whole: set[int] = set()
        most, ahead = 0, 0
        seen = kinds(plan)
        for place, (kind, stage) in enumerate(seen):
            if kind == "UNSHARD":
                assert stage not in whole
                whole.add(stage)
                ahead += seen[place + 1] != ("WAIT", stage)
            elif kind == "RESHARD":
                whole.remove(stage)
            elif kind in "FBI":
                assert stage in whole
            most = max(most, len(whole))
        assert not whole
        assert most == bound
        assert (ahead > 0) == (bound > 1)


def test_the_other_levels_gather_once():
    for zero in (1, 2):
        seen = kinds(plans("Interleaved1F1B", zero=zero)[0])
        assert [stage for kind, stage in seen if kind == "UNSHARD"] == [0, 2]


class Asleep(LocalGroup):
    """The first of two copies, of which the other does nothing, so that only this process holds
    tensors.
    """

    def __init__(self) -> None:
        super().__init__((torch.device("cpu"),))
        self.size, self.here = 2, (0,)

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Any:
        return Done((memory.chunk(2)[0].clone() if scatter else memory,))

    def start_gather(self, memory: Tensor) -> Any:
        return Done((memory,))

    def gather_objects(self, obj: object) -> list[Any]:
        return [obj, obj]


@pytest.fixture
def few_objects() -> Callable[[], None]:
    """After this call, the garbage collector lists only newer objects, which is quick."""

    def begin() -> None:
        gc.collect()
        gc.freeze()

    return begin


@pytest.mark.covering
@pytest.mark.parametrize("engine", ["trace", "eager"])
@pytest.mark.parametrize("bound", [1, 2, 3])
def test_bytes_held_are_parts_and_whole_stages(
    bound: int, engine: Any, few_objects: Callable[[], None]
):
    """By measurement: after every instruction, all memory alive of the size of a stage's large
    leaf, or of its part.

    That leaf is frozen, so that no gradient has its size. A stage on autograd keeps what its graph
    holds.
    """
    width, stages = 64, 6

    def wide(p: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ p["w"]) * p["scale"]

    schedule = fpipe.make_schedule("Interleaved1F1B", 1, 4, stages)
    pipe = fpipe.pipeline(
        [wide] * stages,
        schedule,
        loss=squared,
        group=fpipe.local(1),
        dp=fpipe.copies(Asleep(), zero=3, unsharded=bound),
        frozen=["*.w"],
        engine=engine,
    )
    network = [{"w": torch.eye(width), "scale": torch.ones(width)} for _ in range(stages)]
    x = torch.zeros(4, width)
    fpipe.grad(pipe)(pipe.shard(network), x, x)
    few_objects()
    params = pipe.shard(network)
    whole, part, most = width * width * 4, width * width * 2, 0
    (cached,) = pipe.cache.plans.values()

    def watched(one: Any) -> Any:
        def step(r: Any) -> Any:
            nonlocal most
            out = one(r)
            tensors = [
                t for t in gc.get_objects() if type(t) is Tensor and t.layout is torch.strided
            ]
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            most = max(most, sum(size for size in held.values() if size in (whole, part)))
            return out

        return step

    before = WATCH.set(lambda bound, phase: enumerate(map(watched, bound.steps)))
    try:
        fpipe.grad(pipe)(params, x, x)
    finally:
        WATCH.reset(before)
    if engine == "trace":
        assert most == stages * part + bound * whole
        assert cached.prepared.plans[0].peak > bound * whole, "the plan counts them"
    else:
        assert most > stages * part + bound * whole, (
            "documented: autograd's graph keeps parameters to the backward"
        )


# ---- layouts ----
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_parts_make_the_whole(parts: int, limit: int):
    shapes = [(3, 5), (7,), (), (40,), (0, 3), (2, 2)]
    leaves = [torch.randn(shape) for shape in shapes] + [
        torch.randn(4).bfloat16(),
        torch.arange(3),
        "text",
    ]
    flags = [True, False, True, True, True, False, True, False, False]
    layouts = [Layout.of(leaves, flags, part, parts, limit) for part in range(parts)]
    cuts = [layout.cut(leaves) for layout in layouts]
    assert all(cut[7] is leaves[7] and cut[8] == "text" for cut in cuts)
    assert sorted(i for bucket in layouts[0].buckets for i in bucket.leaves) == list(range(7))
    for bucket in layouts[0].buckets:
        assert {flags[i] for i in bucket.leaves} == {bucket.trained}
        memories = [
            layout.fill(bucket, [cut[i] for i in bucket.leaves])
            for layout, cut in zip(layouts, cuts, strict=True)
        ]
        whole = (
            torch.cat([memory.chunk(parts)[part] for part, memory in enumerate(memories)])
            if bucket.size
            else memories[0]
        )
        for index, leaf in zip(bucket.leaves, layouts[0].whole(bucket, whole), strict=True):
            assert torch.equal(leaf, leaves[index])
        assert torch.equal(
            layouts[0].pack(bucket, [leaves[i] for i in bucket.leaves], bucket.dtype), whole
        )


# ---- mistakes ----
def test_mistakes_are_reported():
    with pytest.raises(fpipe.errors.StageError, match="zero=2 needs copies"):
        fpipe.copies(None, zero=2)
    with pytest.raises(fpipe.errors.StageError, match="zero=4; 0 keeps everything whole"):
        pipe_of("1F1B", fpipe.local(1), zero=4)
    with pytest.raises(fpipe.errors.StageError, match="has 2 ranks in this process"):
        pipe_of("1F1B", fpipe.local(2))
    pipe = pipe_of("1F1B", fpipe.local(1), zero=3)
    x, y = (t[: MICROBATCHES * ROWS] for t in batch())
    with pytest.raises(fpipe.errors.StageError, match=r"call pipe\.shard\(params\)"):
        fpipe.grad(pipe)(network(2), x, y)
    pipe.shard(network(2))
    with pytest.raises(
        fpipe.errors.StageError, match="must have 40 elements along one axis and is"
    ):
        fpipe.grad(pipe)(network(2), x, y)


def test_one_copy_is_none():
    """A group of one: the same bits as without copies, at every level."""
    for zero in range(4):
        x, y = (t[: MICROBATCHES * ROWS] for t in batch())
        pipe = pipe_of("ZBV", fpipe.local(1), zero=zero)
        value, grads = fpipe.value_and_grad(pipe)(pipe.shard(network(4)), x, y)
        plain = fpipe.pipeline(
            [block] * 4,
            fpipe.make_schedule("ZBV", 2, MICROBATCHES),
            loss=squared,
            group=fpipe.local(2),
            tied=TIED,
        )
        assert same((value, pipe.unshard(grads)), fpipe.value_and_grad(plain)(network(4), x, y))


def test_nothing_is_left_in_the_registers():
    with fpipe.debug():
        assert same(*on_copies(lambda dp: step(pipe_of("ZBV", dp, zero=3), dp)))


def test_copies_that_differ_are_reported():
    def run(dp: Any) -> None:
        step(pipe_of("1F1B", dp, zero=2 * dp.here[0]), dp)

    with pytest.raises(fpipe.errors.MismatchError, match=r"disagree about copies.*zero=0.*zero=2"):
        on_copies(run)


def test_copies_of_other_stages_are_reported():
    """Where ``dp=`` has the first rank of one pipeline and the second rank of another."""

    def run(dp: Any) -> None:
        rank = dp.here[0]
        group = FakeGroup(Network(World(2, 0, 60.0), (), lockstep=False), rank)
        pipe = fpipe.pipeline(
            [block] * 2, loss=squared, microbatches=2, group=group, dp=fpipe.copies(dp)
        )
        fpipe.grad(pipe)(pipe.place(network(2)), *(t.chunk(2)[rank] for t in batch()))

    with pytest.raises(
        fpipe.errors.MismatchError,
        match=r"disagree about the stages here: rank 0 has \(0,\), rank 1 has \(1,\); give dp=",
    ):
        on_copies(run)


def test_an_own_pattern_that_fits_nothing_is_refused():
    def run(dp: Any) -> None:
        fpipe.grad(pipe_of("1F1B", dp, own=["*.bb"]))(
            network(2), *(t.chunk(2)[dp.here[0]] for t in batch())
        )

    with pytest.raises(fpipe.errors.StageError, match=r"own='\*\.bb' matches no leaf"):
        on_copies(run)


@pytest.mark.parametrize("zero", [0, 3])
def test_to_module_joins_the_parts_of_copies(zero: int):
    def run(dp: Any) -> bool:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
        stages, params = fpipe.from_module(model, cuts=["2"])
        pipe = fpipe.pipeline(
            stages,
            "1F1B",
            microbatches=1,
            group=fpipe.local(2),
            dp=fpipe.copies(dp, zero=zero),
        )
        parts = tree.tree_map(lambda t: t + 1, pipe.shard(params))
        before = [p.clone() for p in model.parameters()]
        fpipe.to_module(model, parts, gather=pipe)
        return all(torch.equal(p, q + 1) for p, q in zip(model.parameters(), before, strict=True))

    assert on_copies(run) == [True, True]


@pytest.mark.parametrize("weighted", [False, True])
def test_microbatches_are_added_and_copies_averaged(weighted: bool):
    """As trainers count that multiply a loss by the number of copies: the sum of a copy, then the
    mean over copies.
    """
    reduction = fpipe.weighted(lambda t: t[0, 0].abs()) if weighted else "sum"
    alone = [
        step(pipe_of("1F1B", reduction=reduction, group=fpipe.local(2), microbatches=4), part(n))
        for n in (0, 1)
    ]
    want = optree.tree_map(lambda a, b: (a + b) / 2, *alone, namespace="fpipe")
    both = on_copies(
        lambda dp: step(pipe_of("1F1B", dp, reduction=reduction, dp_reduction="mean"), dp)
    )
    assert near(both[0], want)
    assert same(*both)


def part(number: int) -> Any:
    """What ``step`` asks of a group of copies, for one of two without the other."""
    return SimpleNamespace(size=2, here=(number,))


def test_an_unknown_reduction_of_copies_is_refused():
    with pytest.raises(fpipe.errors.StageError, match=r"reduction='max'\); give 'mean' or 'sum'"):
        pipe_of("1F1B", fpipe.local(1), dp_reduction="max")


def test_a_dtype_in_which_no_gradient_is_sent_is_refused():
    for dtype in (torch.int32, "bf16"):
        with pytest.raises(fpipe.errors.ArgumentError, match="give a floating dtype"):
            fpipe.copies(fpipe.local(1), reduce_dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_are_not_averaged_again(zero: Any):
    """Shards of two processes are of other elements; ``mean_over`` averaged these, or hung."""

    def run(dp: Any) -> str:
        pipe = fpipe.pipeline(
            [torch.mul],
            loss=torch.sum,
            microbatches=2,
            group=fpipe.local(1),
            dp=fpipe.copies(dp, zero=zero),
        )
        params = pipe.shard([torch.ones(64)])
        grads = fpipe.grad(pipe)(params, torch.ones(4, 64))
        with pytest.raises(fpipe.errors.StageError, match="leave mean_over out") as caught:
            fpipe.mean_over(dp).update(grads, ())
        return str(caught.value)

    assert all(f"zero={zero}" in text for text in on_copies(run))
