# SPDX-License-Identifier: Apache-2.0
"""Measurements of a run: events, clocks, costs and the timeline of a measured step."""
