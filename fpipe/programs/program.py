"""``Program``: a straight line of tensor operations, printed as Python and called with a box.

A box is a list of arguments that the program empties as it starts, so that a tensor is freed at its last use, also
where the caller would otherwise keep it alive. Programs know nothing of stages, schedules or ranks; values that
several programs of one stage share have one name in all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

#: Overloads whose Python binding does the same with less parsing. Only those whose positional arguments agree.
_QUICK: dict[str, str] = {
    **{
        f"aten.{name}": f"torch.{target}"
        for name, target in {
            "mm.default": "mm",
            "bmm.default": "bmm",
            "addmm.default": "addmm",
            "add.Tensor": "add",
            "sub.Tensor": "sub",
            "mul.Tensor": "mul",
            "div.Tensor": "div",
            "mul.Scalar": "mul",
            "tanh.default": "tanh",
            "sigmoid.default": "sigmoid",
            "relu.default": "relu",
            "neg.default": "neg",
            "exp.default": "exp",
            "rsqrt.default": "rsqrt",
            "permute.default": "permute",
            "transpose.int": "transpose",
            "unsqueeze.default": "unsqueeze",
            "t.default": "t",
            "sum.dim_IntList": "sum",
            "native_layer_norm.default": "native_layer_norm",
            "embedding.default": "embedding",
            "pow.Tensor_Scalar": "pow",
            "mean.default": "mean",
            "sum.default": "sum",
            "div.Scalar": "div",
        }.items()
    },
    "aten.view.default": "torch.Tensor.reshape",  # a real kernel may give other strides than its fake one
    "aten.expand.default": "torch.Tensor.expand",
}


class Program:
    """A callable straight-line program.

    ``inputs`` and ``outputs`` are value names, in the order of the box and of the returned tuple; ``code`` is the
    source that runs. ``random`` says whether it draws; ``stream``, for one segment of several that draw, whether it
    takes the random stream over from another and whether it leaves it to one. ``adds`` names, for a value, the inputs
    it is added into; ``label`` is what a segment is called. Calling it empties the box.

    >>> gm = fx.symbolic_trace(lambda a, b: torch.add(a, b))
    >>> add = Program.from_nodes("add", gm.graph.nodes, inputs=["a", "b"], outputs=["add"])
    >>> add([torch.ones(()), torch.ones(())])
    (tensor(2.),)
    """

    def __init__(
        self, name: str, code: str, run: Callable[[list[Any]], tuple[Any, ...]], inputs: Sequence[str],
        outputs: Sequence[str], *, random: bool = False, nodes: Sequence[fx.Node] = (),
        constants: Mapping[str, Any] | None = None, adds: Mapping[str, Sequence[str]] | None = None,
    ):  # fmt: skip
        self.name, self.code = name, code
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.random, self.nodes = random, tuple(nodes)
        self.run = run
        self.constants = dict(constants or {})
        self.adds = dict(adds or {})
        self.label = ""
        self.of = ""  # whose program it is, for messages
        self.stream: tuple[bool, bool] | None = None
        self.numbers: dict[str, int] = {}  # of a segment: its program's collectives

    def __call__(self, box: list[Any]) -> tuple[Any, ...]:
        return self.run(box)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self.nodes)} operations, {len(self.inputs)} in, {len(self.outputs)} out>"

    @classmethod
    def from_nodes(
        cls, name: str, nodes: Iterable[fx.Node], inputs: Sequence[str], outputs: Sequence[str],
        constants: Mapping[str, Any] | None = None, adds: Mapping[str, Sequence[str]] | None = None,
    ) -> Program:  # fmt: skip
        """Write the nodes out as Python, compile it once, and bind every operation to a name.

        ``adds`` names, for a value, the inputs that it is added into as soon as it is made.
        """
        body = [node for node in nodes if node.op == "call_function"]
        scope: dict[str, Any] = dict(constants or {})
        code = _source(name, body, inputs, outputs, scope, adds or {})
        space = dict(scope)
        exec(compile(code, f"<fpipe program {name}>", "exec"), space)
        return cls(name, code, space[name], inputs, outputs, random=any(map(draws, body)), nodes=body,
                   constants=constants, adds=adds)  # fmt: skip


def draws(node: fx.Node) -> bool:
    """Whether a node takes from the random stream."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def elementwise(node: fx.Node) -> bool:
    """Whether a node does something to each element alone, drawing nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return not target._schema.is_mutable and not draws(node)


def _source(
    name: str, body: Sequence[fx.Node], inputs: Sequence[str], outputs: Sequence[str], scope: dict[str, Any],
    adds: Mapping[str, Sequence[str]],
) -> str:  # fmt: skip
    last: dict[str, int] = {}
    for index, node in enumerate(body):
        for used in node.all_input_nodes:
            last[used.name] = index
    keep = set(outputs) | set(scope) | {into for many in adds.values() for into in many}
    lines = [f"def {name}(box):"]
    if inputs:
        lines += [f"    {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = box", "    box.clear()"]
    unused = [value for value in inputs if value not in last and value not in keep]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    for index, node in enumerate(body):
        lines.append(f"    {node.name} = {_call(node, scope)}")
        lines += [f"    {into}.add_({node.name})" for into in adds.get(node.name, ())]
        dead = [u.name for u in node.all_input_nodes if last[u.name] == index and u.name not in keep]
        if node.name not in last and node.name not in keep:
            dead.append(node.name)
        if dead:
            lines.append(f"    del {', '.join(dict.fromkeys(dead))}")
    lines.append(f"    return ({', '.join(outputs)}{',' if len(outputs) == 1 else ''})")
    return "\n".join(lines) + "\n"


def _call(node: fx.Node, scope: dict[str, Any]) -> str:
    if node.target is operator.getitem:
        return f"{_text(node.args[0], scope)}[{_text(node.args[1], scope)}]"
    args = [_text(a, scope) for a in node.args] + [f"{k}={_text(v, scope)}" for k, v in node.kwargs.items()]
    return f"{_bind(node.target, scope)}({', '.join(args)})"


def _bind(target: Any, scope: dict[str, Any]) -> str:
    """A short name for an operation, entered in the scope."""
    if isinstance(target, torch._ops.OpOverload):
        full = f"{target.namespace}.{target._opname}.{target._overloadname}"
        quick = _QUICK.get(full)
        name = (quick or full).replace(".", "_").removesuffix("_default")
        scope[name] = operator.attrgetter(quick.removeprefix("torch."))(torch) if quick else target._op
        return name
    name = f"{getattr(target, '__module__', 'op')}_{getattr(target, '__name__', 'call')}".replace(".", "_")
    while name in scope and scope[name] is not target:
        name += "_"
    scope[name] = target
    return name


def _text(value: Any, scope: dict[str, Any]) -> str:
    """An argument as source; what has no literal is entered in the scope under a name."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_text(item, scope) for item in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return repr(value)
    name = f"lit_{type(value).__name__}_{value}" if isinstance(value, (torch.dtype, torch.device)) else "lit"
    name = "".join(c if c.isalnum() else "_" for c in name)
    serial = 0
    base = name
    while name in scope and scope[name] is not value:
        serial += 1
        name = f"{base}_{serial}"
    scope[name] = value
    return name
