"""A transformer with a mixture of experts: expert parallelism x pipeline parallelism, fused actions woven.

    torchrun --nproc-per-node 4 examples/moe.py                        # 2 x 2 processes: DualPipeV, woven
    torchrun --nproc-per-node 4 examples/moe.py --schedule Overlapped1F1B
    torchrun --nproc-per-node 4 examples/moe.py --overlap sequential   # the same bits, without the overlap
    python examples/moe.py --plan                                      # one process; prints the plan and its weaves

Each stage is attention, a router, dispatch (all_to_all), experts, combine (all_to_all). The members of an expert group
hold different experts and the same of everything else. What is in ``fpipe.remat`` is computed again in the backward;
the router stands outside, so its choices are saved, and a token goes to the same experts both times.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

WIDTH, HIDDEN, HEADS, VOCABULARY = 32, 64, 4, 64
EXPERTS, CHOICES, CAPACITY = 4, 2, 1.5  # in all; of each token; places an expert has, as a share of an even load


# ---- one block ------------------------------------------------------------------------------------------------------
def attention(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal self-attention with its residual."""
    h = F.layer_norm(x, (WIDTH,), p["norm1"])
    q, k, v = (h @ p["qkv"]).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + mixed.transpose(1, 2).reshape(x.shape) @ p["out"]


def route(p: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which place of which expert each token takes, as 0 and 1, and with what weight: both (token, expert, place)."""
    gates = torch.softmax(tokens @ p["router"], -1)
    top, index = gates.topk(CHOICES, -1)
    chosen = F.one_hot(index, EXPERTS).sum(1)  # (token, expert)
    places = int(CAPACITY * CHOICES * tokens.shape[0] / EXPERTS)
    place = chosen.cumsum(0) * chosen - 1  # -1: not chosen; beyond the last: the token is dropped
    taken = F.one_hot(place.clamp(-1, places) + 1, places + 2)[..., 1:-1].to(tokens.dtype)
    weight = torch.zeros_like(gates).scatter(-1, index, top / top.sum(-1, keepdim=True))
    return taken, taken * weight[..., None]


def experts(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The experts that live here, on (source, expert, place, width)."""
    sources, here, places, width = x.shape
    h = x.transpose(0, 1).reshape(here, sources * places, width)
    h = F.gelu(h @ p["up"]) @ p["down"]
    return h.view(here, sources, places, width).transpose(0, 1)


def block(members: Any, size: int) -> Any:
    """A block whose experts are spread over the members of a process group."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        with fpipe.segment("attention"):
            x = fpipe.remat(attention)(p, x)
            h = F.layer_norm(x, (WIDTH,), p["norm2"])
            taken, weight = route(p, h.flatten(0, 1))
            sent = torch.einsum("nec,nd->ecd", taken, h.flatten(0, 1))
        with fpipe.segment("dispatch"):
            had = fpipe.ops.all_to_all(sent, members)
        with fpipe.segment("experts"):
            made = fpipe.remat(experts)(p, had.view(size, EXPERTS // size, *sent.shape[1:])).reshape(sent.shape)
        with fpipe.segment("combine"):
            back = fpipe.ops.all_to_all(made, members)
            return x + torch.einsum("nec,ecd->nd", weight, back).view(x.shape)

    return fn


def embedded(inner: Any) -> Any:
    """The first stage: an embedding, then a block."""
    return lambda p, tokens: inner(p, p["embedding"][tokens])


def with_head(inner: Any) -> Any:
    """The last stage: a block, then the logits."""
    return lambda p, x: F.layer_norm(inner(p, x), (WIDTH,)) @ p["head"]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# ---- the model ------------------------------------------------------------------------------------------------------
def parameters(stages: int, member: int, size: int) -> list[dict[str, Tensor]]:
    """Every stage's parameters; of the experts, those of one member."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator) / shape[-2] ** 0.5
    made = []
    for stage in range(stages):
        p = {"norm1": torch.ones(WIDTH), "qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH),
             "norm2": torch.ones(WIDTH), "router": normal(WIDTH, EXPERTS)}  # fmt: skip
        mine = slice(member * EXPERTS // size, (member + 1) * EXPERTS // size)
        p |= {"up": normal(EXPERTS, WIDTH, HIDDEN)[mine], "down": normal(EXPERTS, HIDDEN, WIDTH)[mine]}
        p |= {"embedding": normal(VOCABULARY, WIDTH) * 4} if stage == 0 else {}
        p |= {"head": normal(WIDTH, VOCABULARY)} if stage == stages - 1 else {}
        made.append(p)
    return made


def stages_of(count: int, members: Any, size: int) -> list[Any]:
    """The stage functions."""
    inner = block(members, size)
    if count == 1:
        return [with_head(embedded(inner))]
    return [embedded(inner), *[inner] * (count - 2), with_head(inner)]


def update(params: list[Any], grads: list[Any], experts_group: Any, rate: float) -> None:
    """Plain descent. Experts have their gradient from all members already; the rest is summed over them."""
    for p, g in zip(params, grads, strict=True):
        for name in p or ():
            whole = g[name] if name in ("up", "down") else experts_group.all_reduce(g[name])
            p[name] -= rate * whole / experts_group.size


def main(arguments: list[str] | None = None) -> list[float]:
    """Train for a few steps; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="DualPipeV")
    parser.add_argument("--overlap", default="weave", choices=["weave", "sequential"])
    parser.add_argument("--members", type=int, default=2, help="of an expert group, where there are several processes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plan", action="store_true", help="print what each rank here will run")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)

    group = fpipe.init(dp=given.members) if torch.distributed.is_torchelastic_launched() else fpipe.local(2)
    spread = getattr(group, "dp", None) or fpipe.local(1)
    members, size, member = getattr(spread, "pg", None), spread.size, getattr(spread, "rank", 0)
    count = fpipe.make_schedule(given.schedule, group.size, 8).stages
    pipe = fpipe.pipeline(
        stages_of(count, members, size), given.schedule, loss=cross_entropy, microbatches=8, group=group,
        overlap=given.overlap,
    )  # fmt: skip
    params = pipe.place(parameters(count, member, size))
    losses = []
    for step in range(given.steps):
        generator = torch.Generator().manual_seed(100 * step + member)
        tokens = torch.randint(VOCABULARY, (16, 13), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]  # every other token is a repetition: something to learn
        if given.plan and step == 0:
            print(pipe.plan(params, tokens[:, :-1], tokens[:, 1:]))
        loss, grads = fpipe.value_and_grad(pipe)(params, tokens[:, :-1], tokens[:, 1:])
        update(params, grads, spread, 0.5)
        losses.append(float(loss))
        if group.here[0] == 0 and member == 0:
            print(f"step {step}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
