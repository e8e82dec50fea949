# SPDX-License-Identifier: Apache-2.0
"""``Programs``: the four programs of a stage, F, B, I and W, and the values they share.

The values of one stage share a namespace: ``p0..`` parameters, ``x0..`` inputs, ``k0..`` side
inputs, ``t0..`` state, ``dy0..`` and ``daux`` cotangents, and the trace's names for the rest. Knows
no schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from .. import tree
from ..errors import StageError
from ..tree import Aval, Structure, Tree
from . import sizes
from .autocast import without_autocast
from .graphs import Held
from .operations import Operation
from .program import Program, compiled
from .signature import Outputs
from .sizes import Numbers


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a stage, as ``fpipe.trace`` returns them: functions whose ``.code`` is their
    source.

    ``y, saved = forward(params, x)`` and ``dx, dparams = backward(saved, dy)``; or, with the same
    bits, ``dx, kept = backward_input(saved, dy)`` and ``dparams = backward_weight(kept)``.
    ``saved`` names the values held from F to I or B, ``kept`` those from I to W.

    >>> from fpipe import trace
    >>> programs = trace(lambda p, x: x * p, torch.tensor(3.0), torch.ones(2))
    >>> y, saved = programs.forward(torch.tensor(3.0), torch.ones(2))
    >>> programs.backward(saved, torch.ones(2))
    (tensor([3., 3.]), tensor(2.))
    """

    f: Program
    b: Program
    i: Program
    w: Program
    counts: tuple[int, ...]  # numbers of leaves of params, x, side, state
    outputs: Outputs
    ys: tuple[str | None, ...]
    aux: str | None
    new_state: tuple[str, ...]
    dps: tuple[str | None, ...]
    dxs: tuple[str | None, ...]
    saved: tuple[str, ...]
    kept: tuple[str, ...]
    grad_avals: Mapping[str, Aval]  # of the gradients, where known
    traced_memory: Mapping[str, Held]  # by value, at the sizes of the trace
    fresh: frozenset[str] = (
        frozenset()
    )  # gradients that share no memory, into which others may be added
    eager: bool = False
    extra: str | None = None  # what a loss passes to the caller's function, of any kind
    during: Mapping[str, int] = field(
        default_factory=dict
    )  # of an eager stage: bytes that programs hold beyond others
    compiled: bool = False
    label: str = ""
    numbers: Numbers | None = None  # for which these programs are; None: those of the trace
    #: Of programs for other sizes than those of the trace: those of the trace, and how one of them
    #: is resized.
    origin: tuple[Programs, Callable[[Program], Program]] | None = None

    @cached_property
    def dys(self) -> tuple[str | None, ...]:
        """The names of the outputs' cotangents; ``None`` where no gradient flows."""
        return tuple(
            name if (name := f"dy{j}") in self.outputs.cotangents else None
            for j in range(len(self.ys))
        )

    @cached_property
    def daux(self) -> Aval | None:
        """The cotangent of the auxiliary scalar, if it carries a gradient."""
        return self.outputs.cotangents.get("daux")

    # ---- other sizes ----
    def at(self, numbers: Numbers, label: str) -> Programs:
        """The programs of a symbolic trace for other sizes."""
        known: dict[Operation, Operation] = {}

        def operation(one: Operation) -> Operation:
            if one not in known:
                known[one] = one.at(numbers)
            return known[one]

        f, b, i, w = (
            each.at(numbers, operation, label) for each in (self.f, self.b, self.i, self.w)
        )
        outputs = replace(
            self.outputs,
            y=sizes.at(self.outputs.y, numbers),
            aux=sizes.at(self.outputs.aux, numbers),
            state=sizes.at(self.outputs.state, numbers),
        )
        return replace(
            self,
            f=f,
            b=b,
            i=i,
            w=w,
            outputs=outputs,
            grad_avals=sizes.at(dict(self.grad_avals), numbers),
            numbers=numbers,
            origin=(self, lambda program: program.at(numbers, operation, label)),
        )

    def compiled_by(self, backend: str) -> Programs:
        """The same programs, compiled."""
        f, b, i, w = (compiled(program, backend) for program in (self.f, self.b, self.i, self.w))
        return replace(self, f=f, b=b, i=i, w=w, compiled=True, origin=None)

    @cached_property
    def memory(self) -> Mapping[str, Held]:
        """The memory behind each value."""
        if self.numbers is None:
            return self.traced_memory
        return {name: held.at(self.numbers) for name, held in self.traced_memory.items()}

    # ---- bytes ----
    def held(self, names: Sequence[str]) -> int:
        """Bytes behind some names, each storage once; parameters, side inputs and state are the
        caller's.
        """
        behind = {self.memory[n].root: self.memory[n] for n in names if n in self.memory}
        return sum(h.nbytes for h in behind.values() if not (h.given and h.root[0] in "pkt"))

    @property
    def saved_bytes(self) -> int:
        """Bytes held from F to I or B, the stage's own input included where it is needed."""
        return self.held(self.saved)

    @property
    def kept_bytes(self) -> int:
        """Bytes held from I to W."""
        return self.held(self.kept)

    # ---- gradients added as soon as they are computed ----
    def added_by(self, letter: str) -> dict[int, str]:
        """The parameter gradients, by leaf, that program ``letter`` ("B" or "W") computes and can
        add itself.
        """
        program = self.b if letter == "B" else self.w
        if self.compiled:
            return {}
        computed = set(program.outputs) if self.eager else {one.name for one in program.traced}
        return {i: name for i, name in enumerate(self.dps) if name is not None and name in computed}

    def adding(self, letter: str) -> Program:
        """Program ``letter`` with its parameter gradients added into inputs ``g0..`` as soon as
        each is computed.
        """
        return self._b_adding if letter == "B" else self._w_adding

    def known_adding(self, letter: str) -> Program | None:
        """What ``adding`` returned, if it was called."""
        return vars(self).get("_b_adding" if letter == "B" else "_w_adding")

    @cached_property
    def _b_adding(self) -> Program:
        return self._adding("B", self.b)

    @cached_property
    def _w_adding(self) -> Program:
        return self._adding("W", self.w)

    def _adding(self, letter: str, program: Program) -> Program:
        if self.origin is not None:
            traced, resized = self.origin
            return resized(traced.adding(letter))
        adds: dict[str, list[str]] = {}
        for index, name in self.added_by(letter).items():
            adds.setdefault(name, []).append(f"g{index}")
        return program.adding(
            adds, [name for name in program.outputs if name not in adds or name in self.dxs]
        )

    # ---- by hand ----
    @property
    def forward(self) -> TreeProgram:
        """``forward(params, x, **side) -> (y, saved)``."""
        return TreeProgram(self.f, self._forward)

    @property
    def backward(self) -> TreeProgram:
        """``backward(saved, dy) -> (dx, dparams)``."""
        return TreeProgram(self.b, self._backward)

    @property
    def backward_input(self) -> TreeProgram:
        """``backward_input(saved, dy) -> (dx, kept)``."""
        return TreeProgram(self.i, self._backward_input)

    @property
    def backward_weight(self) -> TreeProgram:
        """``backward_weight(kept) -> dparams``."""
        return TreeProgram(self.w, self._backward_weight)

    def _forward(self, params: Tree, x: Tree, *, state: Tree = None, **side: Tree) -> Tree:
        p, xs = tree.flatten(params), tree.flatten(x)
        groups = zip("pxkt", (p[0], xs[0], tree.leaves(side), tree.leaves(state)), strict=True)
        values = {
            name: leaf for prefix, leaves in groups for name, leaf in named(prefix, leaves).items()
        }
        values = _run(self.f, values)
        y = self.outputs.y.fill([values[name] for name in self.ys if name is not None])
        extras = [values[self.aux]] if self.aux else []
        if self.outputs.state is not None:
            extras.append(self.outputs.state.fill([values[name] for name in self.new_state]))
        return (y, *extras) if extras else y, Carried({n: values[n] for n in self.saved}, p, xs)

    def _backward(
        self, saved: Carried, dy: Tree, *, daux: torch.Tensor | None = None
    ) -> tuple[Tree, Tree]:
        values = _run(self.b, {**saved.values, **self._cotangents(dy, daux)})
        return _gradients(self.dxs, saved.x, values), _gradients(self.dps, saved.params, values)

    def _backward_input(
        self, saved: Carried, dy: Tree, *, daux: torch.Tensor | None = None
    ) -> tuple[Tree, Carried]:
        values = _run(self.i, {**saved.values, **self._cotangents(dy, daux)})
        return _gradients(self.dxs, saved.x, values), replace(
            saved, values={n: values[n] for n in self.kept}
        )

    def _backward_weight(self, kept: Carried) -> Tree:
        return _gradients(self.dps, kept.params, _run(self.w, kept.values))

    def _cotangents(self, dy: Tree, daux: torch.Tensor | None) -> dict[str, Any]:
        leaves = tree.leaves(dy)
        names = [name for name, y in zip(self.dys, self.ys, strict=True) if y is not None]
        if len(leaves) != len(names):
            raise StageError(
                f"dy has {len(leaves)} leaves where the stage gives {len(names)}; give one for "
                "each output"
            )
        values = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name is not None}
        if self.daux is not None:
            one = torch.ones((), dtype=self.daux.dtype, device=self.daux.device)
            values["daux"] = one if daux is None else daux
        return values


@dataclass(frozen=True, eq=False, repr=False)
class TreeProgram:
    """A program called with pytrees, for interactive use; ``.code`` is its source."""

    program: Program
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast():
            return self.call(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.program)

    @property
    def code(self) -> str:
        """The source that runs."""
        return self.program.code


@dataclass(frozen=True, eq=False)
class Carried:
    """Values between two programs by name, and the flat arguments of the first, like which
    gradients are returned.
    """

    values: Mapping[str, Any]
    params: tuple[list[Any], Structure]
    x: tuple[list[Any], Structure]


def _run(program: Program, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those that a program computes from them."""
    missing = next((name for name in program.inputs if name not in values), None)
    if missing is not None:
        raise StageError(
            f"the arguments have no leaf {missing!r}, which {program!r} reads; pass trees of the "
            "structure "
            "that was traced"
        )
    results = program([values[name] for name in program.inputs])
    return {**values, **dict(zip(program.outputs, results, strict=True))}


def _gradients(
    names: Sequence[str | None], like: tuple[list[Any], Structure], values: Mapping[str, Any]
) -> Tree:
    leaves, spec = like
    zeros = [torch.zeros_like(t) if tree.is_floating(t) else None for t in leaves]
    return tree.unflatten(
        spec, [z if n is None else values[n] for n, z in zip(names, zeros, strict=True)]
    )


@lru_cache(maxsize=4096)
def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """The names of ``count`` values.

    >>> numbered("p", 2)
    ('p0', 'p1')
    """
    return tuple(f"{prefix}{index}" for index in range(count))


def named(prefix: str, leaves: Sequence[Any]) -> dict[str, Any]:
    """Leaves by their names in the stage's namespace.

    >>> named("p", [7, 8])
    {'p0': 7, 'p1': 8}
    """
    return dict(zip(numbered(prefix, len(leaves)), leaves, strict=True))
