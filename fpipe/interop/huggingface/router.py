# SPDX-License-Identifier: Apache-2.0
"""The auxiliary loss of the routers of a mixture of experts, over the layers of all stages.

transformers' load-balancing loss multiplies two sums over all layers, so it is not a sum of losses
of single stages: the sums are passed on with the activations, and the last stage multiplies. This
module must not know stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import StageError


class Totals(NamedTuple):
    """Sums over the layers so far: tokens sent to each expert, its probabilities, and rows."""

    tokens: Tensor
    probabilities: Tensor
    rows: Tensor  #: a number would make every length another trace


class Router(NamedTuple):
    """The number of experts, how many each token uses, and the weight of the loss."""

    experts: int
    top_k: int
    coefficient: float

    def start(self, device: torch.device) -> Totals:
        """Return totals of no layer."""
        zeros = torch.zeros(self.experts, dtype=torch.float32, device=device)
        return Totals(zeros, zeros, torch.zeros((), dtype=torch.float32, device=device))

    def add(self, totals: Totals, logits: Sequence[Tensor], mask: Tensor | None) -> Totals:
        """Return totals with more layers; rows that the mask (batch, length) leaves out do not
        count.
        """
        for layer in logits:
            shares = nn.functional.softmax(layer, dim=-1)
            chosen = torch.topk(shares, self.top_k, dim=-1).indices
            numbers = torch.arange(self.experts, device=layer.device)
            hits = (chosen.unsqueeze(-1) == numbers).sum(1).float()
            counted = torch.ones_like(layer[:, :1]) if mask is None else mask.reshape(-1, 1)
            counted = counted.to(torch.float32)
            totals = Totals(
                totals.tokens + (hits * counted).sum(0),
                totals.probabilities + (shares.float() * counted).sum(0),
                totals.rows + counted.sum(),
            )
        return totals

    def loss(self, totals: Totals) -> Tensor:
        """Return the loss with its coefficient.

        >>> router = Router(experts=2, top_k=1, coefficient=0.5)
        >>> float(router.loss(router.add(router.start(torch.device("cpu")), [torch.zeros(4, 2)],
        ...     None)))
        0.5
        """
        tokens, probabilities, rows = totals
        return self.coefficient * self.experts * torch.sum((tokens / rows) * (probabilities / rows))


def router_of(model: nn.Module) -> Router:
    """Return the router of a causal model, from the attributes that these models have in common."""
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    experts, top_k, coefficient = (getattr(model, name, None) for name in names)
    if experts is None or top_k is None or coefficient is None:
        raise StageError(f"{type(model).__name__} has no router loss to add; say aux_loss=False")
    return Router(experts, top_k, coefficient)
