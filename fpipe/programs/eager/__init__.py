"""Programs that run on autograd's graph, for functions that cannot be traced."""
