"""Five small models as pure stages, and an oracle that computes their gradients without fpipe.

Any number of stages. The stages are module-level functions, so that one trace serves every
schedule.

    model = MODELS["mlp"]; stages, params, state = model.make(4); x, y = model.batch(microbatches=3)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import fpipe
from common import squared

WIDTH, ROWS, SEED = 4, 2, 7  # of a hidden layer, of a microbatch, of the random numbers


# ---- stages ----
def mlp(p, x):
    return x + torch.tanh(x @ p["w1"] + p["b"]) @ p["w2"]


def attention(p, x):
    """A pre-norm transformer block with SDPA and dropout."""
    h = F.layer_norm(x, (WIDTH,), p["norm1"], p["bias1"])
    q, k, v = rearrange(h @ p["qkv"], "row t (head qkvd) -> row head t qkvd", head=2).chunk(3, -1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.dropout(rearrange(mixed, "row head t d -> row t (head d)") @ p["out"], 0.25)
    h = F.gelu(F.layer_norm(x, (WIDTH,), p["norm2"], p["bias2"]) @ p["up"])
    return x + F.dropout(h @ p["down"], 0.25)


def convolution(p, state, x):
    """A convolution with batch norm; the running statistics are state, updated in place inside the
    stage.
    """
    mean, var, count = state["mean"].clone(), state["var"].clone(), state["count"] + 1
    h = F.conv2d(x, p["w"], padding=1)
    h = F.batch_norm(h, mean, var, p["scale"], p["shift"], training=True)
    return F.relu(h), {"mean": mean, "var": var, "count": count}


def embed(p, tokens):
    return p["wte"][tokens]


def unembed(p, x):
    return F.layer_norm(x, (WIDTH,)) @ p["wte"].T


def language(p, tokens):
    """Embedding and head in one stage."""
    return F.layer_norm(F.embedding(tokens, p["wte"]), (WIDTH,)) @ p["wte"].T


def experts(p, x):
    """Four experts, two for each row, dense; the auxiliary loss balances them."""
    gates = torch.softmax(x @ p["router"], -1)
    top, index = gates.topk(2, -1)
    weight = torch.zeros_like(gates).scatter(-1, index, top)
    hidden = torch.einsum("bd,edh->beh", x, p["up"]).relu()
    y = torch.einsum("beh,ehd,be->bd", hidden, p["down"], weight)
    return x + y, 0.1 * (gates.mean(0) * (weight > 0).float().mean(0)).sum()


# ---- losses ----
def cross_entropy(y, t):
    return F.cross_entropy(y.flatten(0, -2), t.flatten())


def with_aux(y, t):
    return (y - t).square().mean(), {"rows": y.shape[0], "mean": y.mean()}


#: torch.manual_seed on a machine without accelerators, where that formats a traceback for each kind
#: of them.
seed_of_torch = torch.default_generator.manual_seed


# ---- models ----
class Model(NamedTuple):
    """A model as functions of the number of stages and rows."""

    name: str
    stages: Callable[[int], list[Any]]
    params: Callable[[int, int], Any]  #: (stage, number of stages)
    data: Callable[[int], tuple[Tensor, Tensor]]  #: (rows)
    loss: Callable[..., Any]
    state: Any = None
    has_aux: bool = False
    tied: Callable[[int], tuple[tuple[str, ...], ...]] = lambda stages: ()

    def make(self, stages: int) -> tuple[list[Any], list[Any], list[Any] | None]:
        """Stages, parameters and state."""
        seed_of_torch(stages)
        params = [self.params(s, stages) for s in range(stages)]
        for name, *others in self.tied(stages):
            first, leaf = name.split(".")
            for other in others:
                params[int(other.split(".")[0])] = {leaf: params[int(first)][leaf].clone()}
        state = (
            None
            if self.state is None
            else [optree.tree_map(torch.clone, self.state) for _ in range(stages)]
        )
        return self.stages(stages), params, state

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """A batch of ``microbatches`` times ``ROWS`` rows."""
        seed_of_torch(100 + microbatches)
        return self.data(ROWS * microbatches)


def normal(**shapes: Sequence[int]) -> dict[str, Tensor]:
    return {name: torch.randn(*shape) / 2 for name, shape in shapes.items()}


def block_params(stage: int, stages: int) -> dict[str, Tensor]:
    d = WIDTH
    return normal(
        norm1=(d,),
        bias1=(d,),
        qkv=(d, 3 * d),
        out=(d, d),
        norm2=(d,),
        bias2=(d,),
        up=(d, 2 * d),
        down=(2 * d, d),
    )


def tied_stages(stages: int) -> list[Any]:
    return [language] if stages == 1 else [embed, *[mlp] * (stages - 2), unembed]


def tied_params(stage: int, stages: int) -> dict[str, Tensor]:
    if stage in (0, stages - 1):
        return normal(wte=(5, WIDTH))
    return normal(w1=(WIDTH, 6), b=(6,), w2=(6, WIDTH))


MODELS = {
    model.name: model
    for model in (
        Model(
            "mlp",
            lambda n: [mlp] * n,
            lambda s, n: normal(w1=(WIDTH, 6), b=(6,), w2=(6, WIDTH)),
            lambda rows: (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)),
            with_aux,
            has_aux=True,
        ),
        Model(
            "transformer",
            lambda n: [attention] * n,
            block_params,
            lambda rows: (torch.randn(rows, 3, WIDTH), torch.randn(rows, 3, WIDTH)),
            squared,
        ),
        Model(
            "cnn",
            lambda n: [fpipe.Stage(convolution, state=True)] * n,
            lambda s, n: normal(w=(2, 2, 3, 3), scale=(2,), shift=(2,)),
            lambda rows: (torch.randn(rows, 2, 4, 4), torch.randn(rows, 2, 4, 4)),
            squared,
            state={
                "mean": torch.zeros(2),
                "var": torch.ones(2),
                "count": torch.zeros((), dtype=torch.int64),
            },
        ),
        Model(
            "tied",
            tied_stages,
            tied_params,
            lambda rows: (torch.randint(5, (rows, 3)), torch.randint(5, (rows, 3))),
            cross_entropy,
            tied=lambda n: (("0.wte", f"{n - 1}.wte"),) if n > 1 else (),
        ),
        Model(
            "moe",
            lambda n: [fpipe.Stage(experts, aux_loss=True)] * n,
            lambda s, n: normal(router=(WIDTH, 4), up=(4, WIDTH, 5), down=(4, 5, WIDTH)),
            lambda rows: (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)),
            squared,
        ),
    )
}


# ---- the oracle ----
class One(NamedTuple):
    """The results of one microbatch through the whole model by plain autograd."""

    loss: Tensor
    aux: Any
    grads: list[list[Tensor]]  #: by stage, by leaf
    dx: Tensor | None


def draw(seed: int, stage: int, mb: int) -> None:
    """Seed torch by the documented rule for (seed, stage, microbatch), written here independently
    of fpipe.
    """
    digest = hashlib.sha256(f"{seed}/{stage}/{mb}/F".encode()).digest()
    seed_of_torch(int.from_bytes(digest[:8], "little") >> 1)


@cache
def one(name: str, stages: int, microbatches: int, mb: int) -> One:
    """Microbatch ``mb`` of ``microbatches`` through model ``name``: weighted, then backward."""
    model = MODELS[name]
    functions, params, state = model.make(stages)
    x, t = (batch[mb * ROWS : (mb + 1) * ROWS] for batch in model.batch(microbatches))
    leaves = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in params]
    start = x.clone().requires_grad_() if x.is_floating_point() else x
    y, extra = start, None
    for stage, fn in enumerate(functions):
        draw(SEED, stage, mb)
        y = fn(leaves[stage], state[stage], y)[0] if state is not None else fn(leaves[stage], y)
        if isinstance(y, tuple):
            y, more = y
            extra = more if extra is None else extra + more
    loss, aux = model.loss(y, t) if model.has_aux else (model.loss(y, t), None)
    total = (loss if extra is None else loss + extra) * (1.0 / microbatches)
    wrt = [leaf for p in leaves for leaf in optree.tree_leaves(p)] + (
        [start] if start.requires_grad else []
    )
    grads = list(torch.autograd.grad(total, wrt))
    dx = grads.pop() if start.requires_grad else None
    by_stage = [[grads.pop(0) for _ in optree.tree_leaves(p)] for p in leaves]
    return One(
        total.detach(),
        optree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, aux),
        by_stage,
        dx,
    )


def state_after(
    name: str, stages: int, microbatches: int, order: Sequence[Sequence[int]]
) -> list[Any]:
    """The state of every stage after the microbatches of ``order[stage]``, one after another."""
    model = MODELS[name]
    functions, params, states = model.make(stages)
    assert states is not None
    x, _ = model.batch(microbatches)
    inputs = list(x.split(ROWS))
    with torch.no_grad():
        for stage, fn in enumerate(functions):
            for mb in order[stage]:
                states[stage] = fn(params[stage], states[stage], inputs[mb])[1]
            inputs = [fn(params[stage], states[stage], v)[0] for v in inputs]
    return states
