"""Differential fuzzing: random stages, pipelines, options and call sequences, compared with plain
autograd. ``features`` lists what a case composes: options of the pipeline, those of each call, what
happens between calls, and the global state of torch.

``make fuzz ARGS="--minutes 10"`` runs new cases; ``make fuzz ARGS="--case 7"`` runs one case again
and prints it. ``python -m tests.fuzz.operators`` runs every differentiable operator of torch as a
stage. Only public names are used.
"""
