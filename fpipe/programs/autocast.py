"""The autocast that is on around a call: a trace bakes it in, so running must not apply it a second time.

Backwards run without it, as torch asks for. Knows no stage and no program.
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
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if found is None or found.type == "cpu" else ("cpu", found.type)


def ambient() -> Ambient:
    """The kinds of devices for which autocast is on, each with its dtype.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     ambient()
    (('cpu', torch.bfloat16),)
    """
    return tuple([(k, torch.get_autocast_dtype(k)) for k in _kinds() if torch.is_autocast_enabled(k)])


@contextmanager
def without_autocast() -> Iterator[None]:
    """As if none was on.

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
    """As it was when ``ambient()`` gave ``state``.

    >>> with under((("cpu", torch.bfloat16),)):
    ...     torch.eye(2).mm(torch.eye(2)).dtype
    torch.bfloat16
    """
    with without_autocast(), ExitStack() as stack:
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype))
        yield
