"""A small GPT on a small text, through a pipeline: what ``fpipe train`` and ``make demo`` run, and examples borrow.

Everything here stands on the public parts of the package and nothing stands on it. It knows one model and one text,
and is no trainer: there are no checkpoints, no evaluation and no other data.
"""

from .gpt import Sizes, cross_entropy, gpt
from .single import one_process
from .text import Text, sonnets

__all__ = ["Sizes", "Text", "cross_entropy", "gpt", "one_process", "sonnets"]
