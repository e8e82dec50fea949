"""How many lines of Python a call runs: a measure of effort that depends neither on the machine nor
on its load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(call: Callable[[], Any], without: str = "\0") -> int:
    """The lines that this thread runs in a call; not those of files whose names begin with
    ``without``.
    """
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename.startswith(without):
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
