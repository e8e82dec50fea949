# SPDX-License-Identifier: Apache-2.0
"""Programs whose waits for collectives end in time: those of a backend may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...collectives.faults import watched
from ...programs.program import Program, Programs
from .segments import collectives_of


def bounded(program: Program, owner: Programs) -> Callable[[list[Any]], Sequence[Any]]:
    """What runs a program of a stage that starts a collective or waits for one."""
    several = (program, owner.f, owner.b, owner.i, owner.w)
    started = (found.members for each in several for found in collectives_of(each))
    members = next(started, None)
    run = program.run
    if members is None:
        return run
    waiting = watched(members)

    def within_time(box: list[Any]) -> Sequence[Any]:
        with waiting():
            return run(box)

    return within_time
