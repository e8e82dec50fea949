"""torchtitan's debug models, imported on machines without a GPU as well."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def _stub_triton() -> Iterator[None]:
    """A stub of triton, which torchtitan imports even where nothing is compiled for a GPU."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    import torch

    torch.compile(
        lambda x: x
    )  # torch's compiler looks for triton when it is loaded; load it before the stub exists

    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit = lambda fn: fn  # type: ignore[attr-defined]
    language.constexpr = int  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def torchtitan_llama() -> Any:
    """The package's Llama, with its configuration class as ``JobConfig``; skips where torchtitan is
    not installed.
    """
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _loaded()


def _loaded() -> Any:
    vars(builtins).pop(
        "_", None
    )  # doctests leave their last value there; tyro hashes all values of builtins
    with _stub_triton():
        from torchtitan.config import JobConfig
        from torchtitan.models import llama3

        importlib.import_module("torchtitan.distributed.pipeline_parallel")
    return types.SimpleNamespace(JobConfig=JobConfig, llama=llama3)


def trained_by_parts(names: list[str], steps: int = 3) -> list[tuple[list[float], dict[str, Any]]]:
    """On each of two processes, what torchtitan's trainer does with ``pipelining_fn``: by schedule
    the losses, on the process with the last stage, and the gradients of the first step, of this
    process's parts.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [_trained_by_parts(name, steps) for name in names]


def _trained_by_parts(name: str, steps: int) -> tuple[list[float], dict[str, Any]]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from fpipe.interop import torchtitan

    found = torchtitan_llama()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    dims = types.SimpleNamespace(get_mesh=lambda axis: mesh)
    config, model_args = debug_config(found, name)
    with torch.device("meta"):
        model = found.llama.model.model.Transformer(model_args)
    prepared: list[nn.Module] = []

    def parallelize(part: nn.Module, dims: Any, config: Any) -> nn.Module:
        prepared.append(part)
        return part

    schedule, parts, first, last = torchtitan.pipelining_fn(
        model, dims, config, torch.device("cpu"), model_args, parallelize, cross_entropy
    )
    assert parts == prepared
    weights = whole_llama(found, model_args).state_dict()
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=torch.device("cpu"))  # type: ignore[operator]
        part.load_state_dict({name: weights[name] for name in part.state_dict()})
        part.train()
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    printed, grads = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        tokens, labels = debug_batch(step)
        losses: list[torch.Tensor] = []
        keywords = {
            "target": labels if last else None,
            "losses": losses if last else None,
            "return_outputs": False,
        }
        schedule.step(*((tokens,) if first else ()), **keywords)
        printed += [float(torch.stack(losses).sum())] if last else []
        if not step:
            grads = {n: p.grad.clone() for part in parts for n, p in part.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
    return printed, grads


def cross_entropy(logits: Any, labels: Any) -> Any:
    """torchtitan's own loss: the mean cross-entropy of logits in float32."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def whole_llama(found: Any, model_args: Any) -> Any:
    """The whole model, with the same weights in every process."""
    import torch

    torch.manual_seed(0)
    model = found.llama.model.model.Transformer(model_args)
    model.init_weights()
    return model


def debug_batch(step: int) -> tuple[Any, Any]:
    """Tokens and labels of a step."""
    import torch

    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(64, (4, 9), generator=draw)
    return rows[:, :-1], rows[:, 1:]


def debug_config(found: Any, schedule: str) -> tuple[Any, Any]:
    """A configuration with two ranks and four microbatches, and a Llama of six small layers."""
    config = found.JobConfig()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = schedule
    config.training.local_batch_size = 4
    args = found.llama.model.args.TransformerModelArgs(
        dim=32, n_layers=6, n_heads=2, vocab_size=64, max_seq_len=16
    )
    return config, args
