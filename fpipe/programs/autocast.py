# SPDX-License-Identifier: Apache-2.0
"""The autocast around a call: a trace contains its casts, so programs must run without it, or they would cast twice.

Backwards run without it, as torch recommends. Knows no stages or programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import TypeAlias

import torch

Ambient: TypeAlias = tuple[tuple[str, torch.dtype], ...]


@lru_cache(maxsize=1)
def _kinds() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if device is None or device.type == "cpu" else ("cpu", device.type)


def ambient() -> Ambient:
    """The device types for which autocast is on, each with its dtype.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     ambient()
    (('cpu', torch.bfloat16),)
    """
    return tuple([(k, torch.get_autocast_dtype(k)) for k in _kinds() if torch.is_autocast_enabled(k)])


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off for all device types.

    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
    ...     ambient()
    ()
    """
    with ExitStack() as stack:
        for kind, _ in ambient():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def under(state: Ambient) -> Iterator[None]:
    """Switch autocast to a state returned by ``ambient()``.

    >>> with under((("cpu", torch.bfloat16),)):
    ...     torch.eye(2).mm(torch.eye(2)).dtype
    torch.bfloat16
    """
    with without_autocast(), ExitStack() as stack:
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype))
        yield
