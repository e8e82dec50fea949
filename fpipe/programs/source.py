# SPDX-License-Identifier: Apache-2.0
"""Writes graph nodes as a Python function, one line for each operation, with a ``del`` after each last use.

Knows nodes and names, no programs or stages.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from .internals import Op, direct

Adds: TypeAlias = Mapping[str, Sequence[str]]
#: What the names in a source stand for. The private functions here enter what they meet.
Scope: TypeAlias = dict[str, Any]

_SAME_NAME = (
    "mm", "bmm", "addmm", "tanh", "sigmoid", "relu", "neg", "exp", "rsqrt", "permute", "unsqueeze", "t",
    "native_layer_norm", "embedding", "mean", "sum",
)  # fmt: skip
#: Overloads whose Python binding does the same with less parsing. Only those whose positional arguments agree.
_BINDINGS = {f"aten.{name}.default": name for name in _SAME_NAME} | {
    "aten.add.Tensor": "add",
    "aten.sub.Tensor": "sub",
    "aten.mul.Tensor": "mul",
    "aten.mul.Scalar": "mul",
    "aten.div.Tensor": "div",
    "aten.div.Scalar": "div",
    "aten.pow.Tensor_Scalar": "pow",
    "aten.transpose.int": "transpose",
    "aten.sum.dim_IntList": "sum",
    "aten.view.default": "Tensor.reshape",  # a real kernel may return other strides than its fake one
    "aten.expand.default": "Tensor.expand",
}


def function(
    name: str, body: Sequence[fx.Node], inputs: Sequence[str], outputs: Sequence[str], constants: Mapping[str, Any],
    adds: Adds,
) -> tuple[str, Callable[[list[Any]], tuple[Any, ...]]]:  # fmt: skip
    """The nodes as source of a function of a box, and that function. ``adds``: see ``Program``."""
    scope = dict(constants)
    last = {used.name: index for index, node in enumerate(body) for used in node.all_input_nodes}
    keep = {*outputs, *constants, *(into for targets in adds.values() for into in targets)}
    lines = [f"def {name}(box):"]
    if inputs:
        lines += [f"    {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = box", "    box.clear()"]
    lines += _delete(value for value in inputs if value not in last and value not in keep)
    for index, node in enumerate(body):
        lines.append(f"    {node.name} = {_call(node, scope)}")
        lines += [f"    {into}.add_({node.name})" for into in adds.get(node.name, ())]
        dead = [used.name for used in node.all_input_nodes if last[used.name] == index and used.name not in keep]
        lines += _delete([*dead, *([node.name] if node.name not in last and node.name not in keep else [])])
    lines.append(f"    return ({', '.join(outputs)}{',' if len(outputs) == 1 else ''})")
    code = "\n".join(lines) + "\n"
    namespace = dict(scope)
    exec(compile(code, f"<fpipe program {name}>", "exec"), namespace)
    return code, namespace[name]


def _delete(names: Iterable[str]) -> list[str]:
    unique = list(dict.fromkeys(names))
    return [f"    del {', '.join(unique)}"] if unique else []


def _call(node: fx.Node, scope: Scope) -> str:
    if node.target is operator.getitem:
        return f"{_text(node.args[0], scope)}[{_text(node.args[1], scope)}]"
    args = [_text(a, scope) for a in node.args] + [f"{k}={_text(v, scope)}" for k, v in node.kwargs.items()]
    return f"{_target(node.target, scope)}({', '.join(args)})"


def _target(target: object, scope: Scope) -> str:
    """A short name for an operation."""
    if isinstance(target, Op):
        binding = _BINDINGS.get(str(target))
        name = (f"torch.{binding}" if binding else str(target).removesuffix(".default")).replace(".", "_")
        scope[name] = operator.attrgetter(binding)(torch) if binding else direct(target)
        return name
    name = f"{getattr(target, '__module__', 'op')}_{getattr(target, '__name__', 'call')}".replace(".", "_")
    return _enter(name, target, scope)


def _text(value: object, scope: Scope) -> str:
    """An argument as source; a value without a literal gets a name."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_text(item, scope) for item in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    name = f"lit_{type(value).__name__}_{value}" if isinstance(value, (torch.dtype, torch.device)) else "lit"
    return _enter("".join(c if c.isalnum() else "_" for c in name), value, scope)


def _enter(name: str, value: object, scope: Scope) -> str:
    """Enter a value under a name, or under the next one that is free."""
    free, serial = name, 0
    while free in scope and scope[free] is not value:
        serial += 1
        free = f"{name}_{serial}"
    scope[free] = value
    return free
