# SPDX-License-Identifier: Apache-2.0
"""``order="ready"``: a rank runs what is ready, within a window of its row.

``window`` has the rule, ``simulated`` and ``blocking`` apply it to schedules, and ``option``,
``plans`` and ``running`` to pipelines.
"""
