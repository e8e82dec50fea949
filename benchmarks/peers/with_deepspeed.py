"""DeepSpeed's PipelineModule (1F1B), on a CPU by ``DS_ACCELERATOR=cpu``."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_RANK"] = os.environ["RANK"]

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from benchmarks.peers.job import Job
from benchmarks.peers.model import Layer, Setting, Update, batch, loss


def build(setting: Setting, rank: int) -> Job:
    """The engine that trains a pipeline module with the cuts of the others."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    cuts = setting.cuts(setting.ranks, "loop")

    class Cut(PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            bounds = [0]
            for names in cuts:
                bounds.append(bounds[-1] + len(names))
            self.parts = bounds
            self._set_bounds(start=bounds[rank], stop=bounds[rank + 1])

    module = Cut(
        layers=[LayerSpec(Layer, setting, name) for name in setting.names()],
        num_stages=setting.ranks,
        loss_fn=loss,
    )
    config = {
        "train_micro_batch_size_per_gpu": setting.rows,
        "gradient_accumulation_steps": setting.microbatches,
        "steps_per_print": 1 << 30,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    if setting.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    update = Update(setting, [m for m in module.modules() if isinstance(m, Layer)])
    engine, *_ = deepspeed.initialize(model=module, optimizer=update.optimizer, config=config)
    x, t = map(torch.from_numpy, batch(setting))
    pairs = list(zip(x.split(setting.rows), t.split(setting.rows), strict=True))
    take = engine._take_model_step

    def noting(*args: object, **kwargs: object) -> object:
        if all(p.grad is not None for p in module.parameters()):
            update.note()
        return take(*args, **kwargs)

    engine._take_model_step = noting

    def step() -> float:
        return engine.train_batch(iter(pairs)).item()

    return Job(step, update.norms)
