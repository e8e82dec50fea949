"""``engine="eager"``: the four programs of a stage on autograd, for functions that look at their data.

    F   runs the function and records its graph          B   one ``torch.autograd.grad`` for everything
    I   the way to the inputs (``splitting``)            W   from where it forked to the parameters

The same function may take another way with each microbatch; what it returns must keep its shapes, dtypes and structure,
which the plan needs beforehand (``rehearsal``, or ``Stage(like=)``) and F checks. Costs over the trace engine: the
function's own Python, about 0.1 ms a transformer block in I to look over the graph, and as much a linear layer in W; no
leaf is known to be unused, so all are sent, and unused inputs get zeros. Bytes from F to I and from I to W are those of
the rehearsal. Not split, but computed in I: what ``splitting`` says, and everything where the function hangs hooks on
tensors, which would run twice. This module knows nothing of schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ... import tree
from ...errors import StageError
from ...stage import Remat, Stage
from ...tree import Aval, arriving
from ..autocast import ambient, under
from ..program import Program
from ..signature import Signature
from ..stage_programs import Held, Programs
from ._nodes import versions
from .autograd_split import GradientEdge, Grads, Kept, both, get_gradient_edge, of_inputs, of_weights, survey
from .shape_probe import StageFacts, record, refuse_captured, refuse_writes, rehearse


def eager_programs(stage: Stage, signature: Signature) -> Programs:
    """The programs of a stage that runs on autograd.

    >>> def clipped(p, x):
    ...     return x @ p if x.norm().item() > 1 else x * p.sum()
    >>> from fpipe import trace
    >>> own = trace(Stage(clipped, engine="eager"), torch.eye(2), torch.ones(1, 2))
    >>> y, saved = own.forward(torch.eye(2), torch.ones(1, 2))
    >>> own.backward(saved, torch.ones(1, 2))
    (tensor([[1., 1.]]), tensor([[1., 1.], [1., 1.]]))
    """
    if stage.compile:
        raise StageError(
            f"stage {stage.label} has compile={stage.compile!r} and engine='eager'; only traced programs are compiled: "
            "leave compile= out, or call torch.compile inside the function"
        )
    return _Engine(stage, signature, rehearse(stage, signature)).programs()


@dataclass
class Tape:
    """A recorded graph: its ends by cotangent, its leaves by index, and whether the function hung hooks on tensors."""

    ends: dict[str, GradientEdge]
    xs: dict[int, GradientEdge]
    ps: dict[int, GradientEdge]
    hooked: bool


@dataclass
class Again:
    """A stage under remat: what it needs to be run once more."""

    groups: list[list[Any]]
    random: list[tuple[torch.device, torch.Tensor]]


class _Engine:
    """One stage's function and what is known of it; its methods are the programs."""

    def __init__(self, stage: Stage, signature: Signature, told: StageFacts):
        self.stage, self.signature, self.told = stage, signature, told
        self.made, self.around = told.outputs, ambient()
        self.dps = {i: f"dp{i}" for i in signature.params.wanted}
        self.dxs = {i: f"dx{i}" for i in signature.x.wanted}
        self.trained = bool(self.dps or self.dxs)
        self.ys = {j: f"x{told.passed[j]}" if j in told.passed else f"y{j}"
                   for j, a in enumerate(self.made.y) if isinstance(a, Aval)}  # fmt: skip
        self.dys = {j: f"dy{j}" for j in self.ys if self.trained and self.made.y[j].grad}
        self.daux = self.made.aux if self.trained and self.made.aux is not None and self.made.aux.grad else None
        self.cotangents = (*self.dys.values(), *(["daux"] if self.daux is not None else []))
        self.slots = [(g, i) for g, argument in enumerate(signature) for i in argument.avals]
        self.devices = sorted({a.device for argument in signature for a in argument.avals.values()}, key=str)
        self.checked = False

    # ---- F ------------------------------------------------------------------------------------------------------
    def forward(self, box: list[Any]) -> tuple[Any, ...]:
        """F: outputs, auxiliary scalar, new state, and the tape."""
        groups = [argument.map(lambda aval: None) for argument in self.signature]
        for (g, i), value in zip(self.slots, box, strict=True):
            groups[g][i] = value
        box.clear()
        if isinstance(self.stage.fn, Remat) and self.trained:
            again = Again([list(group) for group in groups], self._random())
            with torch.no_grad():
                outs, _ = self._record(groups, wanted=False)
            return (*outs, again)
        outs, tape = self._record(groups, wanted=self.trained)
        return (*outs, tape) if self.trained else outs

    @torch.inference_mode(False)
    def _record(self, groups: list[list[Any]], wanted: bool) -> tuple[tuple[Any, ...], Tape]:
        """Run the function on leaves of its own; check and detach what it returns."""
        before = [versions(group) for group in groups[:3]]  # state is copied
        leaves = [[_leaf(t, a, wanted) for t, a in zip(group, argument.leaves, strict=True)]
                  for group, argument in zip(groups[:3], self.signature, strict=False)]  # fmt: skip
        state = [t.clone() if isinstance(t, torch.Tensor) else t for t in groups[3]]
        hooks = RemovableHandle.next_id
        with under(self.around):
            y, aux, new = record(self.stage, self.signature, [*leaves, state], self.made.copies)
        hooked = RemovableHandle.next_id != hooks
        self._refuse_writes(before, [versions(group) for group in groups[:3]])
        ys = self._check(y, aux, new, leaves[1])
        carried = {f"dy{j}": ys[j] for j in self.ys} | ({} if aux is None else {"daux": aux})
        ends = {name: get_gradient_edge(t) for name, t in carried.items() if t.requires_grad}
        tape = Tape(
            ends,
            {i: get_gradient_edge(leaves[1][i]) for i in self.dxs} if wanted else {},
            {i: get_gradient_edge(leaves[0][i]) for i in self.dps} if wanted else {},
            hooked,
        )
        if ends and not self.checked:
            refuse_captured(self.stage, survey(list(ends.values()), tape.xs.values(), tape.ps).foreign)
            self.checked = True
        callers = _storages(groups)
        fresh = [_own(ys[j], callers) for j, name in self.ys.items() if name[0] == "y"]
        rest = [] if aux is None else [_own(aux, callers)]
        return (*fresh, *rest, *(t.detach() for t in tree.leaves(new))), tape

    def _refuse_writes(self, before: list[list[int]], after: list[list[int]]) -> None:
        changed = [old != new for old, new in zip(before, after, strict=True)]
        refuse_writes(changed)
        if changed[1]:
            raise StageError(
                f"stage {self.stage.label} wrote into its input in place, which it did not do when the plan was made; "
                "write x = x.clone() first"
            )

    def _check(self, y: Any, aux: Any, new: Any, xs: Sequence[Any]) -> list[Any]:
        """The output's leaves, which must be as the plan was told."""
        ys, spec = tree.flatten(y)
        if spec != self.made.y_spec:
            raise self._differs("a pytree of another structure", spec, self.made.y_spec)
        for j, (got, told) in enumerate(zip(ys, self.made.y, strict=True)):
            if not isinstance(told, Aval):
                if got is not told and (type(got) is not type(told) or got != told):
                    raise self._differs(f"output {j}", got, told)
                continue
            if not isinstance(got, torch.Tensor) or not _fits(got, told):
                raise self._differs(f"output {j}", tree.describe([got]), told)
            if got.requires_grad and j not in self.dys:
                raise self._differs(f"output {j}", "one that carries a gradient", "none that does")
            if j in self.told.passed and got is not xs[self.told.passed[j]]:
                raise self._differs(f"output {j}", "a new tensor", f"its input {self.told.passed[j]}, passed on")
        if self.made.aux is not None and not _fits(aux, self.made.aux):
            raise self._differs("its auxiliary loss", tree.describe([aux]), self.made.aux)
        states, state_spec = tree.flatten(new) if self.stage.state else ([], None)
        if state_spec != self.made.state_spec or not all(map(_fits, states, self.made.state)):
            raise self._differs("its state", tree.describe(states), ", ".join(map(str, self.made.state)))
        return ys

    def _differs(self, what: str, got: Any, told: Any) -> StageError:
        return StageError(
            f"stage {self.stage.label} returned {what} otherwise than the plan was made for: {got}, where {told} was "
            "expected. Shapes, dtypes, structure and numbers that leave a stage may not depend on data; where a "
            "rehearsal guessed wrong, say what is true: fpipe.Stage(fn, like=lambda p, x: x)"
        )

    def _random(self) -> list[tuple[torch.device, torch.Tensor]]:
        return [(d, torch.get_rng_state() if d.type == "cpu" else torch.get_device_module(d).get_rng_state(d))
                for d in self.devices if d.type != "meta"]  # fmt: skip

    def _tape(self, held: Tape | Again) -> Tape:
        """The recorded graph; of a stage under remat, recorded now, with the draws of F."""
        if isinstance(held, Tape):
            return held
        before = self._random()
        _set_random(held.random)
        try:
            return self._record(held.groups, wanted=True)[1]
        finally:
            _set_random(before)

    # ---- B, I and W ---------------------------------------------------------------------------------------------
    def _open(self, box: list[Any]) -> tuple[Tape, list[tuple[GradientEdge, torch.Tensor]]]:
        """The tape, and its ends with their cotangents; the box begins with what F held and the cotangents."""
        held, *rest = box[: 1 + len(self.cotangents)]
        box.clear()
        tape = self._tape(held)
        return tape, [(tape.ends[n], dy) for n, dy in zip(self.cotangents, rest, strict=True) if n in tape.ends]

    def backward(self, box: list[Any]) -> tuple[Any, ...]:
        """B: input gradients, then parameter gradients."""
        into = box[1 + len(self.cotangents) :]
        tape, ends = self._open(box)
        dxs, dps = both(ends, tape.xs, tape.ps)
        del tape, ends
        if into:
            self._add(dps, into)
            return self._input_grads(dxs)
        return (*self._input_grads(dxs), *self._weight_grads(dps))

    def backward_input(self, box: list[Any]) -> tuple[Any, ...]:
        """I: input gradients, and what W needs."""
        tape, ends = self._open(box)
        seen = survey([edge for edge, _ in ends], tape.xs.values(), tape.ps, whole=tape.hooked)
        refuse_captured(self.stage, seen.foreign)
        dxs, kept = of_inputs(ends, tape.xs, tape.ps, seen)
        return (*self._input_grads(dxs), kept) if self.dps else self._input_grads(dxs)

    def backward_weight(self, box: list[Any]) -> tuple[Any, ...]:
        """W: parameter gradients."""
        into = box[1:]
        kept: Kept = box[0]
        box.clear()
        dps = of_weights(kept)
        if into:
            self._add(dps, into)
            return ()
        return self._weight_grads(dps)

    def _add(self, dps: Grads, into: Sequence[torch.Tensor]) -> None:
        """Add each gradient to what there is of it; a parameter that was not used costs nothing."""
        for index, total in zip(self.dps, into, strict=True):
            gradient = dps.pop(index)
            if gradient is not None:
                total.add_(gradient)

    def _input_grads(self, dxs: Grads) -> tuple[torch.Tensor, ...]:
        avals = self.signature.x.leaves
        return tuple(_zeros(avals[i]) if dxs[i] is None else _dense(dxs[i]) for i in self.dxs)  # type: ignore[arg-type]

    def _weight_grads(self, dps: Grads) -> tuple[torch.Tensor, ...]:
        avals = self.signature.params.leaves
        return tuple(_nothing(avals[i]) if dps[i] is None else dps[i] for i in self.dps)  # type: ignore[misc]

    # ---- all together -------------------------------------------------------------------------------------------
    def programs(self) -> Programs:
        """The programs with their names."""
        made, dxs, dps = self.made, tuple(self.dxs.values()), tuple(self.dps.values())
        fresh = [name for name in self.ys.values() if name[0] == "y"]
        state = tuple(f"s{i}" for i in range(len(made.state)))
        given = [f"{'pxkt'[g]}{i}" for g, i in self.slots]
        held, kept = ("ctx",) if self.trained else (), ("kept",) if self.dps else ()
        back = (*held, *self.cotangents)
        f = self._program("F", self.forward, given, [*fresh, *(["aux"] if made.aux else []), *state, *held])
        b = self._program("B", self.backward if self.trained else _nothing_to_do, back, [*dxs, *dps])
        if dxs:
            i = self._program("I", self.backward_input, back, [*dxs, *kept])
            w = self._program("W", self.backward_weight if dps else _nothing_to_do, kept, dps)
        else:  # no input gradient to give: W is the whole backward
            i, w, kept = self._program("I", _nothing_to_do, (), ()), self._program("W", b.run, back, dps), back
        into = [f"g{i}" for i in self.dps]
        adding = {"B": self._program("B", b.run, [*back, *into], dxs),
                  "W": self._program("W", w.run, [*w.inputs, *into], ())}  # fmt: skip
        counts = tuple(len(argument.leaves) for argument in self.signature)
        dx_avals = {self.dxs[i]: self.told.dx.get(i, self.signature.x.leaves[i]) for i in self.dxs}
        return Programs(
            f=f, b=b, i=i, w=w, counts=counts,  # type: ignore[arg-type]
            y_spec=made.y_spec,
            y_static={j: a for j, a in enumerate(made.y) if not isinstance(a, Aval)},
            ys=tuple(self.ys.get(j) for j in range(len(made.y))),
            y_avals=tuple(_arriving(a) if isinstance(a, Aval) else None for a in made.y),
            aux="aux" if made.aux is not None else None, aux_aval=made.aux, new_state=state,
            state_spec=made.state_spec, state_avals=made.state,
            dys=tuple(self.dys.get(j) for j in range(len(made.y))), daux=self.daux,
            dps=tuple(self.dps.get(i) for i in range(counts[0])),
            dxs=tuple(self.dxs.get(i) for i in range(counts[1])),
            saved=held, kept=kept, dx_avals={n: _arriving(a) for n, a in dx_avals.items()},
            memory=self._memory(dx_avals), fresh=frozenset(), eager=True, label=self.stage.label, _adding=adding,
        )  # fmt: skip

    def _program(self, letter: str, run: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Program:
        text = f"# {letter} of {self.stage.label}, on autograd: ({', '.join(inputs)}) -> ({', '.join(outputs)})\n"
        program = Program(letter, text, run, inputs, outputs, random=letter == "F")
        program.of = f"{self.stage.label} {self.signature}"
        return program

    def _memory(self, dx_avals: Mapping[str, Aval]) -> dict[str, Held]:
        known = {name: self.made.y[j] for j, name in self.ys.items() if name[0] == "y"} | dict(dx_avals)
        known |= {f"s{i}": aval for i, aval in enumerate(self.made.state)}
        known |= {name: self.signature.params.leaves[i] for i, name in self.dps.items()}
        memory = {name: Held(name, aval.nbytes) for name, aval in known.items()}
        for name, nbytes in (("ctx", self.told.saved), ("kept", self.told.kept)):
            if nbytes is not None:
                memory[name] = Held(name, nbytes)
        return memory


# ---- tensors --------------------------------------------------------------------------------------------------------


def _leaf(value: Any, aval: Any, wanted: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.clone() if value.is_inference() else value.detach()  # a graph holds no tensors made for inference
    return leaf.requires_grad_() if wanted and aval.grad else leaf


def _storages(groups: Sequence[Sequence[Any]]) -> set[int]:
    """Memory of the caller's: parameters, side inputs, state."""
    tensors = (t for g in (0, 2, 3) for t in groups[g] if type(t) in (torch.Tensor, torch.nn.Parameter))
    return {t.untyped_storage().data_ptr() for t in tensors}


def _own(tensor: torch.Tensor, callers: set[int]) -> torch.Tensor:
    """An output without its graph, copied where it is the caller's memory or has gaps."""
    tensor = tensor.detach()
    if tensor.untyped_storage().data_ptr() in callers and tensor.numel():
        return tensor.clone(memory_format=torch.contiguous_format)
    return _dense(tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that arrives as it leaves."""
    if tensor.is_contiguous() or tensor.stride() == arriving(tensor.shape, tensor.stride()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _arriving(aval: Aval) -> Aval:
    return aval._replace(stride=arriving(aval.shape, aval.stride))


def _fits(got: torch.Tensor, told: Aval) -> bool:
    return tuple(got.shape) == told.shape and got.dtype == told.dtype and got.device == told.device


def _zeros(aval: Aval) -> torch.Tensor:
    return aval.build(lambda a: torch.zeros(a.shape, dtype=a.dtype, device=a.device))


def _nothing(aval: Aval) -> torch.Tensor:
    """Zeros that take no memory: nobody writes into them."""
    return aval.build(lambda a: torch.zeros((), dtype=a.dtype, device=a.device).expand(a.shape))


def _set_random(states: Sequence[tuple[torch.device, torch.Tensor]]) -> None:
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _nothing_to_do(box: list[Any]) -> tuple[Any, ...]:
    box.clear()
    return ()
