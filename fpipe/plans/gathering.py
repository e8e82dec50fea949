# SPDX-License-Identifier: Apache-2.0
"""What the copies of a pipeline do together, put into a plan: REDUCE, UNSHARD, RESHARD and the waits for them.

Gradients of a stage leave as soon as the last of them is there. Parameters that come in parts are gathered one action
ahead of their first use, and let go of after their last; where only so many stages may be whole at once, the one that
is needed again latest goes first, since the row says what comes. Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Callable

from ..programs.stage_programs import Programs
from ..schedules.actions import Action
from .keys import Grad, Key, grad, inputs, param, reduced_grad, whole_param
from .plan import LoweringInput, Step
from .sharding import Share


class Gathering:
    """Emits the steps of one rank into ``out``; does nothing where there are no copies."""

    def __init__(self, job: LoweringInput, rank: int, out: list[Step], added: set[Key]):
        self.job, self.out, self.added = job, out, added
        self.row = job.schedule[rank]
        self.copies = job.copies
        self.cut = job.copies is not None and job.copies.cut
        self.given: set[Key] = set()  # gradients that are reduced, and what they become
        self.reduced: set[Key] = set()
        self._shared = _shared(job)
        self._asked: list[Step] = []
        self._number = 0
        self._whole: set[int] = set()
        self._coming: dict[int, Step] = {}
        self._at = -1
        self._uses = [tuple(dict.fromkeys(a.stage for a in entry.parts if self._reads(a))) for entry in self.row]
        self._last = self._last_gradients() if job.copies is not None and job.training else {}
        self._phase = next((i for i, e in enumerate(self.row) if any(a.op != "F" for a in e.parts)), len(self.row))
        bound = job.copies.unsharded if job.copies is not None and job.copies.zero == 3 else job.stages
        self._bound = max([bound, *map(len, self._uses)])

    # ---- what the row says --------------------------------------------------------------------------------------
    def _programs(self, action: Action) -> Programs:
        return self.job.kinds[self.job.kind_of[action.microbatch]].programs[action.stage]

    def _reads(self, action: Action) -> bool:
        """Whether an action reads parameters that come in parts."""
        if not self.cut:
            return False
        own = self._programs(action)
        read = {"F": own.f, "B": own.b, "I": own.i, "W": own.w}[action.op].inputs
        leaves = {leaf for bucket in self.job.layouts[action.stage].buckets for leaf in bucket.leaves}
        return any(role == "param" and leaf in leaves for role, leaf in (inputs(own).get(n, ("", 0)) for n in read))

    def _last_gradients(self) -> dict[int, int]:
        """Where in the row each stage makes its last gradients."""
        return {a.stage: place for place, entry in enumerate(self.row) for a in entry.parts if a.op in "BW"}

    def _next_use(self, stage: int, after: int) -> int:
        """Where a stage's parameters are read next, within this phase; past the end where they are not."""
        end = self._phase if self.job.phased and after < self._phase else len(self.row)
        return next((place for place in range(after, end) if stage in self._uses[place]), len(self.row))

    # ---- steps --------------------------------------------------------------------------------------------------
    def key(self, stage: int, leaf: int) -> Key:
        """Under which key a program finds a parameter."""
        cut = self.cut and self.job.layouts[stage].shapes[leaf] is not None
        return whole_param(stage, leaf) if cut else param(stage, leaf)

    def at(self, position: int) -> None:
        """Before a position of the row: end the one before it, have what this one reads, ask for what the next does."""
        if self.copies is None or position == self._at:
            return
        self._end(self._at)
        self._at = position
        if not self.cut:
            return
        for stage in self._uses[position]:
            if stage not in self._whole and stage not in self._coming:
                self._unshard(stage, position, self._uses[position])
        for stage in self._uses[position]:
            self._have(stage)
        end = self._phase if self.job.phased and position < self._phase else len(self.row)
        ahead = next((place for place in range(position + 1, end) if self._uses[place]), None)
        for stage in self._uses[ahead] if ahead is not None else ():
            if stage not in self._whole and stage not in self._coming:
                self._unshard(stage, position, (*self._uses[position], *self._uses[ahead or 0]))

    def rest(self) -> None:
        """Between phases nothing is under way, and nothing is whole."""
        self._end(self._at)
        for stage in sorted(self._whole):
            self._reshard(stage)

    def _end(self, position: int) -> None:
        if position < 0:
            return
        for stage in self._uses[position]:
            if stage in self._whole and self._next_use(stage, position + 1) == len(self.row):
                self._reshard(stage)
        for stage, place in self._last.items():
            if place == position and stage not in self._shared:
                self._reduce(stage)

    def _unshard(self, stage: int, position: int, wanted: tuple[int, ...]) -> None:
        """Gather a stage, if there is room or somebody makes it."""
        while len(self._whole) + len(self._coming) >= self._bound:
            others = [s for s in self._whole if s not in wanted]
            if not others:
                return
            self._reshard(max(others, key=lambda s: self._next_use(s, position)))
        share = self._parameters(stage)
        step = self._begin("UNSHARD", share, lambda leaf: param(stage, leaf))
        keys = tuple(whole_param(stage, leaf) for leaf in share.leaves)
        self._coming[stage] = Step("WAIT", writes=keys, number=step.number, share=share)

    def _have(self, stage: int) -> None:
        step = self._coming.pop(stage, None)
        if step is not None:
            self.out.append(step)
            self._whole.add(stage)

    def _reshard(self, stage: int) -> None:
        share = self._parameters(stage)
        self.out.append(Step("RESHARD", reads=tuple(whole_param(stage, leaf) for leaf in share.leaves), share=share))
        self._whole.remove(stage)

    def _parameters(self, stage: int) -> Share:
        layout = self.job.layouts[stage]
        assert self.copies is not None
        return Share(stage, layout, tuple(leaf for bucket in layout.buckets for leaf in bucket.leaves), self.copies)

    def _begin(self, kind: str, share: Share, key: Callable[[int], Key]) -> Step:
        step = Step(kind, reads=tuple(map(key, share.leaves)), number=self._number, share=share)  # type: ignore[arg-type]
        self._number += 1
        self.out.append(step)
        return step

    def _reduce(self, stage: int) -> None:
        layout = self.job.layouts[stage]
        made = [leaf for bucket in layout.buckets for leaf in bucket.leaves if grad(stage, leaf) in self.added]
        if made:
            assert self.copies is not None
            share = Share(stage, layout, tuple(made), self.copies, gradients=True, wide=self.job.wide)
            step = self._begin("REDUCE", share, lambda leaf: grad(stage, leaf))
            keys = tuple(reduced_grad(stage, leaf) for leaf in made)
            self._asked.append(Step("WAIT", writes=keys, number=step.number, share=share))

    def finish(self) -> None:
        """The end of the row: reduce what had to be summed over stages first, and have every gradient."""
        if self.copies is None:
            return
        self._end(self._at)
        for stage in sorted(self._whole):
            self._reshard(stage)
        for stage in sorted(self._shared & {source.stage for source, _ in self.added if isinstance(source, Grad)}):
            self._reduce(stage)
        for step in self._asked:
            self.out.append(step)
            self.reduced.update(key for key in step.writes if key is not None)
            if step.share is not None:
                self.given.update(grad(step.share.stage, leaf) for leaf in step.share.leaves)


def _shared(job: LoweringInput) -> set[int]:
    """Stages whose gradients are summed over ranks or stages before they are whole."""
    placement = job.schedule.placement
    tied = {stage for group in job.tied for stage, _ in group}
    return tied | {stage for stage in range(job.stages) if len(placement.ranks_of(stage)) > 1}
