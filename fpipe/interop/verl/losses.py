# SPDX-License-Identifier: Apache-2.0
"""A loss function of verl as the loss of a pipeline: logits become log-probabilities or values,
then verl is called.

It runs on autograd, so that loss functions may return any metrics and look at numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .._rl.heads import scores
from .._rl.sequences import Tokens

tensordicts = import_module("verl.utils.tensordict_utils")


@dataclass(frozen=True)
class Row:
    """What verl wants to know of a microbatch; of no type that pytrees look into."""

    content: dict[str, object]


@dataclass(frozen=True)
class Batch:
    """The microbatches of a call, as verl and as the model have them, and verl's loss function.

    Without a function outputs alone are computed.
    """

    parts: Sequence[Any]
    tokens: Sequence[Tokens]
    function: Callable[..., tuple[Tensor, object]] | None
    keep_outputs: bool


#: The batch whose losses are computed.
CURRENT: ContextVar[Batch] = ContextVar("CURRENT")


@dataclass(frozen=True)
class Loss:
    """The loss of a pipeline: of logits, and the number of their microbatch in the current batch.

    Args:
        values: whether the logits are values of a value model.
        chunk: rows of logits that are converted at a time.
        group: the process group of the copies, for verl.
        device: of the logits.
    """

    values: bool
    chunk: int
    group: Any
    device: torch.device

    def __call__(self, logits: Tensor, number: Tensor) -> tuple[Tensor, Row]:
        """Return the loss of a microbatch, and what verl wants to know of it."""
        call = CURRENT.get()
        index = int(number)
        batch = call.parts[index].to(self.device)
        outputs = self._outputs(logits, call.tokens[index], batch)
        loss = logits.new_ones((), dtype=torch.float32)
        metrics = {}
        if call.function is not None:
            loss, metrics = call.function(model_output=outputs, data=batch, dp_group=self.group)
        content = {"loss": loss.detach().item(), "metrics": metrics}
        if call.keep_outputs:
            content["model_output"] = {name: value.detach() for name, value in outputs.items()}
        return loss.to(_wide(logits)), Row(content)

    def _outputs(self, logits: Tensor, tokens: Tokens, batch: Any) -> dict[str, Tensor]:
        """Return nested tensors by verl's names."""
        if self.values:
            return {"values": tokens.nested(logits.squeeze(-1).to(_wide(logits)))}
        result = scores(
            logits,
            tokens.labels,
            tokens.temperature,
            chunk=self.chunk,
            entropy=asked(batch, "calculate_entropy"),
        )
        outputs = {"log_probs": tokens.nested(result.log_probs)}
        if result.entropy is not None:
            outputs["entropy"] = tokens.nested(result.entropy)
        return outputs


def like(logits: Tensor, number: Tensor) -> tuple[Tensor, None]:
    """Return what a loss returns: a number in float32 at least, and anything."""
    return logits.sum().to(_wide(logits)), None


def asked(batch: Any, name: str, default: Any = False) -> Any:
    """Return what a batch says under a name beside its tensors."""
    return tensordicts.get_non_tensor_data(data=batch, key=name, default=default)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
