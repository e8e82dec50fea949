"""megatron-core's schedule (1F1B), which asks for CUDA: what is named ``cuda`` is patched to mean
the CPU.
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers.job import Job
from benchmarks.peers.model import Layer, Setting, Update, batch, loss


def patch() -> None:
    """Let megatron-core run where there is no CUDA."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.nvtx = mock.MagicMock()
    zeros = torch.zeros

    def on_host(*args, **kwargs):
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return zeros(*args, **kwargs)

    torch.zeros = on_host


def build(setting: Setting, rank: int) -> Job:
    """The function that runs a step of 1F1B."""
    patch()
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=setting.ranks)
    names = setting.cuts(setting.ranks, "loop")[rank]

    layers = [Layer(setting, n) for n in names]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)
            self.given: torch.Tensor | None = None
            self.model_type = ModelType.encoder_or_decoder
            self.config = ModelParallelConfig(
                pipeline_model_parallel_size=setting.ranks,
                pipeline_dtype=setting.kind,
                params_dtype=setting.kind,
                batch_p2p_comm=False,
                deallocate_pipeline_outputs=False,
            )
            self.config.hidden_size = setting.shape[1]
            self.config.calculate_per_token_loss = False
            self.config.init_method = None
            self.config.fine_grained_activation_offloading = False

        def set_input_tensor(self, given):
            self.given = given[0] if isinstance(given, list) else given

        def forward(self, tokens):
            x = tokens if self.given is None else self.given
            for one in self.layers:
                x = one(x)
            return x

    model = Model()
    update = Update(setting, layers)
    x, t = map(torch.from_numpy, batch(setting))
    pairs = list(zip(x.split(setting.rows), t.split(setting.rows), strict=True))
    run = get_forward_backward_func()

    def forward(iterator, model):
        a, b = next(iterator)

        def value(y):
            out = loss(y, b)
            return out, {"loss": out.detach().clone()}

        return model(a), value

    def step() -> float | None:
        found = run(
            forward_step_func=forward,
            data_iterator=iter(pairs),
            model=model,
            num_microbatches=setting.microbatches,
            seq_length=setting.rows,
            micro_batch_size=setting.tokens,
            forward_only=False,
        )
        update()
        return torch.stack([f["loss"] for f in found]).mean().item() if found else None

    return Job(step, update.norms)
