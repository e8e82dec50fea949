"""Plans in a simple form: the only helper of the tests of ``fpipe/lowering/`` that knows how plans
are represented.

``plan_of`` and ``plans_of_processes`` lower small pipelines, on one process and on several.
``lines`` makes a plan a list of ``Line``, and ``short`` a list of words such as ``0F1``, ``SEND 1``
and ``WAIT 1 #0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

import fpipe
from common import layer, squared
from fpipe import Schedule, testing
from fpipe.collectives.group import Group
from fpipe.engine.arguments import Call
from fpipe.engine.copies import Copies
from fpipe.lowering.instruction import Instruction
from fpipe.lowering.plan import Plan

WIDTH = 2


class Line(NamedTuple):
    """One instruction."""

    kind: str  #: RECV, WAIT, SEND, SETTLE, ADD, SUM, ZERO, ..., or F, B, I, W of a program
    action: str  #: as ``0F1``; of the loss's programs ``loss F1``
    peer: int
    number: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]  #: without those that nothing wants
    frees: tuple[int, ...]
    how: tuple[str, ...]  #: of ADD: take, copy or add, by gradient
    nbytes: tuple[int, ...]  #: of messages: bytes of each tensor
    stage: int  #: whose parameters or gradients all copies of the pipeline gather or reduce; or -1
    gradients: bool  #: whether it is about gradients of that stage

    @property
    def short(self) -> str:
        """The line in few words."""
        which = f"#{self.number}" if self.number >= 0 else "to sum"  # gradients at the end
        words = {
            "RECV": f"RECV {self.peer} {which}",
            "WAIT": f"WAIT {self.peer} {which}",
            "SEND": f"SEND {self.peer}",
            "SETTLE": f"SETTLE {self.number} {self.peer}",
        }
        if self.stage >= 0:
            what = "gradients" if self.gradients else "stage"
            return f"{self.kind} {what} {self.stage}"
        if self.kind in "FBIW":
            return self.action
        if self.kind == "ADD":
            return " ".join(("ADD", *self.how))
        return words.get(self.kind, self.kind)


class Lowered(NamedTuple):
    """The plan of one rank in a simple form."""

    lines: tuple[Line, ...]
    slots: int
    feeds: tuple[int, ...]  #: slots that are filled before the first instruction
    results: tuple[int, ...]  #: slots that are full after the last
    peak: int

    @property
    def short(self) -> list[str]:
        """Each line in few words."""
        return [line.short for line in self.lines]

    def only(self, *kinds: str) -> list[str]:
        """The lines of some kinds in few words; ``run`` stands for programs."""
        return [
            line.short
            for line in self.lines
            if line.kind in kinds or ("run" in kinds and line.kind in "FBIW")
        ]

    def of(self, kind: str) -> list[Line]:
        """The lines of one kind."""
        return [line for line in self.lines if line.kind == kind]


def lowered(plan: Plan) -> Lowered:
    """A plan in a simple form."""
    return Lowered(
        tuple(map(_line, plan.instructions)),
        plan.slots,
        tuple(plan.feeds.values()),
        tuple(plan.results.values()),
        plan.peak,
    )


def _line(ins: Instruction) -> Line:
    action, op = "" if ins.action is None else str(ins.action), ins.op
    share = getattr(op, "share", None)
    if ins.kind in "FBIW" and ins.action is not None and op.stage > ins.action.stage:
        action = f"loss {ins.kind}{ins.action.microbatch}"
    return Line(
        ins.kind,
        action,
        getattr(op, "peer", -1),
        getattr(op, "count", getattr(op, "number", -1)),
        ins.reads,
        tuple(slot for slot in ins.writes if slot >= 0),
        ins.frees,
        getattr(op, "how", ()),
        tuple(spec.bytes for spec in getattr(op, "specs", ()))
        or tuple(aval.nbytes for aval in getattr(op, "sums", ())),
        -1 if share is None else share.stage,
        share is not None and share.gradients,
    )


def lowered_call(
    pipe: fpipe.Pipeline,
    params: Sequence[Any],
    x: Any,
    *targets: Any,
    mode: Literal["grad", "forward", "vjp"] = "grad",
    wanted: tuple[int, ...] = (0,),
    each: Callable[..., Any] | None = None,
    side: Mapping[str, Any],
) -> dict[int, Lowered]:
    """The plans of the ranks of this process for a call: of ``value_and_grad`` with ``argnums``
    ``wanted``, of the pipeline itself (``forward``), or of ``vjp``.
    """
    call = Call.of(pipe.config, mode, params, x, targets, side, argnums=wanted, each=each)
    plans = pipe.cache.plans_for(call).prepared.plans
    return {rank: lowered(plan) for rank, plan in plans.items()}


def lower(
    schedule: Schedule,
    *,
    stages: Sequence[Any] | None = None,
    params: Sequence[Any] | None = None,
    x: Any = None,
    targets: tuple[Any, ...] | None = None,
    group: Group | None = None,
    loss: Callable[..., Any] | None = squared,
    side: Mapping[str, Any] | None = None,
    call: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> dict[int, Lowered]:
    """The plans of a schedule by rank, by default of layers ``tanh(x @ p)`` of width 2 with the
    mean of squares as the loss, ``x`` itself as the target and one row in each microbatch; all in
    this process.
    """
    stages = [layer] * schedule.stages if stages is None else stages
    params = [torch.eye(WIDTH)] * schedule.stages if params is None else params
    x = torch.ones(schedule.microbatches, WIDTH) if x is None else x
    group = fpipe.local(schedule.ranks) if group is None else group
    pipe = fpipe.pipeline(stages, schedule, loss=loss, group=group, **keywords)
    if isinstance(keywords.get("dp"), Copies) and keywords["dp"].zero:
        params = pipe.shard(params)
    if targets is None:
        targets = () if loss is None else (x,)
    return lowered_call(pipe, params, x, *targets, side=side or {}, **(call or {}))


def lower_apart(
    schedule: Schedule,
    order: Literal["buffered", "lockstep"],
    at_once: bool = False,
    **keywords: Any,
) -> dict[int, Lowered]:
    """As ``lower``, where each rank is another process. ``lockstep``: a send blocks until its
    receive is posted; ``at_once``: a send is complete when it returns.
    """

    def one(group: Group) -> dict[int, Lowered]:
        group.at_once = at_once
        return lower(schedule, group=group, **keywords)

    plans = testing.run(one, ranks=schedule.ranks, order=order, seed=0)
    return {rank: plan for each in plans for rank, plan in each.items()}


def lower_copy(schedule: Schedule, zero: int, **keywords: Any) -> dict[int, Lowered]:
    """As ``lower``, for one of two copies of the pipeline."""

    def one(group: Group) -> dict[int, Lowered]:
        own = {"unsharded", "own"} & keywords.keys()
        copies = fpipe.copies(group, zero=zero, **{name: keywords[name] for name in own})
        rest = {name: value for name, value in keywords.items() if name not in own}
        return lower(schedule, dp=copies, **rest)

    return testing.run(one, ranks=2, seed=0)[0]
