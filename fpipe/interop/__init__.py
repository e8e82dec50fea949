"""Where fpipe meets other people's models and configurations; they are known here and nowhere else.

Nothing here imports transformers or torchtitan: their objects are taken as they come in.
"""

from . import huggingface, torchtitan
from .modules import from_module, to_module

__all__ = ["from_module", "huggingface", "to_module", "torchtitan"]
