# SPDX-License-Identifier: Apache-2.0
"""The bytes that operations allocate, on fake tensors too, and what nodes of autograd hold. Knows
no stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from ... import tree
from ...programs.internals import Args, Around, Kwargs, TorchOp, storage_id


class Meter(NamedTuple):
    """A mode that counts, and the bytes in memory now and at most."""

    mode: Around
    now: list[int]
    peak: list[int]


def meter() -> Meter:
    """A meter that counts memory from its allocation under the mode until it is freed, also outside
    of the mode.

    >>> count = meter()
    >>> with count.mode:
    ...     total = (torch.ones(8) + 1).sum()
    >>> count.now, count.peak
    ([4], [64])
    """
    now = [0]
    peak = [0]
    counted = set[int]()

    def ended(key: int, nbytes: int) -> None:
        counted.discard(key)
        now[0] -= nbytes

    def run(op: TorchOp, args: Args, kwargs: Kwargs) -> object:
        result = op(*args, **kwargs)
        given = set(map(storage_id, plain_tensors((args, kwargs))))
        for tensor in plain_tensors(result):
            key = storage_id(tensor)
            storage = tensor.untyped_storage()
            if key not in given and key not in counted and storage.nbytes():
                counted.add(key)
                now[0] += storage.nbytes()
                peak[0] = max(peak[0], now[0])
                weakref.finalize(storage, ended, key, storage.nbytes())
        return result

    return Meter(Around(run), now, peak)


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """The ordinary tensors in a tree."""
    for leaf in filter(tree.is_tensor, tree.leaves(value)):
        yield from tree.parts(leaf)


@lru_cache(maxsize=4096)
def saved_names(kind: type) -> tuple[str, ...]:
    """The names of the handles of what nodes of a kind save."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_handles(node: Node) -> Iterator[Any]:
    """The handles of the tensors that a node saved."""
    for name in saved_names(type(node)):
        saved = getattr(node, name)
        yield from saved if isinstance(saved, (tuple, list)) else (saved,)


def gradient_bytes(node: Node, ports: Sequence[int]) -> int:
    """Bytes of the gradients that arrive at a node."""
    total = 0
    for port in ports:
        gradient = node._input_metadata[port]  # type: ignore[attr-defined]
        total += torch.Size(gradient.shape).numel() * gradient.dtype.itemsize
    return total
