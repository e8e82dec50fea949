# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the messages and collectives between them.

``group`` is the protocol that other packages use; ``local``, ``c10d`` and the fakes of
``fpipe.testing`` implement it. This package must not know schedules, stages or plans.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .group import Group

if TYPE_CHECKING:
    from .c10d import C10dGroup
    from .capabilities import DTYPES, reduction, sending
    from .codec import decode, encode

#: Names whose modules are loaded when they are first used.
_LATER = {
    "C10dGroup": "c10d",
    "DTYPES": "capabilities",
    "decode": "codec",
    "encode": "codec",
    "reduction": "capabilities",
    "sending": "capabilities",
}
__all__ = ["DTYPES", "C10dGroup", "Group", "decode", "encode", "reduction", "sending"]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
