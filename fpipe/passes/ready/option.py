# SPDX-License-Identifier: Apache-2.0
"""The option ``order=`` of ``fpipe.pipeline``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...engine.request import Request
from ...errors import StageError
from ...lowering.plan import Feature


@dataclass(frozen=True)
class Order:
    """The option. ``window`` is None for the default, and 0 for the order of the rows."""

    window: int | None

    def features(self, request: Request) -> Iterator[Feature]:
        """Plans of forwards alone, and of the two phases of ``fpipe.vjp``, keep their order."""
        if self.window != 0 and request.mode == "grad":
            from .plans import Ready

            yield Ready(self.window or 0)


def option(value: object) -> Order:
    """The option ``order=``, checked.

    >>> option("ready"), option(("ready", 12)), option("row")
    (Order(window=None), Order(window=12), Order(window=0))
    """
    if value == "row":
        return Order(0)
    if value == "ready":
        return Order(None)
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "ready":
        window = value[1]
        if type(window) is int and window > 0:
            return Order(window)
    raise StageError(
        f"order={value!r:.80}; give 'row', 'ready', or ('ready', n) for a window of n actions"
    )
