"""Data for rl_engine.py: sequences in microbatches with padding, the loss of PPO, and sample data.

    python examples/rl_engine.py

Nothing here depends on pipelines. The data are pieces of a text in place of the samples of a policy.
"""

from typing import Any

import torch
from torch import Tensor

import fpipe
from fpipe.products.demo import sonnets


def cut(lengths: list[int], budget: int, divisor: int) -> list[list[int]]:
    """Which sequences make a microbatch: the longest first, as many as fit the budget, padding included."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = -(-lengths[parts[-1][0]] // divisor) * divisor if parts else 0
        if not parts or (len(parts[-1]) + 1) * longest > budget:
            parts.append([])
        parts[-1].append(row)
    return parts


def padded(sequences: list[dict], divisor: int) -> dict[str, Tensor]:
    """One microbatch: every tensor that sequences have, as rows of one length."""
    rows = [{k: v[None] for k, v in one.items() if isinstance(v, Tensor)} for one in sequences]
    rows, _ = fpipe.pad(rows, multiple=divisor, uniform=True)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def ppo(now: Tensor, batch: dict[str, Tensor], clip: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective of PPO; metrics are sums over tokens, which add up however the data are cut."""
    mask, advantage = batch["mask"], batch["advantage"]
    gone = torch.where(mask > 0, now - batch["old_log_probs"], 0.0)
    ratio = gone.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    tokens = mask.sum()
    clipped = ((ratio - 1).abs() > clip) * mask
    return -(gain * mask).sum() / tokens.clamp(min=1), {"tokens": tokens, "clipped": clipped.sum(), "kl": -gone.sum()}


def rollouts(count: int = 24, prompt: int = 8) -> list[dict[str, Any]]:
    """Pieces of the sonnets of many lengths, each with a name; a vowel is worth 1, anything else 0, less the mean."""
    text, data = sonnets(), []
    for number in range(count):
        tokens = text.batch(number, 1, prompt + 4 + 5 * number % 29)[0][0]
        reward = torch.tensor([float(text.letters[token] in "aeiou") for token in tokens])
        mask = (torch.arange(len(tokens)) >= prompt).float()
        data.append({"name": f"piece {number}", "tokens": tokens, "mask": mask, "advantage": reward - reward.mean()})
    return data
