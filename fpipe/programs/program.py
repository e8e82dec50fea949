# SPDX-License-Identifier: Apache-2.0
"""``Programs``, the four programs of a stage, and ``Program``, a straight line of operations.

A program is printed as Python. It is called with a box, a list of arguments, which it empties as it
starts: a tensor is then freed at its last use even if the caller keeps the list. The programs of a
stage share one namespace: ``p0..`` parameters, ``x0..`` inputs, ``k0..`` side inputs, ``t0..``
state, ``dy0..`` and ``daux`` cotangents, and the trace's names for the rest. This module knows no
schedules or ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, count
from typing import Any, TypeAlias

import torch

from ..actions.product import load_pass
from ..tree import Aval
from .internals import TorchOp, direct, draws, is_collective, without_autocast
from .operations import Held, Input, Operation, Ref, Role
from .signature import Outputs, Signature

Adds: TypeAlias = Mapping[str, Sequence[str]]
#: The values of the names in a source. The private functions of this module add to it.
Scope: TypeAlias = dict[str, object]

#: Overloads with a Python binding that parses less. Both have the same positional arguments.
_SAME_NAME = """
    mm.default bmm.default addmm.default tanh.default sigmoid.default relu.default neg.default
    exp.default rsqrt.default permute.default unsqueeze.default t.default
    native_layer_norm.default embedding.default mean.default sum.default sum.dim_IntList
    add.Tensor sub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar pow.Tensor_Scalar
    transpose.int
"""
_BINDINGS = {f"aten.{overload}": overload.partition(".")[0] for overload in _SAME_NAME.split()} | {
    # a real kernel may return other strides than its fake one
    "aten.view.default": "Tensor.reshape",
    "aten.expand.default": "Tensor.expand",
}


# ---- one program ----
@dataclass(frozen=True, eq=False)
class Program:
    """A callable straight-line program; a call empties the box.

    ``inputs`` and ``outputs`` are names of values, in the order of the box and of the returned
    tuple. ``code`` is the source that runs. ``random``: it draws random numbers. ``adds`` has, for
    a value, the inputs into which it is added as soon as it is computed. ``stage`` describes the
    stage for messages. ``traced_operations`` are the operations with the sizes of the trace;
    ``resized`` converts one of them to the sizes of this program.

    A segment of a program has a ``label``, and ``numbers`` of the program's collectives. If several
    segments draw, ``stream`` says whether it continues the random stream of another, and whether
    another continues its stream.

    >>> add = Operation("total", torch.add, (Ref("a"), Ref("b")), {}, ("a", "b"))
    >>> add = Program.of("add", [add], inputs=["a", "b"], outputs=["total"])
    >>> add([torch.ones(()), torch.ones(())])
    (tensor(2.),)
    """

    name: str
    code: str
    run: Callable[[list[Any]], tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random: bool = False
    traced_operations: tuple[Operation, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    adds: Adds = field(default_factory=dict)
    stage: str = ""
    label: str = ""
    stream: tuple[bool, bool] | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)
    resized: Callable[[Operation], Operation] | None = None

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """The operations with the sizes of this program."""
        return (
            self.traced_operations
            if self.resized is None
            else tuple(map(self.resized, self.traced_operations))
        )

    @cached_property
    def collective(self) -> bool:
        """Whether an operation starts a collective or waits for one."""
        return any(is_collective(op.target) for op in self.traced_operations)

    def __call__(self, box: list[Any]) -> tuple[Any, ...]:
        return self.run(box)

    def __repr__(self) -> str:
        return (
            f"<Program {self.name}: {len(self.traced_operations)} operations, "
            f"{len(self.inputs)} in, {len(self.outputs)} out>"
        )

    @classmethod
    def of(
        cls,
        name: str,
        operations: Iterable[Operation],
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: Mapping[str, Any] | None = None,
        adds: Adds | None = None,
        stage: str = "",
    ) -> Program:
        """Write the operations as Python, in which every target has a name, and compile it."""
        body = tuple(operations)
        constants = constants or {}
        adds = adds or {}
        scope = dict(constants)
        code = _source(name, body, inputs, outputs, adds, scope)
        exec(compile(code, f"<fpipe program {name}>", "exec"), scope)
        return cls(
            name,
            code,
            scope[name],
            tuple(inputs),
            tuple(outputs),
            any(map(draws, body)),
            body,
            constants,
            adds,
            stage,
        )

    def adding(self, adds: Adds, outputs: Sequence[str]) -> Program:
        """The program that adds values into more inputs and returns ``outputs``."""
        inputs = (*self.inputs, *(into for targets in adds.values() for into in targets))
        if not self.traced_operations:  # an eager program, whose function takes more inputs
            return replace(self, inputs=inputs, outputs=tuple(outputs))
        adds = dict(adds)
        body = self.operations
        if any(one.name in adds and getattr(one.value, "nbytes", 0) >> 20 for one in body):
            body = load_pass("added").adding(body, adds, outputs)
        return Program.of(self.name, body, inputs, outputs, self.constants, adds, self.stage)


def _source(
    name: str,
    body: Sequence[Operation],
    inputs: Sequence[str],
    outputs: Sequence[str],
    adds: Adds,
    scope: Scope,
) -> str:
    """The source of a function that runs the operations; ``scope`` has the constants."""
    last = dict.fromkeys(inputs, -1)
    last |= {name: index for index, op in enumerate(body) for name in (op.name, *op.inputs)}
    keep = {*outputs, *scope, *(into for targets in adds.values() for into in targets)}

    def delete(index: int, names: Iterable[str]) -> list[str]:
        dead = [name for name in dict.fromkeys(names) if last[name] == index and name not in keep]
        return [f"    del {', '.join(dead)}"] if dead else []

    lines = [f"def {name}(box):"]
    if inputs:
        lines += [f"    {_tuple(inputs)} = box", "    box.clear()"]
    lines += delete(-1, inputs)
    for index, op in enumerate(body):
        lines.append(f"    {op.name} = {_call(op, scope)}")
        lines += [f"    {into}.add_({op.name})" for into in adds.get(op.name, ())]
        lines += delete(index, [*op.inputs, op.name])
    lines.append(f"    return ({_tuple(outputs)})")
    return "\n".join(lines) + "\n"


def _tuple(items: Sequence[str]) -> str:
    return f"{items[0]}," if len(items) == 1 else ", ".join(items)


def _call(op: Operation, scope: Scope) -> str:
    args = [_text(value, scope) for value in op.args]
    if op.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    args += [f"{key}={_text(value, scope)}" for key, value in op.kwargs.items()]
    return f"{_target(op.target, scope)}({', '.join(args)})"


def _target(target: object, scope: Scope) -> str:
    """A short name for an operation."""
    if isinstance(target, TorchOp):
        binding = _BINDINGS.get(str(target))
        name = f"torch.{binding}" if binding else str(target).removesuffix(".default")
        name = name.replace(".", "_")
        scope[name] = operator.attrgetter(binding)(torch) if binding else direct(target)
        return name
    module = getattr(target, "__module__", "op")
    name = getattr(target, "__name__", "call")
    return _enter(f"{module}_{name}".replace(".", "_"), target, scope)


def _text(value: object, scope: Scope) -> str:
    """An argument as source; a value without a literal gets a name."""
    if isinstance(value, Ref):
        return str(value)
    if isinstance(value, (list, tuple)):
        items = [_text(item, scope) for item in value]
        return f"[{', '.join(items)}]" if isinstance(value, list) else f"({_tuple(items)})"
    finite = type(value) is float and math.isfinite(value)
    if value is None or finite or type(value) in (bool, int, str):
        return repr(value)
    name = "lit"
    if isinstance(value, (torch.dtype, torch.device)):
        name = f"lit_{type(value).__name__}_{value}"
    elif isinstance(value, (int, float)):  # a subclass whose values may have names
        name = getattr(value, "name", name)
    return _enter("".join(c if c.isalnum() else "_" for c in name), value, scope)


def _enter(name: str, value: object, scope: Scope) -> str:
    """Enter a value under a name, or under the next one that is free."""
    names = chain([name], (f"{name}_{serial}" for serial in count(1)))
    free = next(name for name in names if scope.get(name, value) is value)
    scope[free] = value
    return free


# ---- the programs of a stage ----
@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a stage, as ``fpipe.trace`` returns them: functions whose ``.code`` is their
    source.

    ``y, saved = forward(params, x)`` and ``dx, dparams = backward(saved, dy)``; or, with the same
    bits, ``dx, kept = backward_input(saved, dy)`` and ``dparams = backward_weight(kept)``.
    ``saved`` names the values held from F to I or B, ``kept`` those from I to W. ``ys`` names the
    leaves of the output, ``dps`` and ``dxs`` the gradients of params and x by leaf; None is a leaf
    that is no tensor or has no gradient.

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
    signature: Signature
    outputs: Outputs
    ys: tuple[str | None, ...]
    aux: str | None
    new_state: tuple[str, ...]
    dps: tuple[str | None, ...]
    dxs: tuple[str | None, ...]
    saved: tuple[str, ...]
    kept: tuple[str, ...]
    #: By name of a gradient; without those that are not known before the run.
    grad_avals: Mapping[str, Aval]
    #: By name of a value: the memory that it holds.
    memory: Mapping[str, Held]
    #: Gradients that share no memory, into which others may be added.
    fresh: frozenset[str] = frozenset()
    eager: bool = False
    #: The name of a value of any type that a loss passes to a function of the caller.
    extra: str | None = None
    #: By letter, of an eager stage: the most bytes that the program holds beyond those before it.
    during: Mapping[str, int] = field(default_factory=dict)
    #: In place of ``Program.adding``, of compiled programs.
    compiler: Callable[[Program, Adds, Sequence[str]], Program] | None = None
    label: str = ""
    #: If the sizes are not those of the trace: the programs of the trace, and a function that
    #: resizes one of them.
    origin: tuple[Programs, Callable[[Program], Program]] | None = None

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The numbers of leaves of params, x, side inputs and state."""
        return self.signature.counts

    @cached_property
    def dys(self) -> tuple[str | None, ...]:
        """The names of the outputs' cotangents; ``None`` where no gradient flows."""
        names = numbered("dy", len(self.ys))
        return tuple(name if name in self.outputs.cotangents else None for name in names)

    @cached_property
    def daux(self) -> Aval | None:
        """The cotangent of the auxiliary scalar, if it carries a gradient."""
        return self.outputs.cotangents.get("daux")

    @cached_property
    def roles(self) -> Mapping[str, Input]:
        """The roles of the inputs of programs, by name. Other names are computed values."""
        params, xs, sides, states = self.counts
        table: tuple[tuple[str, Role, int], ...] = (
            ("p", "param", params),
            ("x", "x", xs),
            ("k", "side", sides),
            ("t", "state", states),
            ("g", "grad", params),
        )
        roles = {
            name: Input(role, leaf)
            for prefix, role, count in table
            for leaf, name in enumerate(numbered(prefix, count))
        }
        for leaf, name in enumerate(self.dys):
            if name is not None:
                roles[name] = Input("cotangent", leaf)
        return roles | {"daux": Input("aux cotangent", 0)}

    # ---- what they hold between each other ----
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
        """The parameter gradients, by leaf, that program ``letter`` ("B" or "W") can add itself."""
        program = getattr(self, letter.lower())
        computed = (
            set(program.outputs) if self.eager else {op.name for op in program.traced_operations}
        )
        return {i: name for i, name in enumerate(self.dps) if name is not None and name in computed}

    def adding(self, letter: str) -> Program:
        """Program ``letter`` with its parameter gradients added into inputs ``g0..`` as soon as
        each is computed.
        """
        return self._b_adding if letter == "B" else self._w_adding

    @cached_property
    def _b_adding(self) -> Program:
        return self._adding("B")

    @cached_property
    def _w_adding(self) -> Program:
        return self._adding("W")

    def _adding(self, letter: str) -> Program:
        if self.origin is not None:
            traced, resized = self.origin
            return resized(traced.adding(letter))
        program: Program = getattr(self, letter.lower())
        adds: dict[str, list[str]] = {}
        for index, name in self.added_by(letter).items():
            adds.setdefault(name, []).append(f"g{index}")
        outputs = [name for name in program.outputs if name not in adds or name in self.dxs]
        adding = self.compiler or Program.adding
        return adding(program, adds, outputs)

    # ---- by hand ----
    @property
    def forward(self) -> TreeProgram:
        """``forward(params, x, **side) -> (y, saved)``."""
        return TreeProgram(self.f, partial(load_pass("by_hand").forward, self))

    @property
    def backward(self) -> TreeProgram:
        """``backward(saved, dy) -> (dx, dparams)``."""
        return TreeProgram(self.b, partial(load_pass("by_hand").backward, self))

    @property
    def backward_input(self) -> TreeProgram:
        """``backward_input(saved, dy) -> (dx, kept)``."""
        return TreeProgram(self.i, partial(load_pass("by_hand").backward_input, self))

    @property
    def backward_weight(self) -> TreeProgram:
        """``backward_weight(kept) -> dparams``."""
        return TreeProgram(self.w, partial(load_pass("by_hand").backward_weight, self))


@lru_cache(maxsize=4096)
def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """The names of ``count`` values.

    >>> numbered("p", 2)
    ('p0', 'p1')
    """
    return tuple(f"{prefix}{index}" for index in range(count))


@dataclass(frozen=True, eq=False, repr=False)
class TreeProgram:
    """A program called with pytrees, for interactive use; ``.code`` is its source."""

    program: Program
    call: Callable[..., Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast():
            return self.call(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.program)

    @property
    def code(self) -> str:
        """The source that runs."""
        return self.program.code
