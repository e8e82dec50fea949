"""What a transform asks all processes, apart from what it does with the answer, so that the answer may come late.

``LATE`` knows the transforms that only ask whether they have anything to do, by their update function; ``CHAINS`` the
parts of chains; ``DONATING`` those that write into the memory of the state they are given. Knows no single transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor


class Late(NamedTuple):
    """``measure(grads)``: this process's part of one sum, or None where it cannot be one sum.

    ``judge(total, state)``: the state after a step for which there was nothing to do; None where there was.
    ``over``: the pipeline that it asks, if any.
    """

    measure: Callable[[Any], Tensor | None]
    judge: Callable[[Tensor, Any], Any]
    over: Any = None


LATE: WeakKeyDictionary[Any, Late] = WeakKeyDictionary()
CHAINS: WeakKeyDictionary[Any, Sequence[Any]] = WeakKeyDictionary()
DONATING: WeakSet[Any] = WeakSet()


def donating(update: Any, *inner: Any, donate: bool = False) -> None:
    """Note an update function that donates its state's memory, by itself or by one of those that it calls."""
    if donate or any(each in DONATING for each in inner):
        DONATING.add(update)
