"""Keys: sources of different classes never compare equal, and the names of programs are read in one
place.
"""

from __future__ import annotations

import itertools
import typing

import torch

import fpipe
from fpipe.lowering import keys


def test_sources_of_different_classes_are_never_equal():
    classes = typing.get_args(keys.Source)
    sources = [cls(**dict.fromkeys((f for f in cls._fields if f != "kind"), 0)) for cls in classes]
    assert len({*sources}) == len(classes) == 13
    assert all(a != b for a, b in itertools.combinations(sources, 2))


def test_the_inputs_of_a_stages_programs_by_name():
    def stage(p, x, *, mask):
        return torch.tanh(x @ p) * mask

    programs = fpipe.trace(stage, torch.eye(2), torch.ones(1, 2), mask=torch.ones(1, 2))
    named = programs.roles
    assert {name: named[name] for name in ("p0", "x0", "k0", "dy0", "g0")} == {
        "p0": ("param", 0),
        "x0": ("x", 0),
        "k0": ("side", 0),
        "dy0": ("cotangent", 0),
        "g0": ("grad", 0),
    }
    assert not {"p1", "x1", "t0"} & named.keys()
