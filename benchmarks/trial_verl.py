"""verl's own trainer and workers, unmodified, on fpipe and on verl's FSDP2 engine, on the CPU.

python -m benchmarks.trial_verl                      # all of it, about ten minutes on two cores
python -m benchmarks.trial_verl sft workers timed    # some of it
VERL_PYTHON=/path/to/python python -m benchmarks.trial_verl     # with a Python that has verl

* sft: losses and gradient norms of ``verl.trainer.sft_trainer`` over 20 steps, ``engine=fpipe`` on
  2 and 4 processes beside FSDP2 on one.
* resume: that trainer from its checkpoint, under another schedule.
* workers: log-probabilities, entropies, PPO steps with KL and entropy, value losses, LoRA, exported
  weights by name, a checkpoint and what follows it.
* timed: CPU seconds of a step, over all processes, on unpadded sequences whose lengths are new in
  every step.

Exit code 1 where losses differ by more than 1e-6, log-probabilities or weights by more than 1e-5,
or a step takes more than 1.5 times the CPU time. Needs verl 0.9.1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("VERL_PYTHON", sys.executable)
ZERO = {"pipeline_parallel_size": 2, "zero": 1}
#: Name, processes, options of verl, options of the engine.
SFT = [
    ("pp=2", 2, {}, {}),
    ("pp=2 dp=2 zero=1", 4, {}, ZERO),
    ("pp=2, fixed batch sizes", 2, {"data.use_dynamic_bsz": False}, {}),
    ("pp=2 dp=2 zero=1, fixed batch sizes", 4, {"data.use_dynamic_bsz": False}, ZERO),
    (
        "tied ZBV, checkpointing",
        2,
        {"model.enable_gradient_checkpointing": True, "tied": True},
        {"schedule": "ZBV"},
    ),
    (
        "tied ZBV dp=2 zero=1, checkpointing",
        4,
        {"model.enable_gradient_checkpointing": True, "tied": True},
        {**ZERO, "schedule": "ZBV"},
    ),
]
#: Name, processes, what the scenario is asked, options of the engine.
WORKERS = [
    ("pp=2", 2, {}, {}),
    ("ZBV dp=2 zero=1", 4, {}, {**ZERO, "schedule": "ZBV"}),
    (
        "tied ZBV, temperature",
        2,
        {"tied": True, "dynamic": False, "temperature": 0.7, "remat": True},
        {"schedule": "ZBV"},
    ),
    ("values", 2, {"values": True}, {}),
    ("LoRA", 2, {"lora": 4}, {}),
    ("LoRA, ZBV dp=2 zero=2", 4, {"lora": 4}, {**ZERO, "zero": 2, "schedule": "ZBV"}),
]


def run(
    module: str, processes: int, arguments: Sequence[str], ours: bool, log: Path, **more: str
) -> None:
    """Run a module under torchrun; its output goes to a file, and its end into the error."""
    port = str(random.randint(20000, 40000))
    command = [
        PYTHON,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
    ]
    command += ["--master-port", port, "-m", module, *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
        **more,
    }
    environment["VERL_USE_EXTERNAL_MODULES"] = "fpipe.interop.verl"
    if not ours:
        environment["VERL_ENGINE_DEVICE"] = (
            "cuda"  # verl registers its engine for cuda alone; it runs on the CPU too
        )
    with log.open("w") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=600,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(
            f"{module} failed, see {log}:\n" + "\n".join(log.read_text().splitlines()[-30:])
        )


def trained(
    folder: Path, name: str, processes: int, options: dict[str, Any], engine: dict[str, Any] | None
) -> Any:
    """Loss and gradient norm of each step of verl's SFT trainer."""
    options = dict(options)
    model = folder / ("tied" if options.pop("tied", False) else "plain")
    log = folder / f"{name}.jsonl"
    if engine is None:
        choices = {"engine": "fsdp", "engine.strategy": "fsdp2", "engine.use_torch_compile": False}
        choices |= {f"+engine.mixed_precision.{name}_dtype": "fp32" for name in ("param", "reduce")}
    else:
        choices = {
            "engine": "fpipe",
            "engine.dtype": "fp32",
            **{f"engine.{key}": v for key, v in engine.items()},
        }
    choices |= {
        "data.train_files": model / "train.parquet",
        "data.train_batch_size": 8,
        "data.micro_batch_size_per_gpu": 2,
        "data.max_token_len_per_gpu": 256,
        "data.num_workers": 0,
        "model.path": model,
        "optim.lr": 1e-3,
        "model.tokenizer_path": model / "tokenizer",
        "+model.override_config.attn_implementation": "sdpa",
        "model.enable_gradient_checkpointing": False,
        "trainer.device": "cpu",
        "trainer.logger": "[file]",
        "trainer.total_training_steps": 20,
        "trainer.total_epochs": 10,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / f"{name}.checkpoints",
        "hydra.run.dir": folder / "hydra",
        **options,
    }
    arguments = [f"{key}={value}" for key, value in choices.items()]
    ours = engine is not None
    run(
        "verl.trainer.sft_trainer",
        processes,
        arguments,
        ours,
        log.with_suffix(".txt"),
        VERL_FILE_LOGGER_PATH=str(log),
    )
    rows = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    return torch.tensor(
        [[row["train/loss"], row["train/grad_norm"]] for row in rows], dtype=torch.float64
    )


def sft(folder: Path) -> bool:
    """Print how far losses and gradient norms are off."""
    wrong, known = False, dict[str, Any]()
    for index, (name, processes, options, engine) in enumerate(SFT):
        key = str(options)
        if key not in known:
            known[key] = trained(folder, f"fsdp-{index}", 1, options, None)
        ours = trained(folder, f"fpipe-{index}", processes, options, engine)
        off = ((ours - known[key]).abs() / known[key].abs()).amax(0)
        wrong |= len(ours) != 20 or bool(off[0] > 1e-6)
        print(
            f"sft      {name:38} {len(ours)} steps: losses off by {off[0]:.1e}, norms by "
            f"{off[1]:.1e}; last loss "
            f"{ours[-1, 0]:.6f}",
            flush=True,
        )
    return wrong


def resume(folder: Path) -> bool:
    """Print how far losses are off after a checkpoint, which another schedule reads."""
    whole = trained(folder, "whole", 2, {"trainer.save_freq": 10}, {})
    path = folder / "whole.checkpoints" / "global_step_10"
    options = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": path}
    rest = trained(folder, "rest", 2, options, {"schedule": "ZBV"})
    off = ((rest - whole[-len(rest) :]).abs() / rest.abs()).amax(0)
    print(
        f"resume   {'1F1B, then ZBV':38} {len(rest)} steps: losses off by {off[0]:.1e}, norms by "
        f"{off[1]:.1e}",
        flush=True,
    )
    return len(rest) != 10 or bool(off[0] > 1e-6)


def scenario(
    folder: Path, name: str, processes: int, task: dict[str, Any], engine: dict[str, Any] | None
) -> Path:
    """Run the scenario; the folder with its results."""
    task = dict(task)
    out = folder / name
    out.mkdir()
    model = folder / task.pop("model", "tied" if task.pop("tied", False) else "plain")
    task |= {
        "engine": "fsdp2" if engine is None else "fpipe",
        "options": engine or {},
        "model": str(model),
    }
    task["folder"] = str(out)
    run(
        "benchmarks.verl_scenario",
        processes,
        [json.dumps(task)],
        engine is not None,
        out / "log.txt",
    )
    return out


def results(out: Path) -> dict[str, Any]:
    """What the copies found, joined."""
    parts = [torch.load(file) for file in sorted(out.glob("*.pt"))]
    joined = dict(parts[0])
    for key in ("before", "after", "reference"):
        if key in joined:
            joined[key] = {
                name: [row for part in parts for row in part[key][name]] for name in joined[key]
            }
    return joined


def rows_off(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of outputs; of log-probabilities without the last of a sequence.

    What follows the last token is the first one of the next sequence in the same row, and rows
    depend on the copies.
    """
    worst = 0.0
    for name in theirs:
        for a, b in zip(ours[name], theirs[name], strict=True):
            end = -1 if name == "log_probs" else None
            worst = max(worst, (torch.tensor(a[:end]) - torch.tensor(b[:end])).abs().max().item())
    return worst


def steps_off(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float:
    """The largest difference of a metric, relative to its largest value: losses of PPO may be near
    0.
    """
    a, b = (
        [row[name] for key in ("steps", "onward", "resumed") for row in found[key]]
        for found in (ours, theirs)
    )
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(map(abs, b))


def workers(folder: Path) -> bool:
    """Print how far outputs, losses and weights are off."""
    wrong, known = False, dict[str, Any]()
    for index, (name, processes, task, engine) in enumerate(WORKERS):
        key = str(task)
        if key not in known:
            known[key] = results(scenario(folder, f"fsdp2-workers-{index}", 1, task, None))
        theirs, ours = (
            known[key],
            results(scenario(folder, f"workers-{index}", processes, task, engine)),
        )
        outputs = max(
            rows_off(ours[k], theirs[k]) for k in ("before", "after", "reference") if k in theirs
        )
        losses, norms = (steps_off(ours, theirs, metric) for metric in ("loss", "grad_norm"))
        names = ours["weights"].keys() == theirs["weights"].keys()
        weights = max(
            (ours["weights"][n] - theirs["weights"][n]).abs().max().item()
            for n in theirs["weights"]
        )
        resumed = ours["resumed"] == ours["onward"]
        wrong |= outputs > 1e-5 or losses > 1e-6 or weights > 1e-5 or not names or not resumed
        print(
            f"workers  {name:38} outputs off by {outputs:.1e}, losses {losses:.1e}, norms "
            f"{norms:.1e}, weights "
            f"{weights:.1e}; names {'equal' if names else 'DIFFER'}; resumed "
            f"{'equal' if resumed else 'DIFFERS'}",
            flush=True,
        )
    return wrong


def timed(folder: Path, steps: int = 30) -> bool:
    """Print the CPU seconds of a step over all processes: the median of the steps after the
    tenth.
    """
    wrong = False
    for model in ("plain", "larger"):
        seconds = []
        for processes, engine in ((1, None), (2, {}), (2, {"schedule": "ZBV"})):
            task = {"timed": steps, "model": model}
            out = scenario(folder, f"timed-{model}-{len(seconds)}", processes, task, engine)
            total = torch.stack([torch.load(file) for file in out.glob("*.seconds")]).sum(0)[10:]
            seconds.append((total.median().item(), total.mean().item()))
        wrong |= seconds[1][0] > 1.5 * seconds[0][0]
        shown = ", ".join(
            f"{name} {median:.3f} (mean {mean:.3f}, ratio {median / seconds[0][0]:.2f})"
            for name, (median, mean) in zip(("FSDP2", "1F1B", "ZBV"), seconds, strict=True)
        )
        print(f"timed    {model:38} CPU s a step: {shown}", flush=True)
    return wrong


def main() -> int:
    """Print a line for each comparison; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="sft, resume, workers, timed; by default all")
    wrong = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, options in {
            "plain": [],
            "tied": ["--tied"],
            "larger": ["--hidden", "256", "--layers", "8"],
        }.items():
            command = [
                PYTHON,
                "-W",
                "ignore",
                "-m",
                "benchmarks.verl_model",
                str(folder / model),
                *options,
            ]
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        for what in parser.parse_args().what or ["sft", "resume", "workers", "timed"]:
            wrong |= {"sft": sft, "resume": resume, "workers": workers, "timed": timed}[what](
                folder
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
