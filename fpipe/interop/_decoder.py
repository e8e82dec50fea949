# SPDX-License-Identifier: Apache-2.0
"""A part of a decoder-only causal model as a stage function, by what the families of transformers models share.

They embed tokens, run a list of layers, and end in a norm and a head; between these is code that each family defines
(scales, position embeddings, masks, soft caps). A stage therefore runs the model's forward with stand-ins for the
submodules of other stages, and takes its input where its first layer would. This module must not know any family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from ..errors import StageError
from ..stage import remat
from ._layers import as_block
from ._pure import Claim, Pure, clone

SIDES = ("attention_mask", "position_ids", "position_embeddings")


# ---- the structure of a model ----------------------------------------------------------------------------------------


def decoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder inside a causal model, and its list of layers."""
    inner = getattr(model, "base_model", None)
    if not isinstance(inner, nn.Module) or not hasattr(model, "config"):
        raise StageError(
            f"{type(model).__name__} is no causal model of the transformers package; "
            f"{_inside(model) or 'fpipe.from_module cuts other modules'}"
        )
    lists = _layer_lists(inner)
    if len(lists) != 1:
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: {type(inner).__name__} has {len(lists)} lists of layers where "
            f"a decoder has one; {_inside(model) or 'write its stages as functions'}"
        )
    return inner, lists[0]


def _layer_lists(inner: nn.Module) -> list[nn.ModuleList]:
    return [child for child in inner.children() if isinstance(child, nn.ModuleList) and len(child)]


def _inside(model: nn.Module) -> str:
    """Advice to pass the causal model that a model contains, as those with adapters (PEFT) do; "" without one."""
    for name, child in model.named_modules():
        inner, head = getattr(child, "base_model", None), getattr(child, "get_output_embeddings", lambda: None)()
        if not name or head is None or not isinstance(inner, nn.Module) or not hasattr(child, "config"):
            continue
        if len(_layer_lists(inner)) == 1:
            return f"pass the {type(child).__name__} inside it, model.{name}"
    return ""


def is_rotary(module: nn.Module) -> bool:
    """Whether a module computes rotary embeddings, by the name of its class."""
    return "rotary" in type(module).__name__.lower()


# ---- stand-ins -------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What one call of a stage passes to modules inside the model."""

    hidden: Any  # the input of the stage's first layer
    embeddings: Any  # rotary embeddings: a pair of tensors, or one pair per type of layer; None where none are passed
    router_logits: list[torch.Tensor]  # filled in by the decoder


_CALL: ContextVar[_Call] = ContextVar("_CALL")


class _Skip(nn.Module):
    """In place of a layer of another stage: returns its input."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class _ZeroEmbedding(nn.Module):
    """In place of an embedding of another stage that is added to others."""

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((*ids.shape, 1), device=ids.device)


class _Rotary(nn.Module):
    """Returns the embeddings passed as a side input, or computes them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Any, position_ids: Any = None, layer_type: str | None = None, **kwargs: Any) -> Any:
        kind = {} if layer_type is None else {"layer_type": layer_type}
        embeddings = _CALL.get().embeddings
        if embeddings is None:
            return self.module(x, position_ids=position_ids, **kwargs, **kind)
        return embeddings if layer_type is None else embeddings[layer_type]


def _enter(forward: Callable[..., Any], hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a stage's first layer, on the stage's input."""
    return forward(_CALL.get().hidden, *args, **kwargs)


def _with_router_logits(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a decoder that keeps its routers' logits, whatever the model around it asks for."""
    out = forward(*args, **kwargs | {"output_router_logits": True})
    _CALL.get().router_logits[:] = out.router_logits or ()
    return out


def with_stand_ins(
    model: nn.Module, span: tuple[int, int], last: bool, config: Any, as_blocks: bool
) -> nn.Module:  # fmt: skip
    """A clone of the model in which stand-ins replace the submodules of other stages.

    ``as_blocks``: equal layers are traced once.
    """
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
        if isinstance(new, _Skip):
            continue
        if as_blocks:
            as_block(new)
        if getattr(old, "gradient_checkpointing", False) and old.training:
            new.forward = _checkpointed(new)
    return copy


def _checkpointed(layer: nn.Module) -> Callable[..., Any]:
    """The forward of a layer that is computed again in the backward, then with the parameters of this call."""
    plain = object.__new__(type(layer))
    plain.__dict__.update(layer.__dict__)

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = dict(layer.named_parameters(remove_duplicate=False))
        tensors |= dict(layer.named_buffers(remove_duplicate=False))
        run = lambda *args, **kwargs: functional_call(plain, tensors, args, kwargs, tie_weights=False)
        return remat(run)(*args, **kwargs)

    return forward


# ---- the auxiliary loss of routers -----------------------------------------------------------------------------------
# transformers' load-balancing loss multiplies two sums over all layers, so it is not a sum of losses of single stages:
# the sums are passed on with the activations, and the last stage multiplies.


class Totals(NamedTuple):
    """Tokens sent to each expert, the sum of each expert's probability, and rows counted, over the layers so far."""

    tokens: torch.Tensor
    probabilities: torch.Tensor
    rows: int | torch.Tensor  # a tensor where a mask decides


class Router(NamedTuple):
    """The number of experts, how many each token uses, and the weight of the loss."""

    experts: int
    top_k: int
    coefficient: float

    def start(self, device: torch.device) -> Totals:
        """Totals of no layer."""
        zeros = torch.zeros(self.experts, dtype=torch.float32, device=device)
        return Totals(zeros, zeros, 0)

    def add(self, totals: Totals, logits: Sequence[torch.Tensor], mask: torch.Tensor | None) -> Totals:
        """Totals with more layers; rows that the mask (batch, length) leaves out are not counted."""
        tokens, probabilities, rows = totals
        for layer in logits:
            shares = nn.functional.softmax(layer, dim=-1)
            _, chosen = torch.topk(shares, self.top_k, dim=-1)
            hits = (chosen.unsqueeze(-1) == torch.arange(self.experts, device=layer.device)).sum(1).float()
            shares = shares.float()
            if mask is not None:
                keep = mask.reshape(-1, 1).to(torch.float32)
                hits, shares = hits * keep, shares * keep
            tokens = tokens + hits.sum(0)
            probabilities = probabilities + shares.sum(0)
            rows = rows + (layer.shape[0] if mask is None else mask.sum().to(torch.float32))
        return Totals(tokens, probabilities, rows)

    def loss(self, totals: Totals) -> torch.Tensor:
        """The loss with its coefficient.

        >>> router = Router(experts=2, top_k=1, coefficient=0.5)
        >>> float(router.loss(router.add(router.start(torch.device("cpu")), [torch.zeros(4, 2)], None)))
        0.5
        """
        tokens, probabilities, rows = totals
        return self.coefficient * self.experts * torch.sum((tokens / rows) * (probabilities / rows))


def router_of(model: nn.Module) -> Router:
    """The router of a causal model, from the attributes that these models have in common."""
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    experts, top_k, coefficient = (getattr(model, name, None) for name in names)
    if experts is None or top_k is None or coefficient is None:
        raise StageError(f"{type(model).__name__} has no router loss to add; say aux_loss=False")
    return Router(experts, top_k, coefficient)


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
        if not self.first:
            entry = layers[min(span[0], len(layers) - 1)]  # a stand-in, for a stage without layers
            entry.forward = partial(_enter, entry.forward)
        if router is not None:
            self.inner.forward = partial(_with_router_logits, self.inner.forward)

    def call(self, tensors: dict[str, torch.Tensor], x: Any, side: Mapping[str, Any]) -> Any:
        """Run the layers on token ids, or on the output of the stage before."""
        hidden, totals = (x[0], Totals(*x[1:])) if isinstance(x, tuple) else (x, None)
        call = _Call(hidden, side.get("position_embeddings"), [])
        token = _CALL.set(call)
        try:
            y = self._output(tensors, hidden, side)
        finally:
            _CALL.reset(token)
        if self.router is None:
            return y
        mask = side.get("attention_mask")
        mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        totals = self.router.add(totals or self.router.start(y.device), call.router_logits, mask)
        return (y, self.router.loss(totals)) if self.last else (y, *totals)

    def _output(self, tensors: dict[str, torch.Tensor], hidden: torch.Tensor, side: Mapping[str, Any]) -> torch.Tensor:
        keywords: dict[str, Any] = {name: side.get(name) for name in ("attention_mask", "position_ids")}
        keywords |= {"use_cache": False, "return_dict": True}
        keywords |= {} if self.router is None else {"output_router_logits": False}  # no loss of a few layers alone
        keywords["input_ids" if self.first and not hidden.is_floating_point() else "inputs_embeds"] = hidden
        if self.last:
            out = functional_call(self.module, tensors, (), keywords, tie_weights=False)
            return out.logits if self.prefix else out.last_hidden_state
        tensors = {n.removeprefix(self.prefix): t for n, t in tensors.items() if n.startswith(self.prefix)}
        return functional_call(self.inner, tensors, (), keywords, tie_weights=False).last_hidden_state
