# SPDX-License-Identifier: Apache-2.0
"""A place outside of the trace that is going on, in which a block has a trace of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx.traceback import current_meta
from torch.utils._python_dispatch import _disable_current_modes

from ...programs.internals import setting
from ...programs.wrappers import BLOCKS


@contextmanager
def outside() -> Iterator[None]:
    """Run without the modes, the annotations and the blocks of the trace that is going on."""
    annotations = current_meta.pop("custom", None)
    try:
        with setting(BLOCKS, None), _disable_current_modes():
            yield
    finally:
        if annotations is not None:
            current_meta["custom"] = annotations
