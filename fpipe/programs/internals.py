# SPDX-License-Identifier: Apache-2.0
"""State and modes of torch that tracing needs; most of them have private names.

Schemas and storages, transforms, autocast, fake tensors, and a mode that refuses impure functions.
Works on torch 2.11 to 2.15 (``tests/programs/test_fake.py``). Knows no stages, graphs or programs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from threading import RLock
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.backends import cuda
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ..actions.product import load_pass
from ..errors import GroupError
from ..tree import AbstractTree, Aval
from .operations import Operation

T = TypeVar("T")
TorchOp: TypeAlias = torch._ops.OpOverload
#: The device types for which autocast is on, each with its dtype.
Ambient: TypeAlias = tuple[tuple[str, torch.dtype], ...]
Args: TypeAlias = Sequence[object]
Kwargs: TypeAlias = Mapping[str, object]
#: Runs an operation on arguments and keyword arguments.
Run: TypeAlias = Callable[[TorchOp, Args, Kwargs], object]
#: Operations that ran, with what they returned.
Steps: TypeAlias = list[tuple[TorchOp, Args, Kwargs, object]]

_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
#: What ``torch.tensor(...)`` runs. Its schema declares a view, but no other tensor has the memory.
_FRESH = torch.ops.aten.lift_fresh.default
#: How operations of this package run on fake tensors. They are not registered by
#: ``torch.library.register_fake``, which reads the files of all loaded modules: that takes 50 ms.
RULES: dict[object, Callable[..., object]] = {}


# ---- operations ----
def operator_of(node: fx.Node | Operation) -> TorchOp | None:
    """The torch operation that a node calls, if it is one."""
    return node.target if isinstance(node.target, TorchOp) else None


def draws(node: fx.Node | Operation) -> bool:
    """Whether a node draws random numbers.

    Fused attention has the tag of draws also without dropout, and so has its backward, which is
    given the state of the draws.
    """
    op = operator_of(node)
    if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = [argument.name for argument in op._schema.arguments]
    given = {"dropout_p": 0.0, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or ("philox_seed" not in names and given["dropout_p"] != 0)


def is_collective(target: object) -> bool:
    """Whether an operation is a functional collective, or the wait for one."""
    return getattr(target, "namespace", "") == "_c10d_functional"


def direct(op: TorchOp) -> Callable[..., Any]:
    """The operation without checks of its overload."""
    return op._op


def mutates(op: TorchOp) -> bool:
    """Whether an operation writes into an argument, by its schema."""
    return op._schema.is_mutable


def returns_views(op: TorchOp) -> bool:
    """Whether a result may share memory with an argument, by the schema."""
    return any(result.alias_info is not None for result in op._schema.returns)


def updates_statistics(op: TorchOp, args: Args) -> bool:
    """Whether an operation is a batch norm that writes into running statistics, its arguments 3 and
    4.

    Its kernels write into them although their schemas declare them as plain inputs.
    """
    return op._opname in _NORMS and bool(args[5]) and args[3] is not None


def written(op: TorchOp, args: Args, kwargs: Kwargs) -> list[object]:
    """The arguments that an operation writes into.

    >>> written(torch.ops.aten.add_.Tensor, (7, 8), {})
    [7]
    """
    if updates_statistics(op, args):
        return [args[3], args[4]]
    declared = op._schema.arguments
    values = {**dict(zip((a.name for a in declared), args, strict=False)), **kwargs}
    return [
        values.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write
    ]


# ---- tensors ----
def storage_id(tensor: Tensor) -> int:
    """A number of a tensor's storage, unique as long as the storage is alive; fake tensors have
    storages, too.
    """
    return tensor.untyped_storage()._cdata


# ---- torch.func ----
def transforming() -> bool:
    """Whether a torch.func transform or a level of forward-mode autograd is active.

    >>> transforming(), torch.vmap(lambda x: x * transforming())(torch.ones(1)).item()
    (False, 1.0)
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# ---- global state ----
@lru_cache(maxsize=1)
def _device_types() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if device is None or device.type == "cpu" else ("cpu", device.type)


def ambient() -> Ambient:
    """The device types for which autocast is on, each with its dtype.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     ambient()
    (('cpu', torch.bfloat16),)
    """
    return tuple(
        [(k, torch.get_autocast_dtype(k)) for k in _device_types() if torch.is_autocast_enabled(k)]
    )


def function_modes() -> tuple[str, ...]:
    """Each ``TorchFunctionMode`` that is active: the device of new tensors, or a class."""
    modes = _get_current_function_mode_stack()
    return tuple([str(getattr(mode, "device", type(mode))) for mode in modes])


#: Settings of torch that choose kernels.
KERNELS = (
    torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision,
    cuda.flash_sdp_enabled,
    cuda.mem_efficient_sdp_enabled,
    cuda.math_sdp_enabled,
    cuda.cudnn_sdp_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_mkldnn_enabled,
)
#: All global state of torch that a trace can see. Signatures of calls and traces contain its
#: values, and ranks compare them.
STATE = (
    ambient,
    torch.is_autocast_cache_enabled,
    torch.get_default_dtype,
    function_modes,
    *KERNELS,
)


def surroundings() -> tuple[object, ...]:
    """The values of ``STATE``.

    >>> before = surroundings()
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     surroundings() == before
    False
    """
    return tuple([get() for get in STATE])  # called in each step: faster than a generator


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off. A trace contains its casts, so programs would cast twice.

    Backwards run without it, as torch recommends.

    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
    ...     ambient()
    ()
    """
    states = ambient()
    if not states:
        yield
        return
    with ExitStack() as stack:
        for kind, _ in states:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def caching(enabled: bool) -> Iterator[None]:
    """Switch autocast's cache on or off, and empty it at the end.

    With the cache, a parameter is cast once for all its uses, and the gradients of the uses are
    added in the narrow dtype. Without it, each use has a cast, and they are added in the dtype of
    the parameter, which gives other bits.

    >>> with caching(False):
    ...     torch.is_autocast_cache_enabled()
    False
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


# ---- fake tensors ----
class Fake(FakeTensorMode):
    """A mode in which tensors have no data. Captured real tensors may enter it as constants.

    ``cpu:0`` and ``cpu`` are one device in it, as for tensors with data. In torch's own mode they
    are two.

    >>> with Fake():
    ...     type(torch.ones(2)).__name__
    'FakeTensor'
    """

    supports_higher_order_operators = True

    def __init__(self, shape_env: ShapeEnv | None = None):
        if torch.version.cuda is not None and not torch.cuda.is_available():
            load_pass("first_mode").enter_first()
        super().__init__(allow_non_fake_inputs=True, shape_env=shape_env)
        self._allow_unsafe_data_ptr_access = False  # numpy() would read missing memory

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Any = None
    ) -> object:
        if isinstance(func, torch._ops.HigherOrderOperator):
            # their rules are registered for torch's own mode
            return func.python_key_table[FakeTensorMode](self, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Any = None
    ) -> object:
        """Torch's, or the rule of an operation of this package."""
        if func in RULES:
            with self:
                return RULES[func](*args)
        device = kwargs.get("device") if kwargs else None
        if isinstance(device, torch.device) and device.type == "cpu" and device.index is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().dispatch(func, types, args, kwargs)


class Sizes:
    """What a trace does with the numbers in it: it takes them as they are.

    The pass for symbolic sizes has a subclass, in which numbers depend on the sizes of the inputs.
    """

    def mode(self) -> FakeTensorMode:
        """A new mode to trace under."""
        return Fake()

    def inline(self, graph: fx.GraphModule) -> None:
        """Put numbers in place of the nodes that compute them."""

    def number(self, value: Any) -> Any:
        """A number, or another argument, as programs have it."""
        return value

    def aval(self, aval: Aval) -> Aval:
        """An abstract tensor with such numbers."""
        return aval


PLAIN = Sizes()


def is_fake(value: object) -> TypeGuard[FakeTensor]:
    """Whether a value is a tensor without data."""
    return isinstance(value, FakeTensor)


def empty(aval: Aval) -> Tensor:
    """A fake tensor of an aval; call it inside a mode."""
    tensor = aval.build(
        lambda a: torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device)
    )
    return tensor.requires_grad_(aval.grad and aval.differentiable)


def fake_inputs(trees: Iterable[AbstractTree]) -> list[list[Any]]:
    """The flat leaves of abstract trees, with fake tensors; call it inside a mode."""
    return [abstract.map(empty) for abstract in trees]


@contextmanager
def quiet() -> Iterator[None]:
    """Disable torch's log of operations that fail on fake tensors: the exception has the same
    text.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# ---- impure functions ----
class Around(TorchDispatchMode):
    """Runs every operation by ``run(op, args, kwargs)``."""

    supports_higher_order_operators = True

    def __init__(self, run: Run):
        super().__init__()
        self.run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.cond compiles its branches under the modes that are on

    @classmethod
    def is_infra_mode(cls) -> bool:
        """A compiler may ignore this mode, as it ignores fake tensors."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Args = (), kwargs: Any = None
    ) -> object:
        if not isinstance(func, TorchOp):  # torch.cond, for example
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})


def pure_on_fakes(
    label: str, error: str = "captured_gradient_error", steps: Steps | None = None
) -> Around:
    """While a function runs on fake tensors under this mode, refuse writes into real ones.

    Where gradients are recorded, real ones that require one are refused also as arguments, with
    the exception of the function ``error`` of the pass ``explain``. ``steps`` gets what ran.
    """
    #: The storages of fake views of real tensors, by id; kept alive, so that no other gets the id.
    views: dict[int, torch.UntypedStorage] = {}

    def run(op: TorchOp, args: Args, kwargs: Kwargs) -> object:
        for tensor in tensors_in(written(op, args, kwargs)):
            if _has_data(tensor) or (is_fake(tensor) and storage_id(tensor) in views):
                raise load_pass("explain").captured_write_error(label, tensor)
        captured = [each for each in args if _has_data(each)]
        if torch.is_grad_enabled() and op is not torch.ops.aten.detach.default:
            for tensor in captured:
                if tensor.requires_grad:
                    raise getattr(load_pass("explain"), error)(label, tensor)
        result = op(*args, **kwargs)
        if captured and op is not _FRESH and returns_views(op) and is_fake(result):
            views[storage_id(result)] = result.untyped_storage()
        if steps is not None:
            steps.append((op, args, kwargs, result))
        return result

    return Around(run)


@contextmanager
def unseeded(label: str) -> Iterator[None]:
    """While a function runs on fake tensors, refuse that it seeds, sets or restores a random stream
    of torch.

    A program repeats the operations of a function, but not its seeds. A draw on fake tensors does
    not move the stream. Here each draw sets another seed: a function that restores the stream also
    restores an older seed, and is found.
    """
    stream = torch.default_generator
    device = _device_seed()
    state = stream.get_state()
    expected = stream.seed() >> 1  # random, so that no function sets the same

    def check() -> None:
        if stream.initial_seed() != expected or _device_seed() != device:
            raise load_pass("explain").seed_error(label)

    def run(op: TorchOp, args: Args, kwargs: Kwargs) -> object:
        nonlocal expected
        if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
            check()
            expected += 1
            stream.manual_seed(expected)
        return op(*args, **kwargs)

    stream.manual_seed(expected)
    try:
        with Around(run):
            yield
        check()
    finally:
        stream.set_state(state)


def _device_seed() -> int | None:
    """The seed of the accelerator, where that is in use."""
    device = torch.accelerator.current_accelerator(check_available=True)
    module: Any = None if device is None else torch.get_device_module(device)
    return module.initial_seed() if getattr(module, "is_initialized", lambda: False)() else None


def _has_data(value: object) -> TypeGuard[Tensor]:
    """Whether a value is an ordinary tensor with data. A tensor with inner tensors does
    not count: operations on these are checked instead.
    """
    return (
        isinstance(value, Tensor)
        and not is_fake(value)
        and not hasattr(type(value), "__tensor_flatten__")
    )


def tensors_in(values: Iterable[object]) -> list[Tensor]:
    """The tensors among values and in the lists among them."""
    listed = (value if isinstance(value, (list, tuple)) else [value] for value in values)
    return [each for items in listed for each in items if isinstance(each, Tensor)]


# ---- threads ----
@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context in which a variable has another value.

    >>> number = ContextVar("number", default=1)
    >>> with setting(number, 2):
    ...     number.get()
    2
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


#: Held by the thread that draws, or that traces a function.
_LOCK = RLock()
#: The seconds that a thread waits for it. Programs of two threads that also communicate could wait
#: for each other.
PATIENCE = 600.0


@contextmanager
def exclusive() -> Iterator[None]:
    """The random streams of the process, for this thread alone; other threads wait.

    >>> with exclusive(), exclusive():
    ...     pass
    """
    if not _LOCK.acquire(timeout=PATIENCE):
        raise GroupError(
            f"another thread has drawn random numbers or traced a function for {PATIENCE:g} "
            "seconds, and only one thread of a process can; run pipelines that draw inside "
            "collectives in processes of their own"
        )
    try:
        yield
    finally:
        _LOCK.release()
