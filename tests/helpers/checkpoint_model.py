"""A small model cut in several ways, and training of it that is stopped and resumed: for tests of
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fpipe
from fpipe import Stage
from written_transforms import accumulate, average_params

WIDTH, WORDS, BLOCKS, MICROBATCHES = 8, 11, 6, 4


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w1"] + p["b"]) @ p["w2"]


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["wte"][tokens]


def head(p: Any, x: Tensor) -> Tensor:
    return x @ p["wte"].T


def first(p: Any, tokens: Tensor) -> Tensor:
    return blocks(p["blocks"], embed(p["embed"], tokens))


def last(p: Any, x: Tensor) -> Tensor:
    return head(p["head"], blocks(p["blocks"], x))


def whole(p: Any, tokens: Tensor) -> Tensor:
    return head({"wte": p["embed"]["wte"]}, blocks(p["blocks"], embed(p["embed"], tokens)))


def blocks(ps: Any, x: Tensor) -> Tensor:
    for p in ps:
        x = block(p, x)
    return x


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


class Cut(NamedTuple):
    """Stages, their parameters from those of the model, and ties."""

    stages: list[Stage]
    params: list[Any]
    tied: list[tuple[str, str]]


def model() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=draw) / 3
    rows = [{"w1": random(WIDTH, 5), "b": random(5), "w2": random(5, WIDTH)} for _ in range(BLOCKS)]
    return {"embed": {"wte": random(WORDS, WIDTH)}, "blocks": rows}


def cut(parts: int) -> Cut:
    """The model in 1, 2, 4 or 8 stages."""
    m = model()
    tie = {"wte": m["embed"]["wte"].clone()}
    if parts == 1:
        layers = {"blocks": range(BLOCKS), "embed": "embed"}
        return Cut([Stage(whole, layers=layers)], [m], [])
    if parts == 8:
        middle = [Stage(blocks, name="blocks", layers=[i]) for i in range(BLOCKS)]
        params = [m["embed"], *([row] for row in m["blocks"]), tie]
        return Cut(
            [Stage(embed, name="embed"), *middle, Stage(head, name="head")],
            params,
            [("0.wte", "7.wte")],
        )
    edges = {2: [0, 2, 6], 4: [0, 1, 3, 5, 6]}[parts]
    spans = [range(a, b) for a, b in pairwise(edges)]
    rows = [m["blocks"][span.start : span.stop] for span in spans]
    stages = [
        Stage(first, layers={"embed": "embed", "blocks": spans[0]}),
        *(Stage(blocks, name="blocks", layers=span) for span in spans[1:-1]),
        Stage(last, layers={"blocks": spans[-1], "head": "head"}),
    ]
    params = [
        {"embed": m["embed"], "blocks": rows[0]},
        *rows[1:-1],
        {"blocks": rows[-1], "head": tie},
    ]
    return Cut(stages, params, [("0.embed.wte", f"{parts - 1}.head.wte")])


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (2 * MICROBATCHES, 5), generator=draw)
    return tokens, tokens.roll(-1, 1)


class Layout(NamedTuple):
    """How a model is cut and run."""

    parts: int
    schedule: str
    ranks: int
    zero: int = 0


def pipeline(
    layout: Layout, copies: Any = None, group: Any = None, own: Any = (), **options: Any
) -> tuple[Any, list[Any]]:
    """A pipeline and the initial parameters, placed."""
    c = cut(layout.parts)
    pipe = fpipe.pipeline(
        c.stages,
        layout.schedule,
        loss=cross_entropy,
        microbatches=MICROBATCHES // (copies.size if copies else 1),
        group=group or fpipe.local(layout.ranks),
        tied=c.tied,
        dp=fpipe.copies(copies, zero=layout.zero, own=own) if copies else None,
        **options,
    )
    return pipe, pipe.shard(c.params)


def optimizer(pipe: Any) -> fpipe.Transform:
    """AdamW on vectors, Muon on matrices, an average, a loss scale and accumulation."""
    from optree import tree_map

    kinds = lambda params: tree_map(lambda p: "matrix" if p.ndim == 2 else "other", params)
    step = fpipe.partition(
        {"matrix": fpipe.from_torch(torch.optim.Muon, lr=0.02), "other": fpipe.adamw(0.01)}, kinds
    )
    return fpipe.chain(
        fpipe.dynamic_loss_scale(4.0, interval=2, over=pipe),
        accumulate(2),
        step,
        average_params(0.9),
    )


def adam(pipe: Any) -> fpipe.Transform:
    """A chain whose transforms work on parts."""
    return fpipe.chain(
        fpipe.clip_by_global_norm(1.0, over=pipe, exact=True),
        fpipe.adamw(0.01),
        average_params(0.9),
    )


def steps(
    pipe: Any, tx: fpipe.Transform, params: Any, state: Any, numbers: range
) -> tuple[Any, Any, list[Tensor]]:
    """Some steps of training."""
    losses = []
    for number in numbers:
        x, y = batch(number)
        if pipe.copies is not None:
            x, y = (t.chunk(pipe.copies.group.size)[pipe.copies.part] for t in (x, y))
        scale = getattr(state[0], "scale", None)
        loss, grads = fpipe.value_and_grad(pipe)(params, x, y, loss_scale=scale)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss)
    return params, state, losses


def by_name(pipe: Any, params: Any) -> dict[str, Tensor]:
    """Parameters by their names in the model: of any cut the same."""
    from fpipe.saving.leaf_names import Names

    names, found = Names(pipe), {}
    for stage in pipe.here:
        leaves = names.tree(stage, params[stage], whole=True).leaves
        found |= {leaf.key: leaf.value for leaf in leaves}
    return found


def first_half(
    layout: Layout, path: Path, make: Callable[[Any], fpipe.Transform], copies: Any = None
) -> None:
    """Train three steps and save."""
    pipe, params = pipeline(layout, copies)
    tx = make(pipe)
    params, state, _ = steps(pipe, tx, params, tx.init(params), range(3))
    fpipe.save(path, pipe, params=params, state=state, step=3)


def second_half(
    layout: Layout, path: Path, make: Callable[[Any], fpipe.Transform], copies: Any = None
) -> Any:
    """Load, train three more steps; parameters by name, averages by name and losses."""
    pipe, _ = pipeline(layout, copies)
    params, state, step = fpipe.load(path, pipe, "params", "state", "step")
    params, state, losses = steps(pipe, make(pipe), params, state, range(step, step + 3))
    return result(pipe, params, state, losses)


def result(pipe: Any, params: Any, state: Any, losses: Any) -> Any:
    return (
        by_name(pipe, pipe.unshard(params)),
        by_name(pipe, pipe.unshard(state[-1].average)),
        losses,
    )


def uninterrupted(
    layout: Layout, make: Callable[[Any], fpipe.Transform], copies: Any = None
) -> Any:
    """Six steps at once, as the result of ``second_half``."""
    pipe, params = pipeline(layout, copies)
    tx = make(pipe)
    params, state, losses = steps(pipe, tx, params, tx.init(params), range(6))
    return result(pipe, params, state, losses[3:])
