# SPDX-License-Identifier: Apache-2.0
"""Batches of ``torch.distributed.pipelining`` as microbatches of fpipe. Knows no stages and no
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import merge_chunks, split_args_kwargs_into_chunks

from ... import tree
from ...engine.microbatches import Microbatches, split


@dataclass(frozen=True)
class Batch:
    """The arguments of a step: whole, or in Microbatches. ``target`` is None where there is
    none.
    """

    number: int
    x: Any
    kwargs: Any
    target: Any

    @classmethod
    def of(
        cls,
        whole: tuple[Any, ...],
        mbs: tuple[Any, ...],
        number: int,
        args_spec: Any = None,
        kwargs_spec: Any = None,
    ) -> Batch:
        """From (args, kwargs, target), whole and already split, as ``step`` takes them."""
        given = [
            None if rows is None else _checked(rows, name, number)
            for rows, name in zip(mbs, _NAMES, strict=True)
        ]
        (args, kwargs, target), (arg_mbs, kwarg_mbs, target_mbs) = whole, given
        for one, rows, name in zip((args, kwargs, target), given, _NAMES, strict=True):
            if rows is not None and (one is not None if name == "target_mbs" else bool(one)):
                raise ValueError(f"give {name}, or the whole batch, not both")
        if arg_mbs is None and kwarg_mbs is None and (args or kwargs):
            if args_spec is None and kwargs_spec is None and _even((args, kwargs), number):
                x, named = args, kwargs
            else:
                rows, sides = split_args_kwargs_into_chunks(
                    args, kwargs, number, args_spec, kwargs_spec
                )
                if len(rows) != number:
                    raise ValueError(
                        f"the batch makes {len(rows)} microbatches, not {number}; give tensors "
                        "with rows"
                    )
                x, named = Microbatches(rows), Microbatches(sides) if kwargs else {}
        else:
            x = () if arg_mbs is None else Microbatches(map(tuple, arg_mbs))
            named = {} if not kwarg_mbs or not any(kwarg_mbs) else Microbatches(kwarg_mbs)
        if target_mbs is not None:
            return cls(number, x, named, Microbatches(target_mbs))
        if isinstance(target, torch.Tensor) and not _even(target, number):
            target = Microbatches(torch.tensor_split(target, number))
        return cls(number, x, named, target)

    def targets(self, loss_kwargs: dict[str, Any]) -> Any:
        """The targets with the keyword arguments of the loss, which are not split.

        Numbers among these become tensors without axes: as numbers they would be part of a trace.
        """
        if self.target is None:
            raise ValueError(
                "the schedule has a loss, and the rank of the last stage got no target; pass "
                "target="
            )
        if isinstance(self.target, Microbatches) or loss_kwargs:
            rows, numbers = (
                split(self.target, self.number, "target"),
                tree.tree_map(_as_tensor, loss_kwargs),
            )
            return Microbatches({"target": row, "kwargs": numbers} for row in rows)
        return {"target": self.target, "kwargs": {}}

    def split(self) -> tuple[list[Any], list[Any], list[Any] | None]:
        """Arguments, keyword arguments and targets, microbatch by microbatch."""
        x, named = split(self.x, self.number), split(self.kwargs or {}, self.number)
        return x, named, None if self.target is None else split(self.target, self.number)


_NAMES = ("arg_mbs", "kwarg_mbs", "target_mbs")


def _checked(rows: object, name: str, number: int) -> list[Any]:
    if not isinstance(rows, list):
        raise TypeError(f"{name} must be a list but got a {type(rows)}")
    if len(rows) != number:
        raise ValueError(f"Expecting {number} {name} but got {len(rows)}")
    return rows


def _as_tensor(leaf: Any) -> Any:
    return (
        torch.tensor(leaf)
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        else leaf
    )


def _even(value: Any, number: int) -> bool:
    """Whether fpipe splits the tensors of a batch as torch does: into equal parts of plain
    tensors.
    """
    leaves = [leaf for leaf in tree.leaves(value) if not isinstance(leaf, (int, float, str, bool))]
    plain = (type(leaf) is torch.Tensor and leaf.dim() > 0 for leaf in leaves)
    return all(plain) and all(leaf.shape[0] and leaf.shape[0] % number == 0 for leaf in leaves)


def merged(outputs: Sequence[Any], spec: Any) -> Any:
    """The outputs of the microbatches as one batch."""
    if spec is None and all(isinstance(y, torch.Tensor) and y.dim() > 0 for y in outputs):
        return torch.cat(list(outputs))
    return merge_chunks(list(outputs), spec)
