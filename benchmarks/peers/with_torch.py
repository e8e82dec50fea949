"""torch.distributed.pipelining."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

from benchmarks.peers.job import Job
from benchmarks.peers.model import Layer, Setting, Update, batch, loss

CLASSES = {
    "GPipe": ("ScheduleGPipe", 1),
    "1F1B": ("Schedule1F1B", 1),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", 2),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", 2),
    "ZBV": ("ScheduleZBVZeroBubble", 2),
    "DualPipeV": ("ScheduleDualPipeV", 2),
}


def build(setting: Setting, rank: int) -> Job:
    """Stages of modules, and torch's optimizer in the step."""
    dist.init_process_group("gloo")
    name, per_rank = CLASSES[setting.schedule]
    ranks = setting.ranks
    count = ranks * per_rank
    v = setting.schedule in ("ZBV", "DualPipeV")
    here = [rank, 2 * ranks - 1 - rank] if v else list(range(rank, count, ranks))
    cuts = setting.cuts(count, "V" if v else "loop")
    modules = {s: nn.Sequential(*(Layer(setting, n) for n in cuts[s])) for s in here}
    ran = {s: torch.compile(m) if setting.compile else m for s, m in modules.items()}
    device = torch.device("cpu")
    stages = [PipelineStage(m, s, count, device) for s, m in ran.items()]
    given = stages if per_rank > 1 else stages[0]
    schedule = getattr(schedules, name)(given, setting.microbatches, loss_fn=loss)
    layers = [one for m in modules.values() for one in m.modules() if isinstance(one, Layer)]
    update = Update(setting, layers)
    x, t = map(torch.from_numpy, batch(setting))
    first, last = 0 in here, count - 1 in here

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        args, more = ((x,) if first else ()), ({"target": t, "losses": losses} if last else {})
        schedule.step(*args, **more)
        update()
        return torch.stack(losses).mean().item() if last else None

    return Job(step, update.norms)
