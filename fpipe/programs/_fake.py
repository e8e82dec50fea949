"""All that fpipe asks of torch's private tracing: fake tensors, ``make_fx`` and functionalization.

Works on torch 2.11 and 2.13 (``tests/programs/test_fake.py``). Nothing here knows what a stage is: leaves come
in, a cleaned graph goes out.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os.path import dirname, sep
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import preserve_node_meta

from ..errors import ActionError, TraceError
from ..tree import AbstractTree, Aval, arriving
from .stage_programs import Held

_DATA = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
#: What torch says of code that runs on real tensors and not on fake ones.
_UNTRACEABLE = (
    ".numpy()", "symbolically trace", "fake impl", "data pointer", "meta kernel", "meta tensors", "inputs of bf16",
)  # fmt: skip
_T = torch.ops.aten.t.default
_IDENTITY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def mode() -> FakeTensorMode:
    """A world without data. Real tensors that a function captured may enter it as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own log of what fails on fake tensors: the exception says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def empty(aval: Aval) -> torch.Tensor:
    """A fake tensor of an aval; call inside ``mode()``."""
    tensor = aval.build(lambda a: torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device))
    return tensor.requires_grad_(aval.grad and aval.differentiable)


def inputs(trees: Iterable[AbstractTree]) -> list[list[Any]]:
    """The flat leaves of abstract trees, with fake tensors; call inside ``mode()``."""
    return [abstract.map(empty) for abstract in trees]


def make_graph(joint: Any, flat: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Record what ``joint`` does to tensors as a graph without mutations; one placeholder per tensor."""
    for tensor in flat:
        tensor.grad = None
    with preserve_node_meta():
        graph = make_fx(joint, _allow_non_fake_inputs=True)(*flat)
    if any(_writes(node) for node in graph.graph.nodes):
        plain = [t.detach() for t in flat]
        regions = any("custom" in node.meta for node in graph.graph.nodes)
        functional = torch.func.functionalize(_interpreted(graph) if regions else graph, remove="mutations")
        with torch.no_grad(), preserve_node_meta():
            graph = make_fx(functional, _allow_non_fake_inputs=True)(*plain)
    return graph


def _interpreted(graph: fx.GraphModule) -> Any:
    """The graph run node by node, so that marks on nodes pass to the nodes made from them."""
    return lambda *flat: fx.Interpreter(graph).run(*flat)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def name_inputs(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Give placeholders their names, and every node that had one of them another."""
    holders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    taken = set(names)
    for node in graph.graph.nodes:
        if node.op != "placeholder" and (node.name in taken or node.name in ("box", "lit")):
            node.name = f"{node.name}_"
    for holder, name in zip(holders, names, strict=True):
        holder.name = holder.target = name


def clean(graph: fx.GraphModule) -> None:
    """Drop identities and writes back into inputs, then what nobody uses."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _IDENTITY:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.target is _T and isinstance(node.args[0], fx.Node) and node.args[0].target is _T:
            node.replace_all_uses_with(node.args[0].args[0])  # transposed twice
        elif node.target is torch.ops.aten.copy_.default:
            _drop_write_back(graph, node)
        elif node.target is torch.ops.aten.convolution_backward.default:
            _split_convolution(graph, node)
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _drop_write_back(graph: fx.GraphModule, node: fx.Node) -> None:
    """A stage's input and state are copies to the caller; what it shares with others may not change: refuse that."""
    target = node.args[0]
    assert isinstance(target, fx.Node)
    if target.op == "get_attr" or (target.op == "placeholder" and target.name[0] in "pk"):
        what = {"p": "a parameter", "k": "a side input"}.get(target.name[0], "a captured tensor")
        what = "a captured tensor" if target.op == "get_attr" else what
        raise TraceError(
            f"a stage writes into {what} in place; stages are pure functions: return what changes "
            "(fpipe.Stage(fn, state=True) carries running statistics)"
        )
    node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
    graph.graph.erase_node(node)


def _split_convolution(graph: fx.GraphModule, node: fx.Node) -> None:
    """Input and weight gradients of a convolution share no work, but come from one operation: make it two."""
    mask = node.args[10]
    items = [u for u in node.users if u.op == "call_function"]
    if not isinstance(mask, (list, tuple)) or not mask[0] or not any(mask[1:]):
        return
    for_input, for_weight = [mask[0], False, False], [False, *mask[1:]]
    with graph.graph.inserting_before(node):
        first = graph.graph.call_function(node.target, (*node.args[:10], for_input))  # type: ignore[arg-type]
        second = graph.graph.call_function(node.target, (*node.args[:10], for_weight))  # type: ignore[arg-type]
    first.meta, second.meta = dict(node.meta), dict(node.meta)
    for item in items:
        item.args = (first if item.args[1] == 0 else second, item.args[1])
    graph.graph.erase_node(node)


def own_outputs(graph: fx.GraphModule) -> None:
    """Copy what is returned but belongs to others: parameters, side inputs, captured tensors; and what has gaps in
    memory, which would arrive otherwise than it left. An input or a cotangent that is passed on stays as it is."""
    output = next(n for n in graph.graph.nodes if n.op == "output")
    made: dict[fx.Node, fx.Node] = {}
    for node in output.args[0]:  # type: ignore[union-attr]
        if not isinstance(node, fx.Node) or node in made:
            continue
        foreign = node.op == "get_attr" or (node.op == "placeholder" and node.name[0] in "pkt")
        value = node.meta.get("val")
        gaps = isinstance(value, torch.Tensor) and node.op == "call_function" and _gappy(value)
        if foreign or gaps:
            with graph.graph.inserting_before(output):
                copy = graph.graph.call_function(
                    torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            if isinstance(value, torch.Tensor):
                copy.meta["val"] = value.clone(memory_format=torch.contiguous_format)
            made[node] = copy
    output.args = ([made.get(n, n) if isinstance(n, fx.Node) else n for n in output.args[0]],)  # type: ignore[union-attr]
    graph.graph.lint()


def _gappy(value: torch.Tensor) -> bool:
    return tuple(value.stride()) != arriving(tuple(value.shape), tuple(value.stride()))


def constants(graph: fx.GraphModule) -> dict[str, Any]:
    """Captured tensors by name."""
    found: dict[str, Any] = {}
    for node in graph.graph.nodes:
        if node.op != "get_attr":
            continue
        value = getattr(graph, node.target)
        if isinstance(value, torch.Tensor) and value.requires_grad:  # used under no_grad, or detached
            value = value.detach()
        found[node.name] = value
    return found


def region(node: fx.Node, key: str) -> object | None:
    """The mark ``key`` that a node was made under, if any."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


def memory(nodes: Iterable[fx.Node]) -> dict[str, Held]:
    """Which storage lies behind each value, named after the first value on it, and its bytes."""
    roots: dict[int, str] = {}
    keep: list[Any] = []
    found: dict[str, Held] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            keep.append(storage)
            waited = node.name.startswith("wait_tensor")  # it gives what it waited for
            root = roots.setdefault(storage._cdata, found[str(node.args[0])].root if waited else node.name)
            given = found[root].given if root in found else node.op == "placeholder"
            found[node.name] = Held(root, storage.nbytes(), given)
    return found


def dense(node: fx.Node) -> bool:
    """Whether a value's elements are all different places in memory."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return all(stride > 0 or size <= 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def explain(error: Exception, label: str, wants: str) -> Exception:
    """What to tell the user about a function that did not trace."""
    place = where(error)
    text = str(error).lower()
    if isinstance(error, _DATA) or "data-dependent" in text or "data dependent" in text:
        return TraceError(
            f"stage {label} {wants} depends on data{place}: a value decides what is computed or of which shape, "
            'so it has no straight-line program; use fpipe.Stage(fn, engine="eager") for it'
        )
    if isinstance(error, UnsupportedOperatorException) or any(word in text for word in _UNTRACEABLE):
        return TraceError(
            f'stage {label} {wants} cannot be traced{place}: {error}; use fpipe.Stage(fn, engine="eager") for it'
        )
    return ActionError(f"stage {label} {wants} raised {type(error).__name__}{place}: {error}")


def where(error: BaseException) -> str:
    """The innermost line of the user's own code."""
    ours = (*torch.__path__, dirname(__file__))  # by place: a folder of the user's may be called fpipe, too
    inside = (*(path + sep for path in ours), "<fpipe")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
