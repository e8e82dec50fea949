# SPDX-License-Identifier: Apache-2.0
"""``engine="eager"``: the four programs of a stage on autograd, for functions that look at their data.

    F   runs the function and records its graph          B   one ``torch.autograd.grad`` for everything
    I   from the outputs to the inputs                   W   from the forks of that path to the parameters

The function may take another path with each microbatch, but shapes, dtypes and structure of its results must stay: the
plan needs them beforehand (``shape_probe``) and F checks them (``recording``). Costs over the trace engine: the
function's own Python; about 0.1 ms a transformer block in I to survey the graph, and as much a linear layer in W; no
leaf is known to be unused, so all are sent, and unused inputs get zeros. Bytes from F to I and from I to W are those
that the shape probe found. What ``autograd_split`` cannot split is computed in I; so is everything where the function
sets hooks on tensors, which would run twice. Knows no schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ...errors import StageError
from ...stage import Remat, Stage
from ...tree import AbstractTree, Aval, arriving
from ..autocast import ambient
from ..graphs import Held
from ..internals import Streams, restore_streams, save_streams
from ..program import Program
from ..signature import Signature
from ..stage_programs import Programs
from .autograd_split import Grads, Kept, both, of_inputs, of_weights, survey
from .recording import Recorder, Tape, refuse_captured, until_passed, without_gaps
from .shape_probe import StageFacts, facts_of


def eager_programs(stage: Stage, signature: Signature) -> Programs:
    """The programs of a stage that runs on autograd.

    >>> def clipped(p, x):
    ...     return x @ p if x.norm().item() > 1 else x * p.sum()
    >>> from fpipe import trace
    >>> programs = trace(Stage(clipped, engine="eager"), torch.eye(2), torch.ones(1, 2))
    >>> y, saved = programs.forward(torch.eye(2), torch.ones(1, 2))
    >>> programs.backward(saved, torch.ones(1, 2))
    (tensor([[1., 1.]]), tensor([[1., 1.], [1., 1.]]))
    """
    if stage.compile:
        raise StageError(
            f"stage {stage.label} has compile={stage.compile!r} and engine='eager'; only traced programs are compiled: "
            "leave compile= out, or call torch.compile inside the function"
        )
    facts = facts_of(stage, signature)
    check = lambda ends, xs, ps: refuse_captured(stage, survey(list(ends.values()), xs.values(), ps).foreign)
    recorder = Recorder(stage, signature, facts.outputs, facts.passed, ambient(), until_passed(check))
    return _Engine(recorder, facts).programs()


@dataclass(frozen=True)
class Replay:
    """What a stage under remat needs to run once more: its arguments and the states of the random streams."""

    groups: list[list[Any]]
    random: Streams


@dataclass(frozen=True, eq=False)
class _Engine:
    """One stage's function and what is known of it; its methods are the programs."""

    recorder: Recorder
    facts: StageFacts

    @property
    def stage(self) -> Stage:
        return self.recorder.stage

    @property
    def signature(self) -> Signature:
        return self.recorder.signature

    @cached_property
    def dps(self) -> dict[int, str]:
        return {i: f"dp{i}" for i in self.signature.params.wanted}

    @cached_property
    def dxs(self) -> dict[int, str]:
        return {i: f"dx{i}" for i in self.signature.x.wanted}

    @cached_property
    def trained(self) -> bool:
        return bool(self.dps or self.dxs)

    @cached_property
    def cotangents(self) -> tuple[str, ...]:
        return tuple(self.facts.outputs.cotangents)

    @cached_property
    def slots(self) -> list[tuple[int, int]]:
        """Argument and leaf of each tensor in the box of F."""
        return [(g, i) for g, argument in enumerate(self.signature) for i in argument.avals]

    @cached_property
    def devices(self) -> list[torch.device]:
        return sorted({a.device for argument in self.signature for a in argument.avals.values()}, key=str)

    # ---- F ------------------------------------------------------------------------------------------------------
    def forward(self, box: list[Any]) -> tuple[Any, ...]:
        """F: outputs, auxiliary scalar, new state, and the tape."""
        groups = [argument.map(lambda aval: None) for argument in self.signature]
        for (g, i), value in zip(self.slots, box, strict=True):
            groups[g][i] = value
        box.clear()
        if isinstance(self.stage.fn, Remat) and self.trained:
            replay = Replay([list(group) for group in groups], save_streams(self.devices))
            with torch.no_grad():
                outs, _ = self.recorder.record(groups, grad=False)
            return (*outs, replay)
        outs, tape = self.recorder.record(groups, grad=self.trained)
        return (*outs, tape) if self.trained else outs

    def _tape(self, held: Tape | Replay) -> Tape:
        """The recorded graph; of a stage under remat, recorded now, with the random draws of F."""
        if isinstance(held, Tape):
            return held
        before = save_streams(self.devices)
        restore_streams(held.random)
        try:
            return self.recorder.record(held.groups, grad=True)[1]
        finally:
            restore_streams(before)

    # ---- B, I and W ---------------------------------------------------------------------------------------------
    def _open(self, box: list[Any]) -> tuple[Tape, list[tuple[GradientEdge, torch.Tensor]]]:
        """The tape, and its ends with their cotangents; the box begins with what F returned last, and cotangents."""
        held, *cotangents = box[: 1 + len(self.cotangents)]
        box.clear()
        tape = self._tape(held)
        return tape, [(tape.ends[n], dy) for n, dy in zip(self.cotangents, cotangents, strict=True) if n in tape.ends]

    def backward(self, box: list[Any]) -> tuple[Any, ...]:
        """B: input gradients, then parameter gradients, or the former alone where the latter are added into others."""
        into = box[1 + len(self.cotangents) :]
        tape, ends = self._open(box)
        dxs, dps = both(ends, tape.xs, tape.ps)
        del tape, ends
        return (*self._input_grads(dxs), *self._weight_grads(dps, into))

    def backward_input(self, box: list[Any]) -> tuple[Any, ...]:
        """I: input gradients, and what W needs."""
        tape, ends = self._open(box)
        seen = survey([edge for edge, _ in ends], tape.xs.values(), tape.ps, whole=tape.hooked)
        refuse_captured(self.stage, seen.foreign)
        dxs, kept = of_inputs(ends, tape.xs, tape.ps, seen)
        return (*self._input_grads(dxs), kept) if self.dps else self._input_grads(dxs)

    def backward_weight(self, box: list[Any]) -> tuple[Any, ...]:
        """W: parameter gradients, or nothing where they are added into others."""
        kept: Kept = box[0]
        into = box[1:]
        box.clear()
        return self._weight_grads(of_weights(kept), into)

    def _input_grads(self, dxs: Grads) -> tuple[torch.Tensor, ...]:
        gradients = ((self.signature.x.avals[i], dxs[i]) for i in self.dxs)
        return tuple(_zeros(aval) if dx is None else without_gaps(dx) for aval, dx in gradients)

    def _weight_grads(self, dps: Grads, into: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The gradients, or none once each is added into its sum; an unused parameter adds nothing."""
        if not into:
            gradients = ((self.signature.params.avals[i], dps[i]) for i in self.dps)
            return tuple(_expanded_zeros(aval) if dp is None else dp for aval, dp in gradients)
        for index, total in zip(self.dps, into, strict=True):
            gradient = dps.pop(index)
            if gradient is not None:
                total.add_(gradient)
        return ()

    # ---- all four -----------------------------------------------------------------------------------------------
    def programs(self) -> Programs:
        """The programs with their names."""
        facts, outputs = self.facts, self.facts.outputs
        dxs, dps = tuple(self.dxs.values()), tuple(self.dps.values())
        passed = {j: f"x{i}" for j, i in facts.passed.items()}
        ys = {j: passed.get(j, f"y{j}") for j in outputs.y.avals}
        state = tuple(f"s{i}" for i in (() if outputs.state is None else outputs.state.avals))
        held, kept = ("ctx",) if self.trained else (), ("kept",) if self.dps else ()
        back = (*held, *self.cotangents)
        results = (*(ys[j] for j in ys if j not in passed), *(["aux"] if outputs.aux else []), *state, *held)
        f = self._program("F", self.forward, [f"{'pxkt'[g]}{i}" for g, i in self.slots], results)
        b = self._program("B", self.backward if self.trained else _nothing, back, [*dxs, *dps])
        if dxs:
            i = self._program("I", self.backward_input, back, [*dxs, *kept])
            w = self._program("W", self.backward_weight if dps else _nothing, kept, dps)
        else:  # without input gradients W is the whole backward
            i, w, kept = self._program("I", _nothing, (), ()), self._program("W", b.run, back, dps), back
        dx_avals = {name: facts.dx.get(i, self.signature.x.avals[i]) for i, name in self.dxs.items()}
        counts = tuple(len(argument.leaves) for argument in self.signature)
        return Programs(
            f=f, b=b, i=i, w=w,
            counts=counts,
            outputs=replace(outputs, y=_arriving_tree(outputs.y)),
            ys=tuple(map(ys.get, range(len(outputs.y.leaves)))),
            aux="aux" if outputs.aux is not None else None,
            new_state=state,
            dps=tuple(map(self.dps.get, range(counts[0]))),
            dxs=tuple(map(self.dxs.get, range(counts[1]))),
            saved=held, kept=kept,
            grad_avals={name: _arriving(aval) for name, aval in dx_avals.items()},
            memory=self._memory({ys[j]: aval for j, aval in outputs.y.avals.items() if j not in passed} | dx_avals),
            eager=True,
            label=self.stage.label,
        )  # fmt: skip

    def _program(
        self, letter: str, run: Callable[[list[Any]], tuple[Any, ...]], inputs: Sequence[str], outputs: Sequence[str]
    ) -> Program:
        text = f"# {letter} of {self.stage.label}, on autograd: ({', '.join(inputs)}) -> ({', '.join(outputs)})\n"
        stage = f"{self.stage.label} {self.signature}"
        return Program(letter, text, run, tuple(inputs), tuple(outputs), random=letter == "F", stage=stage)

    def _memory(self, avals: Mapping[str, Aval]) -> dict[str, Held]:
        state = self.facts.outputs.state
        known = {**avals, **({} if state is None else {f"s{i}": aval for i, aval in state.avals.items()})}
        known |= {name: self.signature.params.avals[i] for i, name in self.dps.items()}
        memory = {name: Held(name, aval.nbytes) for name, aval in known.items()}
        for name, nbytes in (("ctx", self.facts.saved), ("kept", self.facts.kept)):
            if nbytes is not None:
                memory[name] = Held(name, nbytes)
        return memory


def _arriving(aval: Aval) -> Aval:
    return aval._replace(stride=arriving(aval.shape, aval.stride))


def _arriving_tree(y: AbstractTree) -> AbstractTree:
    return replace(y, leaves=tuple(_arriving(leaf) if isinstance(leaf, Aval) else leaf for leaf in y.leaves))


def _zeros(aval: Aval) -> torch.Tensor:
    return aval.build(lambda a: torch.zeros(a.shape, dtype=a.dtype, device=a.device))


def _expanded_zeros(aval: Aval) -> torch.Tensor:
    """Zeros that take no memory, into which nothing is written."""
    return aval.build(lambda a: torch.zeros((), dtype=a.dtype, device=a.device).expand(a.shape))


def _nothing(box: list[Any]) -> tuple[Any, ...]:
    box.clear()
    return ()
