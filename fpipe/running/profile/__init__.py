"""Measurements of a run: events, clocks, costs and the timeline of a measured step."""
