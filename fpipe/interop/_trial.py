# SPDX-License-Identifier: Apache-2.0
"""Runs a model on a few tokens when it is cut: twice, with other sizes and once with a mask. Knows
no stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import StageError
from ..programs import fake_tensors
from ._decoder import SIDES, keywords_of, result_of, sides_of, with_configs
from ._flow import Flow, flow_of
from ._recorder import Recording, record
from ._router import Router
from ._structure import Structure
from ._verify import brief, count, forked
from .module_function import clone, tensors_of

#: Rows and tokens of the first forward, tokens for a decoder behind an encoder; and those of the
#: second.
_SIZES = ((1, 4, 3), (2, 6, 5))
_PADDED = 2


class Trial(NamedTuple):
    """What two forwards of a model showed."""

    flow: Flow
    recordings: tuple[Recording, Recording]
    sides: tuple[str, ...]
    traces: bool  # whether it runs without values

    @property
    def always(self) -> list[str]:
        """The side inputs that every call has."""
        one, other = self.recordings
        return [name for name in one.side if name in other.side]

    def layers(self, structure: Structure) -> list[int]:
        """The numbers of the calls of layers."""
        return [
            number
            for number, visit in enumerate(self.flow.visits)
            if visit.unit in structure.layers
        ]


def try_forward(
    model: nn.Module,
    structure: Structure,
    configs: Mapping[int, Any],
    example: Mapping[str, torch.Tensor] | None,
    router: Router | None,
) -> Trial:
    """Run a model twice.

    Raises:
        StageError: if the model fails, or runs other modules the second time.
    """
    small, large = _arguments(model, example)
    sides = sides_of(model)
    first = _record(model, structure, configs, router, *small)
    empty = _without_values(model, structure, configs, router, *small)
    training = empty if model.training else None
    inputs, side = large
    ids = next(iter(inputs.values()))
    if (
        "attention_mask" in sides
        and "attention_mask" not in side
        and ids.dim() == 2
        and not ids.is_floating_point()
    ):
        mask = torch.ones_like(ids)
        mask[1, :_PADDED] = 0
        try:
            second = _record(
                model, structure, configs, router, inputs, {**side, "attention_mask": mask}
            )
            return Trial(
                flow_of(model, first, second, training), (first, second), sides, empty is not None
            )
        except StageError:
            sides = tuple(name for name in sides if name != "attention_mask")
    second = _record(model, structure, configs, router, inputs, side)
    return Trial(flow_of(model, first, second, training), (first, second), sides, empty is not None)


def _without_values(
    model: nn.Module,
    structure: Structure,
    configs: Mapping[int, Any],
    router: Router | None,
    inputs: Mapping[str, torch.Tensor],
    side: Mapping[str, torch.Tensor],
) -> Recording | None:
    """A forward in the model's modes, without values; None where it needs them."""
    try:
        return _record(model, structure, configs, router, inputs, side, real=False)
    except StageError:
        return None


def _record(
    model: nn.Module,
    structure: Structure,
    configs: Mapping[int, Any],
    router: Router | None,
    inputs: Mapping[str, torch.Tensor],
    side: Mapping[str, torch.Tensor],
    real: bool = True,
) -> Recording:
    """A forward in eval mode; or, where it is not to be ``real``, in the model's modes on tensors
    without values.
    """
    whole = with_configs(model, clone(model), configs)
    pairs = zip(list(model.modules()), list(whole.modules()), strict=True)
    units = {new: structure.units[old] for old, new in pairs if old in structure.units}
    for child in whole.modules():
        child.training = child.training and not real
    without = not real or any(p.is_meta for p in model.parameters())
    routed = router is not None and not without
    keywords = {
        **keywords_of(model),
        **({"output_router_logits": routed} if router is not None else {}),
    }

    def finish(out: Any) -> tuple[torch.Tensor, ...]:
        return (
            result_of(out),
            *((out.aux_loss * router.coefficient,) if routed and router is not None else ()),
        )

    tensors = tensors_of(model)
    try:
        with fake_tensors() if without else forked(next(model.parameters()).device):
            if without:
                tensors, inputs, side = _empty(tensors), _empty(inputs), _empty(side)
            return record(whole, tensors, units, inputs, side, keywords, finish)
    except Exception as error:
        values = "without values it does not run" if without else "its own forward fails"
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: {values} on {count(inputs)} "
            f"({brief(error)}), so the stages "
            "cannot be compared with it; write its stages as functions"
        ) from error


def _empty(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes, which are fake where that mode is on; one for all names of a
    tensor.
    """
    empty = {id(t): torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors.values()}
    return {name: empty[id(t)] for name, t in tensors.items()}


def _arguments(
    model: nn.Module, example: Mapping[str, torch.Tensor] | None
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Inputs and side inputs of both forwards."""
    device = next(model.parameters()).device
    if example is not None:
        both = [_cut(example, rows, shorter) for rows, shorter in ((1, 2), (2, 0))]
    else:
        name, vocabulary = getattr(model, "main_input_name", "input_ids"), _vocabulary(model)
        if name != "input_ids":
            raise StageError(
                f"{type(model).__name__} takes {name!r} in place of token ids; give an example of "
                "it"
            )
        both = [{"input_ids": _ids(rows, length, vocabulary)} for rows, length, _ in _SIZES]
        if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in sides_of(
            model
        ):
            for arguments, (rows, _, length) in zip(both, _SIZES, strict=True):
                arguments["decoder_input_ids"] = _ids(rows, length, vocabulary)
    placed = [{name: value.to(device) for name, value in arguments.items()} for arguments in both]
    return [
        (
            {n: v for n, v in each.items() if n not in SIDES},
            {n: v for n, v in each.items() if n in SIDES},
        )
        for each in placed
    ]


def _cut(example: Mapping[str, torch.Tensor], rows: int, shorter: int) -> dict[str, torch.Tensor]:
    if any(len(value) < 2 for value in example.values()):
        raise StageError("example= needs two rows of each argument")
    return {
        name: value[:rows, : value.shape[1] - shorter]
        if value.dim() == 2 and not value.is_floating_point()
        else value[:rows]
        for name, value in example.items()
    }


def _ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return (torch.arange(1, rows * length + 1) % vocabulary).view(rows, length)


def _vocabulary(model: nn.Module) -> int:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    config: Any = model.config
    return (
        getattr(embedding, "num_embeddings", None)
        or getattr(config, "vocab_size", None)
        or _SIZES[0][1]
    )
