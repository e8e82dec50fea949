"""What torch.distributed.pipelining gets wrong, each case a test by its name, and right here."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from common import Count, same, squared

ZERO_BUBBLE = ("ZBV", "InterleavedZeroBubble", "ZBH1", "DualPipeV")
WIDTH = 3


def layer(p, x):
    return torch.tanh(x @ p["w"])


def weights(stages: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(stages)
    return [{"w": torch.randn(WIDTH, WIDTH)} for _ in range(stages)]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def plain(
    fns: Any, params: Any, x: Any, t: Any, parts: int, loss: Any = squared
) -> tuple[Tensor, Any]:
    """Loss and gradients by one process, microbatch after microbatch."""
    leaves = optree.tree_map(lambda v: v.clone().requires_grad_(), params)
    flat, spec = optree.tree_flatten(leaves)
    total, sums = None, None
    xs = x if isinstance(x, list) else list(x.chunk(parts))
    ts = t if isinstance(t, list) else list(t.chunk(parts))
    for y, target in zip(xs, ts, strict=True):
        for fn, p in zip(fns, leaves, strict=True):
            y = fn(p, y)
        value = loss(y, target) * (1.0 / len(xs))
        grads = torch.autograd.grad(value, flat, allow_unused=True)
        grads = [torch.zeros_like(f) if g is None else g for f, g in zip(flat, grads, strict=True)]
        total = value.detach() if total is None else total + value.detach()
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
    assert total is not None
    return total, optree.tree_unflatten(spec, sums)


def piped(fns: Any, schedule: str, ranks: int, parts: int, **more: Any) -> fpipe.Pipeline:
    return fpipe.pipeline(
        fns, schedule, loss=squared, microbatches=parts, group=fpipe.local(ranks), **more
    )


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_first_stage_frozen_zero_bubble_schedule(name: str):
    """There: later stages' weights silently get no gradient."""
    stages = 2 if name == "ZBH1" else 4
    params, (x, t) = weights(stages), batch(8)
    loss, grads = fpipe.value_and_grad(piped([layer] * stages, name, 2, 4, frozen=["0"]))(
        params, x, t
    )
    true_loss, true = plain([layer] * stages, params, x, t, 4)
    assert torch.equal(loss, true_loss)
    assert grads[0] == {"w": None} and same(grads[1:], true[1:])


@pytest.mark.parametrize("name", ["1F1B", *ZERO_BUBBLE])
def test_a_stage_output_that_depends_on_parameters_only(name: str):
    """There: None gradients, or "backward through graph a second time"."""
    stages = 2 if name in ("1F1B", "ZBH1") else 4

    def positions(p, x):
        return x * 0 + p["w"].sum(0), p["w"] * 2

    def use(p, x):
        return layer(p, x[0] + x[1].sum(0))

    fns = [layer] * (stages - 2) + [positions, use]
    params, (x, t) = weights(stages), batch(8)
    loss, grads = fpipe.value_and_grad(piped(fns, name, 2, 4))(params, x, t)
    true_loss, true = plain(fns, params, x, t, 4)
    assert torch.equal(loss, true_loss) and same(grads, true)


@pytest.mark.parametrize("name", ["1F1B", *ZERO_BUBBLE])
def test_a_middle_stage_that_ends_in_a_3d_linear_with_bias(name: str):
    """Its output is a view. There: "Can't detach views in-place"."""
    stages = 2 if name in ("1F1B", "ZBH1") else 4

    def linear(p, x):
        return F.linear(x, p["w"], p["b"])

    params = [{"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)} for _ in range(stages)]
    x, t = torch.randn(8, 2, WIDTH), torch.randn(8, 2, WIDTH)
    loss, grads = fpipe.value_and_grad(piped([linear] * stages, name, 2, 4))(params, x, t)
    true_loss, true = plain([linear] * stages, params, x, t, 4)
    assert torch.equal(loss, true_loss) and same(grads, true)


def test_activation_checkpointing_under_i_and_w():
    """There: recomputed once per parameter group, so K linears give 2 + K forward runs. Here two,
    whatever K is.
    """
    depth, stages, parts = 5, 4, 4

    def deep(p, x):
        for w in p:
            x = torch.tanh(x @ w)
        return x

    params = [[torch.randn(WIDTH, WIDTH) for _ in range(depth)] for _ in range(stages)]
    x, t = batch(8)
    pipe = piped([fpipe.remat(deep)] * stages, "ZBV", 2, parts)
    fpipe.value_and_grad(pipe)(params, x, t)  # traced
    with Count("tanh") as count:
        loss, grads = fpipe.value_and_grad(pipe)(params, x, t)
    runs = count.times / (stages * parts * depth)
    assert runs == 2, "each tanh once in the forward and once more for I and W together"
    true_loss, true = plain([deep] * stages, params, x, t, parts)
    assert torch.equal(loss, true_loss) and same(grads, true)


class Square(torch.autograd.Function):
    """A function whose backward counts its runs, by an operation that nothing else uses."""

    python_runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        Square.python_runs += 1
        x, w = ctx.saved_tensors
        inner = torch.asinh(2 * g * (x @ w))  # no real gradient, which the function decides
        return inner @ w.T, x.T @ inner


def test_custom_autograd_function_under_i_and_w():
    """There: its backward runs twice."""
    stages, parts = 4, 4
    fn = lambda p, x: Square.apply(x, p["w"])
    params, (x, t) = weights(stages), batch(8)
    pipe = piped([fn] * stages, "ZBV", 2, parts)
    fpipe.value_and_grad(pipe)(params, x, t)
    Square.python_runs = 0
    with Count("asinh") as count:
        loss, grads = fpipe.value_and_grad(pipe)(params, x, t)
    assert (count.times, Square.python_runs) == (stages * parts, 0)
    true_loss, true = plain([fn] * stages, params, x, t, parts)
    assert torch.equal(loss, true_loss) and same(grads, true)


def test_memory_at_i():
    """There: nothing is freed before W. Here what W does not need is gone after I."""

    def wide(p, x):
        return torch.tanh(torch.tanh(x @ p["a"]) @ p["b"])

    p, x = {"a": torch.randn(4, 64), "b": torch.randn(64, 4)}, torch.randn(32, 4)
    programs = fpipe.trace(wide, p, x)
    y, saved = programs.forward(p, x)
    alive = [weakref.ref(value) for name, value in saved.values.items() if name[0] not in "px"]
    needed = set(programs.backward_weight.program.inputs)
    gone = {name for name in saved.values if name not in needed}
    assert gone, "the case is too small to tell"
    before = programs.saved_bytes
    _, kept = programs.backward_input(saved, [torch.ones_like(y)])
    del saved, y
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= len(needed & set(programs.saved))
    live = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.values.values()
    }
    assert sum(live.values()) <= programs.held(programs.backward_weight.program.inputs) + x.nbytes
    assert set(kept.values) == set(programs.backward_weight.program.inputs)
    assert before > 0


@pytest.mark.parametrize("name", fpipe.schedule_names())
def test_eval_on_zbv_or_dualpipev(name: str):
    """There: eval crashes; elsewhere it replays the training order and keeps graphs."""
    schedule = fpipe.make_schedule(name, 2, 4)
    stages = schedule.stages
    params, (x, t) = weights(stages), batch(8)
    pipe = piped([layer] * stages, name, 2, 4)
    loss = pipe(params, x, t)
    assert not loss.requires_grad and torch.equal(loss, plain([layer] * stages, params, x, t, 4)[0])
    outputs = fpipe.pipeline([layer] * stages, name, microbatches=4, group=fpipe.local(2))
    y = outputs(params, x)
    true = x
    for p in params:
        true = layer(p, true)
    assert torch.equal(y, true)
    (cached,) = outputs.cache.plans.values()
    for plan in cached.prepared.plans.values():
        assert {ins.kind for ins in plan.instructions} <= {
            "F",
            "SEND",
            "RECV",
            "WAIT",
            "SETTLE",
            "FREE",
        }
        assert all(len(ins.writes) == 1 for ins in plan.instructions if ins.kind == "F"), (
            "something is saved"
        )


def test_eval_after_step():
    """There: pending gradients are divided by the number of microbatches again."""
    params, (x, t) = weights(4), batch(8)
    pipe = piped([layer] * 4, "ZBV", 2, 4)
    _, grads = fpipe.value_and_grad(pipe)(params, x, t)
    copies = optree.tree_map(torch.clone, grads)
    pipe(params, x, t)
    assert same(grads, copies)
    assert same(fpipe.grad(pipe)(params, x, t), copies)


def test_two_steps_without_zeroing():
    """There: 1.25 times, not twice."""
    params, (x, t) = weights(4), batch(8)
    step = fpipe.grad(piped([layer] * 4, "Interleaved1F1B", 2, 4))
    first, second = step(params, x, t), step(params, x, t)
    true = plain([layer] * 4, params, x, t, 4)[1]
    assert same(optree.tree_map(torch.add, first, second), optree.tree_map(lambda g: 2 * g, true))


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV", "LoopedBFS"])
def test_uneven_or_shorter_microbatches_a_changed_length_at_the_second_step(name: str):
    """There: stale shapes, or the receiver aborts."""
    stages = fpipe.make_schedule(name, 2, 4).stages
    pipe = piped([layer] * stages, name, 2, 4)
    params = weights(stages)
    for sizes in ((3, 1, 2, 5), (2, 2), (7,), (3, 1, 2, 5), (1, 1, 1, 1, 1, 4)):
        xs, ts = [torch.randn(n, WIDTH) for n in sizes], [torch.randn(n, WIDTH) for n in sizes]
        loss, grads = fpipe.value_and_grad(pipe)(
            params, fpipe.Microbatches(xs), fpipe.Microbatches(ts)
        )
        order = list(range(len(sizes)))[:: -1 if name == "LoopedBFS" else 1]
        _, true = plain([layer] * stages, params, [xs[i] for i in order], [ts[i] for i in order], 0)
        true_loss, _ = plain([layer] * stages, params, xs, ts, 0)
        assert torch.equal(loss, true_loss) and same(grads, true), sizes


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipe"])
def test_dict_between_stages(name: str):
    """There: rejected."""
    stages = fpipe.make_schedule(name, 2, 4).stages

    def spread(p, x):
        return {
            "h": layer(p, x if isinstance(x, Tensor) else x["h"] + x["more"]["skip"]),
            "more": {"skip": p["w"][0]},
        }

    def gather(p, x):
        return layer(p, x["h"] + x["more"]["skip"])

    fns = [spread] * (stages - 1) + [gather]
    params, (x, t) = weights(stages), batch(8)
    loss, grads = fpipe.value_and_grad(piped(fns, name, 2, 4))(params, x, t)
    true_loss, true = plain(fns, params, x, t, 4)
    assert torch.equal(loss, true_loss)
    if name == "DualPipe":  # on two ranks, each with a sum
        assert all(map(torch.allclose, optree.tree_leaves(grads), optree.tree_leaves(true)))
    else:
        assert same(grads, true)


def test_batch_norm():
    """There: one extra batch is counted, from a dry run on uninitialised memory."""

    def norm(p, state, x):
        mean, var = state["mean"].clone(), state["var"].clone()
        y = F.batch_norm(x @ p["w"], mean, var, training=True)
        return y, {"mean": mean, "var": var, "count": state["count"] + 1}

    fresh = lambda: {"mean": torch.zeros(WIDTH), "var": torch.ones(WIDTH), "count": torch.tensor(0)}
    params, (x, t) = weights(4), batch(8)
    pipe = piped([fpipe.Stage(norm, state=True)] * 4, "ZBV", 2, 4)
    start = [fresh() for _ in range(4)]
    (_, state), _ = fpipe.value_and_grad(pipe)(params, x, t, state=start)
    true = [fresh() for _ in range(4)]
    with torch.no_grad():
        for y in x.chunk(4):
            for s in range(4):
                y, true[s] = norm(params[s], true[s], y)
    assert same(state, true) and all(s["count"] == 4 for s in state)
    assert same(start, [fresh() for _ in range(4)])


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_of_a_stage():
    """There: rejected."""
    params, (x, t) = weights(4), batch(8)
    pipe = piped([layer] * 4, "ZBV", 2, 4, compile="aot_eager")
    loss, grads = fpipe.value_and_grad(pipe)(params, x, t)
    true_loss, true = plain([layer] * 4, params, x, t, 4)
    assert torch.allclose(loss, true_loss)
    assert all(map(torch.allclose, optree.tree_leaves(grads), optree.tree_leaves(true)))


@pytest.mark.parametrize("name", ["DualPipeV", "DualPipe"])
def test_overlap_f_b(name: str):
    """There: the two run one after the other. Here a fused action is one action of the plan, and
    right either way.
    """
    schedule = fpipe.make_schedule(name, 2, 6)
    assert any(isinstance(action, fpipe.Fused) for row in schedule for action in row)
    params, (x, t) = weights(schedule.stages), batch(12)
    loss, grads = fpipe.value_and_grad(piped([layer] * schedule.stages, name, 2, 6))(params, x, t)
    true_loss, true = plain([layer] * schedule.stages, params, x, t, 6)
    assert torch.equal(loss, true_loss)
    assert all(map(torch.allclose, optree.tree_leaves(grads), optree.tree_leaves(true)))


@pytest.mark.parametrize(
    "text", ["[0F0, 2F0xyz]", "[0F0, 0B0, 0B0]", "[0F0, 0F1, 0B0]", "[1B0, 1F0]\n[0F0, 0B0]"]
)
def test_parser_and_validator(text: str):
    """There: accepts ``2F0xyz``, duplicates, orders that deadlock, microbatches never run
    backward.
    """
    with pytest.raises(fpipe.errors.ScheduleError):
        fpipe.Schedule.parse(text).check()


def test_an_unknown_deadlock():
    """There: "Malformed compute schedule", no rank, no action."""
    crossed = "[0F0, 0F1, 0B1, 0B0]\n[1F1, 1B1, 1F0, 1B0]".replace(
        "0F0, 0F1, 0B1, 0B0", "0F0, 0B0, 0F1, 0B1"
    )
    with pytest.raises(fpipe.errors.ScheduleError, match=r"rank \d") as caught:
        fpipe.Schedule.parse(crossed).check()
    assert caught.value.rank is not None and caught.value.position is not None
    assert re.search(r"\b[01][FB][01]\b", str(caught.value))


ROWS = """
first stage frozen, zero-bubble schedule; a stage output that depends on parameters only; a middle
stage that ends in a 3-D linear with bias; activation checkpointing under I/W; custom
autograd.Function under I/W; memory at I; eval on ZBV or DualPipeV; eval after step; two steps
without zeroing; uneven or shorter microbatches, a changed length at the second step; dict between
stages; BatchNorm; torch.compile of a stage; OVERLAP_F_B; parser; an unknown deadlock
"""


def test_every_case_has_its_test():
    plainly = lambda text: re.sub(
        r"[^a-z]", "", text.lower().replace("/", "and").replace("autograd.", "autograd")
    )
    tests = [
        plainly(name.removeprefix("test_").replace("3d", "d"))
        for name in globals()
        if name.startswith("test_")
    ]
    for row in ROWS.replace("\n", " ").replace("3-D", "D").split(";"):
        assert any(test.startswith(plainly(row)) for test in tests), row
