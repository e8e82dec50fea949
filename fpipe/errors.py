# SPDX-License-Identifier: Apache-2.0
"""Every exception that fpipe raises on purpose, as one tree.

    FpipeError
    ├── ScheduleError        a schedule that is malformed, unknown or cannot run
    ├── StageError           a stage count, parameter list or boundary that does not fit
    │   ├── TraceError       a function that cannot become straight-line programs
    │   └── ActionError      a stage raised while the plan ran (chains the user's own exception)
    ├── BatchError           a batch that cannot be split, or microbatches that do not fit
    ├── WeaveError           a way to run fused actions that does not exist
    ├── CheckpointError      files of a checkpoint, or trees to save, that do not fit
    ├── TransformError       a gradient transform whose arguments or trees do not fit
    ├── PlanError            a model, a machine or a job for which no layout can be planned
    ├── ArgumentError        arguments that a function does not take
    └── GroupError           the processes or their devices
        ├── MismatchError    ranks that disagree about a call or about versions
        ├── PeerError        a peer that died or raised
        ├── StalledError     a peer that was waited for longer than the time-out
        ├── DeadlockError    every rank of a local group waits
        ├── UnsupportedError an operation that the backend cannot do and no adaptor can replace
        └── LaunchError      processes that could not be started

A message names the value, the rule it broke and the remedy, in less than 1,000 characters. This
module knows nothing of the rest.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


class FpipeError(Exception):
    """The base class of all errors that fpipe raises on purpose.

    A long message loses its middle, which is the text of a value. Tracebacks of ranks and rows of
    schedules stay whole.

    >>> issubclass(ScheduleError, FpipeError), len(str(BatchError("x" * 5000)))
    (True, 989)
    """

    def __init__(self, message: str = ""):
        whole = isinstance(self, LaunchError) or "\n    rank" in message
        if len(message) > 990 and not whole:
            message = f"{message[:600]} ... {message[-384:]}"
        super().__init__(message)


class ScheduleError(FpipeError, ValueError):
    """A schedule that is malformed, unknown or cannot run.

    ``rank`` and ``position`` (the index in the row of the rank) are the place of the mistake, if it
    has one. ``rule`` names the broken rule in one word.

    >>> ScheduleError("no such schedule").rank is None
    True
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        position: int | None = None,
        rule: str | None = None,
    ):
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.rule = rule


class StageError(FpipeError, ValueError):
    """A stage count, a parameter list or a boundary between stages that does not fit."""


class TraceError(StageError):
    """A function that cannot become straight-line programs; ``engine="eager"`` is the usual
    remedy.
    """


class ActionError(StageError, RuntimeError):
    """A stage raised while the plan ran. The user's own exception is its ``__cause__``."""


class BatchError(FpipeError, ValueError):
    """A batch that cannot be split into microbatches, or microbatches that do not fit together."""


class WeaveError(FpipeError, ValueError):
    """A way to run fused actions that does not exist."""


class CheckpointError(FpipeError, ValueError):
    """Files of a checkpoint that are incomplete, damaged or for another model, or trees that cannot
    be saved.
    """


class TransformError(FpipeError, ValueError):
    """A gradient transform with arguments that make no sense, or with trees that do not fit
    together.
    """


class PlanError(FpipeError, ValueError):
    """A model, a kind of GPU or a job that is not known, does not fit, or for which no layout can
    be planned.
    """


class ArgumentError(FpipeError, TypeError):
    """Arguments that a function does not take: other names, another number or other types."""


class GroupError(FpipeError, RuntimeError):
    """Something is wrong with the processes, their devices or what they agreed on."""


class MismatchError(GroupError):
    """Ranks disagree about a call: its plan, shapes, functions or options, or the versions. All
    ranks raise it.
    """


class PeerError(GroupError):
    """A peer died or raised while this rank waited for it."""


class StalledError(GroupError, TimeoutError):
    """A peer was waited for longer than the time-out."""


class DeadlockError(GroupError):
    """Every rank of a local group waits for another one."""


class UnsupportedError(GroupError):
    """The backend cannot do this and no adaptor can replace it."""


class LaunchError(GroupError):
    """Processes could not be started, or ended before they began."""


#: Packages whose frames lie between a function of fpipe and an error about its arguments.
_NO_USERS = {"fpipe", "torch", "optree", *sys.stdlib_module_names}


#: What a repr shows of the values of a tensor.
_VALUES = r"(?<=tensor\()\[[^a-z)]*"


def check_floating(name: str, dtype: object) -> None:
    """Raise ArgumentError if this is no floating dtype, and not None.

    >>> check_floating("dtype", "bf16")
    Traceback (most recent call last):
    fpipe.errors.ArgumentError: dtype='bf16'; give a floating dtype, such as torch.bfloat16
    """
    if not getattr(dtype, "is_floating_point", dtype is None):
        raise ArgumentError(f"{name}={dtype!r}; give a floating dtype, such as torch.bfloat16")


def checked(fn: F) -> F:
    """``fn``, where an error of Python about its arguments is an ArgumentError that names them.

    An error of a function of the user's, which ``fn`` called, stays as it is. Of a class, these are
    the arguments with which it is called.

    >>> checked(len)(3)
    Traceback (most recent call last):
    fpipe.errors.ArgumentError: len(3) raised TypeError: object of type 'int' has no len(); give
    (obj, /)
    """

    if isinstance(fn, type):
        for name in {"__new__", "__init__"} & vars(fn).keys():
            setattr(fn, name, checked(getattr(fn, name)))
        return cast(F, fn)

    @wraps(fn)
    def call(*args: object, **named: object) -> object:
        try:
            return fn(*args, **named)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            at = error.__traceback__
            while at := at and at.tb_next:
                if at.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _NO_USERS:
                    raise
            of_tensor = "value of Tensor" in str(error)  # `if` of several numbers
            ours = isinstance(error, FpipeError) or isinstance(error.__cause__, FpipeError)
            if ours or (isinstance(error, RuntimeError) and not of_tensor):
                raise
            name = re.sub(r".*<locals>\.|\.__(init|new)__$", "", fn.__qualname__)
            takes = str(signature(fn)).replace("'", "")
            if takes.startswith(("(self", "(cls", "(_cls")):
                args = args[1:]
                takes = re.sub(r"\w+,? ?", "", takes, count=1)
            unknown = str(error).partition("unexpected keyword argument '")[2].strip("'")
            for near in get_close_matches(unknown, signature(fn).parameters, 1):
                takes += f"; did you mean {near!r}?"
            given = [f"{value!r:.80}" for value in args]
            given += [f"{key}={value!r:.80}" for key, value in named.items()]
            text = re.sub(r"\s+", " ", re.sub(_VALUES, "...", ", ".join(given)))
            text = f"{name}({text:.400}) raised {type(error).__name__}: {error!s:.160}"
            raise ArgumentError(f"{text.replace('Base.', '.')}; give {takes}") from error

    return cast(F, call)
