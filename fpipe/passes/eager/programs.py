# SPDX-License-Identifier: Apache-2.0
"""``engine="eager"``: the four programs of a stage on autograd, for functions that look at their
data.

* F runs the function and records its graph.
* B is one ``torch.autograd.grad`` for all gradients.
* I goes from the outputs to the inputs.
* W goes from the forks of that path to the parameters.

The function may take another path with each microbatch. Shapes, dtypes and structure of its results
must stay: the plan needs them beforehand (``shape_probe``), and F checks them. Beside the trace
engine it costs the function's own Python, about 0.1 ms a transformer block in I to survey the
graph, and as much a linear layer in W. No input of a function that looks at its data is known to be
unused, so the gradients of unused inputs are zeros, which are sent. The shape probe found the bytes
that are held from F to I and from I to W. I computes what ``autograd_split`` cannot split, and
everything where the function sets hooks on tensors, which would run twice. Knows no schedules or
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ... import tree
from ...errors import StageError
from ...programs.internals import Ambient, ambient, without_autocast
from ...programs.operations import Held
from ...programs.program import Program, Programs
from ...programs.signature import LossCall, Result, Signature, entering, outputs_from
from ...programs.tensor_state import resolved, versions
from ...programs.wrappers import Remat
from ...stage import Stage
from ...tree import AbstractLeaf, AbstractTree, Aval, arriving
from ..explain import sparse_gradient_error
from ..streams import Streams, restore_streams, save_streams
from .autograd_split import (
    Arrived,
    Edges,
    Grads,
    Survey,
    all_gradients,
    leaf_edge,
    of_inputs,
    of_weights,
    survey,
)
from .shape_probe import (
    Groups,
    devices_of,
    facts_of,
    refuse_captured,
    run_recording,
    stored_in_full,
    wrote_into_input,
)

#: What a program returns.
Results: TypeAlias = tuple[object, ...]


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
            "programs are compiled: leave compile= out, or call torch.compile inside the function"
        )
    return _Engine(stage, signature, unused).programs()


class Tape(NamedTuple):
    """A recorded graph: its ends by cotangent, its leaves by index, whether the function set hooks
    on tensors, and addresses of inputs, of which it may create leaves.
    """

    ends: Mapping[str, GradientEdge]
    xs: Edges
    ps: Edges
    hooked: bool
    inputs: Container[int]


class Replay(NamedTuple):
    """What a stage under remat needs to run once more: its arguments, their versions, and the
    random streams.
    """

    groups: Groups
    random: Streams
    versions: list[list[int]]


class _Engine:
    """One stage's function and what is known of it; its methods are the programs.

    A program empties the list of its inputs.
    """

    def __init__(self, stage: Stage, signature: Signature, unused: frozenset[int]):
        self.stage = stage
        self.signature = signature
        self.facts = facts = facts_of(stage, signature, unused)
        self.autocast = ambient()
        self.devices = devices_of(signature)
        self.outputs = replace(facts.outputs, y=facts.outputs.y.with_avals(Aval.arrived))
        self.cotangents = tuple(facts.outputs.cotangents)
        # Without a cotangent F records all the same, to check that the function is as expected,
        # unless all are unused.
        wanted = bool(signature.params.wanted or signature.x.wanted)
        self.trained = wanted and bool(self.cotangents or not unused)
        reached = signature.x.avals if facts.dx is None else facts.dx
        self.dxs: dict[int, Aval] = {}
        self.dps: dict[int, Aval] = {}
        if self.cotangents:
            inputs = (i for i in signature.x.wanted if i in reached)
            self.dxs = {i: stored_in_full(reached[i]) for i in inputs}
            self.dps = {i: signature.params.avals[i] for i in signature.params.wanted}
        self.extra = isinstance(stage.fn, LossCall) and stage.fn.extra
        self.check_captured = _until_passed(self._refuse_captured)

    # ---- F ----
    def forward(self, inputs: list[Any]) -> Results:
        """F: outputs, auxiliary scalar, new state, and the tape."""
        following = iter(inputs)
        groups = [argument.map(lambda _: next(following)) for argument in self.signature]
        inputs.clear()
        if isinstance(self.stage.fn, Remat) and self.trained:
            replay = Replay(groups, save_streams(self.devices), list(map(versions, groups)))
            # Recorded, since torch chooses products by what requires a gradient.
            return (*self.record(groups, grad=True)[0], replay)
        results, tape = self.record(groups, grad=self.trained)
        if self.trained:
            return (*results, tape)
        return results

    def _tape(self, held: Tape | Replay) -> Tape:
        """The recorded graph; of a stage under remat, recorded now, with the random draws of F."""
        if isinstance(held, Tape):
            return held
        if list(map(versions, held.groups)) != held.versions:
            raise StageError(
                f"an argument of stage {self.stage.label}, which runs again in its backward, was "
                "changed in place since the forward; change a copy"
            )
        with ExitStack() as stack:
            stack.callback(restore_streams, save_streams(self.devices))
            restore_streams(held.random)
            return self.record(held.groups, grad=True)[1]

    @torch.inference_mode(False)
    def record(self, groups: Groups, grad: bool) -> tuple[Results, Tape]:
        """Outputs that are not inputs, auxiliary scalar and new state, and the graph; ``grad``:
        whether to record.
        """
        before = list(map(versions, groups[:3]))  # not of the state, which is copied
        params, x, side = (
            list(map(_leaf, group, abstract.leaves, [grad] * len(group)))
            for group, abstract in zip(groups[:3], self.signature, strict=False)
        )
        given = entering(self.signature.x, x)
        state = [t.clone() if isinstance(t, Tensor) else t for t in groups[3]]
        hooks = RemovableHandle.next_id
        with _under(self.autocast):
            arguments = [params, given, side, state]
            result = run_recording(self.stage, self.signature, arguments, self.outputs.writes_input)
        hooked = RemovableHandle.next_id != hooks
        if wrote_into_input(before, groups):
            raise StageError(
                f"stage {self.stage.label} wrote into its input in place, which it did not do when "
                "the plan was made; write x = x.clone() first"
            )
        ys = self._check(result, given)
        live: dict[str, Any] = {f"dy{j}": ys[j] for j in self.outputs.y.avals}
        live["daux"] = result.aux
        carrying = [name for name in self.cotangents if live[name].requires_grad]
        ends = {name: get_gradient_edge(live[name]) for name in carrying}
        ps, xs = (
            {i: leaf_edge(leaves[i]) for i in abstract.wanted if grad}
            for leaves, abstract in zip((params, x), self.signature[:2], strict=True)
        )
        inputs = set(map(tree.address, filter(tree.is_tensor, (*x, *side))))
        tape = Tape(ends, xs, ps, hooked, inputs)
        if ends:
            self.check_captured(tape)
        return self._returned(result, ys, groups), tape

    def _returned(self, result: Result, ys: Sequence[Any], groups: Groups) -> Results:
        """What F returns of a result: new tensors without a graph."""
        leaves = (leaf for group in (0, 2, 3) for leaf in groups[group])
        foreign = {tree.address(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        foreign |= {tree.address(ys[j]) for j in self.facts.captured}
        planned = [
            (ys[j], aval) for j, aval in self.outputs.y.avals.items() if j not in self.facts.passed
        ]
        if result.aux is not None and self.outputs.aux is not None:
            planned.append((result.aux, self.outputs.aux))
        returned = [_as_planned(tensor.detach(), aval, foreign) for tensor, aval in planned]
        if self.stage.state:
            returned += [t.detach() for t in tree.leaves(result.state)]
        if self.extra:
            return (*returned, result.extra)
        return tuple(returned)

    def _check(self, result: Result, xs: Sequence[object]) -> list[Any]:
        """The leaves of the output; all results must be as the plan expects them."""
        returned = outputs_from(self.stage, result, False)
        expected = self.facts.outputs
        y = returned.y
        planned = expected.y
        self._expect(
            y.structure == planned.structure, "another structure", y.structure, planned.structure
        )
        ys = tree.leaves(result.y)
        for j, (leaf, aval) in enumerate(zip(y.leaves, planned.leaves, strict=True)):
            name = f"output {j}"
            self._expect(_alike(leaf, aval), name, leaf, aval)
            if not isinstance(leaf, Aval) or not isinstance(aval, Aval):
                continue
            if 0 in aval.stride and leaf.stride != aval.stride:
                fits = torch.equal(_once(ys[j], aval.stride).expand_as(ys[j]), ys[j])
                self._expect(fits, name, "a tensor with other rows", "an expanded one")
            grad = aval.grad or not leaf.grad
            self._expect(grad, name, "one that carries a gradient", "none that does")
        for j, i in self.facts.passed.items():
            same = ys[j] is xs[i]
            self._expect(same, f"output {j}", "a new tensor", f"its input {i}, unchanged,")
        for j, i in planned.repeats:
            self._expect(ys[j] is ys[i], f"output {j}", "another tensor", f"output {i}")
        fits = _alike(returned.aux, expected.aux)
        self._expect(fits, "its auxiliary loss", returned.aux, expected.aux)
        state = returned.state
        planned_state = expected.state
        if state is not None and planned_state is not None:
            fits = state.structure == planned_state.structure
            fits = fits and all(map(_alike, state.leaves, planned_state.leaves))
            self._expect(fits, "its state", state, planned_state)
        return ys

    def _expect(self, fits: bool, what: str, value: object, expected: object) -> None:
        if not fits:
            raise StageError(
                f"stage {self.stage.label} returned {what} otherwise than the plan was made for: "
                f"{value}, where {expected} was expected. Shapes, dtypes, structure and numbers "
                "that leave a stage may not depend on data; if fpipe found out the wrong ones, "
                "declare the right ones: fpipe.Stage(fn, like=lambda p, x: x)"
            )

    def _refuse_captured(self, tape: Tape, seen: Survey | None = None) -> None:
        """Raise for a captured gradient, unless the function is one that creates leaves."""
        if not self.facts.leaves:
            seen = seen or survey(tape.ends.values(), tape.xs, tape.ps)
            foreign = (leaf for leaf in seen.foreign if tree.address(leaf) not in tape.inputs)
            refuse_captured(self.stage, foreign)

    # ---- B, I and W ----
    def _open(self, inputs: list[Any]) -> tuple[Tape, list[Arrived], list[Tensor]]:
        """The tape, its ends with their cotangents, and sums to add gradients into."""
        held, *rest = inputs
        inputs.clear()
        tape = self._tape(held)
        named = zip(self.cotangents, rest, strict=False)
        ends = [(tape.ends[name], dy) for name, dy in named if name in tape.ends]
        return tape, ends, rest[len(self.cotangents) :]

    def backward(self, inputs: list[Any]) -> Results:
        """B: input gradients, then parameter gradients, or the former alone where the latter are
        added into others.
        """
        tape, ends, sums = self._open(inputs)
        dxs, dps = all_gradients(ends, tape.xs, tape.ps)
        del tape, ends
        return (*self._input_grads(dxs), *self._weight_grads(dps, sums))

    def backward_input(self, inputs: list[Any]) -> Results:
        """I: input gradients, and what W needs."""
        tape, ends, _ = self._open(inputs)
        seen = survey([edge for edge, _ in ends], tape.xs, tape.ps, whole=tape.hooked)
        self._refuse_captured(tape, seen)
        dxs, kept = of_inputs(ends, tape.xs, tape.ps, seen)
        if self.dps:
            return (*self._input_grads(dxs), kept)
        return self._input_grads(dxs)

    def backward_weight(self, inputs: list[Any]) -> Results:
        """W: parameter gradients, or nothing where they are added into others."""
        kept, *sums = inputs
        inputs.clear()
        return self._weight_grads(of_weights(kept), sums)

    def _input_grads(self, dxs: Grads) -> tuple[Tensor, ...]:
        for i, dx in dxs.items():
            planned = dx is None or i in self.dxs
            self._expect(planned, f"the gradient of its input {i}", "one that is not None", "None")
        return tuple(
            _as_planned(_zeros(aval) if (dx := dxs[i]) is None else dx, aval)
            for i, aval in self.dxs.items()
        )

    def _weight_grads(self, dps: Grads, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients, or none once each is added into its sum; an unused parameter adds
        nothing.
        """
        for dp in dps.values():
            if dp is not None and dp.layout is not torch.strided:
                raise sparse_gradient_error(self.stage.label, dp.shape)
        if sums:
            for index, total in zip(self.dps, sums, strict=True):
                gradient = dps.pop(index)
                if gradient is not None:
                    total.add_(gradient)
            return ()
        return tuple(
            _zeros(aval) if (dp := dps[i]) is None else resolved(dp) for i, aval in self.dps.items()
        )

    # ---- all four ----
    def programs(self) -> Programs:
        """The programs with their names."""
        signature = self.signature
        facts = self.facts
        outputs = self.outputs
        dxs = _named("dx", self.dxs)
        dps = _named("dp", self.dps)
        passed = {j: f"x{i}" for j, i in facts.passed.items()}
        ys = _named("y", {j: aval for j, aval in outputs.y.avals.items() if j not in passed})
        states = _named("s", outputs.state.avals if outputs.state is not None else {})
        aux = "aux" if outputs.aux is not None else None
        extra = "extra" if self.extra else None
        held = ("ctx",) if self.trained else ()
        kept = ("kept",) if self.dps else ()
        back = (*held, *self.cotangents)
        results = tuple(filter(None, (*ys, aux, *states, extra, *held)))
        both = self.backward if self.trained else _nothing
        if dxs:
            weights = self.backward_weight if dps else _nothing
            i = self._program("I", self.backward_input, back, (*dxs, *kept))
            w = self._program("W", weights, kept, tuple(dps))
        else:  # without input gradients W is the whole backward
            i = self._program("I", _nothing, (), ())
            w = self._program("W", both, back, tuple(dps))
            kept = back
        sizes = {name: aval.nbytes for name, aval in (ys | states | dxs | dps).items()}
        during = self._during(sum(sizes[name] for name in dps))
        sizes |= {"ctx": facts.saved, "kept": facts.kept}
        return Programs(
            self._program("F", self.forward, tuple(signature.names), results),
            self._program("B", both, back, (*dxs, *dps)),
            i,
            w,
            signature=signature,
            outputs=outputs,
            ys=tuple(passed.get(j, name) for j, name in enumerate(_by_leaf("y", ys, outputs.y))),
            aux=aux,
            new_state=tuple(states),
            dps=_by_leaf("dp", dps, signature.params),
            dxs=_by_leaf("dx", dxs, signature.x),
            saved=held,
            kept=kept,
            grad_avals=dxs,
            memory={name: Held(name, n) for name, n in sizes.items() if n is not None},
            eager=True,
            extra=extra,
            label=self.stage.label,
            during=during,
        )

    def _during(self, gradients: int) -> dict[str, int]:
        """The most bytes that each program holds beyond those before, as far as they are known.

        I leaves the gradients of parameters to W, which computes all before it adds them up. W
        frees what I kept in parts; half of that is taken as free when most is held.
        """
        forward, both = (self.facts.during.get(letter, 0) for letter in "FB")
        weights = max(0, gradients - (self.facts.kept or 0) // 2)
        return {"F": forward, "B": both, "I": max(0, both - gradients), "W": weights}

    def _program(
        self,
        letter: str,
        run: Callable[[list[Any]], Results],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
    ) -> Program:
        label = self.stage.label
        named = f"({', '.join(inputs)}) -> ({', '.join(outputs)})"
        text = f"# {letter} of {label}, on autograd: {named}\n"
        # a backward may draw too: one under remat repeats the draws of F
        random = run is not _nothing
        stage = f"{label} {self.signature}"
        return Program(letter, text, run, inputs, outputs, random=random, stage=stage)


def _named(prefix: str, avals: Mapping[int, Aval]) -> dict[str, Aval]:
    """Abstract tensors by the names of their values."""
    return {f"{prefix}{leaf}": aval for leaf, aval in avals.items()}


def _by_leaf(prefix: str, names: Container[str], argument: AbstractTree) -> tuple[str | None, ...]:
    """The names by leaf of an argument; ``None`` for leaves without one."""
    names_of_all = (f"{prefix}{leaf}" for leaf in range(len(argument.leaves)))
    return tuple(name if name in names else None for name in names_of_all)


@contextmanager
def _under(state: Ambient) -> Iterator[None]:
    """Switch autocast to a state returned by ``ambient()``."""
    with without_autocast(), ExitStack() as stack:
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype))
        # inside the caller's autocast it would hold every microbatch's casts
        stack.callback(torch.clear_autocast_cache)
        yield


def _until_passed(check: Callable[[Tape], None]) -> Callable[[Tape], None]:
    """A check that is not repeated once it has passed."""
    pending = [check]

    def run(tape: Tape) -> None:
        for check in pending:
            check(tape)
        pending.clear()

    return run


def _leaf(value: object, leaf: AbstractLeaf, grad: bool) -> Any:
    """An argument as a leaf of a new graph."""
    if not isinstance(value, Tensor):
        return value
    # a graph holds no inference tensors
    tensor = value.clone() if value.is_inference() else value.detach()
    if grad and isinstance(leaf, Aval) and leaf.grad:
        return tensor.requires_grad_()
    return tensor


def _as_planned(tensor: Tensor, planned: Aval, foreign: Container[int] = ()) -> Tensor:
    """A result with numbers for lazy flags and the strides with which it arrives on another rank.

    It is copied where it has other strides or memory at an address in ``foreign``. Of an expanded
    axis one element is stored.
    """
    tensor = resolved(tensor)
    stride = planned.stride
    new = not tensor.numel() or tree.address(tensor) not in foreign
    if new and stride in (tensor.stride(), arriving(tensor.shape, tensor.stride())):
        return tensor
    if planned.kind is not None:
        return tensor.clone(memory_format=torch.contiguous_format)
    stored = _once(tensor, stride)
    memory = torch.empty_strided(stored.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return memory.copy_(stored).as_strided(tensor.shape, stride)


def _once(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """One element of each axis that is expanded in a layout."""
    for axis, step in enumerate(stride):
        if not step:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _alike(leaf: AbstractLeaf | None, planned: AbstractLeaf | None) -> bool:
    """Whether two numbers are the same, or two tensors have one shape, dtype and device."""
    if isinstance(leaf, Aval) and isinstance(planned, Aval):
        rest = {"stride": (), "grad": False, "kind": None}
        return leaf._replace(**rest) == planned._replace(**rest)
    return leaf == planned


def _zeros(aval: Aval) -> Tensor:
    """Zeros that take no memory, into which nothing is written."""
    return aval.build(lambda a: torch.zeros((), dtype=a.dtype, device=a.device).expand(a.shape))


def _nothing(inputs: list[Any]) -> Results:
    inputs.clear()
    return ()
