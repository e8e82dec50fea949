# SPDX-License-Identifier: Apache-2.0
"""Blocks: functions that are traced once for all their calls. Loaded when a stage calls one."""
