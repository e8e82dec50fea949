# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the messages and collectives between them.

``group`` is the protocol that other packages use; ``local``, ``c10d`` and the fakes of
``fpipe.testing`` implement it. This package must not know schedules, stages or plans.
"""

from .group import Group

__all__ = ["Group"]
