"""Tensor, context and expert parallel inside a stage, beside the pipeline: gradients equal those of
the unsplit model.

One job of four processes, 2 x 2, runs them all; what each process has is compared here with a slice
of the whole. The rule, everywhere: what the members of an axis hold alike is averaged over it, what
they hold apart is divided by its size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import fpipe
from common import squared

WIDTH, HIDDEN, LENGTH, ROWS, MICROBATCHES, STAGES = 6, 8, 4, 4, 4, 4
SCHEDULE = "ZBV"


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) / 2 for shape in shapes]


def network(**shapes: tuple[int, ...]) -> list[dict[str, Tensor]]:
    return [
        dict(zip(shapes, draw(stage, *shapes.values()), strict=True)) for stage in range(STAGES)
    ]


def run(
    fn: Any, params: Any, x: Tensor, y: Tensor, group: Any, tx: Any = None, **keywords: Any
) -> Any:
    """Loss and gradients of a pipeline of one stage function; or updates, by ``tx`` of it."""
    microbatches = keywords.pop("microbatches", MICROBATCHES)
    pipe = fpipe.pipeline(
        [fn] * STAGES, SCHEDULE, loss=squared, microbatches=microbatches, group=group, **keywords
    )
    value, grads = fpipe.value_and_grad(pipe)(pipe.place(params), x, y)
    if tx is None:
        return value, grads
    return value, tx(pipe).update(grads, tx(pipe).init(params), params)[0]


# ---- tensor parallel: a part of each matrix on each member ----
FEED = {"norm": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "bias": (WIDTH,)}


def feed_forward(p: Any, x: Tensor, members: Any = None) -> Tensor:
    h = torch.tanh(F.layer_norm(x, (WIDTH,), p["norm"]) @ p["up"])
    return x + fpipe.ops.all_reduce(h @ p["down"], members) + p["bias"]


def columns(params: Any, member: int) -> Any:
    """What a member of two has: its columns of ``up``, its rows of ``down``, and all of the
    rest.
    """
    return [
        p
        | {"up": p["up"].chunk(2, 1)[member].clone(), "down": p["down"].chunk(2, 0)[member].clone()}
        for p in params
    ]


def tensor_parallel(group: Any) -> Any:
    tp = group.mesh["tp"]
    tx = fpipe.chain(
        fpipe.masked(fpipe.mean_over(group.tp), ["*.norm", "*.bias"]),
        fpipe.masked(fpipe.scale(0.5), ["*.up", "*.down"]),
    )
    x, y = draw(9, *[(MICROBATCHES * ROWS, WIDTH)] * 2)
    params = columns(network(**FEED), tp.get_local_rank())
    return run(lambda p, x: feed_forward(p, x, tp), params, x, y, group, lambda pipe: tx)


# ---- tensor parallel by DTensor ----
def noisy(pipe: Any) -> fpipe.Transform:
    """All that looks at several leaves."""
    return fpipe.chain(
        fpipe.transforms.skip_nonfinite(over=pipe),
        fpipe.clip_by_global_norm(0.01, over=pipe),
        fpipe.transforms.add_noise(1e-4, over=pipe),
        fpipe.sgd(1.0, momentum=0.9, weight_decay=0.1),
    )


def by_dtensor(group: Any, tx: Any = None) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    tp = group.mesh["tp"]
    places = {"up": Shard(1), "down": Shard(0)}

    def stage(p: Any, x: Tensor) -> Tensor:
        y = feed_forward(p, DTensor.from_local(x, tp, [Replicate()]))
        return y.redistribute(tp, [Replicate()]).to_local()  # type: ignore[attr-defined]

    params = [
        {k: distribute_tensor(v, tp, [places.get(k, Replicate())]) for k, v in p.items()}
        for p in network(**FEED)
    ]
    x, y = draw(9, *[(MICROBATCHES * ROWS, WIDTH)] * 2)
    value, grads = run(stage, params, x, y, group, tx, engine="eager")
    return value, optree.tree_map(lambda g: g.full_tensor(), grads)


# ---- context parallel: a part of the sequence on each member ----
HEAD = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}


def attention(p: Any, x: Tensor, members: Any = None) -> Tensor:
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    k, v = (
        fpipe.ops.all_gather(rearrange(t, "row token d -> token row d"), members) for t in (k, v)
    )
    k, v = (rearrange(t, "token row d -> row token d") for t in (k, v))
    return x + F.scaled_dot_product_attention(q, k, v) @ p["out"]


def context_parallel(group: Any, zero: int) -> Any:
    cp = group.mesh["dp"]
    x, y = (
        t.chunk(2, 1)[cp.get_local_rank()]
        for t in draw(8, *[(MICROBATCHES * ROWS, LENGTH, WIDTH)] * 2)
    )
    stages = [lambda p, x: attention(p, x, cp)] * STAGES
    pipe = fpipe.pipeline(
        stages,
        SCHEDULE,
        loss=squared,
        microbatches=MICROBATCHES,
        group=group,
        dp=fpipe.copies(group.dp, zero=zero),
    )
    value, grads = fpipe.value_and_grad(pipe)(pipe.shard(network(**HEAD)), x, y)
    return value, pipe.unshard(grads)


# ---- expert parallel: some of the experts on each member ----
EXPERTS = {"gate": (WIDTH, 4), "experts": (4, WIDTH, WIDTH)}


def mixture(p: Any, x: Tensor, members: Any = None) -> Tensor:
    """Row r of every four goes to expert r, with a weight of its gate."""
    weight = torch.sigmoid(x @ p["gate"]).diagonal().unsqueeze(-1)
    rows = rearrange(
        fpipe.ops.all_to_all(x, members), "(n expert) d -> expert n d", expert=len(p["experts"])
    )
    rows = rearrange(torch.tanh(rows @ p["experts"]), "expert n d -> (n expert) d")
    return x + weight * fpipe.ops.all_to_all(rows, members)


def expert_parallel(group: Any) -> Any:
    ep = group.mesh["dp"]
    member = ep.get_local_rank()
    params = [p | {"experts": p["experts"].chunk(2)[member].clone()} for p in network(**EXPERTS)]
    x, y = (t.chunk(2)[member] for t in draw(7, *[(2 * MICROBATCHES * 4, WIDTH)] * 2))
    return run(
        lambda p, x: mixture(p, x, ep),
        params,
        x,
        y,
        group,
        dp=fpipe.copies(group.dp, own=["*.experts"]),
    )


# ---- all of them, once ----
def job() -> dict[str, Any]:
    group = fpipe.init(pp=2, tp=2, timeout=60)
    results = {"tensor": tensor_parallel(group), "dtensor": by_dtensor(group)}
    results["updates"] = by_dtensor(group, noisy)
    group = fpipe.init(pp=2, dp=2, timeout=60)
    results |= {f"context{zero}": context_parallel(group, zero) for zero in (0, 3)}
    return results | {"expert": expert_parallel(group)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return fpipe.launch(job, ranks=4, timeout=110)


@cache
def whole(kind: str) -> Any:
    """The unsplit model, here."""
    group = fpipe.local(2)
    if kind == "context":
        return run(
            attention, network(**HEAD), *draw(8, *[(MICROBATCHES * ROWS, LENGTH, WIDTH)] * 2), group
        )
    if kind == "expert":
        x, y = draw(7, *[(2 * MICROBATCHES * 4, WIDTH)] * 2)
        return run(mixture, network(**EXPERTS), x, y, group, microbatches=2 * MICROBATCHES)
    tx = noisy if kind == "updates" else None
    x, y = draw(9, *[(MICROBATCHES * ROWS, WIDTH)] * 2)
    return run(feed_forward, network(**FEED), x, y, group, tx)


def close(mine: Any, wanted: Any) -> bool:
    """The stages of one process, compared with all."""
    held = [(a, b) for a, b in zip(mine, wanted, strict=True) if a is not None]
    pairs = zip(*(optree.tree_leaves([pair[i] for pair in held]) for i in (0, 1)), strict=True)
    return len(held) == STAGES // 2 and all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs
    )


@pytest.mark.xdist_group("axes")
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("kind", ["tensor", "dtensor", "updates", "context0", "context3", "expert"])
def test_gradients_are_those_of_the_unsplit_model(
    results: list[dict[str, Any]], kind: str, rank: int
):
    value, grads = results[rank][kind]
    wanted_value, wanted = whole(kind.rstrip("03"))
    if kind == "tensor":
        wanted = columns(wanted, rank % 2)
    if kind == "expert":
        wanted = [g | {"experts": g["experts"].chunk(2)[rank % 2]} for g in wanted]
    assert torch.allclose(value, wanted_value)
    assert close(grads, wanted)
