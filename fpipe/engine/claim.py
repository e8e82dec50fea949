# SPDX-License-Identifier: Apache-2.0
"""``Claim``: a group serves one call at a time.

Calls of a group are numbered, and ranks compare those of equal numbers. Two threads could enter
theirs in another order on each rank. This module must not know pipelines.
"""

from __future__ import annotations

from threading import get_ident

from ..collectives.group import Group
from ..errors import GroupError

#: The attribute of a group that holds the thread of its call, set in one step that no other thread
#: interrupts.
_CALLER = "caller"


class Claim:
    """Groups for the length of a ``with`` block; raises GroupError where one of them is in use.

    >>> from fpipe import local
    >>> group = local(2)
    >>> with Claim(group):
    ...     with Claim(group):
    ...         pass
    Traceback (most recent call last):
    ...
    fpipe.errors.GroupError: fpipe.local(2) on cpu is in use by another call of this thread...
    """

    __slots__ = ("groups",)

    def __init__(self, *groups: Group):
        self.groups = groups

    def __enter__(self) -> None:
        caller = (get_ident(),)
        for group in self.groups:
            other = group.__dict__.setdefault(_CALLER, caller)
            if other is not caller:
                for taken in self.groups[: self.groups.index(group)]:
                    del taken.__dict__[_CALLER]
                raise _in_use(group, other == caller)

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            del group.__dict__[_CALLER]


def _in_use(group: Group, nested: bool) -> GroupError:
    if nested:
        return GroupError(
            f"{group!r} is in use by another call of this thread, from whose stage, loss or each= "
            "this one comes; run "
            "the inner pipeline on a group of its own, or after the outer call"
        )
    return GroupError(
        f"{group!r} is in use by another thread; give each thread a group of its own, or let the "
        "threads take turns"
    )
