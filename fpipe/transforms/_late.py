"""What a transform asks all processes, apart from what it does with the answer, so that the answer may come late.

``LATE`` knows the transforms that only ask whether they have anything to do, by their update function; ``CHAINS`` the
parts of chains. Knows no single transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor


class Late(NamedTuple):
    """``measure(grads)``: this process's part of one sum, or None where it cannot be one sum.

    ``judge(total, state)``: the state after a step for which there was nothing to do; None where there was.
    """

    measure: Callable[[Any], Tensor | None]
    judge: Callable[[Tensor, Any], Any]


LATE: WeakKeyDictionary[Any, Late] = WeakKeyDictionary()
CHAINS: WeakKeyDictionary[Any, Sequence[Any]] = WeakKeyDictionary()
