"""What the eager engine reads of torch's private parts: saved tensors and inputs of nodes, versions, identities.

Knows no stage and no program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import Node


@lru_cache(maxsize=4096)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_handles(node: Node) -> Iterator[Any]:
    """The handles of the tensors that a node saved."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        yield from saved if isinstance(saved, (tuple, list)) else (saved,)


def gradient_bytes(node: Node, ports: Sequence[int]) -> int:
    """Bytes of the gradients that arrive at a node."""
    inputs = [node._input_metadata[port] for port in ports]  # type: ignore[attr-defined]
    return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in inputs)


def versions(leaves: Iterable[Any]) -> list[int]:
    """How often each tensor was written to; 0 for leaves that do not count it.

    >>> x = torch.ones(2)
    >>> _ = x.add_(1)
    >>> versions([x, None])
    [1, 0]
    """
    return [leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0 for leaf in leaves]


def identity(storage: torch.UntypedStorage) -> int:
    """A number of a storage that is its own for as long as it is alive, fake storages included."""
    return storage._cdata
