# SPDX-License-Identifier: Apache-2.0
"""Public fakes and a conformance suite, for tests of user code and of user-defined groups.

``run`` runs a function on fake ranks in one process: deterministic, with a seeded order of events
and with chosen faults; a fault that does not occur is an error. ``conform`` checks that a group
does what fpipe requires; local, distributed and fake groups all pass.
"""

from .conformance import CASES, conform
from .faults import Corrupt, Delay, Drop, Duplicate, Kill, Refuse
from .play import Outcome, outcomes, run

__all__ = [
    "CASES",
    "Corrupt",
    "Delay",
    "Drop",
    "Duplicate",
    "Kill",
    "Outcome",
    "Refuse",
    "conform",
    "outcomes",
    "run",
]
