# SPDX-License-Identifier: Apache-2.0
"""Other people's models and configurations; no other package knows them.

This package does not import transformers or torchtitan: it reads attributes of the objects that it is passed.
"""

from . import huggingface, torchtitan
from .binding import Bound, bind
from .loading import filled
from .modules import from_module, to_module

__all__ = ["Bound", "bind", "filled", "from_module", "huggingface", "to_module", "torchtitan"]
