# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: actions, the rule of dependence, text, checks, simulation, timelines and
pictures.

The value itself is ``fpipe.schedule.Schedule``. Nothing here imports torch.
"""
