"""The one private thing that interop asks of torch: to step out of a trace for a moment.

A buffer of a module must be copied to the device of its stage for real, also when the first call of the stage function
happens under fake tensors. Nothing here knows what for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.utils._python_dispatch import _disable_current_modes


def without_modes() -> AbstractContextManager[object]:
    """A context in which tensors are real again, whatever is being traced around it.

    >>> import torch
    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode(), without_modes():
    ...     type(torch.ones(1)).__name__
    'Tensor'
    """
    return _disable_current_modes()
