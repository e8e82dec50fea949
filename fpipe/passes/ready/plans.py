# SPDX-License-Identifier: Apache-2.0
"""The plan of a rank in the ready order: nodes of instructions, and what each waits for.

Each value has a slot of its own, so no order of a window overwrites one. A *node* is the body of an
action, a send, the wait for a message, or an instruction that keeps its place in the row, such as a
collective. A node waits for those that write what it reads, and, where it frees a slot, for those
that read it. Bodies that provide the same fact of a stage keep their order, so gradients are added
in the order of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from ...lowering.builder import Builder
from ...lowering.instruction import Instruction, Machine, Registers, StepFn
from ...lowering.instructions import SEND_STEP, Add, Recv, Run, Send, Wait, step_of
from ...lowering.keys import Grad, Key
from ...lowering.plan import Feature, Plan
from ...lowering.wired import Settle, WiredMessages
from .bounds import bound
from .window import before, default_window, unawaited

#: What a node is. One that is "placed" runs once all bodies before it have run.
BODY, SEND, WAIT, PLACED = "body", "send", "wait", "placed"


@dataclass
class Node:
    """Consecutive instructions that run together.

    ``position`` is that of the action in the row, ``channel`` the peer and the stream of a message.
    ``after`` are the nodes that wait for this one; ``missing`` is how many it waits for.
    """

    kind: str
    position: int
    steps: list[int] = field(default_factory=list)
    channel: tuple[int, int] | None = None
    after: list[int] = field(default_factory=list)
    missing: int = 0
    last: bool = False  # no other rank waits for it
    message: int = -1  # of a wait: the instruction that waits, among ``steps``


@dataclass(frozen=True)
class Ready(Feature):
    """Makes a plan one in the ready order, where no send waits for its receiver."""

    window: int | None = None

    def start(self, builder: Builder) -> Feature:
        job = builder.job
        if job.strict:
            return Feature()
        schedule = job.schedule
        window = self.window or default_window(schedule.rows, schedule.units)
        if isinstance(builder.messages, WiredMessages):
            # A message shows what its sender had run only outside of its window.
            parts = max(len(action.parts) for row in schedule for action in row)
            builder.messages.lag = window * parts
        return _OnRank(builder, window)


class _OnRank(Feature):
    def __init__(self, builder: Builder, window: int):
        self.builder = builder
        self.window = window

    def complete(self, plan: Plan) -> Plan:
        given = {one.name: getattr(plan, one.name) for one in fields(Plan)}
        streams = 1 if plan.wired else STREAMS
        nodes, lanes = _nodes(plan, streams)
        instructions = tuple(_instructions(plan, lanes))
        slots = _Slots(plan)
        given["instructions"] = tuple(map(slots.place, instructions, plan.uses))
        given["slots"] = len(slots.of)
        given["feeds"] = {key: slots.of[key] for key in plan.feeds}
        given["results"] = {key: slots.of[key] for key in plan.results}
        return ReadyPlan(**given, window=self.window, nodes=tuple(nodes))


#: The streams of messages from one rank to another, in groups whose sends are complete at once.
STREAMS = 3


@dataclass(frozen=True)
class ReadyPlan(Plan):
    """A plan whose actions may run out of order, within ``window`` of them. ``peak`` is the most
    bytes that any such order holds.
    """

    window: int = 1
    nodes: tuple[Node, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def curve(self) -> tuple[int, ...]:
        return bound(self)

    @cached_property
    def draws(self) -> bool:
        """Whether a program draws random numbers."""
        return any(ins.program is not None and ins.program.random for ins in self.instructions)

    def chosen(self, bound: Any, r: Registers) -> Iterator[tuple[int, StepFn]]:
        """The steps in the ready order; in that of the row where draws continue a stream."""
        from .running import steps_in_order

        return steps_in_order(self, bound, r)

    def __str__(self) -> str:
        head, *lines = super().__str__().split("\n")
        return "\n".join([f"{head} in any order of {self.window} actions", *lines])


# ---- slots ----
class _Slots:
    """One slot for each key."""

    def __init__(self, plan: Plan):
        self.of: dict[Key, int] = {}
        for key in (*plan.feeds, *(key for ins in plan.keyed for key in ins.writes), *plan.results):
            self.of.setdefault(key, len(self.of))

    def place(self, ins: Instruction, use: Any) -> Instruction:
        """An instruction over slots."""
        ends, needed = use
        writes = tuple(
            self.of[key] if later else -1 for key, later in zip(ins.writes, needed, strict=True)
        )
        reads = tuple(self.of[key] for key in ins.reads)
        frees = tuple(reads[place] for place in ends)
        return Instruction(ins.op, ins.action, reads, writes, frees)


# ---- messages ----
@dataclass(frozen=True, slots=True)
class InStream(Send):
    """SEND in a stream of its channel."""

    stream: int = 0

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        send = machine.group.sender(machine.rank, self.peer, self.specs, self.stream)
        return step_of(SEND_STEP, ins, send=send)


@dataclass(frozen=True, slots=True)
class Take(Wait):
    """WAIT, whose step returns the receive without waiting."""

    stream: int = 0

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        post, fetch = machine.group.receiver(self.peer, machine.rank, self.specs, self.stream)
        writes = ins.writes
        key = (self.peer, self.number)

        def step(r: Registers) -> Any:
            return (r.receives.pop(key) if fetch is None else post()), writes

        return step


def _instructions(plan: Plan, lanes: dict[int, int]) -> Iterator[Instruction]:
    """The instructions over keys, with messages in streams."""
    for number, ins in enumerate(plan.keyed):
        op = ins.op
        if type(op) is Send:
            op = InStream(op.peer, op.specs, lanes[number])
        elif type(op) is Wait:
            op = Take(op.peer, op.number, op.specs, lanes[number])
        yield ins._replace(op=op)


def _lanes(plan: Plan, streams: int) -> dict[int, int]:
    """The stream of each message, by its instruction: one for each stage and fact, as far as there
    are streams.
    """
    names: dict[tuple[type, int], dict[Any, None]] = {}
    of: dict[int, tuple[tuple[type, int], Any]] = {}
    for number, ins in enumerate(plan.keyed):
        if type(ins.op) in (Send, Wait):
            channel = (type(ins.op), ins.op.peer)
            name = None if ins.action is None else (ins.action.stage, ins.action.op == "F")
            of[number] = channel, name
            if name is not None:
                names.setdefault(channel, {})[name] = None
    lanes = {}
    for number, (channel, name) in of.items():
        known = sorted(names.get(channel, ()))
        lanes[number] = 0 if name is None else known.index(name) % streams
    return lanes


# ---- nodes ----
def _nodes(plan: Plan, streams: int) -> tuple[list[Node], dict[int, int]]:
    """The nodes of a plan, in the order of its instructions, and the streams of its messages."""
    lanes = _lanes(plan, streams)
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
            node = waits[op.peer] = made.add(WAIT, position, steps, (op.peer, lanes[number]))
            node.message = number
        elif type(op) is Settle:
            waits[op.peer].steps.append(number)
        elif type(op) is Send:
            made.add(SEND, position, [number], (op.peer, lanes[number]))
        elif type(op) in (Run, Add) and not getattr(ins.program, "collective", False):
            made.act(position, number)
        else:
            made.add(PLACED, position, [number])
    made.reach(len(plan.row))
    _connect(plan, made.nodes)
    return made.nodes, lanes


class _Made:
    """The nodes so far. ``of`` has those of each action that are bodies or placed."""

    def __init__(self, plan: Plan):
        self.row = plan.row
        self.nodes: list[Node] = []
        self.of: dict[int, Node] = {}
        self.reached = 0

    def add(
        self, kind: str, position: int, steps: list[int], channel: tuple[int, int] | None = None
    ) -> Node:
        """A new node."""
        last = kind == BODY and unawaited(self.row[position])
        node = Node(kind, position, steps, channel, last=last)
        self.nodes.append(node)
        if kind in (BODY, PLACED):
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
    own = {part: n for n, action in enumerate(plan.row) for part in action.parts}
    position = len(plan.row)
    positions = []
    for ins in reversed(plan.keyed):
        if ins.action in own and type(ins.op) is not Wait:
            position = own[ins.action]
        positions.append(position)
    return positions[::-1]


def _connect(plan: Plan, nodes: Sequence[Node]) -> None:
    """Enter for each node which nodes wait for it."""
    waits: list[set[int]] = [set() for _ in nodes]
    last: dict[Any, int] = {}  # of each channel, and of each action
    earlier = before(plan.row)
    for place, node in enumerate(nodes):
        if node.channel is not None:
            name = (node.kind, node.channel)
            waits[place].add(last.get(name, place))
            last[name] = place
        elif node.position < len(plan.row):
            waits[place].update(last[one] for one in earlier[node.position])
            last[node.position] = place
    _connect_values(plan, nodes, waits)
    for place, waited in enumerate(waits):
        waited.discard(place)
        nodes[place].missing = len(waited)
        for one in waited:
            nodes[one].after.append(place)


def _connect_values(plan: Plan, nodes: Sequence[Node], waits: Sequence[set[int]]) -> None:
    """A node waits for those that write what it reads; where it writes or frees a value, also for
    those that read it. A program that reads a sum of gradients adds into it.
    """
    node_of = {number: place for place, node in enumerate(nodes) for number in node.steps}
    written: dict[Key, int] = {}
    read: dict[Key, set[int]] = {}
    for number, ins in enumerate(plan.keyed):
        if number not in node_of:
            continue
        place = node_of[number]
        ends = [ins.reads[end] for end in plan.uses[number][0]]
        changed = [*ins.writes, *(key for key in ins.reads if isinstance(key[0], Grad))]
        for key in (*ins.reads, *ins.writes):
            waits[place].add(written.get(key, place))
        for key in (*changed, *ends):
            waits[place].update(read.get(key, ()))
        for key in ins.reads:
            read.setdefault(key, set()).add(place)
        for key in changed:
            written[key] = place
            read[key] = set()
