# SPDX-License-Identifier: Apache-2.0
"""A part of a decoder-only causal model as a stage function, by what the families of transformers models share.

They embed tokens, run a list of layers, and end in a norm and a head; between these is code that each family defines
(scales, position embeddings, masks, soft caps). A stage therefore runs the model's forward with stand-ins for the
submodules of other stages, and takes its input where its first layer would. This module must not know any family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..errors import StageError
from ..stage import remat
from ._pure import Claim, Pure, clone
from ._router_loss import Router, Totals

SIDES = ("attention_mask", "position_ids", "position_embeddings")


# ---- the structure of a model ----------------------------------------------------------------------------------------


def decoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder inside a causal model, and its list of layers."""
    inner = getattr(model, "base_model", None)
    if not isinstance(inner, nn.Module) or not hasattr(model, "config"):
        raise StageError(
            f"{type(model).__name__} is no causal model of the transformers package; "
            "fpipe.from_module cuts other modules"
        )
    lists = [child for child in inner.children() if isinstance(child, nn.ModuleList) and len(child)]
    if len(lists) != 1:
        raise StageError(
            f"{type(inner).__name__} has {len(lists)} lists of layers where a decoder has one; "
            "write its stages as functions"
        )
    return inner, lists[0]


def is_rotary(module: nn.Module) -> bool:
    """Whether a module computes rotary embeddings, by the name of its class."""
    return "rotary" in type(module).__name__.lower()


# ---- stand-ins -------------------------------------------------------------------------------------------------------


class _Skip(nn.Module):
    """In place of a layer of another stage: returns its input, or ``value`` instead."""

    value: torch.Tensor | None = None

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if self.value is None else self.value


class _ZeroEmbedding(nn.Module):
    """In place of an embedding of another stage that is added to others."""

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((*ids.shape, 1), device=ids.device)


class _Rotary(nn.Module):
    """Returns the embeddings passed as a side input, or computes them."""

    value: Any = None  # a pair of tensors, or one pair per type of layer

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Any, position_ids: Any = None, layer_type: str | None = None, **kwargs: Any) -> Any:
        if self.value is None:
            kwargs |= {} if layer_type is None else {"layer_type": layer_type}
            return self.module(x, position_ids=position_ids, **kwargs)
        return self.value if layer_type is None else self.value[layer_type]


def with_stand_ins(model: nn.Module, span: tuple[int, int], last: bool, config: Any) -> nn.Module:
    """A clone of the model in which stand-ins replace the submodules of other stages."""
    (inner, layers), (low, high) = decoder_of(model), span
    replacements: dict[nn.Module, nn.Module] = {
        layer: _Skip() for index, layer in enumerate(layers) if not low <= index < high
    }
    before = True
    for child in inner.children():
        if child is layers:
            before = False
        elif is_rotary(child):
            replacements[child] = _Rotary(clone(child))
        elif before and low > 0:
            replacements[child] = _ZeroEmbedding() if isinstance(child, nn.Embedding) else _Skip()
        elif not before and not last:
            replacements[child] = _Skip()
    if not last:
        replacements |= {child: _Skip() for child in model.children() if child is not inner}
    copy = clone(model, replacements)
    for child in copy.modules():
        if getattr(child, "config", None) is model.config:
            child.__dict__["config"] = config
        if getattr(child, "gradient_checkpointing", False):
            child.__dict__["gradient_checkpointing"] = False
    for old, new in zip(layers, decoder_of(copy)[1], strict=True):
        if getattr(old, "gradient_checkpointing", False) and old.training and not isinstance(new, _Skip):
            new.forward = remat(new.forward)
    return copy


# ---- a stage ---------------------------------------------------------------------------------------------------------


class DecoderPart(Pure):
    """Some layers of a decoder as a stage function; the first also embeds, the last also computes logits."""

    def __init__(
        self, module: nn.Module, claim: Claim, *, span: tuple[int, int], last: bool, router: Router | None, name: str
    ):
        self.first, self.last, self.router = span[0] == 0, last, router
        super().__init__(module, claim, sides=SIDES, state=(), name=name)
        self.inner, layers = decoder_of(module)
        self.prefix = next((f"{name}." for name, child in module.named_children() if child is self.inner), "")
        self.entry = _entry(layers, *span)
        self.rotary = [child for child in self.inner.children() if isinstance(child, _Rotary)]
        self.router_logits: list[torch.Tensor] = []
        if router is not None:
            _collect_router_logits(self.inner, self.router_logits)

    def call(self, tensors: dict[str, torch.Tensor], x: Any, side: Mapping[str, Any]) -> Any:
        """Run the layers on token ids, or on the output of the stage before."""
        hidden, totals = (x[0], Totals(*x[1:])) if isinstance(x, tuple) else (x, None)
        y = self._output(tensors, hidden, side)
        if self.router is None:
            return y
        mask = side.get("attention_mask")
        mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        totals = self.router.add(totals or self.router.start(y.device), self.router_logits, mask)
        self.router_logits.clear()
        return (y, self.router.loss(totals)) if self.last else (y, *totals)

    def _output(self, tensors: dict[str, torch.Tensor], hidden: torch.Tensor, side: Mapping[str, Any]) -> torch.Tensor:
        keywords: dict[str, Any] = {name: side.get(name) for name in ("attention_mask", "position_ids")}
        keywords |= {"use_cache": False, "return_dict": True}
        keywords |= {} if self.router is None else {"output_router_logits": False}  # no loss of a few layers alone
        if self.first and not hidden.is_floating_point():
            keywords["input_ids"] = hidden
        else:
            keywords["inputs_embeds"] = hidden
            self.entry.value = None if self.first else hidden
        for rotary in self.rotary:
            rotary.value = side.get("position_embeddings")
        module = self.module if self.last else self.inner
        if not self.last:
            tensors = {n.removeprefix(self.prefix): t for n, t in tensors.items() if n.startswith(self.prefix)}
        try:
            out = functional_call(module, tensors, (), keywords, tie_weights=False)
        finally:
            self.entry.value = None
            for rotary in self.rotary:
                rotary.value = None
        return out.logits if self.last and self.prefix else out.last_hidden_state


def _collect_router_logits(inner: nn.Module, logits: list[torch.Tensor]) -> None:
    """Have the decoder put its routers' logits into a list at each call, whatever the model around it asks for."""

    def request(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return args, {**keywords, "output_router_logits": True}

    def collect(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        logits[:] = out.router_logits or ()

    inner.register_forward_pre_hook(request, with_kwargs=True)
    inner.register_forward_hook(collect)


def _entry(layers: nn.ModuleList, low: int, high: int) -> _Skip:
    """The module whose ``value`` is a stage's input: before its first layer or, without layers, in place of one."""
    if low == high and isinstance(before := layers[low - 1], _Skip):
        return before
    entry = _Skip()

    def enter(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if entry.value is None:
            return None
        if args:
            return (entry.value, *args[1:]), keywords
        return args, {**keywords, "hidden_states": entry.value}

    if low < high:
        layers[low].register_forward_pre_hook(enter, with_kwargs=True)
    return entry
