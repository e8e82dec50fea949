# SPDX-License-Identifier: Apache-2.0
"""A small GPT on a small text, for ``fpipe train``, ``make demo`` and the examples.

Uses the public parts of the package. It knows one model and one text, and is not a trainer: no
checkpoints, no evaluation, no other data.
"""

from .gpt import Sizes, cross_entropy, gpt
from .single import one_process
from .text import Text, sonnets

__all__ = ["Sizes", "Text", "cross_entropy", "gpt", "one_process", "sonnets"]
