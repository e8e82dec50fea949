"""What a function must not do behind the back of its trace: write into a tensor that it captured, whether it says so
or, as the kernels of batch norm do, not; or hang on one that wants a gradient.

``watching`` refuses both before they happen. ``spell_out`` makes the hidden writes of a traced graph values like
others. Graphs and operations alone are known here, no stages.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TraceError

#: Operations that update running statistics without a word in their schema.
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_STATISTICS = ("running_mean", "running_var")


class watching(TorchDispatchMode):  # noqa: N801  (used as a function)
    """While a function runs on fake tensors, refuse what it writes into real ones."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch.cond compiles what it is given, this mode and all
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Like fake tensors themselves, it is no business of a compiler."""
        return True

    def __init__(self, label: str):
        super().__init__()
        self.label = label
        self.views: dict[int, Any] = {}  # storages of fake views of real tensors, which the dict keeps alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # torch.cond and its like
            return func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            if _real(tensor) or (is_fake(tensor) and tensor.untyped_storage()._cdata in self.views):
                raise _impure(self.label, tensor)
        real = [a for a in args if _real(a)]
        for tensor in real:
            if tensor.requires_grad and torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
                raise TraceError(
                    f"stage {self.label} closes over a tensor of shape {list(tensor.shape)} that requires a gradient, "
                    "which it would silently not get; pass it in the stage's parameters, or close over tensor.detach()"
                )
        out = func(*args, **kwargs)
        aliases = any(r.alias_info is not None for r in func._schema.returns)
        if real and aliases and isinstance(out, FakeTensor) and func is not torch.ops.aten.lift_fresh.default:
            storage = out.untyped_storage()
            self.views[storage._cdata] = storage
        return out


class guarding(TorchDispatchMode):  # noqa: N801  (used as a function)
    """While a function runs on real tensors that were made up for it, refuse what it writes into any others."""

    def __init__(self, label: str, given: Iterable[torch.Tensor]):
        super().__init__()
        self.label = label
        self.own = {_storage(tensor) for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            if _storage(tensor) not in self.own | {None}:
                raise _impure(self.label, tensor)
        out = func(*args, **kwargs)
        before = {_storage(a) for value in (*args, *kwargs.values()) for a in _list(value)}
        self.own |= {_storage(made) for made in _list(out)} - before
        return out


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return isinstance(tensor, FakeTensor)


def _real(value: Any) -> bool:
    """Whether a tensor has data; what wraps others does not tell."""
    wraps = hasattr(type(value), "__tensor_flatten__")
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not wraps


def _storage(value: Any) -> int | None:
    """What memory a plain tensor stands on; ``None`` for anything else."""
    plain = isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter)
    return value.untyped_storage()._cdata if plain and value.layout is torch.strided else None


def _impure(label: str, tensor: torch.Tensor) -> TraceError:
    return TraceError(
        f"stage {label} writes into a tensor of shape {list(tensor.shape)} that it closes over; stages are pure "
        "functions: return what changes (fpipe.Stage(fn, state=True) carries running statistics)"
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation changes."""
    schema = func._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    if schema.is_mutable:
        names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    elif hides_writes(func, given):
        names = list(_STATISTICS)
    else:
        return []
    values = [v for name in names for v in _list(given.get(name))]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def hides_writes(func: Any, given: dict[str, Any]) -> bool:
    """Whether an operation updates running statistics that its schema does not admit to write."""
    named = isinstance(func, torch._ops.OpOverload) and func._opname in _NORMS
    return named and bool(given["training"]) and given["running_mean"] is not None


def norm(kernel: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    """A batch norm that returns the new running statistics as its last two items, and changes nothing."""
    mean, var = args[3].clone(), args[4].clone()
    return (*kernel(*args[:3], mean, var, *args[5:]), mean, var)


def spell_out(graph: fx.GraphModule) -> None:
    """Make hidden updates of running statistics explicit: later readers of a statistic read the new value."""
    for node in list(graph.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        if not hides_writes(node.target, dict(zip(names, node.args, strict=False))):
            continue
        later = _after(node)
        with graph.graph.inserting_before(node):
            made = graph.graph.call_function(norm, (node.target, *node.args))
            made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        count = len(node.meta["val"])
        for index, old in zip((count, count + 1), node.args[3:5], strict=True):
            assert isinstance(old, fx.Node)
            _refuse(old)
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(operator.getitem, (made, index))
            new.meta = {"val": torch.empty_like(old.meta["val"])}
            old.replace_all_uses_with(new, delete_user_cb=lambda user, later=later: user in later)
        statistics = [o for o in node.args[3:5] if isinstance(o, fx.Node)]
        made.meta["val"] = (*node.meta["val"], *(torch.empty_like(o.meta["val"]) for o in statistics))
        graph.graph.erase_node(node)


def _after(node: fx.Node) -> set[fx.Node]:
    found, at = set(), node.next
    while at.op != "root":
        found.add(at)
        at = at.next
    return found


def _refuse(statistic: fx.Node) -> None:
    """A running statistic that is a parameter or a side input would be changed for the caller."""
    if statistic.op == "placeholder" and statistic.name[0] in "pk":
        what = "a parameter" if statistic.name[0] == "p" else "a side input"
        raise TraceError(
            f"a stage keeps running statistics in {what} and updates them in place; stages are pure functions: use "
            "fpipe.Stage(fn, state=True) with fn(params, state, x) -> (y, state)"
        )
