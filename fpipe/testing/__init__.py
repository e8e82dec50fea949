# SPDX-License-Identifier: Apache-2.0
"""Public fakes, for tests of user code.

``run`` runs a function on fake ranks in one process: deterministic, with a seeded order of events
and with chosen faults; a fault that does not occur is an error.
"""

from .fake import outcomes, run
from .faults import Delay, Drop, Kill, Refuse
from .world import Outcome

__all__ = [
    "Delay",
    "Drop",
    "Kill",
    "Outcome",
    "Refuse",
    "outcomes",
    "run",
]
