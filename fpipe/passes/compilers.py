# SPDX-License-Identifier: Apache-2.0
"""Programs compiled by a backend of torch.compile, for ``compile=``.

Where gradients are summed, a product adds into its sum: ``addmm``, the one change of
``compile="addmm"``. Under other compilers, products that are gradients of parameters are not
compiled but run last, so that programs that sum and those that do not share what is compiled.
Inductor's code is called without the guards of torch.compile: a program has inputs of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor, fx

from ..programs.operations import Operation, Ref, fill, users
from ..programs.program import Adds, Program, Programs
from .added import adding

_aten = torch.ops.aten
Run: TypeAlias = Callable[[list[object]], tuple[object, ...]]
#: What may run last.
_LAST = (
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten.mm.default,
    _aten.embedding_dense_backward.default,
)


def compiled(programs: Programs, backend: str) -> Programs:
    """The same programs, compiled by ``backend`` ("addmm", "inductor", ...)."""
    if backend == "addmm":
        return replace(programs, compiler=partial(_adding, {}), origin=None)
    grads = {name for name in programs.dps if name is not None}
    parts = dict[str, tuple[Program, list[Operation]]]()
    made = dict[str, Program]()
    for letter in "fbiw":
        program: Program = getattr(programs, letter)
        if program.operations:
            first, last = parts[program.name] = _divided(program, grads, backend)
            made[letter] = replace(program, run=_in_turn(program, first, last, {}))
    return replace(programs, **made, compiler=partial(_adding, parts), origin=None)


def _adding(
    parts: Mapping[str, tuple[Program, list[Operation]]],
    program: Program,
    adds: Adds,
    outputs: Sequence[str],
) -> Program:
    """The program that adds gradients into more inputs and returns ``outputs``.

    ``parts`` has, by program, what is compiled and what runs last; it is empty for "addmm".
    """
    left = dict(adds)
    more = (into for targets in adds.values() for into in targets)
    inputs = (*program.inputs, *more)
    first, last = parts.get(program.name, (None, program.operations))
    body = adding(_adding_products(last, left, outputs), left, outputs)
    if first is None:
        given = program.constants, left, program.stage
        return Program.of(program.name, body, inputs, outputs, *given)
    program = replace(program, inputs=inputs, outputs=tuple(outputs))
    return replace(program, run=_in_turn(program, first, body, left))


def _divided(
    program: Program, grads: Collection[str], backend: str
) -> tuple[Program, list[Operation]]:
    """What is compiled; and the products and views that only gradients of parameters need."""
    readers = users(program.operations)
    others = {name for name in program.outputs if name not in grads}
    last: dict[str, Operation] = {}
    for op in reversed(program.operations):
        reads = readers.get(op.name, ())
        needed = (op.name in grads or reads) and op.name not in others
        if op.target in _LAST and needed and all(one.name in last for one in reads):
            last[op.name] = op
    operations = [op for op in program.operations if op.name not in last]
    computed = {op.name for op in operations}
    read = {name for op in operations for name in op.inputs}
    wanted = [
        *program.outputs,
        *(name for op in last.values() for name in op.inputs),
    ]
    first = replace(
        program,
        inputs=tuple(name for name in program.inputs if name in read),
        outputs=tuple(name for name in dict.fromkeys(wanted) if name in computed),
        traced_operations=tuple(operations),
        resized=None,
    )
    return replace(first, run=_compiled(first, backend)), [*reversed(last.values())]


def _adding_products(
    operations: Sequence[Operation], adds: dict[str, Sequence[str]], outputs: Sequence[str]
) -> list[Operation]:
    """The operations, of which products add into sums themselves and leave ``adds``."""
    readers = users(operations)
    found = {op.name: op for op in operations}
    for op in operations:
        into = adds.get(op.name, ())
        source = op
        if op.target is _aten.t.default and len(readers[op.args[0]]) == 1:
            source = found.get(op.args[0], op)
        named = {op.name, source.name}.intersection(outputs) or op.name in readers
        if len(into) == 1 and not named and source.target is _aten.mm.default:
            del adds[op.name]
            if source is not op:
                del found[op.name]
            args = (Ref(into[0]), *source.args)
            found[source.name] = replace(
                source,
                target=add_product if source is op else add_transposed,
                args=args,
                inputs=tuple(dict.fromkeys(map(str, args))),
            )
    return list(found.values())


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of two matrices to a sum, which may be of another dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def add_transposed(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the transposed product of two matrices to a sum."""
    add_product(total.t(), a, b)


def _in_turn(program: Program, first: Program, last: Sequence[Operation], adds: Adds) -> Run:
    """A function that runs what is compiled, and then what runs last."""
    if not last and not adds and (first.inputs, first.outputs) == (program.inputs, program.outputs):
        return first.run
    pairs = [(Ref(into), Ref(name)) for name, targets in adds.items() for into in targets]
    if pairs:
        into, names = (list(column) for column in zip(*pairs, strict=True))
        inputs = tuple(dict.fromkeys(map(str, (*into, *names))))
        sums = Operation("sums", _aten._foreach_add_.List, (into, names), {}, inputs)
        last = [*last, sums]
    read = chain.from_iterable(op.inputs for op in last)
    known = {name: at for at, name in enumerate((*program.inputs, *first.outputs))}
    reads = [name for name in dict.fromkeys([*read, *program.outputs]) if name in known]
    end = Program.of(program.name, last, reads, program.outputs, program.constants)
    begins = [known[name] for name in first.inputs]
    ends = [known[name] for name in reads]

    def run(box: list[object]) -> tuple[object, ...]:
        values = [*box]
        box.clear()
        values += first.run([values[at] for at in begins])
        values = [values[at] for at in ends]
        return end.run(values)

    return run


def _compiled(program: Program, backend: str) -> Run:
    if not program.operations:
        return lambda box: ()
    graph = fx.Graph()
    env = {name: graph.placeholder(name) for name in program.inputs}
    env |= {name: graph.get_attr(name) for name in program.constants}
    for operation in program.operations:
        args = fill(operation.args, env)
        kwargs = fill(operation.kwargs, env)
        env[operation.name] = graph.call_function(operation.target, args, kwargs)
    graph.output(tuple(env[name] for name in program.outputs))
    # Some compilers cache by code object, so every program has one of its own.
    module = fx.GraphModule(dict(program.constants), graph)
    call: Callable[..., Iterable[object]] = (
        _by_inductor(module)
        if backend == "inductor"
        else torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    )

    def run(box: list[object]) -> tuple[object, ...]:
        args = tuple(box)
        box.clear()
        return tuple(call(*args))

    return run


def _by_inductor(module: fx.GraphModule) -> Callable[..., Iterable[object]]:
    """Call inductor's code, which is made for each combination of strides of the inputs."""
    from torch._inductor import standalone_compile

    found: dict[object, Callable[..., Iterable[object]]] = {}

    def call(*args: Tensor) -> Iterable[object]:
        strides = tuple([isinstance(arg, Tensor) and arg.stride() for arg in args])
        if strides not in found:
            with torch.no_grad():
                found[strides] = standalone_compile(
                    module, [*args], dynamic_shapes="from_example_inputs"
                )
        return found[strides](*args)

    return call
