"""Fakes and a conformance suite, public, so that one's own code and one's own groups can be tested as fpipe's are.

``run`` plays a function on fake ranks in one process, deterministically, with a seeded order of events and with
faults to order. ``conform`` asks of any group what fpipe asks of groups; local, distributed and fake ones all pass.
"""

from .conformance import CASES, conform
from .orders import Delay, Drop, Kill, Refuse
from .play import Outcome, outcomes, run

__all__ = ["CASES", "Delay", "Drop", "Kill", "Outcome", "Refuse", "conform", "outcomes", "run"]
