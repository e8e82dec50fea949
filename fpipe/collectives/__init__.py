"""Groups of ranks, and what travels between them.

``group`` is the Protocol that everything above sees; ``local``, ``c10d`` and the fakes of ``fpipe.testing`` carry it
out. Nothing here knows schedules, stages or plans.
"""
