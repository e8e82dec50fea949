# SPDX-License-Identifier: Apache-2.0
"""``engine="eager"``: the four programs of a stage on autograd, for functions that look at their
data.

    F   runs the function and records its graph          B   one ``torch.autograd.grad`` for
    everything I   from the outputs to the inputs                   W   from the forks of that path
    to the parameters

The function may take another path with each microbatch, but shapes, dtypes and structure of its
results must stay: the plan needs them beforehand (``shape_probe``) and F checks them. Costs over
the trace engine: the function's own Python; about 0.1 ms a transformer block in I to survey the
graph, and as much a linear layer in W. Of a function that looks at its data, no input is known to
be unused, so the gradients of unused inputs are zeros, which are sent. Bytes from F to I and from I
to W are those that the shape probe found. What ``autograd_split`` cannot split is computed in I; so
is everything where the function sets hooks on tensors, which would run twice. Knows no schedules or
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ... import tree
from ...errors import StageError
from ...programs.internals import Ambient, ambient, resolved, versions, without_autocast
from ...programs.program import Held, Program, Programs
from ...programs.signature import LossCall, Result, Signature, entering
from ...programs.wrappers import Remat
from ...stage import Stage
from ...tree import AbstractLeaf, Aval, arriving
from ..explain import sparse_gradient_error
from ..streams import Streams, restore_streams, save_streams
from .autograd_split import Grads, Kept, both, of_inputs, of_weights, survey
from .shape_probe import (
    Groups,
    devices_of,
    facts_of,
    refuse_captured,
    refuse_writes,
    run_recording,
    stored_in_full,
)


def programs_of(
    stage: Stage, signature: Signature, unused: frozenset[int] = frozenset()
) -> Programs:
    """The programs of a stage that runs on autograd; the outputs ``unused`` have no cotangent.

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
            f"stage {stage.label} has compile={stage.compile!r} and engine='eager'; only traced "
            "programs are compiled: "
            "leave compile= out, or call torch.compile inside the function"
        )
    return _Engine(stage, signature, unused).programs()


#: The inputs of a program, which empties it.
Box: TypeAlias = list[Any]


class Tape(NamedTuple):
    """A recorded graph: its ends by cotangent, its leaves by index, and whether the function set
    hooks on tensors.
    """

    ends: Mapping[str, GradientEdge]
    xs: Mapping[int, GradientEdge]
    ps: Mapping[int, GradientEdge]
    hooked: bool


class Replay(NamedTuple):
    """What a stage under remat needs to run once more: its arguments, their versions, and the
    random streams.
    """

    groups: Groups
    random: Streams
    versions: list[list[int]]


class _Engine:
    """One stage's function and what is known of it; its methods are the programs."""

    def __init__(self, stage: Stage, signature: Signature, unused: frozenset[int]):
        self.stage, self.signature = stage, signature
        self.facts = facts_of(stage, signature, unused)
        self.autocast = ambient()
        self.cotangents = tuple(self.facts.outputs.cotangents)
        reached = self.facts.dx
        self.dps = {i: f"dp{i}" for i in signature.params.wanted if self.cotangents}
        self.dxs = {
            i: f"dx{i}"
            for i in signature.x.wanted
            if self.cotangents and (reached is None or i in reached)
        }
        self.dx_avals = {i: stored_in_full((reached or signature.x.avals)[i]) for i in self.dxs}
        self.outputs = replace(self.facts.outputs, y=self.facts.outputs.y.with_avals(Aval.arrived))
        # Without a cotangent F records all the same, to check that the function is as expected,
        # unless all are unused.
        wanted = bool(signature.params.wanted or signature.x.wanted)
        self.trained = wanted and bool(self.cotangents or not unused)
        self.slots = signature.slots
        self.devices = devices_of(signature)
        self.extra = isinstance(stage.fn, LossCall) and stage.fn.extra
        self.check_captured = _until_passed(
            lambda ends, xs, ps: refuse_captured(
                stage, survey(list(ends.values()), xs.values(), ps).foreign
            )
        )

    # ---- F ----
    def forward(self, box: Box) -> tuple[object, ...]:
        """F: outputs, auxiliary scalar, new state, and the tape."""
        groups = [argument.map(lambda aval: None) for argument in self.signature]
        for (g, i), value in zip(self.slots, box, strict=True):
            groups[g][i] = value
        box.clear()
        if isinstance(self.stage.fn, Remat) and self.trained:
            replay = Replay(groups, save_streams(self.devices), list(map(versions, groups)))
            # Recorded, since torch chooses products by what requires a gradient; nothing is saved.
            with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                return (*self.record(groups, grad=True)[0], replay)
        outs, tape = self.record(groups, grad=self.trained)
        return (*outs, tape) if self.trained else outs

    def _tape(self, held: Tape | Replay) -> Tape:
        """The recorded graph; of a stage under remat, recorded now, with the random draws of F."""
        if isinstance(held, Tape):
            return held
        if list(map(versions, held.groups)) != held.versions:
            raise StageError(
                f"an argument of stage {self.stage.label}, which runs again in its backward, was "
                "changed in place "
                "since the forward; change a copy"
            )
        with ExitStack() as stack:
            stack.callback(restore_streams, save_streams(self.devices))
            restore_streams(held.random)
            return self.record(held.groups, grad=True)[1]

    @torch.inference_mode(False)
    def record(
        self, groups: Sequence[Sequence[object]], grad: bool
    ) -> tuple[tuple[object, ...], Tape]:
        """Outputs that are not inputs, auxiliary scalar and new state, and the graph; ``grad``:
        whether to record.
        """
        before = list(map(versions, groups[:3]))  # not of the state, which is copied
        arguments = [
            [_leaf(value, leaf, grad) for value, leaf in zip(group, abstract.leaves, strict=True)]
            for group, abstract in zip(groups[:3], self.signature, strict=False)
        ]
        x = entering(self.signature.x, arguments[1])
        state = [t.clone() if isinstance(t, torch.Tensor) else t for t in groups[3]]
        hooks = RemovableHandle.next_id
        with _under(self.autocast):
            given = [arguments[0], x, arguments[2], state]
            result = run_recording(self.stage, self.signature, given, self.facts.outputs.copies)
        hooked = RemovableHandle.next_id != hooks
        after = map(versions, groups[:3])
        changed = [old != new for old, new in zip(before, after, strict=True)]
        refuse_writes(changed)
        if changed[1]:
            raise StageError(
                f"stage {self.stage.label} wrote into its input in place, which it did not do when "
                "the plan was made; write x = x.clone() first"
            )
        ys, new_state = self._check(result, x)
        live: dict[str, Any] = {f"dy{j}": ys[j] for j in self.facts.outputs.y.avals}
        live["daux"] = result.aux
        ends = {
            name: get_gradient_edge(live[name])
            for name in self.cotangents
            if live[name].requires_grad
        }
        ps, xs = (
            {i: get_gradient_edge(argument[i]) for i in abstract.wanted} if grad else {}
            for argument, abstract in zip(arguments, self.signature[:2], strict=False)
        )
        if ends:
            self.check_captured(ends, xs, ps)
        callers = _storages(groups)
        y = self.outputs.y.avals
        others = callers | set(map(tree.address, (ys[j] for j in self.facts.captured)))
        fresh = [_as_planned(ys[j].detach(), y[j], others) for j in y if j not in self.facts.passed]
        if self.outputs.aux is not None and result.aux is not None:
            fresh.append(_as_planned(result.aux.detach(), self.outputs.aux, callers))
        extra = [result.extra] if self.extra else []
        return (*fresh, *(t.detach() for t in new_state), *extra), Tape(ends, xs, ps, hooked)

    def _check(self, result: Result, xs: Sequence[object]) -> tuple[list[Any], list[Any]]:
        """The leaves of output and state, which must be as the plan expects them."""
        expected = self.facts.outputs
        ys, spec = tree.flatten(result.y)
        self._expect(spec == expected.y.spec, "another structure", spec, expected.y.spec)
        for j, (value, leaf) in enumerate(zip(ys, expected.y.leaves, strict=True)):
            name = f"output {j}"
            if not isinstance(leaf, Aval):
                same = value is leaf.value or (type(value) is leaf.type and value == leaf.value)
                self._expect(same, name, value, leaf)
                continue
            self._expect(_fits(value, leaf), name, value, leaf)
            steps = zip(value.stride(), leaf.stride, strict=True) if 0 in leaf.stride else ()
            expanded = all(planned or not step for step, planned in steps)
            self._expect(expanded, name, "a tensor stored in full", "an expanded one")
            grad = leaf.grad or not value.requires_grad
            self._expect(grad, name, "one that carries a gradient", "none that does")
        for j, i in self.facts.passed.items():
            self._expect(
                ys[j] is xs[i], f"output {j}", "a new tensor", f"its input {i}, unchanged,"
            )
        for j, i in expected.y.repeats:
            self._expect(ys[j] is ys[i], f"output {j}", "another tensor", f"output {i}")
        if expected.aux is not None:
            fits = _fits(result.aux, expected.aux)
            self._expect(fits, "its auxiliary loss", result.aux, expected.aux)
        if expected.state is None:
            return ys, []
        states, spec = tree.flatten(result.state)
        fits = spec == expected.state.spec and all(map(_fits, states, expected.state.leaves))
        self._expect(fits, "its state", states, expected.state)
        return ys, states

    def _expect(self, fits: bool, what: str, value: object, expected: object) -> None:
        if fits:
            return
        if isinstance(value, (torch.Tensor, list)):
            value = tree.describe(value if isinstance(value, list) else [value])
        raise StageError(
            f"stage {self.stage.label} returned {what} otherwise than the plan was made for: "
            f"{value}, where {expected} was expected. Shapes, dtypes, structure and numbers that "
            "leave a stage may not depend on data; if fpipe found out the wrong ones, declare the "
            "right ones: fpipe.Stage(fn, like=lambda p, x: x)"
        )

    # ---- B, I and W ----
    def _open(
        self, box: Box
    ) -> tuple[Tape, list[tuple[GradientEdge, torch.Tensor]], Sequence[torch.Tensor]]:
        """The tape, its ends with their cotangents, and sums to add gradients into: the box has
        what F returned last, the cotangents, and the sums.
        """
        held, *rest = box
        box.clear()
        tape = self._tape(held)
        cotangents = zip(self.cotangents, rest, strict=False)
        return (
            tape,
            [(tape.ends[n], dy) for n, dy in cotangents if n in tape.ends],
            rest[len(self.cotangents) :],
        )

    def backward(self, box: Box) -> tuple[object, ...]:
        """B: input gradients, then parameter gradients, or the former alone where the latter are
        added into others.
        """
        tape, ends, into = self._open(box)
        dxs, dps = both(ends, tape.xs, tape.ps)
        del tape, ends
        return (*self._input_grads(dxs), *self._weight_grads(dps, into))

    def backward_input(self, box: Box) -> tuple[object, ...]:
        """I: input gradients, and what W needs."""
        tape, ends, _ = self._open(box)
        seen = survey([edge for edge, _ in ends], tape.xs.values(), tape.ps, whole=tape.hooked)
        refuse_captured(self.stage, seen.foreign)
        dxs, kept = of_inputs(ends, tape.xs, tape.ps, seen)
        return (*self._input_grads(dxs), kept) if self.dps else self._input_grads(dxs)

    def backward_weight(self, box: Box) -> tuple[object, ...]:
        """W: parameter gradients, or nothing where they are added into others."""
        kept: Kept
        kept, *into = box
        box.clear()
        return self._weight_grads(of_weights(kept), into)

    def _input_grads(self, dxs: Grads) -> tuple[torch.Tensor, ...]:
        for i, dx in dxs.items():
            planned = dx is None or i in self.dxs
            self._expect(planned, f"the gradient of its input {i}", "one that is not None", "None")
        gradients = ((aval, dxs[i]) for i, aval in self.dx_avals.items())
        return tuple(
            _zeros(aval) if dx is None else _as_planned(dx, aval) for aval, dx in gradients
        )

    def _weight_grads(self, dps: Grads, into: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The gradients, or none once each is added into its sum; an unused parameter adds
        nothing.
        """
        for dp in dps.values():
            if dp is not None and dp.layout is not torch.strided:
                raise sparse_gradient_error(self.stage.label, dp.shape)
        if not into:
            gradients = ((self.signature.params.avals[i], dps[i]) for i in self.dps)
            return tuple(
                _expanded_zeros(aval) if dp is None else resolved(dp) for aval, dp in gradients
            )
        for index, total in zip(self.dps, into, strict=True):
            gradient = dps.pop(index)
            if gradient is not None:
                total.add_(gradient)
        return ()

    # ---- all four ----
    def programs(self) -> Programs:
        """The programs with their names."""
        signature, facts, outputs = self.signature, self.facts, self.facts.outputs
        dxs = tuple(self.dxs.values())
        dps = tuple(self.dps.values())
        computed = {f"y{j}": a for j, a in outputs.y.avals.items() if j not in facts.passed}
        ys = {j: f"x{facts.passed[j]}" if j in facts.passed else f"y{j}" for j in outputs.y.avals}
        state = {} if outputs.state is None else outputs.state.avals
        states = {f"s{i}": aval for i, aval in state.items()}
        aux = "aux" if outputs.aux is not None else None
        extra = "extra" if self.extra else None
        held = ("ctx",) if self.trained else ()
        kept = ("kept",) if self.dps else ()
        back = (*held, *self.cotangents)
        results = filter(None, (*computed, aux, *states, extra, *held))
        f = self._program("F", self.forward, signature.names, results)
        b = self._program("B", self.backward if self.trained else _nothing, back, [*dxs, *dps])
        if dxs:
            i = self._program("I", self.backward_input, back, [*dxs, *kept])
            w = self._program("W", self.backward_weight if dps else _nothing, kept, dps)
        else:  # without input gradients W is the whole backward
            i = self._program("I", _nothing, (), ())
            w = self._program("W", b.run, back, dps)
            kept = back
        dx_avals = {name: self.dx_avals[i] for i, name in self.dxs.items()}
        dp_avals = {name: signature.params.avals[i] for i, name in self.dps.items()}
        avals = computed | dx_avals | states | dp_avals
        sizes = {name: aval.nbytes for name, aval in avals.items()}
        sizes |= {"ctx": facts.saved, "kept": facts.kept}
        return Programs(
            f,
            b,
            i,
            w,
            counts=signature.counts,
            outputs=self.outputs,
            ys=tuple(map(ys.get, range(len(outputs.y.leaves)))),
            aux=aux,
            new_state=tuple(states),
            dps=tuple(map(self.dps.get, range(signature.counts[0]))),
            dxs=tuple(map(self.dxs.get, range(signature.counts[1]))),
            saved=held,
            kept=kept,
            grad_avals=dx_avals,
            memory={
                name: Held(name, nbytes) for name, nbytes in sizes.items() if nbytes is not None
            },
            eager=True,
            extra=extra,
            label=self.stage.label,
            during=self._during(sum(sizes[name] or 0 for name in dps)),
        )

    def _during(self, gradients: int) -> dict[str, int]:
        """The most bytes that each program holds beyond those before, as far as they are known.

        I leaves the gradients of parameters to W, which computes all before it adds them up. W
        frees what I kept in parts; half of that is taken as free when most is held.
        """
        during = self.facts.during
        both = during.get("B", 0)
        weights = max(0, gradients - (self.facts.kept or 0) // 2)
        return {"F": during.get("F", 0), "B": both, "I": max(0, both - gradients), "W": weights}

    def _program(
        self,
        letter: str,
        run: Callable[[Box], tuple[object, ...]],
        inputs: Iterable[str],
        outputs: Iterable[str],
    ) -> Program:
        inputs, outputs = tuple(inputs), tuple(outputs)
        label = self.stage.label
        text = f"# {letter} of {label}, on autograd: ({', '.join(inputs)}) -> "
        text += f"({', '.join(outputs)})\n"
        # a backward may draw too: one under remat repeats the draws of F
        random = run is not _nothing
        stage = f"{label} {self.signature}"
        return Program(letter, text, run, inputs, outputs, random=random, stage=stage)


@contextmanager
def _under(state: Ambient) -> Iterator[None]:
    """Switch autocast to a state returned by ``ambient()``."""
    with without_autocast(), ExitStack() as stack:
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype))
        # inside the caller's autocast it would hold every microbatch's casts
        stack.callback(torch.clear_autocast_cache)
        yield


def _until_passed(check: Callable[..., None]) -> Callable[..., None]:
    """A check that is not repeated once it has passed."""
    pending = [check]

    def run(*args: object) -> None:
        for each in pending:
            each(*args)
        pending.clear()

    return run


def _leaf(value: object, leaf: AbstractLeaf, grad: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = (
        value.clone() if value.is_inference() else value.detach()
    )  # a graph holds no inference tensors
    return tensor.requires_grad_() if grad and isinstance(leaf, Aval) and leaf.grad else tensor


def _storages(groups: Sequence[Sequence[object]]) -> set[int]:
    """Addresses of the caller's memory: parameters, side inputs, state."""
    plain = (torch.Tensor, torch.nn.Parameter)
    leaves = (leaf for place in (0, 2, 3) for leaf in groups[place])
    return {
        leaf.untyped_storage().data_ptr()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and type(leaf) in plain
    }


def _as_planned(tensor: torch.Tensor, planned: Aval, callers: Container[int] = ()) -> torch.Tensor:
    """A result with numbers for lazy flags and the strides with which it arrives on another rank.

    It is copied where it has other strides or is the caller's memory. Of an expanded axis one
    element is stored.
    """
    tensor = resolved(tensor)
    stride = planned.stride
    mine = not callers or tensor.untyped_storage().data_ptr() not in callers or not tensor.numel()
    if mine and (tensor.stride() == stride or arriving(tensor.shape, tensor.stride()) == stride):
        return tensor
    if planned.kind is not None:
        return tensor.clone(memory_format=torch.contiguous_format)
    stored = tensor
    for axis, step in enumerate(stride):
        if not step:
            stored = stored.narrow(axis, 0, 1)
    memory = torch.empty_strided(stored.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return memory.copy_(stored).as_strided(tensor.shape, stride)


def _fits(value: object, leaf: AbstractLeaf) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and isinstance(leaf, Aval)
        and (tuple(value.shape), value.dtype, value.device) == (leaf.shape, leaf.dtype, leaf.device)
    )


def _zeros(aval: Aval) -> torch.Tensor:
    return aval.build(lambda a: torch.zeros(a.shape, dtype=a.dtype, device=a.device))


def _expanded_zeros(aval: Aval) -> torch.Tensor:
    """Zeros that take no memory, into which nothing is written."""
    return aval.build(lambda a: torch.zeros((), dtype=a.dtype, device=a.device).expand(a.shape))


def _nothing(box: Box) -> tuple[object, ...]:
    box.clear()
    return ()
