# SPDX-License-Identifier: Apache-2.0
"""The training text: Shakespeare's sonnets, by character.

Batches depend on (seed, step) alone, so they are the same on every rank and in every run. Knows no
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A text whose characters are its tokens.

    >>> text = Text("to be or not to be")
    >>> text.letters, text.tokens[:5]
    (' benort', tensor([6, 4, 0, 1, 2]))
    """

    text: str

    @cached_property
    def letters(self) -> str:
        """Every character that occurs, in order; a token is an index into it."""
        return "".join(sorted(set(self.text)))

    @cached_property
    def tokens(self) -> Tensor:
        """The whole text as tokens."""
        return torch.tensor(list(map(self.letters.index, self.text)))

    def batch(self, step: int, rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """``rows`` pieces of the text and, for each character, the next one.

        >>> x, y = Text("to be or not to be").batch(step=0, rows=2, length=5)
        >>> x.shape, torch.equal(x[:, 1:], y[:, :-1])
        (torch.Size([2, 5]), True)
        """
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        last = len(self.text) - length
        starts = torch.randint(last, (rows, 1), generator=generator)
        pieces = self.tokens[starts + torch.arange(length + 1)]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def sonnets() -> Text:
    """Thirty-seven of Shakespeare's sonnets (1609, public domain; spelling modernised).

    >>> sonnets().text.splitlines()[0]
    'From fairest creatures we desire increase,'
    """
    path = Path(__file__).parent / "sonnets.txt"
    return Text(path.read_text(encoding="utf-8"))
