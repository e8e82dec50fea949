# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a traced graph show, and its clean-up: simplification, and no writes.

Placeholders are named after their role: ``p0..`` parameters, ``x0..`` inputs, ``k0..`` side inputs,
``t0..`` state, ``dy0..`` cotangents. Knows graphs, no stages.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..errors import TraceError
from ..tree import arriving
from .explain import write_error
from .internals import (
    Targeted,
    mutates,
    operator_of,
    resolved,
    returns_views,
    storage_id,
    updates_statistics,
)
from .sizes import Numbers, Size
from .symbols import known

_T, _SUM, _VIEW = (
    torch.ops.aten.t.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.view.default,
)
_AS_STRIDED = torch.ops.aten.as_strided.default
_RNN = torch.ops.aten.mkldnn_rnn_layer.default
_IDENTITY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
#: What the first letter of a placeholder's name means, where its memory belongs to the caller and
#: may not change.
_SHARED = {"p": "a parameter", "k": "a side input"}


#: The key of a node's meta that identifies its storage, where another call of the same block shares
#: its fake tensor.
STORAGE = "fpipe_storage"


class Held(NamedTuple):
    """The memory behind a named value: the first value on its storage, and the storage's size."""

    root: str
    nbytes: int
    given: bool = False  # the storage of an input

    def at(self, numbers: Numbers) -> Held:
        """The same for other sizes."""
        root, nbytes, given = self
        return Held(root, numbers[nbytes.place], given) if isinstance(nbytes, Size) else self


def value_of(node: object) -> torch.Tensor | None:
    """The fake tensor that a node stands for, if it is one."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def argument(node: fx.Node, index: int) -> fx.Node:
    """A positional argument that is a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def shared(node: fx.Node) -> str | None:
    """What a node is, in words, if stages may not write into it: a parameter, a side input or a
    captured tensor.
    """
    if node.op == "get_attr":
        return "a captured tensor"
    return _SHARED.get(node.name[0]) if node.op == "placeholder" else None


def draws(node: Targeted) -> bool:
    """Whether a node draws random numbers."""
    op = operator_of(node)
    return op is not None and torch.Tag.nondeterministic_seeded in op.tags


def elementwise(node: fx.Node) -> bool:
    """Whether a node computes each element from the same elements of its inputs, without random
    numbers.
    """
    op = operator_of(node)
    return op is not None and torch.Tag.pointwise in op.tags and not mutates(op) and not draws(node)


def constants(graph: fx.GraphModule) -> dict[str, Any]:
    """Captured tensors and modules by name."""
    captured = {n.name: getattr(graph, n.target) for n in graph.graph.find_nodes(op="get_attr")}
    # A tensor that requires a gradient was used under no_grad or detached.
    return {
        name: v.detach() if isinstance(v, torch.Tensor) and v.requires_grad else v
        for name, v in captured.items()
    }


def annotation(node: fx.Node, key: str) -> object | None:
    """The annotation ``key`` under which a node was recorded, if any."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


def storage(node: fx.Node, value: torch.Tensor) -> Hashable:
    """What identifies the storage of a node's value; calls of one block share the fake tensors of
    its trace.
    """
    return node.meta.get(STORAGE) or storage_id(value)


def memory(nodes: Iterable[fx.Node]) -> dict[str, Held]:
    """The storage behind each value, named after the first value on it."""
    roots: dict[Hashable, str] = {}
    behind: dict[str, Held] = {}
    for node in nodes:
        value = value_of(node)
        if value is None or value.layout is not torch.strided:
            continue
        waits = node.name.startswith("wait_tensor")  # returns the tensor that it waited for
        root = roots.setdefault(
            storage(node, value), behind[str(node.args[0])].root if waits else node.name
        )
        known = behind.get(root)
        nbytes = value.untyped_storage().nbytes() if known is None else known.nbytes
        behind[node.name] = Held(
            root, nbytes, node.op == "placeholder" if known is None else known.given
        )
    return behind


def dense(node: fx.Node) -> bool:
    """Whether all elements of a value are at different places in memory."""
    value = value_of(node)
    return value is not None and all(
        stride > 0 or n <= 1 for n, stride in zip(value.shape, value.stride(), strict=True)
    )


# ---- clean-up ----
def normalize(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Name the inputs of a graph as it was traced, and clean it up."""
    name_inputs(graph, names)
    clean(graph)
    simplify(graph)
    spell_out(graph)
    resolve(graph)
    copy_shared_outputs(graph)


def name_inputs(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Name the placeholders, and rename every node whose name is taken."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    taken = {*names, "box", "lit"}
    for node in graph.graph.nodes:
        if node.op != "placeholder" and node.name in taken:
            node.name = f"{node.name}_"
    for placeholder, name in zip(placeholders, names, strict=True):
        placeholder.name = placeholder.target = name


def clean(graph: fx.GraphModule) -> None:
    """Remove identities and writes back into inputs, then dead code. Splits convolutions'
    gradients.
    """
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _IDENTITY:
            node.replace_all_uses_with(argument(node, 0))
            graph.graph.erase_node(node)
        elif node.target is _T and argument(node, 0).target is _T:
            node.replace_all_uses_with(argument(argument(node, 0), 0))  # transposed twice
        elif node.target is torch.ops.aten.copy_.default:
            if what := shared(argument(node, 0)):
                raise write_error(what)
            node.replace_all_uses_with(
                argument(node, 1)
            )  # an input or a state, which the stage may overwrite
            graph.graph.erase_node(node)
        elif node.target is torch.ops.aten.convolution_backward.default:
            _split_convolution(graph, node)
        elif node.target is _AS_STRIDED:
            _check_place(node)
    graph.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output")
    )


def viewed(view: fx.Node) -> fx.Node:
    """The value whose memory a view shows, through views of views."""
    root = argument(view, 0)
    while (
        root.op == "call_function" and (op := operator_of(root)) is not None and returns_views(op)
    ):
        root = argument(root, 0)
    return root


def _check_place(node: fx.Node) -> None:
    """Refuse a place in the memory of an argument: another microbatch begins at another place of
    the same memory.
    """
    root = viewed(node)
    if root.op == "placeholder" and root.name[0] != "d" and (*node.args[3:], None)[0] is not None:
        raise TraceError(
            "a stage calls as_strided with storage_offset= on an argument, whose place in memory "
            "differs from call to "
            "call; leave storage_offset out, take a slice first, or use fpipe.Stage(fn, "
            'engine="eager")'
        )


def _split_convolution(graph: fx.GraphModule, node: fx.Node) -> None:
    """Make input and weight gradients of a convolution two operations: they share no work."""
    mask = node.args[10]
    if not isinstance(mask, (list, tuple)) or not mask[0] or not any(mask[1:]):
        return
    gradients = []
    for part in ([mask[0], False, False], [False, *mask[1:]]):
        with graph.graph.inserting_before(node):
            gradients.append(
                graph.graph.create_node("call_function", node.target, (*node.args[:10], part))
            )
        gradients[-1].meta = dict(node.meta)
    for item in [user for user in node.users if user.op == "call_function"]:
        item.args = (gradients[item.args[1] != 0], item.args[1])
    graph.graph.erase_node(node)


def resolve(graph: fx.GraphModule) -> None:
    """Resolve lazy tensors that are returned, such as conjugates: a message contains numbers, not
    flags of a tensor.
    """
    output = next(iter(graph.graph.find_nodes(op="output")))
    targets = {str(node.target) for node in graph.graph.nodes}
    numbers: dict[fx.Node, fx.Node] = {}
    for node in dict.fromkeys(
        n for n in output.args[0] if isinstance(n, fx.Node) and n.op == "call_function"
    ):
        value = value_of(node)
        flag = (
            "aten._conj.default"
            if value is not None and value.is_complex()
            else "aten._neg_view.default"
        )
        lazy = value is not None and not targets.isdisjoint(
            (flag, "aten._efficientzerotensor.default")
        )
        if lazy:
            with graph.graph.inserting_before(output):
                numbers[node] = graph.graph.call_function(resolved, (node,))
            numbers[node].meta["val"] = value
    output.args = ([numbers.get(n, n) for n in output.args[0]],)


def copy_shared_outputs(graph: fx.GraphModule) -> None:
    """Copy what is returned and belongs to others (parameters, side inputs, state, captured
    tensors), and what has gaps in memory and would arrive with other strides. An input or a
    cotangent that is returned stays as it is.
    """
    output = next(iter(graph.graph.find_nodes(op="output")))
    copies: dict[fx.Node, fx.Node] = {}
    for node in dict.fromkeys(n for n in output.args[0] if isinstance(n, fx.Node)):
        value = value_of(node)
        foreign = shared(node) or (node.op == "placeholder" and node.name[0] == "t")
        gaps = value is not None and tuple(value.stride()) != arriving(value.shape, value.stride())
        if not foreign and not (gaps and node.op == "call_function"):
            continue
        with graph.graph.inserting_before(output):
            copies[node] = graph.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        if value is not None:
            copies[node].meta["val"] = value.clone(memory_format=torch.contiguous_format)
    output.args = ([copies.get(n, n) for n in output.args[0]],)
    graph.graph.lint()


# ---- simplification ----
def simplify(graph: fx.GraphModule) -> None:
    """Remove views that are not needed.

    A sum that keeps its axes for a view to drop them drops them itself: the gradient of each bias
    is such a sum. Elementwise operations between a view and its inverse are done without both.

    >>> gm = fx.symbolic_trace(lambda x: x)  # a graph of ours has values in the meta of its nodes
    >>> simplify(gm)
    """
    for node in list(graph.graph.nodes):
        if node.target is _VIEW and _drops_axes(node):
            total = argument(node, 0)
            node.target, node.args, node.kwargs = _SUM, (*total.args[:2], False), total.kwargs
            graph.graph.erase_node(total)
        elif elementwise(node):
            _apply_before_views(node)


def _drops_axes(view: fx.Node) -> bool:
    """Whether a view only drops the axes that a sum kept."""
    total = view.args[0]
    if (
        not isinstance(total, fx.Node) or total.target is not _SUM
    ):  # an erased view has no arguments
        return False
    if len(total.users) > 1 or len(total.args) != 3 or not total.args[2]:
        return False
    kept, dropped, axes = value_of(total), value_of(view), total.args[1]
    if kept is None or dropped is None or not isinstance(axes, (list, tuple)):
        return False
    summed = {axis % kept.dim() for axis in axes if isinstance(axis, int)}
    return bool(summed) and _same(
        dropped.shape, [n for axis, n in enumerate(kept.shape) if axis not in summed]
    )


def _apply_before_views(node: fx.Node) -> None:
    """Apply an elementwise operation to the inputs of the views that it reads, and view the result.

    Where the result is viewed back in the shape of those inputs, both views go.
    """
    views, value = node.all_input_nodes, value_of(node)
    if value is None or not views or any(view.target is not _VIEW for view in views):
        return
    sources = [argument(view, 0) for view in views]
    flat, shape = _common_shape(sources, value.numel()), _common_shape(views, value.numel())
    if flat is None or shape is None or not value.is_contiguous() or not _same(shape, value.shape):
        return
    views_back = [user for user in node.users if _is_view(user, flat)]
    if not views_back and not all(elementwise(user) for view in views for user in view.users):
        return
    for view, source in zip(views, sources, strict=True):
        node.replace_input_with(view, source)
    node.meta["val"] = value.view(flat)
    with node.graph.inserting_after(node):
        viewed = node.graph.call_function(_VIEW, (node,))
    viewed.args = (node, list(value.shape))  # sizes may be symbols, which call_function warns of
    viewed.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(viewed, delete_user_cb=lambda user: user is not viewed)
    for view in views_back:
        view.replace_all_uses_with(node)
        node.graph.erase_node(view)
    for view in (viewed, *views):
        if not view.users:
            node.graph.erase_node(view)


def _common_shape(nodes: Sequence[fx.Node], count: int) -> tuple[int, ...] | None:
    """The shape of values that are all contiguous, of one shape and of ``count`` elements."""
    values = [value for node in nodes if (value := value_of(node)) is not None]
    if len(values) < len(nodes):
        return None
    shape = tuple(values[0].shape)

    def alike(value):
        return value.is_contiguous() and known(value.numel() == count) and _same(value.shape, shape)

    return shape if all(map(alike, values)) else None


def _is_view(node: fx.Node, shape: tuple[int, ...]) -> bool:
    value = value_of(node)
    return node.target is _VIEW and value is not None and _same(value.shape, shape)


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal for all sizes that the trace may have."""
    return len(one) == len(other) and all(known(a == b) for a, b in zip(one, other, strict=True))


# ---- operations that do more than their schemas say ----
def norm(kernel: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    """Batch norm without writes: the new running statistics are the last two items of the
    result.
    """
    mean, var = args[3].clone(), args[4].clone()
    return (*kernel(*args[:3], mean, var, *args[5:]), mean, var)


def keeping(kernel: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    """An operation that returns what its backward needs only while autograd records, which programs
    switch off.
    """
    with torch.enable_grad():
        return kernel(*args)


def spell_out(graph: fx.GraphModule) -> None:
    """Make updates of running statistics explicit: later readers of a statistic read the new
    value.
    """
    nodes = list(graph.graph.nodes)
    for place, node in enumerate(nodes):
        op = operator_of(node)
        if node.target is _RNN:
            node.target, node.args = keeping, (node.target, *node.args)
        if op is not None and updates_statistics(op, node.args):
            _return_statistics(graph.graph, node, set(nodes[place + 1 :]))


def _return_statistics(graph: fx.Graph, node: fx.Node, later: Container[fx.Node]) -> None:
    old = [argument(node, 3), argument(node, 4)]
    for what in filter(None, map(shared, old)):
        raise TraceError(
            f"a stage keeps running statistics in {what} and updates them in place; stages are "
            "pure functions: "
            "use fpipe.Stage(fn, state=True) with fn(params, state, x) -> (y, state)"
        )
    results, values = (
        node.meta["val"],
        [torch.empty_like(statistic.meta["val"]) for statistic in old],
    )
    with graph.inserting_before(node):
        pure = graph.call_function(norm, (node.target, *node.args))  # type: ignore[arg-type]
        new = [
            graph.call_function(operator.getitem, (pure, len(results) + index)) for index in (0, 1)
        ]
    pure.meta = {**node.meta, "val": (*results, *values)}
    node.replace_all_uses_with(pure)
    for statistic, item, value in zip(old, new, values, strict=True):
        item.meta = {"val": value}
        statistic.replace_all_uses_with(item, delete_user_cb=lambda user: user in later)
    graph.erase_node(node)
