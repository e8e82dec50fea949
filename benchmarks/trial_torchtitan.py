"""torchtitan's own Trainer, unchanged, on fpipe and on torch's pipeline: losses and gradient norms
of every step.

python -m benchmarks.trial_torchtitan                                # llama3 and qwen3 debug
models, on two processes python -m benchmarks.trial_torchtitan --ranks 4 --schedules 1F1B --steps 5

One line of registration is all that fpipe needs; the data are random tokens, and on a CPU a
stand-in takes the place of the module of the device. A line for each model and schedule: the
largest relative difference of losses and of gradient norms beside torch's pipeline, and the CPU
seconds of a step of both. A schedule that torch does not have is beside its 1F1B. Exit code 1 where
a difference is above 1e-7. Needs torchtitan.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from torchtitan_models import _stub_triton  # pyright: ignore[reportMissingImports]

#: What torchtitan asks the module of a device for.
_CPU = {
    "set_device": lambda device: None,
    "current_device": lambda: 0,
    "synchronize": lambda: None,
    "get_device_name": lambda device=None: "cpu",
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30),
    "reset_peak_memory_stats": lambda *_: None,
    "device_count": lambda: 1,
}


#: Schedules of both.
TORCH = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")


class Tokens:
    """A data loader of random tokens, the same in every process."""

    def __init__(self, batch: int, length: int, vocabulary: int):
        self.batch, self.length, self.vocabulary = batch, length, vocabulary

    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(0)
        while True:
            rows = torch.randint(self.vocabulary, (self.batch, self.length + 1), generator=draw)
            yield {"input": rows[:, :-1]}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def train(
    rank: int, ranks: int, folder: str, model: str, schedule: str, steps: int, ours: bool
) -> None:
    """One process of one run; writes its losses, gradient norms and CPU seconds to a file."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=Path(folder, "port").read_text(),
    )
    with _stub_triton():
        from torchtitan.components import metrics
        from torchtitan.config import JobConfig
        from torchtitan.distributed import utils as distributed
        from torchtitan.distributed.pipeline_parallel import pipeline_llm
        from torchtitan.protocols import train_spec
        from torchtitan.train import Trainer

        import fpipe
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", SimpleNamespace(**_CPU)
    distributed.set_pg_timeouts = lambda **_: None
    metrics.build_device_memory_monitor = lambda: metrics.DeviceMemoryMonitor("cpu")
    config = JobConfig()
    config.model.name, config.model.flavor = model, "debugmodel"
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 32, 8
    config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule = (
        ranks,
        schedule,
    )
    config.debug.seed, config.metrics.log_freq, config.comm.init_timeout_seconds = 0, 1, 60
    config.job.dump_folder = folder
    spec, found = train_spec.get_train_spec(model), []

    class Recorded(metrics.MetricsProcessor):
        def log(
            self, step: int, loss: float, most: float, norm: float, extra_metrics: Any = None
        ) -> None:
            found.append((loss, norm, time.process_time()))

    changes: dict[str, Any] = {
        "build_tokenizer_fn": None,
        "build_metrics_processor_fn": lambda *args: Recorded(*args[:2]),
        "build_dataloader_fn": lambda **_: Tokens(8, 32, spec.model_args["debugmodel"].vocab_size),
    }
    small = spec.model_args["debugmodel"]
    if getattr(small, "enable_weight_tying", False):  # which torchtitan has within one part alone
        changes["model_args"] = {
            "debugmodel": dataclasses.replace(small, enable_weight_tying=False)
        }
    # The line of registration; torchtitan 0.2.1 has a function of its own for qwen3 too, but does
    # not name it.
    changes["pipelining_fn"] = fpipe.interop.torchtitan.pipelining_fn if ours else pipeline_llm
    train_spec.register_train_spec(f"{model}_trial", dataclasses.replace(spec, **changes))
    config.model.name = f"{model}_trial"
    trainer = Trainer(config)
    trainer.train()
    rows = [[a, b, c] for a, b, c in found]
    torch.save(
        (bool(trainer.pp_has_last_stage), torch.tensor(rows, dtype=torch.float64)),
        f"{folder}/{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def outcome(
    model: str, schedule: str, ranks: int, steps: int, ours: bool
) -> tuple[torch.Tensor, float] | str:
    """Losses and gradient norms by step, and the CPU seconds of a step over all processes; or why
    it does not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "port").write_text(str(20000 + os.getpid() % 20000 + int(time.time()) % 997))
        try:
            mp.spawn(train, (ranks, folder, model, schedule, steps, ours), nprocs=ranks)
        except Exception as error:
            return str(error).strip().splitlines()[-1][:120]
        parts = [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]
    losses = next(rows[:, 0] for last, rows in parts if last)
    seconds = sum(float(rows[-1, 2] - rows[1, 2]) for _, rows in parts) / max(steps - 2, 1)
    return torch.stack([losses, parts[0][1][:, 1]], 1), seconds


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["llama3", "qwen3"])
    parser.add_argument(
        "--schedules", nargs="*", default=["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "ZBH2"]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    wrong = False
    for model in args.models:
        for schedule in args.schedules:
            mine = outcome(model, schedule, args.ranks, args.steps, True)
            stand_in = "ZBVZeroBubble" if schedule == "DualPipeV" else "1F1B"  # of as many stages
            beside = schedule if schedule in TORCH else stand_in
            peer = outcome(model, beside, args.ranks, args.steps, False)
            if isinstance(mine, str) or isinstance(peer, str):
                wrong |= isinstance(mine, str)
                shown = (
                    mine
                    if isinstance(mine, str)
                    else f"last loss {mine[0][-1, 0]:.8f}, {mine[1]:.3f} CPU s a step"
                )
                why = f"torch: {peer}" if isinstance(peer, str) else ""
                print(f"{model:8} {schedule:16} {shown}  {why}", flush=True)
                continue
            off = ((mine[0] - peer[0]).abs() / peer[0].abs()).amax(0)
            wrong |= bool((off > 1e-7).any())
            times = f"{mine[1]:.3f}, torch ({beside}) {peer[1]:.3f}, ratio {mine[1] / peer[1]:.2f}"
            print(
                f"{model:8} {schedule:16} losses off by {off[0]:.1e}, norms by {off[1]:.1e}; CPU "
                f"s a step: {times}",
                flush=True,
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
