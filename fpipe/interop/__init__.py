# SPDX-License-Identifier: Apache-2.0
"""Other people's models, trainers and configurations; no other package knows them.

It imports without transformers or torchtitan: it reads attributes of the objects that it is passed.
``pipelining`` loads torch's package of that name when it is first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from . import huggingface, torchtitan
from .binding import Bound, bind
from .modules import from_module, to_module

if TYPE_CHECKING:
    from . import pipelining as pipelining

__all__ = [
    "Bound",
    "bind",
    "from_module",
    "huggingface",
    "pipelining",
    "to_module",
    "torchtitan",
]


def __getattr__(name: str) -> object:
    if name == "pipelining":
        return _import_module(f"{__name__}.pipelining")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
