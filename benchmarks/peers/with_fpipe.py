"""fpipe."""

from __future__ import annotations

import gc
from typing import Any

import optree
import torch

import fpipe
from benchmarks.alone import Alone, programs
from benchmarks.peers.job import Job
from benchmarks.peers.model import RATE, Setting, batch, block, embedding, head, loss, tensors

PER_RANK = {"GPipe": 1, "1F1B": 1}


def build(setting: Setting, rank: int) -> Job:
    """A pipeline, and a step that updates the parameters in place."""
    group = fpipe.init(device="cpu")
    count = setting.ranks * PER_RANK.get(setting.schedule, 2)
    placement = "V" if setting.schedule in ("ZBV", "DualPipeV") else "loop"
    cuts, heads = setting.cuts(count, placement), setting.shape[2]

    @fpipe.block
    def one_block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return block(p, x, heads)

    again = fpipe.remat(one_block) if setting.recompute else one_block
    ends = {"embedding": embedding, "head": head}

    def stage_of(names: list[str]) -> Any:
        def stage(params: Any, x: torch.Tensor) -> torch.Tensor:
            for name in names:
                x = ends.get(name, again)(params[name], x)
            return x

        return stage

    pipe = fpipe.pipeline(
        [stage_of(names) for names in cuts],
        setting.schedule,
        loss=loss,
        microbatches=setting.microbatches,
        group=group,
        compile=setting.compile or None,
    )
    params: Any = [
        {name: tensors(setting, name) for name in names} if s in pipe.here else None
        for s, names in enumerate(cuts)
    ]
    x, t = map(torch.from_numpy, batch(setting))
    vag = fpipe.value_and_grad(pipe)
    tx = fpipe.adamw(RATE, weight_decay=1e-2, donate=True) if setting.optimizer == "adamw" else None
    kept = [params, tx.init(params) if tx is not None else None]
    seen: dict[str, float] = {}

    def step() -> float:
        value, grads = vag(kept[0], x, t)
        if not seen:
            seen.update(
                {
                    f"{name}.{key}": torch.linalg.vector_norm(g, dtype=torch.float64).item()
                    for stage in grads
                    for name, layers in (stage or {}).items()
                    for key, g in layers.items()
                }
            )
        if tx is not None:
            kept[0], kept[1] = tx.step(grads, kept[1], kept[0], donate=True)
        else:
            leaves, gs = optree.tree_leaves(kept[0]), optree.tree_leaves(grads)
            torch._foreach_add_(leaves, gs, alpha=-RATE)
        return value.item()

    def limit() -> float | None:
        alone = Alone(pipe, kept[0], x, t, setting.microbatches)
        gc.collect()
        with torch.no_grad():
            for number in range(4):
                group.barrier()
                alone.round(counts=number > 0)
        costs = fpipe.Costs(**programs(pipe, alone), unit="s")
        return pipe.schedule(setting.microbatches).simulate(costs).total

    return Job(step, seen, limit)
