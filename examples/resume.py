"""Train, kill, resume on another number of processes, and export to Hugging Face: the logits are those of the run.

python examples/resume.py                     # starts its processes itself; needs: pip install '.[hf]'

Two processes train a tiny Llama until one of them is killed. One process continues from the last complete checkpoint,
with another schedule and another cut. The losses are those of a run that was never interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch

import fpipe
from fpipe.interop import huggingface
from fpipe.products.command.cli import main as command

WORDS, ROWS, LENGTH = 40, 8, 12


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The position in the data is the number of the step."""
    start = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(LENGTH)) % WORDS
    return tokens, tokens


def train(folder: Path, steps: int, schedule: str = "GPipe", stages: int = 1, killed_at: int = -1) -> None:
    """On each process: continue the run in the folder until it has so many steps."""
    group = fpipe.init(timeout=60)
    parts, params = huggingface.stages(llama(), stages)
    pipe = fpipe.pipeline(parts, schedule, loss=huggingface.causal_loss, microbatches=4, group=group)
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.adamw(1e-2))

    def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == killed_at and 0 in group.here:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step)

    fpipe.Loop(pipe, tx, folder, every=2, keep=2).run(pipe.place(params), data, steps)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def main(folder: str | None = None, steps: int = 8) -> tuple[list[float], list[float]]:
    """Both runs; returns their losses."""
    from transformers import AutoModelForCausalLM

    place = Path(folder or tempfile.mkdtemp())
    try:
        fpipe.launch(train, place / "run", steps, "1F1B", 2, steps // 2 + 1, ranks=2, timeout=100)
    except fpipe.errors.LaunchError as error:
        print(error)
    print("continued on one process from", sorted(path.name for path in (place / "run").glob("step-*"))[-1])
    train(place / "run", steps)
    train(place / "alone", steps)

    last = place / "run" / f"step-{steps:09}"
    command(["checkpoint", "verify", str(last)])
    command(["checkpoint", "convert", str(last), str(place / "model")])
    llama().config.save_pretrained(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model")

    parts, _ = huggingface.stages(llama(), 1)
    pipe = fpipe.pipeline(parts, microbatches=1, group=fpipe.local(1))
    logits = pipe(fpipe.load(last, pipe, "params"), batch(0)[0])
    print(f"largest difference of logits: {(model(batch(0)[0]).logits - logits).abs().max().item()}")
    return losses(place / "run"), losses(place / "alone")


if __name__ == "__main__":
    both = main()
    print("the same losses as without interruption:", both[0] == both[1])
