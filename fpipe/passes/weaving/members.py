# SPDX-License-Identifier: Apache-2.0
"""Exchanges between the members of a process group, by its name. They end in time, with an error
that names the member that does not answer. This module must not know plans.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...collectives._store import backends, resolved
from ...collectives.codec import MOST_BYTES, decode, encode
from ...collectives.faults import watched
from ...errors import GroupError


def gather_members(name: str, obj: object) -> list[Any]:
    """The object of every member of a process group, by rank; nothing if there is no other member,
    or a fake backend.

    Objects are data, as those of a ``Rendezvous``.
    """
    pg = resolved(name)
    if pg.size() == 1 or dist.get_backend(pg) == "fake":
        return []
    device = _device(pg)
    mine = torch.frombuffer(bytearray(encode(obj)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(pg.size())]
    with watched(name)():
        dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=pg)
        counts = [int(size) for size in sizes]
        most = max(counts)
        if min(counts) <= 0 or most > MOST_BYTES:
            raise GroupError(
                f"the members of group {name} announced {counts} bytes; all must run the same "
                "program"
            )
        padded = torch.nn.functional.pad(mine, (0, most - len(mine)))
        rows = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(rows, padded, group=pg)
        texts = [bytes(row.tolist()) for row in rows]
    return [decode(text[:count]) for text, count in zip(texts, counts, strict=True)]


def _device(pg: dist.ProcessGroup) -> torch.device:
    """A device whose tensors a process group carries: the CPU if it can."""
    types = list(backends(pg))
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())
