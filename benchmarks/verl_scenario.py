"""What verl's workers ask of an engine, in a few steps: run by ``trial_verl`` in each process of an
engine.

Log-probabilities and entropies, PPO steps with KL and entropy (or a value loss), a checkpoint,
exported weights, and the same steps again after a second engine read it. The process with outputs
writes all results to a file. Or, with "timed": the CPU seconds of steps with sequences of new
lengths.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import verl.utils.model
from tensordict import NonTensorData, TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.distributed import initialize_global_process_group
from verl.workers import config as configs
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

PROMPT, RESPONSE, ROWS = 12, 24, 8


def batch(
    rank: int, size: int, task: dict[str, Any], more: dict[str, torch.Tensor], seed: int = 0
) -> TensorDict:
    """This copy's part of rollouts of various lengths, padded left and right, as verl's controller
    sends them.
    """
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, PROMPT + 1, (ROWS,), generator=draw)
    responses = torch.randint(3, RESPONSE + 1, (ROWS,), generator=draw)
    places = torch.arange(PROMPT + RESPONSE)
    mask = ((places >= PROMPT - prompts[:, None]) & (places < PROMPT + responses[:, None])).long()
    ids = torch.randint(4, 256, mask.shape, generator=draw) * mask
    data = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:],
        **{name: torch.randn(ROWS, RESPONSE, generator=draw) for name in ("advantages", "returns")},
        **more,
    }
    half = ROWS // size
    data = {name: value[rank * half : (rank + 1) * half].clone() for name, value in data.items()}
    found = left_right_2_no_padding(TensorDict(data, batch_size=[half]))
    tu.assign_non_tensor(
        found,
        use_remove_padding=True,
        use_dynamic_bsz=task["dynamic"],
        max_token_len_per_gpu=64,
        micro_batch_size_per_gpu=2,
        temperature=task["temperature"],
        global_batch_size=ROWS,
        pad_token_id=0,
        global_token_num=NonTensorData([1]),
        update_lr_scheduler=True,
    )
    return found


def worker(task: dict[str, Any]) -> TrainingWorker:
    """A worker of verl with the engine of the task."""
    from fpipe.interop.verl import FpipeEngineConfig

    model = configs.HFModelConfig(
        path=f"{task['model']}/values" if task["values"] else task["model"],
        lora_adapter_path=f"{task['model']}/adapter" if task["lora"] else None,
        tokenizer_path=f"{task['model']}/tokenizer",
        enable_gradient_checkpointing=task["remat"],
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=True,
        lora_rank=task["lora"],
        lora={"merge": bool(task["lora"])},
    )
    if task["engine"] == "fpipe":
        engine: Any = FpipeEngineConfig(dtype="fp32", **task["options"])
    else:
        precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
        engine = configs.FSDPEngineConfig(
            strategy="fsdp2", mixed_precision=precision, use_torch_compile=False
        )
    optimizer = configs.FSDPOptimizerConfig(
        lr=1e-3,
        total_training_steps=10,
        lr_scheduler_type="cosine",
        lr_warmup_steps=2,
        min_lr_ratio=0.1,
    )
    config = configs.TrainingWorkerConfig(
        model_type="value_model" if task["values"] else "language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    made = TrainingWorker(config=config)
    made.reset()
    if task["values"]:
        made.set_loss_fn(
            partial(value_loss, configs.CriticConfig(strategy="x", ppo_micro_batch_size_per_gpu=2))
        )
    else:
        actor = configs.ActorConfig(
            strategy="x",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=2,
            use_kl_loss=True,
            kl_loss_coef=0.1,
            entropy_coeff=0.01,
        )
        made.set_loss_fn(partial(ppo_loss, actor))
    return made


def outputs(
    made: TrainingWorker, task: dict[str, Any], **flags: Any
) -> dict[str, list[list[float]]]:
    """Log-probabilities and entropies, or values, of this copy's sequences; nothing where the rank
    has no outputs.
    """
    engine = made.engine
    data = batch(engine.get_data_parallel_rank(), engine.get_data_parallel_size(), task, {})
    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=not task["values"], **flags)
    found = made.infer_batch(data)
    names = () if found is None else [n for n in ("log_probs", "entropy", "values") if n in found]
    return (
        {}
        if found is None
        else {name: [row.tolist() for row in found[name].unbind()] for name in names}
    )


def step(
    made: TrainingWorker, task: dict[str, Any], number: int, seed: int = 0
) -> dict[str, float]:
    """One step of training; losses, norms and other metrics as numbers. The seed decides on
    lengths.
    """
    engine = made.engine
    draw = torch.Generator().manual_seed(number)
    shape = (ROWS, RESPONSE)
    near = lambda spread: -5.5 + spread * torch.randn(shape, generator=draw)
    more = {
        "old_log_probs": near(0.3),
        "ref_log_prob": near(0.3),
        "values": torch.randn(shape, generator=draw),
    }
    data = batch(engine.get_data_parallel_rank(), engine.get_data_parallel_size(), task, more, seed)
    tu.assign_non_tensor(data, calculate_entropy=not task["values"])
    found = made.train_batch(data)
    if found is None:
        return {}
    metrics = tu.get(found, "metrics")
    return {name: metrics[name] for name in ("loss", "grad_norm", "lr")}


def weights(made: TrainingWorker) -> dict[str, torch.Tensor]:
    """All exported tensors, on each rank."""
    named, _ = made.engine.get_per_tensor_param()
    return {name: tensor.detach().clone().cpu() for name, tensor in named}


def timed(made: TrainingWorker, task: dict[str, Any]) -> None:
    """Write the CPU seconds of this process in each step, of which no two have the same lengths."""
    seconds = []
    for number in range(task["timed"]):
        before = time.process_time()
        step(made, task, number, seed=number)
        seconds.append(time.process_time() - before)
    torch.save(torch.tensor(seconds), Path(task["folder"], f"{dist.get_rank()}.seconds"))


def _values(local_path: str, torch_dtype: torch.dtype, model_config: Any, **keywords: Any) -> Any:
    kind = transformers.AutoModelForTokenClassification
    return kind.from_pretrained(
        local_path, config=model_config, dtype=torch_dtype, attn_implementation="sdpa"
    )


def main() -> None:
    """Run the task that the first argument describes as JSON."""
    task: dict[str, Any] = {
        "options": {},
        "values": False,
        "dynamic": True,
        "temperature": 1.0,
        "remat": False,
        "lora": 0,
        "timed": 0,
        **json.loads(sys.argv[1]),
    }
    torch.manual_seed(42)
    verl.utils.model.load_valuehead_model = _values  # verl's asks for attention of an accelerator
    initialize_global_process_group()
    folder = Path(task["folder"])
    made = worker(task)
    if task["timed"]:
        timed(made, task)
    else:
        compared(made, task, folder)
    dist.barrier()
    dist.destroy_process_group()


def compared(made: TrainingWorker, task: dict[str, Any], folder: Path) -> None:
    """Write outputs, metrics and weights, before and after a checkpoint."""
    found: dict[str, Any] = {"before": outputs(made, task)}
    if task["lora"]:
        found["reference"] = outputs(made, task, no_lora_adapter=True)
    found["steps"] = [step(made, task, number) for number in range(3)]
    made.save_checkpoint(str(folder / "checkpoint"), global_step=3)
    found["weights"] = weights(made)
    found["onward"] = [step(made, task, number) for number in range(3, 5)]
    again = worker(task)
    again.load_checkpoint(str(folder / "checkpoint"))
    found["resumed"] = [step(again, task, number) for number in range(3, 5)]
    found["after"] = outputs(again, task)
    if made.engine.is_mp_src_rank_with_outputs():
        torch.save(found, folder / f"{made.engine.get_data_parallel_rank()}.pt")


if __name__ == "__main__":
    main()
