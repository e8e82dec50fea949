# SPDX-License-Identifier: Apache-2.0
"""Errors to raise for a stage function that cannot be traced or is not pure. Knows exceptions, no stages or graphs."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import dirname, sep

import torch

from ..errors import ActionError, FpipeError, TraceError
from .fake import DATA_DEPENDENT, NO_FAKE, quiet

#: Parts of torch's messages about code that runs on real tensors but not on fake ones.
_UNTRACEABLE = (
    ".numpy()", "symbolically trace", "fake impl", "data pointer", "meta kernel", "meta tensors", "inputs of bf16",
)  # fmt: skip


def explain(error: Exception, label: str, shapes: str) -> TraceError | ActionError:
    """The exception to raise for an error in a stage function that ran on fake tensors of these shapes."""
    place = where(error)
    text = str(error).lower()
    if isinstance(error, DATA_DEPENDENT) or "data-dependent" in text or "data dependent" in text:
        return TraceError(
            f"stage {label} {shapes} depends on data{place}: a value decides what is computed or of which shape, "
            'so it has no straight-line program; use fpipe.Stage(fn, engine="eager") for it'
        )
    if isinstance(error, NO_FAKE) or any(part in text for part in _UNTRACEABLE):
        return TraceError(
            f'stage {label} {shapes} cannot be traced{place}: {error}; use fpipe.Stage(fn, engine="eager") for it'
        )
    return ActionError(f"stage {label} {shapes} raised {type(error).__name__}{place}: {error}")


@contextmanager
def explained(label: str, shapes: str) -> Iterator[None]:
    """Raise ``explain`` of what a stage function raises inside; errors of fpipe pass. Without torch's log of it."""
    try:
        with quiet():
            yield
    except FpipeError:
        raise
    except Exception as error:
        raise explain(error, label, shapes) from error


def where(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback, for a message."""
    # Compared by path: a directory of the user's may be called fpipe, too.
    libraries = (*torch.__path__, dirname(dirname(__file__)))
    inside = (*(path + sep for path in libraries), "<fpipe")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def write_error(what: str) -> TraceError:
    """The error for a stage that writes into what it shares with others."""
    return TraceError(
        f"a stage writes into {what} in place; stages are pure functions: return what changes "
        "(fpipe.Stage(fn, state=True) carries running statistics)"
    )


def captured_write_error(label: str, tensor: torch.Tensor) -> TraceError:
    """The error for a stage that writes into a tensor of its closure."""
    return TraceError(
        f"stage {label} writes into a tensor of shape {list(tensor.shape)} that it closes over; stages are pure "
        "functions: return what changes (fpipe.Stage(fn, state=True) carries running statistics)"
    )


def captured_gradient_error(label: str, tensor: torch.Tensor) -> TraceError:
    """The error for a stage that closes over a tensor that requires a gradient."""
    return TraceError(
        f"stage {label} closes over a tensor of shape {list(tensor.shape)} that requires a gradient, "
        "which it would silently not get; pass it in the stage's parameters, or close over tensor.detach()"
    )


def other_parameters_error(label: str, tensor: torch.Tensor) -> TraceError:
    """The error for a backward that computes with a captured tensor that requires a gradient."""
    return TraceError(
        f"the backward of stage {label} computes with a tensor of shape {list(tensor.shape)} that requires a gradient "
        "and is no parameter of the stage: a module has the parameters that torch.func.functional_call passes during "
        "the call alone, and a checkpoint inside it runs again later, with others. Remove the checkpoint, and put "
        "fpipe.remat around the function that calls functional_call"
    )
