"""``Programs``: the four programs of a stage, F, B, I and W, and the values they share.

Programs are straight lines over named values. The values of one stage share a name space: ``p0..`` parameters, ``x0..``
inputs, ``k0..`` side inputs, ``t0..`` state, ``dy0..`` cotangents, and whatever the trace calls the rest. This module
knows nothing of schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .. import tree
from ..errors import StageError
from ..tree import Aval
from .autocast import without_autocast
from .program import Program


class Held(NamedTuple):
    """Memory behind a named value: which value's storage it is, and how many bytes."""

    root: str
    nbytes: int
    given: bool = False  # it came in from outside: an input's own storage


@dataclass(frozen=True, eq=False)
class Programs:
    """The four programs of a stage and the names by which they share values.

    ``ys``, ``dps`` and ``dxs`` name the outputs and the gradients (``None``: no gradient flows); a name may be an
    input's own, where a leaf is passed on unchanged. ``dys[j]`` is the cotangent of output ``j``, or ``None`` where it
    carries no gradient. ``saved`` are the names held from F to I (or B), ``kept`` those from I to W.
    """

    f: Program
    b: Program
    i: Program
    w: Program
    counts: tuple[int, int, int, int]  # leaves of params, x, side, state
    y_spec: tree.Structure
    y_static: Mapping[int, Any]  # output leaves that are not tensors
    ys: tuple[str | None, ...]
    y_avals: tuple[Aval | None, ...]
    aux: str | None
    aux_aval: Aval | None
    new_state: tuple[str, ...]
    state_spec: tree.Structure | None
    dys: tuple[str | None, ...]
    daux: Aval | None
    dps: tuple[str | None, ...]
    dxs: tuple[str | None, ...]
    saved: tuple[str, ...]
    kept: tuple[str, ...]
    dx_avals: Mapping[str, Aval]
    memory: Mapping[str, Held]  # behind every named value
    fresh: frozenset[str]  # gradients that alias nothing and may be added to in place
    state_avals: tuple[Aval, ...] = ()
    dp_avals: Mapping[str, Aval] = field(default_factory=dict)  # of the parameter gradients, where they are known
    eager: bool = False
    compiled: bool = False
    label: str = ""
    _adding: dict[str, Program] = field(default_factory=dict, repr=False)
    segments: dict[int, Any] = field(default_factory=dict, repr=False)  # what programs are cut into, by their id

    # ---- bytes --------------------------------------------------------------------------------------------------
    def held(self, names: Sequence[str]) -> int:
        """Bytes behind some names, each storage once; parameters and side inputs are the caller's and count nothing."""
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

    # ---- gradients added where they are made ----------------------------------------------------------------------
    def added_by(self, letter: str) -> dict[int, str]:
        """The parameter gradients, by leaf, that program ``letter`` ("B" or "W") makes itself."""
        program = self.b if letter == "B" else self.w
        if self.compiled:
            return {}
        made = set(program.outputs) if self.eager else {node.name for node in program.nodes}
        return {i: name for i, name in enumerate(self.dps) if name is not None and name in made}

    def adding(self, letter: str) -> Program:
        """Program ``letter`` with its parameter gradients added into inputs ``g0..`` as soon as each is made."""
        found = self._adding.get(letter)
        if found is None:
            program = self.b if letter == "B" else self.w
            adds: dict[str, list[str]] = {}
            for index, name in self.added_by(letter).items():
                adds.setdefault(name, []).append(f"g{index}")
            inputs = (*program.inputs, *(into for many in adds.values() for into in many))
            outputs = [name for name in program.outputs if name not in adds or name in self.dxs]
            found = Program.from_nodes(program.name, program.nodes, inputs, outputs, program.constants, adds)
            found.of = program.of
            self._adding[letter] = found
        return found

    # ---- by hand ------------------------------------------------------------------------------------------------
    @property
    def forward(self) -> ByHand:
        """``forward(params, x, **side) -> (y, saved)``."""
        return ByHand(self, self.f, _forward)

    @property
    def backward(self) -> ByHand:
        """``backward(saved, dy) -> (dx, dparams)``."""
        return ByHand(self, self.b, _backward)

    @property
    def backward_input(self) -> ByHand:
        """``backward_input(saved, dy) -> (dx, kept)``."""
        return ByHand(self, self.i, _backward_input)

    @property
    def backward_weight(self) -> ByHand:
        """``backward_weight(kept) -> dparams``."""
        return ByHand(self, self.w, _backward_weight)


class ByHand:
    """A program called with pytrees, for a person rather than for the runner; ``.code`` is its source."""

    def __init__(self, programs: Programs, program: Program, call: Callable[..., Any]):
        self.programs, self.program, self._call = programs, program, call
        self.code = program.code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast():
            return self._call(self.programs, *args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.program)


@dataclass(frozen=True, eq=False)
class Bundle:
    """Values on their way from one program to the next, by name, with the structures to give gradients back in."""

    values: Mapping[str, Any]
    p_spec: tree.Structure
    x_spec: tree.Structure
    p_like: tuple[Any, ...] = ()
    x_like: tuple[Any, ...] = ()


def _run(program: Program, values: Mapping[str, Any]) -> dict[str, Any]:
    outs = program([values[name] for name in program.inputs])
    return dict(zip(program.outputs, outs, strict=True))


def _forward(own: Programs, params: Any, x: Any, *, state: Any = None, **side: Any) -> Any:
    (p, p_spec), (xs, x_spec) = tree.flatten(params), tree.flatten(x)
    values = dict(named("p", p) | named("x", xs) | named("k", tree.leaves(side)) | named("t", tree.leaves(state)))
    values |= _run(own.f, values)
    y = tree.unflatten(own.y_spec, [own.y_static[j] if n is None else values[n] for j, n in enumerate(own.ys)])
    bundle = Bundle({n: values[n] for n in own.saved}, p_spec, x_spec, tuple(p), tuple(xs))
    extras = [values[own.aux]] if own.aux else []
    if own.state_spec is not None:
        extras.append(tree.unflatten(own.state_spec, [values[n] for n in own.new_state]))
    return ((y, *extras) if extras else y), bundle


def _cotangents(own: Programs, dy: Any, aux: Any) -> dict[str, Any]:
    given = tree.leaves(dy)
    tensors = [name for name, static in zip(own.dys, own.ys, strict=True) if static is not None]
    if len(given) != len(tensors):
        raise StageError(f"dy has {len(given)} leaves where the stage gives {len(tensors)}; give one for each output")
    values = {name: g for name, g in zip(tensors, given, strict=True) if name is not None}
    if own.daux is not None:
        values["daux"] = torch.ones((), dtype=own.daux.dtype, device=own.daux.device) if aux is None else aux
    return values


def _grads(names: Sequence[str | None], like: Sequence[Any], spec: tree.Structure, values: Mapping[str, Any]) -> Any:
    zero = [torch.zeros_like(t) if tree.is_floating(t) else None for t in like]
    return tree.unflatten(spec, [z if n is None else values[n] for n, z in zip(names, zero, strict=True)])


def _backward(own: Programs, saved: Bundle, dy: Any, *, daux: Any = None) -> Any:
    values = dict(saved.values) | _cotangents(own, dy, daux)
    values |= _run(own.b, values)
    dx = _grads(own.dxs, saved.x_like, saved.x_spec, values)
    return dx, _grads(own.dps, saved.p_like, saved.p_spec, values)


def _backward_input(own: Programs, saved: Bundle, dy: Any, *, daux: Any = None) -> Any:
    values = dict(saved.values) | _cotangents(own, dy, daux)
    values |= _run(own.i, values)
    kept = replace(saved, values={n: values[n] for n in own.kept})
    return _grads(own.dxs, saved.x_like, saved.x_spec, values), kept


def _backward_weight(own: Programs, kept: Bundle) -> Any:
    values = dict(kept.values)
    values |= _run(own.w, values)
    return _grads(own.dps, kept.p_like, kept.p_spec, values)


@lru_cache(maxsize=4096)
def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """``('p0', 'p1', ...)``."""
    return tuple(f"{prefix}{index}" for index in range(count))


def named(prefix: str, leaves: Sequence[Any]) -> dict[str, Any]:
    """Leaves under their names in the stage's name space."""
    return dict(zip(numbered(prefix, len(leaves)), leaves, strict=True))
