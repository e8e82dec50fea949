# SPDX-License-Identifier: Apache-2.0
"""``pad``: sequences of a list of microbatches to one length, or to multiples of one, and outputs
back again.

The first axis of tensors are rows, the sequence is on ``axis``. The value of a pad depends on the
meaning of a leaf (token, mask, label, position), which its name indicates. Knows names and lengths;
no models and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch

from .. import tree
from ..engine.microbatches import Microbatches
from ..errors import BatchError

#: What the pad of a leaf holds: a number, ``"restart"`` (0, 1, 2, ... from where the pad begins),
#: ``None`` (no pad).
Fill: TypeAlias = float | int | bool | Literal["restart"] | None

#: By the last part of a leaf's name. Positions restart, so that a packed row gets one more sequence
#: and no position lies beyond a model's table.
FILLS: Mapping[str, Fill] = {
    "*label*": -100,
    "*target*": -100,
    "y": -100,
    "*position*": "restart",
}
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Unpad:
    """Removes pads. ``lengths`` are those of the microbatches before padding, ``padded`` those
    after it.
    """

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    axis: int

    def __call__(self, outputs: Any, index: int | None = None) -> Any:
        """A list with one pytree for each microbatch, stripped; with ``index``, one microbatch's
        pytree.

        Leaves whose axis has the padded length are cut, all others are left as they are.
        """
        if index is None:
            count = len(self.lengths)
            if not isinstance(outputs, (list, tuple, Microbatches)) or len(outputs) != count:
                raise BatchError(
                    f"unpad takes a list of outputs, one for each of the {count} microbatches that "
                    "were padded; pass unpad(output, index) for a single one"
                )
            return [self(output, i) for i, output in enumerate(outputs)]
        length = self.lengths[index]
        padded = self.padded[index]
        axis = self.axis

        def strip(leaf):
            has_axis = isinstance(leaf, torch.Tensor) and leaf.dim() > axis
            if has_axis and leaf.shape[axis] == padded:
                return leaf.narrow(axis, 0, length)
            return leaf

        if length < padded:
            return tree.tree_map(strip, outputs)
        return outputs


def pad(
    microbatches: Iterable[Any],
    multiple: int = 1,
    uniform: bool = False,
    values: Mapping[str, Fill] | None = None,
    *,
    axis: int = 1,
    length: str | None = None,
) -> tuple[Microbatches, Unpad]:
    """Pad sequences on the right: to a multiple, and with ``uniform=True`` to one length over all
    microbatches.

    A microbatch's length is that of its tensors on ``axis``, or where these differ that of its
    whole numbers there (ids, labels, positions). Tensors of that length are padded, all other
    leaves stay.

    Args:
        microbatches: one pytree for each microbatch.
        multiple: lengths become multiples of it.
        uniform: whether all microbatches get one length.
        values: what a pad holds, by leaf name or shell pattern, matched on the whole dotted name
            and on its last part: a number, ``"restart"`` for positions that begin again at 0, or
            None to leave the leaf alone. Names that are not given hold -100 in labels, targets and
            leaves called ``y``, restart in positions, and are 0 elsewhere.
        axis: the axis of the sequence.
        length: the name of a leaf that has the length of the microbatch.

    Returns:
        ``(microbatches, unpad)``: an ``fpipe.Microbatches``, and a function from outputs by
        microbatch to those without pads.

    Raises:
        BatchError: if the length of a microbatch is not clear, or an option is wrong.

    >>> short = {"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3), "name": "a"}
    >>> mbs, unpad = pad([short, {**short, "input_ids": torch.ones(1, 3)}], multiple=4)
    >>> mbs[0]["input_ids"].tolist(), mbs[0]["labels"].tolist(), mbs[0]["name"]
    ([[1.0, 1.0, 1.0, 0.0]], [[1.0, 1.0, 1.0, -100.0]], 'a')
    >>> [y.shape for y in unpad([torch.zeros(1, 4, 7), torch.zeros(1, 4, 7)])]
    [torch.Size([1, 3, 7]), torch.Size([1, 3, 7])]
    """
    if type(multiple) is not int or multiple < 1:
        raise BatchError(
            f"multiple={multiple!r}; give a whole number, 1 or more, such as cp * lcm(2, tp)"
        )
    parts = list(Microbatches(microbatches))
    values = values or {}
    # in this order: the first pattern that fits a name counts
    fills: dict[str, Fill] = {**values, **FILLS, **values}
    for name, fill in fills.items():
        if not (fill is None or fill == "restart" or isinstance(fill, (int, float))):
            raise BatchError(f"values[{name!r}] is {fill!r}; give a number, 'restart' or None")
    lengths = [_length(part, axis, index, length) for index, part in enumerate(parts)]
    padded = [-(-n // multiple) * multiple for n in lengths]
    padded = [max(padded)] * len(parts) if uniform else padded
    results = []
    for part, before, after in zip(parts, lengths, padded, strict=True):
        leaves, spec = tree.flatten(part)
        named = zip(tree.names(part), leaves, strict=True)
        padded_leaves = [
            _pad_leaf(leaf, before, after - before, _fill(name, fills), axis, name)
            for name, leaf in named
        ]
        results.append(tree.unflatten(spec, padded_leaves))
    return Microbatches(results), Unpad(tuple(lengths), tuple(padded), axis)


def _length(part: Any, axis: int, index: int, like: str | None) -> int:
    """The length of a microbatch: that of the leaf called ``like``, or of all leaves that may be
    sequences.
    """
    named = zip(tree.names(part), tree.leaves(part), strict=True)
    sequences = {
        name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor) and leaf.dim() > axis
    }
    if like is not None:
        sequences = {name: leaf for name, leaf in sequences.items() if _called(name, like)}
    if not sequences:
        called = "" if like is None else f" called {like!r}"
        raise BatchError(
            f"microbatch {index} has no tensor{called} with an axis {axis}, so it has no sequence "
            f"to pad; say axis={'' if like is None else ' or length='}, or leave it out"
        )
    # no images, no masks by head
    flat = {name: leaf for name, leaf in sequences.items() if leaf.dim() <= axis + 2} or sequences
    whole = [leaf for leaf in flat.values() if leaf.dim() == axis + 1 and leaf.dtype in _WHOLE]
    for leaves in (list(flat.values()), whole):
        if len({leaf.shape[axis] for leaf in leaves}) == 1:
            return leaves[0].shape[axis]
    lengths = ", ".join(f"{name!r} of {leaf.shape[axis]}" for name, leaf in flat.items())
    raise BatchError(
        f"microbatch {index} has tensors of several lengths on axis {axis}: {lengths}; name one "
        "that has the length of the sequence, as in length='input_ids'"
    )


def _called(name: str, pattern: str) -> bool:
    last = name.rpartition(".")[2]
    return pattern in (name, last) or fnmatchcase(name, pattern) or fnmatchcase(last, pattern)


def _fill(name: str, fills: Mapping[str, Fill]) -> Fill:
    """What the pad of a leaf holds: by its whole name, by the last part of it, or by the first
    pattern.
    """
    exact = [key for key in (name, name.rpartition(".")[2]) if key in fills]
    fitting = [pattern for pattern in fills if _called(name, pattern)]
    return next((fills[key] for key in exact + fitting), 0)


def _pad_leaf(leaf: Any, length: int, more: int, fill: Fill, axis: int, name: str) -> Any:
    if not isinstance(leaf, torch.Tensor) or fill is None or not more:
        return leaf
    square = leaf.dim() > axis + 1 and leaf.shape[-2:] == (length, length)
    if square and (leaf.shape[axis] != length or leaf.dtype == torch.bool or "mask" in name):
        raise BatchError(
            f"{name!r} of shape {list(leaf.shape)} looks like a mask from tokens to tokens, whose "
            "pad depends on the model; pass a mask of rows and tokens, or say values={...: None} "
            "to leave it alone"
        )
    if leaf.dim() <= axis or leaf.shape[axis] != length:
        return leaf
    shape = [*leaf.shape]
    shape[axis] = more
    if fill == "restart":
        line = torch.arange(more, dtype=leaf.dtype, device=leaf.device)
        tail = line.view(-1, *[1] * (leaf.dim() - axis - 1)).expand(shape)
    else:
        tail = leaf.new_full(shape, fill)
    return torch.cat([leaf, tail], dim=axis)
