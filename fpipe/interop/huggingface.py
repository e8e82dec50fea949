"""Decoder-only causal models of the transformers package as pure stages, by what the families have in common.

All of them embed tokens, run a list of layers, and end in a norm and a head; between these stands code of each
family's own (scales, position embeddings, masks, soft caps). A stage therefore runs the model's own forward with
stand-ins for the submodules that live on other stages, and takes its input where its first layer would. This file
knows no family by name and does not import transformers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..errors import StageError
from ..generators.balancing import estimate, spread
from ..stage import Stage, remat
from ._router import Router, Totals, router_of
from ._skeleton import Claim, Pure, claims, clone, is_experts

SIDES = ("attention_mask", "position_ids", "position_embeddings")


def stages(
    model: nn.Module, n: int | None = None, *, cuts: Sequence[int] | None = None, experts: str | None = None,
    aux_loss: bool | None = None,
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:  # fmt: skip
    """Cut a causal language model into ``n`` stages; returns ``(stages, params)``.

    The first stage takes token ids, the last returns logits. Every stage takes ``attention_mask``, ``position_ids``
    and ``position_embeddings`` as side inputs, all of them optional and as the model's own forward takes them (a mask
    of four axes, or a dict of them by layer type, is used as it is). Parameters keep the model's names; frozen and
    tied ones are carried on the stages.

    ``cuts`` are the indices of the layers that begin stages 1, 2, ...; left out, layers are dealt by their number of
    parameters, the head counted too. Layers that the model checkpoints are recomputed in the backward.

    Of mixture-of-experts models, ``experts`` names the implementation in the package; left out, one that traces is
    taken where there is one, else the stages with experts run on ``engine="eager"``. The router's auxiliary loss, with
    its coefficient, joins the loss where the config has ``output_router_logits`` or ``aux_loss=True`` says so; it is
    the model's own, over all layers of all stages.

    ```python
    model = transformers.AutoModelForCausalLM.from_config(config)
    stages, params = fpipe.interop.huggingface.stages(model, 4)
    pipe = fpipe.pipeline(stages, "1F1B", loss=fpipe.interop.huggingface.causal_loss, microbatches=8)
    ```
    """
    inner, layers = _anatomy(model)
    first = _first_layers(model, inner, layers, n, cuts)
    config, traced = _config(model, experts)
    router = router_of(model) if _wants_aux(model, aux_loss) else None
    edges = [0, *first, len(layers)]
    last = len(edges) - 2
    modules = [_hollow(model, layers, span, s == last, config) for s, span in enumerate(pairwise(edges))]
    owned = claims(model, [[n for n, _ in m.named_parameters(remove_duplicate=False)] for m in modules])
    _check_complete(model, owned)
    made = []
    for s, ((lo, hi), module, claim) in enumerate(zip(pairwise(edges), modules, owned, strict=True)):
        label = f"{type(model).__name__}[{lo}:{hi}]"
        part = DecoderPart(module, claim, span=(lo, hi), last=s == last, router=router, name=label)
        expert = any(is_experts(m) for layer in layers[lo:hi] for m in layer.modules())
        engine = None if traced or not expert else "eager"
        made.append(part.stage(claim, engine=engine, aux_loss=router is not None and s == last))
    return made, [claim.params for claim in owned]


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The loss that transformers' causal models compute: each position predicts the next label, in float32.

    It is a mean over the labels of a microbatch. Where microbatches hold different numbers of them, let the pipeline
    weigh: ``reduction=fpipe.weighted(lambda labels: (labels[:, 1:] != -100).sum())``.

    >>> float(causal_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]])))
    1.386...
    """
    flat = logits[:, :-1].float().flatten(0, 1)
    return nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=ignore_index)


def side_inputs(
    model: nn.Module, tokens: torch.Tensor, *, attention_mask: Any = None, position_ids: torch.Tensor | None = None
) -> dict[str, Any]:
    """Position ids and rotary embeddings of a batch, computed once for all stages; pass them as side inputs.

    Stages compute their own where none are passed. Embeddings have one row for each row of ``tokens``, so that they
    split like the batch.
    """
    inner, _ = _anatomy(model)
    rows, length = tokens.shape
    if position_ids is None:
        position_ids = torch.arange(length, device=tokens.device).expand(rows, length)
    found: dict[str, Any] = {"position_ids": position_ids}
    if attention_mask is not None:
        found["attention_mask"] = attention_mask
    for rotary in (child for child in inner.children() if _is_rotary(child)):
        like = next(model.parameters()).detach()
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            kinds = sorted(set(model.config.layer_types))  # type: ignore[union-attr]
            found["position_embeddings"] = {kind: rotary(like, position_ids, kind) for kind in kinds}
        else:
            found["position_embeddings"] = rotary(like, position_ids)
    return found


# ---- a stage ---------------------------------------------------------------------------------------------------------


class _Skip(nn.Module):
    """Stands for a layer that lives elsewhere; may put a value in the place of what reaches it."""

    value: Any = None

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if self.value is None else self.value


class _Nothing(nn.Module):
    """Stands for an embedding that lives elsewhere and is added to others."""

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((*ids.shape, 1), device=ids.device)


class _Rotary(nn.Module):
    """Gives the embeddings that were passed as a side input, or computes them."""

    value: Any = None

    def __init__(self, own: nn.Module):
        super().__init__()
        self.own = own

    def forward(self, x: Any, position_ids: Any = None, layer_type: Any = None, **kwargs: Any) -> Any:
        if self.value is None:
            more = {} if layer_type is None else {"layer_type": layer_type}
            return self.own(x, position_ids=position_ids, **more, **kwargs)
        return self.value if layer_type is None else self.value[layer_type]


class DecoderPart(Pure):
    """Some layers of a decoder as a stage function; the first also embeds, the last also ends in logits."""

    def __init__(
        self, module: nn.Module, claim: Claim, *, span: tuple[int, int], last: bool, router: Router | None, name: str
    ):
        self.first, self.last, self.router = span[0] == 0, last, router
        super().__init__(module, claim, sides=SIDES, state=(), name=name)
        self.inner = _anatomy(module)[0]
        self.prefix = next((f"{name}." for name, child in module.named_children() if child is self.inner), "")
        self.entry = _entry(self.inner, *span)
        self.rotary = [child for child in self.inner.children() if isinstance(child, _Rotary)]
        self.heard: list[torch.Tensor] = []
        if router is not None:
            _listen(self.inner, self.heard)

    def call(self, given: dict[str, torch.Tensor], x: Any, side: Mapping[str, Any]) -> Any:
        """Run the layers on token ids, or on what the stage before handed on."""
        hidden, totals = (x[0], Totals(*x[1:])) if isinstance(x, tuple) else (x, None)
        keywords = {name: side.get(name) for name in ("attention_mask", "position_ids")}
        keywords |= {"use_cache": False, "return_dict": True}
        keywords |= {} if self.router is None else {"output_router_logits": False}  # no loss of a few layers alone
        if self.first and not hidden.is_floating_point():
            keywords["input_ids"] = hidden
        else:
            keywords["inputs_embeds"] = hidden
            self.entry.value = None if self.first else hidden
        for rotary in self.rotary:
            rotary.value = side.get("position_embeddings")
        try:
            out = self._run(given, keywords)
        finally:
            self.entry.value = None
            for rotary in self.rotary:
                rotary.value = None
        y = out.logits if self.last and self.prefix else out.last_hidden_state
        if self.router is None:
            return y
        mask = keywords["attention_mask"]
        mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        totals = self.router.add(totals or self.router.start(y.device), self.heard, mask)
        self.heard.clear()
        return (y, self.router.loss(totals)) if self.last else (y, *totals)

    def _run(self, given: dict[str, torch.Tensor], keywords: dict[str, Any]) -> Any:
        if self.last:
            return functional_call(self.module, given, (), keywords, tie_weights=False)
        inside = {n.removeprefix(self.prefix): t for n, t in given.items() if n.startswith(self.prefix)}
        return functional_call(self.inner, inside, (), keywords, tie_weights=False)


def _listen(inner: nn.Module, heard: list[torch.Tensor]) -> None:
    """Have the decoder report its routers' logits, whatever the model around it asks for."""

    def ask(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return args, {**keywords, "output_router_logits": True}

    def hear(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        heard[:] = out.router_logits or ()

    inner.register_forward_pre_hook(ask, with_kwargs=True)
    inner.register_forward_hook(hear)


def _entry(inner: nn.Module, low: int, high: int) -> _Skip:
    """What lets a stage's input in: before its first layer or, where it has none, in the place of the one before."""
    layers = _layers(inner)
    if low == high and low > 0:
        return layers[low - 1]  # type: ignore[return-value]
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


# ---- a model's anatomy -----------------------------------------------------------------------------------------------


def _anatomy(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder inside a causal model, and its list of layers."""
    inner = getattr(model, "base_model", None)
    if not isinstance(inner, nn.Module) or not hasattr(model, "config"):
        raise StageError(
            f"{type(model).__name__} is no causal model of the transformers package; "
            "fpipe.from_module cuts other modules"
        )
    return inner, _layers(inner)


def _layers(inner: nn.Module) -> nn.ModuleList:
    lists = [child for child in inner.children() if isinstance(child, nn.ModuleList) and len(child)]
    if len(lists) != 1:
        raise StageError(
            f"{type(inner).__name__} has {len(lists)} lists of layers where a decoder has one; "
            "write its stages as functions"
        )
    return lists[0]


def _is_rotary(module: nn.Module) -> bool:
    return "rotary" in type(module).__name__.lower()


def _first_layers(
    model: nn.Module, inner: nn.Module, layers: nn.ModuleList, n: int | None, cuts: Sequence[int] | None
) -> list[int]:
    """The layers that begin stages 1, 2, ...; ``len(layers)`` where the last stage is the head alone."""
    count = len(layers)
    if (n is None) == (cuts is None):
        raise StageError("say how many stages (n) or which layers begin them (cuts), one of both")
    if cuts is not None:
        edges = [0, *cuts]
        if any(not isinstance(c, int) or not 1 <= c <= count for c in cuts) or any(a >= b for a, b in pairwise(edges)):
            raise StageError(f"cuts={list(cuts)!r}; give ascending layer indices from 1 to {count}")
        return list(cuts)
    if not isinstance(n, int) or not 1 <= n <= count + 1:
        raise StageError(f"n={n!r} stages of {count} layers and a head; give 1 to {count + 1}")
    rest = sum(estimate(child) for child in model.children() if child is not inner)
    return list(spread([*map(estimate, layers), rest], n)[1:])


def _wants_aux(model: nn.Module, aux_loss: bool | None) -> bool:
    return bool(getattr(model.config, "output_router_logits", False)) if aux_loss is None else aux_loss


def _config(model: nn.Module, experts: str | None) -> tuple[Any, bool]:
    """The config for the stages, and whether experts, if any, trace under it."""
    weights = [p for m in model.modules() if is_experts(m) for p in m.parameters(recurse=False)]
    if not weights or not hasattr(model, "set_experts_implementation"):
        return model.config, not weights
    grouped = all(p.dtype == torch.bfloat16 for p in weights)  # grouped products of other types do not trace
    chosen = experts or ("grouped_mm" if grouped else "batched_mm")
    config = copy.copy(model.config)
    config._experts_implementation = chosen  # type: ignore[union-attr]
    return config, chosen == "batched_mm" or (chosen == "grouped_mm" and grouped)


def _hollow(model: nn.Module, layers: nn.ModuleList, span: tuple[int, int], last: bool, config: Any) -> nn.Module:
    """A clone of the model in which what lives on other stages is replaced by stand-ins."""
    inner, (low, high) = _anatomy(model)[0], span
    instead: dict[nn.Module, nn.Module] = {layer: _Skip() for i, layer in enumerate(layers) if not low <= i < high}
    before = True
    for child in inner.children():
        if child is layers:
            before = False
        elif _is_rotary(child):
            instead[child] = _Rotary(clone(child))
        elif before and low > 0:
            instead[child] = _Nothing() if isinstance(child, nn.Embedding) else _Skip()
        elif not before and not last:
            instead[child] = _Skip()
    if not last:
        instead |= {child: _Skip() for child in model.children() if child is not inner}
    made = clone(model, instead)
    for child in made.modules():
        if getattr(child, "config", None) is model.config:
            child.config = config
        if getattr(child, "gradient_checkpointing", False):
            child.gradient_checkpointing = False  # type: ignore[assignment]
    for old, new in zip(layers, _layers(_anatomy(made)[0]), strict=True):
        if getattr(old, "gradient_checkpointing", False) and old.training and not isinstance(new, _Skip):
            new.forward = remat(new.forward)
    return made


def _check_complete(model: nn.Module, owned: Sequence[Claim]) -> None:
    every = {name for name, _ in model.named_parameters()}
    held = {group for claim in owned for group in claim.groups}
    if every - held:
        raise StageError(
            f"no stage uses {sorted(every - held)[0]!r} of {type(model).__name__}; its layers do not stand "
            "between what comes before and after them, so write its stages as functions"
        )
