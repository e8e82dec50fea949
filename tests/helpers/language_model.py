"""A small language model whose blocks take a gain per row and return an auxiliary loss; the caller
supplies block and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fpipe
from models import cross_entropy, embed

ROWS, WIDTH, WORDS = 8, 4, 7


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, target tokens, and the gains."""
    generator = torch.Generator().manual_seed(9)
    x, t = (torch.randint(WORDS, (ROWS, 3), generator=generator) for _ in "xt")
    return x, t, torch.rand(ROWS, generator=generator)


def language(
    block: Callable[..., tuple[Tensor, Tensor]],
    head: Any,
    group: Any,
    schedule: str,
    **options: Any,
) -> fpipe.Pipeline:
    """Embedding, two blocks, head; four microbatches."""
    middle = fpipe.Stage(block, aux_loss=True)
    return fpipe.pipeline(
        [embed, middle, middle, head],
        schedule,
        loss=cross_entropy,
        microbatches=4,
        group=group,
        **options,
    )
