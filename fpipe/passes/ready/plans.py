# SPDX-License-Identifier: Apache-2.0
"""The plan of a rank in the ready order.

Each value has a slot of its own, so no order of a window overwrites one. Messages of a channel keep
the order of the row; where the group has streams, those of each stage and fact do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

from ...collectives.bounded import in_thread
from ...collectives.group import Pending as Arrival
from ...lowering.builder import Builder
from ...lowering.instruction import Instruction, Machine, Opcode, Registers, StepFn
from ...lowering.instructions import Send, Wait
from ...lowering.keys import Key
from ...lowering.plan import Feature, Plan, Use
from ...lowering.wired import WiredMessages
from .bounds import bound
from .nodes import Node, nodes_of
from .running import Order, Pending, steps_in_order
from .window import default_window


@dataclass(frozen=True)
class Ready(Feature):
    """Makes a plan one in the ready order, where no send waits for its receiver."""

    window: int = 0  # 0: the default

    def start(self, builder: Builder) -> Feature:
        job = builder.job
        if job.strict:
            return Feature()
        schedule = job.schedule
        window = self.window or default_window(schedule.rows, schedule.units)
        if isinstance(builder.messages, WiredMessages):
            # A message shows what its sender had run only outside of its window.
            parts = (len(action.parts) for row in schedule for action in row)
            builder.messages.lag = window * max(parts, default=1)
        return replace(self, window=window)

    def complete(self, plan: Plan) -> Plan:
        lanes, alone = _lanes(plan, 1 if plan.wired else STREAMS)
        nodes = nodes_of(plan, lanes, alone)
        instructions = tuple(_instructions(plan, lanes))
        keys = chain(plan.feeds, *(ins.writes for ins in plan.keyed), plan.results)
        slots = {key: slot for slot, key in enumerate(dict.fromkeys(keys))}
        placed = replace(
            plan,
            instructions=tuple(map(partial(_placed, slots), instructions, plan.uses)),
            slots=len(slots),
            feeds={key: slots[key] for key in plan.feeds},
            results={key: slots[key] for key in plan.results},
        )
        return ReadyPlan(**vars(placed), window=self.window, nodes=tuple(nodes))


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
        """The most bytes held while the action of each instruction is the first not to have run."""
        return bound(self, self.nodes, self.window)

    @cached_property
    def draws(self) -> bool:
        """Whether a program draws random numbers."""
        return any(getattr(ins.program, "random", False) for ins in self.instructions)

    @cached_property
    def orders(self) -> dict[int, Order]:
        """By executable, the orders that its runs have taken."""
        return {}

    steps_in_order = steps_in_order

    def __str__(self) -> str:
        head, *lines = super().__str__().split("\n")
        return "\n".join([f"{head} in any order of {self.window} actions", *lines])


# ---- slots ----
def _placed(slots: Mapping[Key, int], ins: Instruction, use: Use) -> Instruction:
    """An instruction over slots, one for each key."""
    ends, needed = use
    kept = zip(ins.writes, needed, strict=True)
    writes = tuple(slots[key] if later else -1 for key, later in kept)
    reads = tuple(slots[key] for key in ins.reads)
    frees = tuple(reads[place] for place in ends)
    return ins._replace(reads=reads, writes=writes, frees=frees)


# ---- messages ----
@dataclass(frozen=True, slots=True)
class Beside(Opcode):
    """TAKE in a thread of its own, so that other actions run while a microbatch is missing.

    Ranks that share a process run in one thread: there it blocks, as in the order of the row.
    """

    op: Opcode
    kind = "TAKE"

    def __str__(self) -> str:
        return str(self.op)

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        take = self.op.bind(ins, machine)
        group = machine.group
        if len(group.here) == group.size:
            return take

        def step(r: Registers) -> Pending:
            work, writes = take(r)
            waits = partial(copy_context().run, work.wait)
            future = in_thread(waits, "fpipe-takes", daemon=True)
            return Arrival(future.result, future.done), writes

        return step


def _instructions(plan: Plan, lanes: Mapping[int, int]) -> Iterator[Instruction]:
    """The instructions over keys, with messages in streams."""
    for number, ins in enumerate(plan.keyed):
        op = ins.op
        if isinstance(op, Send | Wait):
            op = replace(op, stream=lanes[number])
        elif op.kind == "TAKE":
            op = Beside(op)
        yield ins._replace(op=op)


def _lanes(plan: Plan, streams: int) -> tuple[dict[int, int], frozenset[int]]:
    """The stream of each message, by its instruction: one for each stage and fact, as far as there
    are streams; and the messages that share theirs with no other stage or fact.
    """
    lanes = {}
    channels = defaultdict[tuple[type, int], dict[tuple[int, bool], list[int]]](dict)
    for number, ins in enumerate(plan.keyed):
        if isinstance(ins.op, Send | Wait):
            lanes[number] = 0
            if ins.action is not None:
                name = ins.action.stage, ins.action.op == "F"
                channels[type(ins.op), ins.op.peer].setdefault(name, []).append(number)
    alone = set[int]()
    for messages in channels.values():
        for place, name in enumerate(sorted(messages)):
            lanes |= dict.fromkeys(messages[name], place % streams)
        if len(messages) <= streams:
            alone.update(*messages.values())
    return lanes, frozenset(alone)
