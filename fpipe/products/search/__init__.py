# SPDX-License-Identifier: Apache-2.0
"""Searches for schedules: costs and limits of memory in, a schedule with a lower bound out. Knows
no torch.
"""
