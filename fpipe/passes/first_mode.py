# SPDX-License-Identifier: Apache-2.0
"""The first mode of fake tensors of a process, where torch is built for CUDA and finds no device.

Knows modes alone.
"""

from __future__ import annotations

import threading
from functools import lru_cache

from torch._subclasses.fake_tensor import FakeTensorMode


@lru_cache(maxsize=1)
def enter_first() -> None:
    """Enter a mode, before any other, in a thread that does not end.

    The first thread to enter a mode registers an object that ends with that thread. Torch 2.11 then
    calls it in the next mode, and the process dies.
    """
    entered = threading.Event()

    def enter() -> None:
        with FakeTensorMode():
            entered.set()
        threading.Event().wait()

    threading.Thread(target=enter, name="fpipe-fake", daemon=True).start()
    entered.wait()
