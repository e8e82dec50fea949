# SPDX-License-Identifier: Apache-2.0
"""``filled``: stages cut from a model on "meta", with the values of this process's stages alone.
Knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import StageError
from ..stage import Stage


def filled(
    stages: Sequence[Stage],
    params: Sequence[Mapping[str, Tensor] | None],
    read: Callable[[str], Tensor],
    *,
    device: str | torch.device = "cpu",
) -> list[dict[str, Tensor] | None]:
    """Return parameters with values, for stages that were cut from a model on the device "meta".

    Keep the entries of this process's stages first, as ``pipe.place(params)`` does: only these are
    read. A leaf that has values already is moved to the device.

    Args:
        stages: as ``fpipe.from_module`` or ``fpipe.interop.huggingface.stages`` returned them.
        params: by stage; ``None`` for a stage of another process.
        read: returns the tensor of a name in the model, from a checkpoint for example. A parameter
            that is tied to another one is asked for under the name that it has first in the model.
            Buffers without values, which a checkpoint may not have, are asked for too.
        device: where the tensors go.

    Returns:
        params, with tensors of the dtypes of the model.

    Raises:
        StageError: if a tensor is missing or has another shape.

    >>> from torch import nn
    >>> from fpipe import from_module
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> stages, params = from_module(model, cuts=["1"])
    >>> checkpoint = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).state_dict()
    >>> filled(stages, [None, params[1]], checkpoint.__getitem__)[1]["1.weight"].shape
    torch.Size([1, 2])
    """
    if len(stages) != len(params):
        raise StageError(
            f"{len(params)} entries of params for {len(stages)} stages; give one per stage"
        )
    return [
        None
        if row is None
        else {name: _value(stage, s, name, like, read, device) for name, like in row.items()}
        for s, (stage, row) in enumerate(zip(stages, params, strict=True))
    ]


def _value(
    stage: Stage,
    index: int,
    leaf: str,
    like: Tensor,
    read: Callable[[str], Tensor],
    device: str | torch.device,
) -> Tensor:
    if not like.is_meta:
        return like.to(device)
    name = dict(stage.ties).get(leaf, leaf)
    try:
        value = read(name)
    except (KeyError, AttributeError) as error:
        raise StageError(
            f"there are no values for {name!r} of stage {index} ({type(error).__name__}: "
            f"{error}); let read return "
            "them, also for buffers that a checkpoint does not hold"
        ) from error
    if value.shape != like.shape:
        raise StageError(
            f"{name!r} of stage {index} has shape {list(value.shape)} where it was read, and "
            f"{list(like.shape)} in the "
            "model; read the checkpoint of this model"
        )
    return value.to(device, like.dtype)
