# SPDX-License-Identifier: Apache-2.0
"""``Program``: a straight line of tensor operations, printed as Python and called with a box.

A box is a list of arguments that the program empties as it starts, so that a tensor is freed at its
last use even if the caller keeps the list. Values that several programs of one stage share have one
name in all of them. Knows no stages, schedules or ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import fx

from .graphs import draws
from .internals import Op, direct, is_collective
from .operations import Operation, Ref, fill
from .sizes import Numbers, Real, Size

Adds: TypeAlias = Mapping[str, Sequence[str]]
#: What the names in a source stand for. The private functions here enter what they meet.
Scope: TypeAlias = dict[str, Any]

#: Overloads whose Python binding does the same with less parsing. Only those whose positional
#: arguments agree.
_SAME_NAME = (
    "mm.default",
    "bmm.default",
    "addmm.default",
    "tanh.default",
    "sigmoid.default",
    "relu.default",
    "neg.default",
    "exp.default",
    "rsqrt.default",
    "permute.default",
    "unsqueeze.default",
    "t.default",
    "native_layer_norm.default",
    "embedding.default",
    "mean.default",
    "sum.default",
    "sum.dim_IntList",
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "mul.Scalar",
    "div.Tensor",
    "div.Scalar",
    "pow.Tensor_Scalar",
    "transpose.int",
)
_BINDINGS = {f"aten.{overload}": overload.partition(".")[0] for overload in _SAME_NAME} | {
    # a real kernel may return other strides than its fake one
    "aten.view.default": "Tensor.reshape",
    "aten.expand.default": "Tensor.expand",
}


@dataclass(frozen=True, eq=False)
class Program:
    """A callable straight-line program; calling it empties the box.

    ``traced`` are its operations at the sizes of the trace, ``operations`` those at its sizes:
    ``resized`` maps one to the other. ``inputs`` and ``outputs`` are value names, in the order of
    the box and of the returned tuple; ``code`` is the source that runs. ``random``: whether it
    draws random numbers. ``adds`` names, for a value, the inputs into which it is added as soon as
    it is computed. ``stage`` describes the stage for messages.

    Of a segment of a program, ``label`` is its name, ``numbers`` the numbers of its program's
    collectives, and ``stream``, where several segments draw, whether it continues another's random
    stream and whether another continues its own.

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
    traced: tuple[Operation, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    adds: Adds = field(default_factory=dict)
    stage: str = ""
    label: str = ""
    stream: tuple[bool, bool] | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)
    resized: Callable[[Operation], Operation] | None = None

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Its operations, with the sizes of this program."""
        return self.traced if self.resized is None else tuple(map(self.resized, self.traced))

    @cached_property
    def collective(self) -> bool:
        """Whether an operation starts a collective or waits for one."""
        return any(is_collective(one.target) for one in self.traced)

    def __call__(self, box: list[Any]) -> tuple[Any, ...]:
        return self.run(box)

    def __repr__(self) -> str:
        return (
            f"<Program {self.name}: {len(self.traced)} operations, {len(self.inputs)} in, "
            f"{len(self.outputs)} out>"
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
        """Write the operations as Python, compile it once, and bind every target to a name."""
        body = tuple(operations)
        constants, adds = constants or {}, adds or {}
        code, run = _function(name, body, inputs, outputs, constants, adds)
        random = any(map(draws, body))
        return cls(
            name, code, run, tuple(inputs), tuple(outputs), random, body, constants, adds, stage
        )

    def at(
        self, numbers: Numbers, operations: Callable[[Operation], Operation], stage: str
    ) -> Program:
        """The program for other sizes. It shares the code, which refers to sizes by name."""
        assert isinstance(self.run, FunctionType)
        given = self.run.__globals__
        changed = {
            name: numbers[v.place] for name, v in given.items() if isinstance(v, (Size, Real))
        }
        run = FunctionType(self.run.__code__, {**given, **changed}, self.name)
        head = "".join(f"# {name} = {value!r}\n" for name, value in changed.items())
        return replace(
            self,
            code=head + self.code,
            run=run,
            stage=stage,
            resized=operations if changed else None,
        )

    def adding(self, adds: Adds, outputs: Sequence[str]) -> Program:
        """The program that adds values into further inputs and returns ``outputs``."""
        inputs = (*self.inputs, *(into for targets in adds.values() for into in targets))
        if not self.traced:  # it takes the further inputs as it is
            return replace(self, inputs=inputs, outputs=tuple(outputs))
        return Program.of(
            self.name, self.operations, inputs, outputs, self.constants, adds, self.stage
        )


# ---- the source ----
def _function(
    name: str,
    body: Sequence[Operation],
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, Any],
    adds: Adds,
) -> tuple[str, Callable[[list[Any]], tuple[Any, ...]]]:
    """The operations as source of a function of a box, and that function. ``adds``: see
    ``Program``.
    """
    scope = dict(constants)
    last = dict.fromkeys(inputs, -1)
    last |= {each: index for index, one in enumerate(body) for each in (one.name, *one.inputs)}
    keep = {*outputs, *constants, *(into for targets in adds.values() for into in targets)}

    def delete(index: int, names: Iterable[str]) -> list[str]:
        dead = [name for name in dict.fromkeys(names) if last[name] == index and name not in keep]
        return [f"    del {', '.join(dead)}"] if dead else []

    lines = [f"def {name}(box):"]
    if inputs:
        lines += [f"    {_tuple(inputs)} = box", "    box.clear()"]
    lines += delete(-1, inputs)
    for index, one in enumerate(body):
        lines.append(f"    {one.name} = {_call(one, scope)}")
        lines += [f"    {into}.add_({one.name})" for into in adds.get(one.name, ())]
        lines += delete(index, [*one.inputs, one.name])
    lines.append(f"    return ({_tuple(outputs)})")
    code = "\n".join(lines) + "\n"
    exec(compile(code, f"<fpipe program {name}>", "exec"), scope)
    return code, scope[name]


def _tuple(items: Sequence[str]) -> str:
    return f"{items[0]}," if len(items) == 1 else ", ".join(items)


def _call(one: Operation, scope: Scope) -> str:
    if one.target is operator.getitem:
        return f"{_text(one.args[0], scope)}[{_text(one.args[1], scope)}]"
    args = [_text(a, scope) for a in one.args] + [
        f"{k}={_text(v, scope)}" for k, v in one.kwargs.items()
    ]
    return f"{_target(one.target, scope)}({', '.join(args)})"


def _target(target: object, scope: Scope) -> str:
    """A short name for an operation."""
    if isinstance(target, Op):
        binding = _BINDINGS.get(str(target))
        name = (f"torch.{binding}" if binding else str(target).removesuffix(".default")).replace(
            ".", "_"
        )
        scope[name] = operator.attrgetter(binding)(torch) if binding else direct(target)
        return name
    name = f"{getattr(target, '__module__', 'op')}_{getattr(target, '__name__', 'call')}".replace(
        ".", "_"
    )
    return _enter(name, target, scope)


def _text(value: object, scope: Scope) -> str:
    """An argument as source; a value without a literal gets a name."""
    if isinstance(value, Ref):
        return str(value)
    if isinstance(value, (list, tuple)):
        items = [_text(item, scope) for item in value]
        return f"[{', '.join(items)}]" if isinstance(value, list) else f"({_tuple(items)})"
    if isinstance(value, (Size, Real)):
        return _enter(f"n{value.place}", value, scope)
    if (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return repr(value)
    name = (
        f"lit_{type(value).__name__}_{value}"
        if isinstance(value, (torch.dtype, torch.device))
        else "lit"
    )
    return _enter("".join(c if c.isalnum() else "_" for c in name), value, scope)


def _enter(name: str, value: object, scope: Scope) -> str:
    """Enter a value under a name, or under the next one that is free."""
    names = chain([name], (f"{name}_{serial}" for serial in count(1)))
    free = next(each for each in names if scope.get(each, value) is value)
    scope[free] = value
    return free


# ---- compilation ----
def compiled(program: Program, backend: str) -> Program:
    """The same program, compiled by ``backend`` ("inductor", "aot_eager", ...) at its first
    call.
    """
    if not program.operations:
        return program
    graph = fx.Graph()
    env = {name: graph.placeholder(name) for name in program.inputs}
    env |= {name: graph.get_attr(name) for name in program.constants}
    for one in program.operations:
        env[one.name] = graph.call_function(one.target, fill(one.args, env), fill(one.kwargs, env))
    graph.output(tuple(env[name] for name in program.outputs))
    # Some compilers cache by code object, so every program has one of its own.
    module = fx.GraphModule(dict(program.constants), graph)
    inner = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def run(box: list[Any]) -> tuple[Any, ...]:
        args = tuple(box)
        box.clear()
        out = inner(*args)
        assert len(out) == len(program.outputs)
        return tuple(out)

    return replace(program, run=run)
