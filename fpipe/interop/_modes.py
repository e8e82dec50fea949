# SPDX-License-Identifier: Apache-2.0
"""A context in which tensors are real while a trace goes on around it: the private part of torch that interop uses.

A buffer of a module must be copied to the device of its stage for real, also if the first call of the stage function
happens under fake tensors. This module must not know modules.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.utils._python_dispatch import _disable_current_modes


def without_modes() -> AbstractContextManager[object]:
    """A context without the dispatch modes around it, such as fake tensors.

    >>> import torch
    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode(), without_modes():
    ...     type(torch.ones(1)).__name__
    'Tensor'
    """
    return _disable_current_modes()
