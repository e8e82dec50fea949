# SPDX-License-Identifier: Apache-2.0
"""``Program``: a straight line of tensor operations, printed as Python and called with a box.

A box is a list of arguments that the program empties as it starts, so that a tensor is freed at its last use even if
the caller keeps the list. Values that several programs of one stage share have one name in all of them. Knows no
stages, schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .internals import mutates, operator_of
from .source import Adds, function


@dataclass(frozen=True, eq=False)
class Program:
    """A callable straight-line program; calling it empties the box.

    ``inputs`` and ``outputs`` are value names, in the order of the box and of the returned tuple; ``code`` is the
    source that runs. ``random``: whether it draws random numbers. ``adds`` names, for a value, the inputs into which it
    is added as soon as it is computed. ``stage`` describes the stage for messages.

    Of a segment of a program, ``label`` is its name, ``numbers`` the numbers of its program's collectives, and
    ``stream``, where several segments draw, whether it continues another's random stream and whether another continues
    its own.

    >>> gm = fx.symbolic_trace(lambda a, b: torch.add(a, b))
    >>> add = Program.from_nodes("add", gm.graph.nodes, inputs=["a", "b"], outputs=["add"])
    >>> add([torch.ones(()), torch.ones(())])
    (tensor(2.),)
    """

    name: str
    code: str
    run: Callable[[list[Any]], tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random: bool = False
    nodes: tuple[fx.Node, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    adds: Adds = field(default_factory=dict)
    stage: str = ""
    label: str = ""
    stream: tuple[bool, bool] | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, box: list[Any]) -> tuple[Any, ...]:
        return self.run(box)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self.nodes)} operations, {len(self.inputs)} in, {len(self.outputs)} out>"

    @classmethod
    def from_nodes(
        cls, name: str, nodes: Iterable[fx.Node], inputs: Sequence[str], outputs: Sequence[str],
        constants: Mapping[str, Any] | None = None, adds: Adds | None = None,
    ) -> Program:  # fmt: skip
        """Write the nodes as Python, compile it once, and bind every operation to a name."""
        body = tuple(node for node in nodes if node.op == "call_function")
        constants, adds = constants or {}, adds or {}
        code, run = function(name, body, inputs, outputs, constants, adds)
        return cls(name, code, run, tuple(inputs), tuple(outputs), any(map(draws, body)), body, constants, adds)

    def adding(self, adds: Adds, outputs: Sequence[str]) -> Program:
        """The program that adds values into further inputs and returns ``outputs``."""
        inputs = (*self.inputs, *(into for targets in adds.values() for into in targets))
        if not self.nodes:  # it takes the further inputs as it is
            return replace(self, inputs=inputs, outputs=tuple(outputs))
        program = Program.from_nodes(self.name, self.nodes, inputs, outputs, self.constants, adds)
        return replace(program, stage=self.stage)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    op = operator_of(node)
    return op is not None and torch.Tag.nondeterministic_seeded in op.tags


def elementwise(node: fx.Node) -> bool:
    """Whether a node computes each element from the same elements of its inputs, without random numbers."""
    op = operator_of(node)
    return op is not None and torch.Tag.pointwise in op.tags and not mutates(op) and not draws(node)
