"""Imported by the process from which tests fork theirs: what most test files import is imported
there once.
"""

from __future__ import annotations

import hypothesis  # noqa: F401
import pytest  # noqa: F401
from torch.fx.experimental.symbolic_shapes import uninteresting_files

import collector

uninteresting_files()  # imports four hundred modules, at the first trace with symbols otherwise
collector.settle()
