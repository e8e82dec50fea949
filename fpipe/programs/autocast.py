# SPDX-License-Identifier: Apache-2.0
"""The autocast around a call: a trace contains its casts, so programs must run without it, or they
would cast twice.

Backwards run without it, as torch recommends. Knows no stages or programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import TypeAlias

import torch

Ambient: TypeAlias = tuple[tuple[str, torch.dtype], ...]
_NOTHING = nullcontext()


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
    return tuple(
        [(k, torch.get_autocast_dtype(k)) for k in _kinds() if torch.is_autocast_enabled(k)]
    )


def without_autocast() -> AbstractContextManager[object]:
    """Switch autocast off for all device types.

    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
    ...     ambient()
    ()
    """
    state = ambient()
    return _off(state) if state else _NOTHING


@contextmanager
def _off(state: Ambient) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, _ in state:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def caching(enabled: bool) -> Iterator[None]:
    """Switch autocast's cache on or off, and empty it at the end.

    The cache casts a parameter once for all its uses, so its gradient is added up in the narrow
    dtype. Without the cache it is added up after the casts, which is another number.

    >>> with caching(False):
    ...     torch.is_autocast_cache_enabled()
    False
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


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
        stack.callback(
            torch.clear_autocast_cache
        )  # inside the caller's autocast it would hold every microbatch's casts
        yield
