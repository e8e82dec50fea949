# SPDX-License-Identifier: Apache-2.0
"""The kinds of actions: one table, ``KINDS``, with a row for each.

A row states what the letter stands for, what the action provides and needs, what it takes of time
and memory, and its colours. The rule of dependence, the check, the simulator, the costs, the text
and the pictures read this table. Nothing here knows tensors, placement or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: The letters of actions.
Op: TypeAlias = Literal["F", "B", "I", "W"]
#: What actions provide: an output, the gradient of an input, the gradient of parameters.
FactKind: TypeAlias = Literal["F", "I", "W"]

#: What a message calls each of these.
FACTS: dict[FactKind, str] = {
    "F": "the output",
    "I": "the input gradient",
    "W": "the weight gradient",
}
#: Those that a schedule must provide once for every stage and microbatch.
REQUIRED: tuple[FactKind, ...] = ("F", "I", "W")


@dataclass(frozen=True)
class Kind:
    """A kind of action.

    Args:
        name: what the letter stands for.
        provides: the facts that it provides. Other stages need the first one only.
        needs: the facts that it needs, each with an offset to the stage that provides it. Outside
            the model nothing is needed. Only the last fact may be of another stage. With slices the
            offset is also one of slices: F of slice 1 needs F of slice 0 of its own stage, and I of
            slice 0 needs I of slice 1.
        saved: how many times it adds ``Costs.saved`` to the memory of its rank.
        kept: how many times it adds ``Costs.kept``.
        colours: in pictures, of the first stage of a rank and of the last; they can be seen on
            light and on dark paper.

    >>> KINDS["B"].name, KINDS["B"].provides, KINDS["B"].activations
    ('backward', ('I', 'W'), -1)
    """

    name: str
    provides: tuple[FactKind, ...]
    needs: tuple[tuple[FactKind, int], ...]
    saved: int
    kept: int
    colours: tuple[str, str]

    @property
    def activations(self) -> int:
        """The change of the number of activations that the rank holds."""
        return self.saved + self.kept


#: The kinds, in the order in which legends and tables list them.
KINDS: dict[str, Kind] = {
    "F": Kind(
        "forward",
        provides=("F",),
        needs=(("F", -1),),
        saved=1,
        kept=0,
        colours=("#4ba3f5", "#c0e2fb"),
    ),
    "B": Kind(
        "backward",
        provides=("I", "W"),
        needs=(("F", 0), ("I", +1)),
        saved=-1,
        kept=0,
        colours=("#e0a712", "#ffe391"),
    ),
    "I": Kind(
        "input gradient",
        provides=("I",),
        needs=(("F", 0), ("I", +1)),
        saved=-1,
        kept=1,
        colours=("#c03a2b", "#ee7d6b"),
    ),
    "W": Kind(
        "weight gradient",
        provides=("W",),
        needs=(("I", 0),),
        saved=0,
        kept=-1,
        colours=("#82559d", "#a599ad"),
    ),
}
#: The letters of all kinds, in that order.
OPS = "".join(KINDS)
#: The facts that another stage needs, each with the offset of that stage.
READERS = {fact: -by for kind in KINDS.values() for fact, by in kind.needs if by}
