# SPDX-License-Identifier: Apache-2.0
"""Lowering: a schedule and its programs become one rank's plan.

First each action becomes steps over keys (waits, the program, sends, accumulation), which a
``Builder`` collects; then ``slots`` assigns numbers, frees each value after its last use and counts
bytes. The messages of a channel have one order on both sides: that in which the sender's row
computes them. Nothing here knows tensors, backends or the names of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..actions.action import AnyAction, Fused, plain
from ..actions.collector import uncollected
from .builder import Builder, input_gradients_of, outputs_of
from .keys import GradSum, Key, PartialGrad, grad, reduced_grad
from .plan import LoweringInput, Plan
from .slots import assign
from .step import Step
from .weaving.fused import act_jointly, starts_collectives, woven_pieces


def lower(job: LoweringInput, rank: int) -> Plan:
    """The plan of one rank."""
    with uncollected():
        return _lower(job, rank)


def _lower(job: LoweringInput, rank: int) -> Plan:
    builder = Builder(job, rank)
    split = _emit_row(builder)
    _emit_sums(builder)
    builder.out += next(builder.of_copies)
    if job.early_loss:
        _emit_loss(builder)
    return assign(job, rank, builder.out, split, list(_wanted(builder)), builder.weaves)


def _emit_row(builder: Builder) -> int:
    """The steps of all actions; returns the number of steps before the first backward."""
    job, row, place, split = builder.job, builder.job.schedule[builder.rank], 0, 0
    backward = (
        next((i for i, action in enumerate(plain(row)) if action.op != "F"), -1)
        if job.phased
        else -2
    )
    builder.messages.begin()
    for position, action in enumerate(row):
        if place != backward:
            builder.out += next(builder.of_copies)
        if _emit_woven(builder, action, position):
            place += len(action.parts)
            continue
        for part in action.parts:
            if place == backward:
                split = _end_phase(builder)
                builder.messages.begin()
                builder.out += next(builder.of_copies)
            builder.messages.before(place)
            builder.act(part)
            place += 1
    if backward == -1:
        split = _end_phase(builder)
    builder.messages.drain()
    return split


def _emit_woven(builder: Builder, action: AnyAction, position: int) -> bool:
    """Emit an action as a weave or by the user's function; False: its parts run one after the
    other.
    """
    how, alone = builder.job.overlap.how, not isinstance(action, Fused)
    if how == "sequential" or (alone and (how != "weave" or builder.job.phased)):
        return False
    if alone and not starts_collectives(builder, action):
        return False
    pieces = woven_pieces(builder, action, position)
    if pieces is None:
        return False
    if how == "function":
        act_jointly(builder, action)
    else:
        builder.emit(action.parts, pieces)
    return True


def _end_phase(builder: Builder) -> int:
    builder.out += next(builder.of_copies)
    builder.messages.next_phase()
    return len(builder.out)


# ---- the end ----
def _emit_loss(builder: Builder) -> None:
    """Send the loss once all of it is computed here.

    The next values that other ranks compute with are sent first: they wait for those.
    """
    job, out = builder.job, builder.out
    if job.scalar_ranks() != [builder.rank]:
        return
    keys = tuple(scalar.key for scalar in job.scalars(builder.rank))
    last = max(
        (n for n, step in enumerate(out) if not set(keys).isdisjoint(step.writes)), default=-1
    )
    if last >= 0 and out[last].program is not None:
        sends = (n for n in range(last + 1, len(out)) if out[n].kind == "SEND")
        out.insert(next(sends, last) + 1, Step("LOSS", reads=keys))


def _emit_sums(builder: Builder) -> None:
    """Sum the gradients of stages that are on several ranks, and of parameters that are tied."""
    job = builder.job
    if not job.training:
        return
    replicated = {
        stage for stage in range(job.stages) if len(job.schedule.placement.ranks_of(stage)) > 1
    }
    tied = {leaf for group in job.tied for leaf in group}
    groups = [
        ((stage, i),) for stage in sorted(replicated) for s, i in job.grad_specs if s == stage
    ]
    for number, group in enumerate([*(g for g in groups if g[0] not in tied), *job.tied]):
        _emit_sum(builder, number, group)


def _emit_sum(builder: Builder, number: int, group: tuple[tuple[int, int], ...]) -> None:
    """Every rank of every member receives the gradients of the others and adds all of them in one
    order.
    """
    job, rank, out = builder.job, builder.rank, builder.out
    places = [(leaf, home) for leaf in group for home in job.schedule.placement.ranks_of(leaf[0])]
    local = [leaf for leaf, home in places if home == rank]
    if not local:
        return
    for leaf in local:
        if grad(*leaf) not in builder.added:
            out.append(Step("ZERO", writes=(grad(*leaf),), avals=(job.grad_specs[leaf],)))
            builder.added.add(grad(*leaf))
    parts: list[Key] = [
        grad(*leaf) if home == rank else (PartialGrad(*leaf, home, number), None)
        for leaf, home in places
    ]
    peers = sorted({home for _, home in places} - {rank})
    arriving = [
        (home, leaf, part)
        for peer in peers
        for (leaf, home), part in zip(places, parts, strict=True)
        if home == peer
    ]
    waits = [
        Step(
            "WAIT",
            writes=(part,),
            peer=peer,
            number=-1 - len(out) - n,
            avals=(job.grad_specs[leaf],),
        )
        for n, (peer, leaf, part) in enumerate(arriving)
    ]
    out += [wait._replace(kind="RECV", writes=()) for wait in waits]
    out += [
        Step("SEND", reads=(grad(*leaf),), peer=peer, avals=(job.grad_specs[leaf],))
        for peer in peers
        for leaf in local
    ]
    out += waits
    total: Key = (GradSum(number), None)
    out.append(Step("SUM", reads=tuple(parts), writes=(total,)))
    out += [Step("SUM", reads=(total,), writes=(grad(*leaf),)) for leaf in local]


def _wanted(builder: Builder) -> Iterator[Key]:
    """The keys whose values are results of the plan."""
    job, rank, top = builder.job, builder.rank, builder.job.stages - 1
    shares = [
        step.share for step in builder.out if step.kind == "REDUCE" and step.share is not None
    ]
    reduced = [(share.stage, leaf) for share in shares for leaf in share.leaves]
    yield from builder.added - {grad(*leaf) for leaf in reduced} | {
        reduced_grad(*leaf) for leaf in reduced
    }
    for keys in builder.state.values():
        yield from keys
    for mb in range(job.schedule.units):
        path, kind = job.schedule.placement.path(mb), job.kind(mb)
        if path[top] == rank:
            if kind.loss is not None:
                names = (
                    kind.loss.ys[:1] if job.each else kind.loss.ys
                )  # the others went to the caller's function
                yield from (builder.key(kind.loss, top + 1, mb, n) for n in names if n is not None)
            elif not job.each:
                yield from outputs_of(kind, mb)
        if path[0] == rank and job.wants_dx:
            yield from input_gradients_of(kind, mb)
        for stage, own in kind.programs.items():
            if own.aux is not None and path[stage] == rank:
                yield builder.key(own, stage, mb, own.aux)
