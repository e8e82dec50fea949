# SPDX-License-Identifier: Apache-2.0
"""The nodes of a plan in the ready order, and which of them wait for which.

A *node* is the body of an action, a send, the wait for a message, or an instruction that keeps its
place in the row, such as a collective. A node waits for those that write what it reads, and, where
it frees a slot, for those that read it. Bodies that provide the same fact of a stage keep their
order, so gradients are added in the order of the row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...lowering.instructions import Add, Recv, Run, Send, Wait
from ...lowering.keys import Grad, Key
from ...lowering.plan import Plan
from ...lowering.wired import Settle
from .window import before, unawaited

#: What a node is. No other rank waits for a body that is "last"; a node that is "placed" runs once
#: all bodies before it have run.
BODY, LAST, SEND, WAIT, PLACED = NODE_KINDS = range(5)
#: Who sends the microbatches that come late, in place of a rank.
CALLER = -1


@dataclass
class Node:
    """Consecutive instructions that run together.

    ``position`` is that of the action in the row, ``channel`` the peer and the stream of a message.
    ``before`` has a bit for each node that this one waits for.
    """

    kind: int
    position: int
    steps: list[int] = field(default_factory=list)
    channel: tuple[int, int] | None = None
    before: int = 0
    message: int = -1  # of a wait: the instruction that waits, among ``steps``


def nodes_of(plan: Plan, lanes: Mapping[int, int], alone: frozenset[int]) -> list[Node]:
    """The nodes of a plan, in the order of its instructions.

    ``lanes`` has the stream of each message, by its instruction. Those ``alone`` share theirs with
    no other stage and fact, so a send among them is a part of its body.
    """
    made = _Made(plan)
    waits: dict[int, Node] = {}
    posts: dict[int, list[int]] = {}
    for number, (ins, position) in enumerate(zip(plan.keyed, _positions(plan), strict=True)):
        made.reach(position)
        op = ins.op
        if type(op) is Recv:
            posts.setdefault(op.peer, []).append(number)
        elif type(op) is Wait:
            steps = [*posts.pop(op.peer, ()), number]
            waits[op.peer] = made.add(WAIT, position, steps, (op.peer, lanes[number]))
        elif op.kind == "TAKE":
            made.add(WAIT, position, [number], (CALLER, 0))
        elif isinstance(op, Settle) and op.peer in waits:
            waits[op.peer].steps.append(number)
        elif isinstance(op, Send) and number not in alone:
            made.add(SEND, position, [number], (op.peer, lanes[number]))
        elif (
            not (type(op) in (Run, Add) or isinstance(op, Send))
            or position == len(plan.row)
            or getattr(ins.program, "collective", False)
        ):
            made.add(PLACED, position, [number])
        else:
            made.act(position, number)
    made.reach(len(plan.row))
    _connect(plan, made.nodes)
    return made.nodes


class _Made:
    """The nodes so far. ``of`` has those of each action that are bodies or placed."""

    def __init__(self, plan: Plan):
        self.row = plan.row
        self.nodes: list[Node] = []
        self.of: dict[int, Node] = {}
        self.reached = 0

    def add(
        self, kind: int, position: int, steps: list[int], channel: tuple[int, int] | None = None
    ) -> Node:
        """A new node."""
        if kind == BODY and unawaited(self.row[position]):
            kind = LAST
        node = Node(kind, position, steps, channel, message=max(steps, default=-1))
        self.nodes.append(node)
        if channel is None:
            self.of[position] = node
        return node

    def act(self, position: int, number: int) -> None:
        """Add an instruction to the body of an action; behind one that is placed, it is, too."""
        node = self.of.get(position)
        if node is None:
            node = self.add(BODY, position, [])
        elif node.kind == PLACED:
            node = self.add(PLACED, position, [])
        node.steps.append(number)

    def reach(self, position: int) -> None:
        """Give each earlier action a node."""
        for earlier in range(self.reached, position):
            if earlier not in self.of:
                self.add(BODY, earlier, [])
        self.reached = max(self.reached, position)


def _positions(plan: Plan) -> list[int]:
    """The position of each instruction: of its action or, where that is another rank's, of the
    next instruction.
    """
    own = {part: place for place, action in enumerate(plan.row) for part in action.parts}
    position = len(plan.row)
    positions = []
    for ins in reversed(plan.keyed):
        if ins.action is not None and ins.action in own and type(ins.op) is not Wait:
            position = own[ins.action]
        positions.append(position)
    return positions[::-1]


def _connect(plan: Plan, nodes: Sequence[Node]) -> None:
    """Enter for each node which nodes wait for it."""
    waits: list[set[int]] = [set() for _ in nodes]
    last: dict[object, int] = {}  # of each channel, and of each action
    earlier = before(plan.row)
    for place, node in enumerate(nodes):
        if node.channel is not None:
            name = (node.kind, node.channel)
            if name in last:
                waits[place].add(last[name])
            last[name] = place
        elif node.position < len(plan.row):
            for one in earlier[node.position]:
                waits[place].add(last[one])
            last[node.position] = place
    _connect_values(plan, nodes, waits)
    for place, waited in enumerate(waits):
        nodes[place].before = sum(1 << one for one in waited - {place})


def _connect_values(plan: Plan, nodes: Sequence[Node], waits: Sequence[set[int]]) -> None:
    """A node waits for those that write what it reads; where it writes or frees a value, also for
    those that read it. A program that reads a sum of gradients adds into it.
    """
    node_of = {number: place for place, node in enumerate(nodes) for number in node.steps}
    written: dict[Key, int] = {}
    read = defaultdict[Key, set[int]](set)
    for number, ins in enumerate(plan.keyed):
        place = node_of[number]
        ends, _ = plan.uses[number]
        changed = [*ins.writes, *(key for key in ins.reads if isinstance(key[0], Grad))]
        waited = waits[place]
        waited.update(written.get(key, place) for key in (*ins.reads, *ins.writes))
        for key in (*changed, *(ins.reads[end] for end in ends)):
            waited |= read[key]
        for key in ins.reads:
            read[key].add(place)
        for key in changed:
            written[key] = place
            read[key] = set()
