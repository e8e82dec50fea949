"""Global state of torch that a trace can see: a call under another state has plans of its own, and
ranks compare it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fpipe
from fpipe.engine import facts
from fpipe.errors import TraceError
from fpipe.programs import internals
from fpipe.programs.internals import STATE
from fpipe.testing import outcomes

#: By the function that reads a state: sets a value and returns the one before.
SETTERS: dict[str, tuple[Callable[[Any], object], Callable[[], Any], Any]] = {
    "is_autocast_cache_enabled": (
        torch.set_autocast_cache_enabled,
        torch.is_autocast_cache_enabled,
        False,
    ),
    "get_default_dtype": (torch.set_default_dtype, torch.get_default_dtype, torch.bfloat16),
    "are_deterministic_algorithms_enabled": (
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
        True,
    ),
    "get_float32_matmul_precision": (
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
        "high",
    ),
    "flash_sdp_enabled": (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.flash_sdp_enabled,
        False,
    ),
    "mem_efficient_sdp_enabled": (
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        False,
    ),
    "math_sdp_enabled": (
        torch.backends.cuda.enable_math_sdp,
        torch.backends.cuda.math_sdp_enabled,
        False,
    ),
    "cudnn_sdp_enabled": (
        torch.backends.cuda.enable_cudnn_sdp,
        torch.backends.cuda.cudnn_sdp_enabled,
        False,
    ),
    "_get_cudnn_enabled": (
        lambda on: setattr(torch.backends.cudnn, "enabled", on),
        lambda: torch.backends.cudnn.enabled,
        False,
    ),
    "_get_mkldnn_enabled": (
        lambda on: torch.backends.mkldnn.set_flags(on),
        lambda: torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
        False,
    ),
}


@contextmanager
def changed(name: str) -> Any:
    if name == "ambient":
        with torch.autocast("cpu", torch.bfloat16):
            yield
    elif name == "function_modes":
        with torch.device("cpu:0"):
            yield
    else:
        put, get, value = SETTERS[name]
        before = get()
        put(value)
        try:
            yield
        finally:
            put(before)


@pytest.mark.parametrize("get", STATE, ids=lambda get: get.__name__)
def test_a_call_under_another_state_is_traced_again(get: Callable[[], Any]):
    seen: list[Any] = []

    def stage(p: Tensor, x: Tensor) -> Tensor:
        seen.append(get()[:1] if get is internals.function_modes else get())  # torch traces by one
        return x * p

    pipe = fpipe.pipeline([stage] * 2, loss=torch.sum, microbatches=2, group=fpipe.local(2))
    step = fpipe.value_and_grad(pipe)
    params, x = [torch.tensor(2.0)] * 2, torch.arange(4.0)
    step(params, x)
    before = set(seen)
    seen.clear()
    with changed(get.__name__):
        expected = get()
        assert expected not in before
        step(params, x)
        assert set(seen) == {expected}
    seen.clear()
    step(params, x)
    assert not seen


def test_plans_of_one_default_dtype_serve_no_other():
    fn = lambda p, x: x * p + torch.ones(1) / 3
    pipe = fpipe.pipeline([fn] * 2, microbatches=2, group=fpipe.local(2))
    params, x = [torch.tensor(2.0, dtype=torch.bfloat16)] * 2, torch.arange(4.0).bfloat16()
    assert pipe(params, x).dtype == torch.float32
    with changed("get_default_dtype"):
        y = pipe(params, x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, fn(params[1], fn(params[0], x)))


@pytest.mark.parametrize("warm", [True, False])
def test_ranks_of_other_states_disagree(warm: bool, monkeypatch: pytest.MonkeyPatch):
    """Fake ranks are threads, and share the state of torch: the table of one of them differs."""
    mine = threading.local()

    def switched() -> bool:
        return getattr(mine, "on", False)

    monkeypatch.setattr(internals, "STATE", (switched,))
    monkeypatch.setattr(facts, "STATE", (switched,))

    def rank(group: Any) -> None:
        fn = lambda p, x: x * p
        pipe = fpipe.pipeline([fn] * 2, loss=torch.sum, microbatches=2, group=group)
        params = pipe.place([torch.tensor(2.0)] * 2)
        if warm:
            pipe(params, torch.arange(4.0))
        mine.on = group.rank == 1
        pipe(params, torch.arange(4.0))

    for outcome in outcomes(rank, ranks=2):
        assert isinstance(outcome.error, fpipe.errors.MismatchError), outcome
        assert "has switched() is False, rank 1 has switched() is True" in str(outcome.error)


def test_results_are_joined_and_added_without_autocast():
    """torch adds up no bfloat16 losses, and joins no bfloat16 rows, under autocast of float16."""
    fn = lambda p, x: x * p
    x, p = torch.arange(4.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)
    pipe = lambda loss: fpipe.pipeline([fn], loss=loss, microbatches=2, group=fpipe.local(1))
    with torch.autocast("cpu", torch.float16):
        value, _ = fpipe.value_and_grad(pipe(lambda y: y.amax()))([p], x)
        y, pullback = fpipe.vjp(pipe(None), [p], x)
        (grad,), dx = pullback(y)
        again = pipe(None)([p], x)
    assert value == 4 and grad == 28 and torch.equal(dx, 4 * x) and torch.equal(y, again)


class Doubled(TorchFunctionMode):
    """What a mode of the user may do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


def test_a_function_mode_of_the_user_is_refused_or_applied_once():
    """One of the first call stayed in the trace and changed the program again, and one of a later
    call changed forwards alone.
    """
    stage = lambda p, x: torch.tanh(x @ p)
    params, x = [torch.eye(3) * 0.5] * 2, torch.ones(4, 3)

    def inside(p: Tensor, x: Tensor) -> Tensor:
        with Doubled():
            return stage(p, x)

    leaves = [p.clone().requires_grad_() for p in params]
    true = inside(leaves[1], inside(leaves[0], x)).sum() / 2
    true.backward()
    for fn, engine, outside in (
        (stage, "trace", True),
        (stage, "eager", True),
        (inside, "trace", False),
    ):
        options = {"loss": lambda y: y.sum(), "microbatches": 2, "group": fpipe.local(2)}
        pipe = fpipe.pipeline([fn] * 2, engine=engine, **options)
        for _ in range(2):
            with Doubled() if outside else nullcontext():
                if outside and engine == "trace":
                    with pytest.raises(TraceError, match="is traced while Doubled is active"):
                        fpipe.value_and_grad(pipe)(params, x)
                    with pytest.raises(TraceError, match="is traced while Doubled is active"):
                        fpipe.trace(fn, params[0], x)
                else:
                    loss, grads = fpipe.value_and_grad(pipe)(params, x)
                    torch.testing.assert_close(loss, true.detach())
                    for got, leaf in zip(grads, leaves, strict=True):
                        torch.testing.assert_close(got, leaf.grad)
            if outside:
                plain = torch.tanh(torch.tanh(x @ params[0]) @ params[1]).sum() / 2
                torch.testing.assert_close(pipe(params, x), plain)
