"""Sequences of many lengths: programs of one trace for all lengths against a trace of each length,
and pipelines against autograd on the unsplit model.

python benchmarks/trial_lengths.py                            # 13 families of decoders, 50 lengths,
all schedules python benchmarks/trial_lengths.py --families llama gpt2 --lengths 5

For each family, two stages run at random lengths with the programs of one symbolic trace and with
those of a trace of that length alone: outputs and gradients must have equal bits, and the same
bytes must be held. Then pipelines of four or eight stages run under every schedule, with
microbatches of different lengths: loss and gradients must be those of autograd on the unsplit model
to float32's accuracy. Exit code 1 where something differs. Needs fpipe[hf].
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import torch
from rich.progress import track

import fpipe
from benchmarks.command import options, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from fpipe.interop import huggingface
from huggingface_decoders import FAMILIES, decoder, distance, tokens  # pyright: ignore[reportMissingImports]
from schedule_table import TABLE, Case  # pyright: ignore[reportMissingImports]

LONGEST, MICROBATCHES = 60, 8


def flat(*values: Any) -> list[torch.Tensor]:
    """The tensors in values."""
    return [
        leaf
        for leaf in optree.tree_leaves(values, namespace="fpipe")
        if isinstance(leaf, torch.Tensor)
    ]


# ---- programs ----
def programs(family: str, lengths: list[int]) -> tuple[int, int]:
    """How many pairs of stage and length have equal bits, and how many were tried."""
    stages, params = huggingface.stages(decoder(family, layers=2), 2)
    right = tried = 0
    for length in lengths:
        x: Any = tokens(2, length, seed=length)
        for stage, p in zip(stages, params, strict=True):
            alone = replace(stage, fn=lambda p, x, stage=stage: stage.fn(p, x), dynamic=False)
            one, other = fpipe.trace(stage, p, x), fpipe.trace(alone, p, x)
            y, found = _results(one, p, x)
            _, wanted = _results(other, p, x)
            same = all(map(torch.equal, found, wanted)) and len(found) == len(wanted)
            held = (one.saved_bytes, one.kept_bytes) == (other.saved_bytes, other.kept_bytes)
            right, tried, x = right + (same and held), tried + 1, y
    return right, tried


def _results(of: fpipe.Programs, p: Any, x: Any) -> tuple[Any, list[torch.Tensor]]:
    """The output, and all results of all programs."""
    y, saved = of.forward(p, x)
    torch.manual_seed(1)
    y, extra = y if of.aux is not None else (y, None)
    dy = optree.tree_map(_cotangent, y, namespace="fpipe")
    dx, kept = of.backward_input(saved, dy)
    return y, flat(y, extra, of.backward(saved, dy), dx, of.backward_weight(kept))


def _cotangent(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None
    return torch.randn_like(leaf) if leaf.is_floating_point() else leaf


# ---- pipelines ----
def cases() -> Iterator[Case]:
    """Every schedule, on 4 ranks."""
    for entry in TABLE:
        yield Case(entry.name, 4, MICROBATCHES, 4 * entry.per_rank[0])


def pipelines(family: str, draw: random.Random) -> list[str]:
    """The schedules under which mixed lengths differ from the unsplit model."""
    model = decoder(family, layers=7)
    cuts = {count: huggingface.stages(model, count) for count in {case.stages for case in cases()}}
    wrong = []
    for case in cases():
        stages, params = cuts[case.stages]
        pipe = fpipe.pipeline(
            stages,
            case.make(),
            loss=huggingface.causal_loss,
            microbatches=MICROBATCHES,
            group=fpipe.local(4),
        )
        parts = [
            tokens(2, draw.randint(2, LONGEST), seed=draw.randint(0, 999))
            for _ in range(MICROBATCHES)
        ]
        ids = fpipe.Microbatches(parts)
        loss, grads = fpipe.value_and_grad(pipe)(params, ids, ids)
        total, wanted = _unsplit(model, parts)
        error = distance(grads, wanted)
        if not (abs(float(loss / total) - 1) < 1e-6 and error < 1e-6):
            wrong.append(
                f"{case.name} (loss {float(loss)}, wanted {float(total)}, gradients off by "
                f"{error:.1e})"
            )
    return wrong


def _unsplit(model: Any, parts: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsplit model, whose microbatches count alike."""
    total = sum(
        (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in parts), torch.zeros(())
    ) / len(parts)
    leaves = dict(model.named_parameters(remove_duplicate=False))
    unique = list(dict.fromkeys(leaves.values()))
    grads = dict(zip(unique, torch.autograd.grad(total, unique), strict=True))
    return total.detach(), {name: grads[p] for name, p in leaves.items()}


def main() -> None:
    """Print a line for each family."""
    parser = options(__doc__, lengths=50)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for family in track(given.families):
        draw = random.Random(family)
        lengths = [draw.randint(2, LONGEST) for _ in range(given.lengths)]
        right, tried = programs(family, lengths)
        wrong = pipelines(family, draw)
        found[family] = {"right": right, "tried": tried, "wrong": wrong}
        print(
            f"{family:10s} programs {right} of {tried}, schedules {len(TABLE) - len(wrong)} of "
            f"{len(TABLE)}",
            *wrong,
        )
        sys.stdout.flush()
    save(found, given.json)
    raise SystemExit(any(each["wrong"] or each["right"] < each["tried"] for each in found.values()))


if __name__ == "__main__":
    main()
