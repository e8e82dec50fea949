"""The eager engine: functions with data-dependent Python, bit for bit as plain autograd, nothing
computed twice.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fpipe
from common import same
from fpipe.programs.internals import is_fake
from fpipe.programs.trace_one import trace
from models import MODELS, SEED, one

RUNS: Counter[str] = Counter()  # how often something of a test's ran


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape) / 2


# ---- stages that look at their data ----
def branching(p: Any, x: Tensor) -> Tensor:
    h = F.linear(x, p["w"], p["b"])
    h = h.tanh() if h.sum().item() > 0 else h.sigmoid()
    return x + F.linear(h, p["w2"])


def experts(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A mixture of experts that loops over those that were hit."""
    h = x.reshape(-1, x.shape[-1])
    gates = F.linear(h, p["router"]).softmax(-1)
    weight, index = gates.topk(1, -1)
    out = torch.zeros_like(h)
    for e in index.unique().tolist():
        rows = (index == e).any(-1).nonzero()[:, 0]
        out = out.index_add(0, rows, F.gelu(F.linear(h[rows], p["experts"][e])) * weight[rows])
    return x + out.view(x.shape), gates.mean(0).square().sum()


def halved(p: Any, x: Tensor) -> Tensor:
    while x.norm().item() > 1:
        x = x / 2
    return F.dropout(x @ p, 0.3)


def forces(p: Any, x: Tensor) -> Tensor:
    """Energies and forces, by a leaf of its own."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        energy = (at @ p).tanh().square().sum(-1, keepdim=True)
        (slope,) = torch.autograd.grad(energy.sum(), at, create_graph=True)
    return torch.cat([energy, -slope], -1) + x.sum(-1, keepdim=True)


def shifted(p: Any, x: Tensor) -> Tensor:
    """With a leaf that is no view of its input, where data decides."""
    shift = torch.zeros(3, requires_grad=True)
    return (x @ p + shift).sin() if x.sum().item() > 0 else x @ p - shift


def make(stage: Any) -> Any:
    fn = stage.fn if isinstance(stage, fpipe.Stage) else stage
    if fn is experts:
        return {"router": randn(4, 3), "experts": [randn(3, 3) for _ in range(4)]}
    return {"w": randn(3, 3), "b": randn(3), "w2": randn(3, 3)} if fn is branching else randn(3, 3)


def squared(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean() if y.mean().item() > 0 else (y - t).abs().mean()


MIXED = [
    branching,
    fpipe.Stage(experts, aux_loss=True),
    branching,
    fpipe.Stage(experts, aux_loss=True),
]


def reference(
    stages: list[Any], params: list[Any], x: Tensor, t: Tensor, parts: int
) -> tuple[Tensor, Any, Tensor]:
    """Loss, parameter gradients and input gradient by plain autograd, microbatch after
    microbatch.
    """
    leaves = optree.tree_map(lambda v: v.clone().requires_grad_(), params)
    flat, spec = optree.tree_flatten(leaves)
    total, sums, dxs = torch.zeros(()), [torch.zeros_like(v) for v in flat], []
    for part, target in zip(x.chunk(parts), t.chunk(parts), strict=True):
        y = start = part.clone().requires_grad_()
        extra = None
        for stage, p in zip(stages, leaves, strict=True):
            y = stage(p, y)
            if isinstance(y, tuple):
                y, more = y
                extra = more if extra is None else extra + more
        loss = squared(y, target)
        loss = (loss if extra is None else loss + extra) * (1.0 / parts)
        *grads, dx = torch.autograd.grad(loss, [*flat, start], allow_unused=True)
        sums = [s if g is None else s + g for s, g in zip(sums, grads, strict=True)]
        total, dxs = total + loss.detach(), [*dxs, dx]
    return total, optree.tree_unflatten(spec, sums), torch.cat(dxs)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"])
def test_bit_for_bit_where_data_decides(schedule: str):
    torch.manual_seed(1)
    params = [make(stage) for stage in MIXED]
    x, t = torch.randn(8, 2, 3), torch.randn(8, 2, 3)
    ranks = 4 if schedule in ("GPipe", "1F1B") else 2
    pipe = fpipe.pipeline(
        MIXED, schedule, loss=squared, microbatches=4, group=fpipe.local(ranks), engine="eager"
    )
    for _ in range(2):
        loss, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))(params, x, t)
        wanted = reference(MIXED, params, x, t, 4)
        assert (
            torch.equal(loss, wanted[0]) and same(grads, wanted[1]) and torch.equal(dx, wanted[2])
        )


@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit_on_the_models_of_the_trace_engine(name: str):
    model = MODELS[name]
    stages, params, state = model.make(4)
    x, t = model.batch(3)
    pipe = fpipe.pipeline(
        stages,
        "ZBV",
        loss=model.loss,
        microbatches=3,
        group=fpipe.local(2),
        seed=SEED,
        tied=model.tied(4),
        engine="eager",
    )
    side = {} if state is None else {"state": state}
    value, grads = fpipe.value_and_grad(pipe, has_aux=model.has_aux)(params, x, t, **side)
    loss = value[0] if isinstance(value, tuple) else value
    each = [one(name, 4, 3, k) for k in range(3)]
    assert torch.equal(loss, each[0].loss + each[1].loss + each[2].loss)
    if name != "tied":
        want = [
            [a + b + c for a, b, c in zip(*leaves, strict=True)]
            for leaves in zip(*(k.grads for k in each), strict=True)
        ]
        assert all(same(optree.tree_leaves(g), w) for g, w in zip(grads, want, strict=True))
    traced = fpipe.pipeline(
        stages,
        "ZBV",
        loss=model.loss,
        microbatches=3,
        group=fpipe.local(2),
        seed=SEED,
        tied=model.tied(4),
    )
    other, others = fpipe.value_and_grad(traced, has_aux=model.has_aux)(params, x, t, **side)
    assert same(grads, others)
    assert optree.tree_all(
        optree.tree_map(
            lambda a, b: bool((torch.as_tensor(a) == torch.as_tensor(b)).all()), value, other
        )
    )


# ---- one stage, by hand ----
class Cube(torch.autograd.Function):
    """An old-style function whose backward looks at its data and uses what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        RUNS["backward"] += 1
        factor = 3.0 if ctx.saved_tensors[0].sum().item() > 0 else 3
        return dy * factor * ctx.saved_tensors[0] ** 2 * ctx.saved_tensors[1], (
            dy * ctx.saved_tensors[0] ** 3
        ).sum(0)


def normed(p: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(x, (3,), p["g"], p["b"])
    q, k, v = F.linear(h, p["qkv"]).view(2, 3, 3, 3).permute(2, 0, 1, 3)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) @ p["o"] + x


def writes(p: Tensor, x: Tensor) -> Tensor:
    return x.mul_(2).relu_() @ p


def hooked(p: list[Tensor], x: Tensor) -> Tensor:
    h = x @ p[0]
    h.register_hook(halve)
    return (h @ p[1]).sin()


def halve(gradient: Tensor) -> Tensor:
    RUNS["hook"] += 1
    return gradient * 0.5


def recurrent(p: list[Tensor], x: Tensor) -> Tensor:
    zero = torch.zeros(1, 2, 3)
    return torch.lstm(x, [zero, zero], p, True, 1, 0.0, True, False, True)[0]


def by_row(p: Tensor, x: Tensor) -> Tensor:
    """torch.func inside."""
    inner = torch.func.grad(lambda row: (row @ p).tanh().sum())
    return torch.func.vmap(inner)(x) + x


class Case(NamedTuple):
    """A function with arguments for it."""

    fn: Callable[..., Any]
    params: Callable[[], Any]
    x: Callable[[], Any]


CASES = {
    "a branch": Case(branching, lambda: make(branching), lambda: randn(2, 3)),
    "a loop": Case(lambda p, x: halved(p, x * 9), lambda: randn(3, 3), lambda: randn(2, 3)),
    "experts": Case(lambda p, x: experts(p, x)[0], lambda: make(experts), lambda: randn(5, 3)),
    "attention": Case(
        normed,
        lambda: {"g": randn(3), "b": randn(3), "qkv": randn(9, 3), "o": randn(3, 3)},
        lambda: randn(2, 3, 3),
    ),
    "ends in a view": Case(
        lambda p, x: F.linear(x, p[0], p[1]).transpose(0, 1),
        lambda: [randn(4, 3), randn(4)],
        lambda: randn(2, 3, 3),
    ),
    "depends on parameters only": Case(
        lambda p, x: (p.sin(), x * p, p.exp().sum() * x), lambda: randn(3), lambda: randn(2, 3)
    ),
    "a parameter as it is": Case(
        lambda p, x: {"p": p, "x": x, "y": x + p}, lambda: randn(3), lambda: randn(2, 3)
    ),
    "a weight used three times": Case(
        lambda p, x: ((x @ p).tanh() @ p).tanh() @ p.t(), lambda: randn(3, 3), lambda: randn(2, 3)
    ),
    "a weight used directly and transposed": Case(
        lambda p, x: F.linear((x * p).sin() * p, p).cos() * p @ p.t(),
        lambda: randn(3, 3),
        lambda: randn(3, 3),
    ),
    "a weight in parts": Case(
        lambda p, x: (x @ p.chunk(2, 1)[0]).sin() @ p.chunk(2, 1)[1].t(),
        lambda: randn(3, 4),
        lambda: randn(2, 3),
    ),
    "parts of one split": Case(
        lambda p, x: (lambda a, b: (x @ a).sin() @ b.t())(*p.chunk(2, 1)),
        lambda: randn(3, 4),
        lambda: randn(2, 3),
    ),
    "a weight made of weights": Case(
        lambda p, x: (x @ (p[0] * p[1])).sin() * p[2],
        lambda: [randn(3, 3), randn(3, 3), randn(3)],
        lambda: randn(2, 3),
    ),
    "unused": Case(
        lambda p, x: (x[0] @ p["a"]).exp(),
        lambda: {"a": randn(3, 3), "b": randn(3, 3)},
        lambda: [randn(2, 3), randn(2, 3)],
    ),
    "integers and numbers": Case(
        lambda p, x: {"y": x["h"] @ p * x["k"], "i": x["i"] + 1, "k": x["k"]},
        lambda: randn(3, 3),
        lambda: {"h": randn(2, 3), "i": torch.arange(3), "k": 5},
    ),
    "writes into its input": Case(writes, lambda: randn(3, 3), lambda: randn(2, 3)),
    "hooks": Case(hooked, lambda: [randn(3, 3), randn(3, 3)], lambda: randn(2, 3)),
    "lstm": Case(
        recurrent,
        lambda: [randn(12, 3), randn(12, 3), randn(12), randn(12)],
        lambda: randn(2, 4, 3),
    ),
    "torch.func": Case(by_row, lambda: randn(3, 3), lambda: randn(2, 3)),
    "an old-style function": Case(
        lambda p, x: Cube.apply(Cube.apply(x @ p[0], p[1]), p[2]) @ p[0],
        lambda: [randn(3, 3), randn(3), randn(3)],
        lambda: randn(2, 3),
    ),
    "an old-style function of weights": Case(
        lambda p, x: ((x * p[0]).sin() * p[0]) @ Cube.apply(p[0], p[1]),
        lambda: [randn(3, 3), randn(3)],
        lambda: randn(3, 3),
    ),
    "a checkpoint": Case(
        lambda p, x: (
            checkpoint(lambda h: F.dropout((h @ p).sin() @ p, 0.5), x.sin(), use_reentrant=False)
            @ p
        ),
        lambda: randn(3, 3),
        lambda: randn(2, 3),
    ),
    "remat": Case(
        fpipe.remat(lambda p, x: F.dropout((x @ p).sin(), 0.5) @ p),
        lambda: randn(3, 3),
        lambda: randn(2, 3),
    ),
    "remat of a part": Case(
        lambda p, x: fpipe.remat(lambda p, h: F.dropout((h @ p).sin(), 0.5) @ p)(p, x.exp()) @ p,
        lambda: randn(3, 3),
        lambda: randn(2, 3),
    ),
    "a leaf of its own": Case(forces, lambda: randn(3, 3), lambda: randn(2, 3)),
    "a leaf of its own and remat": Case(
        fpipe.remat(forces), lambda: randn(3, 3), lambda: randn(2, 3)
    ),
    "a leaf where data decides": Case(shifted, lambda: randn(3, 3), lambda: randn(2, 3)),
    "convolution": Case(
        lambda p, x: F.group_norm(F.conv2d(x, p[0], p[1], padding=1), 2, p[2]).relu(),
        lambda: [randn(2, 2, 3, 3), randn(2), randn(2)],
        lambda: randn(1, 2, 4, 4),
    ),
    "bfloat16": Case(
        lambda p, x: F.gelu(x @ p) @ p,
        lambda: randn(3, 3).bfloat16(),
        lambda: randn(2, 3).bfloat16(),
    ),
    "complex": Case(
        lambda p, x: (x @ p).abs(),
        lambda: torch.randn(3, 3, dtype=torch.complex64),
        lambda: randn(2, 3).to(torch.complex64),
    ),
    "expanded": Case(
        lambda p, x: (x.sum() * p).expand(4, 3), lambda: randn(3), lambda: randn(2, 3)
    ),
}


def by_autograd(case: Case, params: Any, x: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The output, its cotangents, and the gradients of input and parameters."""
    leaf = lambda v: (
        v.clone().requires_grad_()
        if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())
        else v
    )
    p, v = optree.tree_map(leaf, params), optree.tree_map(leaf, x)
    inside = (
        optree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, v)
        if case.fn is writes
        else v
    )
    torch.manual_seed(3)
    y = case.fn(p, inside)
    outs = [t for t in optree.tree_leaves(y) if isinstance(t, Tensor)]
    torch.manual_seed(4)
    dys = [torch.randn_like(t) if t.is_floating_point() or t.is_complex() else t for t in outs]
    live = [(t, d) for t, d in zip(outs, dys, strict=True) if t.requires_grad]
    wrt = [t for t in optree.tree_leaves((v, p)) if isinstance(t, Tensor) and t.requires_grad]
    grads = torch.autograd.grad([t for t, _ in live], wrt, [d for _, d in live], allow_unused=True)
    full = [torch.zeros_like(t) if g is None else g for t, g in zip(wrt, grads, strict=True)]
    return optree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, y), dys, full


@pytest.mark.parametrize("name", CASES)
def test_programs_are_plain_autograd(name: str):
    case = CASES[name]
    torch.manual_seed(2)
    params, x = case.params(), case.x()
    before = optree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (params, x))
    y, dys, grads = by_autograd(case, params, x)
    own = trace(fpipe.Stage(case.fn, engine="eager"), params, x)
    assert own.eager
    for split in (False, True):
        torch.manual_seed(3)
        RUNS.clear()
        got, saved = own.forward(params, x)
        assert optree.tree_all(
            optree.tree_map(
                lambda a, b: torch.equal(a, b) if isinstance(a, Tensor) else a == b, got, y
            )
        )
        if split:
            dx, kept = own.backward_input(saved, dys)
            dp = own.backward_weight(kept)
        else:
            dx, dp = own.backward(saved, dys)
        assert same(optree.tree_leaves((dx, dp)), grads)
        assert RUNS["hook"] == (name == "hooks")
        assert RUNS["backward"] == {
            "an old-style function": 2,
            "an old-style function of weights": 1,
        }.get(name, 0)
    after = (params, x)
    assert optree.tree_all(
        optree.tree_map(
            lambda a, b: torch.equal(a, b) if isinstance(a, Tensor) else a == b, before, after
        )
    )


# ---- nothing twice, nothing held too long ----
def counted(name: str, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any) -> Tensor:
        RUNS[name] += 1
        return fn(*args)

    return call


RECOMPUTED = {
    "remat": fpipe.remat(counted("runs", lambda p, x: (x @ p[0]).sin() @ p[1])),
    "a part": lambda p, x: (
        fpipe.remat(counted("runs", lambda p, x: (x @ p[0]).sin() @ p[1]))(p, x) @ p[2]
    ),
    "checkpoint": lambda p, x: checkpoint(
        counted("runs", lambda x: (x @ p[0]).sin() @ (p[1] * p[2]).sin()),
        x.sin(),
        use_reentrant=False,
    ),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_one_recompute_serves_i_and_w(name: str):
    p, x = [randn(3, 3) for _ in range(3)], randn(2, 3)
    own = trace(fpipe.Stage(RECOMPUTED[name], engine="eager"), p, x)
    RUNS.clear()
    _, saved = own.forward(p, x)
    assert RUNS["runs"] == 1
    _, kept = own.backward_input(saved, randn(2, 3))
    own.backward_weight(kept)
    assert RUNS["runs"] == 2


def test_what_w_does_not_need_is_freed_after_i():
    held: list[StorageWeakRef] = []

    def fn(p: Any, x: Tensor) -> Tensor:
        first = (x @ p[0]).sin()
        second = first.exp()
        third = second.tanh()
        held[:] = [StorageWeakRef(t.untyped_storage()) for t in (second, third)]
        return (third @ p[1]).cos()

    p, x = [randn(3, 3), randn(3, 3)], randn(2, 3)
    own = trace(fpipe.Stage(fn, engine="eager"), p, x)
    _, saved = own.forward(p, x)
    second, third = held
    assert not second.expired() and not third.expired()
    _, kept = own.backward_input(saved, randn(2, 3))
    del saved
    gc.collect()
    assert second.expired(), "the factor of exp serves the input gradient alone"
    assert not third.expired(), "an input of the second weight's gradient"
    assert own.backward_weight(kept)
    gc.collect()
    assert third.expired()
    assert (
        own.saved_bytes == 4 * 2 * 3 * 5
    )  # x, cos of the first, second, third, and sin of the last
    assert own.kept_bytes == 4 * 2 * 3 * 4  # x and third, and what arrived at the two products


# ---- what is known before the run ----
def looks(p: Tensor, x: Tensor) -> Tensor:
    RUNS["looks"] += 1
    return x @ p if x.sum().item() > 0 else x.sin() @ p


def test_a_function_with_a_likeness_is_not_run_before_its_time():
    pipe = fpipe.pipeline(
        [fpipe.Stage(looks, engine="eager", like=lambda p, x: x)],
        loss=squared_loosely,
        microbatches=2,
    )
    p, x = randn(3, 3), randn(4, 3)
    RUNS.clear()
    pipe.plan([p], x, x)
    assert RUNS["looks"] == 0
    fpipe.grad(pipe)([p], x, x)
    assert RUNS["looks"] == 2


def squared_loosely(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def test_a_rehearsal_leaves_no_traces():
    count, noise = torch.zeros(()), []

    def fn(p: Tensor, x: Tensor) -> Tensor:
        noise.append(torch.rand(()))
        return x @ p * (2 if x.max().item() > 0 else 1) + count

    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    p, x = randn(3, 3).clone(), torch.ones(2, 3)
    torch.manual_seed(5)
    own = trace(fpipe.Stage(fn, engine="eager"), p, x)
    assert torch.equal(torch.rand(2), expected)
    assert len(noise) == 2  # on fake tensors, then on invented numbers
    assert own.ys == ("y0",)


@pytest.mark.parametrize("looking", [False, True])
def test_a_write_into_a_captured_tensor_is_refused_before_it_happens(looking: bool):
    count = torch.zeros(())

    def fn(p: Tensor, x: Tensor) -> Tensor:
        if looking and x.sum().item() > 1e9:
            return x
        count.view(1)[0].add_(1)
        return x @ p

    with pytest.raises(fpipe.errors.TraceError, match="closes over"):
        trace(fpipe.Stage(fn, engine="eager"), randn(3, 3), randn(2, 3))
    assert count == 0


@pytest.mark.parametrize("looking", [False, True])
def test_a_write_into_a_parameter_is_refused(looking: bool):
    def fn(p: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            p.add_(int(looking and x.sum().item() > 1e9) + 1)
        return x @ p

    with pytest.raises(fpipe.errors.TraceError, match="writes into a parameter"):
        trace(fpipe.Stage(fn, engine="eager"), randn(3, 3), randn(2, 3))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize(
    "fn", [torch.tanh, torch.exp, torch.relu, torch.sqrt, lambda h: h.softmax(-1)]
)
def test_a_write_over_what_the_backward_needs_raises_as_in_torch(schedule: str, fn: Any):
    stages = [lambda p, x: x * p, lambda p, x: fn(x).add_(1)]
    params, x = [torch.ones(1), None], torch.rand(2, 3)
    for engine in ("eager", "trace"):
        pipe = fpipe.pipeline(
            stages,
            schedule,
            loss=lambda y: y.square().mean(),
            microbatches=2,
            engine=engine,
            group=fpipe.local(2),
        )
        with pytest.raises(fpipe.errors.ActionError, match="modified by an inplace operation"):
            fpipe.value_and_grad(pipe)(params, x)


@pytest.mark.parametrize("looking", [False, True])
def test_a_captured_tensor_that_wants_a_gradient_is_refused(looking: bool):
    other = randn(3, 3).requires_grad_()

    def fn(p: Tensor, x: Tensor) -> Tensor:
        return x @ p @ other * (2 if looking and x.sum().item() > 0 else 1)

    with pytest.raises(fpipe.errors.TraceError, match="would silently not get"):
        trace(fpipe.Stage(fn, engine="eager"), randn(3, 3), randn(2, 3))
    own = trace(fpipe.Stage(fn, engine="eager", like=lambda p, x: x), randn(3, 3), randn(2, 3))
    with pytest.raises(fpipe.errors.TraceError, match="would silently not get"):
        own.forward(randn(3, 3), randn(2, 3))


def fussy(p: Tensor, x: Tensor) -> Tensor:
    assert x.std().item() < 1e-9 and x.sum().item() < 0, "made-up numbers are not like that"
    return x @ p


def test_a_function_that_cannot_be_rehearsed_asks_for_a_likeness():
    p, x = randn(3, 3), -torch.ones(2, 3)
    with pytest.raises(
        fpipe.errors.StageError,
        match=r"(?s)fussy.*AssertionError at .*test_eager.*like=lambda p, x: x",
    ):
        trace(fpipe.Stage(fussy, engine="eager"), p, x)
    own = trace(fpipe.Stage(fussy, engine="eager", like=lambda p, x: x), p, x)
    assert torch.equal(own.forward(p, x)[0], x @ p)


def test_an_ordinary_mistake_is_reported_as_one():
    with pytest.raises(fpipe.errors.ActionError, match=r"test_eager.*cannot be multiplied"):
        trace(fpipe.Stage(lambda p, x: x @ p, engine="eager"), randn(4, 4), randn(2, 3))


def test_a_way_not_seen_before_may_carry_a_gradient():
    """On invented numbers the mask contains only ones and has no gradient; here it depends on the
    input.
    """

    def fn(p: Tensor, x: Tensor) -> dict[str, Tensor]:
        gate = torch.ones_like(x) if x.sum().item() > 0 else x.exp()
        return {"gate": gate, "y": x @ p}

    stages = [fpipe.Stage(fn, engine="eager"), lambda p, x: x["gate"] * x["y"] * p]
    params, x = [randn(3, 3), randn(3)], -torch.ones(4, 3)
    pipe = fpipe.pipeline(stages, loss=squared_loosely, microbatches=2, group=fpipe.local(2))
    (grads, dx) = fpipe.grad(pipe, (0, 1))(params, x, x)
    leaf = x.clone().requires_grad_()
    total = sum(
        squared_loosely(part.exp() * (part @ params[0]) * params[1], -torch.ones(2, 3))
        for part in leaf.chunk(2)
    )
    assert torch.allclose(dx, torch.autograd.grad(total / 2, leaf)[0]) and grads[0].abs().sum() > 0  # type: ignore[operator]


# ---- what a run may find ----
def otherwise(name: str) -> Callable[..., Any]:
    def fn(p: Tensor, x: Tensor) -> Any:
        ordinary = x.sum().item() < 100
        if name == "shape":
            return x @ p if ordinary else (x @ p)[:1]
        if name == "dtype":
            return x @ p if ordinary else (x @ p).double()
        if name == "number":
            return {"y": x @ p, "n": 0 if ordinary else 1}
        if name == "structure":
            return x @ p if ordinary else [x @ p]
        if name == "input":
            return x @ p if ordinary else x.mul_(2) @ p
        with torch.no_grad():
            return x @ (p if ordinary else p.mul_(2))

    return fn


@pytest.mark.parametrize("name", ["shape", "dtype", "number", "structure", "input", "parameter"])
def test_what_differs_from_the_plan_is_reported(name: str):
    stages = [lambda p, x: x * p, fpipe.Stage(otherwise(name), engine="eager", name="odd")]
    pipe = fpipe.pipeline(
        stages,
        loss=lambda y, t: sum(
            leaf.sum() for leaf in optree.tree_leaves(y) if isinstance(leaf, Tensor)
        ),
        microbatches=2,
        group=fpipe.local(2),
    )
    run = fpipe.value_and_grad(pipe)
    run([torch.ones(3), randn(3, 3)], torch.ones(4, 3), torch.zeros(4))
    with pytest.raises(
        fpipe.errors.ActionError, match=r"1F0 \(odd .*float32\[3, 3\]; float32\[2, 3\].*"
    ):
        run([torch.ones(3) * 1000, randn(3, 3)], torch.ones(4, 3), torch.zeros(4))


def test_a_gradient_that_nobody_expected_is_reported():
    """The function looks at no data, but at something else: on fake tensors it gave no gradient."""
    calls = []

    def fn(p: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return x.detach() * 2 if len(calls) == 1 else x * p

    own = trace(fpipe.Stage(fn, engine="eager"), randn(3), randn(2, 3))
    with pytest.raises(fpipe.errors.StageError, match="one that carries a gradient"):
        own.forward(randn(3), randn(2, 3))


def test_state_that_is_written_in_place_stays_with_the_caller():
    def fn(p: Tensor, state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = F.batch_norm(x, state["mean"], state["var"], p, training=bool(x.sum().item() < 1e9))
        return y, state

    state = {"mean": torch.zeros(3), "var": torch.ones(3)}
    stage = fpipe.Stage(fn, state=True, engine="eager")
    pipe = fpipe.pipeline([stage], loss=squared_loosely, microbatches=2)
    x = randn(8, 3)
    (_, [after]), _ = fpipe.value_and_grad(pipe)([torch.ones(3)], x, x, state=[state])
    assert torch.equal(state["mean"], torch.zeros(3))
    for part in x.chunk(2):
        F.batch_norm(part, state["mean"], state["var"], training=True)
    assert same(after, state)


def test_an_error_names_action_stage_shapes_and_line():
    def picky(p: Tensor, x: Tensor) -> Tensor:
        if x.sum().item() > 100:
            raise KeyError("too large")
        return x @ p

    pipe = fpipe.pipeline(
        [lambda p, x: x * p, fpipe.Stage(picky, engine="eager", name="picky")],
        loss=squared_loosely,
        microbatches=2,
        group=fpipe.local(2),
    )
    with pytest.raises(
        fpipe.errors.ActionError,
        match=r"1F0 \(picky .*float32\[2, 3\].*KeyError at .*raise KeyError",
    ) as caught:
        fpipe.grad(pipe)([torch.ones(3) * 1000, randn(3, 3)], torch.ones(4, 3), torch.ones(4, 3))
    assert isinstance(caught.value.__cause__, KeyError)


def test_compile_of_an_eager_stage_is_refused():
    with pytest.raises(fpipe.errors.StageError, match="only traced programs are compiled"):
        trace(
            fpipe.Stage(branching, engine="eager", compile="aot_eager"),
            make(branching),
            randn(2, 3),
        )


# ---- in a pipeline ----
def test_frozen_unused_and_wider():
    def fn(p: Any, x: Tensor) -> Tensor:
        return x @ p["used"] * (2 if x.sum().item() > 0 else 1) + p["frozen"]

    torch.manual_seed(0)
    params = [
        {
            "used": randn(3, 3).bfloat16(),
            "frozen": randn(3).bfloat16(),
            "unused": randn(5).bfloat16(),
            "index": torch.arange(3),
        }
        for _ in range(4)
    ]
    x = randn(6, 3).bfloat16()
    pipe = fpipe.pipeline(
        [fn] * 4,
        "ZBV",
        loss=squared_loosely,
        microbatches=3,
        group=fpipe.local(2),
        engine="eager",
        frozen=["*.frozen"],
        accumulate=torch.float32,
    )
    for grads in fpipe.grad(pipe)(params, x, x):
        assert grads["frozen"] is None and grads["index"] is None
        assert grads["used"].dtype == torch.float32 and grads["used"].abs().sum() > 0
        assert grads["unused"].shape == (5,) and not grads["unused"].any()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_forward_only_and_vjp(schedule: str):
    torch.manual_seed(1)
    stages = [branching] * 4
    params, x, dy = [make(branching) for _ in stages], randn(6, 3), randn(6, 3)
    group = fpipe.local(4 if schedule == "1F1B" else 2)
    pipe = fpipe.pipeline(stages, schedule, microbatches=3, group=group, engine="eager")
    leaves = optree.tree_map(lambda v: v.clone().requires_grad_(), params)
    start = x.clone().requires_grad_()
    ys = []
    for y in start.chunk(3):
        for p in leaves:
            y = branching(p, y)
        ys.append(y)
    y, pullback = fpipe.vjp(pipe, params, x)
    assert torch.equal(pipe(params, x), torch.cat(ys)) and torch.equal(y, torch.cat(ys))
    dparams, dx = pullback(dy)
    wanted = torch.autograd.grad(torch.cat(ys), [start, *optree.tree_leaves(leaves)], dy)
    assert torch.equal(dx, wanted[0])
    assert all(map(torch.allclose, optree.tree_leaves(dparams), wanted[1:]))


def test_side_inputs_aux_and_a_loss_that_looks():
    def masked(p: Tensor, x: Tensor, *, keep: Tensor) -> Tensor:
        rows = keep.nonzero()[:, 0]
        return x.index_add(0, rows, x[rows] @ p)

    def loss(y: Tensor, t: Tensor, *, keep: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return (y - t)[keep].square().sum() / max(int(keep.sum()), 1), {
            "rows": keep.sum(),
            "y": y.mean(),
        }

    torch.manual_seed(3)
    params, x, t, keep = [randn(3, 3), randn(3, 3)], randn(8, 3), randn(8, 3), torch.rand(8) > 0.4
    like = lambda y, t, *, keep: (y.sum(), {"rows": keep.sum(), "y": y.mean()})
    looking = fpipe.Stage(loss, engine="eager", like=like)
    pipe = fpipe.pipeline(
        [masked, masked], loss=looking, microbatches=4, group=fpipe.local(2), engine="eager"
    )
    (value, aux), grads = fpipe.value_and_grad(pipe, has_aux=True)(params, x, t, keep=keep)
    leaves = [p.clone().requires_grad_() for p in params]
    total, sums = torch.zeros(()), [torch.zeros(3, 3)] * 2
    for m, (part, target, k) in enumerate(zip(x.chunk(4), t.chunk(4), keep.chunk(4), strict=True)):
        y = part
        for p in leaves:
            y = masked(p, y, keep=k)
        one_loss = loss(y, target, keep=k)[0] * 0.25
        sums = [s + g for s, g in zip(sums, torch.autograd.grad(one_loss, leaves), strict=True)]
        total = total + one_loss.detach()
        assert aux[m]["rows"] == k.sum()
    assert torch.equal(value, total) and same(list(grads), sums)


def test_under_debug():
    pipe = fpipe.pipeline(
        MIXED, "ZBV", loss=squared, microbatches=2, group=fpipe.local(2), engine="eager"
    )
    params, x = [make(stage) for stage in MIXED], randn(4, 2, 3)
    with fpipe.debug():
        fpipe.grad(pipe)(params, x, x)
        params[2]["w"][0, 0] = float("nan")
        with pytest.raises(fpipe.errors.ActionError, match=r"2F0 .*NaN"):
            fpipe.grad(pipe)(params, x, x)


CAPTURED = randn(3, 3).requires_grad_()


@pytest.mark.parametrize("fn", [forces, shifted])
@pytest.mark.parametrize("like", [None, lambda p, x: p.new_empty(len(x), 4)])
def test_a_captured_gradient_beside_a_leaf_of_its_own(fn: Any, like: Any):
    def work(p: Any, x: Tensor) -> Tensor:
        y = fn(p, x @ CAPTURED)
        return torch.cat([y, y], -1)[:, :4]

    own = fpipe.Stage(work, engine="eager", like=like)
    with pytest.raises(fpipe.errors.TraceError, match=r"closes over a tensor of shape \[3"):
        trace(own, randn(3, 3), randn(2, 3)).forward(randn(3, 3), randn(2, 3))


def test_a_view_of_the_input_is_a_leaf_of_a_stage_with_a_likeness():
    likeness = lambda p, x: p.new_empty(len(x), 4)
    own = trace(fpipe.Stage(forces, engine="eager", like=likeness), randn(3, 3), randn(2, 3))
    p, x, dy = randn(3, 3), randn(2, 3), randn(2, 4)
    y, saved = own.forward(p, x)
    _, kept = own.backward_input(saved, dy)
    leaf = p.clone().requires_grad_()
    wanted = forces(leaf, x)
    assert torch.equal(y, wanted.detach())
    assert torch.equal(own.backward_weight(kept), torch.autograd.grad(wanted, leaf, dy)[0])


# ---- layouts ----
def spread(p: Tensor, x: Tensor) -> Tensor:
    """Expanded on tensors without data, and stored in full on others."""
    y = (x @ p).mean(0, keepdim=True)
    return y.expand(len(x), 3) if is_fake(y) else y.repeat(len(x), 1)


def test_an_output_that_is_expanded_in_the_probe_alone():
    params, x, t = [randn(3, 3), randn(3, 3)], randn(4, 3), randn(4, 3)
    fns = [spread, lambda p, x: (x @ p).tanh()]
    pipe = fpipe.pipeline(fns, loss=squared, microbatches=2, group=fpipe.local(2), engine="eager")
    loss, grads = fpipe.value_and_grad(pipe)(params, x, t)
    wanted, others, _ = reference(fns, params, x, t, 2)
    assert torch.equal(loss, wanted) and same(grads, others)


def test_an_output_whose_rows_differ_where_the_probe_has_one():
    other = lambda p, x: spread(p, x) if is_fake(x) else x @ p
    own = trace(fpipe.Stage(other, engine="eager"), randn(3, 3), randn(2, 3))
    with pytest.raises(
        fpipe.errors.StageError, match=r"a tensor with other rows, where an expanded one was exp"
    ):
        own.forward(randn(3, 3), randn(2, 3))


# ---- tensors that wrap others ----
class Marked(Tensor):
    """A plain subclass."""


@pytest.mark.parametrize("where", ["parameters", "input", "output"])
def test_subclasses_of_tensor(where: str):
    marked = lambda t, place: t.as_subclass(Marked) if place == where else t
    fns = [lambda p, x: marked((x @ p).tanh(), "output")] * 2
    params, x, t = [randn(3, 3), randn(3, 3)], randn(4, 3), randn(4, 3)
    pipe = fpipe.pipeline(
        fns, "ZBH1", loss=squared, microbatches=2, group=fpipe.local(2), engine="eager"
    )
    mine = [marked(p, "parameters") for p in params]
    loss, found = fpipe.value_and_grad(pipe, (0, 1))(mine, marked(x, "input"), t)
    wanted, *others = reference(fns, params, x, t, 2)
    assert torch.equal(loss, wanted)
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(others), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_parameters_that_are_dtensors(mesh: DeviceMesh):
    def layer(p: Any, x: Tensor) -> Tensor:
        h = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        h = F.linear(F.linear(h, p["up"], p["b"]).tanh(), p["down"])
        return x + h.redistribute(placements=[Replicate()]).to_local()

    def plain(p: Any, x: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, p["up"], p["b"]).tanh(), p["down"])

    torch.manual_seed(0)
    whole = [
        {"up": randn(6, 3), "b": randn(6), "down": randn(3, 6), "unused": randn(3)}
        for _ in range(4)
    ]
    ways = {"up": Shard(0), "b": Shard(0), "down": Shard(1), "unused": Replicate()}
    split = [{n: distribute_tensor(t, mesh, [ways[n]]) for n, t in p.items()} for p in whole]
    x, t = randn(6, 3), randn(6, 3)
    run = lambda fn, params, **more: fpipe.value_and_grad(
        fpipe.pipeline(
            [fn] * 4, "ZBV", loss=squared_loosely, microbatches=3, group=fpipe.local(2), **more
        )
    )(params, x, t)
    loss, grads = run(layer, split, engine="eager")
    wanted, others = run(plain, whole)
    assert torch.equal(loss, wanted)
    for mine, other in zip(grads, others, strict=True):
        assert all(isinstance(g, DTensor) for g in mine.values())
        assert same({n: g.full_tensor() for n, g in mine.items()}, other)
    with pytest.raises(fpipe.errors.TraceError, match=r'DTensor float32\[6\].*engine="eager"'):
        run(layer, split)
    with pytest.raises(fpipe.errors.StageError, match=r"returns a DTensor.*to_local"):
        trace(fpipe.Stage(lambda p, x: p["up"], engine="eager"), split[0], x)


# ---- the rest ----
def test_inside_inference_mode():
    params = [make(stage) for stage in MIXED]
    pipe = fpipe.pipeline(
        MIXED, "ZBV", loss=squared, microbatches=2, group=fpipe.local(2), engine="eager"
    )
    with torch.inference_mode():
        x, t = randn(4, 2, 3), randn(4, 2, 3)
        value = pipe(params, x, t)
        loss, grads = fpipe.value_and_grad(pipe)(params, x, t)
    wanted = reference(MIXED, params, x.clone(), t.clone(), 2)
    assert torch.equal(value, wanted[0]) and torch.equal(loss, wanted[0]) and same(grads, wanted[1])


def test_programs_go_with_their_last_user():
    def fn(p: Tensor, x: Tensor) -> Tensor:
        return x @ p

    own = trace(fpipe.Stage(fn, engine="eager"), randn(3, 3), randn(2, 3))
    assert trace(fpipe.Stage(fn, engine="eager"), randn(3, 3), randn(2, 3)) is own
    gone = weakref.ref(fn)
    del fn, own
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_stage_that_looks_at_its_data_gets_an_expanded_input(dtype: torch.dtype):
    """Invented numbers have the strides of the input: elements of an expanded one share memory."""
    expanded = lambda p, x: (x * p).mean(1, keepdim=True).expand(x.shape)
    looks = lambda p, x: x.exp() if bool(x.isfinite().all()) else x
    pipe = fpipe.pipeline(
        [expanded, fpipe.Stage(looks, engine="eager")], microbatches=1, group=fpipe.local(2)
    )
    p, x = torch.ones(6, dtype=dtype), torch.linspace(0, 1, 12).view(2, 6).to(dtype)
    assert torch.equal(pipe([p, p], x), expanded(p, x).exp())
