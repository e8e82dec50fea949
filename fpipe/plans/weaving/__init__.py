"""The order in which the programs of one fused action run, so that communication overlaps with compute."""
